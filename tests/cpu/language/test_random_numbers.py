# ruff: noqa: E501 (programs read best on one line)
"""Random numbers by counter: the generator's published numbers, the same in every schedule, forward and backward, kernel and reference."""

import bounds  # noqa: F401 (an access outside the tensors raises)
import numpy as np
import pytest
import torch

import dtkernels
from dtkernels.lang import parse
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator
from dtkernels.runtime.reference import philox

SCHEDULES = ["", "f.block(x:4, y:8); f.tensorize(x:4, y:8);", "f.block(x:2); f.tensorize(y:0);", "f.block(y:4); f.tensorize(y:4, x:2);"]
DROPOUT = "Func f; In A; SIn seed, p; Var x, y; f[x, y] = where(random(seed, x, y) < p, 0, A[x, y] / (1 - p));"


def op_of(text: str) -> Operator:
    return Operator(Spec("drawn", "Random numbers.", parse(text)))


def whole(*values: int) -> list[torch.Tensor]:
    return [torch.tensor(v) for v in values]


def test_the_words_are_those_of_the_paper():
    """Known answers of the authors' Random123 library, kat_vectors."""
    assert [hex(w) for w in philox.words(torch.tensor(0), whole(0, 0))] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    assert [hex(w) for w in philox.words(torch.tensor(-1), whole(-1, -1, -1, -1))] == ["0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd"]
    pi = philox.words(torch.tensor(0x299F31D0A4093822 - 2**64 if 0x299F31D0A4093822 >= 2**63 else 0x299F31D0A4093822), whole(0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344))
    assert [hex(w) for w in pi] == ["0xd16cfe09", "0x94fdcceb", "0x5001e420", "0x24126ea1"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", [0, 7, -3, 2**40 + 5])
def test_every_schedule_draws_the_same(schedule, seed):
    a = torch.zeros(5, 13)
    got = dtkernels.compile(f"Func f; In A; SIn seed; Var x, y; f[x, y] = random(seed, x, y) + A[x, y]; {schedule}")(a, seed)
    x, y = torch.arange(5)[:, None], torch.arange(13)
    assert torch.equal(got, philox.random(torch.tensor(seed), (x, y)))


@pytest.mark.parametrize("integers, values", [("y", "y"), ("y * 4294967296 + 3", "y * 4294967296 + 3"), ("x, y // 2", "x, y // 2"), ("x, y, 5", "x, y, 5"), ("x * 3000000000 + y * 1000000 * 1000", "x * 3000000000 + y * 1000000 * 1000"), ("y, x, 7, t", "y, x, 7, t")])
def test_every_form_of_a_counter(integers, values, monkeypatch):
    x, y, t = torch.arange(5)[:, None], torch.arange(13), torch.tensor([3, -1, 2**40, 9, 0])
    parts = eval(f"({values},)", {"x": x, "y": y, "t": t[:, None]})
    want = philox.random(torch.tensor(42), [p if isinstance(p, torch.Tensor) else torch.tensor(p) for p in parts]).expand(5, 13)
    text = f"Func f; In A, t; Var x, y; f[x, y] = random(42, {integers.replace(' t', ' t[x]')}) + A[x, y] + 0 * t[x];"
    kernel = op_of(text)(torch.zeros(5, 13), t)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert torch.equal(kernel, want) and torch.equal(op_of(text)(torch.zeros(5, 13), t), want)


def test_a_seed_on_the_device():
    a = torch.zeros(4, 4)
    op = op_of("Func f; In A; SIn seed; Var x, y; f[x, y] = random(seed, x, y) + A[x, y];")
    assert torch.equal(op(a, seed=torch.tensor(2**35 + 1)), op(a, seed=2**35 + 1))


def test_the_numbers_are_spread_evenly():
    u = op_of("Func f; In A; Var x; f[x] = random(1, x) + 0 * A[x];")(torch.zeros(20000))
    n = op_of("Func f; In A; Var x; f[x] = normal(1, x) + 0 * A[x];")(torch.zeros(20000))
    assert 0 <= u.min() and u.max() < 1 and torch.equal(u * 2**24, (u * 2**24).round())
    assert np.histogram(u.numpy(), 16, (0, 1))[0].std() < 4 * (20000 / 16) ** 0.5
    assert abs(n.mean()) < 0.03 and abs(n.var() - 1) < 0.05 and abs((n > 1).float().mean() - 0.1587) < 0.01
    torch.testing.assert_close(n, philox.normal(torch.tensor(1), [torch.arange(20000)]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reference", [False, True], ids=["kernel", "reference"])
def test_dropout_and_its_gradient(reference, monkeypatch):
    if reference:
        monkeypatch.delenv("TRITON_INTERPRET")
    a = torch.randn(9, 33).requires_grad_()
    kept = philox.random(torch.tensor(11), (torch.arange(9)[:, None], torch.arange(33))) >= 0.25
    got = op_of(DROPOUT)(a, seed=11, p=0.25)
    torch.testing.assert_close(got, kept * a / 0.75)
    adjoint = torch.randn(9, 33)
    torch.testing.assert_close(torch.autograd.grad(got, a, adjoint)[0], kept * adjoint / 0.75)


def test_dropout_inside_a_softmax():
    """The weights of attention, dropped in a loop that rescales them."""
    text = """Func e, d, f; In A, V; SIn seed; Var x, n; RVar y; e[x, y] = exp(A[x, y]); d[x] = rsum(e[x, y], y);
    f[x, n] = rdot(where(random(seed, x, y) < 0.5, 0, e[x, y]), V[y, n], y) / d[x];"""
    a, v = torch.randn(17, 40).requires_grad_(), torch.randn(40, 16).requires_grad_()
    kept = philox.random(torch.tensor(3), (torch.arange(17)[:, None], torch.arange(40))) >= 0.5
    got, want = op_of(text)(a, v, seed=3), (torch.softmax(a, 1) * kept) @ v
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(torch.autograd.grad(got.sum(), (a, v)), torch.autograd.grad(want.sum(), (a, v))):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text, error", [("random(1)", "random takes a seed and 1 to 4 integers"), ("random(0.5, x)", "random is of whole numbers: found 0.5"), ("normal(1, x / 2)", "normal is of whole numbers"), ("random(1, x, x, x, x, x)", "takes a seed")])
def test_what_does_not_fit_is_refused(text, error):
    with pytest.raises(dtkernels.DTError, match=error):
        parse(f"Func f; In A; Var x; f[x] = {text} + A[x];")
