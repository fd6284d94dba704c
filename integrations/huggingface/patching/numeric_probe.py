"""Find out what a module computes: run its class's forward on a stand-in with small float64 weights and no hooks.

Structure selects the few modules worth a run; the numbers decide. No list of class or model names is needed.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules import module as calls

TOLERANCE = 1e-5  #: norms compute in float32 for every input dtype; the two gelus differ by ten times as much
NOT_KEPT = ("forward", "_old_forward", "_hf_hook", "_compiled_call_impl")
SCALES = (1e-3, 1.0, 30.0, 1e3)  #: one row for each, so that an epsilon or a clamp becomes visible


_KINDS = "backward forward forward_pre backward_pre buffer_registration module_registration parameter_registration".split()
# The dictionaries stay the same objects: handles of hooks remove them from there.
_GLOBAL_HOOKS: list[dict] = [getattr(calls, f"_global_{kind}_hooks") for kind in _KINDS]


def stand_in(module: nn.Module, parameters: dict | None = None, children: dict | None = None, training: bool = False) -> nn.Module:
    """Return an object of the module's class with its plain attributes, other parameters and children, and no hooks."""
    twin = object.__new__(type(module))
    kept = {key: value for key, value in vars(module).items() if key not in NOT_KEPT}
    hooks: dict[str, OrderedDict] = {key: OrderedDict() for key in kept if key.endswith("_hooks")}
    vars(twin).update(kept | hooks | {"_parameters": parameters or {}, "_buffers": {}, "_modules": children or {}, "training": training})
    return twin


@contextmanager
def unobserved() -> Iterator[None]:
    """Switch global module hooks off, for modules that are made and run to find out what others compute."""
    kept = [(hooks, dict(hooks)) for hooks in _GLOBAL_HOOKS]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, had in kept:
            hooks.update(had)


@unobserved()
def output_of(function: Callable, *inputs: object) -> object | None:
    """Return the function's result; None if it raises or changes a module's attributes. Preserves torch's random state."""
    modules = [(vars(x), dict(vars(x))) for x in inputs if isinstance(x, nn.Module)]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
            result = function(*inputs)
    except Exception:  # foreign code on inputs that it was not written for: any exception means no
        return None
    noted = any(now.keys() != before.keys() or any(now[key] is not value for key, value in before.items()) for now, before in modules)
    return None if noted else result


def same(found: object, wanted: torch.Tensor) -> bool:
    """Return whether a result equals the wanted one, row by row, within float32 accuracy."""
    if not isinstance(found, torch.Tensor) or found.shape != wanted.shape or not found.is_floating_point():
        return False
    return bool(((found.double() - wanted).norm(dim=-1) <= TOLERANCE * wanted.norm(dim=-1)).all())


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normal float64 values from a separate generator."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")


def rows(width: int) -> torch.Tensor:
    """Return (1, len(SCALES), width): one row of each scale."""
    return normal(1, len(SCALES), width) * torch.tensor(SCALES, dtype=torch.float64, device="cpu")[:, None]


def takes_one_tensor(cls: type[nn.Module]) -> bool:
    """Return whether the forward of a class can be called with one argument."""
    try:
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return False
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(required) <= 1 and bool(parameters) and parameters[0].kind is not inspect.Parameter.KEYWORD_ONLY
