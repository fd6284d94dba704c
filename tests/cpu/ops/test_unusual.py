# ruff: noqa: E501 (programs read best on one line)
"""Programs and calls that someone from outside would try: every section of the language once where it is least comfortable."""

import math

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from oracle import check

import dtkernels


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


ADD = "Func f; In A, B; SIn s; Var x, y; f[x, y] = s * (A[x, y] + B[x, y]); "
MM = "Func mm; In A, B; Var x, y; RVar k; mm[x, y] = rdot(A[x, k], B[k, y], k); "
TILES = "mm.block(x:16, y:16); mm.tensorize(x:16, y:16, k:16); "
ATT = """Func s, e, t, o; In Q, K, V; Var b, h, m, n; RVar d, l;
s[b, h, m, l] = rdot(Q[b, h, m, d], K[b, h, l, d], d) / sqrt(len(d)); e[b, h, m, l] = exp(s[b, h, m, l]);
t[b, h, m] = rsum(e[b, h, m, l], l); o[b, h, m, n] = rdot(e[b, h, m, l], V[b, h, l, n], l) / t[b, h, m]; """
ROWS = "Func t, f; In A; Var x; RVar y; t[x] = rsum(exp(A[x, y]), y); f[x, y] = exp(A[x, y]) / t[x]; "

PROGRAMS = {
    "one element": ("Func f; In A; Var x; f[x] = A[x] * A[x];", [(1,)]),
    "no dimensions left": ("Func f; In A; RVar x, y; f[] = rsum(A[x, y], x, y);", [(5, 7)]),
    "no dimensions left, in tiles": ("Func f; In A; RVar x, y; f[] = rmax(A[x, y], x, y); f.tensorize(x:4, y:0);", [(5, 7)]),
    "nothing in an element-wise tensor": (ADD + "f.block(x:4, y:4); f.tensorize(x:4, y:4);", [(0, 5), (0, 5), 2.0]),
    "nothing to sum": (MM + TILES, [(5, 0), (0, 7)]),
    "nothing to sum, whole": (MM + "mm.block(x:16, y:16); mm.tensorize(x:16, y:16, k:0);", [(5, 0), (0, 7)]),
    "nothing to sum of what is divided by nothing": ("Func f; In A, B; Var x; RVar y; f[x] = rsum(A[x, y] / (B[x] - B[x]), y); f.block(x:2); f.tensorize(y:4);", [(5, 0), (5,)]),
    "no keys": (ATT.replace("e[b, h, m, l], V[b, h, l, n], l) / t[b, h, m]", "e[b, h, m, l] / t[b, h, m], V[b, h, l, n], l)") + "s.fuse_at(o, l); e.fuse_at(o, l); t.fuse_at(o, l); o.block(b:1, h:1, m:16); o.tensorize(m:16, l:16, d:0, n:0);", [(1, 2, 5, 4), (1, 2, 0, 4), (1, 2, 0, 3)]),
    "no rows": (ROWS + "t.fuse_at(f, x); f.block(x:2); f.tensorize(y:0);", [(0, 9)]),
    "no columns": (ROWS + "t.fuse_at(f, x); f.block(x:2); f.tensorize(x:2, y:4);", [(3, 0)]),
    "rank 5": ("Func f; In A; Var a, b, c, d, e; f[e, c, a, b, d] = A[a, b, c, d, e] * (a + 2 * e); f.block(e:1, c:1, a:2); f.tensorize(d:4, b:2, a:2);", [(2, 3, 2, 3, 4)]),
    "rank 5 reduced to rank 2": ("Func f; In A; Var a, e; RVar b, c, d; f[a, e] = rmax(A[a, b, c, d, e], b, c, d); f.tensorize(e:4, d:2); f.reorder(d, b, c);", [(2, 3, 2, 3, 5)]),
    "a diagonal": ("Func f; In A; Var x; f[x] = A[x, x]; f.block(x:4); f.tensorize(x:4);", [(7, 7)]),
    "a trace": ("Func f; In A; RVar x; f[] = rsum(A[x, x], x); f.tensorize(x:4);", [(7, 7)]),
    "an outer product": ("Func f; In A, B; Var x, y; f[y, x] = A[x] * B[y] - A[x] / (1 + abs(B[y])); f.block(y:4, x:8); f.tensorize(y:4, x:8);", [(9,), (5,)]),
    "a transpose of a product": ("Func f; In A, B; Var x, y; RVar k; f[y, x] = rdot(A[x, k], B[y, k], k); f.block(x:16, y:16); f.tensorize(x:16, y:16, k:16);", [(20, 33), (18, 33)]),
    "both sides transposed": ("Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[k, x], B[y, k], k); f.block(x:16, y:16); f.tensorize(x:16, y:16, k:16);", [(33, 20), (18, 33)]),
    "a batched product": ("Func f; In A, B; Var b, x, y; RVar k; f[b, x, y] = rdot(A[b, x, k], B[b, k, y], k); f.block(b:1, x:16, y:16); f.tensorize(x:16, y:16, k:16); f.map(y, b, x);", [(3, 17, 20), (3, 20, 19)]),
    "a batch in the middle": ("Func f; In A, B; Var b, x, y; RVar k; f[x, b, y] = rdot(A[x, b, k], B[k, b, y], k); f.block(b:1, x:16, y:16); f.tensorize(x:16, y:16, k:16);", [(17, 3, 20), (20, 3, 19)]),
    "a product over two labels": ("Func f; In A, B; Var x, y; RVar k, j; f[x, y] = rdot(A[x, k, j], B[j, k, y], k, j); f.block(x:16, y:16); f.tensorize(x:16, y:16, k:16, j:1);", [(17, 20, 3), (3, 20, 9)]),
    "a convolution": ("Func f; In A, W; Var x; RVar k; f[x] = rsum(A[x + k - 1] * W[k], k); Extent x = A[0]; f.block(x:8); f.tensorize(x:8);", [(21,), (3,)]),
    "a pooling": ("Func f; In A, B; Var x; RVar k; f[x] = rmax(A[2 * x + k], k) + B[x] + 0 * rsum(k, k); Extent k = 3; f.block(x:8); f.tensorize(x:8);", [(17,), (7,)]),
    "grouped heads": (ATT.replace("K[b, h, l, d]", "K[b, h / 2, l, d]").replace("V[b, h, l, n]", "V[b, h / 2, l, n]") + "s.fuse_at(o, l); e.fuse_at(o, l); t.fuse_at(o, l); o.block(b:1, h:1, m:16); o.tensorize(m:16, l:16, d:0, n:0);", [(2, 4, 19, 16), (2, 2, 21, 16), (2, 2, 21, 16)]),
    "three chained reductions": ("Func a, b, c; In A; Var x; RVar y; a[x] = rmax(A[x, y], y); b[x] = rsum(exp(A[x, y] - a[x]), y); c[x] = rsum(A[x, y] * exp(A[x, y] - a[x]) / b[x], y); a.fuse_at(c, x); b.fuse_at(c, x); c.block(x:2); c.tensorize(x:2, y:4);", [(5, 13)]),
    "three chained reductions in one loop": ("Func a, b, c; In A; Var x; RVar y; a[x] = rmax(A[x, y], y); b[x] = rsum(exp(A[x, y] - a[x]), y); c[x] = rsum(A[x, y] * exp(A[x, y] - a[x]), y) / b[x]; a.fuse_at(c, y); b.fuse_at(c, y); c.block(x:2); c.tensorize(x:2, y:4);", [(5, 13)]),
    "nothing fused": (ATT, [(1, 1, 5, 4), (1, 1, 6, 4), (1, 1, 6, 3)]),
    "a Func used twice, at two places": ("Func g, f; In A; Var x; g[x] = exp(A[x]); f[x] = g[x] + g[x + 1] * g[x - 1]; g.fuse_at(f, x); f.block(x:4); f.tensorize(x:4);", [(11,)]),
    "a Func under two orders of labels": ("Func g, f; In A; Var x, y; g[x, y] = A[x, y] * A[x, y]; f[x, y] = g[x, y] - g[y, x]; g.fuse_at(f, y); f.block(x:4, y:4); f.tensorize(x:4, y:4);", [(7, 7)]),
    "one input on both sides": ("Func f; In A; Var x, y; RVar k; f[x, y] = rdot(A[x, k], A[y, k], k); f.block(x:16, y:16); f.tensorize(x:16, y:16, k:16);", [(20, 33)]),
    "a constant": ("Func f; In A; Var x; f[x] = 3 + 0 * A[x];", [(5,)]),
    "an index": ("Func f; In A; Var x, y; f[x, y] = 10 * x + y + 0 * A[x, y]; f.tensorize(x:2, y:4);", [(3, 5)]),
    "a mean of a mean": ("Func g, f; In A; RVar x, y; g[x] = rmean(A[x, y], y); f[] = rmean(g[x], x); g.fuse_at(f, x); f.tensorize(x:2, y:4);", [(5, 7)]),
    "variance": ("Func m, v; In A; Var x; RVar y; m[x] = rmean(A[x, y], y); v[x] = rmean((A[x, y] - m[x]) * (A[x, y] - m[x]), y); m.fuse_at(v, x); v.tensorize(y:4);", [(3, 9)]),
    "rmin and rmax of one row": ("Func f; In A; Var x; RVar y; f[x] = (rmax(A[x, y], y) - rmin(A[x, y], y)) / len(y); f.tensorize(x:4, y:0); f.block(x:4);", [(9, 6)]),
    "a cumulative sum by a mask": ("Func f; In A; Var x; RVar y; Extent x = A[0]; f[x] = rsum(where(y <= x, A[y], 0), y); f.block(x:8); f.tensorize(x:8, y:4);", [(21,)]),
    "a band": ("Func f; In A; Var x; RVar y; f[x] = rmax(where(x - y < 3 and y <= x, A[x, y], -inf), y); f.block(x:8); f.tensorize(x:8, y:4);", [(21, 21)]),
    "groups of a last partial group": (ADD + "f.block(x:2, y:4); f.tensorize(x:2, y:4); f.map(x:xi/3, y:yi/2, xi, yi);", [(15, 21), (15, 21), 0.5]),
    "a persistent split": (MM + TILES + "mm.split(k:3); mm.persistent(); mm.map(x:xi/2, y, xi);", [(37, 50), (50, 20)]),
    "tiles wider than everything": (MM + "mm.block(x:64, y:128); mm.tensorize(x:64, y:128, k:64);", [(3, 5), (5, 2)]),
    "blocks without tiles": (ADD + "f.block(x:4, y:64);", [(5, 6), (5, 6), 3]),
    "everything specialized": (MM + TILES + "mm.specialize(x, y, k); mm.stages(k:4); mm.unroll(k:2); mm.evict(A:first, B:last); mm.maxnreg(128); mm.num_warps(1);", [(17, 33), (33, 15)]),
    "a staged input read beyond its rows": ("Func f; In A, W; Var n, t; RVar k; Extent t = A[1]; f[n, t] = rsum(A[n, t + k - 1] * W[k], k); f.block(n:1, t:8); f.tensorize(t:8, k:0); f.stage(A);", [(3, 21), (3,)]),
    "an aligned Func read beyond its rows": ("Func g, f; In A; Var n, t; g[n, t] = A[n, t] + 1; f[n, t] = g[n, t + 2]; g.align(); f.block(n:1, t:8); f.tensorize(t:8);", [(3, 21)]),
    "an output made from the one it is fused into": ("Func f, g; In A; Var x; RVar y; f[x] = rsum(A[x, y], y); g[x] = f[x] * f[x]; g.fuse_at(f, x); f.block(x:2); f.tensorize(x:2, y:4); f.compile(); g.compile();", [(5, 9)]),
    "a sum of what the sum before it gave": ("Func f, g; In A; Var x; RVar y; f[x] = rsum(A[x, y], y); g[x] = rsum(A[x, y] * f[x], y); g.fuse_at(f, y); f.tensorize(y:0); f.compile(); g.compile();", [(5, 9)]),
    "a kernel that runs before the one that is defined first": ("Func f, h, g; In A, B; Var x; f[x] = A[x]; h[x] = B[x] * 2; g[x] = h[x] + A[x]; g.fuse_at(f, x); f.block(x:4); f.compile(); g.compile();", [(5,), (5,)]),
    "a scalar named as what is computed twice": ("Func t, f; In A; SIn exp_1, y_partial; Var x; RVar y; t[x] = rsum(exp(A[x, y]), y); f[x, y] = exp(A[x, y]) / t[x] * exp_1 + y_partial; t.fuse_at(f, x); f.tensorize(y:0);", [(5, 9), 0.5, 2.0]),
    "an extent that only another output's input tells": ("Func g, f; In A, W; Var x; RVar k; g[x] = rsum(A[x + k], k) + 0 * A[x]; f[] = rsum(W[k], k); g.tensorize(x:4); f.compile(); g.compile();", [(9,), (3,)]),
    "two labels of a dimension that none indexes": ("Func f; In A; Var x, y; f[x, y] = A[x - y] * A[x - y]; Extent x = A[0]; Extent y = A[0]; f.tensorize(x:4);", [(9,)]),
    "a quadratic form": ("Func u, f; In A, M; Var n; RVar i, j; u[n, j] = rdot(A[n, i], M[i, j], i); f[n] = rsum(u[n, j] * A[n, j], j); u.fuse_at(f, j); f.block(n:16); f.tensorize(n:16, i:16, j:16);", [(19, 17), (17, 17)]),
    "comments and odd spacing": ("# first\nFunc _f;In _A;Var _x; # a name may start with _\n _f [ _x ]=-_A[_x]* -2 ;_f.block( _x:4 ) ;_f.tensorize(_x:4);", [(9,)]),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_program(name):
    text, shapes = PROGRAMS[name]
    args = [random(*s) if isinstance(s, tuple) else s for s in shapes]
    check(text, *args)
    if any(isinstance(s, tuple) and len(s) > 1 for s in shapes):  # the same through other strides
        check(text, *(t.mT.contiguous().mT if isinstance(t, torch.Tensor) and t.dim() > 1 else t for t in args))
        check(text, *(torch.cat([t, t], -1)[..., ::2] if isinstance(t, torch.Tensor) and t.dim() > 1 else t for t in args))


@pytest.mark.parametrize("schedule", ["", "f.block(x:4, y:8); f.tensorize(x:4, y:8);", "f.tensorize(x:0, y:0);"])
def test_expanded_inputs(schedule):
    a, b = random(5, 1).expand(5, 9), random(9).expand(5, 9)
    check(ADD + schedule, a, b, 0.5)


@pytest.mark.parametrize("s", [torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[2]]), torch.tensor(3, dtype=torch.int64), 2, 0.5, True])
def test_a_scalar_in_any_form(s):
    got = check(ADD + "f.block(x:4, y:8); f.tensorize(x:4, y:8);", random(5, 9), random(5, 9), s)["f"]
    assert got.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int8, torch.uint8, torch.bool])
def test_masks_of_any_integer_type(dtype):
    m = (random(5, 9) > 0).to(dtype)
    check("Func f; In M, A; Var x, y; f[x, y] = where(M[x, y] and A[x, y] < 1, A[x, y], -1); f.block(x:2, y:8); f.tensorize(x:2, y:8);", m, random(5, 9), dtype="float32")
    check("Func f; In M, A; Var x; RVar y; f[x] = rsum(where(M[x, y], 1, 0), y) + A[x]; f.block(x:2); f.tensorize(x:2, y:4);", m, random(5), dtype="float32")


def test_integers_cast_to_numbers():
    counts = torch.arange(15, dtype=torch.int32).reshape(3, 5)
    check("Func f; In N, A; Var x, y; f[x, y] = cast(N[x, y], fp32) * A[x, y]; f.block(x:2); f.tensorize(x:2, y:0);", counts, random(3, 5), dtype="float32")


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.float16), (torch.bfloat16, torch.float32)])
def test_results_take_the_common_dtype(dtypes):
    a, b = random(20, 33, dtype=dtypes[0]), random(33, 18, dtype=dtypes[1])
    common = torch.promote_types(*dtypes)
    check(MM + TILES, a, b, dtype=str(common).removeprefix("torch."))
    check(ADD + "f.block(x:4); f.tensorize(x:4, y:0);", a, a.to(dtypes[1]), 1.5, dtype=str(common).removeprefix("torch."))


@pytest.mark.parametrize("product", ["rdot(cast(A[x, k], fp32), B[k, y], k)", "rdot(cast(A[x, k], fp16), cast(B[k, y], fp16), k)", "rdot(B[k, y], cast(A[x, k], fp32), k)"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float32, torch.float16])
def test_an_operand_of_another_dtype_is_cast(product, dtype):
    """It is brought to the dtype of the other, whichever of the two is cast where it is read."""
    a, b = (2 * random(20, 33)).round().to(dtype), random(33, 18, dtype=torch.float16)
    text = f"Func mm; In B, A; Var x, y; RVar k; mm[x, y] = {product}; " + TILES
    check(text, b, a, dtype="float32" if product.count("cast") > 1 else "float16")


def test_several_funcs_compiled_from_one_program():
    text = """Func s, d, p; In A, B; Var x, y; s[x, y] = A[x, y] + B[x, y]; d[x, y] = A[x, y] - B[x, y]; p[x, y] = s[x, y] * d[x, y];
    s.fuse_at(p, y); p.block(x:2, y:4); p.tensorize(x:2, y:4); d.block(x:4); d.tensorize(x:4, y:0); """
    found = check(text + "p.compile(); s.compile(); d.compile();", random(5, 9), random(5, 9, seed=1))
    assert set(found) == {"p", "s", "d"}
    check(text + "d.compile(); p.compile();", random(5, 9), random(5, 9, seed=1))


def test_a_kernel_compiled_alone_is_launched_by_hand():
    program = dtkernels.compile(MM + TILES + "mm.compile_to_kernel();")
    a, b = random(20, 32), random(32, 18)
    with pytest.raises(dtkernels.DTError, match="mm is compiled to a kernel alone"):
        program(a, b)
    import triton.language as tl

    out = torch.full((20, 18), float("nan"))
    sizes = {"size_x": 20, "size_y": 18, "size_k": 32}
    given = {"A_ptr": a, "B_ptr": b, "mm_ptr": out, **sizes} | {f"{n}_stride_{d}": t.stride(i) for n, t, ds in (("A", a, "xk"), ("B", b, "ky"), ("mm", out, "xy")) for i, d in enumerate(ds)}
    constants = {"BLOCK_x": 16, "BLOCK_y": 16, "TILE_k": 16, "EVEN_x": False, "EVEN_y": False, "EVEN_k": True, "INDEX": tl.int32, "PRECISION": "ieee"}
    program.module.mm_kernel[(4,)](**given, **constants)
    torch.testing.assert_close(out, a @ b)


SAFE = """Func a, b, c; In A; Var x; RVar y; a[x] = rmax(A[x, y], y); b[x] = rsum(exp(A[x, y] - a[x]), y);
c[x] = rsum(y * exp(A[x, y] - a[x]), y) / b[x]; a.fuse_at(c, {0}); b.fuse_at(c, {0}); c.block(x:2); c.tensorize(x:2, y:4);"""


@pytest.mark.parametrize("loop", ["x", "y"])
def test_a_maximum_written_out_is_taken_as_the_shift(loop):
    """No second one is derived, and tiles before the first finite element add nothing."""
    a = random(5, 13) * 1e4
    a[1, :8] = float("-inf")
    check(SAFE.format(loop), a)
    assert "shift" not in dtkernels.compile(SAFE.format(loop)).source


def test_an_input_that_serves_twice():
    a = random(20, 20)
    check(MM + TILES, a, a)
    check(MM + TILES, a, a.T)


BAD_CALLS = [
    ((random(3, 4),), {}, TypeError, "missing 1 required positional argument: 'B'"),
    ((random(3, 4), random(5, 6)), {}, ValueError, "mm: B has 5 along k, another input has 4"),
    ((random(3, 4), random(4)), {}, ValueError, r"mm: B has 2 dimensions \(k, y\); got shape \(4,\)"),
    ((random(3, 4).double(), random(4, 5)), {}, TypeError, "mm: A is torch.float64; allowed: float32, float16, bfloat16"),
    ((random(3, 4),), {"C": random(4, 5)}, TypeError, "unexpected keyword argument 'C'"),
]


BAD_CALLS += [
    ((None, random(4, 5)), {}, TypeError, "mm: A is None; allowed: a tensor"),
    (([[1.0]], random(4, 5)), {}, TypeError, "mm: A is a list; allowed: a tensor"),
    ((random(3, 4).to("meta"), random(4, 5)), {}, TypeError, "mm: A is on the meta device; allowed: a tensor with data, or an op, dtkernels.register(...)"),
    ((random(3, 4), random(4, 5).to_sparse()), {}, TypeError, "mm: B is of layout torch.sparse_coo; allowed: a tensor with strides"),
]


@pytest.mark.parametrize("args, named, error, line", BAD_CALLS)
def test_calls_that_are_refused(args, named, error, line):
    with pytest.raises(error, match=line) as caught:
        dtkernels.compile(MM + TILES)(*args, **named)
    assert "\n" not in str(caught.value)


def test_a_scalar_of_many_elements_is_refused():
    with pytest.raises(ValueError, match=r"f: s is a number or a one-element tensor; got shape \(2,\)"):
        dtkernels.compile(ADD)(random(2, 2), random(2, 2), torch.ones(2))


def test_a_scalar_that_is_no_number_is_refused():
    for value, kind in (("2", "a str"), (None, "None")):
        with pytest.raises(TypeError, match=f"f: s is {kind}; allowed: a number or a one-element tensor"):
            dtkernels.compile(ADD)(random(2, 2), random(2, 2), value)


DISAGREE = {
    "f: x, y have one extent; inputs have 5 along x, 9 along y": ("Func g, f; In A, B; Var x, y; g[x] = 2 * A[x]; f[y] = g[y] + B[y];", (5,), (9,)),
    "f: x, y have one extent; inputs have 4 along x, 6 along y": ("Func f; In A; Var x, y; f[x, y] = A[x, y] + A[y, x];", (4, 6)),
    "f: x has extent 7; inputs have 5 along x": ("Func f; In A; Var x; Extent x = 7; f[x] = A[x];", (5,)),
    "f: x, y have extent 3; inputs have 5 along x, 3 along y": ("Func g, f; In A, B; Var x, y; Extent x = 3; g[y] = B[y]; f[x] = A[x] + g[x];", (5,), (3,)),
}


@pytest.mark.parametrize("line", DISAGREE)
def test_sizes_that_disagree_through_a_func_a_transpose_or_a_number_are_refused(line):
    """They were read beyond the end of the shorter."""
    text, *shapes = DISAGREE[line]
    with pytest.raises(ValueError, match=f"^{line}$"):
        dtkernels.compile(text)(*(random(*s) for s in shapes))
    same = [tuple(3 for _ in s) for s in shapes]
    check(text.replace("= 7", "= 3"), *(random(*s) for s in same))


@pytest.mark.parametrize("value, found", [(1.5, "1.5"), (torch.tensor(1.0), "torch.float32"), (float("inf"), "inf")])
def test_a_scalar_of_an_index_is_whole(value, found):
    program = dtkernels.compile("Func f; In A; SIn s; Var x; f[x] = A[x] + A[x - s];")
    with pytest.raises(TypeError, match=rf"^f: s is {found}; allowed: an integer, as it stands in an index$"):
        program(random(5), value)
    assert torch.equal(program(random(5), 2.0), program(random(5), torch.tensor(2)))


def test_an_output_that_another_wrapper_returns_says_so():
    text = "Func s, p; In A; Var x; s[x] = A[x] + 1; p[x] = s[x] * 2; s.fuse_at(p, x); p.compile(); s.compile();"
    program = dtkernels.compile(text)
    assert len(program(random(5))) == 2
    with pytest.raises(dtkernels.DTError, match="s is computed together with others: found a call of s; allowed: p, which returns p, s"):
        program.s(random(5))


def test_a_tile_that_is_too_large_at_these_sizes_is_refused():
    program = dtkernels.compile("Func f; In A; Var x, y; f[x, y] = 2 * A[x, y]; f.tensorize(x:0, y:0);")
    with pytest.raises(dtkernels.DTError, match="a tensor operation of f has at most 1048576 elements"):
        program(random(2048, 1024))


def test_what_takes_no_end_is_refused():
    with pytest.raises(dtkernels.DTError, match=r"<string>:1:1: an expression is nested too deeply"):
        dtkernels.compile("Func f; In A; Var x; f[x] = " + " + ".join(["A[x]"] * 900) + ";")


def test_sparsemax_of_large_elements_and_of_those_that_lie_far_from_0():
    x = torch.tensor([[1e7, 1e7, 0.0], [1e8, 0.0, 0.0], [1e6 + 0.5, 1e6, 1e6 - 4.0]])
    expected = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.75, 0.25, 0.0]])
    torch.testing.assert_close(dtkernels.ops.sparsemax(x), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("padding, old", [(0.0, -200.0), (-math.inf, -math.inf), (math.nan, 0.0)])
def test_grpo_gives_masked_tokens_no_gradient(padding, old):
    logprobs = torch.tensor([[-1.0, padding]], requires_grad=True)
    loss = dtkernels.ops.grpo(logprobs, torch.tensor([[-1.0, old]]), torch.tensor([[True, False]]), torch.ones(1), torch.tensor([[-1.0, 300.0]]), beta=0.1)
    loss.backward()
    assert loss.item() == -1 and logprobs.grad.tolist() == [[-1, 0]]


def test_log_probabilities_take_no_temperature_and_a_bias_is_no_mask():
    p = torch.randn(2, 5).log_softmax(-1)
    for call in (dtkernels.ops.kl_divergence, dtkernels.ops.jsd):
        with pytest.raises(ValueError, match="temperature is 2.0 with inputs='log_probs', which are taken as they are; allowed: 1"):
            call(p, p, temperature=2.0, inputs="log_probs")
    x = torch.randn(1, 1, 3, 4)
    with pytest.raises(TypeError, match="attention: bias is torch.bool; allowed: floating point; mask is what hides keys"):
        dtkernels.ops.attention(x, x, x, bias=torch.ones(3, 3, dtype=torch.bool))


def test_gradients_of_sparse_multi_token_attention_at_few_positions():
    s, w = torch.randn(1, 2, 4, 4, dtype=torch.bfloat16, requires_grad=True), torch.randn(2, 2, 3, 3, dtype=torch.bfloat16, requires_grad=True)
    grads = torch.autograd.grad(dtkernels.ops.multi_token_attention(s, w, sparse=True).sum(), (s, w))
    assert all(g.isfinite().all() for g in grads)
