"""Adapt our losses to the signatures of Liger's autograd functions."""

from __future__ import annotations

import torch

from dtkernels import ops

from .adapters import NoCounterpart, like, only


def _valid(target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    return (target != ignore_index).sum()


def _per_row(rows: torch.Tensor, reduction: str, count: torch.Tensor | int) -> torch.Tensor:
    """Reduce as Liger does: it gives 0 where every row is ignored."""
    if reduction == "none":
        return rows
    return rows.sum() if reduction == "sum" else rows.sum() / (count.clamp(min=1) if isinstance(count, torch.Tensor) else count)


def cross_entropy(logits, target, weight, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean", softcap=None, return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False):  # fmt: skip  # noqa: E501
    more = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
    if weight is None and softcap is None and not lse_square_scale:
        loss = ops.cross_entropy(logits, target, **more)
    else:
        loss = ops.weighted_cross_entropy(logits, target, weight, softcap=softcap, z_loss=lse_square_scale, **more)
    if reduction == "mean":
        loss = torch.where(_valid(target, ignore_index) == 0, 0, loss)
    z_loss = None
    if return_z_loss:
        with torch.no_grad():
            z_loss = like(logits, loss - ops.weighted_cross_entropy(logits, target, weight, softcap=softcap, **more))
    accuracy = predicted = None
    if return_token_accuracy or return_predicted_tokens:
        predicted = torch.where(target == ignore_index, -1, logits.argmax(-1))
        hits = ((predicted == target) & (target != ignore_index)).float()
        accuracy = _per_row(hits, "none" if reduction == "none" else "mean", _valid(target, ignore_index)) if return_token_accuracy else None
    return like(logits, loss), z_loss, accuracy, predicted if return_predicted_tokens else None


def fused_linear_cross_entropy(hidden, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False, return_token_accuracy=False, return_predicted_tokens=False):  # fmt: skip  # noqa: E501
    only(ce_weight=(ce_weight, None), return_token_accuracy=(return_token_accuracy, False), return_predicted_tokens=(return_predicted_tokens, False))
    more = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "softcap": softcap}
    if not use_token_scaling and not return_z_loss:
        return like(hidden, ops.linear_cross_entropy(hidden, weight, target, bias, z_loss=lse_square_scale, reduction=reduction, **more)), None, None, None
    rows = ops.linear_cross_entropy(hidden, weight, target, bias, z_loss=lse_square_scale, reduction="none", **more)
    if use_token_scaling:
        with torch.no_grad():
            share = torch.exp(-ops.linear_cross_entropy(hidden, weight, target, bias, ignore_index=ignore_index, softcap=softcap, reduction="none"))
        rows = rows * share
    count = _valid(target, ignore_index)
    z_loss = None
    if return_z_loss:
        with torch.no_grad():
            plain = ops.linear_cross_entropy(hidden, weight, target, bias, reduction="none", **more)
            z_loss = like(hidden, _per_row(rows - plain, reduction, count))
    return like(hidden, _per_row(rows, reduction, count)), z_loss, None, None


def fused_linear_scaled_cross_entropy(hidden, weight, target, temperature=1.0, ignore_index=-100, m_tiles_per_cluster=1, return_entropy=False):
    valid = target != ignore_index
    found = ops.linear_logprobs(hidden, weight, target.masked_fill(~valid, 0), temperature=temperature)
    loss = torch.where(valid, -found.logprobs, 0)
    return (loss, like(hidden, torch.where(valid, found.entropy, 0))) if return_entropy else loss


def kl_div(predicted, truth, reduction="batchmean", log_target=False, eps=1e-10):
    only(reduction=(reduction == "none", False))
    total = ops.kl_divergence(predicted, truth, inputs="log_probs", log_target=log_target, reduction="sum")
    return like(predicted, {"sum": total, "batchmean": total / predicted.shape[0], "mean": total / predicted.numel()}[reduction])


def jsd(student, teacher, shift_labels=None, beta=0.5, ignore_index=-100):
    more = {"inputs": "log_probs", "reduction": "none", "target": shift_labels, "ignore_index": ignore_index}
    if beta in (0, 1):
        rows = ops.kl_divergence(student, teacher, reverse=beta == 1, **more)
    else:
        rows = ops.jsd(student, teacher, beta, **more)
    return like(student, _per_row(rows, "mean", rows.numel() if shift_labels is None else _valid(shift_labels, ignore_index)))


def tvd(p, q, shift_labels=None, reduction="batchmean", ignore_index=-100):
    only(reduction=(reduction == "none", False))
    rows = ops.tvd(p, q, inputs="probs", reduction="none", target=shift_labels, ignore_index=ignore_index)
    count = rows.numel() if shift_labels is None else _valid(shift_labels, ignore_index).clamp(min=1)
    return like(p, {"sum": rows.sum(), "batchmean": rows.sum() / count, "mean": rows.sum() / (count * p.shape[-1])}[reduction])


def fused_linear_jsd(student, student_weight, teacher, teacher_weight, shift_labels=None, jsd_beta=0.5, ignore_index=-100, temperature=1.0, accum_dtype=None):
    more = {"temperature": temperature, "reduction": "none", "target": shift_labels, "ignore_index": ignore_index}
    if jsd_beta in (0, 1):
        rows = ops.linear_kl(student, student_weight, teacher, teacher_weight, reverse=jsd_beta == 1, **more)
    else:
        rows = ops.linear_jsd(student, student_weight, teacher, teacher_weight, beta=jsd_beta, **more)
    return _per_row(rows, "mean", rows.numel() if shift_labels is None else _valid(shift_labels, ignore_index))


def distill_jsd(student, student_weight, teacher, teacher_weight, target, student_bias, teacher_bias, weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, compiled=True, chunk_size=1024, return_soft_hard_loss=False):  # fmt: skip  # noqa: E501
    only(student_bias=(student_bias, None), teacher_bias=(teacher_bias, None))
    soft = fused_linear_jsd(student, student_weight, teacher.detach(), teacher_weight.detach(), target, beta, ignore_index, temperature)
    hard = ops.linear_cross_entropy(student, student_weight, target, ignore_index=ignore_index)
    loss = weight_hard_loss * hard + weight_soft_loss * soft
    return (loss, soft, hard) if return_soft_hard_loss else loss


# -- preference ---------------------------------------------------------------------------------------------------------


def _tokens(hidden, weight, target, bias, ignore_index):
    """Return log-probabilities of tokens and which of them count."""
    counted = target != ignore_index
    return ops.linear_logprobs(hidden, weight, target.masked_fill(~counted, 0), bias).logprobs, counted


def _sequences(logprobs, counted, average):
    total = (logprobs * counted).sum(-1)
    return total / counted.sum(-1) if average else total


@torch.no_grad()
def _mean_logits(hidden, weight, bias):
    """Return the mean of the logits of half a batch, which Liger reports, from sums of hidden states and weights."""
    rows = hidden.float().reshape(-1, hidden.shape[-1])
    mean = (rows.sum(0) @ weight.float().sum(0)) / (rows.shape[0] * weight.shape[0])
    return mean if bias is None else mean + bias.float().mean()


def _paired(loss_of, hidden, weight, target, bias, ignore_index, alpha, nll, nll_target, average, rewards):
    """Return what Liger's paired losses return: the loss, and the metrics in its order. The chosen sequences are the first half."""
    half = target.shape[0] // 2
    logprobs, counted = _tokens(hidden, weight, target, bias, ignore_index)
    means = [_sequences(part, count, average).detach() for part, count in zip(logprobs.split(half), counted.split(half))]
    loss = loss_of(*logprobs.split(half), *counted.split(half))
    chosen_nll = hidden.new_zeros((), dtype=torch.float32)
    if nll:
        labels = (target if nll_target is None else nll_target)[:half]
        chosen_nll = ops.linear_cross_entropy(hidden[:half], weight, labels, bias, ignore_index=ignore_index)
        loss = loss + alpha * chosen_nll
    logits = [_mean_logits(part, weight, bias) for part in hidden.split(half)]
    return loss, (*means, *logits, chosen_nll.detach(), *rewards(*means))


def cpo(hidden, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0, compute_nll_loss=True, compiled=True, average_log_prob=False, chunk_size=1):  # fmt: skip  # noqa: E501
    more = {"beta": beta, "label_smoothing": label_smoothing}

    def loss_of(*t):
        return ops.simpo(*t, gamma=0.0, **more) if average_log_prob else ops.cpo(*t, alpha=0.0, **more)

    return _paired(loss_of, hidden, weight, target, bias, ignore_index, alpha, compute_nll_loss, None, average_log_prob, lambda a, b: (beta * a, beta * b))


def simpo(hidden, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0, compute_nll_loss=False, compiled=True, gamma=0.5, chunk_size=1):  # fmt: skip  # noqa: E501
    def loss_of(*t):
        return ops.simpo(*t, beta=beta, gamma=gamma, label_smoothing=label_smoothing)

    return _paired(loss_of, hidden, weight, target, bias, ignore_index, alpha, compute_nll_loss, None, True, lambda a, b: (beta * a, beta * b))


def orpo(hidden, weight, target, bias=None, ignore_index=-100, beta=0.1, compute_nll_loss=True, nll_target=None, compiled=True, chunk_size=1):
    def loss_of(chosen, rejected, counted, others):  # ours has the negative log-probability of each chosen sequence, Liger's that of all their tokens
        return ops.orpo(chosen, rejected, counted, others, beta=beta) + _sequences(chosen, counted, True).mean()

    def rewards(a, b):
        odds = (a - b) - (torch.log1p(-a.exp()) - torch.log1p(-b.exp()))
        return beta * a, beta * b, torch.nn.functional.logsigmoid(odds).mean(), odds.mean()

    return _paired(loss_of, hidden, weight, target, bias, ignore_index, 1.0, compute_nll_loss, nll_target, True, rewards)


def dpo(hidden, weight, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None, ignore_index=-100, beta=0.1, compute_nll_loss=False, compiled=True, use_ref_model=True, average_log_prob=False, chunk_size=1, loss_type="sigmoid", label_smoothing=0.0, discopop_tau=0.05, alpha=1.0):  # fmt: skip  # noqa: E501
    if loss_type == "ipo":
        raise NotImplementedError("loss_type='ipo' is not yet supported")
    only(loss_type=(loss_type, "sigmoid"), label_smoothing=(label_smoothing, 0.0))
    half = target.shape[0] // 2
    references = [torch.zeros(target.shape, device=hidden.device)] * 1
    if use_ref_model:
        with torch.no_grad():
            references = [_tokens(ref_input, ref_weight, target, ref_bias, ignore_index)[0]]
    first, second = references[0].split(half)

    def loss_of(chosen, rejected, counted, others):
        if average_log_prob:
            return ops.simpo(chosen - first, rejected - second, counted, others, beta=beta, gamma=0.0)
        return ops.dpo(chosen, rejected, first, second, counted, others, beta=beta)

    counted = (target != ignore_index).split(half)
    away = [_sequences(r, c, average_log_prob) for r, c in zip((first, second), counted)]
    return _paired(loss_of, hidden, weight, target, bias, ignore_index, alpha, compute_nll_loss, None, average_log_prob, lambda a, b: (beta * (a - away[0]), beta * (b - away[1])))


def kto(hidden, weight, target, preference_labels, bias=None, ref_input=None, ref_weight=None, ref_bias=None, kl=None, ignore_index=-100, beta=0.1, compiled=True, use_ref_model=True, average_log_prob=False, chunk_size=1):  # fmt: skip  # noqa: E501
    only(average_log_prob=(average_log_prob, False))
    if isinstance(kl, torch.Tensor) and kl.numel() > 1:
        raise NoCounterpart("a reference point for each sequence")
    logprobs, counted = _tokens(hidden, weight, target, bias, ignore_index)
    reference = torch.zeros_like(logprobs)
    if use_ref_model:
        with torch.no_grad():
            reference = _tokens(ref_input, ref_weight, target, ref_bias, ignore_index)[0]
    good = preference_labels.bool()
    loss = ops.kto(logprobs, reference, counted, good, kl=0.0 if kl is None else kl, beta=beta)
    with torch.no_grad():
        sums = _sequences(logprobs, counted, False)
        each = hidden.float() @ weight.float().sum(0) + (0 if bias is None else bias.float().sum())
        rewards = beta * (sums - _sequences(reference, counted, False))
        parts = [(v * choice).sum() for v, choice in ((sums, good), (sums, ~good))]
        logits = [(each * choice[:, None]).sum() for choice in (good, ~good)]
        return_of = [(rewards[:, None] * choice[:, None]).sum() for choice in (good, ~good)]
    return loss, (*parts, *logits, *return_of)


def grpo(logits, old, reference, ids, advantages, mask, temperature, beta, eps_low, eps_high, inplace, loss_type="grpo", max_completion_length=None, reduce=True, importance_sampling_level="token", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, vllm_is_ratio=None, delta=None, use_bias_correction_kl=False, num_items_in_batch=None, phi_seq=None):  # fmt: skip  # noqa: E501
    only(importance_sampling_level=(importance_sampling_level, "token"), vllm_is_ratio=(vllm_is_ratio, None), delta=(delta, None))
    only(use_bias_correction_kl=(use_bias_correction_kl, False), num_items_in_batch=(num_items_in_batch, None), phi_seq=(phi_seq, None))
    if loss_type not in ("grpo", "bnpo", "dr_grpo", "dapo"):
        raise NoCounterpart(f"loss_type {loss_type}")
    batch, length = ids.shape
    logprobs = ops.logprobs(logits[:, :-1], ids, temperature=temperature).logprobs
    before = logprobs.detach() if old is None else old.float()
    counted = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    column = [t.reshape(-1, 1) for t in (logprobs, before, counted)]  # a sequence of one token each: the loss of each token
    more = {} if not beta else {"reference": reference.float().reshape(-1, 1), "beta": beta}
    each = ops.grpo(*column, advantages.float().repeat_interleave(length), epsilon=eps_low, epsilon_high=eps_high, reduction="none", **more).reshape(batch, length)
    with torch.no_grad():
        ratio, gain = (logprobs - before).exp(), advantages[:, None]
        clipped = (((ratio < 1 - eps_low) & (gain < 0)) | ((ratio > 1 + eps_high) & (gain > 0))) & counted
        away = reference.float() - logprobs if beta else None
        distance = None if away is None else (away.exp() - away - 1) * counted
    if not reduce:
        return each, distance, clipped.float()
    tokens = counted.sum().clamp(min=1)
    loss = {
        "grpo": lambda: (each.sum(-1) / counted.sum(-1).clamp(min=1)).mean(),
        "bnpo": lambda: each.sum() / tokens, "dapo": lambda: each.sum() / tokens,
        "dr_grpo": lambda: each.sum() / (batch * (max_completion_length or length)),
    }[loss_type]()  # fmt: skip
    return loss, None if distance is None else distance.sum() / tokens, clipped.sum() / tokens
