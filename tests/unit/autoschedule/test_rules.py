# ruff: noqa: E501 (programs read best on one line)
"""Rules of the default schedule: what they propose, and when a candidate is taken. Without torch."""

import pytest

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.cost.candidate_time import CandidateTime
from dtkernels.autoschedule.cost.kernel_config import KernelConfig
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.autoschedule.fit_resources import element_bytes, first_too_large
from dtkernels.autoschedule.problem import SchedulingProblem
from dtkernels.autoschedule.rules import registry
from dtkernels.autoschedule.rules.chain_candidates import chain_candidates
from dtkernels.autoschedule.rules.gemm_row_reduction import gemm_row_reduction_tiles
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program, Schedule

CHAIN = """Func s, t, e, u, f; In Q, K, V; Var b, h, m, n; RVar l, d;
s[b, h, m, l] = rdot(Q[b, h, m, d], K[b, h / {g}, l, d], d); t[b, h, m] = rmax(s[b, h, m, l], l); e[b, h, m, l] = exp(s[b, h, m, l] - t[b, h, m]);
u[b, h, m] = rsum(e[b, h, m, l], l); f[b, h, m, n] = rdot(e[b, h, m, l], V[b, h / {g}, l, n], l) / u[b, h, m];"""
MEMBERS = ["f", "s", "t", "e", "u"]
H200 = target("h200")


def chain(group: int, gpu=H200, **sizes: int):
    algorithm = prepare_algorithm(parse(CHAIN.format(g=group)).algorithm, ("f",))
    sizes = {"b": 1, "h": 4 * group, "m": 1, "n": 128, "l": 8192, "d": 128} | sizes
    return SchedulingProblem(algorithm, ("f",), sizes, 2, gpu)


def scheduled(shape: SchedulingProblem) -> Schedule:
    return default_schedule(shape.algorithm, ("f",), shape.sizes, 2, shape.target)


@pytest.mark.parametrize("gpu", ["a100", "h200", "b200", "mi300x"])
@pytest.mark.parametrize("width", [64, 112, 256])
@pytest.mark.parametrize("group", [2, 3, 5, 7, 16, 19, 24, 48, 64, 102])
def test_a_group_of_any_size_is_packed_into_the_rows_of_a_tile(group, width, gpu):
    shape = chain(group, target(gpu), n=width, d=width)
    schedule = scheduled(shape)
    assert {x for x, _ in schedule.fused().items()} == {"s", "t", "e", "u"}
    block, tile = schedule.sizes("f", "block")["h"], schedule.sizes("f", "tensorize")["h"]
    assert tile == max(16, 1 << (block - 1).bit_length())
    assert block == group or gpu == "mi300x" and group % block == 0, "no more than it has shared memory for"
    kernels = lower(Program(shape.algorithm, schedule))
    assert first_too_large(kernels, shape.sizes, element_bytes(shape.algorithm, ("f",), 2), shape.target) is None
    assert (schedule.number("f", "num_stages") or 0) > 1 or gpu == "mi300x", schedule


def test_keys_are_split_so_that_few_groups_fill_the_gpu():
    for heads, keys in ((1, 30000), (3, 30000), (8, 30000), (8, 1000)):
        shape = chain(8, h=8 * heads, l=keys)
        parts = scheduled(shape).sizes("f", "split")["l"]
        assert parts > 1 and heads * parts <= 2 * H200.multiprocessors
        assert keys // parts >= 64


def test_a_short_loop_takes_shorter_steps():
    short, long = (scheduled(chain(1, b=128, h=16, m=m, l=m, n=64, d=64)).sizes("f", "tensorize") for m in (77, 1024))
    assert (short["l"], long["l"]) == (32, 64)


def test_every_candidate_of_a_chain_is_legal():
    for sizes in ({}, {"m": 2}, {"m": 100, "l": 100}, {"n": 256, "d": 256}, {"l": 100}):
        shape = chain(5, **sizes)
        fused = [p for p in scheduled(chain(5)).primitives if p.name == "fuse_at"]
        for config in chain_candidates(shape, "f", MEMBERS):
            lower(Program(shape.algorithm, Schedule((*fused, *config.statements()))))


def test_a_long_loop_has_blocks_and_steps_of_every_useful_size():
    """Eight warps suit more than 64 rows; steps of 128 elements were slow in long loops of two products."""
    found = [*chain_candidates(chain(1, m=2048, l=2048), "f", MEMBERS)]
    sizes = {(dict(c.blocks)["m"], dict(c.tiles)["l"], c.num_warps) for c in found if not c.specialized}
    assert sizes == {(m, step, 8 if m > 64 else 4) for m in (32, 64, 128) for step in (32, 64)}


def test_a_short_loop_is_held_whole_too():
    found = [*chain_candidates(chain(1, b=64, m=100, l=100), "f", MEMBERS)]
    assert any(dict(c.tiles)["l"] == 0 and c.num_stages == 1 for c in found)


def test_a_candidate_is_taken_if_it_is_predicted_to_be_well_faster(monkeypatch):
    shape, (usual, good, fair) = chain(4), (KernelConfig("f", num_warps=n) for n in (1, 2, 4))
    times = {usual: 10.0, good: 10 * registry.FASTER - 0.1, fair: 10 * registry.FASTER + 0.1}
    monkeypatch.setattr(CandidateTime, "microseconds", lambda self, config: times[config])
    assert registry.fastest(CandidateTime(shape, "f", MEMBERS), usual, [fair, good, usual]) is good
    assert registry.fastest(CandidateTime(shape, "f", MEMBERS), usual, [fair, usual]) is usual
    assert registry.fastest(CandidateTime(shape, "f", MEMBERS), usual, []) is usual


@pytest.mark.parametrize("text, kind", [
    ("Func f; In A; Var x, y; f[x, y] = A[x, y] * A[x, y];", "elementwise, reductions, transposes"),
    ("Func f; In A; Var x; RVar k; f[x] = rsum(A[x, k], k);", "elementwise, reductions, transposes"),
    ("Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k);", "products"),
    ("Func t, f; In A, B; Var x; RVar k, y; t[x, y] = rdot(A[x, k], B[k, y], k); f[x] = rmax(t[x, y], y);", "product and row reduction"),
    ("Func t, f; In A, B, C, D; Var x; RVar k, r, y; t[x, y] = rdot(A[x, k], B[k, y], k) + rdot(C[x, r], D[y, r], r); f[x] = rmax(t[x, y], y);", "product and row reduction"),
    (CHAIN.format(g=4), "chained products"),
])  # fmt: skip
def test_a_kernel_is_of_one_kind(text, kind):
    algorithm = prepare_algorithm(parse(text).algorithm, ("f",))
    shape = SchedulingProblem(algorithm, ("f",), dict.fromkeys(algorithm.labels, 128), 2, H200)
    members = list(reversed(algorithm.funcs))
    assert next(k.name for k in registry.KINDS if next(iter(k.configs(shape, "f", members)), None)) == kind


def test_rows_of_a_sum_of_products_are_swept_in_tiles():
    """A product of low rank beside a long one takes tiles of the long one; before, columns were taken one by one."""
    text = "Func t, f; In A, B, C, D; Var x; RVar k, r, y; t[x, y] = rdot(A[x, k], B[y, k], k) + rdot(C[x, r], D[y, r], r); f[x] = rsum(exp(t[x, y]), y);"
    found = default_schedule(prepare_algorithm(parse(text).algorithm, ("f",)), ("f",), {"x": 8192, "y": 128256, "k": 4096, "r": 16}, 2, H200)
    tile = found.sizes("f", "tensorize")
    assert tile["x"] >= 64 and tile["y"] >= 128 and tile["k"] >= 32 and tile["r"] == 16
    text = "Func t, f; In A, B, C, D; Var x; RVar k, r, y; t[x, y] = rdot(A[x, k], B[y, k], k) + rdot(C[r], D[y, r], r); f[x] = rmax(t[x, y], y);"
    algorithm = prepare_algorithm(parse(text).algorithm, ("f",), inline=frozenset())  # a vector's product has one side only
    assert gemm_row_reduction_tiles(SchedulingProblem(algorithm, ("f",), dict.fromkeys(algorithm.labels, 128), 2, H200), "f", ["f", "t"]) is None


SHARED = "Func s, f, g; In A, B, C; Var x, y; RVar k; s[x, k] = rdot(A[x, y], B[y, k], y); f[x, y] = rdot(s[x, k], C[k, y], k); g[x, k] = rdot(f[x, y], B[y, k], y) + s[x, k];"


@pytest.mark.parametrize("empty", ["x", "y", "k", ""])
def test_nothing_is_stored_from_inside_a_loop_that_is_empty(empty):
    algorithm = prepare_algorithm(parse(SHARED).algorithm, ("g", "f"))
    sizes = {"x": 16384, "y": 4096, "k": 32} | ({empty: 0} if empty else {})
    schedule = default_schedule(algorithm, ("g", "f"), sizes, 2, H200)
    inside = {p.func for p in schedule.primitives if p.name in ("store", "compile")} & {*schedule.fused()}
    assert not inside if empty else True, schedule


@pytest.mark.parametrize("rows", [2048, 8192])
def test_distances_of_all_pairs_take_one_term_a_step(rows):
    algorithm = prepare_algorithm(parse("Func f; In A, B; Var x, y; RVar k; f[x, y] = rsum(abs(A[x, k] - B[y, k]), k);").algorithm, ("f",))
    found = default_schedule(algorithm, ("f",), {"x": rows, "y": rows, "k": 128}, 2, H200)
    assert found.sizes("f", "tensorize") == {"x": 128, "y": 64, "k": 1}


def test_a_result_in_float32_leaves_persistent_products_fewer_stages():
    """128 x 256 sums in float32 take 128 KiB of shared memory: three stages of loads have no room beside them, so programs do not stay."""
    algorithm = prepare_algorithm(parse("Func g, f; In A, B; Var x, y; RVar k; g[x, y] = rdot(A[x, k], B[k, y], k); f[x, y] = exp(g[x, y]) + rsum(g[x, z], z); RVar z;").algorithm, ("f",))
    found = default_schedule(algorithm, ("f",), {"x": 8192, "y": 4096, "z": 4096, "k": 4096}, 2, H200)
    persistent = any(p.name == "persistent" and p.func == "g" for p in found.primitives)
    stages = next(p.args[0] for p in found.primitives if p.name == "num_stages" and p.func == "g")
    assert not (persistent and stages > 2)


def test_a_sum_of_one_step_loads_nothing_ahead():
    """Linear attention's second product, 64 x 4096 x 64 x 64 on an H100: with four stages one program a multiprocessor, 67 us for both products; with two 58."""
    text = "Func f; In A, B; Var b, x, y; RVar k; f[b, x, y] = rdot(A[b, x, k], B[b, k, y], k);"
    for k, most in ((64, 2), (2048, 5)):
        problem = SchedulingProblem(prepare_algorithm(parse(text).algorithm, ("f",)), ("f",), {"b": 64, "x": 4096, "y": 64, "k": k}, 2, target("h100"))
        found = [c for c in registry.proposals(problem, "f", ["f"]) if not c.persistent]
        assert max(c.stages for c in found) == most or k > 64 and max(c.stages for c in found) > 2


ONE_TERM = """Func g, a, b; In A, B, d, c; Var x, y, k; g[x, y] = d[x, y] * (c[x, y] * (1 - c[x, y]));
a[x, k] = rdot(g[x, y], B[k, y], y); b[k, y] = rdot(g[x, y], A[x, k], x);"""


@pytest.mark.parametrize("terms, columns, together", [(1, 462, True), (1, 7250, False), (2, 462, False)], ids=["one", "long rows", "two"])
def test_gradients_of_a_sum_of_one_term_read_their_operand_once(terms, columns, together):
    """With one term both are sums of the same elements, along rows and down columns."""
    algorithm = prepare_algorithm(parse(ONE_TERM).algorithm, ("a", "b"))
    found = default_schedule(algorithm, ("a", "b"), {"x": 417, "y": columns, "k": terms}, 2, H200).fused()
    assert ("a" in found and found["a"][0] == "b") == together
