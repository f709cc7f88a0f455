"""The probes: what tries to tell labels from shape.

A probe is made for one fold, fitted on the lines of all groups but one, and ranks the lines of
that one, for many labellings at a time: the columns of ``labels`` are the real labels or shuffles
of them. A labelling's scores do not depend on the others of its batch.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pharos.gate.exact import (
    EXACT,
    Floats,
    cholesky,
    cholesky_batch,
    cholesky_solve,
    exact_product,
    inverse_of_lower,
    mean_and_deviation,
    norm,
    power_of_two_above,
    sigmoid,
    to_grid,
)

Integers = npt.NDArray[np.int64]
Labels = npt.NDArray[np.bool_]

X_BITS = 12  # standardised features are kept in units of 2**-12 deviations
FARTHEST = 2.0**10  # deviations; beyond it the exact integers would overflow
SCORE_BITS = 20  # scores are rounded to 2**-20 before they are ranked

LINEAR_L2 = 1.0
COEFFICIENT_BITS = 32
RESIDUAL_BITS = 29
FINE_RESIDUAL_BITS = 44
STALE = 2.0**-8  # a Hessian is made anew after a step this large
# A step whose squared length in the Hessian (Newton's decrement) is below this is the last one:
# what it leaves is a thousandth of it, or less.
CONVERGED = 2.0**-34
MOST_STEPS = 100
AT_ONCE = 512  # labellings, and
BLOCK_ROWS = 256  # lines, that the linear probe works on at once: they stay in the cache

KERNEL_L2 = 0.3  # a line
KERNEL_BITS = 12
KERNEL_CLIP = 4.0  # deviations
MOST_CROSSED = 24  # columns of which all pairs are taken
WEIGHT_BITS = 30
ROWS = 1 << 13  # lines whose crossed features are held at once


@dataclass(frozen=True)
class Fold:
    """One group held out: standardised features of the others (n_train, d) and of it (n_test, d).

    Both are integers in units of ``2**-X_BITS``; mean and deviation are the training lines'.
    """

    train: Floats
    test: Floats


def make_fold(values: Floats, held_out: Labels) -> Fold:
    """Standardise features by the lines that are not held out; constants become zero."""
    train, test = values[~held_out], values[held_out]
    moments = [mean_and_deviation(column) for column in train.T]
    mean = np.array([m for m, _ in moments])
    deviation = np.array([s if s > 0.0 else np.inf for _, s in moments])
    return Fold(*(
        to_grid(np.clip((part - mean) / deviation, -FARTHEST, FARTHEST), X_BITS)
        for part in (train, test)
    ))  # fmt: skip


@dataclass(frozen=True)
class Scores:
    """Scores of one labelling before they are rounded, and how far off they may be.

    ``error`` bounds the distance of each to the score that exact arithmetic would give; it is
    ``None`` where no bound is known.
    """

    values: Floats
    error: Floats | None


class Probe(Protocol):
    """What every probe can do."""

    def scores(self, labels: Labels) -> Integers:
        """Scores of the held-out lines in units of ``2**-SCORE_BITS``, (n_test, labellings).

        ``labels`` are those of the training lines, (n_train, labellings), both in each.
        """

    def unrounded(self, labels: Labels) -> Scores:
        """The scores of one labelling, (n_train,), before rounding."""


class LinearProbe:
    """Logistic regression, L2 with C = 1, balanced classes, by Newton's method to convergence.

    Its scores are log-odds.
    """

    def __init__(self, fold: Fold) -> None:
        """Take the features of one fold."""
        self.x, self.test = _with_intercept(fold.train), _with_intercept(fold.test)
        n, d = self.x.shape
        self.upper = np.triu_indices(d)
        self.ridge = np.full((d, 1), LINEAR_L2)
        self.ridge[-1] = 0.0  # the intercept is free
        self.column_sum = self.x.sum(axis=0)[:, None]
        self.pair_sum = np.zeros((len(self.upper[0]), 1))
        self.pair_size = 0.0
        for rows in _blocks(n):
            pairs = self._pairs(rows)
            self.pair_sum += pairs.sum(axis=0)[:, None]
            self.pair_size = max(self.pair_size, float(np.abs(pairs).sum(axis=0).max()))

    def scores(self, labels: Labels) -> Integers:
        """See :class:`Probe`."""
        parts = [
            self._fit(labels[:, start : start + AT_ONCE])
            for start in range(0, labels.shape[1], AT_ONCE)
        ]
        return _on_score_grid(self._raw(np.hstack(parts)))

    def unrounded(self, labels: Labels) -> Scores:
        """See :class:`Probe`.

        The bound is Newton's: near the optimum it is no farther than twice the step that is
        left, both measured by the Hessian.
        """
        labels = labels[:, None]
        beta = self._fit(labels)
        slope, factor = self._sweep(beta, labels, np.array([True]), FINE_RESIDUAL_BITS)
        inverse = inverse_of_lower(np.tril(factor[:, :, 0]))
        bits = _bits_for(inverse, 30)
        lengths = exact_product(to_grid(inverse, bits), self.test.T) * 2.0 ** -(bits + X_BITS)
        left = norm(np.array([math.fsum((row * slope[:, 0]).tolist()) for row in inverse]))
        return Scores(self._raw(beta)[:, 0], 2.0 * left * np.sqrt(_dots(lengths, lengths)))

    def _raw(self, beta: Floats) -> Floats:
        return exact_product(self.test, beta) * 2.0 ** -(X_BITS + COEFFICIENT_BITS)

    def _pairs(self, rows: slice) -> Floats:
        """Products of two columns, in the order of ``upper``: Hessians are sums of these."""
        x = self.x[rows]
        return np.hstack([x[:, i : i + 1] * x[:, i:] for i in range(x.shape[1])])

    def _fit(self, labels: Labels) -> Floats:
        """Coefficients in units of ``2**-COEFFICIENT_BITS``, (d, labellings)."""
        beta = np.zeros((self.x.shape[1], labels.shape[1]))
        slope, factor = self._start(labels)
        chosen = np.arange(labels.shape[1])
        for _ in range(MOST_STEPS):
            step = to_grid(cholesky_solve(factor, slope), COEFFICIENT_BITS)
            going = _dots(step, slope) * 2.0**-COEFFICIENT_BITS > CONVERGED
            beta[:, chosen[~going]] += step[:, ~going]
            if not going.any():
                return beta
            if not going.all():
                chosen, labels, factor = chosen[going], labels[:, going], factor[:, :, going]
                step, slope = step[:, going], slope[:, going]
            # Near the optimum the Hessian hardly moves, and an old one will do.
            stale = np.abs(step).max(axis=0) > STALE * 2.0**COEFFICIENT_BITS
            now, slope, new = self._move(beta[:, chosen], step, slope, labels, stale)
            beta[:, chosen] = now
            factor[:, :, stale] = new
        raise ArithmeticError(f"the linear probe has not converged in {MOST_STEPS} steps")

    def _class_weights(self, labels: Labels) -> tuple[Floats, Floats]:
        n, positives = len(labels), labels.sum(axis=0)
        return n / (2.0 * positives), n / (2.0 * (n - positives))

    def _start(self, labels: Labels) -> tuple[Floats, Floats]:
        """Slope and factored Hessian where all coefficients are zero and p is one half."""
        of_positives, of_negatives = self._class_weights(labels)
        slope = np.zeros((self.x.shape[1], labels.shape[1]))
        sums = np.zeros((len(self.pair_sum), labels.shape[1]))
        for rows in _blocks(len(self.x)):
            target = labels[rows].astype(np.float64)
            slope += self.x[rows].T @ target
            sums += self._pairs(rows).T @ target
        slope = slope * ((of_positives + of_negatives) / 2.0)
        slope = (slope - self.column_sum * (of_negatives / 2.0)) * 2.0**-X_BITS
        sums = sums * (of_positives - of_negatives) + self.pair_sum * of_negatives
        return slope, self._factored(sums * (0.25 * 4.0**-X_BITS))

    def _sweep(
        self, beta: Floats, labels: Labels, curved: Labels, bits: int = RESIDUAL_BITS
    ) -> tuple[Floats, Floats]:
        """Slope of the penalised log-likelihood, and factored Hessians of those ``curved``."""
        of_positives, of_negatives = self._class_weights(labels)
        slope = np.zeros_like(beta)
        sums = np.zeros((len(self.pair_sum), int(curved.sum())))
        # The finest unit in which a block's sums are exact integers.
        largest = np.maximum(of_positives, of_negatives)[curved] * self.pair_size
        unit = power_of_two_above(largest * (4.0 / EXACT))
        for rows in _blocks(len(self.x)):
            x, positive = self.x[rows], labels[rows]
            p = sigmoid(exact_product(x, beta), 2.0 ** -(X_BITS + COEFFICIENT_BITS))
            weight = np.where(positive, of_positives, of_negatives)
            residual = (positive - p) * weight
            residual *= 2.0**bits
            np.rint(residual, out=residual)
            slope += exact_product(x.T, residual)
            if sums.size:
                curvature = (p * (1.0 - p) * weight)[:, curved] / unit
                np.rint(curvature, out=curvature)
                sums += self._pairs(rows).T @ curvature
        slope *= 2.0 ** -(X_BITS + bits)
        slope -= self.ridge * (beta * 2.0**-COEFFICIENT_BITS)
        return slope, self._factored(sums * (unit * 4.0**-X_BITS))

    def _factored(self, sums: Floats) -> Floats:
        """Cholesky factors of the Hessians, (d, d, labellings), from the sums of pairs."""
        d = len(self.ridge)
        hessian = np.empty((d, d, sums.shape[1]))
        hessian[self.upper] = sums
        hessian[self.upper[::-1]] = sums
        hessian[np.diag_indices(d)] += self.ridge
        return cholesky_batch(hessian)

    def _move(
        self, beta: Floats, step: Floats, slope: Floats, labels: Labels, curved: Labels
    ) -> tuple[Floats, Floats, Floats]:
        """Take a step, halved where the gradient would grow (never, close to the optimum)."""
        # Below this the gradient is rounding noise.
        before = np.maximum(_dots(slope, slope), 2.0**-32 * len(labels))
        for _ in range(MOST_STEPS):
            tried = beta + step
            slope, factor = self._sweep(tried, labels, curved)
            worse = _dots(slope, slope) > before
            if not worse.any():
                break
            step = np.where(worse, np.rint(step / 2.0), step)
        return tried, slope, factor


class KernelProbe:
    """Kernel ridge regression with ``k(x, z) = sum(x_i z_i) + sum(x_i x_j z_i z_j, i <= j)``.

    Smooth, and sees interactions of two features and bends in one. It is solved in the kernel's
    own feature space (columns, squares and products of two), where one factorisation serves
    every labelling and the time is linear in the lines. Features are cut at 4 deviations; of
    more than 24 columns, the first 24 are crossed. Its scores are predicted labels.
    """

    def __init__(self, fold: Fold) -> None:
        """Factorise for one fold."""
        self.fold = fold
        n = len(fold.train)
        total = sum(phi.sum(axis=0) for _, phi in _crossed(fold.train))
        self.mean = np.rint(total / n)
        unit = 2.0**KERNEL_BITS
        gram = np.zeros((len(self.mean), len(self.mean)))
        for _, phi in _crossed(fold.train, self.mean):
            gram += exact_product(phi.T, phi)
        gram /= unit * unit
        gram[np.diag_indices(len(gram))] += KERNEL_L2 * n
        self.gram = gram
        inverse = inverse_of_lower(cholesky(gram))
        self.bits = _bits_for(inverse, 30)
        self.inverse = to_grid(inverse, self.bits)

    def scores(self, labels: Labels) -> Integers:
        """See :class:`Probe`."""
        weights, unit = self._weights(labels)
        scores = np.empty((len(self.fold.test), labels.shape[1]), dtype=np.int64)
        for rows, phi in _crossed(self.fold.test, self.mean):
            scores[rows] = _on_score_grid(exact_product(phi, weights) * unit)
        return scores

    def unrounded(self, labels: Labels) -> Scores:
        """See :class:`Probe`.

        The bound is that of Cauchy and Schwarz on what the weights leave of the normal equations
        and a line's features, both measured by the inverse of the equations' matrix.
        """
        rounded, unit = self._weights(labels[:, None])
        weights = rounded * (unit * 2.0**KERNEL_BITS)
        # The matrix in 40 bits: its own rounding is far below what is left over.
        left = self._moments(labels[:, None]) * 2.0**-KERNEL_BITS
        fine = _bits_for(self.gram, 40)
        weight_bits = _bits_for(weights, WEIGHT_BITS)
        product = exact_product(to_grid(self.gram, fine), to_grid(weights, weight_bits))
        left = left - product * 2.0 ** -(fine + weight_bits)
        left_bits = _bits_for(left, 40)
        distance = norm(self._whitened(to_grid(left, left_bits)) * 2.0**-left_bits)
        values, error = np.empty(len(self.fold.test)), np.empty(len(self.fold.test))
        for rows, phi in _crossed(self.fold.test, self.mean):
            values[rows] = (exact_product(phi, rounded) * unit)[:, 0]
            size = self._whitened(phi.T) * 2.0**-KERNEL_BITS
            error[rows] = distance * np.sqrt(_dots(size, size))
        return Scores(values, error)

    def _whitened(self, columns: Floats) -> Floats:
        """The inverse factor times columns of integers: lengths become those in the inverse."""
        return exact_product(self.inverse, columns) * 2.0**-self.bits

    def _moments(self, labels: Labels) -> Floats:
        """Sums of the positives' crossed features, in units of ``2**-KERNEL_BITS``."""
        moments = np.zeros((len(self.mean), labels.shape[1]))
        for rows, phi in _crossed(self.fold.train, self.mean):
            moments += exact_product(phi.T, labels[rows].astype(np.float64))
        return moments

    def _weights(self, labels: Labels) -> tuple[Floats, Floats]:
        """Integers (p, labellings), and what one of them counts in a product with integers."""
        half = exact_product(self.inverse, self._moments(labels))
        half_unit = power_of_two_above(np.abs(half).max(axis=0)) * 4.0**-WEIGHT_BITS
        weights = exact_product(self.inverse.T, np.rint(half / half_unit))
        weight_unit = power_of_two_above(np.abs(weights).max(axis=0)) * 2.0**-WEIGHT_BITS
        unit = half_unit * weight_unit * 2.0 ** -(2 * self.bits + 2 * KERNEL_BITS)
        return np.rint(weights / weight_unit), unit


def _crossed(x: Floats, mean: Floats | float = 0.0) -> Iterator[tuple[slice, Floats]]:
    """Columns, their squares and their products less ``mean``, some lines at a time.

    All are integers in units of ``2**-KERNEL_BITS``.
    """
    i, j = np.triu_indices(min(x.shape[1], MOST_CROSSED))
    for start in range(0, len(x), ROWS):
        rows = slice(start, min(start + ROWS, len(x)))
        part = np.clip(x[rows] * 2.0**-X_BITS, -KERNEL_CLIP, KERNEL_CLIP)
        phi = np.hstack([part, part[:, i] * part[:, j]])
        yield rows, to_grid(phi, KERNEL_BITS) - mean


class BoostingProbe:
    """Gradient boosting of small trees (scikit-learn's), one fit a labelling: slow.

    Its sums are not exact: scores are rounded to the grid, which hides nearly every difference
    between processors, but not by construction.
    """

    def __init__(self, fold: Fold) -> None:
        """Take the features of one fold."""
        self.fold = fold

    def scores(self, labels: Labels) -> Integers:
        """See :class:`Probe`."""
        return _on_score_grid(np.array([self.unrounded(column).values for column in labels.T]).T)

    def unrounded(self, labels: Labels) -> Scores:
        """See :class:`Probe`; there is no bound."""
        from sklearn.ensemble import HistGradientBoostingClassifier

        model = HistGradientBoostingClassifier(
            max_iter=50, max_depth=3, early_stopping=False, class_weight="balanced", random_state=0
        )
        model.fit(self.fold.train, labels)
        return Scores(model.decision_function(self.fold.test), None)


PROBES: Mapping[str, Callable[[Fold], Probe]] = {
    "linear": LinearProbe,
    "kernel": KernelProbe,
    "boosting": BoostingProbe,
}


def _bits_for(values: Floats, bits: int) -> int:
    """The grid on which the largest of ``values`` is an integer of ``bits`` bits."""
    return bits - int(np.frexp(np.abs(values).max(initial=2.0**-200))[1])


def _blocks(lines: int) -> list[slice]:
    """All lines, in blocks of about equal size."""
    count = -(-lines // BLOCK_ROWS)
    edges = [lines * k // count for k in range(count + 1)]
    return [slice(start, end) for start, end in pairwise(edges)]


def _with_intercept(x: Floats) -> Floats:
    return np.hstack([x, np.full((len(x), 1), 2.0**X_BITS)])


def _on_score_grid(scores: Floats) -> Integers:
    return np.rint(scores * 2.0**SCORE_BITS).astype(np.int64)


def _dots(a: Floats, b: Floats) -> Floats:
    """The products of columns with columns, summed in a fixed order."""
    total = np.zeros(a.shape[1])
    for left, right in zip(a, b, strict=True):
        total += left * right
    return total
