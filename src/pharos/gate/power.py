"""The smallest leak that a corpus of this size and shape could have shown."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from pharos.gate.design import Design
from pharos.gate.judge import Judge
from pharos.gate.local import doubled_ranks
from pharos.gate.null import random_words

POWER = 0.8
LABELLINGS = 16
# How much of a planted leak goes into the labels, in 64ths of the chance that goes in too.
STRENGTHS = (1, 2, 3, 4, 6, 9, 14, 22, 35, 56, 90, 144, 230)
WHOLE = 64


def smallest_leak(
    judge: Judge, null: Sequence[Fraction], alpha: float, seed: int
) -> dict[str, Any] | None:
    """Plant leaks of many sizes, and see from which size on they are beyond chance.

    A planted leak is one more shape feature, the same for all lines of a cluster, and labels
    that follow it more or less closely; each group keeps its number of positives. Of more than
    two classes the rarest is planted: it is the hardest to see.

    Parameters
    ----------
    judge
        The corpus.
    null
        The sorted values of the label shuffles.
    alpha
        Beyond chance is a p value of at most this.
    seed
        Names the planted leaks.

    Returns
    -------
    ``smallest_leak``: the AUC that the feature alone must have (mean over groups) so that 80 %
    of such leaks are beyond chance, 1.0 if none does; ``labellings``, how many were tried at
    each size; and ``sizes``, the AUC and the share ``found`` of each size. Boosting is too slow
    to be asked: the other probes must find the leak, and ``None`` is returned without any.
    """
    probes = tuple(name for name in judge.probes if name != "boosting")
    if not probes:
        return None
    design = judge.design
    kind = min(judge.folds, key=lambda k: (int((design.labels == k).sum()), k))
    noise = _bell(f"leak {seed}", len(design.labels))
    judge = replace(
        judge,
        values=np.column_stack([judge.values, design.of_lines(noise).astype(np.float64)]),
        folds={kind: judge.folds[kind]},
        probes=probes,
    )
    columns, sizes = [], []
    for strength in STRENGTHS:
        for number in range(LABELLINGS):
            chance = _bell(f"leak {seed}/{strength}/{number}", len(design.labels))
            labels = _following(design, kind, strength * noise + WHOLE * chance)
            # Where clusters span groups a fold may be left without a class: no such labelling.
            if set(judge.folds[kind]) <= set(design.usable(labels, kind)):
                columns.append(labels)
                sizes.append(strength)
    if not columns:
        return {"smallest_leak": 1.0, "labellings": 0, "sizes": []}
    planted = np.stack(columns, axis=1)
    values = judge.largest(judge.rankings(planted))
    allowed = int(alpha * (1 + len(null))) - 1
    found = [len(null) - bisect_left(null, value) <= allowed for value in values]
    aucs = _own_aucs(judge, kind, noise, planted)
    table = []
    for strength in sorted(set(sizes)):
        here = [k for k, size in enumerate(sizes) if size == strength]
        table.append({
            "auc": float(sum((aucs[k] for k in here), Fraction(0)) / len(here)),
            "found": sum(found[k] for k in here) / len(here),
        })  # fmt: skip
    return {
        "smallest_leak": round(_crossing(table), 6),
        "labellings": LABELLINGS,
        "sizes": table,
    }


def _bell(name: str, count: int) -> npt.NDArray[np.int64]:
    """``count`` integers in a bell: sums of eight random bytes, less their mean."""
    data = random_words(name, count).view(np.uint8).reshape(count, 8).astype(np.int64)
    return np.asarray(data.sum(axis=1) - 8 * 255 // 2)


def _following(design: Design, kind: int, wish: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """In each stratum as many clusters of the class as there are, those with the highest wish."""
    order = np.lexsort((-wish, design.strata))
    strata = design.strata[order]
    start = np.searchsorted(strata, strata)
    wanted = np.bincount(design.strata[design.labels == kind], minlength=int(strata.max()) + 1)
    labels = np.full(len(wish), -1)
    labels[order[np.arange(len(wish)) - start < wanted[strata]]] = kind
    return labels


def _own_aucs(
    judge: Judge, kind: int, noise: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]
) -> list[Fraction]:
    """What the planted feature alone tells, mean over groups, for each labelling."""
    design = judge.design
    values = design.of_lines(noise).astype(np.float64)
    of_kind = design.of_lines(labels == kind)
    total = [Fraction(0)] * labels.shape[1]
    groups = judge.folds[kind]
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


def _crossing(table: Sequence[dict[str, float]]) -> float:
    """Where the share found, made to rise, crosses 80 %; linear between sizes, 1.0 if nowhere."""
    shares = _rising([row["found"] for row in table])
    for k, share in enumerate(shares):
        if share >= POWER:
            if k == 0:
                return table[0]["auc"]
            before, step = shares[k - 1], share - shares[k - 1]
            part = (POWER - before) / step
            return table[k - 1]["auc"] + part * (table[k]["auc"] - table[k - 1]["auc"])
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
