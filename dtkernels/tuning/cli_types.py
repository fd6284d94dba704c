"""Define argparse types for the options of ``tune`` and of the tools. They refuse bad values in one line, before anything is measured."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable

from ..lang.errors import message_line

DTYPES = ("bf16", "fp16", "fp32")


class Parser(argparse.ArgumentParser):
    """Parse the options of a tool. An error is one line on stderr, without the usage, and exit status 2."""

    def __init__(self, tool: str, doc: str | None):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.tool = tool

    def error(self, message: str):
        """Exit with one line."""
        self.exit(2, f"{self.tool}: {' '.join(message.split())}; see --help\n")


def said(error: Exception) -> str:
    """Format an error in one line, with its file first if it has one."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return message_line(error, 300)


def some_of(allowed: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Accept names separated by commas, at least one, all from ``allowed``."""
    known = tuple(allowed)

    def names(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(text.split(",")))
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {name!r}; allowed: {', '.join(known)}")
        return found

    return names


def at_least(least: int) -> Callable[[str], int]:
    """Accept an integer of at least ``least``."""

    def count(text: str) -> int:
        if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > 12 or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return count


def within(low: float, high: float = math.inf) -> Callable[[str], float]:
    """Accept a finite number above ``low``, up to ``high``."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not low < value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is no number above {low:g}{'' if high == math.inf else f', up to {high:g}'}")
        return value

    return number


def seconds(text: str) -> float:
    """Parse ``90s``, ``30m``, ``2h`` or plain seconds, more than none."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([smh]?)", text, re.ASCII)
    if not match or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; allowed: 90s, 30m, 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
