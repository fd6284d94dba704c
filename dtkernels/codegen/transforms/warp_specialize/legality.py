"""Check whether the Gluon backend supports a nest, and refuse it with a one-line reason."""

from __future__ import annotations

from ...held_terms import FLOAT8_DEPTH, MOST_IMPRECISE
from ...ir import nest
from ...ir.nest import (
    WHOLE,
    Accumulator,
    Assign,
    Axis,
    Const,
    DescriptorLoad,
    DescriptorStore,
    Guard,
    Index,
    Let,
    Load,
    Local,
    Op,
    Store,
    Tile,
    TileReduce,
    axes_of,
    statement_kind,
)
from .plan import REGISTERS, SPARE, WIDEST, LoopStep, Refused, WarpSpecializedKernel, producer_names

RANDOM = ("random", "normal")


def in_work(step: LoopStep, name: str) -> bool:
    """Return whether the work or the moves of ``step`` read the local ``name``."""
    return any(isinstance(n, Local) and n.name == name for v in nest.values((*step.work, *step.moves)) for n in v.walk())


def check_step(step: LoopStep) -> None:
    """Check the body of one loop. Raises Refused."""
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
    if step.added and (step.direct or not step.fresh):
        raise Refused("what is added to memory is of no product of two loaded tiles")
    if step.fetches and not step.fresh and not step.direct:
        raise Refused("no product of two loaded tiles")
    if any(in_work(step, s.name) for s in step.fetches):
        raise Refused("a tile that is loaded through a descriptor is used outside of products")


def _check_turns(p: WarpSpecializedKernel) -> None:
    """Check that consumers can take blocks in turn: each must know how many steps the blocks of the other have."""
    if not p.kernel.persistent or not p.last.direct:
        raise Refused("ping_pong of what is no persistent kernel of products that only add up")
    if len(p.steps) > 1 or p.last.loop.begin is not None or p.last.loop.end is not None or p.resident:
        raise Refused("ping_pong of blocks with loops of different lengths, or with tiles that stay")


def _check_float8(p: WarpSpecializedKernel) -> None:
    """Check that float8 is multiplied alone: this form has no conversions of it."""
    if not all(step.direct for step in p.steps) or p.resident:
        raise Refused("products in float8 beside others, or of tiles that stay")
    if not all(FLOAT8_DEPTH <= a.tile <= MOST_IMPRECISE for step in p.steps for q in step.direct for a in q.axes):
        raise Refused(f"products in float8 whose steps are not of {FLOAT8_DEPTH} to {MOST_IMPRECISE} terms")
    if any(isinstance(n, Op) and n.fn.endswith((":e4m3", ":e5m2")) for v in nest.values(p.kernel.body) for n in v.walk()):
        raise Refused("a cast to float8")


def check_plan(p: WarpSpecializedKernel) -> None:
    """Check a whole plan: dimensions of tiles, reductions, stores, resident tiles and the order of loops. Raises Refused."""
    if p.float8:
        _check_float8(p)
    if any(isinstance(n, Op) and n.fn in RANDOM for v in nest.values(p.kernel.body) for n in v.walk()):
        raise Refused("random numbers, which Gluon does not have")
    if p.turns:
        _check_turns(p)
    _check_in_order(p)
    parts = any(isinstance(s, Index) and s.axis.whole and not s.axis.half for s in p.kernel.body)
    if parts and not all(step.direct for step in p.steps):
        raise Refused("a tile in parts, whose products do not only add up")
    in_loops = [s for step in p.steps for s in step.loop.body if not isinstance(s, DescriptorStore)]
    body = (*p.before, *p.resident, *in_loops, *p.after)
    for tile in [s.value for s in body if hasattr(s, "value") and not isinstance(s.value, DescriptorLoad)] + [
        Local("", s.axes) for s in body if isinstance(s, Accumulator)
    ]:
        for n in tile.walk():
            if len(axes_of(n)) > 2 or (len(axes_of(n)) == 2 and p.rows not in axes_of(n) and not _is_loaded(n, p)):
                raise Refused(f"{n} has other dimensions than rows and columns")
            if isinstance(n, TileReduce) and (len(n.axes) != 1 or p.rows in n.axes):
                raise Refused(f"{n} is reduced over rows or over two labels")
    for s in p.after:
        if not isinstance(s, (Let, DescriptorStore, Store)) or isinstance(getattr(s, "value", None), DescriptorLoad):
            raise Refused(f"a {statement_kind(s)} after the loop")
        if isinstance(s, DescriptorStore) and [a for a in s.box if a][:1] != [p.rows]:
            raise Refused(f"{s.buffer} is not stored by rows")
    used = {name for step in p.steps for q in (*step.fresh, *step.chained, *step.direct) for name in q.operands} | p.crossing
    if any(s.name not in used for s in p.resident):
        raise Refused("a tile that is loaded once through a descriptor is used outside of products")
    needed = producer_names(p)
    if any(isinstance(s, Let) and s.name in needed and any(isinstance(n, Load) for n in s.value.walk()) for s in p.before):
        raise Refused("what the producer brings, or for how long, is read from memory")
    if p.last.loop.order and (len(p.steps) > 1 or not p.last.direct):
        raise Refused("joined loops around products that do not only add up")
    _check_loops(p)


def _check_in_order(p: WarpSpecializedKernel) -> None:
    """Check the form in which loops are run one by one: nothing is rescaled, and what is added is made of tiles that stay."""
    if not p.in_order:
        return
    if p.turns or p.float8 or p.rescales or any(step.direct for step in p.steps):
        raise Refused("accumulators that are rescaled, in turns or in float8, beside sums in memory or in a loop of loops")
    if any(a.columns.half and (a.rest is None or p.consumers != 2) for a in p.last.added):
        raise Refused("sums in memory of two tiles of a whole extent, which other than two consumers would add to")
    if any([f"{s.name} {s.value}" for s in step.lines] != [f"{s.name} {s.value}" for s in p.last.lines] for step in p.steps):
        raise Refused("loops that read other numbers of columns")
    stay = {s.name: s.value.box for s in p.resident}
    for a in (tile for added in p.last.added for tile in added.tiles):
        if p.rows not in stay.get(a.right.name, ()):
            raise Refused(f"{a.right.name}, which {a.store.buffer} is made of, does not stay for the whole block")


def _is_loaded(tile: Tile, p: WarpSpecializedKernel) -> bool:
    return isinstance(tile, Local) and tile.name in {s.name for s in p.resident} | {s.name for step in p.steps for s in step.fetches}


def _check_loops(p: WarpSpecializedKernel) -> None:
    """Check that consecutive loops walk one extent, and that the last loop is correct anywhere in it; run one by one, that they load the same."""
    last = p.last
    if p.in_order:
        if any(_loads(step) != _loads(last) for step in p.steps):
            raise Refused("loops that load or multiply differently")
        return
    for step, following in zip(p.steps, p.steps[1:]):
        begin = following.loop.begin
        whole = last.loop.end or nest.Size(last.loop.axis.label)
        if begin is None or step.loop.end not in (begin, Op("min", (begin, whole))):
            raise Refused("loops that do not follow each other")
    for step in p.steps[:-1]:
        if _loads(step) != _loads(last):
            raise Refused("loops that load or multiply differently")
        if not _conditions(step) <= _conditions(last) or _unguarded_text(step) != _unguarded_text(last):
            raise Refused("the last loop lacks a condition of an earlier one")
        if [f"{m.name} {m.value}" for m in step.moves] != [f"{m.name} {m.value}" for m in last.moves]:
            raise Refused("loops that move accumulators differently")


def _loads(step: LoopStep) -> tuple[list[str], ...]:
    """Return the loads of a step, and its products of loaded tiles."""
    return (
        [f"{s.name} {s.value}" for s in step.fetches],
        [f"{q.name} {r.left} {r.right}" for q in (*step.fresh, *step.direct) for r in (q, q.rest) if r],
        [f"{q.name} {q.right}" for q in step.chained] + [f"{a.store.buffer} {tile.right}" for a in step.added for tile in a.tiles],
    )


def _conditions(step: LoopStep) -> set[str]:
    found = set()
    for tile in nest.values((*step.work, *step.moves)):
        for n in tile.walk():
            found |= (
                {str(n.args[0])}
                if isinstance(n, Op) and n.fn == "where"
                else {f"{a.name} inside" for a in n.axes}
                if isinstance(n, Guard)
                else set()
            )
    return found


def _unguarded_text(step: LoopStep) -> list[str]:
    """Return the text of a step's computation, without conditions and with named subexpressions inlined."""
    named: dict[str, Tile] = {}

    def strip(n: Tile) -> Tile:
        if isinstance(n, Guard):
            return n.arg
        if isinstance(n, Op) and n.fn == "where" and isinstance(n.args[2], Const):
            return n.args[1]
        return named.get(n.name, n) if isinstance(n, Local) else n

    found = []
    for s in step.work:
        value = s.value.transform(strip)
        if isinstance(s, Let):
            named[s.name] = value
        else:
            found.append(f"{s.name} {_text(value)}")
    return (
        found
        + [f"{s.name} {_text(s.value.transform(strip))}" for s in step.moves]
        + [f"{q.name} {_text(q.left.transform(strip))}" for q in step.chained]
    )


def _text(tile: Tile) -> str:
    """Print ``tile`` independently of the order of factors in a product."""
    match tile:
        case Op("*", _):
            factors: list[Tile] = [tile]
            while products := [f for f in factors if isinstance(f, Op) and f.fn == "*"]:
                factors = [f for f in factors if f not in products] + [a for f in products for a in f.args]
            return f"({' * '.join(sorted(map(_text, factors)))})"
        case Op(fn, args):
            return f"{fn}({', '.join(map(_text, args))})"
        case TileReduce(kind, arg, axes):
            return f"{kind}({_text(arg)}, {', '.join(a.name for a in axes)})"
    return str(tile)


def can_defer_products(step: LoopStep, consumers: int, share: int, promotes: bool = False) -> bool:
    """Return whether registers suffice to run chained products one step behind. Raises Refused if they do not suffice at all.

    ``promotes``: each step's sums take registers beside those that they are added to.
    """

    def each(columns: Axis, width: float = 1) -> float:
        return share * (columns.tile if columns.tile != WHOLE else 64 if columns.half else 128) * width / 128

    products = (*step.fresh, *step.chained, *step.direct)
    if any(q.columns.tile > WIDEST for q in products):
        raise Refused(f"a product of more than {WIDEST} columns")
    held = sum(each(q.columns, 2 if promotes else 1) for q in products)
    held += sum(each(s.axes[-1]) for s in step.work if isinstance(s, Let) and isinstance(s.value, nest.Load) and len(s.axes) == 2)
    operands = sum(each(q.axes[0], 0.5) for q in step.chained)
    room = REGISTERS[consumers][0] - SPARE
    if held > room:
        raise Refused(f"products take {held:.0f} registers of a thread; {room} are left for them")
    return held + operands <= room
