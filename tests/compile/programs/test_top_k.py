"""Machine code of the largest elements: one kernel, which reads the row once and keeps it in registers, for every target."""

import re

import pytest

from dtkernels.lang import parse
from dtkernels.show import Subject, Written

TEXT = "Func v, i; In A; Var x, j; RVar y; Extent j = 4; v[x, j] = rtopk(A[x, y], y, j); i[x, j] = rargtopk(A[x, y], y, j); v.compile(); i.compile();"


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("DTKERNELS_CACHE", str(tmp_path / "dtkernels"))


@pytest.mark.parametrize("gpu", ["a100", "h200", "b200", "mi300x"])
def test_a_row_is_read_once(gpu):
    subject = Subject(Written("top", parse(TEXT), scheduled=False), gpu, {"x": 4096, "y": 128}, "bf16")
    (kernel,) = subject.kernels()
    assert re.findall(r"tl\.load\(\s*(\w+)_ptr", subject.text("triton")) == ["A"] and set(kernel.writes) == {"v", "i"}
    text = subject.text("ptx")
    assert not re.search(r"st\.local|scratch_store", text)


@pytest.mark.parametrize("size, kernels", [(128, 1), (4096, 1), (16384, 1)])
def test_rows_that_are_held_take_one_kernel(size, kernels):
    subject = Subject(Written("top", parse(TEXT), scheduled=False), "h200", {"x": 4096, "y": size}, "bf16")
    assert len(subject.kernels()) == kernels and dict(subject.program.schedule.sizes(subject.kernels()[0].func, "block"))["j"] == 4
