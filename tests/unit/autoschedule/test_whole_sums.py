"""Sums that one kernel finishes for another output, since it has all of their terms at once: choices, legality, work."""

import pytest

from dtkernels.autoschedule.cost.kernel_plan import plans
from dtkernels.autoschedule.cost.outline import Known
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang.parser import parse
from dtkernels.lang.schedule import Program
from dtkernels.ops.registry import shipped

H200 = target("h200")


def backward(**params):
    return shipped("attention").variant(tuple(sorted(params.items())), frozenset(), 0).pair(("Q", "K", "V")).backward


def sizes(b, h, m, l, d, group=1):  # noqa: E741
    return {"b": b, "h": h, "m": m, "l": l, "d": d, "n": d} | ({"K_1": h // group, "h_in": group} if group > 1 else {})


def scheduled(variant, sizes, itemsize=2, to=H200):
    found = default_schedule(variant.algorithm, variant.outputs, sizes, itemsize, to)
    return found, lower(Program(variant.algorithm, found))


@pytest.mark.parametrize("params, extents", [({"causal": True}, (128, 16, 77, 77, 64)), ({}, (64, 12, 197, 197, 64)), ({"group": 3}, (138, 15, 39, 39, 224)), ({}, (8, 12, 128, 128, 64))])
def test_short_sequences_have_one_kernel_of_all_gradients(params, extents):
    found, kernels = scheduled(backward(**params), sizes(*extents, params.get("group", 1)))
    assert "d_Q.accumulate_at(d_K, m, ordered);" in str(found) and len(kernels) == 1
    assert {*kernels[0].writes} == {"d_Q", "d_K", "d_V"}


SHARED = [({"causal": True, "group": 8}, (2, 32, 128, 128, 128), 8), ({"causal": True, "group": 4}, (6, 28, 50, 50, 128), 2), ({"group": 8}, (4, 24, 100, 60, 96), 8)]


@pytest.mark.parametrize("params, extents, parts", SHARED)
def test_few_programs_share_their_heads(params, extents, parts):
    found, kernels = scheduled(backward(**params), sizes(*extents, params["group"]))
    assert "d_Q.accumulate_at(d_K, m, ordered);" in str(found) and found.sizes("d_K", "split") == {"h_in": parts} and len(kernels) == 2


OTHERS = [(2, (8, 12, 2048, 2048, 64), {}),
          (2, (64, 12, 300, 300, 64), {}), (4, (128, 16, 77, 77, 64), {}),
          (2, (10, 17, 111, 111, 72), {"causal": True, "group": 17})]


@pytest.mark.parametrize("itemsize, extents, params", OTHERS)
def test_others_do_not(itemsize, extents, params):
    """Keys that no tile holds; float32, which was not measured; 10 programs of 17 heads."""
    assert "accumulate_at" not in str(scheduled(backward(**params), sizes(*extents, params.get("group", 1)), itemsize)[0])


@pytest.mark.parametrize("gpu", ["a100", "l40s", "h100", "b200", "mi300x"])
def test_where_a_gpu_has_less_room_no_sum_is_added_up_in_memory(gpu):
    for extents in ((128, 16, 77, 77, 64), (64, 12, 197, 197, 64), (138, 5, 39, 39, 224)):
        variant = backward()
        found, _ = scheduled(variant, sizes(*extents), to=target(gpu))
        known = Known.of(variant.algorithm, variant.outputs)
        assert not any(plan.added for plan in plans(str(found), known))


def test_any_program_of_two_products_of_a_product_has_it():
    algorithm = parse(
        "Func s, g, f; In A, B, C; Var b, m, l, d, e; s[b, m, l] = exp(rdot(A[b, m, d], B[b, l, d], d)); g[b, l, e] = rdot(s[b, m, l], C[b, m, e], m);"
        "f[b, m, d] = rdot(s[b, m, l], B[b, l, d], l);"
    ).algorithm
    found = default_schedule(algorithm, ("g", "f"), {"b": 4000, "m": 64, "l": 64, "d": 64, "e": 64}, 2, H200)
    assert "f.accumulate_at(g, m, ordered);" in str(found) and len(lower(Program(algorithm, found))) == 1
