"""Append new keys and values to a cache, in pages or not: a program of its own, which runs before the one that attends to them.

The two are apart since programs of one launch would read what others have not written yet. Both caches are written by one launch where their
heads have one size.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import torch

from ...lang.parser import parse
from ...lang.spec import Spec
from ...runtime.signature.arguments import Interface
from ..attention_arguments import AttentionArgs
from ..op_decorator import compiling, operator_called
from ..registry import built, interfaces
from .checks import check_new_tokens
from .scales import LARGEST, Scale

_CACHE = "b, g, at[b] + t, {x}"
_PAGES = "table[b, (at[b] + t) / page], g, (at[b] + t) % page, {x}"
_INSIDE = ", at[b] + t >= 0 and at[b] + t < page * len(p)"  # an entry of the table that is not there reads 0, which is a page


def algorithm(paged: bool, same: bool, tokens: bool) -> str:
    """Return the text of the algorithm: for pages or not, for keys and values of one size of heads or two, with a scale for each token or not."""
    inputs, results, lines = ["new_k", "new_v", "K", "V", "at", *(["table"] if paged else [])], [], []
    for of, x in (("k", "d"), ("v", "d" if same else "n")):
        place, inside = (_PAGES, _INSIDE) if paged else (_CACHE, "")
        new = value = f"new_{of}[b, g, t, {x}]"
        if tokens:
            lines += [f"top_{of}[b, g, t] = rmax(abs({new}), {x});", f"step_{of}[b, g, t] = where(top_{of}[b, g, t] == 0, 1, top_{of}[b, g, t] / most_{of});"]
            lines.append(f"scale_{of}[b, g, t] = write(step_{of}[b, g, t], {of}_token[{place.format(x='').rstrip(', ')}]{inside});")
            value = f"{new} / step_{of}[b, g, t]"
            results += [f"top_{of}", f"step_{of}", f"scale_{of}"]
            inputs.append(f"{of}_token")
        else:
            value = f"{new} / where({of}_by_number, {of}_number, where({of}_by_head, {of}_head[b, g], 1))"
            inputs.append(f"{of}_head")
        value = f"where({of}_whole, round(clamp({value}, -127, 127)), {value})"
        lines.append(f"put_{of}[b, g, t, {x}] = write({value}, {of.upper()}[{place.format(x=x)}]{inside});")
        results.append(f"put_{of}")
    wide = ["d"] if same else ["d", "n"]
    params = [f"{of}_{p} = false" for of in "kv" for p in ("whole", *(() if tokens else ("by_number", "by_head")))]
    head = [
        f"Func {', '.join(results)};",
        f"In {', '.join(inputs)};",
        f"SIn {'most_k, most_v' if tokens else 'k_number, v_number'};",
        f"Var {', '.join(['b', 'g', 't', *([] if tokens else wide), *(['p'] if paged else [])])};",
        *([f"RVar {', '.join(wide)};"] if tokens else []),
        f"Param {', '.join([*params, *(['page = 16'] if paged else [])])};",
        *(["Extent p = table[1];"] if paged else []),
    ]
    return "\n".join([*head, *lines, *(f"{r}.compile();" for r in results if r.startswith(("put", "scale")))])


_PARAMS = {
    "page": "keys in a page", "k_whole": "keys are rounded to int8", "v_whole": "values are rounded to int8", "k_by_number": "keys are divided by a number",
    "v_by_number": "values are divided by a number", "k_by_head": "keys are divided by a scale of their head", "v_by_head": "values are divided by a scale of their head",
}  # fmt: skip


def append_spec(name: str, paged: bool, same: bool, tokens: bool) -> Spec:
    """Return the spec of appending to a cache."""
    program = parse(algorithm(paged, same, tokens), name)
    return Spec(name, "Append keys and values to a cache.", program, {n: _PARAMS[n] for n, _ in program.algorithm.params}, source=name)


def name_of(paged: bool, same: bool, tokens: bool) -> str:
    """Return the name of the op that appends."""
    return f"append_{'pages' if paged else 'cache'}{'' if same else '_two'}{'_scaled' if tokens else ''}"


for _paged, _same, _tokens in product((False, True), repeat=3):
    _name = name_of(_paged, _same, _tokens)
    built[_name] = partial(append_spec, _name, _paged, _same, _tokens)
    _of = "pages, G, slots" if _paged else "B, G, L"
    interfaces[_name] = Interface({
        "new_k": "new_k (B, G, T, D)", "new_v": f"new_v (B, G, T, {'D' if _same else 'N'})", "at": "lengths (B)", "table": "block_table (B, pages of an entry)",
        "K": f"k ({_of}, D)", "V": f"v ({_of}, {'D' if _same else 'N'})",
    })  # fmt: skip


def _quantized(k: torch.Tensor, v: torch.Tensor, scales: tuple[Scale, Scale]) -> dict[str, object]:
    """Return the arguments that say how new keys and values become codes."""
    given: dict[str, object] = {}
    for of, cache, scale in (("k", k, scales[0]), ("v", v, scales[1])):
        given |= {f"{of}_whole": True} if cache.dtype == torch.int8 else {}
        given |= {f"{of}_{scale.kind}": scale.value} if scale.kind else {}
        if scale.kind == "token":
            if cache.dtype not in LARGEST:
                raise ValueError(f"attention: {of}_scale has one scale a token, and {of} is {cache.dtype}; allowed beside new_{of}: a cache in int8 or float8")
            given[f"most_{of}"] = LARGEST[cache.dtype]
        elif scale.kind:
            given[f"{of}_by_{scale.kind}"] = True
    if (scales[0].kind == "token") != (scales[1].kind == "token"):
        raise ValueError("attention: one of k_scale and v_scale has one scale a token; allowed beside new_k and new_v: both or none")
    return given


def append(args: AttentionArgs, forms: dict, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, scales: tuple[Scale, Scale]) -> int:
    """Write ``new_k`` and ``new_v`` into the cache at ``lengths``, and return how many keys an entry has more.

    k and v are (B, G, L, D) or pages (page, G, slot, D). Where a token has a scale, those of the new ones are worked out, from their largest
    elements, and written too. Without new keys nothing is done.
    """
    new_k, new_v, table = forms["new_k"], forms["new_v"], forms["block_table"]
    if new_k is None and new_v is None:
        return 0
    check_new_tokens(new_k, new_v, args.q, k, v)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (k, v, new_k, new_v)):
        raise NotImplementedError("attention: new_k has no gradient, as it is written into the cache; allowed: torch.no_grad(), or new_k.detach()")
    given = {"new_k": new_k, "new_v": new_v, "K": k, "V": v, "at": lengths if lengths.dtype.itemsize > 2 else lengths.to(torch.int32)}
    given |= _quantized(k, v, scales)
    if table is not None:
        given |= {"table": table, "page": k.shape[2]}
    operator_called(name_of(table is not None, new_k.shape[3] == new_v.shape[3], scales[0].kind == "token"))(**given)
    if not compiling():  # autograd shall know that what it may have saved has changed
        for t in (args.k, args.v, *(s.value for s in scales if isinstance(s.value, torch.Tensor) and s.kind == "token")):
            torch.autograd.graph.increment_version(t)
    return new_k.shape[2]


