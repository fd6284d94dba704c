"""Patch a model with `apply_to(model)`, the public entry. Each op has one patcher; this file selects, runs and undoes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn

from .attention import attention_patch
from .generation.graph_patch import patch_graphs
from .layers import activations, dense_experts, gated_mlp, last_layer, linear_chains, loss, norms, rope
from .patching.numeric_probe import unobserved
from .patching.report import PatchReport
from .residuals.residual_norms import patch_residuals


def _patch_lora(model: nn.Module, report: PatchReport) -> None:
    from ..peft import patch_lora

    patch_lora(model, report)


# op -> patcher(model, report). It adds its findings to the report, and before each change the way to undo it.
_PATCHERS: dict[str, Callable[[nn.Module, PatchReport], None]] = {
    "attention": attention_patch.patch_attention,
    "lora": _patch_lora,
    "relu": activations.patch_relu,
    "relu_squared": activations.patch_relu_squared,
    "softmax": activations.patch_softmax,
    "two_mm": linear_chains.patch_chains,
    "gate": linear_chains.patch_gates,
    "rmsnorm": norms.patch_rmsnorm,
    "layernorm": norms.patch_layernorm,
    "add_rmsnorm": patch_residuals,
    "swiglu": partial(gated_mlp.patch_gated, "swiglu"),
    "geglu": partial(gated_mlp.patch_gated, "geglu"),
    "rope": rope.patch_rope,
    "experts": dense_experts.patch_experts,
    "cross_entropy": loss.patch_cross_entropy,
    "linear_cross_entropy": last_layer.patch_last_layer,
}
OPS = tuple(_PATCHERS)
#: The ops of ops="auto", each with the measurement in benchmarks/ that justifies it. An op without one is patched on request only.
DEFAULTS = {
    "attention": "h200_attention_warpgroups.json",
    "lora": "h200_rows_and_two_mm.json",  # two_mm, the two products in it
    "rmsnorm": "h200_models.json",
    "add_rmsnorm": "h100/untuned.json",
    "swiglu": "h200_models.json",
    "geglu": "h200/more_forward.json",
    "rope": "h200_models.json",
    "cross_entropy": "h200_models.json",  # less memory, the same time
}
#: Asked for by name alone: outputs.logits is another class of tensor then.
BY_NAME = ("linear_cross_entropy",)
_SEVERAL = {"auto": tuple(DEFAULTS), "all": tuple(op for op in OPS if op not in BY_NAME)}


class PatchError(RuntimeError):
    """Raised by `apply_to(strict=True)` when something that holds one of the ops was skipped."""


def apply_to(model: nn.Module, ops: str | Iterable[str] = "auto", strict: bool = False, dry_run: bool = False, graphs: bool = False) -> PatchReport:
    """Make this model instance run its ops on dtkernels. Nothing global and no class is changed.

        attention   softmax(q k^T * scale + mask) v, in Hugging Face models, through their AttentionInterface
        relu        max(x, 0), in nn.ReLU modules; on request only: torch's is as fast
        relu_squared    max(x, 0)^2, in activation modules that compute it; on request only
        lora        y + scale * (x A') B', in LoRA layers of PEFT
        softmax     exp(x) / sum(exp(x)) over the last dimension, in nn.Softmax modules; on request only
        two_mm      (x A) B, in nn.Sequential modules: two nn.Linear in a row, narrow in the middle; on request only
        gate        sigmoid(x A + b), in nn.Sequential modules: nn.Linear, then nn.Sigmoid; on request only
        rmsnorm     x / sqrt(mean(x^2) + eps) * (w, 1 + w, or nothing), of rows or groups, with a gate or without, in modules that compute it
        add_rmsnorm x + residual and the RMSNorm of the sum in one kernel, in layers that have both in their source
        layernorm   (x - mean) / sqrt(var + eps) * w + b, in nn.LayerNorm modules and others that compute the like; on request only
        swiglu, geglu   silu(gate(x)) * up(x), gelu(gate(x)) * up(x), in MLPs that compute it between linear layers
        rope        q and k rotated by cos and sin, in attention modules that call a function for it: halves or neighbours, all or some elements
        experts     sums of w * down(act(up(x))) over each token's experts, whose weights lie in one tensor; on request only
        cross_entropy   of tokens, by a Hugging Face model's loss_function, or where its forward makes a CrossEntropyLoss over its vocabulary
        linear_cross_entropy   the same without making logits in training, unless something reads outputs.logits; by name only, not by "all"

    Under torch.compile those from rmsnorm on, but for experts, are left to Inductor, which fuses the module's own code.

    model     an nn.Module: a transformers model, one wrapped in another module, or any module of your own
    ops       "auto" (those of DEFAULTS, measured to be faster), "all", one op's name, or several of these
    strict    raise PatchError, with the model restored, if a module that holds one of the ops is skipped
    dry_run   change nothing; the report says what would be patched
    graphs    have `generate` replay CUDA graphs for steps of one token, with a static cache and without torch.compile

    If only "auto" asks for attention, as in ops="auto" and ops=["auto", "relu"], some of its calls go to sdpa. On a GPU these are
    calls with gradients and no mask, because sdpa's backward is faster (benchmarks/h200/attention_backward.json), and calls with a matrix
    mask of unknown content (benchmarks/h200_last_run.txt). If attention is asked for by name, also in
    ops=["auto", "attention"], or by "all", it always runs the kernel. The report counts both.

    An attention that somebody else registered (`AttentionInterface.register`) may compute anything: it is skipped. If attention is asked for
    by name, the op takes its place, as the report says, and calls that no kernel takes run transformers' own.

    A query that sees no key, for example with padding on the left, gets zeros, as from sdpa with a boolean mask. Eager attention, and
    masks of the dtype's lowest number, give it the mean of the values. No query that sees a key depends on it.

    Calls that a kernel does not support (dropout of attention weights, ...) take the model's own path and are counted in the report.
    A second call patches nothing and reports "already". Give each model its own config (`copy.deepcopy(config)`): it holds the attention switch.

    Raises TypeError if `model` is no nn.Module, ValueError for an unknown op, PatchError as said above.

        report = apply_to(model)
        print(report)
        report.undo()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply_to needs a torch.nn.Module, got {type(model).__name__}")
    entries = [ops] if isinstance(ops, str) or not isinstance(ops, Iterable) else list(ops)
    chosen = _chosen(entries)
    as_measured = frozenset(op for op, auto in chosen.items() if auto)
    report = PatchReport(dry_run=dry_run, as_measured=as_measured, by_name=frozenset(entries).intersection(chosen))
    _run([*map(_PATCHERS.__getitem__, chosen), *[patch_graphs] * graphs], model, report)
    if strict and report.skipped:
        report.undo()
        first, more = report.skipped[0], len(report.skipped) - 1
        tail = f" (and {more} more)" if more else ""
        raise PatchError(f"strict: skipped {first.op} in {first.module or 'the model'}: {first.reason}{tail}")
    return report


@contextmanager
def patched(model: nn.Module, ops: str | Iterable[str] = "auto", strict: bool = False, dry_run: bool = False, graphs: bool = False) -> Iterator[PatchReport]:
    """Apply `apply_to` for the length of a `with` block. Yields the report; restores the model at the end, also after an error.

    Blocks may be nested: an inner one on the same model finds everything patched and restores nothing.
    """
    report = apply_to(model, ops=ops, strict=strict, dry_run=dry_run, graphs=graphs)
    try:
        yield report
    finally:
        report.undo()


def _run(patchers: list[Callable[[nn.Module, PatchReport], None]], model: nn.Module, report: PatchReport) -> None:
    """Run patchers one after another; an error undoes them all."""
    try:
        with unobserved():
            for patcher in patchers:
                patcher(model, report)
    except BaseException:
        report.undo()
        raise


def _chosen(entries: list[str]) -> dict[str, bool]:
    """Return the ops in the order asked for; op -> whether only "auto" asked for it."""
    chosen: dict[str, bool] = {}
    for entry in entries:
        if not isinstance(entry, str):
            raise TypeError(f"apply_to: ops is a name or several names; got {entry!r}")
        for name in _SEVERAL.get(entry, (entry,)):
            if name not in _PATCHERS:
                raise ValueError(f"unknown op {name!r}; apply_to knows {', '.join(OPS)}, 'all', or 'auto' for {', '.join(DEFAULTS)}")
            chosen[name] = entry == "auto" and chosen.get(name, True)
    return chosen
