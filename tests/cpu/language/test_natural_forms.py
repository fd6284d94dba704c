"""Programs as mathematics has them run as the ones that are written for the compiler do: values and gradients, scores of any size."""

import pytest
import torch
from natural_forms import FORMS

import dtkernels


@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients(name, tmp_path):
    text, truth, shapes, factor = FORMS[name]
    form = f"form_{list(FORMS).index(name)}"
    path = tmp_path / "form.yaml"
    path.write_text(f"op: {form}\ndoc: as in torch\nalgorithm: |\n  {text}\n")
    op, generator = dtkernels.register(path), torch.Generator().manual_seed(0)
    given = {n: torch.randn(shape, generator=generator) * (factor if i == 0 else 1) for i, (n, shape) in enumerate(shapes.items())}
    ours = {n: t.clone().requires_grad_() for n, t in given.items()}
    exact = {n: t.double().requires_grad_() for n, t in given.items()}
    got, want = op(**ours), truth(**exact)
    terms = max(d for shape in shapes.values() for d in shape)
    near = {"rtol": terms**0.5 * 1e-6 * factor, "atol": terms**0.5 * 2e-7 * factor}  # scores of size factor carry its rounding into exp
    torch.testing.assert_close(got.double(), want, rtol=near["rtol"], atol=near["atol"] * max(want.abs().max().item(), 1))
    adjoint = torch.randn(got.shape, generator=generator)
    found, wanted = torch.autograd.grad(got, list(ours.values()), adjoint), torch.autograd.grad(want, list(exact.values()), adjoint.double())
    for n, a, b in zip(shapes, found, wanted, strict=True):
        scale = b.abs().max().item()
        torch.testing.assert_close(a.double(), b, rtol=near["rtol"], atol=near["atol"] * max(scale, 1), msg=lambda m, n=n: f"d_{n}: {m}")
    assert dtkernels.paths()[form]["interpreter"] == dtkernels.paths()[f"{form} backward"]["interpreter"] == 1


SPLIT = {
    "softmax": ("t[m] = rsum(exp(A[m, l]), l); f[m, l] = exp(A[m, l]) / t[m]; t.block(m:4); t.tensorize(m:4, l:16);", 1),
    "of a product": ("t[m] = rsum(exp(rdot(A[m, k], B[k, l], k)), l); f[m, l] = exp(rdot(A[m, k], B[k, l], k)) / t[m]; t.block(m:16); t.tensorize(m:16, l:16, k:16);", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLIT)
def test_what_several_kernels_read_is_cut_as_the_sum_it_serves(name):
    """Kernels of the algebra's own, beside those of a schedule that knows nothing of them: many programs, no matrix stored."""
    text, inputs = SPLIT[name]
    names, labels = ("A, B", "k, l") if inputs == 2 else ("A", "l")
    text = f"Func t, f; In {names}; Var m; RVar {labels}; {text} f.block(m:16, l:16); f.tensorize(m:16, l:16{', k:16' if inputs == 2 else ''});"
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=generator) * 8 for shape in ([(50, 24), (24, 40)] if inputs == 2 else [(50, 40)])]
    compiled = dtkernels.compile(text)
    want = torch.softmax((given[0].double() @ given[1].double()) if inputs == 2 else given[0].double(), -1)
    torch.testing.assert_close(compiled(*given).double(), want, rtol=1e-4, atol=1e-5)
    assert "[(1,)](" not in compiled.source, "one program for everything"
    assert compiled.source.count("torch.empty((size_m, size_l)") == 1, "a matrix between kernels"


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8])
@pytest.mark.parametrize("reference", [False, True], ids=["kernel", "reference"])
@pytest.mark.parametrize("kind", ["rdot(A[x, k], M[k, y], k)", "rsum(A[x, k] * M[k, y], k)"])
def test_a_mask_in_a_product_is_ones_and_zeros(kind, reference, dtype, tmp_path, monkeypatch):
    if reference:
        monkeypatch.delenv("TRITON_INTERPRET")
    path = tmp_path / "form.yaml"
    path.write_text(f"op: masked_product\ndoc: as in torch\nalgorithm: |\n  Func masked_product; In A, M; Var x, y; RVar k; masked_product[x, y] = {kind};\n")
    op, generator = dtkernels.register(path), torch.Generator().manual_seed(0)
    a, m = torch.randn(20, 30, generator=generator), (torch.rand(30, 40, generator=generator) > 0.5).to(dtype)
    torch.testing.assert_close(op(a, m), (a.double() @ m.double()).float(), rtol=1e-5, atol=1e-5)
