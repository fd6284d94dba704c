"""Whatever is wrong with tables, stores and folders: one warning, and the result is right."""

import logging
import sys
import threading

import pytest
import torch

import dtkernels
from dtkernels.ops.registry import shipped
from dtkernels.runtime.select import table_loader
from dtkernels.runtime.signature.spec_hash import spec_hash
from dtkernels.runtime.tables.table import Gpu, Row, rows_text, write_gpu

GOOD = "total_shift.fuse_at(softmax, x);\ntotal.fuse_at(softmax, x);\nsoftmax.block(x:2);\nsoftmax.tensorize(x:2, y:0);\nsoftmax.compile();"


def row(schedule: str = GOOD, **more) -> Row:
    sizes = {"x": 8, "y": 16}
    return Row("softmax", "forward", "fp32", sizes, schedule, **{"spec": spec_hash(shipped("softmax").spec.algorithm), **more})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An H200's table, which the interpreter stands in for; ops forget what they ran before and after."""

    def forget():
        table_loader.forget()
        shipped.cache_clear()

    monkeypatch.setenv("DTKERNELS_TABLES", str(tmp_path / "tables"))
    forget()
    write_gpu(tmp_path / "tables" / "nvidia_h200", Gpu("NVIDIA H200", 90, 132))
    yield tmp_path / "tables" / "nvidia_h200"
    forget()


def right(x: torch.Tensor) -> bool:
    return torch.allclose(dtkernels.ops.softmax(x), x.softmax(-1), atol=1e-6)


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name == "dtkernels"]


def test_a_row_that_fits_is_run(folder, caplog):
    (folder / "softmax.yaml").write_text(rows_text([row()]))
    assert right(torch.randn(7, 13))
    told = dtkernels.explain("softmax", torch.randn(7, 13))
    assert told.forward.row == row() and told.table == "nvidia_h200" and "block(x:2)" in str(told)
    assert not warnings(caplog)


DAMAGE = {
    "no YAML": lambda f: (f / "softmax.yaml").write_text("{{"),
    "no text": lambda f: (f / "softmax.yaml").write_bytes(b"\xff\xfe\x00"),
    "a folder": lambda f: (f / "softmax.yaml").mkdir(),
    "an unknown key": lambda f: (f / "softmax.yaml").write_text(rows_text([row()]).replace("measured", "weighed")),
    "no schedule": lambda f: (f / "softmax.yaml").write_text(rows_text([row("softmax.frobnicate(2);")])),
    "a store cut short": lambda f: ((f / "softmax.yaml").write_text(rows_text([row()])), (f / "softmax.safetensors").write_bytes(b"\x08\0\0"))[0],
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_warns_once(folder, caplog, what):
    DAMAGE[what](folder)
    assert right(torch.randn(8, 16)) and right(torch.randn(9, 20)) and right(torch.randn(8, 16))
    (said,) = warnings(caplog)
    assert str(folder) in said and "\n" not in said


QUIET = {
    "no table at all": None,
    "another version of the spec": row(spec="0" * 12),
    "a row far away": row(),
}


@pytest.mark.parametrize("what", QUIET)
def test_a_row_that_does_not_fit_is_passed_over(folder, caplog, what):
    if QUIET[what] is not None:
        (folder / "softmax.yaml").write_text(rows_text([QUIET[what]]))
    x = torch.randn(8, 16) if what != "a row far away" else torch.randn(3, 900)
    assert right(x)
    assert "default schedule" in dtkernels.explain("softmax", x).forward.why
    assert not warnings(caplog)


UNFIT = {
    "a schedule of Funcs that are not there": row("other.block(x:2);"),
    "a schedule that cannot be lowered": row(GOOD + "\nsoftmax.specialize_warps(y);"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_row_that_does_not_even_fit_its_own_sizes_says_so_once(folder, caplog, what):
    (folder / "softmax.yaml").write_text(rows_text([UNFIT[what]]))
    for _ in range(2):
        assert right(torch.randn(8, 16))
    (said,) = warnings(caplog)
    assert "a row is passed over" in said and "\n" not in said


def test_a_table_of_another_gpu_is_not_used(folder, caplog):
    (folder / "softmax.yaml").write_text(rows_text([row()]))
    folder.rename(folder.parent / "nvidia_a100")
    write_gpu(folder.parent / "nvidia_a100", Gpu("NVIDIA A100", 80, 108))
    assert right(torch.randn(8, 16)) and dtkernels.explain("softmax", torch.randn(8, 16)).table is None
    assert not warnings(caplog)


def test_a_cache_that_cannot_be_written_warns_once(folder, caplog, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DTKERNELS_CACHE", str(tmp_path / "file" / "cache"))
    for module in [m for m in sys.modules if m.startswith("dtkernels_emitted_softmax")]:
        monkeypatch.delitem(sys.modules, module)  # another test of this process may have loaded the same kernels
    (folder / "softmax.yaml").write_text(rows_text([row(GOOD.replace("x:2", "x:4"))]))
    assert right(torch.randn(8, 16)) and right(torch.randn(100, 16)) and right(torch.randn(2, 2000))
    (said,) = warnings(caplog)
    assert "cannot write the cache folder" in said


def test_warmup_runs_forward_and_backward_and_leaves_gradients_alone(folder):
    x = torch.randn(8, 16, requires_grad=True)
    before = dtkernels.paths().get("softmax backward", {"interpreter": 0})["interpreter"]
    dtkernels.warmup("softmax", x)
    assert dtkernels.paths()["softmax backward"]["interpreter"] == before + 1 and x.grad is None


def test_explain_names_what_there_is():
    with pytest.raises(ValueError, match="no op 'nothing'; allowed: add_rmsnorm, attention, "):
        dtkernels.explain("nothing")


def test_explain_of_a_call_without_a_kernel_names_no_gpu_and_no_table():
    told = dtkernels.explain("softmax", torch.randn(7, 13, dtype=torch.float64, requires_grad=True))
    assert told.forward.path == told.backward.path == "reference" and told.table is None
    assert str(told).startswith("softmax\nforward") and "\nbackward: reference\n" in str(told) and "h200" not in str(told)


def test_first_calls_of_many_threads_at_once(folder, caplog):
    (folder / "softmax.yaml").write_text(rows_text([row()]))
    xs, gate, wrong = [torch.randn(n, 13) for n in (5, 6, 5, 7)], threading.Barrier(8), []

    def work(x: torch.Tensor) -> None:
        gate.wait()
        if not right(x):
            wrong.append(x.shape)

    threads = [threading.Thread(target=work, args=(xs[i % 4],)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and not warnings(caplog)


class OnGpu:
    """Stands for a tensor of a GPU."""

    is_cuda = True
    dtype = torch.float32


@pytest.mark.parametrize("problem, runs", [(ImportError("no triton"), True), (torch.OutOfMemoryError("no memory"), False), (MemoryError(), False)])
def test_a_kernel_for_any_layout_stands_in_for_compiling_and_not_for_memory(monkeypatch, problem, runs):
    def by_triton(*call):
        raise problem

    dispatch = shipped("softmax").variant((), frozenset(), 0).dispatch
    for name, stand_in in {"choose": lambda tensors: None, "_by_triton": by_triton, "_stored": lambda *call, coarse: ("any", []) if coarse else None}.items():
        monkeypatch.setattr(dispatch, name, stand_in)
    if runs:
        assert dispatch._first({"A": OnGpu()}, {}) == ("any", [])
    else:
        with pytest.raises(type(problem)):
            dispatch._first({"A": OnGpu()}, {})
