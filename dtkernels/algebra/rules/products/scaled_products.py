"""Multiply operands by the numbers that products are multiplied by, where products are added up: one accumulator then holds their sum."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm, Definition
from ...smart_constructors import factors_of, product
from ..canonicalize import fresh_name


def scale_operands(algorithm: Algorithm, outputs: tuple[str, ...]) -> Algorithm:
    """Multiply a Func by a number, where a product with it is multiplied by that and added to another product.

    Before: ``a[x, r] = rdot(X[x, k], A[r, k], k);  f[x, y] = rdot(X[x, k], W[y, k], k) + c0 * rdot(a[x, r], B[y, r], r);``
    After:  ``a[x, r] = rdot(X[x, k], A[r, k], k) * c0;  f[x, y] = rdot(X[x, k], W[y, k], k) + rdot(a[x, r], B[y, r], r);``

    Where the product is not the only one that reads the Func, as where it is an output, a copy of it is multiplied. The operand is computed, and rounded after that.
    """
    return _Scaling(algorithm, outputs).scaled()


class _Scaling:
    """The Funcs that are multiplied, and the copies of others that are."""

    def __init__(self, algorithm: Algorithm, outputs: tuple[str, ...]):
        read = Counter(a.tensor for d in algorithm.definitions for a in ex.accesses(d.expr))
        self.algorithm, self.names = algorithm, {*algorithm.names}
        self.single = {f for f in algorithm.funcs if read[f] == 1 and f not in outputs and not isinstance(algorithm[f].expr, ex.Cast)}
        self.factors: dict[str, list[ex.Expr]] = {}  #: of Funcs that one product alone reads
        self.copies: dict[tuple[str, ex.Expr], str] = {}  #: of other Funcs, multiplied by a number

    def scaled(self) -> Algorithm:
        """Return the algorithm with scaled operands."""
        found: list[Definition] = []
        for d in [replace(d, expr=d.expr.transform(self._change)) for d in self.algorithm.definitions]:
            found.append(replace(d, expr=product([d.expr, *self.factors.get(d.name, ())])))
            element = ex.Access(d.name, tuple(map(ex.Label, d.labels)))
            found += [Definition(name, d.labels, product([element, factor]), d.pos) for (func, factor), name in self.copies.items() if func == d.name]
        return self.algorithm.with_definitions(tuple(found))

    def _change(self, node: ex.Expr) -> ex.Expr:
        terms = ex.operands_of(node, "+") if isinstance(node, ex.Binary) and node.op == "+" else []
        found = [self._numbers(term) for term in terms]
        if sum(isinstance(term, ex.Dot) or numbers is not None for term, numbers in zip(terms, found)) < 2:
            return node
        return ex.joined("+", [self._product(term, numbers) if numbers else term for term, numbers in zip(terms, found)])

    def _numbers(self, term: ex.Expr) -> list[ex.Expr] | None:
        """Return the numbers that the one product in ``term`` is multiplied by, if an operand of it is a Func; None of another term."""
        every = factors_of(term)
        dots = [f for f in every if isinstance(f, ex.Dot)]
        numbers: list[ex.Expr] = [f for f in every if isinstance(f, (ex.Const, ex.Scalar))]
        return numbers if len(dots) == 1 and numbers and len(numbers) + 1 == len(every) and self._operands(dots[0]) else None

    def _operands(self, dot: ex.Dot) -> list[ex.Access]:
        """Return the operands that are elements of Funcs, one that no other product reads first."""
        made = [s for s in (dot.left, dot.right) if isinstance(s, ex.Access) and s.tensor in self.algorithm]
        return sorted(made, key=lambda s: s.tensor not in self.single)

    def _product(self, term: ex.Expr, numbers: list[ex.Expr]) -> ex.Expr:
        """Return the product in ``term``, with an operand that is multiplied by ``numbers``."""
        dot = next(f for f in factors_of(term) if isinstance(f, ex.Dot))
        operand = self._operands(dot)[0]
        if operand.tensor in self.single:
            self.factors.setdefault(operand.tensor, numbers)
            return dot
        key = operand.tensor, product(numbers)
        if key not in self.copies:
            self.copies[key] = fresh_name(f"{operand.tensor}_scaled", self.names)
        scaled = replace(operand, tensor=self.copies[key])
        return replace(dot, left=scaled) if operand is dot.left else replace(dot, right=scaled)
