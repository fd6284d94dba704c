"""Add nodes to a traced graph, each with the tensor without data that it makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from dtkernels.ops.registry import shipped
from dtkernels.runtime.bind import library_ops

from .canonical import example


class Builder:
    """Adds nodes in front of ``before``, in the fake mode of its graph."""

    def __init__(self, before: fx.Node):
        self.before, self.graph = before, before.graph
        self.mode = example(before).fake_mode

    def call(self, target: Callable, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call of a function."""
        return self._added(self.graph.call_function, target, target, args, kwargs)

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call of a method of the first argument."""
        return self._added(self.graph.call_method, name, getattr(torch.Tensor, name), args, kwargs)

    def _added(self, add: Callable, target: Any, function: Callable, args: tuple, kwargs: dict) -> fx.Node:
        given = fx.node.map_arg((args, kwargs), example)
        learns = any(isinstance(t, torch.Tensor) and t.requires_grad for t in (*given[0], *given[1].values()))
        with self.mode, torch.no_grad():
            found = function(*given[0], **given[1])
        if learns and isinstance(found, torch.Tensor) and found.is_floating_point():
            found.requires_grad_()
        with self.graph.inserting_before(self.before):
            node = add(target, args, kwargs)
        node.meta = {k: v for k, v in self.before.meta.items() if k in ("stack_trace", "nn_module_stack", "source_fn_stack")}
        node.meta["example_value"] = found
        return node

    def size(self, node: fx.Node, dim: int) -> int | fx.Node:
        """Return the size of a dimension: a number, or the node of a symbol."""
        found = example(node).shape[dim]
        return found if isinstance(found, int) else self.method("size", node, dim)

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return the node in another dtype."""
        return node if example(node).dtype == dtype else self.method("to", node, dtype)

    def op(self, name: str, **given: Any) -> fx.Node:
        """Add a call of a shipped op by its own argument names, as an opaque node of torch.library. The name and arguments suffice for torch's caches."""
        shipped(name)
        told = library_ops.signature(name)
        nodes = {id(example(value)): value for value in given.values() if isinstance(value, fx.Node)}
        tensors, named = library_ops.entry_arguments(name, told, (), {n: example(v) for n, v in given.items()})
        while tensors and tensors[-1] is None:
            tensors.pop()
        back = lambda value: nodes.get(id(value), value)  # noqa: E731
        return self.call(getattr(torch.ops.dtkernels, name), *map(back, tensors), **{n: back(v) for n, v in named.items()})

    def laid_out_as(self, node: fx.Node, wanted: torch.Tensor) -> fx.Node | None:
        """Return the node with the strides of ``wanted``; None where copying it in another order of its dimensions does not give them."""
        if _same_strides(example(node), wanted):
            return node
        strides = wanted.stride()
        order = sorted(range(wanted.dim()), key=lambda d: (-hint(strides[d]), d))
        back = [order.index(d) for d in range(wanted.dim())]
        found = self.method("permute", self.method("contiguous", self.method("permute", node, order)), back)
        return found if _same_strides(example(found), wanted) else None


def _same_strides(one: torch.Tensor, other: torch.Tensor) -> bool:
    return all(statically_known_true(a == b) for a, b, size in zip(one.stride(), other.stride(), other.shape) if not statically_known_true(size == 1))


def _same(one: tuple, other: tuple) -> bool:
    return all(statically_known_true(a == b) for a, b in zip(one, other))


def same_shape(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape for any symbolic sizes; adds no guard."""
    return one.dim() == other.dim() and _same(one.shape, other.shape)



def hint(size: int | torch.SymInt) -> int:
    """Return a size, of a symbol the one it was traced with; adds no guard. 0 where nothing is known."""
    if isinstance(size, int):
        return size
    found = size.node.hint
    return 0 if found is None else int(found)
