"""Parse and print the DT language: text <-> Algorithm, Schedule, Program. Values are frozen; ``parse(str(program)) == program``."""

from __future__ import annotations

import importlib

#: name -> module; loaded on first use, so that a call with a prebuilt kernel does not import the language
_LAZY = {
    "Algorithm": "algorithm",
    "DTError": "errors",
    "Definition": "algorithm",
    "Position": "errors",
    "Primitive": "schedule",
    "Program": "schedule",
    "Schedule": "schedule",
    "parse": "parser",
    "parse_schedule": "parser",
}

__all__ = [*_LAZY]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'dtkernels.lang' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
