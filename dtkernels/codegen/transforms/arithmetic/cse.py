"""Common subexpression elimination: name a costly subexpression that occurs more than once.

Before::

    a <- a + exp(s) * v
    b <- b + exp(s)

After::

    exp_1 = exp(s)
    a <- a + exp_1 * v
    b <- b + exp_1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from ....lang.expr import SLOW
from ...ir import nest
from ...ir.layout import preferred_dim_order
from ...ir.nest import (
    Accumulator,
    Assign,
    Guard,
    Kernel,
    Let,
    Local,
    Loop,
    Op,
    Statement,
    Store,
    Tile,
    TileDot,
    TileReduce,
    map_values,
    statements,
)
from ...ir.value_type import value_type
from ...lower.schedule_options import KernelOptions

_COSTLY = frozenset({*SLOW, "/", "where"})


def eliminate_common_subexpressions(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Name costly subexpressions that occur more than once in one straight-line run of statements."""
    moving = {s.name for s in statements(kernel.body) if isinstance(s, Accumulator)}
    return replace(kernel, body=_share(kernel.body, moving, nest.names_in(kernel.body)))


def _share(body: tuple[Statement, ...], moving: set[str], taken: set[str]) -> tuple[Statement, ...]:
    body = tuple(replace(s, body=_share(s.body, moving, taken)) if isinstance(s, Loop) else s for s in body)
    known = {s.value: Local(s.name, s.axes, value_type(s.value)) for s in body if isinstance(s, Let) and _is_worth_sharing(s.value, moving)}
    body = _reuse(body, known)
    while True:
        counts = Counter(n for s in body if isinstance(s, (Let, Assign, Store)) for n in s.value.walk() if _is_worth_sharing(n, moving))
        repeated = [n for n, c in counts.items() if c > 1]
        if not repeated:
            return body
        node = max(repeated, key=lambda n: (sum(1 for _ in n.walk()), str(n)))
        wish = node.fn if isinstance(node, Op) and node.fn[0].isalpha() else "guarded" if isinstance(node, Guard) else "quotient"
        name, count = f"{wish}_1", 1
        while name in taken:
            count += 1
            name = f"{wish}_{count}"
        taken.add(name)
        axes = preferred_dim_order(node)
        local = Local(name, axes, value_type(node))
        first = next(i for i, s in enumerate(body) if isinstance(s, (Let, Assign, Store)) and any(n == node for n in s.value.walk()))
        replaced = map_values(body[first:], _replacing(node, local))
        body = (*body[:first], Let(name, node, axes), *replaced)


def _replacing(node: Tile, local: Local) -> Callable[[Tile], Tile]:
    return lambda value: value.transform(lambda n: local if n == node else n)


def _reuse(body: tuple[Statement, ...], known: dict[Tile, Local]) -> tuple[Statement, ...]:
    """Replace each subexpression that an earlier statement has named by that name."""
    done: dict[Tile, Local] = {}
    result: list[Statement] = []
    for s in body:
        if isinstance(s, (Let, Assign, Store)):
            is_source = isinstance(s, Let) and s.value in known and known[s.value].name == s.name
            value = (
                s.value.rebuild(lambda c: c.transform(lambda n: done.get(n, n)))
                if is_source
                else s.value.transform(lambda n: done.get(n, n))
            )
            result.append(replace(s, value=value))
            if is_source:
                done[s.value] = known[s.value]
        else:
            result.append(s)
    return tuple(result)


def _is_worth_sharing(node: Tile, moving: set[str]) -> bool:
    costly = isinstance(node, Guard) or (isinstance(node, Op) and node.fn in _COSTLY) or isinstance(node, (TileReduce, TileDot, nest.TileScan))
    return costly and not any(isinstance(n, Local) and n.name in moving for n in node.walk())
