"""Every op by the interpreter and by the reference against float64, on odd shapes, in every dtype."""

import pytest
import torch
from op_cases import MAKERS, attention, check, normal

import dtkernels

SHAPES = {
    "relu": [(1,), (4097,), (3, 5, 7), (0, 3)],
    "softmax": [(1, 1), (7, 1000), (3, 5, 131), (2, 4097), (0, 5)],
    "dyt": [(1, 1), (7, 1000), (3, 5, 131), (2, 4097), (0, 5)],
    "mmsigmoid": [(1, 1, 1), (37, 67, 101), (1, 131, 65), (127, 1, 31), (0, 4, 4), (4, 4, 0)],
    "two_mm": [(1, 1, 1, 1), (37, 67, 101, 16), (31, 129, 33, 65), (0, 4, 4, 4)],
    "attention": [(1, 1, 1, 1, 1, 1, 1), (1, 2, 1, 37, 77, 16, 24), (1, 1, 1, 67, 65, 80, 40), (1, 4, 2, 1, 101, 32, 32)],
}  # fmt: skip
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def dtypes_of(op: str) -> list[torch.dtype]:
    """bf16 products multiply raw bits in Triton's interpreter, in every version: those run on a GPU only."""
    return DTYPES if op in ("relu", "softmax", "dyt") else DTYPES[:2]


@pytest.mark.parametrize("op,dtype", [(op, dtype) for op in MAKERS for dtype in dtypes_of(op)], ids=str)
def test_kernel_agrees_with_float64(op, dtype):
    before = dtkernels.paths().get(op, {"interpreter": 0})["interpreter"]
    for shape in SHAPES[op]:
        check(MAKERS[op](shape, dtype, "cpu"), dtype)
    assert dtkernels.paths()[op]["interpreter"] - before == len(SHAPES[op])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", MAKERS)
def test_reference_agrees_with_float64(op, dtype, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    for shape in SHAPES[op]:
        check(MAKERS[op](shape, dtype, "cpu"), dtype)
    assert dtkernels.paths()[op]["reference"] >= len(SHAPES[op])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_causal_attention_agrees_with_float64(dtype):
    for shape in SHAPES["attention"]:
        check(attention(shape, dtype, "cpu", causal=True), dtype)


@pytest.mark.parametrize("op", MAKERS)
def test_gradients_agree_with_float64(op):
    case = MAKERS[op]({"relu": (3, 7), "softmax": (3, 17), "dyt": (3, 17), "mmsigmoid": (5, 7, 17), "two_mm": (5, 7, 17, 16), "attention": (1, 4, 2, 9, 11, 16, 16)}[op], torch.float32, "cpu")
    inputs = tuple(t.requires_grad_() for t in case.inputs)
    grad = normal(*case.result().shape, dtype=torch.float32, device="cpu", seed=9)
    ours = torch.autograd.grad(case.ours(*inputs, **case.options), inputs, grad)
    exact = tuple(t.detach().double().requires_grad_() for t in inputs)
    truth = torch.autograd.grad(case.truth(*exact), exact, grad.double())
    for got, wanted in zip(ours, truth):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


def test_relu_gradient_at_zero_is_zero():
    x = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
    dtkernels.ops.relu(x).sum().backward()
    assert x.grad.tolist() == [0.0, 0.0, 1.0]


def test_non_contiguous_and_expanded_inputs():
    x = normal(6, 5, 40, dtype=torch.float32, device="cpu")
    for view in (x.transpose(0, 2), x[:, ::2, ::3], x[:1].expand(4, 5, 40), x.permute(1, 2, 0)):
        torch.testing.assert_close(dtkernels.ops.relu(view), view.relu())
        torch.testing.assert_close(dtkernels.ops.softmax(view), view.softmax(-1))


def test_large_logits_and_masked_rows():
    x = normal(4, 100, dtype=torch.float32, device="cpu") * 1e4
    torch.testing.assert_close(dtkernels.ops.softmax(x), x.softmax(-1))
    q = normal(1, 2, 8, 16, dtype=torch.float32, device="cpu")
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[3] = False
    out = dtkernels.ops.attention(q, q, q, mask)
    assert (out[:, :, 3] == 0).all() and torch.isfinite(out).all()


def test_nan_stays():
    x = torch.tensor([1.0, float("nan"), -1.0])
    assert dtkernels.ops.relu(x).isnan().tolist() == [False, True, False]
    assert dtkernels.ops.softmax(x).isnan().all()


@pytest.mark.parametrize(
    "call,text",
    [
        (lambda o, z: o.mmsigmoid(z(3, 4), z(5, 6)), "mmsigmoid: B has 5 along k, A has 4"),
        (lambda o, z: o.two_mm(z(3, 4), z(4, 5), z(6, 7)), "two_mm: C has 6 along l, B has 5"),
        (lambda o, z: o.dyt(z(3, 4), 1.0, z(5), z(4)), "dyt: w has 5 along y, A has 4"),
        (lambda o, z: o.attention(z(1, 4, 3, 8), z(1, 3, 3, 8), z(1, 3, 3, 8)), "attention: the heads of k and v divide those of q"),
        (lambda o, z: o.attention(z(3, 8), z(3, 7), z(3, 8)), "attention: K has 7 along d, Q has 8"),
    ],
)
def test_wrong_shapes_give_one_clear_line(call, text):
    with pytest.raises(ValueError) as caught:
        call(dtkernels.ops, torch.zeros)
    assert str(caught.value).startswith(text) and "\n" not in str(caught.value)


def test_wrong_types_are_named():
    with pytest.raises(TypeError, match="relu: A is a list; allowed: a tensor"):
        dtkernels.ops.relu([1.0])
    with pytest.raises(TypeError, match="relu: A is torch.complex64"):
        dtkernels.ops.relu(torch.zeros(3, dtype=torch.complex64))
