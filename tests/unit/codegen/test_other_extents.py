"""Tensors indexed at a label whose extent may be another than theirs, ``W[k + 0]``: offsets, descriptors, copies. Without a GPU."""

import pytest

import dtkernels

TEXT = """Func f{more}; In A, W; Var m, n, w; RVar k; Extent n = A[1];
f[m, n] = rdot(A[m, k], W[{index}], k); {definition}
f.block(m:64, n:64); f.tensorize(m:64, n:64, k:32); {schedule}"""


def source(index: str, schedule: str = "", more: str = "", definition: str = "") -> str:
    text = TEXT.format(index=index, schedule=schedule, more=more, definition=definition)
    return dtkernels.compile(text if more else text.replace(", w;", ";")).source


@pytest.mark.parametrize("index, shape", [("k + 0, n", "(min(W.shape[0], size_k), size_n)"), ("k, n", "(size_k, size_n)")])
def test_a_descriptor_ends_where_the_shorter_extent_does(index, shape):
    """Behind the sum's last term a longer ``W`` has numbers, maybe infinities, and behind a shorter one there is other memory."""
    assert f"tensor_map(W, {shape}" in source(index, "f.descriptor(A, W);")


def test_an_offset_is_made_before_the_loop():
    found = source("n + 0, k")
    assert "W_at = n[" in found and "+ 0" not in found.replace("W[n + 0, k]", "") and "< W_size_0" in found


def test_rows_are_copied_that_a_label_of_another_extent_indexes():
    assert "W_rows" in source("k + 0, n", "f.stage(W); f.compile(); g.compile();", ", g", "g[w] = rsum(W[w, k + 0], k);")
