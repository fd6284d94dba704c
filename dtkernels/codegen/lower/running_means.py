"""Keep the means that sums are relative to, in the loop that adds both up: variances and covariances in one pass.

Before, two loops::

    for y:  sum <- sum + A                        mean = sum / len(y)
    for y:  square <- square + (A - mean) ** 2

After, one. Each step has a mean of its own, from which its terms deviate, and then joins two sums relative to two means
(algebra/rules/deviations.py)::

    for y:  mean_step  = sum(A, y) / count_step
            mean_moved = mean_step - mean
            square <- square + sum((A - mean_step) ** 2, y) + mean_moved ** 2 * count * count_step / (count + count_step)
            mean   <- mean + mean_moved * count_step / (count + count_step)

So no digits are lost where the mean is large: what is squared is as small as in two passes. Only the last three lines depend on the step before,
and these are of single numbers for each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...algebra.rules.center_moments import averaged
from ...algebra.rules.deviations import Repair, repairs
from ...lang import expr as ex
from ..ir import nest
from ..ir.nest import WHOLE, Accumulator, Assign, Axis, Const, Local, Op, Size, Start, Step, Tile
from .reduction_terms import reduced

if TYPE_CHECKING:
    from .reductions import _AccumulatedFunc, _Step


@dataclass
class _Mean:
    running: Local
    step: Tile  #: the mean of this step's elements
    moved: Tile  #: how far that is from the mean of those before


@dataclass
class _Counts:
    before: Local
    step: Tile
    share: Tile  #: of this step in all elements so far
    weight: Tile  #: the product of both counts over their sum


class RunningMeans:
    """The means of one loop that sums in it are relative to."""

    def __init__(self, step: _Step):
        self.s, self.l = step, step.l
        self.labels = tuple(a.label for a in step.axes)
        self._reducing = {d.name for d in self.l.algorithm.definitions if any(isinstance(n, (ex.Reduce, ex.Dot)) for n in d.expr.walk())}
        self.repaired: dict[tuple[str, ex.Expr], tuple[Repair, ...]] = {}
        self.wanted: set[ex.Expr] = set()  #: terms whose means are kept
        self.moving: set[str] = set()  #: Funcs that sums are relative to
        self._means: dict[ex.Expr, _Mean] = {}
        self._counts: _Counts | None = None
        for member in step.members:
            for node in member.nodes:
                self._look_at(member, node)

    def _look_at(self, member: _AccumulatedFunc, node: ex.Expr) -> None:
        names = {*self.s.r.used(node, self.s.shared)}
        terms = node.arg if isinstance(node, ex.Reduce) and node.kind == "sum" else node if isinstance(node, ex.Dot) else None
        if not names or terms is None or all(self.s.r.can_follow(name, node, self.s.shared) for name in names):
            return
        moving = names | {f for f in self._reducing if names & {*self.s.r.used(self.l.algorithm[f].expr, self.s.shared)}}
        found = repairs(terms, node.labels, frozenset(moving), self.l.algorithm, self._plain)  # type: ignore[attr-defined]
        if found is not None:
            self.repaired[member.definition.name, node] = found
            self.wanted |= {t for r in found for t in (r.first, r.second)}
            self.moving |= names
            self.wanted |= {self._plain(self._terms_of_mean(name)) for name in names}

    def _plain(self, expr: ex.Expr) -> ex.Expr:
        """Inline fused Funcs, but for those that reduce: a sum inside terms is computed once."""
        return self.s.r.inlined(expr, self.s.shared | self._reducing)

    def _terms_of_mean(self, name: str) -> ex.Expr:
        """Return what a Func, of which a multiple is a mean, adds up."""
        return next(n.arg for n in self.l.algorithm[name].expr.walk() if isinstance(n, ex.Reduce))

    def repairs(self, member: _AccumulatedFunc, node: ex.Expr) -> tuple[Repair, ...] | None:
        """Return what repairs the sum ``node`` when means move; None if it is relative to none."""
        return self.repaired.get((member.definition.name, node))

    def keeps(self, member: _AccumulatedFunc, node: ex.Reduce, watched: bool) -> bool:
        """Return whether the sum ``node`` is kept as a mean, since other sums are relative to that."""
        return bool(self.wanted) and node.kind == "sum" and self._plain(node.arg) in self.wanted and (member.definition.name in self.moving or not watched)

    # -- statements of a step -------------------------------------------------------------------------------------

    def counts(self) -> _Counts:
        """Count the elements, once for all means of the loop."""
        if self._counts is None:
            before = self._accumulator("count", (), "elements added up")
            sizes = [_elements(a) for a in self.s.axes if not a.scalar]
            step: Tile = sizes[0] if sizes else Const(1)
            for size in sizes[1:]:
                step = Op("*", (step, size))
            step = self.l.let("count_step", step, self.s.inner) if sizes else step
            after = self.l.let("count_next", Op("+", (before, step)), self.s.inner)
            some = Op(">", (before, Const(0.0)))  # else the first share might be 1 but for rounding
            share = self.l.let("count_share", Op("where", (some, Op("/", (step, after)), Const(1.0))), self.s.inner)
            weight = self.l.let("count_weight", Op("*", (before, share)), self.s.inner)
            self.s.late.append(Assign(before.name, (), after))
            self._counts = _Counts(before, step, share, weight)
        return self._counts

    def mean(self, terms: ex.Expr, env: dict[str, Tile], wish: str, origin: str = "") -> _Mean:
        """Return the running mean of ``terms``, updated in this step."""
        if terms not in self._means:
            counts = self.counts()
            tile = self.s.r.terms(ex.Reduce("sum", terms, self.labels), env, self.s.inner, self.s.axes)
            total = reduced("sum", tile, self.s.axes)
            order = tuple(i.axis for i in env.values() if isinstance(i, nest.Position))
            value = total if counts.step == Const(1) else Op("/", (total, counts.step))
            step = self.l.let(f"{wish}_step", value, self.s.inner, order=order)
            running = self._accumulator(wish, step.axes, origin, counts.before.name)
            moved = self.l.let(f"{wish}_moved", Op("-", (step, running)), self.s.inner, order=order)
            self.s.late.append(Assign(running.name, running.axes, Op("+", (running, Op("*", (moved, counts.share))))))
            self._means[terms] = _Mean(running, step, moved)
        return self._means[terms]

    def keep(self, member: _AccumulatedFunc, node: ex.Reduce, env: dict[str, Tile]) -> dict[ex.Expr, Tile]:
        """Keep the mean of a member's terms; return the values after the loop: of the sum, and of the Func if that is the mean."""
        d = member.definition
        mean, counts = self.mean(self._plain(node.arg), env, d.name, str(d)), self.counts()
        some = Op(">", (counts.before, Const(0.0)))
        found: dict[ex.Expr, Tile] = {node: Op("*", (mean.running, counts.before))}
        if averaged(d.expr, node.labels, self.l.algorithm) is not None:  # of no elements it is 0 / 0
            found[d.expr] = Op("where", (some, mean.running, Op("/", (mean.running, counts.before))))
        return found

    def record(self, member: _AccumulatedFunc, node: ex.Reduce, env: dict[str, Tile]) -> None:
        """Let the terms of this step deviate from its own mean."""
        d, step = member.definition, self.mean(self._plain(node.arg), env, member.definition.name).step
        whole = step
        for label in node.labels:
            whole = Op("*", (whole, Size(label)))
        values: dict[ex.Expr, Tile] = {node: whole}
        if averaged(d.expr, node.labels, self.l.algorithm) is not None:
            values[d.expr] = step
        self.s.inner.record((d.name, member.index), self.l.tile(d.expr, env, self.s.inner, values))
        self.s.r.unfinished[d.name] = tuple(self.s.bound)

    def repair(self, found: tuple[Repair, ...], env: dict[str, Tile]) -> tuple[list[Tile], tuple[tuple[float, str, str], ...]]:
        """Return what a sum gains as its means move, and the same for two parts of the loop: (factor, mean, mean)."""
        gains: list[Tile] = []
        of: list[tuple[float, str, str]] = []
        for r in found:
            one, two = self.mean(r.first, env, "term_mean"), self.mean(r.second, env, "term_mean")
            gains.append(gain(r.factor, one.moved, two.moved, self.counts().weight))
            of.append((r.factor, one.running.name, two.running.name))
        return gains, tuple(of)

    def _accumulator(self, wish: str, axes: tuple[Axis, ...], origin: str, count: str = "") -> Local:
        name = self.s.inner.fresh(wish, self.s.outer)
        self.s.outer.reserve(name)
        self.s.outer.body.append(Accumulator(name, axes, 0.0, origin, mean_of=count))
        return Local(name, axes)


def gain(factor: float, first: Tile, second: Tile, weight: Tile) -> Tile:
    """Return ``factor * first * second * weight``; multiplied from the right, so that a mean's square does not overflow where the weight is 0."""
    found = Op("*", (first, Op("*", (second, weight))))
    return found if factor == 1 else Op("*", (found, Const(factor)))


def _elements(axis: Axis) -> Tile:
    """Return how many elements of the extent a tile has."""
    if axis.tile == WHOLE:
        return Size(axis.label)
    return Op("min", (Op("-", (Size(axis.label), Start(axis))), Step(axis)))
