"""Plan warp specialization: choose the nests that the Gluon backend supports and divide them into producer, consumers and rings of tiles.

By ``ping_pong`` two consumers take whole blocks in turn instead. Where the loop has direct products alone and every block as many steps, one
multiplies while the other computes on its results and stores them; each hands the tiles of the ring to the other when it has read its own.

There is one form, whatever the kernel computes. The rows of a block are divided among consumer warpgroups, 64 or 128 each. A producer
warp loads tiles of a reduction loop into ring buffers in shared memory. The loop may contain

* fresh products of two loaded tiles, ``s = dot(Q, K)``: those of the next step overlap this step's work on registers;
* chained products, whose left operand is computed, ``acc <- f(acc) + dot(p, V)``: they run until the next step needs acc;
* or direct products alone, ``acc <- acc + dot(A, B)``;
* beside the first two, products over the rows that are added to memory, ``sum += dot(p^T, K)``.

Several consecutive loops walk one extent; the last one must keep every condition that the others have lost. Where products are added to memory,
or a loop over single elements lies around the others, each loop is run by itself. ``plan`` returns the plan or
raises ``Refused`` with the reason in one line; the Triton form of the same schedule is used then.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir import nest
from ...ir.nest import (
    Accumulator,
    Assign,
    Axis,
    DescriptorLoad,
    DescriptorLoadLet,
    DescriptorStore,
    Index,
    Kernel,
    Let,
    Local,
    Loop,
    Op,
    Statement,
    Store,
    Tile,
    TileDot,
    TileReduce,
    Valued,
    axes_of,
    is_descriptor_load,
    statement_kind,
    statements,
)
from .legality import can_defer_products, check_plan, check_step, in_work
from .plan import HALF, REGISTERS, AddedProduct, LoopStep, Product, Refused, Ring, WarpSpecializedKernel


def plan(kernel: Kernel) -> WarpSpecializedKernel:
    """Plan a kernel in descriptor form. Raises Refused."""
    outer, kernel = _without_outer(kernel)
    loops = [s for s in kernel.body if isinstance(s, Loop)]
    if any(isinstance(s, Store) and s.onto or isinstance(s, DescriptorStore) and s.onto not in ("", "sum") for s in statements(kernel.body)):
        raise Refused("it adds to a sum in memory, not through a descriptor")
    if not any(name == "warp_specialize" for loop in loops for name, _ in loop.options):
        raise Refused("no loop has specialize_warps")
    for loop in (*loops, *([outer] if outer else [])):
        if loop.when is not None:
            raise Refused(f"the loop over {loop.axis.label} runs under a condition")
    for loop in loops:
        if not loop.reduces or loop.within != "extent" or any(isinstance(s, Loop) for s in loop.body):
            raise Refused(f"the loop over {loop.axis.label} is no single loop of a reduction")
        if loop.axis.scalar or loop.axis.label != loops[0].axis.label or loop.axis.tile != loops[0].axis.tile:
            raise Refused("loops over different labels or tiles")
    rows = _rows(kernel, loops)
    consumers = _consumers(kernel, rows)
    kernel = _rows_first(kernel, rows)
    first, last = (
        next(i for i, s in seq if isinstance(s, Loop)) for seq in (list(enumerate(kernel.body)), list(enumerate(kernel.body))[::-1])
    )
    before, after = tuple(s for s in kernel.body[:last] if not isinstance(s, Loop)), kernel.body[last + 1 :]
    if any(axes_of(s.value) for s in (*kernel.body[first:last], *(outer.body if outer else ())) if isinstance(s, Let)):
        raise Refused("tiles are computed between the loops")
    steps = tuple(_step(s, rows) for s in kernel.body if isinstance(s, Loop))
    resident = tuple(s for s in before if is_descriptor_load(s))
    promotes = _in_float8(_dots(loops)) and "rdot" not in kernel.approximate
    behind = can_defer_products(steps[-1], consumers, rows.tile // (1 if kernel.ping_pong else consumers), promotes)
    found = WarpSpecializedKernel(
        kernel,
        rows,
        consumers,
        tuple(s for s in before if s not in resident),
        resident,
        steps,
        _rings(steps[-1]),
        after,
        _stages(kernel, loops),
        kernel.ping_pong,
        _in_float8(_dots(loops)),
        behind,
        outer,
    )
    try:
        return _checked(found)
    except Refused:
        if not behind:
            raise
        return _checked(replace(found, behind=False))  # loops whose masks do not nest can be run one by one


def _checked(found: WarpSpecializedKernel) -> WarpSpecializedKernel:
    """Return the plan, with what products start from where loops are run one by one. Raises Refused."""
    if found.in_order:
        found = replace(found, steps=tuple(_with_starts(step) for step in found.steps))
    check_plan(found)
    return found


def _with_starts(step: LoopStep) -> LoopStep:
    """Let fresh products start from the numbers of columns that they are added to, where nothing else reads either."""
    lines, read = {s.name for s in step.lines}, [n for v in nest.values((*step.work, *step.moves)) for n in v.walk() if isinstance(n, Local)]
    lefts = (*(q.left for q in step.chained), *(a.left for a in step.added))
    read += [n for left in lefts for n in left.walk() if isinstance(n, Local)]
    fresh, work = list(step.fresh), list[Let | Assign]()
    for s in step.work:
        match s.value:
            case Op("+", (Local(name) as product, Local(line) as start)) if line in lines and sum(n.name in (name, line) for n in read) == 2:
                for i, q in enumerate(fresh[1:], 1):  # the first is made a step ahead
                    if q.name == name:
                        fresh[i], s = replace(q, start=start), replace(s, value=product)
        work.append(s)
    return replace(step, fresh=tuple(fresh), work=tuple(work))


def _without_outer(kernel: Kernel) -> tuple[Loop | None, Kernel]:
    """Return the loop over single elements around all others, if there is one, and the kernel with its loops in its place."""
    loops = [s for s in kernel.body if isinstance(s, Loop)]
    if len(loops) != 1 or not loops[0].axis.scalar or loops[0].order or not any(isinstance(s, Loop) for s in loops[0].body):
        return None, kernel
    if others := [s for s in loops[0].body if not isinstance(s, (Index, Let, Loop)) or isinstance(s, Let) and is_descriptor_load(s)]:
        raise Refused(f"a {statement_kind(others[0])} in the loop over {loops[0].axis.label}")
    inner = tuple(s for s in loops[0].body if isinstance(s, Loop))
    at = kernel.body.index(loops[0])
    return loops[0], replace(kernel, body=(*kernel.body[:at], *inner, *kernel.body[at + 1 :]))


def _rows(kernel: Kernel, loops: list[Loop]) -> Axis:
    """Return the block axis that every product keeps and nothing reduces."""
    blocks = [s.axis for s in kernel.body if isinstance(s, Index) and s.start == "block" and not s.axis.scalar]
    dots = _dots(loops)
    if not dots:
        raise Refused("no matrix product in the loop")
    if any(d.operands is not None and d.operands.fixed for d in dots) and not _in_float8(dots):
        raise Refused("an operand that a cast gives its dtype")
    kept = [
        a
        for a in blocks
        if all(a in axes_of(d) for d in dots) and all(a in s.axes for s in statements(kernel.body) if isinstance(s, Accumulator))
    ]
    kept = [a for a in kept if not any(a in n.axes for v in nest.values(kernel.body) for n in v.walk() if isinstance(n, TileReduce))]
    computed = [side for d in dots for side in (d.left, d.right) if not isinstance(side, Local) or _is_work(side.name, loops)]
    kept = [a for a in kept if all(a in axes_of(side) for side in computed)]
    stored = [[a for a in s.box if a] if isinstance(s, DescriptorStore) else s.axes for s in kernel.body if isinstance(s, (DescriptorStore, Store))]
    columns = {axes[-1] for axes in stored if len(axes) == 2}  # results are stored by rows
    kept.sort(key=lambda a: (a in columns, a not in axes_of(dots[0].left)))
    if not kept:
        raise Refused("no block label is kept by every product and reduced by nothing")
    return kept[0]


def _dots(loops: list[Loop]) -> list[TileDot]:
    """Return the products that are not added to memory."""
    kept = [s for loop in loops for s in loop.body if not isinstance(s, DescriptorStore)]
    return [n for v in nest.values(tuple(kept)) for n in v.walk() if isinstance(n, TileDot)]


def _in_float8(dots: list[TileDot]) -> bool:
    """Return whether all products multiply float8."""
    return all(d.operands is not None and bool(d.operands.float8) for d in dots)


def _is_work(name: str, loops: list[Loop]) -> bool:
    """Return whether a local is computed in a loop rather than loaded."""
    return any(isinstance(s, Let) and s.name == name and not isinstance(s.value, DescriptorLoad) for loop in loops for s in loop.body)


def _consumers(kernel: Kernel, rows: Axis) -> int:
    count = kernel.num_warps // 4
    if kernel.num_warps % 4 or count not in REGISTERS:
        raise Refused(f"num_warps {kernel.num_warps}; 4, 8 or 16 make whole consumers")
    if kernel.ping_pong:
        if count != 2 or rows.tile not in HALF:
            raise Refused(f"{rows.tile} rows for each of {count} consumers in turn; 64 or 128 for each of 2")
        return count
    if rows.tile % count or rows.tile // count not in HALF:
        raise Refused(f"{rows.tile} rows for {count} consumers; 64 or 128 each")
    return count


def _stages(kernel: Kernel, loops: list[Loop]) -> int:
    return max(2, int(next((v for loop in loops if not loop.tail for k, v in loop.options if k == "num_stages"), kernel.num_stages)))


def _rows_first(kernel: Kernel, rows: Axis) -> Kernel:
    """Make ``rows`` the first dimension of every computed tile."""

    def order(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(sorted(axes, key=lambda a: a != rows))

    def in_tile(tile: Tile) -> Tile:
        return replace(tile, axes=order(tile.axes)) if isinstance(tile, Local) and tile.name not in loaded else tile

    def one(s: Statement) -> Statement:
        if isinstance(s, Loop):
            return replace(s, body=tuple(one(x) for x in s.body))
        if isinstance(s, (Let, Accumulator, Assign)) and not is_descriptor_load(s):
            s = replace(s, axes=order(s.axes))
        return replace(s, value=s.value.transform(in_tile)) if isinstance(s, Valued) else s

    loaded = {s.name for s in statements(kernel.body) if is_descriptor_load(s)}
    return replace(kernel, body=tuple(one(s) for s in kernel.body))


# -- one loop ---------------------------------------------------------------------------------------------------------


def _step(loop: Loop, rows: Axis) -> LoopStep:
    fetches = tuple(s for s in loop.body if is_descriptor_load(s))
    computed = {s.name for s in loop.body if isinstance(s, Let) and s not in fetches}
    fresh: list[Product] = []
    work: list[Let | Assign] = []
    moves: list[Assign] = []
    chained: list[Product] = []
    direct: list[Product] = []
    added: list[AddedProduct] = []
    for s in loop.body:
        match s:
            case Index() | Let(_, DescriptorLoad()):
                continue
            case Assign(name, axes, Op("+", (older, TileDot() as dot))):
                product = _product(name, dot, rows)
                if isinstance(product.left, Local) and product.left.name not in computed:
                    direct.append(product)
                else:
                    chained.append(product)
                if older != Local(name, axes):
                    moves.append(replace(s, value=older))
            case Let() | Assign():
                work.append(replace(s, value=_hoist(s, rows, computed, fresh)))
            case DescriptorStore(value=TileDot() as dot, onto="sum"):
                product_of_rows = _added(s, dot, rows, loop)
                if product_of_rows.columns.half == 2 and added and added[-1].columns.whole == product_of_rows.columns.whole:
                    added[-1] = replace(added[-1], rest=product_of_rows)
                else:
                    added.append(product_of_rows)
            case _:
                raise Refused(f"a {statement_kind(s)} inside the loop")
    step = LoopStep(loop, fetches, tuple(fresh), tuple(work), tuple(moves), tuple(chained), tuple(direct), tuple(added))
    check_step(step)
    return step


def _hoist(s: Let | Assign, rows: Axis, computed: set[str], fresh: list[Product]) -> Tile:
    """Replace each product in the value of ``s`` by a local of its own, collected in ``fresh``. One of two tiles of a whole extent is one product."""

    def one(node: Tile) -> Tile:
        match node:
            case Op("+", (Local(name) as low, TileDot() as more)) if _is_rest(more) and (known := next((p for p in fresh if p.name == name), None)):
                fresh[fresh.index(known)] = replace(known, rest=_loaded_product(s.name, more, rows, computed))
                return low
        if not isinstance(node, TileDot) or _is_rest(node):
            return node
        known = next((p for p in fresh if (p.left, p.right) in ((node.left, node.right), (node.right, node.left))), None)
        if known is None:
            known = _loaded_product(s.name, node, rows, computed)
            known = replace(known, name=f"{known.loaded_left.name}_{known.right.name}_product")
            fresh.append(known)
        return Local(known.name, (rows, known.columns))

    value = s.value.transform(one)
    if any(isinstance(n, TileDot) for n in value.walk()):
        raise Refused(f"{s.name} adds two tiles of a whole extent to something else")
    return value


def _is_rest(dot: TileDot) -> bool:
    """Return whether a product is over the second of two tiles of a whole extent."""
    return all(a.half == 2 for a in dot.axes)


def _loaded_product(name: str, dot: TileDot, rows: Axis, computed: set[str]) -> Product:
    """Return a product of two loaded tiles. Raises Refused for another."""
    found = _product(name, dot, rows)
    if not isinstance(found.left, Local) or found.left.name in computed:
        raise Refused(f"{name} is a product of what is computed and no accumulator")
    return found


def _product(name: str, dot: TileDot, rows: Axis) -> Product:
    """Return the product with the operand that has the rows on the left."""
    left, right = (dot.left, dot.right) if rows in axes_of(dot.left) else (dot.right, dot.left)
    if len(dot.axes) != 1 or len(axes_of(left)) != 2 or len(axes_of(right)) != 2:
        raise Refused(f"{name} is no product of two matrices")
    if not isinstance(right, Local):
        raise Refused(f"the right operand of {name} is computed")
    return Product(name, left, right, dot.axes, rows, next(a for a in axes_of(right) if a not in dot.axes))


def _added(s: DescriptorStore, dot: TileDot, rows: Axis, loop: Loop) -> AddedProduct:
    """Return a product over the rows that is added to memory."""
    left, right = (dot.right, dot.left) if isinstance(dot.left, Local) and loop.axis not in axes_of(dot.left) else (dot.left, dot.right)
    box = [a for a in s.box if a]
    if dot.axes != (rows,) or set(axes_of(left)) != {rows, loop.axis} or len(axes_of(right)) != 2 or not isinstance(right, Local):
        raise Refused(f"what is added to {s.buffer} is no product over {rows.label} of a computed tile and a loaded one")
    columns = next(a for a in axes_of(right) if a != rows)
    if box != [loop.axis, columns] or loop.axis.tile not in HALF:
        raise Refused(f"{s.buffer} is not added to in boxes of 64 or 128 rows")
    return AddedProduct(s, left, right, loop.axis, columns)


def _rings(step: LoopStep) -> tuple[Ring, ...]:
    """Group fetched tiles into rings: tiles that the same products read share one, and so do two tiles of a whole extent."""
    found: dict[tuple[frozenset[int], bool], list[DescriptorLoadLet]] = {}
    products = (*step.fresh, *step.chained, *step.direct)
    first = [next(j for j, q in enumerate(products) if (q.left, q.whole_columns) == (p.left, p.whole_columns)) for p in products]
    for s in step.fetches:
        uses = frozenset(i for i, p in zip(first, products) if s.name in p.operands)
        found.setdefault((uses, in_work(step, s.name)), []).append(s)
    early, late = len(step.fresh), len(step.fresh) + len(step.chained)
    return tuple(
        Ring(tiles[0].name, tuple(tiles), any(i < early for i in uses), worked or any(early <= i < late for i in uses))
        for (uses, worked), tiles in found.items()
    )
