"""Count what a kernel's loop nest moves and multiplies, by walking it: a check on what schedules make kernels do."""

from dtkernels.codegen.ir.nest import DescriptorLoad, DescriptorStore, Kernel, Let, Load, Loop, Statement, Store, TileDot, axes_of


def blocks(kernel: Kernel, sizes: dict[str, int]) -> int:
    """Return the programs of a launch, before a persistent launch limits them."""
    count = 1
    for g in kernel.grid:
        count *= g.parts or -(-sizes[g.label] // g.block)
    return count


def _length(axis, sizes: dict[str, int]) -> int:
    return axis.tile or sizes[axis.label]


def elements(axes, sizes: dict[str, int]) -> int:
    count = 1
    for a in axes:
        count *= _length(a, sizes)
    return count


def work_of(body: tuple[Statement, ...], trips: float, sizes: dict[str, int], itemsizes: dict[str, int]) -> tuple[float, float]:
    """Return (bytes moved, operations of products) of one program."""
    traffic = flops = 0.0
    for s in body:
        if isinstance(s, Loop):
            extent = sizes.get(s.axis.label, 1)  # parts of a sum made by another kernel, as many as its programs
            steps = max(1.0, extent / max(s.axis.tile or extent, 1)) * (0.0 if s.tail else 0.5 if s.end is not None else 1.0)
            inner = work_of(s.body, trips * max(steps, 0.01), sizes, itemsizes)
            traffic, flops = traffic + inner[0], flops + inner[1]
            continue
        if isinstance(s, (Store, DescriptorStore)):
            traffic += trips * elements(s.axes, sizes) * itemsizes.get(s.buffer, 4)
        for n in s.value.walk() if hasattr(s, "value") else ():
            if isinstance(n, (Load, DescriptorLoad)):
                axes = s.axes if isinstance(s, Let) else axes_of(n)
                traffic += trips * elements(axes, sizes) * itemsizes.get(n.buffer, 4)
            elif isinstance(n, TileDot):
                flops += 2 * trips * elements(axes_of(n.left) | axes_of(n.right), sizes)
    return traffic, flops
