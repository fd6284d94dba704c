# ruff: noqa: E501 (programs read best on one line)
"""What gradients of windows become: plain products, and sums that read an element once. Torch is not needed."""

import pytest

from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import differentiable_form, prepare_algorithm
from dtkernels.algebra.rules.canonicalize import row_of
from dtkernels.algebra.rules.indices.divided_indices import divide_indices
from dtkernels.lang import expr as ex
from dtkernels.lang import parse


def lowered(text: str, *wanted: str, inputs: bool = False) -> dict[str, str]:
    """The definitions of the backward of ``f`` as they are lowered, by name; with ``inputs`` also those that it reads."""
    algorithm = parse(text).algorithm
    made = gradient(differentiable_form(algorithm, ("f",)), ("f",), wanted)
    backward = prepare_algorithm(made.backward, tuple(made.grads.values()))
    return {d.name: str(d).rstrip(";") for d in backward.definitions} | ({"inputs": ", ".join(backward.inputs)} if inputs else {})


STRIDED = "Func f; In A, W; Var b, o, x; RVar c, r; Extent x = 2 * (A[2] - 1) + 2 * (W[2] - 1) + 1 - 2; f[b, o, x] = rdot(where((x + 1 - 2 * r) % 2 == 0, A[b, c, (x + 1 - 2 * r) / 2], 0), W[c, o, r], c, r);"
APART = "Func f; In A, W; Var b, o, y, x; RVar c, r, s; Extent y = 3 * (A[2] - 1) + W[2]; Extent x = 2 * (A[3] - 1) + W[3]; f[b, o, y, x] = rdot(where((y - r) % 3 == 0 and (x - s) % 2 == 0, A[b, c, (y - r) / 3, (x - s) / 2], 0), W[c, o, r, s], c, r, s);"


def test_a_strided_transposed_convolution_has_plain_products_as_gradients():
    assert lowered(STRIDED, "A", "W") == {
        "d_A": "d_A[b, c, A_2] = rdot(d_f[b, o, 2 * A_2 - 1 + 2 * r], W[c, o, r], o, r)",
        "d_W": "d_W[c, o, r] = rdot(d_f[b, o, 2 * x_step - 1 + 2 * r], A[b, c, x_step], b, x_step)",
    }


def test_strides_that_leave_taps_out_are_decided_in_each_dimension():
    assert lowered(APART, "A", "W") == {
        "d_A": "d_A[b, c, A_2, A_3] = rdot(d_f[b, o, 3 * A_2 + r, 2 * A_3 + s], W[c, o, r, s], o, r, s)",
        "d_W": "d_W[c, o, r, s] = rdot(d_f[b, o, 3 * y_step + r, 2 * x_step + s], A[b, c, y_step, x_step], b, y_step, x_step)",
    }


POOL = "Func f; In A; Var c, x, v; RVar r; Extent r = 8; Extent v = A[1]; Extent x = A[1] - 13; f[c, x] = rmax(where(x + 3 * r >= 4 and x + 3 * r < len(v) + 4, A[c, x + 3 * r - 4], -inf), r);"


def test_the_gradient_of_a_maximum_over_windows_reads_the_stored_maximum_and_each_element_once():
    found = lowered(POOL, "A", inputs=True)
    assert found["d_A"] == "d_A[c, A_1] = rsum(where(A[c, A_1] == f[c, A_1 - 3 * r + 4], d_A_window[c, A_1 - 3 * r + 4], 0), r)"
    assert found["d_A_window"] == "d_A_window[c, x] = d_f[c, x] / d_f_term_sum[c, x]" and found["inputs"] == "A, d_f, f"


def test_a_maximum_of_computed_terms_is_made_again():
    """Forward may return it with another rounding."""
    found = lowered(POOL.replace("A[c, x + 3 * r - 4], -inf", "exp(A[c, x + 3 * r - 4]), -inf"), "A", inputs=True)
    assert "f" not in found["inputs"].split(", ")


def test_phases_of_equally_many_terms_differ_in_the_weights_alone():
    text = APART.replace("Extent y =", "Extent r = 3; Extent s = 4; Extent y =")
    product = str(prepare_algorithm(parse(text).algorithm, ("f",))["f_phases"]).rstrip(";")
    assert product == "f_phases[y_phase, x_phase, b, o, y_step, x_step] = rdot(A[b, c, y_step - r_step, x_step - s_step], W[c, o, y_phase + 3 * r_step, x_phase + 2 * s_step], c, r_step, s_step)"


def test_phases_of_unequally_many_terms_keep_their_condition():
    """An infinity beside a term that is not there makes no NaN."""
    text = APART.replace("Extent y =", "Extent r = 3; Extent s = 3; Extent y =")
    assert "where(x_phase + 2 * s_step < len(s), A[" in str(prepare_algorithm(parse(text).algorithm, ("f",))["f_phases"])


def test_phases_whose_elements_lie_apart_keep_their_conditions():
    text = "Func f; In A, W; Var b, o, x; RVar c, r; Extent x = 3 * (A[2] - 1) + 2 * (W[2] - 1) + 1; f[b, o, x] = rdot(where((x - 2 * r) % 3 == 0, A[b, c, (x - 2 * r) / 3], 0), W[c, o, r], c, r);"
    assert "where(x_phase * 2 % 3 + 3 * r_step < len(r), " in str(prepare_algorithm(parse(text).algorithm, ("f",))["f_phases"])


def test_a_sum_over_positions_leaves_the_few_taps_of_its_gradient():
    """``v`` goes over ``len(x) + len(r) - 1`` positions, of which each element meets as many as there are taps."""
    text = "Func p, f; In A; In W; Var c, r; RVar v; Extent r = W[0]; Extent v = A[1] + W[0] - 1; p[c, r] = rsum(A[c, v - r], v); f[c, r] = p[c, r] * p[c, r] * W[r];"
    assert lowered(text, "A")["d_A"].endswith(", r)"), lowered(text, "A")


ROUND = "Func f; In A; Var b, u, i, h; Extent h = A[1]; Extent u = A[1] / 7; Extent i = 7; f[b, u, i] = A[b, (7 * u + i + {shift}) % len(h)];"


def test_a_gradient_of_what_goes_round_by_two_labels_reads_each_element_once():
    """Of a window of a rolled image too; not where labels count further than the extent."""
    assert lowered(ROUND.format(shift=3), "A")["d_A"] == "d_A[b, A_1] = d_f[b, (A_1 - 3) % len(h) / 7, (A_1 - 3) % len(h) % 7]"
    further = ROUND.replace("A[1] / 7", "A[1]").format(shift=3)
    assert "rsum" in lowered(further, "A")["d_A"]


def test_a_number_beside_picked_elements_is_no_operand_of_a_product():
    found = lowered("Func f; In W, t; Var b, y; f[b, y] = W[t[b], y] * sqrt(len(y));", "W")
    assert found["d_W"].startswith("d_W[W_0, y] = sqrt(len(y)) * rsum(where("), found


def test_rows_of_two_labels_have_one_name_each_in_a_sum_and_where_they_are_written():
    algorithm = prepare_algorithm(parse("Func f; In V; Var o, i, k; RVar j, l; f[o, i, k] = V[o, i, k] / sqrt(rsum(V[o, j, l] * V[o, j, l], j, l));").algorithm, ("f",))
    assert str(algorithm["f_sum"]) == "f_sum[o] = rsum(V[o, i, k] * V[o, i, k], i, k);"


DIGITS = "Func s, f; In Q, K; Var b, u, i, j; RVar d; Extent u = 8; Extent i = Q[1] / 8; Extent j = K[1] / 8; s[b, {order}] = rdot(Q[b, 8 * i + u, d], K[b, 8 * j + u, d], d); f[b, {order}] = exp(s[b, {order}]);"


@pytest.mark.parametrize("order", ["u, i, j", "i, u, j", "i, j, u"])
def test_a_gradient_at_a_digit_and_a_step_is_a_product_by_phase(order):
    found = lowered(DIGITS.format(order=order), "Q")
    assert found["d_Q_phases"].startswith("d_Q_phases[u, b, i, d] = rdot(") and found["d_Q_phases"].endswith("K[b, 8 * j + u, d], j)")
    assert found["d_Q"] == "d_Q[b, Q_1, d] = d_Q_phases[Q_1 % 8, b, Q_1 / 8, d]"


def test_a_label_with_fewer_values_than_the_step_has_no_element_of_some_rows():
    found = lowered("Func f; In A; Var b, u, i; Extent u = 7; Extent i = A[1] / 8; f[b, u, i] = exp(A[b, 8 * i + u]);", "A")
    assert "where(A_1 % 8 + 8 * u_step < len(u), " in found["d_A"], found["d_A"]


def test_a_remainder_that_a_label_names_leaves_no_sum():
    found = lowered("Func o, f; In A; Var b, m, u, i; Extent u = 8; Extent i = A[2]; Extent m = 8 * A[2]; o[b, u, i] = A[b, u, i] * A[b, u, i]; f[b, m] = o[b, m % 8, m / 8];", "A")
    assert "rsum" not in found["d_A"] and "8 * i + u" in found["d_A"]


SUBPIXEL = "Func u, f; In X, W, z; Var b, c, y, x; RVar i; Extent y = 2 * X[2]; Extent x = 3 * X[3]; u[b, c, y, x] = rdot(X[b, i, y / 2, x / 3], W[c, y % 2, x % 3, i], i) + z[c]; f[b, c, y, x] = u[b, c, y, x] * sigmoid(u[b, c, y, x]);"


def test_a_product_of_a_remainder_and_a_quotient_is_one_by_phase():
    algorithm = prepare_algorithm(parse(SUBPIXEL).algorithm, ("f",))
    assert str(algorithm["u_phases"]) == "u_phases[y_phase, x_phase, b, c, y_step, x_step] = rdot(X[b, i, y_step, x_step], W[c, y_phase + 0, x_phase + 0, i], i) + z[c];"
    assert algorithm.funcs == ("u_phases", "f_phases", "f") and str(algorithm["f"]).endswith("f_phases[y % 2, x % 3, b, c, y / 2, x / 3];")


def test_its_gradients_are_plain_products_of_one_adjoint_by_phase():
    found = lowered(SUBPIXEL, "X", "W", "z")
    assert found["d_X"] == "d_X[b, i, X_2, X_3] = rdot(d_u_phases[y_in, x_in, b, c, X_2, X_3], W[c, y_in + 0, x_in + 0, i], c, y_in, x_in)"
    assert found["d_W"].endswith("where(W_2 < 3, rdot(d_u_phases[W_1 + 0, W_2 + 0, b, c, y_step, x_step], X[b, i, y_step, x_step], b, y_step, x_step), 0), 0)")
    assert found["d_z"].startswith("d_z[c] = rsum(d_u_phases[y_phase, x_phase, b, c, ") and "d_u" not in found


@pytest.mark.parametrize("operands", [
    "X[b, i, x / 2], W[c, i, x % 2] * z[x + i]",  # the label itself too
    "X[b, i, x / 2, x % 2], W[c, i]",  # both digits of one operand
    "X[b, i, x / 2], W[c, i, x / 2]",
    "X[b, i, x / 2], W[c, i, x % 3]",
    "X[b, i, x / 2], W[c, i, (x + 1) % 2]",
])  # fmt: skip
def test_other_products_keep_their_labels(operands):
    text = "Func f; In X, W, z; Var b, c, x; RVar i; Extent x = z[0]; f[b, c, x] = rdot(" + operands + ", i) + z[0];"
    assert prepare_algorithm(parse(text).algorithm, ("f",)).funcs == ("f",)


@pytest.mark.parametrize(("before", "after"), [
    ("A[(4 * x + p) / 4, (4 * x + p) % 4]", "A[x + 0, p + 0]"),
    ("A[(4 * x + 2 * q + r) / 4, (4 * x + 2 * q + r) % 4]", "A[x + 0, 2 * q + r]"),
    ("A[(8 * x + 4 + p) / 4, (8 * x + 6) % 4]", "A[2 * x + 1, 2]"),
    ("floor((4 * x + p) / 4) + A[0, 0]", "x + A[0, 0]"),
    ("where(x < 4, A[(4 * y + x) / 4, x], 0)", "where(x < 4, A[y + 0, x], 0)"),
    ("where(x < 5, A[(4 * y + x) / 4, x], 0)", "where(x < 5, A[(4 * y + x) / 4, x], 0)"),
    ("A[(4 * x - p) / 4, (4 * x + p + 1) % 4]", "A[(4 * x - p) / 4, (4 * x + p + 1) % 4]"),
    ("A[(2 * x + p) / 4, x / 4]", "A[(2 * x + p) / 4, x / 4]"),
    ("(4 * x + p) / 4 + A[0, 0]", "(4 * x + p) / 4 + A[0, 0]"),  # a value, which is not rounded
])  # fmt: skip
def test_indices_are_divided_where_what_is_left_is_smaller(before, after):
    text = "Func f; In A, B; Var x, y, p, q, r; Extent p = 4; Extent q = 2; Extent r = 2; f[x, y, p, q, r] = where(B[x, y] > 0, {}, 0);"
    algorithm = divide_indices(parse(text.format(before)).algorithm)
    assert str(algorithm["f"]) == str(parse(text.format(after)).algorithm["f"])


LOCAL = (
    "Func s, t, f; In Q, K, V; SIn scale; Var b, w, m, n; RVar l, d; Extent l = 2 * Q[2]; s[b, w, m, l] = where(l <= m + len(m), scale * rdot(Q[b, w, m, d], K[b, len(m) * w + l - len(m), d], d), -inf);"
    " t[b, w, m] = rsum(exp(s[b, w, m, l]), l); f[b, w, m, n] = rdot(exp(s[b, w, m, l]), V[b, len(m) * w + l - len(m), n], l) / t[b, w, m];"
)


def test_exponentials_that_are_read_at_index_arithmetic_are_shifted_by_the_saved_logarithm_too():
    """Otherwise those of backward are not shifted at all, and overflow. Their sum with values is a product."""
    found = lowered(LOCAL, "Q", "K", "V", inputs=True)
    assert "t_log" in found["inputs"] and "t" not in found
    assert found["d_V"].startswith("d_V[b, V_1, n] = rdot(d_f[b, w, m, n], where(") and "exp(s[b, w, m, V_1 - len(m) * w + len(m)] - " in found["d_V"]


@pytest.mark.parametrize(("node", "row"), [
    ("s[b, w, m, l]", "b, w"), ("s[x, y, m, l]", "x, y"), ("s[b, w, y, x - y]", "b, w"), ("s[b, w, y, x * y + 1]", "b, w"), ("s[b, x, y, x]", "b, x"),
    ("s[b, w + 1, m, l]", None), ("r[b, w, m, l]", None), ("s[b, w, m, l] + 1", None), ("s[b, w, m]", None),
])  # fmt: skip
def test_elements_of_one_row_are_found_at_any_index(node, row):
    text = "Func f; In r, s; Var b, w, m, l, x, y; f[b, w, m, l, x, y] = r[b, w, m, l] * s[b, w, m, l] + r[b, w, x, y] + ({});"
    e = parse(text.format(node) if node != "s[b, w, m]" else text.format("r[b, w, m, l]")).algorithm["f"].expr.right
    pattern = ex.Access("s", tuple(map(ex.Label, "bwml")))
    e = ex.Access("s", tuple(map(ex.Label, "bwm"))) if node == "s[b, w, m]" else e
    found = row_of(pattern, e, ("b", "w"))
    assert (found and ", ".join(map(str, found))) == row


def test_sums_of_one_remainder_share_the_label_that_counts_its_places():
    """Of two products that a gradient adds up: their loops are one then."""
    found = lowered("Func f; In X, W, V; Var c, x; RVar i; Extent x = 4 * X[0]; f[x, c] = rdot(X[x / 4, i], W[x % 4, i, c], i) * rdot(X[x / 4, i], W[x % 4, i, c] * V[i], i);", "W")
    assert found["d_W"].count("x_step") >= 4 and "x_step2" not in found["d_W"]
