"""Which products forward hands to backward at given extents. It is asked in calls, and so knows nothing of expressions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True)
class Product:
    """A Func that backward may be handed; for each of its two operands the labels that it has and the operand has not, and those
    that the operand has and it has not."""

    name: str
    against: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]

    def larger(self, sizes: Mapping[str, Any], known: Callable[[Any], bool] = bool) -> bool:
        """Whether it has more elements than each of its operands. ``known`` answers a comparison of extents."""
        return all(known(prod(sizes[label] for label in own) > prod(sizes[label] for label in other)) for own, other in self.against)


def products_to_save(products: tuple[Product, ...], sizes: Mapping[str, Any], known: Callable[[Any], bool] = bool) -> tuple[str, ...]:
    """Those that are handed over at these extents: the ones no larger than one of their operands."""
    return tuple(p.name for p in products if not p.larger(sizes, known))
