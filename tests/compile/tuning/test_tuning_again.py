"""Tuning where a table is there already: its rows race too, those at other sizes stay, and sizes held out judge the new table."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tools")]

from dtkernels.codegen.target import target  # noqa: E402
from dtkernels.lang.tuning_space import read_shapes  # noqa: E402
from dtkernels.runtime.tables.table import read_rows, write_rows  # noqa: E402
from dtkernels.tuning import tune as tune_tool  # noqa: E402
from dtkernels.tuning.records.journal import Journal, Time  # noqa: E402
from dtkernels.tuning.records.measurement_store import MeasurementMatrix, joined, read_matrices, write_matrices  # noqa: E402
from dtkernels.tuning.records.problems import problems_of, row_of, variants_of  # noqa: E402
from dtkernels.tuning.records.write_table import corrected_by_races, entrants, remaining_rows, rows_of, run_at  # noqa: E402
from dtkernels.tuning.search.candidates import split_by_kernel  # noqa: E402
from dtkernels.tuning.search.portfolio import choose_group, dispatched  # noqa: E402
from dtkernels.tuning.search.search import ScheduleSearch  # noqa: E402
from dtkernels.tuning.search.search_state import SearchState  # noqa: E402
from dtkernels.tuning.search.warm_start import WarmStart  # noqa: E402
from dtkernels.tuning.workers.compile_worker import CpuWorker  # noqa: E402

H200 = target("h200")
HAND = "total_shift.fuse_at(softmax, x);\ntotal.fuse_at(softmax, x);\nsoftmax.block(x:{0});\nsoftmax.tensorize(x:{0}, y:0);\nsoftmax.num_warps({1});"


def works(*sizes, dtype="bf16", held_out=False):
    shapes = read_shapes([{"sizes": {"x": x, "y": y}, "directions": ["forward"], "held_out": held_out} for x, y in sizes], "t")
    return problems_of("softmax", shapes, (dtype,))


def hand(rows: int, warps: int) -> str:
    return HAND.format(rows, warps)


def folder_with(path: Path, *rows) -> Path:
    write_rows(path / "softmax.yaml", rows)
    return path


# -- what rows become candidates ------------------------------------------------------------------------------------------


def test_the_row_of_a_size_the_nearest_others_and_the_twins_are_tried(tmp_path):
    here, near, wide, far, further = works((1024, 1000), (2048, 1000), (1024, 1024), (3000, 1000), (1024, 8192))
    twin, *_ = works((1024, 1000), dtype="fp16")
    single, *_ = works((1024, 1000), dtype="fp32")
    rows = [row_of(w, hand(1, n)) for n, w in ((1, far), (2, here), (4, near), (8, wide), (16, further))]
    known = [row_of(twin, hand(2, 4)), replace(row_of(here, hand(4, 4)), spec="0123456789ab")]
    earlier = WarmStart(folder_with(tmp_path, *rows, *known), [here])
    found = earlier.schedules(here)
    assert found[0] == hand(1, 2) and len(found) == 4 and found[-1] == hand(2, 4), "its own first, the twin's last"
    assert hand(1, 16) not in found, "8192 columns held whole are more than here"
    assert hand(4, 4) not in found and earlier.text() == f"6 rows of {tmp_path} raced again; 1 of another version of their spec left out"
    assert WarmStart(tmp_path, [single]).schedules(single) == () and WarmStart(None, [here]).text() == ""


def test_rows_start_the_search_and_what_is_not_legal_is_counted(tmp_path):
    (here,) = works((4096, 1000))
    known = SearchState([here], SimpleNamespace(times={}))
    search = ScheduleSearch(known, known.journal, SimpleNamespace(), SimpleNamespace(), earlier=WarmStart(None, []))
    search.seeding[here.group] = 0
    legal, illegal = hand(2, 16), "softmax.block(nowhere:2);"
    seeds = CpuWorker(H200, compiling=False).seeds(here, False, (legal, illegal))
    search._seeded(here, seeds)
    _, variant = variants_of(here.group)
    made = split_by_kernel(variant.algorithm, variant.outputs, legal)
    assert known.earlier[here] == [made] and made.plans[0] in known.cells[here, made.fused, "softmax"].waiting
    assert dict(search.earlier.illegal) == {illegal: 1} and "1 schedules not legal at 1 sizes left out" in folder_text(search.earlier, tmp_path)


def folder_text(earlier: WarmStart, path: Path) -> str:
    earlier.folder, earlier.stale = path, 1
    return earlier.text()


# -- the choice -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def measured():
    """Two sizes whose kernels are timed, and a row at each."""
    of_works = [*works((4096, 1000), (8192, 1000)), *works((6000, 1000), held_out=True)]
    known = SearchState(of_works, SimpleNamespace(times={}))
    worker, times = CpuWorker(H200, compiling=False), {}
    for w in of_works:
        seeds = worker.seeds(w, False, (hand(2, 16),))
        for cell in known.seeded(w, seeds):
            for c in (*seeds.cuts.values(), *seeds.earlier):
                for i, p in enumerate(p for p in c.plans if p.fused == cell.fused and p.root == cell.root):
                    times[w.text(), p.text()] = cell.times[p] = Time(20.0 if c in seeds.earlier else 10.0 + i, 20.0 if c in seeds.earlier else 10.0 + i)
    return known, times


def test_a_row_that_wins_its_race_stays_whatever_its_kernels_took_by_themselves(measured):
    known, times = measured
    first, second, held = known.works
    group = first.group
    chosen = {group: choose_group(known, group)}
    row = known.earlier[first][0]
    assert row not in chosen[group].values()
    races = entrants(known, {w: chosen[group].get(w) for w in (first, second)})
    assert all(row in races[w] and known.composed(w) in races[w] and known.default[w] in races[w] for w in (first, second))
    known.raced |= races
    for w in (first, second):
        times |= {(w.text(), c.text()): Time(10.0, 10.0) for c in races[w]}
    times |= {(first.text(), row.text()): Time(5.0, 5.0), (second.text(), row.text()): Time(12.0, 12.0)}
    choice = corrected_by_races(known, times, chosen, 1.02)
    assert choice[group] == {first: row, second: chosen[group][second]}
    times[second.text(), row.text()] = Time(10.1, 10.1)
    assert set(corrected_by_races(known, times, chosen, 1.02)[group].values()) == {row}, "one schedule less, for 1%"
    for size, wanted in ((4096, row), (8192, chosen[group][second])):
        near = replace(held, sizes=(("x", size), ("y", 1000)))
        known.of_group[group][2] = near
        assert run_at(known, group, choice[group], rows_of(known, times, choice[group], {}, True))[near] == wanted, "the row that the dispatcher takes"
    apart = "".join(f"{f}.block(x:1);\n{f}.tensorize(x:1, y:0);\n" for f in ("total_shift", "total", "softmax"))
    known.cuts[group] = {row.fused: row}
    assert "total" not in known.funcs(group)
    known.of_group[group][2] = near = replace(held, sizes=(("x", 123), ("y", 1000)))
    kept = run_at(known, group, choice[group], [*rows_of(known, times, choice[group], {}, True), row_of(near, apart)])[near]
    assert kept.roots == ("total_shift", "total", "softmax") and {*kept.roots} <= {*known.funcs(group)} and known.composed(first) is not None


def test_a_row_that_was_not_tried_is_not_replaced(measured):
    known, times = measured
    first, second, _ = known.works
    chosen = {first.group: choose_group(known, first.group)}
    del times[first.text(), known.earlier[first][0].plans[0].text()]
    assert set(corrected_by_races(known, times, chosen, 1.02)[first.group]) == {second}


def test_rows_at_other_sizes_stay_and_those_held_out_go(tmp_path, measured):
    known, _ = measured
    first, _, held = known.works
    (other,) = works((123, 1000))
    rows = [row_of(w, hand(1, 4)) for w in (first, other, held)] + [replace(row_of(other, hand(1, 4)), dtype="fp32", spec="0123456789ab")]
    folder_with(tmp_path, *rows)
    new = [row_of(first, hand(2, 4))]
    assert remaining_rows(tmp_path, known, new, True) == {"softmax": [rows[1]]}
    assert [r.sizes["x"] for r in remaining_rows(tmp_path, known, new, False)["softmax"]] == [123, 6000], "a run that was cut short"


@pytest.mark.parametrize("works, gpus, budget, part", [(876, 4, 400, 0.27), (876, 1, 1800, 0.24), (80, 1, 1800, 0.15), (876, 1, 300, 0.5)])
def test_races_get_the_time_they_need(works, gpus, budget, part):
    assert tune_tool.racing_part(works, gpus, budget) == pytest.approx(part, abs=0.01)


def test_measurements_are_kept_small_and_those_of_other_kinds_stay(tmp_path):
    path, about = tmp_path / "m.safetensors", {"op": "o", "direction": "forward", "dtype": "bf16", "params": {"k": 2}, "wanted": [], "saved": False}
    cold = np.full((3, 400), np.nan, np.float32)
    cold[0, 7], cold[2, 399] = 1.25, 70000.5
    write_matrices(path, {"gpu": "G"}, [MeasurementMatrix({**about, "works": [{}] * 3, "schedules": ["s"] * 400}, cold, cold * 2)])
    by, (back,) = read_matrices(path)
    assert by == {"gpu": "G"} and back.kind == ("o", "forward", "bf16", (("k", 2),), (), False, ())
    assert np.array_equal(back.cold, cold, equal_nan=True) and np.array_equal(back.warm, cold * 2, equal_nan=True)
    assert path.stat().st_size < 1000
    (tmp_path / "old").write_bytes(b"nothing")
    with pytest.raises(Exception, match=".*"):
        read_matrices(tmp_path / "old")


# -- the command ----------------------------------------------------------------------------------------------------------

SHAPES = """softmax:
- {sizes: {x: 1024, y: 1000}, directions: [forward]}
- {sizes: {x: 3000, y: 1000}, directions: [forward], held_out: true}
- {sizes: {x: 2000, y: 3000}, directions: [forward], held_out: true}
two_mm:
- {sizes: {m: 1024, n: 1024, k: 1024, l: 16}, directions: [forward]}
- {sizes: {m: 1000, n: 1000, k: 1000, l: 24}, directions: [forward], held_out: true}
"""


def tune(out: Path, *more: str) -> str:
    shapes = out.parent / "shapes.yaml"
    shapes.write_text(SHAPES)
    what = ["--dry-run", "--ops", "softmax,two_mm", "--shapes", str(shapes), "--dtypes", "bf16", "--jobs", "1", "--out", str(out), "--budget", "900s", "--rounds", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "tune.py"), *what, *more], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rows_race_as_whole_schedules_and_sizes_held_out_race_what_the_new_table_gives(tmp_path):
    first, *_ = works((1024, 1000))
    (other,) = works((77, 1000))
    out, earlier = tmp_path / "out", tmp_path / "earlier"
    folder_with(earlier, row_of(first, hand(2, 16)), replace(row_of(first, hand(2, 16)), spec="0123456789ab", saved=True))
    folder_with(out, replace(row_of(other, hand(2, 16)), measured=False))
    told = tune(out, "--from", str(earlier))
    assert f"tune: 1 rows of {earlier} raced again; 1 of another version of their spec left out" in told
    journal = Journal(out / "journal.jsonl", {})
    rows = [r for op in ("softmax", "two_mm") for r in read_rows((out / f"{op}.yaml").read_text(), op)]
    assert any(r.sizes["x"] == 77 for r in rows if r.op == "softmax"), "at a size that was not tuned"
    made = tune_tool.all_problems(tune_tool.arguments(["--ops", "softmax,two_mm", "--shapes", str(tmp_path / "shapes.yaml"), "--dtypes", "bf16"]))
    known, worker = SearchState(made, journal), CpuWorker(H200, compiling=False)
    for w in made:
        known.seeded(w, worker.seeds(w, True))
    _, variant = variants_of(first.group)
    assert (first.text(), split_by_kernel(variant.algorithm, variant.outputs, hand(2, 16)).text()) in journal.times
    held = [w for w in made if w.held_out]
    assert len(held) == 3
    for w in held:
        _, variant = variants_of(w.group)
        row = dispatched([r for r in rows if r.op == w.group.op], w)
        runs = split_by_kernel(variant.algorithm, variant.outputs, row.schedule) if row is not None else known.default[w]
        for which in (runs, known.composed(w), known.default[w]):
            assert (w.text(), which.text()) in journal.times, w.title()
    assert "regret where held out:   2 sizes" in told and "regret where held out:   1 sizes" in told


def test_a_run_at_some_sizes_keeps_what_was_measured_at_others():
    """Of the kind of call that it tunes too: the regrets of sizes held out are read from all of them."""
    about = {"op": "softmax", "direction": "forward", "dtype": "bf16", "params": {}, "wanted": [], "saved": False}

    def matrix(sizes, schedules, times):
        works = [{"x": x, "held_out": held} for x, held in sizes]
        return MeasurementMatrix({**about, "by": len(schedules), "works": works, "schedules": schedules}, np.array(times, np.float32), np.array(times, np.float32) / 2)

    nan = float("nan")
    before = matrix([(1, False), (2, True), (3, False)], ["a", "b", "c", "d"], [[1, 2, nan, 9], [3, nan, nan, nan], [nan, 4, 5, nan]])
    now = matrix([(4, False), (1, True)], ["b", "e"], [[6, 7], [8, nan]])
    both = joined(now, before)
    assert both.about["by"] == 2 and both.about["schedules"] == ["b", "e", "a", "c"], "d was timed at a size that is timed anew"
    assert both.about["works"] == [*now.about["works"], *before.about["works"][1:]]
    wanted = [[6, 7, nan, nan], [8, nan, nan, nan], [nan, nan, 3, nan], [4, nan, nan, 5]]
    np.testing.assert_array_equal(both.cold, np.array(wanted, np.float32))
    np.testing.assert_array_equal(both.warm, np.array(wanted, np.float32) / 2)
    same = joined(now, now)
    assert same.about == now.about and np.array_equal(same.cold, now.cold, equal_nan=True)
