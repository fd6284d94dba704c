"""Every op on a GPU against float64, at odd and at large sizes, in every dtype; the path must be the generated kernel."""

import pytest
import torch
from op_cases import MAKERS, SMALL, attention, check, normal, softmax

import dtkernels

SHAPES = {
    "relu": [(1,), (4097,), (1000, 1000), (3, 5, 7), (1 << 24,), (70000, 3), (257, 1023), (4099, 4097)],
    "softmax": [(1, 1), (7, 1000), (4096, 4097), (3, 131), (70000, 33), (16, 65536), (5, 131072 + 3)],
    "dyt": [(1, 1), (7, 1000), (4096, 4097), (3, 5, 131), (70000, 33)],
    "mmsigmoid": [(1, 1, 1), (16, 16, 16), (130, 67, 200), (1000, 1000, 1000), (1, 4097, 513), (2048, 2048, 2048), (127, 1, 31)],
    "two_mm": [(1, 1, 1, 1), (64, 128, 32, 32), (130, 67, 200, 16), (1000, 777, 333, 65), (512, 1024, 64, 300), (8192, 4096, 4096, 16)],
    "attention": [(1, 1, 1, 1, 1, 1, 1), (2, 4, 2, 100, 77, 64, 64), (1, 2, 1, 1000, 1000, 80, 96), (2, 3, 3, 257, 4097, 128, 128), (1, 2, 2, 130, 64, 256, 32), (1, 8, 2, 1, 1000, 128, 128)],
    "rmsnorm": [(1, 1), (7, 1000), (4096, 4097), (3, 5, 131), (70000, 33), (5, 131072 + 3)],
    "layernorm": [(1, 1), (7, 1000), (4096, 4097), (3, 5, 131), (70000, 33), (5, 131072 + 3)],
    "swiglu": [(1,), (4097,), (1000, 1000), (3, 5, 7), (70000, 3), (257, 1023)],
    "geglu": [(1,), (4097,), (1000, 1000), (3, 5, 7), (70000, 3), (257, 1023)],
    "rope": [(1, 1, 1, 1, 2), (2, 4, 2, 37, 80), (1, 32, 8, 1000, 128), (2, 8, 1, 3, 64)],
    "cross_entropy": [(1, 1), (7, 1000), (4096, 4097), (3, 5, 131), (70000, 33), (5, 131072 + 3)],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", MAKERS)
def test_op_agrees_with_float64(op, dtype):
    before = dtkernels.paths().get(op, {"gpu": 0, "reference": 0})
    for shape in SHAPES[op]:
        check(MAKERS[op](shape, dtype, "cuda"), dtype)
    after = dtkernels.paths()[op]
    assert after["gpu"] - before["gpu"] == len(SHAPES[op]) and after["reference"] == before["reference"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_causal_attention_agrees_with_float64(dtype):
    for shape in SHAPES["attention"]:
        check(attention(shape, dtype, "cuda", causal=True), dtype)


@pytest.mark.parametrize("op", MAKERS)
def test_gradients_agree_with_float64(op):
    case = MAKERS[op](SMALL[op], torch.float32, "cuda")
    inputs = tuple(t.requires_grad_() for t in case.inputs)
    grad = torch.randn_like(case.result())
    ours = torch.autograd.grad(case.ours(*inputs, **case.options), inputs, grad)
    exact = tuple(t.detach().double().requires_grad_() for t in inputs)
    truth = torch.autograd.grad(case.truth(*exact), exact, grad.double())
    for got, wanted in zip(ours, truth):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


def test_more_than_two_to_the_31_elements():
    x = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device="cuda")
    x[:4096], x[-4096:] = -1, 2
    out = dtkernels.ops.relu(x)
    assert (out[:4096] == 0).all() and (out[-4096:] == 2).all()
    del out
    rows = x[: 2**31].view(2**16, 2**15)
    out = dtkernels.ops.softmax(rows.t()[:, :64])  # strided: offsets pass 2**31
    wanted = rows.t()[:, :64].double().softmax(-1)
    assert (out.double() - wanted).abs().max() < 1e-2


def test_large_logits_and_masked_rows():
    x = normal(64, 1000, dtype=torch.float32, device="cuda") * 1e4
    check(softmax((64, 1000), torch.float32, "cuda", scale=1e4), torch.float32)
    assert torch.isfinite(dtkernels.ops.softmax(x)).all()
    q = normal(1, 2, 64, 64, dtype=torch.float16, device="cuda")
    mask = torch.ones(64, 64, dtype=torch.bool, device="cuda")
    mask[3] = False
    out = dtkernels.ops.attention(q, q, q, mask)
    assert (out[:, :, 3] == 0).all() and torch.isfinite(out).all()


def test_nan_stays():
    x = torch.tensor([1.0, float("nan"), -1.0], device="cuda")
    assert dtkernels.ops.relu(x).isnan().tolist() == [False, True, False]
    assert dtkernels.ops.softmax(x).isnan().all()
