"""Skip the inner loops of a step in which a condition holds for no element.

Before::

    for g in 0 .. size_g:
        for k in 0 .. size_k step T:    acc <- acc + dot(where(e == g, A, 0), W)

After::

    for g in 0 .. size_g:
        g_any = max(where(e == g, 1, 0), m) > 0
        if g_any:
            for k in 0 .. size_k step T:    acc <- acc + dot(where(e == g, A, 0), W)

A step is skipped only where ``simplify.is_noop`` proves that it changes nothing without the condition. Loops without inner loops are left:
a branch would keep their loads from being pipelined. So are those over the few taps of a window around a product, which are joined with the
loop over its terms (joined_loops.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ...ir import nest
from ...ir.affine import extreme, inequalities
from ...ir.nest import Axis, Const, Index, Let, Local, Loop, Op, Position, Tile, TileReduce, statements
from ..arithmetic.simplify import FALSE, is_noop


def skipping_steps(loop: Loop, inside: Callable[[Axis], bool], known: frozenset[Tile], names: set[str]) -> Loop:
    """Return ``loop`` with its inner loops run only where its conditions can hold.

    ``inside`` tells which axes have a current tile; ``known`` are inequalities that the bounds of the loop imply; ``names`` are taken.
    """
    first = next((i for i, s in enumerate(loop.body) if isinstance(s, Loop)), None)
    if first is None or not loop.axis.scalar or _goes_over_taps(loop):
        return loop
    found = [c for c in _conditions(loop, first) if c not in known or _is_equality(c)]
    tests = [t for c in found if not _is_exact(c) for t in _bounds(c, inside)]
    if exact := [c for c in found if _is_exact(c)]:
        tests.append(_holds_anywhere(exact))
    if not tests:
        return loop
    name = _fresh(f"{loop.axis.name}_any", names)
    any_row = Let(name, _all(tests), ())
    body = tuple(replace(s, when=Local(name, (), "boolean")) if isinstance(s, Loop) else s for s in loop.body)
    return replace(loop, body=(*body[:first], any_row, *body[first:]))


def _goes_over_taps(loop: Loop) -> bool:
    """Return whether the loop and all loops inside take single elements of a sum of products, and nothing is computed between them."""
    inner = [s for s in loop.body if not isinstance(s, Index)]
    if not loop.reduces or not loop.axis.scalar or loop.within != "extent" or loop.begin is not None or loop.end is not None or loop.tail:
        return False
    if len(inner) == 1 and isinstance(inner[0], Loop):
        return _goes_over_taps(inner[0])
    return not any(isinstance(s, Loop) for s in inner) and nest.has_matrix_product(tuple(inner))


def _conditions(loop: Loop, first: int) -> Iterator[Op]:
    """Yield comparisons that are known before the inner loops, and without any one of which a step changes nothing."""
    inner = loop.body[first:]
    later = {s.name for s in statements(inner) if isinstance(s, (Let, nest.Assign, nest.Accumulator))}
    axes = {s.axis for s in statements(inner) if isinstance(s, Index)}
    nodes = [n for s in statements(inner) if isinstance(s, (Let, nest.Assign)) for n in s.value.walk()]
    for c in dict.fromkeys(n for n in nodes if isinstance(n, Op) and n.fn in ("<", "<=", ">", ">=", "==", "!=")):
        used = {n.axis for n in c.walk() if isinstance(n, Position)} | nest.axes_of(c)
        if used & axes or {n.name for n in c.walk() if isinstance(n, Local)} & later:
            continue
        if is_noop(loop.body, _failing(c)):
            yield c


def _failing(c: Op) -> Callable[[Tile], Tile]:
    return lambda tile: tile.transform(lambda n: FALSE if n == c else n)


def _is_equality(c: Op) -> bool:
    return c.fn in ("==", "!=")


def _is_exact(c: Op) -> bool:
    """Return whether a condition is tested element by element: bounds of its two sides would say little, or are not known."""
    return bool(nest.axes_of(c)) and (_is_equality(c) or not inequalities(c))


def _bounds(c: Op, inside: Callable[[Axis], bool]) -> list[Tile]:
    """Return what follows if ``c`` holds for any element of the tile, from the extremes of its two sides."""
    if not nest.axes_of(c):
        return [c]
    return [Op(">=", (extreme(f, True, inside).tile(), Const(0))) for f in inequalities(c)]


def _holds_anywhere(conditions: list[Op]) -> Tile:
    one = Op("where", (_all(list(conditions)), Const(1), Const(0)))
    axes = tuple(sorted(nest.axes_of(one), key=lambda a: a.name))
    return Op(">", (TileReduce("max", one, axes, keeps_nan=False), Const(0)))


def _all(tests: list[Tile]) -> Tile:
    tests = list(dict.fromkeys(tests))
    return tests[0] if len(tests) == 1 else Op("and", (tests[0], _all(tests[1:])))


def _fresh(wish: str, names: set[str]) -> str:
    name, count = wish, 1
    while name in names:
        count += 1
        name = f"{wish}_{count}"
    names.add(name)
    return name
