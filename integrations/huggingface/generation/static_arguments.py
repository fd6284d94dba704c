"""Take arguments and results apart into tensors and a hashable structure, and put them together again around other tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch

from ..attention.visible_keys import EAGER_NOTE, KeyMask, VisibleKeys, as_matrix, key_mask, noted_keys
from ..patching.forward_patching import plain

_NUMBERS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class NotCapturableError(Exception):
    """Raised with the reason why a step cannot be a CUDA graph."""


def take_apart(value: Any, cache: object, tensors: list[torch.Tensor]) -> Hashable:
    """Append the tensors in a value to ``tensors`` and return what is left: containers, numbers, and sizes and dtypes of the tensors.

    ``cache`` may be part of the value; the structure marks its place. Raises NotCapturableError for an object that is neither.
    """
    if value is cache:
        return ("cache",)
    if isinstance(value, _NUMBERS):
        return ("number", type(value), value)
    if isinstance(value, KeyMask) or isinstance(value, torch.Tensor) and hasattr(value, EAGER_NOTE):
        return _take_mask_apart(value, cache, tensors)
    if isinstance(value, torch.Tensor):
        if not plain(value):
            raise NotCapturableError(f"a tensor of class {type(value).__name__}")
        tensors.append(value)
        return ("tensor", value.shape, value.dtype, value.device)
    if isinstance(value, dict):
        return ("dict", type(value), tuple([(key, take_apart(held, cache, tensors)) for key, held in value.items()]))
    if type(value) in (list, tuple):
        return ("sequence", type(value), tuple([take_apart(held, cache, tensors) for held in value]))
    raise NotCapturableError(f"an object of class {type(value).__name__}")


def _take_mask_apart(mask: Any, cache: object, tensors: list[torch.Tensor]) -> Hashable:
    reach = noted_keys(mask)
    if reach is None:  # it was written to
        matrix = as_matrix(mask)
        tensors.append(matrix)
        return ("tensor", matrix.shape, matrix.dtype, matrix.device)
    held: list[torch.Tensor] = []
    structure = take_apart((reach.left, reach.right, reach.offset, reach.padding, reach.segments), cache, held)
    tensors += held
    sizes = mask.sizes if isinstance(mask, KeyMask) else (mask.shape[0], *mask.shape[2:])
    return ("mask", sizes, mask.device, structure)


def put_together(structure: Any, tensors: Iterable[torch.Tensor], cache: object) -> Any:
    """Return the value of a structure with these tensors and this cache."""
    return _put_together(structure, iter(tensors), cache)


def _put_together(structure: Any, tensors: Iterator[torch.Tensor], cache: object) -> Any:
    kind, *rest = structure
    if kind == "cache":
        return cache
    if kind == "number":
        return rest[1]
    if kind == "tensor":
        return next(tensors)
    if kind == "mask":
        (batch, queries, keys), device, held = rest
        return key_mask(VisibleKeys(*_put_together(held, tensors, cache)), batch, queries, keys, device)
    made, parts = rest
    if kind == "dict":
        pairs = {key: _put_together(held, tensors, cache) for key, held in parts}
        return pairs if made is dict else made(**pairs) if all(isinstance(key, str) for key in pairs) else made(pairs)
    return made([_put_together(held, tensors, cache) for held in parts])
