"""Hand the norm of a sum from the layer that made both, in one kernel, to the norm of the next layer. Without gradients only.

The normed tensor hangs on the sum, and the norm that takes it removes it: it lives no longer than if that norm had computed it.
"""

from __future__ import annotations

import torch
from torch import nn

_ATTRIBUTE = "_dtkernels_normed"


def may_hang(total: torch.Tensor) -> bool:
    """Return whether a normed tensor may wait on ``total``: writes to it in between must be noticed, which torch does not count in inference mode."""
    return not torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not total.is_inference()


def hang(total: torch.Tensor, norm: nn.Module, normed: torch.Tensor) -> None:
    """Have ``norm(total)`` return ``normed``, once."""
    setattr(total, _ATTRIBUTE, (norm, normed, total._version))


def take_normed(total: object, norm: object) -> torch.Tensor | None:
    """Return the norm attached to a sum if neither has changed since; None otherwise."""
    hung = getattr(total, _ATTRIBUTE, None)
    if hung is None:
        return None
    delattr(total, _ATTRIBUTE)
    known, normed, version = hung
    # a sum of a checkpoint's forward may reach a norm with gradients
    return normed if known is norm and not torch.is_grad_enabled() and isinstance(total, torch.Tensor) and not total.is_inference() and total._version == version else None
