"""Lower reductions: at once over whole extents, or by a loop that several reductions may share.

A Func that reduces over the loop it is fused into is accumulated by that loop. Another accumulator of the loop may depend on its running
value by degree j (algebra/rules/exponentials/shift_degree.py). The partial result of that accumulator is then multiplied by ``exp(j * (new - old))``
whenever the running value changes: the online softmax, for any program of that form. Sums relative to running means are repaired by
running_means.py.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from ...algebra.rules.exponentials.shift_degree import Degree, degree, degree_of
from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ...lang.errors import DTError
from ...lang.schedule import WRITTEN
from ..ir import nest
from ..ir.layout import preferred_dim_order
from ..ir.nest import WHOLE, Accumulator, Assign, Axis, Index, Local, Loop, Op, Tile, TileDot
from ..ir.value_type import value_type
from .memory_sums import add_in_memory
from .merged_labels import grouped
from .reduction_terms import COMBINE, NEUTRAL, accumulates_in_registers, broadcast_over, fits_matrix_units, guarded, key, place_of, reduced
from .running_means import RunningMeans
from .scans import memory_order, position
from .scope import Scope

if TYPE_CHECKING:
    from .lowering import _Lowering


@dataclass
class _AccumulatedFunc:
    """A Func that a loop accumulates."""

    definition: Definition
    nodes: tuple[ex.Expr, ...]
    env: dict[str, Tile]
    index: tuple[Tile, ...]


@dataclass
class _RunningValue:
    """The running value of a member that others in the loop depend on, before and after this step."""

    before: Tile
    after: Tile


class Reducer:
    """Lowers the reductions of one kernel."""

    def __init__(self, lowering: _Lowering):
        self.l = lowering
        self.unfinished: dict[str, tuple[str, ...]] = {}  #: Func whose running value others of its loop use -> labels of the loop

    def inlined(self, expr: ex.Expr, but: Container[str]) -> ex.Expr:
        """Inline the fused Funcs that ``expr`` uses, except those named in ``but``."""

        def change(node: ex.Expr) -> ex.Expr:
            if isinstance(node, ex.Access) and self._is_inlined(node.tensor, but):
                d = self.l.algorithm[node.tensor]
                return self.inlined(ex.substitute(d.expr, dict(zip(d.labels, node.index))), but)
            return node

        return expr.transform(change)

    def _is_inlined(self, func: str, but: Container[str]) -> bool:
        if func not in self.l.fused or func not in self.l.algorithm or func in but or func in self.l.elsewhere:
            return False
        return not isinstance(self.l.algorithm[func].expr, ex.Scan)

    def looked_through(self, expr: ex.Expr, but: Container[str]) -> tuple[Definition, ...]:
        """Return the Funcs that ``inlined`` inlines, each once, after those that it uses itself.

        In a chain of Funcs that each read the one before twice, the inlined expression has 2^n nodes.
        """
        found: dict[str, Definition] = {}

        def look(e: ex.Expr) -> None:
            for func in dict.fromkeys(a.tensor for a in ex.accesses(e)):
                if func not in found and self._is_inlined(func, but):
                    look(self.l.algorithm[func].expr)
                    found[func] = self.l.algorithm[func]

        look(expr)
        return tuple(found.values())

    def nodes(self, expr: ex.Expr, but: Container[str]) -> Iterator[ex.Expr]:
        """Yield the nodes of ``expr`` and of the Funcs that ``inlined`` inlines, each Func once."""
        yield from expr.walk()
        for d in self.looked_through(expr, but):
            yield from d.expr.walk()

    def used(self, expr: ex.Expr, names: Container[str]) -> tuple[str, ...]:
        """Return which Funcs named in ``names`` the terms ``expr`` use, by themselves or through fused Funcs."""
        return tuple(dict.fromkeys(n.tensor for n in self.nodes(expr, names) if isinstance(n, ex.Access) and n.tensor in names))

    def degree(self, expr: ex.Expr, name: str, but: Container[str]) -> Degree | None:
        """Return the degree of ``expr`` in the Func ``name``, looking through fused Funcs except those named in ``but``."""
        known: dict[str, Degree | None] = {name: Degree(plus=Fraction(1))}
        for d in self.looked_through(expr, but):
            known[d.name] = degree_of(d, known)
        return degree(expr, known)

    def check_finished(self, d: Definition) -> None:
        """Raise DTError where ``d`` would be stored while it still depends on an unfinished accumulator of the enclosing loop."""
        for name in self.used(d.expr, self.unfinished) if self.unfinished else ():
            found = self.degree(d.expr, name, self.unfinished)
            if found is None or not found.free:
                over = ", ".join(self.unfinished[name])
                said = [p for word in WRITTEN for p in self.l.schedule.of(d.name, word)]
                raise DTError(
                    "a stored Func is made from finished reductions",
                    found=f"{d.name}, by {name}, in the loop over {over} that {name} is reduced by",
                    allowed=f"tensorize({over}:0), or {d.name} stored by another kernel",
                    at=next((p.pos for p in said), d.pos),
                )

    def reductions(self, d: Definition, env: dict[str, Tile], scope: Scope) -> dict[ex.Expr, Tile]:
        """Return the value of each reduction in ``d``; loops are emitted into ``scope``."""
        groups: dict[tuple[str, ...], list[ex.Reduce | ex.Dot]] = {}
        for node in _outermost(d.expr):
            groups.setdefault(node.labels, []).append(node)
        results: dict[ex.Expr, Tile] = {}
        for labels, nodes in groups.items():
            nodes = list(dict.fromkeys(nodes))
            if part := self._own_block(d, labels):
                results |= self._without_loop(d, (part,), nodes, env, scope)
            elif all(self.l.tile_size(d.name, label) == WHOLE for label in grouped(labels, self.l.merged)):
                axes = tuple(self.l.whole_axis(label, env.values()) for label in grouped(labels, self.l.merged))
                results |= self._without_loop(d, axes, nodes, env, scope)
            else:
                results |= self._by_loop(d, labels, tuple(nodes), env, scope)
        return results

    def _own_block(self, d: Definition, labels: tuple[str, ...]) -> Axis | None:
        """Return the block axis of the reduced label, where ``d`` is the partial sum of each block (partial_sums.py)."""
        counts = [self.l.counted[x] for x in d.labels if x in self.l.counted]
        return self.l.blocked.get(labels[0]) if any(labels == (other,) for other, _ in counts) else None

    # -- at once --------------------------------------------------------------------------------------------------

    def _without_loop(
        self, d: Definition, axes: tuple[Axis, ...], nodes: list[ex.Reduce | ex.Dot], env: dict[str, Tile], scope: Scope
    ) -> dict[ex.Expr, Tile]:
        env = {**env, **self._bound(axes)}
        for axis in axes:
            for label in self.l.merged.get(axis.label, (axis.label,)):
                self.l.place(d.name, label, env, scope)
        found: dict[ex.Expr, Tile] = {}
        for node in nodes:
            terms = self.terms(node, env, scope, axes)
            kind = self.kind(d, node)
            found[node] = terms if isinstance(terms, TileDot) else place_of(kind, reduced(kind, terms, axes))
        return found

    def _bound(self, axes: tuple[Axis, ...]) -> dict[str, Tile]:
        """Return the indices of the labels of ``axes``, and of the labels that merged ones stand for."""
        return {label: at for a in axes for label, at in {a.label: position(a, a.label in self.l.reversed), **self.l.parts(a.label, a)}.items()}

    def terms(self, node: ex.Expr, env: dict[str, Tile], scope: Scope, axes: tuple[Axis, ...]) -> Tile:
        """Return the terms of a reduction: a TileDot, or elementwise terms that are neutral outside the extents."""
        if isinstance(node, ex.Dot):
            left, right = (self.l.tile(side, env, scope, {}) for side in (node.left, node.right))
            if fits_matrix_units(left, right, axes):
                over = tuple(a for a in axes if not a.scalar)
                return TileDot(guarded(left, axes, 0.0), guarded(right, axes, 0.0), over, self.l.operand_types.of(node))
            return guarded(broadcast_over(Op("*", (left, right)), axes, 0.0), axes, 0.0)
        assert isinstance(node, ex.Reduce)
        neutral = NEUTRAL[node.kind]
        terms = self.l.tile(node.arg, env, scope, {})
        if node.kind in ex.PLACES:
            terms = key(node.kind, terms, tuple(env[label] for label in node.labels), node.labels)
        return guarded(broadcast_over(terms, axes, neutral), axes, neutral)

    def kind(self, d: Definition, node: ex.Expr) -> str:
        """Return sum, max, min, or shift: a maximum that need not propagate NaN because it is only used as a guarded shift."""
        kind = node.kind if isinstance(node, ex.Reduce) else "sum"
        return (
            "shift"
            if kind == "max" and d.expr == node and d.name not in self.l.outputs and _only_shifts(self.l.algorithm, d.name)
            else kind
        )

    def can_follow(self, name: str, node: ex.Expr, but: Container[str]) -> bool:
        """Return whether a sum does not depend on ``name``, or can be rescaled when that changes. Funcs named in ``but`` are not looked through."""
        found = self.degree(node, name, but)
        return found is not None and (found.free or not found.plus and found.times < 0)

    # -- by a loop ------------------------------------------------------------------------------------------------

    def _by_loop(
        self, d: Definition, labels: tuple[str, ...], nodes: tuple[ex.Expr, ...], env: dict[str, Tile], scope: Scope
    ) -> dict[ex.Expr, Tile]:
        members = [*self._funcs_in_loop(d, labels, env, scope), _AccumulatedFunc(d, nodes, env, ())]
        asked = self.l.schedule.names(d.name, "reorder")
        ordered = tuple(sorted(labels, key=lambda label: asked.index(label) if label in asked else len(asked)))
        scopes, axes = self._open(d, grouped(ordered, self.l.merged), env, scope)
        inner = scopes[-1]
        bound = self._bound(axes)
        step = _Step(self, members, axes, scope, inner, bound)
        for member in members:
            step.accumulate(member)
        step.close()
        self._close_loops(scopes, axes, scope, [m.definition.name for m in reversed(members)])
        for member in members:
            self.unfinished.pop(member.definition.name, None)
        results: dict[ex.Expr, Tile] = {}
        for member in members:
            finished = step.finished(member)
            if member.definition is d:
                results = finished
            else:
                value = self.l.tile(member.definition.expr, member.env, scope, finished)
                self.l.define(member.definition, member.index, value, scope)
        return results

    def _open(self, d: Definition, labels: tuple[str, ...], env: dict[str, Tile], scope: Scope) -> tuple[list[Scope], tuple[Axis, ...]]:
        """Open a scope for each loop, outermost first; also return the axes of all labels (whole ones have no loop)."""
        scopes: list[Scope] = []
        axes: list[Axis] = []
        for label in labels:
            tile = self.l.tile_size(d.name, label)
            if tile == WHOLE:
                axes.append(self.l.whole_axis(label, env.values()))
                continue
            inner = (scopes[-1] if scopes else scope).child()
            axis = Axis(inner.fresh(label), label, tile, exact=tile == 1)
            inner.open(axis)
            inner.reserve(axis.name)
            inner.body.append(Index(axis, "loop"))
            scopes.append(inner)
            axes.append(axis)
        return scopes, tuple(axes)

    def _close_loops(self, scopes: list[Scope], axes: tuple[Axis, ...], scope: Scope, members: list[str]) -> None:
        looped = [a for a in axes if a.tile != WHOLE]
        for i in reversed(range(len(scopes))):
            outer = scopes[i - 1] if i else scope
            options = next(filter(None, (self.l.options.loop_options(m, looped[i].label) for m in members)), ())
            outer.body.append(Loop(looped[i], "extent", tuple(scopes[i].body), reduces=True, options=options))

    def _funcs_in_loop(self, d: Definition, labels: tuple[str, ...], env: dict[str, Tile], scope: Scope) -> list[_AccumulatedFunc]:
        """Return the Funcs fused into this loop (or into a loop that shares it) that reduce over exactly its labels."""
        found: list[str] = [d.name]
        for name in found:
            for g in self.l.algorithm.definitions:
                reduces = {n.labels for n in _outermost(g.expr)}
                if (
                    self.l.fused.get(g.name, ("", ""))[0] == name
                    and self.l.fused[g.name][1] in labels
                    and reduces == {labels}
                    and g.name not in self.l.added
                    and self.l.bound_index(g, env) is not None
                ):
                    found += [g.name] if g.name not in found else []
        members = []
        for g in self.l.algorithm.definitions:
            if g.name in found[1:]:
                index = self.l.bound_index(g, env)
                assert index is not None
                if scope.find((g.name, index)) is None:
                    own = dict(zip(g.labels, index))
                    members.append(_AccumulatedFunc(g, tuple(dict.fromkeys(_outermost(g.expr))), own, index))
        return members


class _Step:
    """One iteration of a reduction loop: the update of each accumulator."""

    def __init__(
        self, reducer: Reducer, members: list[_AccumulatedFunc], axes: tuple[Axis, ...], outer: Scope, inner: Scope, bound: dict[str, Tile]
    ):
        self.r, self.l = reducer, reducer.l
        self.members, self.axes, self.outer, self.inner, self.bound = members, axes, outer, inner, bound
        self.shared = {m.definition.name for m in members[:-1]}
        self.running: dict[str, _RunningValue] = {}
        self.results: dict[str, dict[ex.Expr, Tile]] = {}
        self.late: list[Assign] = []
        self.moving: dict[str, str] = {}  #: Func -> its accumulator, where the Func is just that
        self.means = RunningMeans(self)

    def accumulate(self, member: _AccumulatedFunc) -> None:
        """Emit the accumulators of ``member`` and their update in one step."""
        name = member.definition.name
        watched = any(name in self._depends(m) for m in self.members if m is not member)
        results: dict[ex.Expr, Tile] = {}
        after: dict[ex.Expr, Tile] = {}
        env = {**member.env, **self.bound}
        for label in self.bound:
            self._place_plain(name, label, env)
        for node in member.nodes:
            if isinstance(node, ex.Reduce) and self.means.keeps(member, node, watched):
                results |= self.means.keep(member, node, env)
                if watched:
                    self.means.record(member, node, env)
                continue
            kind = self.r.kind(member.definition, node)
            terms = self.r.terms(node, env, self.inner, self.axes)
            repairs = self.means.repairs(member, node)
            gains, relative = self.means.repair(repairs or (), env)
            moves = self._rescaling_degrees(member, node, kind) if repairs is None else []
            factors = [self._rescaling_factor(*move) for move in moves]
            inner = any(isinstance(n, ex.Dot) and n != node for n in self.r.nodes(node, self.shared))  # its accumulator is in registers already
            at_end = not (watched or factors or gains or inner) and (not isinstance(node, ex.Dot) or accumulates_in_registers(terms, self.l.options.warps))
            if not (at_end or isinstance(terms, TileDot)):
                terms = reduced(kind, terms, self.axes)
            acc = self._accumulator(member, node, kind, terms, at_end, tuple((self.moving.get(f, ""), times) for f, times in moves), relative)
            older: Tile = acc
            for factor in factors:
                older = Op("*", (older, factor))
            for gain in gains:
                older = Op("+", (older, gain))
            new = Op(COMBINE[kind], (older, terms))
            if watched:
                after[node] = self.l.let(f"{acc.name}_next", new, self.inner, order=acc.axes)
                self.late.append(Assign(acc.name, acc.axes, after[node]))
            else:
                self.inner.body.append(Assign(acc.name, acc.axes, new))
            results[node] = place_of(kind, reduced(kind, acc, self.axes) if at_end else acc)
            if member.definition.expr == node:
                self.moving[name] = acc.name
        self.results[name] = results
        if watched and name not in self.means.moving:
            self._run(member, results, after, env)

    def close(self) -> None:
        """End the step: running values take their new values."""
        self.inner.body += self.late

    def finished(self, member: _AccumulatedFunc) -> dict[ex.Expr, Tile]:
        """Return the reductions of ``member`` after the loop."""
        return self.results[member.definition.name]

    def _place_plain(self, func: str, label: str, env: dict[str, Tile]) -> None:
        for d in self.l.algorithm.definitions:
            if self.l.fused.get(d.name) == (func, label) and d.name in self.l.added:
                add_in_memory(self.l, d, env, self.inner)
            elif self.l.fused.get(d.name) == (func, label) and d.name not in self.shared:
                index = self.l.bound_index(d, env)
                if index is not None and not self._depends_on_later_member(d):
                    varies = d.name not in self.l.outputs or set(d.labels) & set(self.bound)
                    self.l.realize(d.name, index, self.inner if varies else self.outer)  # an output is stored even if nothing is summed

    def _depends_on_later_member(self, d: Definition) -> bool:
        """Return whether ``d`` depends on a member of this loop that has not been accumulated yet."""
        return any(name not in self.results for name in self.r.used(d.expr, self.shared))

    def _accumulator(
        self,
        member: _AccumulatedFunc,
        node: ex.Expr,
        kind: str,
        terms: Tile,
        partial: bool,
        moves: tuple[tuple[str, Fraction], ...],
        relative: tuple[tuple[float, str, str], ...],
    ) -> Local:
        d = member.definition
        alone = len(member.nodes) == 1
        wish = d.name if d.expr == node and d.name != self.l.root and not partial else f"{d.name}_{'acc' if alone else kind}"
        axes = nest.axes_of(terms)
        places = {**member.env, **self.bound}
        order = memory_order([places[label] for label in (*d.labels, *self.bound) if label in places])
        ordered = preferred_dim_order(terms) if partial else nest.in_order(axes, order)  # the order of the terms, so that no step transposes them
        name = self.inner.fresh(wish, self.outer)
        self.outer.reserve(name)
        self.outer.body.append(Accumulator(name, ordered, NEUTRAL[kind], str(d), COMBINE[kind], moves, partial and isinstance(node, ex.Dot), repairs=relative))
        return Local(name, ordered, value_type(terms) if kind in ex.PLACES else "number")

    # -- running values that change during the loop -----------------------------------------------------------------

    def _depends(self, member: _AccumulatedFunc) -> set[str]:
        """Return the members of the loop whose running value enters the terms of ``member``."""
        return {name for node in member.nodes for name in self.r.used(node, self.shared)}

    def _run(self, member: _AccumulatedFunc, before: dict[ex.Expr, Tile], after: dict[ex.Expr, Tile], env: dict[str, Tile]) -> None:
        d = member.definition
        new = self.l.tile(d.expr, env, self.inner, after)
        old = self.l.tile(d.expr, env, self.inner, before)
        if isinstance(d.expr, ex.Reduce) and self.r.kind(d, d.expr) == "max":  # sums relative to -inf would be NaN before the first element
            seen = Op("where", (Op(">", (new, nest.Const(-math.inf))), new, nest.Const(0)))
            self.inner.record((d.name, member.index), seen)
        else:
            self.inner.record((d.name, member.index), new)
        self.running[d.name] = _RunningValue(old, new)
        self.r.unfinished[d.name] = tuple(self.bound)

    def _rescaling_degrees(self, member: _AccumulatedFunc, node: ex.Expr, kind: str) -> list[tuple[str, Fraction]]:
        """Return each Func whose changes rescale an accumulator, with the accumulator's degree in it."""
        moves = []
        for name in self.r.used(node, self.shared):
            found = self.r.degree(node, name, self.shared)
            if found is not None and found.free and name not in self.means.moving:
                continue
            if found is None or found.plus or found.times >= 0 or kind != "sum" or name in self.means.moving:
                raise DTError(
                    "a Func fused into the loop it reduces over is used there before it is finished, and the sum cannot be repaired",
                    found=f"{(said := self._name_in_schedule(name, member))} in {member.definition.name}",
                    allowed=f"{said} fused outside the loop over {', '.join(self.bound)}",
                    at=member.definition.pos,
                )
            moves.append((name, found.times))
        return moves

    def _name_in_schedule(self, name: str, user: _AccumulatedFunc) -> str:
        """Return the Func that a schedule may name for ``name``: a derived Func belongs to the one it was derived from."""
        at = self.l.algorithm[name].pos
        found = [d.name for d in self.l.algorithm.definitions if at is not None and d.pos == at and d is not user.definition]
        return found[-1] if found else name

    def _rescaling_factor(self, name: str, times: Fraction) -> Tile:
        """Return exp(times * (new - old)), shared by all accumulators of that degree; 0 before the first element."""
        run = self.running[name]
        key = ("moved", name, times)
        known = self.inner.find(key)
        if known is None:
            known = self.l.let(f"{name}_rescale", rescale(run.before, run.after, times), self.inner)
            self.inner.record(key, known)
        return known


def rescale(before: Tile, after: Tile, times: Fraction) -> Tile:
    """Return exp(times * (after - before)) for a value that only grows; 0 before the first element."""
    safe = Op("where", (Op(">", (after, nest.Const(-math.inf))), after, nest.Const(0)))
    difference: Tile = Op("-", (before, safe))
    if times != -1:
        difference = Op("*", (difference, nest.Const(float(-times))))
    return Op("exp", (difference,))


def _outermost(expr: ex.Expr) -> list[ex.Reduce | ex.Dot]:
    """Return the reductions in ``expr`` that are not inside another one."""
    if isinstance(expr, (ex.Reduce, ex.Dot)):
        return [expr]
    return [node for child in expr.children() for node in _outermost(child)]


def _only_shifts(algorithm: Algorithm, name: str) -> bool:
    """Return whether every use of a Func is ``where(f > -inf, f, 0)``."""
    uses = guarded = 0
    for node in (n for d in algorithm.definitions for n in d.expr.walk()):
        uses += isinstance(node, ex.Access) and node.tensor == name
        match node:
            case ex.Call("where", (ex.Binary(">", ex.Access(a, _) as left, _), ex.Access() as right, _)) if a == name and left == right:
                guarded += 2
    return uses == guarded > 0
