"""Convolutions, pooling, partial results and ranks among the functions of fused_functions.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fused_functions import case


@case(((2, 3, 11), (4, 3, 3), (4,)), ((3, 5, 8), (2, 5, 2), (2,)), interpreted=True)
def convolution_1d(x, w, b):
    return F.conv1d(x, w, b, stride=2, padding=1).relu()


@case(((2, 4, 9, 8), (6, 2, 3, 2)), ((3, 8, 7, 7), (4, 4, 3, 2)), interpreted=True)
def convolution_in_groups(x, w):
    return F.conv2d(x, w, stride=(2, 1), padding=(2, 0), dilation=(1, 2), groups=2)


@case(((2, 4, 6, 5), (4, 1, 3, 3)), ((3, 4, 4, 7), (4, 1, 3, 3)))
def depthwise(x, w):
    return F.conv2d(x, w, padding="same", groups=4)


@case(((2, 3, 5, 6), (3, 3, 3, 3), (3, 3, 1, 1)), ((3, 2, 4, 7), (2, 2, 3, 3), (2, 2, 1, 1)), interpreted=True)
def residual_of_convolutions(x, w, v):
    """The input of the first convolution is computed, and not 0 outside the tensor."""
    return x + F.conv2d(F.conv2d(x.sigmoid(), w, padding=1).relu(), v)


@case(((2, 2, 4, 5, 3), (3, 2, 2, 3, 1)), ((2, 3, 3, 6, 4), (2, 3, 2, 3, 1)))
def convolution_3d(x, w):
    return F.conv3d(x, w, stride=(1, 2, 1))


@case(((3, 6, 5), (4, 3, 3, 3)), ((2, 4, 4), (5, 2, 3, 3)))
def convolution_of_one_image(x, w):
    return F.conv2d(x, w, padding=1)


@case(((2, 4, 5, 4), (4, 3, 3, 3), (3,)), ((3, 2, 3, 6), (2, 5, 3, 3), (5,)), interpreted=True)
def transposed_convolution(x, w, b):
    return F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1)


@case(((2, 4, 5), (4, 3, 2)), ((3, 4, 7), (4, 2, 2)))
def transposed_in_groups(x, w):
    return F.conv_transpose1d(x.exp(), w, stride=3, groups=2, dilation=2)


@case(((2, 3, 9, 8),), ((3, 2, 6, 7),), interpreted=True)
def mean_pooling(x):
    counted = F.avg_pool2d(x.exp(), 3, 2, 1)
    return counted + F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), F.avg_pool2d(x, (1, 2), divisor_override=3)


@case(((2, 3, 1, 8), (4, 3, 3, 3)), ((3, 2, 1, 5), (2, 2, 3, 3)), interpreted=True)
def convolution_of_one_line(x, w):
    return F.conv2d(x, w, padding=1), F.conv_transpose2d(x, w.transpose(0, 1), stride=2, padding=1)


@case(((2, 3, 9), (4, 3, 3)), ((3, 2, 7), (2, 2, 3)))
def convolution_of_a_part(x, w):
    """Beside the part lie elements of the whole, and a repeated element has no outside."""
    return F.conv1d(x.cumsum(0)[..., 2:-2], w, padding=1), F.conv1d(x.cumsum(0)[..., :1].expand(-1, -1, 6), w, padding=1)


@case(((2, 3, 10, 8),), programs=1)
def mean_pooling_with_partial_windows(x):
    return F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), F.avg_pool1d(x[0], 4, 3, ceil_mode=True)


@case(((2, 3, 8, 6),), ((3, 2, 12, 9),))
def adaptive_pooling(x):
    return F.adaptive_avg_pool2d(x, (4, 3)) * 2


@case(((2, 3, 8, 7),), ((3, 2, 11, 6),), programs=2, interpreted=True)
def adaptive_pooling_by_windows_that_overlap(x):
    return F.adaptive_avg_pool2d(x, (3, 4)), F.adaptive_max_pool1d(x[0], 5)


@case(((2, 3, 8, 7),), ((3, 2, 11, 6),), interpreted=True)
def nearest_elements_of_any_size(x):
    return F.interpolate(x * 2, size=(5, 9))


@case(((2, 3, 4, 3), (2, 3, 8, 6)), ((3, 2, 3, 5), (3, 2, 6, 10)), interpreted=True)
def nearest_upsampling(x, y):
    return F.interpolate(x.relu(), scale_factor=2) * y


@case(((6, 8),), ((5, 12),), interpreted=True)
def partial_sums(x):
    return (x * x).cumsum(-1).sqrt() + x.cumsum(0), (x > 0).cumsum(-1) * x


@case(((2, 3, 4),), ((3, 5, 2),))
def partial_sums_of_flattened(x):
    return x.flatten(1).cumsum(-1), x.cumprod(1)


@case(((6, 8),), ((5, 12),), interpreted=True)
def partial_logarithms(x):
    return (x * 50).logcumsumexp(-1), torch.logaddexp(x, 2 * x), torch.hypot(x, x - 1)


@case(((6, 8),), ((5, 12),), interpreted=True)
def largest_elements(x):
    values, places = (2 * x).topk(3, -1)
    return values, places, x.topk(2, 0, largest=False).values


@case(((4, 8), (8, 5)), ((3, 6), (6, 7)))
def router(x, w):
    best = (x @ w).softmax(-1).topk(2, -1).values
    return best / best.sum(-1, keepdim=True)


@case(((6, 8), (4, 8)), ((5, 3), (2, 3)), interpreted=True)
def all_distances(x, y):
    return torch.cdist(x, y), torch.cdist(x, y, 1.0), torch.cdist(x, x).sum()


@case(((6, 8), (6, 8), (6, 8)), ((5, 3), (5, 3), (5, 3)))
def triplets(a, p, n):
    return F.triplet_margin_loss(a, p, n), a.norm(3, -1), F.pairwise_distance(a, p, 1.0)
