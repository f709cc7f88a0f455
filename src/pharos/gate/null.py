"""What chance alone would show: label shuffles, and a summary of the values they give."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

QUANTILES = (0.5, 0.9, 0.95, 0.99)
Z_95 = 1.959963984540054
HISTOGRAM_BIN = 0.005  # of |AUC - 0.5|


def shuffled_labels(
    labels: npt.NDArray[np.bool_], groups: npt.NDArray[np.int64], seed: int, number: int
) -> npt.NDArray[np.bool_]:
    """Shuffle number ``number`` of cluster labels, within groups.

    The lines of a cluster share one label and a group keeps its share of positives, as the
    design of the corpus fixes them; all else is exchangeable when labels and shape are
    unrelated. The order comes from SHAKE-256, so it is the same with every numpy.

    Parameters
    ----------
    labels, groups
        One entry a cluster, shape (k,).
    seed, number
        Name the shuffle; it does not depend on how many there are.

    Returns
    -------
    Labels of the clusters, shape (k,).
    """
    name = f"pharos label shuffle {seed}/{number}".encode()
    draws = np.frombuffer(hashlib.shake_256(name).digest(8 * len(labels)), dtype="<u8")
    order = np.lexsort((draws, groups))
    places = np.argsort(groups, kind="stable")
    shuffled = np.empty_like(labels)
    shuffled[places] = labels[order]
    return shuffled


def summarise(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation and quantiles, each with its 95 % Monte-Carlo interval.

    Quantiles are order statistics, their intervals too (binomial, normal approximation).
    ``histogram`` counts the values in bins of 0.005 from 0 on.
    """
    n = len(values)
    ordered = sorted(values)
    mean = math.fsum(ordered) / n
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in ordered) / max(1, n - 1))
    error = Z_95 * deviation / math.sqrt(n)
    # The error of a deviation, as for normal values.
    spread = Z_95 * deviation / math.sqrt(2 * max(1, n - 1))
    counts = [0] * (int(ordered[-1] / HISTOGRAM_BIN) + 1)
    for value in ordered:
        counts[int(value / HISTOGRAM_BIN)] += 1
    return {
        "permutations": n,
        "mean": {"value": mean, "low": mean - error, "high": mean + error},
        "sd": {"value": deviation, "low": max(0.0, deviation - spread), "high": deviation + spread},
        "quantiles": {str(q): _quantile(ordered, q) for q in QUANTILES},
        "histogram": {"start": 0.0, "bin": HISTOGRAM_BIN, "counts": counts},
    }


def _quantile(ordered: Sequence[float], q: float) -> dict[str, Any]:
    """The q-quantile; a bound is ``None`` where there are too few values to have one."""
    n = len(ordered)
    half = Z_95 * math.sqrt(n * q * (1.0 - q))
    low, high = math.floor(n * q - half), math.ceil(n * q + half)
    return {
        "value": ordered[min(n, max(1, math.ceil(n * q))) - 1],
        "low": ordered[low - 1] if low >= 1 else None,
        "high": ordered[high - 1] if high <= n else None,
    }
