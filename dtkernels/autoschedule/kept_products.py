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
    """A product, what is made of it element by element for the sums of its rows, these sums, what is made of them, and its rounded copy, "" for none."""

    product: str
    chain: tuple[str, ...]
    sums: tuple[str, ...]
    host: str
    kept: str

    @property
    def inside(self) -> set[str]:
        """What the kernel of the host makes and does not write."""
        return {self.product, *self.chain, *self.sums} - {self.host}

    def statements(self, algorithm: Algorithm) -> tuple[Primitive, ...]:
        """Return the statements that put all of it into the kernel of ``host``."""
        *early, last = self.sums
        own, row = algorithm[self.host].labels[-1], reduction_labels(algorithm, last)[-1]
        inside = [FuseAt(f, "fuse_at", (self.host, own)) for f in (self.product, *self.chain, *((last,) if last != self.host else ()))]
        swept = (*early, self.kept) if self.kept else early
        return (*inside, *(FuseAt(f, "fuse_at", (last, row)) for f in swept), *([Bare(self.kept, "store")] if self.kept else []))

    def rest(self, algorithm: Algorithm, outputs: tuple[str, ...]) -> Algorithm:
        """Return what other kernels compute for ``outputs``, which read the copy and the host from memory."""
        made = (self.host, *([self.kept] if self.kept else []))
        left = replace(algorithm, inputs=(*algorithm.inputs, *made)).with_definitions(tuple(d for d in algorithm.definitions if d.name not in made))
        needed = left.needed_by(tuple(o for o in outputs if o in left))
        return left.with_definitions(tuple(d for d in left.definitions if d.name in needed))


def kept_product(shape: SchedulingProblem) -> KeptProduct | None:
    """Return the long product whose rows are reduced, too long to hold, and that is stored rounded as well; None where there is none."""
    found = find_kept_product(shape.algorithm, shape.outputs)
    return found if found is not None and _is_long(shape, found.product) else None


def summed_product(shape: SchedulingProblem) -> KeptProduct | None:
    """Return the first long product whose rows are reduced, too long to hold, and that nothing stores; None where there is none."""
    algorithm = shape.algorithm
    for d in algorithm.definitions:
        if d.name not in shape.outputs and len(d.labels) > 1 and shape.dots(d.name) and _is_long(shape, d.name):
            if (found := _with_sums(algorithm, d.name, [d.name], "")) and not found.inside & {*shape.outputs}:
                return found
    return None


def _is_long(shape: SchedulingProblem, product: str) -> bool:
    return shape.longest_sum(product) >= LONG and shape.sizes[shape.algorithm[product].labels[-1]] > WHOLE_SIDE


def find_kept_product(algorithm: Algorithm, outputs: tuple[str, ...]) -> KeptProduct | None:
    """Return the first product whose rows are reduced and that is stored rounded as well, at any sizes; None where there is none."""
    for d in algorithm.definitions:
        if isinstance(d.expr, ex.Cast) and isinstance(d.expr.arg, ex.Access) and d.name not in outputs and len(d.labels) > 1:
            made = [f for f in algorithm.needed_by((d.name,)) if f != d.name]
            products = [f for f in made if _has(algorithm, f, ex.Dot)]
            alike = all(algorithm[f].labels == d.labels and (f in products or not reduction_labels(algorithm, f)) for f in made)
            if len(products) == 1 and alike and (found := _with_sums(algorithm, products[0], made, d.name)) and not found.inside & {*outputs}:
                return found
    return None


def _with_sums(algorithm: Algorithm, product: str, made: list[str], kept: str) -> KeptProduct | None:
    own = algorithm[product].labels
    chain = [f for f in made if f != product]
    for d in algorithm.definitions:  # what is made element by element beside the copy, such as a logit under a softcap
        read = {a.tensor for a in ex.accesses(d.expr)} & {*algorithm.funcs}
        beside = d.labels == own and d.name not in (product, kept, *chain) and not reduction_labels(algorithm, d.name)
        chain += [d.name] if beside and read and read <= {product, *chain} else []
    over = [d for d in algorithm.definitions if reduction_labels(algorithm, d.name) == own[-1:] and not _has(algorithm, d.name, ex.Dot)]
    sums = [d.name for d in over if _reads(algorithm, d.name, {product, *chain})]
    if not 1 <= len(sums) <= 2 or any({*algorithm[s].labels} != {*own[:-1]} for s in sums) or len(sums) == 2 and not _reads(algorithm, sums[1], {sums[0]}):
        return None
    after = [d.name for d in algorithm.definitions if d.name not in sums and _reads(algorithm, d.name, {*sums})]
    alone = [f for f in after if algorithm[f].labels == algorithm[sums[-1]].labels and not reduction_labels(algorithm, f)]
    host = next((f for f in alone if {a.tensor for a in ex.accesses(algorithm[f].expr)} <= {*sums}), sums[-1])
    if any(f != host and (host != sums[-1] or _reads(algorithm, f, {*sums[:-1]})) for f in after):
        return None  # another kernel would make the sums again
    used = tuple(f for f in chain if any(f in algorithm.needed_by((s,)) for s in (*sums, *([kept] if kept else []))))
    return KeptProduct(product, used, tuple(sums), host, kept)


def _has(algorithm: Algorithm, func: str, kind: type[ex.Expr]) -> bool:
    return any(isinstance(n, kind) for n in algorithm[func].expr.walk())


def _reads(algorithm: Algorithm, func: str, tensors: set[str]) -> bool:
    return any(a.tensor in tensors for a in ex.accesses(algorithm[func].expr))


def beside(shape: SchedulingProblem, found: KeptProduct, fused: Callable[[SchedulingProblem], tuple[Primitive, ...]]) -> tuple[Primitive, ...]:
    """Return the way to fuse in which one kernel has a product and its sums; ``fused`` places what other kernels compute."""
    inside = {found.product, *found.chain}
    rest = drop_unused(found.rest(shape.algorithm, shape.outputs), shape.algorithm.labels)
    others = fused(replace(shape, algorithm=rest, outputs=tuple(o for o in shape.outputs if o in rest)))
    return (*found.statements(shape.algorithm), *(p for p in others if p.func not in inside and not _reads(shape.algorithm, p.func, inside)))
