"""Why a call runs what it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .choice import Candidate
from .decide import Choice
from .dispatch import DTYPE_NAMES
from .operator import BoundCall, Operator, Pair, Variant, choose_path, device_target
from .reference import result_dtype

SHOWN = 5  #: alternatives


@dataclass(frozen=True)
class Decision:
    """What one direction of a call runs. ``row`` is None where the formula decides."""

    direction: str
    path: str  #: "prebuilt", "compiled", "interpreter" or "reference"
    sizes: dict[str, int]
    row: object | None
    distance: float | None
    why: str
    schedule: str
    alternatives: tuple[Candidate, ...]

    def __str__(self) -> str:
        sizes = " ".join(f"{k}={v}" for k, v in self.sizes.items())
        lines = [f"{self.direction}: {'; '.join(filter(None, (sizes, self.path)))}", f"  {self.why}"]
        lines += [f"    {line}" for line in self.schedule.splitlines()]
        for c in self.alternatives:
            time = f"{c.row.microseconds:g} us" if c.row.microseconds else "not measured"
            sizes = " ".join(f"{k}={v}" for k, v in c.row.sizes.items())
            lines.append(f"  row {sizes}: {c.told()}, {time}" + (f"; refused: {c.refused}" if c.refused else ""))
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """What ``dtkernels.explain`` returns; print it."""

    op: str
    gpu: str
    table: str | None
    forward: Decision
    backward: Decision | None

    def __str__(self) -> str:
        head = self.op if self.forward.path == "reference" else f"{self.op} on {self.gpu}, table {self.table or 'none'}"
        return "\n".join([head, str(self.forward), *([str(self.backward)] if self.backward else [])])


def explain_call(operator: Operator, args: tuple, kwargs: dict) -> Explanation:
    """The row, its distance, why, and the other rows with their times, for one call, which is not run."""
    call = operator.bind(args, kwargs)
    values = {**call.fitted.tensors, **call.scalars}
    wanted = tuple(n for n, v in values.items() if isinstance(v, torch.Tensor) and v.requires_grad)
    pair = call.variant.pair_for(wanted, call.fitted.tensors) if wanted and torch.is_grad_enabled() else None
    variant = pair.forward if pair else call.variant
    gpu = device_target(next(iter(call.fitted.tensors.values())).device)
    forward = _decision(variant, call.fitted.tensors, values)
    if forward.path == "reference":  # so is its backward; the table knows nothing of such tensors
        backward = replace(forward, direction=pair.backward.subject.direction) if pair else None
        return Explanation(operator.spec.op, gpu.name, None, forward, backward)
    backward = _backward(call, pair, values) if pair else None
    return Explanation(operator.spec.op, gpu.name, variant.dispatch.choose(call.fitted.tensors).table.gpu, forward, backward)


def _backward(call: BoundCall, pair: Pair, values: dict) -> Decision:
    """Of the backward, on tensors without storage where it reads what forward has not made yet."""
    dtype = result_dtype(call.variant.algorithm, call.fitted.tensors)
    sizes = call.variant.dispatch.choose(call.fitted.tensors).sizes
    tensors = {}
    for name in pair.backward.algorithm.inputs:
        func = next((o for o, adjoint in pair.gradient.adjoints.items() if adjoint == name), name)
        if name in values:
            tensors[name] = values[name]
        else:
            tensors[name] = torch.empty([sizes[label] for label in pair.forward.algorithm[func].labels], dtype=dtype, device="meta")
    return _decision(pair.backward, tensors, values)


def _decision(variant: Variant, tensors: dict[str, torch.Tensor], values: dict) -> Decision:
    path = choose_path({n: t for n, t in tensors.items() if t.device.type != "meta"} or tensors)
    direction = variant.subject.direction + (" (saving for backward)" if variant.subject.saved else "")
    dtype = result_dtype(variant.algorithm, tensors)
    if dtype not in DTYPE_NAMES or path == "reference":
        return Decision(direction, "reference", {}, None, None, "eager torch on the same algorithm: no kernel runs on this device or dtype", "", ())
    choice: Choice = variant.dispatch.choose(tensors)
    known = variant.dispatch.known((*tensors.values(), *(values[s] for s in variant.algorithm.scalars))) if path == "gpu" and not any(t.is_meta for t in tensors.values()) else None
    target = device_target(next(t.device for t in tensors.values()))
    planned = variant.dispatch.programs.plan(choice, variant.dispatch.types(tensors), target)
    candidate = planned.candidate
    if known is not None:
        if known.candidate is None and candidate is not None and known.kind != "prebuilt":  # the row could not be compiled
            planned = variant.dispatch.programs.formula(choice, variant.dispatch.types(tensors), target)
        candidate, kind = known.candidate, known.kind
    else:
        kind = "interpreter" if path == "interpreter" else "prebuilt if a binary fits" if candidate and candidate.row.binaries and candidate.exact else "compiled when first called"
    schedule = candidate.row.schedule if candidate else str(planned.program.schedule)
    why = f"row {candidate.row.title()}, {candidate.told()}: the nearest that fits" if candidate else f"schedule from the formula{_asked(planned.asked, choice.sizes)}: {choice.why_none()}"
    others = tuple(c for c in choice.considered if c is not candidate and (candidate is None or c.row is not candidate.row))[:SHOWN]
    return Decision(direction, kind, choice.sizes, candidate.row if candidate else None, candidate.distance if candidate else None, why, schedule, others)


def _asked(asked: dict[str, int], sizes: dict[str, int]) -> str:
    """At which sizes the formula was asked, where they are not the call's."""
    return f", asked at sizes {' '.join(f'{k}={v}' for k, v in asked.items())}" if asked != sizes else ""


__all__ = ["Decision", "Explanation", "explain_call"]
