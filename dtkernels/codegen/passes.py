"""Clean-ups of a finished nest: what loads give outside the extents, shared subexpressions, what is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from . import nest
from .apart import apart
from .base_two import base_two
from .exponentials import shared
from .held import hold
from .kinds import kind_of
from .nest import (
    Accumulator,
    Assign,
    Const,
    Guard,
    Let,
    Load,
    Local,
    Loop,
    Op,
    Statement,
    Store,
    Tile,
    TileDot,
    TileReduce,
    map_values,
    mask_axes,
    statements,
)
from .orient import orient
from .overlap import put_off
from .ranges import cut_ranges
from .scale_last import scale_last

_COSTLY = frozenset({"exp", "exp2", "log", "log2", "sqrt", "rsqrt", "erf", "sigmoid", "tanh", "/", "where"})


def finish(
    body: tuple[Statement, ...],
    zero_outside: tuple[str, ...] = (),
    exponentials: tuple[int, int] | None = None,
    integral: frozenset[str] = frozenset(),
) -> tuple[tuple[Statement, ...], frozenset[str], frozenset[str]]:
    """(cleaned body, buffers read, scalars read). Buffers in ``zero_outside`` can give nothing but 0 outside their extents; of
    ``exponentials`` so many are worked out by polynomials. Buffers in ``integral`` hold no -inf."""
    body = drop_guards(body, frozenset(zero_outside) | integral)
    body = shared(put_off(orient(scale_last(base_two(cut_ranges(share(body)))))), exponentials)
    body = apart(body)
    body = body if zero_outside else hold(body)  # a box has the dimensions of its buffer, in their order
    values = [s.value for s in statements(body) if isinstance(s, (Let, Assign, Store))]
    nodes = [n for v in values for n in v.walk()]
    indices = [n for s in statements(body) if isinstance(s, Store) for i in s.index for n in i.walk()]
    reads = frozenset(n.buffer for n in nodes if isinstance(n, Load))
    return body, reads, frozenset(n.name for n in nodes + indices if isinstance(n, nest.Scalar))


# -- guards -----------------------------------------------------------------------------------------------------------


def drop_guards(body: tuple[Statement, ...], zero_outside: frozenset[str] = frozenset()) -> tuple[Statement, ...]:
    """Remove guards that the value loads give outside the extents makes needless, choosing 0 or -inf for each load."""
    buffers = {s.name: s.value for s in statements(body) if isinstance(s, Let) and isinstance(s.value, Load)}
    loads = dict.fromkeys(buffers, 0.0)
    best = _guards_left(body, loads)
    for name in [name for name, load in buffers.items() if load.buffer not in zero_outside and not (load.whole or load.shift or load.checked)]:
        left = _guards_left(body, {**loads, name: -math.inf})
        if left < best:
            loads[name], best = -math.inf, left
    lets = _single(body)

    def strip(tile: Tile) -> Tile:
        return tile.arg if isinstance(tile, Guard) and _needless(tile, lets, loads) else tile

    body = map_values(body, lambda value: value.transform(strip))
    return _set_other(body, loads)


def _set_other(body: tuple[Statement, ...], loads: dict[str, float]) -> tuple[Statement, ...]:
    def one(s: Statement) -> Statement:
        if isinstance(s, Loop):
            return replace(s, body=tuple(one(x) for x in s.body))
        if isinstance(s, Let) and isinstance(s.value, Load) and not s.value.checked:
            return replace(s, value=replace(s.value, other=loads[s.name]))
        return s

    return tuple(one(s) for s in body)


def _single(body: tuple[Statement, ...]) -> dict[str, Tile]:
    """Names that stand for one value wherever they occur; sibling loops may reuse a name for another."""
    values: dict[str, set[Tile | None]] = {}
    for s in statements(body):
        if isinstance(s, (Let, Accumulator)):
            values.setdefault(s.name, set()).add(s.value if isinstance(s, Let) else None)
    return {name: value for name, found in values.items() if len(found) == 1 and (value := next(iter(found))) is not None}


def _guards_left(body: tuple[Statement, ...], loads: dict[str, float]) -> int:
    lets = _single(body)
    guards = {n for s in statements(body) if isinstance(s, (Let, Assign, Store)) for n in s.value.walk() if isinstance(n, Guard)}
    return sum(not _needless(g, lets, loads) for g in guards)


def _needless(guard: Guard, lets: dict[str, Tile], loads: dict[str, float]) -> bool:
    """Whether ``arg`` is neutral anyway wherever any one axis of the guard has passed its extent."""
    return all(_outside(guard.arg, axis, lets, loads) == guard.neutral for axis in guard.axes)


def _outside(tile: Tile, axis: nest.Axis, lets: dict[str, Tile], loads: dict[str, float]) -> float | None:
    """The constant that ``tile`` has where ``axis`` is past its extent; None if it is not known."""
    match tile:
        case Const(value):
            return None if isinstance(value, bool) else float(value)
        case Local(name, _):
            value = lets.get(name)
            if isinstance(value, Load):
                masked = axis in mask_axes(value.index)
                return (0.0 if value.checked else loads[name]) if masked else None
            return _outside(value, axis, lets, loads) if value is not None else None
        case Guard(arg, axes, neutral):
            return neutral if axis in axes else _outside(arg, axis, lets, loads)
        case Op("+" | "-" as fn, (a, b)) if (left := _outside(a, axis, lets, loads)) is not None and math.isinf(left):
            right = _outside(b, axis, lets, loads)
            cancels = left if fn == "-" else -left  # inf - inf is NaN
            if right is None:  # past the extent an operand that varies along the axis may be NaN: sqrt(0 - 1)
                return left if axis not in nest.axes_of(b) and _avoids(b, cancels, lets) else None
            return left if right != cancels else None
        case Op(fn, args):
            return _operate(fn, [_outside(a, axis, lets, loads) for a in args])
    return None


def _avoids(tile: Tile, value: float, lets: dict[str, Tile]) -> bool:
    """Whether no element of ``tile`` can be the infinity ``value``, whatever the inputs hold."""
    match tile:
        case Const(own):
            return own != value
        case nest.Position() | nest.Size() | nest.Start() | nest.Step():
            return True
        case Local(name, _):
            return name in lets and _avoids(lets[name], value, lets)
        case Load():
            return tile.shift and value == -math.inf
        case Guard(arg, _, neutral):
            return neutral != value and _avoids(arg, value, lets)
        case Op("where", (Op(">", (x, Const(low))), y, other)) if x == y and low == value == -math.inf:
            return _avoids(other, value, lets)
        case Op("where", (_, a, b)) | Op("+", (a, b)):
            return _avoids(a, value, lets) and _avoids(b, value, lets)
        case Op("-", (a, b)):
            return _avoids(a, value, lets) and _avoids(b, -value, lets)
        case Op("neg", (a,)):
            return _avoids(a, -value, lets)
        case Op("sigmoid" | "tanh" | "erf", _):
            return True
        case Op("exp" | "exp2" | "abs" | "sqrt", _):
            return value < 0
    return False


def _operate(fn: str, args: list[float | None]) -> float | None:
    match fn, args:
        case ("neg", [a]) if a is not None:
            return -a
        case ("exp" | "exp2", [a]) if a == -math.inf:
            return 0.0
        case ("sqrt" | "abs" | "tanh" | "erf" | "floor", [a]) if a == 0:
            return 0.0
        case ("*", [a, b]) if a == 0 and b == 0:
            return 0.0
        case ("*", [a, b]) if a is not None and b is not None and not math.isnan(a * b):
            return a * b
        case ("+" | "-", [a, b]) if a == 0 and b == 0:
            return 0.0
        case ("where", [_, a, b]) if a == b:
            return a
        case (cast, [a]) if cast.startswith("cast:") and (a == 0 or a is not None and math.isinf(a)):  # others are rounded
            return a
        case ("maximum", [a, b]) if a is not None and b is not None:
            return max(a, b)
    return None


# -- shared subexpressions --------------------------------------------------------------------------------------------


def share(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Name a costly subexpression that occurs more than once in one straight run of statements."""
    moving = {s.name for s in statements(body) if isinstance(s, Accumulator)}
    return _share(body, moving, nest.names_in(body))


def _share(body: tuple[Statement, ...], moving: set[str], taken: set[str]) -> tuple[Statement, ...]:
    body = tuple(replace(s, body=_share(s.body, moving, taken)) if isinstance(s, Loop) else s for s in body)
    known = {s.value: Local(s.name, s.axes, kind_of(s.value)) for s in body if isinstance(s, Let) and _worth(s.value, moving)}
    body = _reuse(body, known)
    while True:
        counts = Counter(n for s in body if isinstance(s, (Let, Assign, Store)) for n in s.value.walk() if _worth(n, moving))
        repeated = [n for n, c in counts.items() if c > 1]
        if not repeated:
            return body
        node = max(repeated, key=lambda n: (sum(1 for _ in n.walk()), str(n)))
        wish = node.fn if isinstance(node, Op) and node.fn[0].isalpha() else "guarded" if isinstance(node, Guard) else "quotient"
        name, count = f"{wish}_1", 1
        while name in taken:
            count += 1
            name = f"{wish}_{count}"
        taken.add(name)
        axes = natural_order(node)
        local = Local(name, axes, kind_of(node))
        first = next(i for i, s in enumerate(body) if isinstance(s, (Let, Assign, Store)) and any(n == node for n in s.value.walk()))
        replaced = map_values(body[first:], _replacing(node, local))
        body = (*body[:first], Let(name, node, axes), *replaced)


def _replacing(node: Tile, local: Local) -> Callable[[Tile], Tile]:
    return lambda value: value.transform(lambda n: local if n == node else n)


def _reuse(body: tuple[Statement, ...], known: dict[Tile, Local]) -> tuple[Statement, ...]:
    """Use a named value wherever it is written out again after it."""
    done: dict[Tile, Local] = {}
    result = []
    for s in body:
        if isinstance(s, (Let, Assign, Store)):
            is_source = isinstance(s, Let) and s.value in known and known[s.value].name == s.name
            value = (
                s.value.rebuild(lambda c: c.transform(lambda n: done.get(n, n)))
                if is_source
                else s.value.transform(lambda n: done.get(n, n))
            )
            result.append(replace(s, value=value))
            if is_source:
                done[s.value] = known[s.value]
        else:
            result.append(s)
    return tuple(result)


def natural_order(node: Tile) -> tuple[nest.Axis, ...]:
    """The order of dimensions in which ``node`` comes cheapest: that of its largest named part."""
    axes = nest.axes_of(node)
    own = [tuple(a for a in n.axes if a in axes) for n in node.walk() if isinstance(n, Local)]
    best = max(own, key=len, default=())
    return best + tuple(sorted(axes - set(best), key=lambda a: a.name))


def _worth(node: Tile, moving: set[str]) -> bool:
    costly = isinstance(node, Guard) or (isinstance(node, Op) and node.fn in _COSTLY) or isinstance(node, (TileReduce, TileDot))
    return costly and not any(isinstance(n, Local) and n.name in moving for n in node.walk())
