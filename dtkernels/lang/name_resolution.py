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


def rename_nested_labels(algorithm: Algorithm) -> Algorithm:
    """Give a reduction inside another one that binds the same label a label of its own, which has the same extent.

    Only where the outer one's terms have the label themselves: else nothing is left for it to run over, which checks refuse.
    """
    taken = {*algorithm.names, *(name for name, _ in algorithm.params)}
    renamed: list[tuple[str, str]] = []

    def of(node: ex.Expr, bound: frozenset[str]) -> ex.Expr:
        if not isinstance(node, (ex.Reduce, ex.Dot)):
            return node.rebuild(lambda child: of(child, bound))
        own = frozenset(node.labels)
        inside = {label for child in node.children() for label in ex.free_labels(child)}
        changed = node.rebuild(lambda child: of(child, bound | own & inside))
        names = {}
        for label in dict.fromkeys(x for x in node.labels if x in bound):
            names[label] = next(n for i in range(2, len(taken) + 3) if (n := f"{label}_{i}") not in taken)
            taken.add(names[label])
            renamed.append((names[label], label))
        own_names: dict[str, ex.Expr] = {x: ex.Label(n) for x, n in names.items()}
        changed = changed.rebuild(lambda child: ex.substitute(child, own_names)) if names else changed
        return replace(changed, labels=tuple(names.get(x, x) for x in node.labels))  # type: ignore[call-arg]

    definitions = tuple(replace(d, expr=of(d.expr, frozenset())) for d in algorithm.definitions)
    if not renamed:
        return algorithm
    extents = tuple((new, tensor, n) for new, old in renamed for label, tensor, n in algorithm.extents if label == old)
    formulas = tuple((new, e) for new, old in renamed for label, e in algorithm.formulas if label == old)
    return replace(
        algorithm,
        definitions=definitions,
        rvars=(*algorithm.rvars, *(new for new, _ in renamed)),
        extents=(*algorithm.extents, *extents),
        formulas=(*algorithm.formulas, *formulas),
    )
