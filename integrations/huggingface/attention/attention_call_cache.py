"""Cache attention calls that passed all checks, and launch an equal call without checking it again.

The layers of a model call attention alike, with as many keys and the same mask, so one check serves them all. Compared are: the
tensors except for their contents, by torch's own guards, which also cover autocast, tracing and transforms; numbers among the
other arguments; and the mask's identity, or the note on it if it is another mask. Only calls of one query without gradients are
cached: for others the kernels take longer than the checks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from dtkernels.ops.attention import AttentionArgs, ready
from dtkernels.runtime.bounded_cache import BoundedCache
from dtkernels.runtime.torch_support.tensor_guards import guards_for, never_matches

from .visible_keys import KeyMask, noted_keys

# Keyword arguments that reach every attention function and do not change its result: the mask contains what they say,
# or they concern other layers. An argument that is not listed, and is neither None nor False, takes the original path.
HARMLESS = frozenset(
    "cache_position cu_seq_lens_k cu_seq_lens_q deterministic logits_to_keep max_length_k max_length_q num_items_in_batch "
    "output_hidden_states output_router_logits position_ids return_dict seq_idx use_cache".split()
)
KEPT = 4  # kinds of layers of a model, compared one by one
REMEMBERED = 1024  # calls found by a hash: each step of a generation makes new ones, and the next generation meets them again
_NUMBERS = (bool, int, float, str)
_seen: tuple[CachedAttentionCall, ...] = ()
_named: BoundedCache[tuple, CachedAttentionCall] = BoundedCache(REMEMBERED)


class CachedAttentionCall:
    """One cached call: how to recognize it, and ``launch``, which computes [B, Tq, H, Dv] from the tensors."""

    __slots__ = ("count", "like", "kwargs_key", "mask", "noted", "added", "launch", "padded")
    count: int  #: of the tensors, those among the other arguments included
    like: Callable[..., bool]  #: torch's guards on the tensors
    kwargs_key: tuple
    mask: weakref.ref[torch.Tensor] | None
    noted: bool  #: whether the mask's note stands for the mask
    added: tuple[str, ...]
    launch: Callable[[tuple[torch.Tensor, ...]], torch.Tensor | None]
    padded: Callable[..., bool]  #: torch's guards on the padding of the mask's note

    def result(self, query, key, value, mask: torch.Tensor | None, kwargs: dict) -> torch.Tensor | None:
        """Launch a recognized call. Returns None if the op must be called instead."""
        if mask is None and not self.added:
            return self.launch((query, key, value))
        tensors = [query, key, value]
        if self.noted and mask is not None:
            if (reach := noted_keys(mask)) is None:
                return None
            mask = reach.padding
        if mask is not None:
            tensors.append(mask)
        return self.launch((*tensors, *[kwargs[name] for name in self.added]))


def known(query, key, value, mask, kwargs: dict) -> CachedAttentionCall | None:
    """Return the cached call that equals this one, or None."""
    if not _seen or torch.compiler.is_compiling():
        return None
    tensors = _tensors(query, key, value, mask)
    kwargs_key = _kwargs_key(kwargs, tensors)
    for s in _seen:
        if s.kwargs_key == kwargs_key and s.count == len(tensors) and (mask is None if s.mask is None else s.mask() is mask) and s.like(*tensors):
            return s if not s.noted or mask is None or noted_keys(mask) is not None else None
    return _by_name(kwargs_key, mask, tensors)


def _by_name(kwargs_key: tuple, mask: torch.Tensor | None, tensors: list) -> CachedAttentionCall | None:
    """Look up an older call by a hash. Its mask may be another tensor, if the notes on both masks are equal."""
    global _seen
    reach = None if mask is None else noted_keys(mask)
    try:
        s = _named.get(_name(kwargs_key, reach, mask, tensors))
    except (AttributeError, RuntimeError, TypeError):  # arguments that cannot be compared
        return None
    if s is None or s.kwargs_key != kwargs_key or not s.like(*tensors):
        return None
    if reach is not None and reach.padding is not None and not s.padded(reach.padding):
        return None
    if mask is not None:
        s.mask = weakref.ref(mask)
    _seen = (s, *_seen[: KEPT - 1])
    return s


def _tensors(query, key, value, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the tensors that torch's guards look at. A mask in numbers is compared by those, or is the same object."""
    return [query, key, value] if mask is None or isinstance(mask, KeyMask) else [query, key, value, mask]


def _name(kwargs_key: tuple, reach, mask: torch.Tensor | None, tensors: list) -> tuple:
    """Return a cheap hash key of a call. It contains what the mask says in numbers, except for tensors."""
    sizes = mask.sizes if isinstance(mask, KeyMask) else None
    noted = None if reach is None else (reach.left, reach.right, reach.offset, reach.padding is None, reach.segments is None, sizes)
    return (kwargs_key, noted, *[(t.shape, t.stride(), t.dtype) for t in tensors])


def remember(query, key, value, mask, kwargs: dict, taken: torch.Tensor | None, options: dict, added: dict[str, str]) -> None:
    """Cache a call that the op computed with the mask ``taken`` and ``options``.

    ``added``: names in ``kwargs`` -> the op's names of additional tensors. If a result [B, H, Tq, D] has the memory layout of
    [B, Tq, H, D], it is written in that shape.
    """
    global _seen
    batch, heads, queries, _ = query.shape
    if queries != 1 or torch.compiler.is_compiling():
        return  # with many queries the kernel takes longer than the checks
    noted = options.get("offset") is not None
    if not noted and mask is not taken or any(options[option] is not kwargs[name] for name, option in added.items()):
        return  # a tensor that was made for this call alone
    tensors = _tensors(query, key, value, mask)
    kwargs_key = _kwargs_key(kwargs, tensors)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors) or any(kind not in _NUMBERS and kind is not torch.Tensor for kind in kwargs_key[1::3]):
        return
    launch = ready((batch, 1, heads, value.shape[3]), AttentionArgs(query, key, value, taken, **options))
    if launch is None:
        return
    s = CachedAttentionCall()
    s.launch = launch
    s.count, s.like, s.kwargs_key = len(tensors), guards_for(tuple(tensors)), kwargs_key
    s.mask, s.noted, s.added = None if mask is None else weakref.ref(mask), noted, tuple(added)
    reach = None if mask is None else noted_keys(mask)
    s.padded = never_matches if reach is None or reach.padding is None else guards_for((reach.padding,))
    _seen = (s, *_seen[: KEPT - 1])
    if reach is None or type(reach.offset) is int:
        _named.put(_name(kwargs_key, reach, mask, tensors), s)


def _kwargs_key(kwargs: dict, tensors: list) -> tuple:
    """Return name, type and value of each keyword argument that matters; append tensors among them to ``tensors``."""
    kwargs_key: list = []
    for name, given in kwargs.items():
        if given is None or given is False or name in HARMLESS:
            continue
        if isinstance(given, torch.Tensor):
            tensors.append(given)
            kwargs_key += (name, torch.Tensor, None)
        else:
            kwargs_key += (name, type(given), given)
    return tuple(kwargs_key)
