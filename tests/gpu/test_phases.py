# ruff: noqa: E501 (programs read best on one line)
"""Transposed convolutions whose kernel stores results elsewhere, scalars on the device in every dtype, and ops of integers alone, on a GPU."""

import pytest
import torch
import torch.nn.functional as F

import dtkernels

PROGRAM = (
    "Func y, low, f; In X, W, B; Var b, o, v, u; RVar c, r, s; Extent v = 2 * X[2] + W[2] - 4; Extent u = 3 * X[3] + W[3] - 5;"
    "y[b, o, v, u] = rdot(where((v + 1 - r) % 2 == 0 and (u + 1 - s) % 3 == 0, X[b, c, (v + 1 - r) / 2, (u + 1 - s) / 3], 0), W[c, o, r, s], c, r, s) + B[o];"
)
FOLLOWING = {
    "elementwise": ("f[b, o, v, u] = maximum(y[b, o, v, u], 0.1 * y[b, o, v, u]);", lambda y: F.leaky_relu(y, 0.1)),
    "softmax over channels": ("low[b, v, u] = rsum(exp(y[b, o, v, u]), o); f[b, o, v, u] = exp(y[b, o, v, u]) / low[b, v, u];", lambda y: y.softmax(1)),
    "least channel": ("f[b, v, u] = rmin(y[b, o, v, u], o);", lambda y: y.amin(1)),
}


def registered(name: str, text: str, folder):
    path = folder / f"{name}.yaml"
    path.write_text(f"op: {name}\ndoc: as in torch\nalgorithm: |\n  {text}\n")
    return dtkernels.register(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FOLLOWING)
def test_transposed_convolutions_and_what_follows(name, dtype, tmp_path):
    body, truth = FOLLOWING[name]
    op = f"phases_{list(FOLLOWING).index(name)}_{str(dtype).removeprefix('torch.')}"
    text = (PROGRAM.replace("y, low, f", "y, low, f" if "low[" in body else "y, f") + body).replace("f[b", f"{op}[b").replace(", f;", f", {op};")
    generator = torch.Generator("cuda").manual_seed(0)
    X, W, B = (torch.randn(*s, device="cuda", generator=generator) for s in ((3, 48, 17, 21), (48, 40, 3, 4), (40,)))
    X, W, B = ((t / (48 if t is W else 1) ** 0.5).to(dtype).requires_grad_() for t in (X, W, B))
    got = registered(op, text, tmp_path)(X, W, B)
    exact = [t.detach().double().requires_grad_() for t in (X, W, B)]
    want = truth(F.conv_transpose2d(*exact, stride=(2, 3), padding=1))
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    if name == "least channel":
        return  # a rounding may choose another channel, whose gradient is another one
    adjoint = torch.randn(got.shape, device="cuda", generator=generator).to(dtype)
    for ours, theirs in zip(torch.autograd.grad(got, (X, W, B), adjoint), torch.autograd.grad(want, exact, adjoint.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2 * tolerance, atol=2 * tolerance * theirs.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("expr, value", [("a * a * X[n]", 300.0), ("X[n] * exp(a)", 0.75), ("(1000 + a) * X[n]", 0.25)])
def test_scalars_on_the_device_are_float32(expr, value, dtype):
    X = torch.rand(50, device="cuda") + 0.5
    program = dtkernels.compile(f"Func f; In X; SIn a; Var n; f[n] = {expr};")
    torch.testing.assert_close(program(X=X, a=torch.tensor(value, dtype=dtype, device="cuda")), program(X=X, a=value), rtol=1e-6, atol=0)


def test_an_op_of_integers_alone_runs_a_kernel(tmp_path):
    op = registered("bits_alone", "Func bits_alone; In X; Var i, j; bits_alone[i, j] = (X[i, j] | 1) * 1000000000 * (X[i, j] & 3);", tmp_path)
    X = torch.randint(0, 128, (50, 70), device="cuda", dtype=torch.int32)
    assert torch.equal(op(X), (X.long() | 1) * 1000000000 * (X.long() & 3)) and dtkernels.paths()["bits_alone"]["gpu"] == 1
