"""Tables and stores without torch: what is written is read back, what is damaged is refused in one line, the nearest row wins."""

import json
import logging
import math
import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from some_rows import BLOCKS, ROWS_HELD, SPEC, row, take

from dtkernels.runtime.select import table_loader
from dtkernels.runtime.select.row_ranking import candidates, distance, nearest_gpu, whole_labels
from dtkernels.runtime.tables.kernel_store import KernelStore, StoredKernel, StoreError, digest, write_store
from dtkernels.runtime.tables.table import Gpu, TableError, read_gpu, read_rows, rows_text, write_gpu, write_rows

H200, H100, A100 = Gpu("NVIDIA H200", 90, 132, 4.8e12), Gpu("NVIDIA H100 80GB HBM3", 90, 132, 3.35e12), Gpu("NVIDIA A100-SXM4-80GB", 80, 108)


def entry(code: bytes, **more) -> StoredKernel:
    known = {"kernel": "f_kernel", "host": "xh", "code": digest(code), "arch": 90, "types": {"b_ptr": "*bf16", "a": "i32"}, "constants": {}, "divisible": ("b_ptr",)}
    return StoredKernel(**{**known, "threads": 128, "shared": 0, **more})


# -- rows -------------------------------------------------------------------------------------------------------------

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
rows = st.builds(
    row,
    x=st.integers(0, 2**40),
    y=st.integers(1, 2**20),
    schedule=st.sampled_from([ROWS_HELD, BLOCKS, ""]),
    direction=st.sampled_from(["forward", "backward"]),
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
    params=st.dictionaries(names, st.booleans() | st.integers(-8, 8), max_size=3),
    wanted=st.lists(names, max_size=3, unique=True).map(tuple),
    saved=st.booleans(),
    batched=st.lists(names, max_size=2, unique=True).map(tuple),
    microseconds=st.none() | st.floats(1e-3, 1e6),
    measured=st.booleans(),
    by=st.fixed_dictionaries({}, optional={"gpu": st.text(max_size=20), "multiprocessors": st.integers(1, 500), "date": st.just("2026-11-20"), "driver": st.just("580.10")}),
    binaries=st.lists(st.from_regex(r"x[0-9a-f]{16}", fullmatch=True), max_size=3).map(tuple),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(rows, max_size=4))
def test_rows_are_read_as_they_were_written(found):
    text = rows_text(found)
    again = read_rows(text, "table")
    assert sorted(map(str, again)) == sorted(map(str, found))
    assert rows_text(again) == text


BAD = {
    "unknown key": {"speed": 3},
    "direction is one of": {"direction": "sideways"},
    "dtype is one of": {"dtype": "fp8"},
    "sizes is label": {"sizes": {"x": -1}},
    "spec is 12 hex": {"spec": "12"},
    "microseconds is a time": {"microseconds": 0},
    "params is name: value": {"params": {"causal": "yes"}},
    "by is a mapping": {"by": {"who": "me"}},
    "saved is true or false": {"saved": "no"},
    "binaries is a list": {"binaries": "x0"},
    "a schedule": {"schedule": "f.frobnicate(x:1);"},
}


@pytest.mark.parametrize("said", BAD)
def test_a_row_that_is_wrong_is_named_with_its_file(said):
    good = {"op": "f", "direction": "forward", "dtype": "bf16", "sizes": {"x": 1}, "schedule": "", "spec": SPEC}
    with pytest.raises(TableError) as caught:
        read_rows(json.dumps([good, {**good, **BAD[said]}]), "some/table.yaml")
    text = str(caught.value)
    assert text.startswith("some/table.yaml: row 2") and "\n" not in text
    assert said in text or said == "a schedule"


def test_a_schedule_that_is_none_is_named_with_its_place_once():
    with pytest.raises(TableError) as caught:
        read_rows(rows_text([row()]).replace("f.block", "f.blok"), "t.yaml")
    assert str(caught.value).startswith("t.yaml: row 1:1:") and str(caught.value).count("t.yaml") == 1


def test_a_missing_key_is_named():
    with pytest.raises(TableError, match="row 1: no schedule"):
        read_rows(json.dumps([{"op": "f", "direction": "forward", "dtype": "bf16", "sizes": {"x": 1}, "spec": SPEC}]), "t")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_table_is_refused_in_one_line_or_read(data):
    text = rows_text([row(), row(2048, params={"causal": True}, by={"gpu": "NVIDIA H200"})])
    at = data.draw(st.integers(0, len(text) - 1))
    cut = data.draw(st.integers(0, 40))
    changed = text[:at] + data.draw(st.text(max_size=6)) + text[at + cut :]
    try:
        read_rows(changed, "t.yaml")
    except TableError as error:
        assert str(error).startswith("t.yaml") and "\n" not in str(error)


def test_a_write_that_fails_leaves_the_old_table(tmp_path, monkeypatch):
    path = tmp_path / "f.yaml"
    write_rows(path, [row()])
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda a, b: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_rows(path, [row(2048)])
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_gpu_is_read_as_it_was_written(tmp_path):
    write_gpu(tmp_path, H200)
    assert read_gpu(tmp_path) == H200
    (tmp_path / "gpu.yaml").write_text("name: only")
    with pytest.raises(TableError, match="gpu.yaml"):
        read_gpu(tmp_path)


# -- choice -----------------------------------------------------------------------------------------------------------


def test_of_rows_with_one_schedule_the_nearest_in_log2_of_sizes_comes_first():
    found = take([row(64, 64), row(4096, 4096), row(1024, 1024)], 3000, 3000)
    assert [c.row.sizes["x"] for c in found] == [4096, 1024, 64]
    assert found[0].distance == pytest.approx(math.sqrt(2) * math.log2(4096 / 3000))


def test_the_faster_of_two_rows_at_one_size_comes_first():
    found = take([row(microseconds=9.0), row(microseconds=3.0), row()], 1024, 1024)
    assert [c.row.microseconds for c in found] == [3.0, 9.0, None]


def test_a_label_of_which_a_program_takes_one_element_counts_less():
    assert distance(row(1024, 4096, ROWS_HELD), {"x": 8192, "y": 4096}) < distance(row(1024, 4096, BLOCKS), {"x": 8192, "y": 4096})


def test_a_schedule_that_holds_a_label_whole_fits_sizes_of_that_power_of_two_only():
    assert whole_labels(ROWS_HELD) == ("y",)
    assert not take([row(1024, 4096, ROWS_HELD)], 1024, 3000)[0].refused
    assert "covers all of y" in take([row(1024, 4096, ROWS_HELD)], 1024, 4097)[0].refused


def test_a_schedule_of_two_tiles_fits_no_extent_that_one_tile_holds_as_well():
    by_two = row(1024, 96, ROWS_HELD + "\nf.two_tiles(y);")
    assert not take([by_two], 1024, 80)[0].refused
    assert "two tiles hold all of y" in take([by_two], 1024, 128)[0].refused


def test_rows_of_another_spec_dtype_or_parameter_are_not_taken():
    assert "another version" in take([row(spec="ba9876543210")], 1024, 1024)[0].refused
    assert take([row(dtype="fp32"), row(params={"causal": True}), row(saved=True), row(direction="backward")], 1024, 1024) == []


def test_a_row_for_another_number_is_a_guess_behind_the_exact_ones():
    found = take([row(params={"group": 4}), row(512)], 1024, 1024)
    assert [c.exact for c in found] == [True, False]


def test_a_gpu_takes_its_own_table_else_the_most_alike_of_its_capability():
    known = {"nvidia_h200": H200, "nvidia_a100": Gpu("NVIDIA A100", 80, 108, 2.0e12)}
    assert nearest_gpu(known, H200) == nearest_gpu(known, H100) == "nvidia_h200"
    assert nearest_gpu(known, A100) == "nvidia_a100"
    assert nearest_gpu(known, Gpu("NVIDIA B200", 100, 148)) is None
    more = {**known, "nvidia_h100_pcie": Gpu("NVIDIA H100 PCIe", 90, 114, 2.0e12)}
    assert nearest_gpu(more, Gpu("NVIDIA H100 NVL", 90, 116)) == "nvidia_h100_pcie"


# -- stores -----------------------------------------------------------------------------------------------------------


def test_a_store_gives_back_what_was_put_in_and_keeps_the_order_of_parameters(tmp_path):
    path, code, host = tmp_path / "f.safetensors", os.urandom(3000), "def call(): ...\n"
    write_store(path, [entry(code)], {digest(host.encode()): host}, {digest(code): code})
    store = KernelStore(path)
    (name,) = store.names()
    assert store.entry(name) == entry(code) and list(store.entry(name).types) == ["b_ptr", "a"]
    assert store.code(digest(code)) == code and store.host(digest(host.encode())) == host
    for read in (store.entry, store.host, store.code):
        with pytest.raises(StoreError, match="x0 is missing"):
            read("x0")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(alphabet="ab\n é", max_size=300), min_size=1, max_size=40, unique=True))
def test_every_text_of_a_store_is_found_and_no_other(tmp_path, texts):
    hosts = {digest(t.encode()): t for t in texts}
    path = tmp_path / "f.safetensors"
    write_store(path, [], {name: hosts[name] for name in list(hosts)[1:]}, {})
    store = KernelStore(path)
    assert store.names("host") == tuple(sorted(list(hosts)[1:])) and store.names() == ()
    assert all(store.host(name) == hosts[name] for name in list(hosts)[1:])
    with pytest.raises(StoreError, match="is missing"):
        store.host(next(iter(hosts)))


def test_two_stores_of_the_same_kernels_are_the_same_bytes(tmp_path):
    codes = {digest(c): c for c in (b"a" * 100, b"b" * 99)}
    made = [entry(c) for c in codes.values()]
    write_store(tmp_path / "a", made, {}, codes)
    write_store(tmp_path / "b", made[::-1], {}, dict(reversed(codes.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_store_raises_its_own_error_or_gives_what_was_put_in(tmp_path, data):
    path, code = tmp_path / "f.safetensors", bytes(range(256)) * 8
    write_store(path, [entry(code)], {}, {digest(code): code})
    whole = path.read_bytes()
    if data.draw(st.booleans()):
        changed = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        at = data.draw(st.integers(0, len(whole) - 1))
        changed = whole[:at] + bytes([data.draw(st.integers(0, 255))]) + whole[at + 1 :]
    other = tmp_path / "g.safetensors"
    other.write_bytes(changed)
    try:
        store = KernelStore(other)
        assert store.entry(entry(code).name) == entry(code)
        assert store.code(digest(code)) == code
    except StoreError as error:
        assert str(other) in str(error) and "\n" not in str(error)


def test_a_header_of_one_offset_is_damaged(tmp_path):
    path = tmp_path / "f.safetensors"
    write_store(path, [], {}, {digest(b"a"): b"a"})
    whole = path.read_bytes()
    at = whole.index(b",", whole.index(b"data_offsets"))
    path.write_bytes(whole[:at] + b"." + whole[at + 1 :])
    with pytest.raises(StoreError, match="the header is damaged: KeyError"):
        KernelStore(path)


# -- the library ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tables(tmp_path, monkeypatch):
    monkeypatch.setenv("DTKERNELS_TABLES", str(tmp_path))
    table_loader.forget()
    write_gpu(tmp_path / "nvidia_h200", H200)
    write_rows(tmp_path / "nvidia_h200" / "f.yaml", [row()])
    yield tmp_path
    table_loader.forget()


def messages(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_rows_of_the_gpu_and_of_one_like_it(tables):
    assert table_loader.op_table("f", H200).rows == table_loader.op_table("f", H100).rows == (row(),)
    assert table_loader.op_table("f", A100).gpu is None and table_loader.op_table("g", H200).rows == ()


@pytest.mark.parametrize("text", ["{", "- 3", "[{op: f}]", "\x00", "a: &a [*a]", "- !!python/object/apply:os.system [ls]"])
def test_a_corrupt_table_warns_once_and_has_no_rows(tables, caplog, text):
    (tables / "nvidia_h200" / "f.yaml").write_text(text)
    for _ in range(3):
        assert table_loader.op_table("f", H200).rows == ()
        assert table_loader.op_table("f", H100).rows == ()
    (said,) = messages(caplog)
    assert str(tables / "nvidia_h200" / "f.yaml") in said and "default schedules" in said and "\n" not in said


def test_a_corrupt_store_warns_once_and_leaves_the_rows(tables, caplog):
    (tables / "nvidia_h200" / "f.safetensors").write_bytes(b"\xff" * 50)
    for gpu in (H200, H100, H200):
        assert table_loader.op_table("f", gpu) == table_loader.OpTable("nvidia_h200", (row(),), None)
    (said,) = messages(caplog)
    assert "f.safetensors" in said


def test_a_missing_folder_warns_once(tables, monkeypatch, caplog):
    monkeypatch.setenv("DTKERNELS_TABLES", str(tables / "nothing"))
    assert table_loader.op_table("f", H200).gpu is None and table_loader.op_table("g", H200).gpu is None
    assert len(messages(caplog)) == 1


def test_an_unreadable_table_warns_once(tables, caplog):
    path = tables / "nvidia_h200" / "f.yaml"
    path.unlink()
    path.mkdir()
    assert table_loader.op_table("f", H200).rows == ()
    assert len(messages(caplog)) == 1


def test_a_store_of_an_older_table_lends_no_rows(tables):
    path = tables / "nvidia_h200" / "f.yaml"
    old = [replace(row(), sizes={"x": 1}, schedule="")]
    write_store(path.with_suffix(".safetensors"), [], {}, {}, old, digest(b"another table"))
    assert table_loader.op_table("f", H200).rows == (row(),)
    write_store(path.with_suffix(".safetensors"), [], {}, {}, old, digest(path.read_bytes()))
    table_loader.forget()
    assert table_loader.op_table("f", H200).rows == (replace(row(), sizes={"x": 1}, schedule=""),)


def test_a_call_reads_the_copied_rows_of_its_kind_alone(tables, monkeypatch):
    path = tables / "nvidia_h200" / "f.yaml"
    many = [row(n, n, params=p, dtype=d) for n in (64, 128) for p in ({}, {"group": 4}, {"causal": True}) for d in ("bf16", "fp32")]
    write_rows(path, many)
    ordered = read_rows(path.read_text(), str(path))
    write_store(path.with_suffix(".safetensors"), [], {}, {}, ordered, digest(path.read_bytes()))
    table_loader.forget()
    table = table_loader.op_table("f", H200)
    assert table.rows == ordered
    monkeypatch.setattr(table_loader, "read_rows", lambda *args: 1 / 0)
    for wanted in ordered:
        like = [r for r in ordered if r.dtype == wanted.dtype and r.params.get("causal") == wanted.params.get("causal")]
        assert list(table.rows_like(wanted.key)) == like
        assert candidates(table.rows_like(wanted.key), wanted.key, wanted.sizes, SPEC) == candidates(ordered, wanted.key, wanted.sizes, SPEC)
    monkeypatch.undo()
    assert table.rows_like(row(dtype="fp16").key) == ()  # which the table itself was asked for, in case the copy is damaged


def test_copied_rows_that_are_damaged_are_read_from_the_table(tables, caplog):
    path = tables / "nvidia_h200" / "f.yaml"
    store = path.with_suffix(".safetensors")
    write_store(store, [], {}, {}, [row()], digest(path.read_bytes()))
    whole = store.read_bytes()
    at = whole.index(b"[[0,{") + 2
    store.write_bytes(whole[:at] + b"?" + whole[at + 1 :])
    table_loader.forget()
    assert table_loader.op_table("f", H200).rows_like(row().key) == table_loader.op_table("f", H200).rows == (row(),)
    (said,) = messages(caplog)
    assert "f.safetensors" in said and "\n" not in said


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_copied_rows_are_what_was_put_in_or_damaged(tmp_path, data):
    """A parameter that changed on the disk would give a call the kernel of another: nothing but the rows' own checksum notices."""
    path, put = tmp_path / "f.safetensors", (row(params={"group": 4}), row(64, 64, params={"group": 8}))
    write_store(path, [], {}, {}, put, "table")
    whole = path.read_bytes()
    at = data.draw(st.integers(8 + int.from_bytes(whole[:8], "little"), len(whole) - 1))
    (tmp_path / "g.safetensors").write_bytes(whole[:at] + bytes([whole[at] ^ 1 << data.draw(st.integers(0, 7))]) + whole[at + 1 :])
    try:
        assert KernelStore(tmp_path / "g.safetensors").rows(put[0].key) in (put, ())  # (): the name of the rows is damaged, and they are missed
    except StoreError as error:
        assert "\n" not in str(error)


def test_a_row_that_changed_after_its_kernels_were_built_has_those_of_its_call_and_schedule_or_none(tables, caplog):
    """Without its parameter the row of a causal call would be for any call, with the kernels of a causal one."""
    path = tables / "nvidia_h200" / "f.yaml"
    built = [row(binaries=("xa",)), row(binaries=("xb",), params={"causal": True}), row(128, 128)]
    write_rows(path, built)
    write_store(path.with_suffix(".safetensors"), [], {}, {}, read_rows(path.read_text(), "f"), digest(path.read_bytes()))
    path.write_text(path.read_text().replace("  params: {causal: true}\n", ""))
    table_loader.forget()
    assert {r.binaries for r in table_loader.op_table("f", H200).rows} == {("xa",)}, "of the same call and schedule, whatever the sizes"
    path.write_text(path.read_text().replace("tensorize", "block"))
    table_loader.forget()
    assert {r.binaries for r in table_loader.op_table("f", H200).rows} == {()}
    (said,) = messages(caplog)
    assert "2 rows name kernels that were built for others" in said and "tools/build.py" in said
