"""Ops inside PyTorch on a GPU: torch.library's checks, Inductor, its CUDA graphs, capture, autocast, forks, >2^31 elements."""

import os
import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing
from op_cases import MAKERS, SMALL
from torch_entries import entry_of, gradients, leaves

import dtkernels

CASES = SMALL | {
    "relu": (64, 128),
    "softmax": (2, 32, 128),
    "dyt": (2, 32, 128),
    "mmsigmoid": (64, 64, 64),
    "two_mm": (64, 64, 64, 16),
    "attention": (2, 4, 2, 64, 64, 32, 32),
}


def case_of(op: str, dtype: torch.dtype = torch.float32):
    return MAKERS[op](CASES[op], dtype, "cuda")


@pytest.mark.parametrize("op", MAKERS)
def test_opcheck(op):
    case = case_of(op)
    inputs = leaves(case)
    name, tensors, named = entry_of(op, lambda: case.ours(*inputs, **case.options))
    torch.library.opcheck(getattr(torch.ops.dtkernels, name).default, tuple(tensors), named, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("op", MAKERS)
def test_inductor_forward_and_backward(op, mode):
    torch._dynamo.reset()
    case = case_of(op)
    inputs = leaves(case)
    compiled = torch.compile(lambda *i: case.ours(*i, **case.options) * 1.5, fullgraph=True, mode=mode)
    wanted = case.ours(*inputs, **case.options) * 1.5
    grad = torch.randn_like(wanted)
    good = gradients(lambda *i: case.ours(*i, **case.options) * 1.5, inputs, grad)
    for _ in range(4):  # warm up, capture, replay
        torch.compiler.cudagraph_mark_step_begin()
        for g, w in zip(gradients(compiled, inputs, grad), good):
            torch.testing.assert_close(g, w, rtol=2e-3, atol=2e-3 * max(1.0, w.abs().max().item()))


def test_dynamic_shapes_compile_once():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(lambda q, k, v: dtkernels.ops.attention(q, k, v, causal=True), fullgraph=True, backend=counter)
    for size in (48, 64, 100):
        q, k, v = (torch.randn(2, 4, size, 32, device="cuda", requires_grad=True) for _ in range(3))
        for t in (q, k, v):
            torch._dynamo.mark_dynamic(t, 2)
        torch.testing.assert_close(compiled(q, k, v), dtkernels.ops.attention(q, k, v, causal=True))
        compiled(q, k, v).sum().backward()
    assert counter.frame_count == 1


def test_a_training_step_in_a_cuda_graph():
    x = torch.randn(64, 256, device="cuda", requires_grad=True)
    w, b, a = (
        torch.ones(256, device="cuda", requires_grad=True),
        torch.zeros(256, device="cuda", requires_grad=True),
        torch.tensor([0.5], device="cuda", requires_grad=True),
    )

    def step():
        return torch.autograd.grad(dtkernels.ops.dyt(x, a, w, b).square().sum(), (x, a, w, b))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        x.normal_()
    graph.replay()
    for got, wanted in zip(found, step()):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)


def test_autocast():
    a, b = torch.randn(64, 64, device="cuda", requires_grad=True), torch.randn(64, 64, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        product, soft = dtkernels.ops.mmsigmoid(a, b), dtkernels.ops.softmax(b.bfloat16())
    assert (product.dtype, soft.dtype) == (torch.bfloat16, torch.float32)
    product.float().sum().backward()
    assert a.grad.dtype == torch.float32


def test_autocast_is_noticed_by_a_call_like_the_last_one():
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        assert dtkernels.ops.softmax(x).dtype == torch.bfloat16
        with torch.autocast("cuda"):
            assert dtkernels.ops.softmax(x).dtype == torch.float32


def test_a_child_after_a_fork_gets_torchs_own_error():
    dtkernels.ops.softmax(torch.randn(64, 256, device="cuda"))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dtkernels.ops.softmax(torch.randn(64, 256, device="cuda"))
            said = "nothing"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert "Cannot re-initialize CUDA in forked subprocess" in os.read(read, 4096).decode()


FORKS = """
import os, torch, dtkernels
dtkernels.ops.softmax(torch.randn(64, 256, device="cuda"))
child = os.fork()
if child == 0:
    x = torch.randn(4, 9)
    os._exit(0 if torch.allclose(dtkernels.ops.softmax(x), x.softmax(-1), atol=1e-6) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_still_runs_on_the_cpu():
    """In a process of its own: where torch has used its CPU threads before the fork, the child waits for them forever, whoever calls."""
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=240)


def test_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip(f"needs 24 GiB of free GPU memory; found {torch.cuda.mem_get_info()[0] >> 30}")
    x = torch.randn(1 << 19, 4100, device="cuda", dtype=torch.bfloat16)  # 2.15e9 elements
    for call, wanted in ((dtkernels.ops.relu, torch.relu), (dtkernels.ops.softmax, lambda t: t.softmax(-1))):
        got = call(x)
        for rows in (slice(0, 64), slice(-64, None)):
            torch.testing.assert_close(got[rows], wanted(x[rows]))
        del got


def test_layouts_and_empty_tensors():
    wide = torch.randn(64, 300, device="cuda")
    for x in (wide.t(), wide[:, ::3], wide[:1].expand(64, 300), wide[:, 1:], wide[:0], wide[:, :0], wide[None, :, None]):
        torch.testing.assert_close(dtkernels.ops.relu(x), x.relu())
        torch.testing.assert_close(dtkernels.ops.softmax(x), x.softmax(-1))


def test_mixed_dtypes_and_devices():
    a, b = torch.randn(32, 48, device="cuda"), torch.randn(48, 16, device="cuda")
    torch.testing.assert_close(
        dtkernels.ops.mmsigmoid(a.bfloat16(), b).float(), torch.sigmoid(a.bfloat16().float() @ b), rtol=1e-2, atol=1e-2
    )
    with pytest.raises(ValueError) as caught:
        dtkernels.ops.mmsigmoid(a, b.cpu())
    assert str(caught.value) == "mmsigmoid: b is on cpu, a is on cuda:0; allowed: one device"
