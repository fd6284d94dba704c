"""The tuner without a GPU: a stand-in takes the times, and hangs, dies and fails where a test asks for it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import stand_in_gpu

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tools"), str(Path(__file__).parent)]

import tuning_workers  # noqa: E402

from dtkernels.autoschedule.default_schedule import default_schedule  # noqa: E402
from dtkernels.codegen.target import target  # noqa: E402
from dtkernels.lang.errors import DTError  # noqa: E402
from dtkernels.lang.parser import parse_schedule  # noqa: E402
from dtkernels.lang.tuning_space import read_shapes  # noqa: E402
from dtkernels.runtime.build.specialization import fits  # noqa: E402
from dtkernels.runtime.launch.wrapper_recorder import record  # noqa: E402
from dtkernels.runtime.tables.table import read_gpu, read_rows  # noqa: E402
from dtkernels.tuning.records.inputs_and_reference import make, wrong  # noqa: E402
from dtkernels.tuning.records.journal import Journal, Time  # noqa: E402
from dtkernels.tuning.records.measurement_store import read_matrices  # noqa: E402
from dtkernels.tuning.records.problems import problems_of, row_of, variants_of  # noqa: E402
from dtkernels.tuning.search.candidates import KernelCandidate, ScheduleCandidate, split_by_kernel  # noqa: E402
from dtkernels.tuning.search.portfolio import choose, dispatched, summary  # noqa: E402
from dtkernels.tuning.search.space import Surroundings, Tiling, neighbours  # noqa: E402
from dtkernels.tuning.workers.benchmark_worker import GpuWorker  # noqa: E402
from dtkernels.tuning.workers.compile_worker import CpuWorker, completed, family_texts  # noqa: E402
from dtkernels.tuning.workers.worker_pool import WorkerPool  # noqa: E402

H200 = target("h200")
SMALL = {
    "relu": {"x": 4096}, "softmax": {"x": 64, "y": 256}, "dyt": {"x": 64, "y": 256}, "mmsigmoid": {"x": 128, "y": 64, "k": 96},
    "two_mm": {"m": 128, "n": 256, "l": 32, "k": 64}, "attention": {"b": 1, "h": 2, "m": 64, "l": 96, "d": 32, "n": 32},
}  # fmt: skip


def works(op: str, dtype: str = "fp32", **more):
    return problems_of(op, read_shapes([{"sizes": SMALL[op], **more}], "test"), (dtype,))


def whole(work) -> ScheduleCandidate:
    _, v = variants_of(work.group)
    return split_by_kernel(v.algorithm, v.outputs, str(default_schedule(v.algorithm, v.outputs, work.extents, work.group.itemsize, H200)))


# -- candidates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", sorted(SMALL))
def test_a_schedule_is_the_sum_of_its_plans(op):
    for work in works(op):
        _, v = variants_of(work.group)
        made = whole(work)
        assert split_by_kernel(v.algorithm, v.outputs, made.schedule(v.outputs)) == made
        assert all(KernelCandidate.read(p.text()) == p and Tiling.of(p).text() for p in made.plans)


@pytest.mark.parametrize("op", sorted(SMALL))
def test_neighbours_are_legal_text_differ_and_some_fit(op):
    worker = CpuWorker(H200, compiling=False)
    for work in works(op, "bf16"):
        made = whole(work)
        for plan in made.plans:
            around = Surroundings.of(variants_of(work.group)[1].algorithm, plan, work.extents, True)
            found = neighbours(plan, around)
            assert plan not in found and len({p.tiles for p in found}) == len(found)
            for new in found:
                assert Tiling.of(new).text() == new.tiles
                parse_schedule(new.tiles)
            assert any(worker.fits(work, made.with_plan(p), p.root) for p in found)


def test_neighbours_take_any_value_of_a_dimension_and_know_products():
    (work, *_) = works("mmsigmoid", "bf16", sizes={"x": 2048, "y": 2048, "k": 4096})
    text = "mmsigmoid.block(x:128, y:128);\nmmsigmoid.tensorize(x:128, y:128, k:64);\nmmsigmoid.num_warps(8);\nmmsigmoid.num_stages(3);"
    around = Surroundings.of(variants_of(work.group)[1].algorithm, KernelCandidate("", "mmsigmoid", text), work.extents, True)
    found = [Tiling.of(p) for p in neighbours(KernelCandidate("", "mmsigmoid", text), around)]
    assert any(t.block == {"x": 256, "y": 128} and t.tile["x"] == 256 for t in found)
    assert {t.warps for t in found} >= {1, 2, 4, 8, 16}
    assert {t.stages for t in found} >= {1, 2, 3, 4, 5, 6}
    assert {t.tile["k"] for t in found} >= {16, 32, 64, 128, 256}
    assert any(t.persistent for t in found) and any(t.split == {"k": 2} for t in found)
    assert any(t.descriptor == ("A", "B", "mmsigmoid") for t in found)


def test_every_family_of_the_package_gives_legal_schedules_somewhere():
    for op in sorted(SMALL):
        for work in works(op, "bf16"):
            _, v = variants_of(work.group)
            legal = 0
            for text in family_texts(work.group):
                try:
                    split_by_kernel(v.algorithm, v.outputs, completed(text, whole(work), v.outputs))
                    legal += 1
                except DTError:
                    continue
            assert legal or not list(family_texts(work.group)), work.title()


@pytest.mark.parametrize("op", sorted(SMALL))
def test_what_is_compiled_for_a_plan_fits_the_launches_of_the_call(op, monkeypatch):
    stand_in_gpu.tensors_on_it(monkeypatch)
    worker = CpuWorker(H200)
    for work in works(op):
        made = whole(work)
        root = made.roots[-1]
        artefact = worker.compile(work.group, made, root, (work,))
        data = make(work, tuple({*variants_of(work.group)[1].outputs, *made.roots}), "cpu")
        launches = [x for x in record(artefact.host, data.values).launches if x.kernel in artefact.kernels]
        assert launches and all(any(e.kernel == x.kernel and fits(e, x.names, x.args, x.constants) for e in artefact.entries) for x in launches)
        assert root in artefact.writes and set(artefact.writes) <= set(data.right)


def test_a_copy_is_measured_with_every_kernel_that_reads_it():
    """attention's exponentials are computed in both kernels of its backward, and read the copy there."""
    sizes = {"b": 8, "h": 32, "m": 517, "l": 517, "d": 32, "n": 32}
    work = next(w for w in works("attention", "bf16", sizes=sizes) if w.group.direction == "backward" and w.group.wanted == ("Q", "K", "V"))
    made = whole(work)
    assert "d_K.stage(total_log, d_total);" in made.schedule(variants_of(work.group)[1].outputs)
    for root in ("d_Q", "d_K"):
        artefact = CpuWorker(H200).compile(work.group, made, root, (work,))
        assert [e.kernel for e in artefact.entries] == ["total_log_rows_kernel", f"{root}_kernel"]
    small = dict(b=1, h=1)
    data = make(replace(work, sizes=tuple((k, small.get(k, v)) for k, v in work.sizes)), ("d_total",), "cpu")
    rows = [t.shape[-1] for t in record(artefact.host, data.values).allocated if t.dim() == 3]
    assert rows == [576, 576] and data.right["d_total"].shape[-1] == 517, "rows in memory are longer than what they hold"


def test_a_kernel_that_reads_through_descriptors_is_launched_too():
    (work, *_) = works("mmsigmoid", "bf16", sizes={"x": 512, "y": 512, "k": 512})
    _, v = variants_of(work.group)
    text = "mmsigmoid.block(x:128, y:128); mmsigmoid.tensorize(x:128, y:128, k:64); mmsigmoid.descriptor(A, B, mmsigmoid); mmsigmoid.num_warps(8);"
    artefact = CpuWorker(H200).compile(work.group, split_by_kernel(v.algorithm, v.outputs, text), "mmsigmoid", (work,))
    launches = record(artefact.host, make(work, ("mmsigmoid",), "cpu").values).launches
    assert [x.kernel for x in launches] == ["mmsigmoid_descriptor_kernel"] and launches[0].kernel in artefact.kernels
    assert [e.kernel for e in artefact.entries] == ["mmsigmoid_descriptor_kernel"]


def test_wrong_numbers_are_noticed():
    (work, *_) = works("softmax")
    right = make(work, ("softmax",), "cpu").right["softmax"]
    dtype = work.group.torch_dtype
    assert wrong(right.clone(), right, dtype) == ""
    for spoil in (float("nan"), 2.0):
        bad = right.clone()
        bad[3, 5] = spoil
        assert wrong(bad, right, dtype)
    assert "wrong numbers" in wrong(right * 1.01, right, dtype)


# -- workers ------------------------------------------------------------------------------------------------------------


def run_all(crew, tasks, seconds=60.0):
    found, left = [], list(tasks)
    end = time.monotonic() + seconds
    while len(found) < len(tasks):
        assert time.monotonic() < end
        for i in crew.idle():
            if left:
                task = left.pop(0)
                crew.send(i, task, task, 2.0 if task == "hang" else 30.0)
        found += crew.poll(0.2)
    return {d.task: d for d in found}


def check_crew(crew):
    """Three workers, four kinds of trouble, and work before and after."""
    found = run_all(crew, ["a", "hang", "die", "fail", "b", "c"])
    assert [found[t].result[0] for t in "abc"] == ["a", "b", "c"]
    assert "too long" in found["hang"].failure and found["hang"].lost
    assert "died" in found["die"].failure and found["die"].lost
    assert found["fail"].failure.endswith("made to fail") and not found["fail"].lost
    assert all(found[t].result is None for t in ("hang", "die", "fail"))
    assert run_all(crew, ["d"])["d"].result[0] == "d" and not crew.busy()


def test_a_worker_that_hangs_or_dies_is_replaced_and_a_failure_is_told():
    crew = WorkerPool(3, tuning_workers.make)
    try:
        check_crew(crew)
    finally:
        crew.close()


def test_the_same_on_a_ray_cluster(monkeypatch):
    pytest.importorskip("ray", reason="ray is an optional extra and is not installed")
    from dtkernels.tuning.workers.ray_worker_pool import RayWorkerPool

    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tools'}:{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    crew = RayWorkerPool("local", 3, 0, 0.1, tuning_workers.make)
    try:
        check_crew(crew)
    finally:
        crew.close()
        crew.ray.shutdown()


# -- the journal --------------------------------------------------------------------------------------------------------


def test_a_journal_is_read_as_it_was_written_and_a_torn_line_is_dropped(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, {"gpu": "G"})
    journal.put("g\x1fx=1", "f\x1fr\nr.num_warps(4);", Time(12.5, 11.25))
    journal.put("g\x1fx=2", "f\x1fr\nr.num_warps(4);", Time(failure="wrong numbers"))
    journal.spent(3.0)
    journal.close()
    whole_text = path.read_bytes()
    for cut_off in range(1, 25):
        path.write_bytes(whole_text + b'["t",0,0,99.0,98.0]\n'[:-1][: 25 - cut_off])
        again = Journal(path, {"gpu": "G"})
        assert again.times == journal.times and again.seconds == 3.0
        again.put("g\x1fx=3", "f\x1fr\nr.num_warps(8);", Time(1.0, 1.0))
        again.close()
        assert len(Journal(path, {"gpu": "G"}).times) == 3


def test_a_journal_of_another_gpu_or_damaged_is_refused_in_one_line(tmp_path):
    path = tmp_path / "journal.jsonl"
    Journal(path, {"gpu": "G"}).close()
    with pytest.raises(ValueError, match="'G', this is 'H'"):
        Journal(path, {"gpu": "H"})
    path.write_text('["h",{"format":"dtkernels tuning 1","gpu":"G"}]\nnonsense\n["s",1]\n')
    with pytest.raises(ValueError, match="journal.jsonl:2: damaged"):
        Journal(path, {"gpu": "G"})


# -- the choice ---------------------------------------------------------------------------------------------------------


def test_few_schedules_are_chosen_by_regret():
    times = {"s1": {"a": 1.0, "b": 1.01, "c": 2.0}, "s2": {"a": 3.0, "b": 1.0, "c": 1.01}, "s3": {"b": 1.005, "c": 1.0}}
    assert choose(times, 1.02) == {"s1": "b", "s2": "b", "s3": "b"}
    assert choose(times, 1.0) == {"s1": "a", "s2": "b", "s3": "c"}
    assert set(choose(times, 1.0, most=1).values()) == {"b"}
    assert choose({"s1": {}}, 1.0) == {} and choose({}, 1.0) == {}


def test_the_summary_of_regrets():
    found = summary([1.0] * 95 + [1.5] * 5)
    assert (found.count, found.median, found.most_of, found.worst) == (100, 1.0, 1.0, 1.5)
    assert "no sizes" in str(summary([]))


def test_the_row_of_a_size_is_the_one_that_the_dispatcher_takes():
    near, far_away, here = (works("softmax", sizes={"x": x, "y": 256})[0] for x in (1024, 65536, 900))
    rows = [row_of(w, "softmax.block(x:4); softmax.tensorize(x:4, y:0);") for w in (near, far_away)]
    assert dispatched(rows, here) == rows[0]
    assert dispatched(rows[1:], here) == rows[1] and dispatched([], here) is None


# -- the command --------------------------------------------------------------------------------------------------------

class Clock:
    """A timer that says what it is given: the first run, then the others."""

    def __init__(self, first: float, then: float):
        self.first, self.then = first, then

    def once(self, run) -> float:
        return self.first

    def cold(self, run, count: int) -> float:
        return self.then

    def warm(self, run) -> float:
        return self.then / 2


@pytest.mark.parametrize(
    ("first", "then", "best", "wanted"), [(43.0, 4.0, 5.0, Time(4.0, 2.0)), (43.0, 40.0, 5.0, Time(40.0, 40.0)), (6.0, 4.0, 5.0, Time(4.0, 2.0))]
)
def test_a_slow_first_run_is_no_verdict(first, then, best, wanted, monkeypatch):
    worker = object.__new__(GpuWorker)
    worker.timer = Clock(first, then)
    monkeypatch.setattr(worker, "_artefact", lambda key, artefact: artefact, raising=False)
    monkeypatch.setattr(worker, "_ready", lambda work, funcs, artefact: (lambda: None, ""), raising=False)
    assert worker.measure(None, (), "key", None, best) == wanted


SHAPES = "relu: [{sizes: {x: 1048576}}, {sizes: {x: 500000}, held_out: true}]\nsoftmax: [{sizes: {x: 1024, y: 1024}, directions: [forward]}]\n"


def tune(out: Path, *more: str, wait: bool = True):
    shapes = out.parent / "shapes.yaml"
    shapes.write_text(SHAPES)
    what = ["--ops", "relu,softmax", "--shapes", str(shapes), "--dtypes", "bf16", "--jobs", "1", "--from", "none", "--rounds", "1", "--out", str(out)]
    command = [sys.executable, str(ROOT / "tools" / "tune.py"), "--dry-run", *what, *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if not wait:
        return process
    told, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return told


def measurements(out: Path) -> list:
    return [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines() if line.startswith(('["t"', '["f"'))]


def check_tables(out: Path) -> None:
    assert read_gpu(out).name == "NVIDIA H200"
    for op in ("relu", "softmax"):
        rows = read_rows((out / f"{op}.yaml").read_text(), op)
        assert {r.direction for r in rows} == ({"forward", "backward"} if op == "relu" else {"forward"})
        assert all(not r.measured and r.microseconds is None for r in rows)
        assert all(r.by["gpu"] == "NVIDIA H200" and r.by["date"] for r in rows)
        assert not any(r.sizes.get("x") == 500000 for r in rows), "held out"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> tuple[Path, str]:
    """A whole run: its folder, and what it said."""
    out = tmp_path_factory.mktemp("tuned") / "out"
    return out, tune(out, "--budget", "900s")


def test_a_table_is_written_with_every_time_that_was_taken(tuned):
    out, told = tuned
    check_tables(out)
    assert "regret where held out:   2 sizes" in told
    by, matrices = read_matrices(out / "measurements.safetensors")
    assert by["gpu"] == "NVIDIA H200" and len(matrices) == 3
    for m in matrices:
        assert m.cold.shape == (len(m.about["works"]), len(m.about["schedules"])) and (m.cold > 0).any(axis=1).all()
    journal = Journal(out / "journal.jsonl", {})
    assert sum((m.cold > 0).sum() for m in matrices) == sum(not t.failure for t in journal.times.values())
    assert not list(out.glob("*.part"))


def test_candidates_that_hang_die_or_fail_are_recorded_and_skipped(tmp_path):
    (tmp_path / "trouble").mkdir()
    tune(tmp_path / "out", "--budget", "900s", "--troubled", str(tmp_path / "trouble"), "--limit", "1.5")
    why = {m[3].split(":")[0].split(" with")[0] for m in measurements(tmp_path / "out") if m[0] == "f"}
    assert why == {"took too long", "the worker died", "Refused"}
    check_tables(tmp_path / "out")


def wait_for(out: Path, process, count: int, line: str = "") -> None:
    end, path = time.monotonic() + 120, out / "journal.jsonl"
    while not path.exists() or len(measurements(out)) < count or line not in path.read_text():
        assert process.poll() is None and time.monotonic() < end, process.stderr.read() if process.poll() is not None else "too slow"
        time.sleep(0.1)


def test_control_c_and_a_batch_system_keep_what_is_known_and_resume_goes_on(tmp_path):
    out, before, more = tmp_path / "out", [], ()
    for number in (signal.SIGINT, signal.SIGTERM):
        process = tune(out, "--budget", "900s", "--pause", "0.2", *more, wait=False)
        wait_for(out, process, len(before) + 8)
        process.send_signal(number)
        told, errors = process.communicate(timeout=60)
        assert process.returncode == 128 + number and "--resume goes on" in errors and "measurements" in told
        known = measurements(out)
        assert known[: len(before)] == before and len(known) >= len(before) + 8
        before, more = known, ("--resume",)
    tune(out, "--budget", "900s", "--resume")
    after = measurements(out)
    assert after[: len(before)] == before and len(after) > len(before)
    assert len({(m[1], m[2]) for m in after}) == len(after), "nothing is measured twice"
    check_tables(out)


def test_a_kill_loses_what_is_in_hand_only(tmp_path):
    out = tmp_path / "out"
    process = tune(out, "--budget", "900s", "--pause", "0.2", wait=False)
    wait_for(out, process, 5, line='["s"')
    process.kill()
    process.communicate()
    before = measurements(out)
    assert Journal(out / "journal.jsonl", {"gpu": "NVIDIA H200"}).seconds >= 5, "it counts towards the budget of what --resume joins"
    tune(out, "--budget", "900s", "--resume")
    assert measurements(out)[: len(before)] == before


def test_a_table_is_written_again_from_its_journal(tuned, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(tuned[0], out)
    before = {p.name: p.read_bytes() for p in out.glob("*.yaml")}
    for name in before:
        (out / name).unlink()
    tune(out, "--write-only")
    assert {p.name: p.read_bytes() for p in out.glob("*.yaml")} == before
