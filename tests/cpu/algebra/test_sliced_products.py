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


@pytest.mark.parametrize("rows, biases", [(60, 63), (63, 60), (71, 70), (60, 61)])
def test_tensors_that_end_before_or_behind_the_slices(rows, biases, tmp_path):
    """What the slices take of a shorter tensor is 0, whatever the other one has there: in the product that the algebra makes of them, and in its gradients."""
    slices = ("n + 0", "n + len(n)", "n + 2 * len(n)")
    body = " ".join(f"f{i}[m, n] = tanh(rdot(X[m, k], W[{at}, k], k) + c[{at}]);" for i, at in enumerate(slices))
    text = f"Func f0, f1, f2, y; In X, W, c; Var m, n; RVar k; Extent n = X[1]; {body} y[m, n] = f0[m, n] * f1[m, n] + f2[m, n];"
    (tmp_path / "y.yaml").write_text(f"op: y\ndoc: |\n  Three slices.\nalgorithm: |\n  {text}\n")
    op = dtkernels.register(tmp_path / "y.yaml")
    X, W, c = (torch.randn(shape, dtype=torch.float64).float() for shape in ((19, 21), (rows, 21), (biases,)))
    given = [t.clone().requires_grad_() for t in (X, W, c)]
    exact = [t.double().requires_grad_() for t in (X, W, c)]
    x, w, b = exact
    w = torch.cat((w, w.new_zeros(80 - rows, 21)))[:63]
    b = torch.cat((b, b.new_zeros(80 - biases)))[:63]
    p, q, r = (x @ w.T + b).tanh().chunk(3, 1)
    want, got = p * q + r, op(*given)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad(got.sum(), given)
    for a, e in zip(ours, torch.autograd.grad(want.sum(), exact)):
        torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=1e-4)
