# ruff: noqa: E501 (programs read best on one line)
"""Loops over masked tiles run where the mask is, and without a mask where all of it is true."""

import pytest
import torch
from oracle import check
from small_programs import MASKED, random

import dtkernels
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.lang.schedule import Program
from dtkernels.ops.registry import shipped
from dtkernels.runtime.aot_build import known_labels


def source(text):
    return dtkernels.compile(text).source


CONDITIONS = [
    "l <= m", "l < m", "m >= l", "m > l", "l >= m", "l > m", "not m < l", "l + o <= m", "l <= m + o", "l - m <= o", "m - l < w and l <= m",
    "m - l < w", "l - m < w and m - l < w", "l == m", "m == l + o", "2 * m >= l", "l <= 2 * m - o", "l < 7", "l >= 20", "l < len(d)", "l <= m - len(n)", "l < len(l) - 3",
    "l <= m and l > 4 and m < 20", "l <= m or l > 15", "2 * l <= m", "l != m",
]  # fmt: skip


@pytest.mark.parametrize("sizes", [(33, 40), (16, 16), (40, 23), (1, 1)])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_mask_ranges(condition, sizes):
    m, l = sizes  # noqa: E741 (labels)
    check(MASKED.format(condition=condition, scalars="", m=16, l=8), *random((m, 16), (l, 16), (l, 16)))


@pytest.mark.parametrize("tiles", [(16, 16), (8, 32), (32, 4), (1, 8), (1, 1), (8, 1), (16, 0)])
@pytest.mark.parametrize("condition", ["l <= m", "m - l < w and l <= m", "l > m", "2 * l <= m"])
def test_mask_ranges_by_tile(condition, tiles):
    check(MASKED.format(condition=condition, scalars="", m=tiles[0], l=tiles[1]), *random((21, 16), (35, 16), (35, 16)))


HEADS = """Func scores, seen, f; In Q, K, V; Var b, h, m, n; RVar l, d;
scores[b, h, m, l] = rdot(Q[b, h, m, d], K[b, h, l, d], d);
seen[b, h, m, l] = where(l <= m, scores[b, h, m, l], 0);
f[b, h, m, n] = rdot(seen[b, h, m, l], V[b, h, l, n], l);
scores.fuse_at(f, l); seen.fuse_at(f, l);
f.block(b:1, h:1, m:16); f.tensorize(b:1, h:1, m:16, n:0, l:16, d:0); f.num_warps(4); {order} f.compile();"""


@pytest.mark.parametrize("shape", [(5, 3, 40), (2, 6, 33), (1, 5, 16)])
@pytest.mark.parametrize("order", ["f.map(b:b1/4, m, b1, h);", "f.map(b, h:h1/4, m, h1);", "f.map(b, m, h);", "f.map(h:h1/2, b:b1/3, m, b1, h1);", "f.map(b:b1/32, m, b1, h); f.persistent();"])
def test_the_longest_blocks_of_each_group_go_first_and_all_of_them_go(order, shape):
    b, h, m = shape
    check(HEADS.format(order=order), *random((b, h, m, 16), (b, h, m, 16), (b, h, m, 16)))


@pytest.mark.parametrize("value", [0, 4, -7, 2.5, -2.5, 100.0, -100])
@pytest.mark.parametrize("condition", ["l <= m + u", "l < m + u", "m - l < u and l <= m", "l - u >= m", "l > m - u"])
def test_mask_ranges_by_a_scalar(condition, value):
    check(MASKED.format(condition=condition, scalars="SIn u;", m=8, l=8), *random((21, 16), (35, 16), (35, 16)), value)
    check(MASKED.format(condition=condition, scalars="SIn u;", m=8, l=8), *random((21, 16), (35, 16), (35, 16)), torch.tensor([value], dtype=torch.float32))


SUMS = """Func s, f; In A, lo, n; SIn u, w; Var m; RVar l;
s[m, l] = where({condition}, A[m, l], 0); f[m] = rsum(s[m, l], l);
s.fuse_at(f, l); f.block(m:4); f.tensorize(m:4, l:8); f.compile();"""


@pytest.mark.parametrize("values", [(0, 0), (2, -3), (-2.25, 0.5), (50, -45), (float("nan"), 1)])
@pytest.mark.parametrize("condition", ["l < n[m] + u and l >= lo[m] - w", "l <= m + u + w and l >= lo[m] - n[m]", "l < n[m] - u + w - lo[m]", "not l <= m - u - n[m] and l < lo[m] + w"])
def test_mask_ranges_by_a_sum_of_numbers(condition, values):
    """Numbers that are no integers, and one that is none, are added before the bound is rounded."""
    text = SUMS.format(condition=condition)
    a = random((11, 40))
    lo, n = torch.tensor([0.0, 3.5, 2, -4, 39, 7, 1, 0.25, 60, 5, 2]), torch.tensor([9.0, 40, 0, -3.5, 17, 2.5, float("inf"), 33, 12, 64, 1])
    check(text, a, lo, n, *values)
    assert "l_begin" in source(text) or "l_end" in source(text)


def test_a_negated_comparison_holds_of_nan():
    text = SUMS.format(condition="not l <= n[m]").replace("lo, n", "n").replace("SIn u, w; ", "")
    check(text, random((4, 40)), torch.tensor([float("nan"), 60.0, 50.0, 50.0]))


@pytest.mark.parametrize("program", [
    "f[x] = rsum(where(y <= x, A[x, y], 0), y);",
    "f[x] = rsum(where(y <= x, 0, A[x, y]), y);",
    "f[x] = rmax(where(y < x, A[x, y], -inf), y);",
    "f[x] = rmin(where(y - x > 2, A[x, y], inf), y);",
    "f[x] = rsum(where(y < x, A[x, y], 1), y);",  # what is masked is not neutral
    "f[x] = rmax(where(y < x, A[x, y], 0), y);",
    "f[x] = rsum(where(y < x, 0 * A[x, y] + 1, 0) * A[x, y], y);",
    "f[x] = rsum(where(y <= x, A[x, y], 0) + where(x + 4 < y, A[x, y], 0), y);",
])  # fmt: skip
@pytest.mark.parametrize("schedule", ["f.block(x:4); f.tensorize(x:4, y:8);", "f.tensorize(y:4);", "f.block(x:4); f.tensorize(x:2, y:1);", "f.tensorize(x:0, y:8);", "f.block(x:8); f.tensorize(x:4, y:0);"])
def test_mask_ranges_of_plain_reductions(program, schedule):
    check(f"Func f; In A; Var x; RVar y; {program} {schedule}", random((13, 29)))


def test_masked_tiles_are_skipped_and_whole_tiles_carry_no_mask():
    text = source(MASKED.format(condition="l <= m", scalars="", m=16, l=8))
    loops = text.split("for l_start in ")[1:]
    assert [loop.split(":")[0] for loop in loops] == ["range(0, l_partial, TILE_l)", "range(l_partial, l_end, TILE_l)"]
    assert "<= m[:, None]" not in loops[0] and "l_ok" not in loops[0] and "<= m[:, None]" in loops[1]


def test_window_has_two_ends():
    text = source(MASKED.format(condition="m - l < w and l <= m", scalars="", m=16, l=8))
    assert text.count("for l_start in range(") == 3


def test_reductions_whose_masked_terms_count_are_not_cut():
    assert source("Func f; In A; Var x; RVar y; f[x] = rsum(where(y < x, A[x, y], 1), y); f.block(x:4); f.tensorize(x:4, y:8);").count("for y_start") == 1


def test_tiles_are_skipped_inside_a_loop_over_heads_that_share_keys_too():
    """There the gradient's heads are picked by index arithmetic, whose bounds are choices around every value of the inner loop."""
    variant = shipped("attention").variant((("causal", True), ("group", 4)), frozenset(), 0).pair(("Q", "K", "V")).backward
    sizes = {label: {"b": 1, "h": 8, "K_1": 2, "h_in": 4}.get(label, 64 if label in "dn" else 2048) for label in known_labels(variant.algorithm)}
    text = emit(Program(variant.algorithm, default_schedule(variant.algorithm, variant.outputs, sizes, 2, target("a100"))), "call")
    inner = text.split("    m_start = tl.cast(")  # each loop goes through all heads
    assert [loop.split(",")[0] for loop in inner[1:3]] == ["m_begin", "m_full"] and "tl.where(l[:, None] <= m" not in inner[2]
    assert " seen = " in inner[1] and " seen = " not in inner[2] and "scores_unscaled = tl.dot(" in inner[2]  # a choice that is made needs no name
    q, k, v = (t.requires_grad_() for t in random((1, 8, 37, 16), (1, 2, 45, 16), (1, 2, 45, 16)))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    grad = random((1, 8, 37, 16))
    found = torch.autograd.grad(dtkernels.ops.attention(q, k, v, causal=True), (q, k, v), grad)
    wide = [exact[0], *(t.repeat_interleave(4, 1) for t in exact[1:])]
    wanted = torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True), exact, grad.double())
    for got, right in zip(found, wanted):
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-5)
