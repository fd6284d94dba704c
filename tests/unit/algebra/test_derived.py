"""How much work derived gradients do: what they sum over, and how many Funcs and products there are."""

import pytest

from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import differentiable_form, prepare_algorithm
from dtkernels.algebra.rules.func_cse import merge_equal_funcs
from dtkernels.lang import expr as ex
from dtkernels.lang import parse
from dtkernels.lang.algorithm import Algorithm


def backward(text: str, *wanted: str, outputs: tuple[str, ...] = ("f",)) -> Algorithm:
    a = parse(text).algorithm
    return gradient(differentiable_form(a, outputs), outputs, wanted or a.inputs).backward


# -- index arithmetic -----------------------------------------------------------------------------------------------------

SUM = "Func f; In A, W; Var s, c; RVar k; Extent s = A[0]; Extent k = W[1]; f[s, c] = rsum(A[{}, c] * W[c, k], k);"
STRIDED = "rsum(where(({0}) % 2 == 0, d_f[({0}) / 2, c], 0) * W[c, k], k)"


@pytest.mark.parametrize("index, gathered", [
    ("s + k - 3", "rsum(d_f[A_0 - k + 3, c] * W[c, k], k)"),
    ("k + s - 3", "rsum(d_f[A_0 - k + 3, c] * W[c, k], k)"),
    ("-3 + s + k", "rsum(d_f[A_0 + 3 - k, c] * W[c, k], k)"),
    ("3 - k + s", "rsum(d_f[A_0 - 3 + k, c] * W[c, k], k)"),
    ("s - (3 - k)", "rsum(d_f[A_0 + 3 - k, c] * W[c, k], k)"),
    ("3 - s + k", "rsum(d_f[3 + k - A_0, c] * W[c, k], k)"),
    ("s + 2 * k - 3", "rsum(d_f[A_0 - 2 * k + 3, c] * W[c, k], k)"),
    ("2 * s - s + k", "rsum(d_f[A_0 - k, c] * W[c, k], k)"),
    ("2 * s + k", STRIDED.format("A_0 - k")),
    ("s + k - 1 + s", STRIDED.format("A_0 - k + 1")),
    ("2 * s - k", STRIDED.format("A_0 + k")),
    ("(s + k - 3) / 2", "rsum(rsum(d_f[2 * A_0 + s_in - k + 3, c], s_in) * W[c, k], k)"),
    ("(s / 2 + k) / 2", "rsum(rsum(d_f[2 * (2 * A_0 + s_in - k) + s_in2, c], s_in2, s_in) * W[c, k], k)"),
    ("(s + k - 3) % len(s)", "rsum(d_f[(A_0 - k + 3) % len(s), c] * W[c, k], k)"),
    ("(s / 3) % len(s)", "rsum(where(floor(s / 3) % len(s) == A_0, d_f[s, c] * cast(f_sum_kept[c], fp32), 0), s)"),  # some are met twice, some never
])  # fmt: skip
def test_an_index_is_solved_for_the_results_own_label(index, gathered):
    assert str(backward(SUM.format(index), "A")["d_A"].expr) == gathered


@pytest.mark.parametrize("index", ["-k / 3 + s", "0 + k", "s + 0"])
def test_index_arithmetic_that_is_read_stays(index):
    """A division rounds down, a negative one too; a label by itself would have the extent of the dimension."""
    a = backward(SUM.format(index.replace("-k", "(-k)")), "W")
    assert {str(n) for d in a.definitions for n in ex.accesses(d.expr) if n.tensor == "A"} == {f"A[{index}, c]"}


def test_a_strided_product_stays_one():
    a = backward("Func f; In A, W, z; Var o, x; RVar c, k; f[o, x] = rdot(A[c, 2 * x + k - 2], W[o, c, k], c, k) + z[x];", "A")
    assert str(a["d_A"].expr) == "rdot(where((A_1 - k + 2) % 2 == 0, d_f[o, (A_1 - k + 2) / 2], 0), W[o, c, k], o, k)"


def test_a_label_is_not_mistaken_for_one_that_a_sum_inside_runs_over():
    a = backward("Func f; In A, B, w; Var x; RVar k; Extent x = A[0]; f[x] = rsum(A[x + k] * w[k], k) * rsum(B[x - k] * w[k], k);", "A")
    assert str(a["d_A"].expr) == "rsum(d_f[A_0 - k] * rsum(B[A_0 - k - k_] * w[k_], k_) * w[k], k)"


# -- what is computed twice -----------------------------------------------------------------------------------------------


def products(a: Algorithm) -> int:
    """Matrix products that ``a`` makes."""
    return sum(isinstance(n, ex.Dot) for d in a.definitions for n in d.expr.walk())


NORMS = "a[x] = rdot(A[x, k], A[x, k], k); b[y] = rdot(B[y, k], B[y, k], k);"


@pytest.mark.parametrize("text, count", [
    ("Func a, b, f; In A, B; Var x, y; RVar k;" + NORMS + "f[x, y] = rdot(A[x, k], B[y, k], k) * rsqrt(a[x] * b[y]);", 2),  # the product itself is read from f
    ("Func a, f; In A; Var x, y; RVar k; a[x] = rdot(A[x, k], A[x, k], k); f[x, y] = rdot(A[x, k], A[y, k], k) * rsqrt(a[x]) * rsqrt(a[y]);", 3),
])  # fmt: skip
def test_a_product_is_made_once(text, count):
    a = backward(text)
    assert products(a) == count, str(a)


def test_equal_funcs_are_one():
    sums = "g[x, y] = rdot(A[x, k], B[k, y], k); h[x, y] = rdot(A[x, k], C[k, y], k); f[x, y] = (g[x, y] + h[x, y]) * u[x];"
    a = backward("Func g, h, f; In A, B, C, u; Var x, y; RVar k;" + sums)
    assert a.funcs == ("g", "h", "d_h", "d_A", "d_B", "d_C", "d_u")


def test_products_along_labels_of_other_extents_are_others():
    text = "Func f, g; In A, B, u; Var x; RVar y, i, j; Extent j = {}; f[x] = rsum(u[y] * rdot(A[x, i + 1], B[y, i], i), y); g[x] = rsum(rdot(A[x, j + 1], B[y, {}], j), y);"
    alike, other = (merge_equal_funcs(parse(text.format(size, index)).algorithm, ()) for size, index in (("B[1]", "j"), ("3", "j + 0")))
    assert [products(a) for a in (alike, other)] == [1, 2]


def test_a_result_is_not_taken_for_what_is_computed():
    """It may be rounded to 16 bits."""
    text = "Func s, f; In A, B, u; Var x, y; RVar k; s[x, y] = rdot(A[x, k], B[y, k], k); f[x] = rsum(u[y] * rdot(A[x, k], B[y, k], k), y);"
    assert [products(merge_equal_funcs(parse(text).algorithm, keep)) for keep in (("f",), ("s", "f"))] == [1, 2]


def test_a_total_of_sums_along_one_label_is_no_row_of_another():
    """``A`` is read along two labels. The sum over ``y`` alone is one number, where the rule for totals had given it a label that it lacks."""
    found = backward("Func t, f; In A, B; Var y; RVar x, z, l; t[z, y, l, x] = B[y] - A[x, l]; f[y] = rsum(rsum(t[z, y, l, x], x) - A[z, l], z, l);", "A")
    for d in found.definitions:
        assert ex.free_labels(d.expr) <= {*d.labels}, d


# -- gathered rows --------------------------------------------------------------------------------------------------------


def test_gradients_of_a_product_of_gathered_rows_are_products():
    """A table may have many more rows than are picked: the product comes before the sums of rows. The factor's gradient took 1.3 ms, predicted, for 53 us."""
    a = backward("Func f; In E, t, W; Var m, n; RVar k; f[m, n] = rdot(E[t[m], k], W[n, k], k);", "E", "W")
    assert str(a["d_W"].expr) == "rdot(d_f[m, n], E[t[m], k], m)"
    (made,) = (d for d in a.definitions if any(isinstance(n, ex.Dot) for n in d.expr.walk()) and d.name != "d_W")
    assert made.labels == ("m", "k") and str(made.expr) == "rdot(d_f[m, n], W[n, k], n)"
    assert any(str(d.expr) == f"rsum(where(t[m] == E_0, {made.name}[m, k], 0), m)" for d in a.definitions)


def test_a_computed_factor_beside_gathered_rows_makes_a_product():
    a = prepare_algorithm(parse("Func f; In A, E, t; Var x, k; RVar m; f[x, k] = rsum(exp(A[m, x]) * E[t[m], k], m);").algorithm, ("f",))
    assert str(a["f"].expr) == "rdot(cast(exp(A[m, x]), fp32), cast(E[t[m], k], fp32), m)"
