"""A product and what is added to it are saved together: rounded apart they lose their sign, and gates of a few elements in a thousand with it."""

import torch
import torch.nn.functional as F

import dtkernels
from dtkernels.algebra.autodiff.gradient import gradient, savable_products
from dtkernels.algebra.pipeline import differentiable_form
from dtkernels.lang import parse
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator

GATED = "Func gated; In X, W, b, V, c; Var t, o; RVar i; gated[t, o] = (rdot(X[t, i], W[o, i], i) + b[o]) * maximum(rdot(X[t, i], V[o, i], i) + c[o], 0);"


def test_both_sums_are_saved_with_their_biases():
    form = differentiable_form(parse(GATED).algorithm, ("gated",))
    names = tuple(p.name for p in savable_products(form, ("gated",)))
    found = gradient(form, ("gated",), ("X", "W", "b", "V", "c"), names)
    assert len(found.products) == 2 == sum(n in found.backward.inputs for n in names)
    assert {"b", "c"}.isdisjoint(found.backward.inputs) and "+ c[o]" in str(found.forward[names[0]].expr)


def test_gates_near_zero_keep_their_sign(tmp_path):
    (tmp_path / "gated.yaml").write_text(f"op: gated\ndoc: |\n  x * relu(y).\nalgorithm: |\n  {GATED}\n")
    op = dtkernels.register(tmp_path / "gated.yaml")
    dtype = torch.bfloat16
    torch.manual_seed(0)
    x, w, v = (torch.randn(n, 1024).to(dtype) for n in (24, 40, 40))
    b = torch.randn(40).to(dtype)
    c = (-(x.double() @ v.double().mT)[0]).to(dtype)  # gates of the first row are what rounding of c leaves
    leaves = [t.requires_grad_() for t in (x, w, b, v, c)]
    got = torch.autograd.grad(op(*leaves).sum(), leaves)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    truth = torch.autograd.grad((F.linear(wide[0], wide[1], wide[2]) * F.relu(F.linear(wide[0], wide[3], wide[4]))).sum(), wide)
    for g, t in zip(got, truth):
        assert (g - t).norm() <= 4 * torch.finfo(dtype).eps * t.norm()


PICKED = "Func z, i, picked; In X, W; Var t; RVar e, d; z[t, e] = sigmoid(0.02 * rdot(X[t, d], W[e, d], d)); i[t] = rargmax(z[t, e], e); picked[t] = z[t, i[t]];"


def test_a_product_that_decides_places_is_saved_in_float32(tmp_path):
    """Forward picks by what it saves; by products in bfloat16 it picked other elements than those that are larger."""
    (tmp_path / "picked.yaml").write_text(f"op: picked\ndoc: |\n  The largest.\nalgorithm: |\n  {PICKED}\n")
    op = dtkernels.register(tmp_path / "picked.yaml")
    torch.manual_seed(0)
    x, w = (torch.randn(n, 1024).to(torch.bfloat16) for n in (300, 200))
    product = x.double() @ w.double().mT
    assert (product.bfloat16().argmax(1) != product.argmax(1)).sum() > 2  # rounded, others are as large
    leaves = [t.requires_grad_() for t in (x, w)]
    got = torch.autograd.grad(op(*leaves).sum(), leaves)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    truth = torch.autograd.grad(torch.sigmoid(0.02 * (wide[0] @ wide[1].mT)).amax(1).sum(), wide)
    for g, t in zip(got, truth):
        assert (g - t).norm() <= 8 * torch.finfo(torch.bfloat16).eps * t.norm()


LOCAL = (
    "Func s, t, f; In Q, K, V; Var b, w, m, n; RVar l, d; Extent l = 2 * Q[2];"
    " s[b, w, m, l] = where(l <= m + len(m) and len(m) * w + l >= len(m), rdot(Q[b, w, m, d], K[b, len(m) * w + l - len(m), d], d), -inf);"
    " t[b, w, m] = rsum(exp(s[b, w, m, l]), l); f[b, w, m, n] = rdot(exp(s[b, w, m, l]), V[b, len(m) * w + l - len(m), n], l) / t[b, w, m];"
)


def test_gradients_of_attention_to_blocks_do_not_overflow():
    """Scores of some 200: backward reads the exponentials of a block at the places of its keys, and shifts them there as well."""
    torch.manual_seed(0)
    op = Operator(Spec("local", "Attention to a block and the one before it.", parse(LOCAL)))
    Q, K, V = torch.randn(1, 3, 4, 5), torch.randn(1, 12, 5), torch.randn(1, 12, 3)
    Q[..., 0], K[..., 0] = 200, 1
    leaves = [t.requires_grad_() for t in (Q, K, V)]
    q, k, v = wide = [t.detach().double().requires_grad_() for t in leaves]
    place = torch.arange(12) - 4 * torch.arange(3)[:, None, None] + 4
    seen = (place >= 0) & (place <= torch.arange(4)[:, None] + 4)
    truth = torch.einsum("bwms,bsn->bwmn", torch.softmax(torch.einsum("bwmd,bsd->bwms", q, k).masked_fill(~seen, -torch.inf), -1), v)
    out = op(*leaves)
    grad = torch.randn(out.shape)
    for g, t in zip((out, *torch.autograd.grad(out, leaves, grad)), (truth, *torch.autograd.grad(truth, wide, grad.double()))):
        assert (g.double() - t).norm() <= 2e-4 * t.norm()
