"""Find buffers between kernels that one of them may overwrite with what it makes of them.

Before, with two matrices in memory::

    z_kept[x, y] = cast(rdot(H[x, k], W[y, k], k), bf16);    d_z[x, y] = exp(z_kept[x, y] - l[x]);

After, the kernel of ``d_z`` stores each element where it has read that of ``z_kept``, which nothing reads afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...lang import expr as ex
from ...lang.algorithm import Algorithm
from ..ir.nest import DescriptorStore, Kernel, Let, Load, Loop, Statement, Store, statements, values

ROUNDED = ("bf16", "fp16")


def reused_buffers(kernels: Sequence[Kernel], algorithm: Algorithm, kept: frozenset[str]) -> dict[str, str]:
    """Map Funcs to those between ``kernels`` whose buffers they may take: a rounded copy with the same labels. ``kept`` Funcs are read afterwards."""
    found: dict[str, str] = {}
    for i, kernel in enumerate(kernels):
        for new in (w for w in kernel.writes if w in algorithm):
            for old in (r for r in kernel.reads if r in algorithm and r not in kept and r not in found.values()):
                before, after = (any(old in (*k.reads, *k.writes) for k in part) for part in (kernels[:i], kernels[i + 1 :]))
                if before and not after and _is_rounded(algorithm, old) and algorithm[old].labels == algorithm[new].labels and _stores_where_it_read(kernel, old, new):
                    found[new] = old
    return found


def _is_rounded(algorithm: Algorithm, func: str) -> bool:
    e = algorithm[func].expr
    return isinstance(e, ex.Cast) and e.dtype in ROUNDED and func not in algorithm.operands


def _stores_where_it_read(kernel: Kernel, old: str, new: str) -> bool:
    """Return whether a kernel reads each element of ``old`` once, and stores that of ``new`` in its place right after."""
    if kernel.tail or kernel.workspaces:
        return False
    loads = [n for v in values(kernel.body) for n in v.walk() if isinstance(n, Load) and n.buffer == old]
    stores = [s for s in statements(kernel.body) if isinstance(s, (Store, DescriptorStore)) and s.buffer == new]
    for body in _bodies(kernel.body):
        here = [s for s in body if isinstance(s, Let) and isinstance(s.value, Load) and s.value.buffer == old]
        last = [s for s in body if isinstance(s, Store) and s.buffer == new]
        if len(loads) == len(stores) == len(here) == len(last) == 1 and isinstance(here[0].value, Load):
            return here[0].value.index == last[0].index and body.index(here[0]) < body.index(last[0])
    return False


def _bodies(body: tuple[Statement, ...]) -> Iterator[tuple[Statement, ...]]:
    yield body
    for s in body:
        if isinstance(s, Loop):
            yield from _bodies(s.body)
