"""Patch the last layer and the loss of causal language models: in training the loss is computed without the matrix of logits.

The last layer returns a LazyLogits, which holds the hidden states. The loss function computes from those. `outputs.logits` keeps its
meaning: whatever reads it makes the logits then, with their gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ..patching.call_stats import CallRecord
from ..patching.forward_patching import replace_forward, taken, without_autocast
from ..patching.replacements import Noted, put
from ..patching.report import ALREADY, SKIPPED, PatchReport
from ..patching.source_inspection import names_in
from .last_layer_forms import Parts, learns, parts_of, why_skipped
from .loss import _SLOT, causal_loss

OP = "linear_cross_entropy"


class LazyLogits(torch.Tensor):
    """Logits [..., V] that are made when something reads them. Scaled, capped or cast they stay unmade."""

    parts: Parts
    made: torch.Tensor | None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _OF_THE_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _FIXED:
            return _FIXED[func]
        if args and (more := _step(func, args, kwargs)) is not None:
            return more
        if func is torch.Tensor.register_hook and args[0].made is None and _before_backward(args[1]):
            return None  # of FSDP2, which gathers weights for the backward of this layer; the loss needs the one that is there
        return func(*_made(args), **_made(kwargs))

    @property
    def placements(self) -> tuple:
        """The layout of logits that are a DTensor. While they are unmade it equals no other one, so that the hooks of tensor parallelism ask for theirs."""
        return () if self.made is None and self.parts.layout else made(self).placements

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:
        """Return the logits in another layout of their mesh."""
        wanted = kwargs.get("placements")
        if self.made is not None or args or not self.parts.layout or wanted is None or not all(p.is_replicate() for p in wanted):
            return made(self).redistribute(*args, **kwargs)
        step = (_redistributed, (_SELF,), kwargs)
        return lazy_logits(replace(self.parts, layout="whole", steps=(*self.parts.steps, step)), self.dtype)

    def to_local(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's part of the logits, which is all of them once they are whole."""
        if self.made is not None or args or kwargs or self.parts.layout != "whole":
            return made(self).to_local(*args, **kwargs)
        return lazy_logits(replace(self.parts, layout="", steps=(*self.parts.steps, (_local, (_SELF,), {}))), self.dtype)


def lazy_logits(parts: Parts, dtype: torch.dtype) -> LazyLogits:
    """Return logits that hold their parts; their own memory is one element."""
    shape = (*parts.hidden.shape[:-1], parts.weight.shape[0])
    lazy: Any = torch.zeros((), dtype=dtype, device=parts.hidden.device).expand(shape).as_subclass(LazyLogits)
    lazy.parts, lazy.made = parts, None
    return lazy


def made(logits: Any) -> Any:
    """Return logits as a tensor of torch's own class."""
    if not isinstance(logits, LazyLogits):
        return logits
    if logits.made is None:
        logits.made = logits.parts.logits(_SELF)
    return logits.made


def head_forward(record: CallRecord, module: nn.Module, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute the logits, in training lazily. Calls that the op does not support take the instance's forward before, or the class's own."""
    original = record.before
    if learns(module, input) and not torch.compiler.is_compiling():
        parts = "more arguments" if args or kwargs else parts_of(module, input, original)
        if isinstance(parts, Parts):
            return lazy_logits(parts, parts.hidden.dtype)
        record.count(parts, input)
    return original(input, *args, **kwargs) if original is not None else type(module).forward(module, input, *args, **kwargs)


@dataclass
class LossNote(Noted):
    """What a replaced loss function replaced, and the record of the last layer, which counts both."""

    record: CallRecord
    before: Any = None


def head_loss(
    note: LossNote,
    original: Callable,
    logits: Any,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor:
    """Return the mean cross entropy of the next token, or its sum over `num_items_in_batch`, like transformers' ForCausalLMLoss.

    From LazyLogits it is computed without logits. Anything else goes to the loss by the op on logits that was there before, or to ``original``, transformers' own.
    """
    record, original = note.record, note.before or original
    reason = None
    if not isinstance(logits, LazyLogits):
        reason = ""  # counted where the last layer ran, if at all
    elif logits.made is not None:
        reason = "the model reads the logits"
    elif labels is None and shift_labels is None or logits.shape[-1] != vocab_size:
        reason = "no labels" if labels is None else "logits wider than the vocabulary"
    target = shift_labels if shift_labels is not None else labels
    if reason is None and target is not None and target.shape != logits.shape[:-1]:
        reason = "labels of another shape than the logits"
    if reason or (reason is None and isinstance(logits, LazyLogits)):
        record.count(reason, logits.parts.hidden)
    if reason is not None or target is None:
        more = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index, "shift_labels": shift_labels}
        return original(made(logits), labels, vocab_size, **more, **kwargs)
    loss = _linear_loss(logits.parts, target.to(logits.device), shift_labels is None, ignore_index, "mean" if num_items_in_batch is None else "sum")
    if num_items_in_batch is None:
        return loss
    return loss / (num_items_in_batch.to(loss.device) if torch.is_tensor(num_items_in_batch) else num_items_in_batch)


def _linear_loss(parts: Parts, target: torch.Tensor, shift: bool, ignore_index: int, reduction: str) -> torch.Tensor:
    from dtkernels import ops

    hidden, bias, inner = parts.hidden, parts.bias, parts.scale if parts.outer is None else parts.scale * parts.outer
    more: dict[str, Any] = {} if (lora := parts.low_rank()) is None else {"lora": lora}
    if not math.isclose(inner, 1.0, rel_tol=1e-9):  # inner * (h W^T + b), which the cap divides by ``outer``
        hidden, bias = hidden * inner, None if bias is None else bias * inner
        more = {} if lora is None else {"lora": (lora[0] * inner, lora[1])}
    with without_autocast(hidden.device.type):
        loss = ops.linear_cross_entropy(
            hidden, parts.weight, target, bias, softcap=parts.outer, ignore_index=ignore_index, reduction=reduction, shift=shift, **more
        )
    return loss.to_local() if hasattr(loss, "to_local") else loss


def _step(func: Callable, args: tuple, kwargs: dict) -> LazyLogits | None:
    """Return the logits after a step that a Parts holds, else None."""
    logits = next((arg for arg in args if isinstance(arg, LazyLogits)), None)
    if logits is None or logits.made is not None or func not in _KINDS:
        return None
    kind, parts, number, dtype = _KINDS[func], logits.parts, args[-1], logits.dtype
    if kind == "cast":
        dtype = torch.float32 if func is torch.Tensor.float else number
        if dtype not in (torch.float32, logits.dtype) or kwargs or len(args) > 2:
            return None
    elif kind == "tanh":
        if parts.outer is not None or kwargs or len(args) != 1:
            return None
        parts = replace(parts, outer=1.0)
    else:
        number = next((arg for arg in args if arg is not logits), None)
        if not isinstance(number, (int, float)) or number <= 0 or kwargs or len(args) != 2 or (kind == "/" and args[0] is not logits):
            return None
        factor = float(number) if kind == "*" else 1 / number
        parts = replace(parts, scale=parts.scale * factor) if parts.outer is None else replace(parts, outer=parts.outer * factor)
    taken_by = tuple(_SELF if arg is logits else arg for arg in args)
    return lazy_logits(replace(parts, steps=(*parts.steps, (func, taken_by, kwargs))), dtype)


def _made(given: Any) -> Any:
    """Replace each LazyLogits among arguments by the logits."""
    if isinstance(given, LazyLogits):
        return made(given)
    if type(given) in (list, tuple):
        return type(given)([_made(one) for one in given])
    return {name: _made(one) for name, one in given.items()} if type(given) is dict else given


def patch_last_layer(model: nn.Module, report: PatchReport) -> None:
    """Patch the last layer and the loss function of every causal language model of transformers inside `model`."""
    try:
        from transformers import PreTrainedModel
        from transformers.loss.loss_utils import ForCausalLMLoss
    except ImportError:
        return
    names = {id(module): name for name, module in model.named_modules()}
    for name, module in model.named_modules():
        if not isinstance(module, PreTrainedModel) or "loss_function" not in names_in(type(module)):
            continue
        current = vars(module).get(_SLOT)
        head = module.get_output_embeddings()
        if isinstance(current, partial) and current.func is head_loss:
            report.add(name, OP, ALREADY, record=current.args[0].record)
        elif head is not None and (module.loss_function is ForCausalLMLoss or isinstance(current, partial) and current.func is causal_loss):
            _patch(module, names.get(id(head), ""), head, report)


def _patch(module: nn.Module, head_name: str, head: nn.Module, report: PatchReport) -> None:
    reason = taken(module, type(module)) or why_skipped(head)
    if reason is not None:
        report.add(head_name, OP, SKIPPED, reason)
        return
    record = CallRecord()
    replace_forward(head_name, head, OP, partial(head_forward, record, head), None, report)
    if not report.dry_run:
        below = vars(module).get(_SLOT)  # of a report that may be undone first
        original = below.args[1] if isinstance(below, partial) else cast(Callable, module.loss_function)
        put(module, _SLOT, partial(head_loss, LossNote(record), original), report)


def _redistributed(logits: Any, **kwargs: Any) -> Any:
    return logits.redistribute(**kwargs)


def _local(logits: Any) -> Any:
    return logits.to_local()


def _before_backward(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp")


_SELF = object()
_OF_THE_SHAPE = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in "shape dtype device ndim is_cuda is_meta is_cpu layout is_nested is_sparse is_quantized".split()]
    + [getattr(torch.Tensor, name) for name in "dim size numel is_floating_point is_complex is_inference ndimension element_size __len__ __hash__".split()]
)
_FIXED = {getattr(torch.Tensor, name).__get__: value for name, value in (("requires_grad", True), ("is_leaf", False), ("_base", None))}
_KINDS: dict[Callable, str] = {
    **dict.fromkeys([torch.tanh, torch.Tensor.tanh], "tanh"),
    **dict.fromkeys([torch.div, torch.true_divide, torch.Tensor.div, torch.Tensor.__truediv__, torch.Tensor.true_divide], "/"),
    **dict.fromkeys([torch.mul, torch.multiply, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.Tensor.multiply], "*"),
    **dict.fromkeys([torch.Tensor.float, torch.Tensor.to], "cast"),
}
