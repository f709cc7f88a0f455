"""The cluster bootstrap, the same for metrics and for the promotion gate.

Clusters, not items, are drawn with replacement: items of one cluster share their label draw and
so are not independent (Field and Welsh 2007, "Bootstrapping clustered data"). All counts are
integers and limits are order statistics, so that the same seed gives the same bits everywhere.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

CHUNK_CELLS = 2_000_000


def stream(name: str, seed: int) -> np.random.Generator:
    """The random stream of this name and seed; other names never share its numbers."""
    digest = hashlib.sha256(f"{name}:{seed}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))


def cluster_index(clusters: list[str]) -> tuple[Ints, int]:
    """``(index of each item's cluster, number of clusters)``, numbered by first appearance."""
    numbers: dict[str, int] = {}
    index = [numbers.setdefault(cluster, len(numbers)) for cluster in clusters]
    return np.array(index, dtype=np.int64), len(numbers)


def cluster_weights(
    n_clusters: int, n_resamples: int, rng: np.random.Generator
) -> Iterator[Floats]:
    """How often each cluster was drawn, a block of resamples at a time.

    Yields
    ------
    Arrays of shape ``(resamples of the block, n_clusters)`` of whole numbers; each row sums to
    ``n_clusters``. Blocks bound the memory; they do not change what is drawn.
    """
    block = max(1, CHUNK_CELLS // n_clusters)
    for start in range(0, n_resamples, block):
        rows = min(block, n_resamples - start)
        drawn = rng.integers(0, n_clusters, size=(rows, n_clusters))
        flat = (drawn + np.arange(rows)[:, None] * n_clusters).ravel()
        counts = np.bincount(flat, minlength=rows * n_clusters)
        yield counts.reshape(rows, n_clusters).astype(np.float64)


def lower_limit(values: Floats, tail: float) -> float:
    """The order statistic at or below the ``tail`` quantile of ``values``."""
    return float(np.sort(values)[int(np.floor((len(values) - 1) * tail))])


def upper_limit(values: Floats, tail: float) -> float:
    """The order statistic at or above the ``1 - tail`` quantile of ``values``."""
    return float(np.sort(values)[int(np.ceil((len(values) - 1) * (1 - tail)))])


def ratio(numerator: Any, denominator: Any) -> Floats:
    """Elementwise quotient; NaN where the denominator is 0."""
    top, bottom = np.broadcast_arrays(
        np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)
    )
    quotient: Floats = np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom != 0)
    return quotient


def f1_score(true_positive: Any, false_positive: Any, false_negative: Any) -> Floats:
    """``2 tp / (2 tp + fp + fn)``; NaN where there are no positives to find."""
    top = 2 * np.asarray(true_positive, np.float64)
    positives = np.asarray(true_positive) + np.asarray(false_negative)
    return np.where(positives > 0, ratio(top, top + false_positive + false_negative), np.nan)
