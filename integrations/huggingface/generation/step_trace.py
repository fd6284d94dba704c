"""Watch a decoding step for operations that a CUDA graph cannot hold: synchronization, random numbers, and numbers that change.

A graph repeats the kernels of the step that was captured, with their arguments. What Python did in that step is not repeated. So the
operations of two steps in a row are compared: they must be equal, numbers among their arguments included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .static_arguments import NotCapturableError

_WITHOUT_KERNELS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default)


class StepTrace(TorchDispatchMode):
    """Record the operations of a step on a device: ``operations``, and ``obstacle``, the first that a graph cannot hold.

    ``runs``: whether the operations run. While they are captured, nobody may look at the random numbers.
    """

    def __init__(self, device: torch.device, runs: bool):
        super().__init__()
        self.device, self.runs = device, runs
        self.operations: list[tuple] = []
        self.obstacle: str | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.obstacle is None:
            self.obstacle = self._obstacle(func, args, kwargs)
        if func not in _WITHOUT_KERNELS:
            self.operations.append((func, _numbers(args), _numbers(kwargs)))
        if not self.runs or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = _drawn(self.device)  # attention has that tag, and draws numbers for dropout alone
        result = func(*args, **kwargs)
        if self.obstacle is None and _drawn(self.device) != before:
            self.obstacle = f"its forward draws random numbers: {func}"
        return result

    def _obstacle(self, func: Any, args: tuple, kwargs: dict) -> str | None:
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            return f"its forward waits for the device: {func}"
        if self.device.type == "cpu":
            return None
        elsewhere = [t for t in _tensors((args, kwargs)) if t.device != self.device and t.device.type != "meta"]
        if any([t.dim() or func._schema.is_mutable for t in elsewhere]):  # a single number is an argument of the kernel
            return f"its forward has tensors on {elsewhere[0].device}: {func}"
        to = kwargs.get("device")
        if to is not None and torch.device(to).type != self.device.type and any([t.device == self.device for t in _tensors(args)]):
            return f"its forward waits for the device: {func}"
        return f"its forward copies from the host: {func}" if to is not None and torch.device(to).type == self.device.type and elsewhere else None


def _drawn(device: torch.device) -> Any:
    """Return what tells how many random numbers were drawn."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index].get_offset()
    return torch.get_rng_state().tolist()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for held in value for tensor in _tensors(held)]


def _numbers(value: Any) -> Any:
    """Return arguments with sizes in place of tensors."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return tuple([(name, _numbers(held)) for name, held in value.items()])
    return tuple([_numbers(held) for held in value]) if isinstance(value, list | tuple) else value


class Constants(TorchFunctionMode):
    """Make the tensors of Python numbers once: ``torch.tensor([-1], device=...)`` copies from the host, which no graph holds.

    The first step makes them. A step after ``close()`` gets copies of the same, and may ask for no others.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.made: dict[tuple, torch.Tensor] = {}
        self.closed = False

    def close(self) -> Constants:
        """Make no more constants."""
        self.closed = True
        return self

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in (torch.tensor, torch.as_tensor) or not args or not self._asked_for(args[0], kwargs):
            return func(*args, **kwargs)
        key = (func, repr(args), repr(sorted(kwargs.items())))
        if key not in self.made:
            if self.closed:
                raise NotCapturableError(f"its forward makes a tensor of numbers that change: {str(args[0])[:40]}")
            with torch.utils._python_dispatch._disable_current_modes():
                self.made[key] = func(*args, **kwargs)
        return self.made[key].clone()

    def _asked_for(self, data: Any, kwargs: dict) -> bool:
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == self.device.type and not _tensors(data)


def difference(one: StepTrace, other: StepTrace) -> str | None:
    """Return where two steps differ, or None."""
    for a, b in zip(one.operations, other.operations, strict=False):
        if a != b:
            return f"its steps differ: {a[0]} after {b[0]}" if a[0] is not b[0] else f"a number or a size changes from step to step: {a[0]}"
    return None if len(one.operations) == len(other.operations) else "its steps differ in length"
