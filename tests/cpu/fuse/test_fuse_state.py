"""What selects a program of a fused function besides its tensors: arguments that are objects, what it closes over, settings of torch; copies and nesting."""

import collections
import copy
import dataclasses
import functools
import pickle
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

import dtkernels
from dtkernels.frontend import UnsupportedOperation


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


X, W = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


def scaled(x, by):
    return x * by


ARGUMENTS = {
    "numpy numbers": (lambda x, s: x * s, [np.float32(2), np.float32(3), np.float32(4)]),
    "lambdas": (lambda x, g: g(x), [lambda a: a * 2, lambda a: a * 3]),
    "partial functions": (lambda x, g: g(x), [functools.partial(scaled, by=2.0), functools.partial(scaled, by=3.0)]),
    "slices": (lambda x, s: x[:, s] * 1, [slice(1, 3), slice(0, 3)]),
    "ranges": (lambda x, r: sum(x * i for i in r), [range(3), range(4)]),
    "arrays": (lambda x, a: x * torch.from_numpy(a), [np.full(6, 2.0, np.float32), np.full(6, 3.0, np.float32)]),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_is_no_tensor_selects_a_program(name):
    function, values = ARGUMENTS[name]
    fused = dtkernels.fuse(function)
    for value in (*values, *values):
        torch.testing.assert_close(fused(X, value), function(X, value))
    assert len(fused.programs()) == len(values)


@dataclasses.dataclass(slots=True)
class Slots:
    by: float




def test_what_a_function_closes_over_is_read_at_each_call(monkeypatch):
    several, queue, array, slots, settings = [W], collections.deque([W]), np.ones(3, np.float32), Slots(2.0), types.ModuleType("settings_of_mine")
    settings.by = 2.0
    monkeypatch.setitem(sys.modules, "settings_of_mine", settings)
    monkeypatch.setitem(globals(), "settings", settings)

    def function(x):
        made = sum(x @ w for w in several) + sum(x @ w for w in queue) * slots.by
        return made * torch.from_numpy(array) * globals_settings()

    def globals_settings():
        return settings_by(1.0)

    fused = dtkernels.fuse(function)

    def same():
        torch.testing.assert_close(fused(X), function(X), rtol=1e-4, atol=1e-4)

    same()
    several.append(W)  # the same tensor once more
    same()
    queue.append(W * 2)
    same()
    array[:] = 3
    same()
    slots.by = 5.0
    same()
    settings.by = 7.0
    same()
    monkeypatch.setitem(globals(), "settings_by", lambda x: x * 11)
    same()


def settings_by(x):
    return x * settings.by  # noqa: F821 (a module that the test makes)


def test_a_number_that_is_no_number_and_the_default_dtype():
    fused = dtkernels.fuse(lambda x, s: x.masked_fill(x > 0, s))
    for _ in range(3):
        fused(X, float("nan"))
    assert len(fused.programs()) == 1
    made = dtkernels.fuse(lambda x: x * torch.ones(6))
    assert made(X).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert made(X).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@dtkernels.fuse
def inner(x):
    return x.sin()


def test_a_fused_function_calls_others():
    outer = dtkernels.fuse(lambda x: inner(x) * 2)
    for x in (X, X[:2], X):
        torch.testing.assert_close(outer(x), x.sin() * 2)
        inner(x)
    assert len(outer.programs()) == 1
    module = nn.Sequential(dtkernels.fuse(nn.Linear(6, 3)), nn.ReLU())
    torch.testing.assert_close(dtkernels.fuse(module)(X), module(X))


def test_copies_have_their_own_parameters_and_functions_are_pickled_by_name():
    one = dtkernels.fuse(nn.Linear(6, 3))
    one(X)
    for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        torch.testing.assert_close(other(X), one(X))
        with torch.no_grad():
            other.module.weight.mul_(2)
        torch.testing.assert_close(other(X), other.module(X))
    torch.testing.assert_close(one(X), one.module(X))
    assert pickle.loads(pickle.dumps(inner)) is inner and copy.deepcopy(inner) is inner


@dataclasses.dataclass
class Pair:
    first: torch.Tensor


def test_results_made_of_sizes_and_classes_that_torch_does_not_know():
    fused = dtkernels.fuse(lambda x: (x * 2, x.shape[0] / 2, x.shape[0] > 5, x.numel()))
    assert [fused(x)[1:] for x in (X, torch.ones(7, 6))] == [(2.0, False, 24), (3.5, True, 42)]
    with pytest.raises(UnsupportedOperation, match="a result of class Pair: it holds tensors"):
        dtkernels.fuse(lambda x: Pair(x * 2))(X)
    with pytest.raises(UnsupportedOperation, match="torch.func.grad"):
        torch.func.grad(dtkernels.fuse(lambda x: (x**3).sum()))(X)
    with pytest.raises(UnsupportedOperation, match="test_fuse_state.py:.*(a Generator of one's own|torch._C.Generator)"):
        generator = torch.Generator()
        dtkernels.fuse(lambda x: x + torch.rand(6, generator=generator))(X)


def test_a_closed_over_tensor_is_not_changed_by_a_trace():
    held = torch.ones(3)
    for change in (lambda x: held.add_(5.0), lambda x: held.__iadd__(5.0), lambda x: held[1:].mul_(2.0), lambda x: held.__setitem__(0, 5.0), lambda x: held.copy_(x[0, :3])):
        with pytest.raises(UnsupportedOperation, match="changing (a tensor in place that it closes over|an argument in place)"):
            dtkernels.fuse(lambda x, change=change: (change(x), x * 2)[1])(X)
    assert held.tolist() == [1, 1, 1]
    ours = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    theirs, fused = copy.deepcopy(ours), dtkernels.fuse(ours, fallback=True)
    for _ in range(2):
        torch.testing.assert_close(fused(X), theirs(X))
    for one, other in zip(ours.buffers(), theirs.buffers()):
        assert torch.equal(one, other)
