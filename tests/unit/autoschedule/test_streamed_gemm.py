# ruff: noqa: E501 (programs read best on one line)
"""The rule for products with few rows, few columns or a short sum: what it proposes, what it costs, and when it is taken. Without torch."""

import math
from dataclasses import replace

import pytest

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.cost.candidate_time import CandidateTime
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.autoschedule.problem import SchedulingProblem
from dtkernels.autoschedule.rules.candidates.streamed_gemm import streamed_candidates
from dtkernels.autoschedule.rules.registry import proposals
from dtkernels.autoschedule.rules.streams.rank_one import rank_one_configs
from dtkernels.autoschedule.rules.streams.single_terms import single_term_configs
from dtkernels.codegen.ir.nest import has_matrix_product
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import TARGETS, target
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program, Schedule
from dtkernels.lang.schedule_checks import check_schedule

H200 = target("h200")
MM = "Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k);"
NT = "Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[y, k], k);"
FORMS = {
    "plain": MM, "transposed": NT, "batch": "Func f; In A, B; Var b, x, y; RVar k; f[b, x, y] = rdot(A[b, x, k], B[b, k, y], k);",
    "group": "Func f; In A, B; Var b, x, y; RVar k; f[b, x, y] = rdot(A[b, x, k], B[b / 2, k, y], k);",
    "siblings": "Func f; In A, B, C; Var x, y; RVar k; f[x, y] = sigmoid(rdot(A[x, k], B[k, y], k)) * rdot(A[x, k], C[k, y], k);",
    "epilogue": "Func f; In A, B, c; Var x, y; RVar k; f[x, y] = maximum(rdot(A[x, k], B[y, k], k) + c[y], 0);",
    "vector": "Func f; In A, b; Var x; RVar k; f[x] = rdot(A[x, k], b[k], k);", "one number": "Func f; In a, b; RVar k; f[] = rdot(a[k], b[k], k);",
    "two sums": "Func f; In A, B; Var x, y; RVar k, l; f[x, y] = rdot(A[x, k, l], B[k, l, y], k, l);",
    "gathered": "Func f; In A, B, t; Var x, y; RVar k; f[x, y] = rdot(A[t[x], k], B[k, y], k);",
    "computed operand": "Func f; In A, B, s; Var x, y; RVar k; f[x, y] = rdot(A[x, k], cast(B[k, y], fp16) * s[k / 4], k);",
    "fused operand": "Func g, f; In A, B; Var x, y, k; g[x, k] = A[x, k] * A[x, k]; f[x, y] = rdot(g[x, k], B[k, y], k);",
}  # fmt: skip


def problem(text: str, sizes: dict[str, int], itemsize: int = 2, gpu=H200) -> SchedulingProblem:
    return SchedulingProblem(prepare_algorithm(parse(text).algorithm, ("f",)), ("f",), sizes, itemsize, gpu)


def scheduled(shape: SchedulingProblem) -> Schedule:
    return default_schedule(shape.algorithm, ("f",), shape.sizes, shape.itemsize, shape.target)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_every_candidate_is_legal(form, itemsize):
    labels = prepare_algorithm(parse(FORMS[form]).algorithm, ("f",)).labels
    count = 0
    for thin, size in ((x, n) for x in labels for n in (1, 5)):
        shape = problem(FORMS[form], dict.fromkeys(labels, 96) | {thin: size}, itemsize)
        fused = [p for p in scheduled(shape).primitives if p.name == "fuse_at"]
        for config in [*streamed_candidates(shape, "f", ["f", *(p.func for p in fused)])][::11]:
            schedule, count = Schedule((*fused, *config.statements())), count + 1
            check_schedule(schedule, shape.algorithm)
            assert not any(has_matrix_product(k.body) for k in lower(Program(shape.algorithm, schedule)))
    assert count > 1


@pytest.mark.parametrize("text, sizes", [
    (MM, {"x": 331, "y": 15670, "k": 1}), (NT, {"x": 1, "y": 1 << 20, "k": 3}), (MM, {"x": 240900, "y": 1, "k": 37}),
])  # fmt: skip
def test_products_that_only_move_memory_are_streamed(text, sizes):
    """Sums of hundreds of terms take the matrix units: 58 us for 1 x 8192 x 8192 on an H100, where a streamed kernel took 70."""
    shape = problem(text, sizes)
    schedule = scheduled(shape)
    assert not any(has_matrix_product(k.body) for k in lower(Program(shape.algorithm, schedule))), schedule
    tile = schedule.sizes("f", "tensorize")
    held = math.prod(tile.values()) / (32 * (schedule.number("f", "num_warps") or 4))
    assert 8 <= held <= 64, "a vector of 16 bytes or several for each thread, in registers"


@pytest.mark.parametrize("sizes", [{"x": 9, "y": 4096, "k": 4096}, {"x": 16, "y": 8192, "k": 8192}, {"x": 512, "y": 512, "k": 512}])
def test_more_rows_are_for_the_matrix_units(sizes):
    shape = problem(MM, sizes)
    assert not [*streamed_candidates(shape, "f", ["f"])]
    assert any(has_matrix_product(k.body) for k in lower(Program(shape.algorithm, scheduled(shape))))


def test_a_sum_over_a_label_of_the_result_is_left_to_others():
    text = "Func g, f; In A, b, C; Var x, y; g[x] = rdot(A[x, y], b[y], y); f[x, y] = g[x] * C[x, y];"
    shape = problem(text, {"x": 96, "y": 96})
    assert not [*streamed_candidates(shape, "f", ["f", "g"])]
    lower(Program(shape.algorithm, scheduled(shape)))


def test_a_loop_with_another_reduction_inside_is_left_to_others():
    text = "Func t, f; In A, B; Var x, y; RVar k, l; t[x, k] = rmax(A[x, k, l], l); f[x, y] = rdot(t[x, k], B[k, y], k);"
    assert not [*streamed_candidates(problem(text, {"x": 1, "y": 512, "k": 512, "l": 64}), "f", ["f", "t"])]


def test_few_rows_are_all_in_one_block_and_their_sums_in_registers():
    shape = problem(MM, {"x": 5, "y": 4096, "k": 4096})
    found = [*streamed_candidates(shape, "f", ["f"])]
    assert found and all(dict(c.blocks)["x"] == 5 for c in found)
    assert all(math.prod(size for _, size in c.tiles) <= 64 * 32 * c.warps for c in found)


def test_a_long_sum_of_few_blocks_is_split_over_programs():
    shape = problem(MM, {"x": 1, "y": 64, "k": 1 << 20})
    assert scheduled(shape).sizes("f", "split")["k"] > 1


@pytest.mark.parametrize("sizes", [{"x": 1, "y": 134, "k": 604}, {"x": 1, "y": 34, "k": 600}, {"x": 11, "y": 17, "k": 1829}])
def test_few_results_are_spread_over_multiprocessors(sizes):
    """Blocks of 4 columns that load all of the sum at once took 6.6 to 7.1 us on an H100, the usual ones of 32 columns, or for the matrix units, 9.9 to 11.2."""
    shape = problem(MM, sizes, gpu=target("h100"))
    schedule = scheduled(shape)
    assert not any(has_matrix_product(k.body) for k in lower(Program(shape.algorithm, schedule))), schedule
    block, tile = schedule.sizes("f", "block"), schedule.sizes("f", "tensorize")
    assert block["x"] == 1 and block["y"] <= 8 and tile["k"] >= sizes["k"], schedule


@pytest.mark.parametrize("form", ["plain", "transposed", "batch", "siblings", "epilogue", "vector", "gathered", "fused operand"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_products_of_one_term_are_tiled_as_elementwise_products(form, itemsize):
    shape = problem(FORMS[form], {"x": 900, "y": 777, "b": 6, "k": 1}, itemsize)
    members = ["f", *(["g"] if form == "fused operand" else [])]
    fused = [p for p in scheduled(shape).primitives if p.name == "fuse_at"]
    found = [*proposals(shape, "f", members)]
    assert found[1:] and set(single_term_configs(shape, "f", members)) <= {replace(c, approximations=()) for c in found}
    for config in found:
        schedule = Schedule((*fused, *config.statements()))
        check_schedule(schedule, shape.algorithm)
        assert not any(has_matrix_product(k.body) for k in lower(Program(shape.algorithm, schedule)))


@pytest.mark.parametrize("sizes", [{"x": 900, "y": 777, "k": 2}, {"x": 900, "y": 777, "k": 16}])
def test_sums_of_more_terms_are_left_to_others(sizes):
    assert not [*single_term_configs(problem(MM, sizes), "f", ["f"])]


def test_the_model_times_products_of_one_term_as_elementwise_products():
    """13000 x 15000 took 120 us in blocks of 32 x 256 and 128 in blocks of 4 x 1024, in tiles for the matrix units 142 to 252 (sigmoids of it, an H200)."""
    shape = problem(MM.replace("rdot(A[x, k], B[k, y], k)", "sigmoid(rdot(A[x, k], B[k, y], k))"), {"x": 13000, "y": 15000, "k": 1})
    found = {c.tiles: CandidateTime(shape, "f", ["f"]).microseconds(c) for c in proposals(shape, "f", ["f"])}
    assert min(found.values()) < 1.1 * found[(("x", 16), ("y", 512), ("k", 1))] < 140


@pytest.mark.parametrize("rows, terms, step, warps", [(240, 12000, 4096, 8), (1000, 4096, 4096, 8), (240, 2000, 2048, 4), (30, 8192, 1024, 4), (9000, 5000, 1024, 4)])
def test_programs_of_one_row_have_more_bytes_on_their_way(rows, terms, step, warps):
    """100 rows of 11000 took 8.5 us by 4096 terms and 8 warps, 11.0 by 1024 and 4 (an H200)."""
    schedule = scheduled(problem(MM, {"x": rows, "y": 1, "k": terms}))
    assert (schedule.sizes("f", "tensorize")["k"], schedule.number("f", "num_warps")) == (step, warps), schedule


RANK_ONE = "Func s, f; In A, B, C; Var m, n; RVar k, l; s[m, l] = rdot(A[m, k], B[k, l], k); f[m, n] = rdot(s[m, l], C[l, n], l);"


def test_a_product_of_rank_one_reads_the_matrix_as_a_matrix_vector_product_does():
    shape = problem(RANK_ONE, {"m": 16100, "n": 200, "k": 3730, "l": 1}, gpu=target("h100"))
    schedule = scheduled(shape)
    kernels = lower(Program(shape.algorithm, schedule))
    assert len(kernels) == 1 and not has_matrix_product(kernels[0].body), schedule
    tile = schedule.sizes("f", "tensorize")
    assert tile["m"] <= 4 and tile["k"] >= 512 and tile["n"] == 0, schedule


@pytest.mark.parametrize("text, sizes", [
    (RANK_ONE, {"m": 16100, "n": 200, "k": 3730, "l": 2}),  # the matrix would be read twice
    (RANK_ONE, {"m": 16100, "n": 2000, "k": 3730, "l": 1}), (RANK_ONE, {"m": 16100, "n": 200, "k": 30, "l": 1}),
    ("Func s, f; In A, B, C; Var h, m, n; RVar k, l; s[h, m, l] = rdot(A[h, m, k], B[h, k, l], k); f[h, m, n] = rdot(s[h, m, l], C[h, l, n], l);",
     {"h": 8, "m": 16100, "n": 100, "k": 3730, "l": 1}),
    ("Func s, f; In A, B, C; Var m, n; RVar k, j, l; s[m, l] = rdot(A[m, j, k], B[j, k, l], j, k); f[m, n] = rdot(s[m, l], C[l, n], l);",
     {"m": 16, "n": 100, "k": 3730, "j": 300, "l": 1}),
    ("Func z, f; In Q, K, V; Var m, d; RVar k, l; z[m, l] = exp(rdot(Q[m, k], K[l, k], k)); f[m, d] = rdot(z[m, l], V[l, d], l) / rsum(z[m, l], l);",
     {"m": 4096, "d": 256, "k": 256, "l": 1}),
])  # fmt: skip
def test_other_chains_are_left_to_others(text, sizes):
    shape = problem(text, sizes, gpu=target("h100"))
    members = [d.name for d in shape.algorithm.definitions]
    assert not [*rank_one_configs(shape, "f", members)]
    lower(Program(shape.algorithm, scheduled(shape)))


@pytest.mark.parametrize("gpu", TARGETS)
def test_every_gpu_has_room(gpu):
    for sizes in ({"x": 8192, "y": 1, "k": 5120}, {"x": 1, "y": 8192, "k": 8192}, {"x": 331, "y": 15670, "k": 1}):
        shape = problem(MM, sizes, gpu=TARGETS[gpu])
        lower(Program(shape.algorithm, scheduled(shape)))
