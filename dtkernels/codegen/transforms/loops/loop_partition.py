"""Partition loops by their conditions: an affine condition on a loop's label becomes a bound of the loop.

Before::

    for l in 0 .. size_l step T:    acc <- acc + guard(where(l <= m, e, 0), l)

After::

    l_end     = min(size_l, last m + 1)                   tiles from here on are masked everywhere
    l_partial = min(size_l, first m + 1) // T * T         tiles before this one are masked nowhere
    for l in 0 .. l_partial step T:      acc <- acc + e
    for l in l_partial .. l_end step T:  acc <- acc + guard(where(l <= m, e, 0), l)

What is compared with the label may be data, as long as it is known before the loop: of ``lo[m] <= l and l < hi[m]`` the loop runs from the
smallest ``lo`` of the block's rows to the largest ``hi``, and needs no mask from the largest ``lo`` to the smallest ``hi``.

A tile is skipped only where ``simplify.is_noop`` proves that it changes nothing. A loop without a condition is peeled into whole tiles
and a last partial one if its extent guards a matrix product, since the guard would cost time in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ...ir import nest
from ...ir.affine import Affine, extreme, inequalities
from ...ir.axes import swap_axis
from ...ir.nest import (
    Axis,
    Const,
    Guard,
    Index,
    Kernel,
    Let,
    Local,
    Loop,
    Op,
    Position,
    Size,
    Statement,
    Step,
    Tile,
    TileDot,
    statements,
)
from ...ir.value_type import never_negative, value_type
from ...lower.reduction_terms import repeated
from ...lower.schedule_options import KernelOptions
from ..arithmetic.simplify import FALSE, TRUE, is_noop, simplified
from .step_skipping import skipping_steps


def partition_loops(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Turn masks into loop bounds, and peel masked and partial tiles."""
    return replace(kernel, body=with_loops_partitioned(kernel.body))


def with_loops_partitioned(body: tuple[Statement, ...], outside: frozenset[Axis] = frozenset()) -> tuple[Statement, ...]:
    """Partition every reduction loop of ``body`` by the conditions in it; ``outside`` are the axes of the loops around it."""
    return _partition_body(body, outside, nest.names_in(body))


def _partition_body(body: tuple[Statement, ...], outside: frozenset[Axis], names: set[str]) -> tuple[Statement, ...]:
    result: list[Statement] = []
    for s in body:
        if isinstance(s, Index):
            outside |= {s.axis}
        if isinstance(s, Loop):
            s = replace(s, body=_partition_body(s.body, outside | {s.axis}, names))
            result += _LoopPartition(s, outside, names).loops() if s.reduces and s.within == "extent" else [s]
        else:
            result.append(s)
    return tuple(result)


@dataclass(frozen=True)
class _Condition:
    """A comparison, and the truth value (``holds``) without which a tile contributes nothing; ``forms`` are then all >= 0."""

    comparison: Op
    holds: bool
    forms: tuple[Affine, ...]


class _LoopPartition:
    """Partition one loop into the loops that replace it."""

    def __init__(self, loop: Loop, outside: frozenset[Axis], names: set[str]):
        self.loop, self.outside, self.names = loop, outside, names
        self.axis = loop.axis
        self.begin, self.end = loop.begin or Const(0), loop.end or Size(loop.axis.label)
        self.changing = {s.name for s in statements(loop.body) if isinstance(s, (Let, nest.Assign, nest.Accumulator))}
        self.conditions = tuple(self._conditions())
        self.bounds: list[Let] = []

    def loops(self) -> list[Statement]:
        lower = [f.without(Position(self.axis)).scaled(-1) for c in self.conditions for f in c.forms if f.terms[Position(self.axis)] > 0]
        upper = [f.without(Position(self.axis)).plus(1) for c in self.conditions for f in c.forms if f.terms[Position(self.axis)] < 0]
        if not self.conditions:
            return self._peeled() if self._guards_a_product() else [skipping_steps(self.loop, self.outside.__contains__, frozenset(), self.names)]
        begin = self._name("begin", self._round_down(_maximum([self.begin, *self._extremes(lower, False)]))) if lower else self.loop.begin
        end = self._name("end", _minimum([self.end, *self._extremes(upper, True)])) if upper else self.end
        if self.axis.scalar and all(a.scalar for c in self.conditions for f in c.forms for a in f.axes):
            return [*self.bounds, self._unmasked_loop(begin, end)]
        if self._picks_one_step() and begin is not None:
            return self._one_step_or_several(lower, upper, begin, end)
        if self._masks_loads_alone():
            return [*self.bounds, self._masked_loop(begin, end)]
        return self._masked_whole_masked(lower, upper, begin, end)

    def _picks_one_step(self) -> bool:
        """Return whether each element takes part in one step alone, that of an equal number: of ``e[m] == g`` in the loop over g."""
        return self.axis.scalar and any(c.comparison.fn == "==" and c.holds and nest.axes_of(c.comparison) for c in self.conditions)

    def _masks_loads_alone(self) -> bool:
        """Return whether whole tiles would be masked too: every choice by the conditions is also one by data of this loop, of rows to load."""
        compared = [c.comparison for c in self.conditions]
        loaded = {s.name for s in statements(self.loop.body) if nest.is_load(s)}
        nodes = [n for s in statements(self.loop.body) if isinstance(s, (Let, nest.Assign)) for n in s.value.walk()]
        choices = [n for n in nodes if isinstance(n, Op) and n.fn == "where" and any(c in n.args[0].walk() for c in compared)]
        inside = sum(n in compared for choice in choices for n in choice.args[0].walk())
        return inside == sum(n in compared for n in nodes) and all(self._loads_by_data(n, compared, loaded) for n in choices)

    def _loads_by_data(self, choice: Op, compared: list[Op], loaded: set[str]) -> bool:
        match choice.args:
            case (condition, Local(name), Const(0)) if name in loaded:
                tests = [n for n in condition.walk() if isinstance(n, Op) and n.fn == "==" and n not in compared]
                return any(isinstance(x, Local) and x.name in loaded for n in tests for x in n.walk())
        return False

    def _one_step_or_several(self, lower: list[Affine], upper: list[Affine], begin: Tile, end: Tile) -> list[Statement]:
        """Return the step that all elements of the tile pick, without a mask, and all steps with masks for a tile whose elements differ."""
        full = self._name("full", _maximum([self.begin, *self._extremes(lower, True)]))
        partial = self._name("partial", _minimum([self.end, *self._extremes(upper, False)]))
        several = self._name("several", Op("where", (Op("<", (full, partial)), end, begin)))
        return [*self.bounds, self._unmasked_loop(full, partial), self._masked_loop(several, end)]

    def _masked_whole_masked(self, lower: list[Affine], upper: list[Affine], begin: Tile | None, end: Tile) -> list[Statement]:
        """Return masked tiles, whole tiles, masked tiles; the first group only under a lower bound."""
        last = self._end_of_whole_tiles(_minimum([self.end, *self._extremes(upper, False)]), all(map(self._nonnegative, upper)))
        if not lower:
            partial = self._name("partial", last)
            return [*self.bounds, self._unmasked_loop(self.loop.begin, partial), self._masked_loop(partial, end)]
        full = self._name("full", self._round_up(_maximum([self.begin, *self._extremes(lower, True)])))
        partial = self._name("partial", Op("max", (full, last)))
        if upper or self.axis.exact:
            before = self._masked_loop(begin, Op("min", (full, end)))
            return [*self.bounds, before, self._unmasked_loop(full, partial), *([self._masked_loop(partial, end)] if upper else [])]
        assert begin is not None  # as there is a lower bound
        before = self._loop_within_extent(begin, Op("min", (full, last)))
        return [*self.bounds, before, self._unmasked_loop(full, partial), self._tail_loop(_maximum([begin, last]), end)]

    def _peeled(self) -> list[Statement]:
        whole = self._name("partial", self._end_of_whole_tiles(self.end, True))
        return [*self.bounds, self._unmasked_loop(self.loop.begin, whole), self._tail_loop(whole, self.end)]

    def _end_of_whole_tiles(self, bound: Tile, positive: bool) -> Tile:
        """Return where the whole tiles before ``bound`` end; where the loop begins if there are none."""
        return self._round_down(bound) if self.begin == Const(0) and positive else _maximum([self.begin, self._round_down(bound)])

    # -- conditions -------------------------------------------------------------------------------------------------

    def _conditions(self) -> Iterable[_Condition]:
        """Find comparisons of the loop's label with loop-invariant values that mask every statement where they fail (or hold)."""
        values = [s.value for s in statements(self.loop.body) if isinstance(s, (Let, nest.Assign))]
        for comparison in dict.fromkeys(n for v in values for n in v.walk() if isinstance(n, Op)):
            for holds, node in ((True, comparison), (False, _negated(comparison))):
                forms = inequalities(node, of_nan=not holds) if node is not None else ()
                if not forms or not all(self._bounds_the_loop(f) for f in forms):
                    continue
                if is_noop(self.loop.body, _replacing_condition(comparison, FALSE if holds else TRUE)):
                    yield _Condition(comparison, holds, forms)

    def _bounds_the_loop(self, form: Affine) -> bool:
        others = form.axes - {self.axis}
        inner = {s.axis for s in statements(self.loop.body) if isinstance(s, Index)} - {self.axis}
        return form.terms.get(Position(self.axis)) in (1, -1) and not others & inner and not form.names & self.changing

    def _guards_a_product(self) -> bool:
        nodes = [n for s in statements(self.loop.body) if isinstance(s, (Let, nest.Assign)) for n in s.value.walk()]
        return any(isinstance(n, TileDot) for n in nodes) and any(isinstance(n, Guard) and self.axis in n.axes for n in nodes)

    # -- bounds -----------------------------------------------------------------------------------------------------

    def _extremes(self, forms: list[Affine], largest: bool) -> list[Tile]:
        return [extreme(f, largest, self.outside.__contains__).tile() for f in forms]

    def _nonnegative(self, form: Affine) -> bool:
        return extreme(form, False, self.outside.__contains__).never_negative()

    def _round_down(self, bound: Tile) -> Tile:
        return bound if self.axis.scalar else Op("*", (Op("//", (bound, Step(self.axis))), Step(self.axis)))

    def _round_up(self, bound: Tile) -> Tile:
        return bound if self.axis.scalar else Op("*", (Op("cdiv", (bound, Step(self.axis))), Step(self.axis)))

    def _name(self, what: str, value: Tile) -> Local:
        name, count = f"{self.axis.name}_{what}", 1
        while name in self.names:
            count += 1
            name = f"{self.axis.name}_{what}_{count}"
        self.names.add(name)
        self.bounds.append(Let(name, value, ()))
        return Local(name, ())

    # -- bodies -----------------------------------------------------------------------------------------------------

    def _masked_loop(self, begin: Tile | None, end: Tile) -> Loop:
        """Return the loop unchanged, over too few tiles for warp specialization to pay."""
        loop = replace(self.loop, begin=begin, end=end, options=_without_warp_specialization(self.loop))
        bounding = frozenset(c.comparison for c in self.conditions)
        return skipping_steps(loop, self.outside.__contains__, bounding, self.names)

    def _tail_loop(self, begin: Tile | None, end: Tile) -> Loop:
        """Return the last, partial tile as a loop of one step, without software pipelining.

        In a loop that adds up several products, the registers that prefetching takes would slow down the loop over whole tiles too.
        """
        loop = replace(self._masked_loop(begin, end), tail=True)
        sums = [s for s in statements(loop.body) if isinstance(s, nest.Assign) and any(isinstance(n, TileDot) for n in s.value.walk())]
        if len(sums) < 2:
            return loop
        return replace(loop, options=(*(o for o in loop.options if o[0] != "num_stages"), ("num_stages", 1)))

    def _unmasked_loop(self, begin: Tile | None, end: Tile) -> Loop:
        """Return the loop over tiles that meet every condition and lie inside the extent."""
        known: dict[Tile, Tile] = {c.comparison: TRUE if c.holds else FALSE for c in self.conditions}
        return replace(self._loop_within_extent(begin, end, known), options=self.loop.options)

    def _loop_within_extent(self, begin: Tile | None, end: Tile, known: Mapping[Tile, Tile] = MappingProxyType({})) -> Loop:
        """Return the loop over a few tiles that lie inside the extent, with conditions replaced as ``known`` says."""
        exact = replace(self.axis, exact=True)

        def change(tile: Tile) -> Tile:
            tile = known.get(tile, tile)
            if isinstance(tile, Guard) and self.axis in tile.axes:
                axes = tuple(a for a in tile.axes if a != self.axis)
                return replace(tile, axes=axes) if axes else tile.arg
            if isinstance(tile, nest.Load) and known:
                return _without_known_checks(tile, known)
            return simplified(tile)

        body = _ConditionFolding(change).body(self.loop.body)
        body = without_aliases(swap_axis(body, self.axis, exact))
        return replace(self.loop, axis=exact, body=body, begin=begin, end=end, options=_without_warp_specialization(self.loop))


class _ConditionFolding:
    """Rewrites a body whose conditions are decided.

    A decision may drop axes of a tile; operands of products and reductions, and what is guarded, are broadcast to their axes again.

    Before: ``dot(where(l <= m, a, 0), B, l)``  Decided: ``dot(a, B, l)``, where ``a[m]`` lacks ``l``  After: ``dot(where(l >= 0, a, 0), B, l)``
    """

    def __init__(self, change: Callable[[Tile], Tile]):
        self.change = change
        self.left: dict[str, frozenset[Axis]] = {}  #: name -> axes that its value still varies with

    def body(self, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        return tuple(self._statement(s) for s in body)

    def _statement(self, s: Statement) -> Statement:
        if isinstance(s, Loop):
            return replace(s, body=self.body(s.body))
        if not isinstance(s, (Let, nest.Assign, nest.Store, nest.DescriptorStore)):
            return s
        value = self._tile(s.value)
        if isinstance(s, Let):
            self.left[s.name] = frozenset(s.axes) if isinstance(value, nest.Load) else self._axes(value)
            if not self.left[s.name]:
                return replace(s, value=value, axes=())  # a single number has no dimension to broadcast along
        return replace(s, value=value)

    def _tile(self, tile: Tile) -> Tile:
        new = self.change(tile.rebuild(self._tile))
        match tile, new:
            case Local(name), Local() if self.left.get(name) == frozenset():
                return replace(new, axes=())
            case TileDot(left, right), TileDot():
                return replace(new, left=self._broadcast_to(new.left, left), right=self._broadcast_to(new.right, right))
            case nest.TileReduce(_, arg), nest.TileReduce():
                return replace(new, arg=self._broadcast_to(new.arg, arg))
            case Guard(arg, _), Guard():
                return replace(new, arg=self._broadcast_to(new.arg, arg, frozenset(new.axes)))
        if value_type(new) == "integer" and value_type(tile) == "number":  # where(l <= m, 2, -inf) is a float, decided or not
            return Const(float(new.value)) if isinstance(new, Const) else Op("*", (new, Const(1.0)))
        return new

    def _broadcast_to(self, new: Tile, old: Tile, wanted: frozenset[Axis] | None = None) -> Tile:
        """Broadcast ``new`` to the axes of ``old``, or to those of them that are ``wanted``."""
        lost = (nest.axes_of(old) if wanted is None else nest.axes_of(old) & wanted) - self._axes(new)
        return repeated(new, tuple(sorted(lost, key=lambda a: a.name)), 0.0)

    def _axes(self, tile: Tile) -> frozenset[Axis]:
        """Return the axes that a rewritten tile varies with."""
        named = tile.transform(lambda n: replace(n, axes=tuple(self.left[n.name])) if isinstance(n, Local) and n.name in self.left else n)
        return nest.axes_of(named)


def _without_warp_specialization(loop: Loop) -> tuple[tuple[str, int | bool], ...]:
    return tuple(o for o in loop.options if o[0] != "warp_specialize")


def _without_known_checks(load: nest.Load, known: Mapping[Tile, Tile]) -> nest.Load:
    """Return a load that does not check the indices that conditions keep inside its dimensions."""

    def inside(index: Tile, label: str | None) -> bool:
        below = label is not None and known.get(Op("<", (index, Size(label)))) == TRUE
        return below and (never_negative(index) or known.get(Op(">=", (index, Const(0)))) == TRUE)

    left = [(d, label) for d, label in zip(load.checked, load.extents) if not inside(load.index[d], label)]
    return replace(load, checked=tuple(d for d, _ in left), extents=tuple(label for _, label in left))


def _replacing_condition(comparison: Tile, truth: Tile) -> Callable[[Tile], Tile]:
    return lambda tile: tile.transform(lambda n: truth if n == comparison else n)


def _negated(comparison: Op) -> Op | None:
    opposite = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "!=": "=="}.get(comparison.fn)
    return Op(opposite, comparison.args) if opposite else None


def _maximum(tiles: list[Tile]) -> Tile:
    tiles = list(dict.fromkeys(tiles))
    return tiles[0] if len(tiles) == 1 else Op("max", (tiles[0], _maximum(tiles[1:])))


def _minimum(tiles: list[Tile]) -> Tile:
    tiles = list(dict.fromkeys(tiles))
    return tiles[0] if len(tiles) == 1 else Op("min", (tiles[0], _minimum(tiles[1:])))


def without_aliases(body: tuple[Statement, ...], known: Mapping[str, Tile] = MappingProxyType({})) -> tuple[Statement, ...]:
    """Remove names that only rename another value; ``known`` are the aliases of the enclosing statements."""
    moving = {s.name for s in statements(body) if isinstance(s, nest.Assign)}
    alias = dict(known)
    result: list[Statement] = []
    rename: Callable[[Tile], Tile] = lambda n: alias.get(n.name, n) if isinstance(n, Local) else n  # noqa: E731
    for s in body:
        if isinstance(s, (Let, nest.Assign, nest.Store)):
            s = replace(s, value=s.value.transform(rename))
            s = replace(s, value=s.value.transform(simplified))
        if isinstance(s, Loop):
            bounds = {side: bound.transform(rename) for side in ("begin", "end", "when") if (bound := getattr(s, side)) is not None}
            s = replace(s, body=without_aliases(s.body, alias), **bounds)
        if isinstance(s, Let):
            alias.pop(s.name, None)
        if isinstance(s, Let) and _is_alias(s, moving):
            alias[s.name] = s.value
        else:
            result.append(s)
    return tuple(result)


def _is_alias(s: Let, moving: set[str]) -> bool:
    return s.value in (TRUE, FALSE) or (isinstance(s.value, Local) and s.value.name not in moving)
