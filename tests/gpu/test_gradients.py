"""Gradients on a GPU: no further from float64 than torch's own, in every dtype, at odd shapes; by generated kernels only."""

import pytest
import torch
from op_cases import MAKERS, attention, normal

import dtkernels

SHAPES = {
    "relu": [(33, 7), (4097,), (257, 1023)],
    "softmax": [(33, 65), (7, 1000), (129, 4097)],
    "dyt": [(33, 65), (7, 1000), (1025, 333)],
    "mmsigmoid": [(33, 17, 65), (130, 67, 200), (257, 129, 1000)],
    "two_mm": [(33, 17, 65, 16), (130, 67, 200, 65), (513, 257, 100, 33)],
    "attention": [(2, 4, 2, 33, 41, 32, 32), (1, 2, 1, 130, 257, 64, 64), (2, 3, 3, 100, 77, 80, 80), (1, 8, 2, 257, 513, 128, 128)],
    "rmsnorm": [(33, 65), (7, 1000), (1025, 333)],
    "layernorm": [(33, 65), (7, 1000), (1025, 333)],
    "swiglu": [(33, 7), (4097,)],
    "geglu": [(33, 7), (4097,)],
    "rope": [(2, 4, 2, 37, 80), (1, 8, 2, 257, 128)],
    "cross_entropy": [(33, 65), (7, 1000), (129, 4097), (33, 131072 + 3)],
}  # fmt: skip
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def results(function, inputs: tuple, adjoint: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """The result and the gradients of all inputs, computed in ``dtype``."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, adjoint.to(dtype))]


def errors(case, dtype: torch.dtype, length: int) -> list[tuple[str, float, float, float]]:
    """(what, error of ours, error of torch's, what rounding may add) for the result and each gradient, as root mean squares.

    Rounding: once to ``dtype``; four times in float32, as elementwise functions are good to; and along a chain of sums, whose
    error grows by half an ulp times sqrt(length / 6), where torch may sum in several chains.
    """
    shape = case.wanted().shape
    adjoint = normal(*shape, dtype=dtype, device="cuda", seed=9)
    exact = results(case.truth, case.inputs, adjoint, torch.float64)
    theirs = results(case.truth, case.inputs, adjoint, dtype)
    ours = results(lambda *t: case.ours(*t, **case.options), case.inputs, adjoint, dtype)
    found = []
    for at, (a, b, want) in enumerate(zip(ours, theirs, exact)):
        assert a.dtype == b.dtype == dtype and a.shape == want.shape
        error = [(x.double() - want).square().mean().sqrt().item() for x in (a, b)]
        roundings = torch.finfo(dtype).eps + torch.finfo(torch.float32).eps * (4 + (length / 6) ** 0.5)
        found.append(("result" if at == 0 else f"gradient {at}", *error, roundings / 2 * want.square().mean().sqrt().item()))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [*MAKERS, "causal attention"])
def test_error_is_no_larger_than_that_of_torch(op, dtype, capsys):
    name = op.split()[-1]
    before = dtkernels.paths().get(f"{name} backward", {"gpu": 0, "reference": 0})
    tf32, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    try:
        for shape in SHAPES[name]:
            case = attention(shape, dtype, "cuda", causal=True) if op != name else MAKERS[op](shape, dtype, "cuda")
            for what, ours, theirs, rounding in errors(case, dtype, sum(shape)):
                with capsys.disabled():
                    print(f"\n{case.name} {dtype} {what}: {ours:.3g} against {theirs:.3g}, ratio {ours / max(theirs, 1e-300):.2f}", end="")
                assert ours <= 1.5 * theirs + rounding, f"{case.name} {what}: {ours:.3g} against torch's {theirs:.3g}"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    after = dtkernels.paths()[f"{name} backward"]
    assert after["gpu"] - before["gpu"] == len(SHAPES[name]) and after["reference"] == before["reference"]


def test_scale_bias_and_masked_rows():
    q, k, v = (normal(1, 2, 65, 32, dtype=torch.float32, device="cuda", seed=s).requires_grad_() for s in range(3))
    scale, bias = torch.tensor([0.2], device="cuda", requires_grad=True), normal(65, 65, dtype=torch.float32, device="cuda", seed=4)
    bias[7] = float("-inf")
    bias.requires_grad_()
    dtkernels.ops.attention(q, k, v, bias, scale=scale).square().sum().backward()
    exact = [t.detach().double().requires_grad_() for t in (q, k, v, scale, bias)]
    seen = [m for m in range(65) if m != 7]
    scores = exact[0][:, :, seen] @ exact[1].transpose(-1, -2) * exact[3] + exact[4][seen]
    (scores.softmax(-1) @ exact[2]).square().sum().backward()
    for ours, truth in zip((q, k, v, scale, bias), exact):
        assert torch.isfinite(ours.grad).all()
        torch.testing.assert_close(ours.grad.double(), truth.grad, rtol=1e-4, atol=1e-4 * truth.grad.abs().max().item())


def test_gradients_do_not_differ_from_run_to_run():
    for op, shape in (("dyt", (4097, 333)), ("attention", (1, 4, 2, 257, 513, 64, 64)), ("two_mm", (513, 257, 100, 33))):
        case = MAKERS[op](shape, torch.bfloat16, "cuda")
        adjoint = normal(*case.wanted().shape, dtype=torch.bfloat16, device="cuda", seed=9)
        first, second = (results(case.ours, case.inputs, adjoint, torch.bfloat16) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second))
