"""What a refused call says, and which of its results need a gradient."""

import copy

import pytest
import torch
from torch import nn

import dtkernels
from dtkernels.frontend import UnsupportedOperation
from dtkernels.frontend.aten.table import TABLE

FACTOR = torch.tensor(1)


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


REFUSED = {
    "vmap of a sum": ("torch.vmap", lambda x, i: torch.vmap(lambda r: r * r.sum())(x)),
    "vmap": ("torch.vmap", lambda x, i: torch.vmap(lambda r: r * 2)(x) + 1),
    "func.grad": ("torch.func.grad", lambda x, i: torch.func.grad(lambda r: (r * r).sum())(x)),
    "an argument as index": ("a tensor without dimensions.*x\\[i\\[None\\]\\]", lambda x, i: x[:, i] * 2),
    "a computed index": ("a tensor without dimensions", lambda x, i: x[x[:, 0].argmax()] * 2),
    "a written index": ("a tensor without dimensions", lambda x, i: (x * 2).index_put_((i[None],), x[0]).__setitem__(i, 1.0)),
    "a closed-over index": ("a tensor without dimensions", lambda x, i: x[:, FACTOR] * 2),
    "a closed-over bound": ("a tensor without dimensions", lambda x, i: x[:, :FACTOR] * 2),
    "a closed-over number": ("a number taken from a tensor that it closes over", lambda x, i: x * FACTOR.item()),
    "a closed-over integer": ("a number taken from a tensor that it closes over", lambda x, i: x * int(FACTOR)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_line_and_says_what_it_is(name):
    said, function = REFUSED[name]
    with pytest.raises(UnsupportedOperation, match=rf"^\S*test_fuse_messages.py:\d+: .*{said}"):
        dtkernels.fuse(function)(torch.ones(3, 4), torch.tensor(1))


def test_a_number_that_the_function_writes_out_is_an_index():
    x = torch.arange(12.0).view(3, 4)
    assert torch.equal(dtkernels.fuse(lambda x: x[:, torch.tensor(1) + 1] * 2)(x), x[:, 2] * 2)
    assert torch.equal(dtkernels.fuse(lambda x, i: x.index_select(1, i) * x[:, i[None]])(x, torch.tensor(1)), x[:, 1:2] ** 2)


def test_arguments_that_an_operation_does_not_take_are_named(monkeypatch):
    monkeypatch.setitem(TABLE, "round", lambda b, x: b.value(x))
    with pytest.raises(UnsupportedOperation, match=r"test_fuse_messages.py:\d+: .*aten.round with these arguments: .*decimals"):
        dtkernels.fuse(lambda x: x.round(decimals=1) * 2)(torch.ones(3))


def test_errors_of_the_translation_have_a_line(monkeypatch):
    monkeypatch.setitem(TABLE, "sin", lambda b, x: 1 // 0)
    with pytest.raises(UnsupportedOperation, match=r"test_fuse_messages.py:\d+: .*ZeroDivisionError"):
        dtkernels.fuse(lambda x: x.sin() * 2)(torch.ones(3))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 3)

    def forward(self, x):
        return self.rnn(x)[0] * 2


@pytest.mark.parametrize("module, place", [(Recurrent(), "test_fuse_messages.py"), (nn.LSTM(4, 3), r"modules/rnn.py"), (nn.Sequential(nn.Tanh(), nn.LSTM(4, 3)), r"modules/rnn.py")])
def test_the_line_in_a_module_of_torch_is_that_of_its_forward(module, place):
    with pytest.raises(UnsupportedOperation, match=rf"^\S*{place}:\d+: "):
        dtkernels.fuse(module)(torch.randn(5, 2, 4))


@pytest.mark.parametrize("traced_before", [False, True])
def test_fallback_runs_in_torch_under_vmap(traced_before):
    fused = dtkernels.fuse(lambda a, b: torch.sigmoid(a) * b, fallback=True, name=f"gate_{traced_before}")
    a, b = torch.randn(2, 3, 4)
    if traced_before:
        fused(a[0], b[0])
    assert torch.equal(torch.vmap(fused)(a, b), torch.sigmoid(a) * b)
    assert dtkernels.paths()[f"gate_{traced_before}"]["torch"] == 1
    with pytest.raises(UnsupportedOperation, match="torch.vmap of a fused function"):
        torch.vmap(dtkernels.fuse(lambda a: a * 2))(a)


def test_results_need_a_gradient_where_they_depend_on_what_needs_one():
    def several(a, b):
        with torch.no_grad():
            c = b * 2
        return a * b, a.sin(), b.cos(), (a.sum(0) * 2)[None], c + a, b.detach() + a, torch.where(b > 0, a, 0.0), a

    fused = dtkernels.fuse(several)
    for needs_a, needs_b in ((False, True), (True, False), (True, True), (False, False)):
        a, b = torch.randn(5, 4, requires_grad=needs_a), torch.randn(5, 4, requires_grad=needs_b)
        got, want = fused(a, b), several(a, b)
        assert [g.requires_grad for g in got] == [w.requires_grad for w in want]
        with torch.no_grad():
            assert not any(g.requires_grad for g in fused(a, b)[:-1])
        if needs_b:
            (got[0].sum() + got[2].sum()).backward()
            torch.testing.assert_close(b.grad, a.detach() - b.detach().sin())
    assert len(fused.programs()) == 2


def test_a_closed_over_parameter_gives_results_that_need_a_gradient():
    layer = nn.Linear(4, 3)
    fused, x = dtkernels.fuse(lambda x: (layer(x), x * 2)), torch.randn(2, 4)
    assert [t.requires_grad for t in fused(x)] == [True, False]
    frozen = copy.deepcopy(layer).requires_grad_(False)
    assert not dtkernels.fuse(frozen)(x).requires_grad


@pytest.mark.parametrize("name", [3, "a b", "class", ""])
def test_a_name_that_python_does_not_take(name):
    with pytest.raises(ValueError, match="^fuse: name is .*; allowed: a Python name$"):
        dtkernels.fuse(lambda x: x * 2, name=name)
