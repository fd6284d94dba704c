"""Tile kernels that run along a label: one program holds or walks the whole of it. Not measured on a GPU yet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain, product

from ...codegen.powers_of_two import next_power_of_two
from ...lang import expr as ex
from ...lang.schedule_checks import reduction_labels
from ..cost.kernel_config import KernelConfig
from ..problem import SchedulingProblem
from .reduction import approximations

HELD, STEP = 4096, 2048  #: longest row scanned at once, and the tile of longer ones, in elements
TALL = 16  #: elements at once along a label that does not lie contiguous
ELEMENTS = 2048  #: of a tile
FULL, SECTOR = 2, 16  #: programs a multiprocessor for which blocks are narrowed, and their narrowest
STEPS, WARPS = (8, 16, 32, 64), (4, 8)  #: tiles along a scan that are looked at, and warps
NARROW = 256  #: most elements that each step of a scan sums for what reads it


def scan_labels(shape: SchedulingProblem, members: list[str]) -> tuple[str, ...]:
    """Return the labels that scans among ``members`` run along."""
    found = (shape.algorithm[m].expr for m in members if m in shape.algorithm)
    return tuple(dict.fromkeys(e.label for e in found if isinstance(e, ex.Scan)))


def scan_consumer(shape: SchedulingProblem, func: str) -> str | None:
    """Return the Func in whose kernel the scan ``func`` is computed as it is read, and so not stored: an output that alone reads it,
    element by element along the scan, and sums over what it lacks, if that can be held.
    """
    a, own = shape.algorithm, shape.algorithm[func]
    users = [d for d in a.definitions if any(x.tensor == func for x in ex.accesses(d.expr))]
    if func in shape.outputs or len(users) != 1 or users[0].name not in shape.outputs:
        return None
    (user,) = users
    reads = {x.index for x in ex.accesses(user.expr) if x.tensor == func}
    rest = tuple(label for label in own.labels if label not in user.labels)
    summed = reduction_labels(a, user.name)
    narrow = math.prod(next_power_of_two(shape.sizes[label]) for label in rest) <= NARROW
    plain = reads == {tuple(ex.Label(label) for label in own.labels)} and not shape.dots(user.name)
    return user.name if plain and narrow and set(summed) == set(rest) and own.expr.label in user.labels else None  # type: ignore[attr-defined]


def scan_host(shape: SchedulingProblem, func: str, hosts: Mapping[str, set[str]], anywhere: bool) -> tuple[str, ...]:
    """Return the kernels in which the scan ``func`` is computed as it is read, in the order that they run; none if it has a kernel of its own.

    ``anywhere``: in all kernels that read it element by element in a loop along it, not only in that of ``scan_consumer``.
    """
    user = scan_consumer(shape, func)
    if user and hosts.get(user) == {user}:
        return (user,)
    a, own = shape.algorithm, shape.algorithm[func]
    scan = own.expr
    assert isinstance(scan, ex.Scan)
    users = [d.name for d in a.definitions if any(x.tensor == func for x in ex.accesses(d.expr))]
    kernels = {*chain.from_iterable(hosts.get(u, {u}) for u in users)}
    plain = {x.index for u in users for x in ex.accesses(a[u].expr) if x.tensor == func} == {tuple(ex.Label(label) for label in own.labels)}
    along = all(scan.label in (*a[k].labels, *reduction_labels(a, k)) and not shape.dots(k) for k in kernels)
    others = (e for f, placed in hosts.items() if placed & kernels and isinstance(e := a[f].expr, ex.Scan))
    one_way = next_power_of_two(shape.sizes[scan.label]) <= HELD or all(o.label != scan.label or o.reverse == scan.reverse for o in others)
    return tuple(k for k in a.needed_by(shape.outputs) if k in kernels) if anywhere and func not in shape.outputs and plain and along and one_way else ()


def scan_configs(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield the choices for a kernel with a scan, the usual ones first; none for any other. No label that a scan runs along is cut into blocks.

    A tile of several steps is scanned at once, so that its loads wait for memory once, not in each step.
    """
    usual = scan_tiles(shape, root, members)
    if usual is None:
        return
    yield usual
    along = scan_labels(shape, members)[-1]
    if dict(usual.tiles)[along] == 0 or along == _last_label(shape, root, members, along):
        return
    blocks = dict(usual.blocks)
    last = next((label for label in reversed(shape.algorithm[root].labels) if label in blocks), "")
    others = math.prod(next_power_of_two(shape.sizes[x]) for x, n in usual.tiles if n == 0) * math.prod(n for x, n in blocks.items() if x != last)
    for steps, warps in product(STEPS, WARPS):
        room = ELEMENTS * warps // WARPS[0] // (others * steps)
        for width in sorted({min(room, blocks.get(last, 1), 2**i) for i in range(8)} - {0}):
            if steps <= next_power_of_two(shape.sizes[along]) and others * steps * width <= ELEMENTS * warps // WARPS[0]:
                sizes = {**dict(usual.tiles), along: steps, **({last: width} if last else {})}
                yield shape.config(root, {**blocks, **({last: width} if last else {})}, sizes, warps, 3, approximations=approximations(shape, members))


def scan_tiles(shape: SchedulingProblem, root: str, members: list[str]) -> KernelConfig | None:
    """Return the usual choices for a kernel with a scan; None for any other."""
    along = scan_labels(shape, members)
    labels = shape.algorithm[root].labels
    if not along or along[-1] not in (*labels, *reduction_labels(shape.algorithm, root)):
        return None
    t = along[-1]
    last = _last_label(shape, root, members, t)
    length = next_power_of_two(shape.sizes[t])
    tile = {label: 1 for label in along}
    tile[t] = (0 if length <= HELD else STEP) if t == last else min(TALL, length)
    summed = [r for m in members for r in reduction_labels(shape.algorithm, m) if r not in (*labels, *along)]
    if summed:  # each step sums a tile that is held whole: one element along t, as many as there is room for along the others
        tile |= {t: 1, **dict.fromkeys(summed, 0)}
    width = math.prod(next_power_of_two(shape.sizes[r]) for r in summed) if summed else min(length, HELD) if tile[t] == 0 else tile[t]
    room = max(1, ELEMENTS // width)
    block: dict[str, int] = {}
    for label in reversed([label for label in labels if label not in along]):
        block[label] = min(next_power_of_two(shape.sizes[label]), room, 128)
        room //= block[label]
    block = {label: block[label] for label in labels if label in block}
    while block and shape.programs(block) < FULL * shape.target.multiprocessors and max(block.values()) > SECTOR:
        widest = max(block, key=lambda label: block[label])
        block[widest] //= 2
    return shape.config(root, block, {**tile, **block}, 4, 3, approximations=approximations(shape, members))


def _last_label(shape: SchedulingProblem, root: str, members: list[str], along: str) -> str:
    """Return the label along which the elements of a kernel lie contiguous: the last of its result, or of what it reads along ``along`` where the result sums over it."""
    labels = shape.algorithm[root].labels
    reads = (a.index for m in members for a in ex.accesses(shape.algorithm[m].expr) if a.tensor not in members and ex.Label(along) in a.index)
    return labels[-1] if along in labels else next((index[-1].name for index in reads if isinstance(index[-1], ex.Label)), along)
