"""Map our functions to Liger's, and exchange them in the modules of an imported Liger."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable

from . import adapters, losses

#: autograd function of Liger -> ours, with the name of the op
FUNCTIONS: dict[str, tuple[str, Callable]] = {
    "LigerRMSNormFunction": ("rmsnorm", adapters.rms_norm),
    "LigerFusedAddRMSNormFunction": ("add_rmsnorm", adapters.fused_add_rms_norm),
    "LigerModulatedRMSNormFunction": ("modulated_rmsnorm", adapters.modulated_rms_norm),
    "LigerLayerNormFunction": ("layernorm", adapters.layer_norm),
    "LigerGroupNormFunction": ("groupnorm", adapters.group_norm),
    "LigerPolyNormFunction": ("polynorm", adapters.poly_norm),
    "LigerDyTFunction": ("dyt", adapters.dyt),
    "LigerSiLUMulFunction": ("swiglu", adapters.swiglu),
    "LigerFusedGateUpSiLUMulFunction": ("swiglu", adapters.fused_gate_up),
    "LigerGELUMulFunction": ("geglu", adapters.geglu),
    "LigerReLUSquaredFunction": ("relu_squared", adapters.relu_squared),
    "LigerRopeFunction": ("rope", adapters.rope),
    "LigerLlama4RopeFunction": ("partial_rope", adapters.llama4_rope),
    "LigerQwen2VLMRopeFunction": ("multimodal_rope", adapters.qwen2vl_mrope),
    "LigerSoftmaxFunction": ("softmax", adapters.softmax),
    "LigerSparsemaxFunction": ("sparsemax", adapters.sparsemax),
    "LigerEmbeddingFunction": ("embedding", adapters.embedding),
    "LigerMultiTokenAttentionFunction": ("multi_token_attention", adapters.multi_token_attention),
    "LigerFusedNeighborhoodAttentionFunction": ("attention_spec", adapters.neighborhood_attention),
    "LigerAttnResFunction": ("attention_residual", adapters.attn_res),
    "LigerMHCPreFunction": ("mix_streams", adapters.mhc_pre),
    "LigerMHCPostResFunction": ("mix_streams", adapters.mhc_post_res),
    "LigerCrossEntropyFunction": ("cross_entropy", losses.cross_entropy),
    "LigerFusedLinearCrossEntropyFunction": ("linear_cross_entropy", losses.fused_linear_cross_entropy),
    "LigerFusedLinearScaledCrossEntropyFunction": ("linear_logprobs", losses.fused_linear_scaled_cross_entropy),
    "LigerFusedLinearJSDFunction": ("linear_jsd", losses.fused_linear_jsd),
    "LigerKLDivLossFunction": ("kl_divergence", losses.kl_div),
    "LigerJSDFunction": ("jsd", losses.jsd),
    "LigerTVDLossFunction": ("tvd", losses.tvd),
    "GrpoLossFunction": ("grpo", losses.grpo),
    "LigerFusedLinearCPOFunction": ("cpo", losses.cpo),
    "LigerFusedLinearDPOFunction": ("dpo", losses.dpo),
    "LigerFusedLinearSimPOFunction": ("simpo", losses.simpo),
    "LigerFusedLinearORPOFunction": ("orpo", losses.orpo),
    "LigerFusedLinearKTOFunction": ("kto", losses.kto),
}
#: of the package's chunked losses alone, where another function has the same name
CHUNKED: dict[str, tuple[str, Callable]] = {"LigerFusedLinearJSDFunction": ("linear_jsd", losses.distill_jsd)}

#: what Liger has and we have not, with the reason
MISSING: dict[str, str] = {
    "LigerFusedMoEFunction": "mixtures of experts are being made",
    "LigerMHCCoeffsFunction": "twenty Sinkhorn steps of a 4 x 4 matrix: the language has no loop of a fixed number of steps",
    "LigerMLPFunction": "a whole MLP in one function: three products and swiglu here",
    "LigerTiledMLPFunction": "an MLP computed again in pieces: torch.utils.checkpoint over pieces of the rows does it with any MLP",
    "LigerVocabParallelCEFunction": "cross entropy of a sharded vocabulary: an all-reduce between two kernels",
    "LigerFusedLinearCosineSimilarityFunction": "cosine_distance takes logits or hidden states that are stored",
    "LigerFusedLinearKLDivFunction": "linear_kl takes the teacher's last layer; for stored teacher probabilities, kl_divergence of stored logits",
    "LigerFusedCETVDFunction": "cross_entropy and tvd, called one after the other",
    "LigerFusedLinearGRPOFunction": "linear_logprobs and grpo, called one after the other; its other losses are not here",
}
_ROOTS = ("liger_kernel.ops", "liger_kernel.transformers", "liger_kernel.chunked_loss")
_BACKENDS = ("backends", "cutile", "cutedsl", "cute", "model", "monkey_patch", "trainer", "auto_model", "fsdp", "moe")


def modules() -> list:
    """Import the modules of Liger that hold functions, and return them. Raises ImportError where Liger is not installed."""
    found = []
    for root in _ROOTS:
        package = importlib.import_module(root)
        found.append(package)
        for info in pkgutil.walk_packages(package.__path__, root + "."):
            if any(part.startswith("_") or part in _BACKENDS for part in info.name.split(".")[2:]):
                continue
            try:
                found.append(importlib.import_module(info.name))
            except ImportError:  # another GPU's compiler
                continue
    return found


def functions() -> dict[str, type]:
    """Return the autograd functions of the imported Liger by name: those of its own modules, without base classes."""
    import torch

    found: dict[str, type] = {}
    for module in modules():
        for name, value in vars(module).items():
            if isinstance(value, type) and issubclass(value, torch.autograd.Function) and value is not torch.autograd.Function:
                if "forward" in vars(value) and not name.startswith("_") and not name.endswith("Base"):
                    found.setdefault(name, value)  # that of its ops, before one of the same name elsewhere
    return found


def missing() -> dict[str, str]:
    """Return the functions of the imported Liger that nothing of ours stands for, with the reason where one is known."""
    return {name: MISSING.get(name, "unknown here: new in this Liger") for name in sorted(functions()) if name not in FUNCTIONS}


def substitute(calls: dict[str, int]) -> list[str]:
    """Put our functions in the place of Liger's in every module of it that is imported. ``calls`` counts them. Return the names replaced."""
    ours = {name: _class(name, *entry, calls) for name, entry in FUNCTIONS.items()}
    ours |= {name: _class(name, "", _lacking(name, reason), {}) for name, reason in MISSING.items()}
    chunked = {name: _class(name, *entry, calls) for name, entry in CHUNKED.items()}
    modules()
    replaced = set()
    for name, module in list(sys.modules.items()):
        if not name.startswith("liger_kernel.") or any(part in _BACKENDS[:4] for part in name.split(".")):
            continue
        for attribute in list(vars(module)):
            if attribute in ours:
                table = chunked if name.startswith("liger_kernel.chunked_loss") and attribute in chunked else ours
                setattr(module, attribute, table[attribute])
                replaced.add(attribute)
    return sorted(replaced)


def _lacking(name: str, reason: str) -> Callable:
    def refuse(*_, **__):
        raise adapters.NoCounterpart(f"{name}: {reason}")

    return refuse


def _class(name: str, op: str, function: Callable, calls: dict[str, int]) -> type:
    """Return a class whose ``apply`` is a function of ours."""

    def apply(*args, **kwargs):
        calls[op] = calls.get(op, 0) + 1
        return function(*args, **kwargs)

    return type(name, (), {"apply": staticmethod(apply), "__doc__": f"dtkernels.ops.{op}"})
