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
from common import workloads  # noqa: E402

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

    closed = 0

    def __init__(self, peers, dtype):
        self.dtype = dtype

    def prepare(self, sizes, jobs, seconds):
        return len(sizes)

    def measure(self, op, shape, direction, seconds):
        if direction == "backward":
            return {"us": {}, "errors": {}, "notes": {}, "failed": "RuntimeError: no"}
        rows = float(shape.split("x")[0])
        return {"us": {"dtkernels": 10.0, "eager": rows}, "errors": {}, "notes": {}, "reference": "float64", "limit": 5.0}

    def close(self):
        Bench.closed += 1


def test_a_run_takes_every_dtype_and_sums_up_each_project(tmp_path, capsys):
    todo = sweeps.cases(re.compile("(Liger|Helion) softmax .*(x128|4096x256) "), ("forward", "backward"))
    options = argparse.Namespace(seconds=60.0, jobs=2, peers=("eager",), json=tmp_path / "out.json")
    run = sweeps.Run(options, todo, {"gpu": "none"}, Bench)
    run.go()
    said, printed = run.text(), capsys.readouterr().out
    assert Bench.closed == len({c.dtype for c in todo}) == 3 and len(run.found) == len(todo) == 6
    assert "Liger        softmax        forward     2 sizes  mean 204.80" in said and "Helion       softmax        forward     1 sizes  mean 409.60" in said
    assert "FAILED RuntimeError: no" in printed and "wrong or failed:" in said
    written = json.loads((tmp_path / "out.json").read_text())
    assert [one["suites"] for one in written["sizes"]] == [[*c.suites] for dtype in dict.fromkeys(c.dtype for c in todo) for c in todo if c.dtype == dtype]
