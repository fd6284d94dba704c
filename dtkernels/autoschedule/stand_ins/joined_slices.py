"""Schedule the Funcs that another one holds in its slices first, as outputs, and let their kernel store that one.

Before: ``f[b, g] = p[b, g - 0] + q[b, g - len(j)];`` is no output, others read it: each element computes ``p`` and ``q`` and keeps one
After:  ``p`` and ``q`` are asked for and scheduled alone, then the rest with ``f`` as an input; ``q.fuse_at(p, j); f.fuse_at(p, j); f.store();``

So are several such Funcs whose slices one kernel computes: the gradients of two products by which a cell computes its gates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...algebra.joined_slices import JoinedSlices, joined_slices
from ...lang.algorithm import Algorithm
from ...lang.schedule import Bare, FuseAt, Primitive, Schedule, host


def stored_by_slices(algorithm: Algorithm, outputs: tuple[str, ...], default: Callable[[Algorithm, tuple[str, ...]], Schedule]) -> Schedule | None:
    """Return a schedule in which the kernels of slices store the Funcs that hold them; None where there is no such Func, or its slices have several kernels.

    ``default`` returns the schedule of an algorithm for its outputs.
    """
    found = {d.name: j for d in algorithm.definitions if d.name not in outputs and (j := joined_slices(d, algorithm)) and not {*j.sources} & {*outputs}}
    if not found:
        return None
    sources = tuple(dict.fromkeys(s for j in found.values() for s in j.sources))
    if {*found} & {*algorithm.needed_by(sources)}:
        return None
    made = algorithm.limited_to(sources)
    first = default(made, sources)
    stored = _stored(made, found, first)
    if stored is None:
        return None
    rest = tuple(d for d in algorithm.definitions if d.name not in found)
    left = replace(algorithm, inputs=(*algorithm.inputs, *found)).with_definitions(rest).limited_to(outputs)
    second = default(left, outputs)
    before = tuple(p for p in first.primitives if p.name != "compile")
    return Schedule((*before, *stored, *(p for p in second.primitives if p.func not in made.funcs)))


def _stored(made: Algorithm, found: dict[str, JoinedSlices], schedule: Schedule) -> tuple[Primitive, ...] | None:
    """Return the statements by which the kernel of the slices stores each Func; None where several kernels compute them."""
    fused = schedule.fused()
    stored: list[Primitive] = []
    for name, j in found.items():
        roots = {host(s, fused) for s in j.sources}
        if len(roots) != 1:
            return None
        (root,) = roots
        stored += [FuseAt(name, "fuse_at", (root, made[root].labels[-1])), Bare(name, "store")]
    return tuple(stored)
