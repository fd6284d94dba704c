"""Shapes to measure: what is called, with what, how much it must move and compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import dtkernels


@dataclass
class Work:
    """One op at one shape. ``eager`` is torch's own form, ``truth`` the same in float64 (None where it is too large)."""

    op: str
    shape: str
    dtype: str
    make: Callable[[], tuple]
    ours: Callable
    eager: Callable
    truth: Callable | None
    flops: float
    bytes: float


def _double(fn: Callable) -> Callable:
    return lambda *inputs: fn(*(t.double() if isinstance(t, torch.Tensor) else t for t in inputs))


def _random(*shapes: tuple[int, ...], dtype: torch.dtype) -> Callable[[], tuple]:
    return lambda: tuple(torch.randn(s, device="cuda", dtype=torch.float32).to(dtype) for s in shapes)


def row_op(op: str, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Work:
    """relu, softmax or dyt on (rows, columns)."""
    shapes = [(rows, columns)] + ([(1,), (columns,), (columns,)] if op == "dyt" else [])
    eager = {"relu": torch.relu, "softmax": lambda x: torch.softmax(x, -1), "dyt": lambda x, a, w, b: torch.tanh(a * x) * w + b}[op]
    moved = 2 * rows * columns * dtype.itemsize
    return Work(op, f"{rows}x{columns}", str(dtype)[6:], _random(*shapes, dtype=dtype), getattr(dtkernels.ops, op), eager, _double(eager), 0, moved)


def mmsigmoid(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Work:
    def eager(a, b):
        return torch.sigmoid(a @ b)

    moved = (m * k + k * n + m * n) * dtype.itemsize
    return Work("mmsigmoid", f"{m}x{n}x{k}", str(dtype)[6:], lambda: tuple(t * k**-0.25 for t in _random((m, k), (k, n), dtype=dtype)()), dtkernels.ops.mmsigmoid, eager, _double(eager), 2.0 * m * n * k, moved)


def two_mm(m: int, n: int, k: int, rank: int, dtype: torch.dtype = torch.bfloat16) -> Work:
    def eager(a, b, c):
        return (a @ b) @ c

    moved = (m * k + k * rank + rank * n + m * n) * dtype.itemsize
    return Work("two_mm", f"{m}x{n}x{k}r{rank}", str(dtype)[6:], _random((m, k), (k, rank), (rank, n), dtype=dtype), dtkernels.ops.two_mm, eager, _double(eager), 2.0 * m * rank * (k + n), moved)


def attention(b: int, h: int, s: int, d: int, causal: bool, groups: int | None = None, queries: int | None = None, dtype: torch.dtype = torch.bfloat16) -> Work:
    g, m = groups or h, queries or s

    def ours(q, k, v):
        return dtkernels.ops.attention(q, k, v, causal=causal)

    def eager(q, k, v):
        k, v = (t.repeat_interleave(h // g, 1) if g != h else t for t in (k, v))
        scores = q @ k.transpose(-1, -2) * d**-0.5
        if causal:
            scores = scores.masked_fill(torch.ones(m, s, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
        return torch.softmax(scores, -1) @ v

    small = b * h * m * s <= 1 << 28
    name = f"B{b}H{h}{f'/{g}' if g != h else ''}M{m}S{s}D{d}{' causal' if causal else ''}"
    moved = (2 * b * h * m * d + 2 * b * g * s * d) * dtype.itemsize
    flops = 4.0 * b * h * m * s * d * (0.5 if causal else 1)
    return Work("attention", name, str(dtype)[6:], _random((b, h, m, d), (b, g, s, d), (b, g, s, d), dtype=dtype), ours, eager, (lambda q, k, v: eager(q.double(), k.double(), v.double())) if small else None, flops, moved)


def large() -> Iterator[Work]:
    """One large shape an op."""
    yield row_op("relu", 16384, 8192)
    yield row_op("softmax", 16384, 8192)
    yield row_op("dyt", 16384, 8192)
    yield mmsigmoid(4096, 4096, 4096)
    yield mmsigmoid(8192, 8192, 512)
    yield two_mm(8192, 4096, 4096, 16)
    yield attention(4, 32, 4096, 128, False)
    yield attention(4, 32, 4096, 128, True)


SETS: dict[str, Callable[[], Iterator[Work]]] = {"large": large}
