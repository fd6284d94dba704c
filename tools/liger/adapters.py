"""Adapt our norms, gates, rotations and attention to the signatures of Liger's autograd functions."""

from __future__ import annotations

from functools import lru_cache

import torch

import dtkernels
from dtkernels import ops


class NoCounterpart(Exception):
    """A call of Liger's that no op of ours has; says which argument."""


def only(**given: tuple[object, object]) -> None:
    """Raise NoCounterpart for an argument that is not what ours can do: ``name=(value, the value allowed)``."""
    for name, (value, allowed) in given.items():
        if (value is None) != (allowed is None) or value is not None and value != allowed:
            raise NoCounterpart(f"{name} is {value if isinstance(value, (bool, int, float, str)) else type(value).__name__}")


def like(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return the result in the dtype of an input, which is Liger's."""
    return result.to(tensor.dtype)


def _whole(offset: float) -> int:
    if offset != int(offset):
        raise NoCounterpart(f"offset is {offset}")
    return int(offset)


def rms_norm(x, weight, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
    return like(x, ops.rmsnorm(x, weight, eps, offset=_whole(offset)))


def fused_add_rms_norm(x, residual, weight, eps, offset=0.0, casting_mode="llama", in_place=False):
    return ops.add_rmsnorm(x, residual, weight, eps, offset=_whole(offset))


def modulated_rms_norm(x, weight, scale, shift, eps, offset=0.0, casting_mode="llama", in_place=True):
    weight, offset = (x.new_ones(x.shape[-1]), 0) if weight is None else (weight, offset)
    parts = x
    if scale.dim() == 2 and x.dim() == 2 and scale.shape[0] != x.shape[0]:
        parts = x.reshape(scale.shape[0], -1, x.shape[-1])
    return like(x, ops.modulated_rmsnorm(parts, weight, scale, shift, eps, offset=_whole(offset)).reshape(x.shape))


def layer_norm(x, weight, bias, eps):
    return ops.layernorm(x, weight, bias, eps)


def group_norm(x, weight, bias, num_channels, num_groups, eps):
    return ops.groupnorm(x, num_groups, weight, bias, eps)


def poly_norm(x, weight, bias, eps=1e-6, in_place=True):
    return like(x, ops.polynorm(x, weight, bias.reshape(1), eps))


def dyt(x, alpha, gamma, beta):
    return ops.dyt(x, alpha, gamma, torch.zeros_like(gamma) if beta is None else beta)


def swiglu(gate, up, gate_multiplier=1.0, down_multiplier=1.0):
    found = ops.swiglu(gate if gate_multiplier == 1.0 else gate * gate_multiplier, up)
    return found if down_multiplier == 1.0 else found * down_multiplier


def fused_gate_up(packed, in_place=False):
    return ops.swiglu(*packed.chunk(2, -1))


def geglu(gate, up):
    return ops.geglu(gate, up)


def relu_squared(x):
    return ops.relu_squared(x)


def rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    only(unsqueeze_dim=(unsqueeze_dim, 1))
    found = ops.rope(q, k, cos, sin)
    return like(q, found[0]), like(k, found[1])


def llama4_rope(q, k, freqs_cis, block_size=None):
    if not freqs_cis.is_complex() and freqs_cis.shape[-1] == q.shape[-1]:
        freqs_cis = torch.view_as_complex(freqs_cis.float().reshape(*freqs_cis.shape[:-1], -1, 2))
    cos, sin = (t.float().repeat_interleave(2, -1) for t in (freqs_cis.real, freqs_cis.imag))
    found = ops.partial_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, interleaved=True)
    return tuple(like(q, t.transpose(1, 2)) for t in found)


def qwen2vl_mrope(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    only(unsqueeze_dim=(unsqueeze_dim, 1))
    found = ops.multimodal_rope(q, k, cos, sin, tuple(mrope_section))
    return like(q, found[0]), like(k, found[1])


def softmax(x):
    return ops.softmax(x)


def sparsemax(x, dim):
    return ops.sparsemax(x.movedim(dim, -1)).movedim(-1, dim)


def embedding(weight, indices):
    return ops.embedding(weight, indices)


def multi_token_attention(scores, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, sparse=False):
    if stride not in (1, (1, 1)):
        raise NoCounterpart(f"stride is {stride}")
    pad, step = (v[0] if isinstance(v, tuple) else v for v in (padding, dilation))
    return ops.multi_token_attention(scores, weight, bias, padding=pad, dilation=step, groups=groups, sparse=sparse)


def attn_res(blocks, query, weight, eps):
    return ops.attention_residual(blocks, query, weight, eps)


def mhc_pre(x, h_pre):
    return like(x, ops.mix_streams(x, h_pre[..., None, :])[..., 0, :])


def mhc_post_res(x, f_out, h_post, h_res):
    return like(x, ops.mix_streams(x, h_res, f_out, h_post))


@lru_cache(maxsize=1)
def _neighborhood():
    return dtkernels.attention_spec(mask="abs(l - m) <= reach and (l - m) % step == 0", params={"reach": 3, "step": 1}, name="neighborhood_attention")


def neighborhood_attention(query, key, value, kernel_size=7, dilation=1, scale=None):
    return _neighborhood()(query, key, value, scale=scale, reach=kernel_size // 2 * dilation, step=dilation)
