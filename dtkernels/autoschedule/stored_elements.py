"""Compute and store an elementwise Func in the kernel of another Func that reads the same elements.

Two gradients that products take, each in a kernel of its own, read the incoming gradient twice; so do a gradient and its column sums::

    d_u[x, y] = d[x, y] * v[x, y];    d_v[x, y] = d[x, y] * u[x, y];    d_bias[y] = rsum(d[x, y] * v[x, y], x);
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ..codegen.powers_of_two import next_power_of_two
from ..lang import expr as ex
from ..lang.algorithm import Algorithm
from ..lang.schedule import Bare, FuseAt, Primitive
from ..lang.schedule_checks import reduction_labels
from .problem import WHOLE_SIDE, SchedulingProblem
from .rules.gemm_row_reduction import reduced_product_labels
from .rules.reduction import ROW_LIMIT

ROW = 16  #: bytes that rows start at multiples of, for products to load them as they are
Members = Callable[[str], list[str]]


def stored_elements(shape: SchedulingProblem, roots: list[str], members: Members) -> Iterator[tuple[Primitive, ...]]:
    """Yield ways to compute one of ``roots``, Funcs with kernels of their own, in the kernel of another, which stores it.

    ``members``: what a kernel computes. A Func whose rows start anywhere stays: its own kernel can lay them out (``align``). A result goes to the sums of its
    own rows alone: fused_outputs (output_fusion.py) places it in kernels of other results.
    """
    for func in roots:
        result = func in shape.outputs
        if not _is_elementwise(shape, members(func)) or not result and shape.row_stride(func) * shape.itemsize % ROW:
            continue
        for host in (h for h in roots if h != func and not (result and h in shape.outputs)):
            loop = _loop_along(shape, func, host, members) if result else _loop(shape, func, host, members)
            if loop and {func, *_read(shape, members(func))} & _read(shape, members(host)) and _runs_before_readers(shape, func, host, members):
                yield (FuseAt(func, "fuse_at", (host, loop)), *([] if result else [Bare(func, "store")]))


def with_stored_outputs(shape: SchedulingProblem, stored: tuple[str, ...]) -> tuple[str, ...]:
    """Return the outputs and those of the ``stored`` Funcs that are made element for element: kernels write both."""
    return (*shape.outputs, *(f for f in stored if f not in shape.outputs and _is_elementwise(shape, [f])))


def products_of_outputs(shape: SchedulingProblem) -> set[str]:
    """Return the outputs that are products and of which other outputs are made, but not as an operand of another product.

    None whose rows are reduced: what is made of the sums has to fit the product as it is stored, rounded. A softmax of rounded scores does
    not add up to 1 with the sum of unrounded ones.
    """
    made = shape.algorithm.needed_by(shape.outputs)
    plain = (o for o in shape.outputs if shape.dots(o) and not any(reduced_product_labels(shape, f, o) for f in made))
    read = {f for o in shape.outputs for f in shape.algorithm.needed_by((o,)) if f != o}
    return {o for o in plain if o in read and not feeds_another_output(shape, o)}


def feeds_another_output(shape: SchedulingProblem, output: str) -> bool:
    """Return whether another output is a product of this one."""
    return any(isinstance(s, ex.Access) and s.tensor == output for o in shape.outputs for dot in shape.dots(o) for s in (dot.left, dot.right))


def is_compared_for_equality(algorithm: Algorithm, func: str) -> bool:
    """Return whether an element of ``func`` that contains sums is compared for equality: other tiles may add up to another value.

    An extremum of what is so compared, and hence stored, is one of the stored values, whatever the tiles.
    """
    match algorithm[func].expr:
        case ex.Reduce("max" | "min", ex.Access(made), _) if made in algorithm and is_compared_for_equality(algorithm, made):
            return False
    parts = [n for f in algorithm.needed_by((func,)) for n in algorithm[f].expr.walk()]
    if not any(isinstance(n, ex.Dot) or isinstance(n, ex.Reduce) and n.kind == "sum" for n in parts):
        return False
    nodes = [n for d in algorithm.definitions for n in d.expr.walk()]
    tests = [n.children() for n in nodes if isinstance(n, ex.Binary) and n.op in ("==", "!=")]
    tensors = [[side.tensor for side in sides if isinstance(side, ex.Access)] for sides in tests]
    return any(func in named for named, sides in zip(tensors, tests) if len(named) == len(sides))


def is_compared_across_tiles(shape: SchedulingProblem, func: str, roots: set[str]) -> bool:
    """Return whether ``func``, compared for equality, would be made more than once: not where one kernel makes its rows whole for all that reduces them."""
    users = [d for d in shape.algorithm.definitions if any(a.tensor == func for a in ex.accesses(d.expr))]
    along = {x for d in users for n in ex.reductions(d.expr) if any(a.tensor == func for a in ex.accesses(n)) for x in n.labels}
    whole = len(roots) == 1 and all(shape.sizes[x] <= WHOLE_SIDE for x in along)
    return not whole and is_compared_for_equality(shape.algorithm, func)


def _is_elementwise(shape: SchedulingProblem, members: list[str]) -> bool:
    nodes = (n for m in members for n in shape.algorithm[m].expr.walk())
    return not any(isinstance(n, (ex.Reduce, ex.Dot, ex.Scan)) for n in nodes) and len({shape.algorithm[m].labels for m in members}) == 1


def _loop(shape: SchedulingProblem, func: str, host: str, members: Members) -> str | None:
    """Return the loop of ``host`` to compute ``func`` in: ``host`` is made of the same elements, or sums them down columns."""
    own, outer, reduced = shape.algorithm[func].labels, shape.algorithm[host].labels, reduction_labels(shape.algorithm, host)
    if _is_elementwise(shape, members(host)):
        return own[-1] if own == outer and own else None
    down = len(reduced) == 1 and members(host) == [host] and not shape.dots(host) and isinstance(shape.algorithm[host].expr, ex.Reduce)
    return reduced[0] if down and own == (*reduced, *outer) else None


def _loop_along(shape: SchedulingProblem, func: str, host: str, members: Members) -> str | None:
    """Return the loop of ``host``, whose kernel makes nothing but sums of whole rows of ``func``, and what these are made of element by element."""
    own, outer, reduced = shape.algorithm[func].labels, shape.algorithm[host].labels, reduction_labels(shape.algorithm, host)
    sums = [m for m in members(host) if reduction_labels(shape.algorithm, m)]
    alike = all(reduction_labels(shape.algorithm, m) == reduced and shape.algorithm[m].labels == outer and not shape.dots(m) for m in sums)
    held = math.prod(next_power_of_two(shape.sizes[x]) for x in reduced) <= ROW_LIMIT // 2
    return reduced[-1] if reduced and alike and held and own == (*outer, *reduced) and host not in shape.algorithm.needed_by((func,)) else None


def _read(shape: SchedulingProblem, members: list[str]) -> set[str]:
    """Return the tensors that a kernel reads at every element."""
    labels = set(shape.algorithm[members[0]].labels) | set(reduction_labels(shape.algorithm, members[0]))
    found = (a for m in members for a in ex.accesses(shape.algorithm[m].expr) if a.tensor not in members)
    return {a.tensor for a in found if labels <= {i.name for i in a.index if isinstance(i, ex.Label)}}


def _runs_before_readers(shape: SchedulingProblem, func: str, host: str, members: Members) -> bool:
    """Return whether nothing that ``host`` waits for reads ``func``."""
    waits = set(shape.algorithm.needed_by((host,))) - {func, *members(host)}
    return host not in shape.algorithm.needed_by((func,)) and not any(func in shape.algorithm.needed_by((w,)) for w in waits)
