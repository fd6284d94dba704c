"""Rates of a GPU that the cost model takes as given, fitted to measured times."""

from __future__ import annotations

import math
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
    tripled_rate: float = 0.75e6  #: operations of float32 products as three in TF32
    shallow: float = 1.25  #: the same with fewer than 32 terms in a step
    crammed: float = 2.2  #: with more sums than a thread has registers for
    old_tripled: float = 1.6  #: by tiles too small for a warp group
    turned: float = 1.4  #: columns that lie contiguous, for as many rows as columns
    masked: float = 3.0  #: the same where masks keep them from being loaded in vectors
    ordinary_rate: float = 1.5e4  #: operations of products that are no two matrices: 86 measured ones lie between 4e3 and 2.7e4 where they are long
    few_rows: float = 20.0  #: rows of a tile that cost as much as the whole product, and columns
    few_columns: float = 15.0
    old_units: float = 1.3  #: products of tiles too small for a warp group
    few_warps: float = 4.0  #: products by fewer warps than a group
    crowded: float = 1.5  #: chained products by more warps than their rows suit
    specialized: float = 0.7  #: products by specialized warps
    several: float = 0.78  #: the same where a step has more than two: gradients of attention of 128 columns (an H200, 22 kernels)
    many: float = 0.91  #: the same where it has more than three
    restart: float = 4.0  #: microseconds of such a program whose loop a mask takes apart: in each part its products start anew
    next_block: float = 1.22  #: microseconds between blocks of a program of two products by specialized warps: attention, an H200, 68 times
    overlapped: float = 2.1  #: arithmetic of such a program, relative to the rates; it runs beside products of other warps
    concurrent: float = 4.4  #: how little time of the two adds up
    special: float = 5e4  #: special functions
    plain: float = 3e5  #: other arithmetic
    l2_rate: float = 5e4  #: bytes loaded
    request_rate: float = 1.5e4  #: loads of a thread
    narrow: float = 1.5  #: loads of less than 16 bytes, relative to those
    ragged: float = 1.3  #: the same in the parts of a split, whose ends need masks
    warp_rate: float = 3e3  #: loads of a thread that one warp has done by itself
    store_rate: float = math.inf  #: stores of less than 16 bytes by programs that store block after block
    stored_strip: float = 0.0  #: bytes that a row of such a block costs besides
    sync: float = 0.002  #: microseconds of an iteration for each warp
    beside: float = 0.7  #: the part of arithmetic that products do not hide
    live: float = 1.6  #: registers of an element of a tile of rows
    spills: float = 1.5
    overlap: float = 0.3  #: the part of a last wave that runs beside the one before it
    flying: float = 2e6  #: bytes on their way at which half the bandwidth is reached
    bandwidth: float = 4.3e6  #: bytes from memory
    sharp: float = 2.0  #: how little time of memory and of programs adds up
    rounds: float = 2.0  #: the same for a round of programs and its longest one
    pipelined: float = 3.0  #: the same where long loops load several tiles ahead, 16 bytes at a time
    inner: float = 3.0  #: the same for loads and products of one program
    skew: float = 0.0  #: how much longer than the others the last of programs takes that all run at once, since each has its share of memory
    exposed: float = 0.5  #: the part of a program's own time in which one that runs alone loads nothing
    tall: float = 1.08  #: products of tiles with more rows than columns
    low: float = 1.18  #: products of wide tiles with too few rows for a warp group
    half: float = 1.6  #: the same with half of its rows: 32 x 64 took 13.1 and 17.5 us where 64 x 32 took 7.8 and 10.1 (an H200)
    doubled: float = 1.05  #: products of tiles with more rows than their warp groups take at once
    lone: float = 1.1  #: products of programs that stay, by one warp group
    paired: float = 1.2  #: products side by side of programs that stay
    parted: float = 1.1  #: products of tiles in two parts
    quartered: float = 1.3  #: blocks of a tail by quarters, relative to whole ones
    strip: float = 1.0  #: bytes that a row of a block costs besides its own, where rows begin at no multiple of 16 bytes
    run: float = 0.0  #: bytes that each piece of a block that lies contiguous costs besides its own
    gather: float = 0.02  #: microseconds of one sum over a program's threads
    passed: float = 1.0  #: loads of rows that a loop copies to shared memory ahead
    refilled: float = 1.1  #: programs that stay and load through pointers, whose loads start anew with each block
    merge: float = 3.0  #: microseconds of the kernel that merges a split
    merge_rate: float = 5e6  #: bytes of partial results
    merge_part: float = 0.05  #: of each part
    merge_single: float = 0.0  #: of each part besides, where a merge takes one after another
    begin: float = 0.0  #: microseconds until a multiprocessor has begun one more program
    begin_warp: float = 0.0  #: the same for each of its warps
    issue: float = 1e9  #: instructions of one warp, which wait for one another
    slots: float = 1e9  #: instructions of all warps
    passes: float = 1e9  #: passes through shared memory
    serial: float = 0.0  #: arithmetic of a program that runs by itself, for each of its warps: it waits for products, and they for it


#: python benchmarks/fit_cost_rates.py --trials benchmarks/h200_product_grid.json, and --more with each file of benchmarks/h100/*.safetensors and benchmarks/h200/candidate*.safetensors;
#: PRODUCTS with --launch 4.31 --steps 12, but for paired, by benchmarks/h100/product_probes.json
#: store_rate and stored_strip of PRODUCTS: by a grid over them, beside the others
#: ROWS: the same, then changed one by one for as long as the mean regret fell over the kernels of the tables and of benchmarks/h100/rows_*.safetensors
#: STREAMS: the same with --programs benchmarks/h100/small_and_odd_sizes.json, and --launch 4.4 so that kinds compare at small sizes; merge_single by splits in 16 to 128 parts on an H200
PRODUCTS = Rates(
    launch=4.31, start=0.412, latency=0.363, step=1.1e-10, alone=0.296, rate=7260000, wide_rate=280000, few_rows=4.79, few_columns=5.03, old_units=3.6,
    few_warps=2.53, crowded=1.88, specialized=0.585, special=45800, plain=510000, l2_rate=103000, request_rate=243000000, narrow=3.09, ragged=1.14,
    warp_rate=6300, store_rate=24600, stored_strip=54.1, sync=0.0187, beside=2.36, spills=4.79, overlap=0.155, flying=35500, bandwidth=3990000, sharp=1.31, rounds=1.5, pipelined=3.58, inner=5.6,
    exposed=0.0102, tall=1.2, low=1.07, doubled=1.15, lone=1.22, paired=1.3, parted=1.55, quartered=1.03, strip=3.29, gather=0.129, refilled=1.28,
    merge=1.66, merge_rate=3590000, merge_part=0.108,
)  # fmt: skip
ROWS = Rates(
    launch=4.5, start=0.266, latency=0.497, step=0.0802, special=39700, plain=3810000, l2_rate=138000, request_rate=19800, narrow=1, ragged=1,
    warp_rate=17200, sync=0.000767, spills=6.3, overlap=0.253, flying=13900, bandwidth=4600000, sharp=1.8, rounds=1.54, inner=5.82, exposed=0.115,
    strip=8.29, gather=0.0153, passed=1.51, merge=2.6, merge_rate=4030000, merge_part=0.00209, begin=0.112, begin_warp=0.00133, issue=495, slots=7190, passes=1400, run=8, skew=0.1,
)  # fmt: skip
STREAMS = Rates(
    launch=4.4, start=0.3, latency=0.138, step=0.0843, special=21900, plain=57000, l2_rate=118000, request_rate=127000, narrow=1.51, ragged=1.01,
    warp_rate=3170, sync=0.0137, spills=39, overlap=0.617, flying=63100, bandwidth=3780000, sharp=1.4, rounds=1.5, inner=1.95, exposed=0.0865,
    strip=1, gather=0.0718, merge=1.74, merge_rate=3660000, merge_part=0.000169, merge_single=0.11,
)  # fmt: skip
#: the same for kernels with products of products, with benchmarks/h100/candidate_trials_52.safetensors among the files
CHAINS = PRODUCTS._replace(
    launch=4.33, start=0.716, latency=0.301, alone=0.282, rate=5480000, wide_rate=117000, few_rows=3.85, few_columns=2.05, old_units=2.65,
    few_warps=1.71, crowded=1.34, specialized=0.779, special=74500, plain=632000, l2_rate=73400, narrow=3.83, ragged=1.12, warp_rate=5530,
    store_rate=18200, stored_strip=63.8, sync=0.0398, beside=0.76, spills=0.469, overlap=0.176, flying=44100, bandwidth=4640000, sharp=1.81,
    rounds=1.52, pipelined=2.4, inner=7.93, exposed=0.0156, doubled=1.31, lone=1.32, paired=1.32, parted=1.45, strip=3.85, refilled=1.06, merge=2.58,
    merge_rate=7000000, merge_part=0.158, serial=1.01,
)  # fmt: skip
#: 16-bit products of a multiprocessor relative to the fitted ones, by compute capability: datasheets' figures, unmeasured
UNITS = {"80": 0.39, "89": 0.34, "90": 1.0, "100": 2.0}
FLOAT8 = 2.0  #: products in float8 relative to those of 16 bits, by the datasheets


class RatesOfKinds(NamedTuple):
    """The rates of each kind of kernel: with a product on matrix units, with none, with products that only move memory, with products of products."""

    products: Rates
    rows: Rates
    streams: Rates
    chains: Rates


@lru_cache(maxsize=16)
def rates_of(arch: int | str) -> RatesOfKinds:
    """Return the rates for a compute capability."""
    factor = UNITS.get(str(arch), 1.0)
    return RatesOfKinds(PRODUCTS._replace(rate=PRODUCTS.rate * factor), ROWS, STREAMS, CHAINS._replace(rate=CHAINS.rate * factor))
