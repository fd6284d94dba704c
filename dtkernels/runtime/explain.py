"""Explain what one call runs and why: ``dtkernels.explain``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..codegen.target import Target, target
from .bind.operator import BoundCall, DifferentiablePair, Operator, Variant, choose_path, device_target
from .decision import Decision, direction_of, expected_path, make_decision
from .reference.evaluator import result_dtype
from .torch_support.dtypes import DTYPE_NAMES, FLOAT8_NAMES


@dataclass(frozen=True)
class Explanation:
    """The result of ``dtkernels.explain``; print it."""

    op: str
    gpu: str
    table: str | None
    forward: Decision
    backward: Decision | None

    def __str__(self) -> str:
        head = self.op if self.forward.path == "reference" else f"{self.op} on {self.gpu}, table {self.table or 'none'}"
        return "\n".join([head, str(self.forward), *([str(self.backward)] if self.backward else [])])


def explain_call(operator: Operator, args: tuple, kwargs: dict, gpu: str | None = None) -> Explanation:
    """Explain one call without running it: its row, the distance, the reason, and the other rows with their times.

    ``gpu``: explain it for this GPU, one of ``codegen.target.TARGETS``, wherever the tensors are. Raises DTError for another.
    """
    pretended = None if gpu is None else target(gpu)
    call = operator.bind(args, kwargs)
    values = {**call.fitted.tensors, **call.scalars}
    wanted = tuple(n for n, v in values.items() if isinstance(v, torch.Tensor) and v.requires_grad)
    pair = call.variant.pair_for(wanted, call.fitted.tensors) if wanted and torch.is_grad_enabled() else None
    variant = pair.forward if pair else call.variant
    where = pretended or device_target(next(iter(call.fitted.tensors.values())).device)
    forward = _decision(variant, call.fitted.tensors, values, pretended)
    if forward.path == "reference":  # the backward runs the reference too; tables have no rows for such tensors
        backward = replace(forward, direction=pair.backward.subject.direction) if pair else None
        return Explanation(operator.spec.op, where.name, None, forward, backward)
    backward = _backward(call, pair, values, pretended, where if forward.path != "interpreter" else None) if pair else None
    return Explanation(operator.spec.op, where.name, variant.dispatch.choose(call.fitted.tensors, where).table.title, forward, backward)


def _backward(call: BoundCall, pair: DifferentiablePair, values: dict, pretended: Target | None, where: Target | None) -> Decision:
    """Decide the backward. Tensors that forward has not made yet are on the meta device; where all are, it runs on the GPU ``where`` of the forward."""
    dtype = result_dtype(call.variant.algorithm, call.fitted.tensors)
    sizes = call.variant.signature.extents(call.fitted.tensors)
    tensors = {}
    for name in pair.backward.algorithm.inputs:
        func = next((o for o, adjoint in pair.gradient.adjoints.items() if adjoint == name), name)
        if name in values:
            tensors[name] = values[name]
        else:
            tensors[name] = torch.empty([sizes[label] for label in pair.forward.algorithm[func].labels], dtype=dtype, device="meta")
    if all(t.is_meta for t in tensors.values()):
        pretended = pretended or where
    return _decision(pair.backward, tensors, values, pretended)


def _path(tensors: dict[str, torch.Tensor], pretended: Target | None) -> str:
    """Return gpu, interpreter or reference. For a GPU that is only named, the dtypes decide."""
    if pretended is not None:
        return "gpu" if _for_kernels(tensors) else "reference"
    return choose_path({n: t for n, t in tensors.items() if t.device.type != "meta"} or tensors)


def _for_kernels(tensors: dict[str, torch.Tensor]) -> bool:
    """Tell whether kernels support the dtypes."""
    floats = [t.dtype for t in tensors.values() if t.is_floating_point()]
    return bool(floats) and all(dtype in DTYPE_NAMES or dtype in FLOAT8_NAMES for dtype in floats)


def _decision(variant: Variant, tensors: dict[str, torch.Tensor], values: dict, pretended: Target | None) -> Decision:
    path = _path(tensors, pretended)
    dtype = result_dtype(variant.algorithm, tensors)
    if dtype not in DTYPE_NAMES or path == "reference":
        lacking = 'device; gpu="h200" says what that GPU would run' if _for_kernels(tensors) else "dtype"
        why = f"eager torch on the same algorithm: no kernel runs on this {lacking}"
        return Decision(direction_of(variant.subject), "reference", {}, None, None, why, "", ())
    where = pretended or device_target(next(t.device for t in tensors.values()))
    choice = variant.dispatch.choose(tensors, where)
    made = path == "gpu" and pretended is None and not any(t.is_meta for t in tensors.values())
    known = variant.dispatch.known((*tensors.values(), *(values[s] for s in variant.algorithm.scalars))) if made else None
    planned = variant.dispatch.programs.plan(choice, variant.dispatch.types(tensors), where)
    candidate = planned.candidate
    if known is not None:
        if known.candidate is None and candidate is not None and known.kind != "prebuilt":  # the row's kernel did not compile
            planned = variant.dispatch.programs.default_plan(choice, variant.dispatch.types(tensors), where)
        candidate, kind = known.candidate, known.kind
    else:
        kind = "interpreter" if path == "interpreter" else expected_path(candidate)
    return make_decision(variant.subject, variant.dispatch.types(tensors), kind, choice, planned, candidate, variant.outputs, where)


__all__ = ["Decision", "Explanation", "explain_call"]
