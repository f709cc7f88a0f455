"""Holding groups out in turn, and ranking each with probes fitted on the rest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from pharos.gate.certificate import certify
from pharos.gate.design import Design
from pharos.gate.exact import twice_mann_whitney
from pharos.gate.probes import PROBES, Probe, make_fold
from pharos.runtime.log import Progress

AT_ONCE = 1 << 24  # lines times labellings whose labels are spread over the lines at once
HALF = Fraction(1, 2)


@dataclass(frozen=True)
class Ranking:
    """How well one held-out group was ranked, for each labelling: AUC = twice_u / twice_pairs."""

    group: int
    twice_u: npt.NDArray[np.int64]
    twice_pairs: npt.NDArray[np.int64]

    def auc(self, labelling: int = 0) -> Fraction:
        """The area under the ROC curve, exactly."""
        return Fraction(int(self.twice_u[labelling]), int(self.twice_pairs[labelling]))


Rankings = dict[tuple[int, str], list[Ranking]]


def mean_auc(rankings: Sequence[Ranking], labelling: int = 0) -> Fraction:
    """The mean AUC over groups, exactly."""
    return sum((ranking.auc(labelling) for ranking in rankings), Fraction(0)) / len(rankings)


@dataclass(frozen=True)
class Judge:
    """A corpus whose shape was measured, and the probes to be tried on it.

    ``values`` are its features, (n, d); ``folds`` has the groups to be held out for each class.
    """

    design: Design
    values: npt.NDArray[np.float64]
    folds: Mapping[int, tuple[int, ...]]
    probes: tuple[str, ...]

    @property
    def groups(self) -> list[int]:
        """All groups that are held out."""
        return sorted({group for groups in self.folds.values() for group in groups})

    def judge(
        self, labels: npt.NDArray[Any], progress: Progress | None = None
    ) -> tuple[Rankings, dict[tuple[int, str], dict[str, Any]]]:
        """Fit and rank for every labelling of the clusters, ``labels`` (k, labellings).

        Returns
        -------
        The rankings of every class and probe, a fold each; and for each class and probe how safe
        the ranks of the first labelling are, see :func:`~pharos.gate.certificate.certify`.
        """
        rankings, unrounded = self._judge(labels, progress, certified=True)
        return rankings, {key: certify(folds) for key, folds in unrounded.items()}

    def rankings(self, labels: npt.NDArray[Any]) -> Rankings:
        """The first of what :meth:`judge` returns, without the work for the second."""
        return self._judge(labels, None, certified=False)[0]

    def _judge(
        self, labels: npt.NDArray[Any], progress: Progress | None, certified: bool
    ) -> tuple[Rankings, dict[tuple[int, str], list[Any]]]:
        keys = [(kind, name) for kind in self.folds for name in self.probes]
        rankings: Rankings = {key: [] for key in keys}
        unrounded: dict[tuple[int, str], list[Any]] = {key: [] for key in keys}
        for group in self.groups:
            held_out = self.design.groups == group
            ids = [self.design.ids[line] for line in np.flatnonzero(held_out)]
            fold = make_fold(self.values, held_out)
            for name in self.probes:
                probe = PROBES[name](fold)
                for kind, groups in self.folds.items():
                    if group not in groups:
                        continue
                    if certified:
                        first = self.design.of_lines(labels[:, 0] == kind)
                        scores = probe.unrounded(first[~held_out])
                        unrounded[kind, name].append((scores, first[held_out], ids))
                    rankings[kind, name].append(self._rank(probe, labels == kind, group))
                if progress is not None:
                    progress.advance()
        return rankings, unrounded

    def _rank(self, probe: Probe, of_kind: npt.NDArray[np.bool_], group: int) -> Ranking:
        """Rank one group for labels of the clusters, (k, labellings)."""
        held_out = self.design.groups == group
        parts = []
        at_once = max(16, AT_ONCE // len(held_out))
        for start in range(0, of_kind.shape[1], at_once):
            labels = self.design.of_lines(of_kind[:, start : start + at_once])
            inside = np.ascontiguousarray(labels[held_out].T)
            scores = probe.scores(labels[~held_out])
            parts.append(twice_mann_whitney(np.ascontiguousarray(scores.T), inside))
        positives = self._count(of_kind, held_out)
        pairs = positives * (int(held_out.sum()) - positives)
        return Ranking(group, np.concatenate(parts), 2 * pairs)

    def _count(
        self, of_kind: npt.NDArray[np.bool_], held_out: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.int64]:
        """How many lines of a group have a class, for each labelling."""
        size = np.bincount(self.design.clusters[held_out], minlength=len(of_kind))
        return size.astype(np.int64) @ of_kind.astype(np.int64)

    def largest(self, rankings: Rankings) -> list[Fraction]:
        """The largest |AUC - 0.5| over classes and probes, for each labelling."""
        labellings = range(len(next(iter(rankings.values()))[0].twice_u))
        return [
            max(abs(mean_auc(ranked, k) - HALF) for ranked in rankings.values()) for k in labellings
        ]
