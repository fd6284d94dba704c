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
ONE = ("sin", "cos", "log1p", "expm1", "round", "ceil", "trunc", "sign", "isnan", "isinf", "isfinite")
DIFFERENTIABLE = ("sin(A[x])", "cos(A[x])", "log1p(A[x] * A[x])", "expm1(A[x])", "round(A[x]) * A[x]", "ceil(A[x]) + trunc(A[x]) * A[x]", "sign(A[x]) * A[x]")
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
@pytest.mark.parametrize("terms", ["cos(A[x, y])", "log1p(abs(A[x, y]))", "clamp(A[x, y], 0.25, 1)", "pow(A[x, y], 2) * pow(abs(A[x, y]), 1.5)", "where(isnan(A[x, y]), 1, 0)", "sign(A[x, y]) + ceil(A[x, y])"])
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
