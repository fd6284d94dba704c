"""Lower an algorithm and its schedule to a Kernel (a loop nest).

One Func is the root of the kernel: its blocks are the programs. Every Func fused into it is computed where it is first needed, at or inside
the loop that ``fuse_at`` names. A Func that reduces over the very loop it is fused into is accumulated by that loop (reductions.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

from ...algebra.joined_slices import JoinedSlices, joined_slices
from ...algebra.operand_types import OperandTypes
from ...algebra.rearrangement import rearrangement
from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ...lang.errors import DTError
from ...lang.extents.index_bounds import size_of_dimension, stays_inside
from ...lang.schedule import Program, Sizes, host
from ...lang.schedule_checks import reduction_labels
from ..ir import nest
from ..ir.integer_math import arithmetic, block_is_in_one_group, quotient
from ..ir.nest import (
    WHOLE,
    Axis,
    Index,
    Kernel,
    Let,
    Local,
    Loop,
    Op,
    Position,
    Start,
    Statement,
    Store,
    Tile,
)
from ..ir.value_type import is_integer, value_type, whole_quotient
from ..powers_of_two import next_power_of_two
from ..prelower.kernel_partition import stored_funcs
from ..prelower.stage_aligned_copies import is_shift
from .memory_sums import add_in_memory, additions, single_elements_past
from .merged_labels import grouped, parts_of
from .reduction_terms import MIN_DOT
from .reductions import Reducer
from .scans import axis_of, index_axes, lower_scan, memory_order, position, reversed_labels, scans_of, spans
from .schedule_options import KernelOptions
from .scope import Scope


def lower_kernel(program: Program, options: KernelOptions, once_a_block: bool = True) -> Kernel:
    """Return the loop nest of the kernel of ``options.root`` before any pass. Raises DTError where the schedule does not fit."""
    return _Lowering(program, options, once_a_block).kernel()


def check_unused_in_kernel(program: Program, options: KernelOptions) -> None:
    """Raise DTError for a statement that has no effect on the kernel of ``options.root``."""
    _Lowering(program, options).check_unused_statements()


class _Lowering:
    """The state of lowering one kernel."""

    def __init__(self, program: Program, options: KernelOptions, once_a_block: bool = True):
        self.once_a_block = once_a_block  #: an element that is the same for a whole block is loaded once
        self.algorithm: Algorithm = program.algorithm
        self.schedule = program.schedule
        self.fused = self.schedule.fused()
        self.options, self.root = options, options.root
        root = self.root
        written = tuple(dict.fromkeys((*program.outputs(), *stored_funcs(program))))
        self.elsewhere = frozenset(o for o in stored_funcs(program) if host(o, self.fused) != root)  #: fused into another kernel, read from memory here
        self.outputs = tuple(o for o in written if o == root or (o in self.fused and host(o, self.fused) == root))
        moved = ((o, rearrangement(self.algorithm[o], self.algorithm)) for o in self.outputs if o != root)
        self.rearranged = {o: r.places for o, r in moved if r and r.source == root and r.interleaves}  #: outputs that are the root in other places
        joined = {o: joined_slices(self.algorithm[o], self.algorithm) for o in self.outputs if o != root}
        self.joined = {o: j for o, j in joined.items() if j and all(s == root or s in self.fused and host(s, self.fused) == root for s in j.sources)}  #: Funcs of which this kernel computes all slices
        readers = {d.name for d in self.algorithm.definitions if any(a.tensor == root for a in ex.accesses(d.expr))}
        self.stores_root = root in written or not (self.rearranged or self.joined) or not readers <= {*self.rearranged, *self.joined}
        self.stored: list[str] = []
        self.tiled: dict[str, dict[str, int]] = {}  #: label -> Func whose schedule sets the tile -> tile
        self.blocks = self.schedule.sizes(root, "block")
        self.merged = {name: parts for m in options.members for name, parts in self.schedule.merged(m).items()}
        self.operand_types = OperandTypes(self.algorithm)
        self.integers, self.integer_inputs = self.algorithm.integer_scalars(), self.algorithm.integer_tensors()
        self.whole: dict[str, list[Axis]] = {}
        self.counted = {label: (other, size) for label, other, size in program.counted}
        self.added = {a.func: a for a in program.accumulated if a.host == root}  #: sums that this kernel adds to in memory
        self.summed = frozenset(name for name, _ in program.pieces.sums) if program.pieces else frozenset()  #: read from memory by their own kernel
        self.blocked: dict[str, Axis] = {}  #: label of the output -> its axis, where one tile is the whole block
        self.scanned = scans_of(self.algorithm, options.members)
        self.reversed = reversed_labels(self.algorithm, options.members, lambda func, label: self.tile_size(func, label) == WHOLE)
        self.top = Scope(reserved=self.algorithm.scalars)
        self.reducer = Reducer(self)

    # -- the kernel, step by step ---------------------------------------------------------------------------------

    def kernel(self) -> Kernel:
        """Open the loops, compute the Funcs fused in them, and store the results."""
        definition = self.algorithm[self.root]
        self._levels(definition, grouped(self._loop_order(definition), self.merged), {}, self.top)
        missing = set(self.outputs) - set(self.stored)
        if missing:
            raise DTError("an output is computed over all its labels", found=f"{min(missing)} is not, where it is fused",
                          allowed="fuse_at a loop inside which its labels are bound", at=self.schedule.of(min(missing), "fuse_at")[0].pos)  # fmt: skip
        body = additions(tuple(self.top.body), self.added, self.algorithm)
        self.options.check(body, self._touched(body))
        writes = tuple(dict.fromkeys((*((self.root,) if self.stores_root else ()), *self.stored)))
        return Kernel(self.root, self.root, (), writes, (), (), (), body, merged=tuple(self.merged.items()), **self.options.launch_fields())

    def _touched(self, body: tuple[Statement, ...]) -> frozenset[str]:
        """Return the buffers that the body reads or writes."""
        loads = {s.value.buffer for s in nest.statements(body) if isinstance(s, Let) and isinstance(s.value, nest.Load)}
        return frozenset(loads | {s.buffer for s in nest.statements(body) if isinstance(s, Store)})

    def _loop_order(self, definition: Definition) -> tuple[str, ...]:
        """Return the labels of the output in the order of their loops, slowest first: those that ``reorder`` names, then the rest."""
        asked = self.schedule.names(self.root, "reorder")
        for i, label in enumerate(asked):
            inside = next((a for a in asked[i + 1 :] if a in definition.labels and self._has_loop(a)), None)
            if label not in definition.labels and inside:
                raise DTError("a reduction is finished before the loops of the output go on",
                              found=f"reorder: {label} outside the loop over {inside}",
                              allowed=f"tensorize({inside}:0), or {inside} before {label}",
                              at=self.schedule.of(self.root, "reorder")[-1].pos)  # fmt: skip
        named = tuple(a for a in asked if a in definition.labels)
        along = {d.expr.label for d in self.scanned} & set(definition.labels) - set(named)  # type: ignore[attr-defined]
        if along:  # what is carried is carried by the innermost loop
            return named + tuple(sorted((x for x in definition.labels if x not in named), key=lambda x: x in along))
        rest = tuple(label for label in definition.labels if label not in named)
        return named + (tuple(sorted(rest, key=self._has_loop)) if self._repeats_sums(rest) else rest)

    def _repeats_sums(self, labels: tuple[str, ...]) -> bool:
        """Return whether a sum fused at a label without a loop would be computed anew by each iteration of a loop over a label before it, which it lacks."""
        for d in self.algorithm.definitions:
            root, at = self.fused.get(d.name, ("", ""))
            if root == self.root and at in labels and not self._has_loop(at) and reduction_labels(self.algorithm, d.name):
                if any(label not in d.labels and self._has_loop(label) for label in labels[: labels.index(at)]):
                    return True
        return False

    def _has_loop(self, label: str) -> bool:
        """Return whether an output label is advanced by a loop inside the block."""
        tile, block = self.tile_size(self.root, label), self.blocks.get(label)
        return tile not in (WHOLE, block)

    def _levels(self, definition: Definition, labels: tuple[str, ...], env: dict[str, Tile], scope: Scope) -> None:
        """Open nested loops over ``labels`` and store the result in the innermost one."""
        if not labels:
            value = self.compute(definition, env, scope)
            if any(self.root in self.algorithm.needed_by((o,)) for o in self.outputs if o != self.root):
                value = self.let(self.root, value, scope, str(definition), tuple(i.axis for i in env.values() if isinstance(i, Position)))
                scope.record((self.root, tuple(env[label] for label in definition.labels)), value)
            if self.stores_root:
                self._store(definition, env, value, scope)
            self._other_outputs(env, scope)
            return
        axis, within = self._output_axis(labels[0], scope)
        inner = scope.child() if within else scope
        inner.open(axis)
        env = {**env, labels[0]: position(axis, labels[0] in self.reversed), **self.parts(labels[0], axis)}
        if within:
            inner.reserve(axis.name)
            inner.body.append(Index(axis, "block+loop" if within == "block" else "loop"))
        for label in self.merged.get(labels[0], labels[:1]):
            self.place(definition.name, label, env, inner)
        self._levels(definition, labels[1:], env, inner)
        if within:
            scope.body.append(Loop(axis, within, tuple(inner.body), options=self.options.loop_options(definition.name, labels[0])))

    def parts(self, label: str, axis: Axis) -> dict[str, Tile]:
        """Return the indices of the labels that a merged one stands for; nothing for any other."""
        return parts_of(axis, self.merged[label]) if label in self.merged else {}

    def _other_outputs(self, env: dict[str, Tile], scope: Scope) -> None:
        """Compute the outputs that nothing in this kernel uses last, when the reductions they need are finished."""
        for d in self.algorithm.definitions:
            if d.name in self.added:
                add_in_memory(self, d, env, scope)
            elif d.name in self.rearranged:
                self._store_rearranged(d, env, scope)
            elif d.name in self.joined:
                self._store_slices(d, self.joined[d.name], env, scope)
            elif d.name in self.outputs and d.name not in self.stored and (index := self.bound_index(d, env)) is not None:
                self.realize(d.name, index, scope)

    def _output_axis(self, label: str, scope: Scope) -> tuple[Axis, str]:
        """Return the axis of an output label and the range of its loop: the block, the extent, or '' for no loop."""
        tile, block = self.tile_size(self.root, label), self.blocks.get(label)
        if block is None and tile == WHOLE:
            return self.whole_axis(label), ""
        name = scope.fresh(label, self.top if block is not None else None)  # the index of a block is defined outside every loop
        if block is None:
            return Axis(name, label, tile, exact=tile == 1), "extent"
        asked, tile = tile, tile or block
        wider = next_power_of_two(block)
        padded = block < tile and (tile <= MIN_DOT or tile == wider)
        if not padded and tile != block and (tile > block or block % tile or tile & (tile - 1)):
            raise DTError(
                "a block is a whole number of tiles",
                found=f"{label}: block {block}, tile {asked or f'{tile} (all of the block)'}",
                allowed=f"all of it, a power of two that divides {block}, or, padded, {max(wider, MIN_DOT)}",
                at=self.schedule.of(self.root, "block")[-1].pos,
            )
        axis = Axis(name, label, tile, exact=block == 1 and not padded, padded=padded)
        if tile == block or padded:
            self.top.reserve(name)
            self.top.open(axis)
            self.top.body.append(Index(axis, "block"))
            self.blocked[label] = axis
            return axis, ""
        return axis, "block"

    def _store(self, definition: Definition, env: dict[str, Tile], value: Tile, scope: Scope) -> None:
        index = tuple(env[label] for label in definition.labels)
        axes = tuple(a for a in memory_order(index) if not a.scalar)
        onto = ""
        if isinstance(definition.expr, ex.Write):
            index, onto = self._written_index(definition.expr, env, scope), "elements"
        scope.body.append(Store(definition.name, index, value, axes, str(definition), onto))
        self.stored.append(definition.name)

    def _store_rearranged(self, d: Definition, env: dict[str, Tile], scope: Scope) -> None:
        """Store the value of the root where ``d`` holds it."""
        value = self._root_value(tuple(env[label] for label in self.algorithm[self.root].labels), scope)
        index = tuple(self.index_of(self.rearranged[d.name][label], env, scope) for label in d.labels)
        axes = tuple(a for a in memory_order(index) if not a.scalar)
        scope.body.append(Store(d.name, index, value, axes, str(d), "elsewhere"))
        self.stored.append(d.name)

    def _store_slices(self, d: Definition, joined: JoinedSlices, env: dict[str, Tile], scope: Scope) -> None:
        """Store each of the Funcs that ``d`` holds one after another in its place."""
        for source in joined.sources:
            own = self.bound_index(self.algorithm[source], env)
            if own is None:
                return
            value = self._root_value(own, scope) if source == self.root else self.realize(source, own, scope)
            place = self.index_of(joined.place(source), env, scope)
            index = tuple(place if label == joined.label else i for label, i in zip(d.labels, own))
            axes = tuple(a for a in memory_order(index) if not a.scalar)
            scope.body.append(Store(d.name, index, value, axes, str(d), "elsewhere"))
        self.stored.append(d.name)

    def _written_index(self, write: ex.Write, env: dict[str, Tile], scope: Scope) -> tuple[Tile, ...]:
        """Return the index of the element that a write changes: -1, which no store reaches, where its condition does not hold, or past an extent.

        No tile is masked along a loop over single elements, which may pass its extent; data picks an element there too.
        """
        index = tuple(self.index_of(i, env, scope) for i in write.place.index)
        past = single_elements_past(tuple(i for i in env.values() if isinstance(i, Position)))
        conditions: list[Tile] = [Op("<", (Position(a), nest.Size(a.label))) for a in past]
        conditions += [self.tile(write.condition, env, scope, {})] if write.condition is not None else []
        if not conditions:
            return index
        return (Op("where", (reduce(lambda a, b: Op("and", (a, b)), conditions), index[0], nest.Const(-1))), *index[1:])

    # -- Funcs ----------------------------------------------------------------------------------------------------

    def tile_size(self, func: str, label: str) -> int:
        """Return the tile of ``label`` in the loops of ``func``: set on it, else on its consumers, else 1.

        The root's tile takes precedence over those of consumers in another kernel, where ``func`` is computed in both.
        """
        chain = self._hosts(func)
        if self.root not in chain:
            chain.insert(1, self.root)
        func, size = next(((f, sizes[label]) for f in chain if label in (sizes := self.schedule.sizes(f, "tensorize"))), ("", 1))
        self.tiled.setdefault(label, {})[func] = size
        return size

    def check_unused_statements(self) -> None:
        """Lower, then raise DTError for an approximation of a function that is not computed, or for a tile of a loop that another Func has."""
        self.kernel()
        self.options.check_approximate(tuple(self.top.body))
        for p in (p for m in self.options.members for p in self.schedule.of(m, "tensorize", Sizes)):
            for a in p.sizes:
                used = self.tiled.get(a.label, {})
                if used and p.func not in used and a.size not in used.values():  # of parts_at, another kernel has the loop
                    of = next((f for f in used if f), self.root)
                    raise DTError("tensorize belongs to the Func whose loop it tiles", found=f"{a} of {p.func}, in the loop over {a.label} of {of}",
                                  allowed=f"{of}.tensorize({a})", at=p.pos)  # fmt: skip

    def whole_axis(self, label: str, bound: Iterable[Tile] = ()) -> Axis:
        """Return the axis over the whole extent of ``label``: one for the kernel, or another where ``bound`` indices already have that one.

        In ``d[k] = s[k, k]`` of ``s[m, l] = rsum(A[m, k] * B[l, k], k)`` the two ``k`` are not the same.
        """
        taken = {a for tile in bound for a in nest.axes_of(tile)}
        axes = self.whole.setdefault(label, [])
        found = next((a for a in axes if a not in taken), None)
        if found is None:
            found = Axis(self.top.fresh(label, self.top), label, WHOLE)
            axes.append(found)
            self.top.reserve(found.name)
            self.top.open(found)
            self.top.body.append(Index(found, "whole"))
        return found

    def place(self, func: str, label: str, env: dict[str, Tile], scope: Scope) -> None:
        """Compute the Funcs fused at the loop of ``func`` over ``label``, as far as their labels are bound there."""
        for d in self.algorithm.definitions:
            if self.fused.get(d.name) == (func, label) and d.name in self.added:
                if self.root not in self.algorithm.needed_by((d.name,)):  # else it is computed after the root, by _other_outputs
                    add_in_memory(self, d, env, scope)
            elif self.fused.get(d.name) == (func, label) and self._is_read(d.name) and not self._depends_on_inner_accumulator(d.name, env):
                index = self.bound_index(d, env)
                if index is not None:
                    self.realize(d.name, index, scope)

    def _depends_on_inner_accumulator(self, func: str, env: dict[str, Tile]) -> bool:
        """Return whether ``func`` depends on an accumulator of an inner loop of this kernel; it is then computed where it is used, after that loop."""
        fused = [name for name in self.algorithm.needed_by((func,)) if name in self.fused]
        inside = {name: self.fused[name][1] for name in fused if func not in (hosts := self._hosts(name)) and self.root in hosts}
        return any(label not in env and label in reduction_labels(self.algorithm, name) for name, label in inside.items())

    def _hosts(self, func: str) -> list[str]:
        """Return ``func``, the Func it is fused into, and so on to the root."""
        chain = [func]
        while chain[-1] in self.fused:
            chain.append(self.fused[chain[-1]][0])
        return chain

    def _is_read(self, func: str) -> bool:
        """Return whether another Func of this program reads ``func``; an output that none reads can wait."""
        return any(a.tensor == func for d in self.algorithm.definitions for a in ex.accesses(d.expr))

    def bound_index(self, d: Definition, env: dict[str, Tile]) -> tuple[Tile, ...] | None:
        """Return the index of ``d`` under ``env``, whole extents filled in; None if a label has neither."""
        index = []
        for label in d.labels:
            if label in env:
                index.append(env[label])
            elif (number := self._block_number(label)) is not None:
                index.append(number)
            elif (whole := self._within_whole_tile(d.name, label)) is not None:
                index.append(whole)
            else:
                return None
        return tuple(index)

    def _within_whole_tile(self, func: str, label: str) -> Tile | None:
        """Return the index along a label that one tile holds whole, by itself or merged with others; None where none does."""
        together = next((name for name, parts in self.merged.items() if label in parts), label)
        if self.tile_size(func, together) != WHOLE:
            return None
        axis = self.whole_axis(together)
        return self.parts(together, axis).get(label) or position(axis, label in self.reversed)

    def _block_number(self, label: str) -> Tile | None:
        """Return the value of a label that numbers the blocks of another label, where this kernel has these blocks."""
        other, size = self.counted.get(label, ("", 0))
        return Op("//", (Start(self.blocked[other]), nest.Const(size))) if other in self.blocked else None

    def realize(self, func: str, index: tuple[Tile, ...], scope: Scope) -> Tile:
        """Return the value of a fused Func at ``index``, computed here unless it is already known."""
        known = scope.find((func, index))
        if known is not None:
            return known
        definition = self.algorithm[func]
        env = dict(zip(definition.labels, index))
        value = self.compute(definition, env, scope)
        if not all(self._runs_over(label, i) or label in self.counted for label, i in zip(definition.labels, index)):
            value = self._mask_outside(definition, index, value)
        return self.define(definition, index, value, scope)

    def define(self, definition: Definition, index: tuple[Tile, ...], value: Tile, scope: Scope) -> Tile:
        """Name ``value`` after its Func, remember it, and store it if it is an output."""
        if not isinstance(value, Local):
            value = self.let(definition.name, value, scope, str(definition), memory_order(index))
        scope.record((definition.name, index), value)
        if definition.name in self.outputs and definition.name not in self.stored and self._covers_whole_func(definition, index):
            self.reducer.check_finished(definition)
            self._store(definition, dict(zip(definition.labels, index)), value, scope)
        return value

    def _covers_whole_func(self, definition: Definition, index: tuple[Tile, ...]) -> bool:
        """Return whether ``index`` covers the whole Func: each label by itself. ``f[x, x]`` is only its diagonal, ``f[x + 1]`` lacks its first element."""
        axes = [a for i in index if (a := axis_of(i)) is not None]
        alone = all(spans(i, label) or label in self.counted or self._is_part(label, i) for label, i in zip(definition.labels, index))
        return alone and len(set(axes)) == len(axes) and len(set(index)) == len(index)

    def _mask_outside(self, definition: Definition, index: tuple[Tile, ...], value: Tile) -> Tile:
        """Mask a shifted Func: outside its extents it reads 0, as an input does."""
        for label, i in zip(definition.labels, index):
            if not self._runs_over(label, i):
                inside = Op("and", (Op(">=", (i, nest.Const(0))), Op("<", (i, nest.Size(label)))))
                value = Op("where", (inside, value, nest.Const(0 if is_integer(value) else 0.0)))
        return value

    def compute(self, definition: Definition, env: dict[str, Tile], scope: Scope) -> Tile:
        """Return the value of ``definition`` with its labels bound by ``env``."""
        for label in definition.labels:
            if definition.name != self.root:
                self.place(definition.name, label, env, scope)
        if isinstance(definition.expr, ex.Scan):
            return lower_scan(self, definition, env, scope)
        reduced = self.reducer.reductions(definition, env, scope)
        return self.tile(definition.expr, env, scope, reduced)

    def _root_value(self, index: tuple[Tile, ...], scope: Scope) -> Tile:
        """Return the value of the root Func, for an output that is fused into it and computed from it."""
        known = scope.find((self.root, index))
        if known is None:
            inside = [f for f in self.fused if f in self.algorithm and host(f, self.fused) == self.root]
            user = next(f for f in inside if self.root in self.algorithm.needed_by((f,)))
            at = self.schedule.of(user, "fuse_at")[0].pos
            raise DTError("a Func is fused where what it is made from is known", found=f"{user} in {self.root}, which it uses",
                          allowed=f"{user} in a kernel of its own", at=at)  # fmt: skip
        return known

    def let(self, wish: str, value: Tile, scope: Scope, origin: str = "", order: tuple[Axis, ...] = ()) -> Local:
        """Name ``value`` in ``scope``; its dimensions follow ``order`` as far as that goes."""
        if isinstance(value, Op) and value.fn in ("~", *ex.INTEGER_OPERATORS) and value.fn != "//":
            value = Op("wide", (value,))  # arithmetic on it does not know of how many bits it is
        axes = nest.axes_of(value)
        ordered = nest.in_order(axes, order)
        name = scope.fresh(wish)
        scope.reserve(name)
        scope.body.append(Let(name, value, ordered, origin))
        return Local(name, ordered, value_type(value))

    # -- expressions ----------------------------------------------------------------------------------------------

    def tile(self, expr: ex.Expr, env: dict[str, Tile], scope: Scope, reduced: dict[ex.Expr, Tile]) -> Tile:
        """Return ``expr`` as a tile; its reductions have been computed."""
        if expr in reduced:
            return reduced[expr]

        def below(node: ex.Expr) -> Tile:
            return self.tile(node, env, scope, reduced)

        match expr:
            case ex.Const(value):
                return nest.Const(value)
            case ex.Scalar(name):
                return nest.Scalar(name, name in self.integers)
            case ex.Len(label):
                return nest.Size(label)
            case ex.Label(name):
                return env[name]
            case ex.Access(tensor, index):
                loads = not self._is_computed(tensor)
                at = tuple(self.index_of(_without_zero(i) if loads else i, env, scope) for i in index)
                checked = tuple(d for d, i in enumerate(index) if not self._is_in_range(tensor, d, i, at[d], env))
                return self._access(tensor, at, scope, checked)
            case ex.Unary("-", ex.Const(value)):
                return nest.Const(-value)
            case ex.Unary(op, arg):
                return Op({"-": "neg"}.get(op, op), (below(arg),))
            case ex.Binary(_, left, right):
                return arithmetic(expr, below(left), below(right))
            case ex.Call("clamp", (a, low, high)):
                return Op("minimum", (Op("maximum", (below(a), below(low))), below(high)))
            case ex.Call(fn, args):
                return whole_quotient(Op(fn, tuple(below(a) for a in args)))
            case ex.Write(value):
                return below(value)
            case ex.Cast(arg, "fp32"):
                return below(arg)  # values are float32 already
            case ex.Cast(arg, dtype):
                return Op(f"cast:{dtype}", (below(arg),))
        raise AssertionError(f"{type(expr).__name__} is gone before lowering")

    def _is_uniform_in_block(self, label: str, at: Tile, size: int | float) -> bool:
        """Return whether ``label / size`` is one number for a whole block; a sum over ``label`` has tiles of its own."""
        own = label in self.blocked and at == Position(self.blocked[label])
        return self.once_a_block and own and block_is_in_one_group(at, self.blocks.get(label, 0), size)

    def index_of(self, expr: ex.Expr, env: dict[str, Tile], scope: Scope) -> Tile:
        """Return an index as integer arithmetic, in which / rounds down."""
        match expr:
            case ex.Binary("/", ex.Label(label), ex.Const(size)) if self._is_uniform_in_block(label, env[label], size):
                return Op("//", (Start(env[label].axis), nest.Const(size)))  # type: ignore[attr-defined]
            case ex.Binary("/", left, right):
                return quotient(self.index_of(left, env, scope), self.index_of(right, env, scope), self.algorithm)
            case ex.Binary(_, left, right):
                return arithmetic(ex.as_value(expr), self.index_of(left, env, scope), self.index_of(right, env, scope))
            case ex.Unary("-", arg):
                return Op("neg", (self.index_of(arg, env, scope),))
            case ex.Call("where", (condition, a, b)):
                return Op("where", (self.tile(condition, env, scope, {}), self.index_of(a, env, scope), self.index_of(b, env, scope)))
        return self.tile(expr, env, scope, {})

    def _is_in_range(self, tensor: str, dim: int, index: ex.Expr, at: Tile, env: dict[str, Tile]) -> bool:
        """Return whether the masks of the axes keep ``at`` within the dimension; ``(2*x + r)/2`` is ``x``, whose extent may be another."""
        if isinstance(index, ex.Label):
            return isinstance(at, Position) or self._is_part(index.name, at)
        if not isinstance(at, Position):
            inside = all(self._is_own_position(x, env[x]) for x in ex.free_labels(index))
            return inside and (size := size_of_dimension(self.algorithm, tensor, dim)) is not None and stays_inside(self.algorithm, index, size)
        own = self._labels_of(tensor)[dim]
        return own is not None and at.axis.label in self.algorithm.tied_labels(own)

    def _labels_of(self, tensor: str) -> tuple[str | None, ...]:
        """Return, for each dimension of a tensor, the label with its extent; None where there is none."""
        return self.algorithm[tensor].labels if tensor in self.algorithm else self.algorithm.plain_labels(tensor)

    def _runs_over(self, label: str, at: Tile) -> bool:
        """Return whether ``at`` is an index along ``label``, by itself or in a loop over several labels as one."""
        return spans(at, label) or any(self._is_part(x, at) for x in self.algorithm.tied_labels(label))

    def _is_part(self, label: str, at: Tile) -> bool:
        """Return whether ``at`` is where a loop over ``label`` and others as one is along ``label``."""
        return any(at == parts_of(a, self.merged[a.label]).get(label) for a in _all_axes(at) if a.label in self.merged)

    def _is_own_position(self, label: str, at: Tile) -> bool:
        """Return whether ``at`` runs through ``label`` itself, whose mask keeps it inside its extent."""
        return isinstance(at, Position) and at.axis.label in self.algorithm.tied_labels(label) or self._is_part(label, at)

    def _is_computed(self, tensor: str) -> bool:
        """Return whether this kernel computes ``tensor``, and does not load it."""
        fused = tensor in self.fused and tensor in self.algorithm and tensor not in self.elsewhere
        return (fused or tensor == self.root) and tensor not in self.summed

    def _access(self, tensor: str, index: tuple[Tile, ...], scope: Scope, checked: tuple[int, ...]) -> Tile:
        if self._is_computed(tensor):
            return self._root_value(index, scope) if tensor == self.root else self.realize(tensor, index, scope)
        whole = tensor in self.integer_inputs
        shift = tensor in self.algorithm and is_shift(self.algorithm[tensor].expr)
        extents = tuple(self._labels_of(tensor)[d] for d in checked)
        load = nest.Load(tensor, index, checked, extents, whole=whole, shift=shift)
        known = scope.find(load)
        if known is not None:
            return known
        home = scope.defining_scope(index)
        axes = tuple(dict.fromkeys(a for i in index for a in index_axes(i)))
        name = scope.fresh(tensor, home if home is not scope else None)
        home.reserve(name)
        home.body.append(Let(name, load, axes))
        local = Local(name, axes, value_type(load))
        home.record(load, local)
        return local


def _without_zero(index: ex.Expr) -> ex.Expr:
    """Return ``x`` of ``x + 0``: the place of an element that is checked against its tensor's extent, not that of ``x``."""
    match index:
        case ex.Binary("+" | "-", ex.Label() as label, ex.Const(0)):
            return label
    return index


def _all_axes(tile: Tile) -> set[Axis]:
    """Return the axes of the positions in ``tile``, also of single elements."""
    return {n.axis for n in tile.walk() if isinstance(n, Position)}
