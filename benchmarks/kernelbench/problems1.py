"""Declare the problems of level 1: single operations. The mathematics is in level1/*.dt."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from problem import Problem, products

XKY, ROWS = {"A": "xk", "B": "ky"}, {"A": "xy"}
SQUARE = dict(x=37, k=41, y=35)
IMAGES, MIDDLE = {"A": "bchw"}, {"A": "byz"}
WIDE = (dict(x=4096, y=393216), dict(x=5, y=301))
SCANNED = (dict(x=32768, t=32768), dict(x=5, t=301))
REDUCED = (dict(b=128, y=4096, z=4095), dict(b=3, y=37, z=21))
DIFFERENCE = {"P": "xy", "T": "xy"}
CONV1, CONV2, CONV3 = {"A": "bcw", "W": "ocr"}, {"A": "bchw", "W": "ocrs"}, {"A": "bcdhw", "W": "ocqrs"}
TRANSPOSED1, TRANSPOSED2, TRANSPOSED3 = {"A": "bcw", "W": "cor"}, {"A": "bchw", "W": "cors"}, {"A": "bcdhw", "W": "coqrs"}
DEPTHWISE = {"A": "bchw", "W": "crs"}
WEIGHT = {"W": "weight"}
FLAT = dict(b=2, c=5, h=7, w=9, o=3)  #: small images
DEEP = dict(b=1, c=3, d=3, h=4, w=5, o=2)  #: small boxes


def product(x: int, k: int, y: int, of: str = "", fn=torch.mm, **more) -> Problem:
    """A product of two matrices: ``of`` says which are transposed, ``A``, ``B``."""
    inputs = {"A": "kx" if "A" in of else "xk", "B": "yk" if "B" in of else "ky"}
    return Problem(fn, inputs, dict(x=x, k=k, y=y), SQUARE, **more)


def elements(fn, **scalars: float) -> Problem:
    """A function of each element."""
    return Problem(fn, ROWS, *WIDE, scalars=scalars)


def scan(fn, **more) -> Problem:
    """A running total along rows."""
    return Problem(fn, {"A": "xt"} | more.pop("others", {}), *SCANNED, **more)


def reduction(fn, grad: tuple[str, ...] | None = None) -> Problem:
    """A reduction of the middle dimension."""
    return Problem(fn, MIDDLE, *REDUCED, grad=grad)


def depthwise(published: dict, small: dict) -> Problem:
    """A convolution of each channel by itself; its kernels lack the dimension of one input channel."""
    return Problem(lambda A, W: F.conv2d(A, W[:, None], groups=len(W)), DEPTHWISE, published, small, WEIGHT)


def transposed(fn, inputs: dict[str, str], published: dict, small: dict, **options) -> Problem:
    """A transposed convolution. Each input element meets every tap: that counts its operations, where strides leave taps out."""
    labels = "".join(dict.fromkeys("".join(inputs.values())))
    return Problem(partial(fn, **options), inputs, published, small, WEIGHT, flops=products(labels))


def grouped(fn, **options):
    """A transposed convolution of channels viewed as groups of channels."""

    def call(A, W):
        groups = len(W)
        return fn(A.flatten(1, 2), W.flatten(0, 1), groups=groups, **options).unflatten(1, (groups, -1))

    return call


def batch_norm(A, w, z, eps):
    return F.batch_norm(A, None, None, w, z, training=True, eps=eps)


def group_norm(A, w, z, eps):
    return F.group_norm(A.flatten(1, 2), A.shape[1], w.flatten(), z.flatten(), eps).reshape(A.shape)


def layer_norm(A, w, z, eps):
    return F.layer_norm(A, w.shape, w, z, eps)


def exclusive_sum(A):
    return torch.cat((torch.zeros_like(A[:, :1]), torch.cumsum(A[:, :-1], 1)), 1)


PRODUCTS = {
    "001_square_matmul": product(4096, 4096, 4096),
    "002_matmul": product(2048, 8192, 4096),
    "003_batched_matmul": Problem(torch.bmm, {"A": "bxk", "B": "bky"}, dict(b=128, x=512, k=1024, y=2048), dict(b=3, x=20, k=33, y=17)),
    "004_matvec": Problem(torch.mm, {"A": "xk", "v": "ky"}, dict(x=2048, k=1048576, y=1), dict(x=21, k=301, y=1)),
    "005_matrix_scalar": Problem(lambda A, s: A * s, ROWS, dict(x=65536, y=16384), dict(x=5, y=301), scalars={"s": 3.14}),
    "006_matmul_large_k": product(256, 524288, 256),
    "007_matmul_small_k": product(32768, 64, 32768),
    "008_matmul_irregular": product(8205, 2949, 5921),
    "009_matmul_tall_skinny": product(32768, 32, 32768),
    "010_matmul_3d": Problem(torch.matmul, {"A": "nmk", "B": "kl"}, dict(n=16, m=1024, k=2048, l=768), dict(n=2, m=19, k=33, l=21)),
    "011_matmul_4d": Problem(torch.matmul, {"A": "bijl", "B": "lk"}, dict(b=8, i=256, j=512, l=256, k=768), dict(b=2, i=3, j=7, l=33, k=21)),
    "012_matmul_diagonal": Problem(lambda d, B: d[:, None] * B, {"d": "x", "B": "xy"}, dict(x=4096, y=4096), dict(x=33, y=41)),
    "013_matmul_symmetric": Problem(torch.mm, XKY, dict(x=4096, k=4096, y=4096), dict(x=37, k=37, y=37), {"A": "symmetric", "B": "symmetric"}),
    "014_matmul_upper": Problem(
        lambda A, B: torch.triu(A @ B), XKY, dict(x=4096, k=4096, y=4096), dict(x=67, k=67, y=67), {"A": "upper", "B": "upper"}, grad=(),
        flops=products("xky", times=1 / 3)),
    "015_matmul_lower": Problem(
        lambda A, B: torch.tril(A @ B), XKY, dict(x=4096, k=4096, y=4096), dict(x=67, k=67, y=67), {"A": "lower", "B": "lower"}, grad=(),
        flops=products("xky", times=1 / 3)),
    "016_matmul_transposed_a": product(2048, 8192, 4096, "A", lambda A, B: A.T @ B),
    "017_matmul_transposed_b": product(2048, 8192, 4096, "B", lambda A, B: A @ B.T),
    "018_matmul_transposed_both": product(2048, 8192, 4096, "AB", lambda A, B: A.T @ B.T),
}  # fmt: skip

ELEMENTS = {
    "019_relu": elements(torch.relu),
    "020_leaky_relu": elements(lambda A, slope: F.leaky_relu(A, slope), slope=0.01),
    "021_sigmoid": elements(torch.sigmoid),
    "022_tanh": elements(torch.tanh),
    "025_swish": elements(lambda A: A * torch.sigmoid(A)),
    "026_gelu": elements(F.gelu),
    "027_selu": elements(F.selu),
    "028_hard_sigmoid": elements(F.hardsigmoid),
    "029_softplus": elements(F.softplus),
    "030_softsign": elements(F.softsign),
    "031_elu": elements(lambda A, alpha: F.elu(A, alpha), alpha=1.0),
    "032_hard_tanh": elements(F.hardtanh),
    "088_gelu_tanh": Problem(lambda A: F.gelu(A, approximate="tanh"), ROWS, dict(x=8192, y=8192), dict(x=5, y=301)),
}

NORMS = {
    "023_softmax": Problem(lambda A: torch.softmax(A, 1), ROWS, *WIDE),
    "024_log_softmax": Problem(lambda A: torch.log_softmax(A, 1), ROWS, *WIDE),
    "033_batchnorm": Problem(
        batch_norm, IMAGES | {"w": "c", "z": "c"}, dict(b=64, c=64, h=512, w=512), dict(b=3, c=5, h=8, w=9), {"w": "ones", "z": "zeros"}, {"eps": 1e-5}),
    "034_instancenorm": Problem(lambda A, eps: F.instance_norm(A, eps=eps), IMAGES, dict(b=112, c=64, h=512, w=512), dict(b=2, c=5, h=8, w=9), scalars={"eps": 1e-5}),
    "035_groupnorm": Problem(
        group_norm, {"A": "bgchw", "w": "gc", "z": "gc"}, dict(b=112, g=8, c=8, h=512, w=512), dict(b=2, g=3, c=2, h=8, w=9), {"w": "ones", "z": "zeros"}, {"eps": 1e-5}),
    "036_rmsnorm": Problem(
        lambda A, eps: A / torch.sqrt((A**2).mean(1, keepdim=True) + eps), IMAGES, dict(b=112, c=64, h=512, w=512), dict(b=2, c=5, h=8, w=9), scalars={"eps": 1e-5}),
    "037_frobenius": Problem(lambda A: A / torch.linalg.vector_norm(A), IMAGES, dict(b=112, c=64, h=512, w=512), dict(b=2, c=5, h=8, w=9)),
    "038_l1norm": Problem(lambda A: A / A.abs().mean(1, keepdim=True), ROWS, dict(x=32768, y=65535), dict(x=5, y=301)),
    "039_l2norm": Problem(lambda A: A / torch.linalg.vector_norm(A, dim=1, keepdim=True), ROWS, dict(x=32768, y=65535), dict(x=5, y=301)),
    "040_layernorm": Problem(
        layer_norm, IMAGES | {"w": "chw", "z": "chw"}, dict(b=16, c=64, h=256, w=256), dict(b=3, c=4, h=8, w=9), {"w": "ones", "z": "zeros"}, {"eps": 1e-5}),
}  # fmt: skip

POOLS = {
    "041_max_pool_1d": Problem(partial(F.max_pool1d, kernel_size=8, stride=1, padding=4, dilation=3), {"A": "bcx"}, dict(b=64, c=192, x=65536), dict(b=2, c=3, x=37)),
    "042_max_pool_2d": Problem(partial(F.max_pool2d, kernel_size=4, stride=1, padding=1), IMAGES, dict(b=32, c=64, h=512, w=512), dict(b=2, c=3, h=9, w=11)),
    "043_max_pool_3d": Problem(
        partial(F.max_pool3d, kernel_size=3, stride=2, padding=1, dilation=3), {"A": "bcdhw"}, dict(b=16, c=32, d=128, h=128, w=128), dict(b=1, c=2, d=7, h=8, w=9)),
    "044_avg_pool_1d": Problem(partial(F.avg_pool1d, kernel_size=8, stride=1, padding=4), {"A": "bcx"}, dict(b=64, c=128, x=65536), dict(b=2, c=3, x=37)),
    "045_avg_pool_2d": Problem(partial(F.avg_pool2d, kernel_size=11), IMAGES, dict(b=16, c=64, h=2048, w=2048), dict(b=2, c=3, h=24, w=35)),
    "046_avg_pool_3d": Problem(
        partial(F.avg_pool3d, kernel_size=3, stride=2, padding=1), {"A": "bcdhw"}, dict(b=16, c=32, d=128, h=128, w=256), dict(b=1, c=2, d=5, h=6, w=9)),
}  # fmt: skip

REDUCTIONS = {
    "047_sum": reduction(lambda A: A.sum(1)),
    "048_mean": reduction(lambda A: A.mean(1)),
    "049_max": reduction(lambda A: A.amax(1)),
    "051_argmax": reduction(lambda A: A.argmax(1), grad=()),
    "052_argmin": reduction(lambda A: A.argmin(1), grad=()),
    "053_min": reduction(lambda A: A.amin(1)),
    "089_cumsum": scan(lambda A: A.cumsum(1)),
    "090_cumprod": scan(lambda A: A.cumprod(1)),
    "091_cumsum_reverse": scan(lambda A: A.flip(1).cumsum(1).flip(1)),
    "092_cumsum_exclusive": scan(exclusive_sum),
    "093_masked_cumsum": scan(lambda A, m: (A * m).cumsum(1), others={"m": "xt"}, kinds={"m": "mask"}),
}

CONVOLUTIONS = {
    "050_conv_2d": Problem(
        partial(F.conv2d, stride=4, padding=2), CONV2 | {"v": "o"}, dict(b=256, c=3, h=224, w=224, o=96, r=11, s=11), dict(b=2, c=3, h=11, w=13, o=3, r=5, s=5),
        WEIGHT | {"v": "bias"}),
    "054_conv_3d": Problem(F.conv3d, CONV3, dict(b=16, c=3, d=64, h=64, w=64, o=64, q=3, r=3, s=3), DEEP | dict(q=3, r=3, s=3), WEIGHT),
    "055_conv_2d_wide": Problem(F.conv2d, CONV2, dict(b=8, c=64, h=512, w=1024, o=128, r=3, s=3), FLAT | dict(r=3, s=3), WEIGHT),
    "056_conv_2d_asymmetric": Problem(F.conv2d, CONV2, dict(b=8, c=64, h=512, w=256, o=128, r=5, s=7), FLAT | dict(r=5, s=7), WEIGHT),
    "059_conv_3d_flat": Problem(F.conv3d, CONV3, dict(b=16, c=3, d=256, h=256, w=10, o=64, q=3, r=3, s=1), DEEP | dict(q=3, r=3, s=1), WEIGHT),
    "060_conv_3d_asymmetric_kernel": Problem(F.conv3d, CONV3, dict(b=16, c=3, d=64, h=64, w=64, o=64, q=3, r=5, s=7), DEEP | dict(q=2, r=3, s=4), WEIGHT),
    "062_conv_2d_asymmetric_kernel": Problem(F.conv2d, CONV2, dict(b=8, c=32, h=512, w=512, o=64, r=5, s=9), FLAT | dict(r=3, s=5), WEIGHT),
    "063_conv_2d_square": Problem(F.conv2d, CONV2, dict(b=16, c=16, h=1024, w=1024, o=128, r=3, s=3), FLAT | dict(c=16, r=3, s=3), WEIGHT),
    "066_conv_3d_asymmetric": Problem(F.conv3d, CONV3, dict(b=8, c=3, d=16, h=128, w=128, o=64, q=3, r=5, s=7), DEEP | dict(q=3, r=2, s=4), WEIGHT),
    "067_conv_1d": Problem(F.conv1d, CONV1, dict(b=32, c=64, w=131072, o=128, r=3), dict(b=2, c=18, w=37, o=7, r=3), WEIGHT),
    "076_conv_1d_dilated_strided": Problem(
        partial(F.conv1d, stride=3, dilation=4), CONV1, dict(b=64, c=64, w=524280, o=128, r=3), dict(b=2, c=18, w=61, o=7, r=3), WEIGHT),
    "080_conv_2d_dilated_padded": Problem(
        partial(F.conv2d, dilation=(2, 3), padding=(2, 4)), CONV2, dict(b=8, c=32, h=512, w=512, o=64, r=5, s=9), FLAT | dict(r=3, s=3), WEIGHT),
    "082_conv_depthwise_2d": depthwise(dict(b=16, c=64, h=512, w=512, r=3, s=3), dict(b=2, c=5, h=9, w=11, r=3, s=3)),
    "083_conv_depthwise_2d_column": depthwise(dict(b=64, c=8, h=512, w=512, r=3, s=1), dict(b=2, c=5, h=9, w=11, r=3, s=1)),
    "084_conv_depthwise_2d_wide": depthwise(dict(b=64, c=128, h=256, w=512, r=3, s=3), dict(b=3, c=4, h=7, w=14, r=3, s=3)),
    "085_conv_depthwise_2d_asymmetric": depthwise(dict(b=32, c=128, h=128, w=256, r=3, s=7), dict(b=2, c=5, h=9, w=11, r=3, s=7)),
    "086_conv_separable_2d": Problem(
        lambda A, W, V: F.conv2d(F.conv2d(A, W[:, None], padding=1, groups=len(W)), V[:, :, None, None]), DEPTHWISE | {"V": "oc"},
        dict(b=16, c=64, h=512, w=512, o=128, r=3, s=3), FLAT | dict(c=18, r=3, s=3), WEIGHT | {"V": "weight"}),
    "087_conv_pointwise_2d": Problem(
        lambda A, W: F.conv2d(A, W[:, :, None, None]), IMAGES | {"W": "oc"}, dict(b=16, c=64, h=1024, w=1024, o=128), FLAT | dict(c=18), WEIGHT),
}  # fmt: skip

TRANSPOSED_CONVOLUTIONS = {
    "057_conv_transposed_2d": transposed(F.conv_transpose2d, TRANSPOSED2, dict(b=8, c=64, h=1024, w=1024, o=64, r=3, s=3), FLAT | dict(r=3, s=3)),
    "058_conv_transposed_3d_asymmetric": transposed(
        F.conv_transpose3d, TRANSPOSED3, dict(b=16, c=32, d=16, h=32, w=64, o=16, q=3, r=5, s=7), DEEP | dict(q=2, r=3, s=4)),
    "061_conv_transposed_3d": transposed(F.conv_transpose3d, TRANSPOSED3, dict(b=8, c=48, d=64, h=64, w=64, o=48, q=3, r=3, s=3), DEEP | dict(q=3, r=3, s=3)),
    "064_conv_transposed_1d": transposed(F.conv_transpose1d, TRANSPOSED1, dict(b=64, c=128, w=65536, o=128, r=3), dict(b=2, c=18, w=37, o=7, r=3)),
    "065_conv_transposed_2d_asymmetric_kernel": transposed(
        F.conv_transpose2d, TRANSPOSED2, dict(b=8, c=64, h=512, w=512, o=64, r=3, s=7), FLAT | dict(r=3, s=7)),
    "068_conv_transposed_3d_asymmetric_kernel": transposed(
        F.conv_transpose3d, TRANSPOSED3, dict(b=16, c=32, d=64, h=64, w=64, o=64, q=3, r=5, s=5), DEEP | dict(q=3, r=2, s=2)),
    "069_conv_transposed_2d_asymmetric": transposed(F.conv_transpose2d, TRANSPOSED2, dict(b=64, c=64, h=128, w=256, o=128, r=3, s=5), FLAT | dict(r=3, s=5)),
    "070_conv_transposed_3d_square_kernel": transposed(
        F.conv_transpose3d, TRANSPOSED3, dict(b=8, c=48, d=96, h=96, w=96, o=24, q=3, r=3, s=3), DEEP | dict(q=3, r=3, s=3)),
    "071_conv_transposed_2d_wide": transposed(F.conv_transpose2d, TRANSPOSED2, dict(b=8, c=32, h=512, w=1024, o=32, r=3, s=3), FLAT | dict(r=3, s=3)),
    "072_conv_transposed_3d_strided_grouped": Problem(
        grouped(F.conv_transpose3d, stride=2, padding=(1, 2, 3), output_padding=1), {"A": "bgcdhw", "W": "gcoqrs"},
        dict(b=8, g=4, c=8, d=12, h=24, w=48, o=8, q=3, r=5, s=7), dict(b=1, g=2, c=3, d=2, h=3, w=3, o=2, q=2, r=3, s=4), WEIGHT, flops=products("bgcdhwoqrs")),
    "073_conv_transposed_3d_strided": transposed(
        F.conv_transpose3d, TRANSPOSED3, dict(b=4, c=32, d=32, h=64, w=128, o=32, q=3, r=3, s=3), DEEP | dict(q=3, r=3, s=3), stride=2, padding=1),
    "074_conv_transposed_1d_dilated": transposed(
        F.conv_transpose1d, TRANSPOSED1, dict(b=32, c=32, w=131072, o=64, r=5), dict(b=2, c=18, w=37, o=7, r=5), dilation=3),
    "075_conv_transposed_2d_everything": Problem(
        grouped(F.conv_transpose2d, stride=(2, 3), padding=(1, 2), dilation=(2, 1)), {"A": "bgchw", "W": "gcors"},
        dict(b=16, g=4, c=8, h=128, w=256, o=16, r=3, s=5), dict(b=1, g=2, c=3, h=4, w=5, o=2, r=3, s=4), WEIGHT, flops=products("bgchwors")),
    "077_conv_transposed_3d_dilated_strided": transposed(
        F.conv_transpose3d, TRANSPOSED3, dict(b=16, c=32, d=16, h=32, w=32, o=64, q=3, r=3, s=3), DEEP | dict(q=3, r=3, s=3), stride=2, padding=1, dilation=2),
    "078_conv_transposed_2d_padded": transposed(
        F.conv_transpose2d, TRANSPOSED2, dict(b=8, c=32, h=512, w=1024, o=32, r=3, s=7), FLAT | dict(r=3, s=7), padding=(1, 3)),
    "079_conv_transposed_1d_dilated_strided": transposed(
        F.conv_transpose1d, TRANSPOSED1, dict(b=16, c=32, w=131072, o=64, r=3), dict(b=2, c=18, w=37, o=7, r=3), stride=2, padding=1, dilation=2),
    "081_conv_transposed_2d_dilated_strided": transposed(
        F.conv_transpose2d, TRANSPOSED2, dict(b=16, c=32, h=64, w=128, o=64, r=3, s=3), FLAT | dict(r=3, s=3), stride=5, padding=1, dilation=2),
}  # fmt: skip

LOSSES = {
    "094_mse_loss": Problem(F.mse_loss, DIFFERENCE, dict(x=32768, y=32768), dict(x=7, y=301), {"P": "scaled"}),
    "095_cross_entropy": Problem(F.cross_entropy, {"A": "xy", "t": "x"}, dict(x=32768, y=4096), dict(x=7, y=301), {"t": "index:y"}),
    "096_huber_loss": Problem(F.smooth_l1_loss, DIFFERENCE, dict(x=32768, y=32768), dict(x=7, y=301), {"P": "scaled"}),
    "097_attention": Problem(
        F.scaled_dot_product_attention, {"Q": "bhmd", "K": "bhld", "V": "bhln"}, dict(b=32, h=32, m=512, l=512, d=1024, n=1024), dict(b=1, h=2, m=35, l=37, d=33, n=33)),
    "098_kl_div_loss": Problem(
        lambda P, T: F.kl_div(torch.log(P), T, reduction="batchmean"), DIFFERENCE, dict(x=16384, y=16384), dict(x=7, y=301), {"P": "scaled softmax", "T": "softmax"}),
    "099_triplet_loss": Problem(
        lambda A, P, N, margin: F.triplet_margin_loss(A, P, N, margin=margin), {"A": "xy", "P": "xy", "N": "xy"}, dict(x=32768, y=8192), dict(x=7, y=301),
        {"A": "scaled"}, {"margin": 1.0}),
    "100_hinge_loss": Problem(lambda P, T: torch.clamp(1 - P * T, min=0).mean(), {"P": "xy", "T": "y"}, dict(x=32768, y=32768), dict(x=7, y=301), {"T": "sign"}),
}  # fmt: skip

PROBLEMS = dict(sorted((PRODUCTS | ELEMENTS | NORMS | POOLS | REDUCTIONS | CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS | LOSSES).items()))
NOT_SAID: dict[str, str] = {}
