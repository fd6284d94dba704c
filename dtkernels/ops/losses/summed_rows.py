"""The sum of what an op gives for each row, as an op of its own, so that its forward can form the adjoint of a product."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from ...lang import expr as ex
from ...lang.algorithm import Definition
from ...lang.schedule import Program, Schedule
from ...lang.spec import Spec, load_spec
from ...runtime.bind.variant import choose_path
from ..op_decorator import operator_called
from ..registry import SPECS, built, interfaces

SUMMED = ("linear_cross_entropy",)


def name_of_sum(op: str) -> str:
    """Return the name of the op that sums the rows of ``op``."""
    return f"{op}_sum"


def sum_spec(op: str) -> Spec:
    """Build the spec ``op_sum[] = rsum(op[x], x)``, in float32, from that of ``op``."""
    spec, total = load_spec(SPECS / f"{op}.yaml"), name_of_sum(op)
    a = spec.algorithm
    labels = a[op].labels
    rows = ex.Reduce("sum", ex.Access(op, tuple(map(ex.Label, labels))), labels)
    whole = a.with_definitions((*a.definitions, Definition(total, (), ex.Cast(rows, "fp32"))))
    return replace(spec, op=total, doc=f"The sum of the rows of {op}.", program=Program(whole, Schedule()), shapes=(), schedules=())


built.update({name_of_sum(op): partial(sum_spec, op) for op in SUMMED})


def may_form_adjoint(tensors: list[torch.Tensor]) -> bool:
    """Return whether the forward of a sum of rows may form the adjoint of its product: in bfloat16, where a gradient is asked for."""
    wide = [t for t in tensors if t.is_floating_point()]
    asked = torch.is_grad_enabled() and any(t.requires_grad for t in wide)
    return asked and all(t.dtype == torch.bfloat16 for t in wide) and choose_path(dict(enumerate(tensors))) != "reference"


def sum_of_rows(op: str, given: dict) -> torch.Tensor | None:
    """Return the sum of the rows of ``op`` by its own op where its forward may form the adjoint of the logits; None elsewhere."""
    if not may_form_adjoint([t for t in given.values() if isinstance(t, torch.Tensor)]):
        return None
    interfaces.setdefault(name_of_sum(op), interfaces[op])
    return operator_called(name_of_sum(op))(**given)
