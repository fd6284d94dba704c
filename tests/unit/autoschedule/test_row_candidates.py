"""Rows, columns and elementwise kernels: which tiles are proposed, what is computed in one pass, and what the cost model counts of them. Without torch."""

import pytest

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.cost.candidate_time import CandidateTime
from dtkernels.autoschedule.cost.kernel_config import KernelConfig
from dtkernels.autoschedule.cost.kernel_plan import KernelPlan
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.autoschedule.problem import SchedulingProblem
from dtkernels.autoschedule.rules import registry
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program, Schedule

H100 = target("h100")
GROUPS = "Func f; In A; Var n, g; RVar c, s; f[n, g] = rsum(A[n, g, c, s], c, s);"
ROW_AND_COLUMNS = """Func t, d, {more} w; In G, A, v; Var {batch} x; RVar y; t[{batch} x] = rsum(G[{batch} x, y] * v[y], y);
d[{batch} x, y] = G[{batch} x, y] * v[y] - t[{batch} x] * A[{batch} x, y]; {other} w[{batch} y] = rsum(G[{batch} x, y] * A[{batch} x, y], x);"""


def problem(text: str, *outputs: str, **sizes: int) -> SchedulingProblem:
    algorithm = prepare_algorithm(parse(text).algorithm, outputs)
    return SchedulingProblem(algorithm, outputs, sizes, 2, H100)


@pytest.mark.parametrize("text, sizes", [
    (GROUPS, dict(n=8, g=32, c=10, s=4096)),
    ("Func t, f; In A; Var x; RVar y; t[x] = rsum(exp(A[x, y]), y); f[x, y] = exp(A[x, y]) / t[x];", dict(x=999, y=5000)),
    ("Func f; In A; Var y; RVar x; f[y] = rsum(A[x, y], x);", dict(x=7001, y=333)),
    ("Func f; In A; Var x, y; f[x, y] = A[x, y] + 1;", dict(x=77, y=1000)),
    ("Func f; In A; Var x, y; f[y, x] = A[x, y] + 1;", dict(x=77, y=1000)),
])  # fmt: skip
def test_all_proposals_are_legal_different_and_begin_with_the_usual_one(text, sizes):
    shape = problem(text, "f", **sizes)
    members = [*reversed(shape.algorithm.funcs)]
    fused = default_schedule(shape.algorithm, ("f",), sizes, 2, H100)
    placed = [p for p in fused.primitives if p.name == "fuse_at"]
    usual, *more = registry.proposals(shape, "f", members)
    assert usual == registry.row_tiles(shape, "f", members)
    assert len({*more}) > (20 if "f[y, x]" not in text else 1) and {c.num_warps for c in more} - {usual.num_warps}
    for config in [*dict.fromkeys(more)][::11]:
        lower(Program(shape.algorithm, Schedule((*placed, *config.statements()))))


def test_sums_of_planes_have_proposals_where_there_are_no_rows():
    shape = problem("Func f; In A; Var n; RVar c, h, w; f[n] = rsum(A[n, c, h, w], c, h, w);", "f", n=0, c=3, h=35, w=40)
    assert [*registry.proposals(shape, "f", ["f"])]


def test_channels_that_lie_one_after_the_other_are_taken_together():
    shape = problem(GROUPS, "f", n=8, g=32, c=10, s=4096)
    tiles = {dict(c.tiles)["c"] for c in registry.proposals(shape, "f", ["f"]) if dict(c.tiles).get("s") == 0}
    assert {1, 2, 4} <= tiles, "whole channels, several at once"


def test_the_plan_of_other_sizes_is_the_plan_made_anew():
    shape = problem(GROUPS, "f", n=8, g=32, c=10, s=4096)
    configs = [*dict.fromkeys(registry.proposals(shape, "f", ["f"]))]
    judge = CandidateTime(shape, "f", ["f"])
    assert [judge.microseconds(c) for c in configs] == [CandidateTime(shape, "f", ["f"]).microseconds(c) for c in configs]
    assert len(judge.plans) < len(configs) // 4


@pytest.mark.parametrize("batch, more, other, outputs", [
    ("", "", "", ("d", "w")),
    ("b,", "", "", ("d", "w")),
    ("", "e,", "e[x, y] = G[x, y] * v[y] + t[x] * A[x, y];", ("d", "e", "w")),
    ("", "r,", "r[x] = rsum(G[x, y] * A[x, y], y);", ("d", "r", "w")),
])  # fmt: skip
def test_rows_and_columns_are_summed_in_one_pass(batch, more, other, outputs):
    algorithm = prepare_algorithm(parse(ROW_AND_COLUMNS.format(batch=batch, more=more, other=other)).algorithm, outputs)
    sizes = dict(x=8192, y=3000) | (dict(b=4) if batch else {})
    schedule = default_schedule(algorithm, outputs, sizes, 2, H100)
    assert {*schedule.fused()} >= {*outputs} - {"w"}, schedule
    names = [k.name for k in lower(Program(algorithm, schedule))]
    assert {name.removesuffix("_part") for name in names} == {"w"}, "the pass over the rows, and the sum of its parts"


def test_a_row_that_is_read_again_costs_more_than_one_that_is_held():
    shape = problem("Func h, q, f; In A, B; Var x; RVar y; h[x, y] = A[x, y] + B[x, y]; q[x] = rsum(h[x, y] * h[x, y], y); f[x, y] = h[x, y] * q[x];", "f", x=8192, y=4096)
    judge = CandidateTime(shape, "f", ["f", "h", "q"], {"h": ("f", "y"), "q": ("f", "x")})
    held = KernelConfig("f", (("x", 1),), (("y", 0), ("x", 1)), num_warps=4)
    again = KernelConfig("f", (("x", 64),), (("y", 256), ("x", 64)), num_warps=32)
    assert judge.microseconds(again) > 1.3 * judge.microseconds(held), "an H100 took 146 us for 94"


def test_what_a_thread_has_no_registers_for_is_spilled():
    shape = problem("Func t, f; In A, B; Var x; RVar y; t[x] = rsum(A[x, y] * B[x, y], y); f[x, y] = A[x, y] * B[x, y] * t[x];", "f", x=4096, y=65536)
    config = KernelConfig("f", (("x", 1),), (("y", 0), ("x", 1)), num_warps=32)
    work = KernelPlan(config, shape.known, frozenset()).at(shape.sizes, 2, H100, 1.6)
    assert work.spilled > 1.5 and work.held == 1
    narrow = KernelPlan(KernelConfig("f", (("x", 1),), (("y", 1024), ("x", 1)), num_warps=4), shape.known, frozenset()).at(shape.sizes, 2, H100, 1.6)
    assert narrow.spilled == 1.0 and narrow.held > 8


def test_a_merge_of_numbers_takes_them_all_at_once():
    """One after another 1024 parts took 25 microseconds on an H100."""
    algorithm = prepare_algorithm(parse("Func f; In A; RVar x, y; f[] = rsum(A[x, y], x, y);").algorithm, ("f",))
    schedule = parse("Func f; In A; RVar x, y; f[] = rsum(A[x, y], x, y); f.tensorize(x:4, y:0); f.split(x:1024); f.compile();").schedule
    *_, merge = lower(Program(algorithm, schedule))
    (loop,) = [s for s in merge.body if type(s).__name__ == "Loop"]
    assert loop.axis.tile == 1024


def test_sums_over_several_dimensions_begin_with_the_last():
    """Threads of a warp lie along the last dimension; warps then exchange one number for each row, in place of a row for each warp."""
    algorithm = prepare_algorithm(parse(GROUPS).algorithm, ("f",))
    schedule = parse(GROUPS + " f.block(n:1, g:1); f.tensorize(c:16, s:64, n:1, g:1); f.compile();").schedule
    assert "tl.sum(tl.sum(f_acc, 1), 0)" in emit(Program(algorithm, schedule), "call", H100)


@pytest.mark.parametrize("x, y", [(5, 70), (1, 1), (0, 64), (64, 0), (1, 100000)])
def test_small_and_empty_sums_have_proposals_too(x, y):
    text = "Func f; In A, B; Var x; RVar y; f[x] = rsum(A[x, y] * B[y, x], y);"
    for given in (text, text.replace("B[y, x]", "B[x, y]"), "Func f; In A; RVar x, y; f[] = rsum(A[x, y], x, y);"):
        shape = problem(given, "f", x=x, y=y)
        schedule = default_schedule(shape.algorithm, ("f",), shape.sizes, 2, H100)
        assert lower(Program(shape.algorithm, schedule)) and [*registry.proposals(shape, "f", ["f"])]
