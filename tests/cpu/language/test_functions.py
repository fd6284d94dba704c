# ruff: noqa: E501 (programs read best on one line)
"""The elementwise functions against torch: values at ordinary and special numbers, kernel and reference, and gradients."""

import math

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from oracle import check
from small_programs import binary, unary

import dtkernels
from dtkernels.lang import parse
from dtkernels.lang.expr import FUNCTIONS
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator

inf, nan = math.inf, math.nan
SPECIAL = torch.tensor([0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 1.0, -1.0, 1e-8, -1e-6, 3e-4, 0.1, 20.25, -20.25, 87.0, -100.0, 8388609.0, 4194304.5, 1e30, inf, -inf, nan])
ONE = ("sin", "cos", "atan", "asin", "acos", "log1p", "expm1", "erfc", "round", "ceil", "trunc", "sign", "isnan", "isinf", "isfinite")
DIFFERENTIABLE = ("sin(A[x])", "cos(A[x])", "atan(A[x])", "asin(A[x] / 4)", "acos(A[x] / 4)", "log1p(A[x] * A[x])", "expm1(A[x])", "erfc(A[x])", "1 + erf(A[x])", "A[x] * tanh(log1p(exp(A[x])))", "round(A[x]) * A[x]", "ceil(A[x]) + trunc(A[x]) * A[x]", "sign(A[x]) * A[x]")
BOTH = pytest.mark.parametrize("reference", [False, True], ids=["kernel", "reference"])


def op_of(text: str) -> Operator:
    return Operator(Spec("of_functions", "One function.", parse(text)))


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """As torch has it in float64, to 3 float32 roundings; NaNs and infinities where it has them."""
    torch.testing.assert_close(got.double(), want.double(), rtol=4e-7, atol=1e-37, equal_nan=True)


@BOTH
@pytest.mark.parametrize("fn", ONE)
def test_one_argument(fn, reference, monkeypatch):
    if reference:
        monkeypatch.delenv("TRITON_INTERPRET")
    value = f"where({fn}(A[x]), 1, 0)" if FUNCTIONS[fn].is_boolean else f"{fn}(A[x])"
    a = SPECIAL[SPECIAL.abs() != 1e30] if fn in ("sin", "cos") else SPECIAL
    want = getattr(torch, fn)(a.double())
    if fn == "expm1":
        want = want.float()  # exp of 100 is infinite in float32
    near(op_of(f"Func f; In A; Var x; f[x] = {value};")(a), want.double())


def whole_range(dtype: torch.dtype) -> torch.Tensor:
    """Numbers of every size and sign, many near 0, 1 and where functions change their form; zeros, denormals, infinities and a NaN."""
    sizes = 2.0 ** torch.linspace(-149, 128, 2000, dtype=torch.float64)
    dense = [torch.linspace(-low, low, 3001, dtype=torch.float64) for low in (12, 1.2, 0.05)]
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, -1.5, 1e-45, -1e-45, inf, -inf, nan], dtype=torch.float64)
    return torch.cat([sizes, -sizes, *dense, 1 + dense[2], 1 - dense[2], special]).to(dtype)


#: function -> roundings to float32 that it may be off, and the relative error of the form that approximate() asks for
ERRORS = {"expm1": (2.5, 2**-17), "log1p": (2.5, 2**-16.5), "erfc": (64, 2**-14.5), "log": (2, 2**-16.5), "log2": (2, 2**-16.5), "tanh": (4, 2**-11), "erf": (4, None), "exp": (2, None), "sigmoid": (4, None)}


@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize("fn", ERRORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_the_whole_range(fn, dtype, approximate):
    """Against float64, in the dtype of the result: infinities, NaNs and the signs of zeros included."""
    roundings, rough = ERRORS[fn]
    if approximate and rough is None:
        return
    a, limits = whole_range(dtype), torch.finfo(dtype)
    if dtype == torch.bfloat16:
        a = a[(a == 0) | ~(a.abs() < limits.tiny)]  # the interpreter reads its denormals as 0
    text = f"Func f; In A; Var x; f[x] = {fn}(A[x]); f.block(x:1024); f.tensorize(x:1024);" + f"f.approximate({fn});" * approximate
    got, want = dtkernels.compile(text)(a), getattr(torch, fn)(a.double())
    rounding = {torch.float32: 0.0, torch.float16: limits.eps / 2, torch.bfloat16: limits.eps}[dtype]  # the interpreter rounds toward 0 to bfloat16
    assert torch.equal(got.isnan(), want.isnan())
    error = rounding + (rough if approximate else roundings * 2**-23)
    finite = want.abs() < 0.999 * limits.max
    off = finite & ~((got.double() - want).abs() <= error * want.abs() + (limits.tiny * limits.eps if dtype == torch.float16 else limits.tiny))
    assert not off.any(), (a[off][:5], got[off][:5], want[off][:5])
    assert got[want.abs() > 1.001 * limits.max].isinf().all()
    zeros = (want == 0) & (a == 0) & (fn != "tanh")
    assert torch.equal(got[zeros].signbit(), want[zeros].signbit())


@pytest.mark.parametrize("text", ["A[x] * tanh(log1p(exp(A[x])))", "A[x] * tanh(where(A[x] > 20, A[x], log1p(exp(A[x]))))", "A[x] * tanh(where(A[x] > 20, A[x], log1p(exp(minimum(A[x], 21)))))"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_mish_keeps_its_digits(text, dtype):
    """As a quotient also where the logarithm of 1 + exp(a) had lost them."""
    a = whole_range(dtype)
    a = a[a.abs() < inf]
    got, want = dtkernels.compile(f"Func f; In A; Var x; f[x] = {text}; f.block(x:1024); f.tensorize(x:1024);")(a), torch.nn.functional.mish(a.double())
    error = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps * 1.001
    torch.testing.assert_close(got.double(), want, rtol=error, atol=torch.finfo(dtype).tiny, equal_nan=True)


def test_gelu_keeps_its_digits_far_from_zero():
    a = torch.linspace(-12, 12, 4001)
    got, want = dtkernels.compile(unary("0.5 * A[x] * (1 + erf(A[x] * 0.7071067811865476))"))(a), 0.5 * a.double() * torch.erfc(a.double() * -0.7071067811865476)
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=1e-37)


@BOTH
def test_the_angle_of_two_numbers(reference, monkeypatch):
    if reference:
        monkeypatch.delenv("TRITON_INTERPRET")
    numbers = torch.tensor([0.0, 1, -1, 2, -0.5, 1e-20, -3e7, 1e38, inf, -inf, nan])
    a, b = (t.reshape(-1) for t in torch.meshgrid(numbers, numbers, indexing="ij"))
    near(op_of("Func f; In A, B; Var x; f[x] = atan2(A[x], B[x]);")(a, b), torch.atan2(a.double(), b.double()))


@pytest.mark.parametrize("reference", [False, True], ids=["kernel", "reference"])
def test_no_gradient_passes_through_detach(reference, monkeypatch):
    """A straight-through estimator; the value is that of the argument."""
    if reference:
        monkeypatch.delenv("TRITON_INTERPRET")
    op = op_of("Func r, f; In A, B; Var x; r[x] = round(A[x] * 4) / 4; f[x] = (A[x] + detach(r[x] - A[x])) * B[x] + detach(B[x]);")
    a, b = torch.randn(5, generator=torch.Generator().manual_seed(0)).requires_grad_(), torch.full((5,), 3.0).requires_grad_()
    found, rounded = op(a, b), (a * 4).round() / 4
    near(found.detach(), (rounded * b + b).detach().double())
    got = torch.autograd.grad(found.sum(), (a, b))
    near(got[0], b.detach().double())
    near(got[1], rounded.detach().double())


def test_detach_inside_a_compiled_graph(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    op = op_of("Func f; In A; Var x; f[x] = A[x] * A[x] + detach(A[x]) * A[x];")
    a = torch.tensor([1.0, 2.0, -3.0]).requires_grad_()
    (got,) = torch.autograd.grad(torch.compile(lambda t: op(t) * 1, backend="aot_eager")(a).sum(), a)
    assert got.tolist() == [3.0, 6.0, -9.0]


@BOTH
def test_powers(reference, monkeypatch):
    if reference:
        monkeypatch.delenv("TRITON_INTERPRET")
    a, b = (t.reshape(-1) for t in torch.meshgrid(*[torch.tensor([0.0, 1, -1, 2, -2, 0.5, 3.25, -1.5, inf, -inf, nan]), torch.tensor([0.0, 1, 2, 3, -1, -3, 0.5, -0.5, 2.5, 7, inf, -inf, nan])], indexing="ij"))
    near(op_of("Func f; In A, B; Var x; f[x] = pow(A[x], B[x]);")(a, b), torch.pow(a.double(), b.double()))


@pytest.mark.parametrize("power", ["0", "1", "2", "3", "4", "5", "8", "0.5", "1.5", "-0.5", "-1", "-2", "-3", "-1.5"])
def test_a_constant_power(power):
    a = torch.tensor([1.5, 2.0, 0.25, -3.0, -0.5, 1.0, 7.0])
    a = a if float(power) == int(float(power)) else a.abs()
    check(unary(f"pow(A[x], {power})"), a)
    leaf, exact = a.clone().requires_grad_(), a.double().requires_grad_()
    (got,) = torch.autograd.grad(op_of(f"Func f; In A; Var x; f[x] = pow(A[x], {power});")(leaf).sum() + 0 * leaf.sum(), leaf)
    (want,) = torch.autograd.grad(torch.pow(exact, float(power)).sum() + 0 * exact.sum(), exact)
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=1e-12)


def test_small_whole_powers_are_products():
    source = dtkernels.compile(unary("pow(A[x], 2) + pow(A[x], 3) + pow(A[x], p)").replace("Var", "Param p = 4; Var")).source
    assert "A * A + A * A * A + A * A * (A * A)" in source and "float_power" not in source


@BOTH
def test_clamp(reference, monkeypatch):
    if reference:
        monkeypatch.delenv("TRITON_INTERPRET")
    a = torch.tensor([-2.0, -1, 0, 0.5, 1, 2, inf, -inf, nan])
    near(op_of("Func f; In A; Var x; f[x] = clamp(A[x], -1, 1);")(a), a.clamp(-1, 1))
    near(op_of("Func f; In A; Var x; f[x] = clamp(A[x], 1, -1);")(a), a.clamp(1, -1))
    low, high = torch.linspace(-1, 1.5, 9), torch.linspace(1, 0.5, 9)
    near(op_of("Func f; In A, L, H; Var x; f[x] = clamp(A[x], L[x], H[x]);")(a, low, high), torch.clamp(a, low, high))
    if not reference:  # compiled programs have none
        check("Func f; In A; Var x; f[x] = clamp(x, 2, 5) * A[x]; f.block(x:4); f.tensorize(x:4);", a[:6])


def test_gradients_at_the_bounds_of_a_clamp_are_those_of_torch():
    rows = [(1, 1, 2), (2, 1, 2), (0, 1, 2), (3, 1, 2), (1.5, 2, 1), (0, 2, 1), (3, 2, 1), (1.5, 1, 1), (1, 1, 1), (0.5, 1, 1)]
    ours = [t.float().clone().requires_grad_() for t in torch.tensor(rows).T]
    theirs = [t.float().clone().requires_grad_() for t in torch.tensor(rows).T]
    got = torch.autograd.grad(op_of("Func f; In A, L, H; Var x; f[x] = clamp(A[x], L[x], H[x]);")(*ours).sum(), ours)
    assert [g.tolist() for g in got] == [g.tolist() for g in torch.autograd.grad(torch.clamp(*theirs).sum(), theirs)]
    a = torch.tensor([-1.0, 1.0, 0.0, 1.5]).requires_grad_()
    assert torch.autograd.grad(op_of("Func f; In A; Var x; f[x] = clamp(A[x], -1, 1);")(a).sum(), a)[0].tolist() == [1, 1, 1, 0]


def in_torch(expression: str, **tensors: torch.Tensor) -> torch.Tensor:
    return eval(expression.replace("[x]", ""), {**{fn: getattr(torch, fn) for fn in FUNCTIONS if hasattr(torch, fn)}, **tensors})


@pytest.mark.parametrize("expression", [*DIFFERENTIABLE, "pow(A[x] * A[x], B[x])", "pow(abs(A[x]) + 0.5, 2.5)", "clamp(A[x], B[x] - 1, B[x])", "sin(A[x]) * cos(B[x])"])
def test_gradients(expression):
    generator = torch.Generator().manual_seed(1)
    given = {n: torch.randn(23, generator=generator) for n in "AB" if n in expression}
    ours, exact = ({n: made(t).requires_grad_() for n, t in given.items()} for made in (torch.clone, torch.Tensor.double))
    got, want = op_of(f"Func f; In {', '.join(given)}; Var x; f[x] = {expression};")(**ours), in_torch(expression, **exact)
    adjoint = torch.randn(23, generator=generator)
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=1e-6)
    for a, b in zip(torch.autograd.grad(got, [*ours.values()], adjoint), torch.autograd.grad(want, [*exact.values()], adjoint.double())):
        torch.testing.assert_close(a.double(), b, rtol=4e-6, atol=4e-6)


def test_a_power_of_zero_has_the_gradients_of_torch():
    a, b = torch.tensor([0.0, 0.0, 2.0]), torch.tensor([2.5, 0.0, 0.0])
    ours, theirs = ([t.clone().requires_grad_() for t in (a, b)] for _ in range(2))
    got = torch.autograd.grad(op_of("Func f; In A, B; Var x; f[x] = pow(A[x], B[x]);")(*ours).sum(), ours)
    for mine, want in zip(got, torch.autograd.grad(torch.pow(*theirs).sum(), theirs)):
        torch.testing.assert_close(mine, want)


@pytest.mark.parametrize("schedule", ["f.tensorize(y:0);", "f.tensorize(x:2, y:4); f.block(x:2);", "f.tensorize(x:2, y:4); f.block(x:2); f.split(y:2);", ""])
@pytest.mark.parametrize("terms", ["cos(A[x, y])", "log1p(abs(A[x, y]))", "erfc(A[x, y])", "clamp(A[x, y], 0.25, 1)", "pow(A[x, y], 2) * pow(abs(A[x, y]), 1.5)", "where(isnan(A[x, y]), 1, 0)", "sign(A[x, y]) + ceil(A[x, y])"])
def test_in_reductions_of_odd_lengths(terms, schedule):
    """Past the extent elements read as 0, of which some functions make something else."""
    torch.manual_seed(0)
    check(f"Func f; In A; Var x; RVar y; f[x] = rsum({terms}, y); {schedule}", torch.randn(4, 9) + 0.003)


def test_numbers_scalars_and_halves():
    torch.manual_seed(0)
    a = torch.randn(11)
    check("Func f; In A; SIn s; Var x; f[x] = A[x] * sin(2) + cos(s) + pow(2, A[x]) + pow(s, 3.5) + round(2.5) + expm1(x / 10) + log1p(len(x)) + ceil(s); f.block(x:8); f.tensorize(x:8);", a, 0.3)
    check(unary("sin(A[x]) + pow(A[x], 2) + clamp(round(A[x]), -1, 1)"), a.half(), dtype="float16")
    check(binary("where(isfinite(A[x]) and not isnan(B[x]), sign(A[x]), trunc(B[x]))"), a, a * 7)


def test_names_of_these_functions_may_be_declared():
    a, b = torch.randn(5), torch.randn(5)
    got = op_of("Func sign; In cos, sin; Var x; sign[x] = cos[x] * sin(sin[x]);")(a, b)
    torch.testing.assert_close(got, a * b.sin())


@pytest.mark.parametrize("text, error", [("sin(A[x] > 0)", "a number is wanted here"), ("isnan(A[x]) + 1", "a number is wanted here"), ("clamp(A[x], 0)", "clamp takes 3 argument"), ("where(sin(A[x]), 1, 0)", "a boolean is wanted here")])
def test_what_does_not_fit_is_refused(text, error):
    with pytest.raises(dtkernels.DTError, match=error):
        parse(f"Func f; In A; Var x; f[x] = {text};")
