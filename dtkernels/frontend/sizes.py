"""Decide about symbolic sizes. Every decision that a size could change becomes a guard of the traced program."""

from __future__ import annotations

from typing import Any

import sympy
import torch


class Sizes:
    """Compare and divide sizes in the ShapeEnv of one trace."""

    def __init__(self, env: Any):
        self.env = env

    def of(self, value: Any) -> Any:
        """Return the sympy form of an int or a SymInt."""
        if isinstance(value, torch.SymInt):
            return self.env.simplify(value.node.expr)
        if isinstance(value, sympy.Basic):
            return self.env.simplify(value)
        return sympy.Integer(int(value))

    def true(self, condition: Any) -> bool:
        """Decide a relation by the call's sizes; add a guard if other sizes could decide otherwise."""
        condition = self.env.simplify(condition) if isinstance(condition, sympy.Basic) else sympy.sympify(condition)
        if condition in (sympy.true, sympy.false):
            return bool(condition)
        return bool(self.env.evaluate_expr(condition))

    def never_negative(self, value: Any) -> bool:
        """Tell whether a size is at least 0 at every call that takes this program. Adds no guard."""
        return bool(self.env.bound_sympy(self.of(value)).lower >= 0)

    def same(self, a: Any, b: Any) -> bool:
        """Tell whether two sizes are equal."""
        a, b = self.of(a), self.of(b)
        return a == b or self.true(sympy.Eq(a, b))

    def divides(self, a: Any, b: Any) -> bool:
        """Tell whether ``b`` is a multiple of ``a``; of 0 nothing is."""
        from torch.utils._sympy.functions import Mod

        a, b = self.of(a), self.of(b)
        if not self.env.bound_sympy(a).lower > 0 and self.true(sympy.Eq(a, 0)):
            return False
        return a == 1 or a == b or sympy.cancel(b / a).is_integer is True or self.true(sympy.Eq(Mod(b, a), 0))

    def quotient(self, b: Any, a: Any) -> Any:
        """Return ``b / a`` of sizes where ``a`` divides ``b``."""
        from torch.utils._sympy.functions import FloorDiv

        a, b = self.of(a), self.of(b)
        exact = sympy.cancel(b / a)
        return exact if exact.is_integer is True else self.of(FloorDiv(b, a))

    def fixed(self, value: Any) -> int:
        """Return a size as a number, guarded."""
        size = self.of(value)
        return int(size) if size.is_Integer else int(self.env.evaluate_expr(size))
