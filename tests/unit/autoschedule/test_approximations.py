"""When default schedules ask for functions of few instructions: in any kernel of 16-bit results that would hide their error."""

import pytest

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.analysis.product_types import InputTypes
from dtkernels.codegen.target import target
from dtkernels.lang import parse

HEAD = "Func f; In A, B; Var x, y; f[x, y] = B[x, y] + "
PRODUCT = "Func y, f; In X, W; Var m, n; RVar k; y[m, n] = rdot(X[m, k], W[n, k], k); f[m, n] = "


def asked(text: str, itemsize: int = 2, gpu: str = "h100") -> set[str]:
    algorithm = prepare_algorithm(parse(text).algorithm, ("f",))
    schedule = default_schedule(algorithm, ("f",), {label: 2048 for label in algorithm.labels}, itemsize, target(gpu))
    return {str(a) for p in schedule.primitives if p.name == "approximate" for a in p.args}


@pytest.mark.parametrize(("text", "wanted"), {
    HEAD + "where(A[x, y] > 0, A[x, y], expm1(A[x, y]));": {"expm1"},
    HEAD + "log1p(exp(A[x, y])) + log(B[x, y]);": {"log1p", "log"},
    HEAD + "0.5 * A[x, y] * (1 + erf(A[x, y]));": {"erfc"},
    HEAD + "(erfc(A[x, y]) - 2 * erfc(B[x, y])) * 3;": set(), HEAD + "(1 - erfc(A[x, y])) * 2;": set(),
    HEAD + "(tanh(A[x, y]) * B[x, y] - tanh(B[x, y])) * 2;": set(),
    PRODUCT + "tanh(y[m, n]) * log1p(exp(y[m, n]));": {"tanh", "log1p"},
    "Func s, f; In A, B; Var x, y; s[x, y] = erfc(A[x, y]) * B[x, y]; f[x, y] = cast(s[x, y] * B[x, y], fp32);": set(),
    "Func s, f; In A; Var x; RVar k; s[x] = rsum(exp(A[x, k]), k); f[x] = log(s[x]);": set(),
}.items())  # fmt: skip
def test_functions_of_16_bit_results(text, wanted):
    assert asked(text) == wanted
    assert asked(text, gpu="mi300x") == set() and not asked(text, itemsize=4) - {"rdot"}


def test_results_of_float32_keep_their_functions_beside_16_bit_products():
    """``B`` in float32 makes the result float32; the product is still of 16 bits."""
    algorithm = prepare_algorithm(parse("Func y, f; In X, W, B; Var m, n; RVar k; y[m, n] = rdot(X[m, k], W[n, k], k); f[m, n] = tanh(y[m, n]) + B[n];").algorithm, ("f",))
    for bias, wanted in (("bf16", {"tanh"}), ("fp32", set())):
        types = InputTypes((("X", "bf16"), ("W", "bf16"), ("B", bias)))
        schedule = default_schedule(algorithm, ("f",), {label: 2048 for label in algorithm.labels}, types, target("h100"))
        assert {str(a) for p in schedule.primitives if p.name == "approximate" for a in p.args} == wanted
