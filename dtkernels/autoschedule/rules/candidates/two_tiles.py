"""Propose two tiles for a whole extent that is far from a power of two: 64 and 32 for the 96 columns of a head, where one would be 128.

On one H100 (16 heads of 2048 queries and keys, causal or not) attention's backward of 80 and 96 columns took 0.86 to 0.9 of the time, of 160
and 192 columns 0.8 to 0.86; of 40 and 48 columns, whose second tile is the smallest of the matrix units, as long as by one tile.

By specialized warps, on one H200 (16 heads of 4 x 2048, benchmarks/h200/attention_columns.json): the backward of 80 columns took 0.9 of the time that one
tile takes, of 96 columns 0.9 to 0.95. In the forward what is summed over alone by two tiles took 0.91 to 0.98 at 40 to 96 columns; results by two tiles,
too, 1.03 to 1.13 times as long as that: products of few columns take longer than their work, if their rows come from registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....codegen.powers_of_two import NARROW, UNITS, next_power_of_two, two_tiles, two_tiles_are_shorter
from ...cost.kernel_config import KernelConfig
from ...problem import SchedulingProblem


def fits_two_tiles(sizes: dict[str, int], label: str, narrow: int = NARROW) -> bool:
    """Return whether two tiles that hold the whole of a label are shorter than one."""
    return two_tiles_are_shorter(sizes[label], narrow)


def tiled_extent(sizes: dict[str, int], label: str) -> int:
    """Return the elements of the tiles that hold the whole of a label: two where these are shorter than one."""
    return sum(two_tiles(sizes[label], UNITS)) if fits_two_tiles(sizes, label) else next_power_of_two(sizes[label])


def in_two_tiles(shape: SchedulingProblem, config: KernelConfig) -> Iterator[KernelConfig]:
    """Yield the choices with two tiles for each whole extent that is shorter so; nothing where there is none."""
    labels = tuple(label for label, tile in config.tiles if tile == 0 and fits_two_tiles(shape.sizes, label))
    if labels and not config.two_tiles:
        yield replace(config, two_tiles=labels)


def with_sums_in_two_tiles(shape: SchedulingProblem, config: KernelConfig) -> KernelConfig:
    """Return the choices with two tiles for each whole extent that is summed over and no label of the result, where these are shorter."""
    labels = tuple(label for label, tile in config.tiles if tile == 0 and label not in shape.algorithm[config.func].labels and fits_two_tiles(shape.sizes, label, UNITS))
    return replace(config, two_tiles=labels)
