"""What tells calls apart: of each pair the second was once taken for the first, which was known from before."""

import numpy as np
import stand_in_gpu
import torch
from pytest import fixture, mark, raises

import dtkernels
from dtkernels.ops.registry import SPECS
from dtkernels.runtime.bind.operator import Operator
from dtkernels.runtime.torch_support import tf32

CHOSEN = """op: chosen
doc: one of two
parameters:
  second: the second
algorithm: |
  Func chosen;
  In A, B;
  SIn s, t;
  Var x;
  Param second = false;
  chosen[x] = where(second, B[x] * t, A[x] * s);
"""
MOVED = """op: moved
doc: elements further on
algorithm: |
  Func moved;
  In A, B;
  SIn by;
  Var x;
  moved[x] = A[x] + B[x + by];
"""


@fixture
def gpu(monkeypatch):
    stand_in_gpu.use(monkeypatch)


def op_of(name: str) -> Operator:
    return Operator(SPECS / f"{name}.yaml")


def own(tmp_path, text: str) -> Operator:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    return dtkernels.register(path)


def mirrored(*shape: int) -> torch.Tensor:
    """A tensor that torch has noted to be the negative of what lies in memory."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(shape, generator=generator, dtype=torch.complex64).conj().imag
    assert found.is_neg()
    return found


def test_one_tensor_or_number_given_twice_is_that_of_its_place(gpu, tmp_path):
    op, x, y = own(tmp_path, CHOSEN), torch.ones(8), torch.full((8,), 3.0)
    for _ in range(2):
        for second, wanted in ((True, 3 * 0.75), (False, 0.5)):
            op(x, x, 0.5, 0.5, second=second)
            torch.testing.assert_close(op(x, y, 0.5, 0.75, second=second), torch.full((8,), wanted))


def test_a_whole_number_of_any_type_is_itself(gpu, tmp_path):
    op, zeros, x = own(tmp_path, MOVED), torch.zeros(8), torch.arange(8.0)
    for by in (1.0, 2.0, np.int64(1), np.int64(2), np.float32(3), np.float64(4), 1, 2, True, torch.tensor(3)):
        assert op(zeros, x, by)[0] == int(by), by
    for by in (3.5, np.float32(3.5), torch.tensor(3.5)):
        with raises(TypeError, match="moved: by is .*; allowed: an integer, as it stands in an index"):
            op(zeros, x, by)


@mark.parametrize("before", [0, 1, 2])
def test_a_parameter_is_a_whole_number_or_a_truth_value_whatever_was_called_before(gpu, before):
    op, x, w = op_of("rmsnorm"), torch.ones(4, 16), torch.ones(16)
    op(x, w, 1e-6, offset=before), op(x, w, 1e-6, offset=before)
    for offset in (0.0, 1.0, -1.0, 2.0, False, True, None, torch.tensor(1), "1"):
        with raises(TypeError, match="rmsnorm: parameter offset is .*; allowed: an integer"):
            op(x, w, 1e-6, offset=offset)
    for offset in (1, 2, np.int64(1), np.int32(2)):
        assert op(x, w, 1e-6, offset=offset)[0, 0].round() == 1 + offset
    gated = op_of("geglu")
    gated(x, x, exact=True), gated(x, x)
    for exact in (1, 0, 1.0, np.int64(1)):
        with raises(TypeError, match="geglu: parameter exact is .*; allowed: True or False"):
            gated(x, x, exact=exact)


@mark.parametrize("name", ["softmax", "relu"])
@mark.parametrize("shape", [(4, 16), (4, 16, 1), (16,), (1, 1)])
def test_a_tensor_noted_to_be_negative_is_read_as_such(gpu, name, shape):
    op, eager = op_of(name), {"relu": torch.relu, "softmax": lambda x: torch.softmax(x, -1)}[name]
    x = mirrored(*shape)
    for given in (x, x.resolve_neg().clone(), x, torch.empty_strided(x.shape, x.stride()).copy_(x), x):
        torch.testing.assert_close(op(given), eager(given))
        mine, theirs = (given.detach().requires_grad_() for _ in range(2))
        for grad in (torch.ones_like(given), torch.empty_strided(x.shape, x.stride()).copy_(x), x):
            torch.testing.assert_close(torch.autograd.grad(op(mine), mine, grad), torch.autograd.grad(eager(theirs), theirs, grad))
    if not shape[1:]:
        torch.testing.assert_close(op(x[0].relu()), eager(x[0].relu()))
        torch.testing.assert_close(op(x[0]), eager(x[0]))


def test_a_program_reads_a_tensor_noted_to_be_negative_as_such():
    double = dtkernels.compile("Func y; In A; Var i; y[i] = 2 * A[i]; y.block(i:16); y.tensorize(i:16);")
    torch.testing.assert_close(double(mirrored(40)), 2 * mirrored(40))
    torch.testing.assert_close(dtkernels.ops.relu(mirrored(40)), torch.relu(mirrored(40)))


@mark.parametrize("shape", [(4, 8), ()])
def test_a_call_is_traced_though_one_like_it_is_known(gpu, shape):
    op, x = op_of("relu"), torch.randn(shape)
    op(x), op(x)
    traced = torch.jit.trace(op, x, check_trace=False)
    torch.testing.assert_close(traced(x - 3), torch.relu(x - 3))
    torch.testing.assert_close(traced(x + 3), torch.relu(x + 3))


def test_a_trace_of_the_reference_is_made_of_torchs_own_operations(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    traced = torch.jit.trace(dtkernels.ops.relu, torch.ones(3), check_trace=False)
    assert "aten::" in str(traced.graph) and "dtkernels::" not in str(traced.graph)
    torch.testing.assert_close(traced(torch.linspace(-1, 1, 5)), torch.linspace(-1, 1, 5).relu())


def test_a_known_call_that_is_differentiated_is_made_inside_transforms_of_others(gpu):
    op, x = op_of("softmax"), torch.randn(3, 4, 8)
    w = torch.randn(4, 8, requires_grad=True)
    for _ in range(3):
        torch.testing.assert_close(torch.func.grad(lambda t: (op(w) * t).sum())(x[0]), torch.softmax(w, -1))
        torch.testing.assert_close(torch.vmap(lambda t: (op(w) * t).sum())(x), (torch.softmax(w, -1) * x).sum((1, 2)))
        op(w).sum().backward()


def test_a_tensor_without_a_pointer_is_like_none_that_is_known(gpu):
    op, x = op_of("softmax"), torch.randn(4, 8)
    with torch.no_grad():
        op(x), op(x)
        with raises(RuntimeError, match="Functionalize"):  # torch's own words; the kernel would have read at 0
            torch.func.functionalize(op)(x)


def test_gradients_of_several_at_once_are_refused_in_one_line(gpu):
    op, x = op_of("softmax"), torch.randn(4, 8, requires_grad=True)
    for _ in range(3):
        y = op(x)
        with raises(NotImplementedError, match="softmax backward: torch.vmap is not supported, nor are batches of gradients"):
            torch.autograd.grad(y, x, torch.ones(2, 4, 8), is_grads_batched=True, retain_graph=True)
        with raises(NotImplementedError, match="softmax backward: torch.vmap is not supported"):
            torch.vmap(lambda g, y=y: torch.autograd.grad(y, x, g, retain_graph=True)[0])(torch.ones(2, 4, 8))
        y.sum().backward()


def test_a_number_of_the_cpu_is_taken_to_the_inputs_and_no_other():
    op, (x, w) = op_of("dyt"), (torch.ones(shape, device="meta") for shape in ((2, 3), (3,)))
    assert op.bind((x, w, w, torch.tensor(0.5)), {}).scalars["alpha"].device.type == "meta"
    with raises(ValueError, match="dyt: alpha is on meta, the inputs are on cpu; allowed: one device"):
        op(torch.ones(2, 3), torch.ones(3), torch.ones(3), torch.ones(1, device="meta"))


@mark.parametrize("interpreted", [True, False])
def test_the_precision_of_products_may_be_set_by_either_name(monkeypatch, interpreted):
    if not interpreted:
        stand_in_gpu.use(monkeypatch)
    op, a = op_of("mmsigmoid"), torch.randn(16, 16)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for name, values in (("allow_tf32", (True, False)), ("fp32_precision", ("tf32", "ieee"))):
            for value, wanted in zip(values, ("tf32", "ieee")):
                setattr(torch.backends.cuda.matmul, name, value)
                assert tf32.dot_precision() == wanted
                for _ in range(2):
                    torch.testing.assert_close(op(a, a), torch.sigmoid(a @ a), atol=1e-5, rtol=1e-5)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    product = dtkernels.compile("Func y; In A, B; Var i, j; RVar k; y[i, j] = rdot(A[i, k], B[k, j], k); y.block(i:16, j:16); y.tensorize(i:16, j:16, k:16);")
    assert product.module.dot_precision is tf32.dot_precision
