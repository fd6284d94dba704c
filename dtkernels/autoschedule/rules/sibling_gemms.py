"""Schedule sibling products in one kernel, as ``rdot(A[x, k], W[k, y], k) * rdot(A[x, k], V[k, y], k)``, and sums beside a product.

Two products that share an operand are to the matrix units one of twice as many columns. So their tiles are those of one product of
as many columns as all have together, cut to what each has of them: the accumulators take as many registers, the loop as much room.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...algebra.operand_types import rows_of
from ...codegen.analysis.product_types import cast_bytes
from ...lang import expr as ex
from ...lang.schedule_checks import reduction_labels
from ..problem import WHOLE_SIDE, SchedulingProblem

SHORT = 64  #: terms of a sum up to which it costs no more than a launch, wherever it is made (8192 x 8192 distances of 256 took 292 us on an H200)


def products(shape: SchedulingProblem, members: Iterable[str]) -> tuple[ex.Dot, ...]:
    """Return the products of a kernel, each once."""
    return tuple(dict.fromkeys(dot for m in members for dot in shape.dots(m)))


def each_of(dots: tuple[ex.Dot, ...], rows: int, columns: int) -> tuple[int, int]:
    """Return the tile of each of ``dots`` whose accumulators together are ``rows`` x ``columns``. Matrix units take 64 rows at once."""
    for _ in range((len(dots) - 1).bit_length()):
        rows, columns = (rows, max(16, columns // 2)) if columns > rows or rows <= 64 else (rows // 2, columns)
    return rows, columns


def adds_up_products(shape: SchedulingProblem, main: str, dots: tuple[ex.Dot, ...]) -> bool:
    """Return whether ``main`` adds up products that have no operand in common, as a gradient does of an operand of two products.

    One accumulator then holds the sum, and each product has a loop of its own (accumulator_fusion.py): on an H100 4096 x 4096 sums of two products of 11008
    terms took 976 us in tiles of 128 x 256, 1133 in one loop by two accumulators of 128 x 128. Rows that data chooses leave no registers for such tiles.
    """
    operands = [side for dot in dots for side in (dot.left, dot.right)]
    sums = (set(_addends(n)) for n in shape.algorithm[main].expr.walk() if isinstance(n, ex.Binary) and n.op == "+")
    return len({*operands}) == len(operands) and not any(map(picked_rows, operands)) and any(found == {*dots} for found in sums)


def _addends(e: ex.Expr) -> tuple[ex.Expr, ...]:
    return (*_addends(e.left), *_addends(e.right)) if isinstance(e, ex.Binary) and e.op == "+" else (e,)


def may_be_persistent(shape: SchedulingProblem, dots: tuple[ex.Dot, ...]) -> bool:
    """Return whether programs may be persistent.

    On compute capability 10 Triton 3.9 fails on several accumulators where the loop over blocks and the loop over terms are flattened
    into one.
    """
    return len(dots) < 2 or shape.target.backend != "cuda" or int(shape.target.arch) // 10 != 10


def tiles_read(shape: SchedulingProblem, members: list[str], side: ex.Expr) -> int:
    """Count the tiles that shared memory holds for one side of a product: those loaded, and the side itself if it is computed. A Func stored in float32 is loaded as such."""
    if isinstance(side, ex.Cast) and side.dtype == "fp32" and isinstance(side.arg, ex.Access) and side.arg.tensor not in members:
        stored = side.arg.tensor in shape.algorithm and side.arg.tensor not in (*shape.narrow, *shape.outputs)
        side = side.arg if stored and cast_bytes(shape.algorithm, side.arg.tensor) in (None, 0, 4) else side
    if isinstance(side, ex.Access) and side.tensor in shape.algorithm and side.tensor in members:
        side = shape.algorithm[side.tensor].expr
    return 1 if rows_of(side) else 1 + sum(1 for _ in ex.accesses(side))


def picked_rows(side: ex.Expr) -> bool:
    """Return whether a side of a product is rows that data chooses: they are loaded as such (codegen/transforms/memory/load_masks.py)."""
    return not isinstance(side, ex.Access) and rows_of(side) is not None


def width(shape: SchedulingProblem, members: list[str], tile: dict[str, int]) -> int:
    """Return the total rows of the tiles that one step of a kernel's longest loop loads, for products of ``tile`` (label -> rows)."""
    loops: dict[tuple[str, ...], dict[ex.Expr, int]] = {}
    for dot in products(shape, members):
        for side in (dot.left, dot.right):
            rows = [size for label, size in tile.items() if label in ex.free_labels(side)]
            loops.setdefault(dot.labels, {})[side] = max(rows, default=1) * tiles_read(shape, members, side)
    return max(sum(loop.values()) for loop in loops.values())


def summed(shape: SchedulingProblem, func: str) -> set[str]:
    """Return the tensors whose elements ``func`` sums."""
    over = set(reduction_labels(shape.algorithm, func))
    return {a.tensor for a in ex.accesses(shape.algorithm[func].expr) if ex.free_labels(a) & over}


def are_sibling_products(shape: SchedulingProblem, func: str, other: str) -> bool:
    """Return whether both are products of one operand, which one loop then loads for both."""
    dots = [shape.algorithm[f].expr for f in (func, other)]
    if not all(isinstance(dot, ex.Dot) for dot in dots) or not shape.share_iteration_space(func, other):
        return False
    return bool({dots[0].left, dots[0].right} & {dots[1].left, dots[1].right})  # type: ignore[attr-defined]


def loads_sum_operands(shape: SchedulingProblem, output: str, inside: Iterable[str]) -> bool:
    """Return whether the product made of Funcs ``inside`` loads what the plain sum ``output`` adds up.

    Otherwise each of its blocks would load that for the sum alone.
    """
    inside = tuple(inside)
    loaded = {a.tensor for f in inside for a in ex.accesses(shape.algorithm[f].expr)}
    return summed(shape, output) <= loaded and not any(sums_product_input(shape, output, f) for f in inside)


def sums_product_input(shape: SchedulingProblem, func: str, root: str) -> bool:
    """Return whether ``func`` is a long plain sum over an input that products of ``root`` read too.

    Each block would load that input a second time for the sum (duplicate_wgmma_loads.py).
    """
    sides = {s.tensor for dot in shape.dots(root) for s in (dot.left, dot.right) if isinstance(s, ex.Access)}
    long = any(shape.sizes[label] > SHORT for label in reduction_labels(shape.algorithm, func))
    return long and not shape.dots(func) and bool(summed(shape, func) & sides & set(shape.algorithm.inputs))


def sum_needs_own_kernel(shape: SchedulingProblem, func: str, root: str, missing: Iterable[str]) -> bool:
    """Return whether a sum is faster in a kernel of its own than in the loop of ``root``'s products.

    The operands of the products would be loaded twice for it, or other terms once for each block of the labels that it is
    ``missing``.
    """
    dots = shape.dots(root)
    if not dots or shape.dots(func) or not set(reduction_labels(shape.algorithm, func)) & set(reduction_labels(shape.algorithm, root)):
        return False
    sides = tuple(a.tensor for dot in dots for side in (dot.left, dot.right) for a in ex.accesses(side))
    made = {*sides, *shape.algorithm.needed_by(tuple(t for t in sides if t in shape.algorithm))}
    blocks = any(shape.sizes[label] > WHOLE_SIDE for label in missing)
    return sums_product_input(shape, func, root) or blocks and not summed(shape, func) <= made
