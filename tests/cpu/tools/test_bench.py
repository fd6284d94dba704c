"""The benchmark without a GPU: timers replaced, everything else as it is."""

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

import bench
from common import baselines, timing, workloads


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """Inputs on the CPU, the same in every run, and a clock that gives every call 10 microseconds after running it."""
    monkeypatch.setattr(bench, "time", SimpleNamespace(time_ns=lambda: 7, monotonic=time.monotonic))
    for name in ("randn", "randint", "arange"):
        made = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, device=None, made=made, **kwargs: made(*args, **kwargs))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(timing, "captured", lambda prepare: (prepare(), True))
    monkeypatch.setattr(timing, "gpu_time", lambda fn, milliseconds=30.0: (fn(), 10.0)[1])
    monkeypatch.setattr(timing, "host_time", lambda fn, calls: (fn(), 1.0)[1])
    monkeypatch.setattr(timing, "copy_time", lambda moved: moved / 1e3)
    monkeypatch.setattr(timing, "product_rate", lambda dtype: 1e9)


ROOT = Path(__file__).parents[3]
HALF = torch.float16  # the interpreter multiplies raw bits of bfloat16
WORKS = [
    workloads.row_op("softmax", 8, 16, HALF), workloads.row_op("dyt", 8, 16, HALF), workloads.mmsigmoid(16, 8, 32, HALF), workloads.two_mm(16, 8, 8, 4, HALF),
    workloads.attention(2, 4, 16, 8, True, groups=2, dtype=HALF), workloads.attention(2, 4, 16, 8, False, groups=2, queries=1, dtype=HALF),
    workloads.rope(1, 4, 8, 8, groups=2, dtype=HALF), workloads.norm("layernorm", 4, 8, HALF), workloads.norm("rmsnorm", 4, 8, HALF),
    workloads.gated("geglu", 4, 8, HALF), workloads.cross_entropy(4, 8, HALF),
]  # fmt: skip


@pytest.mark.parametrize("direction", bench.DIRECTIONS)
@pytest.mark.parametrize("work", WORKS, ids=lambda w: f"{w.op}-{w.shape}")
def test_every_workload_is_right_in_every_direction(work, direction):
    figures = bench.bench(work, ["eager", "sdpa"], direction, HALF, host=True)
    for f in figures:
        assert f.note == "" and (f.who in baselines.REFERENCES or 0 <= f.error < 0.02), f
    moved, flops = (sum(v) if direction == "both" else v[bench.DIRECTIONS.index(direction)] for v in (work.bytes, work.flops))
    assert figures[-1].limit == max(moved / 1e3, flops / 1e9 * 1e6) and figures[-1].fraction == figures[-1].limit / 10.0


def test_a_wrong_result_shows_and_a_peer_that_fails_is_named(monkeypatch):
    monkeypatch.setitem(baselines.PEERS, "wrong", lambda work: lambda x: work.eager(x) * 1.5)
    monkeypatch.setitem(baselines.PEERS, "broken", lambda work: lambda x: x.no_such_thing)
    found = {f.who: f for f in bench.bench(workloads.row_op("relu", 8, 16), ["wrong", "broken"], "forward", torch.bfloat16, host=False)}
    assert abs(found["wrong"].error - 0.5) < 0.01 and found["dtkernels"].error == 0
    assert math.isnan(found["broken"].microseconds) and "no_such_thing" in found["broken"].note


def test_a_peer_that_is_not_installed_is_said():
    if "liger_kernel" in sys.modules:
        pytest.skip("liger-kernel is installed")
    found = {f.who: f for f in bench.bench(workloads.row_op("softmax", 8, 16), ["liger", "eager"], "forward", torch.bfloat16, host=False)}
    assert "liger-kernel is not installed" in found["liger"].note and math.isnan(found["liger"].microseconds)
    assert "not installed" in bench.table(list(found.values())) and "eager 10.0" in bench.summary(list(found.values()))


def test_a_peer_that_writes_into_its_inputs_disturbs_no_other(monkeypatch):
    monkeypatch.setitem(baselines.PEERS, "writer", lambda work: lambda x: x.relu_())
    figures = bench.bench(workloads.row_op("relu", 8, 16), ["writer", "eager"], "forward", torch.bfloat16, host=False)
    assert [f.error for f in figures] == [0, 0, 0]


@pytest.mark.parametrize("name", sorted(workloads.SETS))
def test_shapes_of_every_set_can_be_written_again(name):
    for work in workloads.SETS[name]():
        again = workloads.at(work.op, work.shape, getattr(torch, work.dtype))
        assert (again.shape, again.bytes, again.flops) == (work.shape, work.bytes, work.flops)


def test_a_shape_that_is_none_is_refused_in_one_line():
    with pytest.raises(ValueError, match="no workload softmax '4x4x4'; allowed: .*RxC"):
        workloads.at("softmax", "4x4x4", torch.bfloat16)


def test_every_job_of_the_script_is_asked_for_once_and_each_gpu_has_its_share(tmp_path):
    for name, says in {"nvidia-smi": "echo GPU 0; echo GPU 1", "python3": 'echo "$CUDA_VISIBLE_DEVICES" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)

    def run(*names: str) -> dict[str, list[str]]:
        out = tmp_path / "-".join(["out", *names])
        subprocess.run(["bash", str(ROOT / "benchmarks" / "measure.bash"), str(out), *names], check=True, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
        return {p.stem: p.read_text().split() for p in out.iterdir()}

    script = (ROOT / "benchmarks" / "measure.bash").read_text()
    jobs = [line.split()[0] for line in script.partition("<<JOBS\n")[2].partition("\nJOBS")[0].splitlines()]
    everything = run()
    assert set(everything) == set(jobs) and len(jobs) >= 20
    assert sum(words[0] == "0" for words in everything.values()) == (len(jobs) + 1) // 2
    for gpu, tool, *options in everything.values():
        assert gpu in "01" and (ROOT / tool).exists()
        if tool == "tools/bench.py":
            assert bench._works(bench._options(options))
    assert set(run("lora", "models_train")) == {"lora", "models_train"}
