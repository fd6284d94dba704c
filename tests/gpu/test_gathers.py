"""Gradients of gathers on a GPU: additions at places that data names, and a search in order where torch asks for determinism."""

import pytest
import torch

import dtkernels
from dtkernels.ops.registry import shipped


@pytest.fixture
def deterministic(request):
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("deterministic", [False, True], indirect=True)
@pytest.mark.parametrize("rows, columns, taken", [(20000, 256, 50000), (30000, 65, 4097), (300, 1024, 20000)])
def test_gradient_of_an_embedding(deterministic, dtype, rows, columns, taken):
    shipped.cache_clear()
    torch.manual_seed(0)
    w = torch.randn(rows, columns, device="cuda", dtype=dtype, requires_grad=True)
    t, adjoint = torch.randint(rows, (taken,), device="cuda"), torch.randn(taken, columns, device="cuda", dtype=dtype)
    found = [torch.autograd.grad(dtkernels.ops.embedding(w, t), w, adjoint)[0] for _ in range(3)]
    truth = torch.zeros(rows, columns, device="cuda", dtype=torch.float64).index_add_(0, t, adjoint.double())
    eps = torch.finfo(dtype).eps
    for got in found:
        assert ((got.double() - truth).abs() <= 2 * eps * truth.abs() + 100 * torch.finfo(torch.float32).eps * truth.abs().max()).all()
        assert not deterministic or torch.equal(got, found[0])
    assert ("accumulate_at" in str(dtkernels.explain("embedding", w, t))) != deterministic
