"""Repeat the calls of compiled graphs: torch's guards of the tensors lead straight to bound kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..launch.bound_launch import BoundLaunch
from ..path_counters import checking, counter
from ..torch_support.determinism import fixed_order
from ..torch_support.tensor_guards import guards_for
from ..torch_support.tf32 import allows_tf32

if TYPE_CHECKING:
    from .variant import Variant

RECENT = 8  #: kinds of calls compared one by one: a graph has few kinds of layers


class _Recent:
    """The latest kinds of calls and how each is launched."""

    __slots__ = ("kinds",)

    def __init__(self) -> None:
        self.kinds: tuple[tuple[tuple, Callable[..., bool], Any], ...] = ()

    def find(self, tensors: list[torch.Tensor], settings: tuple) -> Any:
        """Return what was added for such tensors under these settings; None if nothing was."""
        for found_with, same, launch in self.kinds:
            if found_with == settings and same(*tensors):
                return launch
        return None

    def add(self, tensors: list[torch.Tensor], settings: tuple, launch: Any) -> None:
        """Add a kind of call; the oldest is forgotten. Nothing is added where calls are checked, or guards cannot tell the tensors apart."""
        if tensors and not checking() and all(type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_neg() for t in tensors):
            self.kinds = ((settings, guards_for(tuple(tensors)), launch), *self.kinds[: RECENT - 1])


def _numbers_key(numbers: dict[str, Any]) -> list:
    """Return what kernels depend on of numbers: the values of integers, the signs of others."""
    return [v > 0 if isinstance(v, float) else v for v in numbers.values()]


class RepeatedCalls:
    """Run the calls of one variant without gradients.

    ``order`` has for each input and scalar of the variant the name of a number, None for the next tensor.
    """

    __slots__ = ("variant", "title", "order", "numbered", "counts", "recent")

    def __init__(self, variant: Variant, title: str, order: list[str | None]):
        self.variant, self.title, self.order, self.numbered = variant, title, order, any(order)
        self.counts, self.recent = counter(title), _Recent()

    def __call__(self, tensors: list[torch.Tensor], numbers: dict[str, object]) -> list[torch.Tensor]:
        """Return the results. ``numbers``: scalars that are Python numbers, by name."""
        settings = (fixed_order(), allows_tf32(), *_numbers_key(numbers))
        values = self._ordered(tensors, numbers) if self.numbered else tuple(tensors)
        launch = self.recent.find(tensors, settings)
        if launch is not None and (found := launch(values)) is not None:
            self.counts["gpu"] += 1
            return [found] if isinstance(found, torch.Tensor) else list(found)
        signature = self.variant.signature
        count = len(signature.inputs)
        with torch.no_grad():
            results = list(self.variant.forward(self.title, dict(zip(signature.inputs, values)), dict(zip(signature.scalars, values[count:]))))
        route = self.variant.dispatch.known(values)
        if route is not None and isinstance(route.launch, BoundLaunch):
            self.recent.add(tensors, settings, route.launch.alone() or route.launch.together())
        return results

    def _ordered(self, tensors: list[torch.Tensor], numbers: dict[str, object]) -> tuple:
        following = iter(tensors)
        return tuple([next(following) if name is None else numbers[name] for name in self.order])
