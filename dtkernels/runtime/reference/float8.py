"""Round to float8 in any floating-point dtype, without torch's conversions, which differ between versions beyond the range."""

from __future__ import annotations

import torch

from ...lang.expr import Float8


def to_float8(x: torch.Tensor, form: Float8) -> torch.Tensor:
    """Return ``x``, float32 or float64, rounded to the nearest number of ``form``, ties to even, in its own dtype.

    Beyond the largest finite number, infinities included, that number is returned; a NaN stays one.
    """
    size = x.detach().abs().clamp(max=form.largest)
    _, exponent = torch.frexp(size)  # size = m * 2**exponent with m in [0.5, 1)
    step = torch.ldexp(torch.ones_like(size), exponent.clamp(min=2 - form.bias) - 1 - form.fraction)
    return torch.copysign(torch.round(size / step) * step, x.detach())
