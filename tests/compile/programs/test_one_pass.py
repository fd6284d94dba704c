"""Kernels that sum along rows and down columns at once, to machine code: everything they hold stays in registers."""

import re
import subprocess
from pathlib import Path

import pytest
import triton

from dtkernels.show import Subject, machine_code, read

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def stack(cubin: bytes, path: Path) -> int:
    """Bytes of stack that a thread takes."""
    path.write_bytes(cubin)
    usage = subprocess.run([CUOBJDUMP, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


def compiled(op: str, columns: int, dtype: str, gpu: str) -> dict:
    """The kernels of a backward of 8192 rows by name."""
    return {c.metadata.name: c for _, c in machine_code(Subject(read(op), gpu, (8192, columns), dtype, wanted=()))}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("columns", [1000, 8192])
@pytest.mark.parametrize("op", ["rmsnorm", "layernorm"])
def test_no_register_is_spilled_and_rows_are_loaded_ahead(op, columns, dtype, tmp_path):
    kernels = compiled(op, columns, dtype, "h200")
    assert set(kernels) == {"d_w_part_kernel", "d_w_kernel"}
    assert [stack(k.asm["cubin"], tmp_path / "kernel.cubin") for k in kernels.values()] == [0, 0]
    rows = kernels["d_w_part_kernel"].asm["ptx"]
    assert "cp.async" in rows and ("cp.async.cg" in rows or columns % 16), "16 bytes at once where rows are aligned"


@pytest.mark.parametrize("gpu", ["a100", "b200", "mi300x"])
@pytest.mark.parametrize("columns, dtype", [(1024, "bf16"), (8192, "bf16"), (8192, "fp32")])
def test_rows_fit_into_the_shared_memory_of_other_gpus(gpu, columns, dtype):
    subject = Subject(read("layernorm"), gpu, (8192, columns), dtype, wanted=())
    found = machine_code(subject)
    assert found and all(c.metadata.shared <= subject.target.shared_bytes for _, c in found)
