"""Patch gated MLPs, down(act(gate(x)) * up(x)) with silu or gelu: the instance's `forward` computes act(gate) * up by the op.

The linear layers are called as modules, so that their hooks, LoRA and quantisation keep working.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from dtkernels.runtime.path_counters import no_kernel

from ..patching.call_stats import CallRecord
from ..patching.forward_patching import plain, replace_forward, runs_besides_forward, taken, unsupported
from ..patching.numeric_probe import NOT_KEPT, normal, output_of, rows, same, stand_in, takes_one_tensor
from ..patching.report import PatchReport

IN_TRAINING = "it computes something else in training"
_WIDTHS = 6, 10, 7  #: of a stand-in: input, intermediate, output
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "gelu": F.gelu}


@dataclass(frozen=True)
class Form:
    """The names of the children, and the activation. If `up` is None, the layer `gate` computes both halves."""

    gate: str
    up: str | None
    down: str
    activation: str
    gate_first: bool = True  #: order of the two halves, if one layer computes both
    in_training: bool = True  #: whether training computes the same

    @property
    def op(self) -> str:
        return "swiglu" if self.activation == "silu" else "geglu"


def gated_forward(record: CallRecord, module: nn.Module, form: Form, rest: dict[str, object], *args, **kwargs) -> torch.Tensor:
    """Compute down(act(gate(x)) * up(x)), the activation and the product in one kernel; x: (..., in), returns (..., out).

    ``rest``: the module's other parts, such as its activation, at the time its form was determined. Where training computes something else, such as
    dropout, a call in training takes the module's own forward.
    """
    if torch.compiler.is_compiling():
        return type(module).forward(module, *args, **kwargs)
    children = cast("dict[str, nn.Module]", module._modules)  # those that a form names are there
    reason = "arguments other than one tensor" if len(args) != 1 or kwargs else _why_not(module, form, rest)
    if reason is None and plain(args[0]):
        reason = no_kernel(args[0])  # checked before gate and up are computed: the module's own forward holds fewer tensors at once
    if reason is not None:
        record.count(reason)
        return type(module).forward(module, *args, **kwargs)
    if form.up is None:
        gate, up = children[form.gate](args[0]).chunk(2, -1)[:: 1 if form.gate_first else -1]
    else:
        gate, up = children[form.gate](args[0]), children[form.up](args[0])
    reason = unsupported(gate) or unsupported(up) or ("gate and up of different dtypes" if gate.dtype != up.dtype else None)
    record.count(reason, gate)
    product = _ACTIVATIONS[form.activation](gate) * up if reason is not None else _activation_by_op(form, gate, up)
    del gate, up  # the largest tensors of a prefill: freed before down runs
    return children[form.down](product)


def _why_not(module: nn.Module, form: Form, rest: dict[str, object]) -> str | None:
    """Return why the module does not compute its form now, or why a child must be called; None if it does."""
    for name, held in rest.items():
        now = (module._modules if name in module._modules else vars(module)).get(name)
        if now is not held and (type(held) is not float or now != held):
            return "another activation or number than when it was patched"
        if name not in module._modules or not isinstance(held, nn.Module):
            continue
        if (more := runs_besides_forward(held)) is not None:
            return f"its {type(held).__name__} has {more}"
        if held.training and (not form.in_training or getattr(held, "p", 0) != 0):
            return IN_TRAINING
    if module.training and not form.in_training:
        return IN_TRAINING
    dtypes = {w.dtype for name in (form.gate, form.up, form.down) if isinstance(w := getattr(module._modules.get(name or ""), "weight", None), torch.Tensor)}
    return "linear layers of different dtypes" if len({d for d in dtypes if d.is_floating_point}) > 1 else None


def _other_members(module: nn.Module, form: Form) -> dict[str, object]:
    """Return children other than the linear layers, and functions and fractions among the attributes."""
    own = (form.gate, form.up, form.down)
    held = {name: held for name, held in vars(module).items() if (callable(held) or type(held) is float) and name not in NOT_KEPT}
    return held | {name: child for name, child in module._modules.items() if name not in own}


def _activation_by_op(form: Form, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    from dtkernels import ops

    return ops.swiglu(gate, up) if form.activation == "silu" else ops.geglu(gate, up, exact=form.activation == "gelu")


def patch_gated(op: str, model: nn.Module, report: PatchReport) -> None:
    """Patch every gated MLP of `model` whose activation is that of `op`, "swiglu" or "geglu"."""
    for name, module in model.named_modules():
        form = _form(module, training=False)
        if form is not None and form.op == op:
            # Anything that training changes, such as dropout, would be lost in the new forward.
            form = replace(form, in_training=_form(module, training=True) == form)
            own = partial(gated_forward, CallRecord(), module, form, _other_members(module, form))
            replace_forward(name, module, op, own, taken(module, type(module)), report)


def _form(module: nn.Module, training: bool) -> Form | None:
    """Return the form of a gated MLP, or None: first by its children's sizes, then by what its class computes."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    linears = {name: child for name, child in children.items() if _sizes(child) is not None}
    others = {name: child for name, child in children.items() if name not in linears}
    held = [value for part in (module._parameters, module._buffers) for value in part.values() if value is not None]
    if len(linears) not in (2, 3) or held or not takes_one_tensor(type(module)):
        return None
    if any(next(child.children(), None) or next(child.parameters(), None) is not None for child in others.values()):
        return None
    others = {name: stand_in(child, training=training) for name, child in others.items()}
    for gate, up, down, first in _layer_assignments(linears):
        layers = _layers(gate, up, down)
        twin, x = stand_in(module, children=others | layers, training=training), rows(_WIDTHS[0])
        result = output_of(type(module).forward, twin, x)
        for activation, function in _ACTIVATIONS.items():
            if same(result, _gated_reference(layers, gate, up, down, first, function, x)):
                return Form(gate, up, down, activation, first)
    return None


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return (in, out) of anything like a linear layer: nn.Linear, LoRA over one, quantised ones."""
    enter, leave = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return (enter, leave) if type(enter) is int and type(leave) is int else None


def _layer_assignments(linears: dict[str, nn.Module]) -> Iterator[tuple[str, str | None, str, bool]]:
    """Return (gate, up, down, gate first) for each assignment that the layers' sizes allow."""
    sizes = {name: found for name, child in linears.items() if (found := _sizes(child)) is not None}
    if len(linears) == 3:
        for gate, up, down in permutations(linears):
            if sizes[gate] == sizes[up] and sizes[gate][1] == sizes[down][0]:
                yield gate, up, down, True
        return
    for both, down in permutations(linears):
        if sizes[both][1] == 2 * sizes[down][0]:
            yield both, None, down, True
            yield both, None, down, False


def _layers(gate: str, up: str | None, down: str) -> dict[str, nn.Linear]:
    """Return small random layers with the same names."""
    enter, between, leave = _WIDTHS
    sizes = {gate: (enter, between if up else 2 * between), down: (between, leave)} | ({up: (enter, between)} if up else {})
    layers = {}
    for seed, (name, (k, n)) in enumerate(sizes.items()):
        layers[name] = layer = nn.Linear(k, n, dtype=torch.float64, device="meta")
        layer.weight, layer.bias = (nn.Parameter(normal(*shape, seed=10 * seed + len(shape))) for shape in ((n, k), (n,)))
    return layers


def _gated_reference(layers: dict[str, nn.Linear], gate: str, up: str | None, down: str, first: bool, activation, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if up is None:
            a, b = layers[gate](x).chunk(2, -1)[:: 1 if first else -1]
        else:
            a, b = layers[gate](x), layers[up](x)
        return layers[down](activation(a) * b)
