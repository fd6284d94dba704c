"""PyTorch's own edge cases: the samples of OpInfo for what torch and this package both have, forward and gradient, against float64.

A sample is translated to the call that a user would write. What an op does not take is counted by name, so that a sample
that is left out without a reason, or a new kind of sample, fails a test.
"""

import sys
import types
import unittest
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import dtkernels

try:
    import expecttest  # noqa: F401  # torch's module of tests derives a class of its own from one of this
except ImportError:
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    sys.modules["expecttest"] = stand_in

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class Lacks(Exception):
    """Raised for a sample that asks for what an op does not have."""


def softmax(x, dim, dtype=None):
    return dtkernels.ops.softmax(x, dim, dtype=dtype)


def layer_norm(x, shape, weight=None, bias=None, eps=1e-5):
    rows, channels = x.shape[: x.dim() - len(shape)], torch.Size(shape).numel()
    weight = x.new_ones(channels) if weight is None else weight.reshape(channels)
    bias = x.new_zeros(channels) if bias is None else bias.reshape(channels)
    return dtkernels.ops.layernorm(x.reshape(*rows, channels), weight, bias, eps).reshape(x.shape)


def rms_norm(x, shape, weight=None, eps=None):
    rows, channels = x.shape[: x.dim() - len(shape)], torch.Size(shape).numel()
    weight = x.new_ones(channels) if weight is None else weight.reshape(channels)
    return dtkernels.ops.rmsnorm(x.reshape(*rows, channels), weight, torch.finfo(x.dtype).eps if eps is None else eps).reshape(x.shape)


def cross_entropy(x, target, weight=None, **options):
    if weight is not None:
        raise Lacks("class weights")
    if target.is_floating_point():
        raise Lacks("probabilities as target")
    return dtkernels.ops.cross_entropy(x.movedim(1, -1), target, **options)


def attention(q, k, v, attn_mask=None, is_causal=False, dropout_p=0.0):
    if dropout_p:
        raise Lacks("dropout")
    if q.dim() != k.dim():
        raise Lacks("queries of another rank than keys")
    return dtkernels.ops.attention(q, k, v, attn_mask, causal=is_causal)


@pytest.fixture(params=["interpreter", "reference"])
def path(request, monkeypatch):
    """Where calls run; float64 always runs the reference."""
    if request.param == "reference":
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return request.param


#: (OpInfo, its variant) -> (ours, torch's, op, samples by what becomes of them)
OPS = {
    ("softmax", ""): (softmax, torch.softmax, "softmax", {"compared": 7}),
    ("softmax", "with_dtype"): (softmax, torch.softmax, "softmax", {"compared": 7}),
    ("nn.functional.layer_norm", ""): (layer_norm, F.layer_norm, "layernorm", {"compared": 6}),
    ("nn.functional.rms_norm", ""): (rms_norm, F.rms_norm, "rmsnorm", {"compared": 6}),
    ("nn.functional.cross_entropy", ""): (
        cross_entropy,
        F.cross_entropy,
        "cross_entropy",
        {"compared": 8, "class weights": 6, "probabilities as target": 7},
    ),
    ("nn.functional.scaled_dot_product_attention", ""): (
        attention,
        F.scaled_dot_product_attention,
        "attention",
        {"compared": 9, "dropout": 12, "queries of another rank than keys": 4},
    ),
}


def samples(name: str, variant: str, dtype: torch.dtype) -> list:
    (info,) = [i for i in op_db if (i.name, i.variant_test_name) == (name, variant)]
    return list(info.sample_inputs("cpu", dtype, requires_grad=True))


def moved(value, dtype: torch.dtype | None = None):
    """A value with tensors of its own, of another dtype where one is given and they hold floating numbers."""
    if not isinstance(value, torch.Tensor):
        return value
    own = value.detach().clone()
    own = own.to(dtype) if dtype and own.is_floating_point() else own
    return own.requires_grad_(value.requires_grad)


def run(function, sample, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The result for a sample, and the gradients of its tensors."""
    args = [moved(v, dtype) for v in (sample.input, *sample.args)]
    named = {n: moved(v, dtype) for n, v in sample.kwargs.items()}
    result = function(*args, **named)
    leaves = [v for v in (*args, *named.values()) if isinstance(v, torch.Tensor) and v.requires_grad]
    adjoint = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).reshape(result.shape)
    return result, list(torch.autograd.grad(result, leaves, adjoint.to(result.dtype), allow_unused=True))


def exactly(function, sample, dtype: torch.dtype):
    """torch's own result in float64. The default of rms_norm's eps depends on the dtype, and is the one thing that stays as it is."""
    if function is F.rms_norm and sample.kwargs.get("eps") is None:
        return run(lambda *a, **k: F.rms_norm(*a, **{**k, "eps": torch.finfo(dtype).eps}), sample, torch.float64)
    return run(function, sample, torch.float64)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name, variant", OPS, ids=lambda v: v or "plain")
def test_samples_agree_with_torch(name, variant, dtype, path):
    ours, theirs, op, counts = OPS[name, variant]
    before, found, empty = dtkernels.paths().get(op, dict.fromkeys(("interpreter", "reference"), 0)), Counter(), 0
    for sample in samples(name, variant, dtype):
        try:
            result, grads = run(ours, sample)
        except Lacks as reason:
            found[str(reason)] += 1
            continue
        found["compared"] += 1
        empty += not result.numel()
        wanted, wanted_grads = exactly(theirs, sample, dtype)
        agree(result, wanted, dtype, sample)
        for grad, want in zip(grads, wanted_grads, strict=True):
            agree(grad, want, dtype, sample)
    assert found == counts
    ran = {kind: dtkernels.paths()[op][kind] - before[kind] for kind in ("interpreter", "reference")}
    assert sum(ran.values()) == counts["compared"]
    by_kernels = path == "interpreter" and dtype != torch.float64 and variant != "with_dtype"  # which is float64 too
    least = counts["compared"] - empty if by_kernels else 0  # of several results without elements the reference makes some
    assert least <= ran["interpreter"] <= (counts["compared"] if by_kernels else 0)


def agree(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, sample) -> None:
    """Within the rounding of sums as long as the sample's longest dimension, of products of its numbers."""
    assert found.shape == wanted.shape, sample
    if not wanted.numel():
        return
    peak = wanted.nan_to_num(0, 0, 0).abs().max().clamp(min=1).item()
    given = [t.detach().abs().max().item() for t in (sample.input, *sample.args) if isinstance(t, torch.Tensor) and t.numel()]
    terms = max([1, *sample.input.shape]) * max([1.0, *given]) ** 2
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=4 * torch.finfo(dtype).eps * peak * terms, equal_nan=True)


@pytest.mark.parametrize("dim", [-3, 3, 7])
def test_softmax_names_a_dimension_that_there_is_not(dim):
    with pytest.raises(ValueError, match=rf"^softmax: dim is {dim}; allowed: -2 to 1$"):
        dtkernels.ops.softmax(torch.zeros(2, 3), dim)


def test_softmax_along_a_dimension_compiles_to_one_graph():
    """Rows that no view joins were refused where torch.compile asks for shapes alone."""
    x = torch.randn(3, 4, 5)
    compiled = torch.compile(lambda x: dtkernels.ops.softmax(x, 1, dtype=torch.float64), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), x.double().softmax(1))
    with pytest.raises(TypeError, match=r"^softmax: dim is 1.5; allowed: an integer$"):
        dtkernels.ops.softmax(x, 1.5)
