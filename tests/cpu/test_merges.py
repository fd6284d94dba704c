"""The kernel that adds up the parts of a split sum has blocks of its own, smaller than those that made the parts."""

import pytest
from oracle import check
from small_programs import random

import dtkernels
from dtkernels.codegen.lower import lower
from dtkernels.codegen.spread import ELEMENTS
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
