"""Partition a program into kernels: choose the Funcs that get their own, and the order in which they run."""

from __future__ import annotations

from ...lang import expr as ex
from ...lang.errors import DTError
from ...lang.schedule import Program, host


def stored_funcs(program: Program) -> tuple[str, ...]:
    """Return the fused Funcs that ``store()`` makes their kernel write, so that other kernels can read them."""
    fused = program.schedule.fused()
    return tuple(p.func for p in program.schedule.primitives if p.name == "store" and p.func in fused)


def kernel_roots(program: Program) -> tuple[str, ...]:
    """Return the Funcs with a kernel of their own, each after those whose results it reads. Raises DTError if no order exists."""
    fused, outputs = program.schedule.fused(), program.outputs()
    _check_aligned(program, outputs)
    roots = [f for f in program.algorithm.needed_by(outputs) if f not in fused]
    for output in outputs:
        if output in fused and host(output, fused) not in roots:
            at = next(p.pos for p in program.schedule.primitives if p.func == output and p.name.startswith("compile"))
            where = host(output, fused)
            raise DTError("a compiled Func that is fused needs its host", found=f"{output} in {where}", allowed=f"{where}.compile()", at=at)
    _check_consumers(program)
    waiting = {root: _hosts_read_from(program, root) & set(roots) - {root} for root in roots}
    ordered: list[str] = []
    while len(ordered) < len(roots):
        ready = next((r for r in roots if r not in ordered and waiting[r] <= set(ordered)), None)
        if ready is None:
            stuck = [r for r in roots if r not in ordered]
            at = next(p.pos for p in program.schedule.primitives if p.name == "fuse_at" and host(p.func, fused) in stuck)
            raise DTError("kernels run one after another", found=f"{' and '.join(stuck)}, each before the other by fuse_at", at=at)
        ordered.append(ready)
    return tuple(ordered)


def funcs_in_kernel(program: Program, root: str) -> set[str]:
    """Return the Funcs that the kernel of ``root`` computes, including those that other kernels compute as well."""
    algorithm = program.algorithm
    fused, stored = program.schedule.fused(), {*stored_funcs(program), *program.outputs()}
    found = [root, *(f for f in algorithm.funcs if f != root and host(f, fused) == root)]
    for f in found:
        found += [a.tensor for a in ex.accesses(algorithm[f].expr) if a.tensor in fused and a.tensor not in (*stored, *found)]
    return set(found)


def _hosts_read_from(program: Program, root: str) -> set[str]:
    """Return the hosts of the Funcs that the kernel of ``root`` reads from memory."""
    algorithm, fused, stored, outputs = program.algorithm, program.schedule.fused(), stored_funcs(program), program.outputs()
    written = {f for f in (*stored, *outputs) if host(f, fused) == root}
    todo = [root, *written]
    seen: set[str] = set()
    found: set[str] = set()
    while todo:
        func = todo.pop()
        for tensor in {a.tensor for a in ex.accesses(algorithm[func].expr)} - seen:
            seen.add(tensor)
            if tensor not in algorithm:
                continue
            if tensor not in fused or (tensor in stored and host(tensor, fused) != root):
                found.add(host(tensor, fused))
            else:
                todo.append(tensor)
    return found


def _check_consumers(program: Program) -> None:
    """Raise DTError for a Func fused into another one that it is computed from, itself fused."""
    fused = program.schedule.fused()
    for p in program.schedule.primitives:
        at = fused[p.func][0] if p.name == "fuse_at" else ""
        while at in fused:
            if at in program.algorithm.needed_by((p.func,)):
                raise DTError("a Func is fused into one that comes after it", found=f"{p.func} in {at}, which it uses", at=p.pos)
            at = fused[at][0]


def _check_aligned(program: Program, outputs: tuple[str, ...]) -> None:
    inside = {*program.schedule.fused()} - {p.func for p in program.schedule.primitives if p.name == "store"}
    for p in program.schedule.primitives:
        if p.name == "align" and (p.func in outputs or p.func in inside):
            allowed = "a Func that is not compiled, and not fused unless it is stored"
            raise DTError("align is for a Func between kernels", found=p.func, allowed=allowed, at=p.pos)
