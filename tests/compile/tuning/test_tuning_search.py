"""The search on a GPU that is played: planted optima, why it stops, what a resumed run keeps, and its budget."""

import math
import time

import tuning_pools

from dtkernels.autoschedule.cost.coefficients import rates_of
from dtkernels.codegen.target import target
from dtkernels.lang.tuning_space import read_shapes
from dtkernels.runtime.select.schedule_selection import gpu_of
from dtkernels.tuning.records.comparison import timed_against
from dtkernels.tuning.records.journal import Journal
from dtkernels.tuning.records.problems import CallKind, TuningProblem, problems_of, row_of, variants_of
from dtkernels.tuning.records.roofline import roofline
from dtkernels.tuning.records.write_table import pruned
from dtkernels.tuning.search.candidates import split_by_kernel, with_aligned_rows
from dtkernels.tuning.search.search import ScheduleSearch
from dtkernels.tuning.search.search_state import SearchState
from dtkernels.tuning.search.space import Surroundings, Tiling, neighbours
from dtkernels.tuning.workers.compile_worker import CpuWorker, predicted_kernel
from dtkernels.tuning.workers.simulated_worker import SimulatedGpu

H200 = target("h200")


class Planted(SimulatedGpu):
    """A GPU on which schedules of one corner of the space take half of what the model predicts."""

    def factor(self, work, plan):
        return super().factor(work, plan) * (0.4 if in_corner(Tiling.of(plan)) else 1.0)


def in_corner(t: Tiling) -> bool:
    return t.block.get("x") == 64 and t.block.get("y") in (64, 128) and t.split.get("k", 1) >= 6 and t.warps == 8


def product(**sizes) -> TuningProblem:
    return problems_of("mmsigmoid", read_shapes([{"sizes": sizes, "directions": ["forward"], "dtypes": ["bf16"]}], "t"))[0]


def search_in(folder, work, gpu, seconds=120.0, most=10**6):
    """Search as the command does, in this process."""
    journal = Journal(folder / "journal.jsonl", {"gpu": gpu_of(H200).name})
    known = SearchState([work], journal)
    search = ScheduleSearch(known, journal, tuning_pools.Inline(CpuWorker(H200, compiling=False)), tuning_pools.Inline(gpu))
    end = time.monotonic() + seconds
    for _ in search.explore(lambda: time.monotonic() > end or search.measured >= most):
        pass
    journal.close()
    return search, known


def fastest(known, work):
    return Tiling.of(known.composed(work).plans[0])


def test_an_optimum_far_from_the_start_is_found_in_two_runs_of_which_nothing_is_measured_twice(tmp_path):
    work, gpu = product(x=33, y=5120, k=5120), Planted(H200)
    search_in(tmp_path, work, gpu, most=20)
    before = dict(Journal(tmp_path / "journal.jsonl", {"gpu": gpu_of(H200).name}).times)
    search, known = search_in(tmp_path, work, gpu)
    assert len(before) >= 20 and before.items() <= search.journal.times.items()
    assert search.measured == len(search.journal.times) - len(before)
    assert in_corner(fastest(known, work)), known.composed(work).text()
    assert search.reason() == "the model expects no gain above 1% at any size"
    assert not in_corner(descended(work, gpu)), "steps to faster neighbours alone do not lead there"


def descended(work, gpu) -> Tiling:
    """Step to the fastest neighbour while that is faster, from the default schedule."""
    worker = CpuWorker(H200, compiling=False)
    whole = worker.seeds(work, families=False).default
    _, variant = variants_of(work.group)

    def time_of(plan):
        return gpu.measure(work, (), None, None, 0.0, (whole.with_plan(plan), None)).cold

    (now,) = whole.plans
    while True:
        near = neighbours(now, Surroundings.of(variant.algorithm, now, work.extents, True))
        ahead = min((p for p in near if worker.fits(work, whole.with_plan(p), p.root)), key=time_of)
        if time_of(ahead) >= time_of(now):
            return Tiling.of(now)
        now = ahead


def test_a_search_whose_time_ends_says_what_it_still_expects(tmp_path):
    work = product(x=512, y=1024, k=1024)
    search, known = search_in(tmp_path, work, Planted(H200), most=6)
    assert search.reason().startswith("the time is up: of 1 kernels at their sizes, 1 are not done; the model still expects up to ")
    assert known.composed(work) is not None, "what was measured counts"


def test_a_budget_is_kept(tmp_path):
    begin = time.monotonic()
    search_in(tmp_path, product(x=512, y=1024, k=1024), Planted(H200, pause=0.05), seconds=3.0)
    assert time.monotonic() - begin < 3.0 + 15.0, "seeds and what is in hand are finished"


def test_the_rates_are_fitted_to_what_is_measured():
    """A GPU with half the bandwidth of loads and twice the cost of a step is predicted well after a fit, and badly before."""
    work, worker = product(x=2048, y=2048, k=2048), CpuWorker(H200, compiling=False)
    shipped = rates_of(90)
    rates = shipped.products
    other = shipped._replace(products=rates._replace(rate=rates.rate / 2, l2_rate=rates.l2_rate / 3, launch=9.0))
    seeds = worker.seeds(work)
    (root,) = seeds.default.roots
    texts = [seeds.cuts[p.fused].with_plan(p).schedule(("mmsigmoid",)) for p, c in seeds.plans.items() if c is not None][:60]
    times = [predicted_kernel(work, text, root, H200, other) for text in texts]
    fitted = worker.refit([(work, text, root, t, min(times)) for text, t in zip(texts, times)])

    def error(rates):
        return sum(abs(math.log(predicted_kernel(work, text, root, H200, rates) / t)) for text, t in zip(texts, times)) / len(texts)

    assert error(fitted) < 0.35 * error(shipped), (error(fitted), error(shipped))
    assert (fitted.rows, fitted.streams) == (shipped.rows, shipped.streams), "kernels without products were not measured"


# -- what is written and printed ----------------------------------------------------------------------------------------


def test_rows_that_a_call_is_given_anyway_are_left_out():
    wide, deep = (f"mmsigmoid.block(x:64, y:{n}); mmsigmoid.tensorize(x:64, y:{n}, k:64); mmsigmoid.compile();" for n in (128, 64))
    works = [product(x=n, y=n, k=n) for n in (1024, 1536, 1537, 4096)]
    schedules = (wide, wide, wide, deep)
    rows = {w: row_of(w, s, microseconds=w.extents["x"] / 50) for w, s in zip(works, schedules)}
    left = pruned(rows)
    assert len(left) == 3 and {r.schedule for r in left} == {wide, deep}
    assert 1537 in {r.sizes["x"] for r in left}, "its kernels are built for rows that nothing divides"


def test_peers_are_timed_in_the_same_workers_and_a_failure_is_told():
    class Peers(SimulatedGpu):
        def peer(self, work, name):
            if name == "compile":
                raise RuntimeError("no compiler")
            return super().peer(work, name)

    work = product(x=512, y=512, k=512)
    found = timed_against(tuning_pools.Inline(Peers(H200)), [work], ("eager", "compile"), lambda: False)
    assert found[work]["eager"].cold == 2 * roofline(work, H200) and found[work]["compile"].failure == "RuntimeError: no compiler"
    assert timed_against(tuning_pools.Inline(Peers(H200)), [work], ("eager",), lambda: True) == {}


def test_the_roofline_is_the_longer_of_bytes_and_products():
    few, many = product(x=16, y=8192, k=8192), product(x=8192, y=8192, k=8192)
    moved = 2 * (16 * 8192 + 8192 * 8192 + 16 * 8192)
    assert roofline(few, H200) == moved / H200.bandwidth * 1e6
    assert 1000 < roofline(many, H200) < 1600, "cuBLAS takes 1570 us"


def test_what_a_kernel_reads_by_descriptors_has_aligned_rows():
    """Else a kernel is timed that falls back to pointers, ten times slower."""
    kind = CallKind("mmsigmoid", "backward", "bf16", wanted=("A", "B"))
    variant = variants_of(kind)[1]
    text = "operand.num_warps(8); d_A.block(x:128, k:64); d_A.tensorize(x:128, k:64, y:64); d_A.descriptor(operand, B); d_A.num_warps(4);"
    whole = split_by_kernel(variant.algorithm, variant.outputs, text)
    odd, even = (with_aligned_rows(whole, TuningProblem(kind, (("x", 512), ("y", y), ("k", 512)))) for y in (1001, 1024))
    assert even == whole and "operand.align();" in odd.schedule(variant.outputs) and "d_A.align" not in odd.schedule(variant.outputs)
    assert split_by_kernel(variant.algorithm, variant.outputs, odd.schedule(variant.outputs)) == odd
