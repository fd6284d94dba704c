"""Define argparse types for the tools' options. They refuse bad values in one line, before anything is measured."""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from dtkernels.tuning.cli_types import DTYPES, Parser, at_least, said, some_of, within

__all__ = ["DTYPES", "Parser", "at_least", "device", "file_to_write", "folder_to_read", "pattern", "read_figures", "read_text", "said", "several", "share", "some_of", "within"]

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


def several(kind: Callable[[str], object]) -> Callable[[str], tuple]:
    """Accept values of one kind separated by commas."""
    return lambda text: tuple(kind(part) for part in text.split(","))


def share(text: str) -> float:
    """Accept a number from 0 to below 1."""
    return 0.0 if text in ("0", "0.0") else within(0, 0.999999)(text)


def pattern(text: str) -> re.Pattern:
    """Accept a regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


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
