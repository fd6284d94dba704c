"""What the tools' options may be: types for argparse, which refuse the rest in one line before anything is measured."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

DTYPES = ("bf16", "fp16", "fp32")


def some_of(allowed: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Names separated by commas, one at least, each one of ``allowed``."""
    known = tuple(allowed)

    def names(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(text.split(",")))
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {name!r}; allowed: {', '.join(known)}")
        return found

    return names


def at_least(least: int) -> Callable[[str], int]:
    """A whole number from ``least`` on."""

    def count(text: str) -> int:
        if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > 12 or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return count


def several(kind: Callable[[str], object]) -> Callable[[str], tuple]:
    """Values of one kind separated by commas."""
    return lambda text: tuple(kind(part) for part in text.split(","))


def share(text: str) -> float:
    """From 0 to below 1."""
    return 0.0 if text in ("0", "0.0") else within(0, 0.999999)(text)


def within(low: float, high: float = math.inf) -> Callable[[str], float]:
    """A finite number above ``low``, up to ``high``."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not low < value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is no number above {low:g}{'' if high == math.inf else f', up to {high:g}'}")
        return value

    return number


def file_to_write(text: str) -> Path:
    """A path that can be written to: hours of measuring must not end at a folder that is not there."""
    path = Path(text)
    folder = path.parent
    if path.is_dir() or not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: {'a folder' if path.is_dir() else f'no such folder: {folder}'}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: cannot be written")
    return path


def device(text: str) -> str:
    """cpu, or a GPU that is there."""
    import torch

    if text != "cpu" and not (text == "cuda" and torch.cuda.is_available()):
        raise argparse.ArgumentTypeError(f"no device {text!r} here; allowed: cpu{', cuda' if torch.cuda.is_available() else ''}")
    return text
