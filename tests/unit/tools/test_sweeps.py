"""benchmarks/sweeps.py: its sizes, their order and its summary, without a GPU."""

import argparse
import json
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
sys.path[:0] = [p for p in (str(ROOT / "tools"), str(ROOT / "benchmarks")) if p not in sys.path]

import sweeps  # noqa: E402
from common import baselines, workloads  # noqa: E402

EVERY = re.compile("")


def test_helions_pretuned_sweeps_are_whole():
    assert sum(len(s.shapes) for s in sweeps.SWEEPS if s.suite == "Helion") == 196
    assert all(len({*s.shapes}) == len(s.shapes) for s in sweeps.SWEEPS)


@pytest.mark.parametrize("sweep", sweeps.SWEEPS, ids=lambda s: f"{s.suite}-{s.op}-{s.dtype}")
def test_every_size_is_a_workload(sweep):
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[sweep.dtype]
    for shape in sweep.shapes:
        work = workloads.at(sweep.op, shape, dtype)
        assert (work.op, work.shape, f"torch.{work.dtype}") == (sweep.op, shape, str(dtype))


def test_a_run_that_ends_early_has_seen_all_of_a_range():
    shapes = tuple(f"{n}x1" for n in range(1, 18))
    order = sweeps.coarse_first(shapes)
    assert order[:5] == ["1x1", "17x1", "9x1", "5x1", "13x1"] and sorted(order) == sorted(shapes)
    assert sweeps.coarse_first(("1x1",)) == ["1x1"]
    first = sweeps.cases(EVERY, ("forward",))[: len(sweeps.SWEEPS)]
    assert {c.op for c in first} == {s.op for s in sweeps.SWEEPS}


def test_a_size_of_several_projects_is_measured_once():
    found = sweeps.cases(EVERY, ("forward", "backward"))
    assert len({(c.op, c.shape, c.dtype, c.direction) for c in found}) == len(found)
    (one,) = [c for c in found if c.title.endswith("rmsnorm forward 2048x1024 bf16")]
    assert one.suites == ("Liger", "Helion", "TritonBench")
    assert {c.op for c in sweeps.cases(re.compile("^Helion softmax"), ("forward",))} == {"softmax"}


class Bench:
    """Measures nothing: ours takes 10 microseconds, eager as many as there are rows."""

    def prepare(self, sizes, jobs, seconds):
        return len(sizes)

    def measure(self, op, shape, dtype, direction, seconds):
        if direction == "backward":
            return {"us": {}, "errors": {}, "notes": {}, "failed": "RuntimeError: no"}
        rows = float(shape.split("x")[0])
        return {"us": {"dtkernels": 10.0, "eager": rows}, "errors": {}, "notes": {}, "reference": "float64", "limit": 5.0}


def test_a_run_takes_every_dtype_and_sums_up_each_project(tmp_path, capsys):
    todo = sweeps.cases(re.compile("(Liger|Helion) softmax .*(x128|4096x256) "), ("forward", "backward"))
    options = argparse.Namespace(seconds=60.0, jobs=2, peers=("eager",), json=tmp_path / "out.json")
    run = sweeps.Run(options, todo, {"gpu": "none"}, Bench())
    run.go()
    said, printed = run.text(), capsys.readouterr().out
    assert len({c.dtype for c in todo}) == 3 and len(run.found) == len(todo) == 6
    assert "Liger        softmax        forward     2 sizes  mean 204.80" in said and "Helion       softmax        forward     1 sizes  mean 409.60" in said
    assert "FAILED RuntimeError: no" in printed and "wrong or failed:" in said
    written = json.loads((tmp_path / "out.json").read_text())
    assert [one["suites"] for one in written["sizes"]] == [[*c.suites] for c in todo]


def test_a_run_goes_on_where_another_ended(tmp_path):
    todo = sweeps.cases(re.compile("Liger softmax "), ("forward",))
    path = tmp_path / "out.json"
    options = argparse.Namespace(seconds=60.0, jobs=0, peers=("eager",), json=path)
    sweeps.Run(options, todo[:4], {}, Bench()).go()
    known = sweeps.earlier(str(path))
    run = sweeps.Run(options, todo, {}, Bench(), known)
    assert run.todo == todo[4:] and len(todo) > 4
    run.go()
    assert [sweeps.case_of(one) for one in sweeps.earlier(str(path))] == todo
    with pytest.raises(argparse.ArgumentTypeError, match="not written by"):
        path.write_text("[]")
        sweeps.earlier(str(path))


def test_a_short_run_sees_every_sweep_at_both_ends():
    order = sweeps.cases(EVERY, ("forward",))
    seen = {(c.op, c.shape, c.dtype) for c in order[: 2 * len(sweeps.SWEEPS)]}
    assert all((s.op, shape, s.dtype) in seen for s in sweeps.SWEEPS for shape in (s.shapes[0], s.shapes[-1]))


def test_helions_kernels_are_a_peer_where_their_folder_is_named(tmp_path, monkeypatch):
    work = workloads.row_op("softmax", 2, 3)
    monkeypatch.delenv(baselines.HELION_FOLDER, raising=False)
    found, missing = baselines.implementations(work, ["helion"])
    assert "helion" not in found and baselines.HELION_FOLDER in missing["helion"]
    (tmp_path / "softmax").mkdir()
    (tmp_path / "softmax" / "softmax.py").write_text("def softmax(x): return x + 1\n")
    monkeypatch.setenv(baselines.HELION_FOLDER, str(tmp_path))
    found, missing = baselines.implementations(work, ["helion"])
    assert found["helion"](torch.ones(2)).tolist() == [2.0, 2.0] and not missing
    assert baselines.implementations(workloads.row_op("relu", 2, 3), ["helion"])[0].keys() == {"dtkernels"}
