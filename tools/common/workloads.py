"""Define workloads: the op, its inputs, and how much it must move and compute."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

import dtkernels

Call = Callable[..., torch.Tensor]


@dataclass
class Workload:
    """One op at one shape. ``eager`` is torch's own form; ``differentiable`` are the inputs that gradients are asked for.

    ``part`` reduces inputs, outputs and their gradients to what the float64 truth can afford. ``bytes`` and ``flops`` are
    the minimum for the op: every tensor once, for forward and for backward.
    """

    op: str
    shape: str
    dtype: str
    make: Callable[[], tuple]
    ours: Call
    eager: Call
    flops: tuple[float, float]
    bytes: tuple[float, float]
    differentiable: tuple[int, ...] = (0,)
    part: Callable[[tuple], tuple] = lambda tensors: tensors
    about: dict = field(default_factory=dict)  #: data that peers need


def _random(*shapes: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> Callable[[], tuple]:
    return lambda: tuple((torch.randn(s, device="cuda", dtype=torch.float32) * scale).to(dtype) for s in shapes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def row_op(op: str, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Workload:
    """Return relu, softmax or dyt on (rows, columns)."""
    shapes = [(rows, columns)] + ([(1,), (columns,), (columns,)] if op == "dyt" else [])
    forms: dict[str, Call] = {"relu": torch.relu, "softmax": lambda x: torch.softmax(x, -1), "dyt": lambda x, a, w, b: torch.tanh(a * x) * w + b}
    tensor = rows * columns * dtype.itemsize
    return Workload(op, f"{rows}x{columns}", _name(dtype), _random(*shapes, dtype=dtype), getattr(dtkernels.ops, op), forms[op], (0, 0), (2 * tensor, 3 * tensor),
                tuple(range(len(shapes))))  # fmt: skip


def norm(op: str, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Workload:
    """Return rmsnorm or layernorm over the last dimension."""
    shapes = [(rows, columns), (columns,)] + ([(columns,)] if op == "layernorm" else [])
    eager = (lambda x, w: F.rms_norm(x, (columns,), w, 1e-6)) if op == "rmsnorm" else (lambda x, w, b: F.layer_norm(x, (columns,), w, b, 1e-5))
    tensor = rows * columns * dtype.itemsize
    return Workload(op, f"{rows}x{columns}", _name(dtype), _random(*shapes, dtype=dtype), getattr(dtkernels.ops, op), eager, (0, 0), (2 * tensor, 3 * tensor),
                tuple(range(len(shapes))))  # fmt: skip


def gated(op: str, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Workload:
    """Return swiglu or geglu of two matrices."""
    eager = (lambda a, b: F.silu(a) * b) if op == "swiglu" else (lambda a, b: F.gelu(a, approximate="tanh") * b)
    tensor = rows * columns * dtype.itemsize
    make = _random((rows, columns), (rows, columns), dtype=dtype)
    return Workload(op, f"{rows}x{columns}", _name(dtype), make, getattr(dtkernels.ops, op), eager, (0, 0), (3 * tensor, 5 * tensor), (0, 1))


def cross_entropy(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Workload:
    def make():
        return (*_random((rows, columns), dtype=dtype)(), torch.randint(columns, (rows,), device="cuda"))

    def eager(x, t):
        return F.cross_entropy(x if x.dtype == torch.float64 else x.float(), t)  # in 16 bits the loss would have the rounding error of its own dtype

    tensor = rows * columns * dtype.itemsize
    return Workload("cross_entropy", f"{rows}x{columns}", _name(dtype), make, dtkernels.ops.cross_entropy, eager, (0, 0), (tensor, 2 * tensor))


def mmsigmoid(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Workload:
    def eager(a, b):
        return torch.sigmoid(a @ b)

    a, b, c = m * k, k * n, m * n
    flops = 2.0 * m * n * k
    return Workload("mmsigmoid", f"{m}x{n}x{k}", _name(dtype), _random((m, k), (k, n), dtype=dtype, scale=k**-0.25), dtkernels.ops.mmsigmoid, eager, (flops, 2 * flops),
                ((a + b + c) * dtype.itemsize, (2 * a + 2 * b + 2 * c) * dtype.itemsize), (0, 1))  # fmt: skip


def two_mm(m: int, n: int, k: int, rank: int, dtype: torch.dtype = torch.bfloat16) -> Workload:
    def eager(a, b, c):
        return (a @ b) @ c

    moved = m * k + k * rank + rank * n + m * n
    flops = 2.0 * m * rank * (k + n)
    return Workload("two_mm", f"{m}x{n}x{k}r{rank}", _name(dtype), _random((m, k), (k, rank), (rank, n), dtype=dtype, scale=max(k, rank) ** -0.25), dtkernels.ops.two_mm, eager,
                (flops, 2 * flops), (moved * dtype.itemsize, (2 * moved - m * n) * dtype.itemsize), (0, 1, 2))  # fmt: skip


def attention(b: int, h: int, s: int, d: int, causal: bool, groups: int | None = None, queries: int | None = None, dtype: torch.dtype = torch.bfloat16) -> Workload:
    g, m = groups or h, queries or s

    def ours(q, k, v):
        return dtkernels.ops.attention(q, k, v, causal=causal)

    def eager(q, k, v):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) if q.shape[1] != t.shape[1] else t for t in (k, v))
        scores = q @ k.transpose(-1, -2) * d**-0.5
        if causal:
            scores = scores.masked_fill(torch.ones(m, s, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
        return torch.softmax(scores, -1) @ v

    def part(tensors):  # one key head of the first batch, with the queries that use it
        return tuple(t[:1, : h // g if t.shape[1] == h else 1] for t in tensors)

    name = f"B{b}H{h}{f'/{g}' if g != h else ''}M{m}S{s}D{d}{' causal' if causal else ''}"
    rows, keys = b * h * m * d * dtype.itemsize, b * g * (min(m, s) if causal else s) * d * dtype.itemsize
    flops = 4.0 * b * h * m * s * d * (visible_share(m, s) if causal else 1)
    return Workload("attention", name, _name(dtype), _random((b, h, m, d), (b, g, s, d), (b, g, s, d), dtype=dtype), ours, eager, (flops, 2.5 * flops),
                (2 * rows + 2 * keys, 4 * rows + 4 * keys), (0, 1, 2), part, {"causal": causal})  # fmt: skip


def visible_share(queries: int, keys: int) -> float:
    """Return the share of pairs of a query and a key that causal attention computes: one half of a large square."""
    if queries == keys:
        return 0.5
    few = min(queries, keys)
    return (few * (few + 1) / 2 + (queries - few) * keys) / (queries * keys)


def rope(b: int, h: int, s: int, d: int, groups: int | None = None, dtype: torch.dtype = torch.bfloat16) -> Workload:
    g = groups or h

    def eager(q, k, cos, sin):
        turned = [torch.cat((-t[..., d // 2 :], t[..., : d // 2]), -1) for t in (q, k)]
        return torch.cat([t * cos[:, None] + r * sin[:, None] for t, r in zip((q, k), turned)], 1)

    def ours(q, k, cos, sin):
        return dtkernels.ops.rope(q, k, cos, sin)

    def make():
        angle = torch.arange(s, device="cuda")[:, None] * 10000.0 ** (-torch.arange(0, d, 2, device="cuda") / d)
        angle = torch.cat((angle, angle), -1)[None]
        return (*_random((b, h, s, d), (b, g, s, d), dtype=dtype)(), angle.cos().to(dtype), angle.sin().to(dtype))

    moved = 2 * b * (h + g) * s * d * dtype.itemsize
    return Workload("rope", f"B{b}H{h}{f'/{g}' if g != h else ''}S{s}D{d}", _name(dtype), make, ours, eager, (0, 0), (moved, moved), (0, 1))


# -- sets ---------------------------------------------------------------------------------------------------------------


def large() -> Iterator[Workload]:
    """Return one large shape for each op."""
    for op in ("relu", "softmax", "dyt"):
        yield row_op(op, 16384, 8192)
    yield mmsigmoid(4096, 4096, 4096)
    yield mmsigmoid(8192, 8192, 512)
    yield two_mm(8192, 4096, 4096, 16)
    yield attention(4, 32, 4096, 128, False)
    yield attention(4, 32, 4096, 128, True)


def wide() -> Iterator[Workload]:
    """Return memory-bound ops by rows, large and narrow products, long attention and decoding."""
    for op in ("relu", "softmax", "dyt"):
        for rows, columns in ((16384, 8192), (4096, 32768), (65536, 128), (1024, 4096), (8192, 4096), (32768, 1000)):
            yield row_op(op, rows, columns)
    for rows, columns in ((2048, 65536), (1024, 131072)):
        yield row_op("softmax", rows, columns)
        yield row_op("dyt", rows, columns)
    yield row_op("softmax", 128, 65536, torch.float32)
    yield row_op("dyt", 128, 65536, torch.float32)
    for shape in ((1024,) * 3, (2048,) * 3, (4096,) * 3, (8192,) * 3, (8192, 8192, 512), (16, 8192, 8192), (64, 8192, 8192), (8192, 64, 8192), (8192, 16, 8192)):
        yield mmsigmoid(*shape)
    for m, n, k in ((64, 128, 32), (128, 256, 32), (256, 512, 32), (512, 1024, 32), (128, 128, 64), (256, 256, 64), (512, 512, 64), (1024, 1024, 64)):
        yield two_mm(m, n, k, k)
    for rank in (8, 16, 32, 64, 128):
        yield two_mm(8192, 4096, 4096, rank)
    for d in (128, 64):
        for causal in (False, True):
            for b, s in ((16, 1024), (4, 4096), (1, 16384)):
                yield attention(b, 32, s, d, causal)
    for b, s in ((1, 8192), (16, 8192), (64, 2048)):
        yield attention(b, 32, s, 128, False, groups=8, queries=1)


def odd() -> Iterator[Workload]:
    """Return odd sizes, which no tile size divides."""
    for op in ("relu", "softmax", "dyt"):
        for rows, columns in ((4099, 4097), (10007, 1000), (257, 32771)):
            yield row_op(op, rows, columns)
    for shape in ((4095, 4097, 1000), (1009, 1013, 1019), (4097, 4097, 4097)):
        yield mmsigmoid(*shape)
    yield two_mm(8191, 4099, 4093, 17)
    for s, d, causal in ((4001, 128, False), (4001, 128, True), (1000, 64, True), (2048, 80, True), (2048, 96, False), (2048, 256, True)):
        yield attention(2, 16, s, d, causal)


def more() -> Iterator[Workload]:
    """Return the ops of language models beyond the first six."""
    yield norm("rmsnorm", 16384, 4096)
    yield norm("layernorm", 16384, 4096)
    yield gated("swiglu", 8192, 14336)
    yield gated("geglu", 8192, 14336)
    yield cross_entropy(4096, 32000)
    yield cross_entropy(2048, 128256)
    yield rope(4, 32, 4096, 128, groups=8)


SETS: dict[str, Callable[[], Iterator[Workload]]] = {"large": large, "wide": wide, "odd": odd, "more": more}

OPS = ("relu", "softmax", "dyt", "mmsigmoid", "two_mm", "attention", "rmsnorm", "layernorm", "swiglu", "geglu", "cross_entropy", "rope")
_PLAIN = re.compile(r"[1-9]\d{0,9}(x[1-9]\d{0,9})*(r[1-9]\d{0,9})?", re.ASCII)
_ATTENTION = re.compile(r"B(\d+)H(\d+)(?:/(\d+))?(?:M(\d+))?S(\d+)D(\d+)( causal)?")


def at(op: str, shape: str, dtype: torch.dtype) -> Workload:
    """Return the workload of ``op`` at a shape written as the table prints it. Raises ValueError with one line."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", shape)) if _PLAIN.fullmatch(shape) else ()
    makers: dict[str, tuple[Callable[..., Workload], int]] = {"mmsigmoid": (mmsigmoid, 3), "two_mm": (two_mm, 4), "cross_entropy": (cross_entropy, 2)}
    makers |= {o: (partial(row_op, o), 2) for o in ("relu", "softmax", "dyt")}
    makers |= {o: (partial(norm, o), 2) for o in ("rmsnorm", "layernorm")}
    makers |= {o: (partial(gated, o), 2) for o in ("swiglu", "geglu")}
    found = _ATTENTION.fullmatch(shape)
    if op in ("attention", "rope") and found:
        b, h, s, d = (int(found[i]) for i in (1, 2, 5, 6))
        g, m = (int(found[i]) if found[i] else None for i in (3, 4))
        if 0 in (b, h, g, m, s, d) or h % (g or h):
            raise ValueError(f"no workload {op} {shape!r}: sizes are 1 or more, and heads of queries a multiple of those of keys")
        return attention(b, h, s, d, bool(found[7]), g, m, dtype) if op == "attention" else rope(b, h, s, d, g, dtype)
    if op not in makers or len(numbers) != makers[op][1]:
        forms = "relu, softmax, dyt, norms, gates, cross_entropy: RxC; mmsigmoid: MxNxK; two_mm: MxNxKrR; attention: B4H32/8M1S8192D128 causal; rope: B4H32/8S4096D128"
        raise ValueError(f"no workload {op} {shape!r}; allowed: {forms}")
    return makers[op][0](*numbers, dtype=dtype)
