"""``python -m dtkernels show --stage ptx`` and ``explain --build``: machine code without a GPU."""

import re
from pathlib import Path

import pytest

from dtkernels.cli import main

MATRIX_PRODUCT = Path(__file__).parents[1] / "golden" / "programs" / "matrix_product.dt"
SHAPES = {"relu": "65536", "attention": "1x4x256x64x256x64"}


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("DTKERNELS_CACHE", str(tmp_path / "dtkernels"))


def run(capsys, *argv) -> str:
    assert main([str(a) for a in argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "gpu, mark",
    [
        ("a100", ".target sm_80"),
        ("l40s", ".target sm_89"),
        ("h100", ".target sm_90a"),
        ("h200", ".target sm_90a"),
        ("b200", ".target sm_100a"),
    ],
)
def test_ptx_is_for_the_gpu_that_was_named(gpu, mark, capsys):
    text = run(capsys, "show", "relu", "--stage", "ptx", "--gpu", gpu, "--shape", "65536")
    assert text.startswith("// relu_kernel: ") and f"\n{mark}" in text


def test_an_amd_gpu_gets_amdgcn(capsys):
    text = run(capsys, "show", "relu", "--stage", "ptx", "--gpu", "mi300x", "--shape", "65536")
    assert text.startswith("; relu_kernel: ") and "gfx942" in text.splitlines()[1]


@pytest.mark.parametrize(
    "params", [(), ("causal=true", "group=4"), ("masked=true",), ("biased=true",)], ids=lambda p: "-".join(p) or "plain"
)
def test_variants_compile(params, capsys):
    given = [word for p in params for word in ("--param", p)]
    text = run(capsys, "show", "attention", "--stage", "ptx", "--shape", "1x4x256x64x256x64", *given)
    assert re.search(r"wgmma.mma_async|mma.sync", text)


@pytest.mark.parametrize("dtype, mark", [("bf16", ".bf16.bf16"), ("fp16", ".f16.f16")])
def test_a_program_compiles_for_the_element_type(dtype, mark, capsys):
    assert mark in run(capsys, "show", MATRIX_PRODUCT, "--stage", "ptx", "--shape", "512x512x512", "--dtype", dtype)


def test_every_kernel_of_a_program_is_listed(tmp_path, capsys):
    path = tmp_path / "two.dt"
    path.write_text("Func a, b; In A, B; Var i, j; a[i] = 2 * B[i]; b[i, j] = a[i] * A[i, j]; a.compile(); b.compile();")
    text = run(capsys, "show", path, "--stage", "ptx", "--shape", "64x64")
    assert "// a_kernel: " in text and "// b_kernel: " in text


def test_explain_reports_what_the_kernels_take(capsys):
    text = run(capsys, "explain", "mmsigmoid", "--shape", "512x512x512", "--build")
    assert " of 232448 bytes of shared memory" in text


def test_what_triton_refuses_is_told_in_one_line(tmp_path, capsys):
    path = tmp_path / "huge.dt"
    path.write_text("Func y; In A; Var i; y[i] = A[i]; y.block(i:4194304); y.tensorize(i:4194304);")
    assert main(["show", str(path), "--stage", "ptx", "--shape", "4194304"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
