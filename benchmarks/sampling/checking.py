"""Check results against float64, or float32 where that alone fits memory, with a tolerance by the length of the longest sum."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import bench
import torch
from common import workloads

FITS = 2**28  #: float64 scores of attention that are computed at a time
EAGER = 2**28  #: scores of one head of keys up to which torch's own form of attention is compared too
FEW = 8  #: numbers whose error is as likely to be a few times that of as many others
LOOSE = 0.1  #: the error of a peer's results, and the share of a weight of 1, up to which they count as right


@dataclass(frozen=True)
class Deviation:
    """Of each tensor the norm of the difference over that of the truth, the worst element's difference over its own size and the root mean
    square of all, and its elements. Truths that cancel to less than the rounding of their sums count as that."""

    norms: tuple[float, ...]
    worsts: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def norm(self) -> float:
        """Return the largest of all tensors, NaN where there is one."""
        return _largest(self.norms)

    @property
    def worst(self) -> float:
        """Return the largest of all tensors, NaN where there is one."""
        return _largest(self.worsts)

    @classmethod
    def of(cls, got: list[torch.Tensor], truth: list[torch.Tensor], least: float) -> Deviation:
        """Compare tensors one by one. ``least``: the size below which a truth's elements are noise. Raises ValueError if shapes differ."""
        norms, worst = [], []
        for g, t in zip(got, truth, strict=True):
            if g.shape != t.shape:
                raise ValueError(f"a result of shape {tuple(g.shape)}, expected {tuple(t.shape)}")
            off, rms = (g.to(t.dtype) - t).abs_(), max((t.norm() / math.sqrt(max(t.numel(), 1))).item(), least, 1e-30)
            norms.append((off.norm() / (rms * math.sqrt(max(t.numel(), 1)))).item())
            worst.append((off / (t.abs() + rms)).max().item())
        return cls(tuple(norms), tuple(worst), tuple(t.numel() for t in truth))

    def loosely(self) -> bool:
        """Accept what is right at all; NaN is not."""
        return self.norm <= LOOSE

    def allowed(self, tolerance: float, eager: Deviation | None) -> bool:
        """Accept what is within a few roundings, or near what torch's own form is off: of few numbers less near, whose errors are chance. NaN is never accepted."""
        other = eager if eager is not None and math.isfinite(eager.norm + eager.worst) else Deviation((0.0,) * len(self.norms), (0.0,) * len(self.norms), self.counts)
        return all(
            norm <= max(2 * tolerance, 2 * by * (1 + FEW / max(n, 1))) and worst <= max(16 * tolerance, 4 * worst_by * (1 + FEW / max(n, 1)))
            for norm, worst, by, worst_by, n in zip(self.norms, self.worsts, other.norms, other.worsts, self.counts, strict=True)
        )


def _largest(values: tuple[float, ...]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def lengths(work: workloads.Workload) -> tuple[int, int]:
    """Return (the most terms that an element of a result or gradient sums, over how many its weight of 1 is spread or 0).

    The gradients of softmax and attention cancel completely where one element has all the weight.
    """
    named = re.findall(r"([a-zA-Z/]*)(\d+)", work.shape)
    found = {name: int(value) for name, value in named}
    if work.op == "attention":
        queries, keys = found["M"], found["S"]
        return max(queries * found["H"] // found.get("/", found["H"]), keys, found["D"]), min(queries, keys) if work.about["causal"] else keys
    return max(int(value) for _, value in named), found["x"] if work.op == "softmax" else 0


def tolerances(work: workloads.Workload, dtype: torch.dtype) -> tuple[float, float, float]:
    """Return (one rounding to the dtype and those of the longest sum in float32, the size below which elements are noise, the same for peers)."""
    longest, spread = lengths(work)
    noise = 4 * torch.finfo(torch.float32).eps * math.sqrt(longest)
    tolerance = torch.finfo(dtype).eps + noise
    return tolerance, noise / tolerance / spread if spread else 0.0, LOOSE / spread if spread else 0.0


def truth(work: workloads.Workload, inputs: tuple, direction: str, grads: tuple) -> tuple[list[torch.Tensor] | None, str]:
    """Return (the right outputs or gradients of ``work.part``, the dtype they were computed in); (None, "none") without memory for either."""
    for dtype in (torch.float64, torch.float32):
        try:
            given = tuple(t.to(dtype) if t.is_floating_point() else t for t in work.part(inputs))
            asked = tuple(g.to(dtype) for g in work.part(grads))
            if work.op == "attention":
                found = attention(*given, causal=work.about["causal"], grad=asked[0] if direction == "backward" else None)
            else:
                found = bench.results(work.eager, given, work.differentiable, direction, asked)
            return [f.detach() for f in found], str(dtype).removeprefix("torch.")
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    return None, "none"


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, grad: torch.Tensor | None) -> list[torch.Tensor]:
    """Return attention of one head of keys, or the gradients of q, k and v, some queries at a time so that any length fits memory."""
    _, heads, m, d = q.shape
    keys = k.shape[2]
    step = max(1, FITS // max(1, heads * keys))
    found = torch.empty_like(q)
    d_k, d_v = torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, m, step):
        some = slice(start, min(m, start + step))
        p = q[:, :, some] @ k.transpose(-1, -2) * d**-0.5
        if causal:
            p.masked_fill_(torch.arange(some.start, some.stop, device=q.device)[:, None] < torch.arange(keys, device=q.device), float("-inf"))
        p = torch.softmax(p, -1)
        if grad is None:
            found[:, :, some] = p @ v
            continue
        g = grad[:, :, some]
        d_v += (p.transpose(-1, -2) @ g).sum(1, keepdim=True)
        d_p = g @ v.transpose(-1, -2)
        d_p -= (p * d_p).sum(-1, keepdim=True)
        d_p *= p
        found[:, :, some] = d_p @ k * d**-0.5
        d_k += (d_p.transpose(-1, -2) @ q[:, :, some]).sum(1, keepdim=True) * d**-0.5
    return [found] if grad is None else [found, d_k, d_v]


def part_of(work: workloads.Workload, results: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return of each result the part whose truth is known."""
    return [work.part((r,))[0] for r in results]
