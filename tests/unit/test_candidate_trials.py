"""benchmarks/candidate_trials.py: what it would time, without a GPU."""

import argparse
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [p for p in (str(ROOT / "tools"), str(ROOT / "benchmarks")) if p not in sys.path]

import candidate_trials  # noqa: E402

from dtkernels.codegen.target import target  # noqa: E402
from dtkernels.tuning.records.problems import CallKind, TuningProblem, variants_of  # noqa: E402
from dtkernels.tuning.search.candidates import cut  # noqa: E402


def test_every_kernel_is_tried_by_several_proposals_in_whole_schedules():
    work = TuningProblem(CallKind("mmsigmoid", "backward", "bf16", wanted=("A", "B")), (("x", 1599), ("y", 2577), ("k", 1317)))
    trials = candidate_trials.trials_of(work, target("h100"), 6)
    variant = variants_of(work.group)[1]
    roots = {plan.root for _, _, plan in trials}
    assert {"d_A", "d_B"} <= roots and len({plan for _, _, plan in trials}) == len(trials) > 2 * len(roots)
    for _, whole, plan in trials:
        assert next(p for p in whole.plans if p.root == plan.root).fused == plan.fused
        assert cut(variant.algorithm, variant.outputs, whole.schedule(variant.outputs)).roots == whole.roots, "it is legal"
        read = "descriptor" in plan.tiles and "operand" in plan.tiles.partition("descriptor")[2].partition(";")[0]
        assert not read or "operand.align();" in whole.schedule(variant.outputs), "rows of 2577 elements are aligned for descriptors"


def test_sizes_to_take_first_are_pairs_of_an_op_and_a_shape():
    assert candidate_trials.shapes("mmsigmoid:8192x1x5120,relu:3x5") == (("mmsigmoid", "8192x1x5120"), ("relu", "3x5"))
    for wrong in ("mmsigmoid", "no_such_op:3x5", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="no list of op:shape"):
            candidate_trials.shapes(wrong)
