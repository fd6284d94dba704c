"""Describe the arguments of an op in the caller's terms: names, allowed shapes, and errors about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .signature import Signature


def type_name(value: object) -> str:
    """Name the type of an argument for an error."""
    return "None" if value is None else f"a {type(value).__name__}"


def refuse_layout(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise TypeError, one line, for a tensor without strides: nested, sparse."""
    if tensor.is_nested:  # some nested layouts claim to be strided
        raise TypeError(f"{op}: {name} is a nested tensor; allowed: a tensor with strides")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{op}: {name} is of layout {tensor.layout}; allowed: a tensor with strides")


@dataclass(frozen=True)
class Argument:
    """One argument. ``dims`` names its last dimensions. ``leading`` allows more dimensions before them."""

    name: str
    dims: tuple[str, ...] | None  #: None for a scalar
    leading: bool
    text: str

    @staticmethod
    def of(text: str) -> Argument:
        """Parse ``x (..., C)``, ``weight (C)`` or the name of a scalar alone."""
        name, _, shapes = text.partition(" ")
        if not shapes:
            return Argument(name, None, False, text)
        dims = [d.strip() for d in shapes.split(" or ")[-1].strip("()").split(",") if d.strip()]
        return Argument(name, tuple(d for d in dims if d != "..."), "..." in dims, text)


class Interface:
    """The caller's view of an op's arguments.

    ``told`` maps inputs and scalars of the spec to texts such as ``x (..., C)``. Other arguments keep the spec's names.
    ``broadcast``: leading dimensions of different arguments broadcast; otherwise they must be equal.
    """

    def __init__(self, told: Mapping[str, str] | None = None, broadcast: bool = True):
        self._told, self.broadcast = dict(told or {}), broadcast

    @cached_property
    def _arguments(self) -> dict[str, Argument]:
        return {name: Argument.of(text) for name, text in self._told.items()}

    def name(self, spec_name: str) -> str:
        """Return the caller's name of an input or scalar."""
        return self._arguments[spec_name].name if spec_name in self._arguments else spec_name

    def listed(self, names: Iterable[str]) -> str:
        """Join the caller's names with commas."""
        return ", ".join(map(self.name, names))

    def check(self, op: str, signature: Signature, tensors: dict[str, torch.Tensor]) -> None:
        """Raise ValueError, one line, where ranks or leading dimensions violate the declared shapes."""
        leading = {}
        for name, t in tensors.items():
            known = self._arguments.get(name)
            if known is None or known.dims is None:
                continue
            if known.leading:
                leading[name] = t.shape[: max(t.dim() - len(known.dims), 0)]
            elif t.dim() > len(known.dims):
                raise self.refuse_rank(op, signature, tensors, name)
        if self.broadcast or not leading:
            return
        first = next(iter(leading.values()))
        for name, shape in leading.items():
            if len(shape) != len(first) or any(n != m for n, m in zip(shape, first)):
                raise self.refuse(op, signature, tensors, f"{self.name(name)} has other leading dimensions")

    def refuse_rank(self, op: str, signature: Signature, tensors: dict[str, torch.Tensor], name: str) -> ValueError:
        """Return the ValueError for an input with too many or too few dimensions."""
        rank = tensors[name].dim()
        return self.refuse(op, signature, tensors, f"{self.name(name)} has {rank} dimension{'' if rank == 1 else 's'}")

    def refuse(self, op: str, signature: Signature, tensors: dict[str, torch.Tensor], reason: str, among: Iterable[str] = ()) -> ValueError:
        """Return a ValueError of one line: the given shapes (of ``among``, or all), the reason, and what is allowed."""
        shapes = ", ".join(f"{self.name(n)} is {tuple(tensors[n].shape)}" for n in dict.fromkeys(among or tensors))
        if len(tensors) > 1 and not self.broadcast and all(n in self._arguments and self._arguments[n].dims == () for n in tensors):
            return ValueError(f"{op}: {shapes}; allowed: one shape")
        allowed = ", ".join(self._allowed(n, signature) for n in tensors)
        return ValueError(f"{op}: {shapes}: {reason}; allowed: {allowed}")

    def differing(self, op: str, signature: Signature, tensors: dict[str, torch.Tensor], *found: tuple[str | None, str, int]) -> ValueError:
        """Return the ValueError for one extent that differs between two places, each (input, None for the program; label; extent)."""
        said, before = [], None
        for name, label, size in found:
            if name is None:
                said.append(f"{label} is {size} in the program")
                before = label
                continue
            labels, t = signature.inputs[name], tensors[name]
            places = [place - len(labels) for place, own in enumerate(labels) if own == label]
            place = next((p for p in places if t.dim() < -p or t.shape[p] == size), places[0])
            dimension = self._dimension(name, label, place)
            again = "" if dimension == before else f"{dimension} is "
            said.append(f"{again}{t.shape[place] if t.dim() >= -place else size} in {self.name(name)}")
            before = dimension
        tied = "" if found[0][1] == found[1][1] else "; the two are one extent"
        return self.refuse(op, signature, tensors, ", ".join(said) + tied, [name for name, _, _ in found if name is not None])

    def _dimension(self, tensor: str, label: str, place: int) -> str:
        """Return the caller's name of the dimension ``place`` of ``tensor``, counted from the end."""
        known = self._arguments.get(tensor)
        if known is None or known.dims is None:
            return label
        return known.dims[place] if -place <= len(known.dims) else "a leading dimension"

    def _allowed(self, name: str, signature: Signature) -> str:
        """Format the allowed shapes of one argument."""
        if name in self._arguments:
            return self._arguments[name].text
        return f"{name} {self.shape(signature.inputs[name], name in signature.leaders)}"

    @staticmethod
    def shape(labels: tuple[str | None, ...], leads: bool) -> str:
        """Format the allowed shapes of an input with these labels. ``leads``: its leading dimensions are those of the call."""
        dims = ", ".join(label or "_" for label in labels)
        longer = f"(..., {dims})" if dims else "(...)"
        return longer if leads else f"({dims}) or {longer}"
