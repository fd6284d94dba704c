"""Prebuilt kernels on a GPU: right, repeatable, on any stream and thread, inside a capture, without Triton."""

import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import small_tables
import torch
from op_cases import MAKERS, check

import dtkernels
from dtkernels.ops.registry import shipped
from dtkernels.runtime.bind.operator import device_target
from dtkernels.runtime.launch import cuda_driver as driver_module
from dtkernels.runtime.select import table_loader
from dtkernels.runtime.select.schedule_selection import gpu_of
from dtkernels.runtime.signature.spec_hash import spec_hash
from dtkernels.runtime.tables.table import Row, write_gpu, write_rows

ROOT = Path(__file__).parents[2]
SHAPES = {"softmax": (512, 2048), "dyt": (512, 2048), "mmsigmoid": (512, 512, 512)}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A table of default schedules for this GPU, with its kernels; DTKERNELS_TEST_TABLES names one built before."""
    if named := os.environ.get("DTKERNELS_TEST_TABLES"):
        return Path(named)
    here = device_target(torch.device("cuda", 0))
    if not isinstance(here.arch, int) or here.arch not in (80, 89, 90, 100):
        pytest.skip(f"no kernels are built ahead for compute capability {here.arch}")
    folder = tmp_path_factory.mktemp("tables")
    small_tables.build(folder, here)
    return folder


@pytest.fixture
def tables(built, monkeypatch):
    monkeypatch.setenv("DTKERNELS_TABLES", str(built))
    table_loader.forget()
    shipped.cache_clear()
    yield built
    table_loader.forget()
    shipped.cache_clear()


def kinds(op: str) -> set[str]:
    """How the calls of an op so far ran."""
    variants = [v for v in shipped(op)._variants.values()]
    variants += [half for v in variants for pair in v.pairs() for half in (pair.forward, pair.backward)]
    return {route.kind for v in variants for route in v.dispatch._routes.values()}


@pytest.mark.parametrize("op", SHAPES)
def test_prebuilt_kernels_agree_with_float64_forward_and_backward(tables, op):
    case = MAKERS[op](SHAPES[op], torch.float32, "cuda")
    for _ in range(3):  # bound, then known
        check(case, torch.float32)
    inputs = tuple(t.requires_grad_() for t in case.inputs)
    grad = torch.randn_like(case.result())
    found = [torch.autograd.grad(case.ours(*inputs), inputs, grad) for _ in range(3)]
    exact = tuple(t.detach().double().requires_grad_() for t in inputs)
    truth = torch.autograd.grad(case.truth(*exact), exact, grad.double())
    for ours in found:
        for got, first, wanted in zip(ours, found[0], truth):
            assert torch.equal(got, first)
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())
    assert kinds(op) == {"prebuilt"}


@pytest.mark.parametrize("rows, length", [(512, 1990), (500, 1990), (433, 2000)])
def test_other_sizes_and_layouts_run_prebuilt_too(tables, rows, length):
    """Not of an odd length: other warps are predicted to save a tenth there, and the default schedule is compiled."""
    wide = torch.randn(rows, 4096, device="cuda")
    for x in (wide[:, :2048].contiguous(), wide[:, :2048], wide[:, :length].contiguous(), wide[:, :length].contiguous()[1:]):
        torch.testing.assert_close(dtkernels.ops.softmax(x), x.softmax(-1))
    assert kinds("softmax") == {"prebuilt"}


@pytest.mark.parametrize("rows", [512, 333])
def test_a_layout_that_every_prebuilt_kernel_would_read_in_small_pieces_is_compiled(tables, rows):
    wide = torch.randn(rows, 4096, device="cuda")
    for x in (wide[:, 1:2001], wide[:, ::2], torch.randn(2048, rows, device="cuda").t()):
        shipped.cache_clear()
        for _ in range(2):
            torch.testing.assert_close(dtkernels.ops.softmax(x), x.softmax(-1))
        assert kinds("softmax") == {"compiled"}


def test_one_tensor_given_twice_is_told_apart_from_two(tables):
    a, b = torch.randn(2, 512, 512, device="cuda").unbind()
    for args in ((a, a), (a, b), (b, a)):
        torch.testing.assert_close(dtkernels.ops.mmsigmoid(*args), torch.sigmoid(args[0] @ args[1]), rtol=1e-3, atol=1e-3)


def test_threads_and_streams(tables):
    xs = [torch.randn(512, 2048, device="cuda") for _ in range(4)]
    wanted, wrong = [dtkernels.ops.softmax(x) for x in xs], []
    torch.cuda.synchronize()

    def work(first: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(200):
                got = dtkernels.ops.softmax(xs[(first + i) % 4])
                if i % 40 == 0 and not torch.equal(got, wanted[(first + i) % 4]):
                    wrong.append((first, i))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_first_calls_of_many_threads_at_once(tables):
    xs = [torch.randn(rows, 2048, device="cuda", requires_grad=i % 2 == 1) for i, rows in enumerate((480, 488, 480, 496))]
    torch.cuda.synchronize()
    gate, wrong = threading.Barrier(8), []

    def work(x: torch.Tensor) -> None:
        gate.wait()
        y = dtkernels.ops.softmax(x)
        wanted = x.detach().softmax(-1)
        if not torch.allclose(y, wanted, atol=1e-6):
            wrong.append(x.shape)
        if x.requires_grad and not torch.autograd.grad(y, x, torch.ones_like(y))[0].abs().max().item() < 1e-5:
            wrong.append("gradient")

    threads = [threading.Thread(target=work, args=(xs[i % 4],)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and kinds("softmax") == {"prebuilt"}


def test_a_first_call_inside_a_capture(tables):
    x = torch.randn(520, 2048, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = dtkernels.ops.softmax(x)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(y, x.softmax(-1))


FRESH = """
import sys, torch
x = torch.randn(512, 2048, device="cuda")
import dtkernels
y = dtkernels.ops.softmax(x)
print((y - x.softmax(-1)).abs().max().item() < 1e-6, "triton" in sys.modules)
"""


def test_a_fresh_process_without_a_compiler_needs_no_triton(tables, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": str(tmp_path), "CC": "false"}
    done = subprocess.run([sys.executable, "-c", FRESH], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_a_damaged_store_warns_once_and_the_result_is_right(tables, tmp_path, monkeypatch, caplog):
    (source,) = [p for p in tables.iterdir() if p.is_dir()]
    folder = tmp_path / source.name
    folder.mkdir()
    for name in ("gpu.yaml", "softmax.yaml", "softmax.safetensors"):
        (folder / name).write_bytes((source / name).read_bytes())
    data = bytearray((folder / "softmax.safetensors").read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    assert json.loads(data[8:start])
    data[start:] = bytes(len(data) - start)
    (folder / "softmax.safetensors").write_bytes(data)
    monkeypatch.setenv("DTKERNELS_TABLES", str(tmp_path))
    table_loader.forget()
    monkeypatch.setattr(driver_module, "_driver", None)  # what is loaded stays loaded: this one has loaded nothing
    x = torch.randn(504, 2048, device="cuda")  # no other test calls this shape, so that nothing about it is remembered
    with caplog.at_level(logging.WARNING, logger="dtkernels"):
        for _ in range(3):
            torch.testing.assert_close(dtkernels.ops.softmax(x), x.softmax(-1))
    assert len([r for r in caplog.records if r.name == "dtkernels"]) == 1 and kinds("softmax") == {"compiled"}


def test_a_schedule_too_large_for_the_gpu_gives_way_to_the_default_schedule(tables, tmp_path, monkeypatch, caplog):
    (source,) = [p for p in tables.iterdir() if p.is_dir()]
    operator = shipped("mmsigmoid")
    huge = "mmsigmoid.block(x:64, y:64);\nmmsigmoid.tensorize(x:64, y:64, k:512);\nmmsigmoid.compile();"  # 256 KB, however few stages
    row = Row("mmsigmoid", "forward", "fp32", {"x": 512, "y": 512, "k": 512}, huge, spec_hash(operator.spec.algorithm))
    write_gpu(tmp_path / source.name, replace(gpu_of(device_target(torch.device("cuda", 0)))))
    write_rows(tmp_path / source.name / "mmsigmoid.yaml", [row])
    monkeypatch.setenv("DTKERNELS_TABLES", str(tmp_path))
    table_loader.forget()
    a = torch.randn(512, 512, device="cuda")
    for _ in range(2):
        torch.testing.assert_close(dtkernels.ops.mmsigmoid(a, a), torch.sigmoid(a @ a), rtol=1e-3, atol=1e-3)
    assert len([r for r in caplog.records if "passed over" in r.getMessage()]) == 1


def test_explain_says_which_row_a_call_ran(tables):
    x = torch.randn(500, 2048, device="cuda")
    dtkernels.warmup("softmax", x)
    told = dtkernels.explain("softmax", x)
    assert told.forward.path == "prebuilt" and told.forward.row.sizes == {"x": 512, "y": 2048} and 0 < told.forward.distance < 0.1
