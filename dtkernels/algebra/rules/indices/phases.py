"""Compute transposed convolutions phase by phase: no term is computed that a stride leaves out.

``(x + p - d * r) % s == 0`` holds for one in ``s`` of the terms over ``r``, and for which of them depends on ``(x + p) % s`` alone, the phase of ``x``.
A Func of its own has the phase as a label, beside the quotient; its sum runs over every ``s``-th ``r``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm, Definition
from ....lang.extents.linear_form import linear_form
from ...rearrangement import number_of_steps
from ...smart_constructors import ONE, ZERO, conditions_of_term, replaced
from ..canonicalize import fresh_name


@dataclass(frozen=True)
class _Stride:
    """The condition ``(x + offset - dilation * r) % size == 0``, with the access's index ``place / size``."""

    condition: ex.Expr
    place: ex.Expr  #: x + offset - dilation * r
    x: str
    r: str
    offset: int
    dilation: int
    size: int

    @property
    def cut(self) -> bool:
        """Whether the condition selects among the terms over ``r``; else among the results alone."""
        return self.dilation % self.size != 0


@dataclass
class _Names:
    """The labels that stand for ``x`` and ``r`` of one definition."""

    phase: dict[str, str] = field(default_factory=dict)
    step: dict[str, str] = field(default_factory=dict)


def separate_phases(algorithm: Algorithm) -> Algorithm:
    """Give each product whose terms a stride leaves out a Func with the phases of its results as labels.

    Before: ``f[o, x] = rdot(where((x - r) % 2 == 0, A[c, (x - r) / 2], 0), W[c, o, r], c, r);``
    After:  ``f_phases[x_phase, o, x_step] = rdot(where(x_phase + 2 * r_step < len(r), A[c, x_step - r_step], 0), W[c, o, x_phase + 2 * r_step], c, r_step);
    f[o, x] = f_phases[x % 2, o, x / 2];``

    Where ``r`` has a known multiple of 2 elements the condition always holds. All phases then read the same elements of ``A``, and are columns of one product. Otherwise
    it stays: an infinity beside a term that is not there would make a NaN.
    """
    for d in algorithm.definitions:
        dots = [n for n in d.expr.walk() if isinstance(n, ex.Dot)]
        sums = [n for n in d.expr.walk() if isinstance(n, ex.Reduce) and n.kind == "sum"]
        if len(dots) == 1 and (strides := _strides(algorithm, d, dots[0])):
            algorithm = _separated(algorithm, d, dots[0], strides)
        elif len(sums) == 1 and not dots and (strides := _cut_strides(algorithm, d, sums[0])):
            algorithm = _shortened(algorithm, d, sums[0], strides)
    return algorithm


def _strides(algorithm: Algorithm, d: Definition, dot: ex.Dot) -> list[_Stride]:
    """Return the conditions of a product that can be separated, each with labels of its own."""
    found: list[_Stride] = []
    for side, other in ((dot.left, dot.right), (dot.right, dot.left)):
        for condition in conditions_of_term(side)[0]:
            s = _stride(condition, d.labels, dot.labels)
            taken = {label for f in found for label in (f.x, f.r)}
            if s and not {s.x, s.r} & taken and _stands_alone(side, other, s) and algorithm.plain_extent(s.r) is not None:
                found.append(s)
        if found:
            return found
    return []


def _cut_strides(algorithm: Algorithm, d: Definition, total: ex.Reduce) -> list[_Stride]:
    """Return the conditions of a sum that select among its terms, each with labels of its own."""
    found: list[_Stride] = []
    for condition in conditions_of_term(total.arg)[0]:
        s = _stride(condition, d.labels, total.labels)
        taken = {label for f in found for label in (f.x, f.r)}
        if s and s.cut and not {s.x, s.r} & taken and algorithm.plain_extent(s.r) is not None:
            found.append(s)
    return found


def _stride(condition: ex.Expr, results: tuple[str, ...], summed: tuple[str, ...]) -> _Stride | None:
    """Read ``(x + offset - dilation * r) % size == 0``; None for any other condition."""
    match condition:
        case ex.Binary("==", ex.Binary("%", place, ex.Const(size)), ex.Const(0)) if type(size) is int and size > 1:
            form = linear_form(place)
        case _:
            return None
    offset = form.pop(None, 0)
    of = {atom.name: times for atom, times in form.items() if isinstance(atom, ex.Label) and times}
    if len(of) != 2 or len(of) != len([t for t in form.values() if t]):
        return None
    x, r = next((n for n in of if n in results), None), next((n for n in of if n in summed), None)
    if x is None or r is None or of[x] != 1 or of[r] >= 0:
        return None
    dilation = -of[r]
    return _Stride(condition, place, x, r, offset, dilation, size) if math.gcd(dilation, size) in (1, size) else None


def _stands_alone(side: ex.Expr, other: ex.Expr, s: _Stride) -> bool:
    """Return whether ``x`` occurs in the condition and one index alone, and ``r`` besides as an index of the other operand alone."""
    quotient = ex.Binary("/", s.place, ex.Const(s.size))
    uses = [n for n in side.walk() if n in (quotient, s.condition)]
    count = sum(n in (ex.Label(s.x), ex.Label(s.r)) for n in side.walk())
    taps = [i for a in ex.accesses(other) for i in a.index if s.r in ex.free_labels(i)]
    inside = sum(n == ex.Label(s.r) for n in other.walk())
    return len(uses) == 2 and count == 4 and s.x not in ex.free_labels(other) and taps == [ex.Label(s.r)] * inside and inside > 0


def _separated(algorithm: Algorithm, d: Definition, dot: ex.Dot, strides: list[_Stride]) -> Algorithm:
    taken = set(algorithm.names)
    names = _Names()
    extents, formulas = list(algorithm.extents), list(algorithm.formulas)
    for s in strides:
        names.step[s.x] = fresh_name(f"{s.x}_step", taken)
        formulas.append((names.step[s.x], number_of_steps(s.x, s.offset % s.size, s.size)))
        if s.cut:
            names.phase[s.x], names.step[s.r] = fresh_name(f"{s.x}_phase", taken), fresh_name(f"{s.r}_step", taken)
            extents.append((names.phase[s.x], "", s.size))
            formulas.append(_steps(s, names.step[s.r], algorithm))
            extents += _declared_extent(algorithm, s.r, extents)
    func = fresh_name(f"{d.name}_phases", taken)
    labels = (*names.phase.values(), *(names.step.get(x, x) for x in d.labels))
    product = Definition(func, labels, _product(dot, strides, names, algorithm), d.pos)
    read = _read(func, d.labels, strides)
    result = replace(d, expr=d.expr.transform(lambda n: read if n == dot else n))
    definitions = tuple(new for old in algorithm.definitions for new in ((product, result) if old is d else (old,)))
    reduced = tuple(names.step[s.r] for s in strides if s.cut)
    more = tuple(label for label in labels if label not in algorithm.labels)
    algorithm = replace(algorithm, vars=algorithm.vars + more, rvars=algorithm.rvars + reduced, extents=tuple(extents), formulas=tuple(formulas))
    return algorithm.with_definitions(definitions)


def _shortened(algorithm: Algorithm, d: Definition, total: ex.Reduce, strides: list[_Stride]) -> Algorithm:
    """Sum over every ``size``-th ``r`` from the first one of the result's phase, in place: no tile of a matrix product asks for one phase.

    Before: ``f[x] = rsum(where((x - r) % 4 == 0, A[(x - r) / 4], 0), r);``
    After:  ``f[x] = rsum(where(x % 4 + 4 * r_step < len(r), A[x / 4 - r_step], 0), r_step);``
    """
    taken = set(algorithm.names)
    extents, formulas, term, steps = list(algorithm.extents), list(algorithm.formulas), total.arg, {}
    for s in strides:
        steps[s.r] = fresh_name(f"{s.r}_step", taken)
        formulas.append(_steps(s, steps[s.r], algorithm))
        extents += _declared_extent(algorithm, s.r, extents)
        moved = _plus(ex.Label(s.x), s.offset)
        inverse = pow(s.dilation, -1, s.size)
        phase = ex.Binary("%", moved if inverse == 1 else ex.Binary("*", ex.Const(inverse), moved), ex.Const(s.size))
        tap = ex.Binary("+", phase, _times(s.size, steps[s.r]))
        by: dict[ex.Expr, ex.Expr] = {s.condition: ex.Binary("<", tap, ex.Len(s.r))}
        first = moved if s.dilation == 1 else ex.Binary("-", moved, ex.Binary("*", ex.Const(s.dilation), phase))  # the same for all steps
        by[ex.Binary("/", s.place, ex.Const(s.size))] = ex.Binary("-", ex.Binary("/", first, ex.Const(s.size)), _times(s.dilation, steps[s.r]))
        term = ex.substitute(replaced(term, by), {s.r: tap})
    new = replace(total, arg=term, labels=tuple(steps.get(k, k) for k in total.labels))
    result = replace(d, expr=d.expr.transform(lambda n: new if n == total else n))
    algorithm = replace(algorithm, rvars=algorithm.rvars + tuple(steps.values()), extents=tuple(extents), formulas=tuple(formulas))
    return algorithm.with_definitions(tuple(result if old is d else old for old in algorithm.definitions))


def _steps(s: _Stride, step: str, algorithm: Algorithm) -> tuple[str, ex.Expr]:
    """Return the extent of the label that counts every ``size``-th ``r``."""
    extent = algorithm.plain_extent(s.r) or ex.Len(s.r)
    return step, ex.Binary("+", ex.Binary("/", ex.Binary("-", extent, ONE), ex.Const(s.size)), ONE)


def _declared_extent(algorithm: Algorithm, label: str, extents: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    """Return a declaration of the extent of ``label`` where an access alone told it, which is about to change."""
    source = algorithm.extent_source(label)
    return [(label, *source)] if source is not None and not any(own == label for own, *_ in extents) else []


def _first(s: _Stride, names: _Names) -> ex.Expr:
    """Return the first ``r`` of the phase: ``dilation * r`` and the phase have one remainder."""
    phase: ex.Expr = ex.Label(names.phase[s.x])
    inverse = pow(s.dilation, -1, s.size)
    return phase if inverse == 1 else ex.Binary("%", ex.Binary("*", phase, ex.Const(inverse)), ex.Const(s.size))


def _index(s: _Stride, names: _Names) -> ex.Expr:
    """Return ``place / size`` in the new labels."""
    step = _plus(ex.Label(names.step[s.x]), s.offset // s.size)
    if not s.cut:
        return ex.Binary("-", step, _times(s.dilation // s.size, s.r))
    if s.dilation % s.size == 1:  # the first tap is the phase
        step = ex.Binary("-", step, _times(s.dilation // s.size, names.phase[s.x])) if s.dilation > 1 else step
    else:
        begun = ex.Binary("-", ex.Label(names.phase[s.x]), ex.Binary("*", ex.Const(s.dilation), _first(s, names)))
        step = ex.Binary("+", step, ex.Binary("/", begun, ex.Const(s.size)))
    return ex.Binary("-", step, _times(s.dilation, names.step[s.r]))


def _plus(e: ex.Expr, number: int) -> ex.Expr:
    return ex.Binary("+" if number > 0 else "-", e, ex.Const(abs(number))) if number else e


def _times(factor: int, label: str) -> ex.Expr:
    return ex.Label(label) if factor == 1 else ex.Binary("*", ex.Const(factor), ex.Label(label))


def _product(dot: ex.Dot, strides: list[_Stride], names: _Names, algorithm: Algorithm) -> ex.Dot:
    """Return the product in the new labels, without the conditions."""
    masks: dict[ex.Expr, ex.Expr] = {}
    places: dict[ex.Expr, ex.Expr] = {}
    taps: dict[str, ex.Expr] = {}
    for s in strides:
        places[ex.Binary("/", s.place, ex.Const(s.size))] = _index(s, names)
        masks[s.condition] = ex.Const(True)
        if s.cut:
            taps[s.r] = ex.Binary("+", _first(s, names), ex.Binary("*", ex.Const(s.size), ex.Label(names.step[s.r])))
            whole = (algorithm.constant_extent(s.r) or 1) % s.size == 0  # each phase has as many terms
            masks[s.condition] = ex.Const(True) if whole else ex.Binary("<", taps[s.r], ex.Len(s.r))
    sides = []
    for side in (dot.left, dot.right):
        side = replaced(side, {**places, **masks})
        sides.append(ex.substitute(side, {r: tap for r, tap in taps.items()}))
    return replace(dot, left=sides[0], right=sides[1], labels=tuple(names.step.get(k, k) for k in dot.labels))


def _read(func: str, labels: tuple[str, ...], strides: list[_Stride]) -> ex.Expr:
    """Return the element of ``func`` for a result at ``labels``; 0 where no term belongs to it."""
    moved = {s.x: _plus(ex.Label(s.x), s.offset % s.size) for s in strides}
    phases = [ex.Binary("%", moved[s.x], ex.Const(s.size)) for s in strides if s.cut]
    sizes = {s.x: s.size for s in strides}
    index = (*phases, *(ex.Binary("/", moved[x], ex.Const(sizes[x])) if x in sizes else ex.Label(x) for x in labels))
    found: ex.Expr = ex.Access(func, index)
    for s in strides:
        if not s.cut:
            found = ex.Call("where", (ex.Binary("==", ex.Binary("%", ex.as_value(moved[s.x]), ex.Const(s.size)), ZERO), found, ZERO))
    return found
