"""Split a reduction over programs (split-K): ``f.split(k:4)``.

Before::

    for k in 0 .. size_k:               acc <- acc + terms          one program a block
    f := epilogue(acc)

After, two kernels::

    for k in part's share of size_k:    acc <- acc + terms          four programs a block
    acc_part[part] := acc

    for part in 0 .. 4:                 acc <- acc + acc_part[part]  always in this order: bitwise reproducible
    f := epilogue(acc)

Accumulators relative to a running maximum (``lower/reductions.py``) are merged with the same rescaling that each step applies:
``acc * exp(old - new) + acc_part * exp(old_part - new)``. A part may be empty: its maximum is -inf and its sums are 0. For running means
see ``split_k_means.py``.

``split_k_merge.py`` distributes the merge over programs where its blocks would be too few; ``split_k_blocks.py`` makes a part of each block of the label.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from ....lang.errors import DTError
from ...ir import nest
from ...ir.nest import (  # fmt: skip
    Accumulator,
    Assign,
    Axis,
    BlockNumber,
    Const,
    Index,
    Kernel,
    Let,
    Load,
    Local,
    Loop,
    Op,
    Position,
    Size,
    Statement,
    Step,
    Store,
    Tile,
    TileReduce,
    Workspace,
    statements,
)
from ...lower.reduction_terms import TILE_KINDS
from ...lower.reductions import rescale
from ...lower.schedule_options import KernelOptions, Split
from ..dce import eliminate_dead_code, tiles_of
from ..memory.load_sinking import sink_loads
from .split_k_blocks import one_step, summed_axis
from .split_k_means import counted_shares, is_relative, joined, joined_sum, stepped
from .split_k_merge import UNROLL, block_merge, distribute_stores, merge_warps, parts_at_once, read_fewer_ahead

UNROLLED = 16  #: most parts that a step of the merge takes one after another
DTYPES = {"largest_key": "int64"}  #: of workspaces, by the operator that combines their parts; float32 for others


class UniformInBlock(DTError):
    """Refuse a sum that reads one element for a whole block and lacks the block's label.

    ``C[x / 2]`` in blocks of 2 is such an element. The parts of all blocks would share one place.
    """


def split_k(kernel: Kernel, options: KernelOptions) -> tuple[Kernel, ...]:
    """Return a kernel of partial results for each reduction over the split label, then the kernel that merges them."""
    split, body = options.split(), kernel.body
    made: tuple[Kernel, ...] = ()
    spaces: tuple[Workspace, ...] = ()
    while split and _reduces_over(body, split.label):
        parts, new, body = _Splitter(body, split, kernel.func).run()
        early = _stored_buffers(parts) - _stored_buffers(body)
        name = f"{kernel.func}_part" + (str(len(made) + 1) if made else "")
        writes = (*(w.name for w in new), *(o for o in kernel.writes if o in early))
        made += (replace(kernel, name=name, body=parts, writes=writes, workspaces=spaces + new),)
        spaces += new
    if not split or not made:
        return (kernel,)
    spread = distribute_stores(body, split.label)
    writes = tuple(o for o in kernel.writes if o in _stored_buffers(body))
    warps = kernel.num_warps if spread != body else merge_warps(body, kernel.num_warps)
    merged = replace(kernel, body=read_fewer_ahead(spread, warps), writes=writes, workspaces=spaces, num_warps=warps)
    return (*made, merged)


def _made_from(values: list[Tile], before: tuple[Statement, ...]) -> Iterator[Tile]:
    """Yield the nodes of ``values``, and of the definitions in ``before`` of the names in them."""
    made: dict[str, list[Tile]] = {}
    for s in statements(before):
        if isinstance(s, (Let, Assign)):
            made.setdefault(s.name, []).append(s.value)
    todo = list(values)
    while todo:
        for node in todo.pop().walk():
            yield node
            if isinstance(node, Local):
                todo += made.pop(node.name, [])


def _reduces_over(body: tuple[Statement, ...], label: str) -> bool:
    return any(isinstance(s, Loop) and s.reduces and s.axis.label == label for s in statements(body))


def _stored_buffers(body: tuple[Statement, ...]) -> set[str]:
    """Return the buffers that the body stores."""
    return {s.buffer for s in statements(body) if isinstance(s, Store)}


class _Splitter:
    def __init__(self, body: tuple[Statement, ...], split: Split, name: str):
        self.whole, self.split, self.name = body, split, name
        self.part = Axis(f"{split.label}_part", f"{split.label}_part", 1, exact=True)
        at_once = parts_at_once(body, split.parts) if split.parts else 1
        self.piece = Axis(f"{split.label}_piece", f"{split.label}_part", at_once, exact=True)
        before = {s.axis.name: s.axis for s in statements(body) if isinstance(s, Loop)}  # of a sum merged before: Triton keeps a loop's counter after it
        while before.get(self.piece.name, self.piece) != self.piece:
            self.piece = replace(self.piece, name=f"{self.piece.name}_again")
        self.workspaces: dict[str, Workspace] = {}

    def run(self):
        parts, merged = self._cut(self.whole, ())
        parts = (Index(summed_axis(self.whole, self.split) if self.split.block else self.part, "block"), *parts)
        return eliminate_dead_code(parts), tuple(self.workspaces.values()), block_merge(eliminate_dead_code(merged))

    def _cut(self, body: tuple[Statement, ...], before: tuple[Statement, ...]) -> tuple[tuple[Statement, ...], tuple[Statement, ...]]:
        """Return the bodies of the part and of the merge. ``before`` are the enclosing statements, which may define values of the loop."""
        at = next(i for i, s in enumerate(body) if isinstance(s, Loop) and self._reduces_split_label(s))
        loop = body[at]
        assert isinstance(loop, Loop)
        prologue = _without_stores(body[:at])
        if not loop.reduces:
            parts, merged = self._cut(loop.body, before + body[:at])
            return (*prologue, replace(loop, body=parts)), (*body[:at], replace(loop, body=merged), *body[at + 1 :])
        accumulators = self._accumulators(body[:at], loop)
        fixed = self._scalar_axes(loop, before + body[:at])
        blocks = self._of_blocks(loop, before + body[:at])
        for a in accumulators:
            if lost := blocks - set(a.axes):
                label = min(x.label for x in lost)
                raise UniformInBlock(str(self.split), found=f"{a.name}, one for a block of {label}",
                                 allowed=f"{self.name} with {label} in its sum", at=self.split.at)  # fmt: skip
        late = {
            n.arg.name: n.axes
            for v in nest.values(body[at + 1 :])
            for n in v.walk()
            if isinstance(n, TileReduce) and isinstance(n.arg, Local)
        }
        whole = {a.name: replace(a, axes=tuple(x for x in a.axes if x not in late.get(a.name, ()))) for a in accumulators}
        stores = [self._store(a, whole[a.name], fixed) for a in accumulators]
        after = _without_sums(body[at + 1 :], whole)
        if not self.piece.scalar:
            whole = {name: replace(a, axes=(self.piece, *a.axes)) for name, a in whole.items()}
            if any(a.moves or is_relative(a) for a in accumulators):
                after = (*self._combined_accumulators(tuple(whole.values())), *_renamed(after, whole, self.piece))
            else:
                after = _with_sums(after, whole, self.piece)
        merge = self._merge(tuple(whole.values()), fixed)
        start = tuple(whole.get(s.name, s) if isinstance(s, Accumulator) else s for s in body[:at])
        if self.split.block:
            return (*(s for s in prologue if s not in accumulators), *one_step(loop, accumulators, summed_axis(body, self.split)), *stores), (*start, merge, *after)
        prologue, share = sink_loads(prologue, loop)
        return (*prologue, *self._limited_to_part(share), *stores), (*start, merge, *after)

    def _reduces_split_label(self, loop: Loop) -> bool:
        return _reduces_over((loop,), self.split.label)

    # -- the part ---------------------------------------------------------------------------------------------------

    def _accumulators(self, before: tuple[Statement, ...], loop: Loop) -> tuple[Accumulator, ...]:
        """Return the accumulators of the loop. A reduction that finishes inside it must not run over the split label."""
        inner = next(s for s in statements((loop,)) if isinstance(s, Loop) and s.reduces and s.axis.label == self.split.label)
        changed = {s.name for s in statements(inner.body) if isinstance(s, Assign)} - {
            s.name for s in statements(inner.body) if isinstance(s, Accumulator)
        }
        found = tuple(s for s in before if isinstance(s, Accumulator) and s.name in changed)
        if changed - {a.name for a in found}:
            raise self.split.refuse(
                f"a reduction that starts anew inside the loop over {loop.axis.label}", "a reduction that one loop of the block finishes"
            )
        if not found:
            raise self.split.refuse(f"a loop over {loop.axis.label} that carries no sum out", "a reduction that one loop of the block finishes")
        if any(not running for a in found for running, _ in a.moves):
            raise self.split.refuse("a sum relative to more than a running maximum", "a shift that is one rmax")
        return found

    def _scalar_axes(self, loop: Loop, before: tuple[Statement, ...]) -> tuple[Axis, ...]:
        """Return the scalar axes (those of batches, for instance) that index the accumulated values."""
        values = [v for s in statements(loop.body) for v in tiles_of(s)]
        used = {n.axis for n in _made_from(values, before) if isinstance(n, Position) and n.axis.scalar}
        inside = {s.axis for s in statements((loop,)) if isinstance(s, Index)}
        return tuple(dict.fromkeys(s.axis for s in before if isinstance(s, Index) and s.axis in used - inside))

    def _of_blocks(self, loop: Loop, before: tuple[Statement, ...]) -> set[Axis]:
        """Return axes of blocks by whose first index the loop's values differ."""
        values = [s.value for s in statements(loop.body) if isinstance(s, (Let, Assign))]
        summed = {s.axis for s in statements((loop,)) if isinstance(s, Loop) and s.reduces}  # counts of elements are of their tiles
        return {n.axis for n in _made_from(values, before) if isinstance(n, nest.Start) and not n.axis.scalar} - summed

    def _limited_to_part(self, loop: Loop) -> list[Statement]:
        """Limit the loop to one part's share of the extent, which is a whole number of tiles."""
        label, k = self.split.label, next(s.axis for s in statements((loop,)) if isinstance(s, Loop) and s.axis.label == self.split.label)
        parts, size = Const(self.split.parts), Size(label)
        chunk: Tile = Op("cdiv", (size, parts)) if k.scalar else Op("*", (Op("cdiv", (Op("cdiv", (size, Step(k))), parts)), Step(k)))
        names = [Local(f"{label}_{what}", ()) for what in ("chunk", "from", "to")]
        start = Op("*", (Position(self.part), names[0]))
        values = (chunk, start, Op("min", (size, Op("+", (names[1], names[0])))))

        def limit(s: Statement) -> Statement:
            if isinstance(s, Loop):
                s = replace(s, body=tuple(limit(x) for x in s.body))
                return replace(s, begin=names[1], end=names[2]) if s.axis == k and s.reduces else s
            return s

        return [*(Let(n.name, v, ()) for n, v in zip(names, values)), limit(loop)]

    def _store(self, a: Accumulator, whole: Accumulator, fixed: tuple[Axis, ...]) -> Store:
        """Store the partial result of ``a``, reduced over the loop's own tile; ``whole`` has the axes that remain."""
        name = a.name if a.name.startswith(self.name) else f"{self.name}_{a.name}"
        labels, blocks = tuple(x.label for x in fixed + whole.axes), (self.split.label, self.split.block)
        space = Workspace(f"{name}_part", self.part.label, self.split.parts, labels, DTYPES.get(a.combine, "float32"), blocks)
        self.workspaces[a.name] = space
        over = tuple(x for x in a.axes if x not in whole.axes)
        value: Tile = Local(a.name, a.axes)
        value = TileReduce(TILE_KINDS[a.combine], value, over, keeps_nan=a.combine != "largest") if over else value
        index = _index(self.part, fixed, whole)
        return Store(space.name, (BlockNumber(self.split.label), *index[1:]) if self.split.block else index, value, whole.axes)

    # -- the merge --------------------------------------------------------------------------------------------------

    def _merge(self, accumulators: tuple[Accumulator, ...], fixed: tuple[Axis, ...]) -> Loop:
        """Return the loop over parts: one accumulation step for each, unrolled so that their loads overlap."""
        running = {name for a in accumulators for name, _ in a.moves}
        now, part = ({a.name: Local(n.format(a.name), a.axes) for a in accumulators} for n in ("{}", "{}_part"))
        after = {a.name: Local(f"{a.name}_next", a.axes) for a in accumulators if a.name in running}
        body: list[Statement] = [] if self.piece.scalar else [Index(self.piece, "loop")]
        body += [Let(part[a.name].name, Load(self.workspaces[a.name].name, _index(self.piece, fixed, a)), a.axes) for a in accumulators]
        body += counted_shares(accumulators, now, part)
        late: list[Statement] = []
        known: dict[tuple[str, str, Fraction], Local] = {}

        def scaled(value: Local, a: Accumulator, side: str) -> Tile:
            result: Tile = value
            for name, times in a.moves:
                key = (side, name, times)
                if key not in known:
                    before = (now if side == "old" else part)[name]
                    number = len({k for k in known if k[:2] == key[:2]})
                    known[key] = Local(f"{before.name}_rescale" + (f"_{number + 1}" if number else ""), before.axes)
                    body.append(Let(known[key].name, rescale(before, after[name], times), before.axes))
                result = Op("*", (result, known[key]))
            return result

        for a in accumulators:
            value = Op(a.combine, (scaled(now[a.name], a, "old"), scaled(part[a.name], a, "new")))
            if is_relative(a):
                body.append(Assign(a.name, a.axes, stepped(a, accumulators, now, part)))
            elif a.name in running:
                body.append(Let(after[a.name].name, value, a.axes))
                late.append(Assign(a.name, a.axes, after[a.name]))
            else:
                body.append(Assign(a.name, a.axes, value))
        count: Tile = Op("cdiv", (Size(self.split.label), Const(self.split.block))) if self.split.block else Const(self.split.parts)
        unrolled = min(self.split.parts // self.piece.tile, UNROLLED) or UNROLLED
        return Loop(self.piece, "extent", tuple(body + late), reduces=True, end=count, options=((UNROLL, unrolled),))

    def _combined_accumulators(self, accumulators: tuple[Accumulator, ...]) -> tuple[Statement, ...]:
        """Join the accumulators that remain after the loop where a step takes several parts, with the same rescaling."""
        axes = {a.name: tuple(x for x in a.axes if x != self.piece) for a in accumulators}
        own = {a.name: Local(a.name, a.axes) for a in accumulators}
        whole = {name: Local(f"{name}_joined", x) for name, x in axes.items()}
        running = dict.fromkeys(name for a in accumulators for name, _ in a.moves)
        moves = dict.fromkeys(move for a in accumulators for move in a.moves)
        factors = {m: Local(f"{m[0]}_joined_rescale" + (f"_{i}" if i else ""), own[m[0]].axes) for i, m in enumerate(moves)}
        values: dict[str, Tile] = {}
        for a in accumulators:
            value: Tile = own[a.name]
            for move in a.moves:
                value = Op("*", (value, factors[move]))
            values[a.name] = TileReduce(TILE_KINDS[a.combine], value, (self.piece,), keeps_nan=a.combine != "largest")
            if a.repairs:
                values[a.name] = joined_sum(a, accumulators, self.piece)
        means = joined(accumulators, self.piece)
        known = {s.name for s in means if isinstance(s, Let)}
        lets: list[Statement] = [*means, *(Let(whole[n].name, values[n], axes[n]) for n in running)]
        lets += [Let(f.name, rescale(own[n], whole[n], times), f.axes) for (n, times), f in factors.items()]
        return (*lets, *(Let(whole[n].name, v, axes[n]) for n, v in values.items() if n not in running and whole[n].name not in known))


def _without_sums(body: tuple[Statement, ...], whole: dict[str, Accumulator]) -> tuple[Statement, ...]:
    """Drop reductions over the loop's own tile from the statements after it: merged accumulators are already reduced."""

    def change(tile: Tile) -> Tile:
        match tile:
            case TileReduce(_, Local(name, axes) as arg, over) if name in whole and set(over) == set(axes) - set(whole[name].axes):
                return replace(arg, axes=whole[name].axes)
        return tile

    return nest.map_values(body, lambda value: value.transform(change))


def _with_sums(body: tuple[Statement, ...], merged: dict[str, Accumulator], piece: Axis) -> tuple[Statement, ...]:
    """Reduce over the parts of a step wherever the statements after the loop read an accumulator."""

    def change(tile: Tile) -> Tile:
        if isinstance(tile, Local) and tile.name in merged:
            a = merged[tile.name]
            return TileReduce(TILE_KINDS[a.combine], Local(a.name, a.axes), (piece,), keeps_nan=a.combine != "largest")
        return tile

    return nest.map_values(body, lambda value: value.transform(change))


def _renamed(body: tuple[Statement, ...], merged: dict[str, Accumulator], piece: Axis) -> tuple[Statement, ...]:
    """Make the statements after the loop read the values that ``_combined_accumulators`` defines."""

    def change(tile: Tile) -> Tile:
        if isinstance(tile, Local) and tile.name in merged:
            return Local(f"{tile.name}_joined", tuple(x for x in merged[tile.name].axes if x != piece))
        return tile

    return nest.map_values(body, lambda value: value.transform(change))


def _index(part: Axis, fixed: tuple[Axis, ...], a: Accumulator) -> tuple[Tile, ...]:
    return tuple(Position(x) for x in (part, *fixed, *(x for x in a.axes if x != part)))


def _without_stores(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    kept = (s for s in body if not isinstance(s, Store))
    return tuple(replace(s, body=_without_stores(s.body)) if isinstance(s, Loop) else s for s in kept)
