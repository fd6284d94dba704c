"""Read products where they are made: their rows are summed first, and the few elements that are picked of them are made by themselves."""

from __future__ import annotations

from dataclasses import replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm, Definition
from ..canonicalize import extracted_func, fresh_name


def sum_rows_first(algorithm: Algorithm, outputs: tuple[str, ...]) -> Algorithm:
    """Sum rows of a product by themselves where a sum, maximum or minimum runs over its rows and columns: the product's kernel can do that.

    Before: ``s[i, j] = rdot(A[i, k], B[j, k], k);  f[] = rsum(exp(s[i, j]), i, j);``
    After:  ``s[i, j] = rdot(A[i, k], B[j, k], k);  f_rows[i] = rsum(exp(s[i, j]), j);  f[] = rsum(f_rows[i], i);``

    Not where something else reads the product too: it is stored for that.
    """
    readers = _readers(algorithm)
    taken = set(algorithm.names)
    definitions: list[Definition] = []
    for d in algorithm.definitions:
        made: list[Definition] = []

        def change(node: ex.Expr, d: Definition = d, made: list[Definition] = made) -> ex.Expr:
            if not (isinstance(node, ex.Reduce) and node.kind in ("sum", "max", "min") and len(node.labels) > 1):
                return node
            columns = _columns(node.arg, algorithm, {f for f, n in readers.items() if n == 1} - {*outputs})
            inner = tuple(label for label in node.labels if label in columns)
            outer = tuple(label for label in node.labels if label not in columns)
            if not inner or not outer:
                return node
            rows = extracted_func(replace(node, labels=inner), "rows", d, made, taken, algorithm.labels)
            return replace(node, arg=rows, labels=outer)

        expr = d.expr.transform(change)
        definitions += [*made, replace(d, expr=expr)]
    return algorithm.with_definitions(tuple(definitions))


def _readers(algorithm: Algorithm) -> dict[str, int]:
    """Return how many definitions read each Func."""
    reads = [{a.tensor for a in ex.accesses(d.expr)} for d in algorithm.definitions]
    return {f: sum(f in tensors for tensors in reads) for f in algorithm.funcs}


def _columns(e: ex.Expr, algorithm: Algorithm, single: set[str]) -> frozenset[str]:
    """Return the columns of a product in ``e``, or of a sum over all pairs of rows of two tensors: labels that the second alone has.

    Funcs that are read once are looked through.
    """
    for node in e.walk():
        if isinstance(node, ex.Dot) or isinstance(node, ex.Reduce) and node.kind == "sum":
            rows = [ex.free_labels(x) for x in ([node.left, node.right] if isinstance(node, ex.Dot) else ex.accesses(node.arg))]
            rows = [own - {*node.labels} for own in rows if own & {*node.labels}]
            columns = next((b - rows[0] for b in rows[1:] if b - rows[0] and rows[0] - b), frozenset())
            if columns or isinstance(node, ex.Dot):
                return columns
        if isinstance(node, ex.Access) and node.tensor in single:
            d = algorithm[node.tensor]
            if node.index == tuple(map(ex.Label, d.labels)) and (found := _columns(d.expr, algorithm, single)):
                return found
    return frozenset()


def make_picked_elements(algorithm: Algorithm, outputs: tuple[str, ...]) -> Algorithm:
    """Make the elements of a product that are picked, on its diagonal or by data, by themselves, if all else that reads it reduces its rows.

    Before: ``s[i, j] = rdot(A[i, k], B[j, k], k);  t[i] = rsum(exp(s[i, j]), j);  f[i] = log(t[i]) - s[i, y[i]];``
    After:  ``s[i, j] = rdot(A[i, k], B[j, k], k);  t[i] = rsum(exp(s[i, j]), j);  f_element[i] = rsum(A[i, k] * B[y[i], k], k);  f[i] = log(t[i]) - f_element[i];``

    The whole product then need not be stored for the few. One whose columns are reduced too is stored anyway. Operands are inputs: a computed one would be rounded in the product and not here.
    """
    taken = set(algorithm.names)
    products = {d.name: body for d in algorithm.definitions if d.name not in outputs and (body := _as_sum(d.expr, algorithm)) is not None}
    reduced = {f for f in products if len(found := _sums_of(algorithm, f)) == 1 and frozenset() not in found}
    definitions: list[Definition] = []
    for d in algorithm.definitions:
        made: list[Definition] = []

        def change(node: ex.Expr, d: Definition = d, made: list[Definition] = made) -> ex.Expr:
            if not (isinstance(node, ex.Access) and node.tensor in reduced and _is_picked(node) and _is_inside(node, algorithm)):
                return node
            func = algorithm[node.tensor]
            bound = {label for n in ex.reductions(products[func.name]) for label in n.labels}
            if bound & {*ex.free_labels(node), *d.labels}:
                return node
            labels = tuple(label for label in algorithm.labels if label in ex.free_labels(node))
            made.append(Definition(fresh_name(f"{d.name}_element", taken), labels, ex.substitute(products[func.name], dict(zip(func.labels, node.index))), d.pos))
            return ex.Access(made[-1].name, tuple(map(ex.Label, labels)), pos=node.pos)

        expr = d.expr.transform(change)
        definitions += [*made, replace(d, expr=expr)]
    return algorithm.with_definitions(tuple(definitions))


def _as_sum(e: ex.Expr, algorithm: Algorithm) -> ex.Expr | None:
    """Return a product of inputs, with what is made of it element by element, as a sum of float32 terms; None for another expression."""
    dots = list(ex.reductions(e))
    plain = all(isinstance(s, ex.Access) and s.tensor in algorithm.inputs for n in dots if isinstance(n, ex.Dot) for s in (n.left, n.right))
    if len(dots) != 1 or not isinstance(dots[0], ex.Dot) or not plain:
        return None
    dot = dots[0]
    total = ex.Reduce("sum", ex.Binary("*", dot.left, dot.right), dot.labels, pos=dot.pos)
    return e.transform(lambda n: total if n == dot else n)


def _sums_of(algorithm: Algorithm, func: str) -> set[frozenset[str]]:
    """Return the labels over which reductions run around accesses of a Func, none around one that is in no reduction. Picked elements do not count."""
    found = set()
    for d in algorithm.definitions:
        inside = [(a, n) for n in ex.reductions(d.expr) if isinstance(n, ex.Reduce) for a in ex.accesses(n) if a.tensor == func]
        for a in (a for a in ex.accesses(d.expr) if a.tensor == func and not _is_picked(a)):
            found.add(frozenset().union(*(ex.free_labels(a) & {*n.labels} for b, n in inside if a == b)))
    return found


def _is_picked(access: ex.Access) -> bool:
    """Return whether an access reads one element of a row, by data or on the diagonal."""
    labels = [i.name for i in access.index if isinstance(i, ex.Label)]
    return len(set(labels)) < len(labels) or any(True for i in access.index for _ in ex.accesses(i))


def _is_inside(access: ex.Access, algorithm: Algorithm) -> bool:
    """Return whether an access made anew reads what it did: 0 beyond the extents, which a product of what it reads there is, too."""
    func = algorithm[access.tensor]
    moved = [(own, i) for own, i in zip(func.labels, access.index) if i != ex.Label(own)]
    tied = all(isinstance(i, ex.Label) and i.name in algorithm.tied_labels(own) for own, i in moved)
    return tied or isinstance(func.expr, ex.Dot)
