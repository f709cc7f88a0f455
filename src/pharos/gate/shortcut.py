"""The shortcut gate: can the labels of a corpus be told from the shape of its texts alone?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from pharos.errors import InputError
from pharos.gate.exact import twice_mann_whitney
from pharos.gate.features import Features, shape_features
from pharos.gate.null import shuffled_labels, summarise
from pharos.gate.probes import PROBES, Fold, make_fold
from pharos.runtime.artifacts import digest_of
from pharos.runtime.log import Progress

ALPHA = 0.05  # beyond chance
POWER_Z = 0.8416212335729143  # 80 % power
CELLS = 1 << 21  # lines times labellings that are worked on at once
EXAMPLES = 3

Labels = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _Design:
    """Who belongs to what: one entry a line, except where it says cluster."""

    ids: tuple[str, ...]
    group_names: tuple[str, ...]
    groups: npt.NDArray[np.int64]
    clusters: npt.NDArray[np.int64]
    cluster_labels: Labels
    cluster_groups: npt.NDArray[np.int64]

    @property
    def labels(self) -> Labels:
        """The label of each line."""
        return np.take(self.cluster_labels, self.clusters)

    def held_out(self, group: int) -> Labels:
        """The lines of one group."""
        return np.equal(self.groups, group)


@dataclass(frozen=True)
class _Ranking:
    """How well one held-out group was ranked, for each labelling: AUC = twice_u / twice_pairs."""

    twice_u: npt.NDArray[np.int64]
    twice_pairs: npt.NDArray[np.int64]


def shortcut_gate(
    lines: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    categorical: Sequence[str] = (),
) -> dict[str, Any]:
    """Ask of a corpus whether its labels can be told from shape alone.

    Every group is held out in turn; probes are fitted on the shape features of the others and
    rank its lines; their AUC is averaged over the groups. The worst probe counts, whichever way
    round it ranks. The null is the same with labels shuffled over clusters within groups, and
    again takes the worst probe each time.

    Parameters
    ----------
    lines
        Corpus lines.
    settings
        The block ``shortcut_gate`` of a checked configuration: ``ceiling``, ``permutations``,
        ``seed``, ``probes``, ``leave_out``.
    categorical
        Columns to use beside the text.

    Returns
    -------
    The artifact's ``result``: ``verdict`` (PASS, LEAK or INCONCLUSIVE), ``surface_baseline``
    (0.5 + the largest |AUC - 0.5|), ``p_value``, and what they were made of; ``digest`` is over
    all the rest. It is the same, bit for bit, on every processor (probe ``boosting`` excepted).

    Raises
    ------
    InputError
        If there is nothing to hold out, or no group that holds both classes.
    """
    design = _design(lines)
    features = shape_features(lines, categorical, settings["leave_out"])
    usable = _usable_groups(design)
    folds = {group: make_fold(features.values, design.held_out(group)) for group in usable}
    probes = list(settings["probes"])

    observed = _rankings(folds, design, probes, design.cluster_labels[:, None])
    aucs = {probe: _pooled(observed[probe])[0] for probe in probes}
    worst = max(probes, key=lambda probe: abs(aucs[probe] - Fraction(1, 2)))
    deviation = abs(aucs[worst] - Fraction(1, 2))

    count = int(settings["permutations"])
    null = _null(folds, design, probes, int(settings["seed"]), count)
    reached = sum(value >= deviation for value in null)
    summary = summarise([float(value) for value in null]) if null else None
    p_value = (1 + reached) / (1 + count) if count else None
    smallest_leak = _smallest_leak(summary)
    ceiling = float(settings["ceiling"])
    verdict = _verdict(float(deviation + Fraction(1, 2)), ceiling, p_value, smallest_leak)

    result: dict[str, Any] = {
        "verdict": verdict,
        "surface_baseline": _number(deviation + Fraction(1, 2)),
        "p_value": p_value,
        "beyond_chance": None if p_value is None else p_value <= ALPHA,
        "ceiling": ceiling,
        "smallest_leak": smallest_leak,
        "worst_probe": worst,
        "n": len(lines),
        "clusters": len(design.cluster_labels),
        "positives": int(design.labels.sum()),
        "groups": _groups(design),
        "probes": {
            probe: {
                "auc": _number(aucs[probe]),
                "folds": [
                    {"group": design.group_names[group], "auc": _number(_auc(ranking))}
                    for group, ranking in zip(folds, observed[probe], strict=True)
                ],
            }
            for probe in probes
        },
        "features": _feature_report(features, design, usable),
        "constant_features": list(features.constant),
        "null": summary,
        "concerns": _concerns(design, usable, verdict, ceiling, smallest_leak, count, p_value),
        "settings": {
            "permutations": count,
            "seed": int(settings["seed"]),
            "probes": probes,
            "leave_out": list(settings["leave_out"]),
            "categorical": list(categorical),
        },
    }
    return {**result, "digest": digest_of(result)}


def _design(lines: Sequence[Mapping[str, Any]]) -> _Design:
    group_names = tuple(sorted({line["group"] for line in lines}))
    group_index = {name: k for k, name in enumerate(group_names)}
    first: dict[str, Mapping[str, Any]] = {}
    for line in lines:
        first.setdefault(line["cluster"], line)
    cluster_index = {name: k for k, name in enumerate(first)}
    design = _Design(
        ids=tuple(line["id"] for line in lines),
        group_names=group_names,
        groups=np.array([group_index[line["group"]] for line in lines]),
        clusters=np.array([cluster_index[line["cluster"]] for line in lines]),
        cluster_labels=np.array([line["label"] for line in first.values()], dtype=np.bool_),
        cluster_groups=np.array([group_index[line["group"]] for line in first.values()]),
    )
    if len(group_names) < 2:
        raise InputError(
            f"shortcut gate: one group only ({group_names[0]!r}); at least two are needed, "
            "one to hold out"
        )
    if design.cluster_labels.all() or not design.cluster_labels.any():
        which = "positive" if design.cluster_labels.all() else "negative"
        raise InputError(f"shortcut gate: all lines are {which}; both classes are needed")
    return design


def _usable_groups(design: _Design) -> list[int]:
    """Groups that hold both classes, and whose removal leaves both."""
    usable = []
    labels = design.labels
    for group in range(len(design.group_names)):
        held_out = design.held_out(group)
        parts = (labels[held_out], labels[~held_out])
        if all(part.any() and not part.all() for part in parts):
            usable.append(group)
    if not usable:
        raise InputError(
            "shortcut gate: no group can be held out: each needs lines of both classes, "
            "inside and outside of it"
        )
    return usable


def _rankings(
    folds: Mapping[int, Fold], design: _Design, probes: Sequence[str], cluster_labels: Labels
) -> dict[str, list[_Ranking]]:
    """Fit and rank for every labelling, ``cluster_labels`` of shape (clusters, labellings)."""
    labels = cluster_labels[design.clusters]
    rankings: dict[str, list[_Ranking]] = {probe: [] for probe in probes}
    for group, fold in folds.items():
        held_out = design.held_out(group)
        inside, outside = labels[held_out].T.copy(), labels[~held_out]
        positives = inside.sum(axis=1)
        twice_pairs = 2 * positives * (inside.shape[1] - positives)
        for probe in probes:
            scores = PROBES[probe](fold, outside)
            twice_u = twice_mann_whitney(np.ascontiguousarray(scores.T), inside)
            rankings[probe].append(_Ranking(twice_u, twice_pairs))
    return rankings


def _auc(ranking: _Ranking, labelling: int = 0) -> Fraction:
    return Fraction(int(ranking.twice_u[labelling]), int(ranking.twice_pairs[labelling]))


def _pooled(rankings: Sequence[_Ranking]) -> list[Fraction]:
    """The mean AUC over groups, for each labelling, exactly."""
    labellings = range(len(rankings[0].twice_u))
    return [sum((_auc(r, k) for r in rankings), Fraction(0)) / len(rankings) for k in labellings]


def _null(
    folds: Mapping[int, Fold], design: _Design, probes: Sequence[str], seed: int, count: int
) -> list[Fraction]:
    """The largest |AUC - 0.5| over probes, for each of ``count`` shuffles."""
    at_once = max(1, CELLS // len(design.ids))
    values: list[Fraction] = []
    with Progress("shortcut gate", max(1, count), "permutation") as progress:
        for start in range(0, count, at_once):
            numbers = range(start, min(start + at_once, count))
            shuffles = np.stack(
                [
                    shuffled_labels(design.cluster_labels, design.cluster_groups, seed, number)
                    for number in numbers
                ],
                axis=1,
            )
            rankings = _rankings(folds, design, probes, shuffles)
            pooled = [_pooled(rankings[probe]) for probe in probes]
            half = Fraction(1, 2)
            values += [max(abs(auc - half) for auc in aucs) for aucs in zip(*pooled, strict=True)]
            progress.advance(len(numbers))
    return values


def _smallest_leak(summary: Mapping[str, Any] | None) -> float | None:
    """The smallest true AUC that a corpus like this one shows as beyond chance, 4 times in 5.

    Normal approximation: the null's 95 % quantile and 0.84 of its deviation above.
    """
    if summary is None:
        return None
    quantile: float = summary["quantiles"]["0.95"]["value"]
    deviation: float = summary["sd"]["value"]
    return min(1.0, round(0.5 + quantile + POWER_Z * deviation, 6))


def _verdict(
    baseline: float, ceiling: float, p_value: float | None, smallest_leak: float | None
) -> str:
    above = baseline > ceiling
    if p_value is None or smallest_leak is None:
        return "LEAK" if above else "PASS"
    if above and p_value <= ALPHA:
        return "LEAK"
    # A leak of the ceiling's size could have stayed unseen, or noise alone have reached it.
    return "INCONCLUSIVE" if above or smallest_leak > ceiling else "PASS"


def _number(value: Fraction) -> dict[str, Any]:
    """An exact fraction as the nearest float, in hexadecimal and to six decimals."""
    return {"hex": float(value).hex(), "decimal": round(float(value), 6)}


def _groups(design: _Design) -> list[dict[str, Any]]:
    groups = []
    for group, name in enumerate(design.group_names):
        labels = design.labels[design.held_out(group)]
        groups.append({"group": name, "n": len(labels), "positives": int(labels.sum())})
    return groups


def _feature_report(
    features: Features, design: _Design, usable: Sequence[int]
) -> list[dict[str, Any]]:
    """Each feature's own AUC, mean over groups, the worst first, with lines that show it."""
    labels = design.labels
    report = []
    for name, column in zip(features.names, features.values.T, strict=True):
        # Ranks of the values: integers in their order.
        ranks = np.unique(column, return_inverse=True)[1].astype(np.int64)
        rankings = []
        for group in usable:
            held_out = design.held_out(group)
            inside = labels[held_out]
            positives = int(inside.sum())
            twice_pairs = np.array([2 * positives * (len(inside) - positives)])
            rankings.append(
                _Ranking(twice_mann_whitney(ranks[held_out][None], inside[None]), twice_pairs)
            )
        auc = _pooled(rankings)[0]
        report.append((abs(auc - Fraction(1, 2)), name, auc, column))
    report.sort(key=lambda entry: (-entry[0], entry[1]))
    return [
        {"name": name, "auc": _number(auc), "examples": _examples(column, auc, design)}
        for _, name, auc, column in report
    ]


def _examples(
    column: npt.NDArray[np.float64], auc: Fraction, design: _Design
) -> list[dict[str, Any]]:
    """Lines at the two ends of a feature that have the label its AUC expects there."""
    labels = design.labels
    high_label = auc >= Fraction(1, 2)
    examples = []
    for sign, label in ((-1.0, high_label), (1.0, not high_label)):
        order = np.argsort(sign * column, kind="stable")
        for line in order[labels[order] == label][:EXAMPLES]:
            examples.append(
                {"id": design.ids[line], "label": bool(label), "value": float(column[line])}
            )
    return examples


def _concerns(
    design: _Design,
    usable: Sequence[int],
    verdict: str,
    ceiling: float,
    smallest_leak: float | None,
    permutations: int,
    p_value: float | None,
) -> list[str]:
    concerns = []
    left = [name for k, name in enumerate(design.group_names) if k not in usable]
    if left:
        concerns.append(
            f"{len(left)} of {len(design.group_names)} groups could not be held out, because a "
            f"class is missing inside or outside of them: {', '.join(left[:5])}"
        )
    if permutations == 0:
        concerns.append("no permutations: whether the value is beyond chance is unknown")
    elif permutations < 100:
        concerns.append(
            f"{permutations} permutations are few: p cannot be below {1 / (1 + permutations):.3f}"
        )
    if verdict == "INCONCLUSIVE" and smallest_leak is not None:
        concerns.append(
            f"the corpus is too small to tell: only a leak of AUC {smallest_leak:.3f} or more "
            f"would show reliably, the ceiling is {ceiling:.3f}"
        )
    if verdict == "PASS" and p_value is not None and p_value <= ALPHA:
        concerns.append(
            "below the ceiling, but beyond chance: shape says a little about the labels"
        )
    return concerns
