"""What a module computes, found by running its class's forward on a stand-in: small float64 weights, no hooks, nobody's tensors.

Structure picks the few modules that are worth a run; numbers decide. No list of class or model names is needed then.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import nn

TOLERANCE = 1e-5  #: norms compute in float32 whatever they are given; the two gelus differ by ten times as much
NOT_KEPT = ("forward", "_old_forward", "_hf_hook", "_compiled_call_impl")
SCALES = (1e-3, 1.0, 30.0, 1e3)  #: one row each, so that an epsilon or a clamp inside shows


def stand_in(module: nn.Module, parameters: dict | None = None, children: dict | None = None, training: bool = False) -> nn.Module:
    """An object of the module's class with its plain attributes, but with other parameters and children, and no hooks."""
    twin = object.__new__(type(module))
    kept = {key: value for key, value in vars(module).items() if key not in NOT_KEPT}
    hooks = {key: OrderedDict() for key in kept if key.endswith("_hooks")}
    vars(twin).update(kept | hooks | {"_parameters": parameters or {}, "_buffers": {}, "_modules": children or {}, "training": training})
    return twin


def output_of(function: Callable, *inputs: object) -> object | None:
    """The function's result; None where it raises, or leaves a note on a module. Leaves the state of torch's random numbers as it was."""
    modules = [(vars(x), dict(vars(x))) for x in inputs if isinstance(x, nn.Module)]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
            result = function(*inputs)
    except Exception:  # somebody else's code on inputs that it was not written for: whatever it raises says no
        return None
    noted = any(now.keys() != before.keys() or any(now[key] is not value for key, value in before.items()) for now, before in modules)
    return None if noted else result


def same(found: object, wanted: torch.Tensor) -> bool:
    """Whether a result is the wanted one, row by row, up to float32."""
    if not isinstance(found, torch.Tensor) or found.shape != wanted.shape or not found.is_floating_point():
        return False
    return bool(((found.double() - wanted).norm(dim=-1) <= TOLERANCE * wanted.norm(dim=-1)).all())


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal float64 values from a generator of their own."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")


def rows(width: int) -> torch.Tensor:
    """(1, len(SCALES), width): one row of each size."""
    return normal(1, len(SCALES), width) * torch.tensor(SCALES, dtype=torch.float64, device="cpu")[:, None]


def takes_one_tensor(cls: type[nn.Module]) -> bool:
    """Whether the forward of a class can be called with one argument."""
    try:
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return False
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(required) <= 1 and bool(parameters) and parameters[0].kind is not inspect.Parameter.KEYWORD_ONLY
