"""Choose among the candidates of all rules for a kernel by predicted time.

A kernel is of the first kind in ``KINDS`` that yields choices for it. The first of these is the usual one: it was measured at many
sizes. Other rules of that kind in ``RULES`` add candidates. One is taken if it is predicted to be well faster than the usual one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from ..cost.candidate_time import CandidateTime
from ..cost.kernel_config import KernelConfig
from ..problem import SchedulingProblem
from .candidates.split_rows import split_row_candidates
from .candidates.streamed_gemm import streamed_candidates
from .candidates.tile_space import tile_candidates
from .chain_candidates import chain_candidates
from .chained_gemm import chain_configs
from .gemm import product_configs
from .gemm_row_reduction import gemm_row_reduction_tiles
from .reduction import row_tiles
from .row_column_reduction import row_column_tiles
from .scan import scan_tiles

Candidates = Callable[[SchedulingProblem, str, list[str]], Iterable[KernelConfig]]


class Kind(NamedTuple):
    """A kind of kernel. ``configs`` yields its usual choices first, and nothing for a kernel of another kind."""

    name: str
    configs: Candidates


class Rule(NamedTuple):
    """More candidates for the kernels of a kind."""

    kind: str
    candidates: Candidates


def _only(tiles: Callable[[SchedulingProblem, str, list[str]], KernelConfig | None]) -> Candidates:
    def configs(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
        found = tiles(shape, root, members)
        if found is not None:
            yield found

    return configs


ROWS = "elementwise, reductions, transposes"
KINDS = (
    Kind("scans", _only(scan_tiles)),
    Kind("product and row reduction", _only(gemm_row_reduction_tiles)),
    Kind("chained products", chain_configs),
    Kind("products", product_configs),
    Kind("row and column reductions", _only(row_column_tiles)),
    Kind(ROWS, _only(row_tiles)),
)
RULES = (
    Rule("chained products", chain_candidates),
    Rule("products", streamed_candidates),
    Rule(ROWS, split_row_candidates),
    Rule(ROWS, tile_candidates),
)
FASTER = 0.9  #: a candidate is taken if its predicted time is below this part of the usual one's


def kernel_config(shape: SchedulingProblem, root: str, members: list[str]) -> KernelConfig:
    """Return the choices for the kernel of ``root``, which computes ``members``."""
    proposed = proposals(shape, root, members)
    return fastest(shape, root, members, next(proposed), proposed)


def proposals(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield the choices that the rules propose for the kernel of ``root``, which computes ``members``: the usual ones first."""
    for kind in KINDS:
        own = iter(kind.configs(shape, root, members))
        usual = next(own, None)
        if usual is not None:
            yield usual
            yield from chain(own, *(rule.candidates(shape, root, members) for rule in RULES if rule.kind == kind.name))
            return
    raise AssertionError(f"no rule for {root}")  # the last kind takes every kernel


def fastest(shape: SchedulingProblem, root: str, members: list[str], usual: KernelConfig, more: Iterable[KernelConfig]) -> KernelConfig:
    """Return the candidate of the shortest predicted time, ``usual`` unless one is well faster."""
    candidates = [c for c in dict.fromkeys(more) if c != usual]
    if not candidates:
        return usual
    time = CandidateTime(shape, root, members).microseconds
    best = min(candidates, key=time)
    return best if time(best) < FASTER * time(usual) else usual
