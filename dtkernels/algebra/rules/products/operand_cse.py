"""Share operands of matrix products: an operand that several products take becomes one Func, which a schedule may compute once."""

from __future__ import annotations

from collections import Counter

from ....lang import expr as ex
from ....lang.algorithm import Algorithm, Definition
from ..canonicalize import fresh_name


def merge_equal_operands(algorithm: Algorithm) -> Algorithm:
    """Make a Func of each operand that more than one definition has, if it is computed from several tensors.

    Before: ``d_A[x, k] = rdot(d_y[x, y] * s[x, y], B[k, y], y);  d_B[k, y] = rdot(d_y[x, y] * s[x, y], A[x, k], x);``
    After:  ``operand[x, y] = d_y[x, y] * s[x, y];  d_A[x, k] = rdot(operand[x, y], B[k, y], y);  d_B[k, y] = rdot(operand[x, y], A[x, k], x);``

    One tensor times a number stays in place: the number is hoisted out of the product. So do elements that data picks, ``W[e[m], k]`` and
    ``where(e[m] == g, A[m, k], 0)``: as Funcs they would be larger than what they are picked from.
    """
    sides = Counter(side for d in algorithm.definitions for side in {s for s in _operands(d.expr) if _is_computed(s)})
    taken = set(algorithm.names)
    for side in [s for s, count in sides.items() if count > 1]:
        free = ex.free_labels(side)
        name = fresh_name("operand", taken)
        taken.add(name)
        labels = tuple(label for label in algorithm.labels if label in free)
        access = ex.Access(name, tuple(ex.Label(label) for label in labels))
        first = next(i for i, d in enumerate(algorithm.definitions) if side in _operands(d.expr))
        changed = tuple(
            d if side not in _operands(d.expr) else Definition(d.name, d.labels, _replaced(d.expr, side, access), d.pos)
            for d in algorithm.definitions
        )
        algorithm = algorithm.with_definitions((*changed[:first], Definition(name, labels, side), *changed[first:]))
    return algorithm


def _is_computed(side: ex.Expr) -> bool:
    match side:
        case ex.Access() | ex.Call("where", (_, ex.Access(), _)):
            return False
    return len(list(ex.accesses(side))) > 1


def _operands(e: ex.Expr) -> list[ex.Expr]:
    return [side for n in e.walk() if isinstance(n, ex.Dot) for side in (n.left, n.right)]


def _replaced(e: ex.Expr, side: ex.Expr, access: ex.Access) -> ex.Expr:
    def change(node: ex.Expr) -> ex.Expr:
        if not isinstance(node, ex.Dot):
            return node
        left, right = (access if s == side else s for s in (node.left, node.right))
        return ex.Dot(left, right, node.labels, pos=node.pos)

    return e.transform(change)
