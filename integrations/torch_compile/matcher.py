"""Match the nodes of a graph with a pattern, which is a small torch function traced once.

Casts between floating dtypes and operations that do nothing may stand anywhere in between. A parameter of the pattern's function captures what
stands in its place: a tensor, or what its annotation says. ``either(a, b)`` in a pattern matches what one of its arguments matches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .canonical import Operation, aliased, cast_from, example, number_of, operation


class Number:
    """Annotates a parameter that captures a number: Python's, a symbol, or a tensor without dimensions."""


class Optional:
    """Annotates a parameter that captures a tensor or None."""


def either(*choices: fx.Proxy) -> fx.Proxy:
    """Stand for any one of several expressions, in a pattern."""
    return choices[0].tracer.create_proxy("call_function", either, choices, {})


def rows(x: fx.Proxy) -> fx.Proxy:
    """Stand for x, or x with all its dimensions but the last joined, in a pattern."""
    return x.tracer.create_proxy("call_function", rows, (x,), {})


def sliced(x: fx.Proxy) -> fx.Proxy:
    """Stand for x, or x[index] where the index leaves the last dimension whole, in a pattern; captured as ``index``."""
    return x.tracer.create_proxy("call_function", sliced, (x,), {})


_MARKERS: dict[object, str] = {either: "either", rows: "rows", sliced: "sliced"}
_COMMUTES = ("add", "mul")


@dataclass(frozen=True)
class Capture:
    """A parameter of a pattern's function."""

    name: str
    kind: object


@dataclass(frozen=True)
class Form:
    """An operation of a pattern, or a marker."""

    name: str
    operands: tuple


@dataclass(frozen=True)
class Match:
    """What a pattern captured, the nodes it covers, and what each covered operation said by keyword."""

    captured: dict[str, Any] = field(default_factory=dict)
    covered: tuple[fx.Node, ...] = ()
    said: dict[str, dict] = field(default_factory=dict)

    def with_(self, **captured: object) -> Match:
        return Match({**self.captured, **captured}, self.covered, self.said)

    def over(self, node: fx.Node, found: Operation | None = None) -> Match:
        if found is None:
            return Match(self.captured, (*self.covered, node), self.said)
        return Match(self.captured, (*self.covered, node, *found.within), {**self.said, found.name: found.said})

    def get(self, name: str) -> Any:
        return self.captured.get(name)


def pattern_of(function: Callable) -> Form:
    """Trace a torch function to a pattern. Raises ValueError for an operation that has no canonical name."""
    kinds = {n: p.annotation for n, p in inspect.signature(function, eval_str=True).parameters.items()}
    graph = fx.symbolic_trace(function).graph

    def built(value: object) -> object:
        if not isinstance(value, fx.Node):
            return value
        if value.op == "placeholder":
            return Capture(value.name, kinds[value.name])
        if value.target in _MARKERS:
            return Form(_MARKERS[value.target], tuple(built(a) for a in value.args))
        found = operation(value)
        if not found.name:
            raise ValueError(f"{function.__name__}: no canonical name for {value.format_node()}")
        return Form(found.name, tuple(built(o) for o in found.operands))

    form = built(next(n for n in graph.nodes if n.op == "output").args[0])
    assert isinstance(form, Form)
    return form


def matches(form: object, value: object, match: Match) -> Iterator[Match]:
    """Return each way in which a value of a graph, a node or a number, fits a pattern, as an extension of ``match``."""
    if isinstance(form, Capture):
        yield from _captured(form, value, match)
    elif not isinstance(form, Form):
        if number_of(value) == form and form is not None or value is form:
            yield match
    elif form.name == "either":
        for choice in form.operands:
            yield from matches(choice, value, match)
    elif isinstance(value, fx.Node):
        yield from _matched_node(form, value, match)


def _matched_node(form: Form, node: fx.Node, match: Match) -> Iterator[Match]:
    found = operation(node)
    if form.name in ("rows", "sliced"):
        if form.name == "rows" and found.name == "reshape" and _joins_rows(node, found.operands[0]):
            yield from matches(form.operands[0], found.operands[0], match.over(node))
        elif form.name == "sliced" and found.name == "getitem" and _leaves_last(node):
            yield from matches(form.operands[0], node.args[0], match.over(node).with_(index=node.args[1]))
        else:
            inner = _seen_through(node)
            if inner is not None:
                yield from _matched_node(form, inner, match.over(node))
            yield from matches(form.operands[0], node, match)
    elif found.name == form.name:
        orders = [found.operands, found.operands[::-1]] if form.name in _COMMUTES else [found.operands]
        for operands in orders:
            yield from _all(form.operands, operands, match.over(node, found))
    elif (inner := _seen_through(node)) is not None:
        yield from matches(form, inner, match.over(node))


def _all(forms: tuple, values: tuple, match: Match) -> Iterator[Match]:
    if not forms:
        yield match
        return
    for first in matches(forms[0], values[0] if values else None, match):
        yield from _all(forms[1:], values[1:], first)


def _seen_through(node: fx.Node) -> fx.Node | None:
    inner = aliased(node)
    return inner if inner is not None else cast_from(node, widening=False)


def _captured(form: Capture, value: object, match: Match) -> Iterator[Match]:
    if form.kind is Number:
        number = number_of(value)
        scalar = example(value)
        value = number if number is not None else value if isinstance(scalar, torch.Tensor) and scalar.dim() == 0 else None
        fits = value is not None
    elif value is None:
        fits = form.kind is Optional
    else:
        value = stripped(value)
        fits = isinstance(value, fx.Node) and isinstance(example(value), torch.Tensor)
    if not fits or form.name in match.captured and not _same(match.captured[form.name], value):
        return
    yield match.with_(**{form.name: value})


def _same(one: object, other: object) -> bool:
    return one is other or not isinstance(one, fx.Node) and not isinstance(other, fx.Node) and one == other


def stripped(value: Any) -> Any:
    """Return the tensor behind copies and behind casts that change no number."""
    while (inner := aliased(value)) is not None or (inner := cast_from(value, widening=True)) is not None:
        value = inner
    return value


def _joins_rows(node: fx.Node, before: object) -> bool:
    after, first = example(node), example(before)
    return after.dim() == 2 and first.dim() > 1 and statically_known_true(after.shape[-1] == first.shape[-1])


def _leaves_last(node: fx.Node) -> bool:
    index, source = node.args[1], example(node.args[0])
    if not isinstance(index, tuple) or not isinstance(source, torch.Tensor) or not all(i is Ellipsis or isinstance(i, slice) for i in index):
        return False
    last = len(index) == source.dim() or Ellipsis in index and index[-1] is not Ellipsis
    return not last or index[-1] == slice(None, None, None)
