"""Funcs that hold others one after another, stored by the kernel that computes those, against float64."""

import pytest
import torch

import dtkernels

TEXT = """Func p, q, f, y; In A, B, V; Var m, j, g, n; {extent}
p[m, j] = A[m, j] * B[m, j];  q[m, j] = A[m, j] + exp(B[m, j]);
f[m, g] = {joined};
y[m, n] = rdot(f[m, g], V[g + 0, n], g);
q.fuse_at(p, j); f.fuse_at(p, j); f.store(); p.block(m:2, j:16); p.tensorize(m:2, j:16);
y.block(m:16, n:16); y.tensorize(m:16, n:16, g:16); y.compile();"""
JOINED = "p[m, g - 0] + q[m, g - len(j)]"


@pytest.mark.parametrize("columns", [16, 21])
def test_one_kernel_stores_both_slices(columns):
    program = dtkernels.compile(TEXT.format(extent="Extent g = 2 * len(j);", joined=JOINED))
    A, B, V = torch.randn(5, columns), torch.randn(5, columns), torch.randn(2 * columns, 13)
    a, b, v = A.double(), B.double(), V.double()
    torch.testing.assert_close(program(A, B, V).double(), torch.cat((a * b, a + b.exp()), 1) @ v, rtol=1e-5, atol=1e-5)
    assert program.source.count("@triton.jit\ndef p_kernel") == 1 and "p_out" not in program.source


@pytest.mark.parametrize("times, joined", [(3, JOINED), (2, "p[m, g - 0] - q[m, g - len(j)]"), (2, "p[m, g - 0] + q[m, g - 2 * len(j)]")])
def test_a_func_that_is_not_its_slices_alone_is_not_stored_by_their_kernel(times, joined):
    """Nothing would write the rest of a longer one."""
    with pytest.raises(dtkernels.DTError) as refused:
        dtkernels.compile(TEXT.format(extent=f"Extent g = {times} * len(j);", joined=joined))
    assert "an output is computed over all its labels: found f is not" in str(refused.value)
