"""Give every scan a Func of its own, with its plain elements as terms.

A scan at one element is made from all the elements before it, so no other rule may look inside. As the whole definition of a Func it is
opaque to them: Funcs that reduce nothing are looked through only where every index is a label, and this one by none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ..smart_constructors import ONE, ZERO
from .canonicalize import extracted_func

_FIRST = {"sum": ZERO, "prod": ONE, "max": ex.NEG_INF, "min": ex.INF}


def extract_scans(algorithm: Algorithm) -> Algorithm:
    """Make each scan the whole definition of a Func, inclusive, and its terms free of reductions.

    Before: ``f[x, t] = B[x, t] / rscan(sum, A[x, t], t, exclusive);``
    After:  ``f_sum[x, t] = rscan(sum, where(t == 0, 0, A[x, t - 1]), t);  f[x, t] = B[x, t] / f_sum[x, t];``
    """
    if not any(isinstance(n, ex.Scan) for d in algorithm.definitions for n in d.expr.walk()):
        return algorithm
    taken = {*algorithm.names, *(n for n, _ in algorithm.params)}
    found: list[Definition] = []
    for d in algorithm.definitions:
        made: list[Definition] = []
        expr = _Extractor(d, made, taken, algorithm.labels).whole(d.expr)
        found += [*made, replace(d, expr=expr)]
    return algorithm.with_definitions(tuple(found))


@dataclass
class _Extractor:
    """Makes the Funcs of one definition."""

    owner: Definition
    made: list[Definition]
    taken: set[str]
    order: tuple[str, ...]

    def whole(self, expr: ex.Expr) -> ex.Expr:
        """Return the definition; one that is a scan over all its labels stays one."""
        if isinstance(expr, ex.Scan) and ex.free_labels(expr) == set(self.owner.labels):
            return self._plain(replace(expr, args=tuple(a.transform(self._change) for a in expr.args)))
        return expr.transform(self._change)

    def _change(self, node: ex.Expr) -> ex.Expr:
        return self._func(self._plain(node), node.kind) if isinstance(node, ex.Scan) else node

    def _plain(self, scan: ex.Scan) -> ex.Scan:
        """Return an inclusive scan of terms without reductions: those that reduce become a Func."""
        reduces = (any(isinstance(n, (ex.Reduce, ex.Dot)) for n in a.walk()) for a in scan.args)
        scan = replace(scan, args=tuple(self._func(a, "term") if r else a for a, r in zip(scan.args, reduces)))
        return _inclusive(scan) if scan.exclusive else scan

    def _func(self, node: ex.Expr, kind: str) -> ex.Expr:
        return extracted_func(node, kind, self.owner, self.made, self.taken, self.order)


def _inclusive(scan: ex.Scan) -> ex.Scan:
    """Return an exclusive scan as the inclusive one of the terms an element further, after the neutral element."""
    t: ex.Expr = ex.Label(scan.label)
    moved = ex.Binary("+" if scan.reverse else "-", t, ONE)
    first = ex.Binary("==", t, ex.Binary("-", ex.Len(scan.label), ONE) if scan.reverse else ZERO)
    term = ex.Call("where", (first, _FIRST[scan.kind], ex.substitute(scan.args[0], {scan.label: moved})))
    return replace(scan, args=(term,), exclusive=False)
