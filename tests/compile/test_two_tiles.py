"""Whole extents that two tiles hold, to machine code: attention of 96 and 160 columns by default on every target, and by warp groups on Hopper, backward too."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from attention_sweep import apart, by_default, one_sweep

import dtkernels
from dtkernels.autoschedule.cost.kernel_config import read_schedule
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches
from dtkernels.runtime.select.schedule_selection import by_default_schedule, scheduled

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
ATTENTION = """Func s, e, total, f; In Q, K, V; SIn scale; Var b, h, m, n; RVar l, d;
s[b, h, m, l] = scale * rdot(Q[b, h, m, d], K[b, h, l, d], d); e[b, h, m, l] = exp(s[b, h, m, l]); total[b, h, m] = rsum(e[b, h, m, l], l);
f[b, h, m, n] = rdot(e[b, h, m, l], V[b, h, l, n], l) / total[b, h, m]; """
ROWS = 4096


def default(columns: int, gpu: str):
    """The default schedule of attention's forward at 4 x 16 heads of 4096 rows."""
    algorithm = dtkernels.compile(ATTENTION).prepared.algorithm
    sizes = {"b": 4, "h": 16, "m": ROWS, "l": ROWS, "d": columns, "n": columns}
    return by_default_schedule(algorithm, ("f",), sizes, 2, target(gpu))


def by_two(columns: int):
    """The same for an H200, with two tiles for the columns."""
    program = default(columns, "h200")
    found = read_schedule(str(program.schedule))
    return scheduled(program.algorithm, str(replace(found, kernels=tuple(replace(k, two_tiles=("d", "n")) for k in found.kernels))))


def built(columns: int, gpu: str, program=None) -> list:
    tensors = [torch.empty(4, 16, ROWS, columns, dtype=torch.bfloat16, device="meta") for _ in "QKV"]
    module = load_module(emit(program or default(columns, gpu), "call", target(gpu)), "two_tiles")
    return [build(launch, target(gpu)) for launch in record_launches(module, "call", (*tensors, 0.1))]


@pytest.mark.parametrize("columns, widths", [(96, {128, 64, 32}), (160, {128, 32}), (80, {128, 64, 16})])
def test_both_tiles_are_products_of_warp_groups_in_registers(columns, widths, tmp_path):
    (kernel,) = built(columns, "h200", by_two(columns))
    assert "gluon" in kernel.metadata.name
    assert {int(n) for n in re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16", kernel.asm["ptx"])} == widths
    (path := tmp_path / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    usage = subprocess.run([CUOBJDUMP, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    assert "STACK:0" in usage, usage


def test_results_that_go_by_pointers_say_where_the_second_tile_begins():
    """Gluon's text, which no interpreter runs: with wide heads there is no room to gather results for a descriptor."""
    text = emit(by_two(160), "call", target("h200"))
    assert "n_rest = TILE_n + gl.arange(0, TILE_n_1, COLUMNS_n_rest)" in text and "n_rest[None, :] * f_stride_n" in text


BULK = "d_K.descriptor(Q, d_attention, K, V, d_Q); d_K.persistent(); d_K.stages(m:3); d_K.specialize_warps(m); d_K.num_warps(8);"
#: form, parameters, columns, tiles, and of the keys' kernel: columns of its products, KiB of shared memory, bytes that a thread may spill
GRADIENTS = [
    ("five", {}, 128, "", {64, 128}, 227, 192), ("five", {}, 80, "two_tiles(d, n)", {64, 16}, 155, 0), ("five", {}, 96, "two_tiles(d, n)", {64, 32}, 179, 96),
    ("five", {"causal": True}, 80, "two_tiles(d, n)", {64, 16}, 155, 64), ("five", {}, 40, "two_tiles(d, n)", {64, 32, 16}, 108, 0),
    ("apart", {}, 80, "two_tiles(d, n)", {64, 16}, 128, 0), ("apart", {"causal": True}, 72, "two_tiles(d, n)", {64, 16}, 128, 48),
]  # fmt: skip


@pytest.mark.parametrize("form, params, columns, held, widths, most, spilled", GRADIENTS)
def test_gradients_by_warp_groups(form, params, columns, held, widths, most, spilled, tmp_path):
    """One tile takes 227 KiB of shared memory and spills, at 80 columns as at 128."""
    more = "".join(f"{f}.{held};" for f in (("d_K",) if form == "five" else ("d_Q", "d_K", "d_V"))) if held else ""
    program = one_sweep(params, 128, 64, more=BULK + more) if form == "five" else apart(params, columns, more)
    kernel = gradient_kernel(program, columns)
    assert {int(n) for n in re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16", kernel.asm["ptx"])} == widths
    assert kernel.metadata.shared <= most << 10
    (path := tmp_path / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    usage = subprocess.run([CUOBJDUMP, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= spilled, usage


def gradient_kernel(program, columns: int):
    """The kernel of the gradient of keys."""
    given = {n: torch.empty((4, 16, 2048, columns), dtype=torch.bfloat16, device="meta") for n in program.algorithm.inputs}
    given["total_log"] = torch.empty((4, 16, 2048), dtype=torch.float32, device="meta")
    module = load_module(emit(program, "call", target("h200"), True), "tiles")
    launches = record_launches(module, "call", (*given.values(), *(0.125 for _ in program.algorithm.scalars)))
    return build(next(launch for launch in launches if launch.kernel.__name__ == "d_K_gluon_kernel"), target("h200"))


@pytest.mark.parametrize("gpu", ["h200", "a100", "l40s", "b200"])
@pytest.mark.parametrize("columns", [96, 160])
def test_every_target_compiles(gpu, columns):
    for kernel in built(columns, gpu):
        assert kernel.metadata.shared <= target(gpu).shared_bytes


@pytest.mark.parametrize("columns, two", [(128, ()), (112, ()), (48, ("d",)), (96, ("d",)), (72, ("d",)), (192, ("d", "n")), (224, ())])
def test_only_extents_far_from_a_power_of_two_take_two_tiles(columns, two):
    """By specialized warps products of few columns take longer than their work: results do by one tile, while that has room."""
    (kernel,) = read_schedule(str(default(columns, "h100").schedule)).kernels
    assert tuple(sorted(kernel.two_tiles)) == two


@pytest.mark.parametrize("columns, two", [(80, ("d", "n")), (112, ())])
def test_gradients_by_default(columns, two):
    kernels = read_schedule(str(by_default({}, (4, 16, 2048, 2048, columns), target("h200")).schedule)).kernels
    assert all(k.specialized and k.two_tiles == two for k in kernels if k.func != "d_total")
