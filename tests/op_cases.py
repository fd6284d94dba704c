"""Inputs and float64 truth for the six ops: the one place where tests hold them against torch's own operations."""

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


def _terms(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.double().abs() @ b.double().abs()).max().item() if a.numel() and b.numel() else 1.0


MAKERS = {"relu": relu, "softmax": softmax, "dyt": dyt, "mmsigmoid": mmsigmoid, "two_mm": two_mm, "attention": attention}
