"""Gradients of rows that two labels count, ``A[8 * i + u]``: each row tells both, and products stay products."""

import pytest
import torch

import dtkernels
from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import differentiable_form
from dtkernels.lang import expr as ex
from dtkernels.lang import parse

DILATED = (
    "Func s, t, dilated; In Q, K, V; Var u, i, n; RVar j, d; Extent u = 4; Extent i = Q[0] / 4; Extent j = K[0] / 4;"
    "s[u, i, j] = rdot(Q[4 * i + u, d], K[4 * j + u, d], d); t[u, i] = rsum(exp(s[u, i, j]), j);"
    "dilated[u, i, n] = rdot(exp(s[u, i, j]), V[4 * j + u, n], j) / t[u, i];"
)


def dilated(q, k, v):
    q, k, v = (x[: len(x) // 4 * 4].unflatten(0, (-1, 4)).transpose(0, 1) for x in (q, k, v))
    return torch.softmax(q @ k.mT, -1) @ v


def test_each_gradient_is_a_product_over_the_other_rows_of_its_phase():
    backward = gradient(differentiable_form(parse(DILATED).algorithm, ("dilated",)), ("dilated",), ("Q", "K", "V")).backward
    for name in ("Q", "K", "V"):
        (dot,) = [n for n in backward[f"d_{name}"].expr.walk() if isinstance(n, (ex.Dot, ex.Reduce))]
        assert isinstance(dot, ex.Dot) and len(dot.labels) == 1, backward[f"d_{name}"]


@pytest.mark.parametrize("keys", [20, 22])
def test_attention_over_every_fourth_position(tmp_path, keys):
    (tmp_path / "dilated.yaml").write_text(f"op: dilated\ndoc: |\n  Attention over every fourth position.\nalgorithm: |\n  {DILATED}\n")
    op = dtkernels.register(tmp_path / "dilated.yaml")
    torch.manual_seed(0)
    leaves = [torch.randn(n, 16, requires_grad=True) for n in (24, keys, keys)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    weight = torch.randn(4, 6, 16)
    got = torch.autograd.grad((op(*leaves) * weight).sum(), leaves)
    truth = torch.autograd.grad((dilated(*wide) * weight).sum(), wide)
    for g, t in zip(got, truth):
        assert (g - t).norm() <= 1e-6 * t.norm()
