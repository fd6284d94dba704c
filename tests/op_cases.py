"""Inputs and float64 truth for every op: the one place where tests hold them against torch's own operations."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

import dtkernels


@dataclass
class Case:
    """One call: ``ours`` on ``inputs`` against ``truth`` on the same values in float64.

    ``terms`` bounds the error: the largest sum of absolute terms that any output element accumulates.
    """

    name: str
    ours: object
    truth: object
    inputs: tuple
    terms: float = 1.0
    options: dict = field(default_factory=dict)

    def result(self) -> torch.Tensor:
        return self.ours(*self.inputs, **self.options)

    def wanted(self) -> torch.Tensor:
        return self.truth(*(t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in self.inputs))

    def tolerance(self, dtype: torch.dtype, wanted: torch.Tensor) -> float:
        """Rounding of the result (and of one rounded intermediate), plus float32 accumulation of ``terms``."""
        peak = wanted.abs().max().item() if wanted.numel() else 0.0
        return 2 * torch.finfo(dtype).eps * max(peak, self.terms if dtype != torch.float32 else 0.0) + 16 * torch.finfo(torch.float32).eps * max(self.terms, peak)


def check(case: Case, dtype: torch.dtype) -> None:
    """Assert that a case's result has the right shape, dtype and values."""
    got, wanted = case.result(), case.wanted()
    assert got.shape == wanted.shape and got.dtype == dtype, (case.name, got.shape, got.dtype)
    if got.numel():
        error = (got.double() - wanted).abs().max().item()
        assert error <= case.tolerance(dtype, wanted), f"{case.name}: error {error:.3g} > {case.tolerance(dtype, wanted):.3g}"


def normal(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    """Standard normal values, the same for one seed on every device."""
    generator = torch.Generator().manual_seed(seed + sum(shape) + 7 * len(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def relu(shape, dtype, device) -> Case:
    return Case(f"relu {shape}", dtkernels.ops.relu, torch.relu, (normal(*shape, dtype=dtype, device=device),))


def softmax(shape, dtype, device, scale: float = 3.0) -> Case:
    return Case(f"softmax {shape}", dtkernels.ops.softmax, lambda x: x.softmax(-1), (normal(*shape, dtype=dtype, device=device) * scale,))


def dyt(shape, dtype, device) -> Case:
    x = normal(*shape, dtype=dtype, device=device)
    w, b = (normal(shape[-1], dtype=dtype, device=device, seed=s) for s in (1, 2))
    alpha = torch.tensor([0.7], dtype=dtype, device=device)
    return Case(f"dyt {shape}", dtkernels.ops.dyt, lambda x, a, w, b: torch.tanh(a * x) * w + b, (x, alpha, w, b), terms=8.0)


def mmsigmoid(shape, dtype, device) -> Case:
    m, n, k = shape
    a, b = normal(m, k, dtype=dtype, device=device), normal(k, n, dtype=dtype, device=device, seed=1)
    return Case(f"mmsigmoid {shape}", dtkernels.ops.mmsigmoid, lambda a, b: torch.sigmoid(a @ b), (a, b), terms=_terms(a, b))


def two_mm(shape, dtype, device) -> Case:
    m, n, k, rank = shape
    a, b, c = normal(m, k, dtype=dtype, device=device), normal(k, rank, dtype=dtype, device=device, seed=1), normal(rank, n, dtype=dtype, device=device, seed=2)
    terms = (a.double().abs() @ b.double().abs() @ c.double().abs()).max().item() if min(shape) else 1.0
    return Case(f"two_mm {shape}", dtkernels.ops.two_mm, lambda a, b, c: a @ b @ c, (a, b, c), terms=terms)


def attention(shape, dtype, device, causal: bool = False) -> Case:
    batch, heads, groups, queries, keys, depth, values = shape
    q = normal(batch, heads, queries, depth, dtype=dtype, device=device)
    k = normal(batch, groups, keys, depth, dtype=dtype, device=device, seed=1)
    v = normal(batch, groups, keys, values, dtype=dtype, device=device, seed=2)

    def truth(q, k, v):
        k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return Case(f"attention {shape} causal={causal}", dtkernels.ops.attention, truth, (q, k, v), terms=8.0, options={"causal": causal})


def rmsnorm(shape, dtype, device, offset: int = 0) -> Case:
    x, w = normal(*shape, dtype=dtype, device=device), normal(shape[-1], dtype=dtype, device=device, seed=1)

    def truth(x, w):
        return F.rms_norm(x, (shape[-1],), w + offset, 1e-5)

    return Case(f"rmsnorm {shape}", lambda x, w: dtkernels.ops.rmsnorm(x, w, 1e-5, offset=offset), truth, (x, w), terms=8.0)


def layernorm(shape, dtype, device) -> Case:
    x = normal(*shape, dtype=dtype, device=device)
    w, b = (normal(shape[-1], dtype=dtype, device=device, seed=s) for s in (1, 2))
    return Case(f"layernorm {shape}", dtkernels.ops.layernorm, lambda x, w, b: F.layer_norm(x, (shape[-1],), w, b, 1e-5), (x, w, b), terms=8.0)


def swiglu(shape, dtype, device) -> Case:
    a, b = (normal(*shape, dtype=dtype, device=device, seed=s) for s in (0, 1))
    return Case(f"swiglu {shape}", dtkernels.ops.swiglu, lambda a, b: F.silu(a) * b, (a, b), terms=8.0)


def geglu(shape, dtype, device, exact: bool = False) -> Case:
    a, b = (normal(*shape, dtype=dtype, device=device, seed=s) for s in (0, 1))
    kind = "none" if exact else "tanh"
    return Case(f"geglu {shape} {kind}", dtkernels.ops.geglu, lambda a, b: F.gelu(a, approximate=kind) * b, (a, b), terms=8.0, options={"exact": exact})


def rope(shape, dtype, device) -> Case:
    """Queries and keys, one after the other along the heads."""
    batch, heads, groups, length, depth = shape
    q, k = (normal(batch, h, length, depth, dtype=dtype, device=device, seed=h) for h in (heads, groups))
    cos, sin = (normal(batch, length, depth, dtype=dtype, device=device, seed=s) for s in (3, 4))

    def truth(q, k, cos, sin):
        def rotated(x):
            return torch.cat((-x[..., depth // 2 :], x[..., : depth // 2]), -1)

        return torch.cat([x * cos[:, None] + rotated(x) * sin[:, None] for x in (q, k)], 1)

    return Case(f"rope {shape}", lambda *t: torch.cat(dtkernels.ops.rope(*t), 1), truth, (q, k, cos, sin), terms=8.0)


def cross_entropy(shape, dtype, device, smoothing: float = 0.1) -> Case:
    """Row by row, one of them ignored, rounded to the dtype of the logits."""
    *rows, classes = shape
    logits = normal(*shape, dtype=dtype, device=device) * 3
    target = torch.randint(classes, rows, generator=torch.Generator().manual_seed(classes)).to(device)
    target.view(-1)[1:2] = -100
    options = {"label_smoothing": smoothing, "reduction": "none"}

    def ours(x):
        return dtkernels.ops.cross_entropy(x, target, **options).to(x.dtype)

    def truth(x):
        return F.cross_entropy(x.reshape(-1, classes), target.reshape(-1), **options).view(rows)

    return Case(f"cross_entropy {shape}", ours, truth, (logits,), terms=16.0)


def _terms(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.double().abs() @ b.double().abs()).max().item() if a.numel() and b.numel() else 1.0


MAKERS = {"relu": relu, "softmax": softmax, "dyt": dyt, "mmsigmoid": mmsigmoid, "two_mm": two_mm, "attention": attention,
          "rmsnorm": rmsnorm, "layernorm": layernorm, "swiglu": swiglu, "geglu": geglu, "rope": rope, "cross_entropy": cross_entropy}  # fmt: skip
#: a small call of each op
SMALL = {"relu": (33, 7), "softmax": (33, 65), "dyt": (33, 65), "mmsigmoid": (33, 17, 65), "two_mm": (33, 17, 65, 16), "attention": (1, 4, 2, 9, 11, 16, 16),
         "rmsnorm": (33, 65), "layernorm": (33, 65), "swiglu": (33, 7), "geglu": (33, 7), "rope": (2, 4, 2, 9, 10), "cross_entropy": (33, 65)}  # fmt: skip
