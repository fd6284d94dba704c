"""Define the implementations that the benchmark compares with ours, each in its fastest legitimate form."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.workloads import Workload


class Missing(Exception):
    """A peer that is not installed; says what is missing."""


def _compiled(work: Workload, **options) -> Callable:
    return torch.compile(work.eager, dynamic=False, **options)


def _sdpa(work: Workload, backend: SDPBackend | None) -> Callable | None:
    if work.op != "attention":
        return None

    def run(q, k, v):
        call = dict(is_causal=work.about["causal"], enable_gqa=q.shape[1] != k.shape[1])
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, **call)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **call)

    return run


def _flex(work: Workload) -> Callable | None:
    if work.op != "attention":
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled, masks = torch.compile(flex_attention, dynamic=False), {}

    def run(q, k, v):
        sizes = (q.shape[2], k.shape[2])
        if work.about["causal"] and sizes not in masks:
            masks[sizes] = create_block_mask(lambda b, h, m, n: m >= n, None, None, *sizes, device=q.device)
        return compiled(q, k, v, block_mask=masks.get(sizes), enable_gqa=q.shape[1] != k.shape[1])

    return run


def _liger(work: Workload) -> Callable | None:
    try:
        from liger_kernel.transformers import functional as liger
    except ImportError as problem:
        raise Missing(f"liger-kernel is not installed ({problem})") from None
    forms: dict[str, Callable] = {
        "softmax": lambda x: liger.liger_softmax(x),
        "dyt": lambda x, a, w, b: liger.liger_dyt(x, a, w, b),
        "rmsnorm": lambda x, w: liger.liger_rms_norm(x, w, 1e-6),
        "layernorm": lambda x, w, b: liger.liger_layer_norm(x, w, b, 1e-5),
        "swiglu": lambda a, b: liger.liger_swiglu(a, b),
        "geglu": lambda a, b: liger.liger_geglu(a, b),
        "cross_entropy": lambda x, t: liger.liger_cross_entropy(x, t),
        "rope": lambda q, k, cos, sin: liger.liger_rope(q, k, cos, sin),
    }
    return forms.get(work.op)


def _helion(work: Workload) -> Callable | None:
    """Return the kernel of Helion's folder of tuned kernels, which its repository has and its wheel lacks. Only rope has a backward."""
    module, form = HELION.get(work.op, ("", None))
    if form is None:
        return None
    folder = os.environ.get(HELION_FOLDER)
    if not folder:
        raise Missing(f"{HELION_FOLDER} does not name a folder pretuned_kernels of Helion's repository")
    path = Path(folder) / module / f"{module}.py"
    try:
        spec = importlib.util.spec_from_file_location(f"helion_{module}", path)
        assert spec is not None and spec.loader is not None
        sys.modules[spec.name] = loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    except (ImportError, AttributeError, OSError) as problem:  # AttributeError: a helion that is older than its folder
        raise Missing(f"no helion that fits {path} and torch {torch.__version__} ({problem})") from None
    return partial(form, getattr(loaded, module))


HELION_FOLDER = "HELION_PRETUNED_KERNELS"
#: op -> the module of Helion's kernel, and its call for our arguments
HELION: dict[str, tuple[str, Callable]] = {
    "softmax": ("softmax", lambda kernel, x: kernel(x)),
    "rmsnorm": ("rms_norm", lambda kernel, x, w: kernel(x, w, 1e-6)),
    "layernorm": ("layer_norm", lambda kernel, x, w, b: kernel(x, w, b)),
    "cross_entropy": ("cross_entropy", lambda kernel, x, t: kernel(x, t)),
    "rope": ("rope", lambda kernel, q, k, cos, sin: kernel(q, k, cos, sin)),
}


def _bare(work: Workload) -> Callable | None:
    return (lambda a, b: a @ b) if work.op == "mmsigmoid" else None


#: peer -> its form of a workload, or None
PEERS: dict[str, Callable[[Workload], Callable | None]] = {
    "eager": lambda work: work.eager,
    "compile": _compiled,
    "compile-max": lambda work: _compiled(work, mode="max-autotune-no-cudagraphs"),
    "liger": _liger,
    "helion": _helion,
    "sdpa": lambda work: _sdpa(work, None),
    "cudnn": lambda work: _sdpa(work, SDPBackend.CUDNN_ATTENTION),
    "fa2": lambda work: _sdpa(work, SDPBackend.FLASH_ATTENTION),
    "flex": _flex,
}
#: not peers, since they do less: lower bounds for the op
REFERENCES: dict[str, Callable[[Workload], Callable | None]] = {"bare-product": _bare}


def implementations(work: Workload, names: list[str]) -> tuple[dict[str, Callable], dict[str, str]]:
    """Return ours and the named peers that support this workload, and why others are missing."""
    found, missing = {"dtkernels": work.ours}, {}
    for name, form in [*((n, PEERS[n]) for n in names), *REFERENCES.items()]:
        try:
            made = form(work)
        except Missing as why:
            missing[name] = str(why)
            continue
        if made is not None:
            found[name] = made
    return found, missing
