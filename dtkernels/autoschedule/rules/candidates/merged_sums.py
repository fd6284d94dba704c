"""Propose tiles along all labels of a product's sum as one, where other products are added to it.

Before, tiles along one label of the sum of two, of elements that lie apart: each is loaded by itself::

    f[t, o] = rdot(n[t, i, g], W[o, i, g], i, g) + rdot(X[t, i], V[o, i], i);
    f.tensorize(t:128, o:128, i:64, g:1);

After, tiles of whole vectors::

    f.merge(i_g, i, g); f.tensorize(t:128, o:128, i_g:64, i:64);

A kernel of one product, or of several over the same labels, merges labels of its result too: window_products.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ....codegen.powers_of_two import next_power_of_two
from ....lang import expr as ex
from ...cost.kernel_config import KernelConfig
from ...problem import SchedulingProblem
from ..gemm import product_configs
from ..sibling_gemms import products
from .window_products import loaded

DEEP = 16  #: elements of a tile along the merged label at least: a step of the matrix units


def merged_sum_candidates(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield the usual choices for a kernel of several products, with the labels of a sum merged that lie side by side in both operands."""
    dots = products(shape, members)
    if len(dots) < 2 or not shape.has_products_alone(root, members):
        return
    merges: dict[str, tuple[str, ...]] = {}
    for dot in sorted(dots, key=lambda d: -math.prod(shape.sizes[x] for x in d.labels)):
        run = run_of(dot)
        if run and not any({*run} & {*other} for other in merges.values()):
            merges[shape.unused_label("_".join(run), bare=True)] = run
    if not merges:
        return
    alone = {x for dot in dots if run_of(dot) not in merges.values() for x in dot.labels}
    for config in product_configs(shape, root, members):
        if not config.merged and not config.descriptors and not config.staged and not {*dict(config.blocks)} & {x for run in merges.values() for x in run}:
            yield _merged(shape, config, merges, alone)


def run_of(dot: ex.Dot) -> tuple[str, ...]:
    """Return the labels of a product's sum in the order in which they lie side by side in both operands; nothing where they do not, or there is one."""
    reads = [loaded(side) for side in (dot.left, dot.right)]
    found = set()
    for read in reads:
        plain = [i.name if isinstance(i, ex.Label) else "" for i in read.index] if read else []
        at = [dim for dim, name in enumerate(plain) if name in dot.labels]
        found.add(tuple(plain[dim] for dim in at) if at and at == [*range(at[0], at[-1] + 1)] else ())
    (run, *others) = found
    return run if not others and len(run) > 1 and {*run} == {*dot.labels} else ()


def _merged(shape: SchedulingProblem, config: KernelConfig, merges: dict[str, tuple[str, ...]], alone: set[str]) -> KernelConfig:
    """Return a choice with merged labels in place of their parts; a part stays where another product sums over it ``alone``."""
    tiles = dict(config.tiles)
    for name, run in merges.items():
        whole = math.prod(shape.sizes[x] for x in run)
        deep = max(DEEP, *(tiles.get(x) or shape.sizes[x] for x in run))
        tiles = {x: size for x, size in tiles.items() if x not in run or x in alone} | {name: min(deep, next_power_of_two(whole))}
    split = tuple((x, parts) for x, parts in config.split if x not in {y for run in merges.values() for y in run})
    return replace(config, tiles=tuple(tiles.items()), merged=tuple(", ".join((name, *run)) for name, run in merges.items()), split=split)
