"""``parts_at``: a sum made block by block in another kernel, which has the tile it needs, and added up by its own."""

import pytest
from oracle import check
from small_programs import random

import dtkernels
from dtkernels.algebra.pipeline import prepare
from dtkernels.codegen.emit.module import emit
from dtkernels.lang import parse

# the gradients of (A B) C: X comes, W = A B is known
CHAIN = """Func g, e, f; In B, C, X, W; Var m, n, k; RVar l;
g[m, l] = rdot(X[m, n], C[l, n], n); e[m, k] = rdot(g[m, l], B[k, l], l); f[l, n] = rdot(W[m, l], X[m, n], m);
g.block(m:16); g.tensorize(m:16, l:0); e.block(m:16, k:16); e.tensorize(m:16, k:16, l:16); f.block(n:32); f.tensorize(l:0, n:32, m:16);
"""
BOTH = "e.compile(); f.compile();"


@pytest.mark.parametrize("more", ["", "f.split(m:3);", "f.split(m:2); f.persistent();", "g.tensorize(n:16);"])
@pytest.mark.parametrize("sizes", [(64, 96, 32, 16), (37, 71, 19, 5), (50, 300, 33, 40), (1, 1, 1, 1)])
def test_parts_are_made_where_the_tile_is(sizes, more):
    m, n, k, r = sizes
    check(CHAIN + "g.parts_at(f, n);" + more + BOTH, *random((k, r), (r, n), (m, n), (m, r)))


def test_what_two_sums_share_is_read_by_one_kernel():
    apart, together = (dtkernels.compile(CHAIN + more + BOTH).source for more in ("", "g.parts_at(f, n);"))
    assert apart.count("tl.load(X_ptr") == 2 or apart.count("X_ptr +") == 2
    assert together.count("X_ptr +") == 1 and "size_n_part = triton.cdiv(size_n, 32)" in together


def test_parts_are_float32_between_kernels():
    text = dtkernels.compile(CHAIN + "g.parts_at(f, n);" + BOTH).source
    assert "g_parts_out = torch.empty((size_n_part, size_m, size_l), dtype=torch.float32" in text
    assert "g_out = torch.empty((size_m, size_l), dtype=B_dtype" in text, "that of the product that takes it"


@pytest.mark.parametrize("kind", ["rsum", "rmax", "rmin"])
def test_any_reduction_has_parts(kind):
    text = f"""Func g, f, h; In X; Var m, n; g[m] = {kind}(X[m, n], n); f[n] = rsum(X[m, n], m); h[m] = g[m] * 2;
    g.block(m:16); g.tensorize(m:16); h.block(m:16); h.tensorize(m:16); f.block(n:16); f.tensorize(n:16, m:8);
    g.parts_at(f, n); f.compile(); h.compile();"""
    check(text, random((21, 50)))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("g.parts_at(q, n);", "parts_at names a Func: found 'q'"),
        ("g.parts_at(f, m);", "parts_at names a label of f: found 'm'"),
        ("g.parts_at(f, l);", "parts_at cuts one reduction, over l"),
        ("g.parts_at(e, k);", "parts_at cuts one reduction, over k"),
    ],
)
def test_parts_that_are_refused(text, found):
    with pytest.raises(dtkernels.DTError, match=found):
        dtkernels.compile(CHAIN + text + BOTH)


def test_parts_are_of_whole_blocks_and_of_a_func_with_a_kernel():
    with pytest.raises(dtkernels.DTError, match="f has blocks of n, each done at once: found block 32, tile 16"):
        dtkernels.compile(CHAIN.replace("l:0, n:32", "l:0, n:16") + "g.parts_at(f, n);" + BOTH)
    with pytest.raises(dtkernels.DTError, match="g has a kernel after that of f"):
        dtkernels.compile(CHAIN.replace("g.block(m:16);", "") + "g.fuse_at(e, m); g.parts_at(f, n);" + BOTH)


def test_the_host_is_compiled_or_needed():
    with pytest.raises(dtkernels.DTError, match="parts_at names a Func with a kernel of its own: found f"):
        emit(prepare(parse(CHAIN + "g.parts_at(f, n); e.compile();")))
