"""Functions whose positions count from the end: written out, counted, computed, or among the arguments."""

from __future__ import annotations

import torch
from fused_functions import case


@case(((4, 6),), ((3, 9),), interpreted=True, compiled=True, programs=2)  # take_along_dim takes the size as a number
def last_columns(x):
    """Numbers."""
    return x[:, [-1]] * 2, x[[-1]], x[[[-1], [0]], [-2]], x[:, [-1, 0, -3]], torch.take_along_dim(x, torch.tensor([[-1]]), 1)


@case(((4, 6), (5,)), ((3, 9), (4,)), interpreted=True, compiled=True)
def counted_back(x, t):
    """Shifts, reversals and distances: of ranges alone."""
    rows, columns = torch.arange(x.shape[0]), torch.arange(x.shape[1])
    distances = torch.arange(2)[:, None] - torch.arange(3)
    halves = (rows[:, None] - columns) // 2
    return x[:, halves], x[:, columns % -2], x[:, columns - 1], x[:, -1 - columns], x[-rows], x[:, columns % 2 - 1], x[:, distances], t[distances] * 2, x.flatten()[-1 - columns]


@case(((4, 6), ("index", 6, 4), (6,)), ((3, 9), ("index", 9, 3), (9,)), interpreted=True, compiled=True, programs=2)  # a sort takes the size as a number
def computed_places(x, labels, t):
    rows = torch.arange(x.shape[0])
    negative = torch.where(labels > 2, -1, labels)
    return x[rows, -labels], x[rows, ~labels], x[:, labels - 2], x[:, negative], x[rows, x.argmax(1) - 1], t[t.argsort() - 1], torch.take_along_dim(x, labels[:, None] - 3, 1)


@case(((4, 6),), ((3, 9),), interpreted=True, gradient=False)
def above_the_second(x):
    return torch.where(x < x.topk(2, -1)[0][:, [-1]], 0.0, x)


@case(((4, 6), ("index", 6, 3), (4, 2), (4, 3)), ((3, 9), ("index", 9, 3), (3, 2), (3, 3)), interpreted=True, compiled=True)
def written_from_the_end(x, i, v, w):
    a, b, c, d, e = (x * 2 for _ in range(5))
    a[:, [-1]] = 0.0
    b[:, torch.arange(2) - 1] = v
    c[:, i - 2] = 7.0
    d[:, -1 - torch.arange(3)] += w
    e[torch.arange(2) - 1, [-2]] = v[0]
    e[:, -torch.arange(3) // 2] = 5.0
    return a, b, c, d, e, x.index_fill(1, i - 1, 9.0), torch.index_put(x, (torch.arange(2) - 2,), v[0, :1], accumulate=True)
