"""Decide which products forward saves for backward at given extents. Calls use this module, so it imports no expressions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

LIMIT = 256  #: MiB; DTKERNELS_MEMORY_LIMIT is another number
JOINT = "adjoint"  #: what forward saves where it computes the adjoint of a product itself, see joint.py
JOINT_LIMIT = 1024  #: MiB that such an adjoint may take however small the call is, where the user has set no limit
LONG = 1024  #: terms of a sum from which on a product is saved; to make it again takes as long as to write and read it at about 500, and scores of attention have up to 576


def memory_limit() -> int:
    """Return the limit in bytes of intermediates between kernels, and of saved products that backward could recompute; 0 for none."""
    return (int(_given()) if is_limit_set() else LIMIT) << 20


def is_limit_set() -> bool:
    """Return whether the user has set the limit. Raises ValueError for anything but a whole number of MiB."""
    given = _given()
    if given and not (given.isascii() and given.isdigit()):
        raise ValueError(f"DTKERNELS_MEMORY_LIMIT is {given!r}; allowed: MiB, a whole number; 0 for none")
    return bool(given)


def is_within_set_limit(taken: int) -> bool:
    """Return whether ``taken`` bytes are within the limit that the user has set, if there is one."""
    return not is_limit_set() or not memory_limit() or taken <= memory_limit()


def _given() -> str:
    return os.environ.get("DTKERNELS_MEMORY_LIMIT", "")


@dataclass(frozen=True)
class Product:
    """A Func that forward may save.

    ``against``: for each of its two operands, the labels that only the Func has, and the labels that only the operand has; empty for a product
    that other things than products read. ``labels`` are those of the Func, ``terms`` those of its sum. ``multiples``: labels that no input of
    the call has, each with a number and the label that has so many times fewer elements (rules/products/sliced_products.py).
    """

    name: str
    against: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    labels: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()
    multiples: tuple[tuple[str, int, str], ...] = ()

    def count(self, labels: Iterable[str], sizes: Mapping[str, Any]) -> Any:
        """Return the number of elements of a tensor with ``labels``."""
        known = {label: times * sizes[of] for label, times, of in self.multiples}
        return prod(sizes[label] if label in sizes else known[label] for label in labels)

    def elements(self, sizes: Mapping[str, Any]) -> Any:
        """Return the number of its elements."""
        return self.count(self.labels, sizes)

    def small(self, sizes: Mapping[str, Any], known: Callable[[Any], bool] = bool) -> bool:
        """Return whether only products read it, and it has no more elements than one of its operands. ``known`` evaluates a comparison of extents."""
        larger = (known(self.count(own, sizes) > self.count(other, sizes)) for own, other in self.against)
        return bool(self.against) and not all(larger)

    def length(self, sizes: Mapping[str, Any]) -> Any:
        """Return the number of terms of its sum."""
        return self.count(self.terms, sizes)


def is_adjoint_formed_in_forward(
    again: tuple[Product, ...], saved: tuple[str, ...], sizes: Mapping[str, Any], held: Any, known: Callable[[Any], bool] = bool
) -> bool:
    """Return whether the forward of one number computes the adjoint of a product too.

    It does where a product of a long sum is made ``again`` by backward otherwise, and not ``saved``, and where the adjoint in bfloat16 stays within the
    memory limit: of the user, else 1 GiB or the bytes that the caller holds for the call, ``held``, so that memory at most doubles.
    """
    long = [p for p in again if p.name not in saved and known(p.length(sizes) >= LONG)]
    taken: Any = sum(2 * p.elements(sizes) for p in again)
    if is_limit_set():
        return bool(long) and (not memory_limit() or known(taken <= memory_limit()))
    return bool(long) and (known(taken <= JOINT_LIMIT << 20) or known(taken <= held))


def products_to_save(
    products: tuple[Product, ...], sizes: Mapping[str, Any], itemsize: int, known: Callable[[Any], bool] = bool
) -> tuple[str, ...]:
    """Return the products to save at these extents, where results take ``itemsize`` bytes an element.

    Those that only products read, if they are no larger than an operand. Of the others those of long sums, the longest first, as long as all
    that is saved stays within the memory limit. Where extents are symbols and nothing is known of the bytes, a product is saved, as torch
    does, unless the user has set a limit.
    """
    limit = memory_limit()
    saved = [p for p in products if p.small(sizes, known)]
    size: Any = sum(itemsize * p.elements(sizes) for p in saved)
    long = [p for p in products if p not in saved and p.terms and known(p.length(sizes) >= LONG)]
    for p in sorted(long, key=lambda p: -n if isinstance(n := p.length(sizes), int) else 0):
        total = size + itemsize * p.elements(sizes)
        if not limit or (known(total <= limit) if is_limit_set() else not known(total > limit)):
            saved.append(p)
            size = total
    return tuple(p.name for p in products if p in saved)
