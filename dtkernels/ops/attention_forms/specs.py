"""Build the specs of attention's forms. They differ in the layout of their tensors and in whether logsumexp is a second result.

The algorithm is that of specs/attention.yaml, where the keys that query m sees may also be a range ``lo[m] <= l < hi[m]``. The compiler
turns the range into the bounds of its loops: a block of queries reads the keys that one of them sees. ``begins`` and ``stops`` are the
same range for each key; the gradient of keys and values loops over queries and takes its bounds from them.

In a cache the range follows from the length of an entry, which the program reads itself: a step of decoding launches nothing that prepares it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ...lang.parser import parse
from ...lang.spec import Spec
from ..registry import built

PARAMETERS = {
    "ranged": "query m sees keys lo[m] <= l < hi[m]",
    "keyed": "key l is seen by queries begins[l] <= m < stops[l]: the same pairs once more, for the loops over queries; in a cache m < stops[b, l] alone",
    "segmented": "a query sees keys of its own segment",
    "causal": "query m sees keys l <= m",
    "starts": "query m sees keys l >= m + first; in a cache m counts from the place of the first query",
    "ends": "query m sees keys l <= m + last; in a cache m counts from the place of the first query",
    "masked": "a mask says which keys a query sees",
    "flagged": "flags say which keys every query sees",
    "capped": "scores are held within -cap and cap by tanh",
    "biased": "a bias is added to the scores",
    "dropped": "of the weights a share ``drop`` is dropped, and the others are divided by 1 - drop",
    "sinks": "each head has one key more, of score sink and value 0",
    "group": "query heads that share a head of K and V",
    "page": "keys in a page",
    "valid": "keys l >= length[b] + more are not seen, and their values not read, as they may be no numbers; the last query is at the last key before",
    "k_by_head": "keys are multiplied by a scale of their entry and head",
    "k_by_token": "keys are multiplied by a scale each",
    "v_by_number": "values are multiplied by a number",
    "v_by_head": "values are multiplied by a scale of their entry and head",
    "v_by_token": "values are multiplied by a scale each",
}


@dataclass(frozen=True)
class Layout:
    """How the tensors of a form lie: the indices of each, and the parameters that the form has."""

    lead: str  #: of everything that is one for each batch entry
    q: str
    k: str
    v: str
    out: str
    params: tuple[str, ...]
    row: str = "b, h, m"  #: of logsumexp: those of the result but the last
    extent: str = ""  #: the extent of l, where no tensor shows it
    inputs: str = ""  #: further inputs
    token: str = ""  #: of scales, one for each key and head


_RANGES = ("ranged", "keyed", "segmented")
_MASKS = ("causal", "starts", "ends", "masked", "flagged", "biased")
_SCORES = ("capped", "sinks", "group")
_TRAINED = (*_SCORES, "dropped")
_CACHED = ("valid", "starts", "ends", "k_by_head", "k_by_token", "v_by_number", "v_by_head", "v_by_token")

HEADS = Layout(
    lead="b, ", q="b, h, m, d", k="b, h / group, l, d", v="b, h / group, l, n", out="b, h, m, n", params=(*_RANGES, *_MASKS, *_TRAINED)
)
CACHE = replace(HEADS, params=("keyed", "masked", "flagged", "biased", *_TRAINED, *_CACHED), token="b, h / group, l")
TOKENS = Layout(lead="", q="m, h, d", k="l, h / group, d", v="l, h / group, n", out="m, h, n", params=(*_RANGES, *_TRAINED), row="m, h")
PAGES = Layout(
    lead="b, ", q="b, h, m, d", out="b, h, m, n",
    k="table[b, l / page], h / group, l % page, d", v="table[b, l / page], h / group, l % page, n",
    params=(*_SCORES, "page", *_CACHED), extent="Extent l = table[1] * page;", inputs=", table", token="table[b, l / page], h / group, l % page",
)  # fmt: skip

#: name of the op -> layout, whether it gives logsumexp too
FORMS = {
    "attention_flags": (HEADS, False),
    "attention_dropout": (HEADS, False),
    "attention_lse": (HEADS, True),
    "attention_varlen": (TOKENS, False),
    "attention_varlen_lse": (TOKENS, True),
    "attention_segments": (HEADS, False),
    "attention_segments_lse": (HEADS, True),
    "attention_lengths": (CACHE, False),
    "attention_lengths_lse": (CACHE, True),
    "attention_paged": (PAGES, False),
    "attention_paged_lse": (PAGES, True),
}

_INPUTS = {
    "ranged": "lo, hi", "keyed": "begins, stops", "segmented": "of_q, of_k", "masked": "mask", "flagged": "flags", "biased": "bias", "sinks": "sink",
    "valid": "length", "k_by_head": "k_head", "k_by_token": "k_token", "v_by_head": "v_head", "v_by_token": "v_token",
}  # fmt: skip
_SCALARS = {"valid": "more", "starts": "first", "ends": "last", "capped": "cap", "dropped": "seed, drop", "v_by_number": "v_number"}


def _seen(layout: Layout) -> str:
    """Return the condition for query m to see key l."""
    lead, cached = layout.lead, "valid" in layout.params
    place = "m + length[b] - len(m)" if cached else "m"  # of query m among the keys
    conditions = {
        "valid": "l < length[b] + more",
        "ranged": f"lo[{lead}m] <= l and l < hi[{lead}m]",
        "keyed": "m < stops[b, l]" if cached else f"begins[{lead}l] <= m and m < stops[{lead}l]",
        "segmented": f"of_q[{lead}m] == of_k[{lead}l]",
        "causal": "l <= m",
        "starts": f"l >= {place} + first",
        "ends": f"l <= {place} + last",
        "masked": f"mask[{lead}h, m, l]",
        "flagged": f"flags[{lead}l]",
    }
    return " and ".join(f"(not {p} or {c})" for p, c in conditions.items() if p in layout.params)


def algorithm(name: str, layout: Layout, lse: bool) -> str:
    """Return the text of a form's algorithm."""
    lead, has = layout.lead, layout.params
    cached = "valid" in has
    seen = _seen(layout)

    score, row = f"scores[{lead}h, m, l]", f"{lead}h, m"
    capped = f"where(capped, cap * tanh({score} * (1 / cap)), {score})"
    added = f" + where(biased, bias[{lead}h, m, l], 0)" if "biased" in has else ""
    weight = f"e[{row}, l]"
    kept, scaled = weight, ""
    if "dropped" in has:
        kept = f"where(dropped, where(random(seed, {row}, l) < drop, 0, {weight}), {weight})"
        scaled = " * where(dropped, 1 / (1 - drop), 1)"
    value, key_scale, value_scale = _of_cache(layout)
    kept += f" * where(v_by_token, where(not valid or l < length[b] + more, cast(v_token[{layout.token}], fp32), 0), 1)" if "v_by_token" in has else ""
    inputs = ", ".join("stops" if cached and p == "keyed" else _INPUTS[p] for p in has if p in _INPUTS)
    scalars = ", ".join(_SCALARS[p] for p in has if p in _SCALARS)
    defaults = {"group": "1", "page": "16"}
    params = ", ".join(f"{p} = {defaults.get(p, 'false')}" for p in has)
    lines = [
        f"Func scores, seen, e, rest, total, {name}{', lse' if lse else ''};",
        f"In Q, K, V, {inputs}{layout.inputs};",
        f"SIn scale, {scalars};",
        f"Var {lead}h, m, n;",
        "RVar l, d;",
        f"Param {params};",
        layout.extent,
        f"{score} = scale * rdot(Q[{layout.q}], K[{layout.k}], d){key_scale};",
        f"seen[{row}, l] = where({seen}, {capped}{added}, -inf);",
        f"e[{row}, l] = exp(seen[{row}, l]);",
        f"rest[{row}] = where(sinks, exp(sink[h]), 0);",
        f"total[{row}] = rsum(e[{row}, l], l) + rest[{row}];",
        f"{name}[{layout.out}] = rdot({kept}, {value}, l) * where(total[{row}] == 0, 0, 1 / total[{row}]){scaled}{value_scale};",
    ]
    if lse:
        lines += [f"lse[{layout.row}] = cast(log(total[{row}]), fp32);", f"{name}.compile();", "lse.compile();"]
    return "\n".join(line for line in lines if line)


def _of_cache(layout: Layout) -> tuple[str, str, str]:
    """Return the value of a key, the factors of scores and those of results: where a cache may hold no numbers, and has scales."""
    value = f"V[{layout.v}]"
    if "valid" not in layout.params:
        return value, "", ""
    of_keys = f" * where(k_by_head, cast(k_head[b, h / group], fp32), 1) * where(k_by_token, cast(k_token[{layout.token}], fp32), 1)"
    return f"where(not valid or l < length[b] + more, {value}, 0)", of_keys, " * where(v_by_number, v_number, 1) * where(v_by_head, cast(v_head[b, h / group], fp32), 1)"


def form_spec(name: str) -> Spec:
    """Return the spec of a form of attention."""
    layout, lse = FORMS[name]
    program = parse(algorithm(name, layout, lse), name)
    doc = f"Attention, in the form {name.removeprefix('attention_')}: see dtkernels.ops.attention."
    return Spec(name, doc, program, {p: PARAMETERS[p] for p in layout.params}, source=name)


PART = "attention_part"
_OF_PART = replace(HEADS, params=(*_RANGES, "causal", "capped", "group"))


def part_spec() -> Spec:
    """Return the spec of a part of attention over some of the keys, where the logsumexp over all of them is known, and the part's weight.

    Its gradients are those of attention through these keys, of which backward computes nothing twice: a step of ring attention.
    """
    inputs = ", ".join(_INPUTS[p] for p in _OF_PART.params if p in _INPUTS)
    params = ", ".join(f"{p} = {'1' if p == 'group' else 'false'}" for p in _OF_PART.params)
    text = f"""
Func scores, seen, e, {PART}, weight;
In Q, K, V, lse, {inputs};
SIn scale, cap;
Var b, h, m, n;
RVar l, d;
Param {params};
scores[b, h, m, l] = scale * rdot(Q[b, h, m, d], K[b, h / group, l, d], d);
seen[b, h, m, l] = where({_seen(_OF_PART)}, where(capped, cap * tanh(scores[b, h, m, l] * (1 / cap)), scores[b, h, m, l]), -inf);
e[b, h, m, l] = exp(seen[b, h, m, l] - where(lse[b, h, m] == -inf, 0, lse[b, h, m]));
{PART}[b, h, m, n] = rdot(e[b, h, m, l], V[b, h / group, l, n], l);
weight[b, h, m] = rsum(e[b, h, m, l], l);
{PART}.compile();
weight.compile();
"""
    doc = "Part of attention, and its weight, where the logsumexp over all keys is known."
    return Spec(PART, doc, parse(text, PART), {p: PARAMETERS[p] for p in _OF_PART.params}, source=PART)


built.update({name: partial(form_spec, name) for name in FORMS})
built[PART] = part_spec
