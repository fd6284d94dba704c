"""tools/report.py on measurements that are made up: what it says of them, in one page that loads nothing."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import report  # noqa: E402
from reporting import study  # noqa: E402
from tuning.records.measurement_store import MeasurementMatrix, write_matrices  # noqa: E402

HALF = "\x1f"
ROW = """- op: softmax
  direction: forward
  dtype: bf16
  sizes: {{x: 4096, y: 1024}}
  schedule: |
    total_shift.fuse_at(softmax, x);
    total.fuse_at(softmax, x);
    softmax.block(x:1);
    softmax.tensorize(y:0, x:1);
    softmax.num_warps(4);
    softmax.compile();
  microseconds: 12.0
  spec: "{spec}"
"""


def plan(fused: str, root: str, tiles: str) -> str:
    return f"{fused}{HALF}{root}\n{tiles}"


@pytest.fixture
def table(tmp_path) -> Path:
    """Softmax at two sizes: three fused schedules, and one way of three kernels with 1 x 1 x 2 plans."""
    from tuning.records.problems import operator_of

    from dtkernels.runtime.signature.spec_hash import spec_hash

    fused = "total_shift.fuse_at(softmax, x);\ntotal.fuse_at(softmax, x);"
    own = [plan(fused, "softmax", f"softmax.block(x:1);\nsoftmax.tensorize(y:0, x:1);\nsoftmax.num_warps({w});") for w in (2, 4, 8)]
    apart = [
        plan("", "total_shift", "a"),
        plan("", "total", "b"),
        plan("", "softmax", "c"),
        plan("", "softmax", "d"),
        plan(fused, "*", "together"),
    ]
    cold = np.array([[10, 12, 20, 5, 6, 7, 8, 11], [np.nan, 9, 18, np.nan, 6, 7, 8, np.nan]], np.float32)
    works = [{"x": 4096, "y": 1024, "held_out": False}, {"x": 4000, "y": 1000, "held_out": True}]
    told = {
        "op": "softmax",
        "direction": "forward",
        "dtype": "bf16",
        "params": {},
        "wanted": [],
        "saved": False,
        "works": works,
        "schedules": own + apart,
    }
    folder = tmp_path / "gpu_x"
    folder.mkdir()
    write_matrices(folder / "measurements.safetensors", {"gpu": "GPU X", "torch": "2.1", "command": "tools/tune.py"}, [MeasurementMatrix(told, cold, cold)])
    (folder / "gpu.yaml").write_text("name: GPU X\narch: 90\nmultiprocessors: 132\nbandwidth: 4.8e12\n")
    (folder / "softmax.yaml").write_text(ROW.format(spec=spec_hash(operator_of("softmax").spec.algorithm)))
    return folder


@pytest.fixture
def bench(tmp_path) -> Path:
    path = tmp_path / "bench.json"
    figure = {"op": "softmax", "shape": "4096x1024", "dtype": "bfloat16", "direction": "forward"}
    figures = [
        {**figure, "who": "eager", "microseconds": 30.0},
        {**figure, "who": "liger", "microseconds": 11.5},
        {**figure, "who": "dtkernels", "microseconds": 12.0},
    ]
    path.write_text(json.dumps({"command": "tools/bench.py", "figures": figures}))
    return path


def test_schedules_are_counted_and_held_against_the_best_peer(table, bench):
    (kind,) = study.read(table, [bench]).kinds
    first, second = kind.sizes
    assert first.schedules == 5 and first.times.tolist() == [10, 12, 18, 19, 20], "three fused, and 5 + 6 + 7 or 8"
    assert second.schedules == 2 and second.times.tolist() == [9, 18], "a way with a kernel that failed gives no schedule"
    assert first.peers == {"eager": 30.0, "liger": 11.5} and first.competitive == 2, "10 and 12 are within 5% of 11.5"
    assert second.peers == {} and second.competitive == 1 and second.bar == 9


def test_what_a_call_runs_is_that_of_the_nearest_row(table):
    (kind,) = study.read(table, []).kinds
    assert [s.runs for s in kind.sizes] == [12, 9] and kind.sizes[0].regret == pytest.approx(1.2)
    found = study.read(table, [])
    assert found.regrets(False)["softmax"].worst == pytest.approx(1.2) and found.regrets(True)["softmax"].worst == 1


def test_costs_are_those_of_the_algorithm(table):
    size = study.read(table, []).kinds[0].sizes[0]
    assert size.bytes == 2 * 2 * 4096 * 1024 and size.flops == 0


@pytest.mark.parametrize("op, shape, extents", [("relu", "64x8", {"x": 512}), ("mmsigmoid", "2x3x4", {"x": 2, "y": 3, "k": 4}), ("two_mm", "2x3x4r5", {"m": 2, "n": 3, "k": 4, "l": 5}),
                                                ("attention", "B1H2M3S4D5 causal", {"b": 1, "h": 2, "m": 3, "l": 4, "d": 5, "n": 5}), ("unknown", "3x4", None),
                                                ("attention", "B1H8/2M3S4D5", {"b": 1, "h": 8, "m": 3, "l": 4, "d": 5, "n": 5}),
                                                ("rope", "B1H8/2S4D6", {"b": 1, "h": 8, "g": 2, "s": 4, "d": 6})])  # fmt: skip
def test_shapes_of_the_benchmark(op, shape, extents):
    assert study.extents_of(op, shape) == extents


def test_parameters_of_the_benchmark():
    assert study.params_of("attention", "B1H8/2M3S4D5 causal") == (("causal", True), ("group", 4))
    assert study.params_of("attention", "B1H8M3S4D5") == study.params_of("rope", "B1H8/2S4D6") == ()


@pytest.mark.parametrize("changed, taken", [({}, True), ({"gpu": "GPU Y"}, False), ({"command": "tools/bench_host_overhead.py"}, False), ({"figures": []}, False),
                                            ({"figures": [{"op": "softmax"}]}, False)])  # fmt: skip
def test_peers_are_those_of_runs_on_the_same_gpu(bench, changed, taken):
    data = json.loads(bench.read_text())
    data |= {"gpu": "GPU X", "command": "tools/bench.py --ops softmax", "figures": [{**f, "direction": "forward"} for f in data["figures"]]}
    (bench.parent / "below").mkdir()
    bench = bench.rename(bench.parent / "below" / bench.name)
    bench.write_text(json.dumps(data | changed))
    (bench.parent / "other.json").write_text("[]")
    assert study.measured_on("GPU X", bench.parent.parent) == [bench] * taken


def test_the_page_stands_alone(table, bench, tmp_path, capsys):
    assert report.main([str(table), "--bench", str(bench), "--out", str(tmp_path / "out")]) == 0
    assert re.search(r"regret of what a call of \w+ runs, sizes held out: 1 sizes: median 1\.\d{3}", capsys.readouterr().out)
    page = (tmp_path / "out" / "index.html").read_text()
    assert "GPU X" in page and "liger 11.5" in page and "prefers-color-scheme: dark" in page
    assert not re.search(r"(src|href)=[\"'](?!#)", page), "nothing is loaded"
    assert not re.search(r"#1f2428(?!;)", page.split("</style>", 1)[1]), "colours follow the theme"
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert {p.suffix for p in (tmp_path / "out").iterdir()} == {".html", ".png"}


def test_what_cannot_be_drawn_is_one_line(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
