"""Fold constants: bind parameters to values, do arithmetic on constants, and remove branches that are never taken."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ...lang.errors import DTError
from ...lang.extents.formulas import check_formulas, expanded, inputs_of

_FOLD = {
    "+": operator.add, "-": operator.sub, "*": operator.mul,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip


def bind_parameters(algorithm: Algorithm, values: dict[str, int | bool] | None = None) -> Algorithm:
    """Replace each parameter by its value (its default where none is given), then fold.

    Before: ``Param causal = false; s[m, l] = where(not causal or l <= m, q[m, l], -inf);``
    After, causal = false: ``s[m, l] = q[m, l];``. Inputs that only a removed branch used are removed too. A Func that only renames another,
    or that is a constant, is no longer used.
    """
    defaults = dict(algorithm.params)
    values = dict(values or {})
    for name, value in values.items():
        if name not in defaults:
            raise DTError("unknown parameter", found=repr(name), allowed=", ".join(defaults) or "none")
        if isinstance(value, bool) != isinstance(defaults[name], bool) or not isinstance(value, int):
            raise DTError(f"parameter {name} is {type(defaults[name]).__name__}", found=repr(value))
        if abs(value) >= 10**18:
            raise DTError("an integer has at most 18 digits", found=f"{name} of {abs(value).bit_length()} bits")
    bound = {**defaults, **values}

    def bind(node: ex.Expr) -> ex.Expr:
        return replace(constant(bound[node.name]), pos=node.pos) if isinstance(node, ex.Param) else node

    definitions = tuple(replace(d, expr=d.expr.transform(bind)) for d in algorithm.definitions)
    formulas = tuple((label, formula.transform(bind)) for label, formula in algorithm.formulas)
    folded = _fold_formulas(fold_constants(replace(algorithm, params=(), definitions=definitions, formulas=formulas)))
    _check_divisors(folded)
    simple = (ex.Access, ex.Const, ex.Scalar)
    reduced_to_names = {d.name for d in folded.definitions if isinstance(d.expr, simple)}
    emptied = tuple(d.name for d in algorithm.definitions if d.name in reduced_to_names and not isinstance(d.expr, simple))
    return keep_extents(drop_unused(fold_constants(inline_copies(folded, emptied)) if emptied else folded), algorithm)


def _fold_formulas(algorithm: Algorithm) -> Algorithm:
    """Express each formula of an extent by sizes of inputs and numbers alone; one that is a number becomes ``Extent r = 4;``."""
    if not algorithm.formulas:
        return algorithm
    check_formulas(algorithm, {})
    found = [(label, expanded(formula, algorithm._extent_expr)) for label, formula in algorithm.formulas]
    constants = tuple((label, "", int(f.value)) for label, f in found if isinstance(f, ex.Const))
    kept = tuple((label, f) for label, f in found if not isinstance(f, ex.Const))
    return replace(algorithm, extents=algorithm.extents + constants, formulas=kept)


def _check_divisors(algorithm: Algorithm) -> None:
    """Raise DTError for an integer division by 0."""
    nodes = [n for d in algorithm.definitions for n in d.expr.walk()]
    inside = {id(n) for a in nodes if isinstance(a, ex.Access) for i in a.index for n in i.walk()}
    for n in nodes:
        if isinstance(n, ex.Binary) and n.right == ex.Const(0) and (n.op in ("%", "//") or n.op == "/" and id(n) in inside):
            raise DTError("an integer is divided by 0", found=str(n), allowed="a divisor that is not 0", at=n.pos)


def inline_copies(algorithm: Algorithm, names: tuple[str, ...]) -> Algorithm:
    """Inline the Funcs ``names``, each an element of another Func or input, a scalar or a constant.

    A Func that some use shifts is not inlined: outside its extent it reads 0, and what it copies may not, unless that has the same extents.
    """
    shifted = {a.tensor for d in algorithm.definitions for a in ex.accesses(d.expr) if not all(isinstance(i, ex.Label) for i in a.index)}
    copies = {d.name: d for d in algorithm.definitions if d.name in names and (d.name not in shifted or _is_whole_copy(d, algorithm))}

    def change(node: ex.Expr) -> ex.Expr:
        while isinstance(node, ex.Access) and node.tensor in copies:
            d = copies[node.tensor]
            node = ex.substitute(d.expr, dict(zip(d.labels, node.index)))
        return node

    return replace(algorithm, definitions=tuple(replace(d, expr=d.expr.transform(change)) for d in algorithm.definitions))


def _is_whole_copy(d: Definition, algorithm: Algorithm) -> bool:
    """Return whether ``d`` is all of a tensor that another definition reads at the same labels: these tell its extents once ``d`` is gone."""
    if not isinstance(d.expr, ex.Access) or d.expr.index != tuple(map(ex.Label, d.labels)):
        return False
    return any(d.expr in ex.accesses(other.expr) for other in algorithm.definitions if other is not d)


def fold_constants(algorithm: Algorithm) -> Algorithm:
    """Do arithmetic on constants and drop branches that are never taken. A reshape, which labels make needless, is dropped too.

    Before: ``y[x] = where(true, 2 * 3 * A[x], 0);``  After: ``y[x] = 6 * A[x];``
    """
    sized = frozenset(label for label, _ in algorithm.formulas)
    return replace(algorithm, definitions=tuple(replace(d, expr=_folded(d.expr, sized)) for d in algorithm.definitions))


def _folded(node: ex.Expr, sized: frozenset[str], is_index: bool = False) -> ex.Expr:
    """Fold ``node``. ``A[x + 0]`` stays: a bare ``x`` would take the extent of that dimension; so does ``A[x / 1]`` of an x in ``sized``."""
    node = node.rebuild(lambda child: _folded(child, sized, isinstance(node, ex.Access)))
    folded = _fold(node)
    if not (is_index and isinstance(folded, ex.Label) and isinstance(node, ex.Binary)):
        return folded
    return node if node.op in "+-" or folded.name in sized else folded


def drop_unused(algorithm: Algorithm, keep: tuple[str, ...] = ()) -> Algorithm:
    """Remove inputs, scalars and labels that no definition mentions. An RVar becomes a Var if it is a dimension and no longer reduced."""
    nodes = [n for d in algorithm.definitions for n in d.expr.walk()]
    reduced = {label for n in nodes if isinstance(n, (ex.Reduce, ex.Dot)) for label in n.labels}
    own = {label for d in algorithm.definitions for label in d.labels}
    used = {n.tensor for n in nodes if isinstance(n, ex.Access)} | {n.name for n in nodes if isinstance(n, (ex.Scalar, ex.Label))}
    used |= {n.label for n in nodes if isinstance(n, ex.Len)} | reduced | own | set(keep)
    used |= {tensor for label, tensor, _ in algorithm.extents if label in used}
    formulas = tuple((label, _in_terms_of(used, formula, algorithm)) for label, formula in algorithm.formulas if label in used)
    used |= {tensor for _, formula in formulas for tensor, _ in inputs_of(formula)}
    kept: dict[str, Any] = {kind: tuple(n for n in getattr(algorithm, kind) if n in used) for kind in ("inputs", "scalars")}
    kept["extents"] = tuple(e for e in algorithm.extents if e[0] in used)
    kept["formulas"] = formulas
    kept["vars"] = tuple(v for v in algorithm.vars if v in own)
    kept["rvars"] = tuple(v for v in algorithm.labels if v in used and v not in kept["vars"])
    return replace(algorithm, **kept)


def _in_terms_of(labels: set[str], formula: ex.Expr, algorithm: Algorithm) -> ex.Expr:
    """Return a formula that counts by ``labels`` as it is, any other in terms of sizes of inputs."""
    lost = any(isinstance(n, ex.Len) and n.label not in labels for n in formula.walk())
    return expanded(formula, algorithm._extent_expr) if lost else formula


def with_plain_vars(algorithm: Algorithm) -> Algorithm:
    """Declare an RVar as a Var if it is a dimension and nothing reduces it any more.

    Before: ``RVar k; d_A[m, k] = d_y[m] * B[k];``  After: ``Var k; d_A[m, k] = d_y[m] * B[k];``
    """
    reduced = {label for d in algorithm.definitions for n in d.expr.walk() if isinstance(n, (ex.Reduce, ex.Dot)) for label in n.labels}
    plain = tuple(label for label in algorithm.rvars if label not in reduced)
    return replace(algorithm, vars=algorithm.vars + plain, rvars=tuple(label for label in algorithm.rvars if label in reduced))


def keep_extents(after: Algorithm, before: Algorithm) -> Algorithm:
    """Declare an ``Extent`` for each label of ``after`` whose extent only a removed access defined.

    Before: ``f[x] = rsum(where(false, A[x, y], B[x]), y);``  After: ``Extent y = A[1]; f[x] = rsum(B[x], y);``
    """
    lost = [label for label in after.labels if after.plain_extent(label) is None and not after.formulas_of(label)]
    sources = {label: source for label in lost if (source := before.extent_source(label)) is not None}
    formulas = {label: found[0] for label in lost if label not in sources and (found := before.extent_formulas(label))}
    read = {*sources.values(), *(place for f in formulas.values() for place in inputs_of(f))}
    told = {tensor for tensor, _ in read}
    inputs = tuple(t for t in before.inputs if t in told or t in after.inputs)
    inputs += tuple(t for t in after.inputs if t not in inputs)
    if not sources and not formulas:
        return after
    ranks = {t: len(before.plain_labels(t)) for t in told}  # an input that nothing reads any more keeps its dimensions
    extents = after.extents + tuple((label, *source) for label, source in sources.items())
    kept = after.formulas + tuple(formulas.items())
    return replace(after, inputs=inputs, extents=extents, formulas=kept, ranks=tuple({**dict(after.ranks), **ranks}.items()))


def _fold(node: ex.Expr) -> ex.Expr:
    match node:
        case ex.Reshape(arg, _):
            return arg
        case ex.Unary("-", ex.Const(value)) if not isinstance(value, bool) and not math.isinf(value):
            return ex.Const(-value) if value < 0 else node  # negative literals print as unary minus
        case ex.Unary("-", ex.Unary("-", arg)):
            return arg
        case ex.Unary("not", ex.Const(value)):
            return ex.Const(not value)
        case ex.Binary("and" | "or" as op, left, right):
            return fold_logic(op, left, right, node)
        case ex.Binary(op, left, right):
            return _fold_arithmetic(op, left, right, node)
        case ex.Call("where", (ex.Const(value), a, b)):
            return a if value else b
        case ex.Call("pow", (a, b)) if (power := _value(b)) is not None and sum(1 for _ in a.walk()) <= _SHORT:
            return _power(a, power) or node
    return node


_SHORT = 100  #: nodes of a base that is repeated


def _power(a: ex.Expr, power: int | float) -> ex.Expr | None:
    """Return ``a`` to a small whole or half power without ``pow``, as torch computes them; None for another power."""
    if power < 0:
        below = ex.Call("rsqrt", (a,)) if power == -0.5 else _power(a, -power)
        return below if power == -0.5 or below is None else ex.Binary("/", ex.Const(1), below)
    square = ex.Binary("*", a, a)
    known = {0: ex.Const(1), 0.5: ex.Call("sqrt", (a,)), 1: a, 2: square, 3: ex.Binary("*", square, a), 4: ex.Binary("*", square, square)}
    return known.get(power)


def fold_logic(op: str, left: ex.Expr, right: ex.Expr, node: ex.Expr) -> ex.Expr:
    """Simplify an ``and`` or an ``or`` with a constant side; ``node`` is the original expression."""
    decides = op == "or"  # true decides an or, false an and
    for one, other in ((left, right), (right, left)):
        if isinstance(one, ex.Const):
            return one if bool(one.value) is decides else other
    return node


def _fold_arithmetic(op: str, left: ex.Expr, right: ex.Expr, node: ex.Expr) -> ex.Expr:
    a, b = _value(left), _value(right)
    if a is not None and b is not None and not (math.isinf(a) or math.isinf(b)):
        if op in _FOLD:
            return constant(_FOLD[op](a, b))
        if op == "%" and b > 0 and isinstance(a, int) and isinstance(b, int):
            return constant(a % b)
        if op == "/" and b != 0 and a % b == 0:
            return constant(a // b) if isinstance(a, int) and isinstance(b, int) else constant(a / b)
    if b == 1 and op in "*/" or b == 0 and op in "+-":
        return left
    if a == 1 and op == "*" or a == 0 and op == "+":
        return right
    return node


def _value(node: ex.Expr) -> int | float | None:
    match node:
        case ex.Const(value) if not isinstance(value, bool):
            return value
        case ex.Unary("-", ex.Const(value)) if not isinstance(value, bool):
            return -value
    return None


def constant(value: int | float | bool) -> ex.Expr:
    """Return the expression that prints and parses back as ``value``."""
    if not isinstance(value, bool) and value < 0:
        return ex.Unary("-", ex.Const(-value))
    return ex.Const(value)
