"""Repeat the forwards and backwards of compiled graphs: torch's guards of the tensors lead straight to bound kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..dispatch.call_cache import Repeat
from ..launch.bound_launch import BoundLaunch
from ..path_counters import checking, counter
from ..torch_support.determinism import fixed_order
from ..torch_support.tensor_guards import guards_for
from ..torch_support.tf32 import allows_tf32

if TYPE_CHECKING:
    from .variant import Variant

RECENT = 8  #: kinds of calls compared one by one: a graph has few kinds of layers


class RepeatedCalls:
    """Run the calls of one half of a differentiable call.

    ``order`` has for each input and scalar of the variant the name of a number, None for the next tensor.
    """

    __slots__ = ("variant", "title", "order", "numbered", "counts", "kinds")

    def __init__(self, variant: Variant, title: str, order: list[str | None]):
        self.variant, self.title, self.order, self.numbered = variant, title, order, any(order)
        self.counts = counter(title)
        #: settings, guards of the tensors and launch of the latest kinds of calls
        self.kinds: tuple[tuple[tuple, Callable[..., bool], Callable[[tuple], Any]], ...] = ()

    def __call__(self, tensors: list[torch.Tensor], numbers: dict[str, object]) -> list[torch.Tensor]:
        """Return the results. ``numbers``: scalars that are Python numbers, by name."""
        settings = (fixed_order(), allows_tf32(), *[v > 0 if isinstance(v, float) else v for v in numbers.values()])  # kernels depend on the sign alone
        values = self._ordered(tensors, numbers) if self.numbered else tuple(tensors)
        for found_with, same, launch in self.kinds:
            if found_with == settings and same(*tensors) and (found := launch(values)) is not None:
                self.counts["gpu"] += 1
                return [found] if isinstance(found, torch.Tensor) else list(found)
        signature = self.variant.signature
        count = len(signature.inputs)
        with torch.no_grad():
            results = list(self.variant.forward(self.title, dict(zip(signature.inputs, values)), dict(zip(signature.scalars, values[count:]))))
        self._remember(tensors, settings, values)
        return results

    def _remember(self, tensors: list[torch.Tensor], settings: tuple, values: tuple) -> None:
        """Keep how a call ran; nothing where calls are checked, no kernel is bound, or guards cannot tell the tensors apart."""
        if (bound := self._bound(tensors, values)) is not None:
            self.kinds = ((settings, guards_for(tuple(tensors)), bound.alone() or bound.together()), *self.kinds[: RECENT - 1])

    def repeat(self, tensors: list[torch.Tensor], numbers: dict[str, object]) -> Repeat | None:
        """Return how a call that has run can be repeated with the same numbers; None where it cannot."""
        bound = self._bound(tensors, self._ordered(tensors, numbers))
        if bound is None or any(t.data_ptr() & 15 for t in tensors):  # kernels for any alignment would run aligned tensors too
            return None
        following, named = iter(range(len(tensors))), list(numbers)
        places = [next(following) if n is None else len(tensors) + named.index(n) for n in self.order]
        tf32 = allows_tf32() if self.variant.dispatch.precise else None
        return Repeat(guards_for(tuple(tensors)), bound, places, tuple(numbers.values()), tf32, self.title)

    def _bound(self, tensors: list[torch.Tensor], values: tuple) -> BoundLaunch | None:
        route = self.variant.dispatch.known(values)
        if route is None or not isinstance(route.launch, BoundLaunch) or checking() or not tensors:
            return None
        return route.launch if all(type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_neg() for t in tensors) else None

    def _ordered(self, tensors: list[torch.Tensor], numbers: dict[str, object]) -> tuple:
        following = iter(tensors)
        return tuple([next(following) if name is None else numbers[name] for name in self.order])
