"""What one program that nobody tuned is: its text, the same in torch, and the sizes at which it is checked and timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Sizes = dict[str, int]


@dataclass(frozen=True)
class Untuned:
    """One program. ``text`` is its DT, which calls the last result ``out``; ``eager`` the same in torch.

    ``inputs`` has a label for each dimension; ``sizes`` are timed, ``checked`` run on a GPU, ``small`` in the interpreter. ``grad``
    are the inputs that gradients are asked for. ``kinds`` of inputs: ``index:v`` counts below v, ``sorted:v`` the same in ascending order, ``int8``, ``positive``, ``small``,
    ``fp32``, small and float32 whatever the others are, ``table``, of which no more is read than is picked. ``products`` counts their
    operations; a backward has ``backward`` times as many. ``library`` is the same by a function of torch's own, where there is one.
    """

    text: str
    eager: Callable
    inputs: dict[str, str]
    sizes: tuple[Sizes, ...]
    checked: tuple[Sizes, ...]
    small: Sizes
    grad: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bf16",)
    scalars: tuple[float, ...] = ()
    small_scalars: tuple[float, ...] | None = None
    kinds: dict[str, str] = field(default_factory=dict)
    products: Callable[[Sizes], float] = lambda sizes: 0.0
    backward: float = 2.0
    library: Callable | None = None


def along(*labels: str, times: float = 2.0) -> Callable[[Sizes], float]:
    """Operations of products along all of the labels."""

    def count(sizes: Sizes) -> float:
        total = times
        for label in labels:
            total *= sizes[label]
        return total

    return count


def of_attention(sizes: Sizes, keys: float | None = None) -> float:
    """Operations of both products of attention, over so many keys."""
    return 2.0 * sizes["b"] * sizes["m"] * (sizes["l"] if keys is None else keys) * (sizes["d"] + sizes["n"])
