"""What index arithmetic and the order of a tile's dimensions come to in the kernel's text. Without torch."""

import pytest

from dtkernels.algebra.pipeline import prepare
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.lang import parse

CUBE = "f.block(h:4, s:8, d:16); f.tensorize(h:4, s:8, d:16);"


def kernel(text: str) -> str:
    """The kernel alone."""
    return emit(prepare(parse(text)), "call", target("h200")).split("@triton.jit\ndef f_kernel(")[1].split("\ndef ")[0]


@pytest.mark.parametrize("index, calls", [("x + len(x) / 2", 1), ("x - len(x) / 2", 1), ("x + len(x)", 1), ("x", 0), ("x + 3", None), ("x - 2 * len(x)", None)])
def test_what_turns_by_less_than_its_extent_is_not_divided(index, calls):
    found = kernel(f"Func f; In A; Var x; f[x] = A[x] + A[({index}) % len(x)]; f.block(x:64); f.tensorize(x:64);")
    if calls is None:
        assert "% size_x" in found or "floor_modulo(" in found
    else:
        assert "% size_x" not in found and "floor_modulo(" not in found and ("tl.where(" in found) == bool(calls)


@pytest.mark.parametrize("condition, printed", [
    ("x < len(x) / 2", "x < size_x - size_x // 2"), ("x >= len(x) / 2", "x >= size_x - size_x // 2"), ("x > len(x) / 2", "x > size_x // 2"),
    ("len(x) / 2 > x", "x < size_x - size_x // 2"), ("x <= len(x) / 3", "x <= size_x // 3"), ("x < len(x) / 3", "x < tl.cdiv(size_x, 3)"),
    ("x < A[x] / 2", "x < A / 2"),
])  # fmt: skip
def test_an_index_is_compared_with_a_part_of_an_extent_by_whole_numbers(condition, printed):
    found = kernel(f"Func f; In A; Var x; f[x] = where({condition}, A[x], 0); f.block(x:64); f.tensorize(x:64);")
    assert f"tl.where({printed}, A, 0)" in found


@pytest.mark.parametrize("right, order", [
    ("c[s, d]", "[:, None, :]"), ("c[s, d] * w[h, d]", None), ("c[h, d]", None), ("c[h, s]", None), ("w[d]", None), ("c[s, d] * v[s, d] * w[h, d]", "[:, None, :]")
])  # fmt: skip
def test_what_loads_lack_lies_within_threads(right, order):
    """Triton spreads threads along the last dimension, then from the first on."""
    names = ", ".join(n for n in "cvw" if f"{n}[" in right)
    found = kernel(f"Func f; In A, {names}; Var h, s, d; f[h, s, d] = A[h, s, d] * {right}; {CUBE}")
    assert ("h[None, :, None] * A_stride_h + s[:, None, None] * A_stride_s" in found) == (order is not None)
    assert order is None or f"c{order}" in found


def test_dimensions_stay_where_a_box_is_loaded_or_a_sum_is_made():
    program = "Func f; In A, c; Var h, s, d; f[h, s, d] = A[h, s, d] * c[s, d]; "
    assert "h[None, :, None]" not in kernel(program + CUBE + "f.descriptor(A);")
    summed = "Func t, f; In A, c; Var h, s, d; RVar k; t[h, s] = rsum(A[h, s, k], k); f[h, s, d] = t[h, s] * A[h, s, d] * c[s, d]; t.fuse_at(f, s); t.tensorize(k:0); "
    assert "h[None, :, None]" not in kernel(summed + CUBE)
