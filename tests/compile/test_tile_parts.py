"""Tiles that are sums of powers of two, and last waves of split sums, to machine code: on the matrix units, without spills."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton

from dtkernels.algebra.pipeline import prepare
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
MM = "Func f; In A, B; Var x, y; RVar k; f[x, y] = sigmoid(rdot(A[x, k], B[k, y], k)); "
TILED = "f.block(x:{0}, y:{1}); f.tensorize(x:{0}, y:{1}, k:64); f.num_warps({2}); f.num_stages(3); {3}"
THROUGH = "f.descriptor(A, B, f); f.persistent();"


def built(rows: int, columns: int, warps: int, more: str, gpu: str) -> list:
    """The kernels of a product of 16-bit inputs in tiles of ``rows`` x ``columns``."""
    program = prepare(parse(MM + TILED.format(rows, columns, warps, more)))
    tensors = [torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta") for _ in "AB"]
    launches = record_launches(load_module(emit(program, "call", target(gpu)), "parts"), "call", tuple(tensors))
    return [build(launch, target(gpu)) for launch in launches]


@pytest.mark.parametrize("rows, columns, warps, more", [(128, 192, 8, THROUGH), (192, 128, 8, ""), (64, 96, 4, "")])
def test_both_parts_are_products_of_warp_groups_in_registers(rows, columns, warps, more, tmp_path):
    (kernel,) = built(rows, columns, warps, more, "h200")
    widths = {int(n) for n in re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16", kernel.asm["ptx"])}
    assert widths == ({64, 32} if columns == 96 else {128, 64})
    (path := tmp_path / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    usage = subprocess.run([CUOBJDUMP, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    assert "STACK:0" in usage, usage


@pytest.mark.parametrize("gpu", ["a100", "b200", "mi300x"])
def test_every_target_compiles(gpu):
    (kernel,) = built(64, 96, 4, "", gpu)
    assert kernel.metadata.shared <= target(gpu).shared_bytes


@pytest.mark.parametrize("gpu", ["h200", "b200"])
@pytest.mark.parametrize("rows, columns, warps", [(128, 256, 8), (128, 192, 8)])
def test_parts_of_a_last_wave_are_stored_and_merged_by_whole_vectors(rows, columns, warps, gpu, tmp_path):
    found = {k.metadata.name: k for k in built(rows, columns, warps, f"{THROUGH} f.stream(k:4);", gpu)}
    assert set(found) == {"f_descriptor_kernel", "f_tail_part_descriptor_kernel", "f_tail_descriptor_kernel"}
    part, merge = found["f_tail_part_descriptor_kernel"], found["f_tail_descriptor_kernel"]
    assert "mma" in part.asm["ptx"] and "mma" not in merge.asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4\.b32", merge.asm["ptx"])
    for kernel in found.values():
        (path := tmp_path / "kernel.cubin").write_bytes(kernel.asm["cubin"])
        usage = subprocess.run([CUOBJDUMP, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
        assert "STACK:0" in usage, usage
