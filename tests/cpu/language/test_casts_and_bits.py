# ruff: noqa: E501 (programs read best on one line)
"""Casts to integers and truth values, exact integer arithmetic, and Funcs that hold integers: against torch, kernel and reference."""

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch

import dtkernels
from dtkernels.lang import parse
from dtkernels.lang.expr import INTEGERS
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator

inf, nan = float("inf"), float("nan")
BOTH = pytest.mark.parametrize("reference", [False, True], ids=["kernel", "reference"])
VALUES = torch.tensor([0.0, 0.4, 0.9, -0.9, 1.5, -1.5, 2.5, 127.4, 127.9, 128.0, -128.9, -129.0, 300.0, -300.0, 40000.0, -40000.0, 3e9, -3e9, 2147483648.0, 1e19, -1e19, inf, -inf, nan])


@pytest.fixture
def op_of(request, monkeypatch):
    if request.node.callspec.params.get("reference"):
        monkeypatch.delenv("TRITON_INTERPRET")
    return lambda text: Operator(Spec("of_integers", "Integers.", parse(text)))


def saturated(a: torch.Tensor, least: int, most: int) -> list[int]:
    """What a Python int makes of each element."""
    return [0 if v != v else most if v >= most else least if v <= least else int(v) for v in a.double().tolist()]


@BOTH
@pytest.mark.parametrize("dtype", [d for d in INTEGERS if d != "bool"])
def test_casts_go_toward_zero_and_saturate(dtype, reference, op_of):
    got = op_of(f"Func f, g; In A; Var x; f[x] = cast(A[x], {dtype}); g[x] = cast(round(A[x]), {dtype}); f.compile(); g.compile();")(VALUES)
    for value, a in zip(got, (VALUES, VALUES.round())):
        assert value.dtype == getattr(torch, dtype) and value.tolist() == saturated(a, *INTEGERS[dtype])


@BOTH
def test_a_cast_of_integers_saturates_too(reference, op_of):
    t = torch.tensor([-(2**40), -129, -1, 0, 127, 128, 255, 256, 2**31, 2**62])
    for dtype in ("int8", "uint8", "int16", "int32", "int64"):
        got = op_of(f"Func f; In t; Var x; f[x] = cast(t[x] | 0, {dtype});")(t)
        assert got.tolist() == t.clamp(*INTEGERS[dtype]).tolist() and got.dtype == getattr(torch, dtype)


@BOTH
def test_truth_values(reference, op_of):
    a = torch.tensor([0.0, -0.0, 1.0, nan, -3.0])
    got = op_of("Func f, g, h; In A; Var x; f[x] = cast(A[x], bool); g[x] = cast(A[x] > 0, bool); h[x] = where(f[x], 2, 3) + where(cast(A[x], bool) and g[x], 10, 0); f.compile(); g.compile(); h.compile();")(a)
    assert [got[0].dtype, got[1].dtype, got[2].dtype] == [torch.bool, torch.bool, torch.float32]
    assert got[0].tolist() == a.bool().tolist() and got[1].tolist() == (a > 0).tolist() and got[2].tolist() == [3, 3, 12, 2, 2]


@BOTH
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int8, torch.uint8], ids=str)
def test_operators(dtype, reference, op_of):
    low, high = (0, 120) if dtype == torch.uint8 else (-120, 120)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(low, high, (37,), generator=generator) for _ in range(2))
    b = torch.where(b == 0, 3, b)
    text = "Func p, q, r, s, t, u, v; In A, B; Var x; p[x] = A[x] // B[x]; q[x] = A[x] & B[x]; r[x] = A[x] | 3 ^ B[x]; s[x] = (A[x] >> 2) + (B[x] << 20); t[x] = ~A[x] - x // 3; u[x] = (A[x] * A[x] * A[x] | 0) % 7; v[x] = A[x] // 1 / 2; "
    got = op_of(text + "".join(f"{f}.compile();" for f in "pqrstuv"))(a.to(dtype), b.to(dtype))
    x = torch.arange(37)
    want = [torch.div(a, b, rounding_mode="floor"), a & b, a | 3 ^ b, (a >> 2) + (b << 20), ~a - x // 3, a**3 % 7, a / 2]
    for mine, theirs in zip(got, want):
        assert mine.dtype == theirs.dtype and mine.tolist() == theirs.tolist()


@BOTH
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32], ids=str)
def test_arithmetic_on_bits_of_narrow_integers_does_not_wrap_around(dtype, reference, op_of):
    t = torch.tensor([0, 3, 77, 127])
    text = "Func p, q, r, s, u; In T; Var x; p[x] = ((T[x] >> 3) & 15) - 10; q[x] = (T[x] | 1) * 1000000000 * (T[x] & 3); r[x] = ~T[x] - 3; s[x] = x << 40; u[x] = (p[x] ^ 1) * (T[x] & 127) * 400000000;"
    got = op_of(text + "".join(f"{f}.compile();" for f in "pqrsu"))(t.to(dtype))
    p = ((t >> 3) & 15) - 10
    for mine, theirs in zip(got, (p, (t | 1) * 1000000000 * (t & 3), ~t - 3, torch.arange(4) << 40, (p ^ 1) * (t & 127) * 400000000)):
        assert mine.tolist() == theirs.tolist()


@BOTH
def test_integers_beyond_what_float32_holds(reference, op_of):
    t = torch.tensor([2**40 + 1, 2**53 + 1, -(2**60) - 7])
    got = op_of("Func f, g; In t; Var x; f[x] = t[x] // 2 * 3; g[x] = (f[x] & 1023) + 5; f.compile(); g.compile();")(t)
    assert got[0].tolist() == [v // 2 * 3 for v in t.tolist()] and got[1].tolist() == [(v // 2 * 3 & 1023) + 5 for v in t.tolist()]


SCHEDULES = ["", "q.block(x:4, y:8); q.tensorize(x:4, y:8); f.block(x:4, y:8); f.tensorize(x:4, y:8);", "q.fuse_at(f, y); f.block(x:4, y:8); f.tensorize(x:4, y:8);"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_integer_funcs_stay_integers_between_kernels(schedule):
    a = torch.randn(9, 13)
    text = "Func q, f; In A; Var x, y; q[x, y] = cast(round(A[x, y] * 40), int8); f[x, y] = ((q[x, y] >> 1) ^ 5) * 0.5 + A[x, q[x, y] // 64];"
    got = dtkernels.compile(text + schedule)(a)
    q = (a * 40).round().clamp(-128, 127).long()
    at = q // 64
    want = ((q >> 1) ^ 5) * 0.5 + torch.where(at >= 0, a.gather(1, at.clamp(0)), torch.zeros(()))
    torch.testing.assert_close(got, want)


@BOTH
def test_packed_integers_of_four_bits(reference, op_of):
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (6, 32), generator=generator)
    for dtype, per in ((torch.int32, 8), (torch.uint8, 2)):
        packed = sum(q[:, i::per] << (4 * i) for i in range(per))
        packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(dtype)
        text = f"Func f; In W, s; Var x, k; Extent k = s[0]; f[x, k] = (((W[x, k // {per}] >> (4 * (k % {per}))) & 15) - 8) * s[k];"
        s = torch.randn(32, generator=generator)
        torch.testing.assert_close(op_of(text)(packed, s), (q - 8) * s)


def test_a_quantized_row_and_back():
    """Symmetric quantization by the largest element of a row: codes and scales from one program."""
    a = torch.randn(5, 33)
    text = """Func s, q; In A; Var x; Var y; s[x] = cast(rmax(abs(A[x, y]), y) / 127, fp32); q[x, y] = cast(round(A[x, y] / s[x]), int8); s.compile(); q.compile();"""
    s, q = Operator(Spec("quantized", "Codes.", parse(text)))(a)
    assert q.dtype == torch.int8 and torch.equal(q.long(), (a / s[:, None]).round().clamp(-128, 127).long())


def test_integers_have_no_gradient():
    a = torch.randn(7).requires_grad_()
    op = Operator(Spec("mixed", "Both.", parse("Func q, f; In A; Var x; q[x] = cast(A[x] * 3, int32); f[x] = A[x] * A[x] + q[x] + cast(A[x], int64); q.compile(); f.compile();")))
    q, f = op(a)
    assert not q.requires_grad
    torch.testing.assert_close(torch.autograd.grad(f.sum(), a)[0], 2 * a)


@pytest.mark.parametrize(
    "text, error",
    [
        ("A[x] / 2 & 1", "& is of whole numbers"),
        ("exp(A[x]) // 2", "// is of whole numbers"),
        ("(A[x] & 1.5)", "& is of whole numbers"),
        ("~(A[x] > 0)", "~ is of whole numbers"),
        ("cast(A[x], int4)", "unknown dtype: found 'int4'; allowed: fp32, fp16, bf16, e4m3, e5m2, int8"),
        ("A[x] && A[x]", "'and'"),
        ("where(A[x] & 1, 2, 3)", "a boolean is wanted here"),
    ],
)
def test_what_does_not_fit_is_refused(text, error):
    with pytest.raises(dtkernels.DTError, match=error):
        parse(f"Func f; In A; Var x; f[x] = {text};")


def test_numbers_are_not_taken_for_integers():
    with pytest.raises(TypeError, match="f: A is torch.float32; allowed: int32, int64"):
        dtkernels.compile("Func f; In A; Var x; f[x] = A[x] & 3;")(torch.ones(3))
