"""Emit the loads of scalars that are one-element tensors on the device."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def scalar_loads(scalars: Iterable[str], integers: Collection[str], module: str) -> list[str]:
    """Return the lines that load scalars: as float32, and ``integers`` in 32 bits at least. Arithmetic on them is not that of a narrower tensor."""
    lines = []
    for s in scalars:
        if s in integers:
            lines.append(f"    if {s}_on_device:\n        {s} = {module}.load({s})\n        if {s}.dtype.primitive_bitwidth < 32:\n            {s} = {s}.to({module}.int32)")
        else:
            lines.append(f"    if {s}_on_device:\n        {s} = {module}.load({s}).to({module}.float32)")
    return lines
