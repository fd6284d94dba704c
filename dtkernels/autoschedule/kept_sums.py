"""Compute sums that several kernels read in the first of them that goes over their terms again, which stores them for the others.

The gradients of a group norm are such. Before, with a kernel of its own for the sums ``t``, which reads both tensors once more::

    t[n, g, c] = rsum(D[n, g, c, s] * A[n, g, c, s], s);         a kernel of its own
    v[n, g] = rsum(t[n, g, c] * w[g, c], c);                     in the kernel of f
    f[n, g, c, s] = D[n, g, c, s] + v[n, g] * A[n, g, c, s];     a kernel of its own
    d_w[g, c] = rsum(t[n, g, c], n);                             a kernel of its own

After, ``t.fuse_at(v, c); t.store();``: two kernels, of which the second reads sums alone. Sums over sums that go over the same labels then share one loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..lang import expr as ex
from ..lang.schedule import Bare, FuseAt, Fused, Primitive, Schedule, host
from ..lang.schedule_checks import reduction_labels
from .problem import SchedulingProblem


def goes_over_again(shape: SchedulingProblem, func: str, roots: Iterable[str]) -> bool:
    """Return whether ``func`` is a sum, and no product, whose terms one of ``roots`` goes over again element by element."""
    reduced = {*reduction_labels(shape.algorithm, func)}
    return bool(reduced) and not shape.dots(func) and any(reduced <= {*shape.algorithm[root].labels} for root in roots)


def with_kept_sums(shape: SchedulingProblem, fused: tuple[Primitive, ...]) -> tuple[Primitive, ...]:
    """Return ``fused`` with sums that had kernels of their own in the kernels that go over their terms again."""
    places = Schedule(fused).fused()
    own = [f for f in shape.algorithm.needed_by(shape.outputs) if f not in places and f not in shape.outputs]
    found = {f: loop for f in own if (loop := _loop(shape, f, places))}
    stored = [p.func for p in fused if p.name == "store" and host(p.func, places) in found]
    found |= {f: loop for f in stored if (loop := _loop(shape, f, places))}
    found |= {f: found[at] for f in stored if f not in found and (at := host(f, places)) in found and _runs_before(shape, found[at][0], f, at)}
    if not found or any(host(f, places) in found and f not in found for f in places):
        return fused
    kept = [p for p in fused if p.func not in found]
    return (*_sharing_loops(shape, kept, found), *(q for f, loop in found.items() for q in (FuseAt(f, "fuse_at", loop), Bare(f, "store"))))


def _loop(shape: SchedulingProblem, func: str, places: Fused) -> tuple[str, str] | None:
    """Return the loop in which to compute the sum ``func``: of a sum over it, or of the first kernel that reads it. None if that does not go over its terms again."""
    users = [d for d in shape.algorithm.definitions if any(a.tensor == func for a in ex.accesses(d.expr))]
    roots = {host(u.name, places) for u in users}
    root = next((f for f in shape.algorithm.needed_by(shape.outputs) if f in roots), "")
    if not root or not goes_over_again(shape, func, [root]):
        return None
    labels = shape.algorithm[func].labels
    sums = ((u.name, x) for u in users if host(u.name, places) == root for x in reduction_labels(shape.algorithm, u.name) if x in labels)
    rows = ((root, x) for x in reversed(shape.algorithm[root].labels) if x in labels)
    return next(sums, None) or next(rows, None)


def _runs_before(shape: SchedulingProblem, root: str, func: str, beside: str) -> bool:
    """Return whether what reads the sum ``func`` runs after ``root``, which sums the same rows for ``beside``."""
    order = shape.algorithm.needed_by(shape.outputs)
    users = [d.name for d in shape.algorithm.definitions if d.name in order and any(a.tensor == func for a in ex.accesses(d.expr))]
    alike = shape.algorithm[func].labels == shape.algorithm[beside].labels and reduction_labels(shape.algorithm, func) == reduction_labels(shape.algorithm, beside)
    return alike and root in order and all(order.index(root) < order.index(u) for u in users)


def _sharing_loops(shape: SchedulingProblem, fused: list[Primitive], found: dict[str, tuple[str, str]]) -> Iterator[Primitive]:
    """Yield ``fused`` with sums over the ``found`` ones in one loop where they are fused at the same place and go over the same labels."""
    first: dict[tuple, tuple[str, str]] = {}
    for p in fused:
        loop = next((loop for loop in found.values() if loop[0] == p.func), None)
        if loop and isinstance(p, FuseAt) and p.name == "fuse_at":
            same = (p.args, shape.algorithm[p.func].labels, reduction_labels(shape.algorithm, p.func))
            at = first.setdefault(same, loop)
            p = p if at[0] == p.func else FuseAt(p.func, "fuse_at", at)
        yield p
