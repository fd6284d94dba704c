"""Kernels of one call overlap on a GPU of compute capability 9.0 and newer: none reads what the one before it has not written yet."""

import pytest
import torch
from op_cases import normal

import dtkernels

SHAPES = {
    "dyt": [(64, 512), (1024, 4096)],
    "mmsigmoid": [(256, 256, 256), (16, 4096, 4096), (1024, 64, 512)],
    "two_mm": [(256, 256, 64, 64), (512, 1024, 512, 32)],
    "attention": [(1, 8, 300, 64), (2, 4, 512, 128)],
}
SETS, ROUNDS = 3, 40


def leaves(op: str, shape: tuple, seed: int) -> list[torch.Tensor]:
    if op == "dyt":
        made = [shape, (1,), shape[1:], shape[1:]]
    elif op == "mmsigmoid":
        m, n, k = shape
        made = [(m, k), (k, n)]
    elif op == "two_mm":
        m, n, k, r = shape
        made = [(m, k), (k, r), (r, n)]
    else:
        made = [shape] * 3
    return [normal(*s, dtype=torch.bfloat16, device="cuda", seed=10 * seed + i).requires_grad_() for i, s in enumerate(made)]


def step(op: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    result = getattr(dtkernels.ops, op)(*inputs)
    return [result.detach(), *torch.autograd.grad(result, inputs, torch.full_like(result, 0.5))]


@pytest.mark.parametrize(("op", "shape"), [(op, shape) for op, shapes in SHAPES.items() for shape in shapes])
def test_calls_in_a_row_on_other_numbers_give_the_same_bits(op, shape):
    """What a call leaves unwritten shows: the same memory holds the results of other numbers from the call before."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels overlap from compute capability 9.0 on")
    sets = [leaves(op, shape, seed) for seed in range(SETS)]
    right = []
    for inputs in sets:
        right.append(step(op, inputs))
        torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(SETS * ROUNDS):
        for found, expected in zip(step(op, sets[i % SETS]), right[i % SETS], strict=True):
            wrong += (found != expected).sum()
    assert wrong.item() == 0
    assert all(torch.isfinite(t).all() for one in right for t in one)


def test_a_captured_call_gives_the_same_bits():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels overlap from compute capability 9.0 on")
    one, other = (leaves("two_mm", (256, 256, 64, 64), seed) for seed in (1, 2))
    right = [step("two_mm", inputs) for inputs in (one, other)]
    place = [t.detach().clone().requires_grad_() for t in one]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step("two_mm", place)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step("two_mm", place)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(60):
        with torch.no_grad():
            for t, new in zip(place, (one, other)[i % 2]):
                t.copy_(new)
        graph.replay()
        for found, expected in zip(results, right[i % 2], strict=True):
            wrong += (found != expected).sum()
    assert wrong.item() == 0
