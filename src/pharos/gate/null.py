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


def shuffled(
    labels: npt.NDArray[np.int64], strata: npt.NDArray[np.int64], name: str
) -> npt.NDArray[np.int64]:
    """Shuffle the labels of clusters within strata.

    The lines of a cluster share one label and a group keeps its share of each class, as the
    design of the corpus fixes them; all else is exchangeable when labels and shape are
    unrelated. The order comes from SHAKE-256, so it is the same with every numpy.

    Parameters
    ----------
    labels, strata
        One entry a cluster, shape (k,).
    name
        Names the shuffle.

    Returns
    -------
    Labels of the clusters, shape (k,).
    """
    order = np.lexsort((random_words(name, len(labels)), strata))
    places = np.argsort(strata, kind="stable")
    result = np.empty_like(labels)
    result[places] = labels[order]
    return result


def random_words(name: str, count: int) -> npt.NDArray[np.uint64]:
    """``count`` random 64-bit integers from the stream called ``name``."""
    data = hashlib.shake_256(f"pharos shortcut gate {name}".encode()).digest(8 * count)
    return np.frombuffer(data, dtype="<u8")


def summarise(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation and quantiles, each with its 95 % Monte-Carlo interval.

    Quantiles are order statistics, their intervals too (binomial, normal approximation).
    ``histogram`` counts the values in bins of 0.005 from 0 on.
    """
    n = len(values)
    ordered = sorted(values)
    mean = math.fsum(ordered) / n
    deviation = math.sqrt(math.fsum((v - mean) * (v - mean) for v in ordered) / max(1, n - 1))
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
