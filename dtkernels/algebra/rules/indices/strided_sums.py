"""Sum over the elements that a stride reaches, rather than over the places of which a condition on a remainder leaves few.

``(x + p) % s == 0`` leaves one in ``s`` of the terms over ``x``, and each of these reads another element ``(x + p) / s``: the gradient of the weights
of a transposed convolution is such a sum. Over the elements ``t`` it is a plain one, at the places ``x = s * t - p``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm
from ....lang.extents.linear_form import LinearForm, linear_form
from ...index_inversion import multiple
from ...smart_constructors import ZERO, add, conjuncts_of, replaced
from ..canonicalize import fresh_name

Sum = ex.Reduce | ex.Dot


@dataclass(frozen=True)
class _Stride:
    """The condition ``place % size == 0``, ``place`` being ``x`` and others, and the dimension that ``place / size`` indexes."""

    condition: ex.Expr
    quotient: ex.Expr
    x: str
    rest: LinearForm  #: ``place - x``
    size: int
    dimension: tuple[str, int]  #: an input and one of its dimensions


def sum_over_elements(algorithm: Algorithm) -> Algorithm:
    """Replace a label of a sum by one of the elements that a stride leaves of it.

    Before: ``d_W[r] = rsum(d_f[x] * where((x + 1 - r) % 2 == 0, A[(x + 1 - r) / 2], 0), x);``
    After:  ``d_W[r] = rsum(d_f[2 * x_step - 1 + r] * A[x_step], x_step);``

    The others of its factors are 0 where ``x`` is past its extent, or a condition says so.
    """
    taken = set(algorithm.names)
    new: list[tuple[str, str, int]] = []

    def change(node: ex.Expr) -> ex.Expr:
        while isinstance(node, (ex.Reduce, ex.Dot)) and (found := next(_strides(node, algorithm), None)):
            step = fresh_name(f"{found.x}_step", taken)
            new.append((step, *found.dimension))
            node = _summed(node, found, step, algorithm)
        return node

    definitions = tuple(replace(d, expr=d.expr.transform(change)) for d in algorithm.definitions)
    if not new:
        return algorithm
    whole = replace(algorithm, rvars=algorithm.rvars + tuple(label for label, *_ in new), extents=algorithm.extents + tuple(new))
    return whole.with_definitions(definitions)


def _strides(node: Sum, algorithm: Algorithm) -> Iterator[_Stride]:
    """Yield the conditions of a sum's factors that leave some of the terms over one label."""
    if isinstance(node, ex.Reduce) and node.kind != "sum":
        return
    for factor in _factors(node):
        match factor:
            case ex.Call("where", (conditions, ex.Access(tensor, index), ex.Const(0))) if tensor in algorithm.inputs:
                for condition in conjuncts_of(conditions):
                    yield from _stride(condition, tensor, index, node)


def _factors(node: Sum) -> Iterator[ex.Expr]:
    """Yield the factors of a sum's terms."""
    todo = [node.left, node.right] if isinstance(node, ex.Dot) else [node.arg]
    while todo:
        e = todo.pop()
        if isinstance(e, ex.Binary) and e.op == "*":
            todo += [e.left, e.right]
        else:
            yield e


def _stride(condition: ex.Expr, tensor: str, index: tuple[ex.Expr, ...], node: Sum) -> Iterator[_Stride]:
    match condition:
        case ex.Binary("==", ex.Binary("%", place, ex.Const(size)), ex.Const(0)) if type(size) is int and size > 1:
            quotient = ex.Binary("/", place, ex.Const(size))
        case _:
            return
    form = linear_form(place)
    for x in node.labels:
        rest = _without(form, x)
        at = [dim for dim, i in enumerate(index) if i == quotient]
        inside = [n for n in node.walk() if n in (quotient, condition)]
        plain = sum(i == ex.Label(x) for a in ex.accesses(node) for i in a.index)
        count = sum(n == ex.Label(x) for n in node.walk())
        if rest is not None and len(at) == 1 and len(inside) == 2 and count == plain + 2:
            yield _Stride(condition, quotient, x, rest, size, (tensor, at[0]))


def _without(form: LinearForm, x: str) -> LinearForm | None:
    """Return a linear form without the addend ``x``; None where that is not a plain one."""
    rest = {atom: times for atom, times in form.items() if times and atom != ex.Label(x)}
    return None if form.get(ex.Label(x)) != 1 or any(atom is not None and x in ex.free_labels(atom) for atom in rest) else rest


def _summed(node: Sum, s: _Stride, step: str, algorithm: Algorithm) -> ex.Expr:
    """Return the sum over ``step``."""
    place: ex.Expr = ex.Binary("*", ex.Const(s.size), ex.Label(step))
    for atom, times in s.rest.items():
        place = add(place, multiple(atom, -times))
    outside = ex.Binary("and", ex.Binary(">=", place, ZERO), ex.Binary("<", place, ex.Len(s.x)))
    vanishes = any(isinstance(f, ex.Access) and f.tensor in algorithm.inputs and ex.Label(s.x) in f.index for f in _factors(node))
    by: dict[ex.Expr, ex.Expr] = {s.quotient: ex.Label(step), s.condition: ex.Const(True) if vanishes else outside, ex.Label(s.x): place}
    labels = tuple(step if x == s.x else x for x in node.labels)
    return replace(replaced(node, by), labels=labels)  # type: ignore[call-arg]
