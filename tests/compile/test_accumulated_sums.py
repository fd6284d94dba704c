"""Sums that are added up in memory to machine code: attention's backward in one sweep, and terms that data places."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from attention_sweep import by_default, one_sweep

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import TARGETS
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches

BULK = "d_K.stage(total_log, d_total); d_K.descriptor(Q, d_attention, total_log, d_total, d_Q);"
#: GPU, columns, keys and queries of a tile, warps, more of the schedule, bytes that a thread may spill
CASES = [("h200", 64, 64, 64, 4, "", 0), ("h200", 128, 128, 32, 8, BULK, 0), ("a100", 128, 64, 64, 8, "", 0), ("mi300x", 64, 64, 32, 4, "", 0)]


def stack(cubin: bytes, path: Path) -> int:
    """Bytes of a thread's stack, which holds what is spilled."""
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


@pytest.mark.parametrize("gpu, columns, keys, rows, warps, more, most", CASES)
def test_one_sweep_compiles(gpu, columns, keys, rows, warps, more, most, tmp_path):
    params = {"causal": True}
    program = one_sweep(params, keys, rows, more=f"d_K.num_warps({warps}); d_K.num_stages(2); {more}")
    given = {n: torch.empty((2, 8, 2048, columns), dtype=torch.bfloat16, device="meta") for n in program.algorithm.inputs}
    given["total_log"] = torch.empty((2, 8, 2048), dtype=torch.float32, device="meta")
    module = load_module(emit(program, "call", TARGETS[gpu], True), "sweep")
    launches = record_launches(module, "call", (*given.values(), *(0.125 for _ in program.algorithm.scalars)))
    names = [launch.kernel.__name__ for launch in launches]
    assert [n for n in names if n.startswith("d_")] == ["d_total_kernel", "d_Q_sum_zero_kernel", f"d_K{'_descriptor' * bool(more)}_kernel", "d_Q_kernel"]
    compiled = build(next(launch for launch in launches if launch.kernel.__name__.startswith("d_K")), TARGETS[gpu])
    assert compiled.metadata.shared <= TARGETS[gpu].shared_bytes
    if gpu == "mi300x":
        found = re.search(r"\.vgpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"])
        assert "v_mfma" in compiled.asm["amdgcn"] and "global_atomic_add_f32" in compiled.asm["amdgcn"] and found and int(found[1]) <= most
        return
    text = compiled.asm["ptx"]
    assert ("wgmma.mma_async" if gpu == "h200" else "mma.sync") in text
    assert "cp.reduce.async.bulk.tensor" in text if more else re.search(r"\b(red|atom)\.[a-z0-9.]*add[a-z0-9.]*f32", text)
    assert stack(compiled.asm["cubin"], tmp_path / "sweep.cubin") <= most


#: GPU, form, batches, heads, queries, keys, columns, bytes that a thread may spill
WHOLE = [("h200", {"causal": True}, (128, 16, 77, 77, 64), 112), ("h200", {}, (64, 12, 197, 197, 64), 48), ("h200", {"group": 3}, (138, 15, 39, 39, 224), 1280),
         ("h200", {}, (64, 16, 128, 128, 96), 0), ("h200", {}, (8, 12, 128, 128, 64), 0), ("a100", {"causal": True}, (128, 16, 77, 77, 64), 400)]  # fmt: skip


@pytest.mark.parametrize("gpu, params, sizes, most", WHOLE)
def test_one_kernel_of_short_sequences_compiles(gpu, params, sizes, most, tmp_path):
    program = by_default(params, sizes, TARGETS[gpu])
    assert "d_Q.accumulate_at(d_K, m, ordered);" in str(program.schedule)
    b, h, m, l, d = sizes  # noqa: E741
    shapes = {n: (b, h // params.get("group", 1), l, d) if n in ("K", "V") else (b, h, m) if n == "total_log" else (b, h, m, d) for n in program.algorithm.inputs}
    given = [torch.empty(s, dtype=torch.float32 if n == "total_log" else torch.bfloat16, device="meta") for n, s in shapes.items()]
    module = load_module(emit(program, "call", TARGETS[gpu], True), "sweep")
    (launch,) = record_launches(module, "call", (*given, *(0.125 for _ in program.algorithm.scalars)))
    compiled = build(launch, TARGETS[gpu])
    assert compiled.metadata.shared <= TARGETS[gpu].shared_bytes and "atom" not in compiled.asm["ptx"]
    assert ("wgmma.mma_async" if gpu == "h200" else "mma.sync") in compiled.asm["ptx"]
    assert stack(compiled.asm["cubin"], tmp_path / "whole.cubin") <= most


@pytest.mark.parametrize("gpu", TARGETS)
def test_terms_that_data_places_compile(gpu):
    """Additions at places that data names, for every target: no lock, and no loop that tries again."""
    text = "Func f; In X, t, A; Var v, k; RVar b; Extent v = A[0]; f[v, k] = rsum(where(t[b] == v, X[b, k] * 2, 0), b); "
    program = parse(text + "f_terms.block(b:4, k:512); f_terms.tensorize(b:4, k:512); f.accumulate_at(f_terms, k); f.compile();")
    program = Program(prepare_algorithm(program.algorithm, ("f",)), program.schedule)
    module = load_module(emit(program, "f", TARGETS[gpu], True), "f")
    given = {"X": torch.empty((4096, 512), dtype=torch.bfloat16, device="meta"), "t": torch.empty(4096, dtype=torch.int64, device="meta")}
    launches = record_launches(module, "f", (given["X"], given["t"], torch.empty((9000, 1), dtype=torch.bfloat16, device="meta")))
    assert [launch.kernel.__name__ for launch in launches] == ["f_sum_zero_kernel", "f_terms_kernel", "f_kernel"]
    compiled = build(launches[1], TARGETS[gpu])
    code = compiled.asm["amdgcn" if gpu == "mi300x" else "ptx"]
    assert re.search(r"global_atomic_add_f32" if gpu == "mi300x" else r"\b(red|atom)\.[a-z0-9.]*add[a-z0-9.]*f32", code) and ".cas" not in code
    assert not re.search(r"st\.global|global_store", code), "the terms themselves are not stored"
