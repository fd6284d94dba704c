"""Every op by the interpreter and by the reference against float64, on odd shapes, in every dtype."""

import pytest
import torch
from op_cases import MAKERS, SMALL, attention, check, geglu, normal, rmsnorm

import dtkernels

SHAPES = {
    "relu": [(1,), (4097,), (3, 5, 7), (0, 3)],
    "softmax": [(1, 1), (7, 1000), (3, 5, 131), (2, 4097), (0, 5)],
    "dyt": [(1, 1), (7, 1000), (3, 5, 131), (2, 4097), (0, 5)],
    "mmsigmoid": [(1, 1, 1), (37, 67, 101), (1, 131, 65), (127, 1, 31), (0, 4, 4), (4, 4, 0)],
    "two_mm": [(1, 1, 1, 1), (37, 67, 101, 16), (31, 129, 33, 65), (0, 4, 4, 4)],
    "attention": [(1, 1, 1, 1, 1, 1, 1), (1, 2, 1, 37, 77, 16, 24), (1, 1, 1, 67, 65, 80, 40), (1, 4, 2, 1, 101, 32, 32)],
    "rmsnorm": [(1, 1), (7, 1000), (3, 5, 131), (2, 4097), (0, 5)],
    "layernorm": [(1, 1), (7, 1000), (3, 5, 131), (2, 4097), (0, 5)],
    "swiglu": [(1,), (4097,), (3, 5, 7), (0, 3)],
    "geglu": [(1,), (4097,), (3, 5, 7), (0, 3)],
    "rope": [(1, 1, 1, 1, 2), (2, 4, 2, 37, 80), (1, 3, 3, 5, 6), (2, 8, 1, 3, 64)],
    "cross_entropy": [(1, 1), (7, 1000), (3, 5, 131), (2, 4097), (0, 5)],
}  # fmt: skip
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("op,dtype", [(op, dtype) for op in MAKERS for dtype in DTYPES], ids=str)
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_variants_of_norms_and_gates(dtype):
    for shape in ((7, 129), (3, 5, 131)):
        check(rmsnorm(shape, dtype, "cpu", offset=1), dtype)
        check(geglu(shape, dtype, "cpu", exact=True), dtype)


def test_layernorm_of_a_large_mean():
    x = normal(5, 129, dtype=torch.float32, device="cpu") + 1e4
    wanted = torch.nn.functional.layer_norm(x.double(), (129,))
    got = dtkernels.ops.layernorm(x, torch.ones(129), torch.zeros(129))
    assert (got - wanted).abs().max() < 2e-3, "the mean's own rounding, 5e-4 of the deviation, and little more"


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.25])
@pytest.mark.parametrize("ignored", [-100, 3])
def test_cross_entropy_by_its_options(reduction, smoothing, ignored):
    logits = normal(4, 6, 11, dtype=torch.float32, device="cpu").requires_grad_()
    target = torch.arange(24).view(4, 6) % 11
    target[1, 2:4] = ignored
    exact = logits.detach().double().requires_grad_()
    options = {"ignore_index": ignored, "label_smoothing": smoothing, "reduction": reduction}
    got = dtkernels.ops.cross_entropy(logits, target, **options)
    want = torch.nn.functional.cross_entropy(exact.permute(0, 2, 1), target, **options)
    assert got.dtype == torch.float32 and got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), logits)[0].double(), torch.autograd.grad(want.sum(), exact)[0], rtol=1e-5, atol=1e-7)


def test_cross_entropy_is_float32_and_a_missing_class_gives_inf():
    logits = normal(3, 5, dtype=torch.float16, device="cpu")
    rows = dtkernels.ops.cross_entropy(logits, torch.tensor([1, 5, -1]), reduction="none")
    assert rows.dtype == torch.float32 and rows.isinf().tolist() == [False, True, True]
    assert dtkernels.ops.cross_entropy(logits, torch.full((3,), -100)).isnan()


def test_rope_of_one_table_for_all_and_heads_that_lie_last():
    q, k = normal(2, 5, 4, 16, dtype=torch.float32, device="cpu").transpose(1, 2), normal(2, 5, 2, 16, dtype=torch.float32, device="cpu").transpose(1, 2)
    cos, sin = normal(5, 16, dtype=torch.float32, device="cpu"), normal(5, 16, dtype=torch.float32, device="cpu", seed=1)
    for got, x in zip(dtkernels.ops.rope(q, k, cos, sin), (q, k)):
        torch.testing.assert_close(got, x * cos + torch.cat((-x[..., 8:], x[..., :8]), -1) * sin)
    for got, wanted in zip(dtkernels.ops.rope(q, k, cos[None], sin[None]), dtkernels.ops.rope(q, k, cos, sin)):
        assert torch.equal(got, wanted)


def test_gates_of_a_packed_tensor():
    packed = normal(3, 4, 26, dtype=torch.float32, device="cpu")
    gate, up = packed.chunk(2, -1)
    torch.testing.assert_close(dtkernels.ops.swiglu(gate, up), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("op", MAKERS)
def test_gradients_agree_with_float64(op):
    case = MAKERS[op](SMALL[op], torch.float32, "cpu")
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
        (lambda o, z: o.mmsigmoid(z(3, 4), z(5, 6)), "mmsigmoid: a is (3, 4), b is (5, 6): K is 4 in a, 5 in b; allowed: a (..., M, K), b (K, N) or (..., K, N)"),
        (lambda o, z: o.two_mm(z(3, 4), z(4, 5), z(6, 7)), "two_mm: b is (4, 5), c is (6, 7): L is 5 in b, 6 in c; allowed: a (..., M, K)"),
        (lambda o, z: o.dyt(z(3, 4), 1.0, z(5), z(4)), "dyt: x is (3, 4), weight is (5,): C is 4 in x, 5 in weight; allowed: x (..., C), weight (C), bias (C)"),
        (lambda o, z: o.attention(z(1, 4, 3, 8), z(1, 3, 3, 8), z(1, 3, 3, 8)), "attention: the heads of k and v divide those of q"),
        (lambda o, z: o.rmsnorm(z(3, 4), z(5)), "rmsnorm: x is (3, 4), weight is (5,): C is 4 in x, 5 in weight; allowed: x (..., C), weight (C)"),
        (lambda o, z: o.swiglu(z(3, 4), z(3, 5)), "swiglu: gate is (3, 4), up is (3, 5); allowed: one shape"),
        (lambda o, z: o.rope(z(1, 1, 2, 3), z(1, 1, 2, 3), z(2, 3), z(2, 3)), "rope: the last dimension is even; got shape (1, 1, 2, 3)"),
        (lambda o, z: o.rope(z(1, 2, 4), z(1, 2, 4), z(2, 4), z(2, 4)), "rope: q and k have 4 dimensions"),
        (lambda o, z: o.cross_entropy(z(3, 4), z(4)), "cross_entropy: target has a class for each row of logits; got shapes (3, 4), (4,)"),
        (lambda o, z: o.cross_entropy(z(3, 4), z(3), reduction="all"), "cross_entropy: reduction is 'all'; allowed: none, sum, mean"),
        (lambda o, z: o.cross_entropy(z(3, 4), z(3), label_smoothing=2), "cross_entropy: label_smoothing is 2; allowed: 0 to 1"),
        (lambda o, z: o.attention(z(3, 8), z(3, 7), z(3, 8)), "attention: q is (3, 8), k is (3, 7): D is 8 in q, 7 in k; allowed: q (..., H, M, D)"),
    ],
)
def test_wrong_shapes_give_one_clear_line(call, text):
    with pytest.raises(ValueError) as caught:
        call(dtkernels.ops, torch.zeros)
    assert str(caught.value).startswith(text) and "\n" not in str(caught.value)


def test_wrong_types_are_named():
    with pytest.raises(TypeError, match="cross_entropy: target is torch.float32; allowed: int32, int64, int8 or uint8, as it stands in an index"):
        dtkernels.ops.cross_entropy(torch.zeros(3, 4), torch.zeros(3))
    x = torch.zeros(3, 4)
    with pytest.raises(TypeError, match="relu: x is of layout torch.sparse_coo; allowed: a tensor with strides"):
        dtkernels.ops.relu(x.to_sparse())
    with pytest.raises(ValueError, match=r"dyt: alpha is a number or a one-element tensor; got shape \(4,\)"):
        dtkernels.ops.dyt(x, x[0], x[0], x[0])
    with pytest.raises(TypeError, match="dyt: alpha is a str; allowed: a number or a one-element tensor"):
        dtkernels.ops.dyt(x, "1", x[0], x[0])
    with pytest.raises(TypeError, match="relu: x is a list; allowed: a tensor"):
        dtkernels.ops.relu([1.0])
    with pytest.raises(TypeError, match="relu: x is torch.complex64"):
        dtkernels.ops.relu(torch.zeros(3, dtype=torch.complex64))
