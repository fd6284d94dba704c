# ruff: noqa: E501 (programs read best on one line)
"""Programs of windows: convolutions, pooling, upsampling, with the extents of their results worked out from those of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Form:
    """A program, the same in torch, and the shapes of its inputs."""

    text: str
    truth: Callable[..., torch.Tensor]
    shapes: dict[str, tuple[int, ...]]


FORMS = {
    "conv1d": Form(
        "Func f; In A, W; Var b, o, x; RVar c, r; Extent x = (A[2] - W[2]) / 1 + 1; f[b, o, x] = rdot(A[b, c, x + r], W[o, c, r], c, r);",
        F.conv1d, {"A": (2, 5, 19), "W": (7, 5, 3)}),
    "conv1d, strided, dilated, padded": Form(
        "Func f; In A, W; Var b, o, x; RVar c, r; Param s = 2, d = 3, p = 4; Extent x = (A[2] + 2 * p - d * (W[2] - 1) - 1) / s + 1; f[b, o, x] = rdot(A[b, c, s * x + d * r - p], W[o, c, r], c, r);",
        lambda A, W: F.conv1d(A, W, stride=2, dilation=3, padding=4), {"A": (2, 5, 19), "W": (7, 5, 3)}),
    "causal conv1d": Form(
        "Func f; In A, W; Var b, c, x; RVar r; Extent x = A[2]; f[b, c, x] = rsum(A[b, c, x + r - len(r) + 1] * W[c, r], r);",
        lambda A, W: F.conv1d(F.pad(A, (W.shape[1] - 1, 0)), W[:, None], groups=A.shape[1]), {"A": (2, 5, 19), "W": (5, 4)}),
    "conv2d": Form(
        "Func f; In A, W; Var b, o, y, x; RVar c, r, s; Extent y = (A[2] + 2 - W[2]) / 2 + 1; Extent x = (A[3] + 2 - W[3]) / 2 + 1; f[b, o, y, x] = rdot(A[b, c, 2 * y + r - 1, 2 * x + s - 1], W[o, c, r, s], c, r, s);",
        lambda A, W: F.conv2d(A, W, stride=2, padding=1), {"A": (2, 3, 10, 11), "W": (4, 3, 3, 3)}),
    "conv2d with a bias": Form(
        "Func f; In A, W, v; Var b, o, y, x; RVar c, r, s; Extent y = A[2] - W[2] + 1; Extent x = A[3] - W[3] + 1; f[b, o, y, x] = v[o] + rdot(A[b, c, y + r, x + s], W[o, c, r, s], c, r, s);",
        F.conv2d, {"A": (2, 3, 8, 9), "W": (4, 3, 3, 2), "v": (4,)}),
    "conv2d in groups": Form(
        "Func f; In A, W; Var b, o, y, x; RVar c, r, s; Param g = 3; Extent y = A[2] - W[2] + 1; Extent x = A[3] - W[3] + 1; f[b, o, y, x] = rdot(A[b, o / (len(o) / g) * len(c) + c, y + r, x + s], W[o, c, r, s], c, r, s);",
        lambda A, W: F.conv2d(A, W, groups=3), {"A": (2, 6, 7, 8), "W": (9, 2, 3, 2)}),
    "depthwise conv2d": Form(
        "Func f; In A, W; Var b, c, y, x; RVar r, s; Extent y = (A[2] - W[1]) / 2 + 1; Extent x = (A[3] - W[2]) / 2 + 1; f[b, c, y, x] = rsum(A[b, c, 2 * y + r, 2 * x + s] * W[c, r, s], r, s);",
        lambda A, W: F.conv2d(A, W[:, None], stride=2, groups=A.shape[1]), {"A": (2, 5, 9, 8), "W": (5, 3, 3)}),
    "conv3d": Form(
        "Func f; In A, W; Var b, o, z, y, x; RVar c, q, r, s; Extent z = A[2] - W[2] + 1; Extent y = A[3] - W[3] + 1; Extent x = (A[4] - W[4]) / 2 + 1; f[b, o, z, y, x] = rdot(A[b, c, z + q, y + r, 2 * x + s], W[o, c, q, r, s], c, q, r, s);",
        lambda A, W: F.conv3d(A, W, stride=(1, 1, 2)), {"A": (1, 2, 4, 5, 6), "W": (3, 2, 2, 3, 2)}),
    "transposed conv1d": Form(
        "Func f; In A, W; Var b, o, x; RVar c, r; Extent x = (A[2] - 1) * 2 + W[2]; f[b, o, x] = rdot(where((x - r) % 2 == 0, A[b, c, (x - r) / 2], 0), W[c, o, r], c, r);",
        lambda A, W: F.conv_transpose1d(A, W, stride=2), {"A": (2, 5, 9), "W": (5, 4, 3)}),
    "transposed conv2d, strided, dilated, padded": Form(
        "Func f; In A, W; Var b, o, y, x; RVar c, r, s; Extent y = 3 * (A[2] - 1) + W[2] - 2; Extent x = 2 * (A[3] - 1) + 3 * (W[3] - 1) + 1 - 4; f[b, o, y, x] = rdot(where((y + 1 - r) % 3 == 0 and (x + 2 - 3 * s) % 2 == 0, A[b, c, (y + 1 - r) / 3, (x + 2 - 3 * s) / 2], 0), W[c, o, r, s], c, r, s);",
        lambda A, W: F.conv_transpose2d(A, W, stride=(3, 2), padding=(1, 2), dilation=(1, 3)), {"A": (2, 5, 4, 5), "W": (5, 6, 5, 3)}),
    "transposed depthwise conv1d": Form(
        "Func f; In A, W; Var b, c, x; RVar r; Extent x = 3 * (A[2] - 1) + 2 * (W[1] - 1) + 1; f[b, c, x] = rsum(where((x - 2 * r) % 3 == 0, A[b, c, (x - 2 * r) / 3], 0) * W[c, r], r);",
        lambda A, W: F.conv_transpose1d(A, W[:, None], stride=3, dilation=2, groups=A.shape[1]), {"A": (2, 5, 9), "W": (5, 4)}),
    "patches": Form(
        "Func f; In A, W; Var b, n, o; RVar c, r; Extent n = A[2] / 4; Extent r = 4; f[b, n, o] = rdot(A[b, c, 4 * n + r], W[o, c, r], c, r);",
        lambda A, W: F.conv1d(A, W, stride=4).mT, {"A": (2, 3, 21), "W": (5, 3, 4)}),
    "max_pool1d": Form(
        "Func f; In A; Var c, x; RVar r; Extent r = 3; Extent x = (A[1] - 3) / 2 + 1; f[c, x] = rmax(A[c, 2 * x + r], r);",
        lambda A: F.max_pool1d(A, 3, 2), {"A": (5, 20)}),
    "max_pool2d, padded": Form(
        "Func u, v, f; In A; Var b, y, x, h, w; RVar r, s; Extent h = A[1]; Extent w = A[2]; Extent r = 3; Extent s = 3; Extent y = (h - 1) / 2 + 1; Extent x = (w - 1) / 2 + 1; u[h] = 1; v[w] = 1; f[b, y, x] = rmax(where(u[2 * y + r - 1] > 0 and v[2 * x + s - 1] > 0, A[b, 2 * y + r - 1, 2 * x + s - 1], -inf), r, s);",
        lambda A: F.max_pool2d(A, 3, 2, padding=1), {"A": (2, 6, 5)}),
    "max_pool2d, strided, dilated, padded": Form(
        "Func f; In A; Var b, y, x, h, w; RVar r, s; Extent h = A[1]; Extent w = A[2]; Extent r = 3; Extent s = 2; Extent y = (A[1] - 1) / 2 + 1; Extent x = A[2] - 1; f[b, y, x] = rmax(where(2 * y + r >= 1 and 2 * y + r < len(h) + 1 and x + 3 * s >= 1 and x + 3 * s < len(w) + 1, A[b, 2 * y + r - 1, x + 3 * s - 1], -inf), r, s);",
        lambda A: F.max_pool2d(F.pad(A, (1, 1, 1, 1), value=-torch.inf), (3, 2), (2, 1), dilation=(1, 3)), {"A": (2, 6, 9)}),
    "avg_pool2d": Form(
        "Func f; In A; Var b, y, x; RVar r, s; Extent r = 2; Extent s = 3; Extent y = A[1] / 2; Extent x = A[2] / 3; f[b, y, x] = rmean(A[b, 2 * y + r, 3 * x + s], r, s);",
        lambda A: F.avg_pool2d(A, (2, 3)), {"A": (4, 9, 10)}),
    "nearest upsampling": Form(
        "Func f; In A; Var b, y, x; Extent y = 2 * A[1]; Extent x = 3 * A[2]; f[b, y, x] = A[b, y / 2, x / 3];",
        lambda A: F.interpolate(A[None], scale_factor=(2, 3), mode="nearest")[0], {"A": (4, 5, 7)}),
    "every second": Form(
        "Func f; In A; Var x; Extent x = (A[0] + 1) / 2; f[x] = A[2 * x] * A[2 * x];", lambda A: A[::2] ** 2, {"A": (21,)}),
    "pairs": Form(
        "Func f; In A; Var b, x; Extent x = A[1] / 2; f[b, x] = A[b, 2 * x] * A[b, 2 * x + 1];", lambda A: A[:, :-1:2] * A[:, 1::2], {"A": (3, 21)}),
}  # fmt: skip
