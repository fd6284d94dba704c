"""A backward tests the output in place of the input that the output picks: the input need not be kept then."""

import pytest
import torch

from dtkernels.lang import Program, Schedule, parse
from dtkernels.lang.spec import Spec
from dtkernels.ops.registry import shipped
from dtkernels.runtime.operator import Operator

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: program -> what backward reads besides the gradient that arrives
READ = {
    "Func y; In A; Var x; y[x] = maximum(A[x], 0);": {"y"},
    "Func y; In A; Var x; y[x] = minimum(1.5, A[x]);": {"y"},
    "Func y; In A; Var x; y[x] = maximum(A[x], 0.3);": {"A"},  # 0.3 is another number in each dtype
    "Func y; In A; Var x; y[x] = maximum(A[x] * 0.001, 0);": {"A"},  # a product may round to 0
    "Func y; In A, B; Var x; y[x] = maximum(A[x], 0) * B[x];": {"A", "B"},
    "Func y; In A; Var x, z; y[x, z] = maximum(A[z, x], 0);": {"y"},
    "Func y, s; In A; Var x; y[x] = maximum(A[x], 0); s[x] = A[x] * A[x];": {"A"},  # which is read anyway
}
TORCH = {
    "maximum(A[x], 0);": lambda a, b: a.clamp(min=0), "minimum(1.5, A[x]);": lambda a, b: a.clamp(max=1.5),
    "maximum(A[x], 0.3);": lambda a, b: a.clamp(min=0.3), "maximum(A[x] * 0.001, 0);": lambda a, b: (a * 0.001).clamp(min=0),
    "maximum(A[x], 0) * B[x];": lambda a, b: a.clamp(min=0) * b, "maximum(A[z, x], 0);": lambda a, b: a.t().clamp(min=0),
}  # fmt: skip


def op_of(text: str) -> Operator:
    return Operator(Spec("picks", "", Program(parse(text).algorithm, Schedule(()))))


@pytest.mark.parametrize("text", READ)
def test_the_output_is_read_where_its_test_is_the_inputs(text):
    variant = op_of(text).variant((), frozenset(), 0)
    pair = variant.pair(variant.plain.inputs)
    assert set(pair.backward.algorithm.inputs) - set(pair.gradient.adjoints.values()) == READ[text]
    assert pair.forward.outputs == variant.outputs, "nothing is saved besides"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", [t for t in READ if "s[x]" not in t])
def test_gradients_are_those_of_the_input(text, dtype):
    """Values around the bounds, the smallest of the dtype among them. At a bound the constant takes the gradient, as in ReLU."""
    tiny = torch.finfo(dtype).smallest_normal  # the interpreter takes what is below it for 0 in bfloat16
    edge = [0.0, -0.0, tiny, -tiny, tiny * 2, 0.3, 0.30078125, 0.299, 1.4990234375, 1.5078125, torch.inf, -torch.inf, 3.0, -3.0, 65504.0, 1e-6]
    a = torch.tensor(edge, dtype=dtype).reshape(*((4, 4) if "z" in text else (16,)))
    b = torch.linspace(-2, 2, 16, dtype=dtype)
    truth = next(f for end, f in TORCH.items() if text.endswith(end))
    leaf, exact = a.clone().requires_grad_(), a.double().requires_grad_()
    given = (leaf, b) if "B" in text else (leaf,)
    result, wanted = op_of(text)(*given), truth(exact, b.double())
    (got,) = torch.autograd.grad(result, leaf, torch.ones_like(result))
    (want,) = torch.autograd.grad(wanted, exact, torch.ones_like(wanted))
    bound = next((torch.tensor(float(n)).double() for n in ("1.5", "0.3") if n in text), 0.0)
    inner = a.double() != bound  # clamp passes the gradient at its bound, where a constant's maximum does not
    torch.testing.assert_close(got.double()[inner], want[inner], rtol=torch.finfo(dtype).eps, atol=0)
    assert not got[~inner].any()


def test_relu_keeps_its_output_and_not_its_input():
    x = torch.randn(64, requires_grad=True)
    y = shipped("relu")(x)
    saved = [t.untyped_storage().data_ptr() for t in y.grad_fn.saved_tensors]
    assert y.untyped_storage().data_ptr() in saved and x.untyped_storage().data_ptr() not in saved


def test_relu_of_nan_and_infinities_is_torchs():
    x = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 1.0, -1.0], requires_grad=True)
    torch.testing.assert_close(shipped("relu")(x), torch.relu(x), equal_nan=True)
    (got,) = torch.autograd.grad(shipped("relu")(x).sum(), x)
    assert got.tolist() == [0, 0, 1, 0, 1, 0]
