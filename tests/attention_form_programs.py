"""Programs of attention's forms, as the default schedule has them, and what their wrappers take and allocate."""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtkernels.ops.attention_forms import calls  # noqa: F401 (makes the forms known)
from dtkernels.ops.registry import shipped
from dtkernels.runtime.aot_build import known_labels

SIZES = {"b": 2, "h": 8, "m": 2048, "l": 2048, "d": 64, "n": 64, "K_1": 2, "h_in": 4}
WHOLE = ("lo", "hi", "begins", "stops", "of_q", "of_k", "table", "length", "doc", "prefix")
WIDE = ("lse", "d_lse", "total_log", "d_weight")


def programs(operator, params, backward, gpu, sizes=SIZES):
    """The programs of an op, or of the shipped op of a name: forward and, where asked for, what training runs."""
    operator = shipped(operator) if isinstance(operator, str) else operator
    variant = operator.variant(tuple(sorted(params.items())), frozenset(), 0)
    pair = variant.pair(("Q", "K", "V")) if backward else None
    for v in (variant, *((pair.forward, pair.backward) if pair else ())):
        known = {label: sizes[label] for label in known_labels(v.algorithm)} | ({"m": 1} if operator.name.startswith("attention_paged") else {})
        yield v, known, v.program(known, 2, gpu)


def tensors(variant, sizes):
    """Tensors on meta for a variant's inputs."""
    for name in variant.algorithm.inputs:
        shape = [sizes[x] if x else {"K": 2, "V": 2}.get(name, 4) for x in variant.signature.inputs[name]]
        if name in ("K", "V") and "table" in variant.algorithm.inputs:
            shape = [256, 2, 16, 64]
        if name == "table":
            shape = [sizes["b"], sizes["l"] // 16]
        dtype = torch.int32 if name in WHOLE else torch.bool if name == "mask" else torch.float32 if name in WIDE else torch.bfloat16
        yield torch.empty(shape, dtype=dtype, device="meta")


def arguments(variant, sizes):
    """All arguments of a wrapper."""
    return (*tensors(variant, sizes), *(7 if scalar == "seed" else 0.125 for scalar in variant.algorithm.scalars))


class Allocated(TorchDispatchMode):
    """Adds up the bytes of the tensors that are made."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if not func.is_view and isinstance(made, torch.Tensor):
            self.bytes += math.prod(made.shape) * made.itemsize
        return made
