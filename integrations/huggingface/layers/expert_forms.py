"""Find out how a module combines the weights of its experts: its class's own loop runs on a stand-in with small weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import nn
from torch.nn import functional as F

from dtkernels.runtime.torch_support.dtypes import KERNEL_DTYPES

from ..patching.forward_patching import plain
from ..patching.numeric_probe import normal, output_of, rows, same, stand_in

WIDTH, _INNER = 6, 5  #: of a stand-in
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


@dataclass(frozen=True)
class Unit:
    """A gated unit as ops.packed_glu computes it. ``alpha`` and ``limit`` name the module's attributes with those numbers."""

    activation: str = "silu"
    paired: bool = False
    alpha: str | None = None
    limit: str | None = None
    offset: float = 0.0

    def of(self, module: nn.Module, packed: torch.Tensor) -> torch.Tensor:
        """Compute the unit in torch."""
        gate, up = (packed[..., 0::2], packed[..., 1::2]) if self.paired else packed.chunk(2, -1)
        if self.limit is not None:
            limit = getattr(module, self.limit)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        act = _ACTIVATIONS[self.activation](gate) if self.alpha is None else gate * torch.sigmoid(gate * getattr(module, self.alpha))
        return act * (up + self.offset)


@dataclass(frozen=True)
class Form:
    """How a module computes.

    arguments   the names of its forward's arguments: hidden states, experts, weights
    parameters  the names of its parameters: the first product's weight, the second's, and their biases if there are any
    gated       whether the first weight holds gate and up
    transposed  whether weights are (E, in, out), not (E, out, in)
    unit        the gated unit; None where the module's own function computes the activation
    plain       whether that is silu(gate) * up of halves, without biases
    """

    arguments: tuple[str, ...]
    parameters: tuple[str, ...]
    gated: bool
    transposed: bool
    unit: Unit | None = None
    plain: bool = False

    @property
    def biased(self) -> bool:
        """Return whether both products have a bias."""
        return len(self.parameters) == 4


def holds_experts(module: nn.Module) -> bool:
    """Return whether a module holds the weights of several experts: two parameters or more with a matrix for each."""
    numbers = {value for name, value in vars(module).items() if "expert" in name and type(value) is int}
    return sum(p.dim() >= 3 and p.shape[0] in numbers for p in module._parameters.values() if p is not None) >= 2


def form_of(module: nn.Module) -> Form | None:
    """Return the form of an experts module that transformers' interface dispatches, or None if it has none that the ops compute."""
    held = {name: p for name, p in module._parameters.items() if p is not None}
    up = next((name for name in ("gate_up_proj", "up_proj") if name in held), "")
    parameters = (up, "down_proj", *(name for name in (f"{up}_bias", "down_proj_bias") if name in held))
    forward = inspect.unwrap(type(module).forward)
    if why_unknown(module, known=True) is not None or not inspect.isfunction(forward) or set(held) != set(parameters) or len(held) == 3:
        return None
    arguments = tuple(inspect.signature(forward).parameters)[1:4]
    if len(arguments) != 3 or any(next(child.parameters(), None) is not None for child in module.children()):
        return None
    for transposed in (False, True):
        form = Form(arguments, parameters, up == "gate_up_proj", transposed)
        if fits(form, held) and all(_computes(form, module, training) for training in (False, True)):
            unit = _unit(module) if form.gated else None
            return replace(form, unit=unit, plain=unit == Unit() and not form.biased)
    return None


def why_unknown(module: nn.Module, known: bool = False) -> str | None:
    """Return why a module with the weights of several experts is left alone. ``known``: None unless a property of its weights or class says so."""
    name, held = type(module).__name__, [p for p in module._parameters.values() if p is not None]
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are sharded"
    if not all(plain(p) and p.dtype in (*KERNEL_DTYPES, torch.float64) for p in held):
        return "its weights are quantised or sharded"
    if not hasattr(module, "_apply_gate"):
        return f"{name} does not use transformers' interface for experts"
    if "float" in inspect.unwrap(type(module).forward).__code__.co_names:
        return f"{name} computes its products in float32"
    return None if known else f"{name} computes something else than two products by expert and an activation between"


def fits(form: Form, held: dict[str, nn.Parameter]) -> bool:
    """Return whether the weights have the sizes of a form."""
    (experts, *up), down = (held[name].shape for name in form.parameters[:2])
    wide, width = up[::-1] if form.transposed else up
    inner = wide // 2 if form.gated else wide
    fits = down == (experts, inner, width) if form.transposed else down == (experts, width, inner)
    biases = not form.biased or [held[name].shape for name in form.parameters[2:]] == [(experts, wide), (experts, width)]
    return fits and biases and (not form.gated or wide % 2 == 0)


def twin_of(form: Form, module: nn.Module, training: bool) -> nn.Module:
    """Return a stand-in with as many experts and small float64 weights."""
    experts, wide = module._parameters["down_proj"].shape[0], (1 + form.gated) * _INNER  # type: ignore[union-attr]
    shapes = dict(zip(form.parameters, ((wide, WIDTH), (WIDTH, _INNER))))
    parameters = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        parameters[name] = normal(experts, *(shape[::-1] if form.transposed else shape), seed=seed)
        if form.biased:
            parameters[f"{name}_bias"] = normal(experts, shape[0], seed=seed + 2)
    children = {name: stand_in(child, training=training) for name, child in module._modules.items() if child is not None}
    return stand_in(module, {name: nn.Parameter(value) for name, value in parameters.items()}, children, training)


def _computes(form: Form, module: nn.Module, training: bool) -> bool:
    """Return whether the class's own loop agrees with a form."""
    twin, experts = twin_of(form, module, training), module._parameters["down_proj"].shape[0]  # type: ignore[union-attr]
    x = rows(WIDTH)[0]
    each = min(3, experts)
    index = torch.stack([(torch.arange(each) * max(experts // each, 1) + token) % experts for token in range(len(x))])
    weights = normal(len(x), each, seed=9)
    found = output_of(inspect.unwrap(type(module).forward), twin, x, index, weights)
    wanted = output_of(_reference, form, twin, x, index, weights)
    return isinstance(wanted, torch.Tensor) and same(found, wanted)


def _reference(form: Form, twin: nn.Module, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute the mixture with a matrix for each choice."""
    inner = (twin._apply_gate if form.gated else twin.act_fn)(_linear(form, twin, form.parameters[0], x[:, None].expand(-1, index.shape[1], -1), index))  # type: ignore[operator]
    return (_linear(form, twin, "down_proj", inner, index) * weights[..., None]).sum(1)


def _linear(form: Form, twin: nn.Module, name: str, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    weight = twin._parameters[name][index]  # type: ignore[index]
    made = torch.einsum("tjk,tjkn->tjn" if form.transposed else "tjk,tjnk->tjn", x, weight)
    return made + twin._parameters[f"{name}_bias"][index] if form.biased else made  # type: ignore[index]


def _unit(module: nn.Module) -> Unit | None:
    """Return the unit that a module's gate function computes, or None if it is another one."""
    children = {name: stand_in(child) for name, child in module._modules.items() if child is not None}
    twin, packed = stand_in(module, children=children), rows(2 * _INNER)[0]
    found = output_of(type(module)._apply_gate, twin, packed)  # type: ignore[attr-defined]
    return next((unit for unit in _units(module) if same(found, unit.of(module, packed))), None)


def _units(module: nn.Module) -> Iterator[Unit]:
    """Return the units that a module's numbers allow, the usual ones first."""
    numbers = [name for name, value in vars(module).items() if type(value) in (int, float) and value > 0]
    for paired, activation in product((False, True), _ACTIVATIONS):
        yield Unit(activation, paired)
    for paired, limit, offset in product((False, True), numbers, (0.0, 1.0)):
        for activation in _ACTIVATIONS:
            yield Unit(activation, paired, None, limit, offset)
        for alpha in numbers:
            yield Unit("silu", paired, alpha, limit, offset)
