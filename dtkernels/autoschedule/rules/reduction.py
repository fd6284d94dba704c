"""Tile kernels without matrix products: elementwise, row reductions, column sums."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ...codegen.powers_of_two import next_power_of_two, two_tiles
from ...lang import expr as ex
from ...lang.algorithm import Algorithm
from ...lang.extents.linear_form import linear_form
from ...lang.schedule import APPROXIMATIONS
from ...lang.schedule_checks import reduction_labels
from ..cost.kernel_config import KernelConfig, Pairs
from ..problem import SchedulingProblem
from .program_order import broadcast_program_order

ROW_LIMIT = 32768  #: longest row held in registers, in elements
WHOLE_COLUMN = 256  #: longest column held in registers where results are written along it
PAIR, PAIR_TERMS = (16, 32), 8  #: block of what meets all of another side's rows, and terms at once
SIDE, LINE, SECTOR = 64, 128, 16  #: widest side of a block that is read along one label and written along another, bytes of it, narrowest
HELD, FULL = 4, 4  #: block of a label that an input lacks, and programs a multiprocessor that it leaves
SERVED, TERMS = 16, 256  #: block of a label that nothing read has, and terms at once beside it
LONG_STEP = 16384  #: elements at once of a row that is longer, or of several rows: twice as many of two tensors spilled, and took 2.5 times as long
LOOSE_STEP = 8192  #: the same of rows that start at no multiple of 16 bytes
LOOSE_WARPS = ((8, 3), (16, 2))  #: of such steps, and programs of so many that a multiprocessor holds, by the registers that ptxas gives them
KEPT = 0.55  #: the part of the L2 that holds rows for a second pass
STREAMED = 6  #: times the L2, the largest inputs of sums that are evicted first
FEW = 8  #: times as many elements as a function is evaluated for, from which on its time does not matter
SHORT_RUN = 64  #: the same of long columns
COLUMN_EACH = 1024  #: elements of a warp where columns are held: 64 of 128 in 16 bits took 187 us by 8 warps, 321 by 16, whose parts of sums meet in banks (an H100)
PLACES = 512  #: of a block of windows
SHALLOW = 16  #: elements of a window whose extent a kernel has as a constant, though inputs tell it
UNROLLED = 8  #: places of a window that a loop takes at once, at most
#: elements of narrow rows that a program writes: nine columns made of three took 724 us in blocks of 1024 rows by 16 columns, whose threads hold a value of each row for each element (1048576
#: rows in 16 bits, an H200), and spilled 7.7 KB; in blocks of 64 rows they take 26 registers
WRITTEN = 1024
L1_EACH = 64  #: bytes of the first cache for each thread that a multiprocessor holds
NARROWEST, PADDED = 64, 1.13  #: blocks along rows that no block fills, and how much longer than the rows they are together
RUN = 256  #: bytes of rows side by side that columns are held of: at 64 channels of float32, runs of 64 bytes took 1.2 times as long


def row_tiles(shape: SchedulingProblem, root: str, members: list[str]) -> KernelConfig:
    """Return the choices for a kernel that moves memory; the figures were measured on an H200."""
    labels = shape.algorithm[root].labels
    reduced = list(dict.fromkeys(r for m in members for r in reduction_labels(shape.algorithm, m)))
    if pair := _pairwise_labels(shape, root, members):
        return _pairwise_tiles(shape, root, pair, members)
    read = loaded_accesses(shape, root, members)
    if sides := _transposed_labels(shape, root, members, read):
        return _transpose_tiles(shape, root, sides, members)
    width, loose = 1, 0  # of a tile, in elements; warps that go along rows that start anywhere
    passing = stores_while_reducing(shape, root, members)
    columns = [r for r in reduced if r in labels and r != labels[-1] and not passing and shape.sizes[r] <= WHOLE_COLUMN]
    if len(reduced) > 1 and math.prod(next_power_of_two(shape.sizes[r]) for r in reduced) > ROW_LIMIT:
        columns = []  # of a volume that is too large to hold, whole lines
    taps = windows(shape, reduced, read)
    loops = _looped_windows(taps, read)
    columns = [r for r in columns if r not in loops]
    rest = _by_stride(shape, [r for r in reduced if r not in (*columns, *loops)], read)
    tile = dict.fromkeys(loops, 1)
    down = [r for r in rest if labels and _no_tensor_is_contiguous_along(r, read)]  # the width goes to the label that lies contiguous
    line = math.prod(next_power_of_two(shape.sizes[r]) for r in rest if r not in down)
    rows = 4096 // _columns(shape.sizes[labels[-1]]) if passing and labels else max(1, min(_rows_down(shape, labels, read, line), LONG_STEP // line))  # of a step
    for r in columns:
        tile[r] = 0
        width *= next_power_of_two(shape.sizes[r])
    for r in down:
        tile[r] = min(next_power_of_two(shape.sizes[r]), rows)
        width, rows = width * tile[r], rows // tile[r]
    for r in (r for r in rest if r not in down):
        anywhere = starts_anywhere(shape, r, read)
        whole = next_power_of_two(shape.sizes[r]) * width <= (ROW_LIMIT // 2 if anywhere or _exceeds_registers(shape, r, members, read) else ROW_LIMIT)
        step = LOOSE_STEP if (loose := _warps_that_stay_in_cache(shape, labels, r) if anywhere else 0) else LONG_STEP
        tile[r] = 0 if whole else max(1, min(next_power_of_two(shape.sizes[r]), step // min(width, step)))
        width *= next_power_of_two(shape.sizes[r]) if whole else tile[r]
    room = max(1, _elements(shape, reduced, width, bool(set(reduced) & set(labels)), {*reduced} == {*loops}, _waits_for_numbers(shape, labels, read)) // width, _least_run(shape, columns, reduced))
    block = _sharing_sums(shape, members, [x for x in labels if x not in tile])
    if wider := math.prod(block.values()) > width:  # written than summed
        room = min(room, max(1, WRITTEN // math.prod(block.values())))
    for label in _contiguous_first(labels, read):
        if label in tile or label in block:
            continue
        block[label] = min((_columns if passing else next_power_of_two)(shape.sizes[label]), room) if reduced else _filled_block(shape.sizes[label], room)
        room //= block[label]
        width *= block[label]
    if not reduced:
        block |= _broadcast_reuse_block(shape, block, members)
    elif len(reduced) == 1 and not passing and (served := _unread_label(shape, labels, block, read)):
        block[served], tile[reduced[0]], width = SERVED, min(next_power_of_two(shape.sizes[reduced[0]]), TERMS), SERVED * TERMS
    block = {label: block[label] for label in labels if label in block}
    tile |= block
    more: dict[str, Any] = _passing_stages(reduced[0], tile) if passing else _prefetching(shape, block, tile, members) if reduced and width == ROW_LIMIT and not _is_padded(shape, tile) else {}
    again = () if passing else reread(shape.algorithm, shape.sizes, root, tile, members)
    prefetches = bool(more or again) and len(again) != 1
    more["evictions"] = tuple((t, "reread") for t in again if not loose) or (() if again else read_once(shape, root, members, read))
    more |= {"constants": taps, "unrolled": tuple((r, min(UNROLLED, shape.sizes[r])) for r in loops if len(taps) == 1)}
    held = max(1, width // COLUMN_EACH) if columns and width <= LONG_STEP else _warps(width, bool(reduced) and not wider, not labels, prefetches, min(32, 1024 // shape.target.warp_size))
    warps = _window_warps(shape, root, read, width) if loops and {*reduced} == {*loops} else 4 if passing else loose if loose and width == LOOSE_STEP else held
    more["order"] = () if passing else broadcast_program_order(shape, labels, read, block)
    return shape.config(root, block, tile, warps, 3, share=2 if passing else 8, approximations=approximations(shape, members), **more)


def _sharing_sums(shape: SchedulingProblem, members: list[str], labels: list[str]) -> dict[str, int]:
    """Return a block of all of each short label that a member's sums lack: else each block along it would make the sums anew."""
    lacked = [x for x in labels if any(x not in shape.algorithm[m].labels for m in members if reduction_labels(shape.algorithm, m))]
    return {x: next_power_of_two(shape.sizes[x]) for x in lacked if shape.is_short(x)}


def _filled_block(size: int, room: int) -> int:
    """Return the widest block of which the last one along ``size`` is nearly full: rows of 1152 took 13.4 us in blocks of 1024, 11.5 in such of 64 (an H200)."""
    block = min(next_power_of_two(size), room)
    while block > NARROWEST and size > room and -(-size // block) * block > PADDED * size:
        block //= 2
    return block


def _passing_stages(label: str, tile: dict[str, int]) -> dict[str, Any]:
    """Return the stages of the loop that passes over what is reduced; none where a tile holds the whole of it."""
    return {"stages_of": ((label, 3),)} if tile[label] else {}


def _warps(width: int, reduces: bool, alone: bool, prefetches: bool, most: int) -> int:
    """Return the warps of a program that holds ``width`` elements at once. ``alone``: it is the only one, whose warps are all that run."""
    if prefetches or alone and width > 4096:
        return most
    if alone and width >= 1024:
        return 16
    return 4 if not reduces or 2048 < width < 8192 else 2 if width <= 2048 else 16


def starts_anywhere(shape: SchedulingProblem, label: str, read: list[ex.Access]) -> bool:
    """Return whether rows along ``label`` start at no multiple of 16 bytes, so that elements of 16 bits are loaded one by one.

    Softmax of 1747 x 20343 took 74 us in steps of 8192 by 8 warps, 101 held by 32 warps, 112 in steps of 32768 (bfloat16, an H100). Rows of 65535 in float32
    took 8.4 ms in steps of 16384, 10.9 in these.
    """
    if shape.itemsize > 2:
        return False
    tensors = {a.tensor for a in read if contiguous_label(a) == (label,) and len(a.index) > 1}
    return bool(tensors) and not shape.aligned(tensors)


def _warps_that_stay_in_cache(shape: SchedulingProblem, labels: tuple[str, ...], label: str) -> int:
    """Return by how many warps short steps go along rows, so that the L2 holds those of all programs that run at once, for a second pass; 0 for rows that are too long.

    Softmax took 71 us by 8 warps and 82 by 16 (1747 x 20343), 92 and 84 (1030 x 36661), 85 and 68 (512 x 50257). In steps of 16384, of which fewer run at once, it
    took 113 us (1030 x 36661) and 79 (512 x 50257); 139 for 157 at 900 x 65535, and 0.9 of the time at 100001 elements (bfloat16, an H100).
    """
    rows = math.prod(shape.sizes[x] for x in labels if x != label)
    each, room = shape.sizes[label] * shape.itemsize, KEPT * shape.target.l2_bytes
    return next((warps for warps, held in LOOSE_WARPS if min(rows, held * shape.target.multiprocessors) * each <= room), 0)


def _exceeds_registers(shape: SchedulingProblem, label: str, members: list[str], read: list[ex.Access]) -> bool:
    """Return whether rows of several tensors, kept across many sums, or addresses that data decides, leave no registers for the longest row."""
    if any(label in ex.free_labels(i) and any(ex.accesses(i)) for a in read for i in a.index):
        return True
    tensors = {a.tensor for a in read if label in ex.free_labels(a) and len(a.index) > 1 and a.tensor not in members}
    return len(tensors) > 1 and sum(label in reduction_labels(shape.algorithm, m) for m in members) > 2


def reread(algorithm: Algorithm, sizes: Mapping[str, int], root: str, tile: Mapping[str, int], members: Iterable[str]) -> tuple[str, ...]:
    """Return the tensors whose rows a kernel reads twice because they are too long to hold.

    It reads them to reduce them, and again for what is written along them.
    """
    summed = {m: set(reduction_labels(algorithm, m)) for m in members if m != root}
    over = set().union(*summed.values()) & {*algorithm[root].labels, *reduction_labels(algorithm, root)}
    long = {label for label in over if 0 < tile.get(label, 0) < sizes[label]}
    read = [a for m in summed if summed[m] & long for a in ex.accesses(algorithm[m].expr) if ex.free_labels(a) & long and ex.free_labels(a) - long]
    return tuple(dict.fromkeys(a.tensor for a in read if a.tensor not in members))


def _unread_label(shape: SchedulingProblem, labels: tuple[str, ...], block: dict[str, int], read: list[ex.Access]) -> str | None:
    """Return a label of a sum's result that nothing read has: each load then serves a block of it, such as the classes that an index is compared with."""
    many = SERVED * FULL * shape.target.multiprocessors
    return next((x for x in labels if block.get(x) == 1 and shape.sizes[x] >= many and read and not any(x in ex.free_labels(a) for a in read)), None)


def _broadcast_reuse_block(shape: SchedulingProblem, block: dict[str, int], members: list[str]) -> dict[str, int]:
    """Block a label that an input lacks, so that each load of that input (cos in RoPE) serves several outputs.

    Only where a program loads as much of that input as it computes, and the input is more than a row, since a row stays in L1. The
    block is indexed once.
    """
    wide = {label for label, size in block.items() if size > 1}
    read = [ex.free_labels(a) for m in members for a in ex.accesses(shape.algorithm[m].expr) if a.tensor not in members]
    lacked = [label for label in block if block[label] == 1 and any(wide <= own and len(own) > 1 and label not in own for own in read)]
    for label in reversed(lacked):
        times = min(HELD, next_power_of_two(shape.sizes[label]))
        if times > 1 and shape.programs(block) >= times * FULL * shape.target.multiprocessors:
            return {label: times}
    return {}


def _pairwise_labels(shape: SchedulingProblem, root: str, members: list[str]) -> tuple[str, ...]:
    """Return two labels of ``root`` such that each summed input has one without the other, as in pairwise distances.

    The label that results are contiguous along comes last. Empty if other Funcs reduce too.
    """
    labels, own = shape.algorithm[root].labels, set(reduction_labels(shape.algorithm, root))
    if not own or own & set(labels) or any(reduction_labels(shape.algorithm, m) for m in members if m != root):
        return ()
    read = [ex.free_labels(a) for m in members for a in ex.accesses(shape.algorithm[m].expr) if ex.free_labels(a) & own]
    wide = [label for label in labels if shape.sizes[label] >= PAIR[0]]
    found = [(a, b) for a in wide for b in wide if labels.index(a) < labels.index(b)]
    apart = [(a, b) for a, b in found if any(a in r and b not in r for r in read) and any(b in r and a not in r for r in read)]
    return max(apart, key=lambda pair: labels.index(pair[1]), default=())


def _pairwise_tiles(shape: SchedulingProblem, root: str, pair: tuple[str, ...], members: list[str]) -> KernelConfig:
    """Block both labels, with a few terms at a time: each loaded row serves the whole block of the other side."""
    own = reduction_labels(shape.algorithm, root)
    longest = max(own, key=lambda label: shape.sizes[label])
    block = {label: min(PAIR[pair.index(label)], next_power_of_two(shape.sizes[label])) if label in pair else 1 for label in shape.algorithm[root].labels}
    tile = {**block, **{k: min(PAIR_TERMS, next_power_of_two(shape.sizes[k])) if k == longest else 1 for k in own}}
    return shape.config(root, block, tile, 4, 3, share=2, approximations=approximations(shape, members))


def _transposed_labels(shape: SchedulingProblem, root: str, members: list[str], read: list[ex.Access]) -> tuple[str, ...]:
    """Return the labels that different tensors are contiguous along, such as those of the input and the output of a transpose.

    Empty where rows are summed for what is written along them: they are held whole.
    """
    labels, reduced = shape.algorithm[root].labels, reduction_labels(shape.algorithm, root)
    if set(reduced) & set(labels) or any(reduction_labels(shape.algorithm, m) for m in members if m != root):
        return ()
    every = {*labels, *reduced}
    written = [(own[-1], {*own}) for m in _stored_funcs(shape, root, members) if (own := shape.algorithm[m].labels)]
    tensors = [*written, *((label, ex.free_labels(a) & every) for a in read for label in contiguous_label(a) if label in every)]
    found = [
        a
        for a, own in tensors
        for b, others in tensors
        if a != b and {a, b} <= own & others and (min(shape.sizes[a], shape.sizes[b]) >= SECTOR or own == others == every)
    ]
    return tuple(dict.fromkeys(label for label in found if shape.sizes[label] > 1)) if len(set(found)) > 1 else ()


def _transpose_tiles(shape: SchedulingProblem, root: str, sides: tuple[str, ...], members: list[str]) -> KernelConfig:
    """Block all of these labels, so that each tensor is read or written along its contiguous one; long ones take what short ones leave."""
    labels, reduced = shape.algorithm[root].labels, reduction_labels(shape.algorithm, root)
    side = min(SIDE, LINE // shape.itemsize) if len(sides) == 2 else SECTOR
    tile = {label: min(side, next_power_of_two(shape.sizes[label])) if label in sides else 1 for label in (*labels, *reduced)}
    room = side ** len(sides) // math.prod(tile.values())
    for label in (*sides, *reversed(tile)):
        wider = min(room, next_power_of_two(shape.sizes[label]) // tile[label])
        tile[label], room = tile[label] * wider, room // wider
    block = {label: tile[label] for label in labels}
    while not reduced and shape.programs(block) < shape.target.multiprocessors and max(block.values()) > SECTOR:
        widest = max(block, key=lambda label: block[label])
        block[widest] = tile[widest] = block[widest] // 2
    return shape.config(root, block, tile, 4, 3, share=8, approximations=approximations(shape, members))


def _columns(size: int) -> int:
    """Return the columns of a block: 1024, or 512 or 256 where the last of larger blocks would be mostly empty."""
    return next((wide for wide in (1024, 512, 256) if 8 * (-size % wide) <= size), min(next_power_of_two(size), 1024))


def windows(shape: SchedulingProblem, reduced: Iterable[str], read: list[ex.Access]) -> tuple[str, ...]:
    """Return the labels of windows, ``A[x + r]``, of constant extent or a short one: known to the compiler, their ends need no masks.

    Where the sum goes over all that an index has, as over the windows that an image is cut into, windows do not overlap for different results.
    """
    over = {*(reduced := tuple(reduced))}
    several = [i for a in read for i in a.index if len(ex.free_labels(i)) > 1 and ex.free_labels(i) - over]
    beside = {x for i in several for x in ex.free_labels(i)}
    sums = {x for i in several if not any(ex.accesses(i)) for x in ex.free_labels(i)}
    return tuple(r for r in reduced if r in beside and (shape.algorithm.constant_extent(r) or r in sums and shape.sizes[r] <= SHALLOW))


def _looped_windows(taps: tuple[str, ...], read: list[ex.Access]) -> tuple[str, ...]:
    """Return the windows to go over one place after another: all but one along what lies contiguous, whose places are held side by side.

    On an H100 such loops took 0.1 to 0.75 of the time of several windows held at once, a single one along contiguous elements 1.7 times as long.
    """
    most = max((len(a.index) for a in read), default=0)  # beside which a vector over the windows, such as how many of their elements there are, is short
    last = [ex.free_labels(a.index[-1]) for a in read if a.index and len(a.index) == most]
    along = {x for labels in last if len(labels) > 1 for x in labels}
    return taps if len(taps) > 1 else tuple(r for r in taps if r not in along)


def _window_warps(shape: SchedulingProblem, root: str, read: list[ex.Access], width: int) -> int:
    """Return the warps of a program that goes over windows one place after another."""
    return max(4, min(32, width // (shape.target.warp_size * thread_elements(shape, root, read))))


def thread_elements(shape: SchedulingProblem, root: str, read: list[ex.Access]) -> int:
    """Return the elements of a thread up to which the first cache keeps the lines that windows lie apart in, for the places of the windows that follow.

    Means of 11 x 11 elements beside one another took 3.2 ms with 2 elements a thread, 25 with 8 (2048 x 2048, bfloat16, an H100).
    """
    own = {*map(ex.Label, shape.algorithm[root].labels)}
    forms = [linear_form(a.index[-1]) for a in read if a.index and len(ex.free_labels(a.index[-1])) > 1]
    strides = [abs(times) for form in forms for atom, times in form.items() if times and atom in own]
    return max(1, L1_EACH // (max(strides, default=1) * shape.itemsize))


def _rows_down(shape: SchedulingProblem, labels: tuple[str, ...], read: list[ex.Access], line: int) -> int:
    """Return the rows of a step that goes down columns: more, of a line of the cache, where rows start anywhere: 32 rows of 512 bytes took twice the time of
    128 rows of 128 bytes (an H100, float32)."""
    tensors = {a.tensor for a in read if labels and len(a.index) > 1 and contiguous_label(a) == labels[-1:]}
    return 32 if line > 1 or shape.aligned(tensors) else 32 * shape.itemsize


def read_once(shape: SchedulingProblem, root: str, members: list[str], read: list[ex.Access]) -> Pairs:
    """Return the inputs that a kernel of sums reads once and that fill the cache without need: evicted first, they leave what is there.

    At twice the size of the L2, sums took 0.9 to 0.95 of the time so (an H100), at twenty times 1.02. Rows that start anywhere share sectors.
    """
    labels, summed = {*shape.algorithm[root].labels}, {*reduction_labels(shape.algorithm, root)}
    large = [a for a in read if a.tensor in shape.algorithm.inputs and shape.elements(a.tensor) * shape.itemsize > shape.target.l2_bytes]
    names = {a.tensor for a in large}
    elsewhere = {a.tensor for d in shape.algorithm.definitions if d.name not in members for a in ex.accesses(d.expr)}
    once = len(names) == len(large) and not names & elsewhere and all(len(a.index) == len(labels | summed) and {*a.index} == {*map(ex.Label, labels | summed)} for a in large)
    small = sum(map(shape.elements, names)) * shape.itemsize <= STREAMED * shape.target.l2_bytes
    numbers = bool(summed) and not summed & labels and not any(summed & {*shape.algorithm[m].labels} for m in members if m in shape.outputs)
    alone = all({*reduction_labels(shape.algorithm, m)} <= summed for m in members)
    return tuple((t, "first") for t in dict.fromkeys(a.tensor for a in large)) if once and small and numbers and alone and shape.aligned(names) else ()


def _least_run(shape: SchedulingProblem, columns: list[str], reduced: list[str]) -> int:
    """Return how many columns lie side by side in a block that holds them whole; 1 where it holds rows, or would be too large."""
    held = math.prod(next_power_of_two(shape.sizes[r]) for r in columns)
    run = RUN // shape.itemsize
    while held * run > LONG_STEP and run > SHORT_RUN // shape.itemsize:
        run //= 2
    return run if columns and columns == reduced and held * run <= LONG_STEP else 1


def _waits_for_numbers(shape: SchedulingProblem, labels: tuple[str, ...], read: list[ex.Access]) -> bool:
    """Return whether a kernel reads sums of another one for whole rows: a block that waits for numbers first has more to do then."""
    return any(a.tensor in shape.algorithm and labels and labels[-1] not in ex.free_labels(a) for a in read)


def _elements(shape: SchedulingProblem, reduced: list[str], width: int, written: bool, windows_alone: bool = False, waits: bool = False) -> int:
    """Return elements of a program: few keep kernels without reductions nearest to a copy, rows want more; narrow rows that are ``written``
    again want fewer than those of which a number stays: measured, 5 to 20% at 64 to 256 columns."""
    if not reduced:
        return (8192 if waits else 2048) // shape.itemsize * shape.target.warp_size // 32
    if windows_alone:
        return PLACES
    if width <= 256:
        return WRITTEN if written else 4096
    return 2048 if width <= 2048 else 4096


def _is_padded(shape: SchedulingProblem, tile: dict[str, int]) -> bool:
    """Return whether a tile that holds a row whole is empty for a quarter or more: two tiles hold it by fewer registers.

    4096 rows of 20000 took 107 us one after another as tiles of 32768, 79 by two tiles (cross entropy, bfloat16, an H100).
    """
    return any(n == 0 and 4 * sum(two_tiles(shape.sizes[x], 1)) <= 3 * next_power_of_two(shape.sizes[x]) for x, n in tile.items())


def _prefetching(shape: SchedulingProblem, block: dict[str, int], tile: dict[str, int], members: list[str]) -> dict[str, Any]:
    """Make programs persistent and prefetch their next rows, where one row fills a multiprocessor and shared memory holds two more."""
    read = {a.tensor for m in members for a in ex.accesses(shape.algorithm[m].expr) if any(tile.get(n) == 0 for n in ex.free_labels(a))}
    read &= set(shape.algorithm.inputs)
    label = next((label for label, size in block.items() if size == 1 and shape.sizes[label] >= 4 * shape.target.multiprocessors), None)
    fits = 2 * sum(map(shape.input_bytes, read)) * ROW_LIMIT <= shape.target.shared_bytes
    if label is None or not fits or shape.target.backend != "cuda" or shape.programs(block) != shape.sizes[label]:
        return {}
    return {"persistent": True, "stages_of": ((label, 3),)}


def approximations(shape: SchedulingProblem, members: list[str]) -> Pairs:
    """Return the functions that few instructions compute, where results of 16 bits hide their error.

    Not where a constant cancels most of the value, as in 1 + tanh(x), or another value of the same function, as in erfc(x) - erfc(y),
    nor in what a cast keeps in 32 bits, but for terms of sums in other Funcs. Logarithms and expm1 lose two bits at most in a sum; the few of a row's number stay as they are.
    """
    nodes = [n for m in members for n in shape.algorithm[m].expr.walk()]
    terms = {m: () if shape.dots(m) else reduction_labels(shape.algorithm, m) for m in members}
    most = max(_evaluations(shape, (*shape.algorithm[m].labels, *terms[m])) for m in members)
    used = {n.fn for n in nodes if isinstance(n, ex.Call) and (n.fn == "tanh" or FEW * _evaluations(shape, ex.free_labels(n)) >= most)}
    for n in (n for n in nodes if isinstance(n, ex.Binary) and n.op in "+-"):
        sides = (n.left, n.right)
        used -= {s.fn for s in sides if isinstance(s, ex.Call) and any(isinstance(other, ex.Const) for other in sides)}
        used -= {"tanh", "erfc"} & _functions_of_factors(n.left) & _functions_of_factors(n.right)
    known = shape.result_bytes() == 2 and shape.target.backend == "cuda" and isinstance(shape.target.arch, int) and shape.target.arch >= 75
    if not known or not used.intersection(APPROXIMATIONS):  # most kernels, for each of whose candidates this is asked
        return ()
    used -= _functions_of_wide_results(shape.algorithm)
    return tuple((f, "") for f in APPROXIMATIONS if f in used)


def _functions_of_wide_results(algorithm: Algorithm) -> set[str]:
    """Return the functions of what is cast to float32, and of the Funcs that it is made of without a sum between."""
    todo: list[ex.Expr] = [d.expr for d in algorithm.definitions if isinstance(d.expr, ex.Cast) and d.expr.dtype == "fp32"]
    found, seen = {n.fn for e in todo for n in e.walk() if isinstance(n, ex.Call)}, set[str]()
    while todo:
        match todo.pop():
            case ex.Reduce() | ex.Dot() | ex.Scan():
                pass
            case ex.Access(tensor, _) if tensor in algorithm and tensor not in seen:
                seen.add(tensor)
                todo.append(algorithm[tensor].expr)
            case node:
                found |= {node.fn} if isinstance(node, ex.Call) else set()
                todo += node.children()
    return found


def _evaluations(shape: SchedulingProblem, labels: Iterable[str]) -> int:
    return math.prod(shape.sizes.get(x, 1) for x in labels)


def _functions_of_factors(e: ex.Expr) -> set[str]:
    """Return the functions whose values are factors of ``e``."""
    match e:
        case ex.Call(fn, _):
            return {fn}
        case ex.Unary("-", a) | ex.Binary("/", a, _):
            return _functions_of_factors(a)
        case ex.Binary("*", a, b):
            return _functions_of_factors(a) | _functions_of_factors(b)
    return set()


def stores_while_reducing(shape: SchedulingProblem, root: str, members: list[str]) -> bool:
    """Return whether the kernel also writes elementwise outputs in the loop of a reduction."""
    reduced = reduction_labels(shape.algorithm, root)
    return bool(reduced) and any(set(reduced) <= set(shape.algorithm[m].labels) for m in members if m in shape.outputs)


def _stored_funcs(shape: SchedulingProblem, root: str, members: list[str]) -> list[str]:
    """Return the Funcs that the kernel stores."""
    return [m for m in members if m == root or m in shape.outputs]


def loaded_accesses(shape: SchedulingProblem, root: str, members: list[str]) -> list[ex.Access]:
    """Return the accesses that read memory, at indices of the stored Funcs; a Func that the kernel computes is not in memory."""
    found: dict[ex.Access, None] = {}

    def below(func: str, at: dict[str, ex.Expr]) -> None:
        for a in ex.accesses(shape.algorithm[func].expr):
            known = ex.Access(a.tensor, tuple(ex.substitute(i, at, index=True) for i in a.index))
            if known not in found:
                found[known] = None
                if a.tensor in members:
                    below(a.tensor, dict(zip(shape.algorithm[a.tensor].labels, known.index)))

    for func in _stored_funcs(shape, root, members):
        below(func, {})
    return [a for a in found if a.tensor not in members]


def _no_tensor_is_contiguous_along(label: str, read: list[ex.Access]) -> bool:
    """Return whether no large tensor is contiguous along ``label``; a vector over it is not large."""
    having = [a for a in read if label in ex.free_labels(a)]
    most = max((len(a.index) for a in having), default=0)
    return all(label not in contiguous_label(a) for a in having if len(a.index) == most)


def _contiguous_first(labels: tuple[str, ...], read: list[ex.Access]) -> list[str]:
    """Sort labels by how much they need a wide tile: last dimensions of the tensors with the most dimensions first."""
    most = max((len(a.index) for a in read), default=0)
    last = [label for a in read if len(a.index) == most for label in contiguous_label(a)]
    return list(dict.fromkeys([*labels[-1:], *(label for label in last if label in labels), *reversed(labels)]))


def _by_stride(shape: SchedulingProblem, reduced: list[str], read: list[ex.Access]) -> list[str]:
    """Sort the reduced labels by the stride of their terms, smallest first."""
    most = max((len(ex.free_labels(a) & {*reduced}) for a in read), default=0)
    places = [[ex.free_labels(i) for i in reversed(a.index)] for a in read if len(ex.free_labels(a) & {*reduced}) == most]
    order = shape.algorithm.labels

    def distance(label: str) -> tuple[int, int]:
        return min((i for place in places for i, found in enumerate(place) if label in found), default=0), -order.index(label)

    return sorted(reduced, key=distance)


def contiguous_label(access: ex.Access) -> tuple[str, ...]:
    """Return the label of a tensor's last index, if that is of one label and none that another tensor holds."""
    found = tuple(ex.free_labels(access.index[-1])) if access.index else ()
    return found if len(found) == 1 and not any(ex.accesses(access.index[-1])) else ()
