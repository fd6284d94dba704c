# ruff: noqa: E501 (programs read best on one line)
"""Loops over single elements around products are one loop with those over tiles, also where a mask makes several of these."""

import pytest
import torch
from oracle import check
from small_programs import random

import dtkernels

HEADS = "Func f; In A, B; Var g, l, d; RVar h, m; f[g, l, d] = rdot(where({condition}, A[g, h, m, l], 0), B[g, h, m, d], h, m);"
TILES = "f.block(g:1, l:16, d:16); f.tensorize(g:1, l:16, d:16, h:1, m:16); f.num_warps(4);"
#: g, h, m, l, d: some blocks along l have no step at all, one step, and several
SIZES = [(2, 3, 37, 61, 16), (1, 1, 16, 16, 16), (2, 5, 16, 33, 20), (3, 2, 70, 5, 16)]


def inputs(g, h, m, l, d):  # noqa: E741 (labels)
    return random((g, h, m, l), (g, h, m, d))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("more", ["", "f.split(m:2);", "f.split(h:2);", "f.persistent(); f.map(g, l, d);", "f.reorder(m, h);"])
@pytest.mark.parametrize("condition", ["l <= m", "m - l < 9 and l <= m", "m < l", "l >= 0"])
def test_terms_of_all_elements_are_added_once(condition, more, sizes):
    order = "" if "reorder" in more else "f.reorder(h, m);"
    check(HEADS.format(condition=condition) + TILES + order + more, *inputs(*sizes))


@pytest.mark.parametrize("sizes", [(2, 3, 4, 37, 21), (1, 2, 1, 16, 50)])
def test_three_loops_are_one(sizes):
    h, j, m, l = 3, *sizes[1:4]  # noqa: E741 (labels)
    text = "Func f; In A, B; Var l, d; RVar h, j, m; f[l, d] = rdot(where(l <= m, A[h, j, m, l], 0), B[h, j, m, d], h, j, m);"
    text += "f.block(l:16, d:16); f.tensorize(l:16, d:16, h:1, j:1, m:16); f.reorder(h, j, m);"
    assert "for j in" not in dtkernels.compile(text).source
    check(text, *random((h, j, m, l), (h, j, m, 16)))


def test_loops_over_whole_and_over_partial_tiles_each_go_through_all_heads():
    text = dtkernels.compile(HEADS.format(condition="l <= m") + TILES + "f.reorder(h, m);").source
    assert text.count("for m_step in ") == 3 and "for h in " not in text and text.count("h += tl.where(m_over, 1, 0)") == 3


def test_tiles_in_the_outer_loop_and_numbers_that_another_loop_computes_stay_apart():
    assert "for h in " in dtkernels.compile(HEADS.format(condition="l <= m") + TILES + "f.reorder(m, h);").source
    moving = "Func f; In A, B, n; Var l, d; RVar h, m; f[l, d] = rdot(where(m < n[h], A[h, m, l], 0), B[h, m, d], h, m);"
    text = moving + "f.block(l:16, d:16); f.tensorize(l:16, d:16, h:1, m:16); f.reorder(h, m);"
    assert "for h in " in dtkernels.compile(text).source
    a, b = random((3, 40, 20), (3, 40, 16))
    check(text, a, b, torch.tensor([40.0, 0.0, 17.0]))
