"""benchmarks/soak.py: what it calls, what it counts as growth, and a short run on the CPU."""

import json
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
sys.path[:0] = [p for p in (str(ROOT / "tools"), str(ROOT / "benchmarks")) if p not in sys.path]

import soak  # noqa: E402

FLAT = [soak.Tenth(100, 20.0, 500.0, 10.0, 50.0, 1000, 10, 5, 10) for _ in range(10)]


def test_calls_change_their_sizes_and_come_again_with_a_seed():
    data = soak.Data("cpu", torch.float32, 1 << 22)
    one, again, other = ([(c.op, c.size, c.gradient) for c in islice(soak.calls(tuple(soak.KINDS), seed, data, 16), 4000)] for seed in (1, 1, 2))
    assert one == again != other
    sizes = {op: {s for o, s, _ in one if o == op} for op in soak.KINDS}
    assert all(len(found) > soak.HOT for found in sizes.values()), "some rows are new"
    assert 0.05 < sum(gradient for _, _, gradient in one) / len(one) < 0.15


@pytest.mark.parametrize("op", soak.KINDS)
def test_every_call_is_compared_with_torch(op, monkeypatch):
    data = soak.Data("cpu", torch.float32, 1 << 22)
    kind = soak.KINDS[op]
    call = soak.Call(op, (3, *kind.widths[0]), kind.arguments(data, 3, *kind.widths[0]), True)
    assert call.wrong(torch.float32) == ""
    monkeypatch.setitem(soak.KINDS, op, replace(kind, eager=lambda *t: 2 * kind.eager(*t)))
    assert "result off by" in call.wrong(torch.float32) and op in call.wrong(torch.float32)


def test_growth_is_named():
    assert soak.grown(FLAT) == []
    slow = [replace(t, microseconds=20.0 + 3.0 * i) for i, t in enumerate(FLAT)]
    assert "a call took" in soak.grown(slow)[0] and len(soak.grown(slow)) == 1
    large = [replace(t, resident=500.0 + 10.0 * i) for i, t in enumerate(FLAT)]
    assert soak.grown(large) == ["the process grew from 540 to 590 MiB in the second half: more than 32 MiB"]
    assert soak.grown([replace(t, resident=500.0 + 40.0 * min(i, 3)) for i, t in enumerate(FLAT)]) == [], "caches that fill early do no harm"
    assert "its tensors grew" in soak.grown([replace(t, tensors=10.0 * i) for i, t in enumerate(FLAT)])[0]


def test_a_short_run_writes_tenths_and_ends_well(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(soak, "SLOWER", 1e9)  # a busy machine
    assert soak.main(["--device", "cpu", "--calls", "1000", "--ops", "relu,softmax", "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert [t["calls"] for t in found["tenths"]] == [100] * 10 and found["failures"] == [] and "flat" in capsys.readouterr().out
    assert sum(found["paths"]["softmax"].values()) > 0


def test_a_wrong_result_ends_it_with_status_1(monkeypatch, capsys):
    monkeypatch.setattr(soak, "CHECKED", 100)
    monkeypatch.setitem(soak.KINDS, "relu", replace(soak.KINDS["relu"], eager=lambda x: 2 * torch.relu(x)))
    assert soak.main(["--device", "cpu", "--calls", "1000", "--ops", "relu"]) == 1
    assert "FAILED: relu" in capsys.readouterr().out
