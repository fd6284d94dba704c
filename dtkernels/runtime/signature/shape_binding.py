"""Bind the tensors of a call to the declared dimensions: add missing ones, batch extra leading ones.

Adjacent batch dimensions are folded into each other and into the first declared dimension where every tensor allows a view. A kernel
written for two dimensions then runs unchanged on any contiguous tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .arguments import Interface
from .signature import Signature


@dataclass(frozen=True)
class BoundShapes:
    """Tensors in the shapes that the algorithm declares, and how to restore the shapes of results."""

    tensors: dict[str, torch.Tensor]
    batched: frozenset[str]
    labels: int  #: number of batch labels that the algorithm gets
    batch: tuple[int, ...]  #: leading dimensions of the results
    joined: bool  #: whether the batch was folded into the first declared dimension
    dropped: int  #: number of added leading dimensions, which results drop again

    def restore(self, result: torch.Tensor) -> torch.Tensor:
        """Return a result in the shape that the caller's tensors imply."""
        if self.batch and self.joined:
            first = result.shape[0]
            for n in self.batch:
                first = first // n if n else 0
            result = result.view(*self.batch, first, *result.shape[1:])
        for _ in range(self.dropped):
            result = result.squeeze(0)
        return result


def bind_shapes(op: str, signature: Signature, tensors: dict[str, torch.Tensor], interface: Interface) -> BoundShapes:
    """Fit ``tensors`` to the ranks that an op declares. Raises ValueError, one line, where that is impossible.

    The batch is what the leading dimensions of the signature's leaders broadcast to. Other inputs may not add to it.
    """
    given, ranks = tensors, {name: len(signature.inputs[name]) for name in tensors}
    extra = {name: t.dim() - ranks[name] for name, t in tensors.items()}
    short = -min(min(extra.values()), 0)
    if short:
        wrong = _input_that_cannot_broadcast(signature, tensors, extra, short)
        if wrong is not None:
            raise interface.refuse_rank(op, signature, given, wrong)
        tensors = {name: t[(None,) * short] if extra[name] else t for name, t in tensors.items()}
        extra = dict.fromkeys(tensors, 0)
    count = max(extra.values())
    batched = frozenset(name for name, n in extra.items() if n > 0)
    if not count:
        return BoundShapes(tensors, batched, 0, (), False, short)
    batch = _broadcast([tensors[name].shape[: extra[name]] for name in tensors if name in batched and name in signature.leaders])
    if batch is None:
        raise interface.refuse(op, signature, given, "leading dimensions do not broadcast", [n for n in tensors if n in batched])
    for name in (n for n in tensors if n in batched and n not in signature.leaders):
        if _broadcast([batch, tensors[name].shape[: extra[name]]]) != batch:
            leaders = [n for n in signature.leaders if n in tensors]
            lack = f"{interface.listed(leaders)} {'lacks' if len(leaders) == 1 else 'lack'}"
            raise interface.refuse(op, signature, given, f"{interface.name(name)} has leading dimensions that {lack}")
    spread = {name: t.expand(*batch, *t.shape[extra[name] :]) if name in batched else t for name, t in tensors.items()}
    joined = _fold_batch(signature, spread, batched, len(batch)) if 0 not in batch else None
    if joined is not None:
        return BoundShapes(joined, batched, 0, tuple(batch), True, 0)
    return BoundShapes(spread, batched, count, tuple(batch), False, 0)


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the broadcast of ``shapes``; None if they do not broadcast. torch's own function imports sympy, which takes seconds."""
    found = [1] * max(map(len, shapes), default=0)
    for shape in shapes:
        for place, size in enumerate(reversed(shape), 1):
            if size != 1:
                if found[-place] not in (1, size):
                    return None
                found[-place] = size
    return tuple(found)


def _input_that_cannot_broadcast(signature: Signature, tensors: dict[str, torch.Tensor], extra: dict[str, int], short: int) -> str | None:
    """Return an input that prevents a call in which others lack their first ``short`` dimensions; None if there is none.

    Each input lacks that many dimensions or none, and only dimensions that the results then lack too.
    """
    for name, n in extra.items():
        if n not in (0, -short) or n and signature.firsts.get(name, 0) < short:
            return name
    if any(n == 0 and tensors[name].dim() > 1 for name, n in extra.items()):
        return next(name for name, n in extra.items() if n < 0)
    return None


def _fold_batch(
    signature: Signature, tensors: dict[str, torch.Tensor], batched: frozenset[str], count: int
) -> dict[str, torch.Tensor] | None:
    """Fold the batch into the first declared dimension of batched tensors, as views; None if that is impossible."""
    first = {signature.inputs[name][0] if signature.inputs[name] else None for name in batched}
    if len(first) != 1 or (label := first.pop()) is None or frozenset(signature.rows.get(label, ())) != batched:
        return None
    found = dict(tensors)
    for name in batched:
        t = tensors[name]
        lead, rest = t.shape[: count + 1], t.shape[count + 1 :]
        try:
            found[name] = t.view(-1, *rest) if t.numel() else t.reshape(0 if 0 in lead else lead.numel(), *rest)
        except (RuntimeError, ValueError):  # ValueError for tensors without data
            return None
    return found
