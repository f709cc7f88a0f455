"""Arithmetic whose every bit is the same on every processor.

Two kinds of floating-point work are reproducible whatever the BLAS kernel, the number of threads
and the width of the vector units:

- element by element ``+ - * /``, ``sqrt`` and rounding, which IEEE 754 fixes to the last bit, in
  an order that the code fixes;
- sums of products of *integers* kept in float64, as long as no partial sum can reach 2**53: all
  of them are then exact, so the order in which BLAS adds them does not matter.

The gate's linear algebra is made of these two and nothing else. ``numpy.exp``,
``numpy.power``, floating-point sums over an axis and LAPACK are not among them: their bits
depend on the width of the vector units.
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
    size = max(float(b.max(initial=0.0)), -float(b.min(initial=0.0)))
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


def power_of_two_above(values: Floats) -> Floats:
    """The least power of two above each positive value, by its exponent: exact."""
    return np.asarray(np.ldexp(1.0, np.frexp(values)[1]))


def norm(values: Floats) -> float:
    """The Euclidean (Frobenius) norm, from an exactly rounded sum of squares."""
    return math.sqrt(math.fsum((values * values).reshape(-1).tolist()))


# exp(r) for |r| <= ln(2)/2: the Taylor polynomial, whose first omitted term is below 1e-14.
_TAYLOR = [1.0 / math.factorial(k) for k in range(11, -1, -1)]
# ln 2 in two parts; the first has few bits, so that its product with a small integer is exact.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.121944400546905827679e-4
_PER_LN2 = 1.4426950408889634
_LARGEST = 40.0


def sigmoid(values: Floats, scale: float = 1.0) -> Floats:
    """``1 / (1 + exp(-scale * values))`` by element, with arguments cut at +-40.

    Cody and Waite's reduction and a polynomial, in basic operations only. ``scale`` is a power
    of two.
    """
    flat = np.ascontiguousarray(values).reshape(-1)
    result = np.empty_like(flat)
    x, k = np.empty(BLOCK), np.empty(BLOCK)
    power = np.empty(BLOCK, dtype=np.int64)
    for start in range(0, len(flat), BLOCK):
        part = flat[start : start + BLOCK]
        n = len(part)
        np.multiply(part, -scale, out=x[:n])
        _sigmoid_block(x[:n], result[start : start + n], k[:n], power[:n])
    return result.reshape(values.shape)


def _sigmoid_block(x: Floats, out: Floats, k: Floats, power: npt.NDArray[np.int64]) -> None:
    """``1 / (1 + exp(x))`` into ``out``; ``x``, ``k`` and ``power`` are working space."""
    np.maximum(x, -_LARGEST, out=x)
    np.minimum(x, _LARGEST, out=x)
    np.multiply(x, _PER_LN2, out=k)
    np.rint(k, out=k)
    np.multiply(k, _LN2_HIGH, out=out)
    np.subtract(x, out, out=x)
    np.multiply(k, _LN2_LOW, out=out)
    np.subtract(x, out, out=x)  # the reduced argument
    np.multiply(x, _TAYLOR[0], out=out)
    for coefficient in _TAYLOR[1:-1]:
        np.add(out, coefficient, out=out)
        np.multiply(out, x, out=out)
    np.add(out, 1.0, out=out)
    # 2**k by its bits.
    np.add(k, 1023.0, out=k)
    np.copyto(power, k, casting="unsafe")
    np.left_shift(power, 52, out=power)
    np.multiply(out, power.view(np.float64), out=out)
    np.add(out, 1.0, out=out)
    np.divide(1.0, out, out=out)


def cholesky(matrix: Floats) -> Floats:
    """Lower Cholesky factor of a positive definite matrix ``(p, p)``; zero above the diagonal."""
    a = matrix.copy()
    for j in range(len(a)):
        a[j, j] = np.sqrt(a[j, j])
        a[j + 1 :, j] /= a[j, j]
        column = a[j + 1 :, j]
        a[j + 1 :, j + 1 :] -= column[:, None] * column
    return np.tril(a)


def cholesky_batch(matrices: Floats) -> Floats:
    """Lower Cholesky factors of ``(p, p, batch)``; what is above the diagonal means nothing."""
    a = matrices.copy()
    for j in range(len(a)):
        a[j, j] = np.sqrt(a[j, j])
        a[j + 1 :, j] /= a[j, j]
        for k in range(j + 1, len(a)):
            a[k:, k] -= a[k:, j] * a[k, j]
    return a


def cholesky_solve(factor: Floats, right: Floats) -> Floats:
    """Solve ``L L' x = right`` for each of a batch, by elimination in a fixed order.

    ``factor`` is ``(p, p, batch)``, ``right`` and the result ``(p, batch)``.
    """
    x = right.copy()
    for j in range(len(x)):
        x[j] /= factor[j, j]
        x[j + 1 :] -= factor[j + 1 :, j] * x[j]
    for j in range(len(x) - 1, -1, -1):
        x[j] /= factor[j, j]
        x[:j] -= factor[j, :j] * x[j]
    return x


def inverse_of_lower(factor: Floats) -> Floats:
    """The inverse of a lower triangular matrix ``(p, p)``, by elimination in a fixed order."""
    x = np.eye(len(factor))
    for j in range(len(x)):
        x[j, : j + 1] /= factor[j, j]
        x[j + 1 :, : j + 1] -= factor[j + 1 :, j, None] * x[j, : j + 1]
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
