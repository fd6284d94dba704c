"""Default schedules of attention where queries are few, keys are short, or their number is odd. Figures in comments are of an H100."""

import pytest

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.cost.outline import Known
from dtkernels.autoschedule.cost.predicted_time import predicted_time
from dtkernels.autoschedule.default_schedule import default_schedule, schedules
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.schedule import Schedule
from dtkernels.ops.attention_forms.specs import form_spec
from dtkernels.ops.registry import shipped
from dtkernels.runtime.bind.operator import Operator

H100 = target("h100")
SHORT = dict(b=6, h=45, m=39, l=39, d=256, n=256)
FEW = dict(b=6, h=48, m=11, l=247, d=224, n=224)
DECODING = dict(b=92, h=19, m=1, l=10187, d=64, n=64)


def variant(direction: str, params: dict):
    forward = shipped("attention").variant(tuple(sorted(params.items())), frozenset(), 0)
    return forward if direction == "forward" else forward.pair(("Q", "K", "V")).backward


def scheduled(direction: str, sizes: dict[str, int], **params) -> Schedule:
    found = variant(direction, params)
    group = params.get("group", 1)
    sizes = sizes | ({"K_1": sizes["h"] // group, "h_in": group} if direction == "backward" and group > 1 else {})
    return default_schedule(found.algorithm, found.outputs, sizes, 2, H100)


def fused(schedule: Schedule) -> set[str]:
    return set(schedule.fused())


def test_scores_shorter_than_the_heads_are_many_need_no_kernel_of_their_own():
    """Heads are no side of a tile: 39 keys beside 45 heads fill as much of it as beside one."""
    found = scheduled("forward", SHORT, group=5)
    assert fused(found) == {"scores", "total_shift", "e", "total"}


@pytest.mark.parametrize("sizes, group", [(SHORT, 5), (FEW, 16), (DECODING, 19)], ids=["short", "few", "decoding"])
def test_no_product_of_a_gradient_computes_an_operand_of_stored_scores_of_odd_rows(sizes, group):
    """Scores of 247 columns that three kernels read again took 695 us, and all kernels apart 66."""
    found = fused(scheduled("backward", sizes, group=group))
    assert found >= {"scores", "e", "d_e", "d_scores"} or not found & {"e", "d_scores"}


def test_other_ways_to_fuse_are_offered_too():
    found = variant("backward", {"group": 16})
    ways = [fused(s) for s in schedules(found.algorithm, found.outputs, FEW | {"K_1": 3, "h_in": 16}, 2, H100)]
    assert any("scores" in way for way in ways) and any("scores" not in way and "e" in way for way in ways) and set() in ways


def test_scores_that_are_stored_in_odd_rows_are_not_loaded_ahead():
    """Elements that are loaded one by one lie in registers until their use: three stages took 1990 us, one 175."""
    found = variant("backward", {"group": 19})
    stored = [s for s in schedules(found.algorithm, found.outputs, DECODING | {"K_1": 1, "h_in": 19}, 2, H100) if "scores" not in fused(s) and "d_V" in fused(s)]
    assert stored and all(s.number("d_K", "num_stages") == 1 for s in stored)


@pytest.mark.parametrize("sizes", [dict(b=10, h=25, m=1530, l=1530, d=160, n=160), dict(b=1, h=16, m=11520, l=11520, d=64, n=64)])
def test_a_sum_under_a_mask_is_split_over_what_the_mask_does_not_cut(sizes):
    """Parts of the queries differ in how many keys they see; heads do not."""
    found = scheduled("backward", sizes, causal=True, group=sizes["h"])
    split = found.sizes("d_K", "split")
    assert set(split) == {"h_in"} and 2 <= split["h_in"] <= 4


def test_programs_that_all_run_at_once_share_long_and_short_loops():
    """Blocks of 32 keys, none of them split, took 11.6 ms on an H200 with the gradient of queries, cuDNN 5.7."""
    found = scheduled("backward", dict(b=4, h=86, m=4509, l=4509, d=32, n=32), causal=True, group=86)
    assert found.sizes("d_K", "split").get("h_in", 1) > 1 and found.sizes("d_K", "block")["l"] >= 64


def test_a_short_sum_under_a_mask_is_not_split():
    assert not scheduled("backward", dict(b=34, h=4, m=4, l=4, d=40, n=40), causal=True, group=2).sizes("d_K", "split")


def test_blocks_of_sixteen_queries_have_few_warps():
    found = scheduled("forward", FEW, group=16)
    assert found.sizes("attention", "block")["m"] == 16 and found.number("attention", "num_warps") <= 4


def test_blocks_are_halved_where_the_last_wave_of_whole_ones_is_nearly_empty():
    """270 blocks of 128 on 132 multiprocessors: 48.4 us so and 40.6 halved."""
    few, many = (scheduled("forward", dict(b=b, h=15, m=703, l=703, d=72, n=72)) for b in (3, 30))
    assert few.sizes("attention", "block")["m"] == 64 and many.sizes("attention", "block")["m"] == 128


@pytest.mark.parametrize("b, h, m, columns, group, causal, funcs", [
    (2, 16, 2048, 256, 1, True, ("d_K", "d_V")),  # 242 us for 270 by Triton's d_K; its d_Q is the faster one, 216 for 298
    (6, 89, 425, 224, 89, True, ("d_K", "d_V")),  # 446 for 500, and 257 for 392
    (1, 21, 17310, 96, 3, False, ("d_Q", "d_K")),  # both: 15469 for 19339
    (2, 28, 2333, 128, 7, True, ("d_Q", "d_K")),  # both: 607 for 789, rows that begin anywhere
])  # fmt: skip
def test_gradients_take_specialized_warps_where_these_were_measured_to_be_faster(b, h, m, columns, group, causal, funcs):
    """On an H200, of the same programs."""
    found = scheduled("backward", dict(b=b, h=h, m=m, l=m, d=columns, n=columns), causal=causal, group=group)
    assert tuple(f for f in ("d_Q", "d_K", "d_V") if found.names(f, "specialize_warps")) == funcs


def test_a_group_that_decodes_is_split_where_blocks_are_fewer_than_multiprocessors():
    """92 blocks: 156 us whole, 114 in 16 parts."""
    assert scheduled("forward", DECODING, group=19).sizes("attention", "split")["l"] >= 4


ONE_QUERY = """Func s, e, t, out; In Q, K, V; Var b, h, n; RVar l, d; s[b, h, l] = rdot(Q[b, h, d], K[b, {0}, l, d], d); e[b, h, l] = exp(s[b, h, l]);
t[b, h] = rsum(e[b, h, l], l); out[b, h, n] = rdot(e[b, h, l], V[b, {0}, l, n], l) / t[b, h];"""


def of_one_query(index: str, columns: int, **sizes: int) -> Schedule:
    algorithm = prepare_algorithm(parse(ONE_QUERY.format(index)).algorithm, ("out",))
    return default_schedule(algorithm, ("out",), sizes | {"d": columns, "n": columns}, 2, target("h200"))


@pytest.mark.parametrize("index, sizes, heads", [("h / 4", dict(b=1, h=32, l=30000), (4, 16)), ("h / 5", dict(b=3, h=40, l=7777), (5, 16))])
def test_a_program_of_one_query_without_a_label_for_it_packs_heads_as_the_op_does(index, sizes, heads):
    """The loop is split too: each head had read its keys by itself, in one program."""
    found = of_one_query(index, 128, **sizes)
    assert (found.sizes("out", "block")["h"], found.sizes("out", "tensorize")["h"]) == heads and found.sizes("out", "split")["l"] >= 4, found


@pytest.mark.parametrize("columns, sizes, step, warps, parts", [(128, dict(b=1, h=32, l=30000), 16, 1, 64), (64, dict(b=64, h=32, l=2000), 32, 2, 1)])
def test_heads_of_one_query_that_share_no_keys_are_few_warps_each(columns, sizes, step, warps, parts):
    """135 us for 374, and 267 for 331 (an H200)."""
    found = of_one_query("h", columns, **sizes)
    assert (found.sizes("out", "tensorize")["l"], found.number("out", "num_warps"), found.sizes("out", "split").get("l", 1)) == (step, warps, parts), found


@pytest.mark.parametrize("direction, func, sizes, group, tiles", [
    ("backward", "d_K", dict(b=2, h=52, m=923, l=39, d=112, n=112), 1, {"l": 64, "m": 64}), ("backward", "d_Q", dict(b=2, h=8, m=1000, l=1000, d=256, n=256), 1, {"m": 128, "l": 32}),
    ("forward", "attention", dict(b=8, h=16, m=1100, l=1100, d=64, n=64), 8, {"m": 64, "l": 64}),
])  # fmt: skip
def test_the_tiles_of_a_chain_are_those_measured_to_be_the_fastest(direction, func, sizes, group, tiles):
    """Of 20 schedules on an H100, or within 5% of it: benchmarks/h100/candidate_trials_52.safetensors."""
    found = scheduled(direction, sizes, group=group).sizes(func, "tensorize")
    assert {label: found[label] for label in tiles} == tiles


def test_heads_that_a_gradient_sums_over_are_split_over_programs():
    """Scores of short queries are not made again for blocks of columns: 105 heads that share 7 took 109 us so, cuDNN 62."""
    found = scheduled("backward", dict(b=3, h=105, m=108, l=108, d=80, n=80), group=15)
    assert "d_V" in fused(found) and found.sizes("d_K", "split") and "d" not in found.sizes("d_K", "block")


def test_steps_go_along_queries_where_they_are_many():
    """Steps of one query and 15 heads took 4.6 ms on an H200, cuDNN 1.3; one query has its heads side by side."""
    many = scheduled("backward", dict(b=132, h=30, m=268, l=268, d=72, n=72), group=15, causal=True)
    assert many.sizes("d_K", "tensorize")["m"] >= 32 and many.sizes("d_K", "tensorize")["h_in"] == 1
    one = scheduled("backward", dict(b=53, h=51, m=1, l=6306, d=72, n=72), group=17)
    assert one.sizes("d_K", "tensorize")["h_in"] >= 16


def test_pages_that_data_picks_are_no_windows():
    """Scores of paged keys stay in their kernel: stored, they took 16 bytes for each query and key."""
    found = Operator(form_spec("attention_paged")).variant((("group", 4),), frozenset(), 0)
    sizes = dict(b=1, h=4, m=4096, l=4096, d=64, n=64)
    assert {"scores", "e"} <= fused(default_schedule(found.algorithm, found.outputs, {x: sizes.get(x, 1) for x in found.algorithm.labels}, 2, H100))


def test_index_arithmetic_costs_nothing_for_each_element():
    """Heads that share keys, ``K[b, h / 8, l, d]``, divide once a program: a gradient of queries was predicted to take 292 us, and took 127."""
    alone, shared = (variant("backward", {"group": g}).dispatch.known_outline.funcs["scores"] for g in (1, 8))
    assert (alone.heavy, alone.light) == (shared.heavy, shared.light)


def test_numbers_in_rows_that_begin_anywhere_take_specialized_warps_little_longer():
    """Their producer copies these by words: 607 us at 2333 positions, where Triton's kernels, which the model preferred, took 789 (an H200)."""
    found = variant("backward", {"causal": True, "group": 7})
    known, even = Known.of(found.algorithm, found.outputs), dict(b=2, h=28, m=2336, l=2336, d=128, n=128, K_1=4, h_in=7)
    schedule = str(default_schedule(found.algorithm, found.outputs, even, 2, H100))
    times = [predicted_time(schedule, known, even | {"m": rows, "l": rows}, 2, H100) for rows in (2336, 2333)]
    assert "d_K.specialize_warps(m)" in schedule and times[1] <= 1.2 * times[0]
