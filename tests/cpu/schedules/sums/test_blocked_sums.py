# ruff: noqa: E501 (programs read best on one line)
"""Blocks of a label that is summed over: each makes a part of the sum, and a second kernel merges the parts."""

import pytest
import torch
from oracle import check
from small_programs import random

import dtkernels
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang.errors import DTError
from dtkernels.lang.parser import parse

PRODUCT = "Func u, {names}f; In H, W; Var x; RVar y, k; u[x, y] = rdot(H[x, k], W[y, k], k); "
LOGSUMEXP = PRODUCT.format(names="total, ") + "total[x] = rsum(exp(u[x, y]), y); f[x] = log(total[x]); u.fuse_at(total, y); total.fuse_at(f, x); "
BLOCKS = "f.block(x:16, y:32); f.tensorize(x:16, y:32, k:16);"
OF_PRODUCTS = {
    "logsumexp": LOGSUMEXP + BLOCKS,
    "in groups": LOGSUMEXP + BLOCKS + "f.map(x:x1/2, y, x1);",
    "persistent": LOGSUMEXP + BLOCKS + "f.map(y, x); f.persistent(); f.descriptor(H, W);",
    "largest": PRODUCT.format(names="") + "f[x] = rmax(u[x, y], y); u.fuse_at(f, y); " + BLOCKS,
    "squares": PRODUCT.format(names="") + "f[x] = rsum(u[x, y] * u[x, y], y); u.fuse_at(f, y); " + BLOCKS,
    "variance": PRODUCT.format(names="m, ") + "m[x] = rmean(u[x, y], y); f[x] = rmean((u[x, y] - m[x]) * (u[x, y] - m[x]), y); u.fuse_at(f, y); m.fuse_at(f, x); " + BLOCKS,
    "rows of -inf": PRODUCT.format(names="v, ") + "v[x, y] = where(x > 3, u[x, y], -inf); f[x] = rsum(exp(v[x, y]), y); u.fuse_at(f, y); v.fuse_at(f, y); " + BLOCKS,
    "terms of the product": "Func f; In H, W; Var x, y; RVar k; f[x, y] = rdot(H[x, k], W[y, k], k); f.block(x:16, y:16, k:16); f.tensorize(x:16, y:16, k:16);",
}
OF_ROWS = {
    "rows": "Func f; In A; Var x; RVar y; f[x] = rsum(A[x, y], y); f.block(x:4, y:32); f.tensorize(x:4, y:32);",
    "columns": "Func f; In A; Var y; RVar x; f[y] = rsum(A[x, y], x); f.block(y:32, x:8); f.tensorize(y:32, x:8);",
    "products of elements": "Func f; In A; Var x; RVar y; f[x] = rprod(A[x, y], y); f.block(x:4, y:32); f.tensorize(x:4, y:32);",
    "one row a block": "Func f; In A; Var x; RVar y; f[x] = rsum(A[x, y], y); f.block(x:1, y:32); f.tensorize(x:1, y:32);",
    "all rows a block": "Func f; In A; Var x; RVar y; f[x] = rsum(A[x, y], y); f.block(y:32); f.tensorize(x:0, y:32);",
    "the outer of two loops": "Func f; In A; RVar x, y; f[] = rsum(A[x, y], x, y); f.block(x:8); f.tensorize(x:8, y:32);",
    "the inner of two loops": "Func f; In A; RVar x, y; f[] = rsum(A[x, y], x, y); f.block(y:32); f.tensorize(x:8, y:32);",
    "two passes": "Func m, s, f; In A; Var x; RVar y; m[x] = rmax(abs(A[x, y]), y); s[x] = rsum(A[x, y] / (1 + m[x]), y); f[x] = s[x] + m[x]; m.fuse_at(f, x); s.fuse_at(f, x); f.block(x:4, y:32); f.tensorize(x:4, y:32);",
}


@pytest.mark.parametrize("case", OF_PRODUCTS)
def test_parts_of_products(case):
    check(OF_PRODUCTS[case], *random((37, 45), (101, 45)))


@pytest.mark.parametrize("case", OF_ROWS)
def test_parts_of_rows(case):
    check(OF_ROWS[case], random((37, 101)))


@pytest.mark.parametrize("term", ["rdot(0, A[x, y], y)", "rsum(0 * A[x, y], y)", "rsum(2 + 0 * A[x, y], y)", "rmax(2 + 0 * A[x, y], y)"])
@pytest.mark.parametrize("schedule", ["f.block(x:4, y:32); f.tensorize(x:4, y:32);", "f.block(x:8, y:32); f.tensorize(x:4, y:32);"])
def test_parts_that_are_constant(term, schedule):
    check(f"Func f; In A, B; Var x; RVar y; f[x] = {term} - B[x]; {schedule}", *random((37, 101), (37,)))


def test_place_of_the_largest():
    h, w = random((37, 45), (101, 45))
    got = dtkernels.compile(PRODUCT.format(names="") + "f[x] = rargmax(u[x, y], y); u.fuse_at(f, y); " + BLOCKS)(h, w)
    assert torch.equal(got.long(), (h.double() @ w.double().T).argmax(1))


@pytest.mark.parametrize("rows", [1, 33, 96])
def test_one_kernel_for_any_number_of_parts(rows):
    f = dtkernels.compile(LOGSUMEXP + BLOCKS)
    h, w = random((5, 45), (rows, 45))
    assert torch.allclose(f(h, w), (h.double() @ w.double().T).logsumexp(1).float(), atol=1e-5)


def test_a_part_is_a_product_with_nothing_around_its_loop():
    """Specialised warps take no sweep of products; of blocks they take each as they take any product."""
    part, merge = lower(parse(LOGSUMEXP + "f.block(x:128, y:256); f.tensorize(x:128, y:256, k:64); f.map(x:x1/8, y, x1);"))
    assert [(g.label, g.block) for g in part.grid] == [("x", 128), ("y", 256)] and [g.label for g in merge.grid] == ["x"]
    more = "f.block(x:128, y:256); f.tensorize(x:128, y:256, k:64); f.persistent(); f.descriptor(H, W); f.specialize_warps(k); f.num_warps(8); f.compile();"
    assert "warpgroup_mma" in emit(parse(LOGSUMEXP + more), "f", target("h100"))


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("f.block(x:16, y:64); f.tensorize(x:16, y:32, k:16);", r"block\(y:64\): found tensorize\(y:32\); allowed: tensorize\(y:64\), as large as the block"),
        ("f.block(x:16, y:32); f.tensorize(x:16, y:32, k:16); f.split(y:3);", r"block\(y:32\): found block\(y:32\) and f.split\(y:3\); allowed: one of them"),
        ("f.block(x:16, y:32, k:16); f.tensorize(x:16, y:32, k:16);", "one label of a kernel's sums is cut into blocks: found y:32, k:16; allowed: y:32"),
        ("f.block(x:16, y:32); f.tensorize(x:16, k:16);", r"block\(y:32\): found tensorize\(y:1\)"),
        ("f.block(x:16, z:32);", "block names a label of f: found 'z'; allowed: x, y, k"),
        ("f.block(x:16); f.map(x, y);", "map names a label of f: found 'y'; allowed: x"),
    ],
)
def test_blocks_that_are_refused(schedule, words):
    with pytest.raises(DTError, match=words):
        lower(parse(LOGSUMEXP + schedule))


def test_an_operand_that_the_merge_reads_otherwise():
    """The merge reads rows that data picks, which no descriptor reaches; the kernel of the parts keeps its descriptors."""
    text = PRODUCT.format(names="total, ").replace("In H, W", "In H, W, t") + (
        "total[x] = rsum(exp(u[x, y]), y); f[x] = log(total[x]) - u[x, t[x]]; u.fuse_at(f, x); total.fuse_at(f, x); " + BLOCKS + "f.persistent(); f.descriptor(H, W);"
    )
    part, merge = lower(parse(text))
    assert part.descriptors == ("H", "W") and merge.descriptors == ()
    h, w = random((37, 48), (101, 48))
    t = torch.randint(101, (37,))
    want = torch.nn.functional.cross_entropy(h.double() @ w.double().T, t, reduction="none")
    assert torch.allclose(dtkernels.compile(text)(h, w, t), want.float(), atol=1e-5)


@pytest.mark.parametrize("same", ["y", "B[y] * 2"])
def test_a_choice_between_equals_keeps_the_labels_of_its_condition(same):
    """Without them the terms of a weighted mean had no rows, which its accumulators have (fuzz case 313001602)."""
    weight = f"exp(where(A[x, y] > 0, {same}, {same}) - B[y])"
    text = f"Func f; In A, B; Var x; RVar y; f[x] = rsum({weight} * B[y], y) / rsum({weight}, y); f.block(x:16, y:2); f.tensorize(x:16, y:2); f.compile();"
    check(text, *random((5, 3), (3,)))
