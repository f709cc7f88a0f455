"""The gate's arithmetic: right, and the same bits in whatever order BLAS adds."""

import re
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from pharos.gate import exact
from pharos.gate.exact import (
    cholesky,
    cholesky_batch,
    cholesky_solve,
    exact_product,
    inverse_of_lower,
    mean_and_deviation,
    power_of_two_above,
    sigmoid,
    twice_mann_whitney,
)

RNG = np.random.default_rng(0)


def test_sigmoid_is_right_to_the_last_digits_and_cut_at_40():
    x = np.concatenate([np.linspace(-40, 40, 50_001), [0.0, 1e-300, -0.0, 1e9, -1e9]])
    assert np.abs(sigmoid(x) / expit(np.clip(x, -40, 40)) - 1).max() < 1e-14
    assert sigmoid(np.array([[0.0], [-0.0]])).tolist() == [[0.5], [0.5]]


def test_sigmoid_takes_a_scale():
    x = RNG.normal(size=(300, 100)) * 2.0**30
    assert np.array_equal(sigmoid(x, 2.0**-30), sigmoid(x * 2.0**-30))


def test_products_of_integers_are_exact_even_where_they_outgrow_a_float():
    a = RNG.integers(-(2**20), 2**20, (5, 40)).astype(float)
    b = RNG.integers(-(2**40), 2**40, (40, 3)).astype(float)
    truth = [
        [sum(int(x) * int(y) for x, y in zip(row, column, strict=True)) for column in b.T]
        for row in a
    ]
    assert exact_product(a, b).tolist() == [[float(value) for value in row] for row in truth]


def test_a_factor_too_large_for_exact_sums_is_refused():
    with pytest.raises(ValueError, match=r"2\*\*50 is too much"):
        exact_product(np.full((1, 2), 2.0**50), np.ones((2, 1)))


def test_the_order_of_rows_does_not_change_a_mean():
    column = RNG.normal(size=1000) * 10.0 ** RNG.integers(-8, 8, 1000)
    assert mean_and_deviation(column) == mean_and_deviation(column[::-1])


def test_cholesky_solves_a_batch():
    half = RNG.normal(size=(7, 7, 4))
    matrices = np.einsum("ikb,jkb->ijb", half, half) + np.eye(7)[:, :, None]
    right = RNG.normal(size=(7, 4))
    solution = cholesky_solve(cholesky_batch(matrices), right)
    assert np.allclose(np.einsum("ijb,jb->ib", matrices, solution), right, atol=1e-12)


def test_cholesky_factors_and_its_factor_is_inverted():
    half = RNG.normal(size=(30, 30))
    matrix = half @ half.T + np.eye(30)
    factor = cholesky(matrix)
    assert np.allclose(factor @ factor.T, matrix, atol=1e-12)
    assert np.allclose(inverse_of_lower(factor) @ factor, np.eye(30), atol=1e-12)


def test_the_auc_counts_pairs_and_halves_ties():
    for _ in range(50):
        scores = RNG.integers(-3, 3, (4, 12))
        labels = RNG.random((4, 12)) < 0.4
        expected = [
            sum(
                2 * int(p > q) + int(p == q)
                for p, positive in zip(row, which, strict=True) if positive
                for q, other in zip(row, which, strict=True) if not other
            )
            for row, which in zip(scores, labels, strict=True)
        ]  # fmt: skip
        assert twice_mann_whitney(scores, labels).tolist() == expected


def test_powers_of_two_are_exact():
    values = np.array([0.75, 1.0, 3.9, 2.0**-40, 5e300])
    assert power_of_two_above(values).tolist() == [1.0, 2.0, 4.0, 2.0**-39, 2.0**999]


def test_nothing_in_the_gate_calls_what_differs_between_processors():
    """These are computed with other polynomials or in another order on wider vector units."""
    names = "exp|expm1|log|log2|log1p|power|tanh|sin|cos|dot|einsum|mean|std|var|linalg|random"
    forbidden = re.compile(rf"\bnp\.({names})\b|\.(mean|std|var)\(|\*\* *np\.")
    for module in Path(exact.__file__).parent.glob("*.py"):
        found = forbidden.findall(module.read_text(encoding="utf-8"))
        assert not found or module.name in ("promotion.py", "compare.py"), module.name
