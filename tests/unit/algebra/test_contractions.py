"""Sums over several labels: which factors are summed first, and in which dtype."""

import pytest

from dtkernels.algebra.operand_types import products
from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.lang import parse

BILINEAR = "Func f; In H, W, D; Var b, i, j; RVar k, l; f[b, i, j] = rsum({}, k, l);"


@pytest.mark.parametrize("terms", ["H[b, i, k] * W[k, l] * D[b, j, l]", "H[i, k] * W[b, k, l] * D[j, l]", "D[b, l, j] * H[b, k, i] * W[k, l]"])
def test_products_of_three_inputs_are_in_their_dtype(terms):
    found = products(prepare_algorithm(parse(BILINEAR.format(terms)).algorithm, ("f",)))
    assert len(found) == 2 and not any(wanted.fixed for *_, wanted in found)


def test_a_computed_factor_stays_in_float32():
    found = products(prepare_algorithm(parse(BILINEAR.format("exp(H[b, i, k]) * W[k, l] * D[b, j, l]")).algorithm, ("f",)))
    assert [wanted.fixed for *_, wanted in found] == [False, True]


@pytest.mark.parametrize("terms", ["rdot(X[x, k], W[y, k], k) + z[y] + 3 * s * rdot(a[x, r], B[y, r], r)", "s * rdot(B[y, r], a[x, r], r) + z[y] + rdot(X[x, k], W[y, k], k)"])
def test_numbers_of_added_products_multiply_an_operand(terms):
    text = f"Func a, f; In X, W, A, B, z; SIn s; Var x, y; RVar k, r; a[x, r] = rdot(X[x, k], A[r, k], k); f[x, y] = {terms};"
    found = prepare_algorithm(parse(text).algorithm, ("f",))
    assert "*" in str(found["a"].expr) and "*" not in str(found["f"].expr)
    kept = prepare_algorithm(parse(text).algorithm, ("f", "a"))
    assert "*" not in str(kept["a"].expr) and "*" in str(kept["a_scaled"].expr) and "*" not in str(kept["f"].expr)


@pytest.mark.parametrize("weights, summed", [("g[b, c]", True), ("g[b, c] * exp(g[b, c])", True), ("g[b, c] * M[c, o]", False), ("g[b, c] * exp(y[b, c, o])", False)])
def test_a_weighted_sum_of_products_is_a_product_of_a_weighted_sum(weights, summed):
    """The gradients of a quadratic form made 4096 x 64 x 256 products so, 2793 us on an H200, and sums of them alone were read."""
    text = f"Func y, f; In X, M, W, g; Var b, c, o; RVar k; y[b, c, o] = rdot(X[b, k] - M[c, k], W[k, o], k); f[b, o] = rsum({weights} * y[b, c, o], c);"
    made = prepare_algorithm(parse(text).algorithm, ("f",))
    assert ("y" not in made.funcs) == summed, str(made)


def test_a_product_that_is_read_elsewhere_is_summed_as_it_is():
    text = "Func y, f; In X, W, g; Var b, c, o; RVar k; y[b, c, o] = rdot(X[b, c, k], W[k, o], k); f[b, o] = rsum(g[b, c] * y[b, c, o], c);"
    assert "y" in prepare_algorithm(parse(text).algorithm, ("f", "y"))["f"].expr.__str__()
