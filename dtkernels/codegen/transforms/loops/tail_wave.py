"""Run the last, partial wave of a persistent kernel in smaller blocks, ``f.tail(x:64, y:128)``, or its sums in parts, ``f.stream(k:4)``.

Before, with 561 blocks of 128 x 256 on 132 multiprocessors::

    for tile in program .. 561, 132 at once:        the fifth wave has 33 blocks, and takes as long as the others
        f[block of tile] := ...

After ``tail``::

    for tile in program .. tiles_before:            4 waves, 528 blocks
        f[block of tile] := ...

    f[piece of block tiles_before + program / 4] := ...     33 blocks in 4 pieces each, by a kernel of its own

After ``stream`` (stream-K): the same whole waves, then 33 blocks by 4 programs each, of which each adds up a quarter of the sum over ``k``, and a
kernel that merges the parts (split_k.py)::

    acc_part[program % 4, program / 4] := acc over part program % 4 of k, of block tiles_before + program / 4
    f[piece of block tiles_before + program / 2] := epilogue(acc_part[0, ..] + acc_part[1, ..] + ...)      always in this order

Parts are kept by the number of the block in the last wave, so that they take no more memory than that has. With both statements the blocks are
cut, and the sums of the pieces are. No program waits for another: kernels run one after another.

All kernels sum each element in the same order along labels that neither pieces nor parts cut. The wrapper counts the waves at the call. If the
last wave is more than half full, the first kernel runs it too; with ``stream``, if parts would not fill fewer rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ....lang.errors import DTError
from ....lang.schedule import Number, Primitive, Program, Schedule, Sized, Sizes
from ...ir.nest import Axis, Const, GridLabel, Kernel, Load, Loop, Op, Position, Statement, Store, Tile, Workspace, map_values

FEWEST_WARPS = 4  #: one warpgroup, the least that wgmma takes (compute capability 9.0)
BLOCK = Axis("tail_block", "tail_block", 1, exact=True)  #: the number of a block in the last wave
_REPLACED = ("persistent", "tail", "stream", "num_warps", "num_stages", "stages")

Lowered = Callable[[Program], tuple[Kernel, ...]]


def add_tail_wave(kernels: tuple[Kernel, ...], program: Program, root: str, lowered: Lowered) -> tuple[Kernel, ...]:
    """Add a tail to the kernels of ``root`` if the schedule has one; ``lowered`` lowers the program with smaller blocks or split sums."""
    asked = (*program.schedule.of(root, "tail"), *program.schedule.of(root, "stream"))
    if not asked:
        return kernels
    kernel, sizes, parts = kernels[-1], program.schedule.sizes(root, "tail"), program.schedule.sizes(root, "stream")
    _check(kernel, kernels, sizes, bool(parts), asked[0])
    blocks = {g.label: g.block for g in kernel.grid}
    fewer = 1
    for label in sizes.keys() & blocks.keys():
        fewer *= blocks[label] // sizes[label]
    warps = max(min(FEWEST_WARPS, kernel.num_warps), kernel.num_warps // fewer)
    said = [p if p.func != root else _resized(p, sizes) for p in program.schedule.primitives if p.func != root or p.name not in _REPLACED]
    said += [Number(root, "num_warps", (warps,)), Number(root, "num_stages", (kernel.num_stages + (fewer > 1),))]
    said += [Sizes(root, "split", (Sized(label, n),), asked[-1].pos) for label, n in parts.items()]
    tails = lowered(replace(program, schedule=Schedule(tuple(said))))
    if parts and (len(tails) != 2 or not any(g.parts for g in tails[0].grid)):
        found = f"{root} with several" if len(tails) > 2 else f"{root} without one"
        raise DTError("stream is for a kernel with one loop that reduces over the label", found=found, allowed="split", at=asked[-1].pos)
    return (*kernels[:-1], replace(kernel, tail=tuple(_tail(t, kernel, f"{root}_tail{'_part' * (t is not tails[-1])}") for t in tails)))


def _tail(kernel: Kernel, main: Kernel, name: str) -> Kernel:
    """Return a kernel as one of the last wave: its programs number the pieces and parts of each block of ``main``."""
    blocks = {g.label: g.block for g in main.grid}
    grid = tuple(GridLabel(g.label, 1, 1, inside=g.parts) if g.parts else replace(g, inside=blocks[g.label] // g.block) for g in kernel.grid)
    spaces = {w.name: w for w in kernel.workspaces}

    def local(i: Tile) -> Tile:
        size = blocks.get(i.axis.label, 0) if isinstance(i, Position) else 0
        return Op("%", (i, Const(size))) if size > 1 else Const(0) if size else i

    def own(index: tuple[Tile, ...]) -> tuple[Tile, ...]:
        return (index[0], Position(BLOCK), *map(local, index[1:]))

    def load(tile: Tile) -> Tile:
        return replace(tile, index=own(tile.index)) if isinstance(tile, Load) and tile.buffer in spaces else tile

    def one(s: Statement) -> Statement:
        if isinstance(s, Loop):
            return replace(s, body=tuple(one(x) for x in s.body))
        return replace(s, index=own(s.index)) if isinstance(s, Store) and s.buffer in spaces else s

    body = tuple(one(s) for s in map_values(kernel.body, lambda value: value.transform(load)))
    held = tuple(_held(w, blocks) for w in kernel.workspaces)
    return replace(kernel, name=name, grid=grid, order=main.order, body=body, workspaces=held, last_wave=True)


def _held(space: Workspace, blocks: dict[str, int]) -> Workspace:
    """Return a workspace with a dimension for the blocks of the last wave, and of each label a block."""
    return replace(space, labels=(BLOCK.label, *space.labels), extents=tuple(blocks.get(x, 0) for x in (BLOCK.label, *space.labels)))


def _resized(p: Primitive, sizes: dict[str, int]) -> Primitive:
    """Replace the sizes of a block or tensorize statement by those of the tail."""
    if not isinstance(p, Sizes) or p.name not in ("block", "tensorize"):
        return p
    return replace(p, args=tuple(Sized(a.label, sizes.get(a.label, a.size)) for a in p.sizes))


def _check(kernel: Kernel, kernels: tuple[Kernel, ...], sizes: dict[str, int], streamed: bool, p: Primitive) -> None:
    blocks = {g.label: g.block for g in kernel.grid}
    if len(kernels) > 1:
        raise DTError(f"{p.name} is for a kernel that is not split", found=f"{kernel.func}.split(...)", allowed="one of the two", at=p.pos)
    if len(kernel.writes) > 1:  # parts of sums (partial_sums.py) are counted by blocks
        raise DTError(f"{p.name} is for a kernel with one result", found=", ".join(kernel.writes), allowed=kernel.func, at=p.pos)
    if not (kernel.persistent and kernel.descriptors):
        found = f"{kernel.func} without {'descriptors' if kernel.persistent else 'persistent()'}"
        raise DTError(f"{p.name} is for programs that stay and read through descriptors", found=found,
                      allowed=f"{kernel.func}.persistent(); {kernel.func}.descriptor(...)", at=p.pos)  # fmt: skip
    for label, size in sizes.items():
        if label in blocks and blocks[label] % size:
            raise DTError("a tail cuts blocks", found=f"{label}:{size}", allowed=f"a divisor of {blocks[label]}", at=p.pos)
    if not streamed and all(sizes.get(label, block) == block for label, block in blocks.items()):
        raise DTError("a tail cuts blocks", found=", ".join(f"{k}:{v}" for k, v in sizes.items()),
                      allowed=f"less than {', '.join(f'{k}:{v}' for k, v in blocks.items())}", at=p.pos)  # fmt: skip
