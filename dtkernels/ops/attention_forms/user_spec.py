"""Build attention with a score and a mask that the user writes: ``dtkernels.attention_spec``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import torch

from ...lang.checks import check_given
from ...lang.errors import DTError, Position
from ...lang.parser import parse
from ...lang.spec import Spec
from ...runtime.bind.operator import Operator
from ...runtime.signature.arguments import Interface
from ..attention_arguments import key_groups
from ..op_decorator import only_tensors

_TAKEN = ("Q", "K", "V", "s", "seen", "e", "total", "scale", "group", "b", "h", "m", "n", "l", "d")
_NAMES = {"Q": "q (B, H, M, D)", "K": "k (B, G, L, D)", "V": "v (B, G, L, N)"}
_HEAD = """Func s, seen, e, total, {name};
In {inputs};
SIn {scalars};
Var b, h, m, n;
RVar {sums};
Param {params};
s[b, h, m, l] = scale * rdot(Q[b, h, m, d], K[b, h / group, l, d], d);
seen[b, h, m, l] = where("""
_TAIL = """, -inf);
e[b, h, m, l] = exp(seen[b, h, m, l]);
total[b, h, m] = rsum(e[b, h, m, l], l);
{name}[b, h, m, n] = rdot(e[b, h, m, l], V[b, h / group, l, n], l) * where(total[b, h, m] == 0, 0, 1 / total[b, h, m]);
"""


class AttentionFunction:
    """What ``attention_spec`` returns: call it as ``(q, k, v, scale=None, **inputs)``. ``operator`` is the op, ``text`` its DT."""

    def __init__(self, operator: Operator, text: str):
        self.operator, self.text = operator, text

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | torch.Tensor | None = None, **given) -> torch.Tensor:
        only_tensors(self.operator.name, q=q, k=k, v=v)
        return self.operator(Q=q, K=k, V=v, group=key_groups(q, k, v), scale=1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale, **given)

    def __repr__(self) -> str:
        return f"<dtkernels attention {self.operator.name}>"


def attention_spec(
    score: str = "s",
    mask: str = "true",
    *,
    inputs: Iterable[str] = (),
    scalars: Iterable[str] = (),
    params: Mapping[str, int | bool] | None = None,
    sum_over: Iterable[str] = (),
    name: str = "user_attention",
) -> AttentionFunction:
    """Build attention whose scores and mask are DT expressions, and return it as a differentiable function.

    The result is softmax over l of ``score`` where ``mask`` holds, times v. The expressions may read

    - ``s``: the score scale * q k^T of this query and key; ``scale``
    - ``b h m l``: the indices of batch entry, head, query and key; ``len(m)``, ``len(l)``
    - ``inputs``: names of tensors, indexed by these, ``slope[h]``; of integers too, inside another index too
    - ``scalars``: names of numbers or one-element tensors; ``params``: names of compile-time numbers, with their defaults
    - reductions over the labels ``sum_over``: ``s + scale * rdot(Q2[b, h, m, r], K2[b, l, r], r)`` with ``sum_over="r"``

    Several names are a list, or one text with blanks. Returns a function ``(q, k, v, scale=None, **inputs)`` of q (B, H, M, D), k (B, G, L, D)
    and v (B, G, L, N), where G divides H. It is differentiable in q, k, v and floating-point inputs and scalars. A query that sees no key
    gives zeros. Where the mask compares l with what is known of the query, keys outside are not read. Raises DTError, one line that names the expression and the
    column. Example::

        alibi = dtkernels.attention_spec(score="s + slope[h] * (l - m)", mask="l <= m", inputs="slope")
        alibi(q, k, v, slope=slope)
    """
    inputs, scalars, sums = (_listed(names, what) for names, what in ((inputs, "inputs"), (scalars, "scalars"), (sum_over, "sum_over")))
    params = dict(params or {})
    _check_names(name, inputs, scalars, sums, params)
    head = _HEAD.format(
        name=name, inputs=", ".join(("Q", "K", "V", *inputs)), scalars=", ".join(("scale", *scalars)), sums=", ".join(("l", "d", *sums)),
        params=", ".join(f"{n} = {str(v).lower()}" for n, v in {"group": 1, **params}.items()),
    )  # fmt: skip
    pieces = [(head, ""), *_with_scores(mask, "mask"), (", ", ""), *_with_scores(score, "score"), (_TAIL.format(name=name), "")]
    text, origin = _joined(pieces)
    program = _parsed(text, origin, name)
    spec = Spec(name, f"Attention with score {score} where {mask}.", program, {}, source=name)
    return AttentionFunction(Operator(spec, Interface(_NAMES)), text)


def _listed(names: Iterable[str], what: str) -> tuple[str, ...]:
    if not isinstance(names, Iterable):
        raise DTError(f"{what} of attention_spec are names", found=repr(names), allowed="a text, or a list of texts")
    return tuple(re.split(r"[,\s]+", names.strip())) if isinstance(names, str) and names.strip() else () if isinstance(names, str) else tuple(names)


def _check_names(name: str, *groups: Iterable[str]) -> None:
    seen = {*_TAKEN, name}
    for n in (n for group in groups for n in group):
        if n in seen:
            raise DTError("a name of attention_spec is declared once", found=repr(n), allowed=f"a name other than {', '.join(sorted(seen))}")
        seen.add(n)


def _with_scores(expression: str, what: str) -> list[tuple[str, str]]:
    """Split an expression into pieces of program text, each with its source; ``s`` becomes the score of the pair."""
    if not isinstance(expression, str) or not expression.strip():
        raise DTError(f"{what} is a DT expression", found=repr(expression), allowed="s + slope[h] * (l - m), for example")
    if ";" in expression or "#" in expression:
        at = next(i for i, c in enumerate(expression) if c in ";#")
        raise DTError("one expression", found=repr(expression[at]), allowed="an expression without ; and comments", at=Position(1, at + 1, what))
    pieces, last = [("(", "")], 0
    for found in re.finditer(r"(?<![\w.])s(?!\w|\s*\[)", expression):
        pieces += [(expression[last : found.end()], f"{what}:{last}"), ("[b, h, m, l]", f"{what}:{found.start()}!")]
        last = found.end()
    return [*pieces, (expression[last:], f"{what}:{last}"), (")", f"{what}:{len(expression)}!")]


def _joined(pieces: list[tuple[str, str]]) -> tuple[str, list[tuple[str, int] | None]]:
    """Return the text, and for each character (the expression, the offset in it) that it comes from."""
    text, origin = "", []
    for piece, source in pieces:
        text += piece
        what, _, at = source.partition(":")
        for i in range(len(piece)):
            origin.append((what, int(at.rstrip("!")) + (0 if at.endswith("!") else i)) if what else None)
    return text, origin


def _parsed(text: str, origin: list[tuple[str, int] | None], name: str):
    """Parse the program; an error names the expression and the column in it."""

    def place(offset: int) -> tuple[int, int]:
        return offset + 1, 1  # the line stands for the offset

    try:
        program = parse(text, name, place)
        check_given(program, (name,))
        return program
    except DTError as error:
        found = origin[min(error.at.line - 1, len(origin) - 1)] if error.at else None
        if found is None and error.at is None:
            raise
        at = Position(1, found[1] + 1, found[0]) if found else Position(1, 1, name)
        raise DTError(error.rule, found=error.found, allowed=error.allowed, at=at) from None
