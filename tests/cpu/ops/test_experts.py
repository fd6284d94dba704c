"""Products by expert and mixtures of experts, against torch in float64: values, gradients, odd inputs, refusals."""

from functools import partial

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
import torch.nn.functional as F

import dtkernels
from dtkernels import ops


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def picked(weight, expert):
    """The matrix of each row; zeros for an expert out of range."""
    inside = (expert >= 0) & (expert < len(weight))
    return weight[expert.clamp(0, len(weight) - 1)] * inside[..., None, None]


def grouped_mm(a, weight, expert):
    return torch.einsum("mk,mkn->mn", a, picked(weight, expert))


def grouped_swiglu(x, gate, up, scale, expert):
    a, b = (torch.einsum("mk,mnk->mn", x, picked(w, expert)) for w in (gate, up))
    return scale[:, None] * F.silu(a) * b


def grouped_linear(a, weight, expert, bias=None, scale=None, transposed=False):
    out = torch.einsum("mk,mkn->mn" if transposed else "mk,mnk->mn", a, picked(weight, expert))
    return out if bias is None else out + (1 if scale is None else scale[:, None]) * picked(bias[..., None], expert)[..., 0]


def packed_glu(packed, scale, paired=False, activation="silu", alpha=1.0, limit=None, offset=0.0):
    gate, up = (packed[:, 0::2], packed[:, 1::2]) if paired else packed.chunk(2, 1)
    gate, up = (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))
    act = gate * torch.sigmoid(alpha * gate) if activation == "silu" else F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return scale[:, None] * act * (up + offset)


def sum_rows(rows, index):
    return F.embedding_bag(index, rows, mode="sum")


def mixture(hidden, gate, up, down, expert, weight):
    out = torch.zeros_like(hidden)
    for j in range(expert.shape[-1]):
        e = expert[..., j].reshape(-1)
        inner = grouped_swiglu(hidden.reshape(-1, hidden.shape[-1]), gate, up, weight[..., j].reshape(-1), e)
        out = out + torch.einsum("mk,mnk->mn", inner, picked(down, e)).reshape(hidden.shape)
    return out


E = torch.tensor([0, 0, 0, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 4, 4, 4, 9, -1, 2])
CASES = {
    "grouped_mm": (ops.grouped_mm, grouped_mm, (normal(23, 24), normal(5, 24, 20), E)),
    "grouped_mm, strided": (ops.grouped_mm, grouped_mm, (normal(24, 23).T, normal(5, 20, 24).transpose(1, 2), E.int())),
    "grouped_swiglu": (ops.grouped_swiglu, grouped_swiglu, (normal(23, 24), *normal(2, 5, 20, 24), normal(23), E)),
    "grouped_linear": (ops.grouped_linear, grouped_linear, (normal(23, 24), normal(5, 20, 24), E)),
    "grouped_linear, with biases": (ops.grouped_linear, grouped_linear, (normal(23, 24), normal(5, 20, 24), E, normal(5, 20))),
    "grouped_linear, transposed": (
        partial(ops.grouped_linear, transposed=True), partial(grouped_linear, transposed=True), (normal(23, 24), normal(5, 24, 20), E, normal(5, 20), normal(23))
    ),
    **{
        f"packed_glu, {options}": (partial(ops.packed_glu, **options), partial(packed_glu, **options), (normal(9, 40), normal(9)))
        for options in ({}, {"activation": "gelu"}, {"activation": "gelu_tanh"}, {"limit": 1.0}, {"paired": True, "alpha": 1.702, "limit": 1.0, "offset": 1.0})
    },
    "sum_rows": (ops.sum_rows, sum_rows, (normal(9, 20), torch.tensor([[0, 8, 8], [1, 2, 3], [3, 3, 3]]))),
    "moe_mlp": (ops.moe_mlp, mixture, (normal(11, 24), *normal(2, 5, 20, 24), normal(5, 24, 20, seed=1), E[:22].reshape(11, 2), normal(11, 2).softmax(-1))),
    "moe_mlp, batched": (ops.moe_mlp, mixture, (normal(2, 3, 24), *normal(2, 5, 20, 24), normal(5, 24, 20, seed=1), E[:18].reshape(2, 3, 3), normal(2, 3, 3).softmax(-1))),
}  # fmt: skip


def compare(ours, truth, inputs, dtype) -> None:
    """Values and gradients: a few roundings to ``dtype`` of each of the values on the way, and float32 sums."""
    given = [t.to(dtype).requires_grad_() if t.is_floating_point() else t for t in inputs]
    exact = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in given]
    got, want = ours(*given), truth(*exact)
    assert got.dtype == dtype and got.shape == want.shape
    adjoint = normal(*got.shape, seed=5).to(dtype)
    leaves = [(a, b) for a, b in zip(given, exact) if a.is_floating_point()]
    found = torch.autograd.grad(got, [a for a, _ in leaves], adjoint)
    wanted = torch.autograd.grad(want, [b for _, b in leaves], adjoint.double())
    for n, (a, b) in enumerate(zip((got, *found), (want, *wanted), strict=True)):
        bound = (12 * torch.finfo(dtype).eps + 1e-6) * b.abs().max().clamp(min=1).item()
        error = (a.double() - b).abs().max().item()
        assert error <= bound, f"result {n}: error {error:.3g} > {bound:.3g}"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_values_and_gradients(name, dtype):
    before = dtkernels.paths()
    compare(*CASES[name], dtype)
    ran = {n: counts for n, counts in dtkernels.paths().items() if counts != before.get(n)}
    assert ran and all(counts["reference"] == before.get(name, {}).get("reference", 0) for name, counts in ran.items())


@pytest.mark.parametrize("name", ["grouped_mm", "grouped_swiglu", "moe_mlp"])
def test_the_reference_is_that_of_torch(name):
    compare(*CASES[name], torch.float64)


def test_no_tokens_and_one_expert():
    x, gate, up, down = normal(3, 24), *normal(2, 1, 20, 24), normal(1, 24, 20, seed=1)
    none = ops.moe_mlp(x[:0], gate, up, down, torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    assert none.shape == (0, 24)
    one = ops.moe_mlp(x, gate, up, down, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    torch.testing.assert_close(one, (F.silu(x @ gate[0].T) * (x @ up[0].T)) @ down[0].T, rtol=1e-4, atol=1e-4)


def test_the_same_bits_twice():
    ours, _, inputs = CASES["moe_mlp"]
    runs = []
    for _ in range(2):
        given = [t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
        out = ours(*given)
        runs.append((out, *torch.autograd.grad(out.square().sum(), [t for t in given if t.is_floating_point()])))
    assert all(torch.equal(a, b) for a, b in zip(*runs))


MIX = CASES["moe_mlp"][2]


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: ops.moe_mlp(*MIX[:4], MIX[4].float(), MIX[5]), TypeError, "expert is torch.float32; allowed: int32, int64, int8 or uint8"),
        (lambda: ops.moe_mlp(*MIX[:4], MIX[4], MIX[5][:, :1]), ValueError, "expert and weight"),
        (lambda: ops.moe_mlp(MIX[0], MIX[1], MIX[2], MIX[1], *MIX[4:]), ValueError, "down \\(E, H, I\\)"),
        (lambda: ops.moe_mlp(3, *MIX[1:]), TypeError, "hidden is a int"),
        (lambda: ops.grouped_mm(normal(23, 24), normal(5, 25, 20), E), ValueError, "grouped_mm"),
        (lambda: ops.grouped_mm(normal(23, 24), normal(5, 24, 20), E.float()), TypeError, "integers|int64"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(call, error, message):
    with pytest.raises(error, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)
