"""Recognize Funcs that hold each element of another one at another place, and solve for that place.

``f[o, x] = g[(x + 1) % 2, o, (x + 1) / 2]`` holds ``g[x_phase, o, x_step]`` at ``o`` and ``x = 2 * x_step + x_phase - 1``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..lang import expr as ex
from ..lang.algorithm import Algorithm, Definition
from ..lang.extents.formulas import constant_of
from ..lang.extents.linear_form import LinearForm, linear_form, sum_of_forms
from .smart_constructors import ONE, moved_by, plus


@dataclass(frozen=True)
class Rearrangement:
    """Where a Func holds the elements of ``source``."""

    source: str
    places: dict[str, ex.Expr]  #: label of the Func -> its value, in labels of the source; outside its extent where the Func lacks the element

    @property
    def interleaves(self) -> bool:
        """Return whether elements that are apart in the source become neighbours."""
        return any(not isinstance(place, ex.Label) for place in self.places.values())


@dataclass(frozen=True)
class Interleaving:
    """The indices ``(label + offset) % size`` and ``(label + offset) / size`` of a Func, and the dimensions that they index."""

    label: str
    offset: int
    size: int
    phase: int
    step: int

    @property
    def indices(self) -> tuple[ex.Expr, ex.Expr]:
        """Return the two indices, as rules write them."""
        moved, size = moved_by(self.label, self.offset), ex.Const(self.size)
        return ex.Binary("%", moved, size), ex.Binary("/", moved, size)

    def place(self, phase: str, step: str) -> ex.Expr:
        """Return the label's value in the labels of the two dimensions."""
        return plus(ex.Binary("+", ex.Binary("*", ex.Const(self.size), ex.Label(step)), ex.Label(phase)), -self.offset)


def number_of_steps(label: str, offset: int, size: int) -> ex.Expr:
    """Return how many values ``(label + offset) / size`` has, for ``offset`` from 0 to ``size - 1``."""
    return number_of(ex.Len(label), offset, size)


def number_of(extent: ex.Expr, offset: int, size: int) -> ex.Expr:
    """Return how many values ``(i + offset) / size`` has for ``i`` below ``extent``."""
    return ex.Binary("+", ex.Binary("/", plus(extent, offset - 1), ex.Const(size)), ONE)


def interleavings(access: ex.Access) -> list[Interleaving]:
    """Return the pairs of a remainder and a quotient among the indices of an access."""
    found = []
    for dim, index in enumerate(access.index):
        match index:
            case ex.Binary("%", moved, ex.Const(size)) if type(size) is int and (place := _label_and_offset(moved)):
                pair = Interleaving(*place, size, dim, -1)
                steps = [n for n, other in enumerate(access.index) if other == pair.indices[1]]
                if len(steps) == 1 and 0 <= pair.offset < size:
                    found.append(Interleaving(*place, size, dim, steps[0]))
    return found


def rearrangement(d: Definition, algorithm: Algorithm) -> Rearrangement | None:
    """Return where ``d`` holds the elements of another Func; None if it is anything else, or lacks a source for one of its elements."""
    access = d.expr
    if not isinstance(access, ex.Access) or access.tensor not in algorithm:
        return None
    own = algorithm[access.tensor].labels
    places: dict[str, ex.Expr] = {}
    for pair in interleavings(access):
        if _has_every_step(algorithm, own[pair.step], pair) and algorithm.constant_extent(own[pair.phase]) == pair.size:
            places[pair.label] = pair.place(own[pair.phase], own[pair.step])
    paired = {dim for pair in interleavings(access) for dim in (pair.phase, pair.step)}
    for dim, index in enumerate(access.index):
        if dim not in paired and isinstance(index, ex.Label) and index.name not in places:
            places[index.name] = ex.Label(own[dim])
        elif dim not in paired:
            return None
    return Rearrangement(access.tensor, places) if places.keys() == {*d.labels} else None


def _has_every_step(algorithm: Algorithm, step: str, pair: Interleaving) -> bool:
    """Return whether the extent of ``step`` is as many as the quotient has values."""
    asked = algorithm.in_sizes(number_of_steps(pair.label, pair.offset, pair.size))
    if (number := constant_of((asked,))) is not None:
        return number == algorithm.constant_extent(step)
    said = [_dividend(e, pair.size) for e in (*algorithm.extent_formulas(step), algorithm.in_sizes(ex.Len(step)))]
    lengths = (*algorithm.extent_formulas(pair.label), algorithm.in_sizes(ex.Len(pair.label)))
    return any(_dividend(number_of(e, pair.offset, pair.size), pair.size) in said for e in lengths)


def _dividend(e: ex.Expr, size: int) -> LinearForm:
    """Return the form of which ``e`` is the quotient by ``size``: that of ``a + size * n`` for ``a / size + n``. Where all of it but a number is a multiple, so is the number."""
    form = dict(linear_form(e))
    number = form.pop(None, 0)
    match list(form.items()):
        case [(ex.Binary("/", a, ex.Const(n)), 1)] if n == size:
            found = sum_of_forms(linear_form(a), {None: number * size})
        case _:
            found = sum_of_forms({None: number * size}, {atom: times * size for atom, times in form.items()})
    if not any(times % size for atom, times in found.items() if atom is not None):
        found[None] = found.get(None, 0) // size * size
    return {atom: times for atom, times in found.items() if times}


def _label_and_offset(index: ex.Expr) -> tuple[str, int] | None:
    """Read ``label + number``."""
    form = dict(linear_form(index))
    offset = form.pop(None, 0)
    match list(form.items()):
        case [(ex.Label(name), 1)]:
            return name, offset
    return None
