import math

import torch

from .op_decorator import compiling, only_tensors, op

LOWEST = -2.3e38  #: scores times log2(e) stay in float32's range above it
EXACT = 2**24  #: where float32, in which offsets reach the kernels, no longer tells one key from the next


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
) -> torch.Tensor:
    """softmax(scale * q k^T + bias) v, row by row (Vaswani et al., 2017), in one pass over the keys (Dao et al., 2022).

    q: (..., H, M, D); k: (..., G, L, D); v: (..., G, L, N), where G divides H (grouped queries: head h uses h // (H / G));
    fewer dimensions are taken as one head. mask: boolean (True: the key is seen) or floating (added to the scores; below
    -2.3e38, as the lowest number of float32 and bfloat16 is, the key is not seen), and bias, where both are wanted,
    floating; broadcastable to (..., H, M, L). scale: 1 / sqrt(D) unless given.
    Query m stands at key p = m + offset (a number, or a one-element tensor, read on the device); offset L - M aligns the
    last query with the last key. causal: it sees keys l <= p. window (left, right): it sees p - left <= l <= p + right,
    None for no limit; keys out of reach are not read. softcap c: scores become c * tanh(scores / c) before anything is
    added. sinks: (H,), the score of one key more a head, of value 0.
    Returns (..., H, M, N). A query that sees nothing gives zeros. Differentiable in q, k, v, floating masks, scale and
    sinks. Raises ValueError where shapes disagree, TypeError where an argument is none of these.

    >>> attention(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4), torch.ones(1, 2, 5, 4)).shape
    torch.Size([1, 2, 3, 4])
    """
    operator, tensors, settings = attention.operator(), (), ()
    if not compiling():
        tensors, settings = _told(q, k, v, mask, causal, scale, window, offset, softcap, sinks, bias)
        if (found := operator.repeat(tensors, settings)) is not None:
            return found
    given = _arguments(q, k, v, mask, causal, scale, window, offset, softcap, sinks, bias)
    return operator.fresh(tensors, settings, given)


def ready(shape, q, k, v, mask=None, *, causal=False, scale=None, window=None, offset=0, softcap=None, sinks=None, bias=None):
    """What ``attention`` of these comes to, contents aside, where the last calls say: a function of the tuple of the tensors, those
    that are not None, in the order q, k, v, mask, sinks, bias. It gives the result in ``shape``, of as many elements, or None where
    that takes a call of ``attention``. The caller sees to it that tensors are alike, as torch's guards have it. None: not known."""
    return attention.operator().ready(*_told(q, k, v, mask, causal, scale, window, offset, softcap, sinks, bias), shape)


def _told(q, k, v, mask, causal, scale, window, offset, softcap, sinks, bias) -> tuple[tuple, tuple]:
    """A call as ``Operator.repeat`` takes it."""
    tensors = (q, k, v) if mask is sinks is bias is None else tuple([t for t in (q, k, v, mask, sinks, bias) if t is not None])
    return tensors, (causal, scale, window, offset, softcap, mask is None, sinks is None)


def _arguments(q, k, v, mask, causal, scale, window, offset, softcap, sinks, bias) -> dict[str, object]:
    """What the op is called with."""
    _check_kinds(q, k, v, mask, causal, window, offset, sinks, bias)
    groups = _check_shapes(q, k, v)
    given = _reach(q.shape[-2], k.shape[-2], causal, window, offset)
    if mask is not None and mask.dtype != torch.bool:
        mask = _hiding(mask)
        mask, bias = None, mask if bias is None else mask + bias
    for name, on, tensor in (("mask", "masked", mask), ("bias", "biased", bias)):
        if tensor is not None:
            given |= {on: True, name: _spread(name, tensor, (*q.shape[:-1], k.shape[-2]))}
    if softcap is not None:
        if not softcap > 0:
            raise ValueError(f"attention: softcap is a number above 0; got {softcap}")
        given |= {"capped": True, "cap": float(softcap)}
    if sinks is not None:
        heads = q.shape[-3] if q.dim() > 2 else 1
        if sinks.shape != (heads,):
            raise ValueError(f"attention: sinks has one number a head, shape ({heads},); got shape {tuple(sinks.shape)}")
        given |= {"sinks": True, "sink": sinks}
    if scale is None:
        scale = 1 / math.sqrt(max(q.shape[-1], 1))
    return {"Q": q, "K": k, "V": v, "scale": scale, "group": groups, **given}


def _hiding(mask: torch.Tensor) -> torch.Tensor:
    """A floating mask with -inf in the place of what hides a key by a lowest number: a row of those would leave the range."""
    if mask.dtype == torch.float16:
        return mask
    if mask.requires_grad and torch.is_grad_enabled():  # each element has a gradient of its own
        return torch.nn.functional.threshold(mask, LOWEST, -math.inf)
    once = mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]  # what is expanded, once
    return torch.nn.functional.threshold(once, LOWEST, -math.inf).expand(mask.shape)


def _spread(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        return tensor.expand(shape)
    except (RuntimeError, ValueError):  # the latter of tensors without data
        raise ValueError(f"attention: {name} broadcasts to {shape}; got shape {tuple(tensor.shape)}") from None


def _check_kinds(q, k, v, mask, causal, window, offset, sinks, bias) -> None:
    """Raise TypeError for what would mean something else than it says, or fail where nobody looks."""
    only_tensors("attention", q=q, k=k, v=v, **{n: t for n, t in (("mask", mask), ("sinks", sinks), ("bias", bias)) if t is not None})
    if mask is not None and not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
        raise TypeError(f"attention: mask is {mask.dtype}; allowed: bool or floating point")
    if not isinstance(causal, (bool, int, torch.Tensor, torch.SymBool)) and type(causal).__name__ not in ("bool", "bool_"):  # NumPy's
        raise TypeError(f"attention: causal is {causal!r}; allowed: True or False")
    if not isinstance(offset, (int, torch.Tensor, torch.SymInt)):
        raise TypeError(f"attention: offset is {offset!r}; allowed: a whole number or a one-element tensor")
    if window is not None and not (
        isinstance(window, (tuple, list)) and len(window) == 2 and all(w is None or hasattr(w, "__index__") for w in window)
    ):
        raise TypeError(f"attention: window is {window!r}; allowed: (left, right), each a whole number of keys or None")


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Query heads that share a head of k and v."""
    if not (2 <= q.dim() == k.dim() == v.dim()):
        raise ValueError(f"attention: q, k and v have one rank, 2 or more; got shapes {_shapes(q, k, v)}")
    heads, groups = (t.shape[-3] if t.dim() > 2 else 1 for t in (q, k))
    if groups == 0 or heads % groups or (v.shape[-3] if v.dim() > 2 else 1) != groups:
        raise ValueError(f"attention: the heads of k and v divide those of q; got shapes {_shapes(q, k, v)}")
    return heads // groups


def _shapes(*tensors: torch.Tensor) -> str:
    """For an error's text alone: torch.compile makes no text of shapes that may vary."""
    return ", ".join(str(tuple(t.shape)) for t in tensors)


def _reach(
    queries: int, keys: int, causal: bool, window: tuple[int | None, int | None] | None, offset: int | torch.Tensor
) -> dict[str, object]:
    """The spec's parameters and scalars for the keys that a query may see; nothing where that is all of them."""
    left, right = window if window is not None else (None, None)
    if any(side is not None and side < 0 for side in (left, right)):
        raise ValueError(f"attention: a window reaches 0 or more keys to either side, None for no limit; got {window}")
    right = 0 if causal else right
    if causal and left is None and isinstance(offset, int) and offset == 0:
        return {"causal": True}
    if max(queries, keys) >= EXACT and (left is not None or right is not None):
        raise ValueError(f"attention: windows and offsets count up to {EXACT} keys; got {queries} queries and {keys} keys")
    given: dict[str, object] = {}
    fixed = isinstance(offset, int)
    if not isinstance(offset, int):
        offset = offset.to(torch.float32)
    if left is not None and not (fixed and queries - 1 + offset - left <= 0):
        given |= {"starts": True, "first": _number(offset - left)}
    if right is not None and not (fixed and offset + right >= keys - 1):
        given |= {"ends": True, "last": _number(offset + right)}
    return given


def _number(value: int | torch.Tensor) -> float | torch.Tensor:
    return value if isinstance(value, torch.Tensor) else float(value)
