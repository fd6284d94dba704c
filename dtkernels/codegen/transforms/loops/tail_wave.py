"""Run the last, partial wave of a persistent kernel in smaller blocks: ``f.tail(x:64, y:128)``.

Before, with 561 blocks of 128 x 256 on 132 multiprocessors::

    for tile in program .. 561, 132 at once:        the fifth wave has 33 blocks, and takes as long as the others
        f[block of tile] := ...

After::

    for tile in program .. tiles_before:            4 waves, 528 blocks
        f[block of tile] := ...

    f[piece of block tiles_before + program / 4] := ...     33 blocks in 4 pieces each, by a kernel of its own

Both kernels sum each element in the same order along labels that the pieces do not cut. The wrapper counts the waves at the call.
If the last wave is more than half full, the first kernel runs it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ....lang.errors import DTError
from ....lang.schedule import Number, Primitive, Program, Schedule, Sized, Sizes
from ...ir.nest import Kernel

FEWEST_WARPS = 4  #: one warpgroup, the least that wgmma takes (compute capability 9.0)
_REPLACED = ("persistent", "tail", "num_warps", "num_stages", "stages")


def add_tail_wave(
    kernels: tuple[Kernel, ...], program: Program, root: str, lowered: Callable[[Program], tuple[Kernel, ...]]
) -> tuple[Kernel, ...]:
    """Add a tail to the kernels of ``root`` if the schedule has one; ``lowered`` lowers the program with smaller blocks."""
    asked = program.schedule.of(root, "tail")
    if not asked:
        return kernels
    kernel, sizes = kernels[-1], program.schedule.sizes(root, "tail")
    _check(kernel, kernels, sizes, asked[-1])
    blocks = {g.label: g.block for g in kernel.grid}
    fewer = 1
    for label in sizes.keys() & blocks.keys():
        fewer *= blocks[label] // sizes[label]
    warps = max(min(FEWEST_WARPS, kernel.num_warps), kernel.num_warps // fewer)
    said = [p if p.func != root else _resized(p, sizes) for p in program.schedule.primitives if p.func != root or p.name not in _REPLACED]
    said += [Number(root, "num_warps", (warps,)), Number(root, "num_stages", (kernel.num_stages + 1,))]
    (tail,) = lowered(replace(program, schedule=Schedule(tuple(said))))
    grid = tuple(replace(g, inside=blocks[g.label] // g.block) for g in tail.grid)
    return (*kernels[:-1], replace(kernel, tail=(replace(tail, name=f"{root}_tail", grid=grid, order=kernel.order),)))


def _resized(p: Primitive, sizes: dict[str, int]) -> Primitive:
    """Replace the sizes of a block or tensorize statement by those of the tail."""
    if not isinstance(p, Sizes) or p.name not in ("block", "tensorize"):
        return p
    return replace(p, args=tuple(Sized(a.label, sizes.get(a.label, a.size)) for a in p.sizes))


def _check(kernel: Kernel, kernels: tuple[Kernel, ...], sizes: dict[str, int], p: Primitive) -> None:
    blocks = {g.label: g.block for g in kernel.grid}
    if len(kernels) > 1:
        raise DTError("tail is for a kernel that is not split", found=f"{kernel.func}.split(...)", allowed="one of the two", at=p.pos)
    if len(kernel.writes) > 1:  # parts of sums (partial_sums.py) are counted by blocks
        raise DTError("tail is for a kernel with one result", found=", ".join(kernel.writes), allowed=kernel.func, at=p.pos)
    if not (kernel.persistent and kernel.descriptors):
        found = f"{kernel.func} without {'descriptors' if kernel.persistent else 'persistent()'}"
        raise DTError("tail is for programs that stay and read through descriptors", found=found,
                      allowed=f"{kernel.func}.persistent(); {kernel.func}.descriptor(...)", at=p.pos)  # fmt: skip
    for label, size in sizes.items():
        if label in blocks and blocks[label] % size:
            raise DTError("a tail cuts blocks", found=f"{label}:{size}", allowed=f"a divisor of {blocks[label]}", at=p.pos)
    if all(sizes.get(label, block) == block for label, block in blocks.items()):
        raise DTError("a tail cuts blocks", found=", ".join(f"{k}:{v}" for k, v in sizes.items()),
                      allowed=f"less than {', '.join(f'{k}:{v}' for k, v in blocks.items())}", at=p.pos)  # fmt: skip
