"""An op of one's own, from its spec to kernels in a table, as the tutorial has it."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

import build as build_tool

from dtkernels import ops
from dtkernels.lang.errors import DTError
from dtkernels.ops.registry import register
from dtkernels.runtime.tables.kernel_store import KernelStore
from dtkernels.runtime.tables.table import read_rows
from dtkernels.tuning import build_kernels

SPEC = """
op: own_squares
doc: scale * max(A, 0)^2.
algorithm: |
  Func r, own_squares;
  In A;
  SIn scale;
  Var x;
  r[x] = maximum(A[x], 0);
  own_squares[x] = scale * r[x] * r[x];
schedules:
- schedule: own_squares.block(x:{tile}); own_squares.tensorize(x:{tile});
  space: {tile: [512, 1024]}
shapes:
- {sizes: {x: 65536}, wanted: [A]}
"""


@pytest.fixture
def spec(tmp_path) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text(SPEC)
    return path


@pytest.fixture
def build(tmp_path, monkeypatch):
    """tools/build.py on a folder of this test's; its worker processes find the checkout."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("DTKERNELS_CACHE", str(tmp_path / "dtkernels"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]))
    return lambda *words: build_tool.main(["--tables", str(tmp_path / "tables"), "--jobs", "1", *map(str, words)])


def test_the_kernels_of_a_spec_are_built_when_its_file_is_named(spec, build, tmp_path, capsys):
    assert build("--default-schedules", "l40s", "--few", "1", "--dtypes", "fp32", "--ops", spec) == 0
    path = tmp_path / "tables" / "nvidia_l40s" / "own_squares.yaml"
    rows = read_rows(path.read_text(), str(path))
    store = KernelStore(path.with_suffix(".safetensors"))
    assert {r.direction for r in rows} == {"forward", "backward"}
    assert all(r.binaries and store.entry(n).arch == 89 for r in rows for n in r.binaries)
    assert build() == 1 and "name its spec, --ops FILE.yaml" in capsys.readouterr().err  # its file does not say where its spec is
    assert build("--ops", "relu") == 1 and "relu: no table here has rows of it" in capsys.readouterr().err
    assert read_rows(path.read_text(), str(path)) == rows  # and nothing was lost of what is there


@pytest.mark.parametrize("asked, said", [("no_such_op", "no op 'no_such_op'"), ("nowhere.yaml", "no such file: nowhere.yaml")])
def test_what_is_not_there_is_refused_in_one_line(build, asked, said):
    with pytest.raises(SystemExit, match=said):
        build("--ops", asked)


def test_a_schedule_that_is_no_dt_is_refused_where_the_op_is_registered(spec):
    spec.write_text(SPEC.replace("tensorize(", "tensorise("))
    with pytest.raises(DTError, match=r"own\.yaml:12:\d+: unknown schedule primitive: found 'tensorise'"):
        register(spec)


def test_a_slip_in_the_name_of_a_registered_op_is_told_which_there_are(spec):
    register(spec)
    with pytest.raises(AttributeError, match="no op 'own_square'; allowed: .*two_mm, .*own_squares, or register a spec"):
        ops.own_square  # noqa: B018


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), MemoryError()])
def test_what_is_no_rows_failure_leaves_tables_as_they_are(problem, spec, build, tmp_path, monkeypatch):
    """Rows would lose their kernels for a disk that is full."""

    def fails(*row):
        raise problem

    assert build("--ops", spec, "--default-schedules", "a100", "--few", "1", "--dtypes", "fp32") == 0
    before = {p: p.read_bytes() for p in (tmp_path / "tables").rglob("*") if p.is_file()}
    monkeypatch.setattr(build_kernels, "build_row", fails)
    monkeypatch.setattr(build_kernels, "ProcessPoolExecutor", lambda *size, **context: ThreadPoolExecutor(1))
    with pytest.raises(SystemExit) as end:
        build("--ops", spec)
    assert str(end.value).startswith("build: ") and "\n" not in str(end.value)
    assert {p: p.read_bytes() for p in (tmp_path / "tables").rglob("*") if p.is_file()} == before


def test_a_default_table_that_cannot_be_written_is_one_line(spec, build, tmp_path):
    (tmp_path / "tables").write_text("")
    with pytest.raises(SystemExit, match="^build: .*Not a directory"):
        build("--ops", spec, "--default-schedules", "a100", "--few", "1")
