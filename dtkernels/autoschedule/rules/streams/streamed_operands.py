"""Find along which labels the largest tensor of a kernel is read or written, and which tensors hold codes."""

from __future__ import annotations

import math

from ....lang import expr as ex
from ...problem import SchedulingProblem
from ..reduction import contiguous_label, loaded_accesses


def sides_of_largest(shape: SchedulingProblem, root: str, members: list[str], labels: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the label along which the largest tensor lies contiguous, and the longest of its others, each if there is one."""
    read = [(ex.free_labels(a), contiguous_label(a)) for a in loaded_accesses(shape, root, members)]
    stored = [({*own}, own[-1:]) for m in members if m == root or m in shape.outputs if (own := shape.algorithm[m].labels)]
    every, last = max((*stored, *read), key=lambda tensor: math.prod(shape.sizes[x] for x in tensor[0] if x in labels))
    others = sorted((x for x in labels if x in every and x not in last), key=lambda x: shape.sizes[x])
    return [x for x in last if x in labels], others[-1:]


def has_codes(shape: SchedulingProblem, access: ex.Access) -> bool:
    """Return whether a tensor holds integers, such as the codes of quantized weights."""
    return shape.types is not None and dict(shape.types.of).get(access.tensor) in ex.INTEGERS
