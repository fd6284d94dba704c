"""Algorithm + Schedule -> Kernel (a LoopNest).

One Func is the root of the kernel: its blocks are the programs. Everything fused into it is computed where it is first
needed at or inside the loop that ``fuse_at`` names; a Func that reduces over the very loop it is fused into is
accumulated by that loop (reduce.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from ..algebra.operand_types import OperandTypes
from ..lang import expr as ex
from ..lang.algorithm import Algorithm, Definition
from ..lang.errors import DTError
from ..lang.schedule import Program, host
from ..lang.schedule_checks import reduction_labels
from . import nest
from .descriptors import described
from .indices import arithmetic, inside_one, quotient
from .kinds import kind_of, whole_quotient
from .nest import WHOLE, Axis, GridLabel, GridStep, Index, Kernel, Let, Local, Loop, Op, Position, Start, Statement, Store, Tile, Workspace
from .options import Options
from .passes import finish
from .reduce import Reducer
from .roots import kept, kernel_roots
from .scope import Scope
from .split import OneOfBlock, split_reduction
from .spread import warps
from .staged import computed, is_shift, staged
from .terms import MIN_DOT
from .walk import grid_order
from .waves import ended


def lower(program: Program) -> tuple[Kernel, ...]:
    """The kernels of ``program`` in the order they run: one for each Func that is compiled or not fused."""
    return _lower(program, program.algorithm.stands_for)


@lru_cache(maxsize=16)  # the formula, the fit and the printer each ask for the kernels of one program
def _lower(program: Program, stands_for: tuple) -> tuple[Kernel, ...]:
    """``stands_for``: that of the algorithm, which its text, and so its equality, leaves out."""
    program = staged(program)
    return tuple(kernel for root in kernel_roots(program) for kernel in _kernels(program, root))


lower.cache_info, lower.cache_clear = _lower.cache_info, _lower.cache_clear  # type: ignore[attr-defined]


def _kernels(program: Program, root: str) -> tuple[Kernel, ...]:
    def lowered(program: Program) -> tuple[Kernel, ...]:
        try:
            return _Lowering(program, root, program.outputs()).kernels()
        except OneOfBlock:
            return _Lowering(program, root, program.outputs(), once_a_block=False).kernels()

    return ended(program, root, lowered)


def lower_one(program: Program, root: str) -> tuple[Kernel, ...]:
    """The kernels of one Func that is not fused, as ``lower`` makes them: those that make copies for it first, those that add up
    what it makes parts of last."""
    made = staged(program)
    fused = made.schedule.fused()
    read = {a.tensor for f in computed(made, root) for a in ex.accesses(made.algorithm[f].expr)}
    copies = tuple(f for f in made.algorithm.funcs if f in read and f not in program.algorithm and f not in fused)
    parts = {f for f in fused if host(f, fused) == root and f not in program.algorithm}
    sums = (d.name for d in made.algorithm.definitions if parts & {a.tensor for a in ex.accesses(d.expr)})
    return tuple(kernel for func in (*copies, root, *sums) for kernel in _kernels(made, func))


class _Lowering:
    """State of lowering one kernel."""

    def __init__(self, program: Program, root: str, outputs: tuple[str, ...], once_a_block: bool = True):
        self.once_a_block = once_a_block  #: an element that is one for a whole block is loaded once
        self.algorithm: Algorithm = program.algorithm
        self.schedule = program.schedule
        self.fused = self.schedule.fused()
        self.root = root
        written = tuple(dict.fromkeys((*outputs, *kept(program))))
        self.elsewhere = frozenset(o for o in kept(program) if host(o, self.fused) != root)  #: fused, and read from memory here
        self.outputs = tuple(o for o in written if o == root or (o in self.fused and host(o, self.fused) == root))
        self.stored: list[str] = []
        self.blocks = self.schedule.sizes(root, "block")
        self.operand_types = OperandTypes(self.algorithm)
        self.integers, self.integer_inputs = self.algorithm.integer_scalars(), self.algorithm.integer_inputs()
        self.whole: dict[str, list[Axis]] = {}
        self.counted = {label: (other, size) for label, other, size in program.counted}
        self.blocked: dict[str, Axis] = {}  #: labels of the output -> their axis, where a block is done at once
        self.top = Scope(reserved=self.algorithm.scalars)
        self.reducer = Reducer(self)
        self.options = Options(program, root)
        self.split = self.options.split()

    # -- the kernel, step by step ---------------------------------------------------------------------------------

    def kernels(self) -> tuple[Kernel, ...]:
        """The kernel; where a reduction in it is split, first those that make its parts."""
        definition = self.algorithm[self.root]
        self._levels(definition, self._loop_order(definition), {}, self.top)
        missing = set(self.outputs) - set(self.stored)
        if missing:
            raise DTError("an output is computed over all its labels", found=f"{min(missing)} is not, where it is fused",
                          allowed="fuse_at a loop inside which its labels are bound", at=self.schedule.of(min(missing), "fuse_at")[0].pos)  # fmt: skip
        body, found = tuple(self.top.body), []
        self.options.check(body, self._touched(body))
        made: tuple[Workspace, ...] = ()
        while self.split and (cut := split_reduction(body, self.split, self.root)) is not None:
            parts, spaces, body = cut
            name = f"{self.root}_part" + (str(len(found) + 1) if found else "")
            early = self._written(parts) - self._written(body)
            found.append(self._kernel(name, parts, made + spaces, (*(w.name for w in spaces), *(o for o in self.stored if o in early))))
            made += spaces
        written = self._written(body)
        last = self._kernel(self.root, body, made, tuple(o for o in dict.fromkeys((self.root, *self.stored)) if o in written))
        return (*found, replace(last, num_warps=warps(body, last.num_warps)) if found else last)

    def _written(self, body: tuple[Statement, ...]) -> set[str]:
        """Funcs that the body stores."""
        return {s.buffer for s in nest.statements(body) if isinstance(s, Store)} & set(self.stored)

    def _touched(self, body: tuple[Statement, ...]) -> frozenset[str]:
        """Buffers that the body reads or writes."""
        loads = {s.value.buffer for s in nest.statements(body) if isinstance(s, Let) and isinstance(s.value, nest.Load)}
        return frozenset(loads | {s.buffer for s in nest.statements(body) if isinstance(s, Store)})

    def _kernel(self, name: str, body: tuple[Statement, ...], spaces: tuple[Workspace, ...], writes: tuple[str, ...]) -> Kernel:
        body, reads, scalars = finish(body, self.options.descriptors(), self.options.exponentials(), self.algorithm.integral)
        blocked = {s.axis.label: s for s in nest.statements(body) if isinstance(s, Index) and s.start.startswith("block")}
        whole = {label: s.axis.tile for label, s in blocked.items() if s.start == "block" and not s.axis.padded}  # a merge has its own
        grid = tuple(GridLabel(x, whole.get(x) or self.blocks[x]) for x in self.algorithm[self.root].labels if x in blocked)
        order = grid_order(self.schedule.of(self.root, "map"), grid)
        part = next((w for w in spaces if w.name in writes), None)
        if part is not None:
            grid, order = (GridLabel(part.part, 1, part.parts), *grid), (GridStep(part.part), *order)
        reads = tuple(t for t in (*self.algorithm.inputs, *self.algorithm.funcs, *(w.name for w in spaces)) if t in reads)
        scalars = tuple(s for s in self.algorithm.scalars if s in scalars)
        spaces = tuple(w for w in spaces if w.name in reads + writes)
        said = self.options.of_kernel(reads, writes)
        kernel = Kernel(name, self.root, reads, writes, scalars, grid, order, self.options.evicted(body), **said, workspaces=spaces)
        if kernel.descriptors:
            described(kernel, self.options.where("descriptor"))  # refused here, or it can be printed
        return kernel

    def _loop_order(self, definition: Definition) -> tuple[str, ...]:
        """Labels of the output in the order of their loops, slowest first: those that ``reorder`` names, then the rest."""
        asked = self.schedule.names(self.root, "reorder")
        for i, label in enumerate(asked):
            inside = next((a for a in asked[i + 1 :] if a in definition.labels and self._has_loop(a)), None)
            if label not in definition.labels and inside:
                raise DTError("a reduction is finished before the loops of the output go on",
                              found=f"reorder: {label} outside the loop over {inside}",
                              allowed=f"tensorize({inside}:0), or {inside} before {label}",
                              at=self.schedule.of(self.root, "reorder")[-1].pos)  # fmt: skip
        named = tuple(a for a in asked if a in definition.labels)
        return named + tuple(label for label in definition.labels if label not in named)

    def _has_loop(self, label: str) -> bool:
        """Whether an output label is advanced by a loop inside the block."""
        tile, block = self.tile_size(self.root, label), self.blocks.get(label)
        return tile not in (WHOLE, block)

    def _levels(self, definition: Definition, labels: tuple[str, ...], env: dict[str, Tile], scope: Scope) -> None:
        """Open the loops over ``labels`` one inside the other; store the result innermost."""
        if not labels:
            value = self.compute(definition, env, scope)
            if any(self.root in self.algorithm.needed_by((o,)) for o in self.outputs if o != self.root):
                value = self.let(self.root, value, scope, str(definition), tuple(i.axis for i in env.values() if isinstance(i, Position)))
                scope.know((self.root, tuple(env[label] for label in definition.labels)), value)
            self._store(definition, env, value, scope)
            self._other_outputs(env, scope)
            return
        axis, within = self._output_axis(labels[0], scope)
        inner = scope.child() if within else scope
        inner.open(axis)
        env = {**env, labels[0]: Position(axis)}
        if within:
            inner.take(axis.name)
            inner.body.append(Index(axis, "block+loop" if within == "block" else "loop"))
        self.place(definition.name, labels[0], env, inner)
        self._levels(definition, labels[1:], env, inner)
        if within:
            scope.body.append(Loop(axis, within, tuple(inner.body), options=self.options.of_loop(definition.name, labels[0])))

    def _other_outputs(self, env: dict[str, Tile], scope: Scope) -> None:
        """Outputs that nothing in this kernel uses are computed last, when the reductions they need are finished."""
        for d in self.algorithm.definitions:
            if d.name in self.outputs and d.name not in self.stored and (index := self.bound_index(d, env)) is not None:
                self.realize(d.name, index, scope)

    def _output_axis(self, label: str, scope: Scope) -> tuple[Axis, str]:
        """The axis of an output label and what its loop runs over: the block, the extent, or '' for no loop."""
        tile, block = self.tile_size(self.root, label), self.blocks.get(label)
        if block is None and tile == WHOLE:
            return self.whole_axis(label), ""
        name = scope.fresh(label, self.top if block is not None else None)  # the index of a block is defined outside every loop
        if block is None:
            return Axis(name, label, tile, exact=tile == 1), "extent"
        asked, tile = tile, tile or block
        padded = block < tile <= MIN_DOT
        if not padded and (tile > block or block % tile or tile & (tile - 1)):
            raise DTError(
                "a block is a whole number of tiles",
                found=f"{label}: block {block}, tile {asked or f'{tile} (all of the block)'}",
                allowed=f"a tile that is a power of two and divides {block}, or one of up to {MIN_DOT}, padded",
                at=self.schedule.of(self.root, "block")[-1].pos,
            )
        axis = Axis(name, label, tile, exact=block == 1 and not padded, padded=padded)
        if tile == block or padded:
            self.top.take(name)
            self.top.open(axis)
            self.top.body.append(Index(axis, "block"))
            self.blocked[label] = axis
            return axis, ""
        return axis, "block"

    def _store(self, definition: Definition, env: dict[str, Tile], value: Tile, scope: Scope) -> None:
        index = tuple(env[label] for label in definition.labels)
        axes = tuple(i.axis for i in index if isinstance(i, Position) and not i.axis.scalar)
        scope.body.append(Store(definition.name, index, value, axes, str(definition)))
        self.stored.append(definition.name)

    # -- Funcs ----------------------------------------------------------------------------------------------------

    def tile_size(self, func: str, label: str) -> int:
        """How many elements ``label`` advances by in the loops of ``func``: its own word, else its consumers', else 1.

        The root's comes before those of consumers in another kernel, where ``func`` is computed there and here once more.
        """
        chain = self._hosts(func)
        if self.root not in chain:
            chain.insert(1, self.root)
        said = (self.schedule.sizes(f, "tensorize") for f in chain)
        return next((sizes[label] for sizes in said if label in sizes), 1)

    def whole_axis(self, label: str, bound: Iterable[Tile] = ()) -> Axis:
        """The axis over the whole extent of ``label``: one for the kernel, or another where ``bound`` indices have that one already.

        In ``d[k] = s[k, k]`` of ``s[m, l] = rsum(A[m, k] * B[l, k], k)`` the two ``k`` are not the same.
        """
        taken = {a for tile in bound for a in nest.axes_of(tile)}
        axes = self.whole.setdefault(label, [])
        found = next((a for a in axes if a not in taken), None)
        if found is None:
            found = Axis(self.top.fresh(label, self.top), label, WHOLE)
            axes.append(found)
            self.top.take(found.name)
            self.top.open(found)
            self.top.body.append(Index(found, "whole"))
        return found

    def place(self, func: str, label: str, env: dict[str, Tile], scope: Scope) -> None:
        """Compute what is fused at ``func``'s loop over ``label``, as far as its labels are bound there."""
        for d in self.algorithm.definitions:
            if self.fused.get(d.name) == (func, label) and self._used(d.name) and not self._waits(d.name, env):
                index = self.bound_index(d, env)
                if index is not None:
                    self.realize(d.name, index, scope)

    def _waits(self, func: str, env: dict[str, Tile]) -> bool:
        """Whether ``func`` is made from what a loop further in accumulates; it is computed where it is used, after that loop."""
        inside = {name: self.fused[name][1] for name in self.algorithm.needed_by((func,)) if name in self.fused and func not in self._hosts(name)}
        return any(label not in env and label in reduction_labels(self.algorithm, name) for name, label in inside.items())

    def _hosts(self, func: str) -> list[str]:
        """``func``, what it is fused into, what that is fused into, and so on."""
        chain = [func]
        while chain[-1] in self.fused:
            chain.append(self.fused[chain[-1]][0])
        return chain

    def _used(self, func: str) -> bool:
        """Whether another Func of this program reads ``func``; an output that none reads can wait."""
        return any(a.tensor == func for d in self.algorithm.definitions for a in ex.accesses(d.expr))

    def bound_index(self, d: Definition, env: dict[str, Tile]) -> tuple[Tile, ...] | None:
        """The index of ``d`` under ``env``, whole extents filled in; None if a label has neither."""
        index = []
        for label in d.labels:
            if label in env:
                index.append(env[label])
            elif (number := self._block_number(label)) is not None:
                index.append(number)
            elif self.tile_size(d.name, label) == WHOLE:
                index.append(Position(self.whole_axis(label)))
            else:
                return None
        return tuple(index)

    def _block_number(self, label: str) -> Tile | None:
        """The value of a label that numbers the blocks of another one, where this kernel has these."""
        other, size = self.counted.get(label, ("", 0))
        return Op("//", (Start(self.blocked[other]), nest.Const(size))) if other in self.blocked else None

    def realize(self, func: str, index: tuple[Tile, ...], scope: Scope) -> Tile:
        """The value of a fused Func at ``index``, computed here unless it is known already."""
        known = scope.find((func, index))
        if known is not None:
            return known
        definition = self.algorithm[func]
        env = dict(zip(definition.labels, index))
        value = self.compute(definition, env, scope)
        if not all(isinstance(i, Position) or label in self.counted for label, i in zip(definition.labels, index)):
            value = self._inside(definition, index, value)
        return self.keep(definition, index, value, scope)

    def keep(self, definition: Definition, index: tuple[Tile, ...], value: Tile, scope: Scope) -> Tile:
        """Name ``value`` after its Func, remember it, store it if it is an output."""
        if not isinstance(value, Local):
            value = self.let(definition.name, value, scope, str(definition), tuple(i.axis for i in index if isinstance(i, Position)))
        scope.know((definition.name, index), value)
        if definition.name in self.outputs and definition.name not in self.stored and self._everywhere(definition, index):
            self.reducer.check_finished(definition)
            self._store(definition, dict(zip(definition.labels, index)), value, scope)
        return value

    def _everywhere(self, definition: Definition, index: tuple[Tile, ...]) -> bool:
        """Whether values at ``index`` are all of the Func: each label runs by itself. ``f[x, x]`` is its diagonal, ``f[x + 1]`` lacks its first."""
        axes = [i.axis for i in index if isinstance(i, Position)]
        alone = all(isinstance(i, Position) or label in self.counted for label, i in zip(definition.labels, index))
        return alone and len(set(axes)) == len(axes)

    def _inside(self, definition: Definition, index: tuple[Tile, ...], value: Tile) -> Tile:
        """Outside its extents a shifted Func reads 0, as an input does."""
        for label, i in zip(definition.labels, index):
            if not isinstance(i, Position):
                inside = Op("and", (Op(">=", (i, nest.Const(0))), Op("<", (i, nest.Size(label)))))
                value = Op("where", (inside, value, nest.Const(0.0)))
        return value

    def compute(self, definition: Definition, env: dict[str, Tile], scope: Scope) -> Tile:
        """The value of ``definition`` with its labels bound by ``env``."""
        for label in definition.labels:
            if definition.name != self.root:
                self.place(definition.name, label, env, scope)
        reduced = self.reducer.reductions(definition, env, scope)
        return self.tile(definition.expr, env, scope, reduced)

    def _own_value(self, index: tuple[Tile, ...], scope: Scope) -> Tile:
        """The value of the kernel's own Func, for an output that is fused into it and made from it."""
        known = scope.find((self.root, index))
        if known is None:
            inside = [f for f in self.fused if f in self.algorithm and host(f, self.fused) == self.root]
            user = next(f for f in inside if self.root in self.algorithm.needed_by((f,)))
            at = self.schedule.of(user, "fuse_at")[0].pos
            raise DTError("a Func is fused where what it is made from is known", found=f"{user} in {self.root}, which it uses",
                          allowed=f"{user} in a kernel of its own", at=at)  # fmt: skip
        return known

    def let(self, wish: str, value: Tile, scope: Scope, origin: str = "", order: tuple[Axis, ...] = ()) -> Local:
        """Name ``value`` in ``scope``; dimensions in ``order`` as far as it says."""
        axes = nest.axes_of(value)
        ordered = nest.in_order(axes, order)
        name = scope.fresh(wish)
        scope.take(name)
        scope.body.append(Let(name, value, ordered, origin))
        return Local(name, ordered, kind_of(value))

    # -- expressions ----------------------------------------------------------------------------------------------

    def tile(self, expr: ex.Expr, env: dict[str, Tile], scope: Scope, reduced: dict[ex.Expr, Tile]) -> Tile:
        """``expr`` as a tile; reductions in it have been computed."""
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
                return self._access(tensor, tuple(self._index(i, env, scope) for i in index), scope)
            case ex.Unary("-", ex.Const(value)):
                return nest.Const(-value)
            case ex.Unary(op, arg):
                return Op("neg" if op == "-" else "not", (below(arg),))
            case ex.Binary(_, left, right):
                return arithmetic(expr, below(left), below(right))
            case ex.Call(fn, args):
                return whole_quotient(Op(fn, tuple(below(a) for a in args)))
            case ex.Cast(arg, "fp32"):
                return below(arg)  # values are float32 already
            case ex.Cast(arg, dtype):
                return Op(f"cast:{dtype}", (below(arg),))
        raise AssertionError(f"{type(expr).__name__} is gone before lowering")

    def _one_for_block(self, label: str, at: Tile, size: int | float) -> bool:
        """Whether ``label / size`` is one number for a whole block; a sum over ``label`` has tiles of its own."""
        own = label in self.blocked and at == Position(self.blocked[label])
        return self.once_a_block and own and inside_one(at, self.blocks.get(label, 0), size)

    def _index(self, expr: ex.Expr, env: dict[str, Tile], scope: Scope) -> Tile:
        """Index arithmetic: integers, and / rounds down."""
        match expr:
            case ex.Binary("/", ex.Label(label), ex.Const(size)) if self._one_for_block(label, env[label], size):
                return Op("//", (Start(env[label].axis), nest.Const(size)))  # type: ignore[attr-defined]
            case ex.Binary("/", left, right):
                return quotient(self._index(left, env, scope), self._index(right, env, scope), self.algorithm)
            case ex.Binary(_, left, right):
                return arithmetic(ex.as_value(expr), self._index(left, env, scope), self._index(right, env, scope))
            case ex.Unary(_, arg):
                return Op("neg", (self._index(arg, env, scope),))
        return self.tile(expr, env, scope, {})

    def _access(self, tensor: str, index: tuple[Tile, ...], scope: Scope) -> Tile:
        if tensor in self.fused and tensor in self.algorithm and tensor not in self.elsewhere:
            return self.realize(tensor, index, scope)
        if tensor == self.root:
            return self._own_value(index, scope)
        checked = tuple(d for d, i in enumerate(index) if not isinstance(i, Position))
        whole = tensor in self.integer_inputs
        shift = tensor in self.algorithm and is_shift(self.algorithm[tensor].expr)
        load = nest.Load(tensor, index, checked, whole=whole, shift=shift)
        known = scope.find(load)
        if known is not None:
            return known
        home = scope.home(index)
        axes = tuple(dict.fromkeys(a for i in index for a in sorted(nest.axes_of(i), key=lambda a: a.name)))
        name = scope.fresh(tensor, home if home is not scope else None)
        home.take(name)
        home.body.append(Let(name, load, axes))
        local = Local(name, axes, kind_of(load))
        home.know(load, local)
        return local
