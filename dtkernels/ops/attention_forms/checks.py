"""Check the arguments of attention's forms. What only the device knows is checked under ``DTKERNELS_CHECK=1``, since that waits for it."""

from __future__ import annotations

import torch

from ...runtime.path_counters import checking
from ..attention_arguments import FORM_ARGUMENTS, AttentionArgs
from ..op_decorator import only_tensors

ANY_FORM = ("return_lse", "dropout_p", "seed")  #: arguments that go with every form
CACHE = ("new_k", "new_v", "k_scale", "v_scale")  #: those that go with a cache, in pages or not
SLOTS = 256  #: in a page, at most
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def only_for(form: str, forms: dict, *others: str) -> None:
    """Raise ValueError for arguments of another form than the one that ``form`` asks for."""
    wrong = [n for n, v in forms.items() if v is not None and v is not FORM_ARGUMENTS[n] and v != FORM_ARGUMENTS[n] and n not in (form, *others, *ANY_FORM)]
    if wrong:
        raise ValueError(f"attention: {form} and {wrong[0]} are given; allowed: one of the two")
    if forms[form] is None:
        raise ValueError(f"attention: {others[0]} is given, {form} is missing; allowed: both")


def only_with_cache(forms: dict) -> None:
    """Raise ValueError for arguments of a cache where there is none."""
    wrong = next((n for n in CACHE if forms[n] is not None), None)
    if wrong:
        raise ValueError(f"attention: {wrong} is given, lengths is missing; allowed: both")


def new_tokens(forms: dict) -> int:
    """Return how many keys a call appends to each entry."""
    return forms["new_k"].shape[-2] if isinstance(forms["new_k"], torch.Tensor) and forms["new_k"].dim() > 1 else 0


def check_new_tokens(new_k: object, new_v: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise TypeError or ValueError for keys and values that do not fit a cache of (..., G, ..., D)."""
    for name, given, other in (("new_k", new_k, "new_v"), ("new_v", new_v, "new_k")):
        if given is None:
            raise ValueError(f"attention: {other} is given, {name} is missing; allowed: both")
    only_tensors("attention", new_k=new_k, new_v=new_v)
    assert isinstance(new_k, torch.Tensor) and isinstance(new_v, torch.Tensor)
    batch, heads = q.shape[0], k.shape[1]
    fits = new_k.dim() == new_v.dim() == 4 and new_k.shape[:3] == new_v.shape[:3] and new_k.shape[:2] == (batch, heads)
    if not fits or new_k.shape[3] != k.shape[3] or new_v.shape[3] != v.shape[3]:
        found = f"{tuple(new_k.shape)} and {tuple(new_v.shape)}"
        raise ValueError(f"attention: new_k is ({batch}, {heads}, T, {k.shape[3]}), new_v ({batch}, {heads}, T, {v.shape[3]}), T new tokens; got shapes {found}")
    for name, given in (("new_k", new_k), ("new_v", new_v)):
        if not given.is_floating_point() or given.dtype.itemsize == 1:
            raise TypeError(f"attention: {name} is {given.dtype}; allowed: floating point of 16 bits and more")


def check_integers(name: str, t: object, device: torch.device, of: str = "attention") -> torch.Tensor:
    """Return a tensor of integers on ``device``, an argument of the op ``of``. Raises TypeError and ValueError."""
    only_tensors(of, **{name: t})
    assert isinstance(t, torch.Tensor)
    if t.dtype not in _INTEGERS:
        raise TypeError(f"{of}: {name} is {t.dtype}; allowed: integers")
    if t.device != device:
        raise ValueError(f"{of}: {name} is on {t.device}, q is on {device}; allowed: one device")
    return t


def without(args: AttentionArgs, form: str, *names: str) -> None:
    """Raise ValueError for arguments that the form does not take."""
    for name in names:
        value = getattr(args, name)
        if isinstance(value, torch.Tensor) or value not in (None, 0):
            raise ValueError(f"attention: {form} and {name} are given; allowed: {form} without {name}")


def check_packed(args: AttentionArgs, forms: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cumulative lengths of queries and keys."""
    without(args, "cu_seqlens_q", "mask", "bias", "offset")
    only_tensors("attention", q=args.q, k=args.k, v=args.v)
    if not args.q.dim() == args.k.dim() == args.v.dim() == 3:
        found = ", ".join(str(tuple(t.shape)) for t in (args.q, args.k, args.v))
        raise ValueError(f"attention: with cu_seqlens_q, q is (M, H, D), k (L, G, D), v (L, G, N); got shapes {found}")
    cu_q = check_integers("cu_seqlens_q", forms["cu_seqlens_q"], args.q.device)
    cu_k = forms["cu_seqlens_k"]
    if cu_k is None:
        if args.q.shape[0] != args.k.shape[0]:
            raise ValueError(f"attention: {args.q.shape[0]} queries, {args.k.shape[0]} keys, and no cu_seqlens_k; allowed: cu_seqlens_k, or as many of both")
        cu_k = cu_q
    check_integers("cu_seqlens_k", cu_k, args.q.device)
    if cu_q.dim() != 1 or cu_q.shape != cu_k.shape or cu_q.shape[0] < 2:
        found = f"{tuple(cu_q.shape)} and {tuple(cu_k.shape)}"
        raise ValueError(f"attention: cu_seqlens_q and cu_seqlens_k have one number more than there are sequences, 2 or more; got shapes {found}")
    if checking():
        for name, cu, total in (("cu_seqlens_q", cu_q, args.q.shape[0]), ("cu_seqlens_k", cu_k, args.k.shape[0])):
            check_cumulative(name, cu.tolist(), total)
    return cu_q, cu_k


def check_cumulative(name: str, numbers: list[int], total: int) -> None:
    """Raise ValueError where cumulative lengths do not go from 0 to ``total``."""
    if numbers[0] != 0 or numbers[-1] != total:
        raise ValueError(f"attention: {name} goes from {numbers[0]} to {numbers[-1]}; allowed: from 0 to {total}, the length of the tensor")
    at = next((i for i in range(1, len(numbers)) if numbers[i] < numbers[i - 1]), None)
    if at is not None:
        raise ValueError(f"attention: {name}[{at}] is {numbers[at]} after {numbers[at - 1]}; allowed: numbers that do not decrease")


def _four(form: str, *tensors: torch.Tensor) -> None:
    if any(t.dim() != 4 for t in tensors):
        found = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise ValueError(f"attention: with {form}, q is (B, H, M, D), k (B, G, L, D), v (B, G, L, N); got shapes {found}")


def check_segments(args: AttentionArgs, forms: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the segments of queries and of keys."""
    only_tensors("attention", q=args.q, k=args.k, v=args.v)
    _four("segments", args.q, args.k, args.v)
    batch, queries, keys = args.q.shape[0], args.q.shape[2], args.k.shape[2]
    of_q = check_integers("segments", forms["segments"], args.q.device)
    of_k = of_q if forms["segments_k"] is None else check_integers("segments_k", forms["segments_k"], args.q.device)
    if of_k is of_q and queries != keys:
        raise ValueError(f"attention: {queries} queries, {keys} keys, and no segments_k; allowed: segments_k, or as many of both")
    for name, t, size in (("segments", of_q, queries), ("segments_k", of_k, keys)):
        if t.dim() not in (1, 2) or t.shape[-1] != size or t.dim() == 2 and t.shape[0] not in (1, batch):
            raise ValueError(f"attention: {name} has shape {tuple(t.shape)}; allowed: ({size},) or ({batch}, {size})")
    of_q, of_k = (t if t.dim() == 2 else t[None] for t in (of_q, of_k))
    return of_q.long(), of_k.long()


def check_pages(args: AttentionArgs, forms: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pages of keys and of values as (page, head, slot, width)."""
    without(args, "block_table", "mask", "bias", "offset")
    only_tensors("attention", q=args.q, k=args.k, v=args.v)
    table = check_integers("block_table", forms["block_table"], args.q.device)
    if forms["kv_layout"] not in ("NHD", "HND"):
        raise ValueError(f"attention: kv_layout is {forms['kv_layout']!r}; allowed: 'NHD' for pages (page, slot, head, d), 'HND' for (page, head, slot, d)")
    if forms["lengths"] is None:
        raise ValueError("attention: block_table is given, lengths is missing; allowed: both")
    if any(t.dim() != 4 for t in (args.q, args.k, args.v)) or table.dim() != 2 or table.shape[0] != args.q.shape[0]:
        found = ", ".join(str(tuple(t.shape)) for t in (args.q, args.k, args.v, table))
        raise ValueError(f"attention: with block_table (B, T), q is (B, H, M, D), k and v have 4 dimensions, pages first; got shapes {found}")
    if table.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"attention: block_table is {table.dtype}; allowed: int32 or int64")
    k, v = (args.k, args.v) if forms["kv_layout"] == "HND" else (args.k.transpose(1, 2), args.v.transpose(1, 2))
    if k.shape[:3] != v.shape[:3] or not 1 <= k.shape[2] <= SLOTS:
        found = ", ".join(str(tuple(t.shape)) for t in (args.k, args.v))
        raise ValueError(f"attention: k and v have as many pages, heads and slots, 1 to {SLOTS} slots in a page; got shapes {found}")
    if checking():
        check_page_numbers(table, forms["lengths"] + new_tokens(forms), k.shape[0], k.shape[2])
        check_slots(table, forms["lengths"], new_tokens(forms), k.shape[2])
    return k, v


def check_page_numbers(table: torch.Tensor, lengths: torch.Tensor, pages: int, slots: int) -> None:
    """Raise IndexError for a page number out of range among the pages that the lengths reach."""
    used = torch.arange(table.shape[1], device=table.device) * slots < lengths.reshape(-1, 1)
    wrong = (used & ((table < 0) | (table >= pages))).nonzero().tolist()
    if wrong:
        b, at = wrong[0]
        raise IndexError(f"attention: block_table[{b}, {at}] is {int(table[b, at])}; allowed: 0 to {pages - 1}, the pages of k and v")


def check_slots(table: torch.Tensor, lengths: torch.Tensor, new: int, slots: int) -> None:
    """Raise ValueError where two entries would write their new keys to one slot."""
    seen: dict[tuple[int, int], int] = {}
    for b, (row, n) in enumerate(zip(table.tolist(), lengths.tolist())):
        for at in range(n, n + new):
            if at // slots < len(row) and seen.setdefault(slot := (row[at // slots], at % slots), b) != b:
                raise ValueError(f"attention: new_k of entries {seen[slot]} and {b} goes to slot {slot[1]} of page {slot[0]}; allowed: a slot for each")


def check_cache(args: AttentionArgs, forms: dict, keys: int) -> torch.Tensor:
    """Return the lengths of the entries of a batch."""
    only_tensors("attention", q=args.q, k=args.k, v=args.v)
    without(args, "lengths", "offset")
    if forms["block_table"] is None:
        _four("lengths", args.q, args.k, args.v)
    lengths = check_integers("lengths", forms["lengths"], args.q.device)
    batch = args.q.shape[0]
    if lengths.shape != (batch,):
        raise ValueError(f"attention: lengths has shape {tuple(lengths.shape)}; allowed: ({batch},), one for each entry of the batch")
    if checking():
        new = new_tokens(forms)
        for b, n in enumerate(lengths.tolist()):
            if not 0 <= n <= keys - new:
                beside = f" beside {new} new ones" if new else ""
                raise ValueError(f"attention: lengths[{b}] is {n}; allowed: 0 to {keys - new}, the keys that the cache has room for{beside}")
    return lengths
