"""benchmarks/schedule_study.py without a GPU: its schedules, its figures, and the rotation at its end with timers replaced."""

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
sys.path[:0] = [p for p in (str(ROOT / "tools"), str(ROOT / "benchmarks")) if p not in sys.path]

import schedule_study  # noqa: E402
from common import baselines, timing  # noqa: E402
from sampling import beside_peers  # noqa: E402

from dtkernels.codegen.target import target  # noqa: E402
from dtkernels.tuning.records import inputs_and_reference  # noqa: E402
from dtkernels.tuning.records.journal import Time  # noqa: E402
from dtkernels.tuning.workers.compile_worker import Artefact, Refused  # noqa: E402


def test_schedules_are_marked_seeded_each_once_and_of_every_origin():
    found = []
    for seed in (1, 1, 2):
        case = schedule_study.case_at("dyt", "96x4096", "fp32", target("h100"))
        found.append([*schedule_study.stream(case, seed, 64)])
        assert {*case.marks} == {"default", "call", "cost model"} and {*case.marks.values()} == {*found[-1][: len({*case.marks.values()})]}
        assert len(found[-1]) == len({*found[-1]}) == 64 and {*case.entries} == {*found[-1]}
        assert {"rules", "families", "random"} <= {e.origin for e in case.entries.values()}
        proposed = [e.predicted for e in case.entries.values() if e.origin == "rules"]
        assert case.entries[case.marks["cost model"]].predicted == min(proposed), "of all that the rules propose"
    assert found[0] == found[1] != found[2]


def test_a_schedule_without_room_is_refused_before_it_is_compiled():
    case = schedule_study.case_at("mmsigmoid", "512x512x512", "bf16", target("h100"))
    whole, compiler = case.entries[case.marks["default"]].whole, schedule_study.make_compiler(0, target("h100"), False)
    assert isinstance(compiler.compile_fitting(case.work, whole), Artefact)
    plan = whole.plans[-1]
    huge = whole.with_plan(type(plan)(plan.fused, plan.root, f"{plan.root}.block(x:4096, y:4096);\n{plan.root}.tensorize(x:4096, y:4096, k:64);\n{plan.root}.num_warps(4);"))
    with pytest.raises(Refused, match=schedule_study.ILLEGAL):
        compiler.compile_fitting(case.work, huge)


@pytest.fixture
def measured():
    """A case of which all but two schedules took 10, 11, 12 ... microseconds."""
    case = schedule_study.case_at("two_mm", "64x128x32r32", "bf16", target("h100"))
    keys = [*schedule_study.stream(case, 1, 12)]
    for i, key in enumerate(reversed(keys[:-2])):
        case.entries[key].time = Time(10.0 + i, 5.0)
    case.entries[keys[-2]].why = f"Refused: {schedule_study.ILLEGAL}"
    case.entries[keys[-1]].why = "wrong numbers: 1e0"
    return case


def test_figures_of_a_case(measured):
    measured.finals = {"us": {"best": 10.0, "eager": 15.0, "dtkernels": 10.5, "bare-product": 4.0}, "notes": {"liger": "not installed"}, "copy_us": 5.0}
    case = json.loads(json.dumps(schedule_study.described(measured)))
    count = len(case["schedules"])
    assert [s["us"] for s in case["schedules"]] == [10.0 + i for i in range(count)] and case["illegal"] == 1 and case["failures"] == {"wrong numbers: 1e0": 1}
    said = schedule_study.text(case)
    last = 1 + (count - 1) / 10
    assert f"100%: {last:.2f}" in said and f"within 5% of the best: 1 of {count}" in said
    place = case["marks"]["default"]["place"]
    assert f"* default: place {place + 1} of {count}, {1 + place / 10:.2f} of the best's time" in said
    assert "eager                             15.0 us    1.50 of the best" in said and "liger: not installed" in said
    assert "eager 1.50" in schedule_study.summary([case]), "a bare product does less, and is no peer"


def test_the_best_and_the_marked_run_beside_the_peers(monkeypatch, measured, tmp_path):
    for name in ("randn", "randint"):
        made = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, device=None, made=made, **kwargs: made(*args, **kwargs))
    ran = []
    monkeypatch.setattr(timing, "captured", lambda prepare: (prepare(), True))
    monkeypatch.setattr(timing, "interleaved_times", lambda running, ms: {who: (run(), ran.append(who), 7.0)[2] for who, run in running.items()})
    monkeypatch.setattr(timing, "copy_time", lambda moved: moved / 1e3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setitem(baselines.PEERS, "compile", lambda work: lambda *t: work.eager(*t) * 1.5)
    made = inputs_and_reference.make
    monkeypatch.setattr(inputs_and_reference, "make", lambda work, roots, device: made(work, roots, "cpu"))
    monkeypatch.setattr(beside_peers, "by_hand", lambda op: {})
    schedules = {"best": measured.text(measured.timed()[0].whole), "broken": "_2mm.no_such_thing();"}
    work = beside_peers.Finalists(str(tmp_path / "stage"))
    monkeypatch.setattr(torch._dynamo, "reset", lambda: None)
    case = schedule_study.case_at("two_mm", "64x128x32r32", "fp16", target("h100"))  # the interpreter multiplies raw bits of bfloat16
    found = work(("two_mm", "64x128x32r32", "fp16", case.work, ("eager", "compile"), schedules))
    assert {*found["us"]} == {*ran} == {"dtkernels", "eager", "best"} and found["notes"]["compile"].startswith("WRONG") and "no_such_thing" in found["notes"]["broken"]
    assert found["copy_us"] == (64 * 32 + 32 * 32 + 32 * 128 + 64 * 128) * 2 / 1e3


def test_cases_are_ops_with_a_shape_and_a_dtype_or_without():
    assert schedule_study.cases_of("dyt,two_mm:8x8x8r8,relu:4x4:fp32") == (("dyt", "128x65536", "fp32"), ("two_mm", "8x8x8r8", "bf16"), ("relu", "4x4", "fp32"))
    for wrong in ("no_such_op", "relu:4x4:int8", "relu:4x4:fp32:2"):
        with pytest.raises(SystemExit):
            schedule_study.main(["--ops", wrong, "--dry-run"])
