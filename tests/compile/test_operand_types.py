"""Machine code of products beside float32 inputs: 16-bit matrix instructions, on older GPUs and new ones."""

import re

import pytest

from dtkernels.lang import parse
from dtkernels.show import Subject, Written

ALIBI = """Func s, e, d, att; In Q, K, V, slopes; Var b, h, m, n; RVar l, k;
s[b, h, m, l] = rdot(Q[b, h, m, k], K[b, h, l, k], k) * 0.125 + slopes[h] * (l - m);
e[b, h, m, l] = exp(s[b, h, m, l]); d[b, h, m] = rsum(e[b, h, m, l], l);
att[b, h, m, n] = rdot(e[b, h, m, l], V[b, h, l, n], l) / d[b, h, m];"""
NORM = """Func t, out; In A, W, w; Var x, y; RVar k; t[x] = rsum(A[x, k] * A[x, k], k);
out[x, y] = rdot(A[x, k] * w[k] * rsqrt(t[x] / len(k) + 0.00001), W[y, k], k);"""
INT8 = "Func out; In A, W, s; Var x, y; RVar k; out[x, y] = rdot(A[x, k], cast(W[y, k], bf16) * s[y], k);"
BIAS = "Func out; In A, W, b; Var x, y; RVar k; out[x, y] = rdot(A[x, k], W[y, k], k) + b[y];"
CASES = {
    "alibi": (ALIBI, "bf16,slopes=fp32", (2, 16, 2048, 128, 2048, 128)),
    "alibi of 64 columns": (ALIBI, "fp16,slopes=fp32", (2, 16, 2048, 64, 2048, 64)),
    "norm": (NORM, "bf16,w=fp32", (2048, 2048, 2048)),
    "int8": (INT8, "bf16,W=int8,s=fp32", (2048, 2048, 2048)),
    "bias": (BIAS, "bf16,b=fp32", (2048, 2048, 2048)),
    "bias of few rows": (BIAS, "bf16,b=fp32", (16, 2048, 2048)),
}
INSTRUCTION = {"a100": r"mma\.sync\S*", "h200": r"wgmma\.mma_async\S*|mma\.sync\S*"}


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("DTKERNELS_CACHE", str(tmp_path / "dtkernels"))


def instructions(text: str, dtype: str, shape: tuple[int, ...], gpu: str, wanted: tuple[str, ...] | None = None) -> set[str]:
    program = parse(text)
    subject = Subject(Written("mixed", program, scheduled=False), gpu, shape, dtype, wanted=wanted)
    found = re.findall(INSTRUCTION[gpu], subject.text("ptx"))
    kinds = {"tf32" if "tf32" in f else "fp32" if not re.search(r"\.(bf16|f16)\.", f) else re.search(r"\.(bf16|f16)\.", f)[1] for f in found}
    assert found and (gpu != "h200" or shape[-3] < 64 or any("wgmma" in f for f in found))
    return kinds


@pytest.mark.parametrize("gpu", INSTRUCTION)
@pytest.mark.parametrize("name", CASES)
def test_products_take_the_matrix_units_of_their_own_dtype(name, gpu):
    text, dtype, shape = CASES[name]
    assert instructions(text, dtype, shape, gpu) == {"bf16" if dtype.startswith("bf16") else "f16"}


def test_gradients_do_too():
    assert instructions(ALIBI, "bf16,slopes=fp32", CASES["alibi"][2], "h200", ("Q", "K", "V")) == {"bf16"}
