"""The smallest leaks that a corpus of this size and shape could have shown.

Leaks of many sizes are planted into shuffled labels, and it is seen from which size on they are
beyond chance. Three kinds: a shape feature that follows the labels in all groups; an interaction,
two flags whose agreement follows the labels while neither does; and a feature that follows the
labels in one group only. A planted feature is the same for all lines of a cluster, which is the
hardest case: leaks that differ from line to line show sooner.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from pharos.gate.design import Design
from pharos.gate.judge import Judge
from pharos.gate.local import away_from_chance, doubled_ranks
from pharos.gate.null import random_words

POWER = 0.8
LABELLINGS = 12  # of each size
# Sizes to plant, as multiples of the |AUC - 0.5| that shuffles exceed with probability alpha.
SIZES = (0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
CROSSED_SIZES = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)
LOCAL_LABELLINGS = 50
LOCAL_SIZES = (0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5, 2.0)
WHOLE = 1 << 12  # the part of chance in planted labels, beside the strength of the leak
STRONGEST = 8 * WHOLE

Integers = npt.NDArray[np.int64]


def smallest_leaks(
    judge: Judge, null: Sequence[Fraction], alpha: float, seed: int
) -> dict[str, Any]:
    """Find the smallest leaks that all groups share and that 80 % of labellings show.

    Parameters
    ----------
    judge
        The corpus. Boosting is too slow to be asked: its other probes must find the leak.
    null
        The sorted values of the label shuffles.
    alpha
        Beyond chance is a p value of at most this.
    seed
        Names the planted leaks.

    Returns
    -------
    For ``feature`` and ``interaction``: ``smallest_leak``, the AUC that the leak alone must have
    (mean over groups), 1.0 if none is large enough and ``None`` without a probe to ask;
    ``labellings``, how many were tried at each size; and ``sizes``, the AUC of each size and the
    share ``found``. Of more than two classes the rarest is planted: it is the hardest to see.
    """
    design = judge.design
    probes = tuple(name for name in judge.probes if name != "boosting")
    edge = _edge(null, alpha)
    if edge is None or not probes:
        nothing = _statement([], 0) if probes else None
        return {"feature": nothing, "interaction": nothing}
    kind = min(judge.folds, key=lambda k: (int((design.labels == k).sum()), k))
    names = f"leak {seed}"
    noise = _bell(f"{names}/feature", len(design.labels))
    flags = [_flags(f"{names}/flag {k}", len(design.labels)) for k in range(2)]
    agree = flags[0] * flags[1] * 209  # a bell's deviation
    planted = [
        _plant(design, judge.folds[kind], kind, leak, sizes, float(edge), f"{names}/{name}")
        for name, leak, sizes in (
            ("feature", noise, SIZES),
            ("interaction", agree, CROSSED_SIZES),
        )
    ]
    # Planted columns come first, so that they are among those that are crossed.
    columns = [design.of_lines(column).astype(np.float64) for column in (noise, *flags)]
    judge = replace(
        judge,
        values=np.column_stack([*columns, judge.values]),
        folds={kind: judge.folds[kind]},
        probes=probes,
    )
    labels = np.concatenate([labels for labels, _ in planted], axis=1)
    found = [value > edge for value in judge.largest(judge.rankings(labels))]
    statements, start = [], 0
    for (_, table), leak in zip(planted, (noise, agree), strict=True):
        stop = start + len(table)
        aucs = _own_aucs(design, judge.folds[kind], kind, leak, labels[:, start:stop])
        statements.append(
            _statement(list(zip(table, aucs, found[start:stop], strict=True)), LABELLINGS)
        )
        start = stop
    return dict(zip(("feature", "interaction"), statements, strict=True))


def smallest_local_leak(
    design: Design, group: int, kind: int, null: npt.NDArray[np.float64], alpha: float, seed: int
) -> dict[str, Any]:
    """The same for a feature that follows the labels in one group only.

    ``null`` has, for every label shuffle, how far the most striking feature of any one group
    stands out, in deviations of a chance ranking.
    """
    ordered = np.sort(null)
    edge = _edge(list(ordered), alpha)
    if edge is None:
        return _statement([], 0)
    rows = design.groups == group
    names = f"local leak {seed}"
    noise = _bell(names, len(design.labels))
    # The size at which a chance ranking would stand out so far.
    of_kind = design.of_lines(design.labels == kind)[rows]
    pairs = float(of_kind.sum() * (~of_kind).sum())
    half = float(edge) * np.sqrt((len(of_kind) + 1.0) / (12.0 * pairs))
    labels, table = _plant(
        design, (group,), kind, noise, LOCAL_SIZES, half, names, LOCAL_LABELLINGS
    )
    doubled = doubled_ranks(design.of_lines(noise)[rows][:, None].astype(np.float64))
    away = away_from_chance(doubled, design.of_lines(labels == kind)[rows])[0]
    aucs = _own_aucs(design, (group,), kind, noise, labels)
    found = [bool(value > edge) for value in away]
    return _statement(list(zip(table, aucs, found, strict=True)), LOCAL_LABELLINGS)


def _edge(null: Sequence[Any], alpha: float) -> Any:
    """What a value must exceed to be beyond chance; ``None`` where shuffles are too few."""
    allowed = int(alpha * (1 + len(null))) - 1
    return null[-1 - allowed] if allowed >= 0 else None


def _plant(
    design: Design,
    groups: Sequence[int],
    kind: int,
    leak: Integers,
    sizes: Sequence[float],
    edge: float,
    name: str,
    labellings: int = LABELLINGS,
) -> tuple[Integers, list[int]]:
    """Labels that follow a leak, (k, labellings), and the strength of each."""
    # For small leaks |AUC - 0.5| is about half of what the leak counts beside the chance.
    strengths = [min(STRONGEST, 1 + int(2 * WHOLE * edge * size)) for size in sizes]
    columns, table = [], []
    for strength in (*strengths, STRONGEST):
        for number in range(labellings):
            chance = _bell(f"{name}/{strength}/{number}", len(design.labels))
            labels = _following(design, kind, strength * leak + WHOLE * chance)
            # Where clusters span groups a fold may be left without a class: no such labelling.
            if not design.spanning or set(groups) <= set(design.usable(labels, kind)):
                columns.append(labels)
                table.append(strength)
    empty = np.empty((len(design.labels), 0), dtype=np.int64)
    return np.stack(columns, axis=1) if columns else empty, table


def _bell(name: str, count: int) -> Integers:
    """``count`` integers in a bell: sums of eight random bytes, less their mean."""
    data = random_words(name, count).view(np.uint8).reshape(count, 8).astype(np.int64)
    return np.asarray(data.sum(axis=1) - 8 * 255 // 2)


def _flags(name: str, count: int) -> Integers:
    """``count`` times 1 or -1."""
    return 2 * (random_words(name, count) & 1).astype(np.int64) - 1


def _following(design: Design, kind: int, wish: Integers) -> Integers:
    """In each stratum as many clusters of the class as there are, those with the highest wish."""
    order = np.lexsort((-wish, design.strata))
    strata = design.strata[order]
    start = np.searchsorted(strata, strata)
    wanted = np.bincount(design.strata[design.labels == kind], minlength=int(strata.max()) + 1)
    labels = np.full(len(wish), -1)
    labels[order[np.arange(len(wish)) - start < wanted[strata]]] = kind
    return labels


def _own_aucs(
    design: Design, groups: Sequence[int], kind: int, leak: Integers, labels: Integers
) -> list[Fraction]:
    """What the leak alone tells, mean over groups, for each labelling."""
    values = design.of_lines(leak).astype(np.float64)
    of_kind = design.of_lines(labels == kind)
    total = [Fraction(0)] * labels.shape[1]
    for group in groups:
        rows = design.groups == group
        inside = of_kind[rows].astype(np.float64)
        positives = inside.sum(axis=0)
        twice_u = doubled_ranks(values[rows][:, None])[:, 0] @ inside - positives * (positives + 1)
        pairs = positives * (len(inside) - positives)
        total = [
            t + Fraction(int(u), 2 * int(p) * len(groups))
            for t, u, p in zip(total, twice_u, pairs, strict=True)
        ]
    return total


def _statement(trials: Sequence[tuple[int, Fraction, bool]], labellings: int) -> dict[str, Any]:
    """What trials, ``(strength, AUC, found)``, say about the smallest leak."""
    table = []
    for strength in sorted({strength for strength, _, _ in trials}):
        here = [(auc, found) for size, auc, found in trials if size == strength]
        table.append(
            {
                "auc": float(sum((auc for auc, _ in here), Fraction(0)) / len(here)),
                "found": sum(found for _, found in here) / len(here),
            }
        )
    return {
        "smallest_leak": round(_crossing(table), 6),
        "labellings": labellings,
        "sizes": table,
    }


def _crossing(table: Sequence[dict[str, float]]) -> float:
    """Where the share found crosses 80 %, linear between sizes; 1.0 if nowhere.

    Shares and AUCs are made to rise first.
    """
    shares = _rising([row["found"] for row in table])
    aucs = _rising([row["auc"] for row in table])
    for k, share in enumerate(shares):
        if share >= POWER:
            if k == 0:
                return aucs[0]
            part = (POWER - shares[k - 1]) / (share - shares[k - 1])
            return aucs[k - 1] + part * (aucs[k] - aucs[k - 1])
    return 1.0


def _rising(values: Sequence[float]) -> list[float]:
    """The closest rising sequence (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (b, m), (a, n) = pools.pop(), pools.pop()
            pools.append(((a * n + b * m) / (n + m), n + m))
    return [value for value, size in pools for _ in range(size)]
