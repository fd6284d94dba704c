"""Find the operands of products that may be worth a kernel of their own: expressions that many blocks of a product would compute again.

Conversion in the loop keeps operands from going from memory to the matrix units through shared memory alone. At 4096 rows, columns and terms int8 weights took
561 us so on an H100, stored first 199, bfloat16 weights 175; four-bit weights with scales of groups 2792 and 203. With few rows an operand is read once anyhow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..algebra.autodiff.rematerialization import is_limit_set, is_within_set_limit
from ..algebra.operand_types import OperandTypes, rows_of
from ..codegen.powers_of_two import next_power_of_two
from ..lang import expr as ex
from ..lang.algorithm import operand_names, paired_sides
from ..lang.parts.apart_products import apart_product_names
from ..lang.parts.batched_products import batched_product_names, lies_across
from ..lang.parts.rounded_copies import rounded_copy_names
from ..lang.schedule_checks import reduction_labels
from .memory_limit import SHORTEST, memory_limit
from .problem import WHOLE_SIDE, SchedulingProblem
from .recomputation import STORED, goes_over_windows
from .rules.product_sides import leaves_out_terms
from .rules.reduction import ROW_LIMIT

IN_LOOP = 1.8  #: the time of such loops relative to what is predicted, where those that are stored take theirs: 1.4 to 5 times on an H100
#: for each side that lies along a sum over pairs, its time relative to what is predicted, and to that of copies: 105 and 68 us on an H100, where 83 and 92 are predicted
ACROSS = 1.25
MANY_PAIRS = 2048 * 2048  #: results from which on that was measured
NARROW = ("int8", "uint8", *ex.FLOAT8)  #: dtypes that are converted beside operands of 16 or 32 bits
FROM_SHARED = 90  #: compute capability from which on they do; earlier ones take operands from registers
FLOATS = ("fp32", "bf16", "fp16")
MOST = 3  #: operands that are tried one by one


def stored_operands(shape: SchedulingProblem) -> list[tuple[str, ...]]:
    """Return sets of names of operands to try: all that may be worth it, then each by itself."""
    names = operand_names(shape.algorithm).items()
    paired = tuple(name for name, e in names if _is_paired(shape, e))
    if not paired and (across := _across_products(shape)):
        return [across]
    worth = tuple(name for name, e in names if (_is_converted(shape, e) or _is_crossed(shape, e)) and _is_reread(shape, e) and _has_room(shape, e) and name not in paired)
    if paired:
        return [paired, *([(*paired, *worth)] if worth else [])]
    rounded = _rounded_copies(shape)
    apart = _apart_products(shape)
    tried = ((*rounded, *worth), rounded, worth, *((name,) for name in worth[:MOST]), *(((*apart, *rounded, *worth), apart) if apart else ()))
    return [found for found in dict.fromkeys(tried) if found]


def _apart_products(shape: SchedulingProblem) -> tuple[str, ...]:
    """Return the products, long on all sides, that kernels may store before what is made of them with other tensors of their size.

    Such a tensor is loaded as the accumulators lie, a few bytes at a time, while the matrix units wait: a product with a mask of one byte and a residual
    took 295 us at 4096 x 4096 x 4096 on an H200, one alone 180.
    """
    found = []
    for name, dot in apart_product_names(shape.algorithm).items():
        d = next(d for d in shape.algorithm.definitions if dot in d.expr.walk())
        beside = {a.tensor for a in ex.accesses(d.expr)} - {a.tensor for a in ex.accesses(dot)}
        full = any({*d.labels} <= ex.free_labels(a) for a in ex.accesses(d.expr) if a.tensor in beside)
        long = shape.longest_sum(d.name) >= STORED and min(_longest(shape, dot, side) for side in (dot.left, dot.right)) > WHOLE_SIDE
        found += [name] if full and long and len(shape.dots(d.name)) == 1 and _has_room(shape, ex.Access(name, tuple(map(ex.Label, d.labels)))) else []
    return tuple(found)


def _rounded_copies(shape: SchedulingProblem) -> tuple[str, ...]:
    """Return the copies of Funcs that may be worth storing beside them (lang/parts/rounded_copies.py): products of 16 bits read these many times."""
    if shape.itemsize != 2:
        return ()
    wide = {f for f in shape.algorithm.funcs if f not in shape.outputs and shape.stored_bytes(f) > shape.itemsize}
    sides = [s for f in shape.algorithm.funcs for dot in shape.dots(f) for s in (dot.left, dot.right) if (rows := rows_of(s)) and rows.tensor in wide]
    read = {rows.tensor for s in sides if _is_reread(shape, s) and _has_room(shape, s) and (rows := rows_of(s))}
    return tuple(name for name, func in rounded_copy_names(shape.algorithm).items() if func in read)


def _across_products(shape: SchedulingProblem) -> tuple[str, ...]:
    """Return the operands that lie across several products, one for each place of their last dimension, and these products where their results lie so too.

    As they are, each tile loads one element of a sector: 128 products of 512 x 512 x 512 took 5.4 ms on an H200.
    """
    dots = [dot for d in shape.algorithm.definitions for dot in shape.dots(d.name)]
    sides = [side for dot in dots for side in (dot.left, dot.right) if lies_across(dot, side)]
    operands = {name: e for name, e in operand_names(shape.algorithm).items() if e in sides and _has_room(shape, e)}
    results = {name: dot for name, dot in batched_product_names(shape.algorithm).items() if dot in dots} if operands else {}
    kept = sum(4 * math.prod(shape.sizes[label] for label in ex.free_labels(e)) for e in (*operands.values(), *results.values()))
    return (*operands, *results) if is_within_set_limit(kept) else ()


def _is_paired(shape: SchedulingProblem, operand: ex.Expr) -> bool:
    """Return whether an input is one side of a sum over all pairs of rows whose copy has the rows side by side, in float32.

    Threads take a row each: of 2048 x 2048 distances of 128 terms in bfloat16, tiles load 2 bytes of a sector, 105 us on an H100; by copies 68.
    """
    if not isinstance(operand, ex.Access) or operand.tensor not in shape.algorithm.inputs or operand.tensor in shape.algorithm.integer_inputs():
        return False
    kinds = dict(shape.types.of) if shape.types else {}
    found = [(d, n) for d in shape.algorithm.definitions for n in d.expr.walk() if operand in (paired_sides(n) or ())]
    across = any(ex.free_labels(operand.index[-1]) & {*n.labels} for _, n in found)  # type: ignore[attr-defined]
    many = any(math.prod(shape.sizes[label] for label in d.labels) >= MANY_PAIRS for d, _ in found)
    long = any(shape.sizes[label] > WHOLE_SIDE for d, _ in found for label in {*d.labels} - ex.free_labels(operand))
    return kinds.get(operand.tensor, FLOATS[0]) in FLOATS and across and many and long


def _is_converted(shape: SchedulingProblem, operand: ex.Expr) -> bool:
    """Return whether an operand is computed, or loaded in a narrow dtype that its products do not multiply in."""
    e = operand.arg if isinstance(operand, ex.Unary) and operand.op == "-" else operand
    if any(leaves_out_terms(shape, dot) for dot in _products(shape, operand)):
        return False
    types = OperandTypes(shape.algorithm)
    if any(types.of(dot).float8 for dot in _products(shape, operand)):
        return shape.target.has_float8 and _is_turned(shape, operand)
    if rows := rows_of(e):
        given = dict(shape.types.of) if shape.types else {}
        return isinstance(e, ex.Access) and rows.tensor in shape.algorithm.inputs and given.get(rows.tensor, "") in NARROW
    return True


def _is_turned(shape: SchedulingProblem, operand: ex.Expr) -> bool:
    """Return whether an input that is an operand lies contiguous along no label that its products sum over; a copy of it does.

    The matrix units read elements of 8 and of 32 bits along the sum alone: in the loop each step turns its tile round, element by element.
    """
    if not isinstance(operand, ex.Access) or not operand.index:
        return False
    summed = {label for dot in _products(shape, operand) for label in dot.labels}
    return bool(summed & ex.free_labels(operand)) and not ex.free_labels(operand.index[-1]) & summed


def _is_crossed(shape: SchedulingProblem, operand: ex.Expr) -> bool:
    """Return whether three products in TF32 would turn a float32 operand round in the loop, on GPUs whose matrix units read operands from shared memory."""
    return shape.triples_float32 and int(shape.target.arch) >= FROM_SHARED and _is_turned(shape, operand)


def _products(shape: SchedulingProblem, operand: ex.Expr) -> list[ex.Dot]:
    return [dot for d in shape.algorithm.definitions for dot in shape.dots(d.name) if operand in (dot.left, dot.right)]


def _is_reread(shape: SchedulingProblem, operand: ex.Expr) -> bool:
    """Return whether a product has a long label that the operand lacks, or goes over windows: several blocks, or taps, read the operand."""
    return any(_longest(shape, dot, operand) > WHOLE_SIDE // 2 or goes_over_windows(shape, dot) for dot in _products(shape, operand))


def computed_operand_slowdown(shape: SchedulingProblem, funcs: Iterable[str] | None = None) -> float:
    """Return how much longer than predicted an algorithm takes: one with a long product, long on both sides, that computes an operand in its loop, or a sum over pairs.

    ``funcs``: of a single kernel.
    """
    dots = (dot for f in funcs or shape.algorithm.funcs for dot in shape.dots(f) if math.prod(shape.sizes[k] for k in dot.labels) > WHOLE_SIDE)
    if funcs is None and (sides := sum(_is_paired(shape, e) for e in operand_names(shape.algorithm).values())):
        return ACROSS**sides
    long = (dot for dot in dots if min(_longest(shape, dot, side) for side in (dot.left, dot.right)) > WHOLE_SIDE)
    return IN_LOOP if any(_is_converted(shape, side) for dot in long for side in (dot.left, dot.right)) else 1.0


def _longest(shape: SchedulingProblem, dot: ex.Dot, side: ex.Expr) -> int:
    """Return the extent of the longest label of a product that ``side`` lacks."""
    return max((shape.sizes[label] for label in ex.free_labels(dot) - ex.free_labels(side) - {*dot.labels}), default=0)


def _has_room(shape: SchedulingProblem, operand: ex.Expr) -> bool:
    """Return whether the stored operand, or a piece of it that products fill the GPU with, is within the memory limit, or as large as one that products read anyway, unless the user sets the limit."""
    sides = (rows_of(side) for f in shape.algorithm.funcs for dot in shape.dots(f) for side in (dot.left, dot.right))
    if not is_limit_set() and any(rows.tensor in shape.algorithm and ex.free_labels(operand) <= {*shape.algorithm[rows.tensor].labels} for rows in sides if rows):
        return True
    limit, sizes = memory_limit(), sorted(shape.sizes[label] for label in ex.free_labels(operand))
    return not limit or shape.itemsize * math.prod((*sizes[:-1], min(sizes[-1], SHORTEST))) <= limit


def sums_held_rows(shape: SchedulingProblem, func: str, host: str) -> bool:
    """Return whether ``func`` reduces rows of elements such as ``host`` is made of one by one, short enough for its kernel to hold."""
    own, over = shape.algorithm[func].labels, reduction_labels(shape.algorithm, func)
    held = math.prod(next_power_of_two(shape.sizes[x]) for x in over) <= ROW_LIMIT
    return bool(over) and held and (*own, *over) == shape.algorithm[host].labels and not shape.dots(func)


def operand_beside(shape: SchedulingProblem, func: str, operands: Iterable[str]) -> str | None:
    """Return the first of ``operands``, which have kernels of their own, whose kernel can compute ``func`` as well and store it.

    It is a copy of ``func``, or ``func`` sums rows and both read the same elements.
    """
    for operand in sorted({*operands} & {*shape.algorithm.funcs}):
        e = shape.algorithm[operand].expr
        if isinstance(e, ex.Access) and e.tensor == func:
            return operand
        read = [_read_in_rows(shape, f, shape.algorithm[operand].labels) for f in (func, operand)]
        waits = operand in shape.algorithm.needed_by((func,)) or not shape.algorithm[func].labels
        if not waits and read[0] & read[1] and sums_held_rows(shape, func, operand) and not list(ex.reductions(e)):
            return operand
    return None


def _read_in_rows(shape: SchedulingProblem, func: str, labels: tuple[str, ...]) -> set[str]:
    """Return the tensors of which ``func`` is made that are read at every element of ``labels``, the last of which lies contiguous."""
    every = (a for f in shape.algorithm.needed_by((func,)) for a in ex.accesses(shape.algorithm[f].expr))
    return {a.tensor for a in every if set(labels) <= ex.free_labels(a) and a.index[-1:] == (ex.Label(labels[-1]),)}
