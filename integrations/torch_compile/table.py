"""List the replacements: for each op its patterns, the conditions that refuse it, and whether it is on by default."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import fx

from . import attention, layers
from .canonical import example
from .matcher import Form, Match, pattern_of

NOT_TIMED = "not timed by a GPU inside a graph: ask for it by name"
#: of a Llama-shaped training step on an H200: with both replaced 105.2 ms for 103.4 (benchmarks/h200/models_compiled_2048.json)
INDUCTOR = "Inductor's own was faster"
#: with 32768 classes 123.0 ms for 123.2 and 213.5 for 211.4, the same peak memory (benchmarks/h200/models_loss_alone_2048.json, _8192.json)
NO_GAIN = "no faster than Inductor's where it was timed: ask for it by name"


@dataclass(frozen=True)
class Replacement:
    """Calls of one op that stand for what a pattern matches.

    refuse   (match, result) -> why the op does not compute it, or None
    emit     (builder, match, result) -> the node that replaces the result
    leave    (match, result) -> why "auto" leaves it alone, or None
    ease     (match, result): make what was left alone cheaper, with the same numbers
    """

    op: str
    pattern: Callable
    refuse: Callable[[Match, fx.Node], str | None]
    emit: Callable
    leave: Callable[[Match, fx.Node], str | None]
    ease: Callable[[Match, fx.Node], None] | None = None

    @property
    def form(self) -> Form:
        """The traced pattern."""
        return _traced(self.pattern)


@cache
def _traced(pattern: Callable) -> Form:
    return pattern_of(pattern)


def _always(reason: str) -> Callable[[Match, fx.Node], str | None]:
    return lambda match, result: reason


def _sdpa_is_faster(match: Match, result: fx.Node) -> str | None:
    """Return why attention is left alone, as it was measured on an H200: beside sdpa, and beside what Inductor makes of the written-out form.

    sdpa has no softcap: there the matrix of scores would be stored, and attention is replaced. So it is where a mask is read in numbers: for sdpa it
    is a matrix. A training step of padded rows took 110 ms for 124 (2048 positions) and 148 for 214 (8192), one of packed sequences 106 for 124.
    """
    if match.get("cap") is not None:
        return None
    if any(match.get(n) is not None for n in attention.MASKS):
        read = attention.all_in_numbers(match)
        if read is None:
            return "a mask that is a matrix: sdpa was faster"
        if not read.causal and not read.nothing:
            return None
    learning = any(example(match.get(n)).requires_grad for n in ("query", "key", "value")) and torch.is_grad_enabled()
    return "gradients without a mask: sdpa was faster" if learning else None


TABLE = (
    Replacement("attention", attention.sdpa, attention.refuse, attention.emit, _sdpa_is_faster, attention.without_matrix),
    Replacement("attention", attention.spelled_out, attention.refuse, attention.emit, _sdpa_is_faster),
    Replacement("linear_cross_entropy", layers.last_layer_loss, layers.refuse_loss, layers.emit_loss, _always(NO_GAIN)),
    Replacement("rmsnorm", layers.rms, layers.refuse_norm, layers.emit_rms, _always(INDUCTOR)),
    Replacement("rmsnorm", layers.rms_of_difference, layers.refuse_norm, layers.emit_rms_of_difference, _always(INDUCTOR)),
    Replacement("rmsnorm", layers.rms_spelled_out, layers.refuse_norm, layers.emit_rms, _always(INDUCTOR)),
    Replacement("layernorm", layers.layer, layers.refuse_norm, layers.emit_layer, _always(NOT_TIMED)),
    Replacement("swiglu", layers.silu_gate, layers.refuse_gate, layers.emit_silu, _always(INDUCTOR)),
    Replacement("geglu", layers.gelu_gate, layers.refuse_gate, layers.emit_gelu, _always(NOT_TIMED)),
    Replacement("lora", layers.low_rank, layers.refuse_low_rank, layers.emit_low_rank, _always(NOT_TIMED)),
)
OPS = tuple(dict.fromkeys(row.op for row in TABLE))


@dataclass(frozen=True)
class Wanted:
    """What is to be replaced: the ops asked for by name, and whether the others are replaced where measured."""

    named: frozenset[str]
    auto: bool

    def leaves(self, row: Replacement, match: Match, result: fx.Node) -> str | None:
        """Return why a match is left alone; None if it is to be replaced."""
        return None if row.op in self.named else row.leave(match, result)

    def rows(self) -> list[Replacement]:
        """Return the rows that are to be tried."""
        return [row for row in TABLE if self.auto or row.op in self.named]


def wanted(ops: str | Iterable[str]) -> Wanted:
    """Return what ``ops`` asks for: "auto", "all", the name of an op, or several of these. Raises ValueError for another word."""
    words = (ops,) if isinstance(ops, str) else tuple(ops)
    unknown = [w for w in words if w not in ("auto", "all", *OPS)]
    if unknown:
        raise ValueError(f"compile_backend: unknown op {unknown[0]!r}; allowed: auto, all, {', '.join(OPS)}")
    return Wanted(frozenset(OPS if "all" in words else (w for w in words if w in OPS)), "auto" in words)
