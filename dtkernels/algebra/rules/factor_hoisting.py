"""Hoist loop-invariant factors out of sums: a factor that does not depend on the summed label is applied after the sum."""

from __future__ import annotations

import math
from dataclasses import replace

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ..smart_constructors import is_constant, is_length
from .canonicalize import extracted_func, inline_access


def hoist_invariant_factors(algorithm: Algorithm, outputs: tuple[str, ...], inline: frozenset[str] | None = None) -> Algorithm:
    """Hoist factors that do not depend on the summed label.

    Before: ``rdot(e[m, l] / d[m], V[l, n], l)``, ``rsum(where(c0 < d[m], 0, A[m, l]), l)``
    After:  ``where(len(l) == 0, 0, rdot(e[m, l], V[l, n], l) / d[m])``, ``where(c0 < d[m], 0, rsum(A[m, l], l))``

    Likewise a condition that does not depend on it, which decides between all terms and none. Funcs in ``inline`` (all, if None) that are
    quotients or products with such a factor are looked through: ``sm[m, l] = e[m, l] / d[m]`` need not be written inside the sum. A number of
    times another Func is looked through at any index, shifted ones included. Funcs that nothing uses any more are removed. An empty sum stays 0
    whatever divides it; an existing test of ``d[m] == 0`` covers this case.

    A mean keeps its factors where another sum reads deviations from it: ``rsum((z[b, o] - mean[o]) ** 2, b)``. Both then take one pass.
    """

    def hoist(node: ex.Expr) -> ex.Expr:
        return _drop_redundant_guard(node) if isinstance(node, ex.Call) else _hoist(node, algorithm, inline)

    means = _means_of_deviations(algorithm)
    definitions = tuple(d if d.name in means else replace(d, expr=d.expr.transform(hoist)) for d in algorithm.definitions)
    changed = replace(algorithm, definitions=definitions)
    return changed.limited_to(outputs)


def _means_of_deviations(algorithm: Algorithm) -> set[str]:
    """Return the Funcs that a sum subtracts from the very terms that they are sums of."""
    found = set()
    for total in (n for d in algorithm.definitions for n in ex.reductions(d.expr)):
        for n in total.walk():
            match n:
                case ex.Binary("-", term, ex.Access(mean)) if mean in algorithm.funcs:
                    sums = ex.reductions(algorithm[mean].expr)
                    found |= {mean for s in sums if isinstance(s, ex.Reduce) and s.kind == "sum" and s.arg == term and set(s.labels) <= {*total.labels}}
    return found


def hoist_row_factors(algorithm: Algorithm, outputs: tuple[str, ...]) -> Algorithm:
    """Hoist factors of whole rows, made of a sum of these rows, out of sums that read them in a Func, each as a Func of its own.

    Before: ``k_sum[l] = rsum(K[l, d] * K[l, d], d);  kn[l, d] = K[l, d] * rsqrt(k_sum[l]);  s[m, l] = rdot(Q[m, d], kn[l, d], d);``
    After:  ``k_sum[l] = rsum(K[l, d] * K[l, d], d);  kn_factor[l] = rsqrt(k_sum[l]);  s[m, l] = rdot(Q[m, d], K[l, d], d) * kn_factor[l];``

    Only where one tensor is left along that label: what is left of several would be computed in the sum's loop, without the factor as with it.
    """
    summed = {a.tensor for d in algorithm.definitions for n in ex.reductions(d.expr) for a in ex.accesses(n)}
    taken = set(algorithm.names)
    definitions: list[Definition] = []
    changed = set()
    for d in algorithm.definitions:
        made: list[Definition] = []
        if d.name in summed and (factors := _row_factors(d, algorithm)):
            named = {f: f if isinstance(f, ex.Access) else extracted_func(f, "factor", d, made, taken, algorithm.labels) for f in factors}
            d = replace(d, expr=_with_factors(d.expr, named))
            changed.add(d.name)
        definitions += [*made, d]
    algorithm = algorithm.with_definitions(tuple(definitions))

    def hoist(node: ex.Expr) -> ex.Expr:
        reads = isinstance(node, (ex.Dot, ex.Reduce)) and any(a.tensor in changed for a in ex.accesses(node))
        return _hoist(node, algorithm, frozenset(changed)) if reads else node

    hoisted = algorithm.transform(hoist)
    return hoisted.limited_to(outputs)


def _factors(node: ex.Expr) -> list[ex.Expr]:
    """Return the factors and divisors of an expression."""
    if isinstance(node, ex.Binary) and node.op in "*/":
        return [*_factors(node.left), *_factors(node.right)]
    return [node]


def _row_factors(d: Definition, algorithm: Algorithm) -> list[ex.Expr]:
    """Return the factors of a definition that are made of a sum of its rows, if one tensor is left along these."""
    factors = _factors(d.expr) if isinstance(d.expr, ex.Binary) else []
    over = {f: _summed_rows(f, algorithm) & set(d.labels) - ex.free_labels(f) for f in factors}
    found = [f for f in factors if over[f]]
    along = set().union(*over.values())
    left = {a.tensor for f in factors if f not in found for a in ex.accesses(f) if ex.free_labels(a) & along}
    return found if len(left) == 1 else []


def _summed_rows(e: ex.Expr, algorithm: Algorithm) -> set[str]:
    """Return the labels over which Funcs in ``e`` are sums or other reductions, but no products."""
    made = [algorithm[a.tensor].expr for a in ex.accesses(e) if a.tensor in algorithm]
    return {label for m in (e, *made) for n in ex.reductions(m) if isinstance(n, ex.Reduce) for label in n.labels}


def _with_factors(node: ex.Expr, named: dict[ex.Expr, ex.Expr]) -> ex.Expr:
    if isinstance(node, ex.Binary) and node.op in "*/":
        return node.rebuild(lambda child: _with_factors(child, named))
    return named.get(node, node)


def _hoist(node: ex.Expr, algorithm: Algorithm, inline: frozenset[str] | None) -> ex.Expr:
    if isinstance(node, ex.Dot):
        left, left_out = _split(node.left, node.labels, algorithm, inline)
        right, right_out = _split(node.right, node.labels, algorithm, inline)
        outside = left_out + right_out
        kept: ex.Expr = replace(node, left=left, right=right)
    elif isinstance(node, ex.Reduce) and node.kind == "sum":
        match node.arg:
            case ex.Call("where", (condition, a, b)) if ex.Const(0) in (a, b) and not ex.free_labels(condition) & set(node.labels):
                sums = (x if x == ex.Const(0) else _hoist(replace(node, arg=x), algorithm, inline) for x in (a, b))
                return ex.Call("where", (condition, *sums))
        arg, outside = _split(node.arg, node.labels, algorithm, inline)
        kept = replace(node, arg=arg)
    else:
        return node
    for op, factor in outside:
        kept = ex.Binary(op, kept, factor)
    if any(op == "/" and any(ex.accesses(factor)) for op, factor in outside):
        empty: ex.Expr = ex.Len(node.labels[0])
        for label in node.labels[1:]:
            empty = ex.Binary("*", empty, ex.Len(label))
        return ex.Call("where", (ex.Binary("==", empty, ex.Const(0)), ex.Const(0), kept))
    return kept


def _drop_redundant_guard(node: ex.Expr) -> ex.Expr:
    """Drop the guard against an empty sum inside ``where(d == 0, 0, x / d)``, which covers that case."""
    match node:
        case ex.Call("where", (ex.Binary("==", d, ex.Const(0)) as none, ex.Const(0) as zero, ex.Call("where", (empty, _, kept)))):
            ours = isinstance(empty, ex.Binary) and empty.op == "==" and is_length(empty.left)
            if ours and isinstance(kept, ex.Binary) and kept.op == "/" and kept.right == d:
                return ex.Call(node.fn, (none, zero, kept), pos=node.pos)
    return node


def _has_several_users(func: str, algorithm: Algorithm) -> bool:
    """Return whether several products take ``func``: as one operand it is computed once, without a factor of its rows each has its own."""
    dots = [n for d in algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Dot)]
    return sum(any(a.tensor == func for side in (dot.left, dot.right) for a in ex.accesses(side)) for dot in dots) > 1


def _is_computed(func: str, inner: ex.Expr, algorithm: Algorithm) -> bool:
    """Return whether ``inner``, which is left of ``func``, takes several tensors, element for element from inputs on: each product would compute it again."""
    parts = (n for f in algorithm.needed_by((func,)) for n in algorithm[f].expr.walk())
    return len({a.tensor for a in ex.accesses(inner)}) > 1 and not any(isinstance(n, (ex.Reduce, ex.Dot)) for n in parts)


def _multiple(access: ex.Access, algorithm: Algorithm) -> tuple[ex.Expr, list[tuple[str, ex.Expr]]] | None:
    """Split an element of a Func that is a number of times another one into that one and the number, wherever it is: outside, both are 0."""
    d = algorithm[access.tensor]
    match d.expr:
        case ex.Binary("*", ex.Access() as other, number) | ex.Binary("*", number, ex.Access() as other) | ex.Binary("/", ex.Access() as other, number):
            plain = sorted(i.name for i in other.index if isinstance(i, ex.Label)) == sorted(d.labels) and len(other.index) == len(d.labels)
            if plain and is_constant(number) and not ex.free_labels(number) and _is_finite(number):
                return ex.substitute(other, dict(zip(d.labels, access.index)), index=True), [(d.expr.op, number)]  # type: ignore[union-attr]
    return None


def _is_finite(number: ex.Expr) -> bool:
    value = number.arg.value if isinstance(number, ex.Unary) else number.value  # type: ignore[attr-defined]
    return not isinstance(value, bool) and math.isfinite(value) and value != 0


def _split(node: ex.Expr, labels: tuple[str, ...], algorithm: Algorithm, inline: frozenset[str] | None):
    """Split ``node`` into (part that depends on labels, [(op, factor that does not)])."""
    if isinstance(node, ex.Access) and node.tensor in algorithm and (inline is None or node.tensor in inline):
        body = inline_access(node, algorithm)
        if isinstance(body, ex.Binary) and body.op in "*/":
            inner, outside = _split(body, labels, algorithm, inline)
            costly = any(any(ex.accesses(factor)) for _, factor in outside) or _is_computed(node.tensor, inner, algorithm)
            if outside and not (costly and _has_several_users(node.tensor, algorithm)):
                return inner, outside
        return _multiple(node, algorithm) or (node, [])
    if isinstance(node, ex.Binary) and node.op in "*/":
        depends = bool(ex.free_labels(node.left) & set(labels)), bool(ex.free_labels(node.right) & set(labels))
        if depends[0] and not depends[1]:
            inner, outside = _split(node.left, labels, algorithm, inline)
            return inner, [*outside, (node.op, node.right)]
        if depends[1] and not depends[0] and node.op == "*":
            inner, outside = _split(node.right, labels, algorithm, inline)
            return inner, [*outside, ("*", node.left)]
        left, left_out = _split(node.left, labels, algorithm, inline)
        right, right_out = _split(node.right, labels, algorithm, inline) if node.op == "*" else (node.right, [])
        if left_out or right_out:
            return replace(node, left=left, right=right), left_out + right_out
    return node, []
