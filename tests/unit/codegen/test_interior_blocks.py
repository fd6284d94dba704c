"""Which kernels have a form without masks for the blocks that lie inside their extent. Without torch."""

import pytest

from dtkernels.algebra.pipeline import prepare
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.codegen.transforms.loops.interior_blocks import specialize_interior_blocks
from dtkernels.lang import parse

LINE = "f.block(x:64); f.tensorize(x:64); "
TEXT = "Func f; In A, B; Var x; f[x] = exp(A[x]) * B[x]; " + LINE
CHAIN = "Func g, f; In A; Var x; g[x] = exp(A[x]); f[x] = g[x] * A[x]; g.block(x:32); g.tensorize(x:32); g.compile(); f.compile(); " + LINE


def body(text: str, kernel: str = "f") -> list[str]:
    """The lines of a kernel after its signature."""
    source = emit(prepare(parse(text)), "call", target("h200"))
    return source.split(f"def {kernel}_kernel(")[1].split("):\n", 1)[1].split("\n\n")[0].splitlines()


@pytest.mark.parametrize("more, inner", [("", 1), ("f.persistent();", 2)])
def test_whole_blocks_are_loaded_and_stored_without_masks(more, inner):
    lines, pad = body(TEXT + more), "    " * inner
    start, other = lines.index(f"{pad}if EVEN_x or (block_x + 1) * BLOCK_x <= size_x:"), lines.index(f"{pad}else:")
    whole, last = lines[start + 1 : other], lines[other + 2 :]
    assert lines[other + 1] == f"{pad}    x_ok = x < size_x"
    assert not any("_ok" in line for line in lines[: other + 1])
    assert [sum(f"tl.{what}(" in line for line in part) for part in (whole, last) for what in ("load", "store")] == [2, 1, 2, 1]
    assert all("mask=x_ok" in line for line in last if "_ptr" in line)


def test_what_reaches_past_its_own_element_keeps_that_mask_alone():
    lines = body("Func f; In A; Var x; f[x] = A[x] + A[x / 2 + 1]; " + LINE)
    loads = [line for line in lines if "tl.load" in line]
    assert len(loads) == 4
    assert [("mask=" in line, "x_ok" in line, "A_size_0" in line) for line in loads] == [(False,) * 3, (True, False, True), (True, True, False), (True,) * 3]


def test_both_forms_let_the_next_kernel_start_before_they_store():
    lines = body(CHAIN, "g")
    released = [i for i, line in enumerate(lines) if "launch_dependents" in line]
    stores = [i for i, line in enumerate(lines) if "tl.store" in line]
    loads = [i for i, line in enumerate(lines) if "tl.load" in line]
    assert len(loads) == len(released) == len(stores) == 2 and all(a < b < c for a, b, c in zip(loads, released, stores))
    assert [line.count(" ") for line in lines if "launch_dependents" in line] == [12, 12]
    assert lines[-2:] == ["    if DEPENDENT:", "        tl.extra.cuda.gdc_wait()"] and sum("gdc_wait" in line for line in lines) == 1


@pytest.mark.parametrize("text, has", [
    (TEXT, True),
    (TEXT.replace("B[x]", "B[0]"), True),
    (TEXT.replace("A, B;", "A; SIn t;").replace("B[x]", "t"), True),
    (TEXT.replace("tensorize(x:64)", "tensorize(x:16)"), False),  # a loop over the block
    (TEXT.replace("tensorize(x:64)", "tensorize(x:1)"), False),
    ("Func f; In A; Var x, y; f[x, y] = exp(A[x, y]); f.block(x:1, y:64); f.tensorize(y:64);", False),  # rows that start anywhere
    ("Func f; In A, B; Var x, y; f[x, y] = A[x] * B[y]; f.block(x:8, y:64); f.tensorize(x:8, y:64);", False),
    ("Func f; In A; Var x; RVar k; f[x] = rsum(A[x, k], k); f.block(x:64); f.tensorize(x:64, k:0);", False),
    ("Func f; In A; Var x; RVar k; f[x] = rsum(A[x, k], k); f.block(x:64); f.tensorize(x:64, k:16);", False),
    ("Func f; In A, B; Var x; f[x] = A[3, x] * B[x]; " + LINE, False),
])  # fmt: skip
def test_kernels_of_one_label_have_it(text, has):
    (kernel,) = lower(prepare(parse(text)))
    assert (specialize_interior_blocks(kernel) is not kernel) == has
