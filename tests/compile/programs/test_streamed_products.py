"""Products with one row, one column or a sum of one term, to machine code without a GPU: whole vectors, no matrix units, no spills."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton

from dtkernels.algebra.pipeline import prepare, prepare_algorithm
from dtkernels.autoschedule.cost.candidate_time import CandidateTime
from dtkernels.autoschedule.problem import SchedulingProblem
from dtkernels.autoschedule.rules.candidates.streamed_gemm import streamed_candidates
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.schedule import Bare, Program, Schedule
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches

ROW_MAJOR = "Func f; In A, B; Var x, y; RVar k; f[x, y] = sigmoid(rdot(A[x, k], B[k, y], k));"
COLUMN_MAJOR = "Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[y, k], k);"
CASES = {
    "one column": (ROW_MAJOR, {"x": 8192, "y": 1, "k": 5120}), "one row": (ROW_MAJOR, {"x": 1, "y": 8192, "k": 8192}),
    "one row, transposed": (COLUMN_MAJOR, {"x": 1, "y": 8192, "k": 8192}), "sum of one": (ROW_MAJOR, {"x": 4096, "y": 8192, "k": 1}),
}  # fmt: skip
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def stack(built, path: Path) -> int:
    """Bytes of stack that a thread takes."""
    path.write_bytes(built.asm["cubin"])
    usage = subprocess.run([CUOBJDUMP, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


def kernels(case: str, dtype: torch.dtype, gpu: str) -> list:
    """The kernels that the streamed schedule of a case compiles to which is predicted to be the fastest."""
    text, sizes = CASES[case]
    algorithm, x, y, k = prepare_algorithm(parse(text).algorithm, ("f",)), *sizes.values()
    shape = SchedulingProblem(algorithm, ("f",), sizes, dtype.itemsize, target(gpu))
    best = min(streamed_candidates(shape, "f", ["f"]), key=CandidateTime(shape, "f", ["f"]).microseconds)
    program = Program(algorithm, Schedule((*best.statements(), Bare("f", "compile"))))
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape in ((x, k), (y, k) if text == COLUMN_MAJOR else (k, y))]
    module = load_module(emit(program, "call", target(gpu)), "streamed")
    return [build(launch, target(gpu)) for launch in record_launches(module, "call", tuple(tensors))]


@pytest.mark.parametrize("case, dtype", [*((c, torch.bfloat16) for c in CASES), ("one column", torch.float32), ("one row", torch.float16)])
def test_the_large_operand_moves_by_whole_vectors_without_matrix_units(case, dtype, tmp_path):
    built = kernels(case, dtype, "h200")[0]
    text = built.asm["ptx"]
    assert "mma" not in text
    assert stack(built, tmp_path / "kernel.cubin") == 0
    if case == "sum of one":
        assert "st.global.v4.b32" in text
    else:  # either copied to shared memory ahead of its use or loaded
        assert re.search(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10|ld\.global\S*\.v4\.b32", text)


@pytest.mark.parametrize("text, tile", [(ROW_MAJOR, "x:4, y:64, k:32"), (COLUMN_MAJOR, "x:4, y:4, k:512"), (COLUMN_MAJOR, "x:3, y:4, k:512")])
def test_few_rows_share_one_load_of_the_large_operand_in_registers(text, tile, tmp_path):
    rows, blocks = int(tile[2]), tile.rpartition(",")[0]
    program = prepare(parse(f"{text} f.block({blocks}); f.tensorize({tile}); f.stages(k:4);"))
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((rows, 8192), (8192, 8192))]
    (launch,) = record_launches(load_module(emit(program, "call", target("h200")), "streamed"), "call", tuple(tensors))
    built = build(launch, target("h200"))
    assert "mma" not in built.asm["ptx"] and "cp.async.cg" in built.asm["ptx"]
    assert stack(built, tmp_path / "kernel.cubin") == 0


@pytest.mark.parametrize("gpu", ["a100", "b200", "mi300x"])
@pytest.mark.parametrize("case", ["one column", "one row"])
def test_every_target_compiles(case, gpu):
    found = kernels(case, torch.bfloat16, gpu)
    assert found and all(k.metadata.shared <= target(gpu).shared_bytes for k in found)
