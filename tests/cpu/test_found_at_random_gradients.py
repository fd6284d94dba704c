# ruff: noqa: E501 (programs read best on one line)
"""What tests/fuzz.py found of gradients, shortened: gradients of programs that were wrong or ended in an error."""

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch

from dtkernels.lang import parse
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator


def op_of(text: str) -> Operator:
    return Operator(Spec("found", "Found at random.", parse(text)))


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 0.5


@pytest.mark.parametrize("index", ["2", "len(x) - 1 - x", "x + 1", "T[x]"])
def test_inputs_that_one_arithmetic_indexes_have_extents_of_their_own(index):
    op = op_of(f"Func f; In A, B, C, T; Var x; f[x] = A[{index}] * B[{index}] * C[x] + T[x];")
    a, b, c, t = rand(4), rand(5, seed=1), rand(3, seed=2), torch.tensor([0, 3, 1])
    at = {"2": torch.tensor([2, 2, 2]), "T[x]": t, "x + 1": torch.arange(1, 4)}.get(index, torch.arange(2, -1, -1))
    leaves = [a.requires_grad_(), b.requires_grad_()]
    got, want = op(a, b, c, t), a[at] * b[at] * c + t
    for mine, theirs in zip(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), leaves)):
        torch.testing.assert_close(mine, theirs)
