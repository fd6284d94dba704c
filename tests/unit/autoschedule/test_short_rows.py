"""Kernels of rows: what the model counts of little work and of rows that are read twice, and the tiles that follow. Measured sizes are of softmax on an H100. Without torch."""

import math

import pytest

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.cost.kernel_plan import plans
from dtkernels.autoschedule.cost.outline import Known, Outline
from dtkernels.autoschedule.cost.predicted_time import predicted_time
from dtkernels.autoschedule.cost.work import Work
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.powers_of_two import next_power_of_two
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program, Schedule

H100 = target("h100")
SOFTMAX = "Func m, t, f; In A; Var x; RVar y; m[x] = rmax(A[x, y], y); t[x] = rsum(exp(A[x, y] - m[x]), y); f[x, y] = exp(A[x, y] - m[x]) / t[x];"
PLAIN = "Func f; In A; Var x; f[x] = maximum(A[x], 0);"


def known(text: str) -> Known:
    return Known(Outline.of(prepare_algorithm(parse(text).algorithm, ("f",))), ("f",))


OF_SOFTMAX, OF_PLAIN = known(SOFTMAX), known(PLAIN)


def rows(block: int, warps: int, step: int = 0, loop: str = "f, x", more: str = "") -> str:
    return f"m.fuse_at({loop}); t.fuse_at(f, x); f.block(x:{block}); f.tensorize(y:{step}, x:{block}); {more} f.num_warps({warps}); f.num_stages(3);"


def work(schedule: str, x: int, y: int) -> Work:
    (plan,) = plans(schedule, OF_SOFTMAX)
    return plan.at({"x": x, "y": y}, 2, H100, 1.6)


def default(text: str, **sizes: int) -> Schedule:
    return default_schedule(prepare_algorithm(parse(text).algorithm, ("f",)), ("f",), sizes, 2, H100)


def test_a_warp_that_does_much_by_itself_takes_long():
    """7.5 and 4.9 us were measured."""
    slow, fast = (predicted_time(rows(*choice), OF_SOFTMAX, {"x": 1203, "y": 51}, 2, H100) for choice in ((16, 2), (8, 8)))
    assert slow > 1.2 * fast


def test_many_short_programs_take_long_to_begin():
    """Blocks of 64, 128 and 1024 took 10.3, 7.5 and 5.7 us."""
    times = [predicted_time(f"f.block(x:{n}); f.tensorize(x:{n}); f.num_warps(1);", OF_PLAIN, {"x": 648630}, 2, H100) for n in (64, 128, 1024)]
    assert times[0] > 1.2 * times[1] > 1.2 * times[2]


def test_rows_that_share_threads_are_exchanged_more_often():
    few, many = work(rows(2, 2), 1203, 51), work(rows(16, 2), 1203, 51)
    assert many.issued > 5 * few.issued and work(rows(16, 2), 1203, 64).issued < many.issued, "and aligned rows have vectors"


def test_sums_that_each_step_rescales_hold_no_tile():
    """ptxas gave 64 registers to a tile of 32768 by 32 warps, and no stack."""
    apart, rescaled = (work(rows(1, 32, 32768, loop), 1024, 131072) for loop in ("f, x", "t, y"))
    assert rescaled.spilled == 1 < apart.spilled
    assert rescaled.gathered > apart.gathered, "it adds up over threads in each step"


def test_the_cache_holds_rows_that_few_programs_read_twice():
    once, twice = 2 * 2 * 1024 * 65536, 3 * 2 * 1024 * 65536
    assert work(rows(1, 32, 32768, "t, y", "f.evict(A:reread);"), 1024, 65536).memory == once
    assert once < work(rows(1, 4, 2048, "t, y", "f.evict(A:reread);"), 1024, 65536).memory <= twice


@pytest.mark.parametrize("x, y", [(1203, 51), (300, 51), (5000, 7)])
def test_little_work_is_spread_over_many_threads(x, y):
    schedule = default(SOFTMAX, x=x, y=y)
    elements = schedule.sizes("f", "block")["x"] * next_power_of_two(y)
    assert elements / (32 * schedule.number("f", "num_warps")) <= 8, str(schedule)
    programs = math.ceil(x / schedule.sizes("f", "block")["x"])
    assert programs * schedule.number("f", "num_warps") >= 132 or elements <= 128


def test_long_rows_are_read_by_programs_of_which_the_cache_holds_all_rows():
    """Rows that start anywhere: of 20343 elements 71 us in steps of 8192 by 8 warps and 82 by 16, of 36901 238 and 215, of 100001 in steps of 16384 by 16 warps 245 for 274."""
    short, wide, long = default(SOFTMAX, x=1747, y=20343), default(SOFTMAX, x=2900, y=36901), default(SOFTMAX, x=900, y=100001)
    assert (short.sizes("f", "tensorize")["y"], short.number("f", "num_warps")) == (8192, 8)
    assert (wide.sizes("f", "tensorize")["y"], wide.number("f", "num_warps")) == (8192, 16)
    assert long.sizes("f", "tensorize")["y"] == 16384 and long.number("f", "num_warps") >= 16


def test_rows_far_from_a_power_of_two_are_held_by_two_tiles():
    """4096 rows of 9856 elements took 60 us so, 72 in steps of 2048."""
    found = default(SOFTMAX, x=4096, y=9856)
    assert found.sizes("f", "tensorize")["y"] == 0 and found.names("f", "two_tiles") == ("y",)
    assert not default(SOFTMAX, x=4096, y=8192).names("f", "two_tiles")


def test_blocks_that_share_an_input_follow_one_another_where_the_l2_would_drop_it():
    rope = "Func f; In Q, C; Var h, s, d; f[h, s, d] = Q[h, s, d] * C[s, d];"
    assert [p.name for p in default(rope, h=32, s=16384, d=256).primitives if p.name == "map"] == ["map"]
    assert not [p for p in default(rope, h=32, s=1024, d=256).primitives if p.name == "map"]


def test_sums_down_columns_that_many_warps_share_pass_through_shared_memory():
    """64 channels of 128 elements took 187 us by 8 warps, 321 by 16: 16 parts of each sum meet in the banks."""
    text = "Func t, f; In A; Var b, i; RVar c; t[b, i] = rsum(A[b, c, i] * A[b, c, i], c); f[b, c, i] = A[b, c, i] * rsqrt(t[b, i]);"
    of_norm = known(text)
    few, many = (next(iter(plans(f"t.fuse_at(f, i); f.block(b:1, i:128); f.tensorize(c:0, b:1, i:128); f.num_warps({w});", of_norm))) for w in (8, 16))
    sizes = {"b": 8, "c": 64, "i": 512 * 512}
    assert many.at(sizes, 2, H100, 1.6).passes == 2 * few.at(sizes, 2, H100, 1.6).passes > 0
    assert default(text, **sizes).number("f", "num_warps") == 8


SUMS = "Func d, w, t, g; In A, B, v; Var x, y; d[x, y] = A[x, y] * v[y]; w[y] = rsum(A[x, y] * B[x, y], x); t[y] = rsum(B[x, y], x); g[] = rsum(t[y] * v[y], y);"


@pytest.mark.parametrize("x, y, one", [(1, 230, True), (39, 1, True), (4, 300, True), (256, 1024, False), (1, 100000, False)])
def test_few_elements_take_one_launch(x, y, one):
    """A number that sums what other outputs are made beside: two launches of one program each would take longer."""
    outputs = ("d", "w", "g")
    algorithm = prepare_algorithm(parse(SUMS).algorithm, outputs)
    schedule = default_schedule(algorithm, outputs, {"x": x, "y": y}, 2, H100)
    assert (len(lower(Program(algorithm, schedule))) == 1) == one


@pytest.mark.parametrize("x", [2048, 8])
def test_a_sum_of_rows_that_another_kernel_holds_is_made_there(x):
    """The gradients of a normalized weight: two sums of the same rows, one of them an output, the other in what is written along them."""
    text = "Func t, d, g; In D, V, Y, s; Var x; RVar y; t[x] = rsum(D[x, y] * Y[x, y], y); d[x, y] = D[x, y] * s[x] - t[x] * V[x, y]; g[x] = rsum(D[x, y] * V[x, y], y);"
    algorithm = prepare_algorithm(parse(text.replace("Var x; RVar y", "Var x, y")).algorithm, ("d", "g"))
    schedule = default_schedule(algorithm, ("d", "g"), {"x": x, "y": 3072}, 2, H100)
    assert "g" in schedule.fused() and len(lower(Program(algorithm, schedule))) == 1
