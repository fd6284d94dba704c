"""Define the arguments of each function that both libraries have, at the sizes of Liger's benchmarks and at small ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

#: Llama 3 8B, whose sizes Liger's benchmark scripts take; the length is swept
LARGE = {"rows": 8192, "hidden": 4096, "middle": 14336, "classes": 128256, "heads": 32, "groups": 8, "size": 128, "streams": 4, "batch": 4}
SMALL = {"rows": 16, "hidden": 32, "middle": 48, "classes": 97, "heads": 4, "groups": 2, "size": 16, "streams": 4, "batch": 2}


@dataclass(frozen=True)
class Maker:
    """Makes arguments on a device, in a dtype, from a seed."""

    sizes: dict[str, int]
    device: str
    dtype: torch.dtype
    generator: torch.Generator

    def __getattr__(self, name: str) -> int:
        try:
            return self.sizes[name]
        except KeyError:
            raise AttributeError(name) from None

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        made = torch.randn(shape, generator=self.generator, device=self.device) * scale
        return made.to(dtype or self.dtype)

    def whole(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=self.generator, device=self.device)

    def angles(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        angle = self.normal(*shape[:-1], shape[-1] // 2, dtype=torch.float32)
        angle = torch.cat((angle, angle), -1)
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)


def _hidden(m: Maker) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return m.normal(m.rows, m.hidden), m.normal(m.classes, m.hidden, scale=m.hidden**-0.5), m.whole(m.classes, m.rows)


def _pairs(m: Maker) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    length = max(m.rows // (2 * m.batch), 2)
    shape = (2 * m.batch, length)
    return m.normal(*shape, m.hidden), m.normal(m.classes, m.hidden, scale=m.hidden**-0.5), m.whole(m.classes, *shape)


def _divergence(m: Maker) -> tuple[torch.Tensor, torch.Tensor]:
    return m.normal(m.rows, m.classes).log_softmax(-1), m.normal(m.rows, m.classes).log_softmax(-1)


def _modulated(m: Maker) -> tuple:
    return m.normal(m.batch, m.rows // m.batch, m.hidden), m.normal(m.hidden), m.normal(m.batch, m.hidden), m.normal(m.batch, m.hidden), 1e-6


def _queries(m: Maker) -> tuple[torch.Tensor, torch.Tensor]:
    return m.normal(1, m.heads, m.rows, m.size), m.normal(1, m.groups, m.rows, m.size)


def _llama4(m: Maker) -> tuple:
    angle = m.normal(1, m.rows, m.size // 2, dtype=torch.float32)
    return m.normal(1, m.rows, m.heads, m.size), m.normal(1, m.rows, m.groups, m.size), torch.polar(torch.ones_like(angle), angle)


def _grpo(m: Maker) -> tuple:
    length = max(m.rows // (2 * m.batch), 2)
    shape = (m.batch, length)
    logits = m.normal(m.batch, length + 1, m.classes)
    old, reference = (-m.normal(*shape, dtype=torch.float32).abs() - 5 for _ in range(2))
    return logits, old, reference, m.whole(m.classes, *shape), m.normal(m.batch, dtype=torch.float32), None, 0.9, 0.04, 0.2, 0.4, False, "dapo", None, True


def _scores(m: Maker) -> tuple:
    length = min(m.rows, 1024)
    return m.normal(m.batch, m.streams, length, length), m.normal(m.streams, m.streams, 3, 3, scale=0.2), None, 1, 1, 1, 1, False


def _kto(m: Maker) -> tuple:
    hidden, weight, target = _pairs(m)
    good = torch.arange(hidden.shape[0], device=hidden.device) % 2 == 0
    return hidden, weight, target, good, None, hidden.clone(), weight.clone(), None, None, -100, 0.1, False


#: autograd function of Liger -> its arguments, and which of them are differentiated
CASES: dict[str, tuple[Callable[[Maker], tuple], tuple[int, ...]]] = {
    "LigerRMSNormFunction": (lambda m: (m.normal(m.rows, m.hidden), m.normal(m.hidden), 1e-6, 0.0, "llama", False), (0, 1)),
    "LigerFusedAddRMSNormFunction": (lambda m: (m.normal(m.rows, m.hidden), m.normal(m.rows, m.hidden), m.normal(m.hidden), 1e-6), (0, 1, 2)),
    "LigerModulatedRMSNormFunction": (lambda m: (*_modulated(m), 0.0, "llama", False), (0, 1, 2, 3)),
    "LigerLayerNormFunction": (lambda m: (m.normal(m.rows, m.hidden), m.normal(m.hidden), m.normal(m.hidden), 1e-6), (0, 1, 2)),
    "LigerGroupNormFunction": (lambda m: (m.normal(m.batch, m.hidden // 8, m.rows), m.normal(m.hidden // 8), m.normal(m.hidden // 8), m.hidden // 8, 4, 1e-6), (0, 1, 2)),
    "LigerPolyNormFunction": (lambda m: (m.normal(m.rows, m.hidden), m.normal(3), m.normal(), 1e-6, False), (0, 1, 2)),
    "LigerDyTFunction": (lambda m: (m.normal(m.rows, m.hidden), m.normal(1), m.normal(m.hidden), m.normal(m.hidden)), (0, 1, 2, 3)),
    "LigerSiLUMulFunction": (lambda m: (m.normal(m.rows, m.middle), m.normal(m.rows, m.middle)), (0, 1)),
    "LigerGELUMulFunction": (lambda m: (m.normal(m.rows, m.middle), m.normal(m.rows, m.middle)), (0, 1)),
    "LigerReLUSquaredFunction": (lambda m: (m.normal(m.rows, m.middle),), (0,)),
    "LigerRopeFunction": (lambda m: (*_queries(m), *m.angles(1, m.rows, m.size)), (0, 1)),
    "LigerLlama4RopeFunction": (_llama4, (0, 1)),
    "LigerQwen2VLMRopeFunction": (lambda m: (*_queries(m), *m.angles(3, 1, m.rows, m.size), [m.size // 8, m.size // 8, m.size // 4]), (0, 1)),
    "LigerSoftmaxFunction": (lambda m: (m.normal(m.rows, m.hidden),), (0,)),
    "LigerSparsemaxFunction": (lambda m: (m.normal(min(m.rows, 4096), m.hidden), -1), (0,)),
    "LigerEmbeddingFunction": (lambda m: (m.normal(m.classes, m.hidden), m.whole(m.classes, m.rows)), (0,)),
    "LigerMultiTokenAttentionFunction": (_scores, (0, 1)),
    "LigerAttnResFunction": (lambda m: (m.normal(8, 1, m.rows, m.hidden), m.normal(m.hidden, scale=0.02), m.normal(m.hidden), 1e-6), (0, 1, 2)),
    "LigerMHCPreFunction": (lambda m: (m.normal(m.rows, m.streams, m.hidden), m.normal(m.rows, m.streams, dtype=torch.float32)), (0, 1)),
    "LigerMHCPostResFunction": (lambda m: (m.normal(m.rows, m.streams, m.hidden), m.normal(m.rows, m.hidden), m.normal(m.rows, m.streams, dtype=torch.float32), m.normal(m.rows, m.streams, m.streams, dtype=torch.float32)), (0, 1, 2, 3)),  # fmt: skip  # noqa: E501
    "LigerCrossEntropyFunction": (lambda m: (m.normal(m.rows, m.classes), m.whole(m.classes, m.rows), None), (0,)),
    "LigerFusedLinearCrossEntropyFunction": (_hidden, (0, 1)),
    "LigerFusedLinearJSDFunction": (lambda m: (*_hidden(m)[:2], *_hidden(m)[:2]), (0, 1)),
    "LigerKLDivLossFunction": (lambda m: (*_divergence(m), "batchmean", True), (0,)),
    "LigerJSDFunction": (lambda m: _divergence(m), (0,)),
    "LigerTVDLossFunction": (lambda m: tuple(t.exp() for t in _divergence(m)), (0,)),
    "GrpoLossFunction": (_grpo, (0,)),
    "LigerFusedLinearCPOFunction": (lambda m: (*_pairs(m), None, -100, 0.1, 1.0, 0.0, True, False), (0, 1)),
    "LigerFusedLinearSimPOFunction": (lambda m: (*_pairs(m), None, -100, 0.1, 1.0, 0.0, False, False), (0, 1)),
    "LigerFusedLinearORPOFunction": (lambda m: (*_pairs(m), None, -100, 0.1, True, None, False), (0, 1)),
    "LigerFusedLinearDPOFunction": (lambda m: (*_pairs(m), None, *_pairs(m)[:2], None, -100, 0.1, False, False), (0, 1)),
    "LigerFusedLinearKTOFunction": (_kto, (0, 1)),
}


def arguments(name: str, sizes: dict[str, int], device: str, dtype: torch.dtype, seed: int = 0) -> tuple[tuple, tuple[int, ...]]:
    """Return the arguments of a function of Liger's, and the places of those that are differentiated."""
    make, wanted = CASES[name]
    return make(Maker(sizes, device, dtype, torch.Generator(device).manual_seed(seed))), wanted


def losses(result: object) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a result that are differentiated: those of floating point that have a gradient, metrics left out."""
    parts = result if isinstance(result, tuple) else (result,)
    if parts and isinstance(parts[0], torch.Tensor) and not parts[0].dim():  # a loss, and metrics after it
        parts = parts[:1]
    return tuple(p for p in parts if isinstance(p, torch.Tensor) and p.is_floating_point() and p.requires_grad)
