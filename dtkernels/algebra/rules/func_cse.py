"""Merge derived Funcs that compute the same value: equal Funcs, and equal products inside sums, up to the names of labels.

Before::

    d_a[x] = rsum(d_y[x, y] * rdot(A[x, k], B[y, k], k), y);    d_b[y] = rsum(d_y[x, y] * rdot(A[x, j], B[y, j], j), x);

After::

    product[x, y] = rdot(A[x, k], B[y, k], k);
    d_a[x] = rsum(d_y[x, y] * product[x, y], y);                d_b[y] = rsum(d_y[x, y] * product[x, y], x);

A product inside a sum becomes a Func anyway; without this rule each sum would get one of its own.
"""

from __future__ import annotations

from dataclasses import replace

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from .canonicalize import fresh_name, matches, rename_bound
from .constant_folding import inline_copies


def merge_equal_funcs(algorithm: Algorithm, keep: tuple[str, ...]) -> Algorithm:
    """Keep one Func where several compute the same value; the Funcs ``keep`` stay."""
    while (changed := _one_func(algorithm, keep) or _one_product(algorithm, keep)) is not None:
        algorithm = changed
    return algorithm


def _one_func(algorithm: Algorithm, keep: tuple[str, ...]) -> Algorithm | None:
    """Remove one of two equal Funcs, if there are two. An output is rounded, so no other Func is made to read it."""
    seen: dict[object, str] = {}
    for d in (d for d in algorithm.definitions if d.name not in keep):
        first = seen.setdefault((d.labels, _canonical(d.expr, algorithm)), d.name)
        if first != d.name:
            left = (x for x in algorithm.definitions if x is not d)
            return algorithm.with_definitions(tuple(replace(x, expr=_renamed(x.expr, d.name, first)) for x in left))
    return None


def _one_product(algorithm: Algorithm, keep: tuple[str, ...]) -> Algorithm | None:
    """Replace one product inside a sum by an element of a Func: an existing one, or a new one where several products are equal."""
    for at, d in enumerate(algorithm.definitions):
        nested = _nested(d.expr)
        for node in nested:
            for known in (x for x in algorithm.definitions[:at] if isinstance(x.expr, ex.Dot) and x.name not in keep):
                if (access := _element(known, node, algorithm)) is not None:
                    changed = replace(d, expr=d.expr.transform(lambda n, node=node, access=access: access if n == node else n))  # type: ignore[misc]
                    return algorithm.with_definitions(tuple(changed if x is d else x for x in algorithm.definitions))
            labels = tuple(label for label in algorithm.labels if label in ex.free_labels(node))
            product = Definition("product", labels, node, d.pos)
            others = [n for n in nested if n != node] + [n for later in algorithm.definitions[at + 1 :] for n in _nested(later.expr)]
            if any(_element(product, n, algorithm) is not None for n in others):
                name = fresh_name("product", set(algorithm.names))
                return algorithm.with_definitions((*algorithm.definitions[:at], replace(product, name=name), *algorithm.definitions[at:]))
    return None


def share_products(algorithm: Algorithm, outputs: tuple[str, ...]) -> Algorithm:
    """Let definitions that contain the same product read it from one Func: where it is a Func already, and where it is in float32.

    Before: ``c[x, y] = 2 * rdot(A[x, k], B[k, y], k);  s[x, y] = rdot(A[x, k], B[k, y], k);  f[x] = rsum(c[x, y] * s[x, y], y);``
    After:  ``c_product[x, y] = rdot(A[x, k], B[k, y], k);  c[x, y] = 2 * c_product[x, y];  f[x] = rsum(c[x, y] * c_product[x, y], y);``

    Matrix units are slow in float32, and such products are of correlations, whose gradients read them again. An output is rounded, so no other Func is made to read it.
    """
    for d in algorithm.definitions:
        for node in (n for n in d.expr.walk() if isinstance(n, ex.Dot)):
            if (changed := _with_shared_product(algorithm, d, node, outputs)) is not None:
                return share_products(changed, outputs)
    return algorithm


def _with_shared_product(algorithm: Algorithm, first: Definition, node: ex.Dot, outputs: tuple[str, ...]) -> Algorithm | None:
    """Return ``algorithm`` with one Func for all products equal to ``node``, which stands in ``first``; None where there is nothing to share."""
    labels = tuple(label for label in algorithm.labels if label in ex.free_labels(node))
    whole = first.expr == node and first.name not in outputs
    product = first if whole else Definition(fresh_name(f"{first.name}_product", set(algorithm.names)), labels, node, first.pos)

    def element(n: ex.Expr) -> ex.Expr:
        return (_element(product, n, algorithm) or n) if isinstance(n, ex.Dot) else n

    changed = {x.name: x if x is product else replace(x, expr=x.expr.transform(element)) for x in algorithm.definitions}
    readers = [x for x in algorithm.definitions if changed[x.name] != x]
    is_func = whole or any(isinstance(x.expr, ex.Dot) and isinstance(changed[x.name].expr, ex.Access) and x.name not in outputs for x in readers)
    if len(readers) + whole < 2 or not (is_func or _is_float32_product(node)):
        return None
    made = ((product, changed[x.name]) if x is first and not whole else (changed[x.name],) for x in algorithm.definitions)
    found = algorithm.with_definitions(tuple(x for group in made for x in group))
    copies = tuple(x.name for x in found.definitions if isinstance(x.expr, ex.Access) and x.expr.tensor == product.name and x.name not in outputs)
    return inline_copies(found, copies).limited_to(outputs)


def _is_float32_product(n: ex.Dot) -> bool:
    return all(isinstance(side, ex.Cast) and side.dtype == "fp32" for side in (n.left, n.right))


def _nested(e: ex.Expr) -> list[ex.Dot]:
    """Return the products inside other reductions of ``e``, inner ones first: outer ones are equal only as long as what they are made of is written alike."""
    found = [n for r in e.walk() if isinstance(r, (ex.Reduce, ex.Dot)) for c in r.children() for n in c.walk() if isinstance(n, ex.Dot)]
    return sorted(found, key=lambda n: sum(isinstance(m, ex.Dot) for m in n.walk()))


def _element(func: Definition, node: ex.Dot, algorithm: Algorithm) -> ex.Access | None:
    """Return the element of ``func`` that equals ``node``; None if there is none."""
    names = matches(_canonical(func.expr, algorithm), _canonical(node, algorithm))
    if names is None or set(names) != set(func.labels) or any(new not in algorithm.tied_labels(label) for label, new in names.items()):
        return None
    return ex.Access(func.name, tuple(ex.Label(names[label]) for label in func.labels), pos=node.pos)


def _canonical(e: ex.Expr, algorithm: Algorithm) -> ex.Expr:
    """Rename the labels of reductions in ``e`` by their extent and nesting depth."""

    def change(node: ex.Expr) -> ex.Expr:
        if not isinstance(node, (ex.Reduce, ex.Dot)):
            return node
        depth = sum(isinstance(n, (ex.Reduce, ex.Dot)) for n in node.walk())
        return rename_bound(node, {label: f"{min(algorithm.tied_labels(label))}#{at}#{depth}" for at, label in enumerate(node.labels)})

    return e.transform(change)


def _renamed(e: ex.Expr, func: str, other: str) -> ex.Expr:
    return e.transform(lambda n: replace(n, tensor=other) if isinstance(n, ex.Access) and n.tensor == func else n)
