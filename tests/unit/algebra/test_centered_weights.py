"""Which sums of a derived backward have centered weights, and what forward saves for them."""

import pytest

from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import differentiable_form
from dtkernels.lang import parse

SCORE = "rdot(Q[m, d], K[l, d], d)"


def attention(score: str, inputs: str = "", total: str = "rsum(exp(s[m, l]), l)", out: str = "rdot(exp(s[m, l]), V[l, n], l) / t[m]", more: str = "") -> str:
    return f"Func s, t, out; In Q, K, V{inputs}; Var m, n; RVar l, d; s[m, l] = {score}; t[m] = {total}; out[m, n] = {out};{more}"


def derived(text: str, *wanted: str, outputs: tuple[str, ...] = ("out",)):
    return gradient(differentiable_form(parse(text).algorithm, outputs), outputs, wanted)


def test_a_slope_beside_a_mask():
    text = attention(f"where(l <= m, {SCORE} + a[0] * (l - m), -inf)", ", a")
    found = derived(text, "a")
    assert "t_mean" in found.forward_outputs
    assert str(found.forward["t_mean"]) == "t_mean[m] = cast(where(t[m] == 0, 0, rsum(exp(s[m, l]) * (l - m), l) / t[m]), fp32);"
    sums = [str(d) for d in found.backward.definitions if d.name == "d_a"]
    assert sums == ["d_a[a_0] = where(0 == a_0, rsum(rsum(where(l <= m, d_s[m, l] * (l - m - cast(t_mean[m], fp32)), 0), m), l), 0);"]


def test_a_slope_of_several_batches():
    text = "Func s, t, out; In Q, K, V, a; Var b, h, m, n; RVar l, d; s[b, h, m, l] = where(l <= m, rdot(Q[b, h, m, d], K[b, h, l, d], d) + a[h] * (l - m), -inf);"
    text += "t[b, h, m] = rsum(exp(s[b, h, m, l]), l); out[b, h, m, n] = rdot(exp(s[b, h, m, l]), V[b, h, l, n], l) / t[b, h, m];"
    assert str(derived(text, "a").backward["d_a"]) == (
        "d_a[h] = rsum(where(l <= m, d_s[b, h, m, l] * (l - m - cast(t_mean[b, h, m], fp32)), 0), b, m, l);"
    )


def test_a_sink_balances_the_scores():
    text = attention(f"{SCORE} * a[m]", ", a, z", total="rsum(exp(s[m, l]), l) + exp(z[m])")
    assert str(derived(text, "a").backward["d_a"]) == (
        "d_a[m] = rsum(d_s[m, l] * (s_dot[m, l] - cast(t_mean[m], fp32)), l) - cast(t_mean[m], fp32) * (d_t[m] * t_rest[m]);"
    )


def test_a_term_without_the_label_of_the_row_goes():
    text = attention(f"{SCORE} + l * a[m] - m * a[m]", ", a")
    assert str(derived(text, "a").backward["d_a"]) == "d_a[m] = rsum(d_s[m, l] * (l - cast(t_mean[m], fp32)), l);"


def test_it_is_shared_by_gradients_with_the_same_weights():
    found = derived(attention(f"{SCORE} * a[m] * b[0]", ", a, b"), "a", "b")
    assert [o for o in found.forward_outputs if "mean" in o] == ["t_mean", "t_mean2"]  # the weights are b * dot and a * dot
    found = derived(attention(f"{SCORE} + l * a[m] + l * b[0]", ", a, b"), "a", "b")
    assert [o for o in found.forward_outputs if "mean" in o] == ["t_mean"]


def test_a_temperature_of_a_softmax_and_of_its_logarithm():
    softmax = "Func t, out; In A, a; Var x, y; RVar z; t[x] = rsum(exp(A[x, z] * a[x]), z); out[x, y] = exp(A[x, y] * a[x]) / t[x];"
    for text in (softmax, softmax.replace("exp(A[x, y] * a[x]) / t[x]", "A[x, y] * a[x] - log(t[x])")):
        found = derived(text, "a")
        assert not any("mean" in o for o in found.forward_outputs)
        assert str(found.backward["d_a"]) == "d_a[x] = rsum(d_t_scores[x, y] * (A[x, y] - t_mean[x]), y);"


def test_a_result_that_is_cast():
    text = attention(f"{SCORE} + a[m] * l", ", a", out="cast(rdot(exp(s[m, l]), V[l, n], l) / t[m], bf16)")
    assert str(derived(text, "a").backward["d_a"]) == "d_a[m] = cast(rsum(d_s[m, l] * (l - cast(t_mean[m], fp32)), l), fp32);"


UNCHANGED = {
    "no gradient of that kind": (attention(f"{SCORE} * a[m]", ", a"), ("Q", "K", "V"), ("out",)),
    "a logarithm": ("Func out; In A, a; Var x; RVar y; out[x] = log(rsum(exp(A[x, y] * a[x]), y));", ("A", "a"), ("out",)),
    "an output that moves": (attention(f"{SCORE} + a[m] * l", ", a", more=" lse[m] = log(t[m]);").replace("out;", "out, lse;", 1), ("a",), ("out", "lse")),
    "weights with a label of their own": (attention(f"{SCORE} + rsum(T[l, c] * a[m, c], c)", ", T, a").replace("l, d;", "l, d, c;", 1), ("a",), ("out",)),
    "a table by distance": (attention(f"{SCORE} + T[l - m + len(m) - 1]", ", T"), ("T",), ("out",)),
    "a bias of a key": (attention(f"{SCORE} + a[l]", ", a"), ("a",), ("out",)),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_other_programs_save_no_mean(name):
    text, wanted, outputs = UNCHANGED[name]
    found = derived(text, *wanted, outputs=outputs)
    assert not any("mean" in o for o in (*found.forward_outputs, *found.backward.inputs)) and "scores" not in str(found.backward)
