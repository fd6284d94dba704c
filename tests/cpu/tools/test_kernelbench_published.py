"""Windows and their gradients under the schedules of the published sizes, run at small sizes in Triton's interpreter, against torch in float64.

A schedule depends on the sizes: copies, merged labels and split sums are those of large tensors alone.
"""

import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[3] / "benchmarks" / "kernelbench"
sys.path[:0] = [p for p in (str(FOLDER), str(FOLDER.parents[1] / "tools")) if p not in sys.path]

import check  # noqa: E402
import problem  # noqa: E402

from dtkernels.codegen.emit.module import emit  # noqa: E402
from dtkernels.codegen.target import target  # noqa: E402
from dtkernels.runtime.build.source_cache import load_module  # noqa: E402

NAMES = ("044_avg_pool_1d", "050_conv_2d", "054_conv_3d", "056_conv_2d_asymmetric", "058_conv_transposed_3d_asymmetric", "068_conv_transposed_3d_asymmetric_kernel",
         "070_conv_transposed_3d_square_kernel", "072_conv_transposed_3d_strided_grouped", "074_conv_transposed_1d_dilated", "079_conv_transposed_1d_dilated_strided",
         "080_conv_2d_dilated_padded", "082_conv_depthwise_2d", "086_conv_separable_2d")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_gradients_under_the_schedule_of_the_published_sizes(name):
    asked = problem.problems(1)[name]
    forward, backward = check.planned(1, name, "bf16", target("h100"), backward=True)
    given = dict(zip(asked.inputs, asked.tensors(asked.small, torch.float32, "cpu")))
    wanted = asked.differentiated()
    leaves = {n: t.double().requires_grad_(n in wanted) for n, t in given.items()}
    truth = asked.reference(*leaves.values())
    results = call(forward, given, name)
    close(results[0], truth.detach(), asked)
    adjoint = torch.rand_like(truth)
    pair = forward.variant.written.pair_for(wanted, given)
    known = {**given, **dict(zip(forward.variant.outputs, results)), **{a: adjoint.float() for a in pair.gradient.adjoints.values()}}
    found = dict(zip(pair.gradient.grads, call(backward, known, name)))
    for n, expected in zip(wanted, torch.autograd.grad(truth, [leaves[n] for n in wanted], adjoint)):
        close(found[n], expected, asked)


def call(plan: check.Planned, given: dict[str, torch.Tensor], name: str) -> tuple[torch.Tensor, ...]:
    """Run the emitted file of a plan on other tensors than it was made for."""
    module = load_module(emit(plan.program, "call", target("h100"), plan.uniform), f"published_{name}")
    return problem.as_tuple(module.call(*(given[n] for n in plan.variant.signature.inputs)))


def close(got: torch.Tensor, expected: torch.Tensor, asked: problem.Problem) -> None:
    off = (got.double() - expected).abs()
    assert got.shape == expected.shape and bool((off <= check.error_allowed(asked, expected, torch.float32)).all()), off.max().item()
