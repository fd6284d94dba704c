"""Find matrix products that are only divided by a norm of their own: between kernels they are stored in the dtype of the results.

``y[b, o] = rdot(X[b, k], W[o, k], k)``, then ``y * rsqrt(rmean(y * y))``: the norm needs a sum over all of ``y`` first, so that ``y`` goes to
memory and back. torch rounds it there to the dtype of its layers, and so does this, which halves what is moved. The relative error of an
element stays what rounding the result makes it. The sums that the kernel of the product makes beside it are of unrounded elements.

A mean that is subtracted enlarges the relative error by the mean over the deviation: KernelBench's 2/033, a batch norm after a product of
uniform inputs, was then off by two units in the last place of bfloat16. Such products stay in float32.

How a value depends on ``y`` is worked out upwards from each access:

- ``linear``: by factors, maxima, choices and sums with other values, whose rounding errors are in proportion to the elements'
- ``power``: by products of it, which only a sum may take
- ``normalized``: divided by something made of sums of it, after which its size is that of a number near 1
- ``summed``: by a sum or a product over it, in which rounding errors are averaged; a maximum over it is ``linear`` too
- ``other``: anything else. An exponential of a rounded element, its difference from a mean or a comparison with another would show the rounding
"""

from __future__ import annotations

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition

_REDUCED = frozenset({"summed", "normalized"})


def normalized_products(algorithm: Algorithm) -> frozenset[str]:
    """Return the Funcs that hold a matrix product and that others read in sums, and by element only as far as rounding does not show."""
    return frozenset(d.name for d in algorithm.definitions if _is_matrix_product(d) and _Reads(algorithm, d.name).are_normalized())


def _is_matrix_product(d: Definition) -> bool:
    """Return whether a definition holds a product of whose operands each has a label that the other lacks, and no scan nor a cast."""
    if isinstance(d.expr, (ex.Cast, ex.Write)):
        return False
    return any(isinstance(n, ex.Dot) and all(ex.own_labels(n)) for n in d.expr.walk())


class _Reads:
    """How the Funcs of an algorithm depend on one of them, the root."""

    def __init__(self, algorithm: Algorithm, root: str):
        self.algorithm = algorithm
        self.root = root
        self.dependents = {d.name for d in algorithm.definitions if root in algorithm.needed_by((d.name,))}
        self.has_sum = self.has_element = False
        self.seen: set[str] = set()
        self.dividing: dict[str, bool] = {}

    def are_normalized(self) -> bool:
        """Return whether ``root`` is read in a sum and element by element, and in no way that would show its rounding. Parts of a sum are only summed."""
        return self._allows_rounding(self.root) and self.has_sum and self.has_element

    def _allows_rounding(self, func: str) -> bool:
        """Return whether no read of ``func``, which is linear in the root, shows the rounding of the root."""
        self.seen.add(func)
        for d in self.algorithm.definitions:
            if d.name == func:
                continue
            found = self._kinds(d.expr, func)
            if found & {"other", "power"}:
                return False
            self.has_sum |= "summed" in found
            self.has_element |= bool(found & {"linear", "normalized"})
            if "linear" in found and d.name not in self.seen and not self._allows_rounding(d.name):
                return False
        return True

    def _kinds(self, e: ex.Expr, func: str) -> frozenset[str]:
        """Return how ``e`` depends on the elements of ``func``; nothing where it does not."""
        match e:
            case ex.Access(tensor, index):
                indexing = any(a.tensor == func for i in index for a in ex.accesses(i))
                return frozenset({"other"} if indexing else {"linear"} if tensor == func else ())
            case ex.Binary("*", a, b):
                return self._of_product(self._kinds(a, func), self._kinds(b, func), a, b)
            case ex.Binary("/", a, b):
                below = self._kinds(b, func)
                return self._scaled(self._kinds(a, func), b, True) | (below if below <= _REDUCED else {"other"})
            case ex.Binary("+" | "-", a, b):
                left, right = self._kinds(a, func), self._kinds(b, func)
                cancels = (left - _REDUCED and self._is_made_of_sums(b)) or (right - _REDUCED and self._is_made_of_sums(a))
                return frozenset({"other"}) if cancels else left | right
            case ex.Unary("-", _) | ex.Call("maximum" | "minimum" | "abs", _):
                return self._of_children(e, func)
            case ex.Call("where", (condition, a, b)) if self._keeps_its_truth(condition, func):
                return self._kinds(a, func) | self._kinds(b, func)
            case ex.Reduce("max" | "min", arg):
                inner = self._kinds(arg, func)
                return inner | {"summed"} if inner else inner
            case ex.Reduce("sum" | "mean") | ex.Dot():
                inner = self._of_children(e, func)
                return frozenset({"other"} if "other" in inner else {"summed"} if inner else ())
            case ex.Cast(arg, dtype):  # float32 is asked for to keep digits
                inner = self._kinds(arg, func)
                return inner if dtype != "fp32" or inner <= {"summed"} else frozenset({"other"})
        inner = self._of_children(e, func)
        return inner if inner <= _REDUCED else frozenset({"other"})

    def _keeps_its_truth(self, condition: ex.Expr, func: str) -> bool:
        """Return whether rounding leaves a condition as it is: it tests other values, or a sign."""
        match condition:
            case ex.Binary(op, tested, ex.Const(0)) if op in ex.COMPARISONS:
                return self._kinds(tested, func) <= {"linear"}
        return not self._of_children(condition, func)

    def _of_children(self, e: ex.Expr, func: str) -> frozenset[str]:
        return frozenset().union(*(self._kinds(child, func) for child in e.children()))

    def _of_product(self, left: frozenset[str], right: frozenset[str], a: ex.Expr, b: ex.Expr) -> frozenset[str]:
        """Return how a product depends on what its factors depend on."""
        if "other" in left | right:
            return frozenset({"other"})
        if left - _REDUCED and right - _REDUCED:
            return frozenset({"power"}) | (left | right) & _REDUCED
        return self._scaled(left, b, False) | self._scaled(right, a, False)

    def _scaled(self, kinds: frozenset[str], by: ex.Expr, divided: bool) -> frozenset[str]:
        """Return how a value depends on what it depends on, once it is multiplied or ``divided`` by another."""
        shrinks = self._is_made_of_sums(by) if divided else self._divides(by)
        return (kinds & _REDUCED) | {"normalized"} if shrinks and kinds and "other" not in kinds else kinds

    def _divides(self, e: ex.Expr) -> bool:
        """Return whether ``e`` becomes smaller as the root becomes larger: a reciprocal, by itself or in a Func, of what is made of it."""
        for n in e.walk():
            match n:
                case ex.Call("rsqrt", (arg,)) if self._is_made_of_sums(arg):
                    return True
                case ex.Binary("/", _, below) if self._is_made_of_sums(below):
                    return True
                case ex.Access(tensor, _) if tensor in self.dependents and tensor != self.root and self._func_divides(tensor):
                    return True
        return False

    def _func_divides(self, func: str) -> bool:
        if func not in self.dividing:
            self.dividing[func] = self._divides(self.algorithm[func].expr)
        return self.dividing[func]

    def _is_made_of_sums(self, e: ex.Expr) -> bool:
        """Return whether an expression reads what depends on the root."""
        return any(a.tensor in self.dependents for a in ex.accesses(e))
