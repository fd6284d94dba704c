"""Compute partial sums in the kernel of another Func, one for each of its blocks: ``g.parts_at(f, n)``.

Before, two kernels that read all of ``X``::

    g[m, l] = rdot(X[m, n], C[l, n], n);
    f[l, n] = rdot(W[m, l], X[m, n], m);

After, with blocks of 256 of ``n`` in the kernel of ``f``, which computes a part of every ``g`` from the tile it has loaded::

    g_parts[n_part, m, l] = rdot(X[m, n], C[l, n], n), n in block n_part;       in the kernel of f, in its loop over m
    g[m, l] = rsum(g_parts[n_part, m, l], n_part);                              the parts in order: bitwise reproducible
"""

from __future__ import annotations

from dataclasses import replace

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ...lang.errors import DTError
from ...lang.reserved_names import clashes
from ...lang.schedule import Bare, FuseAt, Primitive, Program, Schedule, Sized, Sizes
from ...lang.schedule_checks import reduction_labels

AT_ONCE = 8  #: parts whose loads overlap


def add_partial_sums(program: Program) -> Program:
    """Replace each ``parts_at`` in ``program`` by a Func of partial sums."""
    for p in [p for p in program.schedule.primitives if isinstance(p, FuseAt) and p.name == "parts_at"]:
        program = _cut(program, p)
    return program


def _cut(program: Program, p: FuseAt) -> Program:
    algorithm: Algorithm = program.algorithm  # type: ignore[assignment]
    schedule, host, label = program.schedule, p.consumer, p.label
    made, block = algorithm[p.func], schedule.sizes(host, "block").get(label, 0)
    node = _summed(made, label, p)
    loop = _loop(program, made, host, label, block, p)
    name, part = free_name(f"{p.func}_parts", algorithm), free_name(f"{label}_part", algorithm)
    kind = node.kind if isinstance(node, ex.Reduce) else "sum"
    whole = ex.Reduce(kind, ex.Access(name, tuple(ex.Label(x) for x in (part, *made.labels))), (part,))

    def change(n: ex.Expr) -> ex.Expr:
        return whole if n == node else n

    parts = Definition(name, (part, *made.labels), node)
    first = algorithm.needed_by((host, *(a.tensor for a in ex.accesses(node) if a.tensor in algorithm)))  # the Funcs that the parts are computed from too
    changed = [replace(d, expr=d.expr.transform(change)) if d is made else d for d in algorithm.definitions]
    before, after = ([d for d in changed if (d.name in first) == early] for early in (True, False))
    said = (FuseAt(name, "fuse_at", (host, loop), p.pos), Bare(name, "store", pos=p.pos))
    more = (Sizes(p.func, "unroll", (Sized(part, AT_ONCE),)),)
    kept = tuple(q for q in schedule.primitives if q is not p)
    algorithm = algorithm.with_definitions((*before, parts, *after))
    algorithm = replace(algorithm, rvars=(*algorithm.rvars, part))
    return replace(program, algorithm=algorithm, schedule=Schedule((*kept, *said, *more, *program.implied())), counted=(*program.counted, (part, label, block)))


def _summed(made: Definition, label: str, p: Primitive) -> ex.Expr:
    """Return the one reduction of ``made``, over ``label`` only."""
    found = [n for n in made.expr.walk() if isinstance(n, (ex.Reduce, ex.Dot))]
    if len(found) != 1 or found[0].labels != (label,) or (isinstance(found[0], ex.Reduce) and found[0].kind in ("mean", *ex.PLACES)):
        raise DTError(f"parts_at cuts one reduction, over {label}", found=str(made).rstrip(";"), allowed=f"{p.func} = rsum(..., {label})", at=p.pos)
    return found[0]


def _loop(program: Program, made: Definition, host: str, label: str, block: int, p: Primitive) -> str:
    """Return the loop of ``host`` inside which every other label of ``made`` is bound. Raises DTError if there is none."""
    algorithm: Algorithm = program.algorithm  # type: ignore[assignment]
    if host not in algorithm.needed_by(program.outputs()) or host in program.schedule.fused():
        raise DTError("parts_at names a Func with a kernel of its own", found=host, allowed="one that is compiled or needed", at=p.pos)
    if made.name in algorithm.needed_by((host,)) or made.name in program.schedule.fused():
        raise DTError(f"parts_at: {made.name} has a kernel after that of {host}", found=f"{made.name} in {host}", at=p.pos)
    tile = program.schedule.sizes(host, "tensorize").get(label, block)
    if not block or tile != block:
        raise DTError(
            f"parts_at: {host} has blocks of {label}, each done at once",
            found=f"block {block or 'none'}, tile {tile or 'none'}",
            allowed=f"{host}.block({label}:...)",
            at=p.pos,
        )
    loops = [x for x in reduction_labels(algorithm, host) if x in made.labels]
    known = {*algorithm[host].labels, *loops, *(x for x, size in program.schedule.sizes(host, "tensorize").items() if size == 0)}
    if not loops or not set(made.labels) <= known:
        lost = next((x for x in made.labels if x not in known), None)
        raise DTError(
            f"parts_at: {host} goes over all labels of {made.name}",
            found=f"{lost} is not among them" if lost else f"no sum of {host} runs over one of them",
            allowed=f"{', '.join(made.labels)}",
            at=p.pos,
        )
    return loops[-1]


def free_name(wish: str, algorithm: Algorithm) -> str:
    """Return ``wish``, made longer where the algorithm already uses that name."""
    taken = set(algorithm.names)
    while clashes(wish, taken):
        wish += "_"
    return wish


__all__ = ["free_name", "add_partial_sums"]
