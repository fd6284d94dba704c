"""Candidates and cost of sums that another kernel adds up in memory; rows of them where torch wants a fixed order."""

import pytest
import torch

from dtkernels.autoschedule.cost.kernel_plan import plans
from dtkernels.autoschedule.cost.outline import Known, Outline
from dtkernels.autoschedule.default_schedule import default_schedule, schedules
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang.parser import parse_schedule
from dtkernels.lang.schedule import Program
from dtkernels.ops.registry import shipped
from dtkernels.runtime.dispatch.dispatcher import call_key
from dtkernels.runtime.launch.wrapper_recorder import host_text, record
from dtkernels.runtime.select.row_ranking import candidates
from dtkernels.runtime.tables.table import Row
from dtkernels.tuning.records.problems import CallKind
from dtkernels.tuning.search.candidates import split_by_kernel
from dtkernels.tuning.search.space import Surroundings, Tiling, dimensions
from dtkernels.tuning.workers.compile_worker import completed, family_texts

SIZES = {"b": 2, "h": 8, "m": 2048, "l": 2048, "d": 128, "n": 128}
GROUPED = SIZES | {"K_1": 2, "h_in": 4}
H200 = target("h200")


def backward(**params):
    return shipped("attention").variant(tuple(sorted(params.items())), frozenset(), 0).pair(("Q", "K", "V")).backward


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("params, sizes", [({"causal": True}, SIZES), ({"causal": True, "group": 4}, GROUPED)], ids=["heads", "groups"])
def test_the_tuner_is_offered_one_sweep_and_the_default_schedule_is_not(params, sizes):
    variant = backward(**params)
    found = list(schedules(variant.algorithm, variant.outputs, sizes, 2, H200))
    added = [s for s in found if "accumulate_at" in str(s)]
    *free, fixed = added
    assert [line for s in added for line in str(s).splitlines() if "accumulate" in line] == [*["d_Q.accumulate_at(d_K, m);"] * len(free), "d_Q.accumulate_at(d_K, m, ordered);"]
    specialized = [s for s in free if s.of("d_K", "specialize_warps")]
    assert len(free) == 1 + len(specialized) and all("d_Q" in s.names("d_K", "descriptor") for s in specialized), "consumers add in bulk"
    assert "accumulate_at" not in str(default_schedule(variant.algorithm, variant.outputs, sizes, 2, H200))
    assert all("d_Q_sum_zero" in names or "d_Q_parts_zero" in names for s in added for names in [[k.name for k in lower(Program(variant.algorithm, s))]])
    blocks = fixed.sizes("d_K", "block")["l"]
    assert sizes["l"] / blocks <= 8 and blocks > fixed.sizes("d_K", "tensorize")["l"], "few parts of several tiles"


@pytest.mark.parametrize("group, parts", [(1, 1), (16, 4)])
def test_heads_that_share_keys_are_split_where_blocks_leave_multiprocessors_idle(group, parts):
    """22 x 13 blocks of keys are 2.2 rounds on 132 multiprocessors; in four parts 8.7."""
    variant = backward(**({"group": group} if group > 1 else {}))
    sizes = {"b": 22, "h": 16, "m": 1664, "l": 1664, "d": 128, "n": 128, **({"K_1": 16 // group, "h_in": group} if group > 1 else {})}
    found = default_schedule(variant.algorithm, variant.outputs, sizes, 2, H200)
    assert found.names("d_K", "specialize_warps") == ("m",) and found.sizes("d_K", "split").get("h_in", 1) == parts
    narrow = default_schedule(variant.algorithm, variant.outputs, {**sizes, "d": 64, "n": 64}, 2, H200)
    assert not narrow.of("d_K", "specialize_warps"), "measured with 128 columns"


def test_families_of_one_sweep_are_legal_for_heads_and_groups():
    for params, sizes in (({"causal": True}, SIZES), ({"causal": True, "group": 4}, GROUPED)):
        variant = backward(**params)
        whole = split_by_kernel(variant.algorithm, variant.outputs, str(default_schedule(variant.algorithm, variant.outputs, sizes, 2, H200)))
        texts = [t for t in family_texts(CallKind("attention", "backward", "bf16", tuple(params.items()), ("Q", "K", "V"))) if "accumulate_at" in t]
        ours = [t for t in texts if ("K_1" in t) == ("group" in params)]
        for text in (ours[0], ours[-1]):
            assert split_by_kernel(variant.algorithm, variant.outputs, completed(text, whole, variant.outputs)).roots == ("d_total", "d_K")


def test_the_space_varies_the_tiles_of_a_part():
    variant = backward(causal=True)
    ordered = next(s for s in schedules(variant.algorithm, variant.outputs, SIZES, 2, H200) if "ordered" in str(s))
    plan = next(p for p in split_by_kernel(variant.algorithm, variant.outputs, str(ordered)).plans if p.root == "d_K")
    around = Surroundings.of(variant.algorithm, plan, SIZES, True)
    tile = Tiling.of(plan).tile["l"]
    blocks = {change["block"]["l"] for values in dimensions(Tiling.of(plan), around) for change in values if "block" in change and "tile" not in change}
    assert {tile, 2 * tile, 2048} <= blocks and around.ordered == ("l",)


def test_the_cost_counts_additions_and_one_sweep_of_products():
    variant = backward(causal=True)
    known = Known(Outline.of(variant.algorithm), variant.outputs)
    texts = [str(s) for s in schedules(variant.algorithm, variant.outputs, SIZES, 2, H200)]
    apart = next(t for t in texts if "accumulate" not in t)
    swept = {order: next(t for t in texts if f"d_Q.accumulate_at(d_K, m{order});" in t) for order in ("", ", ordered")}
    work = {name: [p.at(SIZES, 2, H200, 1.6) for p in plans(t, known)] for name, t in (("apart", apart), *swept.items())}
    total = {name: sum(w.multiplied * w.programs for w in found) for name, found in work.items()}
    assert 0.65 < total[""] / total["apart"] < 0.8, "five products of seven"
    added = [w for w in work[""] if w.added]
    elements = SIZES["b"] * SIZES["h"] * SIZES["m"] * SIZES["d"]
    assert len(added) == 1 and added[0].cleared == elements * (4 + 4 + 2) and added[0].sums == 1
    assert next(w for w in work[", ordered"] if w.added).cleared > added[0].cleared


def test_rows_of_unordered_sums_are_refused_where_torch_wants_an_order():
    texts = [f"f.accumulate_at(g, m{order}); g.block(l:16);" for order in ("", ", ordered")]
    rows = [Row("attention", "backward", "bf16", {"m": 64}, text, "0" * 12, microseconds=1.0 + i) for i, text in enumerate(texts)]
    free = candidates(rows, rows[0].key, {"m": 64}, "0" * 12)
    assert [(c.row.schedule, c.refused) for c in free] == [(text, "") for text in texts]
    torch.use_deterministic_algorithms(True)
    try:
        first, second = candidates(rows, rows[0].key, {"m": 64}, "0" * 12)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (first.row.schedule, first.refused) == (texts[1], "")
    assert second.refused == "f would be added up in no fixed order, and torch.use_deterministic_algorithms(True) is set"


def test_calls_are_told_apart_by_whether_torch_wants_an_order():
    values = (torch.zeros(4),)
    free = call_key(values, False)
    torch.use_deterministic_algorithms(True)
    try:
        assert call_key(values, False) != free
    finally:
        torch.use_deterministic_algorithms(False)
    assert call_key(values, False) == free


def test_a_recorded_call_knows_that_its_sums_are_in_no_order(deterministic):
    algorithm = backward(causal=True).algorithm
    text = "d_Q.accumulate_at(d_K, m{}); d_K.block(b:1, h:1, l:64); d_K.tensorize(b:1, h:1, l:64, d:0, n:0, m:64); d_Q.compile(); d_K.compile(); d_V.compile();"
    shapes = {"total_log": (1, 1, 64)}
    given = [torch.empty(shapes.get(n, (1, 1, 64, 64)), device="meta", dtype=torch.float32) for n in algorithm.inputs] + [0.5 for _ in algorithm.scalars]
    hosts = [host_text(emit(Program(algorithm, parse_schedule(text.format(order))), "call")) for order in ("", ", ordered")]
    with pytest.raises(RuntimeError, match="d_Q is added up in no fixed order"):
        record(hosts[0], tuple(given))
    assert not record(hosts[1], tuple(given)).unordered
    torch.use_deterministic_algorithms(False)
    assert record(hosts[0], tuple(given)).unordered
