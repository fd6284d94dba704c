"""Kernels in the interpreter print no warning of NumPy's: padded lanes divide by 0 and overflow. What a result holds is not hidden.

The random programs of test_property.py run with warnings as errors too.
"""

import warnings

import numpy as np
import pytest
import torch

import dtkernels

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

#: each warned: (program, inputs, result)
ARTEFACTS = {
    "a padded lane divides 0 by 0": ("Func f; In A; Var i; f[i] = A[i] / A[i]; f.tensorize(i:4);", [[1.0, 2.0, 3.0]], [1.0, 1.0, 1.0]),
    "a padded lane divides by 0": ("Func f; In A; Var i; f[i] = 1 / A[i]; f.tensorize(i:4);", [[1.0, 2.0, 4.0]], [1.0, 0.5, 0.25]),
    "a padded lane takes a logarithm of 0": ("Func f; In A; Var i; f[i] = log(A[i]); f.tensorize(i:4);", [[1.0, 1.0, 1.0]], [0.0, 0.0, 0.0]),
    "infinities in a branch that is not taken": ("Func f; In A; Var i; f[i] = where(A[i] > 0, 1 / A[i], 0); f.tensorize(i:4);", [[0.0, 2.0, 4.0]], [0.0, 0.5, 0.25]),
    "a row of masked scores": (
        "Func f; In A; Var i; RVar j; f[i] = rmax(where(A[i, j] > 0, A[i, j], -inf), j); f.tensorize(j:4);", [[[1.0, 2.0, -1.0]]], [2.0]),
}  # fmt: skip


@pytest.mark.parametrize("name", ARTEFACTS)
def test_what_a_mask_drops_is_not_warned_of(name):
    text, inputs, result = ARTEFACTS[name]
    assert dtkernels.compile(text)(*map(torch.tensor, inputs)).tolist() == result


def test_ops_print_no_warning_and_show_what_is_not_finite():
    x = torch.tensor([[0.0, torch.inf, 1.0], [torch.nan, 0.0, 1.0], [-torch.inf, -torch.inf, -torch.inf]])
    for ours, theirs in ((dtkernels.ops.softmax(x), torch.softmax(x, -1)), (dtkernels.ops.relu(x), torch.relu(x))):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        assert ours.isnan().any()


def test_a_result_of_0_by_0_and_of_too_large_a_number_is_there():
    f = dtkernels.compile("Func f; In A, B; Var i; f[i] = A[i] / B[i];")
    got = f(torch.tensor([0.0, 1.0, -1.0, 3e38]), torch.tensor([0.0, 0.0, 0.0, 1e-3]))
    assert got[0].isnan() and got[1:].tolist() == [torch.inf, -torch.inf, torch.inf]


def test_the_settings_of_numpy_are_left_as_they_are():
    before = np.geterr()
    dtkernels.compile("Func f; In A; Var i; f[i] = 1 / A[i];")(torch.zeros(3))
    assert np.geterr() == before
    with warnings.catch_warnings(), pytest.raises(RuntimeWarning):
        np.float32(1) / np.float32(0)
