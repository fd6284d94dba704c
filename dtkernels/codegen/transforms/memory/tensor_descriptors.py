"""Access buffers through tensor descriptors (TMA): ``f.descriptor(A, f)``.

Before::

    A = load A_ptr + x * stride + k     where x < size_x and k < size_k
    store f_ptr + x * stride + y, acc   where x < size_x and y < size_y

After::

    A = A_desc.load([x_first, k_start])
    f_desc.store([x_first, y_first], acc)

A descriptor needs a unit stride in the last dimension; its start and other strides must be multiples of 16 bytes. Only the call can tell
this, so both forms are emitted and the wrapper chooses. It also chooses pointers on GPUs without TMA. Outside the extents a descriptor
reads 0 and writes nothing. The wrapper makes descriptors and passes them: a kernel that makes its own takes 0.8 us for each on an H200, in
every program.

A tile may be moved by a number, ``A[x + r, c]`` with a single ``r``, but in the last dimension, where boxes begin at multiples of 16 bytes (an H100 reports an
illegal instruction otherwise). Behind the extent of ``x`` it then holds elements of ``A``: such a tile is loaded along labels of results alone, where what lies
behind the extent is not stored. ``A[x + 0]``, of another extent than ``x``, has a descriptor that ends where the shorter of both does.

Dimensions that a merged label counts together, ``W[p // len(c), p % len(c), k]``, are one in the box; the call also tells whether they follow each other
without gaps.

A fetched tile ``t`` that is added to a product is written as ``dot(a, b) - -t``, which is the same number. With ``dot(a, b) + t`` Triton
would initialize the accumulator of the product with ``t``, and the matrix units would wait until registers hold it.
"""

from __future__ import annotations

from dataclasses import replace

from ....lang.errors import DTError
from ....lang.errors import Position as Place
from ...ir.merged_dimensions import merged_runs
from ...ir.nest import (
    Axis,
    Const,
    DescriptorLoad,
    DescriptorStore,
    Joined,
    Kernel,
    Let,
    Load,
    Local,
    Loop,
    Op,
    Position,
    Start,
    Statement,
    Store,
    Tile,
    TileDot,
    TileReduce,
    TileScan,
    axes_of,
    has_matrix_product,
    map_values,
    statements,
    values,
)
from ..dce import eliminate_dead_code

WIDEST = 256  #: most elements of a box along one dimension
MOST_DIMENSIONS = 5


def use_descriptors(kernel: Kernel, at: Place | None = None) -> Kernel:
    """Access the buffers in ``kernel.descriptors`` through descriptors. Raises DTError where a box cannot express the access."""
    fixed = _reduced(kernel.body)

    def one(s: Statement) -> Statement:
        if isinstance(s, Loop):
            return replace(s, body=tuple(one(x) for x in s.body))
        if isinstance(s, Let) and isinstance(s.value, Load) and s.value.buffer in kernel.descriptors and not s.value.repeats_each_step:
            if s.value.whole:
                raise _refused(s.value.buffer, "its elements stand in an index", "tensors of numbers", at)
            start, box, joined = _box(s.value.buffer, s.value.index, at, fixed, s.value.checked)
            return replace(s, value=DescriptorLoad(s.value.buffer, start, box, joined))
        if isinstance(s, Store) and s.buffer in kernel.descriptors:
            if s.onto == "ordered sum":  # bulk additions of one program are in no order
                raise _refused(s.buffer, "additions in a fixed order", "accumulate_at without ordered, or blocks of one tile", at)
            if axes_of(s.value) != frozenset(s.axes):
                raise _refused(s.buffer, "a value without all of its labels is stored", "a store of whole tiles", at)
            start, box, joined = _box(s.buffer, s.index, at)
            return DescriptorStore(s.buffer, start, box, s.value, s.axes, s.origin, s.onto, joined)
        return s

    body = eliminate_dead_code(tuple(one(s) for s in kernel.body))
    return replace(kernel, name=f"{kernel.name}_descriptor", body=_products_first(body))


def _products_first(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Rewrite ``dot(a, b) + t`` as ``dot(a, b) - -t``, where ``t`` has fewer dimensions and is fetched by a descriptor."""
    fetched = {s.name for s in statements(body) if isinstance(s, Let) and isinstance(s.value, DescriptorLoad)}

    def change(tile: Tile) -> Tile:
        match tile:
            case Op("+", (TileDot() as dot, Local(name) as t)) | Op("+", (Local(name) as t, TileDot() as dot)):
                if name in fetched and axes_of(t) < axes_of(dot):
                    return Op("-", (dot, Op("neg", (t,))))
        return tile

    return map_values(body, lambda value: value.transform(change))


def use_pointers(kernel: Kernel) -> Kernel:
    """Return the form that uses pointers alone, without warp specialization, which needs descriptor loads.

    Kernels with matrix products are not persistent in this form: Triton does not pipeline pointer loads from one block into the next.
    """

    stays = kernel.persistent and not (kernel.descriptors and has_matrix_product(kernel.body))
    return replace(without_warp_specialization(kernel), persistent=stays, tail=())


def without_warp_specialization(kernel: Kernel) -> Kernel:
    """Remove warp specialization from every loop of the kernel."""

    def one(s: Statement) -> Statement:
        if not isinstance(s, Loop):
            return s
        return replace(s, body=tuple(one(x) for x in s.body), options=tuple(o for o in s.options if o[0] != "warp_specialize"))

    return replace(kernel, body=tuple(one(s) for s in kernel.body))


def _reduced(body: tuple[Statement, ...]) -> frozenset[Axis]:
    """Return the axes along which values are added up or scanned."""
    found = {s.axis for s in statements(body) if isinstance(s, Loop) and s.reduces}
    for n in (n for value in values(body) for n in value.walk()):
        found |= {*n.axes} if isinstance(n, (TileReduce, TileDot)) else {n.axis} if isinstance(n, TileScan) else set()
    return frozenset(found)


def _box(
    buffer: str, index: tuple[Tile, ...], at: Place | None, fixed: frozenset[Axis] | None = None, checked: tuple[int, ...] = ()
) -> tuple[tuple[Tile, ...], tuple[Axis | None, ...], tuple[Joined, ...]]:
    """Return where a box starts, its axes, and the dimensions that are one in it. ``fixed``: axes along which its tile may not be shifted; None for all.

    A dimension of a ``checked`` index may have another extent than the label: the box starts there at ``first + 0`` (see ``described_dimensions``).
    """
    runs = {r.first: r for r in merged_runs(index).values() if isinstance(r.whole, Position) and not r.whole.axis.scalar}
    inside = {n for r in runs.values() for n in range(r.first + 1, r.last + 1)}
    other = [n in checked and n not in runs for n in range(len(index)) if n not in inside]
    index = tuple(runs[n].whole if n in runs else i for n, i in enumerate(index) if n not in inside)
    start: list[Tile] = []
    box: list[Axis | None] = []
    for i, of_other_extent in zip(index, other):
        shifted = _shifted(i)
        if shifted is not None and (shifted[1] is None or fixed is not None and shifted[0] not in fixed and len(start) < len(index) - 1):
            axis, shift = shifted if shifted[1] is not None or not of_other_extent else (shifted[0], Const(0))
            i = Position(axis)
            if i.axis.tile > WIDEST:
                raise _refused(buffer, f"a tile of {i.axis.tile} along {i.axis.label}", f"at most {WIDEST}", at)
            if i.axis.padded:
                raise _refused(buffer, f"a padded tile along {i.axis.label}", "tiles that fill their block", at)
            if i.axis in box:
                raise _refused(buffer, f"{i.axis.label} along two dimensions", "a label along each", at)
            first: Tile = Start(i.axis) if i.axis.tile or i.axis.half == 2 else Const(0)
            start.append(first if shift is None else Op("+", (first, shift)))
            box.append(i.axis)
        elif axes_of(i):
            raise _refused(buffer, f"the index {i}", "labels by themselves, and arithmetic on single indices", at)
        else:
            start.append(i)
            box.append(None)
    if not index or box[-1] is None:
        raise _refused(buffer, "its last dimension is read element by element", "a tile of its last label", at)
    if len(index) > MOST_DIMENSIONS:
        raise _refused(buffer, f"{len(index)} dimensions", f"at most {MOST_DIMENSIONS}", at)
    return tuple(start), tuple(box), tuple(runs[n].joined for n in sorted(runs))


def _shifted(index: Tile) -> tuple[Axis, Tile | None] | None:
    """Return the axis of a tile that ``index`` moves by one number, and that number: None without one. None for any other index."""
    match index:
        case Position(axis) if not axis.scalar:
            return axis, None
        case Op("+", (a, b)) if not axes_of(b) and (found := _shifted(a)):
            return found[0], b if found[1] is None else Op("+", (found[1], b))
        case Op("+", (a, b)) if not axes_of(a) and (found := _shifted(b)):
            return found[0], a if found[1] is None else Op("+", (a, found[1]))
        case Op("-", (a, b)) if not axes_of(b) and (found := _shifted(a)):
            return found[0], Op("neg", (b,)) if found[1] is None else Op("-", (found[1], b))
    return None


def _refused(buffer: str, found: str, allowed: str, at: Place | None) -> DTError:
    return DTError(f"descriptor({buffer})", found=found, allowed=allowed, at=at)
