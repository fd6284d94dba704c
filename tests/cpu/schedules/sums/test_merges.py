"""The kernel that adds up the parts of a split sum has blocks of its own, smaller than those that made the parts."""

import pytest
import torch
from oracle import check
from small_programs import random

import dtkernels
from dtkernels.codegen.ir.nest import Loop, statements
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.transforms.loops.split_k_merge import ELEMENTS
from dtkernels.lang.parser import parse

MM = "Func mm; In A, B; Var x, y; RVar k; mm[x, y] = rdot(A[x, k], B[k, y], k); "


@pytest.mark.parametrize(
    ("schedule", "blocks"),
    [
        ("mm.block(x:128, y:64); mm.tensorize(x:128, y:64, k:16);", {"x": 32, "y": 64}),
        ("mm.block(x:64, y:64); mm.tensorize(x:64, y:64, k:16);", {"x": 32, "y": 64}),
        ("mm.block(x:32, y:64); mm.tensorize(x:32, y:64, k:16);", {"x": 32, "y": 64}),
        ("mm.block(x:256); mm.tensorize(x:256, y:0, k:16);", {"x": 32}),
        ("mm.block(x:64, y:128); mm.tensorize(x:16, y:128, k:16);", {"x": 64, "y": 128}),
    ],
)
def test_blocks_of_a_merge(schedule, blocks):
    parts, merge = lower(parse(MM + schedule + "mm.split(k:4);"))
    assert {g.label: g.block for g in merge.grid} == blocks
    assert {g.label: g.block for g in parts.grid if g.label in blocks} == parse(MM + schedule).schedule.sizes("mm", "block")


@pytest.mark.parametrize("sizes", [(200, 70, 64), (37, 129, 90), (1, 1, 1)])
def test_a_merge_in_smaller_blocks_is_right(sizes):
    m, n, k = sizes
    text = MM + "mm.block(x:128, y:64); mm.tensorize(x:128, y:64, k:16); mm.split(k:4);"
    check(text, *random((m, k), (k, n)))
    assert 128 * 64 > ELEMENTS and "triton.cdiv(size_x, 32)" in dtkernels.compile(text).source


def test_what_a_merge_sums_further_stays_whole():
    text = """Func s, f; In A; Var x; RVar y, z; s[x, z] = rsum(A[x, y, z], y); f[x] = rsum(s[x, z] * s[x, z], z);
    s.fuse_at(f, x); f.block(x:64); f.tensorize(x:64, z:0, y:4); s.split(y:2);"""
    check(text, random((70, 9, 20)))


@pytest.mark.parametrize("parts", [1, 8, 24, 48])
def test_a_number_is_stored_beside_what_is_made_of_it(parts):
    """The number has no labels, so that no block of the merge goes along its last one."""
    text = "Func s, f; In A, B; Var x; RVar y; s[] = rsum(A[y] * A[y], y); f[x] = s[] * B[x]; s.fuse_at(f, x); s.compile(); f.compile(); "
    check(text + f"f.block(x:16); f.tensorize(x:16, y:16); f.split(y:{parts});", *random((2000,), (70,)))


ROWS_OF_QUERIES = """Func s, top, e, t, f; In Q, K, V; Var h, n; RVar l, d;
s[h, l] = rdot(Q[h, d], K[l, d], d); top[h] = rmax(s[h, l], l); e[h, l] = exp(s[h, l] - top[h]); t[h] = rsum(e[h, l], l);
f[h, n] = rdot(e[h, l], V[l, n], l) / t[h];
s.fuse_at(f, l); top.fuse_at(f, l); e.fuse_at(f, l); t.fuse_at(f, l); f.split(l:4); """


@pytest.mark.parametrize(
    ("schedule", "blocks"),
    [
        ("f.block(h:4); f.tensorize(h:16, n:0, l:16, d:0);", {"h": 4, "n": 32}),
        ("f.block(h:2); f.tensorize(h:16, n:0, l:16, d:0);", {"h": 4, "n": 32}),
        ("f.block(h:128); f.tensorize(h:128, n:0, l:16, d:0);", {"h": 64, "n": 32}),
    ],
)
def test_a_merge_relative_to_a_maximum_is_of_small_programs(schedule, blocks):
    _, merge = lower(parse(ROWS_OF_QUERIES + schedule))
    assert {g.label: g.block for g in merge.grid} == blocks
    for heads, width, length in ((7, 40, 70), (1, 1, 3), (130, 64, 64)):
        check(ROWS_OF_QUERIES + schedule, *random((heads, 24), (length, 24), (length, width)))


@pytest.mark.parametrize(
    ("parts", "schedule", "at_once", "warps"),
    [
        (16, "f.block(h:4); f.tensorize(h:16, n:0, l:16, d:0);", 16, 1),
        (64, "f.block(h:4); f.tensorize(h:16, n:0, l:16, d:0);", 32, 2),
        (24, "f.block(h:4); f.tensorize(h:16, n:0, l:16, d:0);", 8, 1),
        (5, "f.block(h:4); f.tensorize(h:16, n:0, l:16, d:0);", 1, 4),
        (16, "f.block(h:32); f.tensorize(h:32, n:0, l:16, d:0);", 4, 4),
        (16, "f.block(h:128); f.tensorize(h:128, n:0, l:16, d:0);", 1, 4),
    ],
)
def test_a_merge_relative_to_a_maximum_takes_several_parts_at_a_time(parts, schedule, at_once, warps):
    text = ROWS_OF_QUERIES.replace("split(l:4)", f"split(l:{parts})") + schedule
    _, merge = lower(parse(text))
    assert [s.axis.tile for s in statements(merge.body) if isinstance(s, Loop)] == [at_once]
    assert merge.num_warps == warps
    for heads, width, length in ((7, 40, 300), (1, 33, 3)):  # parts of several tiles; parts of nothing, whose maximum is -inf
        check(text, *random((heads, 24), (length, 24), (length, width)))


def test_parts_of_very_different_maxima_are_joined_relative_to_the_largest():
    text = ROWS_OF_QUERIES.replace("split(l:4)", "split(l:32)") + "f.block(h:4); f.tensorize(h:16, n:0, l:16, d:0);"
    q, k, v = random((5, 24), (600, 24), (600, 40))
    for first, last in ((40.0, 0.0), (0.0, 40.0)):
        check(text, q, k * torch.linspace(first, last, 600)[:, None], v)


def test_sums_of_two_shifts_and_of_none_merge_together():
    text = """Func top, low, s, t, f; In A; Var x; RVar y;
    top[x] = rmax(A[x, y], y); low[x] = rmax(-A[x, y], y); s[x, y] = exp(A[x, y] - top[x]); t[x, y] = exp(-A[x, y] - low[x]);
    f[x] = rsum(s[x, y], y) + rsum(t[x, y], y) * top[x] + rsum(A[x, y], y);
    top.fuse_at(f, y); low.fuse_at(f, y); s.fuse_at(f, y); t.fuse_at(f, y);
    f.block(x:2); f.tensorize(x:2, y:32); f.split(y:8);"""
    assert "tl.reduce(low, 0, nan_max)" in dtkernels.compile(text).source
    check(text, random((7, 500)))


def test_loops_over_parts_of_several_sums_have_counters_of_their_own():
    """One takes part by part, the other 32 at once: Triton keeps the counter of the first, and refuses a tile in its place."""
    text = """Func t, f; In A, B, w; Var n, c; RVar s, e; t[n] = rsum(A[n, s, e] * w[e], s, e); f[n, c] = rsum(A[n, s, c] * B[n, s, c], s) + t[n];
    t.fuse_at(f, n); f.block(n:1); f.tensorize(n:1, s:8, c:0); f.split(s:32);"""
    loops = [s.axis for s in statements(lower(parse(text))[-1].body) if isinstance(s, Loop)]
    assert [a.tile for a in loops] == [1, 32] and len({a.name for a in loops}) == 2
    check(text, *random((3, 70, 33), (3, 70, 33), (33,)))


def test_what_the_products_of_a_part_take_unchanged_is_loaded_by_each_step():
    schedule = "f.block(h:4); f.tensorize(h:16, n:0, l:16, d:0);"
    source = dtkernels.compile(ROWS_OF_QUERIES + schedule).source
    assert "    " * 2 + "Q = tl.load(" in source and "\n    Q = tl.load(" not in source
    large = dtkernels.compile(ROWS_OF_QUERIES + "f.block(h:32); f.tensorize(h:32, n:0, l:16, d:0);").source
    assert "\n    Q = tl.load(" in large
    whole = dtkernels.compile(ROWS_OF_QUERIES.replace("f.split(l:4);", "") + schedule).source
    assert "\n    Q = tl.load(" in whole


def test_what_more_than_products_take_is_loaded_once():
    text = ROWS_OF_QUERIES.replace("top[h] = rmax(s[h, l], l);", "top[h] = rmax(s[h, l], l); r[h] = rsum(Q[h, d], d);")
    text = text.replace("e, t, f;", "e, t, r, f;").replace("/ t[h];", "/ t[h] + r[h];") + "r.fuse_at(f, l); "
    text += "f.block(h:4); f.tensorize(h:16, n:0, l:16, d:0);"
    assert "\n    Q = tl.load(" in dtkernels.compile(text).source
    check(text, *random((7, 24), (70, 24), (70, 40)))


SOFTMAX = """Func top, total, f; In A, w; Var x, y;
top[x] = rmax(A[x, y], y); total[x] = rsum(exp(A[x, y] - top[x]) * w[y], y); f[x, y] = exp(A[x, y] - top[x]) / total[x]; {}
total.fuse_at(f, x); f.block(x:{}); f.tensorize(x:{}, y:16); f.split(y:{}); f.num_warps(8); f.compile();"""


@pytest.mark.parametrize(("fused", "kernels"), [("top.fuse_at(total, y); top.store();", 2), ("top.fuse_at(f, x);", 3)])
@pytest.mark.parametrize(("rows", "parts"), [(1, 8), (2, 3), (1, 64)])
def test_a_merge_that_writes_along_the_split_label_has_a_program_for_each_piece(fused, kernels, rows, parts):
    text = SOFTMAX.format(fused, rows, rows, parts)
    made = lower(parse(text))
    assert len(made) == kernels and {g.label: g.block for g in made[-1].grid} == {"x": rows, "y": 16}
    assert not any(isinstance(s, Loop) and s.axis.label == "y" for s in statements(made[-1].body)) and made[-1].num_warps == 8
    for x, y in ((3, 100), (5, 7), (2, 33)):  # parts may be empty
        check(text, random((x, y)) * 20, random((y,)).abs() + 0.1)


def test_a_merge_whose_loop_carries_a_sum_on_keeps_the_loop():
    text = """Func s, f; In A, B; Var x, z; RVar y; s[x] = rsum(A[x, y], y); f[x, z] = rsum(A[x, y] * s[x] * B[y, z], y);
    s.fuse_at(f, x); f.block(x:1, z:8); f.tensorize(x:1, z:8, y:16); f.split(y:4); f.compile();"""
    assert any(g.label == "y_part" for k in lower(parse(text)) for g in k.grid)
    check(text, random((3, 70)), random((70, 9)))


def test_what_a_merge_stores_before_its_loop_is_right_with_many_programs():
    text = """Func mean, f; In A; Var x, y; mean[x] = rsum(A[x, y], y) / len(y); f[x, y] = A[x, y] - mean[x];
    mean.fuse_at(f, x); f.block(x:2); f.tensorize(x:2, y:8); f.split(y:4); f.compile(); mean.compile();"""
    assert [{g.label: g.block for g in k.grid} for k in lower(parse(text))][-1] == {"x": 2, "y": 8}
    check(text, random((3, 45)))
