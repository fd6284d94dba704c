"""Represent a mask by numbers: VisibleKeys holds what a query sees, KeyMask is the mask tensor that models pass on.

A mask that is causal, a sliding window, chunks, padding, packed sequences, or a combination is cheaper as numbers than as a matrix of
Tq x Tk: the kernel skips tiles that no query sees, and reads one flag for each key instead of one for each score.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

NOTE = "_dtkernels_reach"  # the attribute of a mask that holds its VisibleKeys, and the mask's version at that time
EAGER_NOTE = "_dtkernels_reach_of_a_call"  # the same, of a mask that a compiled graph takes as a matrix
REASON = "_dtkernels_reason"  # the attribute of a mask that says why it is a matrix


@dataclass(frozen=True)
class VisibleKeys:
    """Query m is at key position p = m + offset and sees p - left <= l <= p + right (None: no limit) where padding[b, 0, 0, l].

    ``segments``: numbers of the queries [B, Tq] and of the keys [B, Tk]; a query sees keys of its own number. None: all are one.
    """

    left: int | None = None
    right: int | None = None
    offset: int | torch.Tensor = 0
    padding: torch.Tensor | None = None
    segments: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def window(self) -> tuple[int | None, int | None] | None:
        return None if self.left is None and self.right is None else (self.left, self.right)

    @property
    def causal(self) -> bool:
        """Whether query m sees keys l <= m."""
        return self.left is None and self.right == 0 and isinstance(self.offset, int) and self.offset == 0

    def matrix(self, batch: int, queries: int, keys: int, device: torch.device | str) -> torch.Tensor:
        """Return the boolean mask [batch, 1, queries, keys], True where a query sees a key, as sdpa's masks are."""
        offset = self.offset.to(torch.long) if isinstance(self.offset, torch.Tensor) else self.offset
        key = torch.arange(keys, device=device)
        query = (torch.arange(queries, device=device) + offset)[:, None]
        seen = torch.ones((1, 1, queries, keys), dtype=torch.bool, device=device)
        if self.left is not None:
            seen = seen & (key >= query - self.left)
        if self.right is not None:
            seen = seen & (key <= query + self.right)
        if self.padding is not None:
            seen = seen & self.padding
        if self.segments is not None:
            seen = seen & (self.segments[0][:, :, None] == self.segments[1][:, None, :])[:, None]
        return seen.expand(batch, 1, queries, keys)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> VisibleKeys:
        """Return the same with each tensor replaced by function(tensor)."""
        offset = function(self.offset) if isinstance(self.offset, torch.Tensor) else self.offset
        padding = None if self.padding is None else function(self.padding)
        segments = None if self.segments is None else (function(self.segments[0]), function(self.segments[1]))
        return replace(self, offset=offset, padding=padding, segments=segments)


class KeyMask(torch.Tensor):
    """A boolean mask [B, 1, Tq, Tk] that is held as VisibleKeys. Any computation with it makes the matrix first.

    Its own memory is one element; only torch's functions on the shape, dtype and device, and those by which its compiler describes a tensor,
    see that. Moved to another device it stays numbers. Writes go to the matrix, which then stands for the mask.
    """

    reach: VisibleKeys
    sizes: tuple[int, int, int]  #: batch, queries, keys
    matrix: torch.Tensor | None
    version: int | None  #: of the matrix when it was made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _OF_THE_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _KEPT and isinstance(args[0], KeyMask) and (same := _KEPT[func](args[0], *args[1:], **kwargs)) is not None:
            return same
        return func(*_matrices(args), **_matrices(kwargs))


class TracedKeyMask:
    """A KeyMask for code that runs on fake tensors, of which there are no subclasses: torch.export without strict.

    It is no tensor. Functions of torch, methods and operators work on the matrix.
    """

    dtype, ndim, is_meta = torch.bool, 4, False

    def __init__(self, reach: VisibleKeys, sizes: tuple[int, int, int], device: torch.device | str):
        self.reach, self.sizes, self.device, self.matrix = reach, sizes, torch.device(device), None
        self.shape = torch.Size((sizes[0], 1, *sizes[1:]))

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*_matrices(args), **_matrices(kwargs or {}))

    def dim(self) -> int:
        return 4

    def to(self, *args: Any, **kwargs: Any) -> Any:
        same = _moved(self, *args, **kwargs)
        return as_matrix(self).to(*args, **kwargs) if same is None else same

    def detach(self) -> TracedKeyMask:
        return self

    def __getitem__(self, index: Any) -> Any:
        same = _whole(self, index)
        return as_matrix(self)[_matrices(index)] if same is None else same

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in dir(torch.Tensor):
            raise AttributeError(name)
        return getattr(as_matrix(self), name)


def _operator(name: str) -> Callable:
    return lambda mask, *others: getattr(as_matrix(mask), name)(*_matrices(others))


for _name in "add radd sub rsub mul rmul truediv rtruediv and rand or ror xor rxor invert neg eq ne lt le gt ge len iter bool".split():
    setattr(TracedKeyMask, f"__{_name}__", _operator(f"__{_name}__"))
TracedKeyMask.__hash__ = object.__hash__  # type: ignore[method-assign]


def key_mask(reach: VisibleKeys, batch: int, queries: int, keys: int, device: torch.device | str) -> Any:
    """Return the mask [batch, 1, queries, keys] as a KeyMask, under a fake tensor mode as a TracedKeyMask. torch.jit.trace gets the matrix."""
    held = torch.zeros((), dtype=torch.bool, device=device)
    if torch.jit.is_tracing():
        return reach.matrix(batch, queries, keys, device)
    if type(held) is not torch.Tensor:
        return TracedKeyMask(reach, (batch, queries, keys), device)
    mask: Any = held.expand(batch, 1, queries, keys).as_subclass(KeyMask)
    mask.reach, mask.sizes, mask.matrix, mask.version = reach, (batch, queries, keys), None, None
    return mask


def note(mask: torch.Tensor, reach: VisibleKeys) -> None:
    """Hang a VisibleKeys on a mask that is a matrix."""
    setattr(mask, NOTE, (reach, None if torch.compiler.is_compiling() else version(mask)))


def noted_keys(mask: torch.Tensor) -> VisibleKeys | None:
    """Return the numbers of a mask if it has not changed since it was made, else None."""
    if isinstance(mask, TracedKeyMask):
        return mask.reach
    if isinstance(mask, KeyMask):
        return mask.reach if mask.matrix is None or version(mask.matrix) == mask.version else None
    noted = getattr(mask, NOTE, None)
    if noted is None and not torch.compiler.is_compiling():
        noted = getattr(mask, EAGER_NOTE, None)
    if noted is None:
        return None
    return noted[0] if torch.compiler.is_compiling() or noted[1] == version(mask) else None  # torch.compile cannot read the version


def visible_keys_of(mask: Any, queries: int, keys: int) -> VisibleKeys | None:
    """Return a mask of ``queries`` x ``keys`` as numbers, or None."""
    reach = None if mask is None else noted_keys(mask)
    if reach is None:
        return None
    sizes = mask.sizes[1:] if in_numbers(mask) else tuple(mask.shape[-2:])
    return reach if sizes == (queries, keys) else None


def in_numbers(mask: object) -> bool:
    """Return whether a mask was made as numbers."""
    return isinstance(mask, (KeyMask, TracedKeyMask))


def as_matrix(mask: Any) -> Any:
    """Return a mask as a tensor that anything may read; the layers of a model share one."""
    if not in_numbers(mask):
        return mask
    if torch.compiler.is_compiling() or isinstance(mask, TracedKeyMask):  # a graph's own parts, such as checkpoints, may keep nothing for others
        return mask.reach.matrix(*mask.sizes, mask.device)
    if mask.matrix is None:
        mask.matrix = mask.reach.matrix(*mask.sizes, mask.device)
        mask.version = version(mask.matrix)
    return mask.matrix


def version(mask: torch.Tensor) -> int | None:
    """Return how often a tensor was written to; under inference_mode torch does not count."""
    return None if mask.is_inference() else mask._version


def _matrices(given: Any) -> Any:
    """Replace each KeyMask among arguments by its matrix."""
    if in_numbers(given):
        return as_matrix(given)
    if type(given) in (list, tuple):
        return type(given)([_matrices(one) for one in given])
    return {name: _matrices(one) for name, one in given.items()} if type(given) is dict else given


def _moved(mask: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the mask on another device, or None if it is more than moved."""
    if kwargs.get("copy") or kwargs.get("memory_format"):
        return None
    to = kwargs.get("device", args[0] if args else None)
    others = [one for one in (*args[1:], kwargs.get("dtype")) if isinstance(one, torch.dtype)]
    if isinstance(to, torch.dtype):
        others.append(to)
        to = None
    if any([one != torch.bool for one in others]) or isinstance(to, torch.Tensor):
        return None
    device = mask.device if to is None else torch.device(to)
    if device == mask.device and mask.matrix is None:
        return mask
    if noted_keys(mask) is None:
        return None
    batch, queries, keys = mask.sizes
    return key_mask(mask.reach.map(lambda held: held.to(device)), batch, queries, keys, device)


def _contiguous(mask: Any, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    """Return the matrix, and note for calls that are not compiled what it says; None where another memory format is asked for.

    transformers' generate asks for it where the cache is static, and may then call a compiled model: of that the matrix is an input as any other. The
    place of a single query becomes a tensor, as a graph of a step would hold a number.
    """
    reach, matrix = noted_keys(mask), as_matrix(mask)
    if reach is None or memory_format is not torch.contiguous_format:
        return None
    matrix = matrix.clone(memory_format=torch.contiguous_format)  # as that of sdpa, which is expanded, would be
    if not torch.compiler.is_compiling():
        if matrix.shape[2] == 1 and not isinstance(reach.offset, torch.Tensor):
            reach = replace(reach, offset=torch.full((1,), reach.offset, dtype=torch.float32, device=matrix.device))
        setattr(matrix, EAGER_NOTE, (reach, version(matrix)))
    return matrix


def _whole(mask: Any, index: Any) -> Any:
    """Return the mask if the index takes all of it, as ``mask[:, :, :, :n]`` does with as many keys, else None."""
    index = index if type(index) is tuple else (index,)
    if index and index[0] is Ellipsis:
        index = (*[_ALL] * (5 - len(index)), *index[1:])
    if len(index) > 4 or any([type(one) is not slice for one in index]) or any([one != _ALL for one in index[:3]]):
        return None
    last = index[3] if len(index) == 4 else _ALL
    whole = last.start in (None, 0) and last.step in (None, 1) and (last.stop is None or last.stop >= mask.sizes[2])
    return mask if whole else None


_ALL = slice(None)
#: what tells of the shape, dtype and device, and what torch.compile describes a tensor by
_PROPERTIES = (
    "shape dtype device ndim is_cuda is_meta is_cpu layout requires_grad is_leaf is_nested is_sparse is_quantized is_mkldnn grad grad_fn _base".split()
)
_METHODS = (
    "dim size stride storage_offset numel is_floating_point is_complex is_inference ndimension element_size get_device __len__ __hash__ "
    "is_conj is_neg untyped_storage _is_view".split()
)
_OF_THE_SHAPE = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES]
    + [getattr(torch.Tensor, "requires_grad").__set__]  # noqa: B009
    + [getattr(torch.Tensor, name) for name in _METHODS]
)
_KEPT: dict[Callable, Callable] = {
    torch.Tensor.to: _moved,
    torch.Tensor.cuda: lambda mask, device=None, **_: _moved(mask, "cuda" if device is None else device),
    torch.Tensor.cpu: lambda mask, **_: _moved(mask, "cpu"),
    torch.Tensor.detach: lambda mask: mask,
    torch.Tensor.contiguous: _contiguous,
    torch.Tensor.__getitem__: _whole,
}
