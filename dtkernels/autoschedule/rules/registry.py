"""Choose among the candidates of all rules for a kernel by predicted time.

A kernel is of the first kind in ``KINDS`` that yields choices for it. The first of these is the usual one: it was measured at many
sizes. Other rules of that kind in ``RULES`` add candidates. One is taken if it is predicted to be well faster than the usual one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from ..cost.candidate_time import CandidateTime
from ..cost.kernel_config import KernelConfig
from ..problem import SchedulingProblem
from .candidates.blocked_sums import swept_configs
from .candidates.chain_tiles import chain_variants
from .candidates.held_windows import held_window_candidates
from .candidates.merged_rows import merged_row_candidates
from .candidates.merged_sums import merged_sum_candidates
from .candidates.paired_sums import paired_sum_candidates
from .candidates.split_rows import split_row_candidates
from .candidates.streamed_gemm import streamed_candidates
from .candidates.tile_space import tile_candidates, variants
from .candidates.unrolled_windows import unrolled_window_candidates
from .candidates.window_products import window_candidates
from .chain_candidates import chain_candidates
from .chained_gemm import chain_configs
from .gemm import product_configs
from .reduction import approximations, row_tiles
from .row_column_reduction import row_column_candidates, row_column_tiles
from .scan import scan_configs
from .sibling_gemms import products
from .streams.matrix_vector import matrix_vector_configs
from .streams.picked_sums import picked_sum_configs
from .streams.rank_one import rank_one_configs
from .streams.single_terms import single_term_configs

Placed = Mapping[str, tuple[str, str]]  #: fused Func -> the Func and the loop that it is computed in
Candidates = Callable[[SchedulingProblem, str, list[str]], Iterable[KernelConfig]]


class Kind(NamedTuple):
    """A kind of kernel. ``configs`` yields its usual choices first, and nothing for a kernel of another kind."""

    name: str
    configs: Candidates


class Rule(NamedTuple):
    """More candidates for the kernels of a kind. ``variants``: of the most promising of them, which are looked at then."""

    kind: str
    candidates: Candidates
    variants: Callable[[SchedulingProblem, str, list[str], KernelConfig], Iterable[KernelConfig]] = lambda shape, root, members, config: ()


def _only(tiles: Callable[[SchedulingProblem, str, list[str]], KernelConfig | None]) -> Candidates:
    def configs(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
        found = tiles(shape, root, members)
        if found is not None:
            yield found

    return configs


ROWS, BOTH, SWEPT = "elementwise, reductions, transposes", "row and column reductions", "product and row reduction"
KINDS = (
    Kind("scans", scan_configs),
    Kind("picked sums", picked_sum_configs),
    Kind(SWEPT, swept_configs),
    Kind(BOTH, _only(row_column_tiles)),
    Kind("products of one term", single_term_configs),
    Kind("products of rank one", rank_one_configs),
    Kind("chained products", chain_configs),
    Kind("matrix-vector products", matrix_vector_configs),
    Kind("products", product_configs),
    Kind(ROWS, _only(row_tiles)),
)
RULES = (
    Rule(SWEPT, held_window_candidates),
    Rule("chained products", chain_candidates, chain_variants),
    Rule("products", streamed_candidates),
    Rule("products", window_candidates),
    Rule("products", merged_sum_candidates),
    Rule(BOTH, row_column_candidates),
    Rule(ROWS, split_row_candidates),
    Rule(ROWS, paired_sum_candidates),
    Rule(ROWS, merged_row_candidates),
    Rule(ROWS, unrolled_window_candidates),
    Rule(ROWS, tile_candidates, variants),
)
PROMISING = 3  #: candidates of which variants are looked at: a first call has no time for all
#: a candidate is taken if its predicted time is below this part of the usual one's; the second is of products of products: what is chosen so took 1.10 times
#: as long as the best of 20 at 46 kernels on an H100, by 0.9 1.12 times, the usual choice 1.18
FASTER, CHAINS_FASTER = 0.9, 0.95
#: the same of kernels without products that sum, and that do not: of 34 of the latter the usual choice was within 11% of the best of 20 measured ones;
#: of 56 of the former these candidates took 0.73 to 0.89 of the usual one's time. 0.95 made a backward of add + RMSNorm take 169 us for 129 on an H100
SUMS_FASTER, PLAIN_FASTER = 0.85, 0.75


def kernel_config(shape: SchedulingProblem, root: str, members: list[str], placed: Placed | None = None) -> KernelConfig:
    """Return the choices for the kernel of ``root``, which computes ``members``, fused where ``placed`` says; several ways to fuse have the same kernel."""
    known = (root, *members, *(placed or {}).items())
    if known not in shape.chosen:
        usual, proposed, rules = _proposed(shape, root, members)
        shape.chosen[known] = fastest(CandidateTime(shape, root, members, placed), usual, proposed, rules)
    return shape.chosen[known]


def proposals(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield the choices that the rules propose for the kernel of ``root``, which computes ``members``: the usual ones first."""
    usual, proposed, rules = _proposed(shape, root, members)
    yield usual
    for config in proposed:
        yield config
        yield from (v for rule in rules for v in rule.variants(shape, root, members, config))


def _proposed(shape: SchedulingProblem, root: str, members: list[str]) -> tuple[KernelConfig, Iterator[KernelConfig], list[Rule]]:
    few = approximations(shape, members)

    def told(config: KernelConfig) -> KernelConfig:
        return replace(config, approximations=tuple(dict.fromkeys((*config.approximations, *few))))

    for kind in KINDS:
        own = iter(kind.configs(shape, root, members))
        usual = next(own, None)
        if usual is not None:
            rules = [rule for rule in RULES if rule.kind == kind.name]
            more = chain(own, *(rule.candidates(shape, root, members) for rule in rules))
            return told(usual), map(told, _with_tripled(shape, members, usual, more) if kind.name == SWEPT else more), rules
    raise AssertionError(f"no rule for {root}")  # the last kind takes every kernel


def _with_tripled(shape: SchedulingProblem, members: list[str], usual: KernelConfig, more: Iterable[KernelConfig]) -> Iterator[KernelConfig]:
    """Yield the candidates ``more`` of a kernel; where it has one product, of float32, also ``usual`` and them with that product as three in TF32."""
    triples = shape.triples_float32 and len(products(shape, members)) == 1
    for config in chain((usual,), more) if triples else more:
        yield replace(config, approximations=(*config.approximations, ("rdot", ""))) if triples else config
        if triples and config is not usual:
            yield config


def fastest(judge: CandidateTime, usual: KernelConfig, more: Iterable[KernelConfig], rules: Iterable[Rule] = ()) -> KernelConfig:
    """Return the candidate of the shortest predicted time, ``usual`` unless one is well faster. ``rules``: whose variants of the best are candidates."""
    candidates = [c for c in dict.fromkeys(more) if c != usual]
    if not candidates:
        return usual
    time = judge.microseconds
    ranked = sorted((time(c), i) for i, c in enumerate(candidates))[:PROMISING]
    best = ranked[0][0], candidates[ranked[0][1]]
    for c in dict.fromkeys(v for _, i in ranked for rule in rules for v in rule.variants(judge.problem, judge.root, judge.members, candidates[i])):
        best = min(best, (time(c), c), key=lambda timed: timed[0])
    return best[1] if best[0] < _well_below(time(usual), judge) else usual


def _well_below(microseconds: float, judge: CandidateTime) -> float:
    """Return the predicted time below which another choice than the usual one is taken: less where the model errs more. No choice makes the launch shorter."""
    funcs = [judge.known.funcs[f] for f in (judge.root, *(m.func for m in judge.fused))]
    if any(f.products for f in funcs):
        return (CHAINS_FASTER if judge.chained else FASTER) * microseconds
    launch = min(microseconds, judge.launch)
    return launch + (SUMS_FASTER if any(f.reduced for f in funcs) else PLAIN_FASTER) * (microseconds - launch)
