"""Ops inside PyTorch: torch.library's own checks, torch.compile, torch.export, autocast, checkpointing, tensors without data."""

import copy
import dataclasses
import io
from functools import partial

import pytest
import torch
import torch._dynamo.testing
import triton.language  # noqa: F401  here, while it is to interpret: Inductor would import it where these tests have it otherwise
from op_cases import MAKERS, SMALL, normal
from torch import nn
from torch_entries import entry_of, gradients, leaves

import dtkernels
from dtkernels.runtime.bind import library_ops

CASES = SMALL | {
    "relu": (3, 7),
    "softmax": (2, 3, 17),
    "dyt": (2, 3, 17),
    "mmsigmoid": (2, 5, 7),
    "two_mm": (5, 7, 17, 16),
    "attention": (2, 4, 2, 9, 11, 16, 16),
}
MINE = """
op: blend
doc: Twice the larger of two tensors, or of a tensor and a number, with a sum over rows beside it.
parameters:
  shifted: a bias is added
algorithm: |
  Func blend, total;
  In A, B, bias;
  SIn level;
  Var x, y;
  Param shifted = false;
  blend[x, y] = 2 * maximum(A[x, y] * level, B[x, y]) + where(shifted, bias[y], 0);
  total[x] = rsum(blend[x, y], y);
  blend.compile(); total.compile();
"""


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    """Eager torch on the same algorithm: what is tested here is how calls get there."""
    monkeypatch.delenv("TRITON_INTERPRET")
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    path = tmp_path_factory.mktemp("specs") / "blend.yaml"
    path.write_text(MINE)
    return dtkernels.register(path)


def case_of(op: str, dtype: torch.dtype = torch.float32):
    return MAKERS[op](CASES[op], dtype, "cpu")


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("op", MAKERS)
def test_opcheck(op, grad):
    case = case_of(op)
    inputs = leaves(case, grad)
    name, tensors, named = entry_of(op, lambda: case.ours(*inputs, **case.options))
    torch.library.opcheck(getattr(torch.ops.dtkernels, name).default, tuple(tensors), named)


def test_opcheck_of_options():
    q, k = normal(2, 4, 9, 16, dtype=torch.float32, device="cpu"), normal(2, 2, 11, 16, dtype=torch.float32, device="cpu", seed=1)
    for options in ({"causal": True}, {"mask": torch.rand(2, 1, 9, 11) > 0.3}, {"mask": torch.randn(9, 11)}, {"scale": torch.tensor(0.3)}):
        _, tensors, named = entry_of("attention", lambda options=options: dtkernels.ops.attention(q, k, k, **options))
        torch.library.opcheck(torch.ops.dtkernels.attention.default, tuple(tensors), named)


def test_opcheck_of_a_registered_spec(mine):
    a, b, bias = (normal(*s, dtype=torch.float32, device="cpu", seed=i).requires_grad_() for i, s in enumerate([(5, 7), (5, 7), (7,)]))
    for args, options in (((a, b, None, 0.5), {}), ((a, b, bias, torch.tensor(0.5)), {"shifted": True})):
        given = {n: v for n, v in zip(("A", "B", "bias", "level"), args) if v is not None}
        _, tensors, named = entry_of("blend", lambda given=given, options=options: mine(**given, **options))
        torch.library.opcheck(torch.ops.dtkernels.blend.default, tuple(tensors), named)


@pytest.mark.parametrize("op", MAKERS)
def test_opcheck_of_the_inner_entries(op):
    """What backward is made of, caught as it is called."""
    case = case_of(op)
    inputs = leaves(case)
    name, tensors, named = entry_of(op, lambda: case.ours(*inputs, **case.options))
    caught = []

    class Catch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "dtkernels":
                caught.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Catch():
        result = getattr(torch.ops.dtkernels, name)(*tensors, **named)
        sum(r.sum() for r in (result if isinstance(result, tuple) else (result,))).backward()
    assert [f.name() for f, *_ in caught] == [f"dtkernels::{op}_forward", f"dtkernels::{op}_backward"]
    for func, args, numbers in caught:
        detached = torch.utils._pytree.tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, args)
        torch.library.opcheck(func, detached, numbers)


@pytest.mark.parametrize("op", MAKERS)
def test_compile_is_one_graph_forward_and_backward(op):
    case = case_of(op)
    inputs = leaves(case)
    grad = torch.randn_like(case.result())
    compiled = torch.compile(lambda *i: case.ours(*i, **case.options) * 1.5, fullgraph=True, backend="aot_eager")
    wanted = gradients(lambda *i: case.ours(*i, **case.options) * 1.5, inputs, grad)
    for got, good in zip(gradients(compiled, inputs, grad), wanted):
        torch.testing.assert_close(got, good)


def test_compile_of_a_registered_spec(mine):
    a, b = (normal(5, 7, dtype=torch.float32, device="cpu", seed=i).requires_grad_() for i in range(2))
    compiled = torch.compile(lambda a, b: mine(A=a, B=b, level=0.5), fullgraph=True, backend="aot_eager")
    for got, good in zip(compiled(a, b), mine(A=a, B=b, level=0.5)):
        torch.testing.assert_close(got, good)


@pytest.mark.parametrize("policy", ["kernel", "fuse"])
def test_the_spec_says_what_the_compiler_sees(mine, policy, monkeypatch):
    seen = []

    def backend(graph, inputs):
        seen.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    monkeypatch.setattr(mine, "manifest", dataclasses.replace(mine.manifest, compiled=policy))
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    compiled = torch.compile(
        lambda a, b: mine(a, b, level=2.0)[0], fullgraph=True, backend=torch._dynamo.backends.common.aot_autograd(fw_compiler=backend)
    )
    torch.testing.assert_close(compiled(a, b), mine(a, b, level=2.0)[0])
    assert ("dtkernels.blend_inference.default" in seen) == (policy == "kernel") and ("aten.maximum.default" in seen) == (policy == "fuse")


@pytest.mark.parametrize("op", ["softmax", "dyt", "mmsigmoid", "two_mm", "attention"])
def test_dynamic_shapes_compile_once(op):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    case = case_of(op)
    compiled = torch.compile(lambda *i: case.ours(*i, **case.options), fullgraph=True, backend=counter)
    for size in (5, 8, 13):
        inputs = list(case.inputs)
        shape = list(inputs[0].shape)
        shape[-2] = size
        inputs[0] = torch.randn(shape).requires_grad_()
        torch._dynamo.mark_dynamic(inputs[0], len(shape) - 2)
        result = compiled(*inputs)
        torch.testing.assert_close(result, case.ours(*inputs, **case.options))
        result.sum().backward()
        assert inputs[0].grad.shape == inputs[0].shape
    assert counter.frame_count == 1


@pytest.mark.parametrize("k, l", [(16, 5), (5, 16)])
def test_a_product_that_is_kept_by_size_compiles_once(k, l):  # noqa: E741
    """Rows are a symbol: with ``l > k`` it would hang on them whether the product is smaller than an operand, and it is kept as torch does."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(dtkernels.ops.two_mm, fullgraph=True, backend=counter)
    b, c = torch.randn(k, l, requires_grad=True), torch.randn(l, 6, requires_grad=True)
    for rows in (4, 9, 30):
        a = torch.randn(rows, k, requires_grad=True)
        torch._dynamo.mark_dynamic(a, 0)
        result = compiled(a, b, c)
        found = torch.autograd.grad(result.square().sum(), (a, b, c))
        for got, want in zip(found, torch.autograd.grad((a @ b @ c).square().sum(), (a, b, c))):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    assert counter.frame_count == 1


def test_static_sizes_decide_in_the_compiled_graph_as_they_do_in_eager():
    for rows, k, inner, kept in ((12, 16, 5, True), (20, 3, 16, False)):
        torch._dynamo.reset()
        shapes = []

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None, shapes=shapes):
                found = func(*args, **(kwargs or {}))
                shapes.extend(tuple(t.shape) for t in found) if func.name() == "dtkernels::two_mm_forward" else None
                return found

        inputs = [torch.randn(s, requires_grad=True) for s in ((rows, k), (k, inner), (inner, 6))]
        compiled = torch.compile(lambda a, b, c: dtkernels.ops.two_mm(a, b, c) * 1, backend="aot_eager", dynamic=False)
        compiled(*inputs)
        with Watch():
            compiled(*inputs).sum().backward()
        assert ((rows, inner) in shapes) == kept and (rows, 6) in shapes


def test_a_position_that_grows_compiles_once():
    """Decoding: the offset follows the keys there are, and reaches the op as a number that the compiler has as a symbol."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def decode(q, k):
        return dtkernels.ops.attention(q, k, k, causal=True, offset=k.shape[2] - q.shape[2], window=(6, None))

    compiled = torch.compile(decode, fullgraph=True, backend=counter)
    for keys in (9, 12, 17):
        q, k = torch.randn(2, 4, 3, 16, requires_grad=True), torch.randn(2, 2, keys, 16)
        torch._dynamo.mark_dynamic(k, 2)
        torch.testing.assert_close(compiled(q, k), decode(q, k))
        compiled(q, k).sum().backward()
    assert counter.frame_count == 1


def test_an_offset_that_varies_compiles_once():
    """A cache of fixed length counts its tokens in a Python number: the graph takes it as a symbol."""
    q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    work = partial(dtkernels.ops.attention, q, k, v, causal=True)
    compiled = torch.compile(lambda at: work(offset=at), fullgraph=True, dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for at in (2, 3, 4):
            torch.testing.assert_close(compiled(at), work(offset=at))


def test_inductor_runs_the_compiled_graph():
    x = torch.randn(4, 33, requires_grad=True)
    compiled = torch.compile(lambda x: dtkernels.ops.softmax(x * 2) + 1, fullgraph=True)
    torch.testing.assert_close(compiled(x), (x * 2).softmax(-1) + 1)
    (got,) = torch.autograd.grad(compiled(x).pow(2).sum(), x)
    (wanted,) = torch.autograd.grad(((x * 2).softmax(-1) + 1).pow(2).sum(), x)
    torch.testing.assert_close(got, wanted)


class Net(nn.Module):
    """A module that calls ops."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.weight, self.bias, self.alpha = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8)), nn.Parameter(torch.tensor([0.5]))

    def forward(self, x):
        x = dtkernels.ops.dyt(self.inner(x), self.alpha, self.weight, self.bias)
        return dtkernels.ops.softmax(dtkernels.ops.relu(x))


def test_export_with_a_dynamic_batch_saves_and_loads():
    net, x = Net(), torch.randn(3, 8)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=64)},))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for rows in (3, 17):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(loaded(x), net(x))


def test_copies_and_pickles_of_modules():
    net, x = Net(), torch.randn(3, 8)
    wanted = net(x)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(net), torch.load(buffer, weights_only=False)):
        torch.testing.assert_close(other(x), wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    net, x = Net(), torch.randn(3, 8, requires_grad=True)
    wanted = torch.autograd.grad(net(x).pow(2).sum(), x)
    y = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=reentrant)
    y.pow(2).sum().backward()
    torch.testing.assert_close(x.grad, wanted[0])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast_lowers_products_and_follows_torch_elsewhere(compiled):
    a, b = torch.randn(4, 8, requires_grad=True), torch.randn(8, 5, requires_grad=True)

    def work(a, b):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return dtkernels.ops.mmsigmoid(a, b), dtkernels.ops.relu(a), dtkernels.ops.softmax(a.bfloat16())

    run = torch.compile(work, fullgraph=True, backend="aot_eager") if compiled else work
    product, plain, soft = run(a, b)
    assert (product.dtype, plain.dtype, soft.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    product.float().sum().backward()
    assert a.grad.dtype == torch.float32 and b.grad.shape == b.shape


@pytest.mark.parametrize("op", [op for op in MAKERS if op != "cross_entropy"])  # whose cases hold the target apart
def test_tensors_without_data_have_the_right_shapes_and_dtypes(op):
    for dtype in (torch.float32, torch.bfloat16):
        case = case_of(op, dtype)
        wanted = case.result()
        meta = case.ours(*(t.to("meta") for t in case.inputs), **case.options)
        assert (meta.shape, meta.dtype, meta.device.type) == (wanted.shape, wanted.dtype, "meta")
        with torch._subclasses.FakeTensorMode() as mode:
            fake = case.ours(*(mode.from_tensor(t) for t in case.inputs), **case.options)
        assert (fake.shape, fake.dtype, fake.stride()) == (wanted.shape, wanted.dtype, wanted.stride())


def test_indices_without_data():
    logits, target = torch.zeros(3, 5, device="meta"), torch.zeros(3, dtype=torch.int64, device="meta")
    rows = dtkernels.ops.cross_entropy(logits, target, reduction="none")
    assert (rows.shape, rows.dtype, rows.device.type) == ((3,), torch.float32, "meta")


def test_what_there_is_no_rule_for_says_so():
    x = torch.randn(3, 4)
    with pytest.raises(NotImplementedError, match="softmax: torch.vmap is not supported; allowed: leading dimensions"):
        torch.func.vmap(dtkernels.ops.softmax)(x)
    for call in (lambda: torch.func.jvp(dtkernels.ops.softmax, (x,), (x,)), lambda: dual(x)):
        with pytest.raises(NotImplementedError, match="softmax: forward-mode differentiation is not supported"):
            call()


def dual(x):
    with torch.autograd.forward_ad.dual_level():
        return dtkernels.ops.softmax(torch.autograd.forward_ad.make_dual(x, x))


def test_functional_gradients():
    x = torch.randn(3, 4)
    got = torch.func.grad(lambda x: dtkernels.ops.softmax(x)[0, 0])(x)
    torch.testing.assert_close(got, torch.func.grad(lambda x: x.softmax(-1)[0, 0])(x))


def test_a_call_in_a_graph_names_its_algorithm(mine, tmp_path):
    """torch keeps compiled graphs on disk by their text: an op of the same name that computes something else must not be taken for it."""
    (tmp_path / "blend.yaml").write_text(MINE.replace("2 * maximum", "3 * maximum"))
    named = []

    def backend(graph, inputs):
        named.extend(n.kwargs["dt_spec"] for n in graph.graph.nodes if "dtkernels" in str(n.target))
        return graph.forward

    arguments = torch.rand(2, 3), torch.rand(2, 3)
    other = dtkernels.register(tmp_path / "blend.yaml")
    for op in (mine, other):
        torch.compile(lambda a, b, op=op: op(a, b, level=0.5)[0], backend=backend, fullgraph=True)(*arguments)
    assert named == [mine.manifest.spec, other.manifest.spec] and named[0] != named[1]


@pytest.mark.parametrize("changed", [("In A, B, bias;", "In A, bias;"), ("2 * maximum", "3 * maximum"), ("algorithm: |", "compiled: fuse\nalgorithm: |")])
def test_an_op_registered_anew_leaves_those_who_hold_the_one_before_what_they_hold(mine, tmp_path, changed):
    path, arguments = tmp_path / "blend.yaml", tuple(torch.rand(2, 3) for _ in range(2))
    path.write_text(MINE.replace(*changed).replace("B[x, y]", "A[x, y]" if changed[1] == "In A, bias;" else "B[x, y]"))
    by_name = torch.compile(lambda *given: dtkernels.ops.blend(*given, level=0.5)[0], backend="aot_eager")
    held = torch.compile(lambda *given: mine(*given, level=0.5)[0], backend="aot_eager")
    ways = lambda f, given: [f(*given), torch.func.grad(lambda a: f(a, *given[1:]).sum())(given[0])]  # noqa: E731
    wanted = [held(*arguments), by_name(*arguments), *ways(lambda *given: mine(*given, level=0.5)[0], arguments)]
    new = dtkernels.register(path)
    assert new is not mine and library_ops.known[new.entry] is new and library_ops.known[mine.entry] is mine
    torch.testing.assert_close([held(*arguments), held(*arguments), *ways(lambda *given: mine(*given, level=0.5)[0], arguments)], wanted)
    fewer = arguments[: len(new.manifest.inputs) - 1]
    anew = by_name(*fewer)
    torch.testing.assert_close(anew, new(*fewer, level=0.5)[0])
    torch.testing.assert_close(ways(lambda *given: new(*given, level=0.5)[0], fewer)[0], anew)
    assert changed[0] == "algorithm: |" or not torch.equal(anew, wanted[0])
