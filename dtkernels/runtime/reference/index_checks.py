"""Find out-of-range indices on request: ``DTKERNELS_CHECK=1`` or ``compile(..., check_indices=True)``. Kernels read 0 there.

An index is checked where data decides it: it contains an element of a tensor, ``W[t[x], y]``, or no label at all, ``A[x, column]``.
Shifted labels, ``A[x - 1]``, read 0 out of range by intention and are not checked. Elements that no result depends on are not checked
either: those that ``where`` does not choose, in this Func or in one that reads it, and the right side of ``and`` and ``or`` where the
left side decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...algebra.rules.constant_folding import drop_unused, keep_extents
from ...lang import expr as ex
from ...lang.algorithm import Algorithm
from ..log import warn_once
from .evaluator import Named, _Evaluator


def check_indices(name: str, algorithm: Algorithm, tensors: dict[str, torch.Tensor], scalars: dict[str, object], outputs: tuple[str, ...]) -> None:
    """Raise IndexError, one line, for the first index that is out of range in ``outputs`` of ``algorithm``, which is as the user wrote it.

    Synchronizes with the device once. Does nothing for tensors without data and in ``torch.jit.trace``. Does nothing, with a warning,
    while a CUDA graph is captured.
    """
    own = keep_extents(drop_unused(algorithm.limited_to(outputs)), algorithm)
    relevant = _relevant(own)
    if not relevant:
        return
    given = {n: tensors[n].detach() for n in own.inputs}
    if _unreadable(name, *given.values()):
        return
    with torch.no_grad():
        checker = _Checker(own, given, {n: _detached(scalars[n]) for n in own.scalars}, relevant)
        checker.check(name, outputs)


check_indices._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compiler.disable, without importing it: a graph break


def _unreadable(name: str, *tensors: torch.Tensor) -> bool:
    """Tell whether the elements cannot be read now. Warns during a CUDA graph capture."""
    if any(t.is_meta for t in tensors) or torch._C._is_tracing():
        return True
    capturing = tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing:
        warn_once(f"{name}: indices are not checked while a CUDA graph is captured; they are in a call before it")
    return capturing


def check_elements(name: str, argument: str, given: torch.Tensor, size: int, but: int | None) -> None:
    """Raise IndexError, one line, for an element of ``given`` that is neither in 0 .. size - 1 nor ``but``, if that is a number.

    For ops whose kernels handle such elements themselves.
    """
    if _unreadable(name, given):
        return
    bad = (given < 0) | (given >= size)
    bad = bad if but is None else bad & (given != but)
    if bool(bad.any()):
        place = tuple(bad.nonzero()[0].tolist())
        raise IndexError(f"{name}: {argument} is {given[place].item()} at {list(place)}; allowed: 0 to {size - 1}{'' if but is None else f', or {but}'}")


def _detached(value: object) -> object:
    return value.detach() if isinstance(value, torch.Tensor) else value


def by_data(index: ex.Expr) -> bool:
    """Tell whether data decides an index: it contains an element of a tensor, or no label."""
    nodes = tuple(index.walk())
    return any(isinstance(n, ex.Access) for n in nodes) or not any(isinstance(n, ex.Label) for n in nodes)


def _relevant(algorithm: Algorithm) -> frozenset[str]:
    """Return the Funcs with a checked index, and the Funcs that read them."""
    found: set[str] = set()
    for d in algorithm.definitions:
        if any(a.tensor in found or any(map(by_data, a.index)) for a in ex.accesses(d.expr)):
            found.add(d.name)
    return frozenset(found)


@dataclass(frozen=True)
class _CheckedIndex:
    """One checked index: dimension ``dim`` of ``access``, its values, and which of them are out of range and used."""

    access: ex.Access
    dim: int
    size: int
    place: torch.Tensor
    bad: torch.Tensor
    labels: tuple[str, ...]


class _Checker(_Evaluator):
    """Propagate the elements that are used from the outputs to the inputs. Funcs are evaluated where a condition or an index reads them."""

    def __init__(self, algorithm: Algorithm, tensors: dict[str, torch.Tensor], scalars: dict[str, object], relevant: frozenset[str]):
        super().__init__(algorithm, tensors, scalars)
        self.relevant = relevant
        self.every = Named(torch.ones((), dtype=torch.bool, device=self.device), ())
        self.asked: dict[str, Named] = {}  #: the used elements of each Func; one truth value without labels stands for all
        self.gathers: list[_CheckedIndex] = []

    def check(self, name: str, outputs: tuple[str, ...]) -> None:
        self.asked |= dict.fromkeys(outputs, self.every)
        for d in reversed(self.algorithm.definitions):
            if d.name in self.asked and d.name in self.relevant:
                self.visit(d.expr, self.asked[d.name])
        if self.gathers and bool(torch.stack([g.bad.any() for g in self.gathers]).any()):
            order = {id(a): i for i, a in enumerate(a for d in self.algorithm.definitions for a in ex.accesses(d.expr))}
            wrong = min((g for g in self.gathers if bool(g.bad.any())), key=lambda g: (order.get(id(g.access), 0), g.dim))
            raise IndexError(f"{name}: {_error_text(wrong)}")

    def visit(self, e: ex.Expr, asked: Named) -> None:
        """Collect the gathers of ``e``, whose elements ``asked`` are used."""
        if not any(a.tensor in self.relevant or any(map(by_data, a.index)) for a in ex.accesses(e)):
            return
        match e:
            case ex.Access(tensor, index):
                for i in index:
                    self.visit(i, asked)
                self._note(e, asked)
                if tensor in self.relevant:
                    self._ask(e, asked)
            case ex.Write(value, place, condition):
                if condition is not None:
                    self.visit(condition, asked)
                    asked = self._where(asked, condition, True)
                self.visit(value, asked)
                self.visit(place, asked)
            case ex.Call("where", (condition, a, b)):
                self.visit(condition, asked)
                self.visit(a, self._where(asked, condition, True))
                self.visit(b, self._where(asked, condition, False))
            case ex.Binary("and" | "or" as op, left, right):
                self.visit(left, asked)
                self.visit(right, self._where(asked, left, op == "and"))
            case ex.Reduce(_, arg, labels):
                self.visit(arg, self._without(asked, labels))
            case ex.Dot(left, right, labels):
                for side in (left, right):
                    self.visit(side, self._without(asked, labels))
            case _:
                for child in e.children():
                    self.visit(child, asked)

    def _where(self, asked: Named, condition: ex.Expr, wanted: bool) -> Named:
        """Return the used elements at which ``condition`` equals ``wanted``."""
        found = self.value(condition)
        (one, other), labels = self._broadcast(asked, Named(found.data.to(torch.bool), found.labels))
        return Named(one & (other if wanted else ~other), labels)

    def _without(self, asked: Named, labels: tuple[str, ...]) -> Named:
        """Return the used terms of a reduction: all terms of each used result."""
        dims = [i for i, label in enumerate(asked.labels) if label in labels]
        return Named(asked.data.any(dims) if dims else asked.data, tuple(label for label in asked.labels if label not in labels))

    def _note(self, access: ex.Access, asked: Named) -> None:
        for dim, index in enumerate(access.index):
            if not by_data(index):
                continue
            own = self.algorithm[access.tensor].labels[dim] if access.tensor in self.algorithm else None
            size = self.sizes[own] if own else self.tensors[access.tensor].shape[dim]
            (place, use), labels = self._broadcast(self._index(index), asked)
            place, use = torch.broadcast_tensors(place, use)
            self.gathers.append(_CheckedIndex(access, dim, size, place, use & ((place < 0) | (place >= size)), labels))

    def _ask(self, access: ex.Access, asked: Named) -> None:
        """Mark the elements of a Func that ``access`` reads."""
        d = self.algorithm[access.tensor]
        shape = [self.sizes[label] for label in d.labels]
        known = self.asked.get(d.name)
        names = [i.name if isinstance(i, ex.Label) else None for i in access.index]
        if None not in names and len(set(names)) == len(names):
            dims = [i for i, label in enumerate(asked.labels) if label not in names]
            labels = tuple(label for label in asked.labels if label in names)
            found = Named(asked.data.any(dims) if dims else asked.data, tuple(d.labels[names.index(label)] for label in labels))
        else:
            places = [self._index(i) for i in access.index]
            aligned, _ = self._broadcast(*places, asked)
            *index, use = torch.broadcast_tensors(*aligned)
            flat = torch.zeros_like(use, dtype=torch.int64)
            for place, size in zip(index, shape):
                use = use & (place >= 0) & (place < size)
                flat = flat * size + place.clamp(0, max(size - 1, 0))
            marks = torch.zeros(max(torch.Size(shape).numel(), 1), dtype=torch.int32, device=self.device)
            marks.scatter_reduce_(0, flat.reshape(-1), use.reshape(-1).to(torch.int32), "amax")
            found = Named(marks[: torch.Size(shape).numel()].reshape(shape).to(torch.bool), d.labels)
        if known is not None:
            (one, other), labels = self._broadcast(known, found)
            found = Named(one | other, labels)
        self.asked[d.name] = found

    # -- values ---------------------------------------------------------------------------------------------------

    def value(self, expr: ex.Expr) -> Named:
        match expr:  # these forms are removed by the algebra before lowering
            case ex.Reshape(arg, _):
                return self.value(arg)
            case ex.Reduce("mean", arg, labels):
                total = self.value(replace(expr, kind="sum"))
                return Named(total.data / max(torch.Size([self.sizes[label] for label in labels]).numel(), 1), total.labels)
        return super().value(expr)

    def _access(self, access: ex.Access, whole: bool = False) -> Named:
        if access.tensor in self.algorithm and access.tensor not in self.known:
            d = self.algorithm[access.tensor]
            self.known[d.name] = self._expand(self.value(d.expr), d.labels)
        found = super()._access(access, whole)
        return Named(found.data.to(torch.int64), found.labels) if whole else found


def _error_text(g: _CheckedIndex) -> str:
    """Format the error: ``s.dt:3:20: A[x, t[x]]: index t[x] is 7 at x = 2; allowed along dimension 1 of A: 0 to 4; 3 such elements``."""
    at = g.bad.nonzero()[0].tolist() if g.labels else []
    value = int(g.place[tuple(at)])
    where = f" at {', '.join(f'{label} = {i}' for label, i in zip(g.labels, at))}" if g.labels else ""
    bound = f"0 to {g.size - 1}" if g.size else "none, it is empty"
    count = int(g.bad.sum())
    others = f"; {count} such elements" if count > 1 else ""
    place = f"{g.access.pos}: " if g.access.pos else ""
    return f"{place}{g.access}: index {g.access.index[g.dim]} is {value}{where}; allowed along dimension {g.dim} of {g.access.tensor}: {bound}{others}"
