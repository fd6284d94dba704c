"""Lower scans: at once over a whole extent, or tile by tile with a carried value.

The loop over the label is one of the kernel's own, and runs in order. A reversed scan counts the same loop from the end: its label stands for
``len(t) - 1 - t`` everywhere in the kernel. Scans of both directions share a kernel only where one tile holds the whole extent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ...lang.errors import DTError
from ..ir import nest
from ..ir.affine import affine
from ..ir.nest import Accumulator, Assign, Axis, Op, Position, Size, Start, Step, Tile, TileReduce, TileScan
from ..ir.value_type import value_type
from .reduction_terms import broadcast_over, guarded
from .scope import Scope

if TYPE_CHECKING:
    from .lowering import _Lowering

FIRST = {"sum": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf, "recur": 0.0}  #: before the first element
_COMBINE = {"sum": "+", "prod": "*", "max": "maximum", "min": "minimum"}


def scans_of(algorithm: Algorithm, funcs: tuple[str, ...]) -> list[Definition]:
    """Return those of ``funcs`` that are scans."""
    return [algorithm[f] for f in funcs if f in algorithm and isinstance(algorithm[f].expr, ex.Scan)]


def reversed_labels(algorithm: Algorithm, funcs: tuple[str, ...], holds: Callable[[str, str], bool]) -> frozenset[str]:
    """Return the labels that all scans of a kernel run along from the end. Raises DTError where some run from the start, and no tile holds the whole extent.

    ``holds``: whether one tile of the loops of a Func holds the whole extent of a label.
    """
    found: dict[str, bool] = {}
    for d in scans_of(algorithm, funcs):
        label, reverse = d.expr.label, d.expr.reverse  # type: ignore[attr-defined]
        if found.setdefault(label, reverse) != reverse:
            if not holds(d.name, label):
                raise DTError("scans of both directions along a label share a tile", found=f"{d.name}, the other way along {label}",
                              allowed=f"tensorize({label}:0), or {d.name} in a kernel of its own", at=d.pos)  # fmt: skip
            found[label] = False
    return frozenset(label for label, reverse in found.items() if reverse)


def position(axis: Axis, reverse: bool) -> Tile:
    """Return the index along ``axis``: its position, or that counted from the end."""
    return Op("-", (Op("-", (Size(axis.label), nest.Const(1))), Position(axis))) if reverse else Position(axis)


def axis_of(index: Tile) -> Axis | None:
    """Return the axis of an index that ``position`` made; None for any other."""
    match index:
        case Position(axis):
            return axis
        case Op("-", (Op("-", (Size(label), nest.Const(1))), Position(axis))) if axis.label == label:
            return axis
    return None


def memory_order(index: Sequence[Tile]) -> tuple[Axis, ...]:
    """Return the axes that an index varies with, by the last dimension in which each occurs."""
    found: dict[Axis, None] = {}
    for i in index:
        axis = axis_of(i)
        for a in (axis,) if axis is not None else index_axes(i):
            found.pop(a, None)
            found[a] = None
    return tuple(found)


def index_axes(index: Tile) -> tuple[Axis, ...]:
    """Return the axes that one index varies with, those of long strides first: ``v``, ``j`` of ``(7 * v + j) % n``, as they lie in memory."""
    form = affine(index.args[0] if isinstance(index, nest.Op) and index.fn == "%" else index)
    strides = {t.axis: abs(times) for t, times in form.terms.items() if isinstance(t, Position)} if form is not None else {}
    return tuple(sorted(nest.axes_of(index), key=lambda a: (-strides.get(a, 0), a.name)))


def spans(index: Tile, label: str) -> bool:
    """Return whether ``index`` runs over the extent of ``label``: a plain index does, one counted from the end only that of its own label."""
    axis = axis_of(index)
    return axis is not None and (isinstance(index, Position) or axis.label == label)


def lower_scan(lowering: _Lowering, d: Definition, env: dict[str, Tile], scope: Scope) -> Tile:
    """Return the tile of the scan ``d``; what is carried is emitted around the loop over its label."""
    scan = d.expr
    assert isinstance(scan, ex.Scan)
    axis, index = axis_of(env[scan.label]), env[scan.label]
    if axis is None:
        raise DTError("a scan is computed at each element in turn", found=f"{d.name} at {index}", allowed=f"{d.name} in a kernel of its own", at=d.pos)
    whole = axis in lowering.whole.get(axis.label, ())
    if scan.reverse == isinstance(index, Position) and not whole:
        raise DTError("a loop along a scan runs the way that the scan does", found=f"{d.name} in a loop over {axis.label}, the other way",
                      allowed=f"a loop over {scan.label}, or {d.name} in a kernel of its own", at=d.pos)  # fmt: skip
    neutral = (1.0, 0.0) if scan.kind == "recur" else (FIRST[scan.kind],)
    terms = tuple(_term(lowering.tile(a, env, scope, {}), axis, n) for a, n in zip(scan.args, neutral))
    if whole:
        return _scanned(scan.kind, terms, axis, scan.reverse == isinstance(index, Position))
    home, outer = _around(lowering, d, axis, scope)
    every = frozenset().union(*map(nest.axes_of, terms)) - {axis}
    order = nest.in_order(every, tuple(a for label in d.labels if (a := axis_of(env[label])) is not None))
    name = outer.fresh(f"{d.name}_carry", outer)
    outer.reserve(name)
    outer.body.append(Accumulator(name, order, FIRST[scan.kind], str(d), _COMBINE.get(scan.kind, "+")))
    carried = nest.Local(name, order)
    value = _combined(scan.kind, carried, terms, axis)
    here = lowering.let(d.name, value, home, str(d), (*order, axis))
    home.body.append(Assign(name, order, here if axis.scalar else _last(here, axis)))
    return here


def _term(tile: Tile, axis: Axis, neutral: float) -> Tile:
    """Return terms along ``axis``, in float32, neutral past its extent."""
    tile = tile if value_type(tile) == "number" else Op("*", (tile, nest.Const(1.0)))
    return guarded(broadcast_over(tile, (axis,), neutral), (axis,), neutral)


def _scanned(kind: str, terms: tuple[Tile, ...], axis: Axis, reverse: bool = False) -> Tile:
    return terms[-1] if axis.scalar else TileScan(kind, terms, axis, reverse)


def _combined(kind: str, carried: Tile, terms: tuple[Tile, ...], axis: Axis) -> Tile:
    """Return the scan of one tile after what is carried into it."""
    if kind != "recur":
        return Op(_COMBINE[kind], (carried, _scanned(kind, terms, axis)))
    a, b = terms
    entered = Op("+", (Op("*", (a, carried)), b))
    if axis.scalar:
        return entered
    return TileScan(kind, (a, Op("where", (Op("==", (Position(axis), Start(axis))), entered, b))), axis)


def _last(tile: Tile, axis: Axis) -> Tile:
    """Return the last element of ``tile`` along ``axis``; past the extent it repeats the one before."""
    end = Op("-", (Op("+", (Start(axis), Step(axis))), nest.Const(1)))
    return TileReduce("sum", Op("where", (Op("==", (Position(axis), end)), tile, nest.Const(0.0))), (axis,))


def _around(lowering: _Lowering, d: Definition, axis: Axis, scope: Scope) -> tuple[Scope, Scope]:
    """Return the body of the loop over ``axis``, and the scope around the loop. Raises DTError where the loop is not in order."""
    label = axis.label
    at = next((p.pos for p in lowering.schedule.of(lowering.root, "block")), d.pos)
    home = next((s for s in scope.chain() if axis in s.axes), None)
    if label in lowering.blocks:
        raise DTError("one program runs through a scan", found=f"{lowering.root} in blocks of {label}, along which {d.name} runs",
                      allowed=f"tiles of {label}, {lowering.root}.tensorize({label}:64), and blocks of other labels", at=at)  # fmt: skip
    split = lowering.options.split()
    if split is not None and split.label == label:
        raise split.refuse(f"{d.name} in the loop over {label}, which one program runs through", f"{d.name} in a kernel of its own")
    if home is not scope or home.parent is None:
        inner = [label for label in d.labels if label != axis.label]
        raise DTError("the loop along a scan is inside all other loops", found=f"{d.name} along {label}, with a loop inside",
                      allowed=f"reorder({', '.join([*inner, label])})", at=d.pos)  # fmt: skip
    return home, home.parent
