"""tools/compare_liger.py: our functions under Liger's signatures, the counts of its tests, and, where Liger is installed, values of both."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

import compare_liger
from liger import OPS, losses
from liger.adapters import NoCounterpart, like
from liger.cases import CASES, SMALL, arguments
from liger.measure import Figure, table, values
from liger.substitution import FUNCTIONS, MISSING

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture(autouse=True)
def by_the_reference(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")


def test_every_function_has_a_case_and_an_op():
    assert set(OPS) == {FUNCTIONS[name][0] for name in CASES}
    assert set(CASES) <= set(FUNCTIONS) and not set(MISSING) & set(FUNCTIONS)


@pytest.mark.parametrize("name", CASES)
def test_functions_take_the_arguments_of_liger_and_give_gradients(name):
    found = values(FUNCTIONS[name][1], name, "cpu", torch.float32)
    given, wanted = arguments(name, SMALL, "cpu", torch.float32)
    assert all(t.isfinite().all() for t in found) and [t.shape for t in found[-len(wanted) :]] == [given[i].shape for i in wanted]
    assert all(t.abs().max() > 0 for t in found)  # what has a gradient has one that is not 0


def test_losses_are_those_of_torch_where_torch_has_them():
    logits, target = torch.randn(6, 9, generator=torch.Generator().manual_seed(0)), torch.tensor([1, -100, 3, 8, 0, -100])
    loss, z_loss, accuracy, predicted = losses.cross_entropy(logits, target, None, -100, 0.1, return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True)
    counted = target != -100
    squares = (0.1 * torch.logsumexp(logits, -1) ** 2)[counted].mean()
    torch.testing.assert_close(loss, F.cross_entropy(logits, target) + squares)
    torch.testing.assert_close(z_loss, squares, atol=1e-5, rtol=1e-5)
    assert accuracy == (logits.argmax(-1) == target)[counted].float().mean() and predicted.tolist() == torch.where(counted, logits.argmax(-1), -1).tolist()
    assert losses.cross_entropy(logits, torch.full((6,), -100), None)[0] == 0  # Liger's mean of nothing
    p, q = logits.log_softmax(-1), torch.randn(6, 9, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    for reduction in ("batchmean", "sum", "mean"):
        torch.testing.assert_close(losses.kl_div(p, q, reduction, log_target=True), F.kl_div(p, q, reduction=reduction, log_target=True))
        torch.testing.assert_close(losses.kl_div(p, q.exp(), reduction), F.kl_div(p, q.exp(), reduction=reduction))
    with pytest.raises(NoCounterpart, match="reduction is True"):
        losses.kl_div(p, q, "none")
    assert like(p.half(), loss).dtype == torch.float16


def test_counts_reasons_and_failures_are_printed():
    def result(outcome, reason=""):
        return {"outcome": outcome, "reason": reason}

    known = "a/test_layer_norm.py::test_liger_layer_norm[dtype1-0.02]"
    assert compare_liger.understood(known) and not compare_liger.understood(known.replace("dtype1", "dtype0")) and not compare_liger.understood("a/test_rope.py::one")
    told = compare_liger.summary({"outcomes": {known: result("failed", "x")}, "calls": {}})
    assert "failed, and understood:" in told and "failed:" not in told.replace("failed, and understood:", "")
    outcomes = {"a/test_rope.py::one": result("passed"), "a/test_rope.py::two": result("failed", "AssertionError: 1 != 2"), "a/test_jsd.py::x": result("skipped", "too large: 12 of 8")}
    lines = compare_liger.summary({"outcomes": outcomes, "calls": {"rope": 3}}).splitlines()
    assert [line.split() for line in lines[1:4]] == [["rope", "1", "1", "0", "0"], ["jsd", "0", "0", "1", "0"], ["all", "1", "1", "1", "0"]]
    assert "     1  too large: ... of ..." in lines and "  a/test_rope.py::two: AssertionError: 1 != 2" in lines and lines[-1] == "calls: rope 3"


def test_times_of_both_are_one_line():
    ours = Figure("LigerRopeFunction", "rope", 2048, "bfloat16", "full", "dtkernels", {"20%": 9.0, "50%": 10.0, "80%": 11.0}, 5.0)
    other = Figure("LigerRopeFunction", "rope", 2048, "bfloat16", "full", "liger", {"20%": 19.0, "50%": 20.0, "80%": 21.0}, 7.0)
    assert table([ours, other]).splitlines()[1].split() == "rope 2048 full 9.0 10.0 11.0 19.0 20.0 21.0 2.00 5 7".split()
    lost = Figure("LigerRopeFunction", "rope", 2048, "bfloat16", "full", "liger", note="OutOfMemoryError: no room")
    assert table([ours, lost]).splitlines()[1].endswith("liger: OutOfMemoryError: no room")


def test_a_small_checkout_of_tests_is_run_with_our_functions(tmp_path):
    """A stand-in for Liger: a package with one function that must not be called, and a test of it."""
    texts = {
        "src/liger_kernel/__init__.py": "",
        "src/liger_kernel/ops/__init__.py": "import torch\nclass LigerReLUSquaredFunction(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        raise AssertionError\n",
        "src/liger_kernel/transformers/__init__.py": "",
        "src/liger_kernel/chunked_loss/__init__.py": "",
        "test/__init__.py": "",
        "test/utils.py": "def supports_bfloat16():\n    return False\n",
        "test/transformers/test_relu_squared.py": "import pytest, torch\nfrom liger_kernel.ops import LigerReLUSquaredFunction\n"
        "@pytest.mark.parametrize('rows', [3, 1 << 30])\ndef test_it(rows):\n    assert LigerReLUSquaredFunction.apply(torch.full((rows,), 3.0)).tolist() == [9.0] * rows\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    run = subprocess.run([sys.executable, str(TOOLS / "compare_liger.py"), "--tests", str(tmp_path)], capture_output=True, text=True, env=dict(os.environ))
    assert run.returncode == 0, run.stdout + run.stderr
    assert [line.split() for line in run.stdout.splitlines() if line.startswith("all")] == [["all", "1", "0", "1", "0"]]
    assert "calls: relu_squared 1" in run.stdout and "more than ..." in run.stdout


def test_values_are_those_of_liger():
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed; pip install liger-kernel runs this")
    command = [sys.executable, "-W", "ignore", str(TOOLS / "compare_liger.py"), "--check", "--functions", "relu_squared,rope,softmax,cross_entropy,attention_residual,jsd"]
    run = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert run.returncode == 0 and "6 same, 0 differ, 0 not run" in run.stdout, run.stdout + run.stderr
