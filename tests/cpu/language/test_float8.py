# ruff: noqa: E501 (programs read best on one line)
"""Float8 in the interpreter, which takes the path of GPUs without it: bits, decoded and encoded by arithmetic."""

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch

import dtkernels
from dtkernels.lang import DTError, parse
from dtkernels.lang.expr import FLOAT8
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator
from dtkernels.runtime.reference.evaluator import evaluate

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = {"e4m3": E4M3, "e5m2": E5M2}
CODES = torch.arange(256, dtype=torch.uint8)
G = torch.Generator().manual_seed(0)
M, N, K, GROUP = 33, 40, 64, 16
SCALES = {
    "tensor": ("s[0]", (1,), lambda s: s),
    "row": ("s[n]", (N,), lambda s: s[:, None]),
    "column": ("s[k]", (K,), lambda s: s),
    "group": (f"s[n, k / {GROUP}]", (N, K // GROUP), lambda s: s.repeat_interleave(GROUP, 1)),
}
PRODUCT = "Func f; In A, W; Var m, n; RVar k; f[m, n] = rdot(A[m, k], W[n, k], k); f.block(m:32, n:32); f.tensorize(m:32, n:32, k:%d);"


def op(text: str) -> Operator:
    return Operator(Spec("narrow", "A program.", parse(text)))


def numbers(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.randn(*shape, generator=G).to(dtype)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether all elements are equal, NaNs and the signs of zeros included."""
    got, want = got.double(), want.double()
    return torch.equal(got.nan_to_num(1e9, 2e9, -2e9), want.nan_to_num(1e9, 2e9, -2e9)) and torch.equal(torch.signbit(got)[want == 0], torch.signbit(want)[want == 0])


def nearest(x: torch.Tensor, name: str) -> torch.Tensor:
    """Round by comparing with every number of the dtype in float64; of two that are as near, the even code. Beyond the range the largest."""
    positive = CODES[:128].view(DTYPES[name]).double()
    kept = CODES[:128][positive.isfinite()]
    table = kept.view(DTYPES[name]).double()
    apart = (x.double().abs().clamp(max=FLOAT8[name].largest)[:, None] - table).abs()
    least = apart == apart.amin(1, keepdim=True)
    even = least & ((kept % 2 == 0) | (least.sum(1, keepdim=True) == 1))
    found = table[even.int().argmax(1)]
    return torch.where(x.isnan(), x.double(), torch.copysign(found, x.double()))


def awkward(name: str) -> torch.Tensor:
    """Every finite number, all that lies halfway between two and what is next to that, and what lies beyond the range."""
    finite = CODES.view(DTYPES[name]).float()
    finite = finite[finite.isfinite()].sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    largest = FLOAT8[name].largest
    beyond = torch.tensor([largest * 1.03, largest * 1.0625, largest * 1.1, 1e6, 3e38, torch.inf, 0.0, 1e-30, 2.0**-10, 2.0**-17, 1e-42])
    around = [torch.nextafter(middle, torch.tensor(end)) for end in (torch.inf, -torch.inf)]
    return torch.cat([finite, middle, *around, beyond, -beyond, torch.tensor([torch.nan])])


@pytest.mark.parametrize("name", DTYPES)
def test_every_code_is_read_exactly(name):
    codes = CODES.view(DTYPES[name])
    got = dtkernels.compile("Func f; In A; Var x; f[x] = 2 * A[x]; f.block(x:64); f.tensorize(x:64);")(codes)
    assert got.dtype == torch.float32 and same(got, 2 * codes.float())


@pytest.mark.parametrize("name", DTYPES)
def test_a_cast_rounds_to_nearest_even_and_saturates(name):
    x = awkward(name)
    want = nearest(x, name)
    stored = dtkernels.compile(f"Func f; In A; Var x; f[x] = cast(A[x], {name}); f.block(x:64); f.tensorize(x:64);")(x)
    inside = dtkernels.compile(f"Func f; In A; Var x; f[x] = 2 * cast(A[x], {name}); f.block(x:64); f.tensorize(x:64);")(x)
    (reference,) = evaluate(parse(f"Func f; In A; Var x; f[x] = cast(A[x], {name});").algorithm, {"A": x.double()}, {}, ("f",))
    assert stored.dtype == reference.dtype == DTYPES[name]
    assert same(stored, want) and same(reference, want) and same(inside, 2 * want)
    below = x.abs() <= FLOAT8[name].largest
    assert torch.equal(stored[below].view(torch.uint8), x[below].to(DTYPES[name]).view(torch.uint8))  # there torch agrees, code by code


def test_casts_of_integers_constants_and_scalars():
    def run(e: str) -> torch.Tensor:
        return dtkernels.compile(f"Func f; In A; SIn s; Var x; f[x] = {e}; f.block(x:64); f.tensorize(x:64);")(torch.zeros(100), 3.3)

    assert same(run("cast(x * 3 + 0 * A[x] + 0 * s, e5m2)"), nearest(3.0 * torch.arange(100), "e5m2"))
    assert same(run("cast(3.3, e4m3) + cast(s, e5m2) + A[x]"), torch.full((100,), 3.25 + 3.5))


@pytest.mark.parametrize("depth", [16, 32])
@pytest.mark.parametrize("left, right", [(E4M3, E4M3), (E5M2, E5M2), (E4M3, E5M2), (torch.float16, E4M3), (torch.bfloat16, E5M2), (torch.float32, E4M3), (torch.int8, E4M3)])
def test_products(left, right, depth):
    a = torch.randint(-9, 9, (M, K), generator=G).to(left) if left == torch.int8 else numbers(M, K, dtype=left)
    w = numbers(N, K, dtype=right)
    got = dtkernels.compile(PRODUCT % depth)(a, w)
    assert got.dtype == (left if left.itemsize > 1 else torch.float32)
    tolerance = 2 ** -(21 if got.dtype == torch.float32 else 7 if left == torch.bfloat16 else 10)  # the interpreter cuts to bfloat16
    want = a.double() @ w.double().T
    sums = 2**-24 * K**0.5 * (a.double().abs() @ w.double().abs().T).max().item()  # of K products, each rounded to float32
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * K**0.5 + sums)


@pytest.mark.parametrize("scale", SCALES)
def test_weights_with_scales(scale):
    said, shape, spread = SCALES[scale]
    a = torch.randn(M, K, generator=G).half().requires_grad_()
    w, s = numbers(N, K), (torch.rand(shape, generator=G) / 16).half().requires_grad_()
    got = op(f"Func f; In A, W, s; Var m, n; RVar k; f[m, n] = rdot(A[m, k], W[n, k] * {said}, k);")(a, w, s)
    exact = [t.detach().double().requires_grad_() for t in (a, s)]
    want = exact[0] @ (w.double() * spread(exact[1])).T
    adjoint = torch.randn(M, N, generator=G).half()
    for mine, theirs in zip((got, *torch.autograd.grad(got, (a, s), adjoint)), (want, *torch.autograd.grad(want, exact, adjoint.double()))):
        assert mine.dtype == torch.float16
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-3, atol=4e-3 * theirs.abs().max().item())


def test_scales_of_blocks():
    text = "Func f; In A, W, s, t; Var m, n; RVar g, k; Extent k = 32; Extent g = A[1] / 32; "
    text += "f[m, n] = cast(rsum(rdot(A[m, 32 * g + k], W[n, 32 * g + k], k) * s[m, g] * t[n, g], g), bf16);"
    a, w, s, t = numbers(M, 128), numbers(N, 128), torch.rand(M, 4, generator=G), torch.rand(N, 4, generator=G)
    wide = [(x.double() * y.double().repeat_interleave(32, 1)) for x, y in ((a, s), (w, t))]
    got = op(text)(a, w, s, t)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), wide[0] @ wide[1].T, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("copied", ["f_left.block(m:16, k:16); f_left.tensorize(m:16, k:16); f.stage(W);", "f.stage(A, W);"])
def test_copies_of_float8_are_in_float8_and_change_no_value(copied, dtype):
    a, w = numbers(K - 1, M, dtype=dtype), numbers(N, K - 1, dtype=dtype)
    a[0, 0], w[3, 1] = -0.0, float("nan")
    text = "Func f; In A, W; Var m, n; RVar k; f[m, n] = rdot(A[k, m], W[n, k], k); f.block(m:32, n:32); f.tensorize(m:32, n:32, k:32);"
    program = dtkernels.compile(text + copied)
    got, want = program(a, w), a.double().T @ w.double().T
    assert torch.equal(got.isnan(), want.isnan()) and got.isnan().sum() == M
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-4 if dtype == E5M2 else 1e-5, equal_nan=True)


@pytest.mark.parametrize("how", ["g.block(m:16, k:64); g.tensorize(m:16, k:64);", "g.fuse_at(f, k);"])
def test_a_cast_is_an_operand_in_float8_stored_or_fused(how):
    text = f"Func g, f; In A, W; Var m, n, k; g[m, k] = cast(A[m, k] * 2, e4m3); f[m, n] = rdot(g[m, k], W[n, k], k); {how} f.block(m:32, n:32); f.tensorize(m:32, n:32, k:32); f.compile();"
    program = dtkernels.compile(text)
    a, w = torch.randn(M, K, generator=G), numbers(N, K)
    got = program(a, w)
    torch.testing.assert_close(got.double(), nearest(2 * a.flatten(), "e4m3").reshape(M, K) @ w.double().T, rtol=1e-6, atol=1e-5)
    assert ("dtype=torch.float8_e4m3fn" in program.source) == ("block(m:16" in how)


@pytest.mark.parametrize("more", ["f.stage(W);", "f.descriptor(A, W);", "f.split(k:2);", "f.descriptor(A, W); f.persistent(); f.tail(m:16);"])
@pytest.mark.parametrize("left", [torch.bfloat16, E5M2])
def test_schedules(more, left):
    a, w = numbers(M, K, dtype=left), numbers(N, K)
    got = dtkernels.compile(PRODUCT % 32 + more)(a, w)
    torch.testing.assert_close(got.double(), a.double() @ w.double().T, rtol=2**-7, atol=1e-4)


def test_results_are_stored_by_descriptor():
    text = "Func f; In A, W; Var m, n; RVar k; f[m, n] = cast(rdot(A[m, k], W[n, k], k), e4m3); f.block(m:32, n:32); f.tensorize(m:32, n:32, k:32); f.descriptor(A, W, f);"
    a, w = numbers(32, K), numbers(64, K)
    assert same(dtkernels.compile(text)(a, w), nearest((a.double() @ w.double().T).flatten(), "e4m3").reshape(32, 64))


def test_ops_and_views_take_float8():
    x = numbers(33, 70)
    torch.testing.assert_close(dtkernels.ops.softmax(x).double(), x.double().softmax(-1), rtol=1e-5, atol=1e-6)
    q = torch.randn(1, 2, 33, 32, generator=G).bfloat16()
    k, v = numbers(1, 2, 50, 32), numbers(1, 2, 50, 32)
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(dtkernels.ops.attention(q, k, v).double(), want, rtol=2**-7, atol=2**-7)
    plus = op("Func f; In A; Var x, y; f[x, y] = A[x, y] + 1;")
    for view in (x.T, x[::2, 1::3], x[:0]):
        assert same(plus(view), view.float() + 1)
    rows = op("Func f; In W, t; Var x, y; f[x, y] = W[t[x], y];")
    at = torch.randint(0, 33, (20,), generator=G)
    assert same(rows(x, at), x.float()[at])
    below = (-x.float().abs()).to(E4M3)  # no -inf fills the rest of a row: e4m3 has none
    assert same(op("Func f; In A; Var x; RVar y; f[x] = rmax(A[x, y], y);")(below), below.float().amax(1))


def test_caches_of_attention():
    """With lengths, and in pages: as those of the numbers in bfloat16, which holds all of them, and which float64 judges."""
    q = torch.randn(2, 4, 1, 32, generator=G).bfloat16()
    lengths, table = torch.tensor([17, 40], dtype=torch.int32), torch.tensor([[3, 1, 0], [4, 5, 6]], dtype=torch.int32)
    k, v = numbers(7, 16, 2, 32), numbers(7, 16, 2, 32)
    flat = [t[table].reshape(2, 48, 2, 32).transpose(1, 2) for t in (k, v)]
    got = dtkernels.ops.attention(q, k, v, block_table=table, lengths=lengths), dtkernels.ops.attention(q, *flat, lengths=lengths)
    for b, n in enumerate(lengths.tolist()):
        wide = [t[b, :, :n].double().repeat_interleave(2, 0) for t in flat]
        want = torch.nn.functional.scaled_dot_product_attention(q[b].double(), *wide)
        for found in got:
            torch.testing.assert_close(found[b].double(), want, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(
    "run, error",
    [
        (lambda: dtkernels.ops.softmax(numbers(3, 4).requires_grad_()), r"softmax: x is torch.float8_e4m3fn and requires a gradient, and float8 has none; allowed: x.detach\(\)"),
        (lambda: dtkernels.ops.softmax(torch.zeros(3, 4).to(torch.float8_e4m3fnuz)), "softmax: x is torch.float8_e4m3fnuz; allowed: torch.float8_e4m3fn, torch.float8_e5m2, or"),
        (lambda: op("Func f; In A; Var x; f[x] = cast(A[x], e4m3) * A[x];")(torch.ones(4, requires_grad=True)), r"a cast to float8 has no gradient: found cast\(A\[x\], e4m3\)"),
        (lambda: op("Func f; In A; SIn s; Var x; f[x] = A[x] * s;")(torch.ones(4), numbers(1)), "narrow: s is torch.float8_e4m3fn; allowed: a real number of 16 bits or more"),
        (lambda: dtkernels.compile("Func f; In A; SIn s; Var x; f[x] = A[x] * s;")(torch.ones(4), numbers(1)), "f: s is torch.float8_e4m3fn; allowed: a real number of 16 bits or more"),
        (lambda: dtkernels.compile("Func f; In A; Var x; f[x] = fp8(A[x]);"), r"unknown function: found 'fp8'; allowed: cast\(e, e4m3\)"),
    ],
)  # fmt: skip
def test_what_is_refused(run, error):
    with pytest.raises((TypeError, DTError), match=error) as raised:
        run()
    assert "\n" not in str(raised.value)
