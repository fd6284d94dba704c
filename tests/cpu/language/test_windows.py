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
