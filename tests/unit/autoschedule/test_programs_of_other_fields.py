"""Default schedules of programs from fields that the benchmarks have none of. Without torch."""

import pytest

from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import differentiable_form, prepare, prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.analysis.resources import spills
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang import expr as ex
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program

H100 = target("h100")
MONARCH = "Func h, y; In X, L, R; Var n, q, p; RVar k, i; h[n, k, q] = rdot(X[n, k, i], L[k, q, i], i); y[n, q, p] = rdot(h[n, k, q], R[q, p, k], k);"
BIAFFINE = "Func y; In X, U, Y; Var b, i, j, o; RVar k, l; y[b, i, j, o] = rsum(X[b, i, k] * U[o, k, l] * Y[b, j, l], k, l);"
FORCES = """Func r, a; In P, m; Var i, c; RVar j, e;
r[i, j] = rsum(pow(P[j, e] - P[i, e], 2), e) + 0.01;
a[i, c] = rsum(m[j] * (P[j, c] - P[i, c]) * pow(r[i, j], -1.5), j);"""
VICREG = """Func m, c, y; In A; RVar n, i, j;
m[i] = rmean(A[n, i], n);
c[i, j] = rsum((A[n, i] - m[i]) * (A[n, j] - m[j]), n) / (len(n) - 1);
y[] = rsum(where(i != j, c[i, j] * c[i, j], 0), i, j) / len(i);"""
TUCKER = "Func y; In G, A, B, C; Var i, j, k; RVar a, b, c; y[i, j, k] = rsum(G[a, b, c] * A[i, a] * B[j, b] * C[k, c], a, b, c);"
RETENTION = """Func y; In Q, K, V, g; Var b, h, m, n; RVar l, d;
y[b, h, m, n] = rdot(where(l <= m, rdot(Q[b, h, m, d], K[b, h, l, d], d) * exp2(g[h] * (m - l)), 0), V[b, h, l, n], l);"""
TWICE = """Func y, m, f; In X, W, z; Var b, o; RVar k;
y[b, o] = rdot(X[b, k], W[o, k], k) + z[o];
m[b, o] = y[b, o] * tanh(where(y[b, o] > 20, y[b, o], log1p(exp(minimum(y[b, o], 21)))));
f[b, o] = m[b, o] * tanh(where(m[b, o] > 20, m[b, o], log1p(exp(minimum(m[b, o], 21)))));"""
POOLED = """Func y, most, f; In X, W; Var b; RVar p, r, k;
y[b, p, r] = rdot(X[b, k], W[p, r, k], k);
most[b, p] = rmax(y[b, p, r], r);
f[b] = rsum(most[b, p], p);"""


def scheduled(algorithm, outputs, **sizes) -> Program:
    algorithm = prepare_algorithm(algorithm, outputs)
    return Program(algorithm, default_schedule(algorithm, outputs, sizes, 2, H100))


def backward(text, output, *wanted):
    found = gradient(differentiable_form(parse(text).algorithm, (output,)), (output,), wanted)
    return found.backward, tuple(found.grads.values())


@pytest.mark.parametrize(
    "text, made, sizes",
    [(MONARCH, ["h", "y_left"], dict(n=8192, k=64, i=64, q=64, p=64)), (BIAFFINE, ["y_dot"], dict(b=32, i=128, j=128, o=16, k=256, l=256))],
)
def test_a_product_that_each_element_of_another_would_make_again_is_stored(text, made, sizes):
    program = scheduled(parse(text).algorithm, ("y",), **sizes)
    assert [k.name for k in lower(program)] == [*made, "y"]


def test_a_limit_of_memory_that_the_user_sets_counts_first(monkeypatch):
    monkeypatch.setenv("DTKERNELS_MEMORY_LIMIT", "1")
    program = scheduled(parse(MONARCH).algorithm, ("y",), n=8192, k=64, i=64, q=64, p=64)
    assert [k.name for k in lower(program)] == ["y"]


def test_a_tensor_may_be_an_operand_of_two_sums_that_leave_no_label_over():
    assert [k.name for k in lower(scheduled(parse(FORCES).algorithm, ("a",), i=4096, j=4096, c=3, e=3))][-1] == "a"


def test_a_product_of_computed_operands_beside_its_sum_can_be_left_out():
    algorithm, outputs = backward(VICREG, "y", "A")
    assert outputs == ("d_A",) and lower(scheduled(algorithm, outputs, n=4096, i=2048, j=2048))


def test_products_inside_products_are_shared_from_the_inside_out():
    algorithm, _ = backward(TUCKER, "y", "G", "A", "B", "C")
    dots = [n for d in algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Dot)]
    assert len(dots) == len({*dots}) == 8, "of nine, two are shared by two gradients each, and one by three"


def test_sums_of_products_are_joined_to_the_sum_that_reads_them():
    algorithm, _ = backward(RETENTION, "y", "g")
    found = [n for n in algorithm["d_g"].expr.walk() if isinstance(n, ex.Reduce)]
    assert [n.labels for n in found] == [("b", "m", "l")]


def test_tiles_are_narrower_where_what_is_made_of_a_product_would_spill():
    algorithm = prepare_algorithm(parse(TWICE).algorithm, ("f", "y"))
    sizes = dict(b=1024, o=8192, k=8192)
    program = Program(algorithm, default_schedule(algorithm, ("f", "y"), sizes, 2, H100))
    assert not any(spills(k, sizes, {}, H100) for k in lower(program))
    wide = parse(TWICE + "f.block(b:128, o:256); f.tensorize(b:128, o:256, k:64); y.fuse_at(f, o); m.fuse_at(f, o); f.num_warps(8); f.compile(); y.compile();")
    assert any(spills(k, sizes, {}, H100) for k in lower(Program(algorithm, wide.schedule)))


@pytest.mark.parametrize("functions, spilled", [(1, False), (2, True)])
def test_functions_after_one_another_hold_their_registers_together(functions, spilled):
    """One mish after tiles of 128 x 256 leaves ptxas enough registers for an H200; two take 1152 bytes of a thread's stack."""
    mish = "{1}[b, o] = {0}[b, o] - 2 * {0}[b, o] / (exp(minimum({0}[b, o], 21)) * (exp(minimum({0}[b, o], 21)) + 2) + 2); "
    names = ["y", "m", "f"] if functions == 2 else ["y", "f"]
    text = f"Func {', '.join(names)}; In X, W, u; Var b, o; RVar k; y[b, o] = rdot(X[b, k], W[o, k], k) + u[o]; " + "".join(map(mish.format, names, names[1:]))
    text += "".join(f"{n}.fuse_at(f, o); " for n in names[:-1]) + "f.block(b:128, o:256); f.tensorize(b:128, o:256, k:64); f.num_warps(8);"
    (kernel,) = lower(prepare(parse(text)))
    assert spills(kernel, dict(b=1024, o=8192, k=8192), dict.fromkeys("XWuf", 2), H100) == spilled


def test_windows_beside_a_product_are_held_as_they_are():
    algorithm = parse(POOLED + "y.block(b:64, p:64); y.tensorize(b:64, p:64, r:1, k:64); f.block(b:1); f.tensorize(p:0, r:0); most.fuse_at(f, p);")
    source = emit(algorithm, "call", H100)
    assert "TILE_r=max(1, triton.next_power_of_2(size_r))" in source and "TILE_r=whole" not in source


def test_rows_of_sums_that_are_reduced_are_stored_for_one_kernel():
    """A softmax over squared distances: maxima, sums and the result were three kernels that each read the distances."""
    text = """Func d, t, f; In X, C; SIn b; Var x, j; RVar k; d[x, j] = rsum((X[x, k] - C[j, k]) * (X[x, k] - C[j, k]), k);
    t[x] = rsum(exp(-d[x, j] * b), j); f[x, j] = exp(-d[x, j] * b) / t[x];"""
    program = scheduled(parse(text).algorithm, ("f",), x=4096, j=4096, k=64)
    assert {*program.schedule.fused()} == {"t_shift", "t"}


def test_rows_by_two_tiles_beside_a_label_of_one_element():
    """A label of one element is in tiles and has no block."""
    assert scheduled(parse("Func f; In A; Var h; RVar b, m; f[h] = rsum(A[b, h, m], b, m);").algorithm, ("f",), b=1, h=12, m=1500)
