# ruff: noqa: E501 (programs read best on one line)
"""Copies of what is read in windows have room beyond the ends of their inputs, and loads no masks for it, against the float64 reference."""

import pytest
import torch
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


PHASES = "Func g, f; In A, W; Var p, b, o, t, x; RVar c, q; Extent p = 2; Extent x = 2 * (A[2] - 1) + W[2]; Extent t = (2 * (A[2] - 1) + W[2] - 1) / 2 + 1; Extent q = (W[2] - 1) / 2 + 1; g[p, b, o, t] = rdot(A[b, c, t - q], W[c, o, p + 2 * q], c, q); f[b, o, x] = g[x % 2, b, o, x / 2]; "


@pytest.mark.parametrize("taps", [1, 2, 3, 4])
def test_phases_are_columns_whose_last_taps_may_lie_beyond_the_weights(taps):
    tiled = "g.merge(m, b, t); g.merge(n, p, o); g.block(m:16, n:16); g.tensorize(m:16, n:16, c:16); g.stage(A:c, W:c);"
    check(PHASES + tiled, *random((2, 18, 5), (18, 5, taps)))


CHUNKED = "Func d, f; In A, W, V; Var b, o, y, x; RVar c, r; Extent y = A[2] + 2 - W[1] + 1; d[b, c, y, x] = rsum(A[b, c, y + r - 1, x] * W[c, r], r); f[b, o, y, x] = rdot(d[b, c, y, x], V[o, c], c); "


@pytest.mark.parametrize("size", [2, 3, 16])
def test_labels_merged_with_one_that_is_cut_into_pieces_have_the_extent_of_the_piece(size):
    tiled = "f.merge(p, y, x); f.block(b:1, o:16, p:16); f.tensorize(b:1, o:16, p:16, c:16); "
    check(CHUNKED + tiled + f"d.chunk(y:{size});", *random((2, 17, 7, 5), (17, 3), (18, 17)))


STRIDED = "Func f; In A, W; Var p, b, o, x; RVar c, r; Extent p = 2; Extent x = A[2]; Extent r = W[2]; f[p, b, o, x] = rdot(where(p + 2 * r < 3, A[b, c, x + r], 0), W[c, o, r], c, r); "
LEAST = "Func y, f; In A, W; Var b, x; RVar o, c, r; Extent x = A[2] - W[2] + 1; y[b, o, x] = rdot(A[b, c, x + r], W[o, c, r], c, r); f[b, x] = rmin(y[b, o, x], o); y.fuse_at(f, o); "


def test_rows_of_a_product_over_windows_are_reduced_from_copies():
    tiled = "f.merge(p, b, x); f.block(p:16); f.tensorize(p:16, o:0, c:16, r:1); f.stage(A:c, W:c); f.specialize(r);"
    check(LEAST + tiled, *random((2, 18, 11), (17, 18, 3)))


@pytest.mark.parametrize("infinite", [False, True])
def test_a_condition_for_a_whole_tile_is_a_mask_of_its_load(infinite):
    """Taps that a phase lacks are not read, whatever lies there, and the loop over them is joined with that over channels."""
    a, w = random((2, 18, 11), (18, 17, 2))
    if infinite:
        a[:, :, -1] = float("inf")  # the last phase's only tap is not there
    text = STRIDED + "f.block(p:1, b:1, o:16, x:16); f.tensorize(p:1, b:1, o:16, x:16, c:16, r:1); f.specialize(r);"
    f = dtkernels.compile(text)
    assert "if r_any" not in f.source and "tl.where(p + 2 * r < 3, A" not in f.source
    got = f(A=a, W=w)
    padded = torch.cat((a, torch.zeros(2, 18, 1)), 2).double()
    taps = torch.stack([torch.einsum("bcx,co->box", padded[:, :, r : r + 11], w[:, :, r].double()) for r in range(2)])
    torch.testing.assert_close(got.double(), torch.stack((taps.sum(0), taps[0])), rtol=1e-5, atol=1e-5, equal_nan=True)


MADE = "Func g, f; In A, W; Var b, i, z, o, x; RVar c, r; Extent x = A[2] + W[2] - 1; g[b, i, z] = maximum(A[b, i, z], 0); f[b, o, x] = rdot(g[b, c, x - r], W[o, c, r], c, r); "


@pytest.mark.parametrize("shapes", [((2, 18, 11), (17, 18, 3)), ((1, 3, 1), (2, 3, 4)), ((3, 16, 5), (16, 16, 1))])
def test_a_func_that_another_kernel_makes_is_copied_as_inputs_are(shapes):
    """As the gradient of a convolution's result is read by that of its input: with a label of its own where the reader sums over another."""
    text = MADE + TILED.replace("A:c", "g:c")
    check(text, *random(*shapes))
    source = dtkernels.compile(text).source
    assert "def g_rows_kernel" in source and "g_rows_size" not in source  # no masks: zeros beyond the ends
    assert "g_out = torch.empty((size_b, size_i, size_z), dtype=W_dtype" in source, "stored as the product reads its copy, not in float32"


def test_two_readers_share_the_copy_of_a_func():
    text = MADE.replace("Func g, f;", "Func g, f, h;").replace("Var b,", "Var n, b,") + "h[b, n, x] = rdot(g[b, c, x - r], W[n, c, r], c, r); "
    tiled = TILED.replace("A:c", "g:c")
    text += tiled + tiled.replace("f.", "h.").replace("p", "q").replace("o:", "n:") + " f.compile(); h.compile();"
    check(text, *random((2, 18, 11), (17, 18, 3)))
    assert dtkernels.compile(text).source.count("def g_rows") == 1


def test_an_output_is_not_copied():
    with pytest.raises(dtkernels.DTError, match="stage names an input, or what another kernel makes for this one: found g"):
        dtkernels.compile(MADE + TILED.replace("A:c", "g:c") + " f.compile(); g.compile();")


def test_rows_of_a_copy_lie_along_a_label_that_indexes_the_func():
    with pytest.raises(dtkernels.DTError, match="the rows of a copy of g lie along a label that indexes it by itself: found r; allowed: b, c"):
        dtkernels.compile(MADE + TILED.replace("A:c", "g:r"))


@pytest.mark.parametrize("staged", ["s.stage(A);", "t.stage(A); s.stage(A);", "t.fuse_at(s, x); s.stage(A);", "s.stage(A:y);", "s.stage(A:x);"])
def test_a_kernel_that_reads_an_input_by_other_labels_than_the_first_one_has_its_copy(staged):
    text = "Func t, s; In A; Var x, y; RVar k; t[x] = rsum(exp(A[x, k]), k); s[x, y] = exp(A[x, y]) / t[x]; s.block(x:4, y:8); s.tensorize(x:4, y:8);"
    check(text + staged, random((5, 19)))
    assert "A_rows" in dtkernels.compile(text + staged).source
