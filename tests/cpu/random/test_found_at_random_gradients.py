# ruff: noqa: E501 (programs read best on one line)
"""What tests/fuzz.py found of gradients, shortened: gradients of programs that were wrong or ended in an error."""

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch

from dtkernels.lang import parse
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator


def op_of(text: str) -> Operator:
    return Operator(Spec("found", "Found at random.", parse(text)))


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 0.5


@pytest.mark.parametrize("index", ["2", "len(x) - 1 - x", "x + 1", "T[x]"])
def test_inputs_that_one_arithmetic_indexes_have_extents_of_their_own(index):
    op = op_of(f"Func f; In A, B, C, T; Var x; f[x] = A[{index}] * B[{index}] * C[x] + T[x];")
    a, b, c, t = rand(4), rand(5, seed=1), rand(3, seed=2), torch.tensor([0, 3, 1])
    at = {"2": torch.tensor([2, 2, 2]), "T[x]": t, "x + 1": torch.arange(1, 4)}.get(index, torch.arange(2, -1, -1))
    leaves = [a.requires_grad_(), b.requires_grad_()]
    got, want = op(a, b, c, t), a[at] * b[at] * c + t
    for mine, theirs in zip(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), leaves)):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("value", ["exp(A[x])", "rsum(exp(A[k]) * 0, k) / rsum(exp(A[k]), k)"])
def test_an_output_is_not_read_instead_of_a_value_that_lacks_its_labels(value):
    """``g[x, y]`` equals ``exp(A[x])``, but where a gradient says that, it has no ``y``."""
    op = op_of(f"""Func g, f; In A, B, C; Var x, y; {"RVar k;" * ("k" in value)} Extent y = B[1]; g[x, y] = {value};
    f[x] = ({value}) * C[x] + maximum(B[x, 1], A[x]); g.compile(); f.compile();""")
    a, b, c = rand(4).requires_grad_(), rand(4, 5, seed=1), rand(4, seed=2).requires_grad_()
    own = a * 0 if "k" in value else a.exp()
    want = own[:, None].expand(4, 5), own * c + torch.maximum(b[:, 1], a)
    got = op(a, b, c)
    for mine, theirs in zip(got, want):
        torch.testing.assert_close(mine, theirs)
    adjoints = [rand(*w.shape, seed=3) for w in want]
    for mine, theirs in zip(*(torch.autograd.grad(r, (a, c), adjoints, allow_unused=True, materialize_grads=True) for r in (got, want))):
        torch.testing.assert_close(mine, theirs)


def test_an_exponential_that_is_divided_by_is_not_shifted():
    """The maximum over ``x``, which a gradient sums over, makes each exponential far below it 0, and its quotient by itself NaN."""
    op = op_of("Func f; In A, B; Var x; RVar k; f[x] = rsum(A[x] * B[k], k) * rsum(exp(A[x]), k) / rsum(exp(A[x]), k);")
    a, b = torch.linspace(-60, 60, 9).requires_grad_(), rand(5, seed=1).requires_grad_()
    got, want = op(a, 3 * b), a * 3 * b.sum()
    for mine, theirs in zip(torch.autograd.grad(got.sum(), (a, b)), torch.autograd.grad(want.sum(), (a, b))):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", ["cast(A[x] * B[x] + C[x], fp32)", "cast((A[x] + 1) * B[x], fp32)", "cast(A[x] + rdot(B[k], N[k], k), bf16)"])
def test_the_gradient_of_a_float32_input_is_float32_where_results_are_cast(value):
    """Backward reads 16-bit inputs or whole numbers alone, which gave its results their dtype."""
    names = [n for n in "ABCN" if f"{n}[" in value]
    op = op_of(f"Func f; In {', '.join(names)}; Var x; {'RVar k;' * ('k' in value)} f[x] = {value};")
    given = {"A": rand(9).bfloat16(), "B": rand(9, seed=1), "C": rand(9, seed=2), "N": 100 + torch.arange(9)}
    given["B" if "N" in names else names[-1]].requires_grad_()
    out = op(*(given[n] for n in names))
    leaf = next(t for t in given.values() if t.requires_grad)
    adjoint = rand(9, seed=3).to(out.dtype)
    (got,) = torch.autograd.grad(out, leaf, adjoint)
    g = adjoint.float()
    a = given["A"].float()
    want = g.sum() * given["N"] if "N" in names else g if "C" in names else g * (a + 1)
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)


def test_an_incoming_gradient_is_rounded_as_an_operand_alone():
    """Products take it in bf16, and the float32 weight's gradient is a sum of it as it came."""
    op = op_of("Func f; In A, B, w; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[y, k], k) * w[y];")
    a, b, w = rand(32, 32).bfloat16().requires_grad_(), rand(32, 32, seed=1).bfloat16(), rand(32, seed=2).requires_grad_()
    adjoint = rand(32, 32, seed=3)
    op_b = op_of("Func f; In A, B, w; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[y, k], k) + w[y];")
    d_a, d_w = torch.autograd.grad(op_b(a, b, w), (a, w), adjoint)
    torch.testing.assert_close(d_w, adjoint.sum(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d_a.float(), adjoint @ b.float(), rtol=2e-2, atol=2e-2)
    (d_w,) = torch.autograd.grad(op(a, b, w), w, adjoint)
    torch.testing.assert_close(d_w, (adjoint * (a.float() @ b.float().T)).sum(0).detach(), rtol=1e-4, atol=1e-4)


def test_an_output_that_the_saved_logarithm_shifts_is_not_read():
    """Backward's ``e`` is divided by the sum; forward returns it as it is."""
    op = op_of("""Func e, f; In S, V; Var m; RVar l; e[m, l] = exp(S[m, l]); f[m] = rdot(e[m, l], V[m, l], l) / rsum(e[m, l], l);
    e.compile(); f.compile();""")  # fmt: skip
    s, v = 3 * rand(4, 5), rand(4, 5, seed=1).requires_grad_()
    (mine,) = torch.autograd.grad(op(s, v)[1].sum(), v)
    torch.testing.assert_close(mine, s.softmax(1))


def test_a_sum_for_rows_and_columns_at_sizes_without_elements_has_a_schedule():
    op = op_of("Func g, f; In A, B, C, D; Var z, k; RVar x, l; g[x] = -rsum(A[l], l) + B[x]; f[z, k, l] = rsum(g[x] + B[x], x) + C[k] + D[z, l];")
    assert op(rand(3), rand(9, seed=1), rand(0), rand(3, 3, seed=2)).shape == (3, 0, 3)


@pytest.mark.parametrize(("extent", "length"), [("3", 3), ("B[0] - 1", 4)])
def test_groups_of_a_label_that_only_the_results_know_have_an_extent(extent, length):
    op = op_of(f"Func f, g; In A, B, C; Var y; RVar x; Extent y = {extent}; f[y] = rsum(exp(B[x] * A[y / 2]), x); g[y] = f[y] + C[0];")
    a, b, c = rand(3).requires_grad_(), rand(5, seed=1).requires_grad_(), rand(1, seed=2)
    want = (b[:, None] * a[torch.arange(length) // 2]).exp().sum(0) + c
    got = op(a, b, c)
    torch.testing.assert_close(got, want)
    for mine, theirs in zip(torch.autograd.grad(got.square().sum(), [a, b]), torch.autograd.grad(want.square().sum(), [a, b])):
        torch.testing.assert_close(mine, theirs)


def test_a_product_of_single_terms_reads_the_gradient_that_another_product_rounds_unrounded():
    """``d_A`` is a product in float16, ``d_B`` one in float32, whose sum over one ``x`` is no product of tiles."""
    op = op_of("Func e, f; In A, B; Var x, y, z; RVar k; e[z, x, k] = exp(A[z, x, k]); f[z, x, y] = rdot(e[z, x, k], B[y, z, k], k);")
    a, b, g = rand(33, 1, 16).requires_grad_(), rand(16, 33, 16, seed=1).half().requires_grad_(), rand(33, 1, 16, seed=2)
    got = torch.autograd.grad(op(a, b), [b], g)[0]
    want = torch.einsum("zxk,zxy->yzk", a.detach().exp().double(), g.double())
    torch.testing.assert_close(got.double(), want.half().double(), rtol=2**-20, atol=0)


def test_a_sum_over_picked_rows_whose_columns_the_target_has_too():
    """The gradient of ``A`` through its plain side sums ``d_g`` by rows; its columns have the label of the target."""
    op = op_of("""Func g, f; In A, T, B; Var l; RVar x, y; g[x, l] = rdot(A[y, x], A[y, T[l] % 16], y); f[l, y] = rdot(B[l, x], A[y, x], x);
    g.compile(); f.compile();""")
    a, b, t = rand(7, 16).requires_grad_(), rand(33, 16, seed=1).requires_grad_(), torch.arange(33, dtype=torch.int32) * 5
    want = a.T @ a[:, t.long() % 16], b @ a.T
    got = op(a, t, b)
    adjoints = [rand(*r.shape, seed=2) for r in want]
    for mine, theirs in zip(torch.autograd.grad(got, [a, b], adjoints), torch.autograd.grad(want, [a, b], adjoints)):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
