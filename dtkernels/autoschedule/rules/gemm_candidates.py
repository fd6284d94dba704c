"""Propose schedules of a kernel with a product of loaded operands. The cost model decides among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

WASTED = 2  #: a tile this many times as long as its extent is proposed only if it is the smallest
LARGE = 24  #: waves of programs from which on small tiles are not proposed
LEAST_PARTS = 2  #: tiles of the sum in each part of a split
MOST_WAVES = 2.2  #: waves that the programs of a split fill at most


class GemmTile(NamedTuple):
    """Rows, columns and depth of a tile, warps and pipeline stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


#: starting points that were the fastest of a grid at some of 289 random sizes on an H200 (benchmarks/h200_product_grid.json), from small to large
TILES = tuple(
    GemmTile(*t)
    for t in (
        (16, 16, 256, 4, 4), (16, 32, 256, 4, 4), (16, 64, 128, 4, 5), (16, 128, 128, 4, 4), (32, 64, 128, 4, 5), (32, 128, 128, 4, 4), (64, 16, 128, 4, 5),
        (64, 32, 128, 4, 5), (64, 64, 64, 4, 5), (64, 64, 128, 4, 4), (64, 128, 64, 4, 5), (64, 128, 128, 4, 4), (64, 256, 64, 4, 4), (64, 256, 64, 8, 4),
        (128, 16, 128, 4, 5), (128, 32, 128, 4, 4), (128, 64, 64, 4, 5), (128, 64, 128, 4, 4), (128, 128, 64, 4, 3), (128, 128, 64, 4, 4), (128, 128, 64, 4, 6), (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 5), (256, 64, 64, 8, 4), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3),
    )
)  # fmt: skip
#: a tile whose program has the memory of a multiprocessor to itself, for one wave at most: 128 x 16384 sums of 16384 took 146 us on an H200, 175 in steps of 64
ALONE = GemmTile(128, 128, 128, 8, 3)
#: tiles of which a thread loads few elements, for rows that start at no multiple of 16 bytes, and waves of so many programs, which hide each other's loads: 57 x 11545 sums of 2486
#: took 48 us by 64 x 128 of 32 terms in 8 parts, 7 x 3397 sums of 9095 41 by 16 x 128 of 64 in 8 parts, 45 and 62 by 64 columns (an H200)
LOOSE = tuple(GemmTile(*t) for t in ((16, 64, 64, 4, 3), (16, 128, 64, 4, 3), (32, 64, 64, 4, 3), (32, 128, 64, 4, 3), (64, 64, 64, 4, 3), (64, 128, 32, 8, 3), (64, 128, 64, 8, 3)))
LOOSE_WAVES, LOOSE_BYTES = 6.0, 1 << 24  #: and bytes of the larger operand: gradients of 1450 x 1259 by 53 columns took 42 us with such tiles, 35 without
#: tiles of two parts: whole waves of them may leave less idle than powers of two do; not measured
PARTED = tuple(GemmTile(*t) for t in ((64, 96, 64, 4, 5), (64, 192, 64, 4, 4), (128, 96, 64, 4, 4), (128, 192, 64, 8, 3), (192, 128, 64, 8, 3)))
#: the same of float32 products: each within 4% of the fastest at several of 264 measured kernels of schedule_tables/nvidia_h200/measurements.safetensors
WIDE_TILES = tuple(
    GemmTile(*t)
    for t in (
        (16, 64, 32, 4, 4), (16, 128, 32, 4, 4), (32, 16, 32, 4, 4), (32, 32, 32, 4, 4), (32, 64, 32, 4, 4), (32, 128, 32, 4, 4), (64, 16, 32, 2, 4),
        (64, 16, 32, 4, 4), (64, 32, 32, 4, 4), (64, 64, 32, 4, 4), (64, 128, 64, 8, 3), (128, 16, 32, 4, 4), (128, 32, 32, 4, 4), (128, 64, 32, 4, 4),
        (128, 128, 16, 4, 4), (128, 128, 32, 8, 4), (256, 128, 32, 8, 4), (256, 128, 16, 8, 3), (64, 64, 16, 2, 3),
    )
)  # fmt: skip
#: the same as three products in TF32, the fastest of 71 measured kernels on an H100: wide where the columns' operand lies along the sum, else few columns
TRIPLED_TILES = tuple(
    GemmTile(*t)
    for t in (
        (32, 64, 32, 4, 4), (32, 128, 32, 4, 3), (64, 64, 32, 2, 3), (64, 64, 32, 4, 3), (64, 128, 32, 4, 3), (128, 64, 32, 4, 3), (128, 64, 32, 8, 3),
        (128, 128, 32, 8, 3), (256, 64, 32, 8, 3),
    )
)  # fmt: skip
#: the same of float8 products: rows of as many bytes. The sums of a step, of at most 128 terms, take registers beside the accumulators
FLOAT8_TILES = tuple(
    GemmTile(*t)
    for t in (
        (16, 32, 256, 4, 5), (16, 64, 256, 4, 5), (16, 128, 256, 4, 4), (32, 64, 256, 4, 5), (32, 128, 256, 4, 4), (64, 16, 256, 4, 5), (64, 32, 256, 4, 5),
        (64, 64, 128, 4, 5), (64, 128, 128, 4, 5), (64, 256, 128, 8, 4), (128, 16, 256, 4, 5), (128, 32, 256, 4, 4), (128, 64, 128, 4, 5), (128, 64, 128, 8, 5),
        (128, 128, 128, 8, 3), (128, 128, 128, 8, 4), (256, 64, 128, 8, 4), (64, 192, 128, 8, 4), (128, 192, 128, 8, 3), (192, 128, 128, 8, 3),
    )
)  # fmt: skip
#: tiles of two consumers in turn, each among the fastest at one of 9 sizes on an H200
IN_TURNS = tuple(GemmTile(*t) for t in ((64, 128, 64, 8, 8), (64, 128, 128, 8, 4), (64, 256, 64, 8, 5), (128, 128, 64, 8, 5)))
#: tiles in parts by two consumers, by which blocks fill a wave that powers of two do not
IN_PARTS = tuple(GemmTile(*t) for t in ((128, 96, 64, 8, 6), (128, 144, 64, 8, 5), (128, 160, 64, 8, 5), (128, 192, 64, 8, 4)))
PARTS = (2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256)


def tiles(
    rows: int, columns: int, depth: int, batch: int, multiprocessors: int, itemsize: int = 2, tripled: bool = False, known: tuple[GemmTile, ...] = ()
) -> Iterator[GemmTile]:
    """Yield the tiles worth considering for a product of these extents, whose operands take ``itemsize`` bytes an element; of those ``known`` if given."""
    for tile in known or (FLOAT8_TILES if itemsize == 1 else (*TILES, ALONE, *PARTED) if itemsize == 2 else TRIPLED_TILES if tripled else WIDE_TILES):
        if (tile.rows > 16 and tile.rows >= WASTED * rows) or (tile.columns > 16 and tile.columns >= WASTED * columns):
            continue
        if tile.rows == tile.columns == 16 and max(rows, columns) > 16:
            continue
        blocks = batch * -(-rows // tile.rows) * -(-columns // tile.columns)
        if tile == ALONE and itemsize == 2 and blocks > multiprocessors:
            continue
        if (tile.depth * itemsize > 128 and tile.depth >= WASTED * depth and tile.rows * tile.columns > 16 * 64) or (
            blocks > LARGE * multiprocessors and tile.rows * tile.columns < 128 * (64 if tripled else 128) and min(rows, columns) > 64
        ):
            continue
        yield tile


def parts(blocks: int, steps: int, multiprocessors: int, waves: float = MOST_WAVES) -> Iterator[int]:
    """Yield numbers of parts that a sum of ``steps`` tiles may be split into, so that its programs fill about a wave; ``waves`` at most."""
    useful = [n for n in PARTS if blocks * n <= waves * multiprocessors and steps >= LEAST_PARTS * n]
    yield from useful[-4:]


def streams(rest: int, steps: int, at_once: int) -> list[int]:
    """Return the two best numbers of parts for the sums of a last wave of ``rest`` blocks, as far as they take fewer rounds than whole sums."""
    rounds = {n: -(-rest * n // at_once) / n for n in PARTS[:5] if steps >= LEAST_PARTS * n}
    return sorted((n for n in rounds if rest and rounds[n] < 1), key=lambda n: (rounds[n], n))[:2]
