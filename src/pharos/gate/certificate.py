"""How far the ranks of a fold are from changing, against how far off its scores may be."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pharos.gate.probes import SCORE_BITS, Scores

NAMED = 20


def certify(
    folds: Sequence[tuple[Scores, npt.NDArray[np.bool_], Sequence[str]]],
) -> dict[str, Any]:
    """Compare the distances to the next rounding boundary with the bound on the error.

    Parameters
    ----------
    folds
        For each fold its scores before rounding, the labels and the ids of its lines.

    Returns
    -------
    ``grid`` (the unit to which scores are rounded), ``largest_error`` (the bound), and over all
    lines ``nearest_boundary``, the least distance of a score to where it would round the other
    way, and ``nearest_rank_change``, the least distance between the rounded scores of a positive
    and a negative that are not the same; ``in_doubt``, how many lines lie closer to a boundary
    than their error and would change places with a line of the other class there, and ``items``,
    up to 20 of them. All are ``None`` for a probe without a bound.
    """
    if any(scores.error is None for scores, _, _ in folds):
        keys = ("largest_error", "nearest_boundary", "nearest_rank_change", "in_doubt", "items")
        return {"grid": 2.0**-SCORE_BITS, **dict.fromkeys(keys)}
    largest, boundary, change = 0.0, np.inf, np.inf
    doubtful: list[str] = []
    for scores, labels, ids in folds:
        assert scores.error is not None
        scaled = scores.values * 2.0**SCORE_BITS
        rounded = np.rint(scaled)
        # The integer it would round to on the other side of the boundary.
        other = np.where(scaled >= rounded, rounded + 1.0, rounded - 1.0)
        distance = np.abs(scaled - (rounded + other) / 2.0) * 2.0**-SCORE_BITS
        near = distance <= scores.error
        for label in (True, False):
            opposite = scores.values[labels != label]
            # Equal features have equal scores, and would move together.
            met = _count(np.rint(opposite * 2.0**SCORE_BITS), rounded) > _count(
                opposite, scores.values
            )
            met |= _count(np.rint(opposite * 2.0**SCORE_BITS), other) > 0
            doubtful += [ids[int(k)] for k in np.flatnonzero(near & met & (labels == label))]
        largest = max(largest, float(scores.error.max()))
        boundary = min(boundary, float(distance.min()))
        change = min(change, _least_gap(rounded, labels))
    return {
        "grid": 2.0**-SCORE_BITS,
        "largest_error": largest,
        "nearest_boundary": boundary,
        "nearest_rank_change": None if change == np.inf else change * 2.0**-SCORE_BITS,
        "in_doubt": len(doubtful),
        "items": sorted(doubtful)[:NAMED],
    }


def _count(
    values: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """How often each of ``wanted`` is among ``values``."""
    ordered = np.sort(values)
    return np.searchsorted(ordered, wanted, "right") - np.searchsorted(ordered, wanted, "left")


def _least_gap(rounded: npt.NDArray[np.float64], labels: npt.NDArray[np.bool_]) -> float:
    """The least distance above zero between a positive's and a negative's score."""
    values = np.unique(rounded)
    of_positive = np.isin(values, rounded[labels])
    of_negative = np.isin(values, rounded[~labels])
    # Of two neighbouring values, one must have a positive and the other a negative.
    facing = of_positive[:-1] & of_negative[1:] | of_negative[:-1] & of_positive[1:]
    return float(np.diff(values)[facing].min(initial=np.inf))
