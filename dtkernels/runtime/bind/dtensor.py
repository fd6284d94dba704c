"""Run ops on DTensors: shard along labels that the algorithm treats independently; each device calls the op on its shard.

A label is shardable where every result has it and each result element reads the inputs only at its own position along it. It is never
reduced, used as a length, or used as a number. Inputs without the label are replicated, and their gradients are partial sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...lang import expr as ex
from ...lang.algorithm import Algorithm
from ..signature.dim_collapse import labels_outside

if TYPE_CHECKING:
    from .operator import Operator


def divisible_labels(algorithm: Algorithm, outputs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels that a call may be sharded along."""
    return tuple(label for label in algorithm[outputs[0]].labels if _divisible(algorithm, outputs, label))


def _divisible(algorithm: Algorithm, outputs: tuple[str, ...], label: str) -> bool:
    if not all(label in algorithm[o].labels for o in outputs):
        return False
    moving: dict[str, tuple] = {}  #: the step of each tensor along the label, which must be unique
    for name in algorithm.needed_by(outputs):
        d = algorithm[name]
        for node in d.expr.walk():
            if isinstance(node, (ex.Len, ex.Scan)) and node.label == label or isinstance(node, (ex.Reduce, ex.Dot)) and label in node.labels:
                return False
            if isinstance(node, ex.Access):
                if any(label in labels_outside(i) and step_of(i) is None for i in node.index):
                    return False
                here = tuple(step_of(i) if label in labels_outside(i) else None for i in node.index)
                if moving.setdefault(node.tensor, here) != here:
                    return False
        if _counted(d.expr, label):
            return False
    return True


def step_of(index: ex.Expr) -> tuple[str, int] | None:
    """Return (label, divisor) of an index that is a label, or a label divided by a constant; else None."""
    match index:
        case ex.Label(name):
            return name, 1
        case ex.Binary("/", ex.Label(name), ex.Const(value)) if isinstance(value, int) and value > 0:
            return name, value
    return None


def _counted(expr: ex.Expr, label: str) -> bool:
    """Tell whether ``label`` is used as a number."""
    if isinstance(expr, ex.Access):
        return False
    return (isinstance(expr, ex.Label) and expr.name == label) or any(_counted(c, label) for c in expr.children())


def dims_of(algorithm: Algorithm, tensor: str, extra: int) -> tuple[str | None, ...]:
    """Return the label that each dimension of an input moves along. Extra leading dimensions are -1, -2, ... from the right."""
    index = next(a.index for d in algorithm.definitions for a in ex.accesses(d.expr) if a.tensor == tensor)
    steps = [step_of(i) for i in index]
    return (*(str(i - extra) for i in range(extra)), *(s[0] if s else None for s in steps))


def call_sharded(operator: Operator, args: tuple, kwargs: dict):
    """Run a call on DTensors and return its results as DTensors."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    tensors, scalars, params = operator.named(args, kwargs)
    algorithm = operator.variant(tuple(sorted(params.items())), frozenset(), 0).algorithm
    if algorithm.written:
        raise NotImplementedError(f"{operator.name}: it changes an input, which is a DTensor; allowed: the local tensors")
    outputs = operator.spec.outputs
    tensors = {n: tensors[n] for n in algorithm.inputs}
    scalars = {n: v for n, v in scalars.items() if n in algorithm.scalars}
    given = {**tensors, **scalars}
    mesh = next(v.device_mesh for v in given.values() if isinstance(v, DTensor))
    for n, v in given.items():
        if isinstance(v, torch.Tensor) and not isinstance(v, DTensor):
            raise TypeError(f"{operator.spec.op}: {n} is a plain tensor beside DTensors; allowed: DTensors of one mesh")
        if isinstance(v, DTensor) and v.device_mesh != mesh:
            raise ValueError(f"{operator.spec.op}: {n} is on another device mesh; allowed: one mesh")
    operator.interface.check(operator.name, operator.variant(tuple(sorted(params.items())), frozenset(), 0).signature, tensors)
    ranks = {n: len(algorithm.plain_labels(n)) for n in tensors}
    extra = {n: t.dim() - ranks[n] for n, t in tensors.items()}
    labels = {n: dims_of(algorithm, n, max(extra[n], 0)) for n in tensors}
    batch = tuple(str(i) for i in range(-max(0, *extra.values()), 0))
    cuttable = () if min(extra.values()) < 0 else (*batch, *divisible_labels(algorithm, outputs))
    placed: dict[str, list] = {n: [] for n in given}
    grads: dict[str, list] = {n: [] for n in given}
    results: dict[str, list] = {o: [] for o in outputs}
    for axis in range(mesh.ndim):
        label = _best(tensors, labels, cuttable, axis, mesh.size(axis))
        for n in given:
            dim = labels[n].index(label) if n in labels and label in labels[n] and tensors[n].shape[labels[n].index(label)] > 1 else None
            placed[n].append(Replicate() if dim is None else Shard(dim))
            grads[n].append(Shard(dim) if dim is not None else Replicate() if label is None else Partial())
        for o in outputs:
            order = (*batch, *algorithm[o].labels)
            results[o].append(Replicate() if label is None else Shard(order.index(label)))
        cuttable = tuple(c for c in cuttable if c != label)  # a second mesh axis shards another label
    local = {
        n: v.redistribute(mesh, placed[n]).to_local(grad_placements=grads[n]) if isinstance(v, DTensor) else v for n, v in given.items()
    }
    found = operator(**local, **params)
    found = found if isinstance(found, tuple) else (found,)
    wrapped = tuple(DTensor.from_local(r, mesh, results[o], run_check=False) for o, r in zip(outputs, found))
    return wrapped if len(wrapped) > 1 else wrapped[0]


def _best(tensors: dict, labels: dict, cuttable: tuple[str, ...], axis: int, parts: int) -> str | None:
    """Return the label along which most elements are already evenly sharded on this mesh axis; None to replicate all."""
    weights: dict[str, int] = {}
    for n, t in tensors.items():
        place = t.placements[axis]
        if place.is_shard() and (label := labels[n][place.dim]) in cuttable:
            weights[label] = weights.get(label, 0) + t.numel()
    for label in sorted(weights, key=weights.__getitem__, reverse=True):
        sizes = [t.shape[labels[n].index(label)] for n, t in tensors.items() if label in labels[n]]
        if all(s % parts == 0 or s == 1 for s in sizes):
            return label
    return None
