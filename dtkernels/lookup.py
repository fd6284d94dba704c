"""Look up an op in the schedule tables of a GPU, which need not be present, for ``python -m dtkernels explain``. Needs no torch."""

from __future__ import annotations

from collections import Counter

from .algebra import pipeline as rules
from .algebra.rules.constant_folding import bind_parameters
from .codegen.target import target
from .lang.schedule import Program
from .runtime.decision import Decision, look_up
from .runtime.select.schedule_selection import Call as Call
from .runtime.select.schedule_selection import gpu_of
from .runtime.select.table_loader import op_table
from .runtime.signature.spec_hash import spec_hash
from .show import Subject, Written


def default_gradients(written: Written, gpu: str, given: dict[str, object]) -> tuple[str, ...]:
    """Return the inputs and scalars that most backward rows of the GPU's table differentiate; () where the op has no rows."""
    algorithm = written.program.algorithm
    params, spec = _params(written, given), spec_hash(algorithm)
    rows = [r for r in op_table(written.name, gpu_of(target(gpu))).rows if r.direction == "backward" and r.spec == spec]
    same = [r for r in rows if tuple(sorted(r.params.items())) == params] or rows
    counts = Counter(r.wanted for r in same)
    return max(counts, key=lambda wanted: (counts[wanted], len(wanted)), default=())


def decisions(subject: Subject) -> tuple[str | None, list[Decision]]:
    """Return (the table, the decisions): the op itself, or for a backward the forward that saves for it, then the backward.

    Replaces the subject's schedule by the chosen one. Raises DTError.
    """
    written = subject.written
    call = Call(subject.op, spec_hash(written.program.algorithm), params=_params(written, subject.params))
    found: list[Decision] = []
    gradient = subject.gradient
    if gradient is not None:
        outputs = written.program.outputs()
        algorithm = rules.prepare_algorithm(gradient.forward, gradient.forward_outputs)
        saving = gradient.forward_outputs != outputs
        forward = Call(call.op, call.spec, params=call.params, wanted=subject.wanted, saved=True, kept=gradient.products) if saving else call
        sizes = {label: subject.forward_sizes[label] for label in algorithm.labels}
        found.append(look_up(forward, algorithm, gradient.forward_outputs, sizes, subject.dtype, subject.types(algorithm), subject.target)[0])
        call = Call(call.op, call.spec, "backward", call.params, subject.wanted, kept=gradient.products)
    decision, planned, choice = look_up(call, subject.algorithm, subject.outputs, subject.sizes, subject.dtype, subject.types(subject.algorithm), subject.target)
    subject.program = Program(subject.algorithm, planned.program.schedule)
    return choice.table.title, [*found, decision]


def _params(written: Written, given: dict[str, object]) -> tuple[tuple[str, int | bool], ...]:
    """Return the parameters that differ from their defaults, as rows list them. Raises DTError for a value of the wrong kind."""
    defaults = dict(written.program.algorithm.params)
    params = {name: value for name, value in given.items() if name in defaults}
    bind_parameters(written.program.algorithm, params)  # type: ignore[arg-type]  # it refuses values that are neither numbers nor booleans
    return tuple(sorted((name, value) for name, value in params.items() if value != defaults[name]))  # type: ignore[misc]


__all__ = ["decisions", "default_gradients"]
