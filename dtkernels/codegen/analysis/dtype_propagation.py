"""Determine which inputs give the results their dtype, and which values stay in that dtype between kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...algebra.operand_types import rows_of
from ...lang import expr as ex
from ...lang.algorithm import Algorithm
from .normalized_products import normalized_products


def value_inputs(algorithm: Algorithm, inputs: Iterable[str]) -> list[str]:
    """Return the inputs whose dtype enters the promotion of the results.

    Excluded are masks, which are only tested for truth, integers, and inputs that are cast wherever they are read.
    """
    masks = {
        t
        for t in inputs
        if t in algorithm.integer_inputs()
        or all(_is_condition(d.expr, t) for d in algorithm.definitions if any(a.tensor == t for a in ex.accesses(d.expr)))
    }
    return [t for t in inputs if t not in masks]


def product_inputs(algorithm: Algorithm) -> frozenset[str]:
    """Return the value inputs that enter matrix products, directly or through a computation: they are cast to the dtype of the results.

    Other inputs are widened to float32 where they are read, so that an integer that is compared or added keeps its value.
    """
    uses: dict[str, list[tuple[str, ex.Expr, bool, bool]]] = {}
    for d in algorithm.definitions:
        for access, within, compared in _uses(d.expr, False, False):
            uses.setdefault(access.tensor, []).append((d.name, access, within, compared))
    feeding: set[str] = set()
    for d in reversed(algorithm.definitions):
        found = uses.get(d.name, [])
        if found and all((within or user in feeding) and not compared for user, _, within, compared in found):
            feeding.add(d.name)
    sides = {id(rows_of(side)) for d in algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Dot) for side in (n.left, n.right)}
    return frozenset(
        t
        for t in value_inputs(algorithm, algorithm.inputs)
        if any(id(access) in sides for _, access, _, _ in uses.get(t, ()))
        or all((within or user in feeding) and not compared for user, _, within, compared in uses.get(t, ()))
    )


def operand_inputs(algorithm: Algorithm) -> tuple[str, ...]:
    """Return the inputs whose elements are part of an operand of a product, directly or through Funcs: not in an index, nor in a condition."""
    todo = [side for d in algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Dot) for side in (n.left, n.right)]
    found: dict[str, None] = {}
    while todo:
        node = todo.pop()
        if isinstance(node, ex.Access):
            todo += [algorithm[node.tensor].expr] if node.tensor in algorithm and node.tensor not in found else []
            found[node.tensor] = None
        elif isinstance(node, ex.Call) and node.fn == "where":
            todo += node.args[1:]
        elif not (isinstance(node, ex.Binary) and node.op in (*ex.COMPARISONS, "and", "or")):
            todo += node.children()
    return tuple(t for t in algorithm.inputs if t in found)


def _uses(expr: ex.Expr, within: bool, compared: bool) -> Iterator[tuple[ex.Access, bool, bool]]:
    """Yield each access in ``expr``, whether it is inside an operand of a product, and whether it needs more than its truth value."""
    if isinstance(expr, ex.Access):
        yield expr, within, compared
    for i, child in enumerate(expr.children()):
        asked = isinstance(expr, ex.Binary) and expr.op in ex.COMPARISONS or isinstance(expr, ex.Call) and expr.fn == "where" and i == 0
        yield from _uses(child, within or isinstance(expr, ex.Dot), compared or asked)


def narrow_buffers(algorithm: Algorithm) -> frozenset[str]:
    """Return the Funcs that are stored between kernels in the dtype of the results, or of the products that read them, rather than in float32."""
    return operands_only(algorithm, copied=True) | normalized_products(algorithm)


def operands_only(algorithm: Algorithm, copied: bool = False) -> frozenset[str]:
    """Return the Funcs that only matrix products consume, or sums that are results.

    The gradient of a linear layer's result is one: products take it, and the gradient of a bias is its sum, of rounded terms as in torch.
    ``copied``: results that are copies may consume them too, such as the gradient of a residual. A copy in the same dtype rounds the same values.
    """
    products = [n for d in algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Dot)]
    sides = [rows for dot in products for side in (dot.left, dot.right) if (rows := rows_of(side))]
    results = _results(algorithm)
    sums = [n.arg for d in algorithm.definitions if d.name in results for n in d.expr.walk() if isinstance(n, ex.Reduce) and n.kind == "sum"]
    copies, found = copied_funcs(algorithm), frozenset[str]()
    kept = [copies[name] for name in results & copies.keys()] if copied else []
    while True:
        sides += [copies[name] for name in found & copies.keys()]
        operands = {id(e) for e in (*sides, *sums, *kept) if isinstance(e, ex.Access)}
        plain = {a.tensor for d in algorithm.definitions for a in ex.accesses(d.expr) if id(a) not in operands}
        plain |= {d.name for d in algorithm.definitions if isinstance(d.expr, ex.Cast) and d.name not in algorithm.operands}
        more = frozenset(side.tensor for side in sides if side.tensor in algorithm) - plain
        if copies.keys().isdisjoint(more - found):
            return more
        found = more


def copied_funcs(algorithm: Algorithm) -> dict[str, ex.Access]:
    """Map copies to the Funcs that they copy: what only products read of a copy, only products read of the Func (codegen/prelower/stage_aligned_copies.py)."""
    return {d.name: d.expr for d in algorithm.definitions if isinstance(d.expr, ex.Access) and d.expr.tensor in algorithm}


def _results(algorithm: Algorithm) -> set[str]:
    """Return the Funcs that no other reads, and those that only a copy reads that is such a one: sums over pieces (codegen/prelower)."""
    read = {a.tensor for d in algorithm.definitions for a in ex.accesses(d.expr) if a.tensor != d.name}
    copies = {d.name for d in algorithm.definitions if isinstance(d.expr, ex.Access)} - read
    return {*algorithm.funcs} - {a.tensor for d in algorithm.definitions if d.name not in copies for a in ex.accesses(d.expr) if a.tensor != d.name}


def _is_condition(expr: ex.Expr, tensor: str, inside: bool = False) -> bool:
    """Return whether every access to ``tensor`` in ``expr`` is used as a boolean or under a cast."""
    match expr:
        case ex.Access(name, _) if name == tensor:
            return inside
        case ex.Cast(ex.Access(name, _), _) if name == tensor:
            return True
        case ex.Write(value, place, condition):  # an input that is written keeps its dtype
            parts = (value, *place.index, *([] if condition is None else [condition]))
            return all(_is_condition(part, tensor) for part in parts)
        case ex.Call("where", (condition, a, b)):
            return _is_condition(condition, tensor, True) and _is_condition(a, tensor, inside) and _is_condition(b, tensor, inside)
        case ex.Binary("and" | "or", left, right):
            return _is_condition(left, tensor, True) and _is_condition(right, tensor, True)
        case ex.Unary("not", arg):
            return _is_condition(arg, tensor, True)
    return all(_is_condition(c, tensor) for c in expr.children())
