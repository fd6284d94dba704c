"""The kernels of a last layer with its loss, forward and backward in pieces, compiled to machine code for GPUs that need not be there."""

import pytest
import torch

from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches
from dtkernels.show import Subject, read

SIZES = {"x": 8192, "y": 128256, "k": 4096}


GPUS = ("a100", "l40s", "h200", "b200", "mi300x")
CALLS = [*((gpu, True) for gpu in GPUS), ("h200", False), ("mi300x", False)]


@pytest.mark.parametrize(("gpu", "backward"), CALLS)
def test_linear_cross_entropy_compiles(gpu, backward):
    subject = Subject(read("linear_cross_entropy"), gpu, SIZES, "bf16", {}, ("H", "W") if backward else None)
    algorithm = subject.program.algorithm
    chunks = [str(p) for p in subject.program.schedule.primitives if p.name == "chunk"]
    assert chunks == (["d_z.chunk(y:8192);"] if backward else [])
    module = load_module(emit(subject.program, "call", subject.target, True), "last_layer")
    args = [torch.empty([SIZES[x] for x in algorithm.plain_labels(t)], dtype=torch.int64 if t == "t" else torch.bfloat16, device="meta") for t in algorithm.inputs]
    found = {}
    for launch in record_launches(module, "call", (*args, *[1.0] * len(algorithm.scalars))):
        found.setdefault(launch.kernel.__name__, launch)
    assert all(build(launch, target(gpu)) for launch in found.values())
