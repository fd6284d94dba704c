from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .attention_arguments import FORM_ARGUMENTS, AttentionArgs, is_of_keys, spec_arguments
from .op_decorator import op

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .attention_forms.calls import FormArgs


@op(
    Q="q (..., H, M, D)",
    K="k (..., G, L, D)",
    V="v (..., G, L, N)",
    mask="mask (..., H, M, L)",
    bias="bias (..., H, M, L)",
    sink="sinks (H)",
    cap="softcap",
    broadcast=True,
)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | torch.Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    offset: int | torch.Tensor = 0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    **forms: Unpack[FormArgs],
) -> torch.Tensor:
    """Return softmax(scale * q k^T + bias) v, row by row (Vaswani et al., 2017), in one pass over the keys (Dao et al., 2022).

    Shapes: q (..., H, M, D); k (..., G, L, D); v (..., G, L, N); result (..., H, M, N) in the promoted dtype. G divides H: head h of q
    reads head h // (H / G) of k and v (grouped-query attention). Tensors with fewer dimensions have one head.

    - mask: boolean (True: the key is visible), or floating point (added to the scores; the key is hidden below -2.3e38, for example at
      the lowest float32 or bfloat16). bias: floating point, for use with a boolean mask. Both broadcast to (..., H, M, L).
    - scale: defaults to 1 / sqrt(D).
    - offset: query m is at key position p = m + offset. A number, or a one-element tensor that is read on the device. L - M aligns the
      last query with the last key.
    - causal: query m sees keys l <= p.
    - window (left, right): query m sees p - left <= l <= p + right; None for no limit. Keys out of reach are not read.
    - softcap c: scores become c * tanh(scores / c), before mask and bias are added.
    - sinks: (H,), the score of one extra key per head with value 0.

    Sequences of different lengths, caches and logsumexp, each described in docs/attention.md:

    - cu_seqlens_q, cu_seqlens_k: q (M, H, D), k and v (L, G, D) hold packed sequences, from cu_seqlens[i] to cu_seqlens[i + 1].
    - segments, segments_k: integers (..., M) and (..., L). A query sees keys of its own segment. q, k and v are (B, H, M, D).
    - lengths: (B,), the number of valid keys of each batch entry. The last query is at the last valid key.
    - block_table: (B, pages of an entry). k and v are pages, (page, slot, G, D), or (page, G, slot, D) with kv_layout="HND". No gradient.
    - new_k, new_v: (B, G, T, D) and (B, G, T, N), with lengths. They are written into k and v at each entry's length before attention.
    - k_scale, v_scale: scales of a float8 or int8 cache. A number; (G,) or (B, G); or one for each key and head, of the shape of
      k and v without the last dimension.
    - return_lse: return (result, logsumexp of the scores) with the second of shape (..., H, M), or (M, H) if packed, float32.
    - dropout_p, seed: each weight is 0 with probability dropout_p, else divided by 1 - dropout_p. The seed, an integer or a one-element
      tensor of integers, decides which; backward draws the same again.

    A query that sees no key gives zeros. Differentiable in q, k, v, floating-point masks and biases, scale and sinks. Raises ValueError
    where shapes disagree, and TypeError for an argument of another type.

    >>> attention(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4), torch.ones(1, 2, 5, 4)).shape
    torch.Size([1, 2, 3, 4])
    """
    if forms:
        from .attention_forms.calls import call

        return call(AttentionArgs(q, k, v, mask, causal, scale, window, offset, softcap, sinks, bias), forms)  # type: ignore[return-value]
    operator, tensors, settings = _operator(q, mask), (), ()
    if not operator.traced:
        tensors, settings = _cache_key(q, k, v, mask, causal, scale, window, offset, softcap, sinks, bias)
        if (found := operator.repeat(tensors, settings)) is not None:
            return found
    args = AttentionArgs(q, k, v, mask, causal, scale, window, offset, softcap, sinks, bias)  # takes 0.3 us: not before a repeated call
    return operator.fresh(tensors, settings, spec_arguments(args))


def _operator(q: torch.Tensor, mask: torch.Tensor | None):
    """Return the operator of a call without a form: one flag a key is read as such, not as a matrix."""
    if mask is None or not is_of_keys(mask, q):
        return attention.operator()
    from .attention_forms.calls import flags_operator

    return flags_operator()


def _with_forms(own: inspect.Signature) -> inspect.Signature:
    """Return the signature with the arguments that ``**forms`` stands for. Held there they cost a call without them nothing."""
    *named, _ = own.parameters.values()
    more = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=default) for n, default in FORM_ARGUMENTS.items()]
    return own.replace(parameters=[*named, *more])


attention.__signature__ = _with_forms(inspect.signature(attention))


def _operator_of(*args, **kwargs):
    """Return the operator that such a call of ``attention`` reaches, for ``explain``."""
    bound = attention.__signature__.bind(*args, **kwargs).arguments
    from .attention_forms.calls import operator_of

    forms = {n: v for n, v in bound.items() if n in FORM_ARGUMENTS}
    return operator_of(forms) if forms else _operator(bound["q"], bound.get("mask"))


attention.operator_of = _operator_of


def ready(shape: tuple[int, ...], args: AttentionArgs) -> Callable[[tuple[torch.Tensor, ...]], torch.Tensor | None] | None:
    """Return a cached launch for calls of ``attention`` with such arguments; None if no such call is cached.

    The launch takes the tuple of the tensors that are not None, in the order q, k, v, mask, sinks, bias. It returns the result in
    ``shape``, of as many elements, or None where ``attention`` itself must be called. The caller guards the tensors' properties, as
    torch's guards do.
    """
    return _operator(args.q, args.mask).ready(*_cache_key(*args), shape)


def _cache_key(q, k, v, mask, causal, scale, window, offset, softcap, sinks, bias) -> tuple[tuple, tuple]:
    """Return the tensors and settings of a call, for ``Operator.repeat``."""
    tensors = (q, k, v) if mask is sinks is bias is None else tuple([t for t in (q, k, v, mask, sinks, bias) if t is not None])
    return tensors, (causal, scale, window, offset, softcap, mask is None, sinks is None)
