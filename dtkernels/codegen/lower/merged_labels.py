"""Loop over several labels as one: ``f.merge(p, y, x)``.

Before, a loop over each label::

    loop y:1
      loop x:64
        ... A[y + r, x + s] ...

After, with the statements of ``p``, which counts the elements of ``y`` and ``x`` together, the last label fastest::

    loop p:64
      ... A[p // len(x) + r, p % len(x) + s] ...

A tile then covers several rows of a small image, or of a product's sum several taps of few channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...lang import expr as ex
from ...lang.algorithm import Algorithm
from ...lang.errors import DTError
from ...lang.schedule import Merge, Program
from ...lang.schedule_checks import reduction_labels
from ..ir.nest import Axis, Op, Position, Size, Tile
from ..prelower.kernel_partition import funcs_in_kernel


def declare_merged_labels(program: Program) -> Program:
    """Give each merged label an extent: the product of those of its parts."""
    algorithm: Algorithm = program.algorithm
    for p in (p for p in program.schedule.primitives if isinstance(p, Merge)):
        name, labels, own = p.label, p.parts, algorithm[p.func].labels
        members = (p.func, *sorted(funcs_in_kernel(program, p.func)))
        sums = list(dict.fromkeys(found for m in members if (found := reduction_labels(algorithm, m))))
        of_sum = not set(labels) <= set(own)  # a fused sum may go over labels of the result too
        if of_sum and not any(set(labels) <= set(s) for s in sums):
            allowed = " or ".join(", ".join(s) for s in (own, *sums)) + ("" if sums else " or none")
            raise DTError("merge names labels of the result, or labels of one sum", found=", ".join(labels), allowed=allowed, at=p.pos)
        every = [x for parts in program.schedule.merged(p.func).values() for x in parts]
        if twice := next((x for x in labels if every.count(x) > 1), None):
            raise DTError("merge names a label once", found=f"{twice!r} twice", at=p.pos)
        if along := next((e.label for e in (algorithm[m].expr for m in members) if isinstance(e, ex.Scan) and e.label in labels), None):
            raise DTError("merge names labels whose loops may go in any order", found=f"{along!r}, along which a scan runs", at=p.pos)
        extent: ex.Expr = ex.Len(labels[0])
        for label in labels[1:]:
            extent = ex.Binary("*", extent, ex.Len(label))
        if (name, extent) in algorithm.formulas:  # lowered a second time
            continue
        if name in algorithm.names:
            raise DTError("merge gives the labels a new name", found=f"{name!r}, which is taken", allowed="a name of its own", at=p.pos)
        algorithm = replace(
            algorithm,
            formulas=(*algorithm.formulas, (name, extent)),
            vars=algorithm.vars if of_sum else (*algorithm.vars, name),
            rvars=(*algorithm.rvars, name) if of_sum else algorithm.rvars,
        )
    return program if algorithm is program.algorithm else replace(program, algorithm=algorithm)


def grouped(labels: Sequence[str], merged: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Replace the parts of each merged label by that label, where the first of them is."""
    found = tuple(labels)
    for name, parts in merged.items():
        if set(parts) <= set(found):
            found = tuple(name if x == next(y for y in found if y in parts) else x for x in found if x not in parts or x == next(y for y in found if y in parts))
    return found


def parts_of(axis: Axis, parts: tuple[str, ...]) -> dict[str, Tile]:
    """Return the index of each part of a merged label, for the axis over all of them."""
    found: dict[str, Tile] = {}
    rest: Tile = Position(axis)
    for label in reversed(parts[1:]):
        found[label] = Op("%", (rest, Size(label)))
        rest = Op("//", (rest, Size(label)))
    return {parts[0]: rest, **found}
