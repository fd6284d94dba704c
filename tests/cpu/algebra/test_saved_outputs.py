"""A backward tests the output in place of the input that the output picks: the input need not be kept then."""

import pytest
import torch

from dtkernels.lang import Program, Schedule, parse
from dtkernels.lang.expr import Dot
from dtkernels.lang.spec import Spec
from dtkernels.ops.registry import shipped
from dtkernels.runtime.bind.operator import Operator

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
    "Func y; In A; Var x; y[x] = where(A[x] > 0, A[x], 0.125 * A[x]);": {"y"},
    "Func y; In A; Var x; y[x] = where(A[x] <= 0, 0, A[x]);": {"y"},
    "Func y; In A; Var x; y[x] = where(A[x] >= 0, A[x], 0.125 * A[x]);": {"A"},  # what rounds to -0 is not below 0
    "Func y; In A; Var x; y[x] = where(A[x] > 0, A[x], -A[x]);": {"A"},
    "Func y; In A; Var x; y[x] = maximum(A[x], -0.5);": {"A"},
}
relu, U = torch.relu, "u[m, n]"
#: of the product u of A and B: what backward reads of it besides the gradient that arrives, and what it is in torch
PRODUCTS = {
    f"maximum({U}, 0)": ("ABf", lambda u, z: relu(u)),
    f"maximum(0, {U} + z[n])": ("ABfz", lambda u, z: relu(u + z)),
    "maximum(rdot(A[m, k], B[k, n], k) + z[n], 0)": ("ABfz", lambda u, z: relu(u + z)),
    f"minimum({U}, 0)": ("ABf", lambda u, z: -relu(-u)),
    f"where({U} > 0, {U}, 0)": ("ABf", lambda u, z: relu(u)),
    f"where({U} > 0, {U}, 0.125 * {U})": ("ABf", lambda u, z: torch.where(u > 0, u, u / 8)),
    f"where({U} <= 0, {U} / 8, {U})": ("ABf", lambda u, z: torch.where(u > 0, u, u / 8)),
    f"where({U} < 0, {U} / 8, {U})": ("AB", lambda u, z: torch.where(u < 0, u / 8, u)),  # what rounds to -0 is not below 0
    f"where({U} > 0, {U}, -{U})": ("AB", lambda u, z: torch.where(u > 0, u, -u)),
    f"where({U} > 0, {U}, exp({U}) - 1)": ("AB", lambda u, z: torch.where(u > 0, u, u.exp() - 1)),
    f"maximum({U}, 1)": ("AB", lambda u, z: relu(u - 1) + 1),  # 1.001 is 1 in bfloat16
    f"maximum({U}, -1)": ("AB", lambda u, z: relu(u + 1) - 1),
    f"maximum({U}, 0) + z[n]": ("ABz", lambda u, z: relu(u) + z),
    f"z[n] * maximum({U}, 0)": ("ABz", lambda u, z: relu(u) * z),
    f"maximum({U}, z[n])": ("ABz", torch.maximum),
}
TORCH = {
    "maximum(A[x], 0);": lambda a, b: a.clamp(min=0), "minimum(1.5, A[x]);": lambda a, b: a.clamp(max=1.5),
    "maximum(A[x], -0.5);": lambda a, b: a.clamp(min=-0.5), "maximum(A[x], 0.3);": lambda a, b: a.clamp(min=0.3), "maximum(A[x] * 0.001, 0);": lambda a, b: (a * 0.001).clamp(min=0),
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
@pytest.mark.parametrize("text", [t for t in READ if "s[x]" not in t and "where" not in t])
def test_gradients_are_those_of_the_input(text, dtype):
    """Values around the bounds, the smallest of the dtype among them. At a bound the constant takes the gradient, as in ReLU."""
    tiny = torch.finfo(dtype).smallest_normal  # the interpreter takes what is below it for 0 in bfloat16
    edge = [0.0, -0.0, tiny, -tiny, tiny * 2, 0.3, 0.30078125, 0.299, 1.4990234375, 1.5078125, torch.inf, -torch.inf, 3.0, -0.5, 65504.0, 1e-6]
    a = torch.tensor(edge, dtype=dtype).reshape(*((4, 4) if "z" in text else (16,)))
    b = torch.linspace(-2, 2, 16, dtype=dtype)
    truth = next(f for end, f in TORCH.items() if text.endswith(end))
    leaf, exact = a.clone().requires_grad_(), a.double().requires_grad_()
    given = (leaf, b) if "B" in text else (leaf,)
    result, wanted = op_of(text)(*given), truth(exact, b.double())
    (got,) = torch.autograd.grad(result, leaf, torch.ones_like(result))
    (want,) = torch.autograd.grad(wanted, exact, torch.ones_like(wanted))
    bound = next((torch.tensor(float(n)).double() for n in ("1.5", "0.3", "-0.5") if n in text), 0.0)
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


# -- products -------------------------------------------------------------------------------------------------------------


def product_op(text: str) -> Operator:
    return op_of(f"Func u, f; In A, B{', z' if 'z' in text else ''}; Var m, n; RVar k; u[m, n] = rdot(A[m, k], B[k, n], k); f[m, n] = {text};")


@pytest.mark.parametrize("text", PRODUCTS)
def test_a_product_is_not_made_again_for_a_test_that_the_output_answers(text):
    variant = product_op(text).variant((), frozenset(), 0)
    backward = variant.pair(variant.plain.inputs).backward.algorithm
    made = sum(isinstance(n, Dot) for d in backward.definitions for n in d.expr.walk())
    read = PRODUCTS[text][0]
    assert ("f" in backward.inputs, made) == ((True, 2) if "f" in read else (False, 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", PRODUCTS)
def test_gradients_of_what_a_product_goes_through(text, dtype):
    """Whole numbers, so that many products are at the bounds exactly."""
    torch.manual_seed(0)
    given = [torch.randint(-1, 2, shape).to(dtype) for shape in ((19, 5), (5, 23), (23,))][: 3 if "z" in text else 2]
    leaves, exact = [t.clone().requires_grad_() for t in given], [t.double().requires_grad_() for t in given]
    result, wanted = product_op(text)(*leaves), PRODUCTS[text][1](exact[0] @ exact[1], exact[-1])
    adjoint = torch.randint(-2, 3, result.shape).to(dtype)
    found, truth = torch.autograd.grad(result, leaves, adjoint), torch.autograd.grad(wanted, exact, adjoint.double())
    for got, want in zip((result, *found), (wanted, *truth)):
        torch.testing.assert_close(got.double(), want.detach(), rtol=2 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("text", ["maximum(u[m, n] + z[n], 0)", "where(u[m, n] + z[n] > 0, u[m, n] + z[n], 0)"])
def test_a_nan_is_on_neither_side(text):
    a, b, z = torch.ones(3, 5), torch.ones(5, 7), torch.ones(7, requires_grad=True)
    a[1] = torch.nan
    result = product_op(text)(a, b, z)
    (got,) = torch.autograd.grad(result, z, torch.ones(3, 7))
    assert got.tolist() == [2.0] * 7


def test_statistics_that_are_results_too_are_kept_in_float32():
    """A mean rounded to bfloat16 moves every element of its channel, some of them across the bound of the ReLU."""
    torch.manual_seed(0)
    text = "Func m, v, y; In A; Var n, c; m[c] = rmean(A[n, c], n); v[c] = rmean((A[n, c] - m[c]) * (A[n, c] - m[c]), n); y[n, c] = maximum((A[n, c] - m[c]) * rsqrt(v[c] + 0.00001) + 0.7, 0);"
    a = (torch.randn(301, 64) + 1).bfloat16().requires_grad_()
    g = torch.randn(301, 64).bfloat16()
    op = Operator(Spec("normed", "", parse(text + "m.compile(); v.compile(); y.compile();")))
    (found,) = torch.autograd.grad(op(a)[2], a, g)
    exact = a.detach().double().requires_grad_()
    normed = torch.relu((exact - exact.mean(0)) * torch.rsqrt(exact.var(0, correction=0) + 0.00001) + 0.7)
    (wanted,) = torch.autograd.grad(normed, exact, g.double())
    assert (found - wanted).norm() < 0.006 * wanted.norm()
