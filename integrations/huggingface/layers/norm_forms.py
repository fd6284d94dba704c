"""Find out which norm a module computes, with or without mean, weight, bias, groups and gate: its class's forward runs on rows of random numbers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import cast

import torch
from torch import nn

from dtkernels.runtime.torch_support.dtypes import rms_norm_eps

from ..patching.call_stats import CallRecord
from ..patching.forward_patching import in_autocast, in_memory_order_of_input, plain, unsupported
from ..patching.numeric_probe import SCALES, normal, output_of, rows, same, stand_in

_WIDTH = 16  #: of a row, where a module does not say
_FUNCTIONS = {"layer_norm", "rms_norm", "rsqrt"}  #: one of them is called where the epsilon is a number in the code


@dataclass(frozen=True)
class Form:
    """A norm as ops.normalize computes it.

    eps       the attribute with the epsilon, or its value
    centered  whether the mean is subtracted
    offset    what is added to the weight
    group     the attribute with the size of a group, or ""
    gate      the name of the argument that holds a gate, or ""
    held      the names of the parameters
    order     what is done with the gate: "silu" or "sigmoid" after the norm, "first" for silu before it
    alone     whether a call without the gate is the norm alone
    """

    eps: str | float
    centered: bool
    offset: int
    group: str = ""
    gate: str = ""
    order: str = "silu"
    held: tuple[str, ...] = ()
    alone: bool = False


def norm_forward(record: CallRecord, module: nn.Module, form: Form, *args, **kwargs) -> torch.Tensor:
    """Compute the norm of one tensor and, where the form has one, a gate; other calls take the module's own forward and are counted."""
    given = dict(zip(("", form.gate) if form.gate else ("",), args)) | kwargs
    if form.alone and len(args) + len(kwargs) == len(given) and given.get(form.gate, ...) is None:
        args, kwargs = args[:1], {}
        del given[form.gate]
    held = {name: p for name, p in module._parameters.items() if p is not None}
    reason = _why_not(form, given, held) if len(args) + len(kwargs) == len(given) else "arguments other than one tensor"
    record.count(reason, args[0] if args else None)
    if reason is not None or torch.compiler.is_compiling():
        return type(module).forward(module, *args, **kwargs)
    x, weight, bias, gate = given[""], held.get("weight"), held.get("bias"), given.get(form.gate) if form.gate else None
    plainly = gate is None and not form.group and (weight is None or weight.dim() == 1)
    return in_memory_order_of_input(lambda x: _by_op(module, form, x, weight, bias, gate), x, last=True) if plainly else _by_op(module, form, x, weight, bias, gate)


def _by_op(module: nn.Module, form: Form, x: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
    from dtkernels import ops

    eps = eps_of(module, form.eps)
    parts, shape = [x, *others], x.shape
    if form.group:
        parts = [None if t is None else t.unflatten(-1, (-1, getattr(module, form.group))) for t in parts]
    x, weight, bias, gate = cast("list", parts)
    first, logistic = (gate is not None and form.order == order for order in ("first", "sigmoid"))
    return ops.normalize(x, weight, bias, eps, centered=form.centered, offset=form.offset, gate=gate, gate_first=first, logistic=logistic).reshape(shape)


def _why_not(form: Form, given: dict, held: dict[str, nn.Parameter]) -> str | None:
    """Return why the op does not take this call, or None."""
    tensors = list(given.values())
    if given.keys() not in (_names(form), *[{""}] * form.alone) or not all(isinstance(t, torch.Tensor) for t in tensors):
        return "arguments other than one tensor" if not form.gate else "arguments other than hidden states and a gate"
    if tuple(held) != form.held:
        return "another weight or bias than when it was patched"
    x = given[""]
    for t in tensors:
        if (reason := unsupported(t)) is not None:
            return reason
    if not all(plain(p) for p in held.values()):
        return "a weight that is sharded or quantised"
    if any(t.dtype != x.dtype for t in (*tensors, *held.values())):
        return "input and weight of different dtypes"
    if any(t.shape != x.shape for t in tensors):
        return "a gate of another shape"
    if in_autocast(x.device.type) and x.dtype != torch.float32:
        return "autocast of a 16-bit input"
    shape = next((p.shape for p in held.values()), x.shape[-1:])
    if x.shape[x.dim() - len(shape) :] != shape:
        return "an input of another width"
    return "input and weight on different devices" if any(t.device != x.device for t in (*tensors, *held.values())) else None


def _names(form: Form) -> set[str]:
    return {"", form.gate} if form.gate else {""}


def form_of(module: nn.Module, known: dict[tuple, Form | None]) -> Form | None:
    """Return the form of a module that computes a norm, or None. ``known`` holds what was found of modules that are alike."""
    held = {name: p for name, p in module._parameters.items() if p is not None}
    others = [value for part in (module._buffers, module._modules) for value in part.values() if value is not None]
    if others or not held.keys() <= {"weight", "bias"} or not inspect.isfunction(inspect.unwrap(type(module).forward)):
        return None
    shapes = {tuple(p.shape) for p in held.values()}
    if len(shapes) > 1 or any(not 0 < len(s) < 3 or 0 in s for s in shapes) or not all(p.is_floating_point() for p in held.values()):
        return None
    if not any(True for _ in _epsilons(module)):
        return None
    own = {key: value for key, value in vars(module).items() if not key.startswith("_") and key != "training"}
    key = (type(module), *sorted(held), *shapes, *((name, value if type(value) in (bool, int, float, str, tuple) else id(value)) for name, value in own.items()))
    if key not in known:
        known[key] = next(_forms(module, held), None)
    return known[key]


def _epsilons(module: nn.Module) -> Iterator[str | float]:
    """Yield where an epsilon may be: attributes, then numbers in the forward's code."""
    names = [key for key, value in vars(module).items() if isinstance(value, float) and 0 < value < 0.1 or key == "eps" and value is None]
    yield from names
    code = inspect.unwrap(type(module).forward).__code__
    if not names and _FUNCTIONS & set(code.co_names):
        yield from (value for value in code.co_consts if isinstance(value, float) and 0 < value < 0.1)


def eps_of(module: object, eps: str | float, dtype: torch.dtype = torch.float32) -> float:
    """Return an epsilon or that of an attribute; torch's own where that is None, as in nn.RMSNorm(width)."""
    value = getattr(module, eps) if isinstance(eps, str) else eps
    return rms_norm_eps(dtype) if value is None else value


def _gate_of(cls: type[nn.Module]) -> str | None:
    """Return the name of the argument with a gate, "" if the forward takes one tensor, None for other forwards."""
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(parameters) == 2 and "gate" in parameters[1].name:
        return parameters[1].name
    return "" if len(required) == 1 and required[0] is parameters[0] else None


def _forms(module: nn.Module, held: dict[str, nn.Parameter]) -> Iterator[Form]:
    gate = _gate_of(type(module))
    if gate is None:
        return
    shape = next((tuple(p.shape) for p in held.values()), None)
    told = getattr(module, "normalized_shape", None)
    shape = shape or (tuple(told) if isinstance(told, tuple) and len(told) == 1 else (_WIDTH,))
    x = rows(shape[0]) if len(shape) == 1 else normal(1, len(SCALES), *shape) * torch.tensor(SCALES, dtype=torch.float64)[:, None, None]
    given = [x, normal(*x.shape, seed=3)] if gate else [x]
    values = {name: normal(*shape, seed=seed) for seed, name in enumerate(held, 1)}
    absent: dict[str, torch.Tensor | None] = dict.fromkeys(module._parameters)
    results = [output_of(type(module).forward, stand_in(module, absent | values, training=training), *given) for training in (False, True)]
    for dtype in (torch.float16, torch.bfloat16):  # some return float32 for those; the op never does
        low = output_of(type(module).forward, stand_in(module, absent | {name: v.to(dtype) for name, v in values.items()}), *(t.to(dtype) for t in given))
        if getattr(low, "dtype", None) != dtype:
            return
    groups = ["", *(k for k, v in vars(module).items() if "group" in k and type(v) is int and 0 < v < shape[-1] and shape[-1] % v == 0)]
    orders = ("silu", "sigmoid", "first") if gate else ("silu",)
    for eps, centered, offset, group, order in product(_epsilons(module), (False, True), (0, 1) if "weight" in held else (0,), groups, orders):
        form = Form(eps, centered, offset, group, gate, order, tuple(held))
        if all(same(result, _in_torch(module, form, values, *given)) for result in results):
            yield replace(form, alone=bool(gate) and _alone(module, form, absent | values, values, x))


def _alone(module: nn.Module, form: Form, parameters: dict, values: dict[str, torch.Tensor], x: torch.Tensor) -> bool:
    """Return whether a call without the gate computes the norm alone."""
    wanted = _in_torch(module, replace(form, gate=""), values, x)
    return all(same(output_of(type(module).forward, stand_in(module, parameters, training=training), x), wanted) for training in (False, True))


def _in_torch(module: nn.Module, form: Form, values: dict[str, torch.Tensor], x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
    shape, eps = x.shape, eps_of(module, form.eps, x.dtype)
    if gate is not None and form.order == "first":
        x = x * gate * gate.sigmoid()
    if form.group:
        x = x.unflatten(-1, (-1, getattr(module, form.group)))
    x = x - x.mean(-1, keepdim=True) if form.centered else x
    x = (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()).reshape(shape)
    x = x * (values["weight"] + form.offset) if "weight" in values else x
    x = x + values["bias"] if "bias" in values else x
    return x if gate is None or form.order == "first" else x * gate.sigmoid() * (gate if form.order == "silu" else 1)
