"""Schedule two products of one narrow operand, or of one large one, in a single pass over the large operand.

Before, two kernels each, where ``l`` is narrow and ``m``, ``k`` and ``n`` are long::

    d_A[m, k] = rdot(S[m, l], B[k, l], l);      writes an m x k
    d_B[k, l] = rdot(A[m, k], S[m, l], m);      reads one
    S[m, l]   = rdot(X[m, n], C[l, n], n);      reads an m x n
    d_C[l, n] = rdot(W[m, l], X[m, n], m);      reads it again

After, ``d_A`` is computed in the loop of ``d_B``, so that reading and writing overlap, and ``d_C``'s kernel makes parts of ``S`` from the
tiles of ``X`` that it has.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...codegen.powers_of_two import last_power_of_two, next_power_of_two
from ...lang import expr as ex
from ...lang.schedule import FuseAt
from ...lang.schedule_checks import reduction_labels
from ..cost.kernel_config import KernelConfig
from ..problem import WHOLE_CHAIN, SchedulingProblem

STREAMED = 1 << 23  #: elements of the large operand from which on the bytes count and not the launches
PARTS_OF = 64  #: widest narrow side whose parts take fewer bytes than a second read of the large operand


@dataclass(frozen=True)
class SharedPass:
    """``func`` made in the kernel of ``host``, whose sum runs over ``loop``: whole, or in parts where ``host`` has blocks of ``cut``."""

    func: str
    host: str
    loop: str
    narrow: str
    wide: str
    cut: str = ""

    def primitive(self) -> FuseAt:
        """Return the statement."""
        if self.cut:
            return FuseAt(self.func, "parts_at", (self.host, self.cut))
        return FuseAt(self.func, "fuse_at", (self.host, self.loop))


def shared_passes(shape: SchedulingProblem) -> tuple[SharedPass, ...]:
    """Return the Funcs that share a pass at these sizes, each Func and each host once."""
    funcs = [f for f in shape.algorithm.needed_by(shape.outputs) if _only_product(shape, f)]
    found: list[SharedPass] = []
    for host in (f for f in funcs if f in shape.outputs):
        taken = {x for p in found for x in (p.func, p.host)}
        found += [p for f in funcs if f != host and not {f, host} & taken and (p := _shared_pass(shape, f, host))][:1]
    return tuple(found)


def shared_pass_tiles(shape: SchedulingProblem, root: str) -> KernelConfig | None:
    """Return the choices for a kernel of ``shared_passes``, or for one that adds its parts up; None for other kernels."""
    for p in shared_passes(shape):
        if root == p.host:
            return _parts_tiles(shape, p) if p.cut else _stream_tiles(shape, p)
        if root == p.func and p.cut:
            own = tuple(label for label in shape.algorithm[root].labels if label != p.narrow)
            return shape.config(root, dict.fromkeys(own, 16), {**dict.fromkeys(own, 16), p.narrow: 0}, 4, 1)
    return None


def _only_product(shape: SchedulingProblem, func: str) -> ex.Dot | None:
    """Return the product of a two-label Func that has no other reduction."""
    nodes = [n for n in shape.algorithm[func].expr.walk() if isinstance(n, (ex.Dot, ex.Reduce))]
    plain = len(nodes) == 1 and isinstance(nodes[0], ex.Dot) and len(shape.algorithm[func].labels) == 2 and len(nodes[0].labels) == 1
    return nodes[0] if plain and all(isinstance(s, ex.Access) for s in (nodes[0].left, nodes[0].right)) else None  # type: ignore[union-attr,return-value]


def _shared_pass(shape: SchedulingProblem, func: str, host: str) -> SharedPass | None:
    """Return how ``func`` is computed while ``host`` sums, if they share an operand."""
    algorithm, sizes = shape.algorithm, shape.sizes
    own, other = _only_product(shape, func), _only_product(shape, host)
    (loop,), (summed,) = reduction_labels(algorithm, host), reduction_labels(algorithm, func)
    if (
        own is None
        or other is None
        or shape.itemsize != 2
        or func in algorithm.needed_by((host,))
        or host in algorithm.needed_by((func,))
        or loop not in algorithm[func].labels
    ):
        return None
    labels = algorithm[host].labels
    narrow = min(labels, key=lambda x: sizes[x])
    wide = next(x for x in labels if x != narrow)
    large = func if summed == narrow else next((s.tensor for s in (other.left, other.right) if isinstance(s, ex.Access) and s in (own.left, own.right)), func)
    if (
        not {own.left, own.right} & {other.left, other.right}
        or shape.last_label(large) != wide
        or sizes[loop] * sizes[wide] < STREAMED
        or any(n % 8 for n in (sizes[wide], sizes[narrow]))
    ):
        return None
    if summed == narrow and set(algorithm[func].labels) == {loop, wide} and func in shape.outputs and sizes[narrow] <= WHOLE_CHAIN:
        return SharedPass(func, host, loop, narrow, wide)
    if summed == wide and set(algorithm[func].labels) == {loop, narrow} and sizes[narrow] <= PARTS_OF:
        return SharedPass(func, host, loop, narrow, wide, wide)
    return None


def _stream_tiles(shape: SchedulingProblem, p: SharedPass) -> KernelConfig:
    """Give a program 128 columns of all rows, or of a part of them; as many programs as there are multiprocessors."""
    return _tiles(shape, p, 128, 64, 4)


def _parts_tiles(shape: SchedulingProblem, p: SharedPass) -> KernelConfig:
    """Give a program 256 columns: the part sums of each block are written and read again."""
    return _tiles(shape, p, 256, 128 if next_power_of_two(shape.sizes[p.narrow]) <= 32 else 64, 3)


def _tiles(shape: SchedulingProblem, p: SharedPass, columns: int, rows: int, stages: int) -> KernelConfig:
    blocks = -(-shape.sizes[p.wide] // columns)
    parts = min(shape.target.multiprocessors // blocks, shape.sizes[p.loop] // rows // 4)
    tile = {x: 0 if x == p.narrow else columns for x in shape.algorithm[p.host].labels} | {p.loop: rows}
    split = ((p.loop, last_power_of_two(parts)),) if parts >= 2 else ()
    return shape.config(p.host, {p.wide: columns}, tile, 8, stages, split=split)
