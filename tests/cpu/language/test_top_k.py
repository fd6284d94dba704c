# ruff: noqa: E501 (programs read best on one line)
"""The largest elements of a row and their places: torch.topk, with ties in order of place; NaNs, infinities, gradients, schedules."""

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch

import dtkernels
from dtkernels.lang import DTError, parse
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator

G = torch.Generator().manual_seed(0)
BOTH = "Func v, i; In A; Var x, j; RVar y; Extent j = %d; v[x, j] = rtopk(A[x, y], y, j); i[x, j] = rargtopk(A[x, y], y, j); v.compile(); i.compile();"


def op(text: str) -> Operator:
    return Operator(Spec("top", "A program.", parse(text)))


def ordered(x: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the first elements: NaNs, then by value, then by place."""
    key = [sorted(range(len(row)), key=lambda n, row=row: ((0, 0.0) if row[n] != row[n] else (1, -row[n]), n)) for row in x.tolist()]
    return torch.tensor(key)[:, :count]


def special() -> torch.Tensor:
    """Rows of ties, NaNs and infinities."""
    x = torch.randn(9, 37, generator=G)
    x[1], x[2] = 1.0, -torch.inf
    x[2, 5] = 0
    x[3, ::7] = torch.nan
    x[4, [3, 9]] = torch.inf
    x[5] = torch.randint(0, 3, (37,), generator=G).float()
    x[6] = torch.nan
    x[7, :36] = -torch.inf
    return x


@pytest.mark.parametrize("count", [1, 4])
def test_values_and_places(count):
    x = special()
    values, places = op(BOTH % count)(x)
    assert places.dtype == torch.int64 and torch.equal(places, ordered(x, count))
    assert torch.equal(values.nan_to_num(1e9), torch.topk(x, count)[0].nan_to_num(1e9))


def test_past_the_end_of_a_row():
    x = torch.randn(3, 2, generator=G)
    values, places = op(BOTH % 4)(x)
    assert torch.equal(values[:, :2], x.sort(descending=True)[0]) and bool((values[:, 2:] == -torch.inf).all() and (places[:, 2:] == 0).all())


def test_the_gradient_is_that_of_the_element_at_the_place():
    x = special()[[0, 1, 5]].requires_grad_()
    values, places = op(BOTH % 3)(x)
    adjoint = torch.randn(3, 3, generator=G)
    (grad,) = torch.autograd.grad(values, x, adjoint)
    assert torch.equal(grad, torch.zeros(3, 37).scatter_(1, places, adjoint))


def test_weights_of_experts():
    """Of a value that is computed, forward and backward, against float64."""
    e = "exp(A[x, y]) / total[x]"
    text = f"Func total, w, i; In A; Var x, j; RVar y; Extent j = 3; total[x] = rsum(exp(A[x, y]), y); w[x, j] = rtopk({e}, y, j); i[x, j] = rargtopk({e}, y, j); w.compile(); i.compile();"
    x = torch.randn(7, 20, generator=G, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    got, places = op(text)(x)
    want, at = torch.topk(exact.softmax(-1), 3)
    assert torch.equal(places, at)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    adjoint = torch.randn(7, 3, generator=G)
    (mine,), (theirs,) = torch.autograd.grad(got, x, adjoint), torch.autograd.grad(want, exact, adjoint.double())
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-6)


def test_ranks_may_be_numbers_and_parameters_and_places_stand_in_an_index():
    a, w = torch.randn(7, 20, generator=G), torch.randn(20, 5, generator=G)
    assert torch.equal(op("Func f; In A; Var x; RVar y; f[x] = rtopk(A[x, y], y, 4);")(a), a.topk(5)[0][:, 4])
    kth = op("Func f; In A; Var x; RVar y; Param n = 2; f[x] = rtopk(A[x, y], y, n);")
    assert torch.equal(kth(a), a.topk(3)[0][:, 2]) and torch.equal(kth(a, n=0), a.amax(1))
    picked = op("Func i, f; In A, W; Var x, z; RVar y, j; Extent j = 3; i[x, j] = rargtopk(A[x, y], y, j); f[x, z] = rsum(W[i[x, j], z], j);")
    torch.testing.assert_close(picked(a, w), w[a.topk(3)[1]].sum(1))
    least = op("Func f; In A; Var x, j; RVar y; Extent j = 3; f[x, j] = -rtopk(-A[x, y], y, j);")
    assert torch.equal(least(a), a.topk(3, largest=False)[0])
    columns = op("Func f; In A; Var b, y, j; RVar x; Extent j = 3; f[b, j, y] = rtopk(A[b, x, y], x, j);")
    assert torch.equal(columns(a.reshape(1, 7, 20).bfloat16()), a.bfloat16().topk(3, 0)[0][None])


@pytest.mark.parametrize("schedule", ["", "f.block(x:4, j:4); f.tensorize(x:4, j:4, y:16);", "f.block(x:2, j:2); f.tensorize(x:2, j:2, y:0);"])
def test_schedules(schedule):
    a = torch.randn(5, 40, generator=G)
    got = dtkernels.compile(f"Func f; In A; Var x, j; RVar y; Extent j = 3; f[x, j] = rtopk(A[x, y], y, j); {schedule}")(a)
    assert torch.equal(got, a.topk(3)[0])


@pytest.mark.parametrize(
    "rank, error",
    [
        ("x", "the rank of rtopk is known at compile time: found x; allowed: a label of constant extent, Extent j = 8;, or an integer from 0 on"),
        ("-1", "the rank of rtopk is known at compile time: found -1"),
        ("y", "the rank of rtopk is known at compile time: found y"),
        ("32", "rtopk finds at most 32 elements: found 33"),
        ("l", "rtopk finds at most 32 elements: found 40"),
    ],
)
def test_ranks_that_are_refused(rank, error):
    with pytest.raises(DTError) as raised:
        dtkernels.compile(f"Func f; In A; Var x, j, l; RVar y; Extent j = 3; Extent l = 40; f[x, j] = rtopk(A[x, y], y, {rank}) + j + l * 0;".replace("f[x, j]", "f[x, j, l]"))
    assert error in str(raised.value) and "\n" not in str(raised.value)
