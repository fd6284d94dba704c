"""A product and what is added to it are saved together: rounded apart they lose their sign, and gates of a few elements in a thousand with it."""

import torch
import torch.nn.functional as F

import dtkernels
from dtkernels.algebra.autodiff.gradient import gradient, savable_products
from dtkernels.algebra.pipeline import differentiable_form
from dtkernels.lang import parse

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
