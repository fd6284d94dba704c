"""Products over slices that data picks, under the default schedule, to machine code without a GPU: forward and gradients."""

import re
import subprocess
from pathlib import Path

import pytest
import triton

from dtkernels.codegen.emit.module import emit
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches
from dtkernels.show import Subject, arguments, machine_code, read

#: GPU -> the instruction with which its matrix units multiply halves
MATRIX_UNITS = {"a100": r"mma\.sync", "h200": r"wgmma\.mma_async", "b200": r"tcgen05\.mma", "mi300x": r"v_mfma"}
#: spec -> sizes of its labels, of experts as of a small model
SIZES = {
    "grouped_mm": {"m": 4096, "n": 2048, "k": 768, "W_0": 64},
    "grouped_swiglu": {"m": 4096, "n": 768, "k": 2048, "G_0": 64},
}


@pytest.fixture(autouse=True)
def empty_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("DTKERNELS_CACHE", str(tmp_path / "dtkernels"))


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers of a thread, and bytes of stack and of local memory that it takes."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    (file := folder / "kernel.cubin").write_bytes(cubin)
    usage = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    return {what: int(re.search(rf"{what}:(\d+)", usage).group(1)) for what in ("REG", "STACK", "LOCAL")}


def kernels(op: str, gpu: str, dtype: str, wanted=None):
    """The kernels of a call whose inputs all have one dtype."""
    subject = Subject(read(op), gpu, SIZES[op], dtype, {}, wanted)
    module = load_module(emit(subject.program, "call", subject.target, True), op)
    launches = {launch.kernel.__name__: launch for launch in record_launches(module, "call", arguments(subject))}
    return subject, [(launch, build(launch, subject.target)) for launch in launches.values()]


@pytest.mark.parametrize(
    "op, gpu, wanted, products",
    [("grouped_mm", "h200", None, 1), ("grouped_mm", "h200", (), 2), ("grouped_mm", "a100", (), 2), ("grouped_swiglu", "h200", None, 1), ("grouped_swiglu", "h200", (), 3)],
)
def test_products_use_the_matrix_units(op, gpu, wanted, products, tmp_path):
    """All of them, and their operands come by asynchronous copies; on an H200 nothing is spilled."""
    subject, made = kernels(op, gpu, "bf16", wanted)
    found = 0
    for launch, compiled in made:
        text, source, name = compiled.asm["ptx"], launch.kernel.src, compiled.metadata.name
        assert compiled.metadata.shared <= subject.target.shared_bytes, name
        used = resources(compiled.asm["cubin"], tmp_path)
        assert gpu != "h200" or used["STACK"] == used["LOCAL"] == 0, (name, used)
        if "tl.dot" in source:
            found += 1
            assert len(re.findall(MATRIX_UNITS[gpu], text)) >= source.count("tl.dot") and "cp.async" in text, name
    assert found == products


@pytest.mark.parametrize("gpu", ["b200", "mi300x"])
def test_other_gpus(gpu):
    _, made = kernels("grouped_mm", gpu, "fp16")
    assert all(re.search(MATRIX_UNITS[gpu], c.asm["amdgcn" if gpu == "mi300x" else "ptx"]) for _, c in made)


def test_few_rows_and_float32():
    for sizes, dtype in (({"m": 16, "n": 1024, "k": 2048, "W_0": 128}, "bf16"), ({"m": 512, "n": 256, "k": 256, "W_0": 8}, "fp32")):
        subject = Subject(read("grouped_mm"), "h200", sizes, dtype)
        assert all(compiled.asm["cubin"] and compiled.metadata.shared <= subject.target.shared_bytes for _, compiled in machine_code(subject))
