# ruff: noqa: E501 (programs read best on one line)
"""``chunk``: a Func between kernels that memory holds in pieces, against the float64 reference."""

import re

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from oracle import check
from small_programs import random

import dtkernels

LOSS = (
    "Func z, g, dH, dW; In H, W, t, d; Var x, y; RVar k; z[x, y] = rdot(H[x, k], W[y, k], k);"
    "g[x, y] = d[x] * (exp(z[x, y] - 3) - where(t[x] == y, 1, 0)) / len(y) + 0.01 * len(x);"
    "dH[x, k] = rdot(g[x, y], W[y, k], y) + W[0, k]; dW[y, k] = -rdot(g[x, y], H[x, k], x); z.fuse_at(g, y);"
    "g.block(x:16, y:16); g.tensorize(x:16, y:16, k:16); dH.block(x:16, k:32); dH.tensorize(x:16, k:32, y:16);"
    "dW.block(y:16, k:16); dW.tensorize(y:16, k:16, x:16);"
)
BOTH = "dH.compile(); dW.compile();"


def loss_inputs(x, y, k):
    H, W, d = random((x, k), (y, k), (x,))
    return H, W, torch.arange(x) % y, d


@pytest.mark.parametrize("pieces", ["y:16", "y:32", "y:1024", "x:16"])
@pytest.mark.parametrize("sizes", [(33, 41, 19), (16, 16, 16), (1, 1, 1)])
def test_pieces_change_no_value(pieces, sizes):
    check(LOSS + f"g.chunk({pieces});" + BOTH, *loss_inputs(*sizes))


def test_an_extent_of_0_gives_what_it_gives_without_pieces():
    check(LOSS + "g.chunk(y:16);" + BOTH, *random((5, 6), (0, 6)), torch.zeros(5, dtype=torch.int64), torch.ones(5))


def test_memory_holds_one_piece():
    text = dtkernels.compile(LOSS + "g.chunk(y:16);" + BOTH).source
    assert "g_out = torch.empty((size_x, min(16, size_y))" in text
    assert "size_y_whole" in text and text.count("torch.empty((size_x, size_y)") == 0


ROWS = (
    "Func z, m, s, p, out; In H, W; Var x; RVar y, k; z[x, y] = rdot(H[x, k], W[y, k], k); m[x] = rmax(z[x, y], y); s[x] = rsum(z[x, y] * z[x, y], y);"
    "p[x, y] = z[x, y] - m[x] + s[x] * x; out[x] = rsum(p[x, y] * z[x, y], y); p.fuse_at(out, y); z.block(x:16, y:16); z.tensorize(x:16, y:16, k:16);"
    "m.block(x:4); m.tensorize(x:4, y:16); s.block(x:4); s.tensorize(x:4, y:16); out.block(x:4); out.tensorize(x:4, y:16);"
)


@pytest.mark.parametrize("sizes", [(40, 33, 20), (16, 16, 16), (3, 5, 2)])
def test_rows_in_pieces_with_everything_that_reads_them(sizes):
    x, y, k = sizes
    check(ROWS + "z.chunk(x:16);", *random((x, k), (y, k)))


PAIRS = (
    "Func g, h, f, b; In A, B, C; Var x, y; RVar k; g[x, y] = exp(rdot(A[x, k], B[y, k], k)); h[x, y] = g[x, y] * C[x, y] + x - y;"
    "f[x] = rsum(h[x, y] * h[x, y], y) + 1; b[y] = rsum(h[x, y], x); g.block(x:16, y:16); g.tensorize(x:16, y:16, k:16);"
    "h.block(x:16, y:16); h.tensorize(x:16, y:16); f.block(x:16); f.tensorize(x:16, y:16); b.block(y:16); b.tensorize(y:16, x:16); b.fuse_at(f, x);"
)


@pytest.mark.parametrize("pieces", ["x:16", "y:16"])
def test_two_funcs_in_one_loop(pieces):
    check(PAIRS.replace("b.fuse_at(f, x);", "") + f"g.chunk({pieces}); h.chunk({pieces}); f.compile(); b.compile();", *random((40, 20), (33, 20), (40, 33)))


@pytest.mark.parametrize("more", ["dH.split(y:2);", "dW.split(x:2);", "dH.persistent();", "g.align();", "dH.descriptor(g, W);", "dH.stage(W);"])
@pytest.mark.parametrize("pieces", ["y:32", "x:32"])
def test_with_other_primitives(more, pieces):
    check(LOSS + f"g.chunk({pieces}); {more}" + BOTH, *loss_inputs(35, 37, 19))


BAD = {
    "dH.chunk(x:16);": "chunk is for a Func between kernels: found dH",
    "z.chunk(y:16);": "chunk is for a Func between kernels: found z",
    "g.chunk(k:16);": "chunk names a label of g: found 'k'",
    "g.chunk(x:16, y:16);": "arguments of chunk: found .x:16, y:16.; allowed: .label:size.",
    "g.chunk(y:0);": "a size in chunk: found y:0; allowed: 1 or more",
    "g.chunk(y:16); g.chunk(x:16);": "a program has one loop over pieces",
}


@pytest.mark.parametrize("statement", BAD)
def test_bad_statements_are_refused_in_one_line(statement):
    with pytest.raises(dtkernels.DTError, match=BAD[statement]) as error:
        dtkernels.compile(LOSS + statement + BOTH)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ROWS + "z.chunk(y:16);", "which takes all of y at once"),
        ("Func g, f; In A; Var x, y; g[x, y] = A[x, y] + 1; f[x, y] = g[x, y - 1]; g.chunk(y:16); f.compile();", r"found g\[x, y - 1\] in f"),
        ("Func g, s, f; In A; Var x, y; g[x, y] = A[x, y] + 1; s[x] = rsum(g[x, y], y); f[x, y] = g[x, y] / s[x]; g.chunk(y:16); f.compile();", "reads the sum s"),
        ("Func g, f; In A; Var x; RVar y; g[x, y] = A[x, y] + A[y, x]; f[x] = rsum(g[x, y], y); g.chunk(y:16); f.compile();", "indexed by y alone there"),
        ("Func g, f; In A; Var x; RVar y; g[x, y] = A[x, y] + 1; f[x] = rmax(g[x, y], y); g.chunk(y:16); f.compile();", "takes all of y at once"),
        ("Func m, f; In A, t, K; Var x; RVar y; m[x] = rmax(A[x, y], y); f[x, y] = write(A[x, y] - m[x], K[t[x], y]); m.chunk(x:4); f.compile();", "found f, which writes K"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_in_one_line(text, message):
    with pytest.raises(dtkernels.DTError, match=message) as error:
        dtkernels.compile(text)
    assert "\n" not in str(error.value) and re.search("chunk cuts [xy] of every kernel", str(error.value))


def test_a_kept_func_that_is_read_beside_the_sum_is_refused():
    text = "Func s, f; In A, B; Var x; RVar k; s[x, k] = A[x, k] + B[k, x]; f[x] = s[x, x] + rsum(s[x, k], k); s.chunk(k:8);"
    with pytest.raises(dtkernels.DTError, match=r"chunk cuts k of every kernel that reads s: found s\[x, x\] in f, beside the sum; allowed: s in the sum over k alone"):
        dtkernels.compile(text)
