"""Programs that nobody tuned, in the interpreter, forward and gradients, in float32 and in their own dtypes, against float64."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from untuned_calls import DTYPES, Call, check, operator
from untuned_programs import PROGRAMS

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import untuned

#: take the interpreter 20 seconds and more; checked on a GPU alone
SLOW = {"padded_weights", "t5_cross", "swin_v2", "gemma_window", "mla_scores", "talking_heads", "triangle_multiply", "convnext_depthwise", "series_decomp",
        "block_int8", "dilated_attention", "log_mel"}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in SLOW])
def test_program(name):
    program, op = PROGRAMS[name], operator(name)
    for dtype in dict.fromkeys(("fp32", *program.dtypes)):
        for backward in (False, True) if program.grad else (False,):
            check(Call.of(name, program.small, DTYPES[dtype], backward, "cpu"), op)


def test_runs_in_a_fixed_order_are_compared(monkeypatch):
    op = operator("embed")
    call, run = Call.of("embed", PROGRAMS["embed"].small, torch.float32, True, "cpu"), Call.results
    check(call, op, times=2)
    monkeypatch.setattr(Call, "results", lambda self, op: tuple(t + torch.are_deterministic_algorithms_enabled() * 1e-6 * torch.rand_like(t) for t in run(self, op)))
    with pytest.raises(AssertionError, match="embed .*other bits in another run"):
        check(call, op, times=2)


def test_a_program_that_computes_something_else_is_found(monkeypatch):
    op = operator("row_sum")
    monkeypatch.setitem(PROGRAMS, "row_sum", replace(PROGRAMS["row_sum"], eager=lambda a: a[:, 1:].sum(-1)))
    with pytest.raises(AssertionError, match="row_sum .*Errors"):
        check(Call.of("row_sum", PROGRAMS["row_sum"].small, torch.bfloat16, False, "cpu"), op)


def on_cpu(monkeypatch):
    """The benchmark at small sizes, with a clock that gives every call 10 microseconds after running it."""
    made = Call.of
    monkeypatch.setattr(
        untuned.Call, "of", lambda name, sizes, dtype, backward, device: made(name, PROGRAMS[name].small, dtype, backward, "cpu")
    )
    monkeypatch.setattr(torch, "compile", lambda fn, dynamic: fn)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(untuned.bench, "versions", lambda: {"gpu": "none"})
    monkeypatch.setattr(untuned.timing, "captured", lambda prepare: (prepare(), True))
    monkeypatch.setattr(untuned.timing, "gpu_time", lambda fn, milliseconds: (fn(), 10.0)[1])
    monkeypatch.setattr(untuned.timing, "copy_time", lambda moved: moved / 1e3)
    monkeypatch.setattr(untuned.timing, "product_rate", lambda dtype: 1e9)


@pytest.mark.filterwarnings("ignore")
def test_the_benchmark_goes_on_after_a_program_that_fails(monkeypatch, tmp_path, capsys):
    on_cpu(monkeypatch)
    monkeypatch.setitem(PROGRAMS, "mish", replace(PROGRAMS["mish"], text="Func out; In A; Var x; out[x] = B[x];"))
    code = untuned.main(["--only", "^(mish|mm_bias_relu|embed|att_window) ", "--json", str(tmp_path / "out.json")])
    found, said = json.loads((tmp_path / "out.json").read_text())["cases"], capsys.readouterr().out
    failed = {title for title, r in found.items() if "failed" in r}
    assert code == 1 and failed == {"mish 33554432 bf16", "mish backward 33554432 bf16"}
    assert "9 of 9 cases; failed 2, wrong 0\ngeometric mean of best peer / ours: 1.00; slowest: " in said
    backward = found["att_window backward 16x8192x8192x128x128 bf16"]
    assert set(backward["us"]) == set(backward["step_us"]) == {"dtkernels", "eager", "compile", "library"} and backward["step_ratio"] == 1
    assert "\nthe same of training steps: 1.00; slowest: " in said and said.count(" step ours 10.0 ratio 1.00") == 3
    assert (
        found["embed 32000x4x4096x4096 bf16"]["bytes"] == 2 * 9 * 8 + (2 * 2 * 9 * 33 + 9 * 33) * 2
    )  # no more of the table than is picked


def test_the_benchmark_is_asked_on_the_command_line(capsys):
    with pytest.raises(SystemExit) as ended:
        untuned.main(["--help"])
    assert ended.value.code == 0 and "--only REGEX" in capsys.readouterr().out
