"""Slices of a product, made by a kernel of the whole product or where they are taken, against float64."""

import pytest
import torch

import dtkernels

TEXT = """Func p, y; In X, W, c; Var m, n, g; RVar k; Extent n = X[1];
p[m, g] = rdot(X[m, k], W[g, k], k) + c[g + 0];  y[m, n] = tanh(p[m, n + 0]) * p[m, n + 2 * len(n)] + p[m, n + len(n)];
y.block(m:16, n:16); y.tensorize(m:16, n:16{}); """
FORMS = ("p.block(m:16, g:32); p.tensorize(m:16, g:32, k:16);", "p.fuse_at(y, n);")


@pytest.mark.parametrize("rows", [63, 71])
@pytest.mark.parametrize("form", FORMS)
def test_slices(form, rows):
    """``W`` may have more rows than the slices, of which nothing is read."""
    X, W, c = torch.randn(19, 21), torch.randn(rows, 21), torch.randn(63)
    got = dtkernels.compile(TEXT.format("" if "block" in form else ", k:16") + form)(X, W, c)
    a, b, d = (X.double() @ W.double().T[:, :63] + c.double()).chunk(3, 1)
    torch.testing.assert_close(got.double(), a.tanh() * d + b, rtol=1e-5, atol=1e-5)
