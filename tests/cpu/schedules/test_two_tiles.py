# ruff: noqa: E501 (programs read best on one line)
"""Whole extents that two tiles hold, of sums, products, maxima and results, against the float64 reference."""

import pytest
import torch
from attention_sweep import arguments, backward, by_default, one_sweep
from oracle import check
from small_programs import random

import dtkernels
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.lang.parser import parse_schedule
from dtkernels.lang.schedule import Program, Schedule
from dtkernels.runtime.build.source_cache import load_module

ATTENTION = """Func s, e, total, f; In Q, K, V; Var b, m, n; RVar l, d;
s[b, m, l] = rdot(Q[b, m, d], K[b, l, d], d); e[b, m, l] = exp(s[b, m, l]); total[b, m] = rsum(e[b, m, l], l);
f[b, m, n] = rdot(e[b, m, l], V[b, l, n], l) / total[b, m];
s.fuse_at(f, l); e.fuse_at(f, l); total.fuse_at(f, l); f.block(b:1, m:16); f.tensorize(b:1, m:16, n:0, l:16, d:0); """
CHAIN = """Func g, f; In A, B, C; Var x, z; RVar y, k; g[x, y] = rdot(A[x, k], B[k, y], k); f[x, z] = rdot(g[x, y], C[y, z], y);
g.fuse_at(f, x); f.block(x:16); f.tensorize(x:16, y:0, k:16, z:0); """


@pytest.mark.parametrize("wide, deep", [(48, 48), (40, 96), (112, 40), (33, 17), (96, 5), (1, 1), (64, 64)])
@pytest.mark.parametrize("more", ["f.two_tiles(d, n);", "f.two_tiles(n);", "f.two_tiles(d);", "f.two_tiles(d, n); f.split(l:2);", "f.two_tiles(d, n); f.persistent();",
                                  "f.two_tiles(d, n); f.descriptor(Q, K, V, f);"])  # fmt: skip
def test_attention_of_any_width(more, wide, deep):
    check(ATTENTION + more, *random((2, 21, deep), (2, 37, deep), (2, 37, wide)))


@pytest.mark.parametrize("sizes", [(20, 30, 40, 50), (5, 3, 96, 2), (17, 16, 80, 33)])
@pytest.mark.parametrize("labels", ["y", "z", "y, z"])
def test_a_product_of_a_product(labels, sizes):
    x, k, y, z = sizes
    check(CHAIN + f"f.two_tiles({labels});", *random((x, k), (k, y), (y, z)))


@pytest.mark.parametrize("columns", [1, 2, 5, 12, 96, 100])
@pytest.mark.parametrize("definition", ["f[x, y] = exp(A[x, y]) / rsum(exp(A[x, y]), y)", "f[x, y] = A[x, y] - rmax(A[x, y], y)", "f[x, y] = A[x, y] * rsum(A[x, y] * A[x, y], y) + y"])
def test_rows_without_products(definition, columns):
    check(f"Func f; In A; Var x; RVar y; {definition}; f.block(x:4); f.tensorize(x:4, y:0); f.two_tiles(y);".replace("Var x; RVar y", "Var x, y"), random((9, columns)))


#: parameters, (batches, heads, queries, keys, columns)
GRADIENTS = {
    "full": ({}, (1, 2, 33, 50, 40)), "causal": ({"causal": True}, (2, 2, 45, 45, 80)), "heads share keys": ({"group": 3}, (1, 6, 21, 37, 112)),
    "causal, heads share keys": ({"causal": True, "group": 2}, (1, 4, 50, 50, 72)),
}  # fmt: skip


@pytest.mark.parametrize("form", ["apart", "in one sweep"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_attention(name, form):
    params, sizes = GRADIENTS[name]
    if form == "apart":
        program = by_default(params, sizes, target("a100"))
        fixed = [p for p in program.schedule.primitives if p.name != "two_tiles"]
        program = Program(backward(params).algorithm, Schedule((*fixed, *parse_schedule("d_Q.two_tiles(d, n); d_K.two_tiles(d, n);").primitives)))
    else:
        program = one_sweep(params, 16, 16, more="d_K.two_tiles(d, n);")
    given, exact = arguments(program, params, sizes, torch.float32)
    found = load_module(emit(program, "call", target("a100"), True), "tiles").call(*given)
    for got, right in zip(found, exact):
        assert (got.double() - right).norm() <= 1e-5 * right.norm()


def test_a_label_that_no_tile_holds_whole_is_refused():
    with pytest.raises(dtkernels.DTError, match=r"two_tiles names a label whose whole extent is one tile: found l; allowed: .*n.*") as error:
        dtkernels.compile(ATTENTION + "f.two_tiles(l);")
    assert "\n" not in str(error.value)


def test_a_scan_is_refused():
    with pytest.raises(dtkernels.DTError, match="two_tiles names a label"):
        dtkernels.compile("Func f; In A; Var x, y; f[x, y] = rscan(sum, A[x, y], y); f.block(x:4); f.tensorize(x:4, y:0); f.two_tiles(y);")
