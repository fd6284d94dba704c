"""benchmarks/candidate_trials.py: what it would time, without a GPU."""

import argparse
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path[:0] = [p for p in (str(ROOT / "tools"), str(ROOT / "benchmarks")) if p not in sys.path]

import candidate_trials  # noqa: E402
from sampling import programs  # noqa: E402

from dtkernels.autoschedule.cost.kernel_config import KernelConfig  # noqa: E402
from dtkernels.codegen.target import target  # noqa: E402
from dtkernels.tuning.records.problems import CallKind, TuningProblem, variants_of  # noqa: E402
from dtkernels.tuning.search.candidates import split_by_kernel  # noqa: E402


def test_every_kernel_is_tried_by_several_proposals_in_whole_schedules():
    work = TuningProblem(CallKind("mmsigmoid", "backward", "bf16", wanted=("A", "B")), (("x", 1599), ("y", 2577), ("k", 1317)))
    trials = candidate_trials.trials_of(work, target("h100"), 6)
    variant = variants_of(work.group)[1]
    roots = {plan.root for _, _, plan in trials}
    assert {"d_A", "d_B"} <= roots and len({plan for _, _, plan in trials}) == len(trials) > 2 * len(roots)
    for _, whole, plan in trials:
        assert next(p for p in whole.plans if p.root == plan.root).fused == plan.fused
        assert split_by_kernel(variant.algorithm, variant.outputs, whole.schedule(variant.outputs)).roots == whole.roots, "it is legal"
        read = "descriptor" in plan.tiles and "operand" in plan.tiles.partition("descriptor")[2].partition(";")[0]
        assert not read or "operand.align();" in whole.schedule(variant.outputs), "rows of 2577 elements are aligned for descriptors"


def test_sizes_to_take_first_are_pairs_of_an_op_and_a_shape():
    assert candidate_trials.shapes("mmsigmoid:8192x1x5120,relu:3x5") == (("mmsigmoid", "8192x1x5120"), ("relu", "3x5"))
    for wrong in ("mmsigmoid", "no_such_op:3x5", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="no list of op:shape"):
            candidate_trials.shapes(wrong)


def test_programs_that_nobody_tuned_are_tried_forward_and_backward():
    found = [*programs.problems(programs.names(re.compile("^groupnorm$")), ("forward", "backward"))]
    assert [(w.group.op, w.group.direction, w.group.dtype, w.extents["c"]) for w in found] == [
        ("untuned_groupnorm", direction, "fp16", c) for c in (10, 40) for direction in ("forward", "backward")
    ]
    trials = candidate_trials.trials_of(found[0], target("h100"), 8)
    tiles = [plan.tiles for _, _, plan in trials if plan.root == "untuned_groupnorm"]
    assert len(tiles) == len({*tiles}) >= 8 and any("tensorize(c:2, s:0" in t for t in tiles), "whole channels, which lie one after the other"


def test_a_sample_has_the_usual_proposal_the_best_of_different_tiles_and_others():
    configs = [KernelConfig("f", tiles=(("x", n),), num_warps=w) for n in (0, 1, 2, 3, 4, 5) for w in (1, 2, 4, 8)]
    found = candidate_trials.sample(configs, 8)
    assert found[0] is configs[0] and len({*found}) == len(found) == 8
    assert found[1:5] == [configs[1], configs[2], configs[4], configs[5]], "no more than two of the same tiles"
    assert found[-1] in configs[-8:] and {*candidate_trials.sample(configs[:3], 8)} == {*configs[:3]}


def test_programs_are_named_by_an_expression_that_finds_some():
    assert "groupnorm" in programs.names(candidate_trials.programs_named("norm"))
    for wrong in ("no_such_program", "("):
        with pytest.raises(argparse.ArgumentTypeError, match="no program has|no regular expression"):
            candidate_trials.programs_named(wrong)
