"""Reduce a loss of each row or sequence to one number."""

import torch

REDUCTIONS = ("none", "sum", "mean")


def check_reduction(op: str, reduction: str) -> None:
    """Raise ValueError, one line, for a reduction that is not known."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction is {reduction!r}; allowed: {', '.join(REDUCTIONS)}")


def reduced(rows: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return the losses, their sum or their mean."""
    return rows if reduction == "none" else rows.sum() if reduction == "sum" else rows.mean()


def check_shapes(op: str, what: str, **tensors: torch.Tensor) -> None:
    """Raise ValueError, one line, where tensors do not have one shape. A set of shapes would fix the sizes of a compiled graph."""
    first = next(iter(tensors.values())).shape
    if any(t.shape != first for t in tensors.values()):
        raise ValueError(f"{op}: {', '.join(tensors)} have one shape, {what}; got {', '.join(str(tuple(t.shape)) for t in tensors.values())}")


def check_range(op: str, name: str, value: float, low: float, high: float, above: bool = False) -> None:
    """Raise ValueError, one line, for a number out of range. ``above``: the lower end is not allowed itself."""
    if not (low < value if above else low <= value) or not value <= high:
        allowed = f"above {low:g}" if above and high == float("inf") else f"{low:g} to {high:g}"
        raise ValueError(f"{op}: {name} is {value}; allowed: {allowed}")
