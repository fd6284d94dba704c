"""One algorithm of an op, its parameters bound: runs it forward, derives its gradient, differentiates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch

from ...codegen.target import Target, target
from ..build.toolchain import NoCompiler
from ..dispatch.dispatcher import Dispatcher
from ..log import warn_once
from ..path_counters import checking, count, interpreting, unable
from ..select.schedule_selection import Call
from ..signature.arguments import Interface
from ..signature.given_sizes import free_labels, sizes_in_order
from ..signature.op_manifest import Facts
from ..signature.signature import Halves, Signature
from ..torch_support.tensor_checks import in_memory, is_batch, refuse_batches
from ..torch_support.unsupported_autograd import without_derivative

if TYPE_CHECKING:
    from ...algebra.autodiff.gradient import Gradient
    from ...algebra.autodiff.rematerialization import Product
    from ...lang.algorithm import Algorithm
    from ...lang.schedule import Program

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class DifferentiablePair:
    """A gradient with what runs its two halves; ``public`` are the outputs that the caller sees."""

    gradient: Halves
    public: tuple[str, ...]
    forward: Variant
    backward: Variant
    names: tuple[str, ...]  #: of the inputs and scalars of a call


class Variant:
    """One algorithm with the kernels emitted for it so far. Where ``facts`` are known, it is made when something wants it."""

    def __init__(self, make: Callable[[], Algorithm], outputs: tuple[str, ...], subject: Call, facts: Facts | None = None):
        self._make, self.outputs, self.subject = make, outputs, subject
        self.written = self  #: what it computes, as the user wrote it
        self._pairs: dict[tuple[tuple[str, ...], tuple[str, ...]], DifferentiablePair] = {}
        self._facts = facts or Facts(Signature.of(self.algorithm, outputs if subject.direction == "forward" and not subject.saved else ()))
        self.signature = self._facts.signature
        self._tied = {} if facts else {label: min(self.algorithm.tied_labels(label)) for label in self.algorithm.labels}
        self.dispatch = Dispatcher(subject, self.signature, lambda: self.algorithm, outputs, device_target)

    @cached_property
    def plain(self) -> Algorithm:
        """The algorithm as it was written, parameters bound and batch labels added."""
        return self._make()

    @cached_property
    def algorithm(self) -> Algorithm:
        """The algorithm as it is lowered."""
        from ...algebra.pipeline import prepare_algorithm

        return prepare_algorithm(self.plain, self.outputs)

    @cached_property
    def differentiated(self) -> Algorithm:
        """The algorithm as gradients are derived of it."""
        from ...algebra.pipeline import differentiable_form

        return differentiable_form(self.plain, self.outputs)

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """What forward may hand to backward where sizes speak for it."""
        if self._facts.products is not None:
            return self._facts.products
        from ...algebra.autodiff.chained_products import chained_products

        return chained_products(self.differentiated, self.outputs)

    def check(self, op: str, tensors: dict[str, torch.Tensor], given: dict[str, torch.Tensor], interface: Interface) -> None:
        """Raise ValueError, one line, where extents do not fit: of ``tensors``, which were ``given`` by the caller in other shapes."""
        sizes, tied = self.signature.sizes, self._tied
        seen: dict[str, tuple[str | None, str, int]] = {tied.get(label, label): (None, label, n) for label, n in sizes.items() if isinstance(n, int)}
        for name, t in tensors.items():
            labels = self.signature.inputs[name]
            if t.dim() != len(labels):
                raise interface.refuse_rank(op, self.signature, given, name)
            for label, size in zip(labels, t.shape):
                if label is not None and (known := seen.setdefault(tied.get(label, label), (name, label, size)))[2] != size:
                    raise interface.differing(op, self.signature, given, known, (name, label, size))

    def run(self, op: str, tensors: dict[str, torch.Tensor], scalars: dict[str, object]) -> tuple[torch.Tensor, ...]:
        """The outputs, differentiable where an input asks for it."""
        given = {**tensors, **scalars}
        wanted = tuple(n for n, v in given.items() if isinstance(v, torch.Tensor) and v.requires_grad)
        if not (torch.is_grad_enabled() and wanted):
            return self.forward(op, tensors, scalars)
        names = tuple(n for n, v in given.items() if isinstance(v, torch.Tensor))
        plain = {n: v for n, v in given.items() if n not in names}
        results = _Differentiable.apply(self.pair_for(wanted, tensors), op, names, plain, *(given[n] for n in names))
        return results[: len(self.outputs)]

    def pair_for(self, wanted: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> DifferentiablePair:
        """Forward and backward for the gradients ``wanted`` of a call on ``tensors``."""
        return self.pair_at(wanted, self.signature.extents(tensors)) if self.products else self.pair(wanted)

    def pair_at(self, wanted: tuple[str, ...], sizes: Mapping[str, int | torch.SymInt]) -> DifferentiablePair:
        """Forward and backward at these extents: products that are no larger than one of their operands are handed over."""
        from ...algebra.autodiff.rematerialization import products_to_save

        return self.pair(wanted, products_to_save(self.products, sizes, _surely))

    def pair(self, wanted: tuple[str, ...], kept: tuple[str, ...] = ()) -> DifferentiablePair:
        """Forward and backward for the gradients ``wanted``; forward hands over those of the products ``kept`` that backward needs."""
        if (wanted, kept) not in self._pairs:
            derived = lru_cache(maxsize=None)(lambda: self._derived(wanted, kept))
            known = self._facts.halves(wanted, kept) or Halves.of(derived())
            self._pairs[wanted, kept] = self.pair(wanted, known.products) if known.products != kept else self._paired(wanted, known, derived)
        return self._pairs[wanted, kept]

    def _paired(self, wanted: tuple[str, ...], known: Halves, derived: Callable[[], Gradient]) -> DifferentiablePair:
        forward, kept = self, known.products
        if known.outputs != self.outputs:
            subject = replace(self.subject, saved=True, wanted=wanted, kept=kept)
            forward = Variant(lambda: derived().forward, known.outputs, subject, Facts(known.forward) if known.forward is not None else None)
            forward.written = self.written
        subject = replace(self.subject, direction="backward", wanted=wanted, kept=kept)
        backward = Variant(lambda: derived().backward, tuple(known.grads.values()), subject, Facts(known.backward) if known.backward is not None else None)
        return DifferentiablePair(known, self.outputs, forward, backward, (*self.signature.inputs, *self.signature.scalars))

    def _derived(self, wanted: tuple[str, ...], kept: tuple[str, ...]) -> Gradient:
        from ...algebra.autodiff.gradient import gradient

        return gradient(self.differentiated, self.outputs, wanted, kept)

    def pairs(self) -> tuple[DifferentiablePair, ...]:
        """The pairs derived so far."""
        return tuple({id(pair): pair for pair in self._pairs.values()}.values())

    def forward(self, op: str, tensors: dict[str, torch.Tensor], scalars: dict[str, object]) -> tuple[torch.Tensor, ...]:
        """The outputs by a generated kernel where one can run, else by the reference; counted.

        Where no kernel can be compiled for a GPU, and none is prebuilt for this call, that is the reference too, with a warning.
        """
        if checking() and self.subject.direction == "forward":
            self._check_indices(op, tensors, scalars)
        path = choose_path(tensors)
        if len(self.outputs) > 1 and not all(t.numel() for t in tensors.values()):
            path = "reference"  # a kernel without programs, since its own Func is empty, may compute others that are not
        if path != "reference":
            refuse_batches(op, (*tensors.values(), *scalars.values()))
            tensors, scalars = ({n: in_memory(v) for n, v in given.items()} for given in (tensors, scalars))
            try:
                results = tuple(self.dispatch(tensors, scalars))
                count(op, path)
                return results
            except NoCompiler as error:
                gpu = next(iter(tensors.values())).get_device()
                unable(gpu, f"no kernel can be compiled: {error}")
                warn_once(f"{op}: the torch reference runs on GPU {gpu}, since no kernel can be compiled: {error}")
        from ..reference.evaluator import evaluate

        count(op, "reference")
        return tuple(_own(r, tensors) for r in evaluate(self.algorithm, tensors, scalars, self.outputs))

    def _check_indices(self, op: str, tensors: dict[str, torch.Tensor], scalars: dict[str, object]) -> None:
        """Raise IndexError, one line, where an element that is asked for lies outside its tensor."""
        from ..reference.index_checks import check_indices

        check_indices(op, self.written.plain, tensors, scalars, self.written.outputs)

    def program(self, sizes: dict[str, int], itemsize: int, gpu: Target) -> Program:
        """The algorithm with the formula's schedule for ``sizes``."""
        from ...autoschedule.default_schedule import default_schedule
        from ...lang.schedule import Program

        return Program(self.algorithm, default_schedule(self.algorithm, self.outputs, sizes, itemsize, gpu))

    def sizes_from(self, shape: tuple[int, ...] | None) -> dict[str, int]:
        """Extents from a plain tuple, in the order of ``free_labels``; 4096 each without one. Raises ValueError where the count differs."""
        output = self.outputs[0]
        return sizes_in_order(self.algorithm, output, (4096,) * len(free_labels(self.algorithm, output)) if shape is None else shape, self.subject.op)


class _Differentiable(torch.autograd.Function):
    """Forward and backward by the kernels of the derived gradient."""

    @staticmethod
    def forward(ctx, pair: DifferentiablePair, op: str, names: tuple[str, ...], plain: dict[str, object], *values):
        given = {**plain, **dict(zip(names, values))}
        forward, a, b = pair.forward, pair.forward.signature, pair.backward.signature
        results = forward.forward(op, {n: given[n] for n in a.inputs}, {n: given[n] for n in a.scalars})
        known = {**given, **dict(zip(forward.outputs, results))}
        kept = [n for n in (*b.inputs, *b.scalars) if n in known]
        ctx.pair, ctx.op, ctx.names = pair, op, names
        ctx.kept = tuple(n for n in kept if isinstance(known[n], torch.Tensor))
        ctx.plain = {n: known[n] for n in kept if n not in ctx.kept}
        ctx.like = {n: (v.shape, v.dtype) for n, v in zip(names, values) if isinstance(v, torch.Tensor)}
        ctx.save_for_backward(*(known[n] for n in ctx.kept))
        ctx.set_materialize_grads(True)
        ctx.mark_non_differentiable(*results[len(pair.public) :])
        return results

    @staticmethod
    def backward(ctx, *grads):
        pair, backward = ctx.pair, ctx.pair.backward
        saved = ctx.saved_tensors  # once: checkpointing gives them once
        known = {**ctx.plain, **dict(zip(ctx.kept, saved))}
        known |= {pair.gradient.adjoints[o]: g for o, g in zip(pair.public, grads)}
        a = backward.signature
        results: tuple[torch.Tensor, ...] = ()
        with torch.no_grad():
            if pair.gradient.grads:  # else nothing enters differentiably
                results = backward.forward(f"{ctx.op} backward", {n: known[n] for n in a.inputs}, {n: known[n] for n in a.scalars})
        found = dict(zip(pair.gradient.grads, results))
        shaped = tuple(_like(found.get(n), ctx.like.get(n)) for n in ctx.names)
        return (None, None, None, None, *without_derivative(ctx.op, shaped, (*saved, *grads)))


def _surely(condition: bool | torch.SymBool) -> bool:
    """Whether a comparison is known to hold. Where it hangs on a size that is a symbol it is not: torch.compile then keeps a product,
    as torch itself does, and need not compile anew for sizes on the other side."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def _own(result: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """A result as a kernel leaves it: contiguous, in memory of its own, and no view, which torch lets nobody change in place where an
    autograd.Function returns it."""
    if is_batch(result):
        return result
    result = result.contiguous()
    shared = (
        any(result.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in tensors.values()) if result.numel() else False
    )
    if shared:
        return result.clone()
    return result.data if result._is_view() and not torch._C._is_tracing() else result  # a trace would lose it


def _like(grad: torch.Tensor | None, like: tuple[torch.Size, torch.dtype] | None) -> torch.Tensor | None:
    return None if grad is None or like is None else grad.reshape(like[0]).to(like[1])


def choose_path(tensors: Mapping[Any, torch.Tensor]) -> str:
    """gpu, interpreter or reference, by device and dtype."""
    if any(t.is_floating_point() and t.dtype not in KERNEL_DTYPES for t in tensors.values()) or not any(
        t.is_floating_point() for t in tensors.values()
    ):
        return "reference"
    if next(iter(tensors.values())).is_cuda:
        return "gpu"
    return "interpreter" if interpreting() and next(iter(tensors.values())).device.type == "cpu" else "reference"


@lru_cache(maxsize=32)
def device_target(device: torch.device) -> Target:
    """What is known of the GPU behind ``device``; the interpreter stands in for an H200."""
    if device.type != "cuda":
        return target("h200")
    p = torch.cuda.get_device_properties(device)
    hip = getattr(torch.version, "hip", None)
    return Target(
        name=p.name,
        backend="hip" if hip else "cuda",
        arch=p.gcnArchName.split(":")[0] if hip else p.major * 10 + p.minor,
        multiprocessors=p.multi_processor_count,
        shared_bytes=65536 if hip else getattr(p, "shared_memory_per_block_optin", 101376),
        bandwidth=1e12,
        l2_bytes=p.L2_cache_size,
        warp_size=64 if hip else 32,
    )
