"""Tile kernels that reduce the rows of a matrix product, such as the softmax of ``A B`` or the logarithm of its sum.

A narrow row is held whole, so that its product is made once. A wide one that an output is written along is swept by a kernel that
sums it and stores the sums, since every block of the output would sweep it again; then each block makes its product once more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...codegen.powers_of_two import last_power_of_two, next_power_of_two
from ...lang import expr as ex
from ...lang.schedule_checks import reduction_labels
from ..cost.kernel_config import KernelConfig, Sizes
from ..problem import LONG, WHOLE_SIDE, SchedulingProblem

ELEMENTS = {2: 128 * 128, 4: 64 * 64}  #: bytes of an element of the operands -> elements of the product that a program has at once
STEP = {2: 128, 4: 64}  #: of a swept row
ROWS = 64  #: of a block of a sweep, at least: with fewer the other operand is read more often than it can be
WIDE = (128, 256)  #: of a block of a sweep and its step, where so large ones are enough for the GPU
ALONE = 128  #: rows of the tiles of both operands up to which five steps of 128 terms have room
FEW_PROGRAMS = 8  #: multiprocessors for each program from which on most of the GPU idles
FILLED = 64  #: elements from which on a label is worth a side of a product's tile
WINDOW = 8  #: longest side of a window
TERMS = 1 << 15  #: that a program holds, of sums of which each term varies along a label that the product lacks
PARTS = 4  #: least steps of a sweep that is cut over programs


def reduced_product_labels(shape: SchedulingProblem, func: str, made: str) -> set[str]:
    """Return the labels of the product ``made`` that ``func`` reduces over; none if ``func`` is a product itself."""
    if func == made or shape.dots(func) or not shape.dots(made) or made not in shape.algorithm.needed_by((func,)):
        return set()
    return set(reduction_labels(shape.algorithm, func)) & set(shape.algorithm[made].labels)


def recomputes_product_rows(shape: SchedulingProblem, func: str, root: str, made: Iterable[str]) -> bool:
    """Return whether each block of ``root`` would recompute whole rows of one of the products ``made`` to reduce them for ``func``.

    That is so where ``root`` is written along these rows and they are too wide to hold.
    """
    along = {label for product in made for label in reduced_product_labels(shape, func, product)} & set(shape.algorithm[root].labels)
    return any(shape.sizes[label] > WHOLE_SIDE for label in along)


def feeds_row_reduction(shape: SchedulingProblem, func: str) -> bool:
    """Return whether rows of ``func``, a product or another sum or made of one element by element, are reduced by a Func that is no product."""
    users = [d.name for d in shape.algorithm.definitions if any(a.tensor == func for a in ex.accesses(d.expr))]
    over = {x for u in users if not shape.dots(u) for x in reduction_labels(shape.algorithm, u)}
    made = [f for f in shape.algorithm.needed_by((func,)) if reduction_labels(shape.algorithm, f) and shape.algorithm[f].labels == shape.algorithm[func].labels]
    return bool(made) and bool(over & {*shape.algorithm[func].labels})


def sweep_underfills_gpu(shape: SchedulingProblem, func: str, root: str) -> bool:
    """Return whether ``root`` would sweep wide rows of the long product ``func`` in too few programs, split as far as possible.

    In a kernel of its own the product has blocks of columns too, and its sum can be split. Its result is small then.
    """
    own, labels = shape.algorithm[root].labels, shape.algorithm[func].labels
    rows = [label for label in labels if label in own]
    across = [label for label in labels if label not in own]
    if len(across) != 1 or not rows or shape.sizes[across[0]] <= WHOLE_SIDE or shape.longest_sum(func) < LONG:
        return False
    block = {label: min(ROWS, shape.sizes[label]) if label == rows[-1] else 1 for label in rows}
    programs = shape.programs(block) * max(1, _max_parts(shape, across[0], STEP[2 if shape.itemsize == 2 else 4]))
    return FEW_PROGRAMS * programs < shape.target.multiprocessors


def repeats_products(shape: SchedulingProblem, func: str, root: str) -> bool:
    """Return whether ``root`` reads the product ``func`` at several places, as the gates of a recurrence, and each would compute other products again.

    Along a chain of such products the work grows by a power with each.
    """
    if not shape.dots(func) or not any(shape.dots(g) for g in shape.algorithm.needed_by((func,)) if g != func):
        return False
    places = {a.index for f in shape.algorithm.needed_by((root,)) for a in ex.accesses(shape.algorithm[f].expr) if a.tensor == func}
    return len(places) > 1 and any(not isinstance(i, ex.Label) for place in places for i in place)


def reduces_beyond_tiles(shape: SchedulingProblem, func: str, root: str) -> bool:
    """Return whether the kernel of ``root`` would reduce ``func``, a product or a reduction of one, over what no tile of a product holds.

    That is over two labels or more, as the mean of an image is, or over one that fills little of a tile where another of the same
    operand fills it, as in small groups of columns. ``func`` then gets a kernel of its own.
    """
    own = set() if shape.dots(func) else set(reduction_labels(shape.algorithm, func))
    found = [over for g in shape.algorithm.needed_by((root,)) if g != func and (over := _labels_reduced_of(shape, g, func))]
    if found and sum(shape.sizes[x] > WINDOW for x in own.union(*found)) >= 2:
        return True
    for side, other in (pair for dot in shape.dots(func) for pair in ((dot.left, dot.right), (dot.right, dot.left))):
        along = [x for x in shape.algorithm[func].labels if x in ex.free_labels(side) - ex.free_labels(other)]  # what both have is no side of a tile
        for over in found:
            widest = max((shape.sizes[x] for x in along if x not in over), default=0)
            if any(shape.sizes[x] < min(FILLED, widest) for x in over if x in along):
                return True
    return False


def _labels_reduced_of(shape: SchedulingProblem, func: str, made: str) -> set[str]:
    """Return the labels that ``func`` reduces over and that elements of ``made``, or of what is made from it without a product, vary with."""
    if shape.dots(func):
        return set()
    reduced = set(reduction_labels(shape.algorithm, func))
    return {x for a in ex.accesses(shape.algorithm[func].expr) if _is_made_of(shape, a.tensor, made) for x in ex.free_labels(a) & reduced}


def _is_made_of(shape: SchedulingProblem, func: str, made: str) -> bool:
    """Return whether ``func`` is ``made``, or made from it without a product between. Each Func is looked at once: top-k reads those before it twice each."""
    todo, seen = [func], {func}
    for f in todo:
        if f != made and f in shape.algorithm and not shape.dots(f):
            more = {a.tensor for a in ex.accesses(shape.algorithm[f].expr)} - seen
            seen |= more
            todo += more
    return made in seen


def reduces_products(shape: SchedulingProblem, func: str) -> bool:
    """Return whether ``func`` is a product, or reduces one: its rows, or windows such as the largest of four neighbours."""
    if shape.dots(func):
        return True
    products = [f for f in shape.algorithm.needed_by((func,)) if shape.dots(f)]
    return any(_labels_reduced_of(shape, func, f) for f in products)


def gemm_row_reduction_tiles(shape: SchedulingProblem, root: str, members: list[str]) -> KernelConfig | None:
    """Return the choices for a kernel that computes one matrix, a product or a sum of some, and reduces its rows; None for other kernels."""
    found = reduced_row(shape, root, members)
    if found is None:
        return None
    main, row, dots = found
    dot, labels = dots[0], shape.algorithm[root].labels
    across = dot.left if row in ex.free_labels(dot.right) else dot.right
    rows = [label for label in labels if label in ex.free_labels(across) and label != row]
    held = shape.sizes[row] <= WHOLE_SIDE
    if row in ex.free_labels(across) or not rows or row in labels and not held:
        return None
    itemsize = 2 if shape.itemsize == 2 else 4
    width = max(16, next_power_of_two(shape.sizes[row])) if held else STEP[itemsize]
    block = {label: 1 for label in labels if label != row}
    block[rows[-1]] = min(max(16, ELEMENTS[itemsize] // width), 128, max(16, next_power_of_two(shape.sizes[rows[-1]])))
    enough = shape.target.multiprocessors * (0.9 if held else 1)
    while block[rows[-1]] > (16 if held else ROWS) and shape.programs(block) < enough:
        block[rows[-1]] //= 2
    longest = shape.longest(dot)
    beside = [label for label in labels if label not in shape.algorithm[main].labels and shape.sizes[label] > 1]
    across_all = math.prod(next_power_of_two(shape.sizes[x]) for x in beside)
    if beside and across_all <= WHOLE_SIDE:  # blocks of what the product lacks would each make it again
        return _whole_beside(shape, root, block, {row: 0 if held else width}, beside, (longest, rows[-1], across_all))
    wide = not held and itemsize == 2 and shape.sizes[rows[-1]] >= WIDE[0] and _fills_gpu(shape, {**block, rows[-1]: WIDE[0]}, row, WIDE[1])
    if wide:
        block[rows[-1]], width = WIDE
    depth, stages = (64, 3) if wide else shape.depth(block[rows[-1]] + width)
    if held and itemsize == 2 and block[rows[-1]] + width <= ALONE and shape.programs(block) <= shape.target.multiprocessors:
        depth, stages = 128, 5  # as a narrow product's: each streams alone
    tile = {**block, row: 0 if held else width, **{k: 1 for d in dots for k in d.labels}}
    tile |= {k: min(depth, max(16, next_power_of_two(shape.sizes[k]))) for k in (longest, *(shape.longest(d) for d in dots[1:]))}
    warps = 8 if block[rows[-1]] * width >= 128 * 128 else 4
    return shape.config(root, block, tile, warps, stages, split=() if held else _split(shape, block, row, width))


def _whole_beside(
    shape: SchedulingProblem, root: str, block: dict[str, int], swept_tile: dict[str, int], beside: list[str], of: tuple[str, str, int]
) -> KernelConfig:
    """Return the choices where terms vary along the labels ``beside`` too, which the product lacks: a program holds these whole, and few rows of it."""
    longest, rows, across = of
    (row, width), most = next(iter(swept_tile.items())), TERMS // across
    width = max(16, min(width, most // 16)) if width else 0
    blocks = {x: n for x, n in block.items() if x not in beside} | {rows: max(16, min(block[rows], most // max(16, width or next_power_of_two(shape.sizes[row]))))}
    tile = {**blocks, row: width, longest: min(64, max(16, next_power_of_two(shape.sizes[longest]))), **dict.fromkeys(beside, 0)}
    return shape.config(root, blocks, tile, 8, 3)


def reduced_row(shape: SchedulingProblem, root: str, members: list[str]) -> tuple[str, str, list[ex.Dot]] | None:
    """Return the only product of a kernel, the label of its rows that others reduce, and its sums, longest first; None for other kernels."""
    products = [m for m in members if shape.dots(m)]
    if len(products) != 1 or products[0] == root:
        return None
    (main,), dots = products, sorted(shape.dots(products[0]), key=lambda d: -math.prod(shape.sizes[x] for x in d.labels))
    if any(_sides(shape, main, other) != _sides(shape, main, dots[0]) for other in dots[1:]):  # they may, such as one of low rank beside a layer's
        return None
    over = {label for m in members for label in reduced_product_labels(shape, m, main)}
    return (main, over.pop(), dots) if len(over) == 1 else None


def swept_row(shape: SchedulingProblem, root: str, members: list[str]) -> tuple[str, str] | None:
    """Return the product whose rows a kernel reduces, and their label, where they are too long to hold and nothing is written along them."""
    found = reduced_row(shape, root, members)
    if found is None or found[1] in shape.algorithm[root].labels or shape.sizes[found[1]] <= WHOLE_SIDE:
        return None
    return found[0], found[1]


def _sides(shape: SchedulingProblem, func: str, dot: ex.Dot) -> set[frozenset[str]]:
    """Return the labels of ``func`` that each operand of a product has."""
    return {frozenset(ex.free_labels(side) & set(shape.algorithm[func].labels)) for side in (dot.left, dot.right)}


def _split(shape: SchedulingProblem, block: dict[str, int], row: str, width: int) -> Sizes:
    """Split the row reduction over programs if blocks of rows alone leave multiprocessors idle."""
    wanted = (1 if width == WIDE[1] else 2) * shape.target.multiprocessors // shape.programs(block)
    parts = min(last_power_of_two(wanted), _max_parts(shape, row, width))
    return ((row, parts),) if parts >= 2 else ()


def _fills_gpu(shape: SchedulingProblem, block: dict[str, int], row: str, width: int) -> bool:
    """Return whether blocks of rows, each split as far as possible, occupy at least nine tenths of the multiprocessors."""
    return 10 * shape.programs(block) * _max_parts(shape, row, width) >= 9 * shape.target.multiprocessors


def _max_parts(shape: SchedulingProblem, row: str, width: int) -> int:
    """Return the most programs that a row reduction can be split over."""
    return last_power_of_two(shape.sizes[row] // width // PARTS)
