"""Products with packed weights and few rows, to machine code without a GPU: whole vectors, unpacked in registers, no detour through shared memory."""

import re

import pytest

from dtkernels.lang import parse
from dtkernels.show import Subject, Written, machine_code

INT4 = "Func f; In A, W, s; Var m, n; RVar k; f[m, n] = rdot(A[m, k], (((W[n, k // {c}] >> (4 * (k % {c}))) & 15) - 8) * s[n, k / 128], k);"
INT4_ROWS = "Func f; In A, W, s; Var m, n; RVar k; f[m, n] = rdot(A[m, k], (((W[k // 2, n] >> (4 * (k % 2))) & 15) - 8) * s[k / 128, n], k);"


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("DTKERNELS_CACHE", str(tmp_path / "dtkernels"))


def product(text: str, dtype: str, gpu: str, m: int = 16) -> tuple:
    """The compiled kernel with the product, and its machine code."""
    made = machine_code(Subject(Written("f", parse(text), scheduled=False), gpu, (m, 14336, 4096), dtype))
    stage = "amdgcn" if gpu == "mi300x" else "ptx"
    return next((c, c.asm[stage]) for launch, c in made if "tl.dot" in launch.kernel.src)


@pytest.mark.parametrize("gpu", ["a100", "h100"])
@pytest.mark.parametrize("text, dtype", [(INT4.format(c=2), "bf16,W=uint8,s=bf16"), (INT4.format(c=2), "bf16,W=int8,s=fp32"), (INT4_ROWS, "bf16,W=uint8,s=bf16")])
def test_packed_weights_are_read_once_in_whole_vectors(text, dtype, gpu):
    compiled, ptx = product(text, dtype, gpu)
    copied = {int(n, 16) for n in re.findall(r"cp\.async\.c[ag]\.shared\.global\S* \[[^]]*\], \[[^]]*\], (0x\w+)", ptx)}
    assert copied & {8, 16} and not re.search(r"ld\.global\S*\.b8", ptx)
    assert "fma.rn.bf16x2" in ptx and not re.search(r"cvt\.rn\.\w+\.[su](8|16|32)", ptx)  # codes become numbers in pairs
    assert "mma.sync" in ptx and ptx[: ptx.rindex("mma.sync")].count("st.shared") <= 2  # scales alone change hands


def test_other_targets():
    _, text = product(INT4.format(c=2), "bf16,W=uint8,s=bf16", "mi300x")
    assert "prmt" not in text and "v_mfma" in text
    _, text = product(INT4.format(c=2), "fp16,W=uint8,s=fp16", "b200")
    assert "fma.rn.f16x2" in text and "bf16x2" not in text
