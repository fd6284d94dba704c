"""Translate matrix products and sums of products."""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any

import torch

from ...lang import expr as ex
from ..builder import Builder
from ..unsupported import UnsupportedOperation
from ..values import Value, flat
from .elementwise import ZERO, choose, compare, number, over, plus, times
from .indexing import fresh
from .randomness import dropped
from .reductions import exponentials, shared
from .table import op

PRODUCTS = "products"
EMPTY: tuple = ()


def multiplied(b: Builder, x: Any, y: Any, hint: str = "") -> Value:
    """Multiply as torch.matmul does."""
    x, y = b.value(x), b.value(y)
    if not x.rank or not y.rank:
        raise UnsupportedOperation("matmul of a tensor without dimensions")
    rows, columns = x.rank > 1, y.rank > 1
    left = (*x.dims[:-2], x.dims[-2], EMPTY, x.dims[-1]) if rows else (EMPTY, EMPTY, x.dims[0])
    right = (*y.dims[:-2], EMPTY, y.dims[-1], y.dims[-2]) if columns else (EMPTY, EMPTY, y.dims[0])
    rank = max(len(left), len(right))
    a, c = (replace(v, dims=((EMPTY,) * (rank - len(d)) + d)) for v, d in ((x, left), (y, right)))
    found = b.product(a, c, [rank - 1], hint)
    batch, (m, n) = found.dims[:-2], found.dims[-2:]
    return replace(found, dims=(*batch, *([m] if rows else []), *([n] if columns else [])), dtype=b.dtype)


@op("matmul", "mm", "bmm", "mv", "dot", "inner_product", "linalg_matmul", "__matmul__", group=PRODUCTS)
def matmul(b: Builder, x: Any, y: Any) -> Value:
    return multiplied(b, x, y)


@op("linear", group=PRODUCTS)
def linear(b: Builder, x: Any, weight: Any, bias: Any = None) -> Value:
    weight = b.value(weight)
    found = multiplied(b, x, replace(weight, dims=weight.dims[::-1]), "" if bias is None else "product")
    return found if bias is None else b.elementwise(plus, found, bias)


def with_addend(b: Builder, addend: Any, found: Value, beta: Any, alpha: Any) -> Value:
    """beta * addend + alpha * product."""
    found = found if alpha == 1 else b.elementwise(times, found, alpha)
    if beta == 0:
        return found
    addend = b.value(addend)
    return b.elementwise(plus, found, addend if beta == 1 else b.elementwise(times, addend, beta))


@op("addmm", "baddbmm", "addmv", group=PRODUCTS)
def addmm(b: Builder, addend: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return with_addend(b, addend, multiplied(b, x, y, "product"), beta, alpha)


@op("addbmm", group=PRODUCTS)
def addbmm(b: Builder, addend: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Value:
    """beta * addend + alpha * the sum of all products."""
    x, y = b.value(x), b.value(y)
    (batch, m, k), (batch2, k2, n) = x.dims, y.dims
    found = b.product(replace(x, dims=(m, EMPTY, batch, k)), replace(y, dims=(EMPTY, n, batch2, k2)), [2, 3], "product")
    return with_addend(b, addend, replace(found, dtype=b.dtype), beta, alpha)


@op("trace", group=PRODUCTS)
def trace(b: Builder, x: Any) -> Value:
    value, _ = on_diagonal(b, b.value(x), "ii")
    return b.reduce("sum", value, None, False, "trace", b.dtype)


@op("outer", "ger", group=PRODUCTS)
def outer(b: Builder, x: Any, y: Any) -> Value:
    x = b.value(x)
    return b.elementwise(times, replace(x, dims=(*x.dims, EMPTY)), y)


def over_letters(value: Value, letters: str, every: str) -> Value:
    """Lay the dimensions of an operand out as ``every`` says; () for letters that it lacks."""
    return replace(value, dims=tuple(value.dims[letters.index(x)] if x in letters else EMPTY for x in every))


@op("einsum", group=PRODUCTS)
def einsum(b: Builder, equation: str, operands: list, path: Any = None) -> Value:
    values = [b.value(v) for v in operands]
    terms, result = letters_of(equation.replace(" ", ""), [v.rank for v in values])
    for k, term in enumerate(terms):
        values[k], terms[k] = on_diagonal(b, values[k], term)
    value, term = values[0], terms[0]
    for k in range(1, len(values)):
        every = term + "".join(x for x in terms[k] if x not in term)
        later = set(result).union(*terms[k + 1 :])
        over_ = [every.index(x) for x in every if x not in later]
        value = b.product(over_letters(value, term, every), over_letters(values[k], terms[k], every), over_, "" if k == len(values) - 1 else "product")
        term = "".join(x for x in every if x in later)
    if gone := [k for k, x in enumerate(term) if x not in result]:
        value = b.reduce("sum", value, gone)
        term = "".join(x for x in term if x in result)
    return replace(over_letters(value, term, result), dtype=b.dtype)


def on_diagonal(b: Builder, value: Value, letters: str) -> tuple[Value, str]:
    """Read an operand that repeats a letter along its diagonal."""
    for place, letter in enumerate(letters):
        first = letters.index(letter)
        if first != place:
            value = fresh(b, value) if first == 0 and place == 1 else value
            value = b.taken(value, place, lambda at: at, value.dims[first])
    kept = [k for k, letter in enumerate(letters) if letters.index(letter) == k]
    return replace(value, dims=tuple(value.dims[k] for k in kept)), "".join(letters[k] for k in kept)


def letters_of(equation: str, ranks: list[int]) -> tuple[list[str], str]:
    """Parse an einsum: the letters of each operand and of the result. ``...`` becomes letters that are not used."""
    left, arrow, result = equation.partition("->")
    terms, free = left.split(","), [x for x in string.ascii_letters if x not in equation]
    most = max((rank - len(t.replace("...", "")) for t, rank in zip(terms, ranks) if "..." in t), default=0)
    dots = "".join(free[:most])
    terms = [t.replace("...", dots[most - (rank - len(t.replace("...", ""))) :] if "..." in t else "") for t, rank in zip(terms, ranks)]
    if not arrow:
        letters = "".join(terms)
        result = dots + "".join(sorted(x for x in set(letters) if letters.count(x) == 1 and x not in dots))
    return terms, result.replace("...", dots)


@op("scaled_dot_product_attention", group=PRODUCTS)
def attention(b: Builder, q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, *, scale: Any = None,
              enable_gqa: bool = False) -> Value:  # fmt: skip
    """softmax(q k' * scale + mask) v. A query to which nothing is visible gives zeros."""
    q, k, v = b.value(q), b.value(k), b.value(v)
    mask = None if attn_mask is None else b.value(attn_mask)
    if enable_gqa:
        q, k, v = grouped(b, q, k, v)
        mask = mask and with_groups(b, mask, [b.extent(d) for d in q.dims[-4:-2]])
    width = b.number(b.extent(q.dims[-1]))
    found = multiplied(b, q, replace(k, dims=(*k.dims[:-2], k.dims[-1], k.dims[-2])), "product")
    factor = number(float(scale)) if scale is not None else number(width.value**-0.5) if isinstance(width, ex.Const) else None
    scores = b.elementwise(lambda s: over(s, ex.Call("sqrt", (width,))) if factor is None else times(s, factor), found)
    scores = masked(b, scores, mask, is_causal)
    scores, total = exponentials(b, shared(b, scores, "scores"), -1)
    weights = b.elementwise(lambda s: ex.Call("exp", (s,)), scores)
    weights = dropped(b, weights, dropout_p) if dropout_p else weights
    if attn_mask is None and not is_causal:
        summed = multiplied(b, weights, v, "summed")
        out = b.elementwise(over, summed, replace(total, dims=total.dims))
    else:
        summed = multiplied(b, weights, v, "summed")
        out = b.elementwise(lambda s, t: times(s, choose(compare("==", t, ZERO), ZERO, over(ex.Const(1), t))), summed, total)
    return merged_groups(out) if enable_gqa else out


def grouped(b: Builder, q: Value, k: Value, v: Value) -> tuple[Value, Value, Value]:
    """Split the heads of q into groups that share a head of k and v."""
    heads, shared_heads = b.extent(q.dims[-3]), b.extent(k.dims[-3])
    group = b.sizes.quotient(heads, shared_heads)
    shape = [b.extent(d) for d in q.dims]
    q = b.reshaped(q, [*shape[:-3], shared_heads, group, *shape[-2:]])
    spread = [replace(t, dims=(*t.dims[:-2], EMPTY, *t.dims[-2:])) for t in (k, v)]
    return q, spread[0], spread[1]


def merged_groups(out: Value) -> Value:
    *batch, heads, group, m, n = out.dims
    return replace(out, dims=(*batch, (*heads, *group), m, n))


def with_groups(b: Builder, mask: Value, sizes: list[Any]) -> Value:
    """Split the heads of a mask as those of the queries. ``sizes``: of the heads of k, and of their groups."""
    if mask.rank < 3:
        return mask
    if not flat(mask.dims[-3]):
        return replace(mask, dims=(*mask.dims[:-2], EMPTY, *mask.dims[-2:]))
    shape = [b.extent(d) for d in mask.dims]
    return b.reshaped(mask, [*shape[:-3], *sizes, *shape[-2:]])


def masked(b: Builder, scores: Value, mask: Value | None, causal: bool) -> Value:
    """Apply a boolean or additive mask, and the causal one, which is aligned at the first query and key."""
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = b.elementwise(lambda m, s: choose(m, s, ex.NEG_INF), _as_condition(b, mask), scores)
        else:
            scores = b.elementwise(plus, scores, mask)
    if causal:
        rows, columns = (b.flat_index(scores.dims[place]) for place in (-2, -1))
        scores = replace(scores, expr=choose(compare("<=", columns, rows), scores.expr, ex.NEG_INF))
    return scores


def _as_condition(b: Builder, mask: Value) -> Value:
    """Return the mask with a dtype that ``elementwise`` leaves a condition."""
    return Value(mask.dims, b.condition(mask), torch.uint8)
