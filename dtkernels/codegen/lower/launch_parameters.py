"""Derive launch parameters from a finished body: buffers and scalars, grid, and the order of programs."""

from __future__ import annotations

from dataclasses import replace

from ...lang.schedule import Map
from ..ir import nest
from ..ir.nest import Assign, GridLabel, GridStep, Index, Kernel, Let, Load, Store, statements
from .program_order import grid_order
from .schedule_options import KernelOptions


def with_launch_parameters(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Set the reads, scalars, grid and options of the kernel from its body and the schedule."""
    algorithm = options.algorithm
    read, scalars = _reads_and_scalars(kernel)
    reads = tuple(t for t in (*algorithm.inputs, *algorithm.funcs, *(w.name for w in kernel.workspaces)) if t in read)
    grid, order = _grid(kernel, options)
    return replace(
        kernel,
        reads=reads,
        scalars=tuple(s for s in algorithm.scalars if s in scalars),
        grid=grid,
        order=order,
        workspaces=tuple(w for w in kernel.workspaces if w.name in reads + kernel.writes),
        **options.buffer_fields(reads, kernel.writes),
    )


def _reads_and_scalars(kernel: Kernel) -> tuple[frozenset[str], frozenset[str]]:
    """Return the buffers that the body reads, and the scalars."""
    values = [s.value for s in statements(kernel.body) if isinstance(s, (Let, Assign, Store))]
    nodes = [n for v in values for n in v.walk()]
    indices = [n for s in statements(kernel.body) if isinstance(s, Store) for i in s.index for n in i.walk()]
    reads = frozenset(n.buffer for n in nodes if isinstance(n, Load)) | frozenset(s.buffer for s in statements(kernel.body) if isinstance(s, Store) and s.onto not in ("", "elsewhere"))
    return reads, frozenset(n.name for n in nodes + indices if isinstance(n, nest.Scalar))


def _grid(kernel: Kernel, options: KernelOptions) -> tuple[tuple[GridLabel, ...], tuple[GridStep, ...]]:
    """Return the blocks that programs compute, and the order in which program ids visit them."""
    blocks = options.schedule.sizes(options.root, "block")
    blocked = {s.axis.label: s for s in statements(kernel.body) if isinstance(s, Index) and s.start.startswith("block")}
    whole = {label: (s.axis.whole or s.axis).tile for label, s in blocked.items() if s.start == "block" and not s.axis.padded}  # a merge has its own
    own = options.algorithm[options.root].labels
    grid = tuple(GridLabel(x, whole.get(x) or blocks[x]) for x in (*own, *(x for x in blocks if x not in own)) if x in blocked)
    order = grid_order(options.schedule.of(options.root, "map", Map), grid)
    part = next((w for w in kernel.workspaces if w.name in kernel.writes), None)
    if part is None or not part.parts:
        return grid, order
    return (GridLabel(part.part, 1, part.parts), *grid), (GridStep(part.part), *order)
