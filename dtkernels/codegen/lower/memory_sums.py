"""Add the terms of a sum to a buffer in memory, where a schedule accumulates it in this kernel (prelower/accumulated_sums.py).

Before: ``f[m, d] = rdot(s[m, l], K[l, d], l)``, in blocks of ``l`` and a loop over ``m``
After: ``f_sum[m, d] += dot(s, K, l)`` in each step of the loop, ``l`` being the block's own tile

Where a loop comes back to the same elements in every step, as rows of a block do to the sums of columns, the loop adds up in registers and the
sum is added to memory after it::

    for x in block:  acc <- acc + A[x, y]
    f_sum[y] += acc

In a fixed order a buffer has a part for each block, and one program alone adds to it. Elements that a loop of the program comes back to are
added to again by other threads, perhaps: a barrier at the end of that loop's body keeps the two apart. What no loop comes back to is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ...lang.errors import DTError
from ...lang.schedule import Accumulation
from ..ir import nest
from ..ir.nest import (
    Accumulator,
    Assign,
    Axis,
    Barrier,
    BlockNumber,
    Guard,
    Index,
    Let,
    Local,
    Loop,
    Op,
    Position,
    Start,
    Statement,
    Store,
    Tile,
    TileDot,
    names_in,
    statements,
)
from .reduction_terms import reduced
from .scope import Scope

if TYPE_CHECKING:
    from .lowering import _Lowering


def add_in_memory(lowering: _Lowering, d: Definition, env: dict[str, Tile], scope: Scope) -> None:
    """Add the terms that are known under ``env`` to the buffer of ``d``, once all labels of the place are bound."""
    asked = lowering.added[d.name]
    wanted = {x for _, place in asked.places for x in ex.free_labels(place)}
    if d.name in lowering.stored or not wanted <= set(env):
        return
    node = next(n for n in d.expr.walk() if isinstance(n, (ex.Reduce, ex.Dot)))
    node = _without_tests(node, asked)
    at = {label: lowering.index_of(place, env, scope) for label, place in asked.places}
    axes: list[Axis] = []
    for label in node.labels:
        if label in at:
            axes += sorted(nest.axes_of(at[label]) - set(axes), key=lambda a: a.name)
        else:
            axes.append(lowering.whole_axis(label, at.values()))
            at[label] = Position(axes[-1])
    for label in d.labels:
        if label not in at and label not in asked.parts:
            at[label] = Position(lowering.whole_axis(label, at.values()))
    _check_merged(lowering, d, node.labels, at, wanted)
    for label in at:
        lowering.place(d.name, label, at, scope)
    lowering.reducer.check_finished(d)
    terms = lowering.reducer.terms(node, at, scope, tuple(axes))
    apart = set().union(*(nest.axes_of(at[label]) for label in d.labels if label in at))  # each term along them has an element of its own
    value = terms if isinstance(terms, TileDot) else reduced("sum", terms, tuple(a for a in axes if a not in apart))
    if past := single_elements_past(tuple(at[label] for label in node.labels)):
        value = Guard(value, past, 0.0)
    at |= {part: BlockNumber(lowering.counted[part][0]) for part in asked.parts}
    index = tuple(at[label] for label in d.labels)
    over = tuple(dict.fromkeys(a for i in index for a in sorted(nest.axes_of(i), key=lambda a: a.name)))
    if asked.complete:
        total = lowering.let(f"{d.name}_sum", value, scope, "", over)
        value = lowering.let(d.name, lowering.tile(d.expr, at, scope, {node: total}), scope, str(d), over)
        scope.record((d.name, index), value)
    scope.body.append(Store(d.name, index, value, over, str(d), "" if asked.complete else "sum"))
    lowering.stored.append(d.name)


def _without_tests(node: ex.Reduce | ex.Dot, asked: Accumulation) -> ex.Reduce | ex.Dot:
    """Return a sum without the tests that its place fulfils: ``t[b] == v`` where ``v`` is ``t[b]``."""
    known = {ex.Binary("==", place, ex.Label(label)) for label, place in asked.places if any(ex.accesses(place))}
    match node:
        case ex.Reduce("sum", ex.Call("where", (condition, value, ex.Const(0))) as picked) if known:
            rest = [c for c in ex.operands_of(condition, "and") if c not in known]
            return replace(node, arg=replace(picked, args=(ex.joined("and", rest), *picked.args[1:])) if rest else value)
    return node


def _check_merged(lowering: _Lowering, d: Definition, summed: tuple[str, ...], at: Mapping[str, Tile], known: set[str]) -> None:
    """Raise DTError where one loop goes over labels of the sum and of its place together, or over labels beside the ``known`` ones.

    A step of the first has terms of several elements; the second would add each term once for each element of the other label.
    """
    asked = {p.args[0]: p.pos for p in lowering.schedule.of(lowering.added[d.name].host, "merge")}
    for axis in {n.axis for t in at.values() for n in t.walk() if isinstance(n, Position)}:
        if others := [x for x in lowering.merged.get(axis.label, ()) if x not in known]:
            raise DTError(f"accumulate_at: a merged loop goes over labels at which terms of {d.name} are known", found=f"{axis.label}, also of {', '.join(others)}",
                          allowed=f"merge without {', '.join(others)}", at=asked.get(axis.label, d.pos))  # fmt: skip
    of_sum, of_place = ({n.axis for x in labels if x in at for n in at[x].walk() if isinstance(n, Position)} for labels in (summed, d.labels))
    for axis in of_sum & of_place:
        if axis.label in lowering.merged:
            parts = ", ".join(lowering.merged[axis.label])
            raise DTError(f"accumulate_at: a merged loop goes over labels of {d.name}, or over labels that it sums", found=f"{axis.label} of {parts}",
                          allowed="merge of either", at=asked.get(axis.label, d.pos))  # fmt: skip


def single_elements_past(index: tuple[Tile, ...]) -> tuple[Axis, ...]:
    """Return the axes of loops over single elements of a block that may pass their extents: no tile is masked along them."""
    return tuple(dict.fromkeys(n.axis for i in index for n in i.walk() if isinstance(n, Position) and n.axis.scalar and not n.axis.exact))


def additions(body: tuple[Statement, ...], added: Mapping[str, Accumulation], algorithm: Algorithm) -> tuple[Statement, ...]:
    """Add up in registers what can be, then give ordered sums their order."""
    for a in added.values():
        again = {x for label, place in a.places if label not in algorithm[a.func].labels for x in ex.free_labels(place)}
        body = _in_registers(body, a.func, again, names_in(body))
        body = _ordered(body, a.func, again)[0] if a.ordered else body
    return body


def _in_registers(body: tuple[Statement, ...], func: str, again: set[str], taken: set[str]) -> tuple[Statement, ...]:
    """Move an addition out of loops in ``again`` that its place in memory does not vary with."""
    found: list[Statement] = []
    for s in body:
        if not isinstance(s, Loop):
            found.append(s)
            continue
        s = replace(s, body=_in_registers(s.body, func, again, taken))
        store = next((x for x in s.body if isinstance(x, Store) and x.buffer == func), None)
        if store is None or s.axis.label not in again or _varies(store, s):
            found.append(s)
            continue
        name = next(n for i in range(len(taken) + 1) if (n := f"{func}_acc" + (f"_{i}" if i else "")) not in taken)
        taken.add(name)
        acc = Local(name, nest.in_order(nest.axes_of(store.value), store.axes))
        step = Assign(name, acc.axes, Op("+", (acc, store.value)))
        found.append(Accumulator(name, acc.axes, 0.0, store.origin))
        found += [replace(s, body=tuple(step if x is store else x for x in s.body)), replace(store, value=acc)]
    return tuple(found)


def _varies(store: Store, loop: Loop) -> bool:
    """Return whether the place of ``store`` depends on what the loop defines."""
    inside = {x.axis for x in statements(loop.body) if isinstance(x, Index)}
    names = {x.name for x in statements(loop.body) if isinstance(x, Let)}
    nodes = [n for i in store.index for n in i.walk()]
    return any(isinstance(n, (Position, Start)) and n.axis in inside or isinstance(n, Local) and n.name in names for n in nodes)


def _ordered(body: tuple[Statement, ...], func: str, again: set[str], inside: bool = False) -> tuple[tuple[Statement, ...], bool]:
    """Return the body, and whether additions in it still need a barrier; ``inside`` a loop that comes back to the same elements."""
    found: list[Statement] = []
    waiting = False
    for s in body:
        if isinstance(s, Store) and s.buffer == func:
            found.append(replace(s, onto="ordered sum" if inside else "zeros"))
            waiting = waiting or inside
        elif isinstance(s, Loop):
            comes_back = s.axis.label in again
            inner, wants = _ordered(s.body, func, again, inside or comes_back)
            found.append(replace(s, body=(*inner, Barrier()) if wants and comes_back else inner))
            waiting = waiting or wants and not comes_back
        else:
            found.append(s)
    return tuple(found), waiting
