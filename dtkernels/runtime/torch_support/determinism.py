"""Read whether torch is told to use deterministic algorithms."""

from __future__ import annotations

import torch

#: whether ``torch.use_deterministic_algorithms(True)`` is set, with ``warn_only`` too; called for each key of a call, so without Python around it
fixed_order = getattr(torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled)


def refuses_any_order() -> bool:
    """Tell whether torch wants an error where there is no fixed order; otherwise, with ``warn_only``, a warning."""
    return fixed_order() and not torch.is_deterministic_algorithms_warn_only_enabled()
