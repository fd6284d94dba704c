"""Decide whether a Func is worth a kernel of its own: what fusing it into another kernel would compute again."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from ..algebra.operand_types import rows_of
from ..lang import expr as ex
from ..lang.extents.linear_form import linear_form
from ..lang.schedule_checks import reduction_labels
from .problem import WHOLE_SIDE, SchedulingProblem
from .rules.gemm_row_reduction import reduces_beyond_tiles, reduces_products, repeats_products, sweep_underfills_gpu
from .rules.reduction import WHOLE_COLUMN
from .rules.sibling_gemms import sum_needs_own_kernel

STORED = 512  #: terms of a product from which on to write and read it takes less than to make it again, if there is room for it
FEW = 8  #: terms of a sum that every block may add up for itself
BLOCK = 4096  #: elements of a block of rows


def recompute_is_costly(shape: SchedulingProblem, func: str, root: str) -> bool:
    """Return whether fusing ``func`` recomputes too much.

    A matrix product would be recomputed for every block of a label that it lacks, or computed by too few programs; a sum
    would be recomputed for every block or step.
    """
    missing = [label for label in shape.algorithm[root].labels if label not in shape.algorithm[func].labels]
    if is_number_of_few(shape, func, root):
        return False
    if reduces_products(shape, func) and reduces_beyond_tiles(shape, func, root) or repeats_products(shape, func, root):
        return True
    if not shape.dots(func):
        long = tuple(label for label in missing if not shape.is_short(label))  # one block has all of a short one
        return _is_operand_summed_over_windows(shape, func, root) or _recomputes_sum(shape, func, root, long)
    if shape.underfills_gpu(func, root) or sweep_underfills_gpu(shape, func, root) or _is_scattered(shape, func, root) or _is_read_in_windows(shape, func, root, products=False):
        return True
    if any(shape.sizes[label] > WHOLE_SIDE for label in missing) and not shape.holds_chain(func, root) or _is_broadcast(shape, func, root, missing):
        return True
    return any(_is_made_for_each_tile(shape, func, product) for product in shape.algorithm.needed_by((root,)) if product not in (func, root))


def is_number_of_few(shape: SchedulingProblem, func: str, root: str) -> bool:
    """Return whether ``func`` is the sum of few numbers, and ``root`` has so few elements that to add up anew for each takes less than another launch."""
    own, terms = shape.algorithm[root].labels, reduction_labels(shape.algorithm, func)
    if shape.algorithm[func].labels or not terms or shape.dots(func) or reduction_labels(shape.algorithm, root):
        return False
    return bool(own) and _elements(shape, own) <= FEW and _elements(shape, terms) <= 2 * BLOCK


def _is_broadcast(shape: SchedulingProblem, func: str, root: str, missing: Iterable[str]) -> bool:
    """Return whether the kernel of ``root`` has no other product, and reads each element of ``func`` at many places: more than a side of a tile has, though maybe no label has so many.

    The gates of an image's channels are such: 32 x 256 of 64 x 64 places each.
    """
    alone = not any(shape.dots(f) for f in shape.algorithm.needed_by((root,)) if f != func and shape.algorithm[f].labels != shape.algorithm[func].labels)
    return alone and not reduction_labels(shape.algorithm, root) and shape.longest_sum(func) > FEW and _elements(shape, tuple(missing)) > WHOLE_SIDE


def _is_made_for_each_tile(shape: SchedulingProblem, func: str, product: str) -> bool:
    """Return whether ``func``, an operand of ``product``, would be made again for each tile of a label that it lacks.

    The kernel that both are computed in may reduce that label, as the last layers of a network do: ``rsum(exp(W2 sigmoid(W1 x)))``.
    """
    own = shape.algorithm[func].labels
    if not shape.dots(product) or not set(reduction_labels(shape.algorithm, product)) & set(own) or func not in shape.algorithm.needed_by((product,)):
        return False
    return any(shape.sizes[x] > WHOLE_SIDE for x in shape.algorithm[product].labels if x not in own) and not shape.holds_chain(func, product)


def stored_for_windows(shape: SchedulingProblem, func: str, roots: Collection[str]) -> bool:
    """Return whether ``func`` has a kernel of its own because windows, in kernels of ``roots``, would have it computed again."""
    return _feeds_windows(shape, func, roots) or _is_repeated_over_windows(shape, func, roots)


def _feeds_windows(shape: SchedulingProblem, func: str, roots: Iterable[str]) -> bool:
    """Return whether ``func``, computed element by element, is an operand of a product over windows in a kernel of ``roots``: each tap would compute it again.

    The taps of such products load ahead only what lies in memory (rules/candidates/window_products.py).
    """
    if reduction_labels(shape.algorithm, func) or func in shape.outputs:
        return False
    dots = (dot for root in roots if root in shape.algorithm for f in shape.algorithm.needed_by((root,)) for dot in shape.dots(f))
    return any(goes_over_windows(shape, dot) and any(rows.tensor == func for s in (dot.left, dot.right) if (rows := rows_of(s))) for dot in dots)


def _is_repeated_over_windows(shape: SchedulingProblem, func: str, roots: Collection[str]) -> bool:
    """Return whether a product would be made again: one over windows in several kernels, or any at each position of a window that a reduction reads."""
    dots = shape.dots(func)
    if len(roots) > 1 and any(goes_over_windows(shape, dot) for dot in dots):
        return True
    return bool(dots) and any(_is_read_in_windows(shape, func, root, products=False) for root in roots)


def goes_over_windows(shape: SchedulingProblem, dot: ex.Dot) -> bool:
    """Return whether an operand is read at sums of a label of the result and one that is summed, in windows that overlap."""
    return any(_slides(shape, i, {*dot.labels}) for side in (dot.left, dot.right) for a in ex.accesses(side) for i in a.index)


def _slides(shape: SchedulingProblem, index: ex.Expr, summed: set[str]) -> bool:
    """Return whether neighbouring places of ``index`` share terms: not of ``4 * i + j``, where ``j`` has four elements, nor of places that data picks."""
    if any(ex.accesses(index)):
        return False
    inside, outside = ex.free_labels(index) & summed, ex.free_labels(index) - summed
    form = {x.name: abs(by) for x, by in linear_form(index).items() if isinstance(x, ex.Label)}
    return bool(inside and outside) and not any(form.get(o, 0) >= shape.sizes[i] or form.get(i, 0) >= shape.sizes[o] for o in outside for i in inside)


def is_long_operand(shape: SchedulingProblem, func: str) -> bool:
    """Return whether an operand of a product is a product of a long sum, or made of one element by element."""
    made = [f for f in shape.algorithm.needed_by((func,)) if shape.dots(f) and shape.algorithm[f].labels == shape.algorithm[func].labels]
    if func in shape.outputs or reduction_labels(shape.algorithm, func) and func not in made or all(shape.longest_sum(f) < STORED for f in made):
        return False
    dots = (dot for f in shape.algorithm.funcs for dot in shape.dots(f))
    return any(rows.tensor == func for dot in dots for s in (dot.left, dot.right) if (rows := rows_of(s)))


def is_made_again(shape: SchedulingProblem, func: str, readers: set[str]) -> bool:
    """Return whether ``func`` is a product, or is computed for products to read: fused into kernels of others it may be made more than once.

    A product is not where the one kernel that reads it is that of a Func made of it element by element. ``readers``: of ``func``, with kernels of their own.
    """
    algorithm = shape.algorithm
    if shape.dots(func):
        own = algorithm[func].labels
        return not (len(readers) == 1 and all(algorithm[r].labels == own and not reduction_labels(algorithm, r) for r in readers))
    dots = (dot for f in algorithm.funcs for dot in shape.dots(f))
    return any(a.tensor == func for dot in dots for side in (dot.left, dot.right) for a in ex.accesses(side))


def _recomputes_sum(shape: SchedulingProblem, func: str, root: str, missing: tuple[str, ...]) -> bool:
    """Return whether blocks or steps of ``root`` would recompute the sum ``func``.

    Either it runs along no label or loop of ``root``, and each block would add up all terms; or it runs down columns that
    ``root`` is written along, too long to hold, and each step would add them up.
    """
    over, own = reduction_labels(shape.algorithm, func), shape.algorithm[root].labels
    if _leaves_few_programs(shape, func, root) or _sums_to(shape, func) and _is_read_in_windows(shape, func, root):
        return True
    if missing and (sum_needs_own_kernel(shape, func, root, missing) or shape.tells_bounds(func) and (_elements(shape, missing) > WHOLE_SIDE or _elements(shape, over) > BLOCK)):
        return True
    if set(over) & set(own):
        return own[-1] not in over and _elements(shape, over) > WHOLE_COLUMN
    terms, others = _elements(shape, over), _elements(shape, missing)
    return not set(over) & set(reduction_labels(shape.algorithm, root)) and terms > FEW and others > 1 and terms * others > BLOCK


def _is_operand_summed_over_windows(shape: SchedulingProblem, func: str, root: str) -> bool:
    """Return whether a product in the kernel of ``root`` has the sums of windows ``func`` as an operand: loads at computed places, ahead of which nothing is loaded.

    A separable convolution of 64 channels of 512 x 512 took 21 ms so on an H100 (bfloat16).
    """
    over = {*reduction_labels(shape.algorithm, func)}
    slides = any(ex.free_labels(i) & over and ex.free_labels(i) - over for a in ex.accesses(shape.algorithm[func].expr) for i in a.index)
    return slides and any(a.tensor == func for f in shape.algorithm.needed_by((root,)) for dot in shape.dots(f) for a in ex.accesses(dot))


def _sums_to(shape: SchedulingProblem, func: str) -> bool:
    """Return whether each element of ``func`` is a sum, or made from one of its own that is no product: those of attention's scores are chained."""
    own = set(shape.algorithm[func].labels)
    sums = (f for f in shape.algorithm.needed_by((func,)) if reduction_labels(shape.algorithm, f) and (f == func or not shape.dots(f)))
    return any(set(shape.algorithm[f].labels) == own for f in sums)


def _is_read_in_windows(shape: SchedulingProblem, func: str, root: str, products: bool = True) -> bool:
    """Return whether the kernel of ``root`` reduces windows of ``func``, or of what is made from it, which would be recomputed at each position of each window.

    ``products``: whether sums of products, and places that data picks, count too.
    """
    made = {f for f in shape.algorithm.needed_by((root,)) if f != root and func in shape.algorithm.needed_by((f,)) and set(shape.algorithm[f].labels) == set(shape.algorithm[func].labels)}
    for g in shape.algorithm.needed_by((root,)):
        if not products and shape.dots(g):
            continue
        reduced = set(reduction_labels(shape.algorithm, g))
        places = (i for a in ex.accesses(shape.algorithm[g].expr) if a.tensor in made for i in a.index if not isinstance(i, ex.Label) and (products or not any(ex.accesses(i))))
        if any(ex.free_labels(i) & reduced and ex.free_labels(i) - reduced for i in places):
            return True
    return False


def _leaves_few_programs(shape: SchedulingProblem, func: str, root: str) -> bool:
    """Return whether programs of ``root`` are too few for the GPU and each would compute many long sums ``func`` one after another."""
    programs, sums = _elements(shape, shape.algorithm[root].labels), _elements(shape, shape.algorithm[func].labels)
    return _elements(shape, reduction_labels(shape.algorithm, func)) >= BLOCK and 2 * programs <= shape.target.multiprocessors and sums >= 8 * programs


def _is_scattered(shape: SchedulingProblem, func: str, root: str) -> bool:
    """Return whether neighbours in ``root`` read ``func`` far apart or read one element, at remainders and quotients: no tile of it serves a tile of ``root``."""
    read = [a for f in shape.algorithm.needed_by((root,)) for a in ex.accesses(shape.algorithm[f].expr) if a.tensor == func]
    return any(isinstance(n, ex.Binary) and n.op in "%/" for a in read for i in a.index for n in i.walk())


def _elements(shape: SchedulingProblem, labels: tuple[str | None, ...]) -> int:
    return math.prod(shape.sizes.get(label, 1) if label else 1 for label in labels)


def feeds_products(shape: SchedulingProblem, func: str) -> bool:
    """Return whether several products are made from elements of ``func``, itself a product of short sums, and none reads it as it is."""
    if not shape.dots(func) or shape.longest_sum(func) > WHOLE_SIDE:
        return False
    users = [d.name for d in shape.algorithm.definitions if any(a.tensor == func for a in ex.accesses(d.expr))]
    products = [d.name for d in shape.algorithm.definitions if shape.dots(d.name) and func in shape.algorithm.needed_by((d.name,)) and d.name != func]
    return len(products) > 1 and not any(map(shape.dots, users))
