"""Low-rank updates and gates as one op each, forward and backward, by kernels, against float64."""

import pytest
import torch
from op_cases import normal

import dtkernels


def agree(ours, truth, tensors: dict[str, torch.Tensor], dtype: torch.dtype, terms: float) -> None:
    """Result and gradients; ``terms`` bounds the sums of absolute products in them."""
    given = {n: t.requires_grad_() for n, t in tensors.items()}
    exact = {n: t.detach().double().requires_grad_() for n, t in tensors.items()}
    result, wanted = ours(**given), truth(**exact)
    assert result.shape == wanted.shape and result.dtype == dtype
    adjoint = normal(*wanted.shape, dtype=dtype, device="cpu", seed=3)
    pairs = [("result", result, wanted)]
    pairs += zip(given, torch.autograd.grad(result, given.values(), adjoint), torch.autograd.grad(wanted, exact.values(), adjoint.double()))
    for name, found, right in pairs:
        error = (found.double() - right).abs().max().item()
        bound = 4 * torch.finfo(dtype).eps * max(terms, right.abs().max().item())
        assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("lead, k, n, rank", [((5,), 17, 9, 4), ((2, 7), 33, 40, 16), ((3,), 16, 300, 64)])
def test_lora_is_the_update_that_peft_writes(dtype, lead, k, n, rank):
    tensors = {
        "y": normal(*lead, n, dtype=dtype, device="cpu"),
        "x": normal(*lead, k, dtype=dtype, device="cpu", seed=1),
        "a": normal(rank, k, dtype=dtype, device="cpu", seed=2) / k**0.5,
        "b": normal(n, rank, dtype=dtype, device="cpu", seed=4) / rank**0.5,
    }
    agree(lambda **t: dtkernels.ops.lora(**t, scale=0.5), lambda y, x, a, b: y + 0.5 * (x @ a.T) @ b.T, tensors, dtype, terms=40.0)


@pytest.mark.parametrize("given", [(), ("bias",), ("times",), ("bias", "times")], ids="+".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gates_take_a_bias_a_linear_weight_and_what_they_gate(dtype, given):
    tensors = {"a": normal(2, 9, 33, dtype=dtype, device="cpu"), "w": normal(20, 33, dtype=dtype, device="cpu", seed=1) / 6}
    shapes = {"bias": (20,), "times": (2, 9, 20)}
    tensors |= {name: normal(*shapes[name], dtype=dtype, device="cpu", seed=5) for name in given}

    def truth(a, w, bias=None, times=None):
        gate = torch.sigmoid(torch.nn.functional.linear(a, w, bias))
        return gate if times is None else gate * times

    agree(lambda a, w, **more: dtkernels.ops.gate(a, w, **more), truth, tensors, dtype, terms=20.0)


def test_shapes_that_do_not_fit_are_one_clear_line():
    with pytest.raises(ValueError, match="^gate: "):
        dtkernels.ops.gate(torch.zeros(2, 3), torch.zeros(4, 3), bias=torch.zeros(5))
    with pytest.raises(ValueError, match="^lora: "):
        dtkernels.ops.lora(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(1, 5), torch.zeros(3, 1))
