"""Patch the losses of language models, which the instance then computes by the op: `model.loss_function` of causal ones, and
`CrossEntropyLoss()` where a forward writes it, as those of masked models and of encoder-decoders do.

The op reads 16-bit logits directly and computes in float32; transformers' own function makes a float32 copy first.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from ..patching.call_stats import CallRecord
from ..patching.forward_copies import Globals, copied, layers_of, redecorated
from ..patching.forward_patching import InPlaceOf, in_autocast, replace_forward, taken, unsupported, without_autocast
from ..patching.replacements import put
from ..patching.report import ALREADY, PATCHED, SKIPPED, WOULD_PATCH, PatchReport
from ..patching.source_inspection import names_in

_SLOT = "_loss_function"  # transformers' property `loss_function` looks here first
_WRITTEN = "CrossEntropyLoss"
_record: ContextVar[CallRecord | None] = ContextVar("record of the model whose forward writes its loss", default=None)


class LossByOp(nn.CrossEntropyLoss):
    """torch's CrossEntropyLoss by the op: logits (N, V), targets (N) of int64; other calls are torch's, and all are counted."""

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        reason = _why_not(self, logits, target)
        if (record := _record.get()) is not None:
            record.count(reason, logits)
        if reason is not None:
            return super().forward(logits, target)
        from dtkernels import ops

        autocast = in_autocast(logits.device.type)  # under which torch's is float32
        with without_autocast(logits.device.type):
            options = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing, "reduction": self.reduction}
            loss = ops.cross_entropy(logits, target, **options)
        return loss if autocast else loss.to(logits.dtype)


class _Modules:
    """torch.nn with ``LossByOp`` for its CrossEntropyLoss."""

    CrossEntropyLoss = LossByOp

    def __getattr__(self, name: str) -> object:
        return getattr(nn, name)


# how a forward names the class
_ORIGINALS: dict[str, object] = {_WRITTEN: nn.CrossEntropyLoss, "nn": nn}
_REPLACEMENTS: dict[str, object] = {_WRITTEN: LossByOp, "nn": _Modules()}


def _why_not(loss: nn.CrossEntropyLoss, logits: torch.Tensor, target: torch.Tensor) -> str | None:
    """Return why the op does not take a call of CrossEntropyLoss, or None."""
    for tensor in (logits, target):
        if not isinstance(tensor, torch.Tensor):
            return "arguments that are not tensors"
    if loss.weight is not None:
        return "a loss with weights of classes"
    if (reason := unsupported(logits)) is not None:
        return reason
    if logits.dim() != 2 or target.shape != logits.shape[:1] or target.dtype != torch.int64:
        return "logits that are not (N, V), or targets that are not N classes"
    return "logits and targets on different devices" if target.device != logits.device else None


def written_loss_forward(record: CallRecord, module: nn.Module, *args, **kwargs):
    """Run the module's own forward, in which CrossEntropyLoss is ``LossByOp``; arguments and result as before."""
    found = None if torch.compiler.is_compiling() else _with_our_loss(cast(type, type(module)), type(module).forward)
    if found is None:
        return type(module).forward(module, *args, **kwargs)
    function, scope, names = found
    if any(scope.get(name) is not _ORIGINALS[name] for name in names) or nn.CrossEntropyLoss is not _ORIGINALS[_WRITTEN]:
        record.count("its modeling file has another CrossEntropyLoss now")
        return type(module).forward(module, *args, **kwargs)
    token = _record.set(record)
    try:
        return function(module, *args, **kwargs)
    finally:
        _record.reset(token)


@cache
def _with_our_loss(cls: type, forward: Callable) -> tuple[Callable, dict, tuple[str, ...]] | None:
    """Return a class's forward with ``LossByOp`` for CrossEntropyLoss, its file's globals, and the names of those that differ; None where it makes no such loss."""
    layers = layers_of(forward)
    if not layers or _WRITTEN not in layers[-1].__code__.co_names:
        return None
    *decorators, inner = layers
    read = {i.argval for i in dis.get_instructions(inner) if i.opname == "LOAD_GLOBAL"}
    names = tuple(name for name, original in _ORIGINALS.items() if name in read and inner.__globals__.get(name) is original)
    if not names:
        return None
    scope = Globals({name: _REPLACEMENTS[name] for name in names}, inner.__globals__)
    return redecorated(decorators, copied(inner, scope, inner.__closure__)), inner.__globals__, names


def causal_loss(
    record: CallRecord,
    original: Callable,
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor:
    """Return the mean cross entropy of the next token, or its sum over `num_items_in_batch`, like transformers' ForCausalLMLoss.

    logits: (..., S, V); labels: (..., S), shifted here, or shift_labels, shifted already. Returns a float32 scalar.
    """
    target = shift_labels
    if target is None and labels is not None and unsupported(logits) is None:
        target = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    if not _takes(record, logits, target, vocab_size):
        more = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index, "shift_labels": shift_labels}
        return original(logits, labels, vocab_size, **more, **kwargs)
    return _mean_or_sum(logits, cast(torch.Tensor, target), num_items_in_batch, ignore_index)


def masked_loss(
    record: CallRecord,
    original: Callable,
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    **kwargs,
) -> torch.Tensor:
    """Return the mean cross entropy of each token, or its sum over `num_items_in_batch`, like transformers' ForMaskedLMLoss.

    logits: (..., V); labels: (...). Returns a float32 scalar.
    """
    if not _takes(record, logits, labels, vocab_size):
        return original(logits, labels, vocab_size, num_items_in_batch=num_items_in_batch, ignore_index=ignore_index, **kwargs)
    return _mean_or_sum(logits, cast(torch.Tensor, labels), num_items_in_batch, ignore_index)


def _takes(record: CallRecord, logits: torch.Tensor, target: torch.Tensor | None, vocab_size: int) -> bool:
    """Count a call; return whether the op computes it."""
    reason = unsupported(logits) or (None if logits.shape[-1] == vocab_size else "logits wider than the vocabulary")
    if reason is None and (target is None or target.shape != logits.shape[:-1]):
        reason = "no labels" if target is None else "labels of another shape than the logits"
    record.count(reason, logits)
    return reason is None and not torch.compiler.is_compiling()


def _mean_or_sum(logits: torch.Tensor, target: torch.Tensor, items: torch.Tensor | int | None, ignore_index: int) -> torch.Tensor:
    from dtkernels import ops

    with without_autocast(logits.device.type):
        target = target.contiguous().to(logits.device)
        loss = ops.cross_entropy(logits, target, ignore_index=ignore_index, reduction="mean" if items is None else "sum")
    if items is None:
        return loss
    return loss / (items.to(loss.device) if torch.is_tensor(items) else items)


def patch_cross_entropy(model: nn.Module, report: PatchReport) -> None:
    """Patch the loss of every transformers model inside `model` over its vocabulary: its loss_function, or the CrossEntropyLoss in its forward."""
    try:
        from transformers import PreTrainedModel
        from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
    except ImportError:
        return  # no transformers model here, or one with a loss function of its own
    known = {ForCausalLMLoss: causal_loss, ForMaskedLMLoss: masked_loss}
    for name, module in model.named_modules():
        if not isinstance(module, PreTrainedModel):
            continue
        if "loss_function" in names_in(type(module)):
            _patch(name, module, known, report)
        elif _with_our_loss(cast(type, type(module)), type(module).forward) is not None and module.get_output_embeddings() is not None:
            ours = InPlaceOf(written_loss_forward, CallRecord(), module)
            replace_forward(name, module, "cross_entropy", ours, taken(module, type(module)), report)


def _patch(name: str, module: nn.Module, known: dict[Callable, Callable], report: PatchReport) -> None:
    current = vars(module).get(_SLOT)
    if isinstance(current, partial) and current.func in known.values():
        report.add(name, "cross_entropy", ALREADY, record=current.args[0])
        return
    original = cast(Callable, module.loss_function)
    if (by_op := next((ours for theirs, ours in known.items() if theirs is original), None)) is None:
        return  # another loss is not this op
    if (reason := taken(module, type(module))) is not None:  # a replaced forward need not call the loss function at all
        report.add(name, "cross_entropy", SKIPPED, reason)
    elif report.dry_run:
        report.add(name, "cross_entropy", WOULD_PATCH)
    else:
        ours = partial(by_op, CallRecord(), original)
        put(module, _SLOT, ours, report)
        report.add(name, "cross_entropy", PATCHED, record=ours.args[0])
