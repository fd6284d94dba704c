"""Read packed elements once: ``rdot(A[x, k], (W[y, k // 2] >> (4 * (k % 2))) & 15, k)``.

Before::

    for k in 0 .. size_k by 64:
        A = A[x, k]
        W = W[y, k // 2]                                each element loaded twice, by itself
        s = s[y, k // 128]                              the same for a whole step
        acc <- acc + dot(A, ((W >> (4 * (k % 2))) & 15) * s)

After::

    for k in 0 .. size_k by 64:
        k_group = 32 from k // 2
        A = A[x, k]
        W = W[y, k_group]                               whole vectors
        s = s[y, first(k) // 128]
        acc <- acc + dot(every(A, 0, 2), ((W >> 0) & 15) * s)
        acc <- acc + dot(every(A, 1, 2), ((W >> 4) & 15) * s)

Only sums are regrouped: within a step the terms with an even ``k`` are added before those with an odd one. Loops in which something else varies
with ``k`` keep their form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....algebra.rules.canonicalize import fresh_name
from ...ir import nest
from ...ir.nest import (
    Assign,
    Axis,
    Const,
    EveryNth,
    Guard,
    Index,
    Kernel,
    Let,
    Load,
    Local,
    Loop,
    Op,
    Position,
    Start,
    Statement,
    Step,
    Tile,
    TileDot,
    axes_of,
    is_load,
)
from ...ir.value_type import is_integer
from ...lower.reduction_terms import MIN_DOT
from ...lower.schedule_options import KernelOptions

MOST = 8  #: elements packed in one
FEW_BITS = 127  #: the largest number that bfloat16 holds in the bits that 128 leaves
MOST_EXACT = 2**20  #: float32 holds sums of these exactly


def read_packed_once(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Split sums over packed elements by their position in the pack, and load each packed element once in a step."""
    return replace(kernel, body=tuple(_loops(kernel.body, kernel, known_values(kernel))))


def known_values(kernel: Kernel) -> dict[str, Tile | None]:
    """Return what names stand for; None for one that stands for several."""
    known: dict[str, Tile | None] = {}
    for s in nest.statements(kernel.body):
        if isinstance(s, Let):
            known[s.name] = None if s.name in known else s.value
    return known


def _loops(body: tuple[Statement, ...], kernel: Kernel, known: dict[str, Tile | None]) -> Iterator[Statement]:
    split: set[str] = set()
    for s in body:
        if not isinstance(s, Loop):
            yield s
        elif s.axis.tile > 1 and s.reduces and s.within == "extent" and starts_at_steps(s.begin, s.axis, known):
            shared = _shared(s.body, s.axis)
            found = _split(shared, s.axis, kernel)
            split |= {s.axis.label} if found != shared else set()
            once = s.tail and found == shared and s.axis.label in split  # one step, of elements that take more room than packed ones
            yield replace(s, body=found, options=(*(o for o in s.options if o[0] != "num_stages"), ("num_stages", 1)) if once else s.options)
        else:
            yield replace(s, body=tuple(_loops(s.body, kernel, known)))


def starts_at_steps(begin: Tile | None, axis: Axis, known: dict[str, Tile | None]) -> bool:
    """Return whether a loop begins at a multiple of its step."""
    match begin:
        case None:
            return True
        case Const(number):
            return number % axis.tile == 0
        case Step(own):
            return own.tile == axis.tile
        case Local(name):
            return known.get(name) is not None and starts_at_steps(known[name], axis, known)
        case Op("*", args):
            return any(starts_at_steps(a, axis, known) for a in args)
        case Op("max" | "min" | "+" | "maximum" | "minimum", args):
            return all(starts_at_steps(a, axis, known) for a in args)
    return False


def _divided(tile: Tile, axis: Axis, fn: str) -> int:
    """Return the number by which the position along ``axis`` is divided, 0 for another tile."""
    match tile:
        case Op(own, (Position(at), Const(value))) if own == fn and at == axis and type(value) is int and value > 0:
            return value
    return 0


# -- one element a step ---------------------------------------------------------------------------------------------------


def _shared(body: tuple[Statement, ...], axis: Axis) -> tuple[Statement, ...]:
    """Load once in a step what an index ``k // d`` has in common, where the step divides ``d``."""
    changed: dict[str, tuple[Axis, ...]] = {}

    def index(tile: Tile) -> Tile:
        divisor = _divided(tile, axis, "//")
        return Op("//", (Start(axis), Const(divisor))) if divisor and divisor % axis.tile == 0 else tile

    def value(tile: Tile) -> Tile:
        return tile.transform(lambda n: replace(n, axes=changed[n.name]) if isinstance(n, Local) and n.name in changed else n)

    def one(s: Statement) -> Statement:
        if is_load(s) and axis in s.axes:
            own = tuple(value(i.transform(index)) for i in s.value.index)  # what was loaded once may be an index
            if own != s.value.index and axis not in frozenset().union(*map(axes_of, own)) and (s.value.only is None or axis not in axes_of(s.value.only)):
                changed[s.name] = tuple(a for a in s.axes if a != axis)
                return replace(s, value=replace(s.value, index=own), axes=changed[s.name])
        return replace(s, value=value(s.value)) if isinstance(s, nest.Valued) else s

    return body if any(isinstance(s, Loop) for s in body) else tuple(map(one, body))


# -- packed elements ------------------------------------------------------------------------------------------------------


def _split(body: tuple[Statement, ...], axis: Axis, kernel: Kernel) -> tuple[Statement, ...]:
    """Return the body with a product for each position in a pack; unchanged where that is not possible."""
    nodes = [n for s in body for n in _nodes(s)]
    count = max((_divided(n, axis, "%") for n in nodes), default=0)
    packed = any(is_load(s) and any(_divided(i, axis, "//") == count for i in s.value.index) for s in body)
    if not packed or not 1 < count <= MOST or count & (count - 1) or axis.tile & (axis.tile - 1) or axis.tile // count < MIN_DOT:
        return body
    name = fresh_name(f"{axis.name}_group", nest.names_of(kernel))
    group = Axis(name, axis.label, axis.tile // count, exact=axis.exact, whole=axis, every=count)
    try:
        return tuple(_Split(axis, group, kernel).run(body))
    except _Unchanged:
        return body


def _nodes(s: Statement) -> Iterator[Tile]:
    if isinstance(s, nest.Valued):
        yield from s.value.walk()


class _Unchanged(Exception):
    """Raised where a loop is left as it is."""


class _Split:
    """Splits one step along ``axis`` into parts, each with every ``group.every``-th element."""

    def __init__(self, axis: Axis, group: Axis, kernel: Kernel):
        self.axis, self.group, self.count, self.kernel = axis, group, group.every, kernel
        self.whole: set[str] = set()  #: what is loaded along ``axis``
        self.packed: set[str] = set()  #: what is loaded along ``group``
        self.made: dict[str, Tile] = {}  #: values along ``axis``: they are made again for each part

    def run(self, body: tuple[Statement, ...]) -> Iterator[Statement]:
        for s in body:
            match s:
                case Index(axis, "loop") if axis == self.axis:
                    yield s
                    yield Index(self.group, "loop")
                case Index():
                    yield s
                case Let(_, Load(), axes) if self.axis in axes:
                    yield self._load(s)
                case Let(name, value, axes) if self.axis in axes:
                    self.made[name] = value
                case Assign(name, axes, Op("+", (Local(own) as older, TileDot() as dot))) if own == name and dot.axes == (self.axis,) and self.axis not in axes:
                    for part in range(self.count):
                        one = replace(dot, left=self._operand(dot.left, part), right=self._operand(dot.right, part), axes=(self.group,))
                        yield replace(s, value=Op("+", (older, one)))
                case Let() | Assign() if not any(self._varies(n) for n in s.value.walk()):
                    yield s
                case _:
                    raise _Unchanged

    def _varies(self, n: Tile) -> bool:
        return isinstance(n, Position) and n.axis == self.axis or isinstance(n, Local) and self.axis in n.axes

    def _load(self, s: Let) -> Statement:
        """Return a load along the groups if its index contains only these; otherwise unchanged."""
        load = s.value
        assert isinstance(load, Load)
        if load.only is not None and any(self._varies(n) for n in load.only.walk()) or load.buffer in self.kernel.descriptors and self._packs(load):
            raise _Unchanged
        if not self._packs(load):
            self.whole.add(s.name)
            return s
        self.packed.add(s.name)
        index = tuple(self._part(i, None) for i in load.index)
        return replace(s, value=replace(load, index=index), axes=tuple(self.group if a == self.axis else a for a in s.axes))

    def _packs(self, load: Load) -> bool:
        """Return whether a load is the same for all elements of a group."""
        steps = [n for i in load.index for n in i.walk() if self._varies(n)]
        divided = [d for i in load.index for n in i.walk() if (d := _divided(n, self.axis, "//"))]
        return len(steps) == len(divided) and all(d % self.count == 0 for d in divided)

    def _operand(self, tile: Tile, part: int) -> Tile:
        return _in_floats(self._part(tile, part), self.packed)

    def _part(self, tile: Tile, part: int | None) -> Tile:
        """Return the elements of a tile at one place of each group; ``part`` None: where it is the same for all."""
        if divisor := _divided(tile, self.axis, "//"):
            if divisor % self.count:
                raise _Unchanged
            return Position(self.group) if divisor == self.count else Op("//", (Position(self.group), Const(divisor // self.count)))
        if divisor := _divided(tile, self.axis, "%"):
            if self.count % divisor or part is None:
                raise _Unchanged
            return Const(part % divisor)
        match tile:
            case Local(name, axes) if self.axis in axes:
                if name in self.packed:
                    return replace(tile, axes=tuple(self.group if a == self.axis else a for a in axes))
                if name in self.whole and part is not None and len(axes) <= 2:
                    return EveryNth(tile, self.axis, self.group, part)
                if name in self.made:
                    return self._part(self.made[name], part)
                raise _Unchanged
            case Position(axis) if axis == self.axis:
                if part is None:
                    raise _Unchanged
                return Op("+", (Op("*", (Position(self.group), Const(self.count))), Const(part)))
            case Guard(_, axes) if self.axis in axes:
                raise _Unchanged
        return _simple(tile.rebuild(lambda child: self._part(child, part)))


def _in_floats(tile: Tile, packed: set[str]) -> Tile:
    """Return integers made of a few bits of packed elements as numbers, which a product takes; the same values, exact in float32."""
    match tile:
        case Op("&", (Local(name) as codes, Const(mask))) if name in packed and 0 < mask <= FEW_BITS:
            return Op("bits", (codes, Const(0), Const(mask), Const(0)))
        case Op("&", (Op(">>", (Local(name) as codes, Const(shift))), Const(mask))) if name in packed and 0 < mask <= FEW_BITS and shift < 32:
            return Op("bits", (codes, Const(shift), Const(mask), Const(0)))
        case Op("+" | "-" as fn, (left, Const(value))) if is_integer(tile) and abs(value) < MOST_EXACT and (own := _in_floats(left, packed)) != left:
            if isinstance(own, Op) and own.fn == "bits" and own.args[3] == Const(0) and fn == "-" and 0 <= value <= FEW_BITS:
                return Op("bits", (*own.args[:3], Const(value)))
            return Op(fn, (own, Const(value)))
        case Op("+" | "-" as fn, (left, right)) if is_integer(tile) and _few_bits(right) and (own := _in_floats(left, packed)) != left:
            return Op(fn, (own, Op("cast:bf16", (right,))))
        case Op("*" | "+" | "-" | "neg" | "cast:fp32" | "cast:bf16" | "cast:fp16") if not is_integer(tile):
            return tile.rebuild(lambda child: _in_floats(child, packed))
    return tile


def _few_bits(tile: Tile) -> bool:
    """Return whether integers are small enough for bfloat16, as zero points are that are packed like codes."""
    match tile:
        case Op("&", (_, Const(mask))):
            return 0 < mask <= FEW_BITS
        case Op("+", (Op("&", (_, Const(mask))), Const(value))):
            return 0 < mask and 0 <= value and mask + value <= 2 * FEW_BITS
    return False


def _simple(tile: Tile) -> Tile:
    """Multiply constants, which shifts are made of; leave out a shift by 0."""
    match tile:
        case Op("*", (Const(a), Const(b))) if type(a) is int and type(b) is int:
            return Const(a * b)
        case Op(">>", (value, Const(0))):
            return value
    return tile
