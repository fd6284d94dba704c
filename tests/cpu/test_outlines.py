"""What lies beside the specs is of the specs as they are, and says what the algorithms say."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dtkernels.lang.spec import load_spec
from dtkernels.ops.registry import SPECS, shipped_names
from dtkernels.runtime.operator import Operator
from dtkernels.runtime.signature import Outline, outline_path, read_outline

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("op", shipped_names())
def test_outlines_are_current(op):
    """``python tools/outlines.py`` writes them anew."""
    outline = read_outline(SPECS / f"{op}.yaml")
    assert outline is not None, "not of its spec as it is now: run tools/outlines.py"
    operator = Operator(load_spec(SPECS / f"{op}.yaml"))
    bare = {k: v for k, v in vars(outline).items() if k != "signatures"}
    assert bare == {k: v for k, v in vars(Outline.of(operator.spec)).items() if k != "signatures"}
    for (params, batched, labels), signature in list(outline.signatures.items())[:12]:
        assert operator.variant(params, batched, labels).signature == signature


@pytest.mark.parametrize("op", shipped_names())
def test_a_number_from_two_on_changes_nothing(op):
    outline = read_outline(SPECS / f"{op}.yaml")
    operator = Operator(load_spec(SPECS / f"{op}.yaml"))
    for name, default in outline.params:
        if not isinstance(default, bool):
            for value in (2, 3, 8, 16):
                key = (((name, value),), frozenset(), 0)
                assert outline.signature(*key) == operator.variant(*key).signature


def test_an_outline_of_another_file_is_not_used(tmp_path):
    spec = tmp_path / "softmax.yaml"
    spec.write_bytes((SPECS / "softmax.yaml").read_bytes() + b"\n")
    outline_path(spec).write_bytes(outline_path(SPECS / "softmax.yaml").read_bytes())
    assert read_outline(spec) is None
    assert torch.equal(Operator(spec)(torch.zeros(1, 2)), torch.full((1, 2), 0.5))


FRESH = """
import sys, torch, dtkernels
op = dtkernels.ops.softmax.operator()
x = torch.zeros(512, 2048)
op.bind((x,), {}).variant.dispatch.choose({"A": x})
op.bind((torch.zeros(4, 512, 2048),), {})
dtkernels.ops.relu.operator().bind((x,), {})
print([m for m in sys.modules if m in ("yaml", "triton", "torch._dynamo", "sympy") or m.startswith("dtkernels.") and m.split(".")[1] in ("algebra",)])
"""


def test_a_call_is_bound_without_yaml_triton_or_the_algebra():
    done = subprocess.run(
        [sys.executable, "-c", FRESH],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(ROOT), "DTKERNELS_TABLES": "/nonexistent"},
    )
    assert done.stdout.strip() == "[]", (done.stdout, done.stderr)
