"""Stabilize exponentials: subtract the row maximum from the argument of exp wherever the shift cancels exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from ....lang import expr as ex
from ....lang.algorithm import Algorithm, Definition
from ..canonicalize import fresh_name, inline_access, matches, row_of
from .shift_degree import FREE, Degree, degree, degree_of, shift_dependent_terms
from .sum_exp_addends import shifted_alike


def subtract_maxima(algorithm: Algorithm, outputs: tuple[str, ...]) -> Algorithm:
    """Insert ``mu = rmax(argument)`` for every exp whose shift by mu leaves ``outputs`` unchanged.

    Before: ``s[x] = rsum(exp(A[x, y]), y);  f[x, y] = exp(A[x, y]) / s[x];``
    After:  ``s_shift[x] = rmax(A[x, y], y);
    s[x] = rsum(exp(A[x, y] - where(s_shift[x] > -inf, s_shift[x], 0)), y);
    f[x, y] = exp(A[x, y] - where(s_shift[x] > -inf, s_shift[x], 0)) / s[x];``

    Exact because every output has degree 0 in mu (see shift_degree.py); the logarithm of a sum of degree j gains ``+ j * mu``.
    Other addends of the sum, exponentials included, are shifted alike (see sum_exp_addends.py).

    Shifting every such exp may change an output, as it does when rows and columns of one matrix are normalized. Then only those of the sum
    and of the Funcs that use it are shifted; failing that, only those in terms that contain the sum; failing that, none. None either where a
    term alone is divided by.

    The guard keeps a row of -inf from becoming inf - inf. Source: the safe softmax of Milakov and Gimelshein, *Online normalizer calculation
    for softmax*, 2018, found here by degree instead of by pattern.
    """
    tried: set[tuple[str, ex.Expr]] = set()
    while (shifted := _shift_next(algorithm, outputs, tried)) is not None:
        algorithm = shifted
    return algorithm


def _shift_next(algorithm: Algorithm, outputs: tuple[str, ...], tried: set[tuple[str, ex.Expr]]) -> Algorithm | None:
    """Shift the first exp that can be and was not ``tried``; None if there is none."""
    for owner, arg, over in _exponential_sites(algorithm, tried):
        tried.add((owner.name, arg))
        users = frozenset(d.name for d in algorithm.definitions if any(a.tensor == owner.name for a in ex.accesses(d.expr)))
        for within, by_term in ((frozenset(algorithm.funcs), False), (users | {owner.name}, False), (users, True)):
            if (shifted := _try_shift(algorithm, outputs, owner, arg, over, within, by_term)) is not None:
                return shifted
    return None


def move_masks_into_exponentials(algorithm: Algorithm, outputs: tuple[str, ...]) -> Algorithm:
    """Move a mask into the exponential: a masked exponential has the argument -inf. Applied where ``subtract_maxima`` then shifts no fewer.

    Before: ``s[x] = rsum(where(m[x, y], exp(A[x, y]), 0), y);  f[x] = log(s[x]);``
    After:  ``s[x] = rsum(exp(where(m[x, y], A[x, y], -inf)), y);  f[x] = log(s[x]);``

    The maximum is then taken over the terms that are summed: a larger one would make all of them underflow to 0.
    """

    def change(node: ex.Expr) -> ex.Expr:
        match node:
            case ex.Call("where", (condition, ex.Call("exp", (a,)), ex.Const(0))):
                return ex.Call("exp", (ex.Call("where", (condition, a, ex.NEG_INF)),), pos=node.pos)
            case ex.Call("where", (condition, ex.Const(0), ex.Call("exp", (a,)))):
                return ex.Call("exp", (ex.Call("where", (condition, ex.NEG_INF, a)),), pos=node.pos)
        return node

    masked = algorithm.transform(change)
    if masked == algorithm:
        return algorithm
    plain, instead = (len(subtract_maxima(a, outputs).definitions) for a in (algorithm, masked))
    return masked if instead >= plain > len(algorithm.definitions) else algorithm


def _exponential_sites(algorithm: Algorithm, tried: set[tuple[str, ex.Expr]]) -> Iterator[tuple[Definition, ex.Expr, tuple[str, ...]]]:
    """Yield (Func that sums it, argument of exp, labels summed over) for each exp under a reduction, in order of definition."""
    for d in algorithm.definitions:
        for reduction in d.expr.walk():
            if not isinstance(reduction, ex.Dot) and not (isinstance(reduction, ex.Reduce) and reduction.kind == "sum"):
                continue
            for arg in _exponents(reduction, algorithm):
                over = tuple(label for label in reduction.labels if label in ex.free_labels(arg))
                if over and (d.name, arg) not in tried and not _is_shifted(arg, algorithm):
                    yield d, arg, over


def _is_shifted(arg: ex.Expr, algorithm: Algorithm) -> bool:
    """Return whether ``arg`` already has a guarded shift or the maximum subtracted."""
    match arg:
        case ex.Binary("-", value, ex.Access(name, index)) if name in algorithm:
            match algorithm[name].expr:
                case ex.Reduce("max", maximized, _):
                    own = ex.substitute(maximized, dict(zip(algorithm[name].labels, index)))
                    return matches(own, value) is not None
        case ex.Binary("-", _, ex.Call("where", (ex.Binary(">", a, ex.Unary("-", ex.Const(math.inf))), b, _))):
            return a == b
    return False


def _exponents(reduction: ex.Expr, algorithm: Algorithm) -> Iterator[ex.Expr]:
    """Yield the arguments of exp in the terms of ``reduction``, looking through Funcs without reductions of their own."""
    todo = list(reduction.children())
    seen: set[ex.Access] = set()  # in a chain of Funcs that each read the one before twice, the ways to the first are 2^n
    while todo:
        node = todo.pop(0)
        if isinstance(node, (ex.Reduce, ex.Dot)):
            continue
        if isinstance(node, ex.Call) and node.fn == "exp":
            yield node.args[0]
        if isinstance(node, ex.Access) and node.tensor in algorithm and node not in seen:
            seen.add(node)
            body = inline_access(node, algorithm)
            todo += [] if body is None else [body]
        todo += node.children()


def _try_shift(
    algorithm: Algorithm,
    outputs: tuple[str, ...],
    owner: Definition,
    arg: ex.Expr,
    over: tuple[str, ...],
    within: frozenset[str],
    by_term: bool,
) -> Algorithm | None:
    """Shift ``exp(arg)`` in ``owner`` and in the Funcs ``within``; None if the outputs would change."""

    def shifted(e: ex.Expr) -> ex.Expr:
        return _replace_exponent(e, arg, name, labels)

    labels = tuple(label for label in algorithm.labels if label in ex.free_labels(arg) - set(over))
    taken = set(algorithm.names)
    name = fresh_name(f"{owner.name}_shift", taken)
    known: dict[str, Degree | None] = {name: Degree(plus=Fraction(1))}
    moving = {name}
    alike = shifted_alike(owner, algorithm) if set(labels) <= set(owner.labels) else ()
    definitions: list[Definition] = []
    for d in algorithm.definitions:
        expr = d.expr
        if d.name in alike:
            expr = shift_exponent(expr, ex.Access(name, tuple(map(ex.Label, labels))))
        elif d.name == owner.name or d.name in within:
            expr = shift_dependent_terms(expr, known, shifted) if by_term and d.name != owner.name else shifted(expr)
        if expr is d.expr and not any(a.tensor in moving for a in ex.accesses(expr)):
            definitions.append(d)
            continue
        definition = replace(d, expr=_restore_logarithms(expr, known, name))
        known[d.name] = degree_of(definition, known)
        moving |= set() if known[d.name] == FREE else {d.name}
        definitions.append(definition)
    if any(o in moving for o in outputs):
        return None
    if _divides_by_a_term(definitions, name):
        return None
    if not any(a.tensor == name for d in definitions for a in ex.accesses(d.expr)):
        return None  # the argument occurs only under another form of its labels, or in Funcs not ``within``
    shift = Definition(name, labels, ex.Reduce("max", arg, over), owner.pos)
    first = min(i for i, d in enumerate(definitions) if any(a.tensor == name for a in ex.accesses(d.expr)))
    return algorithm.with_definitions((*definitions[:first], shift, *definitions[first:]))


def _divides_by_a_term(definitions: list[Definition], name: str) -> bool:
    """Return whether a divisor is a single exponential shifted by ``name``, and no sum of them: far below the maximum it would be 0.

    In ``f[x] = B[x] / exp(A[x]);  g[] = rsum(exp(A[x]) * f[x], x);`` the maximum over ``x`` cancels, but not in float32.
    """
    single: set[str] = set()

    def is_single(e: ex.Expr) -> bool:
        match e:
            case ex.Reduce() | ex.Dot():
                return False
            case ex.Call("exp", (arg,)):
                return any(a.tensor == name for a in ex.accesses(arg))
            case ex.Binary("+", a, b):  # beside the sum it is an addend of it
                return is_single(a) and is_single(b)
            case ex.Access(tensor, _):
                return tensor in single
        return any(is_single(child) for child in e.children())

    for d in definitions:
        for node in d.expr.walk():
            match node:
                case (ex.Binary("/", _, divisor) | ex.Call("rsqrt", (divisor,))) if is_single(divisor):
                    return True
        if is_single(d.expr):
            single.add(d.name)
    return False


def shift_value(mu: ex.Expr) -> ex.Expr:
    """Guard ``mu`` for a row in which nothing is finite."""
    return ex.Call("where", (ex.Binary(">", mu, ex.NEG_INF), mu, ex.Const(0)))


def shift_exponent(expr: ex.Expr, mu: ex.Expr) -> ex.Expr:
    """Rewrite ``exp(x)`` as ``exp(x - mu)``, with mu guarded."""
    assert isinstance(expr, ex.Call) and expr.fn == "exp"
    return ex.Call("exp", (ex.Binary("-", expr.args[0], shift_value(mu)),), pos=expr.pos)


def _replace_exponent(expr: ex.Expr, arg: ex.Expr, name: str, labels: tuple[str, ...]) -> ex.Expr:
    """Shift every ``exp`` in ``expr`` whose argument is ``arg`` up to a renaming of labels."""

    def change(node: ex.Expr) -> ex.Expr:
        if isinstance(node, ex.Call) and node.fn == "exp":
            index = row_of(arg, node.args[0], labels)
            if index is not None:
                return shift_exponent(node, ex.Access(name, index))
        return node

    return expr.transform(change)


def _restore_logarithms(expr: ex.Expr, known: dict[str, Degree | None], name: str) -> ex.Expr:
    """Add j*mu to the logarithms of sums that the shift scaled: log(v * exp(j*mu)) = log(v) + j*mu."""

    def change(node: ex.Expr) -> ex.Expr:
        if not (isinstance(node, ex.Call) and node.fn == "log"):
            return node
        d = degree(node.args[0], known)
        if d is None or d.at is None or not d.times or d.times.denominator != 1:
            return node
        mu = shift_value(ex.Access(name, d.at))
        times = -d.times
        scaled = mu if times == 1 else ex.Binary("*", ex.Const(int(times)), mu) if times > 0 else None
        return node if scaled is None else ex.Binary("+", node, scaled)

    return expr.transform(change)
