"""Cache differentiable calls: one autograd.Function per kind of call, with its backward bound too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from ..bounded_cache import BoundedCache
from ..launch.bound_launch import BoundLaunch
from ..path_counters import counter
from ..torch_support.determinism import fixed_order
from ..torch_support.tensor_checks import refuse_batches
from ..torch_support.tensor_guards import guards_for, never_matches
from ..torch_support.tf32 import allows_tf32
from ..torch_support.unsupported_autograd import without_derivative

if TYPE_CHECKING:
    from ..bind.operator import BoundCall, DifferentiablePair

REMEMBERED = 64  #: bound backwards per kind of call, by layout of the incoming gradients
_grad_enabled = torch.is_grad_enabled


def bound_of(variant, values: tuple) -> BoundLaunch | None:
    """Return the bound kernels that a variant has for ``values``; None if it has none."""
    route = variant.dispatch.known(values)
    return route.launch if route is not None and isinstance(route.launch, BoundLaunch) else None


class TakesGeneralPath(Exception):
    """A tensor is not aligned to 16 bytes, unlike all tensors at binding time, or torch now asks for a fixed order. Nothing was launched."""


class Backward:
    """The bound kernels of a backward. ``run`` maps saved tensors, gradients and numbers to the gradients of the arguments.

    ``in_line`` does the same, but returns None where a tensor is not aligned to 16 bytes. It may be called where the guards ``alike``
    hold for the tensors and no graph of gradients is recorded (create_graph).
    """

    __slots__ = ("alike", "in_line", "run")

    def __init__(self, alike: Callable[..., bool], in_line: Callable, run: Callable):
        self.alike, self.in_line, self.run = alike, in_line, run


class AutogradCall:
    """A cached kind of differentiable call. ``apply`` takes the inputs and scalars in the variant's order."""

    def __init__(self, call: BoundCall, pair: DifferentiablePair, bound: BoundLaunch, results: tuple[torch.Tensor, ...]):
        self.pair, self.op = pair, call.variant.subject.op
        self.counter = counter(f"{self.op} backward")
        self.names = (*call.fitted.tensors, *call.scalars)
        self.views = {n: (call.given[n].stride(), tuple(t.shape), t.stride()) for n, t in call.fitted.tensors.items()}
        self.public = len(results)
        known = (*self.names, *pair.forward.outputs)
        signature = pair.backward.signature
        self.inputs, self.scalars = tuple(signature.inputs), signature.scalars
        #: source of each input and scalar of backward: a place among values and results, None for an incoming gradient
        self.sources = [known.index(n) if n in known else None for n in (*self.inputs, *self.scalars)]
        adjoints = [pair.gradient.adjoints[o] for o in pair.public]
        self.arriving = [adjoints.index(n) if i is None else None for n, i in zip((*self.inputs, *self.scalars), self.sources)]
        self.fitted_results = [bound.shape_of(j) for j in range(self.public)]
        self._plan_saving({**call.fitted.tensors, **call.scalars})
        self.like = {n: (tuple(v.shape), v.dtype) for n, v in {**call.given, **call.scalars}.items() if isinstance(v, torch.Tensor)}
        self.wanted = [list(pair.gradient.grads).index(n) if n in pair.gradient.grads else None for n in self.names]
        self.precise = pair.backward.dispatch.precise
        self.backwards: BoundedCache[tuple, Backward] = BoundedCache(REMEMBERED)
        self.latest = Backward(never_matches, never_matches, never_matches)
        # Public results have the shapes that the caller sees.
        extra = [bound.shape_of(j) for j in range(self.public, len(bound.results))]
        self.forward = bound.shaped([*(tuple(r.shape) for r in results), *extra])
        #: the fast path of a single kernel, which checks alignment itself; None where there are several
        self.one = self.forward.alone()
        self.apply = _function(self)

    def _plan_saving(self, values: dict[str, object]) -> None:
        """Plan what forward saves for backward: the places of tensors and of numbers, and the order in which backward finds them."""
        needed = sorted({i for i in self.sources if i is not None})
        number = [n for n, v in enumerate(values.values()) if not isinstance(v, torch.Tensor)]
        self.kept, self.numbers = [i for i in needed if i not in number], [i for i in needed if i in number]
        after = len(self.kept) + self.public
        #: for each value of backward its place among saved tensors, then gradients, then numbers
        self.order = [
            len(self.kept) + cast(int, g) if i is None else self.kept.index(i) if i in self.kept else after + self.numbers.index(i)
            for i, g in zip(self.sources, self.arriving)
        ]

    @staticmethod
    def of(call: BoundCall, results: tuple[torch.Tensor, ...]) -> AutogradCall | None:
        """Return the cached form of a call; None if it cannot be repeated from the tensors as given."""
        values = {**call.fitted.tensors, **call.scalars}
        if any(t.numel() != call.given[n].numel() for n, t in call.fitted.tensors.items()) or not all(r.is_contiguous() for r in results):
            return None
        wanted = tuple(n for n, v in values.items() if isinstance(v, torch.Tensor) and v.requires_grad)
        pair = call.variant.pair_for(wanted, call.fitted.tensors)
        if not pair.gradient.grads:
            return None
        forward = pair.forward.signature
        if (*forward.inputs, *forward.scalars) != tuple(values):
            return None
        bound = bound_of(pair.forward, tuple(v.detach() if isinstance(v, torch.Tensor) else v for v in values.values()))
        return None if bound is None else AutogradCall(call, pair, bound, results)

    def back(self, tensors: tuple[torch.Tensor, ...], numbers: Sequence) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the arguments, in the arguments' shapes. ``tensors`` are the saved ones, then the incoming gradients.

        Saved tensors may come back in another layout, where saved-tensor hooks store them elsewhere.
        """
        if any([t.is_neg() for t in tensors]):
            tensors = tuple([t.resolve_neg() for t in tensors])
        try:
            key = (self.precise and allows_tf32(), fixed_order(), *[(t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() & 15 == 0) for t in tensors])
        except RuntimeError:  # a tensor without a data pointer
            refuse_batches(f"{self.op} backward", tensors)
            raise
        self.counter["gpu"] += 1
        given = (*tensors, *numbers)
        known = self.backwards.get(key)
        if known is not None:
            self.latest = known
            found = known.run(given)
            return found if isinstance(found, tuple) else (found,)
        with torch.no_grad():
            results = self._first(key, given)
        return tuple([results[i] if i is not None else None for i in self.wanted])

    def _first(self, key: tuple, given: tuple) -> list[torch.Tensor]:
        """Run backward through the dispatcher, on tensors reshaped as it expects; cache the launch where the reshapes are views."""
        fitted, same = [], True
        values = [given[i] for i in self.order]
        for value, name, source, arriving in zip(values, (*self.inputs, *self.scalars), self.sources, self.arriving):
            view = value
            if isinstance(value, torch.Tensor) and (arriving is not None or source is not None and source >= len(self.names)):
                place = arriving if arriving is not None else cast(int, source) - len(self.names)
                view = value.reshape(self.fitted_results[place]) if place < self.public else value
            elif name in self.views:
                strides, shape, fitted_strides = self.views[name]
                view = value.as_strided(shape, fitted_strides) if value.stride() == strides else value.reshape(shape)
            same = same and (not isinstance(view, torch.Tensor) or view.data_ptr() == value.data_ptr())
            fitted.append(view)
        count = len(self.inputs)
        tensors, scalars = dict(zip(self.inputs, fitted)), dict(zip(self.scalars, fitted[count:]))
        route, results = self.pair.backward.dispatch.bind(tensors, scalars)
        shapes = [self.like[n] for n in self.pair.gradient.grads]
        exact = all(r.dtype == dtype and r.is_contiguous() for r, (_, dtype) in zip(results, shapes))
        if same and exact and isinstance(route.launch, BoundLaunch):
            self._remember(key, route.launch.shaped([shape for shape, _ in shapes], self.order), given)
        return [r.reshape(shape).to(dtype) for r, (shape, dtype) in zip(results, shapes)]

    def _remember(self, key: tuple, bound: BoundLaunch, given: tuple) -> None:
        """Cache ``bound`` for this key. Where the guards of ``given`` hold, later calls skip the key."""
        one, wanted, count = bound.alone(), self.wanted, len(given) - len(self.numbers)
        tensors = given[:count]  # a closure over the tensors would keep them, and their autograd graph, alive

        def run(given: tuple) -> tuple[torch.Tensor | None, ...]:
            results = bound(given)
            return tuple([results[i] if i is not None else None for i in wanted])

        def in_line(given: tuple) -> tuple[torch.Tensor | None, ...] | None:
            return None if any([t.data_ptr() & 15 for t in given[:count]]) else run(given)

        alike = never_matches if self.precise or bound.unordered or any(t.data_ptr() & 15 for t in tensors) else guards_for(tensors)
        alone = one if wanted == [0] else None
        self.latest = self.backwards.put(key, Backward(alike, alone or in_line, alone or run))


def _function(call: AutogradCall) -> Callable:
    """Return ``apply`` of an autograd.Function specialized for one kind of call. Forward raises TakesGeneralPath."""
    one, kept, numbers, public, count = call.one, call.kept, call.numbers, call.public, call.counter
    unordered = call.forward.unordered
    only_result = one is not None and kept == [len(call.names)] and not numbers

    def forward_one(ctx, *values):
        if (result := one(values)) is None:
            raise TakesGeneralPath
        ctx.save_for_backward(result)
        return result

    def forward(ctx, *values):
        if unordered and fixed_order():
            raise TakesGeneralPath
        if numbers:
            ctx.numbers = [values[i] for i in numbers]
        results = call.forward(values) if one is None else (one(values),)
        if results[0] is None:
            raise TakesGeneralPath
        known = (*values, *results)
        ctx.save_for_backward(*[known[i] for i in kept])
        return results[0] if public == 1 else tuple(results[:public])

    def backward(ctx, *grads):
        tensors = ctx.saved_tensors + grads  # read once: checkpointing allows no second access
        latest = call.latest
        if not _grad_enabled() and latest.alike(*tensors) and (found := latest.in_line((*tensors, *ctx.numbers) if numbers else tensors)) is not None:
            count["gpu"] += 1
            return found
        found = call.back(tensors, ctx.numbers if numbers else ())
        return without_derivative(call.op, found, tensors) if _grad_enabled() else found

    own = {"forward": staticmethod(forward_one if only_result else forward), "backward": staticmethod(backward)}
    kind: Any = type(call.op, (torch.autograd.Function,), own)
    kind._backward_cls.apply = backward  # the engine calls this; torch's version looks up ``backward`` each time
    return super(torch.autograd.Function, kind).apply  # Function.apply checks for functional transforms, whose tensors never reach this path
