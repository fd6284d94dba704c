"""Hold windows in registers: compute several neighbours of the result at once, each a single number of a thread, and load once what their windows share.

``f.unroll(t:4, k:8)``, of a label ``t`` in blocks of 4 and a sum over ``k``. Before::

    t:4 of a block
    for k in 0 .. size_k:
        A = A[t + k, c]                                 each element of a window is loaded for each place of the window
        acc[t, c] <- acc + A

After, 11 loads for 32 terms::

    t_0, t_1, t_2, t_3 of a block
    for k in 0 .. size_k by 8:
        A_0, A_1, ... = A[t_0 + k_0, c], A[t_0 + k_0 + 1, c], ...
        acc_0[c] <- acc_0 + A_0
        acc_1[c] <- acc_1 + A_1
        ...

Two loads are one where their indices are equal: positions of a tile are counted from its first element, which is inside whatever the extent is.
So are values that are computed of the same elements, such as a quotient in each place of a window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....algebra.rules.canonicalize import fresh_name
from ....lang.expr import ORDERED
from ...ir import nest
from ...ir.affine import Affine, affine
from ...ir.axes import swap_axis
from ...ir.nest import Accumulator, Assign, Axis, Guard, Index, Kernel, Let, Load, Local, Loop, Op, Position, Statement, Store, Tile
from ...ir.value_type import value_type
from ...lower.schedule_options import LOOP_OPTIONS, KernelOptions
from .tile_parts import AxisCut

UNROLL = LOOP_OPTIONS["unroll"]


def hold_windows(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Take apart the tiles of unrolled labels of the result, unroll the loops of their windows, and share what is equal."""
    sizes, found = options.unrolled_elements(), kernel
    for axis in [s.axis for s in kernel.body if isinstance(s, Index) and s.start == "block" and sizes.get(s.axis.label) == s.axis.tile > 1]:
        cut = AxisCut(found.body, axis, found, {})
        body = cut.into((1,) * axis.tile)
        found = replace(found, body=swap_axis(body, cut.parts[0], replace(cut.parts[0], exact=True)))
    return replace(found, body=_Windows(found, options).body(found.body)) if found is not kernel else kernel


class _Windows:
    """The windows of one kernel whose tiles have been taken apart."""

    def __init__(self, kernel: Kernel, options: KernelOptions):
        self.algorithm = options.algorithm
        self.taken = nest.names_of(kernel)
        self.first: dict[Axis, Axis] = {}  #: a part of a tile -> the first part
        self.starts = {s.name: s.start for s in nest.statements(kernel.body) if isinstance(s, Accumulator)}
        self._know([s.axis for s in kernel.body if isinstance(s, Index)])

    def _know(self, axes: list[Axis]) -> None:
        firsts = {a.whole: a for a in axes if a.whole is not None and a.offset == 0}
        self.first |= {a: firsts[a.whole] for a in axes if a.scalar and a.whole in firsts}

    def body(self, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        """Return a body with its loops unrolled, and without what is computed twice in a run of statements."""
        unrolled = [self._unrolled(replace(s, body=self.body(s.body))) if isinstance(s, Loop) else s for s in body]
        return tuple(self._shared(unrolled))

    def _unrolled(self, loop: Loop) -> Loop:
        """Return a loop that takes several steps at once, as many as its option says."""
        times = int(dict(loop.options).get(UNROLL, 1))
        if times == 1 or not loop.axis.scalar or loop.bounds() or loop.order or not all(map(self._is_plain, loop.body)):
            return loop
        whole, size = replace(loop.axis, tile=times), self.algorithm.constant_extent(loop.axis.label)
        even = size is not None and size % times == 0
        parts = [Axis(fresh_name(f"{whole.name}_{j}", self.taken), whole.label, 1, exact=even or j == 0, offset=j, whole=whole) for j in range(times)]
        self._know(parts)
        body = (s for j, part in enumerate(parts) for s in self._step(loop, part, j))
        return replace(loop, axis=whole, body=tuple(self._shared(list(body))), options=tuple(o for o in loop.options if o[0] != UNROLL))

    def _is_plain(self, s: Statement) -> bool:
        """Return whether a statement of a loop can be repeated for another step: an update adds one term."""
        if isinstance(s, Assign):
            return isinstance(s.value, Op) and len(s.value.args) == 2 and s.value.args[0] == Local(s.name, s.axes)
        return isinstance(s, (Index, Let))

    def _step(self, loop: Loop, part: Axis, number: int) -> Iterator[Statement]:
        """Yield the statements of a step, with names of their own."""
        own = {s.name: fresh_name(f"{s.name}_{number}", self.taken) if number else s.name for s in loop.body if isinstance(s, Let)}

        def renamed(n: Tile) -> Tile:
            return replace(n, name=own[n.name]) if isinstance(n, Local) and n.name in own else n

        for s in swap_axis(loop.body, loop.axis, part):
            if isinstance(s, Let):
                yield replace(s, name=own[s.name], value=s.value.transform(renamed))
            elif isinstance(s, Assign) and isinstance(s.value, Op):
                total, term = s.value.args
                term = term.transform(renamed)
                yield replace(s, value=Op(s.value.fn, (total, term if part.exact else Guard(term, (part,), self.starts[s.name]))))
            else:
                yield s

    def _shared(self, body: list[Statement]) -> Iterator[Statement]:
        """Yield statements without those that name a value that another one has named."""
        known: dict[Tile, Local] = {}
        instead: dict[str, Local] = {}

        def changed(tile: Tile) -> Tile:
            return instead.get(tile.name, tile) if isinstance(tile, Local) else self._counted_from_first(tile)

        for s in body:
            if isinstance(s, (Let, Assign, Store)):
                s = replace(s, value=s.value.transform(changed))
            if not isinstance(s, Let) or any(n in self.starts for n in s.value.local_names):
                yield s
            elif s.value in known and known[s.value].axes == s.axes:
                instead[s.name] = known[s.value]
            else:
                known[s.value] = Local(s.name, s.axes, value_type(s.value))
                yield s

    def _counted_from_first(self, tile: Tile) -> Tile:
        """Count checked indices of a load, and sides of a comparison, from the first elements of tiles."""
        if isinstance(tile, Load):
            return replace(tile, index=tuple(self._from_first(i) if d in tile.checked else i for d, i in enumerate(tile.index)))
        if isinstance(tile, Op) and tile.fn in ORDERED:
            return replace(tile, args=tuple(map(self._from_first, tile.args)))
        return tile

    def _from_first(self, index: Tile) -> Tile:
        form = affine(index)
        if form is None or not any(isinstance(t, Position) and t.axis in self.first for t in form.terms):
            return index
        found = Affine({}, form.constant)
        for t, times in sorted(form.terms.items(), key=lambda term: str(term[0])):
            one = Affine({t: 1})
            if isinstance(t, Position) and (first := self.first.get(t.axis)) is not None:
                one = Affine({Position(first): 1}, t.axis.offset)
            found += one.scaled(times)
        return found.tile()
