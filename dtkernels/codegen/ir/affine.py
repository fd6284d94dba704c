"""Parse comparisons into affine conditions ``a*x + b*y + c >= 0`` on axes, and find their extremes over a tile.

Named values take part too: ``l < hi`` with ``hi[m]`` loaded before the loop over ``l`` is ``hi - l - 1 >= 0``. The extreme of such a value
over a tile is a reduction of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .nest import Axis, BlockNumber, Const, Guard, Local, Op, Position, Scalar, Size, Start, Step, Tile, TileReduce, axes_of

FAR = 10**9  #: beyond every index; what ``floor_to_int`` and ``ceil_to_int`` are limited to


@dataclass(frozen=True)
class Affine:
    """A ``constant`` plus an integer multiple of each tile in ``terms``."""

    terms: dict[Tile, int] = field(default_factory=dict)
    constant: int = 0

    def __add__(self, other: Affine) -> Affine:
        terms = dict(self.terms)
        for tile, k in other.terms.items():
            terms[tile] = terms.get(tile, 0) + k
        return Affine({t: k for t, k in terms.items() if k}, self.constant + other.constant)

    def scaled(self, k: int) -> Affine:
        return Affine({t: k * c for t, c in self.terms.items()} if k else {}, k * self.constant)

    def plus(self, constant: int) -> Affine:
        return Affine(self.terms, self.constant + constant)

    def without(self, tile: Tile) -> Affine:
        return Affine({t: k for t, k in self.terms.items() if t != tile}, self.constant)

    @property
    def axes(self) -> frozenset[Axis]:
        return frozenset(a for t in self.terms for a in ((t.axis,) if isinstance(t, Position) else axes_of(t)))

    @property
    def names(self) -> frozenset[str]:
        """The named values in it."""
        return frozenset(n.name for t in self.terms for n in t.walk() if isinstance(n, Local))

    def never_negative(self) -> bool:
        """Return whether the value is at least 0 because no term can be negative (scalars can)."""
        return self.constant >= 0 and all(k > 0 and not isinstance(t, (Scalar, Op, Local, TileReduce)) for t, k in self.terms.items())

    def tile(self) -> Tile:
        """Return the form as an expression, added terms before subtracted ones."""
        result: Tile | None = None
        for t, k in sorted(self.terms.items(), key=lambda item: item[1] < 0):
            term = t if abs(k) == 1 else Op("*", (Const(abs(k)), t))
            result = (term if k > 0 else Op("neg", (term,))) if result is None else Op("+" if k > 0 else "-", (result, term))
        if result is None:
            return Const(self.constant)
        return Op("+" if self.constant > 0 else "-", (result, Const(abs(self.constant)))) if self.constant else result


def affine(tile: Tile) -> Affine | None:
    """Parse ``tile`` as an affine form; None if it is not one over the integers and other numbers."""
    match tile:
        case Const(value):
            return Affine({}, value) if type(value) is int else None
        case Position() | Size() | Scalar() | Start() | BlockNumber() | Step():
            return Affine({tile: 1})
        case Local() if tile.kind != "boolean":
            return Affine({tile: 1})
        case Op("neg", (a,)):
            inner = affine(a)
            return inner and inner.scaled(-1)
        case Op("+" | "-" as op, (a, b)):
            left, right = affine(a), affine(b)
            return None if left is None or right is None else left + right.scaled(1 if op == "+" else -1)
        case Op("*", (a, b)):
            left, right = affine(a), affine(b)
            for one, other in ((left, right), (right, left)):
                if one is not None and other is not None and not one.terms:
                    return other.scaled(one.constant)
    return None


def inequalities(comparison: Tile, of_nan: bool = False) -> tuple[Affine, ...]:
    """Return forms that are all at least 0 exactly where ``comparison`` holds; none if it is not affine.

    ``of_nan``: whether it counts as holding where a number in it is NaN, as the negation of a comparison does.
    """
    if not (isinstance(comparison, Op) and comparison.fn in ("<", "<=", ">", ">=", "==")):
        return ()
    a, b = (affine(x) for x in comparison.args)
    if a is None or b is None:
        return ()
    up, down = b + a.scaled(-1), a + b.scaled(-1)
    forms = {"<": [(up, True)], "<=": [(up, False)], ">": [(down, True)], ">=": [(down, False)], "==": [(up, False), (down, False)]}[
        comparison.fn
    ]
    found = [_rounded_to_integers(form, strict, of_nan) for form, strict in forms]
    return tuple(f for f in found if f is not None) if None not in found else ()


def _rounded_to_integers(form: Affine, strict: bool, of_nan: bool) -> Affine | None:
    """Restrict ``form >= 0`` (or > 0) to integers: the sum of its numbers that may be none is rounded in the direction that preserves the condition.

    Of a NaN the least integer is made. So numbers are negated where they would be subtracted, and with ``of_nan`` where they would be added; a
    single scalar that is subtracted stays.
    """
    floats = [(t, k) for t, k in form.terms.items() if isinstance(t, Scalar) and not t.integer or isinstance(t, Local) and t.kind == "number"]
    if any(abs(k) != 1 for _, k in floats):
        return None
    if floats:
        alone = len(floats) == 1 and isinstance(floats[0][0], Scalar) and not of_nan
        sign = floats[0][1] if alone else -1 if of_nan else 1
        value, *others = [t if k == sign else Op("neg", (t,)) for t, k in floats]
        for other in others:
            value = Op("+", (value, other))
        up = (sign > 0) == strict  # I + f > 0 is I + ceil(f) - 1 >= 0; I + f >= 0 is I + floor(f) >= 0
        for number, _ in floats:
            form = form.without(number)
        form += Affine({Op("ceil_to_int" if up else "floor_to_int", (value,)): sign})
    return form.plus(-1) if strict else form


def extreme(form: Affine, largest: bool, inside: Callable[[Axis], bool]) -> Affine:
    """Return the largest (or smallest) value of ``form`` over the current tile; ``inside``: the axes that have a current tile."""
    result = Affine({}, form.constant)
    for t, k in form.terms.items():
        if not isinstance(t, Position):
            result += Affine({_extreme_element(t, (k > 0) == largest): k})
        elif t.axis.scalar and inside(t.axis):
            result += Affine({t: k})
        elif (k > 0) == largest:
            result += _last(t.axis, inside).scaled(k)
        else:
            result += _first(t.axis, inside).scaled(k)
    return result


def _extreme_element(tile: Tile, largest: bool) -> Tile:
    """Return the largest (or smallest) element of a tile inside the extents; the tile itself if it is a single number."""
    axes = tuple(sorted(axes_of(tile), key=lambda a: a.name))
    if isinstance(tile, Local) and tile.kind == "integer":
        tile = Op("wide", (tile,))  # it may have 8 bits: neither FAR nor the largest index plus 1 is one of them
    if not axes:
        return tile
    past = tuple(a for a in axes if not a.exact)
    kind, neutral = ("max", -FAR) if largest else ("min", FAR)
    return TileReduce(kind, Guard(tile, past, neutral) if past else tile, axes, keeps_nan=False)


def _first(axis: Axis, inside: Callable[[Axis], bool]) -> Affine:
    return Affine({Start(axis): 1}) if inside(axis) and axis.tile else Affine()


def _last(axis: Axis, inside: Callable[[Axis], bool]) -> Affine:
    if inside(axis) and axis.tile:
        return Affine({Start(axis): 1, Step(axis): 1}, -1)
    return Affine({Size(axis.label): 1}, -1)
