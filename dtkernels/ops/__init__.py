"""Provide the ops as functions: the shipped ones, and those of registered specs."""

from __future__ import annotations

from .attention import attention
from .cross_entropy import cross_entropy
from .dyt import dyt
from .gate import gate
from .geglu import geglu
from .layernorm import layernorm
from .lora import lora
from .mmsigmoid import mmsigmoid
from .registry import register, registered, registered_names
from .relu import relu
from .rmsnorm import rmsnorm
from .rope import rope
from .softmax import softmax
from .swiglu import swiglu
from .two_mm import two_mm

_OPS = ["attention", "cross_entropy", "dyt", "gate", "geglu", "layernorm", "lora", "mmsigmoid", "relu", "rmsnorm", "rope", "softmax", "swiglu", "two_mm"]
__all__ = [*_OPS, "register"]


def __getattr__(name: str):
    op = registered(name)
    if op is None:
        allowed = ", ".join([*_OPS, *registered_names()])
        raise AttributeError(f"dtkernels.ops has no op {name!r}; allowed: {allowed}, or register a spec")
    return op


def __dir__() -> list[str]:
    return sorted({*__all__, *registered_names(), *(name for name in globals() if name.startswith("__"))})
