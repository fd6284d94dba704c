"""Sum operands in place of products: the sum of a product's columns is the product with the sum of the columns of its operand."""

from __future__ import annotations

from dataclasses import replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm, Definition
from ..canonicalize import extracted_func, inline_access


def sum_product_operands(algorithm: Algorithm, outputs: tuple[str, ...]) -> Algorithm:
    """Sum an operand of a product where only a sum over one of its labels is read, so that the product itself is never made.

    Before: ``y[b, o] = rdot(X[b, k], W[o, k], k) + v[o];  f[b] = rsum(y[b, o], o);``
    After:  ``f_operand[k] = rsum(W[o, k], o); f_rest[] = rsum(v[o], o); f[b] = rsum(X[b, k] * f_operand[k], k) + f_rest[];``

    Windows that are averaged, and means of whole images after a convolution, are such sums. A sum of sums and differences is taken term
    by term for that. With labels of both operands left it stays an ``rdot``, in which the sum is a computed operand. A product that anything
    else reads is made anyway, and so are its sums from it.
    """
    reads = [a.tensor for d in algorithm.definitions for a in ex.accesses(d.expr)]
    single = frozenset(f for f in algorithm.funcs if f not in outputs and reads.count(f) == 1)
    taken = set(algorithm.names)
    definitions: list[Definition] = []
    for d in algorithm.definitions:
        summing = _OperandSums(d, algorithm, single, taken)
        expr = d.expr.transform(summing.change)
        definitions += [*summing.made, replace(d, expr=expr)]
    if len(definitions) == len(algorithm.definitions):
        return algorithm
    changed = algorithm.with_definitions(tuple(definitions))
    return changed.limited_to(outputs)


class _OperandSums:
    """Makes the Funcs of ``sum_product_operands`` for one definition."""

    def __init__(self, owner: Definition, algorithm: Algorithm, single: frozenset[str], taken: set[str]):
        self.owner, self.algorithm, self.single, self.taken = owner, algorithm, single, taken
        self.made: list[Definition] = []

    def change(self, node: ex.Expr) -> ex.Expr:
        """Return a sum of products with their operands summed first; any other node, and a sum that does not allow it, unchanged."""
        if not (isinstance(node, ex.Reduce) and node.kind == "sum"):
            return node
        parts = list(_linear(node.arg, node.labels, self.algorithm, self.single))
        products = [p for p, _ in parts if isinstance(p, ex.Dot)]
        if not products or any(_operands_apart(p, node.labels) is None for p in products):
            return node
        rest, total = None, None
        for part, sign in parts:
            if isinstance(part, ex.Dot):
                total = _added(total, self._of_product(part, node.labels), sign)
            else:
                rest = _added(rest, part, sign)
        return total if rest is None else ex.Binary("+", total, self._extracted(ex.Reduce("sum", rest, node.labels), "rest"))  # type: ignore[arg-type, return-value]

    def _of_product(self, product: ex.Dot, labels: tuple[str, ...]) -> ex.Expr:
        """Return the sum of a product over ``labels``."""
        apart = _operands_apart(product, labels) or ((), ())
        left, right = (self._extracted(ex.Reduce("sum", s, over), "operand") if over else s for s, over in zip((product.left, product.right), apart))
        own = [ex.free_labels(side) - set(product.labels) for side in (left, right)]
        if own[0] - own[1] and own[1] - own[0]:
            value: ex.Expr = replace(product, left=left, right=right)
        else:  # no two matrices
            value = ex.Reduce("sum", ex.Binary("*", left, right), product.labels, pos=product.pos)
        for label in labels:
            if label not in (*apart[0], *apart[1]):
                value = ex.Binary("*", value, ex.Len(label))
        return value

    def _extracted(self, node: ex.Reduce, kind: str) -> ex.Expr:
        return extracted_func(node, kind, self.owner, self.made, self.taken, self.algorithm.labels)


def _added(total: ex.Expr | None, term: ex.Expr, sign: int) -> ex.Expr:
    if total is None:
        return term if sign > 0 else ex.Unary("-", term)
    return ex.Binary("+" if sign > 0 else "-", total, term)


def _linear(e: ex.Expr, labels: tuple[str, ...], algorithm: Algorithm, single: frozenset[str], sign: int = 1):
    """Yield the terms that ``e`` adds up, each with 1 or -1, looking through Funcs that nothing else reads."""
    match e:
        case ex.Binary("+" | "-" as op, left, right):
            yield from _linear(left, labels, algorithm, single, sign)
            yield from _linear(right, labels, algorithm, single, sign if op == "+" else -sign)
        case ex.Unary("-", arg):
            yield from _linear(arg, labels, algorithm, single, -sign)
        case ex.Access(tensor, _) if tensor in single and (body := inline_access(e, algorithm)) is not None and _adds(body):
            yield from _linear(body, labels, algorithm, single, sign)
        case _:
            yield e, sign


def _adds(body: ex.Expr) -> bool:
    """Return whether a Func's definition is a product, or a sum or difference in which one may be."""
    return isinstance(body, (ex.Dot, ex.Access)) or isinstance(body, ex.Binary) and body.op in "+-" or isinstance(body, ex.Unary) and body.op == "-"


def _operands_apart(product: ex.Dot, labels: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return which of ``labels`` each operand alone has; None where both have one, or neither any."""
    inside = [ex.free_labels(side) for side in (product.left, product.right)]
    if set(labels) & inside[0] & inside[1] or not set(labels) & (inside[0] | inside[1]):
        return None
    found = [tuple(x for x in labels if x in own) for own in inside]
    return found[0], found[1]
