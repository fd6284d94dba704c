"""Sizes drawn at random: the same for a seed, from every stratum; what is measured, checked and summarized at them."""

import json
import math
import os
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[3]
sys.path[:0] = [p for p in (str(ROOT / "tools"), str(ROOT / "benchmarks")) if p not in sys.path]

import random_shapes  # noqa: E402
from common import baselines, timing, workloads  # noqa: E402
from sampling import checking, domains, measuring, ratios, regret  # noqa: E402

from dtkernels.tuning.search.candidates import KernelCandidate  # noqa: E402
from dtkernels.tuning.workers.worker_pool import Finished  # noqa: E402


def extents(shape: str) -> list[int]:
    return list(map(int, re.findall(r"\d+", shape)))


# -- drawing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", domains.OPS)
def test_a_seed_gives_its_sizes_again_and_another_seed_others(op):
    assert domains.first_sizes(1000, op, 50) == domains.first_sizes(1000, op, 60)[:50]
    assert domains.first_sizes(1000, op, 50) != domains.first_sizes(1001, op, 50)


def test_sizes_do_not_change_with_the_version_of_python():
    assert [s.shape for s in domains.first_sizes(1, "mmsigmoid", 3)] == ["4x3798x2224", "8320x218x306", "1324x1x58"]
    assert [s.shape for s in domains.first_sizes(1, "attention", 2)] == ["B1H16/4M276S276D32 causal", "B78H12/1M1004S25144D48"]


@pytest.mark.parametrize("op", domains.OPS)
@pytest.mark.parametrize("seed", range(5))
def test_the_first_ten_sizes_hold_every_stratum(op, seed):
    first = domains.first_sizes(seed, op, 10)
    assert {s.stratum for s in first} == {s.words for s in domains.DOMAINS[op][1]} and len(domains.DOMAINS[op][1]) == 10
    numbers = [extents(s.shape) for s in first]
    assert any(1 in n for n in numbers)
    if op == "attention":
        groups = [h // (g or h) for h, g in (map(int, re.search(r"H(\d+)(?:/(\d+))?M", s.shape).groups("0")) for s in first)]
        assert any(g & (g - 1) for g in groups) and any("M1S" in s.shape for s in first)
    else:
        assert any(all(e % 2 and e > 1 for e in n) for n in numbers)
    if op in ("relu", "softmax", "dyt"):
        assert any(n[1] >= 65536 for n in numbers) and any(n[0] >= 16384 for n in numbers) and any(n[0] <= 64 for n in numbers)


@pytest.mark.parametrize("op", domains.OPS)
def test_every_size_is_a_workload_within_its_bound(op):
    for size in domains.first_sizes(7, op, 300):
        work = workloads.at(op, size.shape, torch.bfloat16)
        assert work.flops[0] <= domains.MOST_FLOPS and work.bytes[0] <= 2**32, size
        domain = domains.DOMAINS[op][0]
        if op in ("relu", "softmax", "dyt", "mmsigmoid"):
            assert all(low <= e <= high for e, (low, high) in zip(extents(size.shape), domain.values())), size


def test_extents_are_drawn_evenly_by_their_logarithm_and_reach_both_ends():
    draw = random.Random(0)
    found = [domains.extent(draw, (1, 1024)) for _ in range(20000)]
    assert min(found) == 1 and max(found) == 1024
    assert abs(sum(e < 32 for e in found) / len(found) - 0.5) < 0.02
    assert {domains.extent(draw, (3, 9), odd=True) for _ in range(500)} == {3, 5, 7, 9}
    assert {domains.extent(draw, (128, 512), 128) for _ in range(500)} == {128, 256, 384, 512}
    assert {domains.extent(draw, (5, 5)) for _ in range(5)} == {5}


def test_list_prints_the_first_sizes_without_a_gpu(capsys):
    assert random_shapes.main(["--seed", "3", "--ops", "softmax,two_mm", "--list", "2"]) == 0
    first = [f"softmax {s.shape} ({s.stratum})" for s in domains.first_sizes(3, "softmax", 2)]
    assert capsys.readouterr().out.splitlines()[:2] == first


WRONG = [
    ("", "the following arguments are required: --seed"), ("--seed -1", "'-1' is no whole number from 0 on"), ("--seed x", "'x' is no whole number"),
    ("--seed 1 --ops rope", "unknown 'rope'; allowed: relu"), ("--seed 1 --directions both", "unknown 'both'; allowed: forward, backward"),
    ("--seed 1 --peers nope", "unknown 'nope'; allowed: eager"), ("--seed 1 --seconds 0", "'0' is no number above 0"),
    ("--seed 1 --regret nan", "'nan' is no number above 0"), ("--seed 1 --json {tmp}/none/x", "no such folder"), ("--seed 1 --dtype fp8", "invalid choice: 'fp8'"),
    ("--seed 1 --list 0", "'0' is no whole number from 1 on"), ("--seed 1", "no GPU"),
]  # fmt: skip


@pytest.mark.parametrize("asked, said", WRONG, ids=[asked or "nothing" for asked, _ in WRONG])
def test_a_wrong_argument_is_one_line(asked, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        code = random_shapes.main(asked.format(tmp=tmp_path).split())
    except SystemExit as refused:
        code = refused.code
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert code == 2 and out == "" and line.startswith("random_shapes: ") and said in line


# -- statistics ---------------------------------------------------------------------------------------------------------


def test_ratios_are_summarized():
    found = ratios.Ratios.of([4.0, 1.0, *[2.0] * 38])
    assert found.count == 40 and found.worst == 1.0 and found.low == 2.0
    assert found.mean == pytest.approx(2.0 * math.exp((math.log(2) - math.log(2)) / 40))
    assert ratios.Ratios.of([0.5, 2.0]).mean == pytest.approx(1.0) and ratios.Ratios.of([0.5, 2.0]).low == 0.5
    assert ratios.Ratios.of([]).count == 0


def size(op: str = "softmax", **more) -> dict:
    base = {"op": op, "direction": "forward", "shape": "3x5", "stratum": "odd", "us": {}, "errors": {}, "notes": {}, "reference": "float64"}
    return ratios.compared(base | {"limit": 4.0, "how": {"by": "the default schedule", "schedule": "a.compile();"}} | more)


def test_the_report_names_slow_sizes_with_the_fastest_peer_and_the_schedule():
    slow = size(us={"dtkernels": 10.0, "eager": 8.0, "compile": 9.0, "bare-product": 1.0})
    text = ratios.report([slow, size(us={"dtkernels": 10.0, "eager": 20.0}), size(us={"dtkernels": 5.0}), size("dyt", skipped="no memory")])
    assert "softmax    forward     2 sizes  mean  1.26  5%  0.80  worst  0.80; 1 without a peer" in text
    assert "0.80 softmax forward 3x5 (odd): ours 10.0 us, eager 8.0 us; of the limit 0.40 and 0.50; the default schedule: a.compile();" in text
    assert "1 not measured" in text and "wrong or failed" not in text


def test_the_report_names_what_is_wrong():
    text = ratios.report([size(wrong="WRONG: off"), size(failed="ValueError: no")])
    assert "2 wrong or failed" in text and "softmax forward 3x5 (odd): WRONG: off; the default schedule" in text and "FAILED ValueError: no" in text


def test_regret_is_summarized_with_the_best_schedule_where_it_is_high():
    high = {"regret": 1.5, "dispatched": 15.0, "best": 10.0, "schedule": "b.compile();"}
    text = ratios.regret_report([size(regret=high), *[size(regret=high | {"regret": 1.0})] * 2, size(regret={"note": "none"})])
    assert "3 sizes: median 1.000, 95% 1.500, worst 1.500" in text and text.count("best found: b.compile();") == 1
    assert ratios.regret_report([size()]) == ""


# -- checking -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["B2H4/2M5S7D4", "B1H3/1M6S6D4 causal", "B1H2M1S9D4", "B1H6/2M9S4D4 causal"])
def test_attention_in_pieces_is_attention(shape, monkeypatch):
    work = workloads.at("attention", shape, torch.float64)
    sizes = {n: int(v) for n, v in re.findall(r"([A-Z/])(\d+)", shape)}
    heads = sizes["H"], sizes.get("/", sizes["H"])
    q, k, v = (torch.randn(sizes["B"], h, n, sizes["D"], dtype=torch.float64) for h, n in zip((*heads, heads[1]), (sizes["M"], sizes["S"], sizes["S"])))
    monkeypatch.setattr(checking, "FITS", 2 * sizes["S"] * heads[0] // heads[1])
    for direction in ("forward", "backward"):
        grads = (torch.randn_like(q),)
        found, how = checking.truth(work, (q, k, v), direction, grads)
        own, asked = work.part((q, k, v)), work.part(grads)
        expected = measuring.bench.results(work.eager, own, (0, 1, 2), direction, asked)
        assert how == "float64" and all(torch.allclose(f, e) for f, e in zip(found, expected))


@pytest.mark.parametrize("count, right", [(1, True), (4, True), (1000, False)])
def test_the_error_of_few_numbers_may_be_a_few_times_that_of_torch(count, right):
    """A gradient of one number that cancels was off by 7.3%, torch's own by 1.5%."""
    truth, many = torch.ones(count, dtype=torch.float64), torch.ones(1000, dtype=torch.float64)
    ours, eager = (checking.Deviation.of([truth * (1 + off), many], [truth, many], 0.0) for off in (0.073, 0.015))
    assert ours.allowed(0.0078, eager) is right
    assert not checking.Deviation.of([truth, many * 1.073], [truth, many], 0.0).allowed(0.0078, eager), "another tensor has no more room"


def test_a_deviation_scales_with_the_truth_but_for_noise():
    truth = torch.tensor([3.0, 4.0], dtype=torch.float64)
    found = checking.Deviation.of([truth.float() * 1.01], [truth], 0.0)
    assert found.norm == pytest.approx(0.01, rel=1e-4) and found.allowed(0.01, None) and not found.allowed(0.001, None)
    assert found.allowed(0.001, checking.Deviation((0.01,), (0.01,), (2,))) and not found.allowed(0.001, checking.Deviation((math.nan,), (math.nan,), (2,)))
    noise = checking.Deviation.of([truth * 1e-7], [truth * 0], 1e-4)
    assert noise.allowed(0.008, None) and not checking.Deviation.of([truth], [truth * 0], 1e-4).allowed(0.008, None)
    missing = checking.Deviation.of([torch.tensor([3.0, math.nan])], [truth], 0.0)
    assert not missing.allowed(1.0, None) and not missing.loosely()
    with pytest.raises(ValueError, match="expected"):
        checking.Deviation.of([truth[:1]], [truth], 0.0)


def test_the_length_of_sums_follows_from_the_shape():
    def of(op: str, shape: str) -> tuple[int, int]:
        return checking.lengths(workloads.at(op, shape, torch.bfloat16))

    assert of("softmax", "70000x33") == (70000, 33) and of("mmsigmoid", "3x900x5") == (900, 0) and of("two_mm", "3x4x5r999") == (999, 0)
    assert of("attention", "B2H12/4M100S50D64") == (300, 50) and of("attention", "B2H4M1S50D64 causal") == (64, 1)


def test_the_limit_of_causal_attention_counts_the_visible_pairs():
    assert workloads.visible_share(4096, 4096) == 0.5 and workloads.visible_share(1, 10) == 0.1 and workloads.visible_share(10, 2) == (3 + 16) / 20


# -- measuring ----------------------------------------------------------------------------------------------------------

SMALL = [("relu", "3x5"), ("softmax", "7x1"), ("softmax", "1x301"), ("dyt", "5x9"), ("mmsigmoid", "1x9x7"), ("mmsigmoid", "5x3x1"), ("two_mm", "3x5x9r1"), ("cross_entropy", "6x11"),
         ("attention", "B2H6/2M5S5D8 causal"), ("attention", "B1H5/1M1S33D8"), ("attention", "B2H3M1S1D8"), ("attention", "B1H2M1S7D8 causal")]  # fmt: skip


@pytest.fixture
def measurer(tmp_path, monkeypatch):
    """The handler of the worker process, on the CPU; every call takes 10 microseconds."""
    made = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *args, device=None, **kwargs: made(*args, **kwargs))
    drawn = torch.randint
    monkeypatch.setattr(torch, "randint", lambda *args, device=None, **kwargs: drawn(*args, **kwargs))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(timing, "captured", lambda prepare: (prepare(), True))
    monkeypatch.setattr(timing, "gpu_time", lambda fn, milliseconds=30.0: (fn(), 10.0)[1])
    monkeypatch.setattr(timing, "copy_time", lambda moved: moved / 1e3)
    monkeypatch.setattr(timing, "product_rate", lambda dtype: 1e9)
    return measuring.Measurer(str(tmp_path / "stage"))


@pytest.mark.parametrize("direction", random_shapes.DIRECTIONS)
@pytest.mark.parametrize("op, shape", SMALL)
def test_a_size_is_checked_and_timed_beside_its_peers(measurer, op, shape, direction):
    found = measurer((op, shape, "fp32", direction, ("eager", "sdpa")))
    assert not ratios.is_fault(found) and found["notes"] == {} and found["reference"] == "float64", found
    assert found["us"]["dtkernels"] == 10.0 and ("sdpa" if op == "attention" else "eager") in found["us"]
    assert found["limit"] > 0 and found["how"]["path"] == "reference" and all(e < 0.1 for e in found["errors"].values())
    json.dumps(found)


def test_a_wrong_result_is_a_fault_and_a_peer_that_fails_or_is_wrong_is_left_out(measurer, monkeypatch):
    monkeypatch.setitem(baselines.PEERS, "liger", lambda work: lambda x: work.eager(x) * 1.5)
    monkeypatch.setitem(baselines.PEERS, "fa2", lambda work: lambda x: x.no_such_thing)
    found = measurer(("relu", "8x9", "fp32", "forward", ("eager", "liger", "fa2")))
    assert set(found["us"]) == {"dtkernels", "eager"} and "WRONG" in found["notes"]["liger"] and "no_such_thing" in found["notes"]["fa2"]
    made = workloads.row_op
    monkeypatch.setattr(workloads, "at", lambda op, shape, dtype: SimpleNamespace(**{**vars(made("relu", 8, 9, dtype)), "ours": lambda x: torch.relu(x) + 0.01}))
    assert "WRONG" in measurer(("relu", "8x9", "fp32", "forward", ("eager",)))["wrong"]
    monkeypatch.setattr(workloads, "at", lambda op, shape, dtype: SimpleNamespace(**{**vars(made("relu", 8, 9, dtype)), "ours": lambda x: x.no_such_thing}))
    assert "no_such_thing" in measurer(("relu", "8x9", "fp32", "forward", ("eager",)))["failed"]


def test_without_memory_for_float64_the_reference_is_float32(monkeypatch):
    def full(self, *args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    work, inputs = workloads.row_op("relu", 2, 3, torch.float32), (torch.randn(2, 3),)
    right = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda t, dtype: full(t) if dtype is torch.float64 else right(t, dtype))
    assert checking.truth(work, inputs, "forward", ())[1] == "float32"
    monkeypatch.setattr(torch.Tensor, "to", full)
    assert checking.truth(work, inputs, "forward", ()) == (None, "none")


@pytest.fixture
def workers(monkeypatch):
    """Measuring processes that only answer: a function of (task, stage file) gives what each says."""
    made = SimpleNamespace(answer=None, tasks=[])

    class Pool:
        def __init__(self, count, make, stage):
            self.stage = Path(stage)

        def close(self):
            pass

    def ask(pool, task, seconds):
        made.tasks.append(task)
        return made.answer(task, pool.stage)

    monkeypatch.setattr(measuring, "WorkerPool", Pool)
    monkeypatch.setattr(measuring, "ask", ask)
    return made


def lost(stage_file: Path, stage: str, why: str = "the worker died") -> Finished:
    stage_file.write_text(stage)
    return Finished((), 0, failure=why, lost=True)


def test_a_peer_that_ends_the_process_is_left_out_and_the_size_measured_again(workers):
    right = Finished((), 0, {"us": {"dtkernels": 1.0}, "errors": {}, "notes": {"eager": "slow"}})
    workers.answer = lambda task, stage: lost(stage, "compile") if "compile" in task[4] else right
    found = measuring.Bench(("eager", "compile")).measure("relu", "3x3", "bf16", "forward")
    assert found["us"] == {"dtkernels": 1.0} and found["notes"] == {"compile": "the worker died", "eager": "slow"} and len(workers.tasks) == 2


def test_what_ends_the_process_is_our_fault_or_that_of_the_place(workers):
    def measured(stage: str, why: str = "the worker died", seconds: float = 1000.0) -> dict:
        workers.answer = lambda task, file: lost(file, stage, why)
        return measuring.Bench(("eager",)).measure("relu", "3x3", "bf16", "forward", seconds)

    assert measured("dtkernels")["failed"] == "the worker died" and "while timing" in measured("timing")["failed"]
    assert "skipped" in measured("reference") and "failed" not in measured("reference")
    assert "failed" in measured("dtkernels", "took too long") and "at the end" in measured("dtkernels", "took too long", 5.0)["skipped"]


def run(argv: str, measure, searcher=None) -> random_shapes.Run:
    made = random_shapes.Run(random_shapes.arguments(argv.split()), SimpleNamespace(measure=measure), searcher, {"gpu": "none"})
    made.go()
    return made


def test_a_run_takes_the_sizes_of_the_seed_and_writes_each(tmp_path, capsys):
    asked = []

    def measure(op, shape, dtype, direction, seconds):
        asked.append((op, shape, direction))
        if len(asked) == 2:
            raise OSError("no more processes")
        return {"us": {"dtkernels": 2.0, "eager": 1.0}, "limit": 1.0, "errors": {}, "notes": {}, "reference": "none"}

    path = tmp_path / "out.json"
    made = run(f"--seed 5 --ops relu,dyt --sizes 3 --skip 1 --json {path}", measure)
    expected = [(op, s.shape, d) for op in ("relu", "dyt") for d in ("forward", "backward") for s in domains.first_sizes(5, op, 4)[1:]]
    written = json.loads(path.read_text())
    assert asked == expected and len(written["sizes"]) == 12 and written["reached"]["dyt backward"] == 3
    assert "OSError: no more processes" in written["sizes"][1]["skipped"] and written["sizes"][0]["ratio"] == 0.5
    assert "sizes reached: relu forward 3" in made.text() and len(capsys.readouterr().out.splitlines()) == 12


def test_time_is_shared_evenly(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(random_shapes, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def measure(op, shape, dtype, direction, seconds):
        clock[0] += 10.0 if op == "relu" else 1.0
        return {"us": {}, "errors": {}, "notes": {}, "skipped": "fast"}

    reached = run("--seed 5 --ops relu,softmax --directions forward --seconds 100", measure).reached
    assert reached == {"relu forward": 5, "softmax forward": 50}


def test_a_search_that_fails_ends_no_run():
    how = {"how": {"by": "x", "schedule": "", "labels": {}}}

    def measure(*_):
        return {"us": {"dtkernels": 2.0}, "limit": 1.0, "errors": {}, "notes": {}, "reference": "none", **how}

    def fails(*_):
        raise KeyError("l")

    made = run("--seed 5 --ops relu --directions forward --sizes 2 --regret 1", measure, SimpleNamespace(at=fails))
    assert [one["regret"] for one in made.found] == [{"note": "KeyError: 'l'"}] * 2


@pytest.mark.parametrize("op, shape", [("relu", "37x1001"), ("softmax", "1x70001"), ("mmsigmoid", "33x512x100"), ("two_mm", "33x100x512r24"),
                                       ("attention", "B1H40/8M77S77D64 causal"), ("attention", "B3H7M1S999D48")])  # fmt: skip
@pytest.mark.parametrize("direction", random_shapes.DIRECTIONS)
def test_the_search_is_at_the_problem_that_is_dispatched(op, shape, direction, monkeypatch):
    made = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *args, device=None, **kwargs: made(*args, device="meta", **kwargs))
    work = workloads.at(op, shape, torch.bfloat16)
    how = measuring.chosen(work, work.make(), direction, "h200")
    problem = regret.problem_of(op, shape, direction, "bf16", how["labels"])
    _, variant = regret.variants_of(problem.group)
    assert problem.group.direction == direction and regret.split_by_kernel(variant.algorithm, variant.outputs, how["schedule"]).plans
    assert {n: e for n, e in problem.extents.items() if n in how["labels"]}.items() <= how["labels"].items()


def test_regret_is_the_dispatched_over_the_best_of_the_race():
    plans = [regret.ScheduleCandidate((KernelCandidate("", "relu", f"relu.num_warps({n});"),)) for n in (1, 2, 4)]
    times = dict(zip((("work", p.text()) for p in plans), (regret.Time(12.0, 12.0), regret.Time(8.0, 8.0), regret.Time(failure="wrong"))))
    work, journal = SimpleNamespace(text=lambda: "work"), SimpleNamespace(times=times)
    found = regret.outcome(work, plans[0], plans, journal, ("relu",))
    assert found == {"regret": 1.5, "dispatched": 12.0, "best": 8.0, "schedule": "relu.num_warps(2); relu.compile();"}
    assert "was not timed: wrong" in regret.outcome(work, plans[2], plans, journal, ())["note"]


def compiled_alone(index: int):
    """Make a process that ends at one size, and fails at another."""

    def handle(task):
        if task[1] == "1x1":
            os._exit(3)
        if task[1] == "2x2":
            raise ValueError("no such kernel")

    return handle


def test_sizes_are_compiled_first_on_several_processes_whatever_fails(monkeypatch):
    monkeypatch.setenv(measuring.THREADS, "7")
    made = measuring.Bench.__new__(measuring.Bench)
    made.names = ("eager",)
    sizes = [("relu", f"{n}x{n}", "bf16", "forward") for n in range(1, 6)]
    assert made.prepare(sizes, 2, 100.0, compiled_alone) == 5 and os.environ[measuring.THREADS] == "7"
    with pytest.raises(SystemExit):
        random_shapes.arguments(["--seed", "1", "--jobs", "2"])
