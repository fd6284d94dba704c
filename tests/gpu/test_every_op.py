"""Every op and its gradients on a GPU against the same op in float64, which runs the reference; narrow extents, and wide ones that fill tiles."""

from dataclasses import replace

import pytest
import torch
from compiled_op_cases import CASES

import dtkernels

WIDE = {8: 72, 6: 130, 11: 1003, 5: 40}  #: extents of the cases, and what stands for them
NARROW_ALONE = {"multimodal_rope", "rotary_pairs"}  #: their tables are those of eight columns
LENGTHS = {"narrow": 37, "wide": 131}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def inputs_of(name, form):
    case = CASES[name]
    if form == "wide":
        case = replace(case, shapes=tuple((WIDE.get(bound, bound), *(WIDE.get(size, size) for size in shape)) for bound, *shape in case.shapes))
    return case, case.inputs(LENGTHS[form])


def outputs_and_gradients(case, inputs):
    """Return the floating-point results, then the gradients of their sum weighted by fixed numbers."""
    made = case.run(*inputs)
    results = [r for r in (made if isinstance(made, tuple) else (made,)) if r.is_floating_point()]
    leaves = [t for t in inputs if t.requires_grad]
    weighted = [r for r in results if r.requires_grad]
    weights = [torch.linspace(0.5, 1.5, r.numel(), dtype=torch.float64).reshape(r.shape).to(r) for r in weighted]
    gradients = torch.autograd.grad(weighted, leaves, weights, allow_unused=True) if leaves and weighted else ()
    return results, [g for g in gradients if g is not None]


def on(inputs, device, dtype):
    def moved(t):
        values = t.detach().to(device)
        return values.to(dtype).requires_grad_(t.requires_grad) if t.is_floating_point() else values

    return tuple(map(moved, inputs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "form"), [(name, form) for name in CASES for form in LENGTHS if form == "narrow" or name not in NARROW_ALONE])
def test_op_and_gradients(name, form, dtype):
    case, drawn = inputs_of(name, form)
    own = on(drawn, "cuda", DTYPES[dtype])
    before = sum(counted["gpu"] for counted in dtkernels.paths().values())
    found, gradients = outputs_and_gradients(case, own)
    assert sum(counted["gpu"] for counted in dtkernels.paths().values()) > before, f"{name} ran no kernel"
    wanted, exact = outputs_and_gradients(case, on([t.detach().cpu().requires_grad_(t.requires_grad) for t in own], "cpu", torch.float64))
    assert len(found) == len(wanted) and len(gradients) == len(exact)
    longest = max(t.numel() for t in drawn)
    for got, value in zip((*found, *gradients), (*wanted, *exact)):
        peak = value.abs().max().item()
        bound = (8 * torch.finfo(DTYPES[dtype]).eps + torch.finfo(torch.float32).eps * longest**0.5 * 8) * max(peak, 1.0)
        error = (got.double().cpu() - value).abs().max().item()
        assert got.shape == value.shape and error <= bound, f"{name}: {error:.3g} > {bound:.3g}, peak {peak:.3g}"
