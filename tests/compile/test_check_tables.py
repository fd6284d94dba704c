"""What the check of tables says of rows and kernels that are not as they should be; building is left to tests/compile/test_prebuilt.py."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import triton

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import check_tables

from dtkernels.ops.registry import shipped
from dtkernels.runtime.store import Entry, digest, write_store
from dtkernels.runtime.table import Gpu, Row, read_rows, rows_text, spec_hash, write_gpu

SCHEDULE = "relu.block(x:{});\nrelu.tensorize(x:{});\nrelu.compile();"


def entry(name: str) -> Entry:
    host = digest(b"host")
    return Entry(name, host, digest(b"code"), 90, {"A_ptr": "*fp32"}, {}, (), 128, 0, built=triton.__version__, ir="ir")


@pytest.fixture
def table(tmp_path):
    """Two rows of relu with a kernel each, and what writes them once more with changes."""
    folder = tmp_path / "nvidia_h200"

    def write(first: dict | None = None, built: str = triton.__version__, missing: bool = False, copied: tuple = ()) -> list[str]:
        entries = [replace(entry(n), built=built) for n in ("small", "large")]
        spec = spec_hash(shipped("relu").spec.algorithm)
        rows = [Row("relu", "forward", "fp32", {"x": size}, SCHEDULE.format(tile, tile), spec, binaries=(e.name,)) for size, tile, e in zip((1024, 4096), (256, 512), entries)]
        rows[0] = replace(rows[0], **(first or {}))
        write_gpu(folder, Gpu("NVIDIA H200", 90, 132))
        text = rows_text(rows)
        (folder / "relu.yaml").write_text(text)
        write_store(folder / "relu.safetensors", entries[missing:], {digest(b"host"): "host"}, {digest(b"code"): b"code"}, copied or read_rows(text, "relu"), digest(text.encode()))
        return ["--tables", str(tmp_path)]

    return write


@pytest.fixture
def builds(monkeypatch):
    """What is built anew: (rows, what becomes of each entry)."""
    asked, changed = [], []

    def anew(rows, jobs):
        asked.extend(rows)
        return [[replace(e, **dict(changed)) for e in r.entries] for r in rows]

    monkeypatch.setattr(check_tables, "built_anew", anew)
    return asked, changed


@pytest.mark.parametrize("rebuild, sizes", [("none", []), ("some", [1024]), ("all", [1024, 4096])])
def test_rows_that_are_built_anew_are_asked_for(table, builds, capsys, rebuild, sizes):
    assert check_tables.main([*table(), "--rebuild", rebuild]) == 0
    assert [r.row.sizes["x"] for r in builds[0]] == sizes
    assert [r.widest for r in builds[0]] == [size == 4096 for size in sizes], "the largest of a kind alone"
    said = capsys.readouterr().out
    assert said.startswith(f"2 rows (0 without kernels, compiled when first taken), 2 kernels, {len(sizes)} built anew and compared (0 gave other code")


@pytest.mark.parametrize("change, wrong, varied", [({"ir": "another"}, 1, 0), ({"threads": 64}, 1, 0), ({"code": "another"}, 0, 1)])
def test_a_kernel_that_builds_otherwise_is_wrong_and_other_code_of_one_ir_is_counted(table, builds, capsys, change, wrong, varied):
    builds[1].extend(change.items())
    assert check_tables.main(table()) == wrong
    said = capsys.readouterr().out
    assert f"({varied} gave other code" in said and said.count("its kernels are not what builds now; run tools/build.py") == wrong


def test_kernels_of_another_triton_are_counted_and_not_built(table, builds, capsys):
    assert check_tables.main(table(built="0.0")) == 0 and builds[0] == []
    assert "1 built by another Triton and not compared" in capsys.readouterr().out


@pytest.mark.parametrize("first, missing, what", [
    ({"spec": "0" * 12}, False, "is of another version of the spec: 000000000000, now "),
    ({"schedule": "other.block(x:2);"}, False, "other"),
    ({}, True, " is missing"),
])  # fmt: skip
def test_a_row_that_is_wrong_is_named_and_not_built(table, builds, capsys, first, missing, what):
    assert check_tables.main(table(first, missing=missing)) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert "relu.yaml: row 1 (" in line and what in line
    assert [r.row.sizes["x"] for r in builds[0]] == [4096]


def test_rows_beside_the_kernels_that_are_not_the_tables_are_wrong(table, builds, capsys):
    other = Row("relu", "forward", "fp32", {"x": 1}, "", "0" * 12)
    assert check_tables.main(table(copied=(other,))) == 1
    assert "the copy of its rows beside its kernels is not of it" in capsys.readouterr().out


@pytest.mark.parametrize("causal, wrong", [(False, 0), (True, 1)])
def test_a_kernel_that_another_row_emits_otherwise_is_found(tmp_path, builds, capsys, causal, wrong):
    """Attention with a mask and without, by one schedule, has one wrapper and two kernels."""
    folder, operator = tmp_path / "nvidia_h200", shipped("attention")
    sizes = {"b": 1, "h": 2, "m": 128, "n": 64, "l": 128, "d": 64}
    schedule = "attention.block(b:1, h:1, m:64); attention.tensorize(b:1, h:1, m:64, n:0, l:64, d:0); attention.compile();"
    fused = "".join(f"{f}.fuse_at(attention, l); " for f in ("scores", "total_shift", "e", "total"))
    kernel = replace(entry("attention_kernel"), types={"Q_ptr": "*fp16"})
    about = ("attention", "forward", "fp16", sizes, (fused + schedule).replace("; ", ";\n"), spec_hash(operator.spec.algorithm))
    rows = [Row(*about, params=params, binaries=(kernel.name,)) for params in ({}, {"causal": True})][: 1 + causal]
    write_gpu(folder, Gpu("NVIDIA H200", 90, 132))
    text = rows_text(rows)
    (folder / "attention.yaml").write_text(text)
    write_store(folder / "attention.safetensors", [kernel], {digest(b"host"): "host"}, {digest(b"code"): b"code"}, read_rows(text, "attention"), digest(text.encode()))
    assert check_tables.main(["--tables", str(tmp_path), "--rebuild", "none"]) == wrong
    assert capsys.readouterr().out.count("of which another text is emitted; run tools/build.py --anew") == wrong
