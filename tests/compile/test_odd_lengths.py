"""How elements are loaded and stored, of one label at lengths that nothing divides and of a transpose: machine code without a GPU."""

import re
from collections import Counter

import pytest
import torch
import triton.language as tl

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program
from dtkernels.ops.registry import shipped
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.specialization import builds
from dtkernels.runtime.build.triton_compile import compile_kernel, plain_types, record_launches

ODD, EIGHTH, EVEN = 4099 * 4097, 10007 * 1000, 4096 * 4096


def widths(op: str, direction: str, length: int, dtype: torch.dtype, gpu: str = "h200") -> list[Counter]:
    """Of each build of the kernels of the default schedule: how many instructions move (load or store, bits) of global memory."""
    variant = shipped(op).variant((), frozenset(), 0)
    variant = variant if direction == "forward" else variant.pair(tuple(variant.signature.inputs)).backward
    program = variant.program({"x": length}, dtype.itemsize, target(gpu))
    return moved(program, tuple(torch.empty(length, dtype=dtype, device="meta") for _ in variant.algorithm.inputs), gpu)


def moved(program, args: tuple, gpu: str = "h200") -> list[Counter]:
    """The same of a program's one kernel for these arguments."""
    (launch,) = record_launches(load_module(emit(program, "call", target(gpu)), "moved"), "call", args)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("text, shapes", [
    ("f[y, x] = A[x, y] * 2;", [(4096, 2048)]), ("f[y, x] = A[x, y] + B[y, x];", [(4096, 2048), (2048, 4096)]),
    ("f[y, z, x] = A[x, z, y];", [(4096, 32, 128)]),
])  # fmt: skip
def test_both_sides_of_a_transpose_move_whole_vectors(text, shapes, dtype):
    """Read along one label and written along the other: what lies between passes through shared memory."""
    labels, inputs = re.findall(r"\w", re.search(r"f\[(.*?)\]", text)[1]), "AB"[: len(shapes)]
    algorithm = prepare_algorithm(parse(f"Func f; In {', '.join(inputs)}; Var {', '.join(labels)}; {text}").algorithm, ("f",))
    sizes = dict(zip("xzy" if "z" in labels else "xy", shapes[0]))
    program = Program(algorithm, default_schedule(algorithm, ("f",), sizes, dtype.itemsize, target("h200")))
    found = moved(program, tuple(torch.empty(s, dtype=dtype, device="meta") for s in shapes))[0]
    assert {what for what, _ in found} == {"ld", "st"} and {bits for _, bits in found} == {128}
