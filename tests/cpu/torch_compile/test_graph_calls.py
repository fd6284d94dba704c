"""What Inductor generates for a call of an op: a function that leads to kernels past torch's dispatcher, with the dispatcher's results."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import stand_in_gpu
import torch
import triton.language  # noqa: F401  here, while it is to interpret: Inductor would import it where these tests have it otherwise
from torch._inductor import lowering
from torch._inductor.utils import run_and_get_code

import dtkernels
from dtkernels import ops
from dtkernels.runtime.bind import inductor_lowering, library_ops
from dtkernels.runtime.bind.graph_calls import graph_call

TESTS = Path(__file__).parents[2]
ROWS = "op: write_rows\ndoc: rows\nalgorithm: |\n  Func put; In N, K, t; Var x, y; put[x, y] = write(2 * N[x, y], K[t[x], y]); put.compile();\n"
BLEND = "op: mixed\ndoc: of two\nalgorithm: |\n  Func f; In A, B; Var x, y; f[x, y] = 2 * maximum(A[x, y], B[x, y]); f.compile();\n"


@pytest.fixture(autouse=True)
def reference(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()


def entry(name: str):
    """The op as one node of a graph: ``ops`` decomposes those that Inductor fuses with their surroundings."""
    getattr(ops, name).operator()
    library_ops.ensure(name)
    return getattr(torch.ops.dtkernels, name)


def t(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


CASES = {
    "softmax": (entry("softmax"), lambda: (t(6, 32),)),
    "twice the same": (lambda x: torch.ops.dtkernels.swiglu(x, x), lambda: (t(6, 32),)),
    "a number": (partial(entry("rmsnorm"), eps_number=1e-3, offset=1), lambda: (t(6, 32), t(32))),
    "a number as a tensor": (lambda x, w, b, a: torch.ops.dtkernels.dyt(x, w, b, a), lambda: (t(6, 32), t(32), t(32), torch.tensor([0.5]))),
    "a product": (ops.mmsigmoid, lambda: (t(6, 32), t(32, 16))),
    "no mask, a scale": (partial(ops.attention, causal=True, scale=0.3), lambda: (t(2, 2, 8, 16), t(2, 2, 8, 16), t(2, 2, 8, 16))),
    "infinite": (partial(entry("rmsnorm"), eps_number=float("inf")), lambda: (t(6, 32), t(32))),
}
entry("swiglu"), entry("dyt")


def results(call, inputs, grad: bool) -> list[torch.Tensor]:
    if not grad:
        with torch.no_grad():
            return [call(*inputs)]
    leaves = [v.clone().requires_grad_() for v in inputs]
    found = call(*leaves)
    return [found.detach(), *torch.autograd.grad(found, leaves, torch.ones_like(found))]


def count(monkeypatch, owner, name: str) -> list:
    """Note each call of a function from here on."""
    noted, plain = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: noted.append(args) or plain(*args))
    return noted


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CASES)
def test_repeated_calls_go_straight_to_kernels(name, grad, monkeypatch):
    call, made = CASES[name]
    inputs = [made() for _ in range(4)]
    wanted = [results(call, i, grad) for i in inputs]
    compiled = torch.compile(call, fullgraph=True)
    found, codes = run_and_get_code(results, compiled, inputs[0], grad)
    torch.testing.assert_close(found, wanted[0])
    assert len(codes) == 1 + grad and all("= graph_call(" in c and "= torch.ops.dtkernels" not in c for c in codes)
    stand_in_gpu.use(monkeypatch)
    torch.testing.assert_close(results(compiled, inputs[1], grad), wanted[1], rtol=1e-4, atol=1e-5)
    through_torch = count(monkeypatch, library_ops, "ensure")
    before = dtkernels.paths()
    for given, right in zip(inputs[2:], wanted[2:]):
        torch.testing.assert_close(results(compiled, given, grad), right, rtol=1e-4, atol=1e-5)
    kernels = {op: kinds["gpu"] - before.get(op, {}).get("gpu", 0) for op, kinds in dtkernels.paths().items()}
    assert name in ("twice the same", "infinite") or not through_torch  # guards of one tensor in two places never hold; no text of infinity is read
    assert sum(kernels.values()) == 2 * (1 + grad), kernels


def test_what_guards_and_launch_cannot_tell_goes_through_torch(monkeypatch):
    """Numbers reach the kernel; other shapes, an unaligned tensor, and TF32 set otherwise are bound anew, and known from then on."""
    stand_in_gpu.use(monkeypatch)
    op = ops.mmsigmoid.operator()
    call, w = graph_call(op.entry, "inference", (..., ...), {"dt_spec": op.manifest.spec}), t(32, 16)
    flat = t(6 * 32 + 1)
    through_torch = count(monkeypatch, library_ops, "ensure")
    told = []
    for x in (t(6, 32), t(6, 32), t(9, 32), t(6, 32), t(9, 32), flat[1:].view(6, 32), t(6, 32), t(6, 32).double()):
        torch.testing.assert_close(call(x, w.to(x.dtype)), torch.sigmoid(x @ w.to(x.dtype)))
        told.append(len(through_torch))
    kept = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = not kept
        call(t(6, 32), w), call(t(6, 32), w)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = kept
    assert told + [len(through_torch)] == [1, 1, 2, 2, 2, 3, 3, 4, 5]


def test_a_call_whose_kinds_are_ever_new_stops_learning(monkeypatch):
    stand_in_gpu.use(monkeypatch)
    ops.softmax.operator()
    call = graph_call("softmax", "inference", (...,), {})
    learned = count(monkeypatch, library_ops, "repeat")
    for rows in range(1, 80):
        x = t(rows, 8)
        torch.testing.assert_close(call(x), x.softmax(-1))
    assert len(learned) == 64


def test_a_function_that_no_graph_says_the_order_of(monkeypatch):
    """None between tensors, a number that a graph holds as a tensor, and one that varies."""
    stand_in_gpu.use(monkeypatch)
    ops.rmsnorm.operator()
    by_tensor = graph_call("rmsnorm", "inference", (..., ..., ...), {"eps_number": None, "offset": 0})
    by_number = graph_call("rmsnorm", "inference", (..., ..., None), {"eps_number": ..., "offset": 1})
    x, w = t(6, 32), t(32)
    for eps in (1e-2, 1e-1, 1.0):
        torch.testing.assert_close(by_tensor(x, w, torch.tensor([eps])), torch.nn.functional.rms_norm(x, (32,), w, eps))
        torch.testing.assert_close(by_number(x, w, eps), torch.nn.functional.rms_norm(x, (32,), w + 1, eps))


def test_results_that_the_graph_does_not_expect(monkeypatch):
    """They are noticed where they are made, once: a graph of fixed sizes has no checks of its own."""
    entry("softmax")
    x = t(6, 32)
    with torch.no_grad():
        _, (code,) = run_and_get_code(torch.compile(entry("softmax"), fullgraph=True), x)
    assert "[((6, 32), (32, 1), " in code and code.count("assert_size_stride(") == 1  # of the input
    stand_in_gpu.use(monkeypatch)
    for layout in ((6, 31), (32, 1), False), ((6, 32), (1, 6), False):
        with pytest.raises(AssertionError, match="softmax"):
            graph_call("softmax", "inference", (...,), {}, [layout])(x)


def test_every_length_by_one_graph(monkeypatch):
    compiled = torch.compile(entry("softmax"), fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        results(compiled, [t(5, 7)], True)
        stand_in_gpu.use(monkeypatch)
        for _ in range(3):
            for rows, columns in ((6, 32), (9, 16), (3, 33)):
                x = t(rows, columns)
                torch.testing.assert_close(results(compiled, [x], True), results(lambda x: x.softmax(-1), [x], True), rtol=1e-4, atol=1e-5)


def test_an_offset_that_varies():
    q, k = t(1, 2, 1, 8), t(1, 2, 6, 8)
    compiled = torch.compile(lambda q, k, at: ops.attention(q, k, k, causal=True, offset=at), fullgraph=True, dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for at in (2, 3, 4):
            torch.testing.assert_close(compiled(q, k, at), ops.attention(q, k, k, causal=True, offset=at))


def test_what_an_op_changes(monkeypatch, tmp_path):
    (tmp_path / "rows.yaml").write_text(ROWS)
    op = dtkernels.register(tmp_path / "rows.yaml")
    compiled = torch.compile(lambda n, k, t: (op(n, k, t), k @ k.mT), fullgraph=True)
    place = torch.tensor([3, 0, 5])
    for stand_in in (False, True, True):
        if stand_in:
            stand_in_gpu.use(monkeypatch)
        n, k = t(3, 32), t(8, 32)
        others = k[1:3].clone()
        found, product = compiled(n, k, place)
        assert torch.equal(k[place], 2 * n) and torch.equal(found, k) and (stand_in or torch.equal(k[1:3], others))  # it clears them
        torch.testing.assert_close(product, k @ k.mT)


def test_an_op_registered_anew(tmp_path):
    path, inputs = tmp_path / "mixed.yaml", (t(3, 4), t(3, 4))
    path.write_text(BLEND)
    first = dtkernels.register(path)
    held = torch.compile(first, fullgraph=True)
    held(*inputs)
    path.write_text(BLEND.replace("2 *", "3 *"))
    other = torch.compile(dtkernels.register(path), fullgraph=True)
    for call, factor in ((held, 2), (other, 3), (held, 2)):
        torch.testing.assert_close(call(*inputs), factor * torch.maximum(*inputs))


def test_an_inductor_that_cannot_be_told(monkeypatch):
    """The call goes through torch.library, as any operator's."""

    def refuse(*args):
        raise AttributeError("no such function in this torch")

    form, op = entry("softmax"), torch.ops.dtkernels.softmax_inference.default
    monkeypatch.setattr(inductor_lowering, "lower", refuse)
    monkeypatch.setattr(library_ops, "_lowered", set())
    monkeypatch.delitem(lowering.lowerings, op, raising=False)
    x = t(4, 9)
    with torch.no_grad():
        found, (code,) = run_and_get_code(torch.compile(lambda x: form(form(x)), fullgraph=True), x)
    torch.testing.assert_close(found, x.softmax(-1).softmax(-1))
    assert "graph_call" not in code and "torch.ops.dtkernels.softmax_inference" in code
    monkeypatch.delitem(lowering.lowerings, op)  # the tests after this one register theirs


def output(text: str, *args: str, **environment: str) -> str:
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    done = subprocess.run([sys.executable, "-c", text, *args], env=kept | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


CACHED = """
import torch, dtkernels
from torch._dynamo.utils import counters
from dtkernels.runtime.bind import library_ops
x = torch.randn(4, 16, requires_grad=True)
w = torch.ones(16)
for op in ("softmax", "rmsnorm"):
    getattr(dtkernels.ops, op).operator()
    library_ops.ensure(op)
softmax, rmsnorm = torch.ops.dtkernels.softmax, torch.ops.dtkernels.rmsnorm
found = torch.compile(lambda x: rmsnorm(softmax(x), w, eps_number=1e-3), fullgraph=True)(x)
torch.testing.assert_close(found, torch.nn.functional.rms_norm(x.softmax(-1), (16,), w, 1e-3))
(gradient,) = torch.autograd.grad(found.sum(), x)
wanted = torch.autograd.grad(torch.nn.functional.rms_norm(x.softmax(-1), (16,), w, 1e-3).sum(), x)
torch.testing.assert_close(gradient, wanted[0])
print(counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"] > 0)
"""
FOUND = """
import pathlib, runpy, sys, torch
code = next(p for p in pathlib.Path(sys.argv[1]).glob("**/*.py") if "rmsnorm_forward" in (text := p.read_text()) and "graph_call(" in text)
print(len(runpy.run_path(str(code))["call"]([torch.randn(4, 16), torch.ones(16)])) > 1)
"""
NEVER_IMPORTED = """
import sys, torch, dtkernels
dtkernels.ops.softmax(torch.randn(3, 4, requires_grad=True)).sum().backward()
torch.ops.dtkernels.softmax if hasattr(torch.ops.dtkernels, "softmax") else None
print("torch._inductor.lowering" in sys.modules)
"""


def test_code_from_the_disk_in_another_process(tmp_path):
    """As a cached graph, and by itself in a process that has called no op."""
    assert [output(CACHED) for _ in range(2)] == ["0 False", "1 True"]
    assert output(FOUND, str(tmp_path)) == "True"


def test_inductor_is_not_imported_for_eager_calls():
    assert output(NEVER_IMPORTED) == "False"
