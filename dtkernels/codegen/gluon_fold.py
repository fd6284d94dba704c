"""Rewrites of a nest that suit the units of the GPU and change no value beyond rounding.

Before::

    e = exp(s - shift)                      # a subtraction and a multiplication for each element, and guards for small results

After::

    shift_log2 = shift * log2(e)
    e = exp2(s * log2(e) - shift_log2)      # one fused operation for each element, as the units count in powers of two
"""

from __future__ import annotations

import math
from dataclasses import replace

from .nest import Const, Kernel, Let, Local, Loop, Op, Statement, Tile, axes_of
from .passes import natural_order

LOG2E = Const(math.log2(math.e))


def fold(kernel: Kernel) -> Kernel:
    """The kernel with the exponentials in its loops as powers of two."""
    return replace(kernel, body=tuple(replace(s, body=_powers(s.body)) if isinstance(s, Loop) else s for s in kernel.body))


def _powers(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    made: list[Statement] = []
    known: dict[Tile, Local] = {}

    def one(n: Tile) -> Tile:
        match n:
            case Op("exp", (Op("-", (a, shift)),)) if axes_of(shift) < axes_of(a):
                if shift not in known:
                    axes = natural_order(shift)
                    known[shift] = Local(f"{shift.name if isinstance(shift, Local) else f'shift_{len(made)}'}_log2", axes)
                    made.append(Let(known[shift].name, Op("*", (shift, LOG2E)), axes))
                return Op("exp2", (Op("-", (Op("*", (a, LOG2E)), known[shift])),))
            case Op("exp", (a,)) if axes_of(a):
                return Op("exp2", (Op("*", (a, LOG2E)),))
        return n

    for s in body:
        changed = replace(s, value=s.value.transform(one)) if hasattr(s, "value") else s  # shifts are named before their use
        if hasattr(s, "name"):
            known = {shift: name for shift, name in known.items() if not any(isinstance(n, Local) and n.name == s.name for n in shift.walk())}  # a new value under an old name
        made.append(changed)
    return tuple(made)
