"""Functions of functions that have a form of their own, which keeps more digits or takes fewer instructions."""

import pytest

from dtkernels.algebra.rules.erf_to_erfc import erf_to_erfc
from dtkernels.algebra.rules.tanh_of_log1p import tanh_of_log1p
from dtkernels.lang import parse


def changed(rule, before: str) -> str:
    (made,) = rule(parse(f"Func f; In A; Var x; f[x] = {before};").algorithm).definitions
    return str(made).removeprefix("f[x] = ").removesuffix(";")


@pytest.mark.parametrize(("before", "after"), {
    "1 + erf(A[x])": "erfc(-1 * A[x])", "erf(A[x]) + 1": "erfc(-1 * A[x])", "1 - erf(A[x])": "erfc(A[x])",
    "0.5 * A[x] * (1 + erf(A[x] * 0.5))": "0.5 * A[x] * erfc(-0.5 * A[x])",
    "exp(1 - erf(1 + erf(A[x])))": "exp(erfc(erfc(-1 * A[x])))", "2 + erf(A[x])": None, "erf(A[x]) - 1": None, "erf(A[x])": None,
}.items())  # fmt: skip
def test_one_and_an_error_function(before, after):
    assert changed(erf_to_erfc, before) == (after or before)


@pytest.mark.parametrize(("before", "exponent", "least"), [
    ("tanh(log1p(exp(A[x])))", "minimum(A[x], 20)", None),
    ("tanh(log1p(exp(minimum(A[x], 30))))", "minimum(A[x], 30)", None),
    ("tanh(log1p(exp(minimum(A[x], 50))))", "minimum(minimum(A[x], 50), 20)", None),
    ("tanh(where(A[x] > 20, A[x], log1p(exp(A[x]))))", "minimum(A[x], 20)", "A[x] > 20"),
])  # fmt: skip
def test_the_tangent_of_a_softplus(before, exponent, least):
    n = f"exp({exponent}) * (exp({exponent}) + 2)"
    quotient = f"{n} / ({n} + 2)"
    assert changed(tanh_of_log1p, before) == (f"where({least}, 1.0, {quotient})" if least else quotient)


@pytest.mark.parametrize("text", ["tanh(log1p(A[x]))", "tanh(where(A[x] > 5, A[x], log1p(exp(A[x]))))", "tanh(where(A[x] > 20, 0, log1p(exp(A[x]))))", "log1p(exp(A[x]))"])
def test_other_tangents_stay(text):
    assert changed(tanh_of_log1p, text) == text
