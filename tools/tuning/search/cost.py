"""Estimate cost from the loop nest: whether a candidate fits, and its rank (traffic + 1) * waves."""

from __future__ import annotations

from dataclasses import dataclass

from dtkernels.codegen.analysis.resources import Resources, check_resources
from dtkernels.codegen.ir.nest import Fetch, Kernel, Let, Load, Loop, Put, Statement, Store, TileDot, axes_of
from dtkernels.codegen.target import Target

OVERHEAD = 1.5e-6  #: seconds of a program besides memory traffic and products
CACHED = 2.5  #: bandwidth of the L2 over that of memory
FLOPS = {2: 800e12, 4: 50e12}  #: operations per second that a large GPU reaches, by bytes of an operand


@dataclass(frozen=True)
class Cost:
    """An estimate; only its order is meaningful."""

    seconds: float
    programs: int
    resources: Resources


def cost(kernels: tuple[Kernel, ...], sizes: dict[str, int], itemsizes: dict[str, int], to: Target) -> Cost:
    """Estimate running the kernels one after another. Raises DTError if the GPU cannot run one."""
    total, programs, most = 0.0, 0, None
    for kernel in kernels:
        r = check_resources(kernel, sizes, itemsizes, to)
        count = blocks(kernel, sizes)
        resident = max(1, min(2048 // r.threads, to.shared_bytes // max(r.shared_bytes, 1), to.registers // max(1, r.registers * r.threads)))
        slots = min(count, to.multiprocessors * resident)
        parts = {g.label: g.parts for g in kernel.grid if g.parts} | {w.part: w.parts for w in kernel.workspaces}
        shared = max((g.parts for g in kernel.grid), default=0) or 1
        traffic, flops = (n / shared for n in _work(kernel.body, 1.0, {**sizes, **parts}, itemsizes))
        moving = traffic * slots / (to.bandwidth * CACHED)
        multiplying = flops * slots / FLOPS[min(itemsizes.values(), default=2) if min(itemsizes.values(), default=2) in FLOPS else 4]
        waves = max(1, -(-count // max(slots, 1)))
        total += waves * (max(moving, multiplying) + OVERHEAD)
        programs += count
        most = r if most is None or r.registers > most.registers else most
    assert most is not None
    return Cost(total, programs, most)


def blocks(kernel: Kernel, sizes: dict[str, int]) -> int:
    """Return the programs of a launch, before a persistent launch limits them."""
    count = 1
    for g in kernel.grid:
        count *= g.parts or -(-sizes[g.label] // g.block)
    return count


def _length(axis, sizes: dict[str, int]) -> int:
    return axis.tile or sizes[axis.label]


def _elements(axes, sizes: dict[str, int]) -> int:
    count = 1
    for a in axes:
        count *= _length(a, sizes)
    return count


def _work(body: tuple[Statement, ...], trips: float, sizes: dict[str, int], itemsizes: dict[str, int]) -> tuple[float, float]:
    """Return (bytes moved, operations of products) of one program."""
    traffic = flops = 0.0
    for s in body:
        if isinstance(s, Loop):
            extent = sizes.get(s.axis.label, 1)  # parts of a sum made by another kernel, as many as its programs
            steps = max(1.0, extent / max(s.axis.tile or extent, 1)) * (0.0 if s.tail else 0.5 if s.end is not None else 1.0)
            inner = _work(s.body, trips * max(steps, 0.01), sizes, itemsizes)
            traffic, flops = traffic + inner[0], flops + inner[1]
            continue
        if isinstance(s, (Store, Put)):
            traffic += trips * _elements(s.axes, sizes) * itemsizes.get(s.buffer, 4)
        for n in s.value.walk() if hasattr(s, "value") else ():
            if isinstance(n, (Load, Fetch)):
                axes = s.axes if isinstance(s, Let) else axes_of(n)
                traffic += trips * _elements(axes, sizes) * itemsizes.get(n.buffer, 4)
            elif isinstance(n, TileDot):
                flops += 2 * trips * _elements(axes_of(n.left) | axes_of(n.right), sizes)
    return traffic, flops
