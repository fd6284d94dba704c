"""Provide the ops as functions: the shipped ones, and those of registered specs."""

from __future__ import annotations

from importlib import import_module

from .attention import attention
from .cross_entropy import cross_entropy
from .dyt import dyt
from .gate import gate
from .geglu import geglu
from .layernorm import layernorm
from .lora import lora
from .merge_attention import merge_attention
from .mmsigmoid import mmsigmoid
from .registry import register, registered, registered_names
from .relu import relu
from .ring_attention import ring_attention, ring_positions
from .rmsnorm import rmsnorm
from .rope import rope
from .softmax import softmax
from .swiglu import swiglu
from .two_mm import two_mm

_OPS = ["attention", "cross_entropy", "dyt", "gate", "geglu", "layernorm", "lora", "mmsigmoid", "relu", "rmsnorm", "rope", "softmax", "swiglu", "two_mm"]
#: folder -> ops in it, imported when they are first asked for
_FAMILIES = {
    "experts": ["grouped_linear", "grouped_mm", "grouped_swiglu", "moe_mlp", "packed_glu", "sum_rows"],
    "losses": ["cosine_distance", "jsd", "kl_divergence", "linear_cross_entropy", "linear_jsd", "linear_kl", "linear_logprobs", "linear_logsumexp", "logprobs", "tvd", "weighted_cross_entropy"],
    "preference": ["cpo", "dpo", "grpo", "kto", "orpo", "simpo"],
    "norms": ["add_rmsnorm", "embedding", "groupnorm", "modulated_rmsnorm", "normalize", "polynorm", "qk_norm_rope", "relu_squared", "sparsemax"],
    "positions": ["multimodal_rope", "partial_rope", "rotary", "rotary_pairs"],
    "residuals": ["attention_residual", "mix_streams", "multi_token_attention"],
}
_FOLDER = {name: folder for folder, names in _FAMILIES.items() for name in names}
__all__ = [*_OPS, *_FOLDER, "merge_attention", "register", "ring_attention", "ring_positions"]


def __getattr__(name: str):
    if name in _FOLDER:
        found = getattr(import_module(f"{__name__}.{_FOLDER[name]}.{name}"), name)
        globals()[name] = found
        return found
    op = registered(name)
    if op is None:
        allowed = ", ".join([*_OPS, *_FOLDER, *registered_names()])
        raise AttributeError(f"dtkernels.ops has no op {name!r}; allowed: {allowed}, or register a spec")
    return op


def __dir__() -> list[str]:
    return sorted({*__all__, *registered_names(), *(name for name in globals() if name.startswith("__"))})
