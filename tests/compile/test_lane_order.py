# ruff: noqa: E501 (programs read best on one line)
"""The threads of a warp take neighbours in memory, also where Triton cannot see which these are."""

import re

import pytest
import torch

from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches

H200 = target("h200")
TILES = "f.block(c:16, x:64); f.tensorize(c:16, x:64);"
MERGED = "f.merge(p, b, x); f.block(o:64, p:128); f.tensorize(o:64, p:128, c:32);"
PROGRAMS = {
    "a merged label that is stored": ("Func f; In A, W; Var b, o, x; RVar c; f[b, o, x] = rdot(A[b, x, c], W[o, c], c); " + MERGED, [(8, 129, 64), (64, 64)], "tt.store"),
    "every second element": ("Func f; In A; Var c, x; Extent x = A[1] / 2; f[c, x] = A[c, 2 * x] + 1; " + TILES, [(512, 1024)], "tt.load"),
    "each element twice": ("Func f; In A; Var c, x; Extent x = 2 * A[1]; f[c, x] = A[c, x / 2] + 1; " + TILES, [(512, 1024)], "tt.load"),
    "backwards": ("Func f; In A; Var c, x; f[c, x] = A[c, len(x) - 1 - x] + 1; Extent x = A[1]; " + TILES, [(512, 1024)], "tt.load"),
    "every second element of merged rows": ("Func f; In A; Var c, y, x; Extent y = A[1]; Extent x = A[2] / 2; f[c, y, x] = A[c, y, 2 * x] + 1; f.merge(p, y, x); f.block(c:16, p:64); f.tensorize(c:16, p:64);", [(64, 30, 1024)], "tt.load"),
    "phases in turn": ("Func f; In A; Var c, x; Extent c = A[1]; Extent x = 2 * A[2]; f[c, x] = A[x % 2, c, x / 2] + 1; " + TILES, [(2, 512, 1024)], "tt.load"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_lanes_go_along_the_last_dimension(name):
    text, shapes, access = PROGRAMS[name]
    module = load_module(emit(parse(text), target=H200), "lanes")
    (launch,) = record_launches(module, "f", tuple(torch.empty(s, dtype=torch.bfloat16) for s in shapes))
    ir = build(launch, H200).asm["ttgir"]
    ((*sides, layout),) = set(re.findall(rf"{access} [^\n]*tensor<(\d+)x(\d+)x!tt\.ptr<\w+>, (#\w+)>", ir))
    lanes = re.search(rf"{layout} = [^\n]*threadsPerWarp = \[(\d+), (\d+)\]", ir)
    longer = max((1, 2), key=lambda d: int(sides[d - 1]))  # of the tile: along x or p
    assert lanes and int(lanes[longer]) >= 8, lanes and lanes[0]


def test_a_func_fused_in_merged_loops_is_not_masked():
    """The masks of the loads and stores keep each part of a merged label inside its extent."""
    text = "Func y, f; In A, W; Var b, x, o; RVar c; y[b, x, o] = rdot(A[b, x, c], W[o, c], c); f[b, x, o] = exp(y[b, x, o]); y.fuse_at(f, o); f.merge(p, b, x); f.block(p:64, o:64); f.tensorize(p:64, o:64, c:32);"
    assert "tl.where" not in emit(parse(text), target=H200)


def test_what_triton_sees_gets_no_hint():
    plain = "Func f; In A; Var c, x; f[c, x] = A[c, x] + 1; " + TILES
    shifted = "Func f; In A; Var c, x; Extent x = A[1] - 1; f[c, x] = A[c, x + 1] + 1; " + TILES
    assert all("max_contiguous" not in emit(parse(text), target=H200) for text in (plain, shifted))


def test_lanes_go_along_the_dimension_that_is_contiguous_in_the_input():
    """Of images with channels last, say, whose positions have a hint otherwise."""
    text, shapes, access = PROGRAMS["every second element"]
    module = load_module(emit(parse(text), target=H200), "turned")
    (launch,) = record_launches(module, "f", (torch.empty(*reversed(shapes[0]), dtype=torch.bfloat16).t(),))
    ir = build(launch, H200).asm["ttgir"]
    ((*sides, layout),) = set(re.findall(rf"{access} [^\n]*tensor<(\d+)x(\d+)x!tt\.ptr<\w+>, (#\w+)>", ir))
    made = re.search(rf"{layout} = [^\n]*sizePerThread = \[(\d+), (\d+)\], threadsPerWarp = \[(\d+), (\d+)\]", ir)
    assert made and sides == ["16", "64"] and int(made[1]) * int(made[3]) == 16, made and made[0]
