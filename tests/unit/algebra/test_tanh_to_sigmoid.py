"""One and a hyperbolic tangent are a sigmoid."""

import pytest

from dtkernels.algebra.rules.tanh_to_sigmoid import tanh_to_sigmoid
from dtkernels.lang import parse


@pytest.mark.parametrize(("before", "after"), {
    "1 + tanh(A[x])": "2 * sigmoid(2 * A[x])",
    "tanh(A[x]) + 1": "2 * sigmoid(2 * A[x])",
    "1 - tanh(A[x])": "2 * sigmoid(-2 * A[x])",
    "A[x] * (1 + tanh(0.25 * A[x])) * -0.5": "-1 * A[x] * sigmoid(0.5 * A[x])",
    "exp(1 + tanh(1 + tanh(A[x])))": "exp(2 * sigmoid(4 * sigmoid(2 * A[x])))",
    "2e-30 * (1 + tanh(1e30 * A[x] * 1e30))": "2 * 2e-30 * sigmoid(2 * 1e+30 * A[x] * 1e+30)",
    "2 + tanh(A[x])": None, "tanh(A[x]) - 1": None, "(1 + tanh(A[x])) / (0.5 * A[x])": "2 * sigmoid(2 * A[x]) / (0.5 * A[x])",
}.items())  # fmt: skip
def test_one_and_a_tangent(before, after):
    (made,) = tanh_to_sigmoid(parse(f"Func f; In A; Var x; f[x] = {before};").algorithm).definitions
    assert str(made) == f"f[x] = {after or before};"
