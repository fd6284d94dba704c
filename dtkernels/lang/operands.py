"""Name the operands of matrix products, so that a schedule can give one a kernel of its own.

An operand is loaded, and computed if it is an expression, in the loop of its product, once for each block that reads it. A schedule that has statements on its
name computes it once, in a kernel of its own, and stores it in the dtype of the product's operands::

    y[m, n] = rdot(A[m, k], cast(W[n, k], bf16), k);                        y_right.block(n:64, k:64); ...

is scheduled as::

    y_right[n, k] = cast(W[n, k], bf16);    y[m, n] = rdot(A[m, k], y_right[n, k], k);

The names are ``f_left`` and ``f_right`` for the product of a Func ``f``, ``f_left2`` and ``f_right2`` for its second one. Equal operands share
the first of their names.
"""

from __future__ import annotations

from dataclasses import replace

from . import expr as ex
from .algorithm import Algorithm, Definition
from .schedule import Program, Schedule

NESTED = (ex.Dot, ex.Reduce, ex.Scan, ex.Reshape)  #: what an operand with a name does not contain


def operand_names(algorithm: Algorithm) -> dict[str, ex.Expr]:
    """Map the names of operands to their expressions, in order of definition."""
    taken = {*algorithm.funcs, *algorithm.inputs, *algorithm.scalars, *algorithm.labels}
    found: dict[str, ex.Expr] = {}
    for d in algorithm.definitions:
        dots = dict.fromkeys(n for n in d.expr.walk() if isinstance(n, ex.Dot))
        for i, dot in enumerate(dots, 1):
            for side, e in (("left", dot.left), ("right", dot.right)):
                if _is_named(e) and e not in found.values():
                    name = f"{d.name}_{side}{i if i > 1 else ''}"
                    while name in taken:
                        name += "_"
                    found[name] = e
    return found


def _is_named(e: ex.Expr) -> bool:
    """Return whether an operand is made of elements of tensors. A cast to float8 is read from memory as it is, if at all."""
    rounded = isinstance(e, ex.Cast) and e.dtype in ex.FLOAT8
    return not rounded and any(ex.accesses(e)) and bool(ex.free_labels(e)) and not any(isinstance(n, NESTED) for n in e.walk())


def with_operands(algorithm: Algorithm, schedule: Schedule) -> Algorithm:
    """Return the algorithm with a Func for each operand that the schedule has statements on."""
    wanted = {p.func for p in schedule.primitives} - {*algorithm.funcs}
    return with_named_operands(algorithm, tuple(n for n in operand_names(algorithm) if n in wanted)) if wanted else algorithm


def with_named_operands(algorithm: Algorithm, names: tuple[str, ...]) -> Algorithm:
    """Return the algorithm with a Func for each of ``names``, before the first product that takes it."""
    every = operand_names(algorithm)
    for name in names:
        side = every[name]
        free = ex.free_labels(side)
        labels = tuple(label for label in algorithm.labels if label in free)
        access = ex.Access(name, tuple(ex.Label(label) for label in labels))
        changed = tuple(replace(d, expr=_replaced(d.expr, side, access)) for d in algorithm.definitions)
        first = next(i for i, (d, before) in enumerate(zip(changed, algorithm.definitions)) if d.expr != before.expr)
        rvars = tuple(label for label in algorithm.rvars if label not in labels)
        algorithm = replace(
            algorithm.with_definitions((*changed[:first], Definition(name, labels, side, changed[first].pos), *changed[first:])),
            vars=(*algorithm.vars, *(label for label in algorithm.rvars if label in labels)), rvars=rvars, operands=algorithm.operands | {name},
        )  # fmt: skip
    return algorithm


def name_scheduled_operands(program: Program) -> Program:
    """Make a Func of each operand that the schedule has statements on."""
    algorithm = with_operands(program.algorithm, program.schedule)
    return program if algorithm is program.algorithm else replace(program, algorithm=algorithm)


def _replaced(e: ex.Expr, side: ex.Expr, access: ex.Access) -> ex.Expr:
    def change(node: ex.Expr) -> ex.Expr:
        if not isinstance(node, ex.Dot):
            return node
        left, right = (access if s == side else s for s in (node.left, node.right))
        return replace(node, left=left, right=right)

    return e.transform(change)
