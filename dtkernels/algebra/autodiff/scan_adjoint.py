"""Derive the gradient of a scan: a recurrence that runs the other way.

Of ``h[t] = a[t] * h[t - 1] + b[t]`` with adjoint dh, what reaches h[t] is ``g[t] = dh[t] + a[t + 1] * g[t + 1]``; then the adjoint of b[t]
is g[t], that of a[t] is ``g[t] * h[t - 1]``. A product is the recurrence with b = 0 that starts at 1; zeros among its factors are
no exception. Of a maximum, the step passes g on where it keeps the old value: a tie belongs to the later element, as in torch.cummax.
"""

from __future__ import annotations

from ...lang import expr as ex
from ...lang.algorithm import Definition
from ..smart_constructors import ONE, ZERO, multiply, where

Parts = tuple[tuple[ex.Expr, ex.Expr], ...]  #: (an argument's expression, its adjoint)


def scan_adjoint(d: Definition, scan: ex.Scan, adjoint: ex.Expr, name: str) -> tuple[Definition, Parts]:
    """Return the Func ``name`` of what reaches each element, and each argument of the scan with its adjoint.

    Before: ``h[x, t] = rscan(sum, A[x, t], t);``  After: ``d_h_scan[x, t] = rscan(sum, d_h[x, t], t, reversed);``, the adjoint of ``A[x, t]``
    """
    own = ex.Access(name, tuple(ex.Label(label) for label in d.labels))
    if scan.kind == "sum":
        return Definition(name, d.labels, ex.Scan("sum", (adjoint,), scan.label, not scan.reverse), d.pos), ((scan.args[0], own),)
    t = ex.Label(scan.label)
    before: ex.Expr = ex.Binary("+" if scan.reverse else "-", t, ONE)
    after: ex.Expr = ex.Binary("-" if scan.reverse else "+", t, ONE)
    last = ex.Binary("-", ex.Len(scan.label), ONE)
    is_first = ex.Binary("==", t, last if scan.reverse else ZERO)
    is_last = ex.Binary("==", t, ZERO if scan.reverse else last)
    earlier = ex.Access(d.name, tuple(before if label == scan.label else ex.Label(label) for label in d.labels))
    first, *rest = scan.args
    if scan.kind == "recur":
        following: ex.Expr = ex.substitute(first, {scan.label: after})
        parts: Parts = ((first, multiply(own, earlier)), (rest[0], own))
    elif scan.kind == "prod":
        following, parts = ex.substitute(first, {scan.label: after}), ((first, multiply(own, where(is_first, ONE, earlier))),)
    else:
        takes = ">=" if scan.kind == "max" else "<="
        here = ex.Access(d.name, tuple(map(ex.Label, d.labels)))
        new = ex.Binary(takes, first, earlier)
        following = where(ex.Binary(takes, ex.substitute(first, {scan.label: after}), here), ZERO, ONE)
        parts = ((first, where(ex.Binary("or", is_first, new), own, ZERO)),)
    passed = where(is_last, ZERO, following)
    return Definition(name, d.labels, ex.Scan("recur", (passed, adjoint), scan.label, not scan.reverse), d.pos), parts
