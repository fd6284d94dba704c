"""Sum operands in place of products: the sum of a product's columns is the product with the sum of the columns of its operand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm, Definition
from ....lang.extents.linear_form import linear_form
from ...smart_constructors import factors_of, product
from ..canonicalize import extracted_func, fresh_name, inline_access


def sum_product_operands(algorithm: Algorithm, outputs: tuple[str, ...]) -> Algorithm:
    """Sum an operand of a product where only a sum over one of its labels is read, so that the product itself is never made.

    Before: ``y[b, o] = rdot(X[b, k], W[o, k], k) + v[o];  f[b] = rsum(y[b, o], o);``
    After:  ``f_operand[k] = rsum(W[o, k], o); f_rest[] = rsum(v[o], o); f[b] = rsum(X[b, k] * f_operand[k], k) + f_rest[];``

    What windows read is summed once for each of its places, not for each tap of a window that passes there:

    Before: ``y[o, t, x] = rdot(X[c, t, x + r], W[o, c, r], c, r);  f[o, x] = rsum(y[o, t, x], t);``
    After:  ``f_operand[c, X_2] = rsum(X[c, t, X_2], t);  f[o, x] = rdot(f_operand[c, x + r], W[o, c, r], c, r);``

    Windows that are averaged, and means of whole images after a convolution, are such sums. A sum of sums and differences is taken term
    by term for that. With labels of both operands left it stays an ``rdot``, in which the sum is a computed operand. A product that anything
    else reads is made anyway, and so are its sums from it. A weighted sum is one of the weighted operand, if that has all labels of the weights:

    Before: ``y[b, c, o] = rdot(X[b, k] - M[c, k], W[k, o], k);  f[b, o] = rsum(g[b, c] * y[b, c, o], c);``
    After:  ``f[b, o] = rdot(rsum(g[b, c] * (X[b, k] - M[c, k]), c), W[k, o], k);``
    """
    algorithm = _with_weighted_operands(algorithm, outputs)
    reads = [a.tensor for d in algorithm.definitions for a in ex.accesses(d.expr)]
    single = frozenset(f for f in algorithm.funcs if f not in outputs and reads.count(f) == 1)
    taken, places = set(algorithm.names), dict[tuple[str, int], str]()
    definitions: list[Definition] = []
    for d in algorithm.definitions:
        summing = _OperandSums(d, algorithm, single, taken, places)
        expr = d.expr.transform(summing.change)
        definitions += [*summing.made, replace(d, expr=expr)]
    if len(definitions) == len(algorithm.definitions):
        return algorithm
    new = tuple((label, tensor, dim) for (tensor, dim), label in places.items())
    changed = replace(algorithm, vars=(*algorithm.vars, *places.values()), extents=(*algorithm.extents, *new))
    return changed.with_definitions(tuple(definitions)).limited_to(outputs)


def _with_weighted_operands(algorithm: Algorithm, outputs: tuple[str, ...]) -> Algorithm:
    """Sum weighted operands in place of weighted products that are read in such sums alone."""
    reads = Counter(a.tensor for d in algorithm.definitions for a in ex.accesses(d.expr))
    every = [found for d in algorithm.definitions for node in d.expr.walk() if (found := _weighted(node, algorithm))]
    summed = Counter(func for func, _ in every)
    whole = {func for func, count in summed.items() if func not in outputs and reads[func] in (0, count)}

    def change(node: ex.Expr) -> ex.Expr:
        found = _weighted(node, algorithm)
        return found[1] if found and found[0] in whole else node

    return algorithm.transform(change).limited_to(outputs) if whole else algorithm


def _weighted(node: ex.Expr, algorithm: Algorithm) -> tuple[str, ex.Expr] | None:
    """Return (the Func that is the product, "" for one without, the product with its weighted operand summed); None for other nodes."""
    if not (isinstance(node, ex.Reduce) and node.kind == "sum"):
        return None
    factors, over = factors_of(node.arg), {*node.labels}
    for n, factor in enumerate(factors):
        func = factor.tensor if isinstance(factor, ex.Access) and factor.tensor in algorithm else ""
        dot = inline_access(factor, algorithm) if func else factor  # type: ignore[arg-type]
        weights = [*factors[:n], *factors[n + 1 :]]
        if not isinstance(dot, ex.Dot) or not weights:
            continue
        for side, other in ((dot.left, dot.right), (dot.right, dot.left)):
            own = ex.free_labels(side) - {*dot.labels}
            if over <= own and not over & ex.free_labels(other) and all(ex.free_labels(w) <= own for w in weights):
                summed = ex.Reduce("sum", product([*weights, side]), node.labels, pos=node.pos)
                if own - over - ex.free_labels(other) and ex.free_labels(other) - ex.free_labels(summed) - {*dot.labels}:
                    return func, replace(dot, left=summed, right=other) if side is dot.left else replace(dot, left=other, right=summed)
                return func, ex.Reduce("sum", ex.Binary("*", summed, other), dot.labels, pos=node.pos)
    return None


class _OperandSums:
    """Makes the Funcs of ``sum_product_operands`` for one definition."""

    def __init__(self, owner: Definition, algorithm: Algorithm, single: frozenset[str], taken: set[str], places: dict[tuple[str, int], str]):
        self.owner, self.algorithm, self.single, self.taken = owner, algorithm, single, taken
        self.places = places  #: (input, dimension) -> the label of its places
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

    def _of_product(self, dot: ex.Dot, labels: tuple[str, ...]) -> ex.Expr:
        """Return the sum of a product over ``labels``."""
        apart = _operands_apart(dot, labels) or ((), ())
        left, right = (self._summed(s, over) if over else s for s, over in zip((dot.left, dot.right), apart))
        own = [ex.free_labels(side) - set(dot.labels) for side in (left, right)]
        if own[0] - own[1] and own[1] - own[0]:
            value: ex.Expr = replace(dot, left=left, right=right)
        else:  # no two matrices
            value = ex.Reduce("sum", ex.Binary("*", left, right), dot.labels, pos=dot.pos)
        for label in labels:
            if label not in (*apart[0], *apart[1]):
                value = ex.Binary("*", value, ex.Len(label))
        return value

    def _summed(self, side: ex.Expr, over: tuple[str, ...]) -> ex.Expr:
        """Return the sum of an operand, of the places of each window on an input where it is read in windows."""
        windows: dict[str, ex.Expr] = {}
        if isinstance(side, ex.Access) and side.tensor in self.algorithm.inputs:
            index = list(side.index)
            for d, i in enumerate(side.index):
                own = ex.free_labels(i)
                elsewhere = set(over).union(*(ex.free_labels(other) for n, other in enumerate(side.index) if n != d))
                form = linear_form(i)
                labels = all(isinstance(atom, (ex.Label, ex.Len)) for atom in form if atom is not None)
                dense = all(abs(by) == 1 for atom, by in form.items() if isinstance(atom, ex.Label))
                if len(own) > 1 and not own & elsewhere and labels and dense:  # windows at steps, or where data says, may leave places out
                    if (side.tensor, d) not in self.places:
                        self.places[side.tensor, d] = fresh_name(f"{side.tensor}_{d}", self.taken)
                    label = self.places[side.tensor, d]
                    index[d], windows[label] = ex.Label(label), i
            side = replace(side, index=tuple(index))
        summed = self._extracted(ex.Reduce("sum", side, over), "operand")
        return ex.substitute(summed, windows)

    def _extracted(self, node: ex.Reduce, kind: str) -> ex.Expr:
        return extracted_func(node, kind, self.owner, self.made, self.taken, (*self.algorithm.labels, *self.places.values()))


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
