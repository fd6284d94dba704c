# ruff: noqa: E501 (programs read best on one line)
"""What the default schedule makes of programs that move memory, at sizes no block divides: by the interpreter, against float64."""

import itertools

import pytest
import torch

import dtkernels
from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang import expr as ex
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program
from dtkernels.runtime.reference.evaluator import evaluate


def kernels(text: str, sizes: dict[str, int], itemsize: int = 4):
    """The program with the default schedule, and its kernels."""
    program = parse(text)
    algorithm = prepare_algorithm(program.algorithm, program.outputs())
    found = Program(algorithm, default_schedule(algorithm, program.outputs(), sizes, itemsize, target("h200")))
    return found, lower(found)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def near(got, want, terms: int) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6 * terms**0.5 * max(1.0, b.abs().max().item()))


#: one kernel for several outputs -> (algorithm, in torch, inputs)
TOGETHER = {
    "what a norm is of": ("Func h, q, f; In A, B, w; Var x; RVar y; h[x, y] = A[x, y] + B[x, y]; q[x] = rmean(h[x, y] * h[x, y], y); f[x, y] = h[x, y] * rsqrt(q[x] + 0.001) * w[y]; h.compile(); f.compile();",
        lambda a, b, w: (a + b, (a + b) * torch.rsqrt((a + b).square().mean(-1, keepdim=True) + 0.001) * w), ("xy", "xy", "y")),
    "its root as well": ("Func h, q, f; In A, B, w; Var x; RVar y; h[x, y] = A[x, y] + B[x, y]; q[x] = rmean(h[x, y] * h[x, y], y); f[x, y] = h[x, y] * rsqrt(q[x] + 0.001) * w[y]; q.compile(); h.compile(); f.compile();",
        lambda a, b, w: ((a + b).square().mean(-1), a + b, (a + b) * torch.rsqrt((a + b).square().mean(-1, keepdim=True) + 0.001) * w), ("xy", "xy", "y")),
    "mean and variance": ("Func m, f; In A; Var x; RVar y; m[x] = rmean(A[x, y], y); f[x] = rmean((A[x, y] - m[x]) * (A[x, y] - m[x]), y); m.compile(); f.compile();",
        lambda a: (a.mean(-1), a.var(-1, correction=0)), ("xy",)),
    "mean, variance and norm": ("Func m, v, f; In A; Var x; RVar y; m[x] = rmean(A[x, y], y); v[x] = rmean((A[x, y] - m[x]) * (A[x, y] - m[x]), y); f[x, y] = (A[x, y] - m[x]) * rsqrt(v[x] + 0.001); m.compile(); v.compile(); f.compile();",
        lambda a: (a.mean(-1), a.var(-1, correction=0), (a - a.mean(-1, keepdim=True)) * torch.rsqrt(a.var(-1, correction=0, keepdim=True) + 0.001)), ("xy",)),
    "the scale of rows": ("Func s, f; In A; Var x; RVar y; s[x] = rmax(abs(A[x, y]), y) * 0.5; f[x, y] = A[x, y] / s[x]; s.compile(); f.compile();",
        lambda a: (a.abs().amax(-1) * 0.5, a / a.abs().amax(-1, keepdim=True) / 0.5), ("xy",)),
    "the logarithm of a softmax's sum": ("Func t, l, f; In A; Var x; RVar y; t[x] = rsum(exp(A[x, y]), y); l[x] = log(t[x]); f[x, y] = exp(A[x, y]) / t[x]; l.compile(); f.compile();",
        lambda a: (a.logsumexp(-1), a.softmax(-1)), ("xy",)),
    "it, told last": ("Func t, l, f; In A; Var x; RVar y; t[x] = rsum(exp(A[x, y]), y); l[x] = log(t[x]); f[x, y] = exp(A[x, y]) / t[x]; f.compile(); l.compile();",
        lambda a: (a.softmax(-1), a.logsumexp(-1)), ("xy",)),
    "what is summed under a mask": ("Func h, q, f; In A, B; Var x; RVar y; h[x, y] = A[x, y] + B[x, y]; q[x] = rsum(where(y <= x, h[x, y], 0), y); f[x, y] = h[x, y] * q[x]; h.compile(); f.compile();",
        lambda a, b: (a + b, (a + b) * (a + b).tril().sum(-1, keepdim=True)), ("xy", "xy")),
    "what is read beside itself": ("Func h, q, f; In A, B; Var x; RVar y; h[x, y] = A[x, y] + B[x, y]; q[x] = rsum(h[x, y], y); f[x, y] = h[x, y + 1] - q[x]; h.compile(); f.compile();",
        lambda a, b: (a + b, torch.nn.functional.pad((a + b)[:, 1:], (0, 1)) - (a + b).sum(-1, keepdim=True)), ("xy", "xy")),
}  # fmt: skip
SIZES = [{"x": 37, "y": 301}, {"x": 5, "y": 4099}, {"x": 1, "y": 1}, {"x": 130, "y": 33}, {"x": 3, "y": 20011}]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: "x".join(map(str, s.values())))
@pytest.mark.parametrize("name", TOGETHER)
def test_outputs_that_rows_are_read_for_share_a_kernel(name, sizes):
    text, truth, inputs = TOGETHER[name]
    program, found = kernels(text, sizes)
    few_long_rows = sizes["y"] > 1000 * sizes["x"]  # their sums may be split, and merged by a second kernel
    assert len(found) <= 1 + few_long_rows and len({kernel.func for kernel in found}) == 1, str(program.schedule)
    given = [random(*(sizes[c] for c in labels), seed=i) for i, labels in enumerate(inputs)]
    got = getattr(dtkernels.compile(str(program)), found[-1].name.removesuffix("_kernel"))(*given)
    near(got, truth(*(t.double() for t in given)), sizes["y"])


#: what is read along one label and written along another -> (algorithm, in torch, inputs, labels of its blocks)
ACROSS = {
    "a transpose": ("Func f; In A; Var y, x; f[y, x] = A[x, y] * 2;", lambda a: a.mT * 2, ("xy",), "xy"),
    "a transpose in a sum": ("Func f; In A, B; Var x, y; f[x, y] = A[y, x] + B[x, y];", lambda a, b: a.mT + b, ("yx", "xy"), "xy"),
    "of each batch": ("Func f; In A; Var b, y, x; f[b, y, x] = A[b, x, y];", lambda a: a.mT, ("bxy",), "xy"),
    "heads, channels first": ("Func f; In A; Var b, z, y, x; f[b, z, y, x] = A[b, x, z, y];", lambda a: a.permute(0, 2, 3, 1), ("bxzy",), "xy"),
    "three ways": ("Func f; In A, B; Var x, y, z; f[x, y, z] = A[z, x, y] + B[y, z, x];", lambda a, b: a.permute(1, 2, 0) + b.permute(2, 0, 1), ("zxy", "yzx"), "xyz"),
    "through another Func": ("Func u, f; In A, B; Var x, y; u[y, x] = A[y, x] * 3; f[x, y] = u[y, x] + B[x, y];", lambda a, b: a.mT * 3 + b, ("yx", "xy"), "xy"),
    "of a broadcast": ("Func f; In A, B; Var z, x, y; f[z, x, y] = A[y, x] + B[z, x, y];", lambda a, b: a.mT + b, ("yx", "zxy"), "xy"),
    "rows by columns": ("Func f; In A, B; Var x; RVar y; f[x] = rsum(A[x, y] * B[y, x], y);", lambda a, b: (a * b.mT).sum(1), ("xy", "yx"), "xy"),
    "all by all": ("Func f; In A, B; RVar x, y; f[] = rsum(A[x, y] * B[y, x], x, y);", lambda a, b: (a * b.mT).sum(), ("xy", "yx"), "xy"),
}  # fmt: skip
ODD = [{"x": 67, "y": 33, "z": 3, "b": 2}, {"x": 129, "y": 130, "z": 17, "b": 1}, {"x": 5, "y": 70, "z": 2, "b": 3}, {"x": 1, "y": 35, "z": 1, "b": 2}]


@pytest.mark.parametrize("sizes", ODD, ids=lambda s: "x".join(map(str, s.values())))
@pytest.mark.parametrize("name", ACROSS)
def test_what_is_read_along_one_label_and_written_along_another(name, sizes):
    text, truth, inputs, _ = ACROSS[name]
    program, _ = kernels(text + " f.compile();", {c: sizes[c] for c in {*"".join(inputs)}})
    given = [random(*(sizes[c] for c in labels), seed=i) for i, labels in enumerate(inputs)]
    near([dtkernels.compile(str(program))(*given)], [truth(*(t.double() for t in given))], sizes["x"] * sizes["y"])


@pytest.mark.parametrize("over", ["rsum(A[b, x, y] * A[b, x, y], {})", "rmax(A[b, x, y], {})", "rmean((A[b, x, y] - B[b, x, y]) * (A[b, x, y] - B[b, x, y]), {})"])
def test_sums_over_everything_in_any_order_agree_with_float64(over):
    sizes = {"b": 3, "x": 37, "y": 301}
    given = [random(3, 37, 301, seed=i) for i in range(2)]
    a, b = (t.double() for t in given)
    want = (a * a).sum() if "rsum" in over else a.max() if "rmax" in over else (a - b).square().mean()
    for order in itertools.permutations("bxy"):
        program, _ = kernels(f"Func f; In A, B; RVar b, x, y; f[] = {over.format(', '.join(order))} + 0 * B[0, 0, 0]; f.compile();", sizes)
        near([dtkernels.compile(str(program))(*given)], [want], a.numel())


@pytest.mark.parametrize("times", ["* 2", "* (0 - 0.5)", "/ 4", "* 0", "* s"])
def test_a_number_is_hoisted_from_shifted_elements_too(times):
    text = f"Func e, d, f, g; In A, W, V; SIn s; Var x, y; RVar r; Extent x = A[0]; e[x] = tanh(A[x]); d[x] = e[x] {times}; f[y] = rsum(d[y - r] * W[r], r); g[x] = d[x] * V[x]; Extent y = A[0] + W[0] - 1;"
    text = text if times == "* s" else text.replace("SIn s; ", "")
    algorithm = parse(text).algorithm
    prepared = prepare_algorithm(algorithm, ("f", "g"))
    read = {a.tensor for a in ex.accesses(prepared["f"].expr)}
    assert ("d" in read) == (times in ("* 0", "* s")), str(prepared)  # 0 times an infinity is none, and a scalar may be one
    tensors = {"A": torch.randn(9), "W": torch.randn(3), "V": torch.randn(9)}
    for got, expected in zip(*(evaluate(a, tensors, {"s": 3.0} if times == "* s" else {}, ("f", "g")) for a in (prepared, algorithm)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
