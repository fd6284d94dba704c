"""Choose the tensors that forward saves for backward.

Outputs are available at no cost. A comparison of an input with a bound is applied to the output instead, where the result is the same.
Reductions along rows are saved in float32, so that backward does not read the rows again; also where they are outputs, which are rounded
to the dtype of the call: a rounded mean of a batch moves every element, and some across the bound of a ReLU. So are products by which places of extrema are found.

For a sum of exponentials the logarithm is saved, and used as the shift of those exponentials. By the degree argument of shift_degree.py
any shift leaves the gradients unchanged, and under this one the sum itself is 1. An expression that then equals an output is read instead
of recomputed. Products that enter further products are saved if the caller, who knows the sizes, asks for it: see chained_products.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ..rules.canonicalize import fresh_name, inline_access, row_of
from ..rules.constant_folding import drop_unused, inline_copies, keep_extents, with_plain_vars
from ..rules.exponentials.max_subtraction import shift_exponent
from ..rules.exponentials.shift_degree import Degree, degree_of, shift_dependent_terms
from ..rules.exponentials.sum_exp_addends import addends, shifted_alike
from ..smart_constructors import ONE, ZERO, factors_of, is_zero, simplify
from .exchanged_sums import exchange_sums

FEW = 2  #: values of a row that are saved one by one


@dataclass(frozen=True)
class SavedTensors:
    """Forward and backward, and the Funcs that forward returns besides its outputs: ``extra`` in float32, ``products`` in the dtype of results."""

    forward: Algorithm
    backward: Algorithm
    extra: tuple[str, ...]
    products: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()  #: products of which forward returns a copy in float32, one of ``extra``

    def with_extra(self, values: tuple[Definition, ...]) -> SavedTensors:
        """Return the same with more row values that forward makes and ``backward`` reads."""
        read = tuple(v for v in values if v.name in self.backward.inputs)
        forward = self.forward.with_definitions((*self.forward.definitions, *read)) if read else self.forward
        return replace(self, forward=forward, extra=(*self.extra, *(v.name for v in read)))


def choose_saved_tensors(
    forward: Algorithm, outputs: tuple[str, ...], backward: Algorithm, grads: tuple[str, ...], products: tuple[str, ...] = (), exchange: bool = True
) -> SavedTensors:
    """Replace values in ``backward`` by saved ones: logarithms of sums of exponentials, then outputs, then the Funcs ``products``.

    ``exchange``: before products are, sums over them are read from gradients where that is possible, see exchanged_sums.py.
    """
    extra: list[Definition] = []
    moved: set[str] = set()  # Funcs that the shift changes: an output of that name holds other values
    for d, argument in sums_of_exponentials(forward, outputs):
        if d.name in backward and not moved & set(backward.needed_by(tuple(a.tensor for a in ex.accesses(argument) if a.tensor in backward))):
            name = fresh_name(f"{d.name}_log", {*backward.names, *forward.funcs})
            uses = [a for x in forward.definitions for a in ex.accesses(x.expr) if a.tensor == d.name]
            inside = all(isinstance(i, ex.Label) for a in uses for i in a.index)  # outside, a sum reads 0
            alike = shifted_alike(d, forward)
            shifted = _shift_by(backward, d, argument, name, grads, alike, by_term=False) if inside else None
            shifted = shifted or (_shift_around_logarithm(backward, d, argument, name, grads) if inside and not alike else None)
            shifted = shifted or (_shift_by(backward, d, argument, name, grads, alike, by_term=True) if inside else None)
            if shifted is not None:
                backward, changed = shifted
                moved |= changed
                logarithm = ex.Call("log", (ex.Access(d.name, tuple(map(ex.Label, d.labels))),))
                extra.append(Definition(name, d.labels, ex.Cast(logarithm, "fp32")))
    outputs = tuple(o for o in outputs if o not in moved and not _is_rounded_statistic(o, forward))
    for output in outputs:
        backward = _tested_by_output(backward, output, grads)
    backward = _needed(_read_outputs(backward, outputs), grads)
    small = [d for d in forward.definitions if d.name in backward and backward[d.name] == d and _is_small(d, forward)]
    small = [d for d in small if not _compared(d.name, backward)]
    for d in _made_of_many(small, forward, backward):
        if d.name in backward:
            name = fresh_name(f"{d.name}_kept", {*backward.names, *forward.funcs})
            whole = forward.integer_funcs.get(d.name, "bool")  # the place of an extremum may stand in an index
            extra.append(Definition(name, d.labels, ex.Cast(ex.Access(d.name, tuple(map(ex.Label, d.labels))), "fp32" if whole == "bool" else whole)))
            backward = replace(_renamed(backward, d.name, name), inputs=(*backward.inputs, name))
    backward = _needed(_read_outputs(backward, outputs), grads)
    backward = _needed(exchange_sums(backward), grads) if exchange else backward
    kept = tuple(p for p in products if p in backward and backward[p] == forward[p] and not _compared(p, backward))
    exact = {p: fresh_name(f"{p}_kept", {*backward.names, *forward.funcs}) for p in kept if _decides_places(p, forward)}
    for p, name in exact.items():
        extra.append(Definition(name, forward[p].labels, ex.Cast(ex.Access(p, tuple(map(ex.Label, forward[p].labels))), "fp32")))
        backward = replace(_renamed(backward, p, name), inputs=(*backward.inputs, name))
    backward = _needed(_read_outputs(backward, tuple(p for p in kept if p not in exact)), grads)
    kept = tuple(p for p in kept if p in backward.inputs)
    backward = _integers_as_in_forward(keep_extents(with_plain_vars(backward) if kept else backward, forward), forward)
    used = tuple(e for e in extra if e.name in backward.inputs)
    with_extra = forward.with_definitions(forward.definitions + used) if used else forward
    if exact:
        with_extra = reading_saved(with_extra, tuple(e.name for e in used if e.name in exact.values()))
    return SavedTensors(with_extra, backward, tuple(e.name for e in used), kept, tuple(p for p, name in exact.items() if name in backward.inputs))


def _integers_as_in_forward(backward: Algorithm, forward: Algorithm) -> Algorithm:
    """Cast Funcs that hold integers in ``forward`` where they are made of saved places alone, which are inputs: such a Func may stand in an index."""
    integers = {f: dtype for f, dtype in forward.integer_funcs.items() if dtype != "bool" and f in backward and f not in backward.integer_funcs}
    if not integers:
        return backward
    return backward.with_definitions(tuple(replace(d, expr=ex.Cast(d.expr, integers[d.name])) if d.name in integers else d for d in backward.definitions))


def sums_of_exponentials(forward: Algorithm, outputs: tuple[str, ...]) -> list[tuple[Definition, ex.Expr]]:
    """Return the sums of exponentials that are no outputs, with the arguments of exp; those that others are made from come after those.

    The saved logarithm of a sum shifts what is made from that sum, so a sum of that is replaced by its own logarithm first.
    """
    found = [(d, argument) for d in forward.definitions if d.name not in outputs and (argument := _summed_exponent(d, forward)) is not None]
    below = [set(forward.needed_by((d.name,))) for d, _ in found]
    return sorted(found, key=lambda one: sum(one[0].name in names for names in below))


def _is_small(d: Definition, algorithm: Algorithm) -> bool:
    """Return whether ``d`` reduces terms of more dimensions, and would get no stability shift if it were an output."""
    parts = [algorithm[f].expr for f in algorithm.needed_by((d.name,))]
    nodes = [n for e in parts for n in e.walk()]
    reduces = any(isinstance(n, (ex.Reduce, ex.Dot)) for n in d.expr.walk())
    larger = any(isinstance(n, ex.Access) and len(n.index) > len(d.labels) for n in nodes)
    return reduces and larger and not any(isinstance(n, ex.Call) and n.fn == "exp" for n in nodes)


def _is_rounded_statistic(output: str, forward: Algorithm) -> bool:
    """Return whether an output is a small reduction that its dtype rounds: neither selected from inputs nor of a dtype of its own."""
    d = forward[output]
    while isinstance(d.expr, ex.Access) and d.expr.tensor in forward and d.expr.index == tuple(map(ex.Label, d.labels)):
        d = forward[d.expr.tensor]
    own = isinstance(d.expr, ex.Cast) or d.name in forward.integer_funcs
    return _is_small(d, forward) and not own and not all(_is_selection(forward[f].expr) for f in forward.needed_by((d.name,)))


def _made_of_many(small: list[Definition], forward: Algorithm, backward: Algorithm) -> list[Definition]:
    """Return ``small`` values of rows, with a value that is made of many of them in their place where backward reads them for it alone.

    Each step of a bisection, ``low2[x] = low1[x] + where(rsum(maximum(A[x, y] - low1[x], 0), y) >= 1, 0.25, 0)``, sums the row once more; the last bound tells all.
    """
    left = {d.name: d for d in small}
    found: list[Definition] = []
    for d in reversed(forward.definitions):
        if d.name in left or d.name not in backward or backward[d.name] != d or any(isinstance(n, (ex.Reduce, ex.Dot, ex.Scan)) for n in d.expr.walk()):
            continue
        inner = {*backward.needed_by((d.name,))}
        of = [f for f in inner & left.keys() if left[f].labels == d.labels]
        others = {a.tensor for e in backward.definitions if e.name not in inner for a in ex.accesses(e.expr)}
        if len(of) > FEW and not others & {*of}:
            found.append(d)
            left = {f: e for f, e in left.items() if f not in of}
    return [*found, *left.values()]


def _summed_exponent(d: Definition, algorithm: Algorithm) -> ex.Expr | None:
    """Return the argument of exp if ``d`` is a sum of exponentials, perhaps through a Func, plus addends that are shifted alike."""
    alike = shifted_alike(d, algorithm)
    parts = [a for a in addends(d.expr) if not (isinstance(a, ex.Access) and a.tensor in alike)]
    if len(parts) != 1 or not (isinstance(parts[0], ex.Reduce) and parts[0].kind == "sum"):
        return None
    term: ex.Expr | None = parts[0].arg
    while isinstance(term, ex.Access) and term.tensor in algorithm:
        term = inline_access(term, algorithm)
    return term.args[0] if isinstance(term, ex.Call) and term.fn == "exp" else None


def _shift_by(
    backward: Algorithm, total: Definition, argument: ex.Expr, name: str, grads: tuple[str, ...], alike: tuple[str, ...], by_term: bool
) -> tuple[Algorithm, set[str]] | None:
    """Shift exp(argument) in ``backward`` by the saved logarithm, which makes the sum itself 1; None if gradients would change.

    Return also the Funcs whose values change.

    The addends ``alike`` are shifted too, see sum_exp_addends.py. ``by_term``: shift only in terms that contain the sum, for programs with
    another sum of the same exponentials.
    """

    def shifted(e: ex.Expr) -> ex.Expr:
        return _shifted(e, argument, name, total.labels)

    known: dict[str, Degree | None] = {name: Degree(plus=Fraction(1))}
    definitions = []
    for d in backward.definitions:
        if d.name == total.name:
            known[d.name] = Degree(times=Fraction(-1))
            continue
        if d.name in alike:
            expr = shift_exponent(d.expr, ex.Cast(ex.Access(name, tuple(map(ex.Label, d.labels))), "fp32"))
        else:
            expr = shift_dependent_terms(d.expr, known, shifted) if by_term else shifted(d.expr)
        definition = replace(d, expr=expr)
        known[d.name] = degree_of(definition, known)
        definitions.append(definition)
    if any(known[g] is None or not known[g].free for g in grads):  # type: ignore[union-attr]
        return None
    vanish = _rows_vanish(list(backward.definitions), total.name, argument, grads)
    kept = tuple(replace(d, expr=simplify(_normalize_sum(d.expr, total.name, name, rows_vanish=vanish))) for d in definitions)
    changed = replace(backward, inputs=(*backward.inputs, name)).with_definitions(kept)
    moved = {n for n, degree in known.items() if n in changed and (degree is None or not degree.free)}
    return _inline_copies(changed, grads), moved


def _shift_around_logarithm(backward: Algorithm, total: Definition, argument: ex.Expr, name: str, grads: tuple[str, ...]) -> tuple[Algorithm, set[str]] | None:
    """Shift exp(argument) where ``backward`` reads the logarithm of the sum as well, which is the saved value itself.

    Before: ``lse[x] = log(total[x]); d_A[x, y] = d[x] * lse[x] / total[x] * exp(A[x, y]);``
    After: ``d_A[x, y] = d[x] * total_log[x] * exp(A[x, y] - total_log[x]);``
    """
    value = fresh_name(f"{name}_value", {*backward.names, name})

    def saved(node: ex.Expr) -> ex.Expr:
        match node:
            case ex.Call("log", (ex.Access(tensor, index),)) if tensor == total.name:
                return ex.Cast(ex.Access(value, index), "fp32")
        return node

    known = tuple(replace(d, expr=d.expr.transform(saved)) for d in backward.definitions)
    if known == backward.definitions:
        return None
    apart = replace(backward, inputs=(*backward.inputs, value)).with_definitions(known)
    ways = (_shift_by(apart, total, argument, name, grads, (), by_term) for by_term in (False, True))
    found = next((way for way in ways if way is not None), None)
    if found is None:
        return None
    changed = replace(found[0], inputs=tuple(i for i in found[0].inputs if i != value))
    return _renamed(changed, value, name), found[1]


def _normalize_sum(expr: ex.Expr, total: str, log: str, *, rows_vanish: bool) -> ex.Expr:
    """Replace ``total`` by 1, or by 0 where ``log`` is -inf. If such rows vanish, only comparisons keep that distinction."""
    match expr:
        case ex.Access(tensor, index) if tensor == total:
            return ONE if rows_vanish else _normalized_sum(log, index)
        case ex.Call("where", (_, _, kept)) if rows_vanish and _is_guard(expr, total):
            return _normalize_sum(kept, total, log, rows_vanish=True)
        case ex.Binary("==" | "!=" as op, ex.Access(tensor, index), ex.Const(0)) if tensor == total:
            return ex.Binary(op, ex.Access(log, index), ex.NEG_INF)
        case ex.Binary(op, _, _) if op in ex.COMPARISONS:
            return expr.rebuild(lambda child: _normalize_sum(child, total, log, rows_vanish=False))
    return expr.rebuild(lambda child: _normalize_sum(child, total, log, rows_vanish=rows_vanish))


def reading_saved(forward: Algorithm, extra: tuple[str, ...]) -> Algorithm:
    """Return forward with what it saves in float32 computed once: its results read that too.

    Before: ``loss[] = rsum(log(s[x]), x); s_log[x] = cast(log(s[x]), fp32);``  After: ``s_log[x] = cast(log(s[x]), fp32); loss[] = rsum(s_log[x], x);``
    """
    saved = {f: d.expr.arg for f in extra if isinstance((d := forward[f]).expr, ex.Cast)}
    values = {value: ex.Access(f, tuple(map(ex.Label, forward[f].labels))) for f, value in saved.items() if any(ex.accesses(value))}
    later, found = dict(saved), []
    for d in (d for d in forward.definitions if d.name not in saved):
        found.append(replace(d, expr=d.expr.transform(lambda n: values.get(n, n))))
        done = {x.name for x in found}
        for f in [f for f, value in later.items() if all(a.tensor in done or a.tensor not in forward for a in ex.accesses(value))]:
            found.append(forward[f])
            del later[f]
    return forward.with_definitions((*found, *(forward[f] for f in later)))


def _normalized_sum(log: str, index: tuple[ex.Expr, ...]) -> ex.Expr:
    return ex.Call("where", (ex.Binary("==", ex.Access(log, index), ex.NEG_INF), ZERO, ONE))


def _is_guard(expr: ex.Expr, total: str) -> bool:
    """Return whether ``expr`` is ``where(total == 0, 0, ...)``."""
    match expr:
        case ex.Call("where", (ex.Binary("==", ex.Access(tensor, _), ex.Const(0)), ex.Const(0), _)):
            return tensor == total
    return False


def _rows_vanish(definitions: list[Definition], total: str, argument: ex.Expr, grads: tuple[str, ...]) -> bool:
    """Return whether rows with ``total`` 0, whose exponentials are all 0, enter ``grads`` only as factors of these exponentials.

    The values of ``total`` and of anything that it guards then do not matter in such a row.
    """
    known: dict[str, str] = {total: "any"}

    def kind(e: ex.Expr) -> str:
        """Classify a value in such a row: "zero", "same" as without ``total``, or "any"."""
        match e:
            case ex.Access(tensor, _):
                return known.get(tensor, "same")
            case ex.Call("exp", (arg,)) if row_of(argument, arg, ()) is not None:
                return "zero"
            case ex.Call("where", (condition, a, b)):
                if _is_guard(e, total):
                    return "zero" if kind(b) == "zero" else "any"
                below = {kind(a), kind(b)}
                return "any" if kind(condition) == "any" or "any" in below else "zero" if below == {"zero"} else "same"
            case ex.Binary("*", a, b) | ex.Dot(a, b, _):
                below = {kind(a), kind(b)}
                return "zero" if "zero" in below else "any" if "any" in below else "same"
            case ex.Binary("/", a, _) if kind(a) == "zero":
                return "zero"
            case ex.Binary(op, ex.Access(tensor, _), ex.Const(0)) if op in ex.COMPARISONS and tensor == total:
                return "same"
            case ex.Const(0):
                return "zero"
            case ex.Binary("+" | "-", _, _) | ex.Unary("-", _) | ex.Reduce("sum", _, _) | ex.Cast() | ex.Reshape():
                below = {kind(c) for c in e.children()}
                return "any" if "any" in below else "zero" if below == {"zero"} else "same"
        return "any" if "any" in {kind(c) for c in e.children()} else "same"

    for d in definitions:
        if d.name != total:
            known[d.name] = kind(d.expr)
    return "any" not in {known[g] for g in grads}


def _shifted(expr: ex.Expr, argument: ex.Expr, name: str, labels: tuple[str, ...]) -> ex.Expr:
    def change(node: ex.Expr) -> ex.Expr:
        if isinstance(node, ex.Call) and node.fn == "exp" and (index := row_of(argument, node.args[0], labels)) is not None:
            return shift_exponent(node, ex.Cast(ex.Access(name, index), "fp32"))
        return node

    return expr.transform(change)


def _inline_copies(algorithm: Algorithm, keep: tuple[str, ...]) -> Algorithm:
    """Drop Funcs that only rename another or a constant."""
    simple = (ex.Access, ex.Const, ex.Scalar)
    copies = tuple(d.name for d in algorithm.definitions if isinstance(d.expr, simple) and d.name not in keep)
    changed = inline_copies(algorithm, copies)
    used = {a.tensor for d in changed.definitions for a in ex.accesses(d.expr)}
    kept = (replace(d, expr=simplify(d.expr)) for d in changed.definitions if d.name not in copies or d.name in used)
    return algorithm.with_definitions(tuple(kept))


def _tested_by_output(backward: Algorithm, output: str, grads: tuple[str, ...]) -> Algorithm:
    """Test the output instead of the input it is bounded by, where ``grads`` then no longer read that input, or compute fewer reductions.

    Before: ``y[x] = maximum(A[x], 0); d_A[x] = where(A[x] > 0, d_y[x], 0);``  After: ``d_A[x] = where(y[x] > 0, d_y[x], 0);``
    An output has the dtype of an input that it picks, and a NaN is neither above nor below. What is computed is rounded to it, and
    stays on its side of 0 but for what is too small for the dtype, which torch's results have lost too. What comes behind keeps the
    output in memory anyway, while nothing may keep the input.

    An output that selects an input has its dtype, and a NaN compares false either way. A computed value is rounded when it is stored and stays
    on its side of 0, except for values too small for the dtype, which torch's results lose too. The output usually stays in memory for later
    operations, while nothing else may keep the input.
    """
    test = _test(backward[output].expr) if output in backward else None
    if test is None:
        return backward
    own = tuple(map(ex.Label, backward[output].labels))
    tested, bound = test.left, test.right
    picked = isinstance(tested, ex.Access) and tested.tensor in backward.inputs
    same = set(own) <= set(tested.index) and _is_exact_in_every_dtype(bound.value) if picked else is_zero(bound)  # type: ignore[attr-defined]
    if not same:
        return backward
    changed = _replaced(backward, output, test, replace(test, left=ex.Access(output, own)))
    if not picked:
        return changed if _reductions(changed, output, grads) < _reductions(backward, output, grads) else backward
    read = {a.tensor for f in changed.needed_by(grads) if f != output for a in ex.accesses(changed[f].expr)}
    return changed if output in read and tested.tensor not in read else backward  # type: ignore[attr-defined]


def _test(e: ex.Expr) -> ex.Binary | None:
    """Return the comparison with a constant that decides ``e``, a maximum or a choice, and that has the same result for ``e`` itself."""
    match e:
        case ex.Call("maximum" | "minimum" as fn, (tested, ex.Const() as bound) | (ex.Const() as bound, tested)):
            return ex.Binary(">" if fn == "maximum" else "<", tested, bound)
        case ex.Call("where", (ex.Binary(">" | "<=" as op, tested, bound) as test, a, b)) if is_zero(bound):  # otherwise a value that rounds to 0 is no longer below the bound
            kept, other = (a, b) if op == ">" else (b, a)
            if kept == tested and (is_zero(other) or _is_positive_multiple(other, tested)):
                return test
        case ex.Binary("*", ex.Const(times), inner) | ex.Binary("*" | "/", inner, ex.Const(times)) if 0 < times < math.inf:
            found = _test(inner)
            return found if found is not None and is_zero(found.right) else None
    return None


def _is_positive_multiple(e: ex.Expr, tested: ex.Expr) -> bool:
    """Return whether ``e`` is ``tested`` times a positive number."""
    match e:
        case ex.Binary("*", ex.Const(times), arg) | ex.Binary("*" | "/", arg, ex.Const(times)):
            return arg == tested and 0 < times < math.inf
    return False


def _reductions(backward: Algorithm, output: str, grads: tuple[str, ...]) -> int:
    """Count the sums and products that ``grads`` take if ``output`` is available."""
    rest = backward.with_definitions(tuple(d for d in backward.definitions if d.name != output))
    return sum(isinstance(n, (ex.Reduce, ex.Dot)) for f in rest.needed_by(grads) for n in rest[f].expr.walk())


def _is_exact_in_every_dtype(value: float) -> bool:
    """Return whether a number is the same in float32, float16 and bfloat16."""
    significand, exponent = math.frexp(value)
    return value == 0 or (significand * 256).is_integer() and -13 <= exponent <= 16


def _read_outputs(backward: Algorithm, outputs: tuple[str, ...]) -> Algorithm:
    """Turn outputs that backward mentions into inputs, along with any Func or expression that equals one."""
    for output in outputs:
        if output not in backward or _compared(output, backward):
            continue
        d = backward[output]
        own = tuple(map(ex.Label, d.labels))
        if isinstance(d.expr, ex.Access) and d.expr.tensor in backward and d.expr.index == own:
            backward = _renamed(backward, d.expr.tensor, output)  # the output is that Func
        elif isinstance(d.expr, ex.Cast) and d.expr.dtype == "fp32" and isinstance(made := d.expr.arg, ex.Access) and made.tensor in backward and made.index == own:
            backward = _renamed(backward, made.tensor, output)  # as it was computed
        else:
            backward = _replaced(backward, output, d.expr, ex.Access(output, own))
        others = tuple(x for x in backward.definitions if x.name != output)
        backward = replace(backward, inputs=(*backward.inputs, output)).with_definitions(others)
    return backward


def _decides_places(func: str, forward: Algorithm) -> bool:
    """Return whether places of extrema depend on ``func``: rounded, it would lead to other ones, and gradients to other elements."""
    sought = [n for d in forward.definitions for n in d.expr.walk() if isinstance(n, ex.Reduce) and n.kind in ex.PLACES]
    return any(func in forward.needed_by(tuple(a.tensor for a in ex.accesses(n) if a.tensor in forward)) for n in sought)


def _compared(func: str, backward: Algorithm) -> bool:
    """Return whether ``backward`` tests values for equality with the computed ``func``: forward may return it with another rounding.

    Values selected from ``func`` alone, such as the maximum of a row, are rounded alike.
    """
    d = backward[func]
    if isinstance(d.expr, ex.Access) and d.expr.tensor in backward:
        return _compared(d.expr.tensor, backward)
    if all(_is_selection(backward[f].expr) for f in backward.needed_by((func,))):
        return False
    tests = [n.children() for d in backward.definitions for n in d.expr.walk() if isinstance(n, ex.Binary) and n.op in ("==", "!=")]
    sides = [(a, b) for left, right in tests for a, b in ((left, right), (right, left)) if isinstance(a, ex.Access) and isinstance(b, ex.Access)]
    return any(a.tensor == func and not _selects_from(b, func, backward) for a, b in sides)


def _selects_from(e: ex.Expr, func: str, backward: Algorithm) -> bool:
    """Return whether ``e`` is an element of ``func``, selected by its values alone."""
    if isinstance(e, ex.Access) and e.tensor != func:
        return e.tensor in backward and _selects_from(backward[e.tensor].expr, func, backward)
    return _is_selection(e) and all(_selects_from(child, func, backward) for child in e.children())


def _is_selection(e: ex.Expr) -> bool:
    """Return whether ``e`` selects one of its values without changing it."""
    match e:
        case ex.Access(_, index):
            return not any(any(ex.accesses(i)) for i in index)
        case ex.Const() | ex.Label() | ex.Len():
            return True
        case ex.Call("where", (condition, a, b)):
            return (not any(ex.accesses(condition)) or _is_selection(condition)) and _is_selection(a) and _is_selection(b)
        case ex.Reduce("max" | "min") | ex.Call("maximum" | "minimum") | ex.Unary("-"):
            return all(map(_is_selection, e.children()))
        case ex.Binary(op):
            return op in ex.COMPARISONS and all(map(_is_selection, e.children()))
    return False


def _renamed(backward: Algorithm, func: str, output: str) -> Algorithm:
    def change(node: ex.Expr) -> ex.Expr:
        return replace(node, tensor=output) if isinstance(node, ex.Access) and node.tensor == func else node

    return backward.with_definitions(tuple(replace(d, expr=d.expr.transform(change)) for d in backward.definitions if d.name != func))


def _replaced(backward: Algorithm, output: str, body: ex.Expr, value: ex.Expr) -> Algorithm:
    """Replace ``body`` by ``value``, an element of ``output``, if it has all labels of the output: others may not be bound where it is used.

    A product with a sum among its factors is also found inside a longer one, in any order.
    """
    if not set(backward[output].labels) <= ex.free_labels(body) or not any(ex.accesses(body)):
        return backward
    parts = factors_of(body)
    if not any(isinstance(f, (ex.Dot, ex.Reduce)) for f in parts):
        parts = []

    def change(node: ex.Expr) -> ex.Expr:
        if node == body:
            return value
        if len(parts) < 2 or not (isinstance(node, ex.Binary) and node.op == "*"):
            return node
        rest = factors_of(node)
        for part in parts:
            if part not in rest:
                return node
            rest.remove(part)
        return reduce(lambda a, b: ex.Binary("*", a, b), (*rest, value))

    changed = (d if d.name == output else replace(d, expr=d.expr.transform(change)) for d in backward.definitions)
    return backward.with_definitions(tuple(changed))


def _needed(backward: Algorithm, grads: tuple[str, ...]) -> Algorithm:
    return drop_unused(backward.limited_to(grads))
