"""Copies of inputs whose rows start at multiples of 16 bytes: ``f.stage(A)``.

Before::

    f[x, y] = rdot(A[x, k], B[k, y], k);

After, with a kernel of its own for the copy, whose buffer has rows as long as alignment wants::

    A_rows[x, k] = A[x, k];
    f[x, y] = rdot(A_rows[x, k], B[k, y], k);

Copies by 16 bytes and tensor descriptors then reach what the caller's layout keeps from them. Kernels that stage the same
input share one copy.
"""

from __future__ import annotations

from dataclasses import replace

from ..lang import expr as ex
from ..lang.algorithm import Algorithm, Definition
from ..lang.errors import DTError
from ..lang.schedule import Named, Primitive, Program, Schedule, Sized
from ..lang.schedule_checks import labels_in_kernel
from .parts import in_parts
from .roots import host

ROWS, COLUMNS = 4, 256  #: of a copy at once: 16 bytes a thread, and little beyond the end of a row


def staged(program: Program) -> Program:
    """``program`` with a Func for each input that ``stage`` names, and without ``stage``."""
    program = in_parts(program)
    asked, known = [p for p in program.schedule.primitives if p.name == "stage"], {}  # type: ignore[var-annotated]
    for p in asked:
        for tensor in p.args:
            program = _stage(program, p, str(tensor), known)
    return replace(program, schedule=Schedule(tuple(p for p in program.schedule.primitives if p.name != "stage"))) if asked else program


def _stage(program: Program, p: Primitive, tensor: str, known: dict[str, str]) -> Program:
    algorithm: Algorithm = program.algorithm  # type: ignore[assignment]
    schedule = program.schedule
    labels = algorithm.plain_labels(tensor) if tensor in algorithm.inputs else ()
    if not labels or None in labels or len(set(labels)) < len(labels):
        raise DTError("stage names an input that labels index by themselves", found=tensor, allowed=", ".join(algorithm.inputs), at=p.pos)
    members = {p.func} | {f for f in algorithm.funcs if host(f, schedule.fused()) == p.func}
    own = tuple(str(label) for label in labels)
    name, made = _copy_of(tensor, program, known)
    copy = Definition(name, own, ex.Access(tensor, tuple(ex.Label(label) for label in own)))

    def change(node: ex.Expr) -> ex.Expr:
        return replace(node, tensor=name) if isinstance(node, ex.Access) and node.tensor == tensor else node

    changed = tuple(replace(d, expr=d.expr.transform(change)) if d.name in members else d for d in algorithm.definitions)
    if changed == algorithm.definitions or not set(own) <= set(labels_in_kernel(p.func, algorithm, schedule)):
        raise DTError(f"stage names an input of {p.func}", found=tensor, allowed=", ".join(sorted(_inputs(algorithm, members))), at=p.pos)

    changed = tuple(d for d in changed if d.name != name)  # shared: it now stands before the first of its readers
    first = next(i for i, d in enumerate(changed) if d.name in members or any(a.tensor == name for a in ex.accesses(d.expr)))

    def renamed(q: Primitive) -> Primitive:
        if q.name not in ("descriptor", "evict") or q.func not in members:
            return q
        return replace(
            q,
            args=tuple(name if a == tensor else replace(a, name=name) if isinstance(a, Named) and a.name == tensor else a for a in q.args),
        )

    tile = tuple(Sized(label, COLUMNS if label == own[-1] else ROWS if label in own[-2:-1] else 1) for label in own)
    copied = (Primitive(name, "block", tile), Primitive(name, "tensorize", tile), Primitive(name, "align"))
    outputs = tuple(
        Primitive(o, "compile") for o in program.outputs() if not schedule.of(o, "compile") and not schedule.of(o, "compile_to_kernel")
    )
    new = Schedule((*map(renamed, schedule.primitives), *(() if made else copied), *outputs))
    return Program(
        replace(
            algorithm.with_definitions((*changed[:first], copy, *changed[first:])), vars=_vars(algorithm, own), rvars=_rest(algorithm, own)
        ),
        new,
        program.counted,
    )


def _copy_of(tensor: str, program: Program, known: dict[str, str]) -> tuple[str, bool]:
    """The Func that is the copy of an input, and whether another kernel has made it already."""
    if tensor in known:
        return known[tensor], True
    algorithm: Algorithm = program.algorithm  # type: ignore[assignment]
    taken = {*algorithm.funcs, *algorithm.inputs, *algorithm.scalars, *algorithm.labels}
    name = f"{tensor}_rows"
    while name in taken:
        name += "_"
    known[tensor] = name
    return name, False


def _inputs(algorithm: Algorithm, members: set[str]) -> set[str]:
    return {a.tensor for m in members for a in ex.accesses(algorithm[m].expr)} & set(algorithm.inputs)


def _vars(algorithm: Algorithm, own: tuple[str, ...]) -> tuple[str, ...]:
    return algorithm.vars + tuple(label for label in own if label in algorithm.rvars)


def _rest(algorithm: Algorithm, own: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(label for label in algorithm.rvars if label not in own)
