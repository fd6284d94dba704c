# ruff: noqa: E501 (programs read best on one line)
"""Elements of one label, of any length: blocks that are whole run without masks."""

import pytest
import torch
from oracle import check
from small_programs import binary, random, unary

import dtkernels

BLOCK = 32
LENGTHS = [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 1, 5 * BLOCK - 8]
SCHEDULES = [f"f.block(x:{BLOCK}); f.tensorize(x:{BLOCK});{more}" for more in ("", " f.persistent();", " f.specialize(x);")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("length", LENGTHS)
def test_values_around_the_ends_of_blocks(length, schedule, dtype):
    a, b = (t.to(dtype) for t in random((length,), (length,)))
    check(binary("maximum(A[x], 0) * B[x] + x", schedule), a, b)
    assert "or (block_x + 1) * BLOCK_x <= size_x" in dtkernels.compile(binary("A[x] * B[x]", schedule)).source


@pytest.mark.parametrize("length", LENGTHS)
def test_neighbours_and_places_in_memory(length):
    """Elements a step away, every third element of a longer tensor, one that all share."""
    check(unary("A[x] - A[x + 1]", SCHEDULES[0]), random((length,)))
    check(unary("A[x] * 2", SCHEDULES[0]), random((3 * length,))[::3])
    check(unary("A[x] * 2", SCHEDULES[0]), random((1,)).expand(length))


@pytest.mark.parametrize("length", LENGTHS)
def test_nothing_behind_the_last_element_is_read_or_written(length):
    """The result lies in the middle of a longer tensor, which the wrapper is given in place of one of its own."""
    program = dtkernels.compile(unary("A[x] + 1", SCHEDULES[0]))
    room, given = torch.full((length + 2 * BLOCK,), -7.0), torch.full((length + 2 * BLOCK,), float("nan"))
    inside = slice(BLOCK, BLOCK + length)
    given[inside] = 1
    module = program.module
    known, module.torch = module.torch, _Allocates(room[inside])
    try:
        result = program(given[inside])
    finally:
        module.torch = known
    assert result.data_ptr() == room[inside].data_ptr() and (result == 2).all()
    assert (room[:BLOCK] == -7).all() and (room[BLOCK + length :] == -7).all()


class _Allocates:
    """torch, which has only this one tensor to give."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def empty(self, shape, **kwargs) -> torch.Tensor:
        assert tuple(shape) == self.tensor.shape
        return self.tensor


def test_several_results_and_a_kernel_that_reads_another():
    text = "Func g, h, f; In A, B; Var x; g[x] = exp(A[x]); h[x] = g[x] * B[x]; f[x] = h[x] + B[x]; "
    text += f"g.block(x:{BLOCK}); g.tensorize(x:{BLOCK}); g.compile(); h.fuse_at(f, x); h.compile(); f.compile(); f.block(x:{BLOCK}); f.tensorize(x:{BLOCK});"
    for length in LENGTHS:
        check(text, *random((length,), (length,)))
