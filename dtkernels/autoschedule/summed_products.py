"""Reduce the rows of a product in the kernel that makes it, where nothing else reads the product.

The loss of a linear layer reduces the rows of its logits::

    z[x, y] = rdot(H[x, k], W[y, k], k);    s[x] = rsum(exp(z[x, y]), y);    l[x] = log(s[x]);

One kernel has blocks of ``z`` and stores a part of each row's sum; a small one merges the parts into ``l``. Without this the product is stored in
float32 and read again for its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..algebra.rules.constant_folding import drop_unused
from ..lang import expr as ex
from ..lang.algorithm import Algorithm
from ..lang.schedule import FuseAt, Primitive
from ..lang.schedule_checks import reduction_labels
from .problem import LONG, WHOLE_SIDE, SchedulingProblem


@dataclass(frozen=True)
class SummedProduct:
    """A product, what is made of it element by element for the sums of its rows, these sums, and what is made of them."""

    product: str
    chain: tuple[str, ...]
    sums: tuple[str, ...]
    host: str

    @property
    def inside(self) -> set[str]:
        """What the kernel of the host makes and does not write."""
        return {self.product, *self.chain, *self.sums} - {self.host}

    def statements(self, algorithm: Algorithm) -> tuple[Primitive, ...]:
        """Return the statements that put all of it into the kernel of ``host``."""
        *early, last = self.sums
        own, row = algorithm[self.host].labels[-1], reduction_labels(algorithm, last)[-1]
        inside = [FuseAt(f, "fuse_at", (self.host, own)) for f in (self.product, *self.chain, *((last,) if last != self.host else ()))]
        return (*inside, *(FuseAt(f, "fuse_at", (last, row)) for f in early))

    def rest(self, algorithm: Algorithm, outputs: tuple[str, ...]) -> Algorithm:
        """Return what other kernels compute for ``outputs``, which read the host from memory."""
        left = replace(algorithm, inputs=(*algorithm.inputs, self.host)).with_definitions(tuple(d for d in algorithm.definitions if d.name != self.host))
        return left.limited_to(tuple(o for o in outputs if o in left))


def summed_product(shape: SchedulingProblem) -> SummedProduct | None:
    """Return the first long product whose rows are reduced, too long to hold, and that nothing stores; None where there is none."""
    algorithm = shape.algorithm
    for d in algorithm.definitions:
        if d.name not in shape.outputs and len(d.labels) > 1 and shape.dots(d.name) and _is_long(shape, d.name):
            if (found := _with_sums(algorithm, d.name)) and not found.inside & {*shape.outputs}:
                return found
    return None


def _is_long(shape: SchedulingProblem, product: str) -> bool:
    return shape.longest_sum(product) >= LONG and shape.sizes[shape.algorithm[product].labels[-1]] > WHOLE_SIDE


def _with_sums(algorithm: Algorithm, product: str) -> SummedProduct | None:
    own = algorithm[product].labels
    chain: list[str] = []
    for d in algorithm.definitions:  # what is made of it element by element, such as a logit under a softcap
        read = {a.tensor for a in ex.accesses(d.expr)} & {*algorithm.funcs}
        alike = d.labels == own and d.name != product and not reduction_labels(algorithm, d.name)
        chain += [d.name] if alike and read and read <= {product, *chain} else []
    over = [d for d in algorithm.definitions if reduction_labels(algorithm, d.name) == own[-1:] and not _has(algorithm, d.name, ex.Dot)]
    sums = [d.name for d in over if _reads(algorithm, d.name, {product, *chain})]
    if not 1 <= len(sums) <= 2 or any({*algorithm[s].labels} != {*own[:-1]} for s in sums) or len(sums) == 2 and not _reads(algorithm, sums[1], {sums[0]}):
        return None
    after = [d.name for d in algorithm.definitions if d.name not in sums and _reads(algorithm, d.name, {*sums})]
    alone = [f for f in after if algorithm[f].labels == algorithm[sums[-1]].labels and not reduction_labels(algorithm, f)]
    host = next((f for f in alone if {a.tensor for a in ex.accesses(algorithm[f].expr)} <= {*sums}), sums[-1])
    if any(f != host and (host != sums[-1] or _reads(algorithm, f, {*sums[:-1]})) for f in after):
        return None  # another kernel would make the sums again
    used = tuple(f for f in chain if any(f in algorithm.needed_by((s,)) for s in sums))
    return SummedProduct(product, used, tuple(sums), host)


def _has(algorithm: Algorithm, func: str, kind: type[ex.Expr]) -> bool:
    return any(isinstance(n, kind) for n in algorithm[func].expr.walk())


def _reads(algorithm: Algorithm, func: str, tensors: set[str]) -> bool:
    return any(a.tensor in tensors for a in ex.accesses(algorithm[func].expr))


def beside(shape: SchedulingProblem, found: SummedProduct, fused: Callable[[SchedulingProblem], tuple[Primitive, ...]]) -> tuple[Primitive, ...]:
    """Return the way to fuse in which one kernel has a product and its sums; ``fused`` places what other kernels compute."""
    inside = {found.product, *found.chain}
    rest = drop_unused(found.rest(shape.algorithm, shape.outputs), shape.algorithm.labels)
    others = fused(replace(shape, algorithm=rest, outputs=tuple(o for o in shape.outputs if o in rest)))
    return (*found.statements(shape.algorithm), *(p for p in others if p.func not in inside and not _reads(shape.algorithm, p.func, inside)))
