"""Tables that GPUs share: built kernels, stored kernels measured on another GPU, and tables that users make and share. No GPU."""

import io
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tools")]

import check_tables  # noqa: E402
import measure_stored  # noqa: E402
import merge_table  # noqa: E402
import tuning_pools  # noqa: E402

from dtkernels.codegen.target import target  # noqa: E402
from dtkernels.ops.registry import shipped  # noqa: E402
from dtkernels.runtime.select import table_loader  # noqa: E402
from dtkernels.runtime.select.schedule_selection import gpu_of  # noqa: E402
from dtkernels.runtime.signature.spec_hash import spec_hash  # noqa: E402
from dtkernels.runtime.tables.kernel_store import KernelStore  # noqa: E402
from dtkernels.runtime.tables.table import Row, read_rows, rows_text, write_gpu, write_rows  # noqa: E402
from dtkernels.tuning import build_kernels, shared_table, user_table  # noqa: E402
from dtkernels.tuning import tune as tune_tool  # noqa: E402
from dtkernels.tuning.records.measurement_store import read_matrices  # noqa: E402
from dtkernels.tuning.workers.simulated_worker import SimulatedGpu  # noqa: E402

H200, H100 = gpu_of(target("h200")), gpu_of(target("h100"))


def relu_row(x: int, warps: int = 4, **more) -> Row:
    text = f"relu.block(x:1024); relu.tensorize(x:1024); relu.num_warps({warps}); relu.compile();"
    return Row("relu", "forward", "fp32", {"x": x}, text, spec_hash(shipped("relu").spec.algorithm), **more)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Tables of an H200 whose kernels lie with its architecture."""
    folder = tmp_path_factory.mktemp("tables")
    (folder / "sm_90").mkdir()
    write_gpu(folder / H200.folder, H200)
    write_rows(folder / H200.folder / "relu.yaml", [relu_row(65536), relu_row(1 << 20, 8)])
    assert not build(folder / H200.folder)
    return folder


def build(folder: Path) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_kernels, "build_rows", here)
        return build_kernels.build_tables([folder], {"relu": "relu"}, 1)


def here(pairs, jobs):
    """``build_rows`` in this process."""
    return [build_kernels.build_some([(row, widest)], to, op, store or "")[0] for row, op, to, widest, store in pairs]


@pytest.fixture
def tables(built, tmp_path, monkeypatch):
    folder = tmp_path / "tables"
    subprocess.run(["cp", "-r", str(built), str(folder)], check=True)
    monkeypatch.setenv("DTKERNELS_TABLES", str(folder))
    table_loader.forget()
    yield folder
    table_loader.forget()


def checked(folder: Path, capsys) -> list[str]:
    check_tables.main(["--tables", str(folder), "--rebuild", "none", "--jobs", "1"])
    return [line for line in capsys.readouterr().out.splitlines() if ": " in line and "; 0 wrong" not in line]


def test_kernels_are_built_into_the_folder_of_the_architecture(tables, capsys):
    shared, beside = KernelStore(tables / "sm_90" / "relu.safetensors"), KernelStore(tables / H200.folder / "relu.safetensors")
    assert shared.names() and not beside.names() and len(shared.rows()) == len(beside.rows()) == 2 and not shared.table
    assert checked(tables, capsys) == []
    table = table_loader.op_table("relu", H200)
    assert table.packed and all(table.store.entry(n) for r in table.rows for n in r.binaries)


def test_another_gpu_s_rows_share_the_kernels_and_leave_the_store_as_it_is(tables, capsys):
    before = (tables / "sm_90" / "relu.safetensors").read_bytes()
    write_gpu(tables / H100.folder, H100)
    write_rows(tables / H100.folder / "relu.yaml", [relu_row(65536, 8)])
    assert [r.binaries for r in table_loader.op_table("relu", H100).rows] == [table_loader.op_table("relu", H200).rows[1].binaries], "before a build"
    assert not build(tables / H100.folder)
    assert (tables / "sm_90" / "relu.safetensors").read_bytes() == before
    assert checked(tables, capsys) == []
    write_rows(tables / H100.folder / "relu.yaml", [relu_row(65536, 2)])
    assert not build(tables / H100.folder) and (tables / "sm_90" / "relu.safetensors").read_bytes() != before
    assert checked(tables, capsys) == [], "the H200's are still there"
    (tables / "sm_90" / "relu.safetensors").write_bytes(before)
    assert any("missing" in line for line in checked(tables, capsys))


def inline(monkeypatch, module, gpu):
    monkeypatch.setattr(module, "WorkerPool", lambda count, make, *rest: tuning_pools.Inline(gpu))
    monkeypatch.setattr(tuning_pools.Inline, "close", lambda self: None, raising=False)


def test_stored_kernels_are_measured_on_another_gpu_without_compiling(tables, monkeypatch, capsys):
    inline(monkeypatch, measure_stored, SimulatedGpu(target("h100")))
    monkeypatch.setattr(build_kernels, "build_row", lambda *args: 1 / 0)
    before = (tables / "sm_90" / "relu.safetensors").read_bytes()
    assert measure_stored.main(["--tables", str(tables), "--dry-run"]) == 0
    rows = read_rows((tables / H100.folder / "relu.yaml").read_text(), "relu")
    assert rows and all(r.binaries and not r.measured and r.microseconds is None and r.by["command"] == "tools/measure_stored.py" for r in rows)
    _, (matrix,) = read_matrices(tables / H100.folder / "measurements.safetensors")
    assert matrix.cold.shape == (2, 2) and (matrix.cold > 0).all()
    assert (tables / "sm_90" / "relu.safetensors").read_bytes() == before
    table_loader.forget()
    table = table_loader.op_table("relu", H100)
    assert table.gpu == "nvidia_h100" and table.packed and all(table.store.entry(n) for r in table.rows for n in r.binaries)
    capsys.readouterr()
    assert checked(tables, capsys) == []
    text = (tables / H100.folder / "relu.yaml").read_text()
    assert measure_stored.main(["--tables", str(tables), "--dry-run", "--again", "--budget", "0.000001"]) == 0 and "not finished, no rows" in capsys.readouterr().out
    assert measure_stored.main(["--tables", str(tables), "--dry-run"]) == 0
    assert (tables / H100.folder / "relu.yaml").read_text() == text and read_matrices(tables / H100.folder / "measurements.safetensors")[1]
    with pytest.raises(SystemExit, match="no table of another GPU of sm_80"):
        inline(monkeypatch, measure_stored, SimulatedGpu(target("a100")))
        measure_stored.main(["--tables", str(tables), "--dry-run", "--gpu", "a100"])


# -- shared files -------------------------------------------------------------------------------------------------------


def zipped(path: Path, **files: str | bytes) -> Path:
    with zipfile.ZipFile(path, "w") as found:
        for name, text in files.items():
            found.writestr(name.replace("__", "."), text)
    return path


def gpu_text() -> str:
    return f"name: {H100.name}\narch: 90\nmultiprocessors: 132\nbandwidth: {H100.bandwidth}\n"


def test_a_table_is_shared_without_kernels_and_merged(tables, tmp_path, capsys):
    mine, path = tables / H200.folder, tmp_path / "shared.zip"
    write_rows(mine / "relu.yaml", [replace(r, microseconds=9.0) for r in read_rows((mine / "relu.yaml").read_text(), "relu")])
    shared_table.write_shared(mine, path)
    with zipfile.ZipFile(path) as found:
        assert sorted(found.namelist()) == ["gpu.yaml", "relu.yaml"] and b"binaries" not in found.read("relu.yaml")
    other = tmp_path / "other"
    assert merge_table.main([str(path), "--tables", str(other), "--no-build"]) == 0
    assert "2 rows taken" in capsys.readouterr().out
    rows = read_rows((other / H200.folder / "relu.yaml").read_text(), "relu")
    assert [r.microseconds for r in rows] == [9.0, 9.0] and not any(r.binaries for r in rows)
    write_rows(mine / "relu.yaml", [replace(r, microseconds=time) for r, time in zip(rows, (8.0, 10.0))])
    merge_table.main([str(shared_table.write_shared(mine, path)), "--tables", str(other), "--no-build"])
    assert sorted(r.microseconds for r in read_rows((other / H200.folder / "relu.yaml").read_text(), "relu")) == [8.0, 9.0], "the faster stays"


@pytest.mark.parametrize("files, said", [
    ({"relu__yaml": "[]"}, "it has no gpu.yaml"),
    ({"gpu__yaml": gpu_text(), "relu__safetensors": b"x"}, "'relu.safetensors' is no part of a shared table"),
    ({"gpu__yaml": gpu_text(), "../relu__yaml": "[]"}, "'../relu.yaml' is no part"),
    ({"gpu__yaml": "[", "relu__yaml": "[]"}, "a mapping of name, arch"),
    ({"gpu__yaml": gpu_text().replace("90", "75"), "relu__yaml": "[]"}, "no target is of its compute capability, 75"),
    ({"gpu__yaml": gpu_text(), "relu__yaml": "- {op: relu}"}, "row 1: no direction"),
])  # fmt: skip
def test_a_shared_file_that_is_none_is_refused_in_one_line(tmp_path, files, said):
    with pytest.raises(SystemExit) as end:
        merge_table.main([str(zipped(tmp_path / "a.zip", **files)), "--tables", str(tmp_path / "to"), "--no-build"])
    assert said in str(end.value) and "\n" not in str(end.value) and not (tmp_path / "to").exists()
    (tmp_path / "b.zip").write_bytes(io.BytesIO(b"PK nonsense").getvalue())
    with pytest.raises(SystemExit, match="no shared table"):
        merge_table.main([str(tmp_path / "b.zip"), "--tables", str(tmp_path / "to")])


def test_rows_that_cannot_be_taken_are_named(tmp_path, capsys):
    good = relu_row(4096, microseconds=2.0)
    rows = [good, replace(good, sizes={"x": 1}, measured=False), replace(good, sizes={"x": 2}, spec="0" * 12), replace(good, sizes={"x": 3}, schedule="relu.block(z:4);")]
    path = zipped(tmp_path / "a.zip", gpu__yaml=gpu_text(), relu__yaml=rows_text(rows))
    assert merge_table.main([str(path), "--tables", str(tmp_path / "to"), "--no-build"]) == 0
    told = capsys.readouterr()
    assert "1 rows taken" in told.out and "3 left out" in told.out
    assert all(word in told.err for word in ("nobody measured it", "another version of the spec", "relu.yaml: relu, forward, fp32, x=3"))


# -- the user's table ---------------------------------------------------------------------------------------------------


def test_a_user_tunes_and_gets_a_table_and_a_file_to_share(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DTKERNELS_USER", str(tmp_path / "user"))
    shapes = tmp_path / "shapes.yaml"
    shapes.write_text("relu: [{sizes: {x: [4096, 65536]}, directions: [forward]}]")
    options = ["--shapes", str(shapes), "--dtypes", "bf16", "--jobs", "1", "--from", "none"]
    assert user_table.tune_user_table(4.0, "relu", [*options, "--dry-run", "--gpu", "h200"]) == 0
    told = capsys.readouterr().out
    assert f"estimates, which no call takes: {tmp_path / 'user' / 'dry_run' / 'nvidia_h200'}" in told and not (tmp_path / "user" / "tables").exists()
    parsed = tune_tool.arguments
    monkeypatch.setattr(tune_tool, "arguments", lambda argv: parsed([*argv, "--dry-run", "--gpu", "h200"]))  # a simulated GPU for a real one
    assert user_table.tune_user_table(4.0, "relu", options) == 0
    told = capsys.readouterr().out
    table = tmp_path / "user" / "tables" / "nvidia_h200"
    assert (table / "relu.yaml").exists() and f"calls take these rows from now on: {table}" in told
    assert told.count("of the roofline; before ") == 2 and (tmp_path / "user" / "shared" / "nvidia_h200.zip").exists()
    table_loader.forget()
    monkeypatch.delenv("DTKERNELS_TABLES", raising=False)
    assert table_loader.tables_folders()[0] == tmp_path / "user" / "tables" and {r.by["command"].split()[0] for r in table_loader.op_table("relu", H200).written} == {"tools/tune.py"}
    table_loader.forget()


def test_a_user_without_a_folder_that_can_be_written_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DTKERNELS_USER", str(tmp_path / "file"))
    assert user_table.tune_user_table(1.0, "relu", ["--dry-run"]) == 2
    assert "DTKERNELS_USER names another folder" in capsys.readouterr().err
