"""Round to powers of two, as tiles are: the tile that holds a whole extent is the next one."""

from __future__ import annotations

UNITS = 16  #: elements of the smallest tile of the matrix units
NARROW = 64  #: elements up to which one padded tile takes no longer than two: attention of 40 and 48 columns on an H100


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least ``n``; 1 for 0."""
    return 1 << max(0, n - 1).bit_length()


def binary_parts(n: int) -> tuple[int, ...]:
    """Return the powers of two that add up to ``n``, largest first: 128 and 64 for 192; none for 0."""
    return tuple(1 << i for i in reversed(range(n.bit_length())) if n >> i & 1)


def two_tiles(n: int, least: int) -> tuple[int, int]:
    """Return the tiles that hold ``n`` elements, each a power of two and at least ``least``: half of what one would be, and one for the rest."""
    low = max(least, next_power_of_two(n) // 2)
    return low, max(least, next_power_of_two(n - low))


def two_tiles_are_shorter(n: int, narrow: int = NARROW) -> bool:
    """Return whether two tiles of the matrix units hold ``n`` elements in less than one would, and more than ``narrow``, up to which that does not pay."""
    one = next_power_of_two(n)
    return one > narrow and sum(two_tiles(n, UNITS)) < one


def last_power_of_two(n: int) -> int:
    """Return the largest power of two that is at most ``n``; 1 for 0."""
    return 1 << max(0, n.bit_length() - 1)
