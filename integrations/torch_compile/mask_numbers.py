"""Read a mask that a graph computes as numbers: which keys a query sees by place, and flags of keys.

Comparisons of places, as ``k <= q`` or ``k > q - 1024``, are brought to one form, a linear function of the places that is at most 0. Conditions
are combined, negated and broadcast; a mask that is added to scores is one of zeros and of lowest numbers where a condition says so.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from dtkernels.ops.attention_forms import calls  # it makes the ops of the forms known

from .builder import Builder
from .canonical import HIDDEN, WRITTEN, called, example, number_of
from .linear_index import COMPARISONS, Linear, Looked, Reader, axes_after

READ = "dtkernels_read"  #: in the meta of nodes that were read: they are pure, and dead where nothing else reads them
QUERY, KEY = -2, -1
_NEGATED = {"le": "gt", "lt": "ge", "ge": "lt", "gt": "le", "eq": "ne", "ne": "eq"}
_SHAPES = ("unsqueeze", "squeeze", "view", "reshape", "expand", "expand_as", "broadcast_to", "contiguous", "clone", "getitem", "to", "bool")


@dataclass(frozen=True)
class Seen:
    """Query q sees key k where each of ``limits``, functions of both places, is at most 0, each of ``flags`` is true for the key, and
    the numbers of each pair in ``same`` are equal."""

    limits: tuple[Linear, ...] = ()
    flags: tuple[tuple[fx.Node, bool], ...] = ()  #: (flags of keys, whether they are true for those that are hidden)
    same: tuple[tuple[fx.Node, fx.Node], ...] = ()  #: numbers of queries (.., Q, 1) and of keys (.., 1, K)

    def joined(self, other: Seen | None) -> Seen | None:
        """Return what satisfies both."""
        return None if other is None else Seen((*self.limits, *other.limits), (*self.flags, *other.flags), (*self.same, *other.same))


@dataclass(frozen=True)
class Numbers:
    """The arguments of attention for a mask: key >= query + first, key <= query + last, flags of keys, segments."""

    first: Linear | None
    last: Linear | None
    flags: tuple[tuple[fx.Node, bool], ...]
    same: tuple[tuple[fx.Node, fx.Node], ...] = ()

    @property
    def causal(self) -> bool:
        """Whether the mask says key <= query and no more."""
        return self.first is None and not self.flags and not self.same and self.last == Linear()

    @property
    def nothing(self) -> bool:
        """Whether every key is seen."""
        return self.first is None and self.last is None and not self.flags and not self.same

    def emit(self, b: Builder, query: fx.Node, learns: bool) -> tuple[dict[str, Any], fx.Node | None]:
        """Return the op's arguments but for flags, and the node of those. ``learns``: gradients will be asked for."""
        given: dict[str, Any] = {}
        if self.same:
            given = self._segments(b, query, learns)
        elif self.last == Linear():
            given["causal"] = True
        elif self.last is not None:
            given |= {"ends": True, "last": _number(b, self.last)}
        if self.first is not None and not self.same:
            given |= {"starts": True, "first": _number(b, self.first)}
        flags: fx.Node | None = None
        for node, hidden in self.flags:
            one = b.call(torch.logical_not, node) if hidden else node
            flags = one if flags is None else b.call(torch.logical_and, flags, one)
        return given, flags

    def _segments(self, b: Builder, query: fx.Node, learns: bool) -> dict[str, Any]:
        pairs = [tuple(_flat(b, node, axis) for node, axis in zip(pair, (QUERY, KEY), strict=True)) for pair in self.same]
        window = None if self.first is None else -self.first.constant, None if self.last is None else self.last.constant
        found = b.call(calls.visible_keys.segments_and_ranges, query, pairs, window)
        names = ["of_q", "of_k", "lo", "hi", *(["begins", "stops"] if learns else [])]
        made = {name: b.call(operator.getitem, found, place) for place, name in enumerate(names)}
        return {"segmented": True, "ranged": True, **({"keyed": True} if learns else {}), **made}


def _flat(b: Builder, node: fx.Node, axis: int) -> fx.Node:
    """Return numbers of places as (sequences or 1, places)."""
    return b.method("reshape", node, (b.size(node, -4) if example(node).dim() == 4 else 1, b.size(node, axis)))


def _number(b: Builder, value: Linear) -> float | fx.Node:
    """Return a number, of symbols and integers on the device a tensor of one element: a kernel reads it, and no graph is made for each."""
    if not value.terms:
        return float(value.constant)
    total: Any = value.constant
    for node, factor in value.terms.items():
        total = b.call(operator.add, total, node if factor == 1 else b.call(operator.mul, node, factor))
    if isinstance(example(total), torch.Tensor):
        return b.method("reshape", b.cast(total, torch.float32), 1)
    return b.call(torch.full, (1,), total, dtype=torch.float32, device=example(b.before).device)


def numbers_of(node: fx.Node, added: bool = False, hidden: bool = False) -> Numbers | None:
    """Return a mask as numbers, or None. ``added``: it is added to scores; ``hidden``: it is true where a key is not seen."""
    reader = _Conditions()
    shape = example(node).shape
    seen = reader.added(node) if added else reader.seen(node, hidden)
    if seen is None or any(len(example(one).shape) > len(shape) for one in (*(flags for flags, _ in seen.flags), *(end for pair in seen.same for end in pair))):
        return None
    limits = [_by_place(limit, seen, reader) for limit in seen.limits]
    if None in limits:
        return None
    first = last = None
    for limit in dict.fromkeys(_as_key(limit) for limit in limits if limit is not None):
        place = Linear(limit[0], {t: f for t, f in limit[1] if t not in (QUERY, KEY)})
        if dict(limit[1])[KEY] == 1:  # key - query + place <= 0
            last = place.times(-1) if last is None else _tighter(last, place.times(-1), min)
            if last is None:
                return None
        else:
            first = place if first is None else _tighter(first, place, max)
            if first is None:
                return None
    if seen.same and any(limit is not None and limit.terms for limit in (first, last)):
        return None
    for read in reader.visited:
        read.meta[READ] = True
    return Numbers(first, last, tuple(dict.fromkeys(seen.flags)), tuple(dict.fromkeys(seen.same)))


def _by_place(limit: Linear, seen: Seen, reader: Reader) -> Linear | None:
    """Return a limit of places; one of positions within segments is one of places where only places of one segment are compared."""
    looked = [term for term in limit.terms if isinstance(term, Looked)]
    if not looked:
        return limit
    tables = {(term.table, term.rows) for term in looked}
    if len(tables) != 1 or len(looked) != 2 or not any(_counts_jumps(pair, *tables.copy().pop(), reader) for pair in seen.same):
        return None
    return Linear(limit.constant, {term.axis if isinstance(term, Looked) else term: factor for term, factor in limit.terms.items()})


def _counts_jumps(pair: tuple[fx.Node, fx.Node], positions: fx.Node, rows: fx.Node, reader: Reader) -> bool:
    """Return whether two lookups are of how often positions have not grown by one: equal numbers then lie in one run of positions."""
    tables: set[Any] = set()
    for node, axis in zip(pair, (QUERY, KEY), strict=True):
        index = node.args[1] if called(node) == "getitem" else ()
        if not isinstance(index, tuple) or len(index) != 2 or index[0] is not rows or reader.linear(index[1]) != Linear(0, {axis: 1}):
            return False
        tables.add(node.args[0])
    table = tables.pop()
    if tables or not isinstance(table, fx.Node) or called(table) != "cumsum" or (table.args[1:2] or (table.kwargs.get("dim"),)) not in ((-1,), (1,)):
        return False
    jumps = table.args[0]
    if not isinstance(jumps, fx.Node) or called(jumps) != "ne" or jumps.args[1] != 1 or not isinstance(jumps.args[0], fx.Node):
        return False
    steps = jumps.args[0]
    return called(steps) == "diff" and _behind(steps.args[0]) is _behind(positions) and steps.kwargs.get("dim", -1) in (-1, 1)


def _behind(node: Any) -> Any:
    """Return the tensor that an expansion repeats."""
    while isinstance(node, fx.Node) and called(node) in ("expand", "contiguous", "to", "long"):
        node = node.args[0]
    return node


def _as_key(limit: Linear) -> tuple[int, tuple]:
    return limit.constant, tuple(sorted(limit.terms.items(), key=lambda item: str(item[0])))


def _tighter(one: Linear, other: Linear, choose: Any) -> Linear | None:
    """Return the narrower of two limits; None where symbols decide."""
    return Linear(choose(one.constant, other.constant), one.terms) if one.terms == other.terms else None


class _Conditions(Reader):
    def seen(self, value: Any, hidden: bool = False) -> Seen | None:
        """Return a condition as numbers, or with ``hidden`` its negation; None if numbers cannot express it."""
        if not isinstance(value, fx.Node) or WRITTEN in value.meta or not isinstance(example(value), torch.Tensor):
            return None
        number = self.linear(value)
        if number is not None and not number.terms:
            return Seen() if bool(number.constant) != hidden else None
        if example(value).dtype == torch.bool and _is_of_keys(example(value).shape):
            return Seen(flags=((value, hidden),))
        found = self._combined(value, hidden)
        if found is not None:
            self.visited[value] = None
        return found

    def _combined(self, node: fx.Node, hidden: bool) -> Seen | None:
        name = called(node).strip("_")
        args = node.args
        if name in ("and", "logical_and", "bitwise_and", "or", "logical_or", "bitwise_or") and len(args) == 2:
            if ("and" in name) == hidden:  # a key that one of two conditions lets through
                return self._one_of(args, hidden)
            one = self.seen(args[0], hidden)
            return None if one is None else one.joined(self.seen(args[1], hidden))
        if name in ("invert", "logical_not", "bitwise_not"):
            return self.seen(args[0], not hidden)
        if name in COMPARISONS and len(args) == 2:
            return self._compared(_NEGATED[name] if hidden else name, *args)
        if name in ("tril", "triu"):
            return self._triangle(node, name, hidden)
        return self._reshaped_condition(node, hidden) if name in _SHAPES else None

    def _one_of(self, args: tuple, hidden: bool) -> Seen | None:
        """Return the condition that decides a pair of which the other never holds."""
        for one, other in (args, args[::-1]):
            number = self.linear(one)
            if number is not None and not number.terms:
                return Seen() if bool(number.constant) != hidden else self.seen(other, hidden)
        return None

    def _compared(self, name: str, one: Any, other: Any) -> Seen | None:
        if isinstance(one, fx.Node) and called(one) == "abs" and name in ("le", "lt"):
            inner, bound = self.linear(one.args[0]), self.linear(other)
            if inner is None or bound is None:
                return None
            self.visited[one] = None
            limits = [inner.times(sign).plus(bound, -1).plus(Linear(int(name == "lt"))) for sign in (1, -1)]
        else:
            if name in ("eq", "ne"):
                return self._same(one, other) if name == "eq" else None
            sides = self.linear(one), self.linear(other)
            if sides[0] is None or sides[1] is None:
                return None
            low, high = sides if name in ("le", "lt") else sides[::-1]
            limits = [low.plus(high, -1).plus(Linear(int(name in ("lt", "gt"))))]  # type: ignore[union-attr, arg-type]
        return Seen(tuple(limits)) if all(map(_of_a_pair, limits)) else None

    def _same(self, one: Any, other: Any) -> Seen | None:
        """Return that numbers of queries and of keys are equal, whatever they are."""
        for q, k in ((one, other), (other, one)):
            ends = [example(end) for end in (q, k)]
            if all(isinstance(end, fx.Node) and WRITTEN not in end.meta for end in (q, k)) and all(_whole_numbers(end) for end in ends):
                if _is_of_keys(ends[1].shape) and len(ends[0].shape) == len(ends[1].shape) and _is_of_keys(ends[0].transpose(-1, -2).shape):
                    return Seen(same=((q, k),))
        return None

    def _triangle(self, node: fx.Node, name: str, hidden: bool) -> Seen | None:
        inner = self.linear(node.args[0])
        diagonal = node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0)
        if inner != Linear(1) or not isinstance(diagonal, int):
            return None
        return Seen((_triangle(name, diagonal, hidden),))

    def _reshaped_condition(self, node: fx.Node, hidden: bool) -> Seen | None:
        before, after = node.args[0], example(node).shape
        if not isinstance(before, fx.Node) or not isinstance(example(before), torch.Tensor) or (found := self.seen(before, hidden)) is None:
            return None
        if node.op == "call_function" and called(node) == "getitem" and not _takes_all(node.args[1]):
            return None
        places = axes_after(example(before).shape, after)
        if len(example(before).shape) < 2 or places.get(KEY) != KEY or places.get(QUERY) != QUERY:
            return None
        kept = not found.flags and not found.same or all(places.get(axis) == axis for axis in range(-len(example(before).shape), 0))
        return found if kept else None

    def added(self, value: Any) -> Seen | None:
        """Read a mask that is added to scores, zeros where a key is seen and lowest numbers elsewhere."""
        if not isinstance(value, fx.Node) or WRITTEN in value.meta or not isinstance(example(value), torch.Tensor):
            return None
        found = self._added(value)
        if found is not None:
            self.visited[value] = None
        return found

    def _added(self, node: fx.Node) -> Seen | None:
        name, args = called(node), node.args
        if name == "where" and len(args) == 3:
            if self._zero(args[1]) and self._low(args[2]):
                return self.seen(args[0])
            return self.seen(args[0], hidden=True) if self._low(args[1]) and self._zero(args[2]) else None
        if name == "masked_fill" and len(args) == 3 and self._low(args[2]):
            return self.seen(args[1], hidden=True) if self._zero(args[0]) else None
        if name == "triu" and self._low(args[0]):
            diagonal = args[1] if len(args) > 1 else node.kwargs.get("diagonal", 0)
            return Seen((_triangle(name, diagonal, hidden=True),)) if isinstance(diagonal, int) else None
        if name in ("mul", "multiply") and len(args) == 2:
            for one, low in (args, args[::-1]):
                if self._low(low):
                    return self._one_minus(one)
            return None
        if name in (*_SHAPES, "float", "half", "bfloat16", "type", "type_as") and (name != "getitem" or _takes_all(args[1])):
            found = self.added(args[0])
            places = axes_after(example(args[0]).shape, example(node).shape) if found is not None else {}
            return found if places and all(places.get(axis) == axis for axis in places) else None
        return None

    def _one_minus(self, value: Any) -> Seen | None:
        """Return what "1 - flags" flags."""
        if not isinstance(value, fx.Node) or WRITTEN in value.meta or called(value) not in ("sub", "rsub") or len(value.args) != 2:
            return None
        one, flags = value.args if called(value) == "sub" else value.args[::-1]
        if number_of(one) != 1 or not isinstance(flags, fx.Node) or called(flags) not in ("to", "float", "half", "bfloat16", "type", "type_as"):
            return None
        before = flags.args[0]
        if not isinstance(before, fx.Node) or not isinstance(example(before), torch.Tensor) or example(before).dtype != torch.bool:
            return None
        self.visited |= dict.fromkeys((value, flags))
        return self.seen(before)

    def _zero(self, value: Any) -> bool:
        return self._filled(value) == 0

    def _low(self, value: Any) -> bool:
        number = self._filled(value)
        return number is not None and number <= HIDDEN

    def _filled(self, value: Any) -> float | None:
        """Return the number that all elements of a tensor are, or a number itself."""
        number = number_of(value)
        if isinstance(number, (int, float)):
            if isinstance(value, fx.Node):
                self.visited[value] = None
            return float(number)
        if not isinstance(value, fx.Node) or WRITTEN in value.meta:
            return None
        name, args = called(value), value.args
        if name in ("zeros", "new_zeros", "zeros_like"):
            self.visited[value] = None
            return 0.0
        if name in ("full", "full_like", "new_full"):
            place = 2 if name == "new_full" else 1
            number = args[place] if len(args) > place else value.kwargs.get("fill_value")
            self.visited[value] = None
            return float(number) if isinstance(number, (int, float)) else None
        return None


def _of_a_pair(limit: Linear) -> bool:
    """Return whether a limit is one of the difference of a key's and a query's place, or of what one table holds for them."""
    places = {t.axis if isinstance(t, Looked) else t: f for t, f in limit.terms.items() if not isinstance(t, fx.Node)}
    return len(places) == sum(not isinstance(t, fx.Node) for t in limit.terms) and places in ({QUERY: 1, KEY: -1}, {QUERY: -1, KEY: 1})


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and not value.is_floating_point() and not value.is_complex()


def _triangle(name: str, diagonal: int, hidden: bool) -> Linear:
    """Return the limit of the keys that lie in a triangle, or with ``hidden`` outside it."""
    if (name == "tril") != hidden:  # key <= query + diagonal, or below the other triangle
        return Linear(-diagonal + int(hidden), {KEY: 1, QUERY: -1})
    return Linear(diagonal + int(hidden), {KEY: -1, QUERY: 1})


def _is_of_keys(shape: torch.Size) -> bool:
    """Return whether a tensor has one flag for each key, of each sequence or of all."""
    ones = [statically_known_true(size == 1) for size in shape]
    return 2 <= len(ones) <= 4 and all(ones[1 if len(ones) == 4 else 0 : -1]) and not ones[-1]


def _takes_all(index: Any) -> bool:
    index = index if isinstance(index, tuple) else (index,)
    return all(i is None or i is Ellipsis or isinstance(i, slice) and i.start in (None, 0) and i.step in (None, 1) for i in index)


def sweep(graph: fx.Graph) -> None:
    """Erase nodes that were read as masks where nothing else reads them any more."""
    for node in reversed(list(graph.nodes)):
        if node.meta.pop(READ, False) and not node.users and WRITTEN not in node.meta and node.op in ("call_function", "call_method"):
            graph.erase_node(node)
