"""tools/report.py on measurements that are made up: what it says of them, in one page that loads nothing."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import report  # noqa: E402
from reporting import benchmark_runs, comparison, study  # noqa: E402

from dtkernels.tuning.records.measurement_store import MeasurementMatrix, write_matrices  # noqa: E402

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
    from dtkernels.runtime.signature.spec_hash import spec_hash
    from dtkernels.tuning.records.problems import operator_of

    fused = "total_shift.fuse_at(softmax, x);\ntotal.fuse_at(softmax, x);"
    own = [plan(fused, "softmax", f"softmax.block(x:1);\nsoftmax.tensorize(y:0, x:1);\nsoftmax.num_warps({w});") for w in (2, 4, 8)]
    apart = [
        plan("", "total_shift", "a"),
        plan("", "total", "b"),
        plan("", "softmax", "c"),
        plan("", "softmax", "d"),
        plan(fused, "*", "softmax.block(x:1);\nsoftmax.tensorize(y:0, x:1);\nsoftmax.num_warps(4);"),  # all kernels of the second, timed together
    ]
    cold = np.array([[10, 13, 20, 5, 6, 7, 8, 12], [np.nan, 9, 18, np.nan, 6, 7, 8, 8.5]], np.float32)
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
    assert first.schedules == 5 and first.times.tolist() == [10, 12, 18, 19, 20], "three fused, one with its time together, and 5 + 6 + 7 or 8"
    assert second.schedules == 2 and second.times.tolist() == [8.5, 18], "a way with a kernel that failed gives no schedule"
    assert first.peers == {"eager": 30.0, "liger": 11.5} and first.competitive == 2, "10 and 12 are within 5% of 11.5"
    assert second.peers == {} and second.competitive == 1 and second.bar == 8.5


def test_what_a_call_runs_is_that_of_the_nearest_row(table):
    (kind,) = study.read(table, []).kinds
    assert [s.runs for s in kind.sizes] == [12, 8.5] and kind.sizes[0].regret == pytest.approx(1.2)
    found = study.read(table, [])
    assert found.regrets(False)["softmax"].worst == pytest.approx(1.2) and found.regrets(True)["softmax"].worst == 1


def test_no_best_time_is_slower_than_what_a_call_runs():
    """Kernels that were timed one after another may take less together than the sum of their times, and less than any sum."""
    statements = ["a.block(x:1);", "b.block(x:2);", "b.block(x:4);"]
    apart = {plan("", "a", statements[0]): 5.0, plan("", "b", statements[1]): 6.0, plan("", "b", statements[2]): 7.0}
    together = {plan("", "*", "\n".join(statements[:2])): 9.0}
    needed = study._needed([*apart, *together])
    times, count = study._whole(apart | together, needed)
    assert sorted(times) == [9, 12] and count == 2, "the first schedule has the time of all together, and counts once"
    times, count = study._whole(together, needed)
    assert list(times) == [9] and count == 1, "a schedule whose kernels were not timed apart counts too"
    size = study.Size(None, np.array([10.0, 12.0]), 2, runs=9.0)
    assert size.best == 9 and size.regret == 1


def test_costs_are_those_of_the_algorithm(table):
    size = study.read(table, []).kinds[0].sizes[0]
    assert size.bytes == 2 * 2 * 4096 * 1024 and size.flops == 0


@pytest.mark.parametrize("op, shape, extents", [("relu", "64x8", {"x": 512}), ("mmsigmoid", "2x3x4", {"x": 2, "y": 3, "k": 4}), ("two_mm", "2x3x4r5", {"m": 2, "n": 3, "k": 4, "l": 5}),
                                                ("attention", "B1H2M3S4D5 causal", {"b": 1, "h": 2, "m": 3, "l": 4, "d": 5, "n": 5}), ("unknown", "3x4", None),
                                                ("attention", "B1H8/2M3S4D5", {"b": 1, "h": 8, "m": 3, "l": 4, "d": 5, "n": 5}),
                                                ("rope", "B1H8/2S4D6", {"b": 1, "h": 8, "g": 2, "s": 4, "d": 6})])  # fmt: skip
def test_shapes_of_the_benchmark(op, shape, extents):
    assert benchmark_runs.extents_of(op, shape) == extents


def test_parameters_of_the_benchmark():
    assert benchmark_runs.params_of("attention", "B1H8/2M3S4D5 causal") == (("causal", True), ("group", 4))
    assert benchmark_runs.params_of("attention", "B1H8M3S4D5") == benchmark_runs.params_of("rope", "B1H8/2S4D6") == ()


@pytest.mark.parametrize("changed, taken", [({}, True), ({"gpu": "GPU Y"}, False), ({"command": "tools/bench_host_overhead.py"}, False), ({"figures": []}, False),
                                            ({"figures": [{"op": "softmax"}]}, False)])  # fmt: skip
def test_peers_are_those_of_runs_on_the_same_gpu(bench, changed, taken):
    data = json.loads(bench.read_text())
    data |= {"gpu": "GPU X", "command": "tools/bench.py --ops softmax", "figures": [{**f, "direction": "forward"} for f in data["figures"]]}
    (bench.parent / "below").mkdir()
    bench = bench.rename(bench.parent / "below" / bench.name)
    bench.write_text(json.dumps(data | changed))
    (bench.parent / "other.json").write_text("[]")
    assert benchmark_runs.measured_on("GPU X", bench.parent.parent) == [bench] * taken


def test_runs_are_read_oldest_first(bench):
    data = json.loads(bench.read_text())
    data |= {"gpu": "GPU X", "command": "tools/bench.py --ops softmax", "figures": [{**f, "direction": "forward"} for f in data["figures"]]}
    folder = bench.parent / "runs"
    folder.mkdir()
    for name in ("a.json", "b.json", "new.json"):
        (folder / name).write_text(json.dumps(data))
    (folder / benchmark_runs.ORDER).write_text("# oldest first\nb.json\na.json\n")
    assert [p.name for p in benchmark_runs.measured_on("GPU X", folder)] == ["b.json", "a.json", "new.json"]


def run(**microseconds: float | None) -> dict:
    figure = {"op": "softmax", "shape": "4096x1024", "dtype": "bfloat16", "direction": "forward"}
    return {"figures": [{**figure, "who": who.replace("_", "-"), "microseconds": time} for who, time in microseconds.items()]}


def test_times_of_two_runs_never_mix():
    """A newer run replaces an older one whole, so that a ratio is of times taken in turn; a reference that does less is no peer."""
    runs = benchmark_runs.Benchmarks([run(dtkernels=10.0, eager=20.0, liger=5.0), run(dtkernels=12.0, eager=21.0, bare_product=1.0, compile=None)])
    (call,) = runs.calls.values()
    assert (call.ours, call.peers) == (12, {"eager": 21})
    alone = benchmark_runs.Benchmarks([run(dtkernels=10.0, eager=20.0), run(dtkernels=12.0)])
    assert [c.ours for c in alone.calls.values()] == [10], "a run without a peer compares nothing"


def test_the_limit_is_that_of_copies_and_products():
    def call(shape, moved, flops, limit):
        return {"op": "mmsigmoid", "shape": shape, "dtype": "bfloat16", "direction": "forward", "who": "dtkernels", "microseconds": 10.0,
                "terabytes": moved / 1e7, "tflops": flops / 1e7, "limit": limit}  # fmt: skip

    figures = [call("1x1x1", 1e6, 0, 5.0), call("1x1x2", 1.1e6, 0, 9.0), call("1x1x3", 4e6, 0, 8.0), call("1x1x4", 8e6, 0, 40.0), call("1x1x5", 1e6, 8e9, 10.0)]
    limit = benchmark_runs.Limit(benchmark_runs.Benchmarks([{"figures": figures}]), 4e12)
    assert limit.copy(4e6) == pytest.approx(8) and limit.copy(1.1e6) == pytest.approx(5.5), "a slow copy of an odd length is none of the GPU's limits"
    assert limit.copy(8e6) == limit.copy(16e6) / 2 == pytest.approx(16), "a longer copy is at least as fast a byte"
    assert limit.at(1e6, 16e9, 2) == pytest.approx(20) and limit.at(1e6, 1, 2) == pytest.approx(5)
    assert limit.at(1e6, 16e9, 4) is None, "no products of fp32 were measured"
    assert benchmark_runs.Limit(benchmark_runs.Benchmarks([]), 4e12).at(4e6, 0, 2) == pytest.approx(1)


@pytest.mark.parametrize("op, extents, params, words", [
    ("attention", {"b": 4, "h": 32, "m": 4096, "l": 4096, "d": 128, "n": 128}, (), "batch 4, heads 32, 4096 x 4096, 128 columns"),
    ("attention", {"b": 1, "h": 8, "m": 1, "l": 64, "d": 32, "n": 16}, (("causal", True), ("group", 4)), "batch 1, heads 8 (2 for keys), 1 x 64, 32 columns, 16 for values, causal"),
    ("rope", {"b": 1, "h": 8, "g": 2, "s": 4, "d": 6}, (), "batch 1, heads 8 (2 for keys), 4 positions, 6 columns"), ("mmsigmoid", {"x": 2, "y": 3, "k": 4}, (), "2 x 4 times 4 x 3"),
    ("two_mm", {"m": 2, "n": 3, "k": 4, "l": 5}, (), "2 x 4 times 4 x 5 times 5 x 3"), ("softmax", {"x": 2, "y": 3}, (), "2 x 3"), ("relu", {"x": 7}, (), "7 elements"),
    ("my.yaml", {"i": 2, "j": 3}, (("scaled", True),), "i 2, j 3, scaled true")])  # fmt: skip
def test_sizes_in_words(op, extents, params, words):
    assert comparison.size_in_words(op, extents, params) == words


def test_each_call_stands_beside_its_best_peer(table, bench):
    first, second = comparison.comparisons(study.read(table, [bench]))
    assert (first.size, first.ours, first.peer, first.who, first.source) == ("4096 x 1024", 12, 11.5, "liger", "benchmark")
    assert first.ratio == pytest.approx(11.5 / 12) and (first.verdict, first.shade) == ("slower", "slower")
    assert (second.size, second.ours, second.peer, second.ratio, second.verdict, second.source) == ("4000 x 1000", 8.5, None, None, "", "tuning")
    found = comparison.summary([first, second])
    assert (found.rows, found.compared, found.faster, found.slower) == (2, 1, 0, 1) and found.mean == pytest.approx(first.ratio)


def test_the_page_stands_alone(table, bench, tmp_path, capsys):
    assert report.main([str(table), "--bench", str(bench), "--out", str(tmp_path / "out")]) == 0
    assert re.search(r"regret of what a call of \w+ runs, sizes held out: 1 sizes: median 1\.\d{3}", capsys.readouterr().out)
    page = (tmp_path / "out" / "index.html").read_text()
    assert "GPU X" in page and "<td>11.5<td>liger<td class='slower'>" in page and "prefers-color-scheme: dark" in page
    assert not re.search(r"(src|href)=[\"'](?!#)", page), "nothing is loaded"
    assert not re.search(r"#1f2428(?!;)", page.split("</style>", 1)[1]), "colours follow the theme"
    assert "Regret is the time" in page and "<details><summary>How this was measured" in page
    assert page.index("id='calls'") < page.index("<svg"), "the answer comes before the pictures"
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert {p.suffix for p in (tmp_path / "out").iterdir()} == {".html", ".png"}


def test_what_cannot_be_drawn_is_one_line(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
