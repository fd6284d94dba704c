"""Order the blocks of a kernel: where a mask makes some longer than others, and where blocks read again what others read."""

from __future__ import annotations

import math

from ...codegen.powers_of_two import next_power_of_two
from ...lang import expr as ex
from ...lang.schedule_checks import reduction_labels
from ..problem import SchedulingProblem

KEPT = 0.75  #: of the L2: what may be read again from it while a group of blocks is taken
AGAIN = 50  #: the part of the bytes moved between two reads of an element, from which on what is read again counts
EVEN = 0.95  #: of the programs busy in whole rounds of pairs of blocks
SEVERAL = 4  #: blocks of a group for each program, so that long and short ones make up for each other
NEAR = 4  #: times as many blocks as there are may come at other sizes: up to this the order says how many go together


def causal_program_order(shape: SchedulingProblem, root: str, members: list[str], block: dict[str, int], row: str) -> tuple[tuple[str, str, int], ...]:
    """Order blocks by row over all heads, the longest rows first, so that blocks of equal length run at the same time.

    Blocks of other rows read the same keys again. On an H200 (L2 of 50 MB) the order gains 8 to 30% where the heads together read up
    to 50 MB, and loses 10% from 67 MB on: as many heads are grouped as the L2 keeps.
    """
    rest = [label for label in block if label != row]
    each = sum(_bytes(shape, root, access, rest) for access in _shared(shape, members, row))
    fit = int(KEPT * shape.target.l2_bytes) // each if each else 0
    outside: list[str] = []
    order: list[tuple[str, str, int]] = [(row, "", 0)]
    for i, label in enumerate(reversed(rest), 1):
        blocks = max(1, -(-shape.sizes[label] // block[label]))
        if fit >= (NEAR * blocks if i == len(rest) else blocks):
            order.insert(1, (label, "", 0))
            fit //= blocks
        elif fit > 1:
            inside = shape.unused_label(label)
            order = [(label, inside, next_power_of_two(fit + 1) // 2), (row, "", 0), (inside, "", 0), *order[1:]]
            fit = 0
        else:
            outside.insert(0, label)
            fit = 0
    return (*((label, "", 0) for label in outside), *order) if len(outside) < len(rest) else ()


def balanced_program_order(shape: SchedulingProblem, root: str, members: list[str], block: dict[str, int], row: str) -> tuple[tuple[str, str, int], ...]:
    """Order blocks so that persistent programs can share them evenly where a mask makes loops longer by ``row``.

    In the usual order each program takes a long and a short one together. Where that leaves many programs one pair short, blocks are sorted
    by length: over as many heads as the L2 keeps, if these give every program several blocks.
    """
    cores, rest = shape.target.multiprocessors, [label for label in block if label != row]
    pairs = shape.programs(block) / (2 * cores)
    if not rest or pairs >= EVEN * math.ceil(pairs):
        return ()
    counts = {label: max(1, -(-shape.sizes[label] // block[label])) for label in rest}
    each = sum(_bytes(shape, root, access, rest) for access in _shared(shape, members, row))
    kept = max(int(KEPT * shape.target.l2_bytes) // max(1, each), -(-SEVERAL * cores * block[row] // shape.sizes[row]))
    if 2 * kept > math.prod(counts.values()):
        return tuple((label, "", 0) for label in (row, *rest))
    *outer, inner = rest
    if kept >= counts[inner]:
        return (*((x, "", 0) for x in outer), (row, "", 0), (inner, "", 0))
    inside = shape.unused_label(inner)
    return (*((x, "", 0) for x in outer), (inner, inside, next_power_of_two(kept)), (row, "", 0), (inside, "", 0))


def broadcast_program_order(shape: SchedulingProblem, labels: tuple[str, ...], read: list[ex.Access], block: dict[str, int]) -> tuple[tuple[str, str, int], ...]:
    """Order blocks so that those that read the same elements of an input run one after another, if the L2 would have dropped it before.

    Before, all positions of four heads come before those of the next ones, which read ``cos`` again::

        rope_q[b, h, s, d] = Q[b, h, s, d] * cos[b, s, d]; rope_q.block(b:1, h:4, s:4, d:256);

    After, all heads of four positions come first: ``rope_q.map(b, s, d, h);``
    """
    several = [label for label in labels if label in block and shape.sizes[label] > block[label]]
    moved = {a.tensor for a in read if set(labels) <= ex.free_labels(a)}
    total = (1 + len(moved)) * math.prod(shape.sizes[label] for label in labels) * shape.itemsize
    far = []
    for i, label in enumerate(several[:-1]):
        between = total // math.prod(-(-shape.sizes[x] // block[x]) for x in several[: i + 1])
        shared = {a.tensor: ex.free_labels(a) for a in read if label not in ex.free_labels(a) and set(several[i + 1 :]) & ex.free_labels(a)}
        again = sum(math.prod(shape.sizes.get(x, 1) for x in own) for own in shared.values()) * shape.itemsize
        far += [label] if between > shape.target.l2_bytes // 2 and AGAIN * again > between else []
    return tuple((x, "", 0) for x in (*(x for x in block if x not in far), *far)) if far else ()


def _shared(shape: SchedulingProblem, members: list[str], row: str) -> list[ex.Access]:
    """Return the accesses of the kernel that do not vary with ``row``, one for each tensor."""
    found = {a.tensor: a for m in members for a in ex.accesses(shape.algorithm[m].expr)}
    return [a for tensor, a in found.items() if tensor not in members and row not in ex.free_labels(a)]


def _bytes(shape: SchedulingProblem, root: str, access: ex.Access, rest: list[str]) -> int:
    """Return bytes of a tensor for one of each label of ``rest``. A label that only a Func inside has stands for several of the root's."""
    known = {*shape.algorithm[root].labels, *reduction_labels(shape.algorithm, root)}
    count = shared = 1
    for index in access.index:
        labels = ex.free_labels(index)
        size = 1 if labels & set(rest) else max((shape.sizes.get(label, 1) for label in labels), default=1)
        count, shared = (count * size, shared) if labels <= known else (count, shared * size)
    meant = math.prod(shape.sizes[label] for label in rest if label not in ex.free_labels(access))
    return count * max(1, shared // max(1, meant)) * shape.itemsize
