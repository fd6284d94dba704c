"""Find out how a rotary function of a modeling file pairs elements and reads its tables: it runs on small tensors, against each form the ops compute."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import cast

import torch

from dtkernels.runtime.torch_support.dtypes import KERNEL_DTYPES

from ..patching.forward_patching import plain, unsupported
from ..patching.numeric_probe import normal, output_of, same

_ROTATED = ("q", "k", "query", "key", "xq", "xk", "x", "tensor")  #: names of arguments that are rotated
_WIDTH = 8  #: of the table in a trial


@dataclass(frozen=True)
class Form:
    """How a function rotates.

    arguments   the names of all arguments
    rotated     those that are rotated: one or two, which come first
    pairs       which elements go together: "halves" or "neighbours"; "unzipped": neighbours that stand in halves in the result
    table       "full": a number for each element; "half": the same, of which the first half is read; "pairs": a number for each pair
    complex     whether one table of complex numbers holds cosines and sines
    heads       the dimension that counts heads, unless unsqueeze_dim says so
    negative    whether the angle is negative
    partial     which elements of a head a narrower table rotates: "first" or "last", or "" if none
    unbatched   whether (S, H, D) with tables (S, R) is taken too
    keeps       whether the result has the dtype of what is rotated, whatever dtype the tables have
    one_table   whether tables (S, R) for all of a batch are taken too, where unsqueeze_dim counts one dimension less
    """

    arguments: tuple[str, ...]
    rotated: tuple[str, ...]
    pairs: str
    table: str
    complex: bool
    heads: int
    negative: bool = False
    partial: str = ""
    unbatched: bool = False
    keeps: bool = False
    one_table: bool = False

    def tables(self, given: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, of each element or of each pair."""
        if self.complex:
            cos, sin = torch.view_as_real(given[self.arguments[len(self.rotated)]]).unbind(-1)
        else:
            cos, sin = given["cos"], given["sin"]
        if self.table == "half":
            cos, sin = (t[..., : t.shape[-1] // 2] for t in (cos, sin))
        return cos, -sin if self.negative else sin

    def width(self, cos: torch.Tensor) -> int:
        """Return how many elements of a head are rotated by tables as ``tables`` returns them."""
        return cos.shape[-1] * (1 if self.table == "full" else 2)


def takes_tables(function: object) -> bool:
    """Return whether a function's arguments are named like those of a rotary function."""
    if not inspect.isfunction(function):
        return False
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    rotated = _rotated(names)
    return bool(rotated) and (set(names[len(rotated) : len(rotated) + 2]) == {"cos", "sin"} or names[len(rotated) :][:1] in (("freqs_cis",), ("freqs_ci",)))


def _rotated(names: tuple[str, ...]) -> tuple[str, ...]:
    count = next((i for i, name in enumerate(names) if name not in _ROTATED), len(names))
    return names[:count] if count in (1, 2) else ()


@cache
def form_of(function: Callable) -> Form | None:
    """Return the form of a rotary function, or None if it computes something else. Its last arguments are optional."""
    names = tuple(inspect.signature(function).parameters)
    rotated = _rotated(names)
    is_complex = names[len(rotated)].startswith("freqs")
    default = inspect.signature(function).parameters["unsqueeze_dim"].default if "unsqueeze_dim" in names else None
    for heads in (default,) if default in (1, 2) else (1, 2):
        for pairs, table, negative in product(("halves", "neighbours", "unzipped"), ("full", "half", "pairs"), (False, True)):
            form = Form(names, rotated, pairs, table, is_complex, heads, negative)
            if (pairs, table) != ("unzipped", "full") and (table == "pairs" or not is_complex) and _computes(form, function, _WIDTH):
                parts = (replace(form, partial=part) for part in ("first", "last"))
                form = next((part for part in parts if _computes(part, function, _WIDTH + 4)), form)
                return replace(form, unbatched=_unbatched(form, function), keeps=_keeps(form, function), one_table=_one_table(form, function))
    return None


def _trial(form: Form, width: int, dtype: torch.dtype, table_dtype: torch.dtype) -> dict:
    shape = (2, 3, 5, width) if form.heads == 1 else (2, 5, 3, width)
    numbers = _WIDTH // 2 if form.table == "pairs" else _WIDTH
    cos, sin = (normal(2, 5, numbers, seed=seed).to(table_dtype) for seed in (2, 3))
    given = {name: normal(*shape, seed=seed).to(dtype) for seed, name in enumerate(form.rotated)}
    return given | ({form.arguments[len(form.rotated)]: torch.complex(cos, sin)} if form.complex else {"cos": cos, "sin": sin})


def _outputs(form: Form, function: Callable, given: dict) -> tuple:
    names = form.arguments[: len(form.rotated) + (1 if form.complex else 2)]
    result = output_of(function, *[given[name] for name in names])
    return result if isinstance(result, tuple) and len(form.rotated) == 2 else (result,)


def _computes(form: Form, function: Callable, width: int) -> bool:
    given = _trial(form, width, torch.float64, torch.float64)
    found = _outputs(form, function, given)
    return len(found) == len(form.rotated) and all(same(y, in_torch(form, given[name], given)) for y, name in zip(found, form.rotated))


def _unbatched(form: Form, function: Callable) -> bool:
    """Return whether the function computes the same of (S, H, D) and (S, R)."""
    width = _WIDTH + (4 if form.partial else 0)
    form, given = replace(form, heads=2), _trial(replace(form, heads=2), width, torch.float64, torch.float64)
    found = _outputs(form, function, {name: x[0] for name, x in given.items()})
    return len(found) == len(form.rotated) and all(same(y, in_torch(form, given[name], given)[0]) for y, name in zip(found, form.rotated))


def _one_table(form: Form, function: Callable) -> bool:
    """Return whether the function computes the same of (B, H, S, D) and (S, R) with unsqueeze_dim=0, and of (B, S, H, D) with 1."""
    if "unsqueeze_dim" not in form.arguments or form.complex:
        return False
    for at in (1, 2):
        like = replace(form, heads=at)
        given = _trial(like, _WIDTH + (4 if form.partial else 0), torch.float64, torch.float64)
        given |= {name: given[name][:1] for name in ("cos", "sin")}
        turned = [given[name] for name in form.rotated]
        found = output_of(partial(function, cos=given["cos"][0], sin=given["sin"][0], unsqueeze_dim=at - 1), *turned)
        found = found if isinstance(found, tuple) and len(form.rotated) == 2 else (found,)
        if len(found) != len(turned) or not all(same(y, in_torch(like, x, given)) for y, x in zip(found, turned)):
            return False
    return True


def with_batch(form: Form, given: dict) -> dict:
    """Return the arguments of a call with tables (S, R) as those of one with tables (1, S, R); other calls as they are."""
    tensors, at = [given.get(name) for name in ("cos", "sin", form.rotated[0])], given.get("unsqueeze_dim", form.heads)
    dims = [t.dim() for t in tensors if isinstance(t, torch.Tensor) and not t.is_nested]
    if not form.one_table or dims != [2, 2, 4] or type(at) is not int or at not in (0, 1):
        return given
    return given | {"cos": given["cos"][None], "sin": given["sin"][None], "unsqueeze_dim": at + 1}


def _keeps(form: Form, function: Callable) -> bool:
    """Return whether bfloat16 stays bfloat16 with float32 tables, which are not rounded before: the result is as near as its dtype allows."""
    given = _trial(form, _WIDTH, torch.bfloat16, torch.float32)
    found = _outputs(form, function, given)
    for y, name in zip(found, form.rotated):
        if not isinstance(y, torch.Tensor) or y.dtype != torch.bfloat16:
            return False
        exact = in_torch(form, given[name].float(), given)
        if (y - exact).norm() > 1.05 * (exact.bfloat16() - exact).norm():
            return False
    return len(found) == len(form.rotated)


def batched(form: Form, given: dict) -> tuple[Form, dict]:
    """Return the form and the arguments of a call with a batch of one, where it has none."""
    tensors = {name: x.unsqueeze(0) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    return replace(form, heads=2, unbatched=False), tensors


def in_torch(form: Form, x: torch.Tensor, given: dict) -> torch.Tensor:
    """Compute the form in torch."""
    cos, sin = (t.unsqueeze(form.heads) for t in form.tables(given))
    size = form.width(cos)
    if form.partial == "last" and size < x.shape[-1]:
        return torch.cat((x[..., :-size], in_torch(form, x[..., -size:], given)), -1)
    turned, rest = x[..., :size], x[..., size:]
    a, b = turned.chunk(2, -1) if form.pairs == "halves" else (turned[..., 0::2], turned[..., 1::2])
    if form.table != "full":
        (c, d), (s, t) = (cos, cos), (sin, sin)
    elif form.pairs == "halves":
        (c, d), (s, t) = cos.chunk(2, -1), sin.chunk(2, -1)
    else:
        (c, d), (s, t) = (cos[..., 0::2], cos[..., 1::2]), (sin[..., 0::2], sin[..., 1::2])
    both = a * c - b * s, b * d + a * t
    return torch.cat((torch.stack(both, -1).flatten(-2) if form.pairs == "neighbours" else torch.cat(both, -1), rest), -1)


def why_not(form: Form, given: dict) -> str | None:
    """Return why the op does not take a call with these arguments, which are complete, or None."""
    own = (*form.rotated, *form.arguments[len(form.rotated) : len(form.rotated) + (1 if form.complex else 2)])
    if any(value is not None and name not in (*own, "unsqueeze_dim") for name, value in given.items()):
        return "arguments other than q, k, cos and sin"
    heads = given.get("unsqueeze_dim", form.heads)
    if heads not in (1, 2):
        return "heads that are not dimension 1 or 2"
    if any(given.get(name) is None for name in own):
        return "no k, cos or sin"
    if form.complex and (not plain(given[own[-1]]) or given[own[-1]].dtype != torch.complex64):
        return "a table that is not complex64"
    turned, (cos, sin) = [given[name] for name in form.rotated], form.tables(given)
    for x in (*turned, cos, sin):
        if (reason := unsupported(x)) is not None:
            return reason
    first = turned[0]
    dtypes = {x.dtype for x in (*turned, cos, sin)}
    if len({x.device for x in (*turned, cos, sin)}) > 1 or len(dtypes) > 1 and not (form.keeps and _tables_differ(turned, cos, sin)):
        return "q, k, cos and sin of different dtypes or devices"
    if any(x.dim() != 4 or x.shape[0] != first.shape[0] or x.shape[3 - heads] != first.shape[3 - heads] or x.shape[3] != first.shape[3] for x in turned):
        return "q and k that are not (B, H, S, D) and (B, G, S, D)"
    if cos.dim() != 3 or cos.shape != sin.shape or cos.shape[0] not in (1, first.shape[0]) or cos.shape[1] != first.shape[3 - heads]:
        return "cos and sin that are not (B, S, D)"
    size = form.width(cos)
    if size > first.shape[3] or size < first.shape[3] and not form.partial or size % 2:
        return "cos and sin that are not (B, S, D)"
    return None


def _tables_differ(turned: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Return whether the tables, of one dtype, are all that differs in dtype."""
    return len({x.dtype for x in turned}) == 1 and cos.dtype == sin.dtype == torch.float32 and turned[0].dtype in KERNEL_DTYPES


def by_op(form: Form, given: dict) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Compute a call that ``why_not`` has nothing against, by the ops."""
    heads, (cos, sin) = given.get("unsqueeze_dim", form.heads), form.tables(given)
    turned = [given[name] for name in form.rotated]
    whole = form.width(cos) == turned[0].shape[3]
    if len(turned) == 2 and whole and heads == 1 and (form.pairs, form.table) == ("halves", "full") and cos.dtype == turned[0].dtype:
        from dtkernels import ops

        return ops.rope(*turned, cos, sin)
    found = tuple(_one_by_op(form, x, cos, sin, heads) for x in turned)
    return found if len(found) == 2 else found[0]


def _one_by_op(form: Form, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> torch.Tensor:
    from dtkernels import ops

    size, paired = form.width(cos), form.table != "full"
    if form.partial == "last" and size < x.shape[3]:
        return torch.cat((x[..., :-size], _one_by_op(form, x[..., -size:], cos, sin, heads)), -1)
    if form.pairs == "neighbours":
        return ops.rotary(x, cos, sin, interleaved=True, paired=paired, heads=heads)
    if paired and size == x.shape[3]:
        return ops.rotary_pairs(x, cos, sin, interleaved=form.pairs == "unzipped", heads=heads)
    if paired:
        cos, sin = (torch.cat((t, t), -1) for t in (cos, sin))
    return ops.rotary(x, cos, sin, heads=heads)


def complete(form: Form, args: tuple, kwargs: dict) -> dict | None:
    """Return the arguments of a call by name; None for one that the function would refuse."""
    if len(args) > len(form.arguments) or kwargs.keys() - set(form.arguments) or kwargs.keys() & set(form.arguments[: len(args)]):
        return None
    return dict(zip(form.arguments, args)) | kwargs


def rotary_functions(function: Callable) -> Iterator[tuple[str, Callable]]:
    """Yield the names and values of the globals that a function uses and that are rotary functions by their arguments."""
    for name in function.__code__.co_names:
        if takes_tables(found := function.__globals__.get(name)):
            yield name, cast(Callable, found)
