"""Counts of what ran where: one CallRecord a patched module, plain data, so that deepcopy and pickle carry it along."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

NAME = "dtkernels"  # the attention implementation's name in transformers' configs
ATTRIBUTE = "_dtkernels_record"  # where a patched attention module keeps its record

_MOST_REASONS = 20  # reasons may quote sizes; a long run of ever new sizes must not fill the memory


@dataclass
class CallRecord:
    """What one patched module did so far.

    calls       calls that reached the patched module, fallbacks included
    fallbacks   reason -> how many calls went to the original path for it
    original    the attention implementation the module had before ("sdpa", "eager", ...); None for activations
    eager       the modeling file's own eager attention function, where there is one
    as_measured whether calls for which the original was measured to be faster go to it; so where "auto" alone asked for the op

    Calls inside a torch.compile graph are not counted: a count would be a side effect that the graph has to guard.
    """

    calls: int = 0
    fallbacks: Counter = field(default_factory=Counter)
    original: str | None = None
    eager: Callable | None = None
    as_measured: bool = False

    def count(self, fallback: str | None = None) -> None:
        """Count one call; `fallback` is the reason why it went to the original path."""
        if torch.compiler.is_compiling():
            return
        self.calls += 1
        if fallback is not None:
            known = fallback in self.fallbacks or len(self.fallbacks) < _MOST_REASONS
            self.fallbacks[fallback if known else "other reasons"] += 1


# Models loaded with attn_implementation="dtkernels" have no record of their own; their calls are counted here.
unpatched_calls = CallRecord()


def record_of(module: torch.nn.Module) -> CallRecord:
    """The record of a patched attention module, or the one shared by all modules that `apply_to` never saw."""
    return getattr(module, ATTRIBUTE, unpatched_calls)
