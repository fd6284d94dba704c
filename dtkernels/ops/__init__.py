"""The ops. Those of registered specs appear here too."""

from __future__ import annotations

from .attention import attention
from .dyt import dyt
from .mmsigmoid import mmsigmoid
from .registry import register, registered
from .relu import relu
from .softmax import softmax
from .two_mm import two_mm

__all__ = ["attention", "dyt", "mmsigmoid", "register", "relu", "softmax", "two_mm"]


def __getattr__(name: str):
    op = registered(name)
    if op is None:
        raise AttributeError(f"dtkernels.ops has no op {name!r}; allowed: {', '.join(a for a in __all__ if a != 'register')}, or register a spec")
    return op
