"""Compile plain torch functions: ``dtkernels.fuse``."""

from .fused_function import Fused, fuse
from .unsupported import UnsupportedOperation

__all__ = ["Fused", "UnsupportedOperation", "fuse"]
