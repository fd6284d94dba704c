"""How elements of one label are loaded and stored at lengths that nothing divides: machine code without a GPU."""

import re
from collections import Counter

import pytest
import torch
import triton.language as tl

from dtkernels.codegen.target import target
from dtkernels.codegen.triton_module import emit
from dtkernels.ops.registry import shipped
from dtkernels.runtime.build import compile_kernel, plain_types, record_launches
from dtkernels.runtime.cache import load_module
from dtkernels.runtime.match import builds

ODD, EIGHTH, EVEN = 4099 * 4097, 10007 * 1000, 4096 * 4096


def widths(op: str, direction: str, length: int, dtype: torch.dtype, gpu: str = "h200") -> list[Counter]:
    """Of each build of the formula's kernel: how many instructions move (load or store, bits) of global memory."""
    variant = shipped(op).variant((), frozenset(), 0)
    variant = variant if direction == "forward" else variant.pair(tuple(variant.signature.inputs)).backward
    program = variant.program({"x": length}, dtype.itemsize, target(gpu))
    args = tuple(torch.empty(length, dtype=dtype, device="meta") for _ in variant.algorithm.inputs)
    (launch,) = record_launches(load_module(emit(program, "call", target(gpu)), op), "call", args)
    found = builds(tuple(launch.kernel.arg_names), launch.args, launch.constants, plain_types(launch), tl.int64)
    texts = [compile_kernel(launch.kernel, b.types, b.constants, b.multiples, launch.options, target(gpu)).asm["ptx"] for b in found]
    return [Counter((what, int(count or 1) * int(bits)) for what, count, bits in re.findall(r"(ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", text)) for text in texts]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("op, direction", [("relu", "forward"), ("relu", "backward"), ("swiglu", "backward")])
def test_blocks_but_the_last_move_whole_vectors(op, direction, dtype):
    """Of the builds for an odd length the last is for tensors that lie anywhere; the one for a length that blocks divide has nothing else."""
    even, odd = widths(op, direction, EVEN, dtype)[0], widths(op, direction, ODD, dtype)[0]
    assert even and {bits for _, bits in even} == {128}
    assert {k: n for k, n in odd.items() if k[1] == 128} == even
    assert set(odd) == {*even, ("ld", 8 * dtype.itemsize), ("st", 8 * dtype.itemsize)}


def test_lengths_that_a_vector_divides_need_no_single_elements():
    found = widths("relu", "forward", EIGHTH, torch.bfloat16)[0]
    assert {bits for _, bits in found} == {128}
