"""Which nests the Gluon backend takes, and how it cuts them: producer, consumers, rings of tiles.

One form, whatever it computes. Rows of a block are dealt to consumer warpgroups, 64 or 128 each; a producer warp brings
tiles of a reduction loop into rings of shared memory. Inside the loop there may be

* fresh products, of two loaded tiles: ``s = dot(Q, K)``; those of the next step run while this step's are worked on;
* chained products, whose left operand is computed: ``acc <- f(acc) + dot(p, V)``; they run until the next step needs acc;
* or direct products alone, ``acc <- acc + dot(A, B)``.

Several loops one behind the other walk one extent; the last must hold every condition that the others have lost.
``plan`` gives the cut or raises ``Refused`` with the reason in one line; the Triton text of the same schedule is used then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from . import nest
from .nest import WHOLE, Accumulator, Assign, Axis, Const, Fetch, Guard, Index, Kernel, Let, Local, Loop, Op, Put, Statement, Store, Tile, TileDot, TileReduce, axes_of, statements

REGISTERS = {1: (240, 24), 2: (240, 24), 4: (120, 24)}  #: consumers -> registers of a thread that computes, that loads
HALF = frozenset({64, 128})  #: rows of a consumer
WIDEST = 256  #: columns of a product
SPARE = 40  #: registers of a thread beside accumulators and operands


class Refused(Exception):
    """A nest that has not the form; says why in one line."""


@dataclass(frozen=True)
class Product:
    """``name`` is the local that a fresh product gives, the accumulator that another adds to."""

    name: str
    left: Tile
    right: Local
    axes: tuple[Axis, ...]
    rows: Axis
    columns: Axis


@dataclass(frozen=True)
class Step:
    """The body of one loop, sorted: ``work`` is done on registers, ``moves`` are what becomes of accumulators before the chained products."""

    loop: Loop
    fetches: tuple[Let, ...]
    fresh: tuple[Product, ...]
    work: tuple[Statement, ...]
    moves: tuple[Assign, ...]
    chained: tuple[Product, ...]
    direct: tuple[Product, ...]


@dataclass(frozen=True)
class Ring:
    """Tiles that are loaded, waited for and given back together; ``late`` where a chained product reads them."""

    name: str
    tiles: tuple[Let, ...]
    fresh: bool
    late: bool


@dataclass(frozen=True)
class Plan:
    """How a kernel is cut; ``kernel`` is its described form with rows first in every tile."""

    kernel: Kernel
    rows: Axis
    consumers: int
    before: tuple[Statement, ...]
    resident: tuple[Let, ...]
    steps: tuple[Step, ...]
    rings: tuple[Ring, ...]
    after: tuple[Statement, ...]
    stages: int
    behind: bool  #: chained products run while the next step's fresh ones are worked on; needs registers for both

    @property
    def share(self) -> int:
        """Rows of one consumer."""
        return self.rows.tile // self.consumers

    @property
    def last(self) -> Step:
        return self.steps[-1]


def plan(kernel: Kernel) -> Plan:
    """The cut of a described kernel. Raises Refused."""
    loops = [s for s in kernel.body if isinstance(s, Loop)]
    if not any(name == "warp_specialize" for loop in loops for name, _ in loop.options):
        raise Refused("no loop has specialize_warps")
    for loop in loops:
        if not loop.reduces or loop.within != "extent" or any(isinstance(s, Loop) for s in loop.body):
            raise Refused(f"the loop over {loop.axis.label} is no single loop of a reduction")
        if loop.axis.scalar or loop.axis.label != loops[0].axis.label or loop.axis.tile != loops[0].axis.tile:
            raise Refused("loops over different labels or tiles")
    rows = _rows(kernel, loops)
    consumers = _consumers(kernel, rows)
    kernel = _rows_first(kernel, rows)
    first, last = (next(i for i, s in seq if isinstance(s, Loop)) for seq in (list(enumerate(kernel.body)), list(enumerate(kernel.body))[::-1]))
    before, after = tuple(s for s in kernel.body[:last] if not isinstance(s, Loop)), kernel.body[last + 1 :]
    if any(axes_of(s.value) for s in kernel.body[first:last] if isinstance(s, Let)):
        raise Refused("tiles are computed between the loops")
    steps = tuple(_step(s, rows) for s in kernel.body if isinstance(s, Loop))
    resident = tuple(s for s in before if isinstance(s, Let) and isinstance(s.value, Fetch))
    behind = _behind(steps[-1], consumers, rows.tile // consumers)
    found = Plan(kernel, rows, consumers, tuple(s for s in before if s not in resident), resident, steps, _rings(steps[-1]), after, _stages(kernel, loops), behind)
    _check(found)
    return found


def _rows(kernel: Kernel, loops: list[Loop]) -> Axis:
    """The axis of the block that every product keeps and whose parts do not meet."""
    blocks = [s.axis for s in kernel.body if isinstance(s, Index) and s.start == "block" and not s.axis.scalar]
    dots = [n for loop in loops for v in nest.values(loop.body) for n in v.walk() if isinstance(n, TileDot)]
    if not dots:
        raise Refused("no matrix product in the loop")
    kept = [a for a in blocks if all(a in axes_of(d) for d in dots) and all(a in s.axes for s in statements(kernel.body) if isinstance(s, Accumulator))]
    kept = [a for a in kept if not any(a in n.axes for v in nest.values(kernel.body) for n in v.walk() if isinstance(n, TileReduce))]
    computed = [side for d in dots for side in (d.left, d.right) if not isinstance(side, Local) or _is_work(side.name, loops)]
    kept = [a for a in kept if all(a in axes_of(side) for side in computed)]
    kept.sort(key=lambda a: a not in axes_of(dots[0].left))
    if not kept:
        raise Refused("no block label is kept by every product and reduced by nothing")
    return kept[0]


def _is_work(name: str, loops: list[Loop]) -> bool:
    """Whether a local is computed in a loop rather than loaded."""
    return any(isinstance(s, Let) and s.name == name and not isinstance(s.value, Fetch) for loop in loops for s in loop.body)


def _consumers(kernel: Kernel, rows: Axis) -> int:
    count = kernel.num_warps // 4
    if kernel.num_warps % 4 or count not in REGISTERS:
        raise Refused(f"num_warps {kernel.num_warps}; 4, 8 or 16 make whole consumers")
    if rows.tile % count or rows.tile // count not in HALF:
        raise Refused(f"{rows.tile} rows for {count} consumers; 64 or 128 each")
    return count


def _stages(kernel: Kernel, loops: list[Loop]) -> int:
    return max(2, int(next((v for loop in loops for k, v in loop.options if k == "num_stages"), kernel.num_stages)))


def _rows_first(kernel: Kernel, rows: Axis) -> Kernel:
    """The kernel with ``rows`` the first dimension of every named tile."""

    def order(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(sorted(axes, key=lambda a: a != rows))

    def in_tile(tile: Tile) -> Tile:
        return replace(tile, axes=order(tile.axes)) if isinstance(tile, Local) and tile.name not in loaded else tile

    def one(s: Statement) -> Statement:
        if isinstance(s, Loop):
            return replace(s, body=tuple(one(x) for x in s.body))
        if isinstance(s, (Let, Accumulator, Assign)) and not (isinstance(s, Let) and isinstance(s.value, Fetch)):
            s = replace(s, axes=order(s.axes))
        return replace(s, value=s.value.transform(in_tile)) if hasattr(s, "value") else s

    loaded = {s.name for s in statements(kernel.body) if isinstance(s, Let) and isinstance(s.value, Fetch)}
    return replace(kernel, body=tuple(one(s) for s in kernel.body))


# -- one loop ---------------------------------------------------------------------------------------------------------


def _step(loop: Loop, rows: Axis) -> Step:
    fetches = tuple(s for s in loop.body if isinstance(s, Let) and isinstance(s.value, Fetch))
    computed = {s.name for s in loop.body if isinstance(s, Let) and s not in fetches}
    fresh: list[Product] = []
    work: list[Statement] = []
    moves: list[Assign] = []
    chained: list[Product] = []
    direct: list[Product] = []
    for s in loop.body:
        match s:
            case Index() | Let(_, Fetch()):
                continue
            case Assign(name, axes, Op("+", (older, TileDot() as dot))):
                product = _product(name, dot, axes, rows)
                if isinstance(product.left, Local) and product.left.name not in computed:
                    direct.append(product)
                else:
                    chained.append(product)
                if older != Local(name, axes):
                    moves.append(replace(s, value=older))
            case Let() | Assign():
                work.append(replace(s, value=_hoist(s, rows, computed, fresh)))
            case _:
                raise Refused(f"a {type(s).__name__.lower()} inside the loop")
    step = Step(loop, fetches, tuple(fresh), tuple(work), tuple(moves), tuple(chained), tuple(direct))
    _check_step(step)
    return step


def _hoist(s: Let | Assign, rows: Axis, computed: set[str], fresh: list[Product]) -> Tile:
    """The value of ``s`` with each product in it a local of its own."""

    def one(node: Tile) -> Tile:
        if not isinstance(node, TileDot):
            return node
        columns = next((a for a in axes_of(node) if a != rows), None)
        known = next((p for p in fresh if (p.left, p.right) in ((node.left, node.right), (node.right, node.left))), None)
        if known is None:
            known = _product(s.name, node, (rows, columns), rows)
            if not isinstance(known.left, Local) or known.left.name in computed:
                raise Refused(f"{s.name} is a product of what is computed and no accumulator")
            known = replace(known, name=f"{known.left.name}_{known.right.name}_product")
            fresh.append(known)
        return Local(known.name, (rows, known.columns))

    return s.value.transform(one)


def _product(name: str, dot: TileDot, axes: tuple[Axis, ...], rows: Axis) -> Product:
    """The product with the operand that has the rows on the left."""
    left, right = (dot.left, dot.right) if rows in axes_of(dot.left) else (dot.right, dot.left)
    if len(dot.axes) != 1 or len(axes_of(left)) != 2 or len(axes_of(right)) != 2:
        raise Refused(f"{name} is no product of two matrices")
    if not isinstance(right, Local):
        raise Refused(f"the right operand of {name} is computed")
    return Product(name, left, right, dot.axes, rows, next(a for a in axes_of(right) if a not in dot.axes))


def _rings(step: Step) -> tuple[Ring, ...]:
    """Tiles in rings: those that the same products read share one."""
    found: dict[tuple[frozenset[int], bool], list[Let]] = {}
    products = (*step.fresh, *step.chained, *step.direct)
    for s in step.fetches:
        uses = frozenset(i for i, p in enumerate(products) if any(isinstance(side, Local) and side.name == s.name for side in (p.left, p.right)))
        found.setdefault((uses, _in_work(step, s.name)), []).append(s)
    early, late = len(step.fresh), len(step.fresh) + len(step.chained)
    return tuple(
        Ring(tiles[0].name, tuple(tiles), any(i < early for i in uses), worked or any(early <= i < late for i in uses)) for (uses, worked), tiles in found.items()
    )


def _in_work(step: Step, name: str) -> bool:
    return any(isinstance(n, Local) and n.name == name for v in nest.values((*step.work, *step.moves)) for n in v.walk())


# -- what is refused --------------------------------------------------------------------------------------------------


def _check_step(step: Step) -> None:
    accumulators = {p.name for p in (*step.chained, *step.direct)}
    assigned = {s.name for s in step.work if isinstance(s, Assign)}
    for s in step.work:
        for n in s.value.walk():
            if isinstance(n, Local) and n.name in accumulators:
                raise Refused(f"{s.name} reads {n.name} before it is finished")
    for tile, name in [(p.left, p.name) for p in step.chained] + [(s.value, s.name) for s in step.moves]:
        if any(isinstance(n, Local) and n.name in assigned | (accumulators - {name}) for n in tile.walk()):
            raise Refused(f"{name} depends on an accumulator that has moved on")
    if step.direct and (step.fresh or step.chained or step.work or step.moves):
        raise Refused("products that only add up beside others")
    if step.fetches and not step.fresh and not step.direct:
        raise Refused("no product of two loaded tiles")
    if any(_in_work(step, s.name) for s in step.fetches):
        raise Refused("a tile that is loaded through a descriptor is used outside of products")


def _check(p: Plan) -> None:
    body = (*p.before, *p.resident, *(s for step in p.steps for s in step.loop.body), *p.after)
    for tile in [s.value for s in body if hasattr(s, "value") and not isinstance(s.value, Fetch)] + [Local("", s.axes) for s in body if isinstance(s, Accumulator)]:
        for n in tile.walk():
            if len(axes_of(n)) > 2 or (len(axes_of(n)) == 2 and p.rows not in axes_of(n) and not _is_loaded(n, p)):
                raise Refused(f"{n} has other dimensions than rows and columns")
            if isinstance(n, TileReduce) and (len(n.axes) != 1 or p.rows in n.axes):
                raise Refused(f"{n} is reduced over rows or over two labels")
    for s in p.after:
        if not isinstance(s, (Let, Put, Store)) or isinstance(getattr(s, "value", None), Fetch):
            raise Refused(f"a {type(s).__name__.lower()} after the loop")
        if isinstance(s, Put) and [a for a in s.box if a][:1] != [p.rows]:
            raise Refused(f"{s.buffer} is not stored by rows")
    used = {side.name for step in p.steps for q in (*step.fresh, *step.chained, *step.direct) for side in (q.left, q.right) if isinstance(side, Local)}
    if any(s.name not in used for s in p.resident):
        raise Refused("a tile that is loaded once through a descriptor is used outside of products")
    _check_loops(p)


def _is_loaded(tile: Tile, p: Plan) -> bool:
    return isinstance(tile, Local) and tile.name in {s.name for s in p.resident} | {s.name for step in p.steps for s in step.fetches}


def _check_loops(p: Plan) -> None:
    """One walk over one extent, whose last loop is right anywhere in it."""
    last = p.last
    for step, following in zip(p.steps, p.steps[1:]):
        begin = following.loop.begin
        whole = last.loop.end or nest.Size(last.loop.axis.label)
        if begin is None or step.loop.end not in (begin, Op("min", (begin, whole))):
            raise Refused("loops that do not follow each other")
    for step in p.steps[:-1]:
        if _loads(step) != _loads(last):
            raise Refused("loops that load or multiply differently")
        if not _conditions(step) <= _conditions(last) or _bare(step) != _bare(last):
            raise Refused("the last loop lacks a condition of an earlier one")
        if [f"{m.name} {m.value}" for m in step.moves] != [f"{m.name} {m.value}" for m in last.moves]:
            raise Refused("loops that move accumulators differently")


def _loads(step: Step) -> tuple[list[str], ...]:
    """What a step loads, and which products it makes of that."""
    return (
        [f"{s.name} {s.value}" for s in step.fetches],
        [f"{q.name} {q.left} {q.right}" for q in (*step.fresh, *step.direct)],
        [f"{q.name} {q.right}" for q in step.chained],
    )


def _conditions(step: Step) -> set[str]:
    found = set()
    for tile in nest.values((*step.work, *step.moves)):
        for n in tile.walk():
            found |= {str(n.args[0])} if isinstance(n, Op) and n.fn == "where" else {f"{a.name} inside" for a in n.axes} if isinstance(n, Guard) else set()
    return found


def _bare(step: Step) -> list[str]:
    """What the step computes, without conditions and without names for parts."""
    named: dict[str, Tile] = {}

    def strip(n: Tile) -> Tile:
        if isinstance(n, Guard):
            return n.arg
        if isinstance(n, Op) and n.fn == "where" and isinstance(n.args[2], Const):
            return n.args[1]
        return named.get(n.name, n) if isinstance(n, Local) else n

    found = []
    for s in step.work:
        value = s.value.transform(strip)  # type: ignore[attr-defined]
        if isinstance(s, Let):
            named[s.name] = value
        else:
            found.append(f"{s.name} {_text(value)}")  # type: ignore[attr-defined]
    return found + [f"{s.name} {_text(s.value.transform(strip))}" for s in step.moves] + [f"{q.name} {_text(q.left.transform(strip))}" for q in step.chained]


def _text(tile: Tile) -> str:
    """``tile`` as text that does not tell in which order numbers are multiplied."""
    match tile:
        case Op("*", _):
            factors = [tile]
            while products := [f for f in factors if isinstance(f, Op) and f.fn == "*"]:
                factors = [f for f in factors if f not in products] + [a for f in products for a in f.args]
            return f"({' * '.join(sorted(map(_text, factors)))})"
        case Op(fn, args):
            return f"{fn}({', '.join(map(_text, args))})"
        case TileReduce(kind, arg, axes):
            return f"{kind}({_text(arg)}, {', '.join(a.name for a in axes)})"
    return str(tile)


def _behind(step: Step, consumers: int, share: int) -> bool:
    """Whether registers suffice to run chained products one step behind. Raises Refused where they do not suffice at all."""

    def each(columns: Axis, width: float = 1) -> float:
        return share * (columns.tile if columns.tile != WHOLE else 128) * width / 128

    products = (*step.fresh, *step.chained, *step.direct)
    if any(q.columns.tile > WIDEST for q in products):
        raise Refused(f"a product of more than {WIDEST} columns")
    held = sum(each(q.columns) for q in products)
    held += sum(each(s.axes[-1]) for s in step.work if isinstance(s, Let) and isinstance(s.value, nest.Load) and len(s.axes) == 2)
    operands = sum(each(q.axes[0], 0.5) for q in step.chained)
    room = REGISTERS[consumers][0] - SPARE
    if held > room:
        raise Refused(f"products take {held:.0f} registers of a thread; {room} are left for them")
    return held + operands <= room


def ring_tiles(p: Plan) -> Iterator[tuple[Ring, Let]]:
    """Every tile that goes through a ring, with its ring."""
    for ring in p.rings:
        for tile in ring.tiles:
            yield ring, tile
