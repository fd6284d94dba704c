"""Provide torch modules built on the ops."""

from .dyt import DyT, convert_norms_to_dyt

__all__ = ["DyT", "convert_norms_to_dyt"]
