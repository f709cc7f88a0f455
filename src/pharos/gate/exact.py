"""Arithmetic whose every bit is the same on every processor.

Two kinds of floating-point work are reproducible whatever the BLAS kernel, the number of threads
and the width of the vector units:

- element by element ``+ - * /``, ``sqrt`` and rounding, which IEEE 754 fixes to the last bit, in
  an order that the code fixes;
- sums of products of *integers* kept in float64, as long as no partial sum can reach 2**53: all
  of them are then exact, so the order in which BLAS adds them does not matter.

The gate's linear algebra is made of these two and nothing else. ``numpy.exp``, floating-point
sums over an axis and LAPACK are not among them.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

EXACT = 2.0**53  # integers below this are exact in float64
BLOCK = 1 << 14  # elements that stay in the cache through all steps of sigmoid()


def to_grid(values: Floats, bits: int) -> Floats:
    """``values`` in units of ``2**-bits``, rounded to integers (half to even)."""
    return np.rint(values * 2.0**bits)


def exact_product(a: Floats, b: Floats) -> Floats:
    """The matrix product of integers ``a`` (m, k) and ``b`` (k, n), to the last bit.

    Where a partial sum could leave the exact integers, ``b`` is cut into a high and a low part,
    whose products are exact; their sum is rounded once.
    """
    row = float(np.abs(a).sum(axis=1).max(initial=0.0))
    if row >= EXACT / 8:
        raise ValueError(f"a row of the first factor sums to {row:.3g}: 2**50 is too much")
    size = float(np.abs(b).max(initial=0.0))
    if row * size < EXACT / 2:
        return np.asarray(a @ b)
    low_unit = 2.0 ** (math.frexp(EXACT / 4 / row)[1] - 1)
    high = np.rint(b / low_unit)
    return exact_product(a, high) * low_unit + a @ (b - high * low_unit)


def mean_and_deviation(column: Floats) -> tuple[float, float]:
    """Mean and (population) standard deviation of a vector, from exactly rounded sums."""
    mean = math.fsum(column.tolist()) / len(column)
    centred = column - mean
    return mean, math.sqrt(math.fsum((centred * centred).tolist()) / len(column))


# exp(r) for |r| <= ln(2)/2: the Taylor polynomial, whose first omitted term is below 2e-16.
_TAYLOR = [1.0 / math.factorial(k) for k in range(13, -1, -1)]
# ln 2 in two parts; the first has few bits, so that its product with a small integer is exact.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.121944400546905827679e-4
_PER_LN2 = 1.4426950408889634
_LARGEST = 40.0


def sigmoid(values: Floats) -> Floats:
    """``1 / (1 + exp(-values))`` by element, with arguments cut at +-40.

    Cody and Waite's reduction and a polynomial, in basic operations only.
    """
    flat = np.ascontiguousarray(values).reshape(-1)
    result = np.empty_like(flat)
    x = np.empty(BLOCK)
    r = np.empty(BLOCK)
    for start in range(0, len(flat), BLOCK):
        part = flat[start : start + BLOCK]
        _sigmoid_block(part, result[start : start + BLOCK], x[: len(part)], r[: len(part)])
    return result.reshape(values.shape)


def _sigmoid_block(values: Floats, out: Floats, x: Floats, r: Floats) -> None:
    np.clip(values, -_LARGEST, _LARGEST, out=x)
    np.negative(x, out=x)
    k = x * _PER_LN2
    np.rint(k, out=k)
    np.multiply(k, _LN2_HIGH, out=r)
    np.subtract(x, r, out=x)
    np.multiply(k, _LN2_LOW, out=r)
    np.subtract(x, r, out=r)  # the reduced argument
    out[...] = _TAYLOR[0]
    for coefficient in _TAYLOR[1:]:
        np.multiply(out, r, out=out)
        np.add(out, coefficient, out=out)
    power = (k.astype(np.int64) + 1023) << 52
    np.multiply(out, power.view(np.float64), out=out)
    np.add(out, 1.0, out=out)
    np.divide(1.0, out, out=out)


def cholesky(matrix: Floats) -> Floats:
    """Lower Cholesky factors of positive definite matrices, ``(p, p)`` or ``(p, p, batch)``."""
    a = matrix.copy()
    for j in range(len(a)):
        a[j, j] = np.sqrt(a[j, j])
        a[j + 1 :, j] /= a[j, j]
        column = a[j + 1 :, j]
        a[j + 1 :, j + 1 :] -= column[:, None] * column[None, :]
    return a


def cholesky_solve(factor: Floats, right: Floats) -> Floats:
    """Solve ``L L' x = right`` by elimination in a fixed order.

    ``factor`` is ``(p, p)`` with ``right`` ``(p, n)``, or ``(p, p, batch)`` with ``(p, batch)``.
    """
    x = right.copy()
    shared = factor.ndim == 2
    for j in range(len(x)):
        x[j] /= factor[j, j]
        below = factor[j + 1 :, j]
        x[j + 1 :] -= (below[:, None] if shared else below) * x[j]
    for j in range(len(x) - 1, -1, -1):
        x[j] /= factor[j, j]
        before = factor[j, :j]
        x[:j] -= (before[:, None] if shared else before) * x[j]
    return x


def twice_mann_whitney(scores: npt.NDArray[np.int64], labels: npt.NDArray[Any]) -> Any:
    """Twice Mann and Whitney's U of each row, counted in integers; a tie counts one half.

    Parameters
    ----------
    scores
        Integers, shape (rows, n).
    labels
        Booleans of the same shape.

    Returns
    -------
    int64, shape (rows,): pairs in which the positive scores higher, twice, plus ties. Divided by
    twice the number of pairs it is the area under the ROC curve.
    """
    positive = labels.astype(np.int64)
    total = np.zeros(len(scores), dtype=np.int64)
    # Within a tie negatives stand first, then last: negatives not above, then those below.
    for negatives_last in (0, 1):
        key = np.sort(2 * scores + (positive ^ negatives_last), axis=1)
        is_positive = (key & 1) ^ negatives_last
        negatives = np.cumsum(1 - is_positive, axis=1)
        total += (negatives * is_positive).sum(axis=1)
    return total
