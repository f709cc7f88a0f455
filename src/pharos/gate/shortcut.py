"""The shortcut gate: can the labels of a corpus be told from the shape of its texts alone?"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from pharos.gate.design import Design, concerns_of, read_design, shown, shuffles, usable_folds
from pharos.gate.features import Features, feature_in_words, shape_features
from pharos.gate.judge import HALF, Judge, mean_auc
from pharos.gate.local import RankedFeatures, feature_aucs, most_striking
from pharos.gate.null import summarise
from pharos.gate.power import smallest_leaks, smallest_local_leak
from pharos.gate.probes import MOST_CROSSED
from pharos.runtime.artifacts import digest_of
from pharos.runtime.log import Progress

ALPHA = 0.05  # beyond chance
LOCAL_ALPHA = 0.01  # beyond chance in a single group
EXAMPLES = 3
AT_ONCE = 1 << 24  # lines times labellings


def shortcut_gate(
    lines: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    categorical: Sequence[str] = (),
) -> dict[str, Any]:
    """Ask of a corpus whether its labels can be told from shape alone.

    Every group is held out in turn; probes are fitted on the shape features of the others and
    rank its lines; their AUC is averaged over the groups. The worst probe counts, whichever way
    round it ranks, and of more than two classes the one that is told best from the rest. The
    null is the same with labels shuffled over clusters within groups, and again takes the worst.

    Parameters
    ----------
    lines
        Corpus lines; labels are booleans, or text that names one of up to 20 classes.
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
        If there is nothing to hold out, nothing to tell apart, or nothing to tell it by.
    """
    design = read_design(lines)
    folds = usable_folds(design)
    features = shape_features(lines, categorical, settings["leave_out"])
    judge = Judge(design, features.values, folds, tuple(settings["probes"]))
    count, seed = int(settings["permutations"]), int(settings["seed"])

    chance = shuffles(design, folds, seed, count)
    with Progress("shortcut gate", len(judge.groups) * len(judge.probes), "fit") as progress:
        # The real labels first, then the shuffles.
        rankings, certificates = judge.judge(
            np.column_stack([design.labels.astype(np.int8), chance]), progress
        )
    aucs = {key: mean_auc(ranked) for key, ranked in rankings.items()}
    kind, worst = max(aucs, key=lambda key: abs(aucs[key] - HALF))
    deviation, *others = judge.largest(rankings)
    null = sorted(others)
    ranked = RankedFeatures(features, design)
    local, local_null = _local(ranked, features, design, folds, chance)
    p_value: float | None = None
    power: dict[str, Any] = {"feature": None, "interaction": None, "one_group": None}
    if count:
        p_value = (1 + sum(value >= deviation for value in null)) / (1 + count)
        power = smallest_leaks(judge, null, ALPHA, seed)
        smallest = min(folds[kind], key=lambda group: int((design.groups == group).sum()))
        power["one_group"] = {
            "group": design.group_names[smallest],
            **smallest_local_leak(design, smallest, kind, local_null, LOCAL_ALPHA, seed),
        }
    smallest_leak = None if power["feature"] is None else power["feature"]["smallest_leak"]
    of_kind = design.of_lines(design.labels == kind)
    ceiling = float(settings["ceiling"])
    verdict, reasons = _verdict(float(HALF + deviation), ceiling, p_value, smallest_leak, local)

    result: dict[str, Any] = {
        "verdict": verdict,
        "reasons": reasons,
        "surface_baseline": _number(HALF + deviation),
        "p_value": p_value,
        "beyond_chance": None if p_value is None else p_value <= ALPHA,
        "ceiling": ceiling,
        "smallest_leak": smallest_leak,
        "worst_probe": worst,
        "worst_class": shown(design.class_names[kind]),
        "n": len(lines),
        "clusters": len(design.labels),
        "positives": int(of_kind.sum()),
        "groups": _groups(design, of_kind),
        "classes": _classes(design, aucs, judge),
        "probes": {
            name: {
                "auc": _number(aucs[kind, name]),
                "folds": [
                    {"group": design.group_names[ranking.group], "auc": _number(ranking.auc())}
                    for ranking in rankings[kind, name]
                ],
            }
            for name in judge.probes
        },
        "local": local,
        "features": _features(ranked, features, design, folds[kind], of_kind),
        "constant_features": list(features.constant),
        "uncrossed_features": list(features.names[MOST_CROSSED:]),
        "null": summarise([float(value) for value in null]) if null else None,
        "power": power if count else None,
        "certificate": {name: certificates[kind, name] for name in judge.probes},
        "concerns": [*concerns_of(design, folds, lines), *_concerns(verdict, p_value, count)],
        "settings": {
            "permutations": count,
            "seed": seed,
            "probes": list(judge.probes),
            "leave_out": list(settings["leave_out"]),
            "categorical": list(categorical),
        },
    }
    return {**result, "digest": digest_of(result)}


def _verdict(
    baseline: float,
    ceiling: float,
    p_value: float | None,
    smallest_leak: float | None,
    local: Mapping[str, Any],
) -> tuple[str, list[str]]:
    """The verdict, and why in words."""
    reasons = []
    above = baseline > ceiling
    if above and (p_value is None or p_value <= ALPHA):
        reasons.append(
            f"labels can be told from shape alone: AUC {baseline:.3f}, ceiling {ceiling:.3f}"
        )
    in_group = 0.5 + abs(local["auc"]["decimal"] - 0.5)
    if in_group > ceiling and local["beyond_chance"]:
        reasons.append(
            f"within group {local['group']} labels can be told by "
            f"{feature_in_words(local['feature'])} alone: "
            f"AUC {in_group:.3f}, ceiling {ceiling:.3f}"
        )
    if reasons:
        return "LEAK", reasons
    if above:
        return "INCONCLUSIVE", [
            f"AUC {baseline:.3f} is above the ceiling {ceiling:.3f}, but chance does as well "
            f"(p = {p_value:.3f}): the corpus is too small to tell"
        ]
    if smallest_leak is not None and smallest_leak > ceiling:
        return "INCONCLUSIVE", [
            f"the corpus is too small to tell: a leak must have AUC {smallest_leak:.3f} "
            f"to show 4 times in 5, and the ceiling is {ceiling:.3f}"
        ]
    return "PASS", [f"AUC {baseline:.3f} is not above the ceiling {ceiling:.3f}"]


def _local(
    ranked: RankedFeatures,
    features: Features,
    design: Design,
    folds: Mapping[int, Sequence[int]],
    chance: npt.NDArray[np.int8],
) -> tuple[dict[str, Any], npt.NDArray[np.float64]]:
    """The feature that stands out most in a single group, and how far shuffles' ones do."""
    found = most_striking(ranked, design, folds, design.labels[:, None])
    count = chance.shape[1]
    at_once = max(16, AT_ONCE // len(design.ids))
    parts = [np.empty(0)]
    for start in range(0, count, at_once):
        some = chance[:, start : start + at_once]
        parts.append(most_striking(ranked, design, folds, some).deviations)
    null = np.concatenate(parts)
    reached = int((null >= found.deviations[0]).sum())
    p_value = (1 + reached) / (1 + count) if count else None
    local = {
        "group": design.group_names[found.group],
        "class": shown(design.class_names[found.kind]),
        "feature": features.names[found.feature],
        "auc": _number(found.auc),
        "p_value": p_value,
        "beyond_chance": None if p_value is None else p_value <= LOCAL_ALPHA,
    }
    return local, null


def _number(value: Fraction) -> dict[str, Any]:
    """An exact fraction as the nearest float, in hexadecimal and to six decimals."""
    return {"hex": float(value).hex(), "decimal": round(float(value), 6)}


def _groups(design: Design, of_kind: npt.NDArray[np.bool_]) -> list[dict[str, Any]]:
    groups = []
    for group, name in enumerate(design.group_names):
        inside = of_kind[design.groups == group]
        groups.append({"group": name, "n": len(inside), "positives": int(inside.sum())})
    return groups


def _classes(
    design: Design, aucs: Mapping[tuple[int, str], Fraction], judge: Judge
) -> list[dict[str, Any]]:
    """Every class: its size, and how well each probe tells it from the rest."""
    line_labels = design.of_lines(design.labels)
    return [
        {
            "class": shown(name),
            "n": int((line_labels == kind).sum()),
            "clusters": int((design.labels == kind).sum()),
            "aucs": {p: _number(aucs[kind, p]) for p in judge.probes if (kind, p) in aucs},
        }
        for kind, name in enumerate(design.class_names)
    ]


def _features(
    ranked: RankedFeatures,
    features: Features,
    design: Design,
    groups: Sequence[int],
    of_kind: npt.NDArray[np.bool_],
) -> list[dict[str, Any]]:
    """Each feature's own AUC, the worst first, with lines that show it."""
    aucs = feature_aucs(ranked, groups, of_kind[:, None])
    order = sorted(range(len(aucs)), key=lambda k: (-abs(aucs[k] - HALF), features.names[k]))
    return [
        {
            "name": features.names[k],
            "auc": _number(aucs[k]),
            "examples": _examples(features.values[:, k], aucs[k] >= HALF, design, of_kind),
        }
        for k in order
    ]


def _examples(
    column: npt.NDArray[np.float64],
    rising: bool,
    design: Design,
    of_kind: npt.NDArray[np.bool_],
) -> list[dict[str, Any]]:
    """Lines at the two ends of a feature that have the label its AUC expects there."""
    examples = []
    labels = design.of_lines(design.labels)
    for sign, wanted in ((-1.0, rising), (1.0, not rising)):
        order = np.argsort(sign * column, kind="stable")
        for line in order[of_kind[order] == wanted][:EXAMPLES]:
            examples.append(
                {
                    "id": design.ids[line],
                    "label": design.class_names[labels[line]],
                    "value": float(column[line]),
                }
            )
    return examples


def _concerns(verdict: str, p_value: float | None, permutations: int) -> list[str]:
    concerns = []
    if permutations == 0:
        concerns.append("no permutations: whether the value is beyond chance is unknown")
    elif permutations < 100:
        least = 1 / (1 + permutations)
        concerns.append(f"{permutations} permutations are few: p cannot be below {least:.3f}")
    if verdict == "PASS" and p_value is not None and p_value <= ALPHA:
        concerns.append("below the ceiling, but beyond chance: shape tells a little of the labels")
    return concerns
