"""Fuse outputs into the kernel of another, so that what both read is read once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ..codegen.analysis.product_types import cast_bytes
from ..codegen.powers_of_two import next_power_of_two
from ..codegen.prelower.kernel_partition import kernel_roots
from ..lang import expr as ex
from ..lang.errors import DTError
from ..lang.schedule import Bare, FuseAt, Fused, Primitive, Program, Schedule, host
from ..lang.schedule_checks import reduction_labels
from .cost.kernel_config import KernelConfig
from .problem import WHOLE_SIDE, SchedulingProblem
from .rules.candidates.two_tiles import fits_two_tiles, tiled_extent
from .rules.gemm_row_reduction import reduced_product_labels
from .rules.reduction import ROW_LIMIT
from .rules.row_column_reduction import row_column_tiles

ONE_PROGRAM = 8192  #: elements that one program computes in no more time than a launch
MOST_BY_TWO_TILES = 384  #: columns of accumulators that two tiles hold: two of 160 took 0.92 of the time of two kernels on an H100, two of 192 0.95 and 1.01


def fused_outputs(shape: SchedulingProblem, loads_sum_operands: Callable[[str, str], bool], rows: bool) -> dict[str, tuple[str, str]]:
    """Return outputs computed in the kernel of another: those that share its reduction, and those of which it computes all parts.

    ``loads_sum_operands`` says whether a kernel loads what a sum is of. With ``rows`` in that of a later one too, where it holds rows; and no sum
    that others are made from, which may go where they are.
    None where an extent is 0: a kernel whose first output is empty is not launched, and others of its outputs may not be empty.
    """
    found: dict[str, tuple[str, str]] = {}
    if 0 in shape.sizes.values():
        return found
    read = {a.tensor for d in shape.algorithm.definitions for a in ex.accesses(d.expr)} if rows else set()
    for i, o in enumerate(shape.outputs):
        for p in shape.outputs[:i]:
            wanted = not (o in read and reduction_labels(shape.algorithm, o))
            if p not in found and o not in found and wanted and (label := _fusion_loop(shape, o, p, loads_sum_operands)):
                found[o] = (p, label)
    found |= _read_by_later_sums(shape, found)
    for o in shape.outputs:
        along = [f for f, (p, _) in found.items() if p == o]  # what is computed with o goes where o goes
        hosts = (p for p in shape.outputs if p not in (*found, *along) and all(_fits_column_reduction_pass(shape, f, p) for f in (o, *along)))
        host = next(hosts, None) if o not in found else None
        if host:
            found |= dict.fromkeys((o, *along), (host, reduction_labels(shape.algorithm, host)[-1]))
    for o in shape.outputs:
        alone = o not in found and o not in {p for p, _ in found.values()}
        host = next((p for p in shape.outputs if alone and p not in found and _fits_rows_of_column_reduction(shape, o, p, found)), None)
        if host:
            found[o] = (host, reduction_labels(shape.algorithm, host)[-1])
    for i, o in enumerate(shape.outputs if rows else ()):
        alone = o not in found and o not in {p for p, _ in found.values()} and not reduction_labels(shape.algorithm, o)
        for p in shape.outputs[i + 1 :] if alone else ():
            if p not in found and o not in found and in_rows(shape, o, p) and (label := _fusion_loop(shape, o, p, loads_sum_operands)):
                found[o] = (p, label)
    for o in shape.outputs if rows else ():
        alone = o not in found and o not in {p for p, _ in found.values()}
        host = next((p for p in shape.outputs if alone and p not in found and _sums_rows_that_are_held(shape, o, p)), None)
        if host:
            found[o] = (host, shape.algorithm[o].labels[-1])
    return found


def _read_by_later_sums(shape: SchedulingProblem, found: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Return output sums that the kernel of a later one, over the same elements of an input, computes in its loop and reads after it: a minimum beside a range."""
    more: dict[str, tuple[str, str]] = {}
    for i, o in enumerate(shape.outputs):
        own, reduced = shape.algorithm[o].labels, reduction_labels(shape.algorithm, o)
        if not reduced or o in found or o in {p for p, _ in (found | more).values()} or shape.dots(o):
            continue
        for p in (p for p in shape.outputs[i + 1 :] if p not in found and (shape.algorithm[p].labels, reduction_labels(shape.algorithm, p)) == (own, reduced)):
            e, every = shape.algorithm[p].expr, (*own, *reduced)
            through = [f for f in shape.algorithm.needed_by((p,)) if f not in (o, p) and o in shape.algorithm.needed_by((f,))]
            inside = any(a.tensor == o for n in ex.reductions(e) for a in ex.accesses(n))
            reads = any(a.tensor == o for a in ex.accesses(e)) and not inside and not through and not shape.dots(p)
            if reads and inputs_below_at(shape, o, every) & inputs_below_at(shape, p, every):
                more[o] = (p, reduced[-1])
                break
    return more


def _fusion_loop(shape: SchedulingProblem, output: str, root: str, loads_sum_operands: Callable[[str, str], bool]) -> str | None:
    own, outer = shape.algorithm[output].labels, shape.algorithm[root].labels
    reduced, inner = reduction_labels(shape.algorithm, output), reduction_labels(shape.algorithm, root)
    extra = [label for label in own if label not in outer]
    if reduced and root in shape.algorithm.needed_by((output,)):
        return None
    if reduced:
        narrow = all(shape.sizes[label] <= WHOLE_SIDE for label in extra) and _both_fit_in_registers(shape, output, root)
        return reduced[-1] if reduced == inner and narrow and set(own) & set(outer) and loads_sum_operands(output, root) else None
    parts = {f for f in shape.algorithm.needed_by((output,)) if f != output}
    made = parts and parts <= set(shape.algorithm.needed_by((root,)))
    return own[-1] if own and not extra and (made or _shares_elementwise_inputs(shape, output, root)) else None


def _sums_rows_that_are_held(shape: SchedulingProblem, output: str, root: str) -> bool:
    """Return whether ``output`` sums rows of what ``root``, which is made element by element and of other sums of these rows, reads at each element."""
    own, reduced, every = shape.algorithm[output].labels, reduction_labels(shape.algorithm, output), shape.algorithm[root].labels
    if not own or not reduced or {*every} != {*own, *reduced} or reduction_labels(shape.algorithm, root):
        return False
    inner, outer = (shape.algorithm.needed_by((f,)) for f in (output, root))
    held = any(shape.algorithm[f].labels == own and {*reduction_labels(shape.algorithm, f)} == {*reduced} for f in outer if f not in shape.outputs)
    apart = not {*inner, *outer} & {*shape.outputs} - {output, root} and output not in outer and root not in inner
    return held and apart and in_rows(shape, output, root) and bool(inputs_below_at(shape, output, every) & inputs_below_at(shape, root, every))


def in_one_launch(shape: SchedulingProblem, fused: tuple[Primitive, ...]) -> Iterator[tuple[Primitive, ...]]:
    """Yield ways to compute outputs of few elements in the kernel of a single number that is summed along them: one program takes less time than a launch."""
    roots = [o for o in shape.outputs if o not in {p.func for p in fused if p.name == "fuse_at"}]
    for number in (o for o in roots if not shape.algorithm[o].labels and not shape.dots(o)):
        along = reduction_labels(shape.algorithm, number)
        for o in (o for o in roots if o != number and along and {*shape.algorithm[o].labels} == {*along} and not shape.dots(o)):
            if math.prod(shape.sizes.get(x, 1) for x in (*along, *reduction_labels(shape.algorithm, o))) <= ONE_PROGRAM:
                yield (*fused, FuseAt(o, "fuse_at", (number, along[-1])))


def in_rows(shape: SchedulingProblem, output: str, root: str) -> bool:
    """Return whether ``root`` sums along all labels that ``output`` lacks, in rows short enough to hold, without matrix products nearby."""
    own, outer = set(shape.algorithm[output].labels), set(shape.algorithm[root].labels)
    parts = shape.algorithm.needed_by((output, root))
    reduced = {label for f in parts for label in reduction_labels(shape.algorithm, f)}
    short = math.prod(shape.sizes[label] for label in reduced) <= ROW_LIMIT and not any(map(shape.dots, parts))
    return own <= outer and outer - own <= reduced and short


def _both_fit_in_registers(shape: SchedulingProblem, output: str, root: str) -> bool:
    """Return whether one program has registers for the accumulators of both, if both are sums of products."""
    if not (shape.dots(output) and shape.dots(root)):
        return True
    sides = [label for f in (output, root) for label in shape.algorithm[f].labels[-1:]]
    if shape.itemsize == 2 and shape.target.backend == "cuda" and all(shape.sizes[label] <= WHOLE_SIDE and fits_two_tiles(shape.sizes, label) for label in sides):
        return sum(tiled_extent(shape.sizes, label) for label in sides) <= MOST_BY_TWO_TILES
    widths = [next_power_of_two(shape.sizes[label]) for label in sides]
    return sum(w for w in widths if w <= WHOLE_SIDE) <= WHOLE_SIDE  # wider ones are cut into blocks


def _shares_elementwise_inputs(shape: SchedulingProblem, output: str, root: str) -> bool:
    """Return whether ``output`` is computed elementwise from inputs that ``root`` reads at the same elements."""
    own, outer = shape.algorithm[output].labels, shape.algorithm[root].labels
    parts, others = shape.algorithm.needed_by((output,)), shape.algorithm.needed_by((root,))
    if own != outer or any(reduction_labels(shape.algorithm, f) for f in (*parts, root)) or any(map(shape.dots, others)):
        return False
    return bool(inputs_below_at(shape, output, own) & inputs_below_at(shape, root, own)) or _written_at_one_place(shape, output, root)


def _written_at_one_place(shape: SchedulingProblem, output: str, root: str) -> bool:
    """Return whether both are stored in inputs at the same index, by data: its elements are read once, and one launch does both."""
    one, other = (shape.algorithm[f].expr for f in (output, root))
    if not isinstance(one, ex.Write) or not isinstance(other, ex.Write):
        return False
    return (one.place.index, one.condition) == (other.place.index, other.condition)


def _fits_column_reduction_pass(shape: SchedulingProblem, output: str, root: str) -> bool:
    """Return whether one read of the inputs serves both ``output`` and the column sums of ``root``.

    ``output`` is made from what ``root`` sums, elementwise or with sums along rows that are held whole.
    """
    reduced = reduction_labels(shape.algorithm, root)
    own, outer = shape.algorithm[output].labels, shape.algorithm[root].labels
    if (
        not reduced
        or reduction_labels(shape.algorithm, output)
        or set(own) != {*outer, *reduced}
        or len(own) != len(outer) + len(reduced)
    ):
        return False
    parts = [f for f in shape.algorithm.needed_by((output,)) if f != output]
    if own[-1] in reduced and not _goes_along_rows(shape, output, root):
        return False
    if shape.dots(root) or not inputs_below_at(shape, output, own) & inputs_below_at(shape, root, own):
        return False
    if set(parts) & set(shape.outputs) or not any(reduction_labels(shape.algorithm, f) for f in parts):
        return not set(parts) & set(shape.outputs)
    sums = [o for o in shape.outputs if shape.algorithm[o].labels == outer and reduction_labels(shape.algorithm, o) == reduced]
    return bool(row_column_tiles(shape, root, [*sums, output, *parts]))


def _goes_along_rows(shape: SchedulingProblem, output: str, root: str) -> bool:
    """Return whether ``output`` is made of inputs element by element along the rows that ``root`` sums, short enough to hold."""
    own, reduced = shape.algorithm[output].labels, reduction_labels(shape.algorithm, root)
    plain = not any(reduction_labels(shape.algorithm, f) or f in shape.outputs for f in shape.algorithm.needed_by((output,)) if f != output)
    held = math.prod(next_power_of_two(shape.sizes[x]) for x in reduced)
    return plain and own == (*shape.algorithm[root].labels, *reduced) and held <= ROW_LIMIT


def _fits_rows_of_column_reduction(shape: SchedulingProblem, output: str, root: str, found: dict[str, tuple[str, str]]) -> bool:
    """Return whether the rows that ``output`` sums are those whose columns ``root`` sums, in a kernel that holds them whole.

    Labels of one element do not count: with a single ``k``, both gradients of ``rdot(A[x, k], B[k, y], k)`` read the same elements once.
    """
    along, down = (shape.several(reduction_labels(shape.algorithm, f)) for f in (output, root))
    own, outer = (shape.several(shape.algorithm[f].labels) for f in (output, root))
    every = tuple(own | outer)
    if not along or not down or not down <= own or not along <= outer or own & along or {*every} != outer | down or {*every} != own | along:
        return False
    if any(a.tensor == output for d in shape.algorithm.definitions for a in ex.accesses(d.expr)):
        return False
    both = [f for f in shape.algorithm.needed_by((output, root)) if f not in shape.outputs]
    joined = [o for o, (p, _) in found.items() if p == root]
    read = inputs_below_at(shape, output, every) & inputs_below_at(shape, root, every)
    return bool(read and row_column_tiles(shape, root, [root, *joined, output, *both]))


def inputs_at(shape: SchedulingProblem, func: str, labels: tuple[str, ...]) -> set[str]:
    """Return inputs that ``func`` reads at all of ``labels``."""
    return {
        a.tensor
        for a in ex.accesses(shape.algorithm[func].expr)
        if set(labels) <= ex.free_labels(a) and a.tensor in shape.algorithm.inputs
    }


def inputs_below_at(shape: SchedulingProblem, func: str, labels: tuple[str, ...]) -> set[str]:
    """Return inputs that ``func`` or what it is made from reads at all of ``labels``."""
    return set().union(*(inputs_at(shape, f, labels) for f in shape.algorithm.needed_by((func,))))


def stores_redundantly(shape: SchedulingProblem, fused: tuple[Primitive, ...], tiles: dict[str, KernelConfig]) -> bool:
    """Return whether programs compute and store an output product redundantly, at a cost above that of the kernel's own output.

    Programs that differ in a label that the product lacks compute the same product; together they write more of it than of
    the output of the kernel.
    """
    written = {*shape.outputs, *(p.func for p in fused if p.name == "store")}
    for func, (root, _) in Schedule(fused).fused().items():
        if func in written and shape.dots(func) and root in tiles:
            times = math.prod(-(-shape.sizes[x] // size) for x, size in tiles[root].blocks if x not in shape.algorithm[func].labels)
            if times > 1 and times * shape.elements(func) > shape.elements(root):
                return True
    return False


def read_outputs(shape: SchedulingProblem, fused: tuple[Primitive, ...]) -> tuple[Primitive, ...]:
    """Return ``fused`` with outputs that further kernels read from memory: without ``store`` each of these computes them again.

    The gradients of statistics need them as they are: ``m_kept[i]``, the mean of a column, is written by the kernel of the variance, and the
    kernel of ``X[n, i] - m_kept[i]`` would add up its column for each element. A product that no other Func of its kernel reads is read rounded by all.
    """
    if 0 in shape.sizes.values():
        return fused
    compiled = tuple(Bare(o, "compile") for o in shape.outputs)
    for o in shape.outputs:
        places = Schedule(fused).fused()
        readers, own = _readers(shape, o, places), host(o, places)
        if o in places and Bare(o, "store") not in fused and readers - {own} and (_is_as_stored(shape, o) or shape.dots(o) and own not in readers):
            try:
                kernel_roots(Program(shape.algorithm, Schedule((*fused, Bare(o, "store"), *compiled))))
            except DTError:  # a kernel that reads it runs before the one that writes it
                continue
            fused = (*fused, Bare(o, "store"))
    return fused


def _is_as_stored(shape: SchedulingProblem, output: str) -> bool:
    """Return whether others may read an output as it is stored: in float32, or a sum of whose rows nothing else is made, with which rounded ones do not agree."""
    if shape.itemsize >= 4 or cast_bytes(shape.algorithm, output) == 4:
        return True
    every = shape.algorithm.needed_by(shape.outputs)
    return bool(reduction_labels(shape.algorithm, output)) and not any(reduced_product_labels(shape, f, output) for f in every)


def _readers(shape: SchedulingProblem, output: str, places: Fused) -> set[str]:
    """Return the Funcs with kernels of their own that read ``output``, or compute again what reads it."""
    found: set[str] = set()
    todo = [output]
    while todo:
        read = todo.pop()
        users = {d.name for d in shape.algorithm.definitions for a in ex.accesses(d.expr) if a.tensor == read}
        found |= {host(u, places) for u in users}
        todo += [u for u in users if u in places and u not in shape.outputs and u != output]
    return found
