"""Cache calls by the arguments as given: a repeated kind of call goes straight to its bound kernels.

The first call of a kind records the order of the arguments, the shapes of the results and the kernels. Reshaping is not repeated:
a view has the same pointer, so the kernels take the tensors as given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from ..bounded_cache import BoundedCache
from ..launch.bound_launch import BoundLaunch
from ..path_counters import checking, counter
from ..torch_support.determinism import fixed_order
from ..torch_support.tensor_guards import guards_for, never_matches
from ..torch_support.tf32 import allows_tf32
from .autograd_cache import AutogradCall, TakesGeneralPath, bound_of

if TYPE_CHECKING:
    from ..bind.operator import BoundCall

REMEMBERED = 1024  #: kinds of calls per op; the oldest is evicted
SHAPES = 64  #: shapes of the result that one cached call gives
FRONTS = 4  #: front calls compared one by one: a model has few kinds of layers
_SETTING_TYPES = frozenset((type(None), bool, int, float, str, tuple))  #: types of settings that are compared
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_grad_enabled = torch.is_grad_enabled
_autocast = torch.is_autocast_enabled
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_tracing = torch._C._is_tracing


class CachedCall:
    """A cached kind of call.

    ``run(args, kwargs)`` returns the results, or None where the call needs the general path. ``again`` does the same and also returns
    None where a tensor is not aligned to 16 bytes. ``again`` may be called where all of these hold: ``same(*args)`` is true of ``count``
    positional arguments, gradient recording is ``grad`` (None: no argument requires a gradient), and no dispatch mode is on.

    ``launches(shape)`` returns a launch that takes the values in the variant's order and gives the result in ``shape`` (None: its own
    shape). The values come from ``places`` of the arguments. ``bound`` are the kernels, without counting. Differentiable calls have None
    for ``launches`` and ``bound``.
    """

    __slots__ = ("run", "again", "same", "count", "grad", "launches", "places", "bound")

    def __init__(
        self, run: Callable, again: Callable, launches: Callable | None = None, places: list[int | str] | None = None, bound: BoundLaunch | None = None
    ):
        self.run, self.again, self.same, self.count = run, again, never_matches, -1
        self.launches, self.places, self.bound = launches, places or [], bound
        self.grad: bool | None = None


@dataclass(frozen=True, slots=True)
class Repeat:
    """How a call that has run runs again, on tensors of which ``same`` is true."""

    same: Callable[..., bool]
    bound: BoundLaunch
    places: list[int]  #: of the kernels' values among the tensors and, after them, ``numbers``
    numbers: tuple
    tf32: bool | None  #: as it was set; None where nothing hangs on it
    title: str  #: what the call is counted under


class CallCache:
    """Cache the calls of one op. ``precise``: the setting of float32 products (TF32) is part of the key."""

    def __init__(self, precise: bool):
        self.known: BoundedCache[tuple | None, CachedCall] = BoundedCache(REMEMBERED)  #: nothing is known by None
        self.last = CachedCall(never_matches, never_matches)
        self.guarded_calls: tuple[GuardedCall, ...] = ()  #: the most recent ones
        self.named: BoundedCache[tuple, GuardedCall] = BoundedCache(REMEMBERED)  #: all, by a cheap key
        self.precise = precise

    def key(self, args: tuple, kwargs: dict) -> tuple | None:
        """Return everything that decides how a call runs except the contents of tensors; None for calls that are not cached."""
        if _autocast() or _modes() or _tracing() or forward_ad._current_level >= 0:
            return None
        grad = False
        parts: list[Any] = []
        try:
            for v in (*args, *kwargs.values()) if kwargs else args:
                kind = type(v)
                if kind is _Tensor or kind is _Parameter:
                    wants = v.requires_grad
                    if wants:
                        grad = True
                    shape, strides, place = v.shape, v.stride(), v.data_ptr()
                    if (not strides or strides[-1] != 1 or shape[-1] == 1) and v.is_neg():  # an imaginary part has a stride of 2
                        return None
                    parts += (shape, strides, v.dtype, v.get_device(), place & 15 == 0 if place else None, wants)
                elif kind is float:
                    parts += (float, v > 0)
                elif kind is int or kind is bool or v is None:
                    parts += (kind, v)
                else:
                    return None
        except RuntimeError:  # a tensor without storage or strides: functional transforms, sparse layouts
            return None
        parts.append((grad and _grad_enabled(), self.precise and allows_tf32(), fixed_order()))
        return (*parts, *kwargs) if kwargs else tuple(parts)

    def repeat(self, tensors: tuple[torch.Tensor, ...], settings: tuple):
        """Return the result of a front function's call straight from its kernels; None where no such call is cached.

        A front function prepares an op's arguments. Contents aside, they depend on ``settings`` and on the properties of ``tensors`` that
        ``guards_for`` compares, so that they need not be prepared again.
        """
        front = self._guarded_call(tensors, settings) if self.named else None
        return None if front is None else front.run(tensors)

    def ready(self, tensors: tuple[torch.Tensor, ...], settings: tuple, shape: tuple[int, ...]) -> Callable[[tuple], object] | None:
        """Return ``repeat`` for a caller that guards the tensors itself: (tensors) -> the result in ``shape``, or None."""
        front = self._guarded_call(tensors, settings)
        return None if front is None else front.shaped(shape)

    def _guarded_call(self, tensors: tuple[torch.Tensor, ...], settings: tuple) -> GuardedCall | None:
        types, count = tuple(map(type, settings)), len(tensors)  # types first: comparing a tensor among the settings would be an operation
        for f in self.guarded_calls:
            if f.count == count and f.types == types and f.settings == settings and f.same(*tensors):
                return f
        try:
            front = self.named.get(_lookup_key(tensors, types, settings)) if _SETTING_TYPES.issuperset(types) else None
        except (AttributeError, RuntimeError, TypeError):  # not tensors, no strides, or an unhashable setting: the op reports it
            return None
        if front is None or not front.same(*tensors):
            return None
        self.guarded_calls = (front, *self.guarded_calls[: FRONTS - 1])
        return front

    def repeatable(self, op: str, args: tuple, kwargs: dict, tensors: tuple[torch.Tensor, ...]) -> Repeat | None:
        """Return how a cached call without gradients can be repeated on other ``tensors``, those among its arguments; None where it cannot."""
        known = self.known.get(self.key(args, kwargs))
        if known is None or known.bound is None or any(t.data_ptr() & 15 for t in tensors):
            return None
        places, numbers = [], list[object]()
        for place in known.places:
            value = args[place] if isinstance(place, int) else kwargs[place]
            if isinstance(value, torch.Tensor):
                places.append(next(i for i, t in enumerate(tensors) if t is value))
            else:
                places.append(len(tensors) + len(numbers))
                numbers.append(value)
        return Repeat(guards_for(tensors), known.bound, places, tuple(numbers), allows_tf32() if self.precise else None, op)

    def remember(self, tensors: tuple[torch.Tensor, ...], settings: tuple, given: dict) -> None:
        """Cache a front function's call, which was just made with the arguments ``given`` by name, if it can be repeated."""
        if self.known and isinstance(tensors[0], torch.Tensor) and (front := _guarded_call_of(self, tensors, settings, given)) is not None:
            self.named.put(_lookup_key(tensors, front.types, settings), front)
            self.guarded_calls = (front, *self.guarded_calls[: FRONTS - 1])

    def learn(self, key: tuple, args: tuple, kwargs: dict, call: BoundCall, results: tuple[torch.Tensor, ...], names: tuple[str, ...]) -> None:
        """Cache how this call ran, if it can be repeated. ``names``: of the positional arguments."""
        if not results[0].is_cuda or checking() or (places := _argument_places(args, kwargs, call, names)) is None:
            return
        known = _training(call, args, places, results) if any(r.requires_grad for r in results) else _inference(call, places, results)
        if known is None:
            return
        if not kwargs and not self.precise and all(isinstance(v, torch.Tensor) and v.data_ptr() & 15 == 0 for v in args):
            known.same, known.count = guards_for(args), len(args)
            known.grad = _grad_enabled() if any(v.requires_grad for v in args) else None
        self.known.put(key, known)


class GuardedCall:
    """A cached call of a front function, see ``CallCache.repeat``: its guards and the order of the kernels' values.

    ``run`` takes tensors that satisfy the guards. It returns None and launches nothing where another condition has changed.
    """

    __slots__ = ("count", "settings", "types", "same", "wants", "tf32", "order", "numbers", "launches", "run")
    count: int
    settings: tuple
    types: tuple[type, ...]
    same: Callable[..., bool]
    wants: bool  #: whether a tensor asks for a gradient
    tf32: bool | None  #: as it was set; None where nothing hangs on it
    order: list[int]
    numbers: tuple
    launches: Callable[[tuple[int, ...] | None], Callable]
    run: Callable[[tuple], Any]

    def shaped(self, shape: tuple[int, ...] | None) -> Callable[[tuple], object]:
        """Return ``run`` with the result in another shape of as many elements; None for its own shape."""
        launch, order, numbers, wants, tf32 = self.launches(shape), self.order, self.numbers, self.wants, self.tf32
        straight = order == list(range(self.count))

        def run(tensors: tuple[torch.Tensor, ...]):
            if _modes() or forward_ad._current_level >= 0 or wants and _grad_enabled() or tf32 is not None and tf32 != allows_tf32():
                return None
            return launch((*tensors, *numbers) if straight else (*[tensors[i] for i in order], *numbers))

        return run


def _comparable(settings: tuple) -> bool:
    """Tell whether settings are plain values: numbers, strings, None and tuples of them."""
    return all(type(v) in _SETTING_TYPES and (type(v) is not tuple or _comparable(v)) for v in settings)


def _lookup_key(tensors: tuple[torch.Tensor, ...], types: tuple, settings: tuple) -> tuple:
    """Return a cheap cache key. The guards of the ``GuardedCall`` decide."""
    return (types, settings, *[(t.shape, t.stride(), t.dtype) for t in tensors])


def _guarded_call_of(call_cache: CallCache, tensors: tuple[torch.Tensor, ...], settings: tuple, given: dict) -> GuardedCall | None:
    """Return the cached form of a front function's call; None if it cannot be repeated."""
    wants = any(t.requires_grad for t in tensors)
    if wants and _grad_enabled() or not _comparable(settings):
        return None
    pointers = [t.data_ptr() for t in tensors]
    known = call_cache.known.get(call_cache.key((), given)) if not any(p & 15 for p in pointers) else None
    if known is None or known.launches is None:
        return None
    front = GuardedCall()
    front.order, numbers = [], []
    for place in known.places:
        value = given[place]  # type: ignore[index]
        if not isinstance(value, torch.Tensor):
            numbers.append(value)
        elif numbers or pointers.count(value.data_ptr()) != 1:  # a tensor that the function made, or one of two with the same address
            return None
        else:
            front.order.append(pointers.index(value.data_ptr()))
    front.count, front.settings, front.types, front.same = len(tensors), settings, tuple(map(type, settings)), guards_for(tensors)
    front.wants, front.tf32 = wants, allows_tf32() if call_cache.precise else None
    front.numbers, front.launches = tuple(numbers), known.launches
    front.run = front.shaped(None)
    return front


def _if_aligned(run: Callable) -> Callable:
    """Return ``run`` with a check: None unless every tensor is aligned to 16 bytes."""

    def again(args: tuple, kwargs: dict):
        for v in args:
            if v.data_ptr() & 15:
                return None
        return run(args, kwargs)

    return again


def _argument_places(args: tuple, kwargs: dict, call: BoundCall, names: tuple[str, ...]) -> list[int | str] | None:
    """Return the place of each input and scalar of the variant among the arguments; None if the kernels cannot take those directly.

    Matched by name: one object may be given at several places, and another call may give different ones there.
    """
    places: list[int | str] = []
    given = dict(zip(names, args)) | kwargs
    for name, value in (*((n, call.given[n]) for n in call.fitted.tensors), *call.scalars.items()):
        if given[name] is not value:  # derived from the argument
            return None
        places.append(name if name in kwargs else names.index(name))
    same = all(t.data_ptr() == call.given[n].data_ptr() for n, t in call.fitted.tensors.items())
    return places if same else None


def _value_reader(places: list[int | str]):
    """Return a function (args, kwargs) -> the values in the variant's order."""
    if places == list(range(len(places))):
        count = len(places)
        return lambda args, kwargs: args if len(args) == count else args[:count]
    return lambda args, kwargs: tuple([args[p] if type(p) is int else kwargs[p] for p in places])


def _inference(call: BoundCall, places: list[int | str], results: tuple[torch.Tensor, ...]) -> CachedCall | None:
    """Return the cached form of a call without gradients; None if it cannot be repeated."""
    bound = bound_of(call.variant, (*call.fitted.tensors.values(), *call.scalars.values()))
    if bound is None or not all(r.is_contiguous() for r, j in zip(results, bound.results) if j >= 0):
        return None
    bound, count = bound.shaped([tuple(r.shape) for r in results]), counter(call.variant.subject.op)
    made: BoundedCache[tuple[int, ...] | None, Callable] = BoundedCache(SHAPES)

    def launches(shape: tuple[int, ...] | None) -> Callable:
        return made.get(shape) or made.put(shape, _launching(bound if shape is None else bound.shaped([shape]), count))

    launch, pick = launches(None), _value_reader(places)
    if places == list(range(len(places))):

        def in_order(args: tuple, kwargs: dict):
            return launch(args)

        return CachedCall(in_order, in_order, launches, places, bound)

    def picked(args: tuple, kwargs: dict):
        return launch(pick(args, kwargs))

    return CachedCall(picked, picked, launches, places, bound)


def _launching(bound: BoundLaunch, count: dict[str, int]) -> Callable:
    """Return a function (the variant's values) -> the results, counted; None where alignment differs from that at binding time."""
    one = bound.alone() or bound.together()

    def launch(values: tuple):
        result = one(values)
        if result is not None:
            count["gpu"] += 1
        return result

    return launch


def _training(call: BoundCall, args: tuple, places: list[int | str], results: tuple[torch.Tensor, ...]) -> CachedCall | None:
    """Return the cached form of a differentiable call; None if it cannot be repeated."""
    found = AutogradCall.of(call, results)
    if found is None:
        return None
    count, pick, apply = counter(found.op), _value_reader(places), found.apply

    def run(args: tuple, kwargs: dict):
        if _transforms():  # a transform of other tensors is active, and torch then refuses such a Function
            return None
        count["gpu"] += 1
        return apply(*pick(args, kwargs))

    def in_order(args: tuple, kwargs: dict):
        try:
            results = apply(*args)
        except TakesGeneralPath:
            return None
        count["gpu"] += 1
        return results

    return CachedCall(run, in_order if found.one is not None and places == list(range(len(args))) else _if_aligned(run))
