"""Draw sizes at random from the whole domain of each op: an infinite stream for each (seed, op), the same whatever is measured.

Extents are drawn log-uniformly. Every ten sizes hold each stratum of the op once, in random order, so a short run meets odd
sizes, extents of 1 and very wide rows too. What exceeds the bound of its op is drawn again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

Range = tuple[int, int]  #: least and greatest extent

ROWS: dict[str, Range] = {"rows": (1, 65536), "columns": (1, 131072)}
PRODUCT: dict[str, Range] = {"m": (1, 16384), "n": (1, 16384), "k": (1, 16384)}
TWO_PRODUCTS: dict[str, Range] = {**PRODUCT, "rank": (1, 512)}
ATTENTION: dict[str, Range] = {"batch": (1, 256), "group": (1, 128), "key_heads": (1, 128), "queries": (1, 32768), "keys": (1, 32768)}
HEAD_SIZES = (32, 40, 48, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256)
HEADS = 128  #: most heads of queries
MOST_ELEMENTS = 2**28  #: of a rows op's tensor: half a GiB in 16 bits
MOST_FLOPS = 1e13  #: of a forward
MOST_MOVED = 2**29  #: elements of an attention's queries and keys together


@dataclass(frozen=True)
class Size:
    """One drawn size: its stratum in words, and its shape as tools/bench.py writes it."""

    stratum: str
    shape: str


@dataclass(frozen=True)
class Stratum:
    """A part of a domain: ranges that replace those of the domain, and conditions.

    ``multiple``: every extent is one of it. ``odd``: every extent is odd. ``power``: whether the group is a power of two, None
    for either. ``alike``: as many keys as queries. ``causal``: its probability. ``head_sizes``: those to draw from.
    """

    words: str
    ranges: tuple[tuple[str, Range], ...] = ()
    multiple: int = 1
    odd: bool = False
    power: bool | None = None
    alike: bool = True
    causal: float = 0.5
    head_sizes: tuple[int, ...] = HEAD_SIZES


def _stratum(words: str, ranges: dict[str, Range] | None = None, **more) -> Stratum:
    return Stratum(words, tuple((ranges or {}).items()), **more)


_ANY = _stratum("any")
_ROWS = (
    _ANY, _ANY, _stratum("odd", {"rows": (3, 65536), "columns": (3, 131072)}, odd=True), _stratum("one row", {"rows": (1, 1)}), _stratum("one column", {"columns": (1, 1)}),
    _stratum("few rows", {"rows": (2, 64), "columns": (1024, 131072)}), _stratum("many rows", {"rows": (16384, 65536), "columns": (2, 1024)}),
    _stratum("very wide", {"columns": (65536, 131072)}), _stratum("very wide, odd", {"columns": (32769, 131072)}, odd=True),
    _stratum("multiples of 128", {"rows": (128, 65536), "columns": (128, 32768)}, multiple=128),
)  # fmt: skip
_LARGE: dict[str, Range] = {"m": (1024, 16384), "n": (1024, 16384), "k": (1024, 16384)}
_PRODUCT = (
    _ANY, _ANY, _stratum("odd", {"m": (3, 16384), "n": (3, 16384), "k": (3, 16384)}, odd=True), _stratum("one row", {"m": (1, 1)}),
    _stratum("one column", {"n": (1, 1)}), _stratum("sums of one", {"k": (1, 1)}), _stratum("few rows", _LARGE | {"m": (2, 128)}),
    _stratum("large", _LARGE), _stratum("large, odd", _LARGE, odd=True), _stratum("multiples of 128", {n: (128, 16384) for n in "mnk"}, multiple=128),
)  # fmt: skip
_TWO_PRODUCTS = (
    _ANY, _ANY, _stratum("any rank", {"rank": (1, 16384)}), _stratum("odd", {"m": (3, 16384), "n": (3, 16384), "k": (3, 16384), "rank": (3, 512)}, odd=True),
    _stratum("one row", {"m": (1, 1)}), _stratum("rank 1", {"rank": (1, 1)}), _stratum("few rows", _LARGE | {"m": (2, 128)}),
    _stratum("large", _LARGE | {"rank": (4, 512)}), _stratum("large, odd", _LARGE | {"rank": (3, 512)}, odd=True),
    _stratum("multiples of 8", {"m": (128, 16384), "n": (128, 16384), "k": (128, 16384), "rank": (8, 512)}, multiple=8),
)  # fmt: skip
_ONE_QUERY: dict[str, Range] = {"queries": (1, 1), "keys": (1024, 32768)}
_ATTENTION = (
    _ANY, _ANY, _stratum("other count of keys", alike=False, causal=0.25), _stratum("odd", {"queries": (3, 32768), "keys": (3, 32768)}, odd=True, alike=False, causal=0.0),
    _stratum("one query, long keys", _ONE_QUERY, alike=False, causal=0.0),
    _stratum("one query, long keys, group no power of two", _ONE_QUERY, alike=False, causal=0.0, power=False),
    _stratum("short", {"batch": (8, 256), "queries": (1, 256)}), _stratum("long", {"batch": (1, 8), "queries": (4096, 32768)}, causal=0.7),
    _stratum("group no power of two", {"queries": (64, 32768)}, power=False),
    _stratum("multiples of 128", {"queries": (128, 32768), "batch": (1, 32)}, multiple=128, power=True, causal=0.7, head_sizes=(64, 128)),
)  # fmt: skip

#: op -> its domain, its strata, and its bound in words
DOMAINS: dict[str, tuple[dict[str, Range], tuple[Stratum, ...], str]] = {
    **{op: (ROWS, _ROWS, f"at most {MOST_ELEMENTS} elements") for op in ("relu", "softmax", "dyt")},
    "mmsigmoid": (PRODUCT, _PRODUCT, f"at most {MOST_FLOPS:.0e} operations forward"),
    "two_mm": (TWO_PRODUCTS, _TWO_PRODUCTS, f"at most {MOST_FLOPS:.0e} operations forward; one stratum has ranks up to 16384"),
    "attention": (ATTENTION, _ATTENTION, f"at most {HEADS} heads of queries, {MOST_FLOPS:.0e} operations forward and {MOST_MOVED} elements of queries and keys; heads of "
                  f"{', '.join(map(str, HEAD_SIZES))}; causal or not"),
}  # fmt: skip
OPS = tuple(DOMAINS)


def sizes(seed: int, op: str) -> Iterator[Size]:
    """Yield the sizes of ``op`` for ``seed``, without end."""
    draw = random.Random(f"{seed} {op}")  # seeded by text: the same numbers on every machine
    domain, strata, _ = DOMAINS[op]
    while True:
        for stratum in draw.sample(strata, len(strata)):
            shape = None
            while shape is None:
                shape = _FORMS[op](draw, {**domain, **dict(stratum.ranges)}, stratum)
            yield Size(stratum.words, shape)


def first_sizes(seed: int, op: str, count: int) -> list[Size]:
    """Return the first ``count`` sizes."""
    return list(islice(sizes(seed, op), count))


def text() -> str:
    """Format the domains as a table."""
    lines = []
    for op, (domain, strata, bound) in DOMAINS.items():
        ranges = ", ".join(f"{name.replace('_', ' ')} {low}..{high}" for name, (low, high) in domain.items())
        lines += [f"{op:10} {ranges}; {bound}", f"{'':10} strata: {'; '.join(dict.fromkeys(s.words for s in strata))}"]
    return "\n".join(lines)


# -- one size -----------------------------------------------------------------------------------------------------------


def extent(draw: random.Random, ends: Range, multiple: int = 1, odd: bool = False) -> int:
    """Draw a number log-uniformly: between the ends, a multiple, or odd. The ends are as likely as others of their size."""
    low, high = ends[0] / multiple, ends[1] / multiple
    value = int(math.exp(draw.uniform(math.log(low), math.log(high + 1)))) if low < high else int(low)
    value = min(max(value, math.ceil(low)), int(high)) * multiple
    return value if not odd or value % 2 else value - 1 if value > ends[0] else value + 1


def _extents(draw: random.Random, ranges: dict[str, Range], s: Stratum) -> list[int]:
    return [extent(draw, ends, s.multiple, s.odd) for ends in ranges.values()]


def _rows(draw: random.Random, ranges: dict[str, Range], s: Stratum) -> str | None:
    rows, columns = _extents(draw, ranges, s)
    return f"{rows}x{columns}" if rows * columns <= MOST_ELEMENTS else None


def _product(draw: random.Random, ranges: dict[str, Range], s: Stratum) -> str | None:
    m, n, k = _extents(draw, ranges, s)
    return f"{m}x{n}x{k}" if 2.0 * m * n * k <= MOST_FLOPS else None


def _two_products(draw: random.Random, ranges: dict[str, Range], s: Stratum) -> str | None:
    m, n, k, rank = _extents(draw, ranges, s)
    return f"{m}x{n}x{k}r{rank}" if 2.0 * m * rank * (n + k) <= MOST_FLOPS else None


def _attention(draw: random.Random, ranges: dict[str, Range], s: Stratum) -> str | None:
    batch, group, key_heads = (extent(draw, ranges[name]) for name in ("batch", "group", "key_heads"))
    queries, keys = (extent(draw, ranges[name], s.multiple, s.odd) for name in ("queries", "keys"))
    size, causal = draw.choice(s.head_sizes), draw.random() < s.causal
    keys, heads = queries if s.alike else keys, group * key_heads
    fits = heads <= HEADS and s.power in (None, group & (group - 1) == 0)
    flops, moved = 4.0 * batch * heads * queries * keys * size, batch * size * (heads * queries + 2 * key_heads * keys)
    if not fits or flops > MOST_FLOPS or moved > MOST_MOVED:
        return None
    return f"B{batch}H{heads}{f'/{key_heads}' if group > 1 else ''}M{queries}S{keys}D{size}{' causal' if causal else ''}"


_FORMS: dict[str, Callable[[random.Random, dict[str, Range], Stratum], str | None]] = {
    **dict.fromkeys(("relu", "softmax", "dyt"), _rows), "mmsigmoid": _product, "two_mm": _two_products, "attention": _attention,
}  # fmt: skip
