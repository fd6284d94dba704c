"""Generate the signature and docstring of an op from its spec, for ``inspect.signature`` and ``help``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ...lang.expr import DTYPES
from ..signature.arguments import Interface
from ..signature.dim_collapse import leading_inputs

if TYPE_CHECKING:
    from .operator import Operator

EMPTY = inspect.Parameter.empty
UNLESS = ", or None where the parameters need none"


def signature_of(operator: Operator) -> inspect.Signature:
    """Return the parameters of a call: inputs, scalars, then compile-time parameters by name.

    An argument that only some parameter settings need defaults to None, and so do all after it.
    """
    a, needed, found = operator.manifest, always_needed(operator), []
    optional = False
    for name in (*a.inputs, *a.scalars):
        optional = optional or name not in needed
        kind = torch.Tensor if name in a.inputs else float | torch.Tensor
        default, kind = (None, kind | None) if optional else (EMPTY, kind)
        found.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind))
    for name, value in a.params:
        found.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=type(value)))
    results = torch.Tensor if len(a.outputs) == 1 else tuple[(torch.Tensor,) * len(a.outputs)]  # type: ignore[misc]
    return inspect.Signature(found, return_annotation=results)


def always_needed(operator: Operator) -> set[str]:
    """Return the inputs and scalars that every setting of the boolean parameters needs."""
    flags = [(n, not v) for n, v in operator.manifest.params if isinstance(v, bool)]
    settings = [(), *((f,) for f in flags), tuple(flags)]
    signatures = [operator.variant(tuple(sorted(s)), frozenset(), 0).signature for s in settings]
    return set.intersection(*({*s.inputs, *s.scalars} for s in signatures))


def document(operator: Operator) -> str:
    """Compose a docstring: the call, the spec's description, the arguments, the result, the algorithm."""
    spec, algorithm = operator.spec, operator.spec.algorithm
    call = inspect.Signature([p.replace(annotation=EMPTY) for p in operator.__signature__.parameters.values()])
    lines = [f"{operator.name}{call}", "", *spec.doc.strip().splitlines(), "", "Arguments:"]
    lines += [f"    {line}" for line in _arguments(operator)]
    results = ", ".join(f"(..., {', '.join(labels)})" if (labels := algorithm[o].labels) else "(...)" for o in spec.outputs)
    dtypes = ", ".join(DTYPES.get(d, d) for d in spec.dtypes)
    lines += ["", f"Returns {results}. It is tuned for {dtypes}. Differentiable in floating-point arguments.", "", "Algorithm:"]
    return "\n".join([*lines, *(f"    {line}" for line in str(algorithm).splitlines())]) + "\n"


def _arguments(operator: Operator) -> Iterator[str]:
    """Yield one line per argument."""
    spec, algorithm = operator.spec, operator.spec.algorithm
    leaders, needed = leading_inputs(algorithm, spec.outputs), always_needed(operator)
    for name in algorithm.inputs:
        shape = Interface.shape(algorithm.plain_labels(name), name in leaders)
        kind = ", integers" if name in operator.manifest.integers else ""
        yield f"{name}: {shape}{kind}{'' if name in needed else UNLESS}"
    for name in algorithm.scalars:
        kind = "an integer" if name in algorithm.integer_scalars() else "a number"
        yield f"{name}: {kind} or a one-element tensor{'' if name in needed else UNLESS}"
    for name, default in algorithm.params:
        kind = "True or False" if isinstance(default, bool) else "an integer"
        said = " ".join(spec.parameters.get(name, "").split())
        yield f"{name}: {kind}, {default} unless given{f'; {said}' if said else ''}"
