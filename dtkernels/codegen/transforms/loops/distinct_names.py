"""Rename a value of an inner loop that would overwrite a value that is read after the loop.

Before::

    A0 = A[k]
    for y in 0 .. size_y:    A0 = A[y]; acc <- acc + A0
    f[k] := acc + A0

After::

    A0 = A[k]
    for y in 0 .. size_y:    A0_in_y = A[y]; acc <- acc + A0_in_y
    f[k] := acc + A0
"""

from __future__ import annotations

from dataclasses import replace

from ....algebra.rules.canonicalize import fresh_name
from ...ir.nest import Accumulator, Assign, Kernel, Let, Local, Loop, Statement, Valued, names_in, statements
from ...lower.schedule_options import KernelOptions
from ..dce import tiles_of

Names = dict[str, str]


def keep_names_apart(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Give each value that would overwrite another one still to be read a name of its own."""
    return replace(kernel, body=_without_clashes(kernel.body, frozenset(), frozenset(), names_in(kernel.body)))


def _without_clashes(body: tuple[Statement, ...], defined: frozenset[str], later: frozenset[str], taken: set[str]) -> tuple[Statement, ...]:
    """Rename what a loop redefines. ``defined``: names before ``body``; ``later``: names that are read after it."""
    result: list[Statement] = []
    for i, s in enumerate(body):
        if isinstance(s, Loop):
            after = later | _read(body[i + 1 :])
            clash = {n for n in _defines(statements(s.body)) if n in defined and n in after}
            inner = _renamed(s.body, {n: fresh_name(f"{n}_in_{s.axis.name}", taken) for n in sorted(clash)}, {}) if clash else s.body
            s = replace(s, body=_without_clashes(inner, defined, after, taken))
        defined |= _defines((s,))
        result.append(s)
    return tuple(result)


def _renamed(body: tuple[Statement, ...], names: Names, known: Names) -> tuple[Statement, ...]:
    """Rename the definitions in ``body`` and their later uses; ``known`` holds the renamings so far."""
    result: list[Statement] = []
    known = dict(known)
    for s in body:
        if isinstance(s, Loop):
            result.append(replace(s, body=_renamed(s.body, names, known)))
            continue
        if isinstance(s, Valued):
            s = replace(s, value=s.value.transform(lambda n: replace(n, name=known[n.name]) if isinstance(n, Local) and n.name in known else n))
        if isinstance(s, (Let, Accumulator)) and s.name in names:
            known[s.name] = names[s.name]
        if isinstance(s, (Let, Accumulator, Assign)) and s.name in known:
            s = replace(s, name=known[s.name])
        result.append(s)
    return tuple(result)


def _defines(body) -> frozenset[str]:
    return frozenset(s.name for s in body if isinstance(s, (Let, Accumulator)))


def _read(body: tuple[Statement, ...]) -> frozenset[str]:
    """Return the names that ``body`` reads before it defines them."""
    read: set[str] = set()
    defined: set[str] = set()
    for s in body:
        inside = statements((s,))
        read |= {n.name for x in inside for t in tiles_of(x) for n in t.walk() if isinstance(n, Local)} - defined
        defined |= _defines((s,))
    return frozenset(read)
