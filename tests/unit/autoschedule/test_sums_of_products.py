# ruff: noqa: E501 (programs read best on one line)
"""Default schedules of sums of products, of sums beside products, and of forwards that save what their backward reads. Without torch."""

import pytest

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program

H200 = target("h200")
LORAS = "Func a, f; In X, W, A, B; SIn s; Var x, y; RVar k, r; a[x, r] = rdot(X[x, k], A[r, k], k); f[x, y] = {};"
SEVERAL = "Func f; In A, B, C, D; Var b, x, y; RVar e, s; f[b, x, y] = rdot(A[b, x, e, s], B[y, e, s], e, s) + rdot(C[b, e, s, y], {}, e, s);"
CENTERED = """Func m, m_kept, v, c, f; In A, B; RVar n, i, j; m[i] = rsum(A[n, i], n) / len(n); m_kept[i] = cast(m[i], fp32);
v[i] = rsum((A[n, i] - m_kept[i]) * (A[n, i] - m_kept[i]), n); c[i, j] = rdot(A[n, i] - m_kept[i], B[n, j], n) * rsqrt(v[i] + 1); f[] = rsum(c[i, j] * c[i, j], i, j);"""
BIASED = "Func s, e, f; In Q, K, V, B, M; Var h, m, n; RVar l, d; s[h, m, l] = rdot(Q[h, m, d], K[h, l, d], d) + B[h, m, l] + M[m, l]; e[h, m, l] = exp(s[h, m, l]); f[h, m, n] = rdot(e[h, m, l] / rsum(e[h, m, l], l), V[h, l, n], l);"
DISTANCES = "Func d, f; In Q, X, A; Var m, t; RVar n, k; d[m, n] = rsum((Q[m, k] - X[n, k]) * (Q[m, k] - X[n, k]), k); f[m, t] = rdot(exp(-d[m, n]), A[n, t], n);"
GRADIENTS = "Func d, g, f, h; In Q, X, A, D; Var m, k, n; RVar t; d[m, n] = rsum((Q[m, k] - X[n, k]) * (Q[m, k] - X[n, k]), k); g[m, n] = rdot(D[m, t], A[n, t], t) * exp(-d[m, n]); f[m, k] = rsum(g[m, n] * X[n, k], n); h[n, k] = rsum(g[m, n] * Q[m, k], m);"


def scheduled(text: str, outputs: tuple[str, ...], itemsize: int = 2, **sizes: int) -> Program:
    algorithm = prepare_algorithm(parse(text).algorithm, outputs)
    return Program(algorithm, default_schedule(algorithm, outputs, sizes, itemsize, H200))


@pytest.mark.parametrize("outputs", [("f",), ("f", "a")])
@pytest.mark.parametrize("terms", ["rdot(X[x, k], W[y, k], k) + s * rdot(a[x, r], B[y, r], r)", "s * rdot(a[x, r], B[y, r], r) + rdot(X[x, k], W[y, k], k)"])
def test_a_short_product_beside_a_long_one_takes_its_tiles_and_its_accumulator(terms, outputs):
    """A forward of two such took 792 us in training on an H200, by 64 x 64, where that of inference took 190; in the other order a gradient took 352."""
    schedule = scheduled(LORAS.format(terms), outputs, x=4096, y=4096, k=4096, r=16).schedule
    assert {**schedule.sizes("f", "block")} == {"x": 128, "y": 256}


@pytest.mark.parametrize("operand, rows", [("D[b, x, e, s]", 1024), ("exp(D[b, x, e, s])", 200)])
def test_a_sum_of_products_over_several_labels_runs_along_them_as_one(operand, rows):
    """A gradient of 16 x 1024 x 1024 over 64 x 16 took 3337 us on an H200 with tiles along the first alone."""
    program = scheduled(SEVERAL.format(operand), ("f",), b=16, x=rows, y=1024, e=64, s=16)
    assert [p.args for p in program.schedule.primitives if (p.func, p.name) == ("f", "merge")] == [("e_s", "e", "s")], str(program.schedule)
    lower(program)


def test_kernels_read_an_output_that_another_one_writes():
    """The kernel of ``A - m`` added up a column for each of its elements, 377 us on an H200, where that of inference took 7."""
    program = scheduled(CENTERED, ("f", "m_kept", "v"), n=1024, i=2048, j=2048)
    assert program.schedule.fused()["m_kept"][0] == "v" and program.schedule.of("m_kept", "store")
    left = next(k for k in lower(program) if k.name == "c_left")
    assert {"A", "m_kept"} == {*left.reads} - {*left.writes}


def test_blocks_of_scores_with_unaligned_biases_are_smaller():
    """64 x 64 scores with two of 49 columns spilled 1704 bytes of a thread."""
    schedule = scheduled(BIASED, ("f",), h=2304, m=49, l=49, l_2=49, d=32, n=32).schedule
    tile = schedule.sizes("f", "tensorize")
    assert tile["m"] * (tile["l_2"] or 64) <= 64 * 32, str(schedule)


def test_distances_have_a_kernel_of_their_own_beside_a_product():
    """One kernel took 407 us on an H200, where the distances alone take 138."""
    program = scheduled(DISTANCES, ("f",), m=4096, n=4096, k=64, t=16)
    assert [k.name for k in lower(program)] == ["d_left", "d_right", "d", "f_part", "f"]


def test_gradients_of_distances_multiply_stored_operands_as_three_in_tf32():
    """Of a float32 operand that is converted in the loop they took 176 and 189 us, where cuBLAS takes 33."""
    program = scheduled(GRADIENTS, ("f", "h"), m=4096, n=4096, k=64, t=16)
    told = {p.func for p in program.schedule.primitives if p.name == "approximate"}
    assert {"f", "h"} <= told, str(program.schedule)
