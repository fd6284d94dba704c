"""Work out extents from whole-number expressions: ``Extent s = (A[1] - 3) / 2 + 1;``.

Division rounds down and a remainder takes the sign of its divisor, as in an index. ``A[1]`` is the size of a dimension, ``len(x)`` or the
label ``x`` itself the extent of another label.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .. import expr as ex
from ..errors import DTError, Position
from .sources import ARITHMETIC, Source, computed

if TYPE_CHECKING:
    from ..algorithm import Algorithm

_ALLOWED = "integers, parameters, A[0] for the size of a dimension, len(x), other extents and + - * / %"


def resolve_formula(formula: ex.Expr, algorithm: Algorithm) -> ex.Expr:
    """Replace the bare names of a formula: a label by its extent, a parameter by itself. Raises DTError for anything but whole numbers."""

    def name(node: ex.Expr) -> ex.Expr:
        if not isinstance(node, ex.Name):
            return node
        if node.name in algorithm.labels:
            return ex.Len(node.name, pos=node.pos)
        if node.name in dict(algorithm.params):
            return ex.Param(node.name, pos=node.pos)
        found = f"{node.name!r}"
        raise DTError("an extent is worked out from whole numbers", found=found, allowed=_ALLOWED, at=node.pos)

    return formula.transform(name)


def check_formulas(algorithm: Algorithm, declared_at: Mapping[str, Position]) -> None:
    """Check every declared formula: its nodes, its names, and that none depends on itself."""
    ranks = {access.tensor: len(access.index) for d in algorithm.definitions for access in ex.accesses(d.expr)}
    once: dict[str, ex.Expr] = {}
    for label, formula in algorithm.formulas:
        at = declared_at.get(f"Extent {label}")
        if label not in algorithm.labels:
            raise DTError("undeclared label", found=repr(label), allowed=", ".join(algorithm.labels), at=at)
        if label in once or any(own == label for own, _, _ in algorithm.extents):
            raise DTError("the extent of a label is declared once", found=f"{formula} too for {label}", at=at)
        once[label] = formula
        _check_nodes(formula, algorithm, ranks, at)
    for label, _ in algorithm.formulas:
        at = declared_at.get(f"Extent {label}")
        _check_cycle(algorithm, label, at)
        for expanded in algorithm.extent_formulas(label):
            _check_divisors(expanded, at)
            if isinstance(expanded, (ex.Const, ex.Unary)) and (value := _constant(expanded)) is not None and value < 0:
                raise DTError("an extent is 0 or more", found=f"{value} for {label}", at=at)


def _check_nodes(formula: ex.Expr, algorithm: Algorithm, ranks: dict[str, int], at: Position | None) -> None:
    match formula:
        case ex.Const(value) if type(value) is int:
            return
        case ex.Param(name) if not isinstance(dict(algorithm.params)[name], bool):
            return
        case ex.Len(label):
            if label not in algorithm.labels:
                raise DTError("undeclared label", found=repr(label), allowed=", ".join(algorithm.labels), at=formula.pos or at)
            return
        case ex.Access(tensor, (ex.Const(dim),)) if tensor in algorithm.inputs and type(dim) is int:
            rank = ranks.get(tensor, dim + 1)
            if dim >= rank:
                raise DTError(f"a dimension of {tensor}", found=str(formula), allowed=f"0 to {max(rank, 1) - 1}", at=formula.pos or at)
            return
        case ex.Unary("-", _) | ex.Binary("+" | "-" | "*" | "/" | "%", _, _):
            for child in formula.children():
                _check_nodes(child, algorithm, ranks, at)
            return
    raise DTError("an extent is worked out from whole numbers", found=str(formula), allowed=_ALLOWED, at=formula.pos or at)


def _check_cycle(algorithm: Algorithm, label: str, at: Position | None) -> None:
    """Raise DTError where the formula of ``label`` leads back to it."""
    seen, todo = [label], [label]
    while todo:
        for _, formula in algorithm.formulas_of(todo.pop()):
            for other in (n.label for n in formula.walk() if isinstance(n, ex.Len)):
                if algorithm.plain_extent(other) is not None:
                    continue
                if algorithm.tied_labels(other) & algorithm.tied_labels(label):
                    raise DTError("an extent does not depend on itself", found=f"{label} = {dict(algorithm.formulas).get(label, formula)}", at=at)
                if other not in seen:
                    seen.append(other)
                    todo.append(other)


def _check_divisors(formula: ex.Expr, at: Position | None) -> None:
    for n in formula.walk():
        if isinstance(n, ex.Binary) and n.op in "/%" and not _divides(n.right):
            raise DTError("an extent is divided by a number or a parameter that is not 0", found=str(n), at=n.pos or at)


def _divides(divisor: ex.Expr) -> bool:
    return isinstance(divisor, ex.Param) or _constant(divisor) not in (None, 0)


def expanded(formula: ex.Expr, extent: Callable[[str], ex.Expr]) -> ex.Expr:
    """Return ``formula`` with every ``len(x)`` replaced by ``extent(x)`` and arithmetic on numbers done."""
    if isinstance(formula, ex.Len):
        return extent(formula.label)
    formula = formula.rebuild(lambda child: expanded(child, extent))
    match formula:
        case ex.Binary(op, a, b) if (x := _constant(a)) is not None and (y := _constant(b)) is not None and (y or op not in "/%"):
            return _number(ARITHMETIC[op](x, y))
        case ex.Unary("-", a) if (x := _constant(a)) is not None:
            return _number(-x)
    return formula


def _constant(e: ex.Expr) -> int | None:
    match e:
        case ex.Const(value):
            return int(value)
        case ex.Unary("-", ex.Const(value)):
            return -int(value)
    return None


def _number(value: int) -> ex.Expr:
    return ex.Unary("-", ex.Const(-value)) if value < 0 else ex.Const(value)


def constant_of(formulas: tuple[ex.Expr, ...]) -> int | None:
    """Return the first of these expanded formulas that is a number; None if all depend on inputs."""
    return next((n for f in formulas if (n := _constant(f)) is not None), None)


def source_of(formula: ex.Expr) -> Source:
    """Return an expanded formula as plain tuples, which JSON can hold."""
    match formula:
        case ex.Access(tensor, (ex.Const(dim),)):
            return tensor, int(dim)
        case ex.Unary("-", arg):
            return "-", 0, source_of(arg)
        case ex.Binary(op, a, b):
            return op, source_of(a), source_of(b)
    return int(formula.value)  # type: ignore[attr-defined]


def inputs_of(formula: ex.Expr) -> tuple[tuple[str, int], ...]:
    """Return the (input, dimension) pairs whose sizes an expanded formula reads."""
    return tuple(dict.fromkeys((a.tensor, int(a.index[0].value)) for a in ex.accesses(formula)))  # type: ignore[attr-defined]


def size_of_labels(algorithm: Algorithm, label: str, sizes: Mapping[str, int]) -> int | None:
    """Return the extent that the formula of ``label`` gives where ``sizes`` has the extents of other labels; None where they do not tell."""
    for formula in algorithm.extent_formulas(label):
        known: dict[tuple[str, int], int] = {}
        for tensor, dim in inputs_of(formula):
            if (size := _size_of(algorithm, tensor, dim, sizes)) is None:
                break
            known[tensor, dim] = size
        else:
            return computed(source_of(formula), lambda t, dim, known=known: known[t, dim])  # type: ignore[misc]
    return None


def follows_from_labels(algorithm: Algorithm, label: str) -> bool:
    """Return whether other labels tell the extent of ``label`` by a formula."""
    return any(
        all((plain := algorithm.plain_labels(t)[dim]) and plain not in algorithm.tied_labels(label) for t, dim in inputs_of(f))
        for f in algorithm.extent_formulas(label)
    ) and algorithm.extent_source(label) is None  # fmt: skip


def _size_of(algorithm: Algorithm, tensor: str, dim: int, sizes: Mapping[str, int]) -> int | None:
    """Return the size of a dimension by the label that indexes it; None where ``sizes`` lacks that."""
    plain = algorithm.plain_labels(tensor)[dim]
    group = algorithm.tied_labels(plain) if plain else frozenset()
    return next((sizes[name] for name in sorted(group) if name in sizes), None)


def smallest_dimension(algorithm: Algorithm, tensor: str, dim: int, sizes: Mapping[str, int], at_least: int) -> int:
    """Return a size of a dimension that only formulas mention for which they give the extents ``sizes``; ``at_least`` where none does.

    Other dimensions that a formula reads have sizes in ``sizes``. Each formula is monotone in practice: the smallest size that gives the
    extent is found by bisection.
    """
    for label, _ in algorithm.formulas:
        for formula in algorithm.extent_formulas(label):
            read = inputs_of(formula)
            known = {(t, d): size for t, d in read if (t, d) != (tensor, dim) and (size := _size_of(algorithm, t, d, sizes)) is not None}
            if label not in sizes or {*read} != {(tensor, dim), *known}:
                continue
            source, wanted = source_of(formula), sizes[label]

            def at(size: int, source: Source = source, known: dict[tuple[str, int], int] = known) -> int:
                return computed(source, lambda tensor, dim: known.get((tensor, dim), size))

            low, high = 0, max(at_least, 1)
            if at(high) == wanted:
                return high
            while at(high) < wanted and high < 2**40:
                high *= 2
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if at(middle) >= wanted else (middle + 1, high)
            if at(low) == wanted:
                return low
    return at_least
