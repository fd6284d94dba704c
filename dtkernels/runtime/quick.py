"""Calls seen before: from the arguments as given straight to bound kernels, with nothing looked at twice.

What a kind of call needs (which argument goes where, the shapes of the results, the kernels) is learned from the first
call of that kind. Reshaping is not repeated: a view has the same pointer, so the kernels take the tensors as given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad

from .dispatch import allows_tf32
from .paths import counter
from .same import like, never
from .training import Elsewhere, Training, bound_of

if TYPE_CHECKING:
    from .operator import BoundCall

REMEMBERED = 1024  #: kinds of calls of one op; then the oldest goes
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_grad_enabled = torch.is_grad_enabled
_autocast = torch.is_autocast_enabled
_modes = torch._C._len_torch_dispatch_stack


class Kind:
    """A kind of call that is known.

    ``run`` takes (args, kwargs) and gives the results. ``again`` does too, but for None where a tensor does not lie at a multiple
    of 16 bytes; it may be called where ``same(*args)`` is true of ``count`` positional arguments, gradients are recorded or not as
    ``grad`` says (None: none are asked for), no mode is on, and nothing else is known.
    """

    __slots__ = ("run", "again", "same", "count", "grad")

    def __init__(self, run: Callable, again: Callable):
        self.run, self.again, self.same, self.count = run, again, never, -1
        self.grad: bool | None = None


class QuickCalls:
    """The kinds of calls of one op that are known. ``precise``: the setting of float32 products is part of a kind."""

    def __init__(self, precise: bool):
        self.known: dict[tuple, Kind] = {}
        self.last = Kind(never, never)
        self.precise = precise

    def key(self, args: tuple, kwargs: dict) -> tuple | None:
        """What decides how a call runs, but for its contents; None for calls that are not learned."""
        if _autocast() or _modes() or forward_ad._current_level >= 0:
            return None
        grad, parts = False, []
        try:
            for v in (*args, *kwargs.values()) if kwargs else args:
                kind = type(v)
                if kind is _Tensor or kind is _Parameter:
                    wants = v.requires_grad
                    if wants:
                        grad = True
                    parts += (v.shape, v.stride(), v.dtype, v.get_device(), v.data_ptr() & 15 == 0, wants)
                elif kind is float:
                    parts.append(float)
                elif kind is int or kind is bool or v is None:
                    parts += (kind, v)
                else:
                    return None
        except RuntimeError:  # a tensor without storage or strides: functional transforms, sparse layouts
            return None
        parts.append((grad and _grad_enabled(), self.precise and allows_tf32()))
        return (*parts, *kwargs) if kwargs else tuple(parts)

    def learn(self, key: tuple, args: tuple, kwargs: dict, call: BoundCall, results: tuple[torch.Tensor, ...]) -> None:
        """Remember how this call ran, if it can be repeated so."""
        if not results[0].is_cuda or (places := _places(args, kwargs, call)) is None:
            return
        known = _training(call, args, places, results) if any(r.requires_grad for r in results) else _inference(call, places, results)
        if known is None:
            return
        if not kwargs and not self.precise and all(isinstance(v, torch.Tensor) and v.data_ptr() & 15 == 0 for v in args):
            known.same, known.count = like(args), len(args)
            known.grad = _grad_enabled() if any(v.requires_grad for v in args) else None
        if len(self.known) >= REMEMBERED:
            self.known.pop(next(iter(self.known), None), None)  # type: ignore[arg-type]  # another thread may have been there
        self.known[key] = known


def _in_line(run: Callable) -> Callable:
    """``run`` where every tensor lies at a multiple of 16 bytes, else None."""

    def again(args: tuple, kwargs: dict):
        for v in args:
            if v.data_ptr() & 15:
                return None
        return run(args, kwargs)

    return again


def _places(args: tuple, kwargs: dict, call: BoundCall) -> list[int | str] | None:
    """For each input and scalar of the variant its place among the arguments; None if the kernels cannot take those."""
    given: list[tuple[int | str, object]] = [*enumerate(args), *kwargs.items()]
    places: list[int | str] = []
    wanted = [*((n, call.given[n]) for n in call.fitted.tensors), *call.scalars.items()]
    for name, value in wanted:
        place = name if name in kwargs else next((p for p, v in given if v is value and p not in places), None)
        if place is None:
            return None
        places.append(place)
    same = all(t.data_ptr() == call.given[n].data_ptr() for n, t in call.fitted.tensors.items())
    return places if same else None


def _picker(places: list[int | str]):
    """(args, kwargs) -> the values in the variant's order."""
    if places == list(range(len(places))):
        count = len(places)
        return lambda args, kwargs: args if len(args) == count else args[:count]
    return lambda args, kwargs: tuple([args[p] if type(p) is int else kwargs[p] for p in places])


def _inference(call: BoundCall, places: list[int | str], results: tuple[torch.Tensor, ...]) -> Kind | None:
    """A call without gradients."""
    bound = bound_of(call.variant, (*call.fitted.tensors.values(), *call.scalars.values()))
    if bound is None or not all(r.is_contiguous() for r in results):
        return None
    bound = bound.shaped([tuple(r.shape) for r in results])
    count, pick, one = counter(call.variant.subject.op), _picker(places), bound.alone()
    if one is not None and places == list(range(len(places))):

        def alone(args: tuple, kwargs: dict):
            result = one(args)
            if result is not None:
                count["gpu"] += 1
            return result

        return Kind(alone, alone)

    def run(args: tuple, kwargs: dict):
        count["gpu"] += 1
        results = bound(pick(args, kwargs))
        return results[0] if len(results) == 1 else tuple(results)

    return Kind(run, _in_line(run))


def _training(call: BoundCall, args: tuple, places: list[int | str], results: tuple[torch.Tensor, ...]) -> Kind | None:
    """A call whose results are differentiated."""
    found = Training.of(call, results)
    if found is None:
        return None
    count, pick, apply = counter(found.op), _picker(places), found.apply

    def run(args: tuple, kwargs: dict):
        count["gpu"] += 1
        return apply(*pick(args, kwargs))

    def in_order(args: tuple, kwargs: dict):
        try:
            results = apply(*args)
        except Elsewhere:
            return None
        count["gpu"] += 1
        return results

    return Kind(run, in_order if found.one is not None and places == list(range(len(args))) else _in_line(run))
