"""Declare the problems of level 1: single operations. The mathematics is in level1/*.dt."""

from __future__ import annotations

import torch
from problem import Problem, products

PROBLEMS = {
    "001_square_matmul": Problem(torch.mm, {"A": "xk", "B": "ky"}, dict(x=4096, k=4096, y=4096), dict(x=37, k=41, y=35), flops=products("xky")),
    "019_relu": Problem(torch.relu, {"A": "xy"}, dict(x=4096, y=393216), dict(x=5, y=301)),
    "023_softmax": Problem(lambda A: torch.softmax(A, 1), {"A": "xy"}, dict(x=4096, y=393216), dict(x=5, y=301)),
}

NOT_SAID: dict[str, str] = {}
