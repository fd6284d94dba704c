"""Decide which products forward saves for backward at given extents. Calls use this module, so it imports no expressions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True)
class Product:
    """A Func that forward may save.

    For each of its two operands: the labels that only the Func has, and the labels that only the operand has.
    """

    name: str
    against: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]

    def larger(self, sizes: Mapping[str, Any], known: Callable[[Any], bool] = bool) -> bool:
        """Return whether it has more elements than each of its operands. ``known`` evaluates a comparison of extents."""
        return all(known(prod(sizes[label] for label in own) > prod(sizes[label] for label in other)) for own, other in self.against)


def products_to_save(products: tuple[Product, ...], sizes: Mapping[str, Any], known: Callable[[Any], bool] = bool) -> tuple[str, ...]:
    """Return the products to save at these extents: those no larger than one of their operands."""
    return tuple(p.name for p in products if not p.larger(sizes, known))
