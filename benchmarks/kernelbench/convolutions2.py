"""Declare the problems of level 2 that begin with a convolution. The mathematics is in level2/*.dt.

W has torch's shape: [out, in, ...], of a transposed convolution [in, out, ...]. Where channels are normalized in groups, its dimension of outputs is in two.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from problem import Problem, Sizes

Tensor = torch.Tensor
KINDS = {"W": "weight", "bias": "bias", "gamma": "positive", "beta": "bias", "shift": "normal", "scale": "normal", "factor": "normal", "less": "normal"}
CHANNELS = {"gamma": "o", "beta": "o"}
GROUPS = {"gamma": "go", "beta": "go"}
WIDTH = {"gamma": "u", "beta": "u"}
SHIFT = {"shift": "o"}
SMALL2, SMALL3 = dict(b=2, c=3, y=9, x=10), dict(b=2, c=3, z=6, y=7, x=6)
STRIDED2, STRIDED3 = dict(b=2, c=3, y=4, x=5), dict(b=2, c=3, z=3, y=4, x=3)
OUTPUTS, OUTPUTS_OF_GROUPS = dict(o=6), dict(g=2, o=3)


def images(b: int, c: int, o: int, y: int, x: int, k: int = 3, g: int = 1) -> Sizes:
    """Return the sizes of a convolution in two dimensions; ``o`` channels in all, in ``g`` groups."""
    return dict(b=b, c=c, y=y, x=x, r=k, s=k) | (dict(g=g, o=o // g) if g > 1 else dict(o=o))


def volumes(b: int, c: int, o: int, z: int, y: int, x: int, k: int = 3, g: int = 1) -> Sizes:
    """Return the sizes of a convolution in three dimensions."""
    return images(b, c, o, y, x, k, g) | dict(z=z, q=k)


def _problem(
    reference: Callable, sizes: Sizes, more: dict[str, str] | None = None, transposed: dict | None = None, bias: bool = True, padding: int = 0,
    before: Callable | None = None, small: Sizes | None = None, **others,
) -> Problem:  # fmt: skip
    """Return a problem that begins with a convolution, ``transposed`` with these arguments; ``reference`` takes its result and the inputs after it."""
    deep, grouped = "q" in sizes, "g" in sizes
    taps, outputs = "qrs" if deep else "rs", "go" if grouped else "o"
    inputs = {"X": "bczyx" if deep else "bcyx", "W": ("c" + outputs if transposed is not None else outputs + "c") + taps}
    inputs |= ({"bias": outputs} if bias else {}) | (more or {})
    strided = transposed is not None and transposed.get("stride", 1) > 1
    tried = (STRIDED3 if deep else STRIDED2) if strided else (SMALL3 if deep else SMALL2)
    tried = tried | {k: sizes[k] for k in taps} | (OUTPUTS_OF_GROUPS if grouped else OUTPUTS) | (small or {})
    convolve = getattr(F, f"conv{'_transpose' if transposed is not None else ''}{3 if deep else 2}d")
    settings = dict(transposed) if transposed is not None else dict(padding=padding)

    def run(X: Tensor, W: Tensor, *rest: Tensor) -> Tensor:
        v, rest = (rest[0], rest[1:]) if bias else (None, rest)
        at = 1 if transposed is not None else 0
        X = X if before is None else before(X)
        y = convolve(X, W.flatten(at, at + 1) if grouped else W, v.flatten() if grouped and v is not None else v, **settings)
        return reference(y.unflatten(1, W.shape[at : at + 2]) if grouped else y, *rest)

    flops = _operations(deep, settings if transposed is not None else None, padding, 2 if before else 1)
    return Problem(run, inputs, sizes, tried, KINDS | others.pop("kinds", {}), flops=flops, **others)


def _operations(deep: bool, transposed: dict | None, padding: int, pooled: int) -> Callable[[Sizes], float]:
    """Return a count of the operations of a convolution: each input of a transposed one, each output of another, meets every tap."""

    def count(sizes: Sizes) -> float:
        places = math.prod((sizes[x] // pooled if transposed is not None else sizes[x] + 2 * padding - sizes[k] + 1) for x, k in zip("zyx"[not deep :], "qrs"[not deep :]))
        return 2.0 * places * math.prod(sizes.get(x, 1) for x in ("bcgoqrs" if deep else "bcgors"))

    return count


def _along(w: Tensor, y: Tensor) -> Tensor:
    """Return ``w`` of channels shaped to broadcast against ``y`` [b, o, ...], or of groups of channels [b, g, o, ...]."""
    return w.view(*w.shape, *(1 for _ in range(y.dim() - 1 - w.dim())))


def group_norm(y: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Return the group normalization of ``y`` [b, g, o, ...]."""
    return F.group_norm(y.flatten(1, 2), y.shape[1], gamma.flatten(), beta.flatten()).view(y.shape)


def batch_norm(y: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Return the batch normalization of ``y`` as in training."""
    return F.batch_norm(y, None, None, gamma, beta, training=True)


def line_norm(y: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Return ``y`` with each line of its last dimension normalized."""
    return F.layer_norm(y, gamma.shape, gamma, beta)


def pooled(pool: Callable, y: Tensor, *sizes: int) -> Tensor:
    """Return ``y`` pooled; groups of channels are channels for that."""
    return pool(y.flatten(1, 2), *sizes).unflatten(1, y.shape[1:3])


def _max_of_max(y: Tensor) -> Tensor:
    return torch.sum(F.max_pool3d(F.max_pool3d(y, 2), 3), 1)


def _one_batch_norm_then_groups(y: Tensor, scale: Tensor, shift: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    z = torch.tanh(batch_norm(y.flatten(1, 2), scale.flatten(), shift.flatten())).unflatten(1, y.shape[1:3])
    return group_norm(pooled(F.max_pool2d, z, 2), gamma, beta)


def _factor_norm_factor(y: Tensor, scale: Tensor) -> Tensor:
    z = torch.clamp(F.instance_norm(y * _along(scale, y)), -1.0, 1.0)
    return torch.amax(z * _along(scale, y), 1)


def _softmax_less(y: Tensor, less: Tensor) -> Tensor:
    z = torch.softmax(F.max_pool3d(y, 2), 1)
    return torch.amax(F.silu(z - _along(less, z)), 1)


def _norm_and_convolution(y: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    z = y + F.hardswish(torch.tanh(group_norm(y, gamma, beta)))
    return torch.logsumexp(z.flatten(1, 2), 1)


def _whole_softmax(y: Tensor, scale: Tensor) -> Tensor:
    return torch.softmax(torch.clamp(y, 0.0, 1.0).flatten(2), 2).view(y.shape) * _along(scale, y)


def _twice_leaky(y: Tensor, scale: Tensor) -> Tensor:
    return F.max_pool3d(F.leaky_relu(F.leaky_relu(y, 0.2) * _along(scale, y), 0.2), 2)


def _less_its_means(y: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    z = batch_norm(y, gamma, beta)
    return z - torch.mean(z, (2, 3, 4), keepdim=True)


def _lse_gate(y: Tensor, less: float) -> Tensor:
    z = torch.logsumexp(y, 1)
    return torch.clamp(z * torch.sigmoid(z + 3) / 6 - less, -1, 1)


def _always_zero(y: Tensor, gamma: Tensor, beta: Tensor, seed: float) -> Tensor:
    return torch.clamp(torch.clamp(group_norm(y, gamma, beta), max=0.0), 0.0, 1.0)


TWICE = dict(stride=2, padding=1, output_padding=1)
TWICE_LESS = dict(stride=2, padding=1)

PROBLEMS = {
    "001_conv2d_relu_biasadd": _problem(lambda y, w: torch.relu(y) + _along(w, y), images(128, 64, 128, 128, 128), SHIFT),
    "004_conv2d_mish_mish": _problem(lambda y: F.mish(F.mish(y)), images(64, 64, 128, 256, 256)),
    "006_conv3d_softmax_maxpool_maxpool": _problem(lambda y: F.max_pool3d(F.max_pool3d(torch.softmax(y, 1), 2), 2), volumes(128, 3, 16, 16, 32, 32)),
    "007_conv3d_relu_leakyrelu_gelu_sigmoid_biasadd": _problem(
        lambda y, w: torch.sigmoid(F.gelu(F.leaky_relu(torch.relu(y)))) + _along(w, y), volumes(64, 8, 32, 32, 64, 64), SHIFT),
    "008_conv3d_divide_max_globalavgpool_biasadd_sum": _problem(
        lambda y, w: torch.sum(torch.mean(F.max_pool3d(y / 2.0, 2), (2, 3, 4)) + w, 1), volumes(128, 8, 16, 16, 64, 64), SHIFT),
    "017_conv2d_instancenorm_divide": _problem(lambda y: F.instance_norm(y) / 2.0, images(128, 64, 128, 128, 128)),
    "021_conv2d_add_scale_sigmoid_groupnorm": _problem(
        lambda y, w, scale, *n: group_norm(torch.sigmoid((y + _along(w, y)) * _along(scale, y)), *n), images(128, 8, 32, 256, 256, g=8),
        {"shift": "go", "scale": "go"} | GROUPS),
    "023_conv3d_groupnorm_mean": _problem(lambda y, *n: torch.mean(group_norm(y, *n), (1, 2, 3, 4, 5)), volumes(128, 3, 24, 24, 32, 32, g=8), GROUPS),
    "024_conv3d_min_softmax": _problem(lambda y: torch.softmax(torch.amin(y, 2), 1), volumes(128, 3, 24, 24, 32, 32)),
    "025_conv2d_min_tanh_tanh": _problem(lambda y: torch.tanh(torch.tanh(torch.amin(y, 1))), images(128, 16, 64, 256, 256)),
    "027_conv3d_hardswish_groupnorm_mean": _problem(
        lambda y, *n: torch.mean(group_norm(F.hardswish(y), *n), (3, 4, 5)), volumes(1024, 3, 16, 16, 32, 32, 4, g=4), GROUPS),
    "031_conv2d_min_add_multiply": _problem(lambda y, w: (torch.clamp(y, max=0.5) + _along(w, y)) * 2.0, images(128, 64, 128, 128, 128), SHIFT),
    "032_conv2d_scaling_min": _problem(lambda y: torch.amin(y * 2.0, 1), images(64, 64, 128, 256, 256)),
    "035_conv2d_subtract_hardswish_maxpool_mish": _problem(lambda y: F.mish(F.max_pool2d(F.hardswish(y - 0.5), 2)), images(128, 64, 128, 128, 128)),
    "043_conv3d_max_logsumexp_relu": _problem(
        lambda y: torch.relu(torch.logsumexp(F.max_pool3d(y, 2), 1)), volumes(4, 32, 64, 32, 128, 128), padding=1),
    "046_conv2d_subtract_tanh_subtract_avgpool": _problem(lambda y: F.avg_pool2d(torch.tanh(y - 0.5) - 0.2, 2), images(128, 64, 128, 128, 128)),
    "047_conv3d_mish_tanh": _problem(lambda y: torch.tanh(F.mish(y)), volumes(16, 32, 64, 32, 64, 64)),
    "048_conv3d_scaling_tanh_multiply_sigmoid": _problem(
        lambda y, scale, factor: torch.sigmoid(torch.tanh(y * _along(scale, y)) * _along(factor, y)), volumes(128, 3, 16, 16, 64, 64), {"scale": "o", "factor": "o"}),
    "052_conv2d_activation_batchnorm": _problem(lambda y, *n: batch_norm(torch.tanh(F.softplus(y)) * y, *n), images(64, 64, 128, 128, 128), CHANNELS),
    "054_conv2d_multiply_leakyrelu_gelu": _problem(
        lambda y, scale: F.gelu(F.leaky_relu(y * _along(scale, y))), images(64, 64, 64, 256, 256), {"scale": "o"}),
    "057_conv2d_relu_hardswish": _problem(lambda y: torch.relu(y) * torch.clamp((torch.relu(y) + 3) / 6, 0, 1), images(128, 8, 64, 128, 128)),
    "065_conv2d_avgpool_sigmoid_sum": _problem(lambda y: torch.sum(torch.sigmoid(F.avg_pool2d(y, 4)), (1, 2, 3)), images(128, 8, 64, 384, 384)),
    "067_conv2d_gelu_globalavgpool": _problem(lambda y: torch.mean(F.gelu(y), (2, 3)), images(128, 8, 64, 256, 256)),
    "069_conv2d_hardswish_relu": _problem(lambda y: torch.relu(F.hardswish(y)), images(128, 8, 64, 128, 128)),
    "071_conv2d_divide_leakyrelu": _problem(lambda y: F.leaky_relu(y / 2), images(128, 8, 64, 128, 128)),
    "073_conv2d_batchnorm_scaling": _problem(lambda y, *n: batch_norm(y, *n) * 2.0, images(128, 8, 64, 128, 128), CHANNELS),
    "079_conv3d_multiply_instancenorm_clamp_multiply_max": _problem(_factor_norm_factor, volumes(128, 3, 16, 16, 32, 32), {"scale": "o"}),
    "082_conv2d_tanh_scaling_biasadd_max": _problem(
        lambda y, w: F.max_pool2d(torch.tanh(y) * 2.0 + _along(w, y), 4), images(128, 8, 64, 256, 256), SHIFT),
    "083_conv3d_groupnorm_min_clamp_dropout": _problem(_always_zero, volumes(128, 3, 16, 16, 64, 64, g=8), GROUPS, scalars={"seed": 7}, grad=()),
    "085_conv2d_groupnorm_scale_maxpool_clamp": _problem(
        lambda y, gamma, beta, scale: torch.clamp(pooled(F.max_pool2d, group_norm(y, gamma, beta) * _along(scale, y), 4), 0.0, 1.0),
        images(128, 8, 64, 128, 128, g=16), GROUPS | {"scale": "go"}),
    "087_conv2d_subtract_subtract_mish": _problem(lambda y: F.mish(y - 0.5 - 0.2), images(128, 8, 64, 256, 256)),
    "090_conv3d_leakyrelu_sum_clamp_gelu": _problem(
        lambda y, w: F.gelu(torch.clamp(F.leaky_relu(y, 0.2) + _along(w, y), -1.0, 1.0)), volumes(128, 8, 64, 16, 64, 64), SHIFT),
    "092_conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp": _problem(_norm_and_convolution, images(128, 8, 64, 128, 128, g=16), GROUPS),
    # transposed, in two dimensions
    "002_convtranspose2d_biasadd_clamp_scaling_clamp_divide": _problem(
        lambda y, w: torch.clamp(torch.clamp(y + _along(w, y), 0.0, 1.0) * 2.0, 0.0, 1.0) / 2.0, images(128, 64, 64, 128, 128), SHIFT, TWICE),
    "005_convtranspose2d_subtract_tanh": _problem(lambda y, w: torch.tanh(y - _along(w, y)), images(32, 64, 64, 256, 256, 4), SHIFT, TWICE),
    "010_convtranspose2d_maxpool_hardtanh_mean_tanh": _problem(
        lambda y: torch.tanh(torch.mean(F.hardtanh(F.max_pool2d(y, 2)), (2, 3))), images(128, 64, 64, 256, 256), transposed=dict(padding=1)),
    "011_convtranspose2d_batchnorm_tanh_maxpool_groupnorm": _problem(
        _one_batch_norm_then_groups, images(512, 64, 128, 32, 32, 5, g=8), {"scale": "go", "shift": "go"} | GROUPS, dict(padding=1),
        small=dict(y=4, x=5), kinds={"scale": "positive", "shift": "bias"}),
    "016_convtranspose2d_mish_add_hardtanh_scaling": _problem(lambda y: F.hardtanh(F.mish(y) + 0.5) * 2, images(128, 64, 64, 128, 128), transposed=TWICE),
    "019_convtranspose2d_gelu_groupnorm": _problem(lambda y, *n: group_norm(F.gelu(y), *n), images(128, 64, 64, 256, 256, g=8), GROUPS, {}),
    "036_convtranspose2d_min_sum_gelu_add": _problem(
        lambda y, shift: F.gelu(torch.sum(torch.amin(y, 1), 1)) + shift, images(16, 64, 128, 128, 128), transposed=TWICE, scalars={"shift": 0.3}),
    "042_convtranspose2d_globalavgpool_biasadd_logsumexp_sum_multiply": _problem(
        lambda y, w: torch.logsumexp(torch.mean(y, (2, 3)) + w, 1) * 10.0, images(16, 64, 128, 512, 512), SHIFT, {}),
    "044_convtranspose2d_multiply_globalavgpool_globalavgpool_mean": _problem(
        lambda y: torch.mean(y * 0.5, (2, 3)), images(16, 64, 128, 128, 128), transposed=TWICE),
    "091_convtranspose2d_softmax_biasadd_scaling_sigmoid": _problem(
        lambda y, w: torch.sigmoid((torch.softmax(y, 1) + _along(w, y)) * 2.0), images(128, 64, 128, 64, 64, 4), SHIFT, TWICE),
    "093_convtranspose2d_add_min_gelu_multiply": _problem(
        lambda y: F.gelu(torch.clamp(y + 0.5, max=0.0)) * 2.0, images(128, 64, 128, 64, 64, 4), transposed=dict(stride=2), kinds={"bias": "normal"}),
    # transposed, in three dimensions
    "003_convtranspose3d_sum_layernorm_avgpool_gelu": _problem(
        lambda y, gamma, beta, add: F.gelu(F.avg_pool3d(line_norm(y + add, gamma, beta), 2)), volumes(32, 32, 64, 16, 32, 32) | dict(u=64), WIDTH, TWICE,
        small=dict(u=6), scalars={"add": 1.0}),
    "013_convtranspose3d_mean_add_softmax_tanh_scaling": _problem(
        lambda y, w: torch.tanh(torch.softmax(torch.mean(y, 2) + w[:, None, None], 1)) * 2.0, volumes(16, 16, 64, 32, 128, 128), SHIFT, dict(padding=1)),
    "015_convtranspose3d_batchnorm_subtract": _problem(_less_its_means, volumes(16, 16, 32, 16, 32, 32), CHANNELS, TWICE_LESS),
    "020_convtranspose3d_sum_residualadd_multiply_residualadd": _problem(
        lambda y, w: (y + _along(w, y) + y) * y + y, volumes(16, 32, 64, 16, 32, 32), SHIFT, TWICE),
    "026_convtranspose3d_add_hardswish": _problem(
        lambda y, R: (y + R) * F.hardswish(y + R), volumes(128, 32, 64, 16, 16, 16) | dict(t=32, v=32, u=32), {"R": "botvu"}, TWICE,
        small=dict(t=6, v=8, u=6)),
    "034_convtranspose3d_layernorm_gelu_scaling": _problem(
        lambda y, *n: F.gelu(line_norm(y, *n)) * 1.0, volumes(32, 32, 64, 16, 32, 32, 4) | dict(u=64), WIDTH, TWICE_LESS, small=dict(u=6)),
    "038_convtranspose3d_avgpool_clamp_softmax_multiply": _problem(
        _whole_softmax, volumes(32, 32, 64, 32, 64, 64), {"scale": "o"}, TWICE, before=lambda X: F.avg_pool3d(X, 2), small=dict(z=6, y=5, x=4)),
    "049_convtranspose3d_softmax_sigmoid": _problem(lambda y: torch.sigmoid(torch.softmax(y, 1)), volumes(16, 32, 64, 16, 32, 32), transposed=TWICE),
    "050_convtranspose3d_scaling_avgpool_biasadd_scaling": _problem(
        lambda y, w, first, second: (F.avg_pool3d(y * first, 2) + w[:, None, None, None]) * second, volumes(128, 3, 16, 16, 32, 32), SHIFT, TWICE_LESS,
        scalars={"first": 0.5, "second": 1.5}),
    "058_convtranspose3d_logsumexp_hardswish_subtract_clamp": _problem(
        _lse_gate, volumes(128, 3, 16, 16, 32, 32), transposed=TWICE_LESS, scalars={"less": 0.3}),
    "060_convtranspose3d_swish_groupnorm_hardswish": _problem(
        lambda y, *n: F.hardswish(group_norm(F.silu(y), *n)), volumes(128, 3, 16, 16, 32, 32, g=4), GROUPS, TWICE_LESS),
    "061_convtranspose3d_relu_groupnorm": _problem(
        lambda y, *n: group_norm(torch.relu(y), *n), volumes(16, 64, 128, 32, 32, 32, g=8), GROUPS, {}, bias=False, small=dict(z=3, y=4, x=3)),
    "072_convtranspose3d_batchnorm_avgpool_avgpool": _problem(
        lambda y, *n: F.avg_pool3d(F.avg_pool3d(batch_norm(y, *n), 2), 2), volumes(64, 3, 16, 32, 32, 32), CHANNELS, TWICE_LESS),
    "074_convtranspose3d_leakyrelu_multiply_leakyrelu_max": _problem(_twice_leaky, volumes(16, 16, 32, 16, 32, 32), {"scale": "o"}, TWICE),
    "077_convtranspose3d_scale_batchnorm_globalavgpool": _problem(
        lambda y, *n: torch.mean(batch_norm(y * 2.0, *n), (2, 3, 4)), volumes(16, 64, 128, 16, 32, 32, 5), CHANNELS, {}, small=dict(z=2, y=2, x=3)),
    "078_convtranspose3d_max_max_sum": _problem(
        _max_of_max, volumes(16, 32, 64, 32, 32, 32, 5), transposed=dict(stride=2, padding=2), small=dict(z=4, y=4, x=4)),
    "089_convtranspose3d_maxpool_softmax_subtract_swish_max": _problem(_softmax_less, volumes(128, 3, 16, 16, 32, 32), {"less": "o"}, TWICE),
    "096_convtranspose3d_multiply_max_globalavgpool_clamp": _problem(
        lambda y: torch.clamp(torch.mean(F.max_pool3d(y * 0.5, 2), (2, 3, 4)), 0, 1), volumes(128, 3, 16, 16, 32, 32), transposed=TWICE_LESS),
    "100_convtranspose3d_clamp_min_divide": _problem(
        lambda y: torch.clamp(y, min=-1.0) / 2.0, volumes(16, 64, 128, 24, 48, 48), transposed=TWICE_LESS),
}  # fmt: skip
