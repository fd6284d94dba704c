"""The tuner where a tile of a whole extent fits at one size and not at another, a sum has parts, or a last wave is cut finer."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path[:0] = [str(Path(__file__).parents[3] / "tools")]

from dtkernels.autoschedule.default_schedule import default_schedule  # noqa: E402
from dtkernels.codegen.target import target  # noqa: E402
from dtkernels.lang.parser import parse, parse_schedule  # noqa: E402
from dtkernels.lang.tuning_space import read_shapes  # noqa: E402
from dtkernels.runtime.build.specialization import fits  # noqa: E402
from dtkernels.runtime.launch.wrapper_recorder import record  # noqa: E402
from dtkernels.tuning.records.inputs_and_reference import itemsizes, meta_arguments  # noqa: E402
from dtkernels.tuning.records.problems import problems_of, variants_of  # noqa: E402
from dtkernels.tuning.search.candidates import KernelCandidate, kernels_of, split_by_kernel  # noqa: E402
from dtkernels.tuning.search.model import Residuals  # noqa: E402
from dtkernels.tuning.search.playoffs import Playoffs  # noqa: E402
from dtkernels.tuning.search.search import Job, ScheduleSearch  # noqa: E402
from dtkernels.tuning.search.space import Surroundings, neighbours  # noqa: E402
from dtkernels.tuning.workers.benchmark_worker import build_for  # noqa: E402
from dtkernels.tuning.workers.compile_worker import CpuWorker  # noqa: E402
from dtkernels.tuning.workers.worker_pool import Finished  # noqa: E402


def works(op, direction="backward", **sizes):
    shapes = read_shapes([{"sizes": sizes, "dtypes": ["bf16"], "directions": [direction]}], "t")
    return [w for w in problems_of(op, shapes) if w.group.direction == direction]


@pytest.fixture(scope="module")
def narrow():
    """Backward of a chain at two ranks, and what to start from."""
    found = works("two_mm", m=8192, n=4096, k=4096, l=[64, 16])
    return found, CpuWorker(target("h200"), compiling=False).seeds(found[1])


@pytest.mark.parametrize("failure, again", [("Refused: d_C takes 311296 bytes of shared memory", True), ("DTError: no", False)])
def test_what_does_not_fit_at_one_size_is_compiled_for_the_next(narrow, failure, again):
    (large, small), seeds = narrow
    jobs = [Job(w, seeds.default, seeds.default.roots[0]) for w in (large, small)]
    told = []
    search = ScheduleSearch(SimpleNamespace(cells={}), SimpleNamespace(put=lambda work, *rest: told.append(work)), None, None)
    search.jobs_of[jobs[0].key] = [((0,), j) for j in jobs]
    search._computed(Finished(("compile", jobs[0], jobs[0].key), 0, failure=failure))
    assert [job.work for _, _, (job, _) in search.to_compile] == ([small] if again else [])
    assert told == [large.text()] if again else sorted(told) == sorted(w.text() for w in (large, small))
    finals = Playoffs(search.known, search.journal, None, None, {}, {})
    finals.waiting = {w: [Job(w, seeds.default, None)] for w in (large, small)}
    finals.making = {(finals.waiting[large][0].key, large)}
    finals._compiled(finals.waiting[large][0], Finished(None, 0, failure=failure))
    assert finals._made(finals.waiting[large][0]) and not finals._made(finals.waiting[small][0])
    assert [job.work for job in finals.wanted] == [small]


def test_what_was_compiled_for_other_sizes_is_compiled_for_each_of_those_that_wait(narrow):
    works_, seeds = narrow
    jobs = [Job(w, seeds.default, seeds.default.roots[0]) for w in works_]
    told = []
    search = ScheduleSearch(SimpleNamespace(cells={}), SimpleNamespace(put=lambda work, *rest: told.append(work)), None, None)
    for job in jobs:
        search._timed(Finished(job, 0, failure="Refused: no build of two_mm_kernel for this call"))
    assert [job.work for _, _, (job, _) in search.to_compile] == [*works_] and not told
    search._timed(Finished(jobs[0], 0, failure="Refused: no build of two_mm_kernel for this call"))
    assert told == [works_[0].text()], "once"


def test_steps_leave_the_statements_of_a_sum_of_parts_alone(narrow):
    (_, work), seeds = narrow
    plan = next(p for p in seeds.default.plans if p.root == "d_C")
    own = [line for line in plan.tiles.splitlines() if line.startswith("d_mm.")]
    found = neighbours(plan, Surroundings.of(variants_of(work.group)[1].algorithm, plan, work.extents, True))
    assert own and len(found) > 8
    for new in found:
        assert {line for line in new.tiles.splitlines() if line.startswith("d_mm.")} == {*own} and parse_schedule(new.tiles)
    worker = CpuWorker(target("h200"))
    assert sum(worker.fits(work, seeds.default.with_plan(p), p.root) for p in found) > 8, "the number of parts is known"


def test_what_products_alone_take_counts_as_the_inputs_do():
    """In float32 the deep tiles of mmsigmoid's backward did not seem to fit."""
    (work,) = works("mmsigmoid", x=1024, y=1024, k=1024)
    assert itemsizes(work)["operand"] == 2
    seeds = CpuWorker(target("h200"), compiling=False).seeds(work)
    assert all(cost is not None for plan, cost in seeds.plans.items() if plan in seeds.default.plans)


def test_a_family_that_leaves_a_kernel_out_or_does_not_fit_is_left_out():
    (work,) = works("two_mm", m=1024, n=1024, k=64, l=64)
    small = CpuWorker(target("h200"), compiling=False).seeds(work)
    way = "d_mm.fuse_at(d_B, m);\nd_A.fuse_at(d_B, m);"
    assert way in small.cuts and {p.root for p in small.plans if p.fused == way} == {"d_B", "d_C"}
    (wide,) = works("two_mm", m=1024, n=1024, k=4096, l=64)
    assert way not in CpuWorker(target("h200"), compiling=False).seeds(wide).cuts, "all of k by one program"


def test_the_last_wave_of_programs_that_stay_is_cut_finer_or_not():
    (work,) = works("mmsigmoid", "forward", x=2048, y=2048, k=4096)
    text = "mmsigmoid.block(x:128, y:256);\nmmsigmoid.tensorize(x:128, y:256, k:64);\nmmsigmoid.persistent();\nmmsigmoid.descriptor(A, B);\n{}mmsigmoid.num_warps(8);\nmmsigmoid.num_stages(3);"
    tail = "mmsigmoid.tail(x:64, y:128);"
    around = Surroundings.of(variants_of(work.group)[1].algorithm, KernelCandidate("", "mmsigmoid", text.format("")), work.extents, True)
    without, cut_finer = ([p.tiles for p in neighbours(KernelCandidate("", "mmsigmoid", text.format(t)), around)] for t in ("", tail + "\n"))
    assert [t for t in without if tail in t] and text.format("") in cut_finer
    assert not [t for t in cut_finer if "tail" in t and (".persistent" not in t or ".descriptor" not in t or ".split" in t)]


def test_a_last_wave_is_compiled_and_launched_with_the_rest():
    """Else what it writes stays unwritten, and every candidate with one would be refused."""
    (work,) = works("mmsigmoid", "forward", x=4097, y=4097, k=4097)
    _, variant = variants_of(work.group)
    whole = split_by_kernel(variant.algorithm, variant.outputs, str(default_schedule(variant.algorithm, variant.outputs, work.extents, 2, target("h200"))))
    assert ".tail(" in whole.text()
    assert "mmsigmoid_tail_descriptor_kernel" in CpuWorker(target("h200"), compiling=False).compile(work.group, whole, None, (work,)).kernels


def test_a_sum_is_tuned_with_its_parts():
    algorithm = parse("""Func g, e, f; In B, C, X, W; Var m, n, k; RVar l; g[m, l] = rdot(X[m, n], C[l, n], n);
    e[m, k] = rdot(g[m, l], B[k, l], l); f[l, n] = rdot(W[m, l], X[m, n], m); e.compile(); f.compile();""").algorithm
    text = """g.parts_at(f, n); g.block(m:16); g.tensorize(m:16, l:0); f.block(n:32); f.tensorize(l:0, n:32, m:16); f.split(m:2);
    e.block(m:16, k:16); e.tensorize(m:16, k:16, l:16);"""
    whole = split_by_kernel(algorithm, ("e", "f"), text)
    assert whole.roots == ("f", "e") and "g.block(m:16);" in whole.plans[0].tiles
    assert [k.name for k in kernels_of(algorithm, ("e", "f"), whole, "f")] == ["f_part", "f", "g"]


def test_a_share_of_the_exponentials_is_tried_and_left_beside_products_only():
    (work,) = works("attention", "forward", b=4, h=32, m=4096, n=64, l=4096, d=64)
    (plan,) = split_by_kernel(*_of(work), str(default_schedule(*_of(work), work.extents, 2, target("h200")))).plans
    around = Surroundings.of(_of(work)[0], plan, work.extents, True)
    assert "approximate(exp:1/8)" in plan.tiles, "the default schedule asks for it at 64 columns"
    without = KernelCandidate(plan.fused, plan.root, plan.tiles.replace("attention.approximate(exp:1/8);\n", ""))
    assert any({*without.tiles.splitlines()} <= {*p.tiles.splitlines()} and "exp:" not in p.tiles for p in neighbours(plan, around))
    assert any("approximate(exp:1/8)" in p.tiles for p in neighbours(without, around))
    (rows,) = works("softmax", "forward", x=4096, y=4096)
    for alone in split_by_kernel(*_of(rows), str(default_schedule(*_of(rows), rows.extents, 2, target("h200")))).plans:
        near = neighbours(alone, Surroundings.of(_of(rows)[0], alone, rows.extents, True))
        assert near and not any("exp:" in p.tiles for p in near)


@pytest.mark.parametrize("keys, specialized", [(1024, False), (4096, True)])
def test_consumers_of_64_columns_want_a_long_loop(keys, specialized):
    (work,) = works("attention", "forward", b=4, h=32, m=keys, n=64, l=keys, d=64)
    assert ("specialize_warps" in str(default_schedule(*_of(work), work.extents, 2, target("h200")))) == specialized


def test_a_kernel_of_which_no_candidate_ran_is_proposed_for():
    """Every first candidate may fail: the order of the predictions is left."""
    plans = [KernelCandidate("", "f", f"f.block(x:{n});") for n in (32, 64)]
    found = Residuals([], [], [])
    assert found.gains(plans, [2.0, 1.0]).argmax() == 1 and found.after(plans, [2.0, 1.0])[0].shape == (2,)


def _of(work):
    variant = variants_of(work.group)[1]
    return variant.algorithm, variant.outputs


def test_what_is_timed_is_the_build_of_the_very_sizes():
    """One plan compiled for rows that nothing divides, then for even ones: a build that merely fits takes several times as long."""
    odd, even = (works("softmax", "forward", x=64, y=y)[0] for y in (1001, 1024))
    whole = split_by_kernel(*_of(even), "total_shift.fuse_at(softmax, x); total.fuse_at(softmax, x); softmax.block(x:1); softmax.tensorize(x:1, y:1024); softmax.compile();")
    made = {w: CpuWorker(target("h200")).compile(w.group, whole, None, (w,)) for w in (odd, even)}
    for work, other in ((odd, even), (even, odd)):
        (launch,) = record(made[work].host, meta_arguments(work)).launches
        chosen = build_for(launch, [*made[other].entries, *made[work].entries])
        assert chosen is not None and chosen.name in {e.name for e in made[work].entries}
        assert build_for(launch, made[other].entries) is None
    (launch,) = record(made[even].host, meta_arguments(even)).launches
    assert any(fits(e, launch.names, launch.args, launch.constants) for e in made[odd].entries), "it would have run"
