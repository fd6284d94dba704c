# ruff: noqa: E501 (programs read best on one line)
"""Reductions over blocks of a tensor: tiles lie along the block, and no block is a window of taps. Without torch."""

import pytest

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.autoschedule.stand_ins.blocked_dimensions import blocks_apart
from dtkernels.codegen.analysis.product_types import InputTypes
from dtkernels.codegen.target import target
from dtkernels.lang import parse

TEXT = "Func s; In W; Var {}; RVar r, c; Extent r = {}; Extent c = {}; {}"
SQUARES = TEXT.format("p, q", 128, 128, "Extent p = W[0] / 128; Extent q = W[1] / 128; s[p, q] = rmax(abs(W[128 * p + r, 128 * q + c]), r, c);")
IMAGES = TEXT.format("b, p, q", 32, 64, "Extent p = W[1] / 32; Extent q = W[2] / 64; s[b, q, p] = rsum(W[b, r + 32 * p, c + 64 * q] * W[b, r + 32 * p, c + 64 * q], r, c);")
VOLUMES = TEXT.format("p, q, z", 128, 32, "Extent p = W[0] / 128; Extent q = W[2] / 32; s[p, z, q] = rsum(W[128 * p + r, z, 32 * q + c], r, c);")


def schedule(text: str, itemsize=2, **sizes: int):
    algorithm = prepare_algorithm(parse(text).algorithm, ("s",))
    return default_schedule(algorithm, ("s",), sizes, itemsize, target("h200"))


@pytest.mark.parametrize("itemsize", [2, 4, InputTypes((("W", "bf16"),))])
@pytest.mark.parametrize(("text", "sizes"), [
    (SQUARES, dict(p=32, q=32, r=128, c=128)), (SQUARES, dict(p=11, q=43, r=128, c=128)), (IMAGES, dict(b=16, p=32, q=16, r=32, c=64)), (VOLUMES, dict(p=32, q=32, z=64, r=128, c=32)),
])  # fmt: skip
def test_tiles_lie_along_blocks(text, sizes, itemsize):
    found = schedule(text, itemsize, **sizes)
    tile = {x: n or sizes[x] for x, n in found.sizes("s", "tensorize").items()}
    assert tile["c"] == sizes["c"] and tile["r"] > 1 and not found.of("s", "specialize"), str(found)


@pytest.mark.parametrize(("index", "read"), [
    ("128 * p + r, 128 * q + c", "W_blocks[p, r, q, c]"), ("r + 128 * p, q", "W_blocks[p, r, q]"), ("p, 128 * q + c", "W_blocks[p, q, c]"),
    ("64 * p + r, q", "W[64 * p + r, q]"), ("128 * p + r + 1, q", "W[128 * p + r + 1, q]"), ("2 * p + q, c", "W[2 * p + q, c]"), ("p + r, q + c", "W[p + r, q + c]"),
])  # fmt: skip
def test_blocks_are_dimensions_where_each_element_is_in_one(index, read):
    text = f"Func s; In W, A; Var p, q; RVar r, c; Extent r = 128; Extent c = 128; s[p, q] = rsum(W[{index}] * A[p, q, r, c], r, c);"
    made, names = blocks_apart(parse(text).algorithm, dict(p=4, q=4, r=128, c=128))
    assert str(made["s"]) == f"s[p, q] = rsum({read} * A[p, q, r, c], r, c);" and names == ({"W_blocks": "W"} if "blocks" in read else {})
    assert ("W" in made.inputs) != bool(names)


def test_a_tensor_is_read_as_it_is_too():
    text = SQUARES.replace("Func s; In W;", "Func s, f; In W;").replace("Var p, q;", "Var p, q, o, i;") + "f[o, i] = W[o, i] / s[o / 128, i / 128];"
    made, _ = blocks_apart(parse(text).algorithm, dict(p=4, q=4, r=128, c=128, o=512, i=512))
    assert made.inputs == ("W", "W_blocks") and str(made["f"]) == "f[o, i] = W[o, i] / s[o / 128, i / 128];"


def test_small_windows_are_taps():
    text = SQUARES.replace("128", "2")
    algorithm = parse(text).algorithm
    assert blocks_apart(algorithm, dict(p=64, q=64, r=2, c=2)) == (algorithm, {})
