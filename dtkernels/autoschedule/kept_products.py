"""Reduce the rows of a product in the kernel that makes it, which also stores it rounded, for kernels after it.

The gradients of a loss of a linear layer, formed in its forward, read the logits after their rows are reduced::

    z[x, y] = rdot(H[x, k], W[y, k], k);    s[x] = rsum(exp(z[x, y]), y);    l[x] = log(s[x]);    z_kept[x, y] = cast(z[x, y], bf16);

One kernel has blocks of ``z``, stores ``z_kept`` and a part of each row's sum; a small one merges the parts into ``l``. Without this the product is stored in
float32 and read again for its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..algebra.rules.constant_folding import drop_unused
from ..lang import expr as ex
from ..lang.algorithm import Algorithm
from ..lang.schedule import Bare, FuseAt, Primitive
from ..lang.schedule_checks import reduction_labels
from .problem import LONG, WHOLE_SIDE, SchedulingProblem


@dataclass(frozen=True)
class KeptProduct:
    """A product, what is made of it element by element for the sums of its rows, these sums, what is made of them, and its rounded copy."""

    product: str
    chain: tuple[str, ...]
    sums: tuple[str, ...]
    host: str
    kept: str

    def statements(self, algorithm: Algorithm) -> tuple[Primitive, ...]:
        """Return the statements that put all of it into the kernel of ``host``."""
        *early, last = self.sums
        own, row = algorithm[self.host].labels[-1], reduction_labels(algorithm, last)[-1]
        inside = [FuseAt(f, "fuse_at", (self.host, own)) for f in (self.product, *self.chain, *((last,) if last != self.host else ()))]
        return (*inside, *(FuseAt(f, "fuse_at", (last, row)) for f in (*early, self.kept)), Bare(self.kept, "store"))

    def rest(self, algorithm: Algorithm) -> Algorithm:
        """Return what other kernels compute, which read the copy and the host from memory."""
        made = {self.host, self.kept, *self.sums}
        left = tuple(d for d in algorithm.definitions if d.name not in made)
        return replace(algorithm, inputs=(*algorithm.inputs, self.host, self.kept)).with_definitions(left)


def kept_product(shape: SchedulingProblem) -> KeptProduct | None:
    """Return the first long product whose rows are reduced, and that is stored rounded as well; None where there is none."""
    algorithm = shape.algorithm
    for d in algorithm.definitions:
        if isinstance(d.expr, ex.Cast) and isinstance(d.expr.arg, ex.Access) and d.name not in shape.outputs and len(d.labels) > 1:
            made = [f for f in algorithm.needed_by((d.name,)) if f != d.name]
            products = [f for f in made if shape.dots(f)]
            alike = all(algorithm[f].labels == d.labels and (f in products or not reduction_labels(algorithm, f)) for f in made)
            if len(products) == 1 and alike and shape.longest_sum(products[0]) >= LONG and (found := _with_sums(shape, products[0], made, d.name)):
                return found
    return None


def _with_sums(shape: SchedulingProblem, product: str, made: list[str], kept: str) -> KeptProduct | None:
    algorithm, row = shape.algorithm, shape.algorithm[product].labels[-1]
    chain = [f for f in made if f != product]
    for d in algorithm.definitions:  # what is made element by element beside the copy, such as a logit under a softcap
        read = {a.tensor for a in ex.accesses(d.expr)} & {*algorithm.funcs}
        if d.labels == algorithm[product].labels and d.name not in (product, kept, *chain) and read and read <= {product, *chain} and not reduction_labels(algorithm, d.name):
            chain.append(d.name)
    sums = [d.name for d in algorithm.definitions if reduction_labels(algorithm, d.name) == (row,) and not shape.dots(d.name) and _reads(algorithm, d.name, {product, *chain})]
    if not 1 <= len(sums) <= 2 or shape.sizes[row] <= WHOLE_SIDE or any({*algorithm[s].labels} != {*algorithm[product].labels} - {row} for s in sums):
        return None
    if len(sums) == 2 and not _reads(algorithm, sums[1], {sums[0]}):
        return None
    after = (d.name for d in algorithm.definitions if d.labels == algorithm[sums[-1]].labels and d.name not in sums and _reads(algorithm, d.name, {sums[-1]}))
    host = next((f for f in after if {a.tensor for a in ex.accesses(algorithm[f].expr)} <= {*sums} and not reduction_labels(algorithm, f)), sums[-1])
    inner = {*sums, *chain, product} - {host}
    if any(_reads(algorithm, d.name, {*sums} - {host}) for d in algorithm.definitions if d.name not in {*inner, host}):
        return None
    used = tuple(f for f in chain if any(f in algorithm.needed_by((s,)) for s in (*sums, kept)))
    return KeptProduct(product, used, tuple(sums), host, kept)


def _reads(algorithm: Algorithm, func: str, tensors: set[str]) -> bool:
    return any(a.tensor in tensors for a in ex.accesses(algorithm[func].expr))


def keeping_product(shape: SchedulingProblem, fused: Callable[[SchedulingProblem], tuple[Primitive, ...]]) -> tuple[Primitive, ...] | None:
    """Return the way to fuse that keeps a product so; ``fused`` places what other kernels compute. None where there is no such product."""
    found = kept_product(shape)
    if found is None:
        return None
    inside = {found.product, *found.chain}
    others = fused(replace(shape, algorithm=drop_unused(found.rest(shape.algorithm), shape.algorithm.labels)))
    return (*found.statements(shape.algorithm), *(p for p in others if p.func not in inside and not _reads(shape.algorithm, p.func, inside)))
