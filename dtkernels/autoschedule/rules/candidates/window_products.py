"""Propose schedules of products whose operands are read in windows, or that have several labels on a side: convolutions and their gradients.

Before, tiles along one label of each side and one of the sum, read as the caller laid them out, from any element on::

    f[b, o, y, x] = rdot(A[b, c, y + r, x + s], W[o, c, r, s], c, r, s);
    f.block(b:1, o:128, y:1, x:64); f.tensorize(b:1, o:128, y:1, x:64, c:64);

After, tiles over all positions, of copies in which what a tile runs along lies contiguous::

    f.merge(b_y_x, b, y, x); f.stage(A:c, W:c);
    f.block(o:128, b_y_x:128); f.tensorize(o:128, b_y_x:128, c:64);

or, where the channels are too few to be a tile's depth, channels and taps as one sum, ``f.merge(c_r_s, c, r, s)``; of copies with whole vectors of channels
last, taps and channels, ``f.merge(r_s_c, r, s, c)``. The cost model decides.

Labels that lie one after the other in all tensors, such as channels in groups, ``rdot(A[b, g, c], W[g, c, k], g, c)``, are one dimension of descriptors too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from ....codegen.powers_of_two import next_power_of_two
from ....lang import expr as ex
from ....lang.extents.linear_form import linear_form
from ....lang.schedule_checks import reduction_labels
from ...cost.kernel_config import KernelConfig
from ...problem import SchedulingProblem
from .. import gemm_candidates
from ..gemm_candidates import GemmTile
from ..product_sides import lies_in_tiles, main_product, sides
from ..sibling_gemms import adds_up_products, products

VECTOR = 16  #: bytes of a load
SHALLOW = 16  #: terms below which a label fills no step of the matrix units
#: of 16 bits: 64 deep in three stages, so that a multiprocessor holds several programs (2d convolutions on an H100 took 1.15 to 1.5 times as long in deeper ones)
TILES = tuple(
    GemmTile(*t)
    for t in (
        (16, 16, 64, 4, 4), (16, 32, 64, 4, 4), (32, 16, 64, 4, 4), (16, 64, 64, 4, 4), (16, 128, 64, 4, 4), (32, 32, 64, 4, 4), (32, 64, 64, 4, 4), (32, 128, 64, 4, 4),
        (64, 16, 64, 4, 4), (64, 32, 64, 4, 4), (64, 64, 64, 4, 4), (64, 128, 64, 4, 3), (64, 256, 64, 8, 3), (128, 16, 64, 4, 4), (128, 32, 64, 4, 4), (128, 64, 64, 4, 4),
        (128, 128, 64, 4, 3), (128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3),
    )
)  # fmt: skip
FULL = 128 * 64  #: elements of a tile below which none is proposed where larger ones give each multiprocessor a program
GROUP = 8  #: rows of blocks that go together where none reads windows: 205 us for 222 on an H100 (1024 rows of 512 x 16, sums of 8192)
LONG = 1024  #: elements of a side that fill several tiles
GATHERED = 64  #: bytes of elements, each with an address of its own, that a thread loads at once: more have no registers


class TileSide:
    """What a tile runs along on one side of a product, or in its sum: one label, or several as one; ``of`` are all that there are."""

    def __init__(self, shape: SchedulingProblem, labels: tuple[str, ...], of: tuple[str, ...], vectors: bool = False):
        self.vectors = vectors  #: whether the last label has whole vectors, along which copies lie
        self.apart = 1 < len(labels) < len(of)  #: without the first
        self.labels, self.size = labels, math.prod(shape.sizes[x] for x in labels)
        #: whether it has enough without the first: places of elements in a sum over several labels take the less the fewer labels a tile has
        self.is_long = 2 < len(labels) == len(of) and self.size >= LONG * shape.sizes[labels[0]]
        self.name = labels[0] if len(labels) == 1 else shape.unused_label("_".join(labels), bare=True)

    @property
    def merged(self) -> tuple[str, ...]:
        """Return the statement's arguments that make its labels one."""
        return (", ".join((self.name, *self.labels)),) if len(self.labels) > 1 else ()


def window_candidates(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield schedules of a kernel of one product of loaded operands that has several labels on a side, or windows, or of a sum of such products over the same labels."""
    dots = products(shape, members)
    if not dots or not shape.has_products_alone(root, members) or shape.itemsize == 1:
        return
    main, dot = main_product(shape, members)
    reads = [a for d in dots for side in (d.left, d.right) for a in _read_by(side, alone=len(dots) == 1)]
    own = shape.algorithm[root].labels
    rows, columns = _sides_of_all(shape, root, (dot, *dots))
    if len(dots) > 1 and not (adds_up_products(shape, main, dots) and all(d.labels == dot.labels for d in dots)):
        return
    others = any(reduction_labels(shape.algorithm, m) for m in members if m != main)
    picked = any(shape.is_picked(dot, x) for x in dot.labels)
    if None in reads or others or picked or not rows or not columns or {*dot.labels} & {*own}:
        return
    slides = any(slides_over(a) for a in reads if a)
    if slides and len(dots) > 1 or not slides and max(len(rows), len(columns), len(dot.labels)) == 1:
        return
    if own.index(rows[-1]) > own.index(columns[-1]):  # the columns are what lies contiguous
        rows, columns = columns, rows
    taps = _taps(shape, [a for a in reads if a], dot)
    found = [a for a in reads if a]
    over = (*tile_sides(shape, dot.labels, dot), *_contiguous(shape, found, dot), *_vectors_last(shape, found, dot))
    across, along = ((*tile_sides(shape, side, dot, own[0], taps), *_taps_first(shape, found, side, taps)) for side in (rows, columns))
    for row, column, summed in product(across, along, over):
        if any(side.is_long if summed.merged else side.apart and not _lies_dense(reads, side) for side in (row, column)):
            continue
        tiled = (row, column, summed)
        order = (column, row, summed) if row.vectors or column.vectors else (summed, column, row)
        copies = copies_of(shape, found, order, slides)
        if copies is not None:
            yield from _tiled(shape, root, tiled, dot.labels, copies, slides, taps=taps)
        if not slides and (described := _described(shape, root, found, tiled)):
            yield from _tiled(shape, root, tiled, dot.labels, (), slides, described)


def _sides_of_all(shape: SchedulingProblem, root: str, dots: tuple[ex.Dot, ...]) -> tuple[list[str], list[str]]:
    """Return the labels of the result that are rows of each product, and those that are columns of each."""
    rows, columns = sides(shape, root, dots[0])
    for dot in dots[1:]:
        left, right = sides(shape, root, dot)
        left, right = (right, left) if {*left} & {*columns} or {*right} & {*rows} else (left, right)
        rows, columns = [x for x in rows if x in left], [x for x in columns if x in right]
    return rows, columns


def _read_by(side: ex.Expr, alone: bool) -> list[ex.Access | None]:
    """Return the elements that an operand is made of; None for one that is computed beside which a kernel has no other product: nothing is loaded ahead then."""
    read = loaded(side)
    return [read] if read or alone else list(ex.accesses(side))


def loaded(side: ex.Expr) -> ex.Access | None:
    """Return the element that an operand is, where a condition allows it."""
    match side:
        case ex.Access():
            return side
        case ex.Call("where", (_, ex.Access() as read, ex.Const(0))):
            return read
    return None


def slides_over(read: ex.Access) -> bool:
    """Return whether an index is a sum of labels."""
    return any(len(ex.free_labels(i)) > 1 for i in read.index)


def _taps(shape: SchedulingProblem, reads: list[ex.Access], dot: ex.Dot) -> set[str]:
    """Return the short labels of the result beside which a long one is summed over in a window, as in the gradient of a convolution's weights."""
    windows = [{x.name: abs(by) for x, by in linear_form(i).items() if isinstance(x, ex.Label)} for a in reads for i in a.index if len(ex.free_labels(i)) > 1]
    summed = {*dot.labels}
    return {x for w in windows for x in w.keys() - summed if shape.sizes[x] <= SHALLOW and any(_passes(shape, x, k, by) for k, by in w.items() if k in summed)}


def _passes(shape: SchedulingProblem, tap: str, position: str, step: int) -> bool:
    """Return whether windows of ``tap`` stand at every ``step`` of ``position``, which is longer; not phases of a step beside its few taps: ``W[phase + 2 * k]``."""
    return shape.sizes[position] > shape.sizes[tap] and not (shape.sizes[tap] <= step and shape.sizes[position] <= SHALLOW)


def tile_sides(shape: SchedulingProblem, labels: list[str] | tuple[str, ...], dot: ex.Dot, first: str = "", taps: Collection[str] = ()) -> Iterator[TileSide]:
    """Yield what a tile may run along: one label, the last of a result if it is long enough, or all of them as one, or all but the first, which may lie dense.

    ``first``: the label along which the result's elements are farthest apart, which is none of its own. Beside ``taps`` it is, if it is long enough, and alone:
    with these as one label the elements of a tile lie anywhere. Gradients of the weights of transposed convolutions in three dimensions took 7 to 208 ms so, by 0.5
    to 5 of those of the inputs (bfloat16, an H100).
    """
    longest = max(labels, key=lambda x: (x == labels[-1] and shape.sizes[x] >= SHALLOW, shape.sizes[x])) if isinstance(labels, list) else shape.longest(dot)
    apart = {*taps} & {*labels} and shape.sizes[longest] >= SHALLOW and longest not in taps
    if shape.sizes[longest] >= SHALLOW and (longest != first or apart) or len(labels) == 1:
        yield TileSide(shape, (longest,), tuple(labels))
    if apart:
        return
    for some in (tuple(labels), tuple(labels[1:])) if isinstance(labels, list) else (tuple(labels),):
        if len([x for x in some if shape.sizes[x] > 1]) > 1:
            yield TileSide(shape, some, tuple(labels))


def _contiguous(shape: SchedulingProblem, reads: list[ex.Access], dot: ex.Dot) -> Iterator[TileSide]:
    """Yield the summed label along which elements of a Func lie contiguous, which cannot be copied, if a tile is filled and it is not the longest."""
    for read in reads:
        match read.index[-1:]:
            case (ex.Label(name),) if read.tensor in shape.algorithm and name in dot.labels and shape.sizes[name] >= SHALLOW and name != shape.longest(dot):
                yield TileSide(shape, (name,), dot.labels)
                return


def _vectors_last(shape: SchedulingProblem, reads: list[ex.Access], dot: ex.Dot) -> Iterator[TileSide]:
    """Yield the whole sum over windows as one label, its channels last, if these are whole vectors and too few for a step of the matrix units.

    Steps along 16 channels, tap after tap, took 3.9 ms on an H200 where taps and channels as one took 5.0 (16 x 16 x 1024 x 1024, 128 results, 3 x 3 taps).
    """
    for name in dot.labels:
        if all(ex.Label(name) in a.index for a in reads) and shape.sizes[name] < SHALLOW and shape.sizes[name] * shape.itemsize % VECTOR == 0:
            taps = tuple(x for x in dot.labels if x != name)
            if taps and all(shape.sizes[x] <= SHALLOW for x in taps):
                yield TileSide(shape, (*taps, name), dot.labels, vectors=True)
            return


def _taps_first(shape: SchedulingProblem, reads: list[ex.Access], side: list[str], taps: Collection[str]) -> Iterator[TileSide]:
    """Yield a result's taps and channels as one label, the channels last, if these are whole vectors: the gradient of a convolution's weights.

    Of copies with channels last, all loads are whole vectors: of windows along positions each tap begins anywhere, and its elements are loaded one by one.
    """
    own = [x for x in side if x in taps]
    rest = [x for x in side if x not in taps]
    if own and len(rest) == 1 and shape.sizes[rest[0]] * shape.itemsize % VECTOR == 0 and any(ex.Label(rest[0]) in a.index for a in reads):
        yield TileSide(shape, (*own, rest[0]), tuple(side), vectors=True)


def _lies_dense(reads: list[ex.Access | None], side: TileSide) -> bool:
    """Return whether an operand has the labels of a side as its last dimensions."""
    return any(a is not None and a.index[-len(side.labels) :] == tuple(map(ex.Label, side.labels)) for a in reads)


def _described(shape: SchedulingProblem, root: str, reads: list[ex.Access], tiled: tuple[TileSide, ...]) -> tuple[str, ...]:
    """Return the operands and the result if descriptors reach them with the labels of each side as one dimension, and nothing otherwise.

    A result in float32 leaves no room for tiles ahead: 292 us for 210 of a product and its group norm on an H100.
    """
    own, joined = tuple(map(ex.Label, shape.algorithm[root].labels)), [side.labels for side in tiled]

    def reached(index: tuple[ex.Expr, ...]) -> bool:
        last = next((labels for labels in joined if index[-len(labels) :] == tuple(map(ex.Label, labels))), ())
        return lies_in_tiles(index, joined) and math.prod(shape.sizes[x] for x in last) * shape.itemsize % 16 == 0

    if not shape.target.has_tma or shape.itemsize != 2 or not any(side.merged for side in tiled) or not all(reached(a.index) for a in reads):
        return ()
    stored = reached(own) and shape.stored_bytes(root) == shape.itemsize
    return (*dict.fromkeys(a.tensor for a in reads), root) if stored else ()


def copies_of(shape: SchedulingProblem, reads: list[ex.Access], tiled: tuple[TileSide, ...], slides: bool) -> tuple[str, ...] | None:
    """Return what is to be copied, each with the label of its rows: the first of the tile's that has a dimension to itself; None where one cannot be.

    The matrix units take 16 bits along any side that lies contiguous.
    """
    found = []
    for read in reads:
        plain = [i.name for i in read.index if isinstance(i, ex.Label)]
        along = next((name for side in tiled if (name := side.labels[-1] if side.vectors else side.name) in plain), None)
        ends = [tuple(map(ex.Label, side.labels)) for side in tiled if side.name == along or side.merged or shape.itemsize == 2 and not slides]
        index = tuple(i for i in read.index if not (isinstance(i, ex.Label) and shape.sizes[i.name] == 1))
        if along is None or any(index[-len(end) :] == end for end in ends):
            continue
        if read.tensor in shape.outputs or read.tensor in shape.algorithm.integer_inputs():
            return None
        found.append(f"{read.tensor}:{along}")
    return tuple(dict.fromkeys(found))


def _tiled(
    shape: SchedulingProblem, root: str, tiled: tuple[TileSide, TileSide, TileSide], labels: tuple[str, ...], copies: tuple[str, ...], slides: bool,
    described: tuple[str, ...] = (), taps: Collection[str] = (),
) -> Iterator[KernelConfig]:  # fmt: skip
    (row, column, summed), own = tiled, shape.algorithm[root].labels
    shape = replace(shape, sizes={**shape.sizes, **{side.name: side.size for side in (row, column, summed)}})
    inside = {x for side in (row, column, summed) if side.merged for x in side.labels}
    batch = math.prod(shape.sizes[x] for x in own if x not in (*row.labels, *column.labels))
    cores, tripled = shape.target.multiprocessors, shape.triples_float32
    short = () if taps else tuple(x for x in labels if x != summed.name and x != summed.labels[0] and shape.sizes[x] <= SHALLOW)
    vectors = [side for side in (row, column, summed) if side.vectors]
    if vectors:
        short = tuple(x for side in vectors for x in (*side.labels, side.name))
    gathers = not vectors and (summed.merged or any({*side.merged[0].split(", ")} & {*taps} for side in (row, column) if side.merged))
    fields: dict[str, Any] = {
        "merged": tuple(m for side in (row, column, summed) for m in side.merged),
        "staged": copies,
        "constants": () if described else short,
        "approximations": (("rdot", ""),) if tripled else (),
        "grouped": None if slides else (row.name, column.name, GROUP),
        "descriptors": described,
        "persistent": bool(described),
    }
    known = TILES if shape.itemsize == 2 else ()
    for of in gemm_candidates.tiles(row.size, column.size, summed.size, batch, cores, shape.itemsize, tripled=tripled, known=known):
        if of.rows * of.columns < FULL and min(row.size, column.size) >= 128 and batch * row.size * column.size >= FULL * cores:
            continue
        depth = max(16, min(of.depth, next_power_of_two(summed.size)))
        while gathers and not described and depth > 16 and max(of.rows, of.columns) * depth * shape.itemsize > GATHERED * 32 * of.warps:
            depth //= 2
        if gathers and not described and max(of.rows, of.columns) * depth * shape.itemsize > GATHERED * 32 * of.warps:
            continue
        block = {x: 1 for x in own if x not in inside and x not in (row.name, column.name)} | {row.name: of.rows, column.name: of.columns}
        tile = block | {x: 1 for x in labels if x not in inside} | {summed.name: depth}
        loops = {x: shape.sizes[x] for x in labels if x not in inside} | {summed.name: -(-summed.size // depth)}
        longest = max(loops, key=lambda x: (loops[x], x == summed.name))
        yield shape.config(root, block, tile, of.warps, _stages(shape, of, depth, of.rows * of.columns * shape.itemsize if described else 0), **fields)
        for parts in gemm_candidates.parts(shape.programs(block), loops[longest], cores):
            yield shape.config(root, block, tile, of.warps, _stages(shape, of, depth), **{**fields, "persistent": False}, split=((longest, parts),))


def _stages(shape: SchedulingProblem, of: GemmTile, depth: int, beside: int = 0) -> int:
    """Return the stages of a tile, as far as shared memory holds them ``beside`` other bytes."""
    return max(2, min(of.stages, (shape.target.shared_bytes - beside) // ((of.rows + of.columns) * depth * shape.itemsize)))
