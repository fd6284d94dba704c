"""Sums over a product that backward reads from the gradient of an operand: which ones, and gradients against float64."""

import itertools

import pytest
import torch
from op_cases import normal

from dtkernels.algebra.autodiff.gradient import gradient, savable_products
from dtkernels.algebra.pipeline import differentiable_form
from dtkernels.lang import Program, Schedule, parse
from dtkernels.lang import expr as ex
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator

SIZES = {"m": 21, "n": 37, "k": 48, "b": 3}
#: DT, the same in torch, labels of the inputs
PROGRAMS = {
    "cosine": ("Func a, c, y; In A, B; Var m, n; RVar k; a[m] = rsum(A[m, k] * A[m, k], k); c[n] = rsum(B[n, k] * B[n, k], k);"
               "y[m, n] = rdot(A[m, k], B[n, k], k) * rsqrt(a[m]) * rsqrt(c[n]);",
               lambda A, B: torch.nn.functional.normalize(A, dim=1) @ torch.nn.functional.normalize(B, dim=1).mT, {"A": "mk", "B": "nk"}),
    "row_scale": ("Func y; In A, B, w; Var m, n; RVar k; y[m, n] = w[m] * rdot(A[m, k], B[k, n], k);", lambda A, B, w: w[:, None] * (A @ B), {"A": "mk", "B": "kn", "w": "m"}),
    "batched": ("Func y; In A, B, w; Var b, m, n; RVar k; y[b, m, n] = w[b, m] * rdot(A[b, m, k], B[b, k, n], k);", lambda A, B, w: w[..., None] * (A @ B),
                {"A": "bmk", "B": "bkn", "w": "bm"}),
}  # fmt: skip


def algorithm_of(name: str):
    return parse(PROGRAMS[name][0]).algorithm


def made_again(name: str, wanted: tuple[str, ...]) -> bool:
    """Whether backward multiplies A and B."""
    form = differentiable_form(algorithm_of(name), ("y",))
    dots = [n for d in gradient(form, ("y",), wanted).backward.definitions for n in d.expr.walk() if isinstance(n, ex.Dot)]
    return any({a.tensor for a in ex.accesses(n)} == {"A", "B"} and len(list(ex.accesses(n))) == 2 for n in dots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_choice_of_gradients(name, dtype):
    text, truth, labels = PROGRAMS[name]
    op = Operator(Spec(f"exchanged_{name}", "", Program(parse(text).algorithm, Schedule(()))))
    tensors = {n: normal(*(SIZES[x] for x in own), dtype=dtype, device="cpu", seed=i) for i, (n, own) in enumerate(labels.items())}
    for wanted in itertools.chain(*(itertools.combinations(tensors, n) for n in range(1, len(tensors) + 1))):
        given = {n: t.clone().requires_grad_(n in wanted) for n, t in tensors.items()}
        exact = {n: t.double().requires_grad_(n in wanted) for n, t in tensors.items()}
        result, right = op(**given), truth(**exact)
        grad = normal(*right.shape, dtype=dtype, device="cpu", seed=9)
        found = torch.autograd.grad(result, [given[n] for n in wanted], grad)
        for n, got, want in zip(wanted, found, torch.autograd.grad(right, [exact[n] for n in wanted], grad.double())):
            error, bound = (got.double() - want).abs().max().item(), 8 * torch.finfo(dtype).eps * max(1.0, want.abs().max().item())
            assert got.dtype == dtype and error <= bound, f"{n} of {wanted}: {error:.2e} > {bound:.2e}"


def test_the_product_is_made_again_only_where_no_gradient_has_its_sums():
    assert not made_again("cosine", ("A", "B"))
    assert not made_again("row_scale", ("A", "w")) and not made_again("batched", ("A", "B", "w"))
    assert made_again("row_scale", ("w",)) and made_again("row_scale", ("B", "w")), "neither has a sum over n"


def test_such_a_product_is_kept_only_where_it_is_made_again():
    form = differentiable_form(algorithm_of("row_scale"), ("y",))
    (product,) = savable_products(form, ("y",))
    for wanted, kept in ((("A", "B", "w"), ()), (("A", "B"), ()), (("B", "w"), (product.name,)), (("w",), (product.name,))):
        assert gradient(form, ("y",), wanted, (product.name,)).products == kept, wanted


def test_what_varies_with_the_summed_label_alone_scales_the_operand():
    form = differentiable_form(algorithm_of("cosine"), ("y",))
    texts = [str(d) for d in gradient(form, ("y",), ("A", "B")).backward.definitions]
    assert "B_scaled[n, k] = B[n, k] * rsqrt(cast(c_kept[n], fp32));" in texts and "B_sum[m, k] = rdot(d_y[m, n], B_scaled[n, k], n);" in texts
