"""Append new keys and values to a cache, in pages or not: a program of its own, which runs before the one that attends to them.

The two are apart since programs of one launch would read what others have not written yet. Both caches are written by one launch where their
heads have one size.
"""

from __future__ import annotations

from functools import partial

import torch

from ...lang.parser import parse
from ...lang.spec import Spec
from ...runtime.signature.arguments import Interface
from ..attention_arguments import AttentionArgs
from ..op_decorator import compiling, operator_called
from ..registry import built, interfaces
from .checks import check_new_tokens

_CACHE = "b, g, at[b] + t, {x}"
_PAGES = "table[b, (at[b] + t) / page], g, (at[b] + t) % page, {x}"
_INSIDE = ", at[b] + t >= 0 and at[b] + t < page * len(p)"  # an entry of the table that is not there reads 0, which is a page


def algorithm(paged: bool, same: bool) -> str:
    """Return the text of the algorithm: for pages or not, for keys and values of one size of heads or two."""
    place, inside = (_PAGES, _INSIDE) if paged else (_CACHE, "")
    lines = [
        "Func put_k, put_v;",
        f"In new_k, new_v, K, V, at{', table' if paged else ''};",
        f"Var b, g, t, d{'' if same else ', n'}{', p' if paged else ''};",
        *(["Param page = 16;", "Extent p = table[1];"] if paged else []),
    ]
    for of, x in (("k", "d"), ("v", "d" if same else "n")):
        lines.append(f"put_{of}[b, g, t, {x}] = write(new_{of}[b, g, t, {x}], {of.upper()}[{place.format(x=x)}]{inside});")
    return "\n".join([*lines, "put_k.compile();", "put_v.compile();"])


def append_spec(name: str, paged: bool, same: bool) -> Spec:
    """Return the spec of appending to a cache."""
    return Spec(name, "Append keys and values to a cache.", parse(algorithm(paged, same), name), {"page": "keys in a page"} if paged else {}, source=name)


def name_of(paged: bool, same: bool) -> str:
    """Return the name of the op that appends."""
    return f"append_{'pages' if paged else 'cache'}{'' if same else '_two'}"


for _paged in (False, True):
    for _same in (False, True):
        _name = name_of(_paged, _same)
        built[_name] = partial(append_spec, _name, _paged, _same)
        _of = "pages, G, slots" if _paged else "B, G, L"
        interfaces[_name] = Interface({
            "new_k": "new_k (B, G, T, D)", "new_v": f"new_v (B, G, T, {'D' if _same else 'N'})", "at": "lengths (B)", "table": "block_table (B, pages of an entry)",
            "K": f"k ({_of}, D)", "V": f"v ({_of}, {'D' if _same else 'N'})",
        })  # fmt: skip


def append(args: AttentionArgs, forms: dict, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, room: int) -> torch.Tensor:
    """Write ``new_k`` and ``new_v`` into the cache at ``lengths``, and return the lengths after that.

    k and v are (B, G, L, D) or pages (page, G, slot, D); ``room`` is how many keys an entry has room for. Without new keys nothing is done.
    """
    new_k, new_v, table = forms["new_k"], forms["new_v"], forms["block_table"]
    if new_k is None and new_v is None:
        return lengths
    check_new_tokens(new_k, new_v, args.q, k, v)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (k, v, new_k, new_v)):
        raise NotImplementedError("attention: new_k has no gradient, as it is written into the cache; allowed: torch.no_grad(), or new_k.detach()")
    given = {"new_k": new_k, "new_v": new_v, "K": k, "V": v, "at": lengths if lengths.dtype.itemsize > 2 else lengths.to(torch.int32)}
    if table is not None:
        given |= {"table": table, "page": k.shape[2]}
    operator_called(name_of(table is not None, new_k.shape[3] == new_v.shape[3]))(**given)
    if not compiling():  # autograd shall know that what it may have saved has changed
        for t in (args.k, args.v):
            torch.autograd.graph.increment_version(t)
    return lengths + new_k.shape[2]


