"""Set eviction policies: a tensor that several loops read stays in the cache until the last of them: ``f.evict(A:reread)``.

Before::

    for y: total <- total + load(A[x, y])
    for y: store(f[x, y], load(A[x, y]) / total)

After::

    for y: total <- total + load(A[x, y], evict last)
    for y: store(f[x, y], load(A[x, y], evict first) / total)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from ...ir.nest import Kernel, LoadLet, Loop, Statement, is_load, statements
from ...lower.schedule_options import KernelOptions


def add_eviction_hints(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Mark the loads of each tensor that the schedule says is read again."""
    body = kernel.body
    for tensor in (t for t, policy in options.evict().items() if policy == "reread"):
        body = with_rereads_kept(body, tensor)
    return replace(kernel, body=body)


def with_rereads_kept(body: tuple[Statement, ...], buffer: str) -> tuple[Statement, ...]:
    """Mark loads of ``buffer`` evict-last before the last loop that has any, evict-first there. Without loops, mark all evict-first."""
    reading = [s for s in body if any(_loads(x, buffer) for x in statements((s,)))]
    loops = [s for s in reading if isinstance(s, Loop)]
    if loops and len(reading) == 1:
        return tuple(replace(s, body=with_rereads_kept(s.body, buffer)) if s is loops[0] else s for s in body)
    return tuple(_marked(s, buffer, "first" if not loops or s is loops[-1] else "last") for s in body)


def _marked(s: Statement, buffer: str, policy: str) -> Statement:
    if isinstance(s, Loop):
        return replace(s, body=tuple(_marked(x, buffer, policy) for x in s.body))
    return replace(s, value=replace(s.value, evict=policy)) if _loads(s, buffer) else s


def _loads(s: Statement, buffer: str) -> TypeGuard[LoadLet]:
    return is_load(s) and s.value.buffer == buffer
