"""The tuner's space at odd sizes and of computed operands: what default schedules propose is in it, and the default takes part."""

import random

import pytest
import tuning_pools

from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.target import target
from dtkernels.lang.tuning_space import read_shapes
from dtkernels.runtime.select.schedule_selection import gpu_of
from dtkernels.tuning.records.journal import Journal
from dtkernels.tuning.records.problems import problems_of, variants_of
from dtkernels.tuning.search.candidates import readers, split_by_kernel
from dtkernels.tuning.search.search import ScheduleSearch
from dtkernels.tuning.search.search_state import SearchState
from dtkernels.tuning.search.space import Surroundings, Tiling, drawn, neighbours, stored_operands
from dtkernels.tuning.workers.compile_worker import CpuWorker
from dtkernels.tuning.workers.simulated_worker import SimulatedGpu

H200 = target("h200")
ODD = {"m": 4097, "n": 4097, "k": 4097}


@pytest.fixture
def gated(tmp_path):
    """A product of a gated operand, at an odd size."""
    (tmp_path / "gated.yaml").write_text("""op: gated_product
doc: A product of a gated operand.
algorithm: |
  Func f; In A, B, W; Var m, n; RVar k;
  f[m, n] = rdot(A[m, k] / (1 + exp(-A[m, k])) * B[m, k], W[n, k], k);
""")
    return problems_of(str(tmp_path / "gated.yaml"), read_shapes([{"sizes": ODD, "directions": ["forward"], "dtypes": ["bf16"]}], "t"))[0]


def product(**sizes):
    return problems_of("mmsigmoid", read_shapes([{"sizes": sizes, "directions": ["forward"], "dtypes": ["bf16"]}], "t"))[0]


def test_a_computed_operand_may_be_stored_first_and_its_kernel_is_part_of_the_time(gated):
    variant, worker = variants_of(gated.group)[1], CpuWorker(H200, compiling=False)
    seeds = worker.seeds(gated)
    default = str(default_schedule(variant.algorithm, variant.outputs, gated.extents, 2, H200))
    assert seeds.default == split_by_kernel(variant.algorithm, variant.outputs, default) and readers(variant.algorithm, default) == {"f_left": "f"}
    (plan,) = seeds.default.plans
    assert stored_operands(plan) == {"f_left"} and "f_left" in plan.tiles and len(seeds.plans) >= 2
    inside = next(p for p in seeds.plans if not stored_operands(p))
    assert seeds.plans[plan] < seeds.plans[inside], "as on a GPU, where such a loop took 1.4 to 5 times as long"
    without = [line for line in plan.tiles.splitlines() if not line.startswith("f_left.num_warps")]
    assert Tiling.of(plan).block == {"m": 128, "n": 256} and "f_left.num_warps(4);" in Tiling.of(plan).text() and len(without) < len(plan.tiles.splitlines())
    around = Surroundings.of(variant.algorithm, plan, gated.extents, True)
    assert around.tensors == ("f_left", "W", "f")
    found = neighbours(plan, around)
    assert all(readers(variant.algorithm, p.tiles) == {"f_left": "f"} for p in found)
    assert sum(worker.fits(gated, seeds.default.with_plan(p), "f") for p in found[::6]) >= 2


def test_a_tuned_odd_size_is_never_worse_than_the_default(gated, tmp_path):
    journal = Journal(tmp_path / "journal.jsonl", {"gpu": gpu_of(H200).name})
    known = SearchState([gated], journal)
    search = ScheduleSearch(known, journal, tuning_pools.Inline(CpuWorker(H200, compiling=False)), tuning_pools.Inline(SimulatedGpu(H200)))
    for _ in search.explore(lambda: search.measured >= 8):
        pass
    journal.close()
    times = next(iter(known.cells.values())).times
    default = times[known.default[gated].plans[0]]
    assert search.measured >= 6 and known.composed(gated) is not None
    assert times[known.composed(gated).plans[0]].score <= default.score < 0.2 * max(t.score for t in times.values())
    assert sum(bool(stored_operands(p)) for p in times) >= 4


def test_descriptors_read_aligned_copies_where_rows_are_odd():
    work = product(x=4097, y=4097, k=4097)
    algorithm = variants_of(work.group)[1].algorithm
    (plan,) = CpuWorker(H200, compiling=False).seeds(work, families=False).default.plans
    around = Surroundings.of(algorithm, plan, work.extents, True)
    root, (left, right) = plan.root, around.loose()
    texts = [p.tiles for p in neighbours(plan, around)]
    assert any(f"{root}.stage({left}, {right});" in t and f"{root}.descriptor({left}, {right});" in t for t in texts)
    assert around.loose() and Surroundings.of(algorithm, plan, {x: 4096 for x in work.extents}, True).loose() == ()


def test_consumers_in_turn_are_in_the_space():
    work = product(x=4096, y=4096, k=4096)
    worker = CpuWorker(H200, compiling=False)
    whole = worker.seeds(work, families=False).default
    around = Surroundings.of(variants_of(work.group)[1].algorithm, whole.plans[0], work.extents, True)
    found = [p for p in neighbours(whole.plans[0], around) if "ping_pong" in p.tiles]
    assert found and all(worker.fits(work, whole.with_plan(p), p.root) for p in found)
    assert all("persistent" in p.tiles and "specialize_warps" in p.tiles and "num_warps(8)" in p.tiles for p in found)
    rng, draws = random.Random(0), []
    for _ in range(60):
        draws.append(drawn(found[0], around, 2, rng))
    assert all("ping_pong" not in p.tiles for p in draws if "num_warps(8)" not in p.tiles or "persistent" not in p.tiles)


def test_a_tail_of_larger_pieces_than_the_block_is_left_out():
    """A proposal that divided by none of its pieces ended the search of a kernel."""
    work = product(x=4097, y=4097, k=4097)
    (plan,) = CpuWorker(H200, compiling=False).seeds(work, families=False).default.plans
    t = Tiling.of(plan)
    assert ".tail(" in t.text()
    x, y = t.block
    small = t.__class__(**{**t.__dict__, "block": {x: 32, y: 64}, "tile": {**t.tile, x: 32, y: 64}})
    assert ".tail(" not in small.text() and Tiling.of(type(plan)(plan.fused, plan.root, small.text())).block == {x: 32, y: 64}
