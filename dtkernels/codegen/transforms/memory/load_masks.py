"""Sink a choice by data, or one for a whole tile, into the mask of the load that it chooses: elements that are not chosen are not read.

Before::

    A = load(A[m, k])
    acc <- acc + dot(where(e == g, A, 0), W)

After::

    A = load(A[m, k] where e == g)
    acc <- acc + dot(A, W)

The tile then goes to the matrix units as it is loaded, through asynchronous copies, and rows that no product needs cost no bandwidth. Of conditions
on labels alone, only those that hold for a whole tile or for none of it, as of the taps that a phase of a transposed convolution lacks: others become
bounds of loops (loop_partition.py).
"""

from __future__ import annotations

from dataclasses import replace

from ...ir.nest import (
    Accumulator,
    Assign,
    Const,
    Index,
    Kernel,
    Let,
    LoadLet,
    Local,
    Loop,
    Op,
    Position,
    Statement,
    axes_of,
    is_load,
    map_values,
    statements,
    values,
)
from ...lower.schedule_options import KernelOptions
from ..loops.loop_partition import without_aliases


def sink_masks_into_loads(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Load rows under the condition that chooses them, or else 0."""
    data = frozenset(s.name for s in statements(kernel.body) if is_load(s))
    sinking = _Sinking(data, frozenset(kernel.descriptors) | frozenset(options.descriptors()))
    body = sinking.body(kernel.body, frozenset())
    return kernel if body == kernel.body else replace(kernel, body=without_aliases(body))


class _Sinking:
    def __init__(self, data: frozenset[str], descriptors: frozenset[str]):
        self.data, self.descriptors = data, descriptors

    def body(self, body: tuple[Statement, ...], defined: frozenset[str]) -> tuple[Statement, ...]:
        """Rewrite ``body``, before which the names and indices ``defined`` are."""
        result: list[Statement] = []
        for i, s in enumerate(body):
            if isinstance(s, Index):
                defined |= {s.axis.name}
            if isinstance(s, Loop):
                s = replace(s, body=self.body(s.body, defined))
            elif is_load(s) and (found := self._choice(s, body[i + 1 :], defined)):
                s = replace(s, value=replace(s.value, only=found.args[0]))
                rest = map_values(body[i + 1 :], lambda v, old=found: v.transform(lambda n: n.args[1] if n == old else n))  # type: ignore[misc]
                return (*result, s, *self.body(rest, defined | {s.name}))
            defined |= {s.name} if isinstance(s, (Let, Accumulator)) else set()
            result.append(s)
        return tuple(result)

    def _choice(self, s: LoadLet, later: tuple[Statement, ...], defined: frozenset[str]) -> Op | None:
        """Return the choice between rows that ``s`` loads and 0, by a condition on data, or one for the whole tile, that is known before ``s``."""
        load, last = s.value, s.value.index[-1] if s.value.index else None
        if load.buffer in self.descriptors or load.only is not None or load.other or load.shift:
            return None
        nodes = [n for v in values(later) for n in v.walk()]
        if sum(isinstance(n, Local) and n.name == s.name for n in nodes) != 1:
            return None
        contiguous = {last.axis} if isinstance(last, Position) and not last.axis.scalar else set()
        changing = {x.name for x in statements(later) if isinstance(x, (Let, Assign))}
        for n in nodes:
            match n:
                case Op("where", (condition, Local(name), Const(0))) if name == s.name and axes_of(condition) <= set(s.axes) - contiguous:
                    used = {x.name for x in condition.walk() if isinstance(x, Local)}
                    known = used | {x.axis.name for x in condition.walk() if isinstance(x, Position)} <= defined
                    chooses = s.axes and not axes_of(condition) or contiguous and used & self.data
                    return n if chooses and known and not used & changing else None
        return None
