"""Generate counter-based random numbers with torch operations: Philox 4x32-10 of Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_LOW = 0xFFFFFFFF
_ROUND = (0xD2511F53, 0xCD9E8D57)
_KEY = (0x9E3779B9, 0xBB67AE85)
UNIT = 2.0**-24


def words(seed: torch.Tensor, integers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the four words of 32 bits of each counter, as int64.

    ``seed``: an int64 scalar, the key. ``integers``: int64 tensors that broadcast; two or fewer count in 64 bits, three or four in 32.
    """
    parts = torch.broadcast_tensors(*integers)
    zero = torch.zeros_like(parts[0])
    if len(parts) <= 2:
        a, b = (*parts, zero)[:2]
        counter = [a & _LOW, (a >> 32) & _LOW, b & _LOW, (b >> 32) & _LOW]
    else:
        counter = [p & _LOW for p in (*parts, zero)[:4]]
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        c0, c1, c2, c3 = counter
        first, second = c0 * _ROUND[0], c2 * _ROUND[1]  # modulo 2**64, of which each half is right
        counter = [(second >> 32) & _LOW ^ c1 ^ k0, second & _LOW, (first >> 32) & _LOW ^ c3 ^ k1, first & _LOW]
        k0, k1 = (k0 + _KEY[0]) & _LOW, (k1 + _KEY[1]) & _LOW
    return counter


def random(seed: torch.Tensor, integers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return numbers in [0, 1) with 24 bits, float32."""
    return (words(seed, integers)[0] >> 8).to(torch.float32) * UNIT


def normal(seed: torch.Tensor, integers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return normal numbers of mean 0 and variance 1, float32, by the method of Box and Muller (1958)."""
    first, second, _, _ = words(seed, integers)
    u, v = ((first >> 8).to(torch.float32) + 1) * UNIT, (second >> 8).to(torch.float32) * UNIT
    return torch.sqrt(-2 * torch.log(u)) * torch.cos(2 * math.pi * v)
