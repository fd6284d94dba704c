"""Make input tensors for a tuning problem, and the reference results of its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...codegen.analysis.dtype_propagation import narrow_buffers
from ...lang import expr as ex
from ...lang.algorithm import Algorithm
from ...runtime.aot_build import meta_tensors
from ...runtime.bind.operator import Variant
from ...runtime.reference.evaluator import evaluate
from .problems import CallKind, TuningProblem, variants_of

EXACT = 2**27  #: elements of the largest intermediate up to which the reference is computed in float64
LARGEST = 2**32  #: above it there is no reference
SCALAR = 0.125


@dataclass
class InputsAndReference:
    """Arguments of the wrapper, and the reference contents of every Func that a kernel may write."""

    values: tuple
    right: dict[str, torch.Tensor]
    bytes: int


def scalars_of(variant: Variant, group: CallKind, device: str) -> tuple:
    """Return scalar arguments: numbers, one-element tensors if a gradient is asked for, whole numbers if they index."""
    a = variant.algorithm
    integers = a.integer_scalars()

    def one(name: str):
        if name in integers:
            return 0
        return torch.full((1,), SCALAR, dtype=group.torch_dtype, device=device) if name in group.wanted else SCALAR

    return tuple(one(s) for s in a.scalars)


def meta_arguments(work: TuningProblem) -> tuple:
    """Return the arguments of the wrapper without storage."""
    forward, variant = variants_of(work.group)
    tensors = meta_tensors(forward, variant, work.extents, work.group.torch_dtype)
    return (*tensors.values(), *scalars_of(variant, work.group, "meta"))


def largest(algorithm: Algorithm, sizes: dict[str, int]) -> int:
    """Return the number of elements of the largest Func."""
    return max(_count(d.labels, sizes) for d in algorithm.definitions)


def _count(labels: tuple[str, ...], sizes: dict[str, int]) -> int:
    count = 1
    for label in labels:
        count *= sizes[label]
    return count


def elements(work: TuningProblem, name: str) -> int:
    """Return the number of elements of an input or a Func."""
    forward, variant = variants_of(work.group)
    if name in variant.algorithm:
        return _count(variant.algorithm[name].labels, work.extents)
    return meta_tensors(forward, variant, work.extents, work.group.torch_dtype)[name].numel()


def itemsizes(work: TuningProblem) -> dict[str, int]:
    """Return the element size of every buffer in bytes."""
    forward, variant = variants_of(work.group)
    tensors = meta_tensors(forward, variant, work.extents, work.group.torch_dtype)
    alike = (*variant.outputs, *narrow_buffers(variant.algorithm))  # values between kernels that are as narrow as results
    return {n: t.dtype.itemsize for n, t in tensors.items()} | dict.fromkeys(alike, work.group.itemsize)


def make(work: TuningProblem, roots: tuple[str, ...], device: str) -> InputsAndReference:
    """Make random inputs, the forward results computed from them, and the reference of ``roots``."""
    group = work.group
    forward, variant = variants_of(group)
    generator = torch.Generator(device).manual_seed(0)
    meta = meta_tensors(forward, variant, work.extents, group.torch_dtype)
    whole = {n: _reach(n, variant.algorithm, meta) for n in variant.algorithm.integer_inputs()}
    tensors = {n: _random(n, t, variant.algorithm, generator, device, whole.get(n)) for n, t in meta.items()}
    scalars = dict(zip(variant.algorithm.scalars, scalars_of(variant, group, device)))
    if group.direction == "backward":
        tensors |= _saved(group, forward, variant, tensors, scalars, work.extents, generator, device)
    right = reference(variant.algorithm, tensors, scalars, roots, work.extents)
    size = sum(t.numel() * t.element_size() for t in (*tensors.values(), *right.values()))
    return InputsAndReference((*tensors.values(), *scalars.values()), right, size)


def peer(work: TuningProblem, device: str, compiled: bool) -> Callable[[], object]:
    """Return a run of the op's reference on random inputs in the dtype of the call, in eager torch or under torch.compile."""
    _, variant = variants_of(work.group)
    algorithm, outputs = variant.algorithm, variant.outputs
    values = make(work, (), device).values
    tensors = dict(zip(algorithm.inputs, values))
    scalars = dict(zip(algorithm.scalars, values[len(algorithm.inputs) :]))

    def run() -> object:
        return evaluate(algorithm, tensors, scalars, outputs)

    return torch.compile(run) if compiled else run


def _reach(name: str, algorithm: Algorithm, meta: dict[str, torch.Tensor]) -> int:
    """Return the shortest dimension that elements of ``name`` index."""
    uses = [(a, dim) for d in algorithm.definitions for a in ex.accesses(d.expr) for dim, i in enumerate(a.index) if any(x.tensor == name for x in ex.accesses(i))]
    return min(meta[a.tensor].shape[dim] for a, dim in uses)


def _random(name: str, meta: torch.Tensor, algorithm: Algorithm, generator: torch.Generator, device: str, below: int | None) -> torch.Tensor:
    """Return normal numbers, scaled down for operands of long sums so that results stay near 1; or integers ``below`` a number."""
    if below is not None:
        return torch.randint(below, meta.shape, generator=generator, device=device, dtype=meta.dtype)
    if not meta.dtype.is_floating_point:
        return torch.rand(meta.shape, generator=generator, device=device) < 0.9
    scale = 1.0
    for d in algorithm.definitions:
        for n in d.expr.walk():
            if isinstance(n, ex.Dot):
                for access in (a for a in ex.accesses(n) if a.tensor == name):
                    for dim, index in enumerate(access.index):
                        if isinstance(index, ex.Label) and index.name in n.labels:
                            scale = min(scale, max(meta.shape[dim], 1) ** -0.25)
    return (torch.randn(meta.shape, generator=generator, device=device, dtype=torch.float32) * scale).to(meta.dtype)


def _saved(group: CallKind, forward: Variant, variant: Variant, tensors: dict, scalars: dict, sizes: dict, generator: torch.Generator, device: str) -> dict:
    """Compute what backward reads from forward; incoming gradients stay random."""
    pair = forward.pair(group.wanted, group.kept)
    a = pair.forward.algorithm
    wanted = [o for o in pair.forward.outputs if o in variant.algorithm.inputs]
    if not wanted:
        return {}
    meta = meta_tensors(forward, pair.forward, {k: v for k, v in sizes.items() if k in a.labels}, group.torch_dtype)
    whole = {n: _reach(n, a, meta) for n in a.integer_inputs()}
    given = {n: tensors[n] if n in tensors else _random(n, t, a, generator, device, whole.get(n)) for n, t in meta.items()}
    own = {s: scalars.get(s, SCALAR) for s in a.scalars}
    return reference(a, given, own, tuple(wanted), sizes)


def reference(algorithm: Algorithm, tensors: dict, scalars: dict, funcs: tuple[str, ...], sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Compute ``funcs`` by eager torch in float64, or float32 if too large, from inputs in the kernels' dtype."""
    if largest(algorithm, sizes) > LARGEST:
        raise MemoryError("no reference: an intermediate has more than 2**32 elements")
    exact = largest(algorithm, sizes) <= EXACT
    given = {n: t.double() if exact and t.is_floating_point() else t for n, t in tensors.items()}
    numbers = {n: v.double() if exact and isinstance(v, torch.Tensor) else v for n, v in scalars.items()}
    known = evaluate(algorithm, given, numbers, funcs)
    floats = [t.dtype for t in tensors.values() if t.is_floating_point()]
    plain = next((d for d in (torch.float16, torch.bfloat16) if d in floats), torch.float32)
    found = {}
    for name, value in zip(funcs, known):
        cast = algorithm[name].expr
        found[name] = value.to(getattr(torch, ex.TORCH_NAMES[cast.dtype]) if isinstance(cast, ex.Cast) else plain).contiguous()
    return found


#: largest error relative to the norm, and of one element relative to the largest
TOLERANCE = {torch.float32: (2e-5, 2e-4), torch.float16: (2.5e-3, 2e-2), torch.bfloat16: (1.5e-2, 1e-1)}


def wrong(got: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> str:
    """Return why ``got`` differs from the reference, or "". ``dtype`` is that of the inputs."""
    norm, worst = TOLERANCE[dtype]
    difference = got.float() - right.float()
    if not torch.isfinite(difference).all():
        return "not finite, or not written, where it should be"
    scale, peak = right.float().norm().item(), right.float().abs().max().item() if right.numel() else 0.0
    error, largest_error = difference.norm().item(), difference.abs().max().item() if right.numel() else 0.0
    if error > norm * scale + 1e-30 or largest_error > worst * peak + 1e-30:
        return f"wrong numbers: {error / max(scale, 1e-30):.1e} of the norm, {largest_error / max(peak, 1e-30):.1e} of the largest"
    return ""
