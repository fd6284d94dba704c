"""Build expressions, simplifying trivial cases: 0 + a, 1 * a, a / 1, - - a."""

from __future__ import annotations

from collections.abc import Sequence

from ..lang import expr as ex

ZERO, ONE = ex.Const(0), ex.Const(1)


def is_zero(e: ex.Expr) -> bool:
    return isinstance(e, ex.Const) and not isinstance(e.value, bool) and e.value == 0


def is_one(e: ex.Expr) -> bool:
    return isinstance(e, ex.Const) and not isinstance(e.value, bool) and e.value == 1


def is_constant(e: ex.Expr) -> bool:
    """Return whether ``e`` is a number; a negative one is written with a unary minus."""
    return isinstance(e, ex.Const) or isinstance(e, ex.Unary) and e.op == "-" and isinstance(e.arg, ex.Const)


def negate(a: ex.Expr) -> ex.Expr:
    if is_zero(a):
        return a
    return a.arg if isinstance(a, ex.Unary) and a.op == "-" else ex.Unary("-", a)


def is_length(e: ex.Expr) -> bool:
    """Return whether ``e`` is the number of terms of a sum: ``len(k)``, or a product of such."""
    return isinstance(e, ex.Len) or isinstance(e, ex.Binary) and e.op == "*" and all(map(is_length, e.children()))


def add(a: ex.Expr, b: ex.Expr) -> ex.Expr:
    if is_zero(a):
        return b
    if is_zero(b):
        return a
    if isinstance(b, ex.Unary) and b.op == "-":
        return ex.Binary("-", a, b.arg)
    return ex.Binary("+", a, b)


def add_with_common_factors(a: ex.Expr, b: ex.Expr) -> ex.Expr:
    """Return ``a + b``, with common outer operations applied once: ``x * e / n + y * e / n`` is ``(x + y) * e / n``.

    This joins the contributions to an adjoint from several uses of the same form.
    """
    match a, b:
        case (ex.Binary("*" | "/" as op, x, last), ex.Binary(other, y, same)) if (op, last) == (other, same):
            return ex.Binary(op, add_with_common_factors(x, y), last)
        case (ex.Call("where", (c, x, none)), ex.Call("where", (same, y, nil))) if c == same and is_zero(none) and is_zero(nil):
            return where(c, add_with_common_factors(x, y), ZERO)
        case (ex.Unary("-", x), ex.Unary("-", y)):
            return negate(add_with_common_factors(x, y))
        case (ex.Binary("+" | "-" as op, x, y), _) if (both := _merge_selects(y if op == "+" else negate(y), b)) is not None:
            return add(x, both)
    both = _merge_selects(a, b)
    return add(a, b) if both is None else both


def _merge_selects(a: ex.Expr, b: ex.Expr) -> ex.Expr | None:
    """Return the sum of two choices by one condition, each 0 in the other's branch; None for anything else.

    ``where(c, x, 0) - where(c, 0, y)`` is ``where(c, x, -y)``.
    """
    (c, x, none), (same, nil, y) = _as_select(a), _as_select(b)
    if c is None or c != same:
        return None
    if is_zero(none) and is_zero(nil):
        return where(c, x, y)
    return where(c, nil, none) if is_zero(x) and is_zero(y) else None


def _as_select(e: ex.Expr) -> tuple[ex.Expr | None, ex.Expr, ex.Expr]:
    """Return (condition, one, other) of a choice, perhaps negated; the condition is None if ``e`` is not a choice."""
    match e:
        case ex.Call("where", (c, a, b)):
            return c, a, b
        case ex.Unary("-", ex.Call("where", (c, a, b))):
            return c, negate(a), negate(b)
    return None, e, e


def multiply(a: ex.Expr, b: ex.Expr) -> ex.Expr:
    if is_zero(a) or is_zero(b):
        return ZERO
    if is_one(a):
        return b
    if is_one(b):
        return a
    for one, other in ((a, b), (b, a)):
        if isinstance(one, ex.Unary) and one.op == "-":
            return negate(multiply(one.arg, other) if one is a else multiply(other, one.arg))
    return ex.Binary("*", a, b)


def divide(a: ex.Expr, b: ex.Expr) -> ex.Expr:
    if is_zero(a) or is_one(b):
        return a
    if isinstance(a, ex.Unary) and a.op == "-":
        return negate(divide(a.arg, b))
    return ex.Binary("/", a, b)


def where(condition: ex.Expr, a: ex.Expr, b: ex.Expr) -> ex.Expr:
    if isinstance(condition, ex.Const):
        return a if condition.value else b
    return a if a == b else ex.Call("where", (condition, a, b))


def simplify(e: ex.Expr, index: bool = False) -> ex.Expr:
    """Rebuild ``e`` with the constructors above and decide comparisons of constants. In an ``index`` a division rounds toward -inf."""
    node = e.rebuild(lambda child: simplify(child, index or isinstance(e, ex.Access)))
    match node:
        case ex.Unary("-", arg):
            return negate(arg)
        case ex.Binary("+" | "-", ex.Label(), ex.Const(0)) | ex.Binary("+", ex.Const(0), ex.Label()):
            return node  # an index that has not the extent of its label
        case ex.Binary("+", a, b):
            return add(a, b)
        case ex.Binary("-", a, b):
            return add(a, negate(b))
        case ex.Binary("*", a, b):
            return multiply(a, b)
        case ex.Binary("/", a, b) if not index:
            return divide(a, b)
        case ex.Binary("==", ex.Const(a), ex.Const(b)):
            return ex.Const(a == b)
        case ex.Call("where", (c, a, b)):
            return where(c, a, b)
        case ex.Reduce("sum", arg, _) if is_zero(arg):
            return ZERO
        case ex.Dot(a, b, _) if is_zero(a) or is_zero(b):
            return ZERO
    return node


def factors_of(node: ex.Expr) -> list[ex.Expr]:
    """Return the factors of a product; the expression itself if it is not a product."""
    return ex.operands_of(node, "*")


def product(factors: Sequence[ex.Expr]) -> ex.Expr:
    """Return the product of ``factors`` as it stands, without simplification; 1 for none."""
    return ex.joined("*", factors) if factors else ONE


def conjuncts_of(condition: ex.Expr) -> list[ex.Expr]:
    """Return the conditions that ``and`` joins; the condition itself if there is one only."""
    return ex.operands_of(condition, "and")


def conditions_of_term(e: ex.Expr) -> tuple[list[ex.Expr], ex.Expr]:
    """Return the conditions without which ``e`` is 0, the outermost first, and what it is under all of them."""
    conditions: list[ex.Expr] = []
    while isinstance(e, ex.Call) and e.fn == "where" and is_zero(e.args[2]):
        conditions += conjuncts_of(e.args[0])
        e = e.args[1]
    return conditions, e


def replaced(e: ex.Expr, by: dict[ex.Expr, ex.Expr]) -> ex.Expr:
    """Replace subexpressions, the outermost first. Conditions that became true are left out."""
    if e in by:
        return by[e]
    match e.rebuild(lambda child: replaced(child, by)):
        case ex.Call("where", (ex.Const(True), kept, _)):
            return kept
        case ex.Binary("and", ex.Const(True), other) | ex.Binary("and", other, ex.Const(True)):
            return other
        case same:
            return same


def reduces(e: ex.Expr) -> bool:
    """Return whether ``e`` has a reduction or a scan."""
    return any(isinstance(n, (ex.Reduce, ex.Dot, ex.Scan)) for n in e.walk())


def product_of(e: ex.Expr) -> ex.Dot | None:
    """Return the matrix product that ``e`` is, perhaps times numbers; None for others."""
    inner = without_numbers(e)
    return inner if isinstance(inner, ex.Dot) else None


def sum_with_product(e: ex.Expr) -> ex.Dot | None:
    """Return the one matrix product of a sum whose other terms reduce nothing, perhaps times numbers; None for others."""
    inner = without_numbers(e)
    if isinstance(inner, ex.Binary) and inner.op in ("+", "-"):
        product, rest = (inner.left, inner.right) if reduces(inner.left) else (inner.right, inner.left)
        return None if reduces(rest) else sum_with_product(product)
    return inner if isinstance(inner, ex.Dot) else None


def without_numbers(e: ex.Expr) -> ex.Expr:
    """Drop the scalar and constant factors of ``e``."""
    match e:
        case ex.Binary("*", ex.Const() | ex.Scalar(), inner) | ex.Binary("*" | "/", inner, ex.Const() | ex.Scalar()) | ex.Unary("-", inner):
            return without_numbers(inner)
    return e


def plus(e: ex.Expr, number: int) -> ex.Expr:
    """Return ``e + number``, as it is written in an index."""
    return ex.Binary("+" if number > 0 else "-", e, ex.Const(abs(number))) if number else e


def moved_by(label: str, number: int) -> ex.Expr:
    """Return ``label + number``."""
    return plus(ex.Label(label), number)
