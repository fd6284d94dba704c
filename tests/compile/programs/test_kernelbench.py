"""Default schedules of KernelBench's problems at the published sizes, to machine code for an H200: none refused, none that spills."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks" / "kernelbench"
sys.path.append(str(FOLDER))
sys.path.append(str(FOLDER.parents[1] / "tools"))

import check  # noqa: E402
import problem  # noqa: E402

from dtkernels.codegen.target import target  # noqa: E402

COMPILED = ("002_matmul bf16", "004_matvec fp32", "019_relu bf16", "024_log_softmax bf16", "037_frobenius fp32", "040_layernorm bf16", "047_sum bf16", "051_argmax fp32",
            "087_conv_pointwise_2d bf16", "079_conv_transposed_1d_dilated_strided fp32", "089_cumsum fp32", "095_cross_entropy bf16", "099_triplet_loss fp32")  # fmt: skip


@pytest.mark.parametrize("case", COMPILED)
def test_it_compiles_and_fits(case):
    found = check.check_schedule(1, *case.split(), target("h200"))
    assert found.kernels and found.wrong == [], found.wrong


#: products of level 2 whose epilogues have several functions
EPILOGUES = ("029_matmul_mish_mish", "053_gemm_scaling_hardtanh_gelu", "081_gemm_swish_divide_clamp_tanh_clamp", "086_matmul_divide_gelu",
             "095_matmul_add_swish_tanh_gelu_hardtanh", "004_conv2d_mish_mish")  # fmt: skip


@pytest.mark.parametrize("name", EPILOGUES)
def test_functions_of_an_epilogue_fit_into_registers(name):
    found = check.check_schedule(2, name, "bf16", target("h100"))
    assert found.kernels and found.wrong == [], found.wrong


def test_every_problem_has_a_schedule_at_its_published_sizes():
    """None refused, no grid too large, and no prediction of level 1 beyond what the GPU can do."""
    for level in problem.levels():
        for name in problem.problems(level):
            found = check.check_schedule(level, name, "fp32", target("h200"), compiled=False)
            assert found.wrong == [], (name, found.wrong)
            faster = level > 1  # the algebra spares some chains their product
            assert found.limit > 0 and (faster or found.microseconds >= 0.8 * found.limit), (name, str(found))


def test_no_operation_on_memory_is_far_from_its_limit():
    """But for windows, whose elements are read again by neighbours."""
    names = [n for n in problem.problems(1) if 19 <= int(n[:3]) <= 40 or 47 <= int(n[:3]) <= 53 and "conv" not in n or int(n[:3]) >= 88 and "attention" not in n]
    for name in names:
        found = check.check_schedule(1, name, "bf16", target("h200"), compiled=False)
        assert not found.long, (name, str(found))
