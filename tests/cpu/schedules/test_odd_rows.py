# ruff: noqa: E501 (programs read best on one line)
"""Products whose rows have odd lengths: copies and buffers with aligned rows, and the last wave of blocks cut finer."""

import pytest
import torch
from oracle import check
from small_programs import random

import dtkernels

MM = "Func mm; In A, B; Var x, y; RVar k; mm[x, y] = sigmoid(rdot(A[x, k], B[k, y], k)); "
WAVES = MM + "mm.block(x:32, y:64); mm.tensorize(x:32, y:64, k:32); mm.persistent(); mm.descriptor(A, B{}); mm.num_warps(8); "


def source(text):
    return dtkernels.compile(text).source


# -- the last wave ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", ["x:16, y:16", "y:32", "x:16, k:64", "x:32, y:16, k:16"])
@pytest.mark.parametrize("order", ["", "mm.map(x:x1/2, y, x1);", "mm.map(y, x);"])
@pytest.mark.parametrize("shape", [(97, 193, 70), (100, 222, 33), (33, 65, 17), (128, 64, 16), (1, 1, 1), (40, 30, 0)])
def test_a_last_wave_in_smaller_blocks(shape, order, tail):
    """The interpreter runs 3 programs at once: of 16 blocks the last, of 4 the last, of 1 none are left to the tail."""
    m, n, k = shape
    check(WAVES.format("") + f"mm.stage(A, B); {order} mm.tail({tail});", *random((m, k), (k, n)))


def test_a_last_wave_is_stored_through_descriptors_too():
    text = WAVES.format(", mm") + "mm.tail(x:16, y:16);"
    check(text, *random((112, 64), (64, 224)))
    assert "mm_desc.store([tl.cast(x_first, tl.int32)" in source(text).split("def mm_tail_descriptor_kernel")[1]


def test_who_computes_the_blocks_is_counted_when_it_is_called():
    text = source(WAVES.format("") + "mm.tail(x:16, y:16);")
    space = {}
    exec("import torch" + text[text.index("\ndef whole_waves") :].split("\n\n\n")[0], space)
    counted = lambda blocks, at_once=132, device="cpu": space["whole_waves"](blocks, at_once, torch.empty(1, device=device))  # noqa: E731
    assert [counted(n) for n in (1, 66, 132, 133, 198, 199, 264, 561)] == [1, 66, 132, 132, 132, 199, 264, 528]
    assert counted(264, device="meta") == 263, "what is built ahead is built with a tail"


def test_the_form_with_pointers_takes_every_block():
    """Rows of odd lengths without copies: descriptors do not reach them."""
    text = WAVES.format("") + "mm.tail(x:16, y:16);"
    check(text, *random((97, 33), (33, 193)))
    assert "tiles_before" not in source(text).split("def mm_kernel")[1].split("def mm_descriptor_kernel")[0]


@pytest.mark.parametrize("more, rule", [
    ("mm.tail(x:16);", r"tail is for programs that stay and read through descriptors: found mm without persistent\(\)"),
    ("mm.persistent(); mm.tail(x:16);", "found mm without descriptors"),
    ("mm.persistent(); mm.descriptor(A, B); mm.tail(x:32);", "a tail cuts blocks: found x:32; allowed: less than x:32, y:64"),
    ("mm.persistent(); mm.descriptor(A, B); mm.tail(k:64);", "a tail cuts blocks: found k:64; allowed: less than x:32, y:64"),
    ("mm.persistent(); mm.descriptor(A, B); mm.tail(x:64);", "a tail cuts blocks: found x:64; allowed: a divisor of 32"),
    ("mm.persistent(); mm.descriptor(A, B); mm.tail(x:24);", "a tile is a power of two"),
    ("mm.persistent(); mm.descriptor(A, B); mm.tail(z:16);", "tail names a label of mm"),
    ("mm.persistent(); mm.descriptor(A, B); mm.split(k:2); mm.tail(x:16);", "tail is for a kernel that is not split"),
])  # fmt: skip
def test_what_has_no_tail_is_refused(more, rule):
    """Nor has what makes parts of another sum, which are counted by blocks: the test after this."""
    with pytest.raises(dtkernels.DTError, match=rule):
        dtkernels.compile(MM + "mm.block(x:32, y:64); mm.tensorize(x:32, y:64, k:32); " + more)


def test_a_kernel_with_several_results_has_no_tail():
    text = "Func mm, f; In A, B; Var x, y; RVar k; mm[x, y] = rdot(A[x, k], B[k, y], k); f[x, y] = mm[x, y] * 2; mm.fuse_at(f, y); mm.store(); mm.compile(); f.compile(); "
    text += "f.block(x:32, y:64); f.tensorize(x:32, y:64, k:32); f.persistent(); f.descriptor(A, B); "
    check(text, *random((35, 40), (40, 72)))
    with pytest.raises(dtkernels.DTError, match="tail is for a kernel with one result: found f, mm; allowed: f"):
        dtkernels.compile(text + "f.tail(x:16);")


# -- aligned rows -----------------------------------------------------------------------------------------------------


def test_kernels_that_stage_the_same_input_share_the_copy():
    text = """Func f, g; In A, B; Var x, y, k; f[x, y] = rdot(A[x, k], B[k, y], k); g[y, k] = rdot(f[x, y], A[x, k], x);
    f.block(x:16, y:16); f.tensorize(x:16, y:16, k:16); g.block(y:16, k:16); g.tensorize(y:16, k:16, x:16); f.compile(); g.compile();
    {} f.descriptor(A); g.descriptor(A);"""
    for order in ("f.stage(A); g.stage(A);", "g.stage(A); f.stage(A, B);"):
        check(text.format(order), *random((21, 19), (19, 35)))
        assert source(text.format(order)).count("def A_rows") == 1


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 31, 33])
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_rows_of_a_copy_are_stored_up_to_their_multiple_of_16(rows, columns):
    """Nothing is written outside the buffer, which tests/bounds.py would see, and the result has no trace of it."""
    text = "Func a, f; In A, B; Var x, y, k; a[x, k] = A[x, k] + 1; f[x, y] = rdot(a[x, k], B[k, y], k); f.block(x:16, y:16); f.tensorize(x:16, y:16, k:16); a.block(x:2, k:32); a.tensorize(x:2, k:32); a.align(); f.compile();"
    check(text, *random((rows, columns), (columns, 5)))
    assert "k_in_row = (k < tl.cdiv(size_k, 16) * 16) | EVEN_k" in source(text)
    assert "in_row" not in source(text.replace("a.align();", ""))
