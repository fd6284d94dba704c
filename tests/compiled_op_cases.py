"""A small call of every op and of every form of attention, at a length that can be chosen: for tests of torch.compile and torch.export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dtkernels import ops


@dataclass(frozen=True)
class CompiledCase:
    """``call(*inputs)``; ``lengths`` says along which dimension each input grows (None: it does not)."""

    call: Callable
    shapes: tuple[tuple, ...]
    options: dict = field(default_factory=dict)
    differentiable: bool = True

    def inputs(self, length: int) -> tuple[torch.Tensor, ...]:
        """Return inputs in which "n" of the shapes is ``length``; a shape that begins with an upper bound holds integers below it."""
        generator = torch.Generator().manual_seed(length)
        found = []
        for bound, *shape in self.shapes:
            sizes = [length if size == "n" else size for size in shape]
            if bound == "float":
                found.append(torch.randn(sizes, generator=generator).requires_grad_(self.differentiable))
            elif bound == "bool":
                found.append(torch.rand(sizes, generator=generator) > 0.3)
            elif bound == "packed":  # cumulative lengths of two sequences
                found.append(torch.tensor([0, 2, length], dtype=torch.int32))
            elif bound == "lengths":
                found.append(torch.tensor([length - 1, length], dtype=torch.int32))
            elif bound == "segments":
                found.append(torch.sort(torch.randint(0, 2, sizes, generator=generator), -1).values)
            else:
                found.append(torch.randint(0, bound, sizes, generator=generator))
        return tuple(found)

    def dynamic_shapes(self, length) -> tuple:
        """Return torch.export's description of the dimensions that are ``length``."""
        return tuple({at: length for at, size in enumerate(shape) if size == "n"} for _, *shape in self.shapes)

    def run(self, *inputs):
        return self.call(*inputs, **self.options)


def _case(call: Callable, *shapes: tuple, differentiable: bool = True, **options) -> CompiledCase:
    return CompiledCase(call, shapes, options, differentiable)


_X, _C = ("float", "n", 8), ("float", 8)
_Q, _K = ("float", 2, 4, "n", 8), ("float", 2, 2, "n", 8)
_HIDDEN, _WEIGHT, _TARGET = ("float", "n", 6), ("float", 11, 6), (11, "n")
_TOKENS, _COUNTED = ("float", 3, "n"), ("bool", 3, "n")

CASES = {
    "add_rmsnorm": _case(ops.add_rmsnorm, _X, _X, _C),
    "attention": _case(ops.attention, _Q, _K, _K, causal=True),
    "attention softcap": _case(ops.attention, _Q, _K, _K, causal=True, softcap=5.0, window=(3, None)),
    "attention mask": _case(ops.attention, _Q, _K, _K, ("bool", 2, 1, "n", "n")),
    "attention sinks": _case(lambda q, k, v, sinks: ops.attention(q, k, v, causal=True, sinks=sinks), _Q, _K, _K, ("float", 4)),
    "attention lse": _case(ops.attention, _Q, _K, _K, causal=True, return_lse=True),
    "attention dropout": _case(ops.attention, _Q, _K, _K, dropout_p=0.3, seed=7),
    "attention packed": _case(
        lambda q, k, v, cu: ops.attention(q, k, v, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu), ("float", "n", 4, 8), *(("float", "n", 2, 8),) * 2, ("packed", 3)
    ),
    "attention segments": _case(lambda q, k, v, s: ops.attention(q, k, v, causal=True, segments=s), _Q, _K, _K, ("segments", 2, "n")),
    "attention lengths": _case(lambda q, k, v, s: ops.attention(q, k, v, causal=True, lengths=s), ("float", 2, 4, 2, 8), _K, _K, ("lengths", 2)),
    "attention_residual": _case(ops.attention_residual, ("float", 4, "n", 8), _C, _C),
    "cosine_distance": _case(ops.cosine_distance, _X, _X),
    "cpo": _case(ops.cpo, *(_TOKENS,) * 2, *(_COUNTED,) * 2),
    "cross_entropy": _case(ops.cross_entropy, ("float", "n", 11), _TARGET, label_smoothing=0.1),
    "dpo": _case(ops.dpo, *(_TOKENS,) * 4, *(_COUNTED,) * 2),
    "dyt": _case(ops.dyt, _X, ("float", 1), _C, _C),
    "embedding": _case(ops.embedding, ("float", 11, 8), _TARGET),
    "gate": _case(ops.gate, _X, ("float", 5, 8), ("float", 5), ("float", "n", 5)),
    "geglu": _case(ops.geglu, _X, _X),
    "groupnorm": _case(lambda x, w, b: ops.groupnorm(x, 2, w, b), ("float", 2, 8, "n"), _C, _C),
    "grpo": _case(ops.grpo, *(_TOKENS,) * 2, _COUNTED, ("float", 3), _TOKENS, beta=0.1),
    "grouped_linear": _case(ops.grouped_linear, _X, ("float", 3, 5, 8), (3, "n"), ("float", 3, 5), ("float", "n")),
    "grouped_mm": _case(ops.grouped_mm, _X, ("float", 3, 8, 5), (3, "n")),
    "grouped_swiglu": _case(ops.grouped_swiglu, _X, *(("float", 3, 5, 8),) * 2, ("float", "n"), (3, "n")),
    "jsd": _case(ops.jsd, _X, _X),
    "kl_divergence": _case(ops.kl_divergence, _X, _X, temperature=2.0),
    "kto": _case(ops.kto, *(_TOKENS,) * 2, _COUNTED, ("bool", 3)),
    "layernorm": _case(ops.layernorm, _X, _C, _C),
    "linear_cross_entropy": _case(ops.linear_cross_entropy, _HIDDEN, _WEIGHT, _TARGET, softcap=4.0, z_loss=0.1),
    "linear_cross_entropy shift": _case(ops.linear_cross_entropy, ("float", 2, "n", 6), _WEIGHT, (11, 2, "n"), shift=True, reduction="none"),
    "linear_jsd": _case(ops.linear_jsd, _HIDDEN, _WEIGHT, ("float", "n", 5), ("float", 11, 5)),
    "linear_kl": _case(ops.linear_kl, _HIDDEN, _WEIGHT, ("float", "n", 5), ("float", 11, 5)),
    "linear_cross_entropy lora": _case(lambda h, w, t, p, q: ops.linear_cross_entropy(h, w, t, lora=(p, q)), _HIDDEN, _WEIGHT, _TARGET, ("float", "n", 2), ("float", 11, 2)),
    "linear_logsumexp": _case(ops.linear_logsumexp, _HIDDEN, _WEIGHT, _TARGET, label_smoothing=0.1),
    "linear_logprobs": _case(ops.linear_logprobs, _HIDDEN, _WEIGHT, _TARGET, temperature=0.7),
    "logprobs": _case(ops.logprobs, ("float", "n", 11), _TARGET),
    "lora": _case(ops.lora, _X, ("float", "n", 6), ("float", 3, 6), ("float", 8, 3), scale=0.5),
    "merge_attention": _case(ops.merge_attention, ("float", 2, "n", 8), ("float", 2, "n"), ("float", 2, "n", 8), ("float", 2, "n")),
    "mix_streams": _case(ops.mix_streams, ("float", "n", 2, 8), ("float", "n", 3, 2), _X, ("float", "n", 3)),
    "mmsigmoid": _case(ops.mmsigmoid, _X, ("float", 8, 5)),
    "modulated_rmsnorm": _case(ops.modulated_rmsnorm, ("float", 2, "n", 8), _C, *(("float", 2, 8),) * 2),
    "moe_mlp": _case(ops.moe_mlp, _X, *(("float", 3, 5, 8),) * 2, ("float", 3, 8, 5), (3, "n", 2), ("float", "n", 2)),
    "multi_token_attention": _case(ops.multi_token_attention, ("float", 2, 2, "n", "n"), ("float", 2, 2, 3, 3)),
    "multimodal_rope": _case(ops.multimodal_rope, _Q, _K, *(("float", 3, 2, "n", 8),) * 2, sections=(1, 1, 2)),
    "normalize": _case(lambda x, w, g: ops.normalize(x, w, centered=True, gate=g), _X, _C, _X),
    "orpo": _case(lambda a, b, *masks: ops.orpo(-a.abs(), -b.abs(), *masks), *(_TOKENS,) * 2, *(_COUNTED,) * 2),
    "packed_glu": _case(ops.packed_glu, _X, ("float", "n"), limit=1.0),
    "partial_rope": _case(ops.partial_rope, _Q, _K, ("float", "n", 4), ("float", "n", 4)),
    "polynorm": _case(ops.polynorm, _X, ("float", 3), ("float", 1)),
    "qk_norm_rope": _case(ops.qk_norm_rope, _Q, _K, _C, _C, ("float", "n", 8), ("float", "n", 8)),
    "relu": _case(ops.relu, _X),
    "relu_squared": _case(ops.relu_squared, _X),
    "rmsnorm": _case(ops.rmsnorm, _X, _C),
    "rope": _case(ops.rope, _Q, _K, ("float", 2, "n", 8), ("float", 2, "n", 8)),
    "rotary": _case(ops.rotary, _Q, ("float", "n", 4), ("float", "n", 4)),
    "rotary_pairs": _case(ops.rotary_pairs, _Q, ("float", "n", 4), ("float", "n", 4), interleaved=True),
    "simpo": _case(ops.simpo, *(_TOKENS,) * 2, *(_COUNTED,) * 2),
    "softmax": _case(ops.softmax, _X),
    "softmax dim": _case(ops.softmax, ("float", 3, "n", 8), dim=1),
    "sparsemax": _case(ops.sparsemax, _X),
    "sum_rows": _case(ops.sum_rows, ("float", 11, 8), (11, "n", 2)),
    "swiglu": _case(ops.swiglu, _X, _X),
    "tvd": _case(ops.tvd, _X, _X),
    "two_mm": _case(ops.two_mm, _X, ("float", 8, 2), ("float", 2, 5)),
    "weighted_cross_entropy": _case(ops.weighted_cross_entropy, ("float", "n", 11), _TARGET, ("float", 11), z_loss=0.1),
}
