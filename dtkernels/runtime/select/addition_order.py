"""Read whether sums must be added in a fixed order. Tables are also read where torch is not loaded."""

from __future__ import annotations

import sys


def fixed_order() -> bool:
    """Tell whether ``torch.use_deterministic_algorithms(True)`` is set."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.are_deterministic_algorithms_enabled()
