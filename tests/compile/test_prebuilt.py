"""Tables to binaries to launches, without a GPU: a driver that takes notes stands in for the real one."""

import ctypes
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import stand_in_gpu
import torch
import triton.language as tl

from dtkernels.algebra.pipeline import prepare
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.lang.parser import parse
from dtkernels.ops.registry import register, shipped
from dtkernels.runtime import aot_build
from dtkernels.runtime.aot_build import known_labels
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.specialization import builds, fits, loses_alignment, specialized
from dtkernels.runtime.build.triton_compile import (
    compile_kernel,
    plain_constant,
    plain_types,
    record_launches,
    split_multiples,
    stored_kernel_of,
)
from dtkernels.runtime.dispatch import dispatcher
from dtkernels.runtime.launch import bound_launch
from dtkernels.runtime.launch.cuda_driver import LaunchConfig
from dtkernels.runtime.select.row_ranking import Candidate
from dtkernels.runtime.select.schedule_selection import gpu_of
from dtkernels.runtime.select.table_loader import op_table
from dtkernels.runtime.signature.spec_hash import spec_hash
from dtkernels.runtime.tables.kernel_store import KernelStore, StoredKernel
from dtkernels.runtime.tables.table import Row, RowKey, read_rows, write_gpu, write_rows

ROOT = Path(__file__).parents[2]
H200 = target("h200")


def write_table(folder: Path, op: str, sizes: dict[str, int], wanted: tuple[str, ...], dtype: str = "fp32") -> None:
    """Rows of default schedules of forward and backward."""
    operator = shipped(op)
    core, rows = operator.variant((), frozenset(), 0), []
    for direction, names in (("forward", ()), ("backward", wanted)):
        variant = core.pair(names).backward if names else core
        own = {label: sizes[label] for label in known_labels(variant.algorithm)}
        schedule = default_schedule(variant.algorithm, variant.outputs, own, 4, H200)
        rows.append(Row(op, direction, dtype, own, str(schedule), spec_hash(operator.spec.algorithm), wanted=names))
    write_rows(folder / gpu_of(H200).folder / f"{op}.yaml", rows)
    write_gpu(folder / gpu_of(H200).folder, gpu_of(H200))


def build(folder: Path, cache: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache / "triton"), "DTKERNELS_CACHE": str(cache / "dtkernels")}
    command = [sys.executable, str(ROOT / "tools" / "build.py"), "--tables", str(folder), "--jobs", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    write_table(folder, "softmax", {"x": 1024, "y": 512}, ("A",))
    write_table(folder, "dyt", {"x": 1024, "y": 512}, ("A", "alpha"))
    build(folder, tmp_path_factory.mktemp("cache"))
    return folder


def test_the_same_tables_build_to_the_same_bytes(tables, tmp_path):
    again = tmp_path / "tables"
    write_table(again, "softmax", {"x": 1024, "y": 512}, ("A",))
    build(again, tmp_path)
    for name in ("softmax.yaml", "softmax.safetensors"):
        assert (tables / "nvidia_h200" / name).read_bytes() == (again / "nvidia_h200" / name).read_bytes()


@pytest.mark.parametrize("changed", [False, True])
def test_a_kernel_is_taken_from_the_store_if_its_ir_is_what_it_was(tables, monkeypatch, changed):
    monkeypatch.setattr(aot_build, "_known", {})
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")  # as tools/build.py does
    path = tables / "nvidia_h200" / "dyt.yaml"
    row = next(r for r in read_rows(path.read_text(), str(path)) if r.direction == "forward")
    earlier = aot_build.PreviousBuild(KernelStore(path.with_suffix(".safetensors")))
    if changed:
        earlier.found = {kind: [replace(e, ir="x" + "0" * 16) for e in entries] for kind, entries in earlier.found.items()}
    monkeypatch.setattr(earlier.store, "code", lambda name: b"kept")
    built = aot_build.build_row(shipped("dyt"), row, H200, earlier=earlier)
    assert {e.name for e in built.entries} == set(row.binaries)
    assert {code == b"kept" for code in built.codes.values()} == {not changed}


def test_kernels_that_differ_are_not_one_because_their_wrappers_are(tmp_path):
    """One process builds an op with a parameter set and not, by one schedule: what it compiled first is not taken for both."""
    spec = tmp_path / "either.yaml"
    spec.write_text("op: either\ndoc: One of two.\nalgorithm: |\n  Func either;\n  In A;\n  Var x;\n  Param up = false;\n  either[x] = where(up, exp(A[x]), A[x] * 3);\n")
    operator = register(str(spec))
    row = Row("either", "forward", "fp32", {"x": 4096}, "either.block(x:512); either.tensorize(x:512); either.compile();", spec_hash(operator.spec.algorithm))
    one, other = (aot_build.build_row(operator, replace(row, params=params), H200, widest=False) for params in ({}, {"up": True}))
    assert one.hosts == other.hosts, "else nothing is asked here"
    assert {e.ir for e in one.entries}.isdisjoint(e.ir for e in other.entries)


def test_one_build_is_for_any_number_of_rows_also_where_a_tensor_has_a_value_for_each_row():
    """As attention's logarithms of sums: the strides of those are odd with the rows, the others' are not."""
    names = ("x_ptr", "s_ptr", "size_m", "size_n", "x_stride_b", "x_stride_m", "x_stride_n", "s_stride_b", "s_stride_m")
    args = (torch.empty(4, 64, 32), torch.empty(4, 64), 64, 32, 2048, 32, 1, 64, 1)
    types = {"x_ptr": "*fp32", "s_ptr": "*fp32", **dict.fromkeys(names[2:], "i32"), "EVEN_m": "constexpr", "EVEN_n": "constexpr"}
    ragged = builds(names, args, {"EVEN_m": True, "EVEN_n": True}, types, "i64")[1]
    assert ragged.multiples == dict.fromkeys(("x_ptr", "s_ptr", "size_n", "x_stride_b", "x_stride_m"), 16)
    assert ragged.constants == {"EVEN_m": False, "EVEN_n": True, "x_stride_n": 1, "s_stride_m": 1}
    entry = StoredKernel("k", "", "", 90, {n: ragged.types.get(n, "i32") for n in names}, ragged.constants, tuple(ragged.multiples), 128, 0)
    assert not loses_alignment(entry, names, (torch.empty(4, 48, 32), torch.empty(4, 48), 48, 32, 1536, 32, 1, 48, 1))
    bare = replace(entry, divisible=("x_ptr", "s_ptr"))
    assert loses_alignment(bare, names, (torch.empty(4, 48, 32), torch.empty(4, 48), 48, 32, 1536, 32, 1, 48, 1))


ROWS = """
Func f; In A; Var x, y;
f[x, y] = A[x, y] * 2;
f.block(x:1, y:1024); f.tensorize(y:1024); f.compile();
"""


@pytest.mark.parametrize("dtype, step", [(torch.bfloat16, 8), (torch.float32, 4)])
def test_rows_of_1000_elements_are_loaded_16_bytes_at_once(dtype, step):
    """1000 is no multiple of 16, which is all that Triton looks for; but of 8."""
    module = load_module(emit(prepare(parse(ROWS)), "call", H200), "rows")
    (bound_launch,) = record_launches(module, "call", (torch.empty(512, 1000, dtype=dtype, device="meta"),))
    names = tuple(bound_launch.kernel.arg_names)
    found = builds(names, bound_launch.args, bound_launch.constants, plain_types(bound_launch), tl.int64)
    known = [{n: s for n, s in b.multiples.items() if not n.endswith(("_ptr", "_out"))} for b in found]
    pitches = ("size_y", "A_stride_x", "f_stride_x")
    assert known[0] == dict.fromkeys(pitches, 8) and dict.fromkeys(pitches, step) in known and known[-2:] == [{}, {}]
    wide = [len(re.findall(r"(?:ld|st)\.global\S*\.v4\.b32", compile_kernel(bound_launch.kernel, b.types, b.constants, b.multiples, bound_launch.options, H200).asm["ptx"])) for b in found]
    assert wide[: known.index({})] == [2 * 8 // step] * known.index({}) and wide[-1] == 0
    entry = stored_kernel_of(specialized(bound_launch, H200), "", 90)
    for columns, fitting in ((1000, True), (1004, False), (2048, True)):
        args = (*bound_launch.args[:2], columns, columns, 1, columns, 1)
        assert fits(entry, tuple(entry.types), args, bound_launch.constants) == fitting, columns


ODD = """
Func f; In A, B; Var x, y; RVar k;
f[x, y] = rdot(A[x, k], B[k, y], k);
f.block(x:128, y:256); f.tensorize(x:128, y:256, k:64); f.map(x:x1/4, y, x1); f.persistent(); f.descriptor(A, B); f.stage(A, B);
f.tail(x:64, y:128, k:128); f.num_warps(8); f.compile();
"""


@pytest.mark.parametrize("m, n, k", [(5001, 3003, 4501), (4097, 4097, 4099), (777, 4999, 8191), (128, 255, 4097)])
def test_kernels_built_for_rows_of_an_odd_length_serve_any_other(m, n, k):
    """Copies have rows of a multiple of 16 elements whatever the sizes: what reads them is never compiled at a call. The copies
    themselves, and stores of results, are of odd rows here and there."""
    module = load_module(emit(prepare(parse(ODD)), "call", H200), "odd")

    def launches(*sizes):
        m, n, k = sizes
        return record_launches(module, "call", (torch.empty(m, k, dtype=torch.bfloat16, device="meta"), torch.empty(k, n, dtype=torch.bfloat16, device="meta")))

    built = {}
    for one in launches(4097, 4097, 4097):
        names, product = tuple(one.kernel.arg_names), "tl.dot" in one.kernel.src
        found = builds(names, one.args, one.constants, plain_types(one), tl.int64, product=product)
        built[one.kernel.__name__] = [
            StoredKernel("f", "", "", 90, b.types, {c: plain_constant(v) for c, v in b.constants.items()}, *split_multiples(b.multiples)[:1], 128, 0, steps=split_multiples(b.multiples)[1])
            for b in found
        ]
    assert sorted(built) == ["A_rows_kernel", "B_rows_kernel", "f_descriptor_kernel", "f_tail_descriptor_kernel"]
    for one in launches(m, n, k):
        names, constants = tuple(one.kernel.arg_names), {c: plain_constant(v) for c, v in one.constants.items()}
        fitting = [e for e in built[one.kernel.__name__] if fits(e, names, one.args, constants)]
        assert fitting and not loses_alignment(fitting[0], names, one.args), one.kernel.__name__


def test_a_gpu_that_nobody_measured_gets_default_schedules_and_says_so(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "triton"), "DTKERNELS_CACHE": str(tmp_path / "dtkernels")}
    what = ["--default-schedules", "l40s", "--ops", "relu", "--few", "1", "--dtypes", "bf16", "--jobs", "2"]
    command = [sys.executable, str(ROOT / "tools" / "build.py"), "--tables", str(tmp_path / "tables"), *what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "tables" / "nvidia_l40s" / "relu.yaml"
    rows = read_rows(path.read_text(), str(path))
    assert {r.direction for r in rows} == {"forward", "backward"} and not any(r.measured or r.microseconds for r in rows)
    store = KernelStore(path.with_suffix(".safetensors"))
    assert all(r.binaries and store.entry(n).arch == 89 for r in rows for n in r.binaries)


def test_safetensors_reads_a_store(tables):
    from safetensors import safe_open

    with safe_open(tables / "nvidia_h200" / "softmax.safetensors", "pt") as f:
        assert f.metadata()["format"] == "dtkernels 4"
        assert all(f.get_tensor(name).dtype == torch.uint8 for name in f.keys()) and f.keys()  # noqa: SIM118


def test_every_row_has_kernels_for_any_size_and_layout(tables):
    for op in ("softmax", "dyt"):
        path = tables / "nvidia_h200" / f"{op}.yaml"
        store = KernelStore(path.with_suffix(".safetensors"))
        for row in read_rows(path.read_text(), str(path)):
            entries = [store.entry(name) for name in row.binaries]
            assert {e.host for e in entries} and all(store.host(e.host) and store.code(e.code)[:4] == b"\x7fELF" for e in entries)
            for kernel in {e.kernel for e in entries}:
                assert any(not e.divisible and "i64" in e.types.values() for e in entries if e.kernel == kernel)


def test_rows_are_read_from_the_store_while_the_table_is_the_one_it_was_built_for(tables, monkeypatch):
    monkeypatch.setenv("DTKERNELS_TABLES", str(tables))
    path = tables / "nvidia_h200" / "softmax.yaml"
    assert op_table("softmax", gpu_of(H200)).rows == read_rows(path.read_text(), str(path))


def test_rows_that_are_missing_beside_the_kernels_are_read_from_the_table_with_one_warning(tables, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "nvidia_h200"
    shutil.copytree(tables / "nvidia_h200", folder)
    path = folder / "softmax.safetensors"
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[:start] + bytes(len(data) - start))
    monkeypatch.setenv("DTKERNELS_TABLES", str(tmp_path))
    rows = read_rows((folder / "softmax.yaml").read_text(), "table")
    table = op_table("softmax", gpu_of(H200))
    with caplog.at_level(logging.WARNING, logger="dtkernels"):
        for _ in range(2):
            assert rows[0] in table.rows_like(rows[0].key)
            assert table.rows_like(RowKey("softmax", "forward", (), (), False, (), "fp16", frozenset("xy"))) == ()
    assert ["its rows are missing" in r.message for r in caplog.records] == [True]


class Noting:
    """Stands for the driver: loads nothing, reads the arguments of a launch back from memory."""

    overlaps = True

    def __init__(self):
        self.launched = []

    def function(self, device, name, code, kernel, shared):
        assert code()[:4] == b"\x7fELF"
        return ctypes.c_void_p(1 + len(kernel))

    def launch(self, reference, function, params, extra):
        config = ctypes.cast(reference, ctypes.POINTER(LaunchConfig)).contents
        values = [ctypes.c_int64.from_address(p).value for p in params]
        self.launched.append(((config.grid_x, config.block_x), values, [ctypes.c_float.from_address(p).value for p in params]))
        return 0


@pytest.fixture
def noting(monkeypatch):
    found = Noting()
    for module in (dispatcher, bound_launch):
        monkeypatch.setattr(module, "driver", lambda: found)
    monkeypatch.setattr(bound_launch, "raw_stream", lambda device: 0)
    stand_in_gpu.tensors_on_it(monkeypatch)
    return found


def bound(tables, op: str, tensors: dict, scalars: dict, direction: str = "forward"):
    """A prebuilt row of ``op`` bound to a call, with what the first call gave."""
    path = tables / "nvidia_h200" / f"{op}.yaml"
    row = next(r for r in read_rows(path.read_text(), str(path)) if r.direction == direction)
    variant = shipped(op).variant((), frozenset(), 0)
    variant = variant.pair(row.wanted).backward if row.wanted else variant
    found = variant.dispatch._prebuilt(Candidate(row, 0.0), KernelStore(path.with_suffix(".safetensors")), tensors, scalars, coarse=True)
    assert found is not None
    return found


@pytest.mark.parametrize("rows", [1024, 1000])
def test_a_launch_gets_pointers_sizes_strides_and_two_zeros(tables, noting, rows):
    x = torch.randn(rows, 512)
    replay, (y,) = bound(tables, "softmax", {"A": x}, {})
    (_, threads), values, _ = noting.launched[-1]
    assert threads % 32 == 0 and y.shape == x.shape
    assert values == [x.data_ptr(), y.data_ptr(), 512, 512, 512, 0, 0]  # unit strides are baked in; one row a program needs no number of rows
    other = torch.randn(rows, 512)
    (z,) = replay((other,))
    assert noting.launched[-1][1][:2] == [other.data_ptr(), z.data_ptr()] and z.data_ptr() != y.data_ptr()


def test_a_strided_input_gets_the_kernel_for_any_layout(tables, noting):
    x = torch.randn(512, 1024).t()
    _, (y,) = bound(tables, "softmax", {"A": x}, {})
    assert noting.launched[-1][1] == [x.data_ptr(), y.data_ptr(), 512, 1, 1024, 512, 1, 0, 0]


def test_a_kernel_that_knows_less_of_the_alignment_than_is_so_is_the_last_resort(tables, noting):
    """Rows 40 or 48 float32 apart start at multiples of 16 bytes, which the build for any size does not know; rows 42 apart do not."""
    path = tables / "nvidia_h200" / "softmax.yaml"
    entries = [KernelStore(path.with_suffix(".safetensors")).entry(n) for r in read_rows(path.read_text(), str(path)) for n in r.binaries]
    names = tuple(next(e for e in entries if e.kernel == "softmax_kernel").types)
    loose = next(e for e in entries if tuple(e.types) == names and not any("_stride_x" in n for n in e.multiples) and e.types["A_stride_x"] != "constexpr")

    def args(stride: int) -> tuple:
        return tuple(torch.empty(0) if n.endswith(("_ptr", "_out")) else stride if n.endswith("_stride_x") else 1 for n in names)

    assert [loses_alignment(loose, names, args(stride)) for stride in (48, 40, 42)] == [True, True, False]
    strides = [n for n in names if n.endswith("_stride_x")]
    assert not loses_alignment(replace(loose, divisible=tuple(strides)), names, args(48))
    fours = replace(loose, steps=dict.fromkeys(strides, 4))
    assert not any(loses_alignment(fours, names, args(stride)) for stride in (48, 40, 42))
    assert loses_alignment(replace(loose, steps=dict.fromkeys(strides, 2)), names, args(40))

    def large(stride: int) -> tuple:
        return tuple(torch.empty(1 << 20, device="meta") if isinstance(a, torch.Tensor) else a for a in args(stride))

    assert [loses_alignment(loose, names, large(stride)) for stride in (48, 42, 41)] == [True, True, False]
    assert [loses_alignment(replace(loose, steps=dict.fromkeys(strides, 2)), names, large(stride)) for stride in (40, 42)] == [True, False]


def test_numbers_may_differ_from_call_to_call(tables, noting):
    x, w = torch.randn(1024, 512), torch.randn(512)
    replay, _ = bound(tables, "dyt", {"A": x, "w": w, "b": w}, {"alpha": 0.5})
    assert 0.5 in noting.launched[-1][2]
    other = torch.randn(512)
    replay((x, w, other, 0.25))
    assert 0.25 in noting.launched[-1][2] and 0.5 not in noting.launched[-1][2]
    assert w.data_ptr() in noting.launched[-1][1] and other.data_ptr() in noting.launched[-1][1]  # one tensor given twice is told apart


def test_a_scalar_on_the_device_is_a_pointer(tables, noting):
    x, w, alpha = torch.randn(1024, 512), torch.randn(512), torch.ones(1)
    _, results = bound(tables, "dyt", {"A": x, "w": w, "b": w}, {"alpha": alpha})
    assert alpha.data_ptr() in noting.launched[-1][1] and len(results) == 1


def test_backward_launches_every_kernel_of_the_program(tables, noting):
    grad, x, w, alpha = torch.randn(1024, 512), torch.randn(1024, 512), torch.randn(512), torch.ones(1)
    known = {"A": x, "w": w, "b": w, "d_dyt": grad}
    variant = shipped("dyt").variant((), frozenset(), 0).pair(("A", "alpha")).backward
    tensors = {n: known[n] for n in variant.algorithm.inputs}
    _, results = bound(tables, "dyt", tensors, {"alpha": alpha}, "backward")
    assert [tuple(r.shape) for r in results] == [(1024, 512), ()] and len(noting.launched) >= 2


@pytest.mark.parametrize("texts, what", [(True, "is missing"), (False, "is damaged")])
def test_a_damaged_store_warns_once_and_its_kernels_are_not_run(tables, tmp_path, noting, caplog, texts, what):
    path = tmp_path / "softmax.safetensors"
    data = bytearray((tables / "nvidia_h200" / "softmax.safetensors").read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    places = {name: part["data_offsets"] for name, part in json.loads(data[8:start]).items() if name != "__metadata__"}
    for begin, end in (where for name, where in places.items() if (name == "texts") == texts):
        data[start + begin : start + end] = bytes(end - begin)
    path.write_bytes(data)
    rows = read_rows((tables / "nvidia_h200" / "softmax.yaml").read_text(), "table")
    variant, row = shipped("softmax").variant((), frozenset(), 0), next(r for r in rows if r.direction == "forward")
    with caplog.at_level(logging.WARNING, logger="dtkernels"):
        for _ in range(2):
            assert variant.dispatch._prebuilt(Candidate(row, 0.0), KernelStore(path), {"A": torch.randn(1024, 512)}, {}, coarse=False) is None
    assert [r.message for r in caplog.records if what in r.message and str(path) in r.message] == [caplog.records[0].message]
