"""Tile warp-specialized kernels for the Gluon backend: consumers of 64 rows fed by a producer, on compute capability 9.0.

Measured on an H200 for 64, 128 and 256 columns in 16 bits: two consumers, tiles of the intermediate as wide as registers hold
beside the accumulators, and as many stages as shared memory holds.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ...codegen.powers_of_two import next_power_of_two
from ...lang import expr as ex
from ...lang.expr import SLOW
from ...lang.schedule import SHARES
from ...lang.schedule_checks import reduction_labels
from ..cost.kernel_config import KernelConfig, Pairs
from ..problem import SchedulingProblem
from .candidates.two_tiles import in_two_tiles, tiled_extent, with_sums_in_two_tiles
from .chained_gemm import Chain
from .program_order import balanced_program_order

ROWS = 128  #: of a block, for two consumers
COLUMNS = (64, 128, 256)  #: widths of an accumulator that leave registers for the rest
_LONG = tuple(fn for fn in SLOW if fn not in ("exp", "exp2", "sqrt", "rsqrt"))
SHORTEST_LOOP = 4096  #: elements from which on consumers of 64 columns repay what it takes to start them
#: the same of fewer columns: 40 took 165 us for 190, causal 107 for 106, and for gradients 486 for 577, 301 for 325 (an H200, benchmarks/h200/attention_columns.json)
SHORTEST_PADDED = 2048
MOST_PRODUCTS = {1: 3, 2: 4}  #: sums of a kernel -> products; schedules may ask for more, the default takes what was measured
PARTS = (1, 2, 4, 8, 16)  #: of a loop around the loop, where blocks alone leave multiprocessors idle
BUSY = 0.9  #: of the multiprocessors' time in whole rounds of blocks


def warpgroup_tiles(shape: SchedulingProblem, root: str, members: list[str]) -> KernelConfig | None:
    """Return the choices for one kernel of chained products, or None where the form does not suit. Whether it fits the backend says."""
    algorithm, sizes = shape.algorithm, shape.sizes
    labels, looped = algorithm[root].labels, reduction_labels(algorithm, root)
    dots = [d for m in members for d in shape.dots(m)]
    sums = 1 + sum(1 for m in members[1:] if m in shape.outputs and shape.dots(m))
    if shape.target.arch != 90 or shape.itemsize != 2 or not 2 <= len(dots) <= MOST_PRODUCTS.get(sums, 0) or not shape.dots(root):
        return None
    if any(shape.operand_bytes(d) != 2 for d in dots) or algorithm.has_float8:  # which the form does not have
        return None
    loop = max(looped, key=lambda x: sizes[x], default="")
    around = tuple(x for x in looped if x != loop)
    if not looped or len(around) > 1:
        return None
    own = [d for d in shape.dots(root) if loop in d.labels]
    rows = _rows(shape, own[0], labels) if own else None
    wide = [label for label in labels[-1:] if label != rows]
    if rows is None or not wide or next_power_of_two(sizes[wide[0]]) not in COLUMNS or sizes[rows] <= 64:
        return None
    whole = {label for m in members for label in (*algorithm[m].labels, *reduction_labels(algorithm, m)) if label not in (*labels[:-1], *looped)}
    if around:  # labels that the loops count in parts are no columns
        whole &= {*labels, *(x for m in members for x in reduction_labels(algorithm, m)), *(x for o in members if o in shape.outputs for x in algorithm[o].labels)}
    if any(next_power_of_two(sizes[label]) not in COLUMNS for label in whole):
        return None
    read = {side.tensor for d in dots for side in (d.left, d.right) if isinstance(side, ex.Access) and side.tensor in algorithm.inputs}
    written = [m for m in members if m in shape.outputs and algorithm[m].labels[-1:] != (rows,)]
    written += [] if root in written else [root]
    if not shape.aligned(read | set(written)):
        return None
    block = {label: ROWS if label == rows else 1 for label in labels[:-1]}
    widest = max(next_power_of_two(sizes[w]) for w in whole)
    several = len(dots) > 2
    padded = max(sizes[w] for w in whole) < widest  # which Triton's loads are masked for, column by column
    narrow = widest == 64 and (around or not padded or sizes[loop] < SHORTEST_PADDED)
    if several and narrow or sums > 1 and (narrow or widest > 128 or len(dots) < 4):
        return None
    chain = Chain.of(shape, root, members)
    masked = chain is not None and chain.has_mask()  # then programs share blocks by the length of their loops
    order = balanced_program_order(shape, root, members, block, rows) if masked else ()
    written = written if widest <= 128 and shape.result_bytes() == 2 else []  # by the copy engine, where there is room to gather them
    config = KernelConfig(root, tuple(block.items()), order=order, descriptors=(*sorted(read), *written), persistent=True, specialized=(loop,), num_warps=8)
    if sums > 1 or around or several and widest > 128:
        ordered = _in_order(shape, members, config, sorted(whole), (loop, *around))
        return next(in_two_tiles(shape, ordered), ordered) if ordered and widest <= 128 else ordered
    programs, cores = shape.programs(block), shape.target.multiprocessors
    if 2 * programs < cores or programs > cores and not masked and shape.fills_better(block, rows, ROWS // 2):
        return None
    if widest <= 64 and sizes[loop] < (SHORTEST_PADDED if padded else SHORTEST_LOOP):
        return None  # measured, attention of 64 columns: at 1024 keys 103 us against 93 by Triton's text, at 4096 1167 against 1169, causal 651 against 690
    held = widest if several or widest <= 128 else max(tiled_extent(sizes, w) for w in whole)
    step = min(_step_size(shape, dots, members, {rows, loop}, held), 64 if several else 128)
    deep = 2 if widest > 128 or widest > 64 and step == 128 else 3
    while (ROWS + 2 * deep * step) * held * shape.itemsize > shape.target.shared_bytes:
        step //= 2
    tile = {**block, **dict.fromkeys(sorted(whole), 0), loop: step}
    config = replace(config, tiles=tuple(tile.items()), stages_of=((loop, deep),), approximations=() if several else _exponentials(shape, members, widest))
    if not several and widest <= 128:  # results by two tiles pay where there is no room for one
        return with_sums_in_two_tiles(shape, config)
    return next(in_two_tiles(shape, config), config)


def _in_order(shape: SchedulingProblem, members: list[str], config: KernelConfig, whole: list[str], loops: tuple[str, ...]) -> KernelConfig | None:
    """Return the choices for a kernel that runs its loops one by one: of two sums, of three products of 256 columns, or with a loop around the loop.

    None where the loop reads more than operands of products and numbers of its columns, or evaluates what takes registers; where it would fill half a
    tile; and for three products of 256 columns without such numbers: Triton's kernels took 0.66 of the time then (an H200).
    """
    nodes, block = [n for m in members for n in shape.algorithm[m].expr.walk()], dict(config.blocks)
    others = [n for n in nodes if isinstance(n, ex.Access) and n.tensor not in (*members, *config.descriptors) and loops[0] in ex.free_labels(n)]
    if any(isinstance(n, ex.Call) and n.fn in _LONG for n in nodes) or any(n.tensor in shape.algorithm.integral or not _is_line(n, loops[0]) for n in others):
        return None
    widest, dots = max(next_power_of_two(shape.sizes[w]) for w in whole), sum(len(shape.dots(m)) for m in members)
    step = 32 if widest > 128 and dots > 2 else 64  # more does not fit beside two operands that stay
    if widest > 128 and dots > 2 and not others or 2 * shape.sizes[loops[0]] <= step:
        return None
    programs, cores = shape.programs(block), shape.target.multiprocessors
    parts = [p for p in PARTS if p <= (shape.sizes[loops[-1]] if len(loops) > 1 else 1)]
    rounds = {p: p * programs / (cores * math.ceil(p * programs / cores)) for p in parts}
    part = next((p for p in parts if rounds[p] >= BUSY), max(parts, key=rounds.__getitem__))
    if 2 * part * programs < cores:
        return None
    tile = {**block, **dict.fromkeys(whole, 0), loops[0]: step, **dict.fromkeys(loops[1:], 1)}
    return replace(
        config.reading(shape.outputs) if part > 1 else config, tiles=tuple(tile.items()), stages_of=((loops[0], 2 if widest > 128 else 3),),
        reordered=(*loops[1:], loops[0]) if len(loops) > 1 else (), split=((loops[1], part),) if part > 1 else (),
    )  # fmt: skip


def _is_line(access: ex.Access, loop: str) -> bool:
    """Return whether a tensor has its elements along ``loop`` in the order of the loop."""
    *outer, last = access.index
    return last == ex.Label(loop) and not any(loop in ex.free_labels(i) for i in outer)


def _exponentials(shape: SchedulingProblem, members: list[str], widest: int) -> Pairs:
    """Emulate an eighth of the exponentials where products of 64 columns take as long as these: measured 1 to 3% faster."""
    powers = any(isinstance(n, ex.Call) and n.fn == "exp" for m in members for n in shape.algorithm[m].expr.walk())
    return (("exp", "/".join(map(str, SHARES[0]))),) if powers and widest <= 64 else ()


def _rows(shape: SchedulingProblem, dot: ex.Dot, labels: tuple[str, ...]) -> str | None:
    """Return the label of the output that the computed side of its product has, and the loaded one has not."""
    computed, loaded = (dot.left, dot.right) if _computed(shape, dot.left) else (dot.right, dot.left)
    found = [label for label in labels[:-1] if label in ex.free_labels(computed) and label not in ex.free_labels(loaded)]
    return found[-1] if found and not _computed(shape, loaded) else None


def _computed(shape: SchedulingProblem, side: ex.Expr) -> bool:
    return not isinstance(side, ex.Access) or side.tensor not in shape.algorithm.inputs


def _step_size(shape: SchedulingProblem, dots: list[ex.Dot], members: list[str], inner: set[str], wide: int) -> int:
    """Return the tile of the loop; intermediates of its width take registers besides the accumulators.

    That is products of two loaded tiles, other tiles over rows and loop, and what functions of many steps hold meanwhile.
    """
    nodes = [n for m in members for n in shape.algorithm[m].expr.walk()]
    tiles = {n.tensor for n in nodes if isinstance(n, ex.Access) and n.tensor in shape.algorithm.inputs and inner <= ex.free_labels(n)}
    long = any(isinstance(n, ex.Call) and n.fn in _LONG and inner <= ex.free_labels(n) for n in nodes)
    fresh = len(dots) - 1 + len(tiles) + long
    room = 200 - wide // 2  # of a thread: half a column of 64 rows each
    step = 128
    while step > 16 and fresh * step // 2 + step // 4 > room:
        step //= 2
    return step
