"""Calls seen before: from the arguments as given straight to bound kernels, with nothing looked at twice.

What a kind of call needs (which argument goes where, the shapes of the results, the kernels) is learned from the first
call of that kind. Reshaping is not repeated: a view has the same pointer, so the kernels take the tensors as given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad

from .launch import Bound
from .once import without_derivative
from .paths import counter

if TYPE_CHECKING:
    from .operator import BoundCall, Pair

REMEMBERED = 4096
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_grad_enabled = torch.is_grad_enabled
_autocast = torch.is_autocast_enabled
_modes = torch._C._len_torch_dispatch_stack
_tf32 = getattr(torch._C, "_get_cublas_allow_tf32", lambda: torch.backends.cuda.matmul.allow_tf32)


class QuickCalls:
    """The kinds of calls of one op that are known. ``precise``: the setting of float32 products is part of a kind."""

    def __init__(self, precise: bool):
        self.known: dict[tuple, Callable] = {}
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
        parts.append((grad and _grad_enabled(), self.precise and _tf32()))
        return (*parts, *kwargs) if kwargs else tuple(parts)

    def learn(self, key: tuple, args: tuple, kwargs: dict, call: BoundCall, results: tuple[torch.Tensor, ...]) -> None:
        """Remember how this call ran, if it can be repeated so."""
        if not results[0].is_cuda or (places := _places(args, kwargs, call)) is None:
            return
        training = any(r.requires_grad for r in results)
        found = _Training.of(call, places, results) if training else _inference(call, places, results)
        if found is not None:
            if len(self.known) >= REMEMBERED:
                self.known.clear()
            self.known[key] = found


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


def _shaped(bound: Bound, shapes: list[tuple[int, ...]]) -> Bound:
    """The same kernels, with results allocated in other shapes of as many elements."""
    other = copy.copy(bound)
    other.allocations = list(bound.allocations)
    for j, shape in zip(bound.results, shapes):
        other.allocations[j] = (tuple(shape), bound.allocations[j][1])
    return other


def _bound(variant, values: tuple) -> Bound | None:
    route = variant.dispatch.known(values)
    return route.launch if route is not None and isinstance(route.launch, Bound) else None


def _inference(call: BoundCall, places: list[int | str], results: tuple[torch.Tensor, ...]) -> Callable | None:
    """What runs a call without gradients: (args, kwargs) -> results."""
    bound = _bound(call.variant, (*call.fitted.tensors.values(), *call.scalars.values()))
    if bound is None or not all(r.is_contiguous() for r in results):
        return None
    bound = _shaped(bound, [tuple(r.shape) for r in results])
    count, pick, one = counter(call.variant.subject.op), _picker(places), bound.alone()
    if one is not None and places == list(range(len(places))):

        def run(args: tuple, kwargs: dict):
            count["gpu"] += 1
            return one(args)

    else:

        def run(args: tuple, kwargs: dict):
            count["gpu"] += 1
            results = bound(pick(args, kwargs))
            return results[0] if len(results) == 1 else tuple(results)

    return run


class _Training:
    """A call whose results are differentiated."""

    def __init__(self, call: BoundCall, places: list[int | str], pair: Pair, bound: Bound, results: tuple[torch.Tensor, ...]):
        self.pick, self.pair, self.forward = _picker(places), pair, bound
        self.op = call.variant.subject.op
        self.counter, self.backward_counter = counter(self.op), counter(f"{self.op} backward")
        self.names = (*call.fitted.tensors, *call.scalars)
        self.views = {n: (tuple(t.shape), t.stride()) for n, t in call.fitted.tensors.items()}
        self.public = len(results)
        known = (*self.names, *pair.forward.outputs)
        algorithm = pair.backward.algorithm
        self.inputs, self.scalars = algorithm.inputs, algorithm.scalars
        #: where backward's inputs and scalars come from: a place among values and results, None for what arrives as a gradient
        self.sources = [known.index(n) if n in known else None for n in (*self.inputs, *self.scalars)]
        adjoints = [pair.gradient.adjoints[o] for o in pair.public]
        self.arriving = [adjoints.index(n) if i is None else None for n, i in zip((*self.inputs, *self.scalars), self.sources)]
        self.fitted_results = [shape for shape, _ in (pair_allocation(bound, j) for j in range(self.public))]
        self._plan_saving({**call.fitted.tensors, **call.scalars})
        self.like = {n: (tuple(v.shape), v.dtype) for n, v in {**call.given, **call.scalars}.items() if isinstance(v, torch.Tensor)}
        self.wanted = [list(pair.gradient.grads).index(n) if n in pair.gradient.grads else None for n in self.names]
        self.precise = pair.backward.dispatch.precise
        self.backwards: dict[tuple, Callable] = {}

    def _plan_saving(self, values: dict[str, object]) -> None:
        """What backward reads, and so what forward keeps: places of tensors, of numbers, and where each value then is."""
        needed = sorted({i for i in self.sources if i is not None})
        number = [n for n, v in enumerate(values.values()) if not isinstance(v, torch.Tensor)]
        self.kept, self.numbers = [i for i in needed if i not in number], [i for i in needed if i in number]
        after = len(self.kept) + self.public
        #: for each of backward's values its place among what was kept, then gradients, then numbers
        self.order = [
            len(self.kept) + g if i is None else self.kept.index(i) if i in self.kept else after + self.numbers.index(i)
            for i, g in zip(self.sources, self.arriving)
        ]

    @staticmethod
    def of(call: BoundCall, places: list[int | str], results: tuple[torch.Tensor, ...]) -> _Training | None:
        values = {**call.fitted.tensors, **call.scalars}
        if any(t.numel() != call.given[n].numel() for n, t in call.fitted.tensors.items()) or not all(r.is_contiguous() for r in results):
            return None
        pair = call.variant.pair(tuple(n for n, v in values.items() if isinstance(v, torch.Tensor) and v.requires_grad))
        forward = pair.forward.algorithm
        if (*forward.inputs, *forward.scalars) != tuple(values):
            return None
        bound = _bound(pair.forward, tuple(v.detach() if isinstance(v, torch.Tensor) else v for v in values.values()))
        return None if bound is None else _Training(call, places, pair, bound, results).shaped(results)

    def shaped(self, results: tuple[torch.Tensor, ...]) -> _Training:
        """Public results in the shapes that the caller sees."""
        extra = [shape for shape, _ in (pair_allocation(self.forward, j) for j in range(self.public, len(self.forward.results)))]
        self.forward = _shaped(self.forward, [*(tuple(r.shape) for r in results), *extra])
        self.one = self.forward.alone()
        self.apply = _function(self)
        return self

    def __call__(self, args: tuple, kwargs: dict):
        self.counter["gpu"] += 1
        return self.apply(*self.pick(args, kwargs))

    def back(self, kept: tuple, grads: tuple) -> list[torch.Tensor | None]:
        """The gradients of the arguments, in the arguments' shapes; ``kept`` is what ``order`` counts in."""
        self.backward_counter["gpu"] += 1
        values = tuple([kept[i] for i in self.order])
        key = (self.precise and _tf32(), *[(g.stride(), g.data_ptr() & 15 == 0) for g in grads])
        run = self.backwards.get(key)
        if run is not None:
            results = run(values)
        else:
            with torch.no_grad():
                results = self._first(key, values)
        return [results[i] if i is not None else None for i in self.wanted]

    def _first(self, key: tuple, values: tuple) -> list[torch.Tensor]:
        """Backward by way of the dispatcher, on tensors in the shapes that it wants; remembered where those are views."""
        fitted, same = [], True
        for value, name, source, arriving in zip(values, (*self.inputs, *self.scalars), self.sources, self.arriving):
            if isinstance(value, torch.Tensor) and (arriving is not None or source is not None and source >= len(self.names)):
                place = arriving if arriving is not None else source - len(self.names)
                view = value.reshape(self.fitted_results[place]) if place < self.public else value
            else:
                view = value.as_strided(*self.views[name]) if name in self.views else value
            same = same and (not isinstance(view, torch.Tensor) or view.data_ptr() == value.data_ptr())
            fitted.append(view)
        count = len(self.inputs)
        tensors, scalars = dict(zip(self.inputs, fitted)), dict(zip(self.scalars, fitted[count:]))
        route, results = self.pair.backward.dispatch.bind(tensors, scalars)
        like = [self.like[n] for n in self.pair.gradient.grads]
        exact = all(r.dtype == dtype and r.is_contiguous() for r, (_, dtype) in zip(results, like))
        if same and exact and isinstance(route.launch, Bound):
            bound = _shaped(route.launch, [shape for shape, _ in like])
            one = bound.alone()
            self.backwards[key] = bound if one is None else lambda values: (one(values),)
        return [r.reshape(shape).to(dtype) for r, (shape, dtype) in zip(results, like)]


def pair_allocation(bound: Bound, result: int) -> tuple[tuple[int, ...], torch.dtype]:
    """(shape, dtype) of a result."""
    return bound.allocations[bound.results[result]]


def _function(call: _Training) -> Callable:
    """``apply`` of an autograd.Function for one kind of call: what it needs is at hand, so that nothing is looked up."""
    one, kept, numbers, public = call.one, call.kept, call.numbers, call.public
    only_result = one is not None and kept == [len(call.names)]

    def forward(ctx, *values):
        if numbers:
            ctx.numbers = [values[i] for i in numbers]
        if only_result:
            result = one(values)
            ctx.save_for_backward(result)
            return result
        results = call.forward(values) if one is None else (one(values),)
        known = (*values, *results)
        ctx.save_for_backward(*[known[i] for i in kept])
        return results[0] if public == 1 else tuple(results[:public])

    def backward(ctx, *grads):
        saved = ctx.saved_tensors
        results = call.back((*saved, *grads, *ctx.numbers) if numbers else saved + grads, grads)
        if _grad_enabled():
            return without_derivative(call.op, tuple(results), (*saved, *grads))
        return results[0] if len(results) == 1 else tuple(results)

    kind = type(call.op, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})
    return super(torch.autograd.Function, kind).apply  # Function.apply looks for functional transforms, whose tensors never come here
