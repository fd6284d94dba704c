"""Crews of the tuner where workers do not start, die idle, or are of a Ray cluster; whole runs on several workers."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tools"), str(Path(__file__).parent)]

import tuning_workers  # noqa: E402

from dtkernels.tuning.records.journal import Journal, Time  # noqa: E402
from dtkernels.tuning.workers.worker_pool import WorkerPool  # noqa: E402

SHAPES = "relu: [{sizes: {x: 1048576}}, {sizes: {x: 500000}, held_out: true}]\nsoftmax: [{sizes: {x: 1024, y: 1024}, directions: [forward]}]\n"


@pytest.fixture
def crew_of(monkeypatch):
    """Makes crews, ``kind`` "processes" or "ray", and ends them."""
    made = []

    def make(kind: str, count: int, what, *args):
        if kind == "processes":
            made.append(WorkerPool(count, what, *args))
        else:
            pytest.importorskip("ray", reason="ray is an optional extra and is not installed")
            from dtkernels.tuning.workers.ray_worker_pool import RayWorkerPool

            monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tools'}:{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
            made.append(RayWorkerPool("local", count, 0, 0.1, what, *args))
        return made[-1]

    yield make
    for crew in made:
        crew.close()


def one(crew, worker: int, task: str, seconds: float = 60.0):
    """What becomes of one task."""
    crew.send(worker, task, task, seconds)
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if found := crew.poll(0.2):
            return found[0]
    raise AssertionError("too slow")


@pytest.mark.parametrize("kind", ["processes", "ray"])
def test_a_task_of_a_worker_that_did_not_start_counts_as_untried(crew_of, tmp_path, kind):
    crew = crew_of(kind, 1, tuning_workers.make_at_second, str(tmp_path))
    first, second = one(crew, 0, "a"), one(crew, 0, "a")
    assert first.untried and first.lost and "not yet" in first.failure and crew.lives == [1]
    assert second.result == ("a", 0, 1) and not second.untried and second.where == "place 0"
    died = one(crew, 0, "die")
    assert died.lost and not died.untried and died.where == "place 0" and crew.lives == [2]


@pytest.mark.parametrize("kind", ["processes", "ray"])
def test_workers_that_never_start_end_the_run_in_one_line(crew_of, kind):
    crew = crew_of(kind, 1, tuning_workers.make_never)
    with pytest.raises(SystemExit, match="workers do not start: no worker: no GPU"):
        for _ in range(9):
            one(crew, 0, "a")


def test_a_worker_that_dies_idle_costs_no_task_and_its_memory_is_known_to_be_gone(crew_of):
    crew = crew_of("processes", 1, tuning_workers.make)
    os.kill(one(crew, 0, "who").result, signal.SIGKILL)
    time.sleep(0.5)
    found = one(crew, 0, "a")  # sent before anyone noticed
    assert found.untried and crew.lives == [1]
    os.kill(one(crew, 0, "who").result, signal.SIGKILL)
    time.sleep(0.5)
    assert crew.poll(0.2) == [] and crew.lives == [2], "noticed before the next task"
    assert one(crew, 0, "b").result == ("b", 0, 1)


def test_a_journal_says_on_which_device_and_reads_lines_that_do_not(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, {"gpu": "G"})
    journal.put("g\x1fx=1", "f\x1fr", Time(12.5, 11.25), "cuda:0")
    journal.put("g\x1fx=2", "f\x1fr", Time(failure="wrong numbers"), "cuda:1")
    journal.put("g\x1fx=3", "f\x1fr", Time(failure="does not compile"))
    journal.put("g\x1fx=4", "f\x1fr", Time(1.0, 2.0))
    journal.close()
    again = Journal(path, {"gpu": "G"})
    assert again.times == journal.times and again.places == {("g\x1fx=1", "f\x1fr"): "cuda:0", ("g\x1fx=2", "f\x1fr"): "cuda:1"}
    again.put("g\x1fx=5", "f\x1fr", Time(1.0, 1.0), "cuda:1")
    again.close()
    assert sum(line.startswith('["g"') for line in path.read_text().splitlines()) == 2


# -- the command --------------------------------------------------------------------------------------------------------


def start(out: Path, *more: str, **environment: str) -> subprocess.Popen:
    shapes = out.parent / "shapes.yaml"
    shapes.write_text(SHAPES)
    what = ["--ops", "relu,softmax", "--shapes", str(shapes), "--dtypes", "bf16", "--jobs", "1", "--from", "none", "--out", str(out), "--budget", "900s", "--rounds", "1"]
    command = [sys.executable, str(ROOT / "tools" / "tune.py"), "--dry-run", *what, *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(out: Path, process: subprocess.Popen, count: int) -> None:
    """Until so many measurements are in the journal."""
    end = time.monotonic() + 120
    while not (out / "journal.jsonl").exists() or len(lines(out)) < count:
        assert process.poll() is None and time.monotonic() < end, process.communicate() if process.poll() is not None else "too slow"
        time.sleep(0.1)


def lines(out: Path) -> list:
    """Measurements in the journal: every line of it is whole."""
    text = (out / "journal.jsonl").read_text()
    return [e for e in map(json.loads, text[: text.rfind("\n") + 1].splitlines()) if e[0] in "tf"]


def test_two_workers_share_the_candidates_and_nothing_is_measured_twice(tmp_path):
    out = tmp_path / "out"
    process = start(out, "--workers", "2", "--pause", "0.02")
    told, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    journal = Journal(out / "journal.jsonl", {"gpu": "NVIDIA H200"})
    counts = {f"stand-in {i}": sum(p == f"stand-in {i}" for p in journal.places.values()) for i in range(2)}
    assert min(counts.values()) > 10 and all(f"{place}: {n} measurements" in told for place, n in counts.items())
    assert len({(e[1], e[2]) for e in lines(out)}) == len(lines(out)) == len(journal.times)


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_goes_on(tmp_path):
    out = tmp_path / "out"
    first = start(out, "--pause", "0.1")
    wait_for(out, first, 3)
    second = start(out, "--resume")
    _, errors = second.communicate(timeout=120)
    assert second.returncode == 1 and errors.strip().splitlines()[-1] == f"tune: another run writes into {out}; choose another --out"
    assert first.poll() is None
    first.send_signal(signal.SIGINT)
    assert first.communicate(timeout=60) and first.returncode == 130 and len(lines(out)) >= 3


def test_control_c_ends_the_actors_and_their_cluster(tmp_path):
    pytest.importorskip("ray", reason="ray is an optional extra and is not installed")
    out = tmp_path / "out"
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    process = start(out, "--ray", "local", "--workers", "1", "--pause", "0.2", TUNING_TEST_MARK=mark)
    wait_for(out, process, 4)
    assert len(processes_with(mark)) > 2
    process.send_signal(signal.SIGINT)
    told, errors = process.communicate(timeout=90)
    assert process.returncode == 130 and "--resume goes on" in errors and "stand-in 0: " in told
    end = time.monotonic() + 20
    while left := processes_with(mark):
        assert time.monotonic() < end, left
        time.sleep(0.2)


def processes_with(mark: str) -> list[int]:
    """Processes in whose environment ``mark`` stands."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += [int(path.parent.name)] if mark.encode() in path.read_bytes() else []
        except OSError:
            continue
    return found


def test_ray_that_is_not_installed_or_not_reached_is_said_in_one_line(tmp_path):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise ImportError('no ray here')\n")
    process = start(tmp_path / "out", "--ray", "auto", PYTHONPATH=f"{tmp_path}:{ROOT}")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and errors.strip() == "tune: --ray needs ray; pip install 'dtkernels[ray]'"
    pytest.importorskip("ray", reason="ray is an optional extra and is not installed")
    process = start(tmp_path / "out", "--ray", "not an address")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" not in errors
    assert errors.strip().splitlines()[-1].startswith("tune: no Ray cluster at 'not an address': ")
