"""What the check of tables says of rows and kernels that are not as they should be; building is left to tests/compile/test_prebuilt.py."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import triton

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

import check_tables

from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.ops.registry import shipped
from dtkernels.runtime.aot_build import variant_of
from dtkernels.runtime.launch.wrapper_recorder import host_text
from dtkernels.runtime.select.schedule_selection import scheduled
from dtkernels.runtime.signature.spec_hash import spec_hash
from dtkernels.runtime.tables.kernel_store import KernelStore, StoredKernel, digest, write_store
from dtkernels.runtime.tables.table import Gpu, Row, read_rows, rows_text, write_gpu

SCHEDULE = "relu.block(x:{});\nrelu.tensorize(x:{});\nrelu.compile();"


def wrapper(row: Row) -> str:
    """The host text of a row's kernels."""
    _, variant = variant_of(shipped(row.op), row)
    return host_text(emit(scheduled(variant.algorithm, row.schedule), "call", target("h200")))


def entry(row: Row, **more) -> StoredKernel:
    known = {"kernel": f"{row.op}_kernel", "host": digest(wrapper(row).encode()), "code": digest(b"code"), "arch": 90, "types": {"A_ptr": f"*{row.dtype}"}}
    return StoredKernel(**{**known, "constants": {}, "divisible": (), "threads": 128, "shared": 0, "built": triton.__version__, "ir": "ir", **more})


def write_kernels(path: Path, rows: list[Row], entries: list[StoredKernel], hosts: list[str], copied: tuple = (), missing: int = 0) -> None:
    """A table with a store beside it."""
    text = rows_text(rows)
    write_gpu(path.parent, Gpu("NVIDIA H200", 90, 132))
    path.write_text(text)
    hosts = {digest(t.encode()): t for t in hosts}
    write_store(path.with_suffix(".safetensors"), entries[missing:], hosts, {digest(b"code"): b"code"}, copied or read_rows(text, "table"), digest(text.encode()))


@pytest.fixture
def table(tmp_path):
    """Two rows of relu with a kernel each, and what writes them once more with changes."""
    folder = tmp_path / "nvidia_h200"

    def write(first: dict | None = None, built: str = triton.__version__, missing: bool = False, copied: tuple = ()) -> list[str]:
        spec = spec_hash(shipped("relu").spec.algorithm)
        rows = [Row("relu", "forward", "fp32", {"x": size}, SCHEDULE.format(tile, tile), spec) for size, tile in ((1024, 256), (4096, 512))]
        entries = [entry(r, built=built) for r in rows]
        hosts = [wrapper(r) for r in rows]
        rows = [replace(r, binaries=(e.name,)) for r, e in zip(rows, entries)]
        rows[0] = replace(rows[0], **(first or {}))
        write_kernels(folder / "relu.yaml", rows, entries, hosts, copied, missing)
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
def test_a_kernel_that_another_row_emits_otherwise_is_found(tmp_path, builds, capsys, monkeypatch, causal, wrong):
    """Attention with a mask and without, by one schedule, may have one wrapper and two kernels."""
    folder, operator = tmp_path / "nvidia_h200", shipped("attention")
    sizes = {"b": 1, "h": 2, "m": 128, "n": 64, "l": 128, "d": 64}
    schedule = "attention.block(b:1, h:1, m:64); attention.tensorize(b:1, h:1, m:64, n:0, l:64, d:0); attention.compile();"
    fused = "".join(f"{f}.fuse_at(attention, l); " for f in ("scores", "total_shift", "e", "total"))
    about = ("attention", "forward", "fp16", sizes, (fused + schedule).replace("; ", ";\n"), spec_hash(operator.spec.algorithm))
    rows = [Row(*about, params=params) for params in ({}, {"causal": True})][: 1 + causal]
    monkeypatch.setattr(check_tables, "host_text", lambda source: "host")  # as it is where warps are specialized
    kernel = entry(rows[0], host=digest(b"host"))
    write_kernels(folder / "attention.yaml", [replace(r, binaries=(kernel.name,)) for r in rows], [kernel], ["host"])
    assert check_tables.main(["--tables", str(tmp_path), "--rebuild", "none"]) == wrong
    assert capsys.readouterr().out.count("of which another text is emitted; run tools/build.py --anew") == wrong


def swapped(folder: Path) -> None:
    """The kernels of two rows of one op, each the other's."""
    path = folder / "relu.yaml"
    first, second = read_rows(path.read_text(), "relu")
    store = KernelStore(path.with_suffix(".safetensors"))
    kept = [replace(first, binaries=second.binaries), replace(second, binaries=first.binaries)]
    entries = [store.entry(n) for r in kept for n in r.binaries]
    write_kernels(path, kept, entries, [store.host(e.host) for e in entries])


DAMAGE = {
    "its relu_kernel is not of this row": swapped,
    "is of NVIDIA H100, of which no call looks here; allowed: the folder nvidia_h100": lambda folder: write_gpu(folder, Gpu("NVIDIA H100", 90, 132)),
    "gpu.yaml": lambda folder: (folder / "gpu.yaml").unlink(),
    "softmax.safetensors: kernels without a table": lambda folder: (folder / "softmax.safetensors").write_bytes(b""),
    "relu.yamlx.part: is no part of a table": lambda folder: (folder / "relu.yamlx.part").write_text(""),
    "measurements.safetensors: no measurements of this version": lambda folder: (folder / "measurements.safetensors").write_bytes(b"\0" * 99),
    "its kernels are missing": lambda folder: (folder / "relu.safetensors").unlink(),
    "cut short": lambda folder: (folder / "relu.safetensors").write_bytes(b"cut"),
    "not YAML": lambda folder: (folder / "relu.yaml").write_text("- ["),
    "no such op": lambda folder: (folder / "relu.yaml").rename(folder / "rellu.yaml"),
    "no table with a row in it": lambda folder: [p.unlink() for p in folder.glob("relu.*")],
}


@pytest.mark.parametrize("said", DAMAGE)
def test_damage_of_every_kind_is_found(tmp_path, table, builds, capsys, said):
    given = table()
    (tmp_path / "__pycache__").mkdir()  # the folder of tables is a package
    (tmp_path / "__pycache__" / "__init__.pyc").write_bytes(b"")
    assert check_tables.main([*given, "--rebuild", "none"]) == 0
    DAMAGE[said](tmp_path / "nvidia_h200")
    assert check_tables.main([*given, "--rebuild", "none"]) == 1
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [{"arch": 80}, {"types": {"A_ptr": "*bf16"}}, {"types": {"A_ptr": "*i64"}}, {"kernel": "softmax_kernel"}, {"host": digest(b"")}])
def test_a_kernel_of_another_gpu_dtype_or_wrapper_is_found(tmp_path, table, builds, capsys, wrong):
    given = table()
    path = tmp_path / "nvidia_h200" / "relu.yaml"
    rows, store = list(read_rows(path.read_text(), "relu")), KernelStore(path.with_suffix(".safetensors"))
    entries = [replace(store.entry(r.binaries[0]), **(wrong if i else {})) for i, r in enumerate(rows)]
    hosts = ["", *(store.host(store.entry(r.binaries[0]).host) for r in rows)]
    write_kernels(path, [replace(r, binaries=(e.name,)) for r, e in zip(rows, entries)], entries, hosts)
    assert check_tables.main([*given, "--rebuild", "none"]) == 1
    assert capsys.readouterr().out.count("is not of this row") == 1


def test_kernels_that_no_row_names_are_found(tmp_path, table, builds, capsys):
    given = table()
    path = tmp_path / "nvidia_h200" / "relu.yaml"
    rows, store = read_rows(path.read_text(), "relu"), KernelStore(path.with_suffix(".safetensors"))
    entries = [store.entry(r.binaries[0]) for r in rows]
    write_kernels(path, rows[:1], entries, [store.host(e.host) for e in entries])
    assert check_tables.main([*given, "--rebuild", "none"]) == 1
    assert "1 kernels that no row names" in capsys.readouterr().out


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="addresses are Linux's to give")
def test_what_a_build_starts_lies_at_the_same_addresses():
    code = """
import subprocess, sys
from dtkernels.tuning.deterministic_build import same_addresses
lies = [sys.executable, "-c", "print(next(line for line in open('/proc/self/maps') if '[heap]' in line))"]
allowed = same_addresses()
print(allowed, len({subprocess.run(lies, capture_output=True, text=True, check=True).stdout for _ in range(4)}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(check_tables.__file__).parent, capture_output=True, text=True, check=True)
    allowed, places = done.stdout.split()
    assert places == "1" or allowed == "False"  # containers may refuse it
