"""Define argparse types for the tools' options. They refuse bad values in one line, before anything is measured."""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

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
    return " ".join(str(error).split())[:300]


def read_text(path: Path) -> str:
    """Read the text of a file. Raises OSError, and ValueError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no UTF-8 text: byte {error.object[error.start]:#x} at offset {error.start}") from None


def read_figures(path: Path, about: Iterable[str] = ()) -> dict:
    """Read the output of tools/bench.py: its figures, and the keys ``about``. Raises OSError, and ValueError for any other content."""
    try:
        data = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: not JSON that is read here: nested too deeply") from None
    figures = data.get("figures") if isinstance(data, dict) else None
    if not isinstance(figures, list) or not all(isinstance(f, dict) for f in figures):
        raise ValueError(f"{path}: not written by tools/bench.py: it has no list of figures")
    for name in about:
        if not isinstance(data.get(name), str):
            raise ValueError(f"{path}: not written by tools/bench.py: it has no {name}")
    for i, figure in enumerate(figures):
        for name, kinds in _FIGURE.items():
            if not isinstance(figure.get(name), kinds):
                raise ValueError(f"{path}: not written by tools/bench.py: figure {i + 1} has no {name}")
    return data


_FIGURE: dict[str, type | tuple[type, ...]] = {"op": str, "shape": str, "dtype": str, "who": str, "microseconds": (int, float, type(None))}


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
    """Accept a whole number of at least ``least``."""

    def count(text: str) -> int:
        if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > 12 or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return count


def several(kind: Callable[[str], object]) -> Callable[[str], tuple]:
    """Accept values of one kind separated by commas."""
    return lambda text: tuple(kind(part) for part in text.split(","))


def share(text: str) -> float:
    """Accept a number from 0 to below 1."""
    return 0.0 if text in ("0", "0.0") else within(0, 0.999999)(text)


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


def file_to_write(text: str) -> Path:
    """Accept a path that can be written: hours of measuring must not end at a missing folder."""
    path = Path(text)
    folder = path.parent
    if path.is_dir() or not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: {'a folder' if path.is_dir() else f'no such folder: {folder}'}")
    try:
        if not path.exists():
            with tempfile.TemporaryFile(dir=folder):  # permissions say little: a disk may be full or read-only
                return path
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: cannot be written: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: cannot be written")
    return path


def folder_to_read(text: str) -> Path:
    """Accept an existing folder."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: {'a file' if path.exists() else 'no such folder'}")
    return path


def device(text: str) -> str:
    """Accept cpu, or an available GPU."""
    import torch

    if text != "cpu" and not (text == "cuda" and torch.cuda.is_available()):
        raise argparse.ArgumentTypeError(f"no device {text!r} here; allowed: cpu{', cuda' if torch.cuda.is_available() else ''}")
    return text
