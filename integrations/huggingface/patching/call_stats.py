"""Count what ran where: one CallRecord for each patched module. Records are plain data, so deepcopy and pickle work."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dtkernels.runtime.path_counters import runs_reference

from .replacements import Noted

NAME = "dtkernels"  # the attention implementation's name in transformers' configs
ATTRIBUTE = "_dtkernels_record"  # where a patched attention module keeps its record

_MOST_REASONS = 20  # reasons may quote sizes; many different sizes must not fill the memory


@dataclass
class CallRecord(Noted):
    """The calls of one patched module so far.

    calls       calls that reached the patched module, fallbacks included
    fallbacks   reason -> number of calls that took the original path for it
    matrices    why the mask was a matrix -> number of calls in which the op took one
    references  calls that the op computed by its torch reference, without a kernel (``DTKERNELS_FALLBACK=reference``)
    original    the attention implementation the module had before ("sdpa", "eager", ...); None for activations
    eager       the modeling file's own eager attention function, if there is one
    as_measured whether calls for which the original was measured to be faster take it: true if only "auto" asked for the op
    before      what the attribute held that was replaced, another report's replacement included; None if the module had none

    Calls inside a torch.compile graph are not counted: a count would be a side effect that the graph has to guard.
    """

    calls: int = 0
    fallbacks: Counter = field(default_factory=Counter)
    matrices: Counter = field(default_factory=Counter)
    references: int = 0
    original: str | None = None
    eager: Callable | None = None
    as_measured: bool = False
    before: Any = field(default=None, repr=False, compare=False)

    @property
    def paths(self) -> dict[str, int]:
        """Calls by the path that they took: "kernel", "own path" (the module's original one) and "reference"."""
        own = self.fallbacks.total()
        return {"kernel": self.calls - own - self.references, "own path": own, "reference": self.references}

    def count(self, fallback: str | None, x: torch.Tensor | None = None) -> None:
        """Count one call; `fallback` is the reason why it went to the original path, None if the op computes it from `x`."""
        if torch.compiler.is_compiling():
            return
        self.calls += 1
        if fallback is None:
            self.references += x is not None and runs_reference(x)
        else:
            known = fallback in self.fallbacks or len(self.fallbacks) < _MOST_REASONS
            self.fallbacks[fallback if known else "other reasons"] += 1

    def count_matrix(self, reason: str) -> None:
        """Count one call whose mask had a flag or a number for each score; `reason` says why."""
        self.matrices[reason] += 1


# Models loaded with attn_implementation="dtkernels" have no record of their own; their calls are counted here.
unpatched_calls = CallRecord()


_before: dict[int, tuple[weakref.ref, str]] = {}  # id(config) -> the config, and its attention implementation before `apply_to`


def remember_before(config: object, name: str) -> None:
    """Remember the attention implementation of a config whose model is about to be patched. An attribute would be saved with the config."""
    key = id(config)
    _before[key] = weakref.ref(config, lambda _: _before.pop(key, None)), name


def implementation_before(config_id: int) -> str | None:
    """Return the attention implementation that a living config named before its model was patched; None if it was not.

    Its id stands for it: as constants, torch 2.11's compiler takes numbers, but no config. A config that dies takes its entry with it.
    """
    return _before[config_id][1] if config_id in _before else None


def record_of(module: torch.nn.Module) -> CallRecord:
    """Return the record of a patched attention module, or the one shared by all modules that `apply_to` never patched."""
    return getattr(module, ATTRIBUTE, unpatched_calls)
