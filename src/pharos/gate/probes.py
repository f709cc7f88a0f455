"""The probes: what tries to tell labels from shape.

A probe is fitted on the lines of all groups but one and scores the lines of that one, for many
labellings at a time: the columns of ``labels`` are the real labels or shuffles of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pharos.gate.exact import (
    EXACT,
    Floats,
    cholesky,
    cholesky_solve,
    exact_product,
    mean_and_deviation,
    sigmoid,
    to_grid,
)

Integers = npt.NDArray[np.int64]

X_BITS = 12  # standardised features are kept in units of 2**-12 deviations
SCORE_BITS = 20  # scores are rounded to 2**-20 before they are ranked

LINEAR_L2 = 1.0
COEFFICIENT_BITS = 26
CONVERGED = 2.0**-24  # no coefficient moved by more than this in the last step
MOST_STEPS = 100

KERNEL_L2 = 0.1  # a line
KERNEL_BITS = 12
KERNEL_CLIP = 4.0  # deviations
MOST_CROSSED = 24  # columns of which all pairs are taken


@dataclass(frozen=True)
class Fold:
    """One group held out: standardised features of the others (n_train, d) and of it (n_test, d).

    Both are integers in units of ``2**-X_BITS``; mean and deviation are the training lines'.
    """

    train: Floats
    test: Floats


def make_fold(values: Floats, held_out: npt.NDArray[np.bool_]) -> Fold:
    """Standardise features by the lines that are not held out; constants become zero."""
    train, test = values[~held_out], values[held_out]
    moments = [mean_and_deviation(column) for column in train.T]
    mean = np.array([m for m, _ in moments])
    deviation = np.array([s if s > 0.0 else np.inf for _, s in moments])
    # A line far outside the training range would only overflow the exact integers.
    far = 2.0**10
    return Fold(
        to_grid(np.clip((train - mean) / deviation, -far, far), X_BITS),
        to_grid(np.clip((test - mean) / deviation, -far, far), X_BITS),
    )


def linear_probe(fold: Fold, labels: npt.NDArray[np.bool_]) -> Integers:
    """Logistic regression, L2 with C = 1, balanced classes, by Newton's method to convergence.

    Parameters
    ----------
    fold
        The features.
    labels
        Labels of the training lines, shape (n_train, labellings); both classes in each.

    Returns
    -------
    Log-odds of the held-out lines in units of ``2**-SCORE_BITS``, shape (n_test, labellings).

    Raises
    ------
    ArithmeticError
        If a fit has not converged after 100 steps (it is strictly convex: not seen).
    """
    x = _with_intercept(fold.train)
    beta = _newton(x, labels)
    scores = exact_product(_with_intercept(fold.test), beta)
    return _on_score_grid(scores, X_BITS + COEFFICIENT_BITS)


def _with_intercept(x: Floats) -> Floats:
    return np.hstack([x, np.full((len(x), 1), 2.0**X_BITS)])


def _on_score_grid(scores: Floats, bits: int) -> Integers:
    return np.rint(scores * 2.0 ** (SCORE_BITS - bits)).astype(np.int64)


def _newton(x: Floats, labels: npt.NDArray[np.bool_]) -> Floats:
    """Coefficients in units of ``2**-COEFFICIENT_BITS``, shape (d, labellings).

    Each labelling's result is its own: it does not depend on the others of the batch.
    """
    n, d = x.shape
    upper = np.triu_indices(d)
    # The products of columns, from which every Hessian is a sum with weights.
    pairs = np.rint(x[:, upper[0]] * x[:, upper[1]] * 2.0**-X_BITS)
    positives = labels.sum(axis=0)
    weight = np.where(labels, n / (2.0 * positives), n / (2.0 * (n - positives)))
    target = labels.astype(np.float64)
    ridge = np.full((d, 1), LINEAR_L2)
    ridge[-1] = 0.0  # the intercept is free
    residual_unit = _finest_unit(np.abs(x).sum(axis=0).max() * weight.max(axis=0))
    curvature_unit = _finest_unit(np.abs(pairs).sum(axis=0).max() * weight.max(axis=0))

    def gradient(beta: Floats, chosen: Integers) -> tuple[Floats, Floats]:
        eta = exact_product(x, beta) * 2.0 ** -(X_BITS + COEFFICIENT_BITS)
        p = sigmoid(eta)
        unit = residual_unit[chosen]
        residual = np.rint(weight[:, chosen] * (target[:, chosen] - p) / unit)
        slope = (x.T @ residual) * (unit * 2.0**-X_BITS)
        return p, slope - ridge * (beta * 2.0**-COEFFICIENT_BITS)

    def factors(p: Floats, chosen: Integers) -> Floats:
        unit = curvature_unit[chosen]
        curvature = np.rint(weight[:, chosen] * (p * (1.0 - p)) / unit)
        sums = (pairs.T @ curvature) * (unit * 2.0**-X_BITS)
        hessian = np.empty((d, d, len(chosen)))
        hessian[upper[0], upper[1]] = sums
        hessian[upper[1], upper[0]] = sums
        hessian[np.arange(d), np.arange(d)] += ridge
        return cholesky(hessian)

    beta = np.zeros((d, labels.shape[1]))
    chosen = np.arange(labels.shape[1])
    p, slope = gradient(beta, chosen)
    factor = factors(p, chosen)
    for _ in range(MOST_STEPS):
        step = to_grid(cholesky_solve(factor, slope), COEFFICIENT_BITS)
        beta[:, chosen], p, slope = _shortened(beta[:, chosen], step, slope, chosen, gradient)
        size = np.abs(step).max(axis=0) * 2.0**-COEFFICIENT_BITS
        going = size > CONVERGED
        if not going.any():
            return beta
        chosen, p, slope = chosen[going], p[:, going], slope[:, going]
        factor = factor[:, :, going]
        # Near the optimum the Hessian hardly moves, and an old one will do.
        stale = size[going] > 2.0**-8
        if stale.any():
            factor[:, :, stale] = factors(p[:, stale], chosen[stale])
    raise ArithmeticError(f"the linear probe has not converged in {MOST_STEPS} steps")


def _shortened(
    beta: Floats,
    step: Floats,
    slope: Floats,
    chosen: Integers,
    gradient: Callable[[Floats, Integers], tuple[Floats, Floats]],
) -> tuple[Floats, Floats, Floats]:
    """Take a Newton step, halved where the gradient would grow (never, close to the optimum)."""
    tried = beta + step
    p, new_slope = gradient(tried, chosen)
    for _ in range(MOST_STEPS):
        # Below this the gradient is rounding noise.
        worse = _length(new_slope) > np.maximum(_length(slope), 2.0**-16)
        if not worse.any():
            break
        step = np.where(worse, np.rint(step / 2.0), step)
        tried = beta + step
        p, new_slope = gradient(tried, chosen)
    return tried, p, new_slope


def _length(slope: Floats) -> Floats:
    """Squared length of each column, summed in a fixed order."""
    total = np.zeros(slope.shape[1])
    for row in slope:
        total += row * row
    return total


def _finest_unit(total: Floats) -> Floats:
    """The smallest power of two in units of which sums up to ``total`` are exact integers."""
    return 2.0 ** np.frexp(total * (4.0 / EXACT))[1]


def kernel_probe(fold: Fold, labels: npt.NDArray[np.bool_]) -> Integers:
    """Kernel ridge regression with the kernel ``(1 + x.z / d)**2``, a smooth interaction probe.

    It is solved in the kernel's own feature space (columns, squares and products of two), where
    one factorisation serves every labelling and the time is linear in the lines. Features are
    cut at 4 deviations; of more than 24 columns, the first 24 are crossed.

    Parameters and result are those of :func:`linear_probe`; the scores are predicted labels.
    """
    train, test = _crossed(fold.train), _crossed(fold.test)
    mean = np.rint(train.sum(axis=0) / len(train))
    train, test = train - mean, test - mean
    unit = 2.0**KERNEL_BITS
    gram = exact_product(train.T, train) / (unit * unit)
    gram[np.diag_indices(len(gram))] += KERNEL_L2 * len(train)
    inverse = cholesky_solve(cholesky(gram), np.eye(len(gram)))
    moments = exact_product(train.T, labels.astype(np.float64))
    inverse_bits = 30 - int(np.frexp(np.abs(inverse).max())[1])
    weights = exact_product(to_grid(inverse, inverse_bits), moments)
    weights *= 2.0 ** -(inverse_bits + KERNEL_BITS)
    # 26 bits of the largest weight of each labelling.
    weight_unit = 2.0 ** (np.frexp(np.abs(weights).max(axis=0))[1] - 26)
    scores = exact_product(test, np.rint(weights / weight_unit))
    return _on_score_grid(scores * weight_unit, KERNEL_BITS)


def _crossed(x: Floats) -> Floats:
    """Columns, their squares and their products, in units of ``2**-KERNEL_BITS``."""
    d = x.shape[1]
    x = np.clip(x * 2.0**-X_BITS, -KERNEL_CLIP, KERNEL_CLIP)
    i, j = np.triu_indices(min(d, MOST_CROSSED))
    scale = np.where(i == j, 1.0, np.sqrt(2.0)) / d
    return to_grid(np.hstack([x * np.sqrt(2.0 / d), x[:, i] * x[:, j] * scale]), KERNEL_BITS)


def boosting_probe(fold: Fold, labels: npt.NDArray[np.bool_]) -> Integers:
    """Gradient boosting of small trees (scikit-learn's), one fit a labelling: slow.

    Its sums are not exact: scores are rounded to the grid, which hides nearly every difference
    between processors, but not by construction.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier

    scores = []
    for column in labels.T:
        model = HistGradientBoostingClassifier(
            max_iter=50, max_depth=3, early_stopping=False, class_weight="balanced", random_state=0
        )
        model.fit(fold.train, column)
        scores.append(model.decision_function(fold.test))
    return _on_score_grid(np.array(scores).T, 0)


PROBES: Mapping[str, Callable[[Fold, npt.NDArray[np.bool_]], Integers]] = {
    "linear": linear_probe,
    "kernel": kernel_probe,
    "boosting": boosting_probe,
}
