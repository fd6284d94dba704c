# ruff: noqa: E501 (programs read best on one line)
"""Products that others read at many places, and products that several read: made once."""

import pytest

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.target import target
from dtkernels.lang import parse

GATED = "Func g, u, f; In X, C, W; Var b, c, y, x; RVar k; g[b, c] = rdot(C[b, k], W[c, k], k); u[b, c, y, x] = X[b, c, y, x] * (1 + g[b, c]); f[b, c, y, x] = u[b, c, y, x] * sigmoid(u[b, c, y, x]);"
SHARED = "Func f, g; In A, B, C; Var x, y; RVar k; f[x, y] = tanh(rdot(A[x, k], B[k, y], k)) * C[x, y] * rdot(A[x, k], B[k, y], k); g[y] = rsum(exp(rdot(A[x, k], B[k, y], k)), x);"


def default(text: str, outputs: tuple[str, ...], sizes: dict[str, int]):
    return default_schedule(prepare_algorithm(parse(text).algorithm, outputs), outputs, sizes, 2, target("h200"))


@pytest.mark.parametrize("side", [17, 27, 64, 200])
def test_a_gate_of_channels_is_made_once_and_what_is_gated_in_place(side):
    found = default(GATED, ("f",), dict(b=32, c=256, y=side, x=side, k=1024))
    assert "g" not in found.fused() and "u" in found.fused()


def test_a_product_that_two_results_need_is_made_once():
    algorithm = prepare_algorithm(parse(SHARED).algorithm, ("f", "g"))
    assert sum("rdot" in str(d) for d in algorithm.definitions) == 1, algorithm
