"""Rates of a GPU that the cost model takes as given, fitted to measured times."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Rates(NamedTuple):
    """Microseconds, and amounts a microsecond: of one multiprocessor, but for ``bandwidth`` and ``merge_rate``."""

    launch: float = 3.5  #: microseconds of a kernel that does nothing
    start: float = 0.8  #: until a program's first loads are issued
    latency: float = 0.8  #: of a load from memory
    step: float = 0.02  #: of an iteration besides, for each product
    alone: float = 1.0  #: products of a program that runs by itself
    rate: float = 7e6  #: operations of 16-bit products
    wide_rate: float = 0.4e6  #: operations of float32 products
    ordinary_rate: float = 1.5e4  #: operations of products that are no two matrices: 86 measured ones lie between 4e3 and 2.7e4 where they are long
    few_rows: float = 20.0  #: rows of a tile that cost as much as the whole product, and columns
    few_columns: float = 15.0
    old_units: float = 1.3  #: products of tiles too small for a warp group
    few_warps: float = 4.0  #: products by fewer warps than a group
    crowded: float = 1.5  #: chained products by more warps than their rows suit
    specialized: float = 0.7  #: products by specialised warps
    special: float = 5e4  #: special functions
    plain: float = 3e5  #: other arithmetic
    l2_rate: float = 5e4  #: bytes loaded
    request_rate: float = 1.5e4  #: loads of a thread
    narrow: float = 1.5  #: loads of less than 16 bytes, relative to those
    ragged: float = 1.3  #: the same in the parts of a split, whose ends need masks
    warp_rate: float = 3e3  #: loads of a thread that one warp has done by itself
    sync: float = 0.002  #: microseconds of an iteration for each warp
    beside: float = 0.7  #: the part of arithmetic that products do not hide
    live: float = 1.6  #: registers of an element of a tile of rows
    spills: float = 1.5
    overlap: float = 0.3  #: the part of a last wave that runs beside the one before it
    flying: float = 2e6  #: bytes on their way at which half the bandwidth is reached
    bandwidth: float = 4.3e6  #: bytes from memory
    sharp: float = 2.0  #: how little time of memory and of programs adds up
    rounds: float = 2.0  #: the same for a round of programs and its longest one
    inner: float = 3.0  #: the same for loads and products of one program
    exposed: float = 0.5  #: the part of a program's own time in which one that runs alone loads nothing
    tall: float = 1.08  #: products of tiles with more rows than columns
    low: float = 1.18  #: products of wide tiles with too few rows for a warp group
    quartered: float = 1.3  #: blocks of a tail by quarters, relative to whole ones
    described: float = 1.5  #: microseconds until a kernel has made its tensor descriptors
    merge: float = 3.0  #: microseconds of the kernel that merges a split
    merge_rate: float = 5e6  #: bytes of partial results
    merge_part: float = 0.05  #: of each part


PRODUCTS = Rates(
    launch=4.49, start=0.58, latency=0.216, step=2.26e-07, alone=0.3, rate=6600000, wide_rate=342000, few_rows=22.1, few_columns=14.8,
    old_units=0.801, few_warps=2.64, crowded=1.15, specialized=0.512, special=20700, plain=1000000, l2_rate=92100, request_rate=20600000, narrow=10,
    ragged=1.12, warp_rate=14300, sync=0.0058, beside=0.618, spills=6, overlap=0.117, flying=162000, bandwidth=3890000, sharp=1.59, rounds=1.5,
    inner=7.96, exposed=0.0104, merge=1.21, merge_rate=4010000, merge_part=0.22,
)  # fmt: skip
ROWS = Rates(
    launch=4.5, start=0.394, latency=0.402, step=0.0242, special=131000, plain=1000000, l2_rate=120000, request_rate=24300, narrow=1, ragged=1,
    warp_rate=1490, sync=0.000161, live=1.6, spills=6, overlap=0.488, flying=20000, bandwidth=4400000, sharp=1.81, rounds=2.93, inner=2.7,
    exposed=0.01, merge=4.86, merge_rate=2910000, merge_part=0.0022,
)  # fmt: skip
#: 16-bit products of a multiprocessor relative to the fitted ones, by compute capability: datasheets' figures, unmeasured
UNITS = {"80": 0.39, "89": 0.34, "90": 1.0, "100": 2.0}


@lru_cache(maxsize=16)
def rates_of(arch: int | str) -> tuple[Rates, Rates]:
    """Return the rates of kernels with products, and of others, for a compute capability."""
    factor = UNITS.get(str(arch), 1.0)
    return PRODUCTS._replace(rate=PRODUCTS.rate * factor), ROWS
