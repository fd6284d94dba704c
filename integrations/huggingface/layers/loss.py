"""Patch the loss of causal language models: `model.loss_function` of the instance computes cross entropy by the op.

The op reads 16-bit logits directly and computes in float32; transformers' own function makes a float32 copy first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from ..patching.call_stats import CallRecord
from ..patching.forward_patching import taken, unsupported, without_autocast
from ..patching.report import ALREADY, PATCHED, SKIPPED, WOULD_PATCH, PatchReport
from ..patching.source_inspection import names_in

_SLOT = "_loss_function"  # transformers' property `loss_function` looks here first


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
    reason = unsupported(logits) or (None if logits.shape[-1] == vocab_size else "logits wider than the vocabulary")
    target = shift_labels
    if reason is None and target is None and labels is not None:
        target = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    if reason is None and (target is None or target.shape != logits.shape[:-1]):
        reason = "no labels" if target is None else "labels of another shape than the logits"
    record.count(reason, logits)
    if reason is not None or target is None or torch.compiler.is_compiling():
        more = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index, "shift_labels": shift_labels}
        return original(logits, labels, vocab_size, **more, **kwargs)
    from dtkernels import ops

    with without_autocast(logits.device.type):
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = ops.cross_entropy(logits, target.contiguous().to(logits.device), ignore_index=ignore_index, reduction=reduction)
    if num_items_in_batch is None:
        return loss
    return loss / (num_items_in_batch.to(loss.device) if torch.is_tensor(num_items_in_batch) else num_items_in_batch)


def patch_cross_entropy(model: nn.Module, report: PatchReport) -> None:
    """Patch the loss function of every transformers model inside `model` that has a causal language model's loss."""
    try:
        from transformers import PreTrainedModel
        from transformers.loss.loss_utils import ForCausalLMLoss
    except ImportError:
        return  # no transformers model here, or one with a loss function of its own
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and "loss_function" in names_in(type(module)):
            _patch(name, module, ForCausalLMLoss, report)


def _patch(name: str, module: nn.Module, causal: Callable, report: PatchReport) -> None:
    current = vars(module).get(_SLOT)
    if isinstance(current, partial) and current.func is causal_loss:
        report.add(name, "cross_entropy", ALREADY, record=current.args[0])
        return
    if module.loss_function is not causal:
        return  # another loss is not this op
    if (reason := taken(module, type(module))) is not None:  # a replaced forward need not call the loss function at all
        report.add(name, "cross_entropy", SKIPPED, reason)
    elif report.dry_run:
        report.add(name, "cross_entropy", WOULD_PATCH)
    else:
        ours = partial(causal_loss, CallRecord(), causal)
        report.on_undo(partial(_restore, weakref.ref(module), _SLOT in vars(module), current, ours))
        vars(module)[_SLOT] = ours
        report.add(name, "cross_entropy", PATCHED, record=ours.args[0])


def _restore(ref: weakref.ref, held: bool, original: Callable | None, ours: partial) -> None:
    module = ref()
    if module is None or vars(module).get(_SLOT) is not ours:
        return
    if held:
        vars(module)[_SLOT] = original
    else:
        del vars(module)[_SLOT]
