"""Name the values of a row that another sum adds up: kernels that reduce the rows, or read one element of each, then make them."""

from __future__ import annotations

from dataclasses import replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm, Definition
from ..canonicalize import extracted_func


def extract_row_values(algorithm: Algorithm) -> Algorithm:
    """Give logarithms of sums of exponentials, and elements of products that data picks, their own Func, where a sum over the rows reads them.

    Before: ``s[n, m] = rsum(exp(A[n, m, l]), l); f[n] = rsum(log(s[n, m]), m);``
    After: ``s[n, m] = rsum(exp(A[n, m, l]), l); f_log[n, m] = log(s[n, m]); f[n] = rsum(f_log[n, m], m);``
    """
    definitions: list[Definition] = []
    taken = set(algorithm.names)
    for d in algorithm.definitions:
        made: list[Definition] = []

        def named(node: ex.Expr, d: Definition = d, made: list[Definition] = made) -> ex.Expr:
            kind = _kind(node, algorithm)
            return extracted_func(node, kind, d, made, taken, algorithm.labels) if kind else node

        def within(node: ex.Expr, named=named) -> ex.Expr:
            if not (isinstance(node, ex.Reduce) and node.kind == "sum"):
                return node
            rows = any({*node.labels} & ex.free_labels(n) for n in node.arg.walk() if _kind(n, algorithm))
            return replace(node, arg=node.arg.transform(named)) if rows else node

        changed = d.expr.transform(within)
        definitions += [*made, replace(d, expr=changed) if made else d]
    return algorithm if len(definitions) == len(algorithm.definitions) else algorithm.with_definitions(tuple(definitions))


def _kind(node: ex.Expr, algorithm: Algorithm) -> str:
    """Return what ``node`` is: a "log" of a sum of exponentials, a "picked" element of a product, or "" for others."""
    match node:
        case ex.Call("log", (ex.Access(tensor, index),)) if tensor in algorithm and all(isinstance(i, ex.Label) for i in index):
            made = algorithm[tensor].expr
            exponentials = any(isinstance(n, ex.Call) and n.fn == "exp" for n in made.walk())
            return "log" if isinstance(made, ex.Reduce) and made.kind == "sum" and exponentials else ""
        case ex.Access(tensor, index) if tensor in algorithm and any(any(ex.accesses(i)) for i in index):
            return "picked" if any(isinstance(n, ex.Dot) for n in algorithm[tensor].expr.walk()) else ""
    return ""
