"""Declare the problems of level 2: chains around a product or a convolution. The mathematics is in level2/*.dt.

The inputs and sizes of linear layers are here, those of convolutions in convolutions2.py. A linear layer has W of shape [out, in], as
torch's. Where outputs are normalized in groups, or pooled, W and what goes with its rows has its first dimension in two, and so has the result.
"""

from __future__ import annotations

import convolutions2
import torch
import torch.nn.functional as F
from problem import Problem, Sizes, products

from dtkernels.runtime.reference.philox import random

Tensor = torch.Tensor
LINEAR = {"X": "bk", "W": "ok", "bias": "o"}
GROUPED = {"X": "bk", "W": "gck", "bias": "gc"}
KINDS = {"W": "weight", "bias": "bias", "gamma": "positive", "beta": "bias"}
USUAL = dict(b=1024, k=8192, o=8192)
LARGE = dict(b=16384, k=4096, o=4096)
SMALL = dict(b=19, k=37, o=45)
SMALL_GROUPS = dict(b=19, k=37, g=3, c=7)


def _grouped(groups: int, b: int = 1024, k: int = 8192, o: int = 8192) -> Sizes:
    return dict(b=b, k=k, g=groups, c=o // groups)


def _linear(reference, more: dict[str, str] | None = None, sizes: Sizes = USUAL, kinds: dict[str, str] | None = None, **others) -> Problem:
    """Return a problem that begins with a linear layer; ``reference`` takes its result and the inputs after it."""
    return Problem(
        lambda X, W, bias, *rest: reference(F.linear(X, W, bias), *rest),
        LINEAR | (more or {}), sizes, SMALL | others.pop("small", {}), KINDS | (kinds or {}), flops=products("bko"), **others,
    )  # fmt: skip


def _groups(reference, more: dict[str, str] | None = None, sizes: Sizes | None = None, **others) -> Problem:
    """Return a problem that begins with a linear layer whose outputs are viewed as groups; ``reference`` takes them as [b, g, c]."""
    return Problem(
        lambda X, W, bias, *rest: reference(F.linear(X, W.flatten(0, 1), bias.flatten()).view(len(X), *bias.shape), *rest),
        GROUPED | (more or {}), sizes or _grouped(16), SMALL_GROUPS | others.pop("small", {}), KINDS | others.pop("kinds", {}),
        flops=products("bkgc"), **others,
    )  # fmt: skip


NORM = {"gamma": "gc", "beta": "gc"}
COLUMNS = {"gamma": "o", "beta": "o"}


def group_norm(y: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Return the group normalization of ``y`` [b, g, c, ...], with ``gamma`` and ``beta`` [g, c]."""
    return F.group_norm(y.flatten(1, 2), y.shape[1], gamma.flatten(), beta.flatten()).view(y.shape)


def batch_norm(y: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None) -> Tensor:
    """Return the batch normalization of ``y`` as in training."""
    return F.batch_norm(y, None, None, gamma, beta, training=True)


def dropout(y: Tensor, seed: float, p: float) -> Tensor:
    """Return ``y`` with what the random numbers of its row and column leave, as the DT text draws them."""
    if y.device.type == "meta":
        return y
    at = [torch.arange(n, device=y.device).view([-1 if i == d else 1 for i in range(y.dim())]) for d, n in enumerate(y.shape)]
    return torch.where(random(torch.tensor(int(seed), device=y.device), at) < p, 0, y / (1 - p))


def _clamped_mish(y: Tensor) -> Tensor:
    found = torch.logsumexp(torch.clamp(y * 2.0 + y * 2.0, -10.0, 10.0), 1)
    return found * F.mish(found)


def _instance_norm(y: Tensor, R: Tensor) -> Tensor:
    return (F.instance_norm(y[:, None, None])[:, 0, 0] + R) * R


def _mean_of_rows(X: Tensor, W: Tensor, bias: Tensor, less: Tensor) -> Tensor:
    mean = torch.mean(F.linear(X, W, bias) - less, 1, keepdim=True)
    return F.gelu(torch.logsumexp(mean, 1, keepdim=True)) + X


def _two_layers(X: Tensor, W: Tensor, bias: Tensor, W2: Tensor, bias2: Tensor) -> Tensor:
    return torch.logsumexp(F.linear(torch.sigmoid(F.linear(X, W, bias)), W2, bias2), 1)


def _row_of_one(y: Tensor) -> Tensor:
    mean = torch.mean(torch.max(torch.sum(y, 1, keepdim=True), 1, keepdim=True)[0], 1, keepdim=True)
    return torch.logsumexp(torch.logsumexp(mean, 1, keepdim=True), 1, keepdim=True)


def _less_its_mean(y: Tensor) -> Tensor:
    most = torch.max(y, 1, keepdim=True).values
    return F.gelu(most - most.mean(1, keepdim=True))


def _twice_swish(y: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor) -> Tensor:
    return F.silu(F.silu(group_norm(y, gamma, beta)) * weight)


def _least_of_groups(y: Tensor, gamma: Tensor, beta: Tensor, shift: Tensor) -> Tensor:
    return (torch.amin(group_norm(y, gamma, beta), (1, 2))[:, None] + shift).mT


PROBLEMS = {
    "009_matmul_subtract_multiply_relu": _linear(lambda y: torch.relu((y - 2.0) * 1.5), kinds={"W": "normal"}),  # usual weights leave nothing above 0
    "012_gemm_multiply_leakyrelu": _linear(lambda y: F.leaky_relu(y * 2.0, 0.1)),
    "014_gemm_divide_sum_scaling": Problem(
        lambda X, W: torch.sum(X @ W.mT / 2, 1) * 1.5, {"X": "bk", "W": "ok"}, USUAL, SMALL, {"W": "weight"}, flops=products("bko")),
    "018_matmul_sum_max_avgpool_logsumexp_logsumexp": _linear(_row_of_one),
    "022_matmul_scale_residualadd_clamp_logsumexp_mish": _linear(_clamped_mish),
    "028_bmm_instancenorm_sum_residualadd_multiply": _linear(_instance_norm, {"R": "bo"}),
    "029_matmul_mish_mish": _linear(lambda y: F.mish(F.mish(y))),
    "030_gemm_groupnorm_hardtanh": _groups(lambda y, *w: F.hardtanh(group_norm(y, *w), -2.0, 2.0), NORM),
    "033_gemm_scale_batchnorm": _linear(lambda y, scale, *w: batch_norm(y * scale, *w), {"scale": "o"} | COLUMNS, kinds={"scale": "normal"}),
    "037_matmul_swish_sum_groupnorm": _groups(
        lambda y, more, *w: group_norm(F.silu(y) + more, *w), {"more": "gc"} | NORM, _grouped(64, 32768, 1024, 4096), kinds={"more": "normal"}),
    "039_gemm_scale_batchnorm": _linear(lambda y, scale, *w: batch_norm(y * scale, *w), {"scale": "o"} | COLUMNS, LARGE, {"scale": "normal"}),
    "040_matmul_scaling_residualadd": _linear(lambda y: y * 0.5 + y, sizes=LARGE),
    "041_gemm_batchnorm_gelu_relu": _linear(lambda y, *w: torch.relu(F.gelu(batch_norm(y, *w))), COLUMNS, LARGE),
    "045_gemm_sigmoid_logsumexp": Problem(
        _two_layers, LINEAR | {"W2": "po", "bias2": "p"}, dict(b=16384, k=2048, o=4096, p=1024), SMALL | dict(p=21),
        KINDS | {"W2": "weight", "bias2": "bias"}, flops=lambda s: products("bko")(s) + products("bop")(s)),
    "051_gemm_subtract_globalavgpool_logsumexp_gelu_residualadd": Problem(
        _mean_of_rows, LINEAR | {"less": "o"}, USUAL | dict(b=2048), SMALL, KINDS | {"less": "normal"}, flops=products("bko")),
    "053_gemm_scaling_hardtanh_gelu": _linear(lambda y: F.gelu(F.hardtanh(y * 0.5, -2, 2)), sizes=USUAL | dict(b=2048)),
    "055_matmul_maxpool_sum_scale": Problem(
        lambda X, W, bias: torch.sum(F.max_pool1d(F.linear(X, W.flatten(0, 1), bias.flatten())[:, None], W.shape[1])[:, 0], 1) * 0.5,
        {"X": "bk", "W": "prk", "bias": "pr"}, dict(b=128, k=32768, p=16384, r=2), dict(b=19, k=37, p=23, r=2), KINDS, flops=products("bkpr")),
    "056_matmul_sigmoid_sum": _linear(lambda y: torch.sum(torch.sigmoid(y), 1), sizes=dict(b=128, k=32768, o=32768)),
    "059_matmul_swish_scaling": _linear(lambda y: F.silu(y) * 2.0, sizes=dict(b=128, k=32768, o=32768)),
    "062_matmul_groupnorm_leakyrelu_sum": _groups(lambda y, *w: 2 * F.leaky_relu(group_norm(y, *w), 0.01), NORM, _grouped(512)),
    "063_gemm_relu_divide": _linear(lambda y: torch.relu(y) / 2.0),
    "064_gemm_logsumexp_leakyrelu_leakyrelu_gelu_gelu": _linear(lambda y: F.gelu(F.gelu(F.leaky_relu(F.leaky_relu(torch.logsumexp(y, 1)))))),
    "066_matmul_dropout_softmax": _linear(
        lambda y, seed: torch.softmax(dropout(y, seed, 0.2), 1), sizes=dict(b=128, k=16384, o=16384), scalars={"seed": 7}),
    "068_matmul_min_subtract": _linear(lambda y, c: torch.clamp(y, max=c) - c, sizes=dict(b=128, k=16384, o=16384), scalars={"c": 2.0}),
    "070_gemm_sigmoid_scaling_residualadd": _linear(lambda y: torch.sigmoid(y) * 2.0 + y),
    "075_gemm_groupnorm_min_biasadd": _groups(
        _least_of_groups, NORM | {"shift": "o"}, _grouped(512) | dict(o=8192), small=dict(o=21), kinds={"shift": "normal"}),
    "076_gemm_add_relu": _linear(torch.relu, kinds={"bias": "normal"}),
    "080_gemm_max_subtract_gelu": _linear(_less_its_mean, grad=()),
    "081_gemm_swish_divide_clamp_tanh_clamp": _linear(lambda y: torch.clamp(torch.tanh(torch.clamp(F.silu(y) / 2.0, -1.0, 1.0)), -1.0, 1.0)),
    "084_gemm_batchnorm_scaling_softmax": _linear(
        lambda y, gamma, beta, scale: torch.softmax(scale * batch_norm(y, gamma, beta), 1), COLUMNS, scalars={"scale": 1.0}),
    "086_matmul_divide_gelu": _linear(lambda y: F.gelu(y / 10.0)),
    "088_gemm_groupnorm_swish_multiply_swish": _groups(_twice_swish, NORM | {"weight": "gc"}, _grouped(256), kinds={"weight": "normal"}),
    "094_gemm_biasadd_hardtanh_mish_groupnorm": _groups(
        lambda y, more, *w: group_norm(F.mish(F.hardtanh(y + more)), *w), {"more": "gc"} | NORM, _grouped(256), kinds={"more": "normal"}),
    "095_matmul_add_swish_tanh_gelu_hardtanh": _linear(
        lambda y, add: F.hardtanh(F.gelu(torch.tanh(F.silu(y + add)))), {"add": "o"}, kinds={"add": "normal"}),
    "097_matmul_batchnorm_biasadd_divide_swish": _linear(
        lambda y, gamma, beta, add: F.silu((batch_norm(y, gamma, beta) + add) / 1.0), COLUMNS, scalars={"add": 0.3}),
    "098_matmul_avgpool_gelu_scale_max": Problem(
        lambda X, W, bias: torch.max(F.gelu(F.avg_pool1d(F.linear(X, W.flatten(0, 1), bias.flatten())[:, None], W.shape[1])[:, 0]) * 2.0, 1).values,
        {"X": "bk", "W": "prk", "bias": "pr"}, dict(b=1024, k=8192, p=512, r=16), dict(b=19, k=37, p=23, r=3), KINDS, flops=products("bkpr")),
    "099_matmul_gelu_softmax": _linear(lambda y: torch.softmax(F.gelu(y), 1)),
    **convolutions2.PROBLEMS,
}  # fmt: skip

NOT_SAID: dict[str, str] = {}
