# ruff: noqa: E501 (programs read best on one line)
"""Copies of what is read in windows have room beyond the ends of their inputs, and loads no masks for it, against the float64 reference."""

import pytest
from oracle import check
from small_programs import random

import dtkernels

TILED = "f.merge(p, b, x); f.block(o:16, p:16); f.tensorize(o:16, p:16, c:16); f.stage(A:c, W:c);"
TRANSPOSED = "Func f; In A, W; Var b, o, x; RVar c, r; Extent x = A[2] + 2 * (W[2] - 1); f[b, o, x] = rdot(A[b, c, x - 2 * r], W[c, o, r], c, r); "
PADDED = "Func f; In A, W; Var b, o, x; RVar c, r; Extent x = (A[2] + 6 - 2 * (W[2] - 1) - 1) / 3 + 1; f[b, o, x] = rdot(A[b, c, 3 * x + 2 * r - 3], W[o, c, r], c, r); "
IMAGES = "Func f; In A, W; Var b, o, y, x; RVar c, r, s; Extent y = A[2] + W[2] - 1; Extent x = A[3]; f[b, o, y, x] = rdot(A[b, c, y - r, x + s - 1], W[o, c, r, s], c, r, s); "
INSIDE = "Func f; In A, W; Var b, o, x; RVar c, r; Extent x = A[2] - W[2] + 1; f[b, o, x] = rdot(A[b, c, x + r], W[o, c, r], c, r); "


@pytest.mark.parametrize("shapes", [((2, 18, 11), (18, 17, 3)), ((1, 3, 1), (3, 2, 4)), ((3, 16, 5), (16, 16, 1))])
def test_a_transposed_convolution(shapes):
    check(TRANSPOSED + TILED, *random(*shapes))
    assert "A_rows_size" not in dtkernels.compile(TRANSPOSED + TILED).source


@pytest.mark.parametrize("shapes", [((2, 18, 11), (17, 18, 3)), ((1, 3, 4), (2, 3, 1)), ((3, 16, 9), (16, 16, 5))])
def test_a_convolution_with_a_stride_and_zeros_beyond_the_ends(shapes):
    check(PADDED + TILED, *random(*shapes))
    assert "A_rows_size" not in dtkernels.compile(PADDED + TILED).source


def test_two_dimensions_with_margins():
    tiled = TILED.replace("p, b, x", "p, b, y, x")
    check(IMAGES + tiled, *random((2, 18, 4, 5), (17, 18, 3, 2)))
    assert "A_rows_size" not in dtkernels.compile(IMAGES + tiled).source


def test_windows_inside_the_input_need_no_margin_and_no_mask():
    source = dtkernels.compile(INSIDE + TILED).source
    assert "A_rows_size" not in source and "A_size" not in source
    check(INSIDE + TILED, *random((2, 18, 11), (17, 18, 3)))


SHARED = "Func f, g; In A, W, V; Var b, o, x, t; RVar c, r; Extent x = A[2] + W[2] - 1; Extent t = A[2]; f[b, o, x] = rdot(A[b, c, x - r], W[c, o, r], c, r); g[b, o, t] = rdot(A[b, c, t], V[c, o], c); "


def test_readers_share_a_copy_that_holds_what_each_needs():
    text = SHARED + TILED + TILED.replace("f.", "g.").replace("W:c", "V:c").replace("p", "q").replace("x", "t") + " f.compile(); g.compile();"
    check(text, *random((2, 18, 11), (18, 17, 3), (18, 17)))
    assert dtkernels.compile(text).source.count("def A_rows") == 1


def test_readers_whose_margins_differ_have_masks():
    text = SHARED.replace("A[b, c, t]", "A[b, c, t + 3]") + TILED + TILED.replace("f.", "g.").replace("W:c", "V:c").replace("p", "q").replace("x", "t") + " f.compile(); g.compile();"
    check(text, *random((2, 18, 11), (18, 17, 3), (18, 17)))
