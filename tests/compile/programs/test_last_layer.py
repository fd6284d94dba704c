"""The kernels of a last layer with its loss, forward and backward in pieces, compiled to machine code for GPUs that need not be there."""

import pytest
import torch

from dtkernels.codegen.emit.module import emit
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches
from dtkernels.show import Subject, read

SIZES = {"x": 8192, "y": 128256, "k": 4096, "r": 16}


GPUS = ("a100", "l40s", "h200", "b200", "mi300x")
CALLS = [*((gpu, True) for gpu in GPUS), ("h200", False), ("mi300x", False)]


def built(subject) -> bool:
    """Return whether every kernel of a subject compiles to machine code."""
    algorithm, integers = subject.program.algorithm, {"t": torch.int64}
    module = load_module(emit(subject.program, "call", subject.target, True), "last_layer")
    args = [torch.empty([SIZES[x] for x in algorithm.plain_labels(t)], dtype=integers.get(t, torch.bfloat16), device="meta") for t in algorithm.inputs]
    found = {}
    for launch in record_launches(module, "call", (*args, *[1.0] * len(algorithm.scalars))):
        found.setdefault(launch.kernel.__name__, launch)
    return bool(found) and all(build(launch, subject.target) for launch in found.values())


@pytest.mark.parametrize(("gpu", "backward"), CALLS)
def test_linear_cross_entropy_compiles(gpu, backward):
    subject = Subject(read("linear_cross_entropy"), gpu, {x: n for x, n in SIZES.items() if x != "r"}, "bf16", {}, ("H", "W") if backward else None)
    chunks = [str(p) for p in subject.program.schedule.primitives if p.name == "chunk"]
    assert chunks == (["d_z.chunk(y:8192);"] if backward else [])
    assert built(subject)


@pytest.mark.parametrize("wanted", [None, ("H", "P", "Q")], ids=["forward", "backward"])
def test_a_layer_with_an_adapter_compiles(wanted):
    """Forward sweeps tiles of columns, both products in one accumulator; backward stores no gradient of the weight."""
    subject = Subject(read("linear_cross_entropy"), "h200", SIZES, "bf16", {"adapted": True}, wanted)
    assert "d_W" not in subject.program.algorithm.funcs
    if wanted is None:
        assert subject.program.schedule.sizes("linear_cross_entropy", "tensorize") == {"x": 128, "y": 256, "k": 64, "r": 16}
    assert built(subject)
