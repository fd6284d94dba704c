"""Check the options of op functions: numbers in a range, integers, flags. Each error is one line: the op, the option, what is allowed."""

from __future__ import annotations

import torch

from ..runtime.bind.operator import MOST_OF_A_PARAMETER as MOST


def check_range(op: str, name: str, value: float, low: float, high: float, above: bool = False, below: bool = False) -> None:
    """Raise ValueError for a number out of range, TypeError for what is no number. ``above``, ``below``: the lower, the upper end is not allowed itself."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise TypeError(f"{op}: {name} is a tensor of shape {tuple(value.shape)}; allowed: a number")
    try:
        inside = (low < value if above else low <= value) and (value < high if below else value <= high)
    except TypeError:
        raise TypeError(f"{op}: {name} is {value!r}; allowed: a number") from None
    if not inside:
        ends = (f"above {low:g}" if above else f"{low:g}", f"below {high:g}" if below else f"{high:g}")
        allowed = ends[0] if above and high == float("inf") else f"{ends[0]} {'and' if above else 'to'} {ends[1]}"
        raise ValueError(f"{op}: {name} is {value}; allowed: {allowed}")


def check_number(op: str, name: str, value: float) -> None:
    """Raise ValueError for nan, TypeError for what is no number."""
    check_range(op, name, value, -float("inf"), float("inf"))


def check_integer(op: str, name: str, value: int, low: int = -MOST, high: int = MOST) -> None:
    """Raise ValueError for an integer out of range, TypeError for what is none. True is not 1."""
    if isinstance(value, (bool, torch.Tensor)) or not (isinstance(value, (int, torch.SymInt)) or hasattr(value, "__index__")):
        raise TypeError(f"{op}: {name} is {value!r}; allowed: an integer")
    if not low <= value <= high:
        allowed = f"{low} to {high}" if high != MOST else f"{low} or more" if value < low and low > -MOST else "integers of at most 18 digits"
        raise ValueError(f"{op}: {name} is {value}; allowed: {allowed}")


def as_flag(op: str, name: str, value: bool) -> bool:
    """Return an option that is true or false. Raises TypeError for a tensor of several elements, which is neither."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise TypeError(f"{op}: {name} is a tensor of shape {tuple(value.shape)}; allowed: True or False")
    return bool(value)


def check_floating(op: str, **tensors: torch.Tensor) -> None:
    """Raise TypeError for a tensor whose elements are not floating-point numbers of 16 bits and more."""
    for name, t in tensors.items():
        if not t.is_floating_point() or t.dtype.itemsize == 1:
            raise TypeError(f"{op}: {name} is {t.dtype}; allowed: floating point of 16 bits and more")
