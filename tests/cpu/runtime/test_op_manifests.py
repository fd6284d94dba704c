"""What lies beside the specs is of the specs as they are, and says what the algorithms say."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dtkernels.lang.spec import load_spec
from dtkernels.ops.registry import SPECS, shipped_names
from dtkernels.runtime.bind.operator import Operator
from dtkernels.runtime.signature.op_manifest import manifest_path, read_manifest
from dtkernels.runtime.tables.table import read_rows

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import write_manifests  # noqa: E402

TABLES = sorted(path for path in (ROOT / "schedule_tables").glob("*/*.yaml") if path.stem != "gpu")


@pytest.mark.parametrize("op", shipped_names())
def test_outlines_are_current(op):
    """``python tools/write_manifests.py`` writes them anew."""
    assert manifest_path(SPECS / f"{op}.yaml").read_text() == write_manifests.text_of(SPECS / f"{op}.yaml"), "run tools/write_manifests.py"


@pytest.mark.parametrize("op", shipped_names())
def test_what_is_read_is_what_was_written(op):
    """Signatures of every setting, and of one gradient all that a call asks for, as the algorithm gives them."""
    outline, derived = read_manifest(SPECS / f"{op}.yaml"), Operator(load_spec(SPECS / f"{op}.yaml"))
    assert {k: v for k, v in vars(outline).items() if k != "lines"} == {k: v for k, v in vars(derived.manifest).items() if k != "lines"}
    settings, gradients = outline.keys()
    for params in settings[:8]:
        facts, variant = outline.facts(params, frozenset(), 0), derived.variant(params, frozenset(), 0)
        assert (facts.signature, facts.products) == (variant.signature, variant.products)
    for params, wanted, kept in gradients:
        known, variant = (o.variant(params, frozenset(), 0) for o in (Operator(SPECS / f"{op}.yaml"), derived))
        assert told(known, wanted, kept) == told(variant, wanted, kept)
        assert "algorithm" not in vars(known) and "differentiated" not in vars(known)


def told(variant, wanted, kept):
    """Whatever a call asks of a gradient."""
    pair = variant.pair(wanted, kept)
    halves = [(v.outputs, v.subject, v.signature) for v in (pair.forward, pair.backward)]
    return halves, pair.gradient.adjoints, pair.gradient.grads, pair.gradient.products, pair.public, pair.names, pair.forward is variant


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_gradient_that_a_table_has_rows_for_is_in_the_outline(path):
    outline = read_manifest(SPECS / path.name)
    rows = [r for r in read_rows(path.read_text(), str(path)) if r.wanted and not r.batched]
    missing = {(tuple(sorted(r.params.items())), r.wanted, r.kept) for r in rows if not outline.halves(tuple(sorted(r.params.items())), r.wanted, r.kept)}
    assert not missing, "run tools/write_manifests.py"


@pytest.mark.parametrize("op", shipped_names())
def test_a_number_from_two_on_changes_nothing(op):
    outline = read_manifest(SPECS / f"{op}.yaml")
    operator = Operator(load_spec(SPECS / f"{op}.yaml"))
    for name, default in outline.params:
        if not isinstance(default, bool):
            for value in (2, 3, 8, 16):
                facts, variant = outline.facts(((name, value),), frozenset(), 0), operator.variant(((name, value),), frozenset(), 0)
                assert (facts.signature, facts.products) == (variant.signature, variant.products)


def test_an_outline_of_another_file_is_not_used(tmp_path):
    spec = tmp_path / "softmax.yaml"
    spec.write_bytes((SPECS / "softmax.yaml").read_bytes() + b"\n")
    manifest_path(spec).write_bytes(manifest_path(SPECS / "softmax.yaml").read_bytes())
    assert read_manifest(spec) is None
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


FIRST = """
import sys, torch, dtkernels, stand_in_driver
stand_in_driver.use()
{make}
result = dtkernels.ops.{op}(*inputs)
torch.autograd.grad(result, inputs, torch.zeros_like(result))
ours = [m for m in sys.modules if m.startswith("dtkernels.") and m.split(".")[1] in ("lang", "algebra", "codegen") and m.count(".") > 1]
print(sorted(ours), [m for m in ("yaml", "triton") if m in sys.modules])
variant = dtkernels.ops.{op}.operator().variant((), frozenset(), 0)
pair, = variant.pairs()
print([(r.kind, r.candidate.row.kept) for half in (pair.forward, pair.backward) for r in half.dispatch._routes.values()])
"""
MAKE = "inputs = [torch.zeros(n, dtype=torch.bfloat16).requires_grad_() for n in {shapes}]"
SHAPES = {
    "softmax": [(1024, 4096)],
    "relu": [(1024, 4096)],
    "dyt": [(1024, 4096), (1,), (4096,), (4096,)],
    "two_mm": [(8192, 4096), (4096, 16), (16, 4096)],
}


@pytest.mark.parametrize("op", SHAPES)
def test_a_first_forward_and_backward_reads_no_algorithm_and_derives_nothing(op):
    """In a process where the table has rows with kernels for both: it neither parses, nor differentiates, nor compiles."""
    code = FIRST.format(op=op, make=MAKE.format(shapes=SHAPES[op]))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    )
    assert not done.returncode, done.stderr
    loaded, routes = done.stdout.splitlines()
    kept = ("mm",) if op == "two_mm" else ()
    rematerialized = ["dtkernels.algebra.autodiff", "dtkernels.algebra.autodiff.rematerialization"]
    codegen = [f"dtkernels.codegen.{name}" for name in ("emit", "emit.host_helpers", "held_terms", "powers_of_two", "target")]
    needed = [*(rematerialized if kept else []), *codegen, "dtkernels.lang.errors"]
    assert loaded == f"{needed} []" and routes == f"{[('prebuilt', kept)] * 2}"
