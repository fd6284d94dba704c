"""Kernels that the GPUs of an architecture share, tables of several folders, and stores that nobody here built. No torch, no triton."""

import logging
import os
from dataclasses import replace

import pytest

from dtkernels.runtime.select import table_loader
from dtkernels.runtime.tables import trust
from dtkernels.runtime.tables.kernel_store import KernelStore, StoredKernel, digest, write_store
from dtkernels.runtime.tables.table import Gpu, Row, arch_folder, read_rows, rows_text, write_gpu, write_rows

H200, H100, A10 = Gpu("NVIDIA H200", 90, 132, 4.8e12), Gpu("NVIDIA H100", 90, 132, 3.35e12), Gpu("NVIDIA A10", 86, 72, 0.6e12)
HOST = "def call(): pass\n"
TEXT = "f.tensorize(x:16, y:0);"


def kernel(name="f_kernel", **more):
    return StoredKernel(name, digest(HOST.encode()), digest(name.encode()), 90, {"a": "*fp32"}, {}, (), 128, 0, **more)


def row(x=64, schedule=TEXT, **more):
    return Row("f", "forward", "bf16", {"x": x, "y": 64}, schedule, "0" * 12, **more)


def put(folder, gpu, rows, kernels=(), store=None, key=None, packed=True, op="f"):
    """Write a table and a store; ``store`` is its folder, beside the table by default."""
    write_gpu(folder / gpu.folder, gpu)
    path = folder / gpu.folder / f"{op}.yaml"
    write_rows(path, rows)
    if kernels:
        ordered = read_rows(path.read_text(), "f") if packed else ()
        codes = {digest(k.kernel.encode()): k.kernel.encode() for k in kernels}
        write_store(folder / (store or gpu.folder) / "f.safetensors", list(kernels), {digest(HOST.encode()): HOST}, codes, ordered, digest(path.read_bytes()), key)
    table_loader.forget()


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("DTKERNELS_USER", str(tmp_path / "user"))
    monkeypatch.delenv("DTKERNELS_TRUST_TABLES", raising=False)
    monkeypatch.delenv("DTKERNELS_TABLES", raising=False)
    write_gpu(tmp_path / "package" / "nvidia_l40s", Gpu("NVIDIA L40S", 89, 142, 8.6e11))
    monkeypatch.setattr(table_loader, "package_tables", lambda: tmp_path / "package")
    table_loader.forget()
    yield tmp_path
    table_loader.forget()


def messages(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_gpu_with_rows_and_no_kernels_runs_those_of_its_architecture(folders, caplog):
    k = kernel()
    put(folders / "package", H200, [row(binaries=(k.name,))], [k], store="sm_90")
    put(folders / "package", H100, [row(128), row(256, schedule="f.tensorize(x:32, y:0);", binaries=(k.name,))])
    own = table_loader.op_table("f", H200)
    assert own.packed is not None and own.rows[0].binaries == (k.name,), "the copy of the rows is that of the H200"
    table = table_loader.op_table("f", H100)
    assert table.gpu == "nvidia_h100" and [r.binaries for r in table.rows] == [(k.name,), ()]
    assert table.store.entry(k.name) == k and table.store.host(k.host) == HOST and table.store.code(k.code) == b"f_kernel"
    (said,) = messages(caplog)
    assert "1 rows name kernels that were built for others" in said, "another schedule"


def test_kernels_beside_a_table_come_before_those_of_its_architecture(folders):
    shared, own = kernel(), kernel("g_kernel")
    put(folders / "package", H200, [row(binaries=(shared.name,))], [shared], store="sm_90")
    put(folders / "package", H100, [row(binaries=(shared.name,)), row(512, "f.num_warps(8);", binaries=(own.name,))], [own])
    table = table_loader.op_table("f", H100)
    assert table.packed is not None and {r.binaries for r in table.rows} == {(shared.name,), (own.name,)}
    assert table.store.entry(shared.name) == shared and table.store.entry(own.name) == own


def test_of_several_rows_with_a_schedule_the_kernels_of_equally_aligned_sizes_come_first(folders):
    even, odd = kernel("even_kernel"), kernel("odd_kernel")
    put(folders / "package", H200, [row(64, binaries=(even.name,)), row(63, binaries=(odd.name,))], [even, odd], store="sm_90")
    put(folders / "package", H100, [row(77), row(96)])
    assert {r.sizes["x"]: r.binaries for r in table_loader.op_table("f", H100).rows} == {77: (odd.name, even.name), 96: (even.name, odd.name)}


def test_a_gpu_of_an_architecture_without_kernels_keeps_its_rows(folders, caplog):
    put(folders / "package", A10, [row(binaries=("x" + "0" * 16,))])
    for _ in range(3):
        table = table_loader.op_table("f", A10)
        assert table.rows and table.store is None
    (said,) = messages(caplog)
    assert "nor in sm_86" in said and "compiled when first called" in said
    assert table_loader.op_table("f", Gpu("NVIDIA A2", 75, 10)).gpu is None, "an unknown GPU"


def test_the_users_rows_come_before_the_packages_and_both_are_there(folders):
    put(folders / "package", H200, [row(64, "f.num_warps(1);"), row(128, "f.num_warps(2);")])
    put(folders / "user" / "tables", H200, [row(64, "f.num_warps(8);")])
    table = table_loader.op_table("f", H200)
    assert {r.sizes["x"]: r.schedule for r in table.rows_like(row().key)} == {64: "f.num_warps(8);", 128: "f.num_warps(2);"}
    assert table_loader.tables_folders() == (folders / "user" / "tables", folders / "package")
    assert table.gpu_of(row().key) == "nvidia_h200" and table.title == f"nvidia_h200 in {folders / 'user' / 'tables'}"
    assert table.beyond.title == "nvidia_h200"


def test_rows_of_another_gpu_stand_in_for_kinds_of_calls_that_the_user_did_not_tune(folders):
    put(folders / "package", H200, [row(64, "f.num_warps(1);"), replace(row(64, "f.num_warps(2);"), direction="backward")])
    put(folders / "user" / "tables", H100, [row(64, "f.num_warps(8);")])
    table, backward = table_loader.op_table("f", H100), replace(row(), direction="backward").key
    assert [r.schedule for r, _ in table.rows_of_kind(row().key)] == ["f.num_warps(8);"], "times of another GPU are no evidence beside one's own"
    assert [r.schedule for r, _ in table.rows_of_kind(backward)] == ["f.num_warps(2);"]
    assert (table.gpu_of(row().key), table.gpu_of(backward)) == ("nvidia_h100", "nvidia_h200")


def test_kinds_of_calls_and_ops_that_a_gpus_table_lacks_take_those_of_its_architecture(folders):
    put(folders / "package", H200, [row(64, "f.num_warps(1);"), replace(row(64, "f.num_warps(2);"), direction="backward")])
    put(folders / "package", H200, [replace(row(64), op="g")], op="g")
    put(folders / "package", H100, [row(128, "f.num_warps(8);")])
    table, backward = table_loader.op_table("f", H100), replace(row(), direction="backward").key
    assert [r.schedule for r in table.rows_like(row().key) if r.direction == "forward"] == ["f.num_warps(8);"]
    assert [r.schedule for r, _ in table.rows_of_kind(backward)] == ["f.num_warps(2);"]
    assert (table.gpu_of(row().key), table.gpu_of(backward)) == ("nvidia_h100", "nvidia_h200")
    assert table_loader.op_table("g", H100).gpu == "nvidia_h200"


def test_a_named_folder_is_the_only_one(folders, monkeypatch):
    put(folders / "package", H200, [row(64)])
    put(folders / "user" / "tables", H200, [row(128)])
    put(folders / "named", H200, [row(256)])
    monkeypatch.setenv("DTKERNELS_TABLES", str(folders / "named"))
    assert [r.sizes["x"] for r in table_loader.op_table("f", H200).rows] == [256]


# -- trust --------------------------------------------------------------------------------------------------------------


def test_a_store_that_neither_the_package_nor_this_user_built_is_refused_in_one_line(folders, monkeypatch, caplog):
    k = kernel()
    put(folders / "user" / "tables", H200, [row(binaries=(k.name,))], [k])
    for _ in range(3):
        table = table_loader.op_table("f", H200)
        assert table.store is None and table.rows, "rows are no code"
    (said,) = messages(caplog)
    assert "neither the package nor this user built it" in said and "\n" not in said
    monkeypatch.setenv("DTKERNELS_TRUST_TABLES", "1")
    table_loader.forget()
    assert table_loader.op_table("f", H200).store.entry(k.name) == k


def test_a_store_that_the_user_sealed_is_used_and_none_that_was_changed_or_sealed_by_another(folders, caplog):
    k, key = kernel(), trust.user_key(make=True)
    assert key == trust.user_key() and os.stat(folders / "user" / "key").st_mode & 0o777 == 0o600
    put(folders / "user" / "tables", H200, [row(binaries=(k.name,))], [k], key=key)
    assert table_loader.op_table("f", H200).store.entry(k.name) == k and not messages(caplog)
    path = folders / "user" / "tables" / "nvidia_h200" / "f.safetensors"
    whole = path.read_bytes()
    for at in range(16, len(whole), 37):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            assert not KernelStore(path).sealed_with(key), at
        except ValueError:
            continue
    path.write_bytes(whole)
    assert KernelStore(path).sealed_with(key) and not KernelStore(path).sealed_with(bytes(32)) and not KernelStore(path).sealed_with(None)
    (folders / "user" / "key").write_bytes(b"short")
    table_loader.forget()
    assert table_loader.op_table("f", H200).store is None


def test_a_sealed_store_differs_from_a_plain_one_in_its_seal_alone(tmp_path):
    for name, key in (("plain", None), ("again", None), ("sealed", b"k" * 32)):
        write_store(tmp_path / name, [kernel()], {digest(HOST.encode()): HOST}, {digest(b"f_kernel"): b"f_kernel"}, [row()], "t", key)
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "again").read_bytes() != (tmp_path / "sealed").read_bytes()
    assert KernelStore(tmp_path / "plain").rows() == KernelStore(tmp_path / "sealed").rows()


def test_a_folder_that_cannot_be_written_gives_no_key(folders, monkeypatch):
    (folders / "file").write_text("")
    monkeypatch.setenv("DTKERNELS_USER", str(folders / "file"))
    assert trust.user_key() is None
    with pytest.raises(OSError):
        trust.user_key(make=True)
    assert table_loader.tables_folders() == (folders / "package",)


# -- damage -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["half", "format", "empty"])
def test_a_damaged_shared_store_gives_one_warning_and_leaves_the_rows(folders, caplog, broken):
    k = kernel()
    put(folders / "package", H200, [row(binaries=(k.name,))], [k], store="sm_90")
    path = folders / "package" / "sm_90" / "f.safetensors"
    whole = path.read_bytes()
    path.write_bytes({"half": whole[: len(whole) // 2], "format": whole.replace(b"dtkernels 4", b"dtkernels 9"), "empty": b""}[broken])
    table_loader.forget()
    for gpu in (H200, H100, H200):
        assert len(table_loader.op_table("f", gpu).rows) == 1 and table_loader.op_table("f", gpu).store is None
    assert sum("f.safetensors" in said for said in messages(caplog)) == 1 and all("\n" not in said for said in messages(caplog))


def test_the_folder_of_an_architecture():
    assert (arch_folder(90), arch_folder("gfx942")) == ("sm_90", "gfx942") and rows_text([]) == "[]\n"
