# ruff: noqa: E501 (programs read best on one line)
"""Tiles that are sums of powers of two, in every kind of kernel and beside other primitives, against the float64 reference."""

import pytest
import torch
from oracle import check
from small_programs import random

import dtkernels

MM = "Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k); "
TILED = "f.block(x:16, y:48); f.tensorize(x:16, y:48, k:16); "
BOTH = "f.block(x:80, y:48); f.tensorize(x:80, y:48, k:16); "
ROWS = "f.block(x:48, y:16); f.tensorize(x:48, y:16, k:16); "
SIZES = [(48, 96, 32), (37, 101, 19), (1, 1, 1), (100, 49, 0)]


def refused(text: str) -> str:
    with pytest.raises(dtkernels.DTError) as error:
        dtkernels.compile(text)
    return str(error.value)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("more", [TILED, ROWS, BOTH, TILED + "f.split(k:3);", TILED + "f.persistent(); f.map(x:x1/2, y, x1);",
                                  TILED + "f.descriptor(A, B, f); f.persistent(); f.tail(y:16);", BOTH + "f.split(k:2); f.stages(k:3);"])  # fmt: skip
def test_products(more, sizes):
    m, n, k = sizes
    check(MM + more, *random((m, k), (k, n)))


@pytest.mark.parametrize("text, shapes", [
    ("Func f; In A, B, c; Var x, y; RVar k; f[x, y] = sigmoid(rdot(A[x, k], B[y, k], k) + c[y]) * x; " + TILED, ((20, 30), (70, 30), (70,))),
    ("Func f; In A, B, C; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k) * sigmoid(rdot(A[x, k], C[k, y], k)); " + TILED, ((20, 30), (30, 70), (30, 70))),
    ("Func f; In A, B; Var b, x, y; RVar k; f[b, x, y] = rdot(A[b, x, k], B[b / 2, k, y], k); f.block(b:1, x:16, y:48); f.tensorize(b:1, x:16, y:48, k:16);", ((4, 20, 17), (2, 17, 50))),
    ("Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(where(k <= x, A[x, k], 0), B[k, y], k); " + ROWS, ((70, 70), (70, 20))),
    ("Func g, f; In A, B; Var x, y; RVar k; g[x, y] = rdot(A[x, k], B[k, y], k); f[x, y] = g[x, y] - 1; g.fuse_at(f, y); g.store(); " + TILED + "g.compile(); f.compile();", ((20, 30), (30, 70))),
    ("Func f; In A; Var x, y; f[x, y] = A[x, y] * y + x; f.block(x:3, y:48); f.tensorize(x:3, y:48);", ((10, 100),)),
    ("Func f; In A; Var x, y; f[y, x] = A[x, y] * 2; f.block(y:12, x:3); f.tensorize(x:3, y:12);", ((10, 40),)),
    ("Func f; In A; Var x; RVar k; f[x] = rsum(exp(A[x, k]), k); f.block(x:6); f.tensorize(x:6, k:16);", ((20, 50),)),
    ("Func t, f; In A; Var x, y; t[x] = rsum(A[x, y], y); f[x, y] = A[x, y] / (t[x] + 9); t.fuse_at(f, x); f.block(x:4, y:6); f.tensorize(x:4, y:6);", ((9, 20),)),
    ("Func f; In A; Var x; RVar k; f[x] = rmax(A[x, k], k); f.block(x:24); f.tensorize(x:24, k:0);", ((50, 20),)),
])  # fmt: skip
def test_epilogues_masks_and_other_kernels(text, shapes):
    given = random(*shapes)
    check(text, *(given if len(shapes) > 1 else (given,)))


def test_sums_over_the_tile_itself_are_those_of_its_parts():
    text = """Func g, f; In X, C, W; Var m, n, l; g[m, l] = rdot(X[m, n], C[l, n], n); f[l, n] = rdot(W[m, l], X[m, n], m);
    g.parts_at(f, n); f.block(n:48); f.tensorize(l:0, n:48, m:16); g.block(m:16); g.tensorize(m:16, l:0); g.compile(); f.compile();"""
    check(text, *random((40, 100), (16, 100), (40, 16)))


def test_softmax_by_rows_in_parts():
    text = "Func t, f; In A; Var x; RVar y; t[x] = rsum(exp(A[x, y]), y); f[x, y] = exp(A[x, y]) / t[x]; t.fuse_at(f, x); f.block(x:5); f.tensorize(x:5, y:16);"
    check(text, random((12, 50)))


def test_attention_with_rows_in_parts():
    text = """Func s, e, d, f; In Q, K, V; Var m, n; RVar l, k; s[m, l] = where(l <= m, rdot(Q[m, k], K[l, k], k), -inf); e[m, l] = exp(s[m, l]);
    d[m] = rsum(e[m, l], l); f[m, n] = rdot(e[m, l], V[l, n], l) / d[m];
    f.block(m:48); f.tensorize(m:48, n:0, k:0, l:16); s.fuse_at(f, l); e.fuse_at(f, l); d.fuse_at(f, l);"""
    check(text, *random((100, 16), (100, 16), (100, 16)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(dtype):
    a, b = (t.to(dtype) for t in random((50, 40), (40, 100)))
    got = dtkernels.compile(MM + BOTH)(A=a, B=b)
    torch.testing.assert_close(got.double(), a.double() @ b.double(), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_one_load_serves_both_parts():
    text = dtkernels.compile(MM + TILED).source
    assert text.count("tl.load(") == 3 and text.count("tl.dot(") == 2 and text.count("tl.store(") == 2


@pytest.mark.parametrize("schedule, found", [
    ("f.tensorize(y:48);", "a tile is a power of two: found y:48"), ("f.block(y:96); f.tensorize(y:48);", "a tile is a power of two: found y:48"),
    ("f.block(x:16, y:48); f.tensorize(x:16, y:48, k:48);", "a tile is a power of two: found k:48"),
    ("f.block(x:16, y:24); f.tensorize(x:16, y:24, k:16);", "a sum of powers of two from 16 on: found y:24; allowed: y:32"),
    ("f.block(x:240); f.tensorize(x:240);", "a sum of at most 3 powers of two: found x:240; allowed: x:128 or x:256"),
])  # fmt: skip
def test_tiles_that_are_refused(schedule, found):
    assert found in refused(MM + schedule)


def test_bounds_of_a_loop_that_data_tells_are_whole_numbers_in_tiles_of_several_parts():
    torch.manual_seed(0)
    a, w, e = torch.randn(7, 3), torch.randn(4, 3, 5), torch.randint(0, 4, (7,))
    A, W = a.double().requires_grad_(), w.double().requires_grad_()
    ours = [a.clone().requires_grad_(), w.clone().requires_grad_()]
    got, want = dtkernels.ops.grouped_mm(*ours, e), torch.einsum("mk,mkn->mn", A, W[e])
    for mine, theirs in zip(torch.autograd.grad(got.sum(), ours), torch.autograd.grad(want.sum(), (A, W)), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
