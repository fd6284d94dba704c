"""Schedule an algorithm that reads dimensions in blocks as if each block were a dimension of its own.

The maximum of each block of 128 x 128 elements::

    s[p, q] = rmax(abs(W[128 * p + r, 128 * q + c]), r, c);

is scheduled as that of an input of four dimensions, in which elements lie contiguous along ``c`` alone, and no window overlaps another::

    s[p, q] = rmax(abs(W_blocks[p, r, q, c]), r, c);
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...algebra.rules.canonicalize import fresh_name
from ...codegen.analysis.product_types import InputTypes
from ...codegen.target import Target
from ...lang import expr as ex
from ...lang.algorithm import Algorithm
from ...lang.extents.linear_form import linear_form
from ...lang.schedule import Evict, Primitive, Program, Schedule
from ..fit_resources import can_be_lowered
from .sliced_products import time_of_schedule

FASTER = 0.95  #: the part of the time of the schedule of windows below which that of blocks is taken
SHALLOW = 16  #: elements up to which a block is a window, whose places are unrolled


def with_blocked_dimensions(
    algorithm: Algorithm, outputs: tuple[str, ...], sizes: dict[str, int], itemsize: int | InputTypes, target: Target,
    found: Schedule, default: Callable[[Algorithm, int | InputTypes], Schedule],
) -> Schedule:  # fmt: skip
    """Return the schedule of the algorithm with blocks as dimensions, or ``found`` unless it is predicted to be slower. ``default`` returns an algorithm's schedule."""
    apart, names = blocks_apart(algorithm, sizes)
    if not names or 0 in sizes.values():
        return found
    types = itemsize
    if isinstance(itemsize, InputTypes):
        types = replace(itemsize, of=(*itemsize.of, *((new, dtype) for new, old in names.items() for tensor, dtype in itemsize.of if tensor == old)))
    made = Schedule(tuple(_restored(p, names) for p in default(apart, types).primitives))
    if any(new in str(made) for new in names) or not can_be_lowered(Program(algorithm, made)):  # a copy, which has the tensor's own dimensions
        return found

    def time(schedule: Schedule) -> float:
        return time_of_schedule(algorithm, schedule, outputs, sizes, itemsize, target)

    return made if time(made) < FASTER * time(found) else found


def blocks_apart(algorithm: Algorithm, sizes: dict[str, int]) -> tuple[Algorithm, dict[str, str]]:
    """Return the algorithm with another input for what is read in blocks, with a dimension for each label, and the tensor that each such input stands for."""
    names: dict[str, str] = {}

    def change(node: ex.Expr) -> ex.Expr:
        if not isinstance(node, ex.Access) or node.tensor not in algorithm.inputs:
            return node
        index = tuple(x for i in node.index for x in _digits(i, sizes))
        if len(index) == len(node.index):
            return node
        new = next((n for n, old in names.items() if old == node.tensor), None) or fresh_name(f"{node.tensor}_blocks", {*algorithm.names, *names})
        names[new] = node.tensor
        return replace(node, tensor=new, index=index)

    definitions = tuple(replace(d, expr=d.expr.transform(change)) for d in algorithm.definitions)
    shapes = {len(a.index) for d in definitions for a in ex.accesses(d.expr) if a.tensor in names}
    if not names or len(shapes) > 1:
        return algorithm, {}
    read = {a.tensor for d in definitions for a in ex.accesses(d.expr)} | {t for _, t, _ in algorithm.extents} | {a.tensor for _, f in algorithm.formulas for a in ex.accesses(f)}
    kept = tuple(t for t in algorithm.inputs if t in read)
    return replace(algorithm, inputs=(*kept, *names)).with_definitions(definitions), names


def _restored(p: Primitive, names: dict[str, str]) -> Primitive:
    """Return a statement whose hints for loads name the tensor itself, each once."""
    if not isinstance(p, Evict):
        return p
    return replace(p, args=tuple({name: replace(a, name=name) for a in p.args for name in (names.get(a.name, a.name),)}.values()))


def _digits(index: ex.Expr, sizes: dict[str, int]) -> tuple[ex.Expr, ...]:
    """Return the labels of ``128 * q + c``, of which ``c`` counts 128 elements; any other index as it is."""
    form = {atom: times for atom, times in linear_form(index).items() if times}
    match sorted(form.items(), key=lambda at: at[1]):
        case [(ex.Label(inner), 1), (ex.Label(outer), size)] if sizes.get(inner) == size > SHALLOW and outer in sizes:
            return ex.Label(outer), ex.Label(inner)
    return (index,)
