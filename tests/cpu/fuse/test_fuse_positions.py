"""Positions in fused functions: which ones are counted from the end, and what one outside on either side does."""

import pytest
import torch

import dtkernels
from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.added_terms import _is_integer, picked_term_names
from dtkernels.lang.parts.picked_terms import WHOLE


def numbers():
    return torch.arange(1.0, 13).view(3, 4)


@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_positions_outside_read_zero_and_write_nothing(interpreted, dtype, monkeypatch):
    if not interpreted:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    @dtkernels.fuse
    def outside(x, i):
        y = x * 1
        y[:, i] = 50.0
        return x[:, i] * 1, y, x[:, torch.arange(3) - 6] * 1

    x = numbers()
    read, y, far = outside(x, torch.tensor([-4, -5, 4, 3, -1], dtype=dtype))
    zero = torch.zeros(3)
    assert torch.equal(read, torch.stack((x[:, 0], zero, zero, x[:, 3], x[:, 3]), 1))
    assert torch.equal(y, torch.where(torch.tensor([True, False, False, True]), 50.0, x))
    assert torch.equal(far, torch.stack((zero, zero, x[:, 0]), 1))


NEVER_NEGATIVE = {
    "range": lambda x: x[:, torch.arange(3)] * 2,
    "quotient": lambda x: x[:, torch.arange(4) // 2] * 2,
    "reversal": lambda x: x[:, x.shape[1] - 1 - torch.arange(x.shape[1])] * 2,
    "remainder": lambda x: x[:, (torch.arange(4) - 2) % 4] * 2,
    "place": lambda x: x[torch.arange(3), x.argmax(1)] * 2,
    "count": lambda x: x[:, torch.bucketize(x[0], torch.tensor([3.0, 9.0]))] * 2,
}


@pytest.mark.parametrize("name", NEVER_NEGATIVE)
def test_positions_that_are_never_negative_are_read_as_they_are(name):
    function = NEVER_NEGATIVE[name]
    fused = dtkernels.fuse(function)
    assert torch.equal(fused(numbers()), function(numbers()))
    assert ">>" not in fused.dt and "%" not in fused.dt.replace("(z - 2) % 4", "")


def test_a_range_moved_round_keeps_the_form_that_gradients_invert():
    fused = dtkernels.fuse(lambda x: x[:, torch.arange(x.shape[1]) - 1] * 2)
    fused(numbers())
    assert "x[y, (z - 1) % len(z)]" in fused.dt


def test_take_along_dim_broadcasts():
    def taken(x, i):
        return torch.take_along_dim(x, i, 1), torch.take_along_dim(x[:1], i, 1), torch.take_along_dim(x, i[:1], 1), torch.take_along_dim(x, i[:, 0].abs())

    fused, i = dtkernels.fuse(taken), torch.tensor([[-1, 0], [2, -3], [1, 1]])
    for got, want in zip(fused(numbers(), i), taken(numbers(), i), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("index", [lambda x, i: x[i] * 2, lambda x, i: x[:, i - 1] * 2])
def test_terms_of_such_a_gradient_are_added_where_the_position_says(index, monkeypatch):
    """The schedule knows the position for an integer."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    fused = dtkernels.fuse(index)
    fused(numbers(), torch.tensor([0, -1]))
    variant = fused.state.last.operator.variant((), frozenset(), 0)
    derived = gradient(variant.differentiated, variant.outputs, ("x",))
    backward = prepare_algorithm(derived.backward, tuple(derived.grads.values()))
    known = backward.indices | backward.integer_tensors() | backward.integer_scalars()
    (terms,) = (terms for name, terms in picked_term_names(backward).items() if WHOLE not in name)
    assert all(">>" in str(data) and _is_integer(data, known) for _, data in terms.places)


def test_remainders_of_sizes_are_positions():
    """Hashed embeddings and ring buffers."""
    fused = dtkernels.fuse(lambda w, i: (w[(i * 31 + 7) % w.shape[0]], w[:, i % w.shape[1]]))
    for rows in (7, 5):
        w, i = torch.randn(rows, 4), torch.arange(9)
        assert all(torch.equal(a, b) for a, b in zip(fused(w, i), (w[(i * 31 + 7) % rows], w[:, i % 4])))
