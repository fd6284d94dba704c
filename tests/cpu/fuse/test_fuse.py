"""``dtkernels.fuse``: torch functions as generated programs, against torch itself in float64."""

import fused_everyday  # noqa: F401 (it adds cases)
import fused_positions  # noqa: F401 (it adds cases)
import fused_windows  # noqa: F401 (it adds cases)
import pytest
import torch
from fused_functions import CASES, arguments
from torch.utils._pytree import tree_leaves

import dtkernels

OLDER = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 12)


def results(function, given):
    return [v for v in tree_leaves(function(*given)) if isinstance(v, torch.Tensor)]


def gradients(found, given, seed=1):
    generator = torch.Generator().manual_seed(seed)
    floats = [f for f in found if f.is_floating_point() and f.requires_grad]
    adjoints = [torch.randn(f.shape, generator=generator, dtype=torch.float64).to(f.dtype) for f in floats]
    wanted = [t for t in given if t.requires_grad]
    grads = torch.autograd.grad(floats, wanted, adjoints, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, grads)]


def close(got, want, tolerance, what):
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} for {tuple(want.shape)}"
    scale = max(want.double().abs().max().item(), 1) if want.numel() else 1
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance * scale, msg=lambda m: f"{what}: {m}")


def check(fused, case, shapes, dtype, seed=0, change=lambda t: t):
    given = [change(t) for t in arguments(shapes, torch.float64, seed)]
    ours = [t.to(dtype) if t.is_floating_point() else t for t in given]
    exact = [t.to(torch.float64) if t.is_floating_point() else t for t in ours]
    for t in (*ours, *exact):
        t.requires_grad_(t.is_floating_point() and case.gradient)
    got, want = results(fused, ours), results(case.function, exact)
    plain = results(case.function, ours)
    assert [g.dtype for g in got] == [p.dtype for p in plain]
    near = {torch.float64: 1e-9, torch.float32: 3e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype] * case.tolerance
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        close(g, w, near, f"result {k} of {shapes}")
    if case.gradient:
        for k, (g, w) in enumerate(zip(gradients(got, ours), gradients(want, exact))):
            close(g, w, near * 10, f"gradient {k} of {shapes}")


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_by_the_reference(name, monkeypatch):
    """Every call but the first takes a program that was traced at other sizes."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = CASES[name]
    fused = dtkernels.fuse(case.function)
    before = dtkernels.paths().get(fused.__name__, {}).get("interpreter", 0)  # ops of other tests may have that name
    for seed, shapes in enumerate(case.calls):
        check(fused, case, shapes, torch.float64, seed)
    more = case.programs + (OLDER and name in ("weighted_loss", "mean_pooling"))  # there torch takes a size as a number
    assert len(fused.programs()) == more, fused.dt
    assert dtkernels.paths().get(fused.__name__, {}).get("interpreter", 0) == before


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.interpreted])
def test_generated_kernels(name):
    """The same through Triton's interpreter, in float32."""
    case = CASES[name]
    fused = dtkernels.fuse(case.function, name=f"{name}_kernels")
    check(fused, case, case.calls[0], torch.float32)
    counts = dtkernels.paths()
    assert counts[f"{name}_kernels"] == {"gpu": 0, "interpreter": 1, "reference": 0}
    assert not case.gradient or counts[f"{name}_kernels backward"]["interpreter"] == 1
