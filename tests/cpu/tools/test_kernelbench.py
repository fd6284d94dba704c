"""Problems of KernelBench at small sizes: all of them by the reference, a sample in the interpreter, and the runner without a GPU."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[3] / "benchmarks" / "kernelbench"
sys.path.append(str(FOLDER))
sys.path.append(str(FOLDER.parents[1] / "tools"))

import check  # noqa: E402
import measure  # noqa: E402
import problem  # noqa: E402
import run  # noqa: E402

from dtkernels.algebra.pipeline import prepare_algorithm  # noqa: E402
from dtkernels.runtime.reference.evaluator import evaluate  # noqa: E402

ALL = [(level, name) for level in problem.levels() for name in problem.problems(level)]
#: one problem of each structure; three-dimensional windows take the interpreter too long
SAMPLE = [n.split()[0] for n in """003_batched_matmul 005_matrix_scalar 012_matmul_diagonal 015_matmul_lower 018_matmul_transposed_both 024_log_softmax 029_softplus
    033_batchnorm 035_groupnorm 036_rmsnorm 037_frobenius 041_max_pool_1d 044_avg_pool_1d 047_sum 049_max 051_argmax 067_conv_1d 076_conv_1d_dilated_strided
    079_conv_transposed_1d_dilated_strided 082_conv_depthwise_2d 087_conv_pointwise_2d 090_cumprod 092_cumsum_exclusive 093_masked_cumsum 095_cross_entropy
    096_huber_loss 097_attention 098_kl_div_loss 099_triplet_loss 100_hinge_loss""".split()]  # fmt: skip


@pytest.mark.parametrize(("level", "name"), ALL, ids=[f"{level}/{name}" for level, name in ALL])
def test_the_text_says_what_torch_computes(level, name):
    p, spec = problem.problems(level)[name], problem.spec(level, name)
    tensors = p.tensors(p.small, torch.float64, "cpu", seed=1)
    got = evaluate(prepare_algorithm(spec.algorithm, spec.outputs), dict(zip(p.inputs, tensors)), dict(p.scalars), spec.outputs)
    expected = problem.as_tuple(p.reference(*tensors, *p.scalars.values()))
    for ours, torchs in zip(got, expected, strict=True):
        assert ours.shape == torchs.shape
        off = (ours.double() - torchs.double()).abs()
        assert (off <= p.extra * 2e-5 * (torchs.double().abs() + torchs.double().square().mean().sqrt())).all(), off.max()


@pytest.mark.kernels
@pytest.mark.parametrize("name", SAMPLE)
def test_kernels_are_right(name):
    assert check.check_values(1, name) == ""


@pytest.mark.kernels
def test_a_text_that_says_something_else_is_found(monkeypatch):
    known = problem.problems(1)
    monkeypatch.setitem(known, "047_sum", replace(known["047_sum"], reference=lambda A: A[:, 1:].sum(1)))
    assert "elements are wrong" in check.check_values(1, "047_sum")
    monkeypatch.setitem(known, "047_sum", replace(known["047_sum"], reference=lambda A: A.sum(2)))
    assert check.check_values(1, "047_sum") == "shape (3, 21), expected (3, 37)"


def test_every_text_has_a_declaration_and_no_schedule():
    for level in problem.levels():
        texts = {p.stem for p in (FOLDER / f"level{level}").glob("*.dt")}
        assert texts == set(problem.problems(level)) and not texts & set(problem.not_said(level))
        for name in texts:
            assert all(p.name == "compile" for p in problem.spec(level, name).program.schedule.primitives), name
            assert problem.text(level, name).startswith("# "), f"{name} has no header"


def test_level_1_has_all_problems():
    names = [*problem.problems(1), *problem.not_said(1)]
    assert sorted(int(n.split("_")[0]) for n in names) == list(range(1, 101))


def on_cpu(monkeypatch):
    """The benchmark at small sizes on the CPU; every call takes 10 microseconds, and torch's own 15."""
    known = problem.problems(1)
    for name in [n for n in known if n.startswith(("047", "048", "049", "051"))]:
        monkeypatch.setitem(known, name, replace(known[name], published=known[name].small))
    made = problem.Problem.tensors
    monkeypatch.setattr(problem.Problem, "tensors", lambda self, sizes, dtype, device, seed=0: made(self, sizes, dtype, "cpu", seed))
    rand = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *a, device=None, **k: rand(*a, **k))
    monkeypatch.setattr(torch, "compile", lambda fn, dynamic: fn)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure.bench, "versions", lambda: {"gpu": "none"})
    monkeypatch.setattr(measure.timing, "captured", lambda prepare: (prepare(), True))
    monkeypatch.setattr(measure.timing, "interleaved_times", lambda running, ms: {who: (fn(), 10.0 if who == "dtkernels" else 15.0)[1] for who, fn in running.items()})
    monkeypatch.setattr(measure.timing, "copy_time", lambda moved: 5.0)
    monkeypatch.setattr(measure.timing, "product_rate", lambda dtype: 1e12)


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore")
def test_the_benchmark_goes_on_after_a_problem_that_fails(monkeypatch, tmp_path, capsys):
    on_cpu(monkeypatch)
    known, write = problem.problems(1), tmp_path / "out.json"
    monkeypatch.setitem(known, "048_mean", replace(known["048_mean"], reference=lambda A: A.sum(1)))
    monkeypatch.setitem(known, "049_max", replace(known["049_max"], kinds={"A": "index:b"}, reference=lambda A: A.nothing))
    code = run.main(["--level", "1", "--only", "04[789]|051", "--backward", "--json", str(write)])
    found, said = json.loads(write.read_text())["cases"], capsys.readouterr().out
    assert code == 1 and set(found) == {"1/047_sum fp32", "1/047_sum backward fp32", "1/048_mean fp32", "1/048_mean backward fp32", "1/049_max fp32", "1/051_argmax fp32"}
    assert {n for n, r in found.items() if r.get("wrong")} == {"1/048_mean fp32", "1/048_mean backward fp32"}
    assert {n for n, r in found.items() if "failed" in r} == {"1/049_max fp32"}
    assert "6 of 6 cases; failed 1, wrong 2" in said and "fast_0.8 0.50, fast_1 0.50, fast_1.5 0.00, fast_2 0.00" in said
    assert found["1/047_sum fp32"]["speedup"] == {"eager": 1.5, "compile": 1.5} and found["1/047_sum fp32"]["error"] < 1e-6


def test_tolerances_are_those_of_the_suite():
    ones = torch.ones(4)
    assert measure.differs([ones], [ones + 1.9e-4], problem.TOLERANCE["fp32"]) == ""
    assert "allowed 0.0001" in measure.differs([ones], [ones + 2.1e-4], problem.TOLERANCE["fp32"])
    assert "allowed 0.01" in measure.differs([ones.bfloat16()], [ones + 0.0234375], problem.TOLERANCE["bf16"])
    assert "off by" in measure.differs([ones * torch.nan], [ones], 1e-2)
    sums = torch.tensor([3.0, 4e3])  # of millions of terms: what is allowed absolutely is of their root mean square
    assert measure.differs([sums + 20], [sums], 1e-2) and not measure.differs([sums + 20], [sums], 1e-2, gradients=True)
    assert measure.differs([sums + 60], [sums], 1e-2, gradients=True)


@pytest.mark.parametrize(("arguments", "wrong"), [
    (["--only", "nothing"], "no problem has 'nothing'"),
    (["--level", "7"], "unknown '7'"),
    (["--only", "("], "is no regular expression"),
    (["--check", "kernels"], "unset TRITON_INTERPRET"),
    ([], "no GPU"),
])  # fmt: skip
def test_a_wrong_command_line_is_one_line(arguments, wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        run.main(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and wrong in said and said.count("\n") == 1
