"""Name copies of Funcs in the dtype of the products that read them, so that a schedule can store both.

A Func that products read, and others element by element, is stored in float32. A product then loads twice the bytes and converts each tile on the
way to the matrix units. Before::

    s[i, j] = rdot(Y[i, k], Y[j, k], k);        p[i, j] = b * s[i, j] + c * rdot(s[i, l], s[l, j], l);

After, with ``s_rounded``, whose kernel can store ``s`` too::

    s[i, j] = rdot(Y[i, k], Y[j, k], k);        s_rounded[i, j] = s[i, j];
    p[i, j] = b * s[i, j] + c * rdot(s_rounded[i, l], s_rounded[l, j], l);
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..expr import Access, Cast, Dot, Expr, Label, accesses

if TYPE_CHECKING:
    from ..algorithm import Algorithm


def rounded_copy_names(algorithm: Algorithm) -> dict[str, str]:
    """Map the names that the copies have in a schedule to the Funcs: ``f_rounded`` for each ``f`` that is an operand of a product, and is read otherwise too."""
    sides = [side for d in algorithm.definitions for n in d.expr.walk() if isinstance(n, Dot) for side in (n.left, n.right)]
    inside = {id(side) for side in sides}
    plain = {a.tensor for d in algorithm.definitions for a in accesses(d.expr) if id(a) not in inside}
    operands = {side.tensor for side in sides if isinstance(side, Access)} - algorithm.operands
    found: dict[str, str] = {}
    for d in algorithm.definitions:
        if d.name in operands & plain and d.labels and not isinstance(d.expr, Cast):
            name = f"{d.name}_rounded"
            while name in algorithm.names:
                name += "_"
            found[name] = d.name
    return found


def with_rounded_copy(algorithm: Algorithm, name: str, func: str) -> Algorithm:
    """Return the algorithm with the copy after ``func``. Products read the copy."""

    def copy(side: Expr) -> Expr:
        return replace(side, tensor=name) if isinstance(side, Access) and side.tensor == func else side

    def change(node: Expr) -> Expr:
        return replace(node, left=copy(node.left), right=copy(node.right)) if isinstance(node, Dot) else node

    changed = [replace(d, expr=d.expr.transform(change)) for d in algorithm.definitions]
    at = next(i for i, d in enumerate(changed) if d.name == func)
    labels = changed[at].labels
    made = replace(changed[at], name=name, expr=Access(func, tuple(map(Label, labels))))
    return replace(algorithm.with_definitions((*changed[: at + 1], made, *changed[at + 1 :])), operands=algorithm.operands | {name})
