# ruff: noqa: E501 (programs read best on one line)
"""Sums that several sums of a program share: their names, what they replace, and where default schedules compute them. Without torch."""

import pytest

from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import differentiable_form, prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.ir.nest import Loop, statements
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.algorithm import with_operands
from dtkernels.lang.parts.shared_sums import shared_sum_names
from dtkernels.lang.schedule import Program

TWO = "Func a, f, b; In D, A, w, r; Var n, c, s; a[n] = rsum(D[n, c, s] * w[c] * A[n, c, s], c, s); f[n, c, s] = D[n, c, s] + a[n]; b[c] = rsum(A[n, c, s] * (r[n] * D[n, c, s]), n, s);"


def norm(labels: str, over: str) -> str:
    """A norm of a tensor over some of its labels, with a weight and a bias of c."""
    at, own, left = ", ".join(labels), ", ".join(over), ", ".join(x for x in labels if x not in over)
    return (f"Func mean, var, f; In A, w, z; SIn eps; Var {left}; RVar {own}; mean[{left}] = rmean(A[{at}], {own});"
            f"var[{left}] = rmean((A[{at}] - mean[{left}]) * (A[{at}] - mean[{left}]), {own});"
            f"f[{at}] = (A[{at}] - mean[{left}]) * rsqrt(var[{left}] + eps) * w[c] + z[c];")  # fmt: skip


def backward(text: str):
    found = gradient(differentiable_form(parse(text).algorithm, ("f",)), ("f",), ("A", "w", "z"))
    outputs = tuple(found.grads.values())
    return prepare_algorithm(found.backward, outputs), outputs


def names(text: str) -> dict[str, str]:
    return {name: str(shared.sum) for name, shared in shared_sum_names(parse(text).algorithm).items()}


def test_factors_along_the_labels_of_both_sums_are_shared():
    assert names(TWO) == {"a_sum": "rsum(D[n, c, s] * A[n, c, s], s)"}
    changed = with_operands(parse(TWO).algorithm, ["a_sum"])
    assert str(changed["a_sum"]) == "a_sum[n, c] = rsum(D[n, c, s] * A[n, c, s], s);"
    assert str(changed["a"]) == "a[n] = rsum(w[c] * a_sum[n, c], c);"
    assert str(changed["b"]) == "b[c] = rsum(r[n] * a_sum[n, c], n);"


@pytest.mark.parametrize("text", [
    TWO.replace("(r[n] * D[n, c, s])", "D[n, c, s] * r[s]"),  # another factor varies along s
    TWO.replace("b[c] = rsum", "b[c] = rmax"),
    TWO.replace("f[n, c, s] = D[n, c, s] + a[n];", "f[n] = a[n] * 2;").replace("Var n, c, s;", "Var n, c; RVar s;"),  # numbers: one loop reads everything once as it is
    TWO.replace("n, s);", "n);").replace("b[c]", "b[c, s]").replace("c, s); f", "s); f").replace("a[n]", "a[n, c]"),  # no label in common
])  # fmt: skip
def test_nothing_is_shared(text):
    assert names(text) == {}


def test_a_func_that_is_the_shared_sum_is_not_read_any_more():
    text = "Func t, v, f, b; In D, w; Var n, c, s; t[n, c] = rsum(D[n, c, s], s); v[n] = rsum(t[n, c] * w[c], c); f[n, c, s] = D[n, c, s] * v[n]; b[c] = rsum(D[n, c, s], n, s);"
    changed = with_operands(parse(text).algorithm, ["t_sum"])
    assert str(changed["v"]) == "v[n] = rsum(t_sum[n, c] * w[c], c);"
    assert changed.needed_by(("f", "b")) == ("t_sum", "v", "f", "b")


def kernels(labels: str, over: str, **sizes: int) -> dict[str, tuple[str, ...]]:
    """The kernels of a norm's gradients on an H100, with the large tensors that each reads."""
    algorithm, outputs = backward(norm(labels, over))
    schedule = default_schedule(algorithm, outputs, sizes, 2, target("h100"))
    return {k.name: tuple(t for t in k.reads if t in ("A", "d_f")) for k in lower(Program(algorithm, schedule))}


def test_gradients_of_norms_read_their_tensors_as_often_as_they_must():
    """A group norm's and an instance norm's in one kernel, beside one that adds up sums; a batch norm's of few channels in two, the first of which is split."""
    assert kernels("nctj", "tj", n=32, c=128, t=64, j=64) == {"d_A": ("A", "d_f"), "d_w": ()}
    few = kernels("ncij", "nij", n=64, c=64, i=512, j=512)
    assert [name for name, read in few.items() if read] == ["d_var_sum_part", "d_A"], few


@pytest.mark.parametrize("sizes", [{"x": 16384, "y": 1024}, {"x": 5003, "y": 3000}, {"x": 64, "y": 100000}])
def test_an_output_computed_beside_another_is_read_where_a_third_needs_it(sizes):
    text = "Func lo, s, f; In A; Var x, y; lo[y] = rmin(A[x, y], x); s[y] = (rmax(A[x, y], x) - lo[y]) / 255; f[x, y] = (A[x, y] - lo[y]) / s[y];"
    outputs = ("lo", "s", "f")
    algorithm = prepare_algorithm(parse(text).algorithm, outputs)
    kernels = lower(Program(algorithm, default_schedule(algorithm, outputs, sizes, 2, target("h200"))))
    last = next(k for k in kernels if k.func == "f")
    assert not any(isinstance(s, Loop) for s in statements(last.body)), "each program goes over all rows again"
