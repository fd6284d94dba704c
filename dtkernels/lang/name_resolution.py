"""Resolve names: distinguish labels, scalars and parameters once all declarations are known."""

from __future__ import annotations

from dataclasses import replace

from . import expr as ex
from .algorithm import Algorithm
from .errors import DTError
from .extents.formulas import resolve_formula
from .hints import name_hint
from .schedule import Program


def resolve_names(program: Program) -> Program:
    """Replace each bare Name by the node of its declaration. Raises DTError for an undeclared name."""
    algorithm = program.algorithm
    kinds = {**dict.fromkeys(algorithm.labels, ex.Label), **dict.fromkeys(algorithm.scalars, ex.Scalar)}
    kinds |= {name: ex.Param for name, _ in algorithm.params}

    def name(node: ex.Expr) -> ex.Expr:
        if not isinstance(node, ex.Name):
            return node
        if node.name in kinds:
            return kinds[node.name](node.name, pos=node.pos)
        if node.name in algorithm.inputs or node.name in algorithm.funcs:
            raise DTError("a tensor is indexed", found=repr(node.name), allowed=f"{node.name}[...]", at=node.pos)
        raise DTError("undeclared name", found=repr(node.name), allowed=name_hint(node.name) or _declared(algorithm), at=node.pos)

    definitions = tuple(type(d)(d.name, d.labels, d.expr.transform(name), d.pos) for d in algorithm.definitions)
    formulas = tuple((label, resolve_formula(formula, algorithm)) for label, formula in algorithm.formulas)
    return Program(replace(algorithm, definitions=definitions, formulas=formulas), program.schedule)


def _declared(algorithm: Algorithm) -> str:
    groups = (("labels", algorithm.labels), ("scalars", algorithm.scalars), ("parameters", tuple(n for n, _ in algorithm.params)))
    return "; ".join(f"{word} {', '.join(names)}" for word, names in groups if names) or "nothing is declared"
