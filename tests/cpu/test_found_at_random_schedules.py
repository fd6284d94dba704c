# ruff: noqa: E501 (programs read best on one line)
"""What tests/fuzz.py found of schedules, shortened: programs that were wrong or ended in an error."""

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from oracle import check


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 0.5


@pytest.mark.parametrize("g, left, rest", [("A[x, k] * N[k, x]", "g[x, k]", "g.block(x:4, k:2);"), ("cast(A[x, k], bf16)", "N[k, x]", "f.stage(N); f.block(x:8); f.tensorize(k:4);")])
def test_a_buffer_has_the_type_of_products_that_are_too_small_for_the_matrix_units(g, left, rest):
    """The wrapper named the type only where a kernel has the instruction."""
    right = "cast(B[k, y], bf16)" if left == "g[x, k]" else "g[y, k]"
    a, b, n, c = rand(8, 4), rand(4, 8, seed=1).half(), torch.arange(32).reshape(4, 8), rand(8, 8, seed=2)
    check(f"""Func g, f; In A, B, N, C; Var x, y; RVar k; g[x, k] = {g}; f[x, y] = rdot({left}, {right}, k) + C[x, y] + B[y / 2, x];
    {rest}""", a, b, n, c, dtype="float32", operands="bfloat16")  # fmt: skip
