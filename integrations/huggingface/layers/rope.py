"""Patch rotary embeddings: modules whose forward calls a function of its modeling file with q, k, cos and sin, or the like.

That function is a global of the file, shared by every model. The instance gets a forward with the same code and the file's
globals, except that the names of such functions are bound to the op. Neither the file nor the class changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial
from typing import cast

import torch
from torch import nn

from ..patching.call_stats import CallRecord
from ..patching.forward_copies import Globals, copied, layers_of, redecorated
from ..patching.forward_patching import replace_forward, taken
from ..patching.report import PatchReport
from .rotary_forms import Form, batched, by_op, complete, form_of, rotary_functions, why_not, with_batch

_record: ContextVar[CallRecord | None] = ContextVar("record of the attention module that runs", default=None)


class Rebound:
    """The forward of a class with some globals, rotary functions, bound to the op; ``function`` is the new forward. ``originals``: name -> function."""

    def __init__(self, cls: type[nn.Module], originals: dict[str, Callable]):
        self.cls, self.originals = cls, originals
        self.forward = cls.forward
        *decorators, forward = layers_of(cls.forward)
        self.scope: dict = forward.__globals__
        own = {name: partial(rotated, original, cast(Form, form_of(original))) for name, original in originals.items()}
        self.function = redecorated(decorators, copied(forward, Globals(own, self.scope), forward.__closure__))

    def __reduce__(self):
        return rebound, (self.cls,)  # functions with globals of their own cannot be pickled: they are made anew

    def changed(self) -> str | None:
        """Return why the rebound forward is outdated: another rotary function, or another class forward. Else None."""
        if any(self.scope.get(name) is not original for name, original in self.originals.items()):
            return "its modeling file has another rotary function now"
        return None if self.cls.forward is self.forward else "its class has another forward now"


def rope_forward(record: CallRecord, module: nn.Module, bound: Rebound, *args, **kwargs):
    """Run the module's own forward with q and k rotated by the op; arguments and result as before."""
    if torch.compiler.is_compiling():
        return type(module).forward(module, *args, **kwargs)
    if (reason := bound.changed()) is not None:
        record.count(reason)
        return type(module).forward(module, *args, **kwargs)
    token = _record.set(record)
    try:
        return bound.function(module, *args, **kwargs)
    finally:
        _record.reset(token)


def rotated(original: Callable, form: Form, *args, **kwargs):
    """Rotate as ``form`` says. Unsupported calls go to the modeling file's function and are counted.

    Some of these functions rotate q alone, for the indexer of sparse attention.
    """
    given = complete(form, args, kwargs)
    first = None if given is None else given.get(form.rotated[0])
    single = form.unbatched and isinstance(first, torch.Tensor) and not first.is_nested and first.dim() == 3
    if given is not None and single:
        form, given = batched(form, given)
    elif given is not None:
        given = with_batch(form, given)
    reason = "arguments other than q, k, cos and sin" if given is None else why_not(form, given)
    if (record := _record.get()) is not None:
        record.count(reason, first)
    if given is None or reason is not None:
        return original(*args, **kwargs)
    found = by_op(form, given)
    if not single:
        return found
    return found.squeeze(0) if isinstance(found, torch.Tensor) else tuple(x.squeeze(0) for x in found)


def patch_rope(model: nn.Module, report: PatchReport) -> None:
    """Patch every module of `model` that rotates elements of its queries and keys against each other."""
    for name, module in model.named_modules():
        cls = type(module)
        forward = inspect.unwrap(cls.forward)
        functions = dict(rotary_functions(forward)) if inspect.isfunction(forward) else {}
        if functions:
            bound = rebound(cls)
            reason = _why_not_replaceable(cls, functions) if bound is None else taken(module, cls)
            if bound is not None or reason is not None:  # a function that computes something else is not this op
                own = partial(rope_forward, CallRecord(), module, cast(Rebound, bound))  # not installed where there is a reason
                replace_forward(name, module, "rope", own, reason, report)


def rebound(cls: type[nn.Module]) -> Rebound | None:
    """Return the forward of a class with its rotary functions replaced; None if it has none that an op computes."""
    layers = layers_of(cls.forward)
    functions = tuple((name, function) for name, function in rotary_functions(layers[-1]) if form_of(function) is not None) if layers else ()
    return _make_rebound(cast(type, cls), functions, cls.forward) if functions else None


@cache
def _make_rebound(cls: type[nn.Module], functions: tuple[tuple[str, Callable], ...], forward: Callable) -> Rebound:
    return Rebound(cls, dict(functions))


def _why_not_replaceable(cls: type[nn.Module], functions: dict[str, Callable]) -> str | None:
    """Return why the functions cannot be examined or replaced; None if they compute something else."""
    if not layers_of(cls.forward):
        return f"{cls.__name__}.forward is wrapped by a decorator that cannot be copied"
    for name, function in functions.items():
        if function.__module__.partition(".")[0] != cls.__module__.partition(".")[0]:
            return f"{name} was already replaced by somebody else"
    return None
