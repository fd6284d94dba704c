"""Count the replacements in compiled graphs, and the reasons why others were not made."""

from __future__ import annotations

from collections import Counter

from torch._guards import CompileContext

from dtkernels.runtime.log import log

REPLACED = "replaced"
_counts: dict[str, Counter] = {}


def count(nodes: int, found: Counter) -> None:
    """Count the matches of a graph, (op, state) -> how many, and log one line at level info. ``state`` is "replaced", or why a match was left."""
    _take_back_last_attempt()
    _last.found += found
    for (op, state), n in found.items():
        _counts.setdefault(op, Counter())[state] += n
    told = ", ".join(f"{op} {state}: {n}" for (op, state), n in sorted(found.items())) or "nothing that an op computes"
    log.info("dtkernels: graph of %d nodes: %s", nodes, told)


class _Last:
    """The attempt of torch.compile that was counted last."""

    identity: object = None
    attempt = 0
    found: Counter = Counter()


_last = _Last()


def _take_back_last_attempt() -> None:
    """Discard the counts of an attempt that torch.compile has restarted, as it does when numbers become symbols."""
    current = CompileContext.current_trace_id()
    identity, attempt = (current.compile_id, current.attempt) if current else (None, 0)
    if (identity, attempt) == (_last.identity, _last.attempt):
        return
    if identity == _last.identity and attempt > _last.attempt:
        for (op, state), n in _last.found.items():
            _counts[op][state] -= n
    _last.identity, _last.attempt, _last.found = identity, attempt, Counter()


class Replacements(dict):
    """Op -> Counter of "replaced" and of the reasons why a match was left. ``print`` shows a table."""

    def __str__(self) -> str:
        if not self:
            return "dtkernels: no graph was compiled that holds what an op computes"
        lines = [("op", "graph nodes", "state")]
        lines += [(op, str(n), state) for op, states in self.items() for state, n in states.most_common()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def replacements() -> Replacements:
    """Return what graph passes of this process replaced so far: op -> Counter of "replaced" and of reasons for leaving a match alone.

    A graph counts when it is compiled, not when it runs; ``dtkernels.paths()`` counts calls.
    """
    return Replacements({op: +states for op, states in _counts.items() if +states})


def forget() -> None:
    """Reset the counts."""
    _counts.clear()
    _last.found = Counter()
