"""Convolutions, pooling and upsampling: values and gradients of default schedules in the interpreter, against torch in float64."""

import math

import pytest
import torch
from window_forms import FORMS

import dtkernels


def register(name, text, tmp_path):
    path = tmp_path / "form.yaml"
    path.write_text(f"op: {name}\ndoc: as in torch\nalgorithm: |\n  {text}\n")
    return dtkernels.register(path)


@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients(name, tmp_path):
    form, op = FORMS[name], f"window_{list(FORMS).index(name)}"
    call, generator = register(op, form.text, tmp_path), torch.Generator().manual_seed(0)
    given = {n: torch.randn(shape, generator=generator) for n, shape in form.shapes.items()}
    ours = {n: t.clone().requires_grad_() for n, t in given.items()}
    exact = {n: t.double().requires_grad_() for n, t in given.items()}
    got, want = call(**ours), form.truth(*exact.values())
    near = {"rtol": 1e-5, "atol": 1e-6 * math.prod(given["W"].shape if "W" in given else (9,)) ** 0.5}
    torch.testing.assert_close(got.double(), want, **near)
    adjoint = torch.randn(got.shape, generator=generator)
    found, wanted = torch.autograd.grad(got, list(ours.values()), adjoint), torch.autograd.grad(want, list(exact.values()), adjoint.double())
    near["atol"] *= adjoint.numel() ** 0.5
    for n, a, b in zip(given, found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, **near, msg=lambda m, n=n: f"d_{n}: {m}")
    assert dtkernels.paths()[op]["interpreter"] == dtkernels.paths()[f"{op} backward"]["interpreter"] == 1


#: docs/patterns.md#concatenation
PIECES = {
    "Func f; In A, B; Var x, y, k; Extent k = A[1]; Extent y = A[1] + B[1]; f[x, y] = where(y < len(k), A[x, y + 0], B[x, y - len(k)]);": lambda a, b: torch.cat((a, b), 1),
    "Func f; In A, B; Var x, y, k; Extent k = A[1]; Extent y = A[1] + B[1]; f[x, y] = A[x, y + 0] + B[x, y - len(k)];": lambda a, b: torch.cat((a, b), 1),
    "Func f; In A; Var x, y, k; Extent k = A[1]; Extent y = A[1] + 2; f[x, y] = where(y >= 1 and y <= len(k), A[x, y - 1], 3);": lambda a, b: torch.nn.functional.pad(a, (1, 1), value=3.0),
    "Func f; In A; Var x, y; Extent y = A[1]; f[x, y] = A[x, (y - 1) % len(y)];": lambda a, b: a.roll(1, 1),
    "Func f; In A; Var x, y; Extent y = A[1]; f[x, y] = A[x, len(y) - 1 - y];": lambda a, b: a.flip(1),
    "Func f; In A; Var x, y; Extent y = A[1]; f[x, y] = where(y < len(y) / 2, -A[x, y + len(y) / 2], A[x, y - len(y) / 2]);": lambda a, b: torch.cat((-a[:, 3:], a[:, :3]), 1),
}


@pytest.mark.parametrize("program", PIECES)
def test_pieces_side_by_side(program):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 6, generator=generator), torch.randn(3, 2, generator=generator)
    given = (a, b) if "B" in program else (a,)
    assert torch.equal(dtkernels.compile(program + "f.block(x:2, y:4); f.tensorize(x:2, y:4);")(*given), PIECES[program](a, b))
