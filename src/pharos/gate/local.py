"""A leak confined to one group, which holding that group out cannot show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from pharos.gate.design import Design
from pharos.gate.features import Features

Floats = npt.NDArray[np.float64]


class RankedFeatures:
    """Every feature ranked within every group, for the AUC of each alone under many labellings."""

    def __init__(self, features: Features, design: Design) -> None:
        """Rank once; a labelling then costs one product of integers."""
        self.rows = [np.flatnonzero(design.groups == g) for g in range(len(design.group_names))]
        self.doubled = [doubled_ranks(features.values[rows]) for rows in self.rows]

    def counts(self, group: int, labels: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """Twice Mann and Whitney's U, (d, labellings), and the pairs, (labellings,).

        ``labels`` are those of all lines, (n, labellings).
        """
        return _counts(self.doubled[group], labels[self.rows[group]])


def _counts(doubled: Floats, labels: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Exact integers, from doubled ranks (n, d) and labels (n, labellings)."""
    inside = labels.astype(np.float64)
    positives = inside.sum(axis=0)
    twice_u = doubled.T @ inside - positives * (positives + 1.0)
    return twice_u, positives * (len(inside) - positives)


def away_from_chance(doubled: Floats, labels: npt.NDArray[np.bool_]) -> Floats:
    """How many deviations each feature's ranking is from one by chance, (d, labellings)."""
    twice_u, pairs = _counts(doubled, labels)
    # Mann and Whitney's variance; a cluster's lines make it larger, in shuffles too.
    spread = np.sqrt(pairs * ((len(labels) + 1.0) / 3.0))
    return np.asarray(np.abs(twice_u - pairs) / spread)


def doubled_ranks(values: Floats) -> Floats:
    """Twice the mid-ranks within each column of (n, d): integers."""
    doubled = np.empty_like(values)
    for column, ranks in zip(values.T, doubled.T, strict=True):
        _, place, count = np.unique(column, return_inverse=True, return_counts=True)
        last = np.cumsum(count)
        ranks[:] = (2 * last - count + 1)[place]
    return doubled


@dataclass(frozen=True)
class Striking:
    """The feature that stands out most in a single group, under the first labelling.

    ``deviations`` says for every labelling how far the most striking one stands out, in standard
    deviations of a chance ranking; ``auc`` is the first's.
    """

    deviations: Floats
    kind: int
    group: int
    feature: int
    auc: Fraction


def most_striking(
    ranked: RankedFeatures,
    design: Design,
    folds: Mapping[int, Sequence[int]],
    labels: npt.NDArray[np.int64] | npt.NDArray[np.int8],
) -> Striking:
    """Look at every feature in every group of ``folds`` alone, for labels (k, labellings)."""
    deviations = np.zeros(labels.shape[1])
    first = (-1.0, 0, 0, 0, Fraction(1, 2))
    for kind, groups in folds.items():
        of_kind = design.of_lines(labels == kind)
        for group in groups:
            away = away_from_chance(ranked.doubled[group], of_kind[ranked.rows[group]])
            deviations = np.maximum(deviations, away.max(axis=0))
            feature = int(away[:, 0].argmax())
            twice_u, pairs = ranked.counts(group, of_kind[:, :1])
            auc = Fraction(int(twice_u[feature, 0]), 2 * int(pairs[0]))
            if away[feature, 0] > first[0]:
                first = (float(away[feature, 0]), kind, group, feature, auc)
    return Striking(deviations, *first[1:])


def feature_aucs(
    ranked: RankedFeatures, groups: Sequence[int], labels: npt.NDArray[np.bool_]
) -> list[Fraction]:
    """The AUC of each feature alone, mean over ``groups``, for labels of lines (n, 1)."""
    total: list[Fraction] = []
    for group in groups:
        twice_u, pairs = ranked.counts(group, labels)
        fold = [Fraction(int(u), 2 * int(pairs[0]) * len(groups)) for u in twice_u[:, 0]]
        total = [a + b for a, b in zip(total, fold, strict=True)] if total else fold
    return total
