"""Kernels whose registers had not sufficed with one of the supported versions of Triton: what ptxas spills of a thread."""

import sys
from pathlib import Path

import pytest
import torch

from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.lang.parser import parse_schedule
from dtkernels.lang.schedule import Program
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches
from dtkernels.tuning.records.problems import CallKind, variants_of

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / p) for p in ("tools", "benchmarks", "benchmarks/kernelbench")]

import check  # noqa: E402

H200 = target("h200")
ALLOWED = 64  #: bytes of a thread, which cost nothing that was measured
SPLIT = (
    "scores.fuse_at(attention, l); total_shift.fuse_at(attention, l); e.fuse_at(attention, l); total.fuse_at(attention, l);"
    "attention.block(b:1, h:1, m:{m}); attention.tensorize(b:1, h:1, m:{m}, n:0, l:32, d:0); attention.split(l:{parts}); attention.num_warps(4); attention.compile();"
)


@pytest.mark.parametrize("m, parts, columns", [(64, 16, 128), (64, 8, 64), (16, 32, 128), (128, 16, 64)])
def test_merges_of_split_attention(m, parts, columns):
    """They spilled 4176, 448, 544 and no bytes."""
    variant = variants_of(CallKind("attention", "forward", "bf16"))[1]
    module = load_module(emit(Program(variant.algorithm, parse_schedule(SPLIT.format(m=m, parts=parts))), "merge", H200, True), "merge")
    Q, K, V = (torch.empty(1, 2, n, columns, dtype=torch.bfloat16, device="meta") for n in (1225, 6948, 6948))
    merge = record_launches(module, "merge", (Q, K, V, 1.0))[-1]
    assert merge.kernel.__name__ == "attention_kernel" and check.usage(build(merge, H200))[1] <= ALLOWED


@pytest.mark.parametrize("problem, kernels", [("005", ("f_phases",)), ("011 backward", ("d_W",)), ("092 backward", ("d_y",))])
def test_problems_of_kernelbench(problem, kernels):
    """They spilled 1016, 6040 and 1424 bytes."""
    number, _, backward = problem.partition(" ")
    name = next(n for n in check.problems(2) if n.startswith(number))
    plan = check.planned(2, name, "bf16", H200, bool(backward))[-1]
    module = load_module(emit(plan.program, "call", H200, plan.uniform), name)
    launches = [k for k in record_launches(module, "call", plan.values) if k.kernel.__name__.removesuffix("_kernel").removesuffix("_part") in kernels]
    assert launches and max(check.usage(build(k, H200))[1] for k in launches) <= ALLOWED
