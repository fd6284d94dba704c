"""Windows, offsets, softcap and sinks of attention on a GPU, forward and backward, in every element type."""

import pytest
import torch
from attention_cases import FLAGS, OPTIONS, inputs, truth

import dtkernels

SHAPES = [(2, 8, 2, 37, 53, 24, 40), (1, 4, 4, 200, 331, 64, 64), (1, 8, 2, 130, 130, 128, 128), (2, 8, 1, 1, 700, 96, 96)]


def run(function, given: dict) -> list[torch.Tensor]:
    """The result and the gradients of everything that floats."""
    leaves = [t for t in given.values() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    for t in leaves:
        t.requires_grad_()
    result = function(**given)
    return [result.detach(), *torch.autograd.grad(result, leaves, torch.ones_like(result))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_as_near_to_float64_as_torch_is_in_that_dtype(name, dtype):
    forms = ("attention_flags",) if OPTIONS[name].get("mask") is FLAGS else ("attention", "attention_flags")  # a mask of one query is flags of keys
    before = sum(dtkernels.paths().get(op, {}).get("gpu", 0) for op in forms)
    for shape in SHAPES:
        given = inputs(shape, OPTIONS[name], dtype, "cuda")
        exact = {n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in given.items()}
        plain = {n: _detached(t) for n, t in given.items()}
        found, wanted, theirs = run(dtkernels.ops.attention, given), run(truth, exact), run(truth, plain)
        largest = max(right.abs().max() for right in wanted)  # a query of one visible key has no gradient: terms of this size cancel
        for ours, right, torchs in zip(found, wanted, theirs):
            error, allowed = (ours.double() - right).abs().max(), (torchs.double() - right).abs().max()
            assert error <= 2 * allowed + 16 * torch.finfo(dtype).eps * largest, (shape, float(error), float(allowed))
    assert sum(dtkernels.paths().get(op, {}).get("gpu", 0) for op in forms) == before + len(SHAPES)


def _detached(value):
    return value.detach() if isinstance(value, torch.Tensor) else value
