"""One algorithm of an op, its parameters bound: runs it forward, derives its gradient, differentiates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch

from ..codegen.target import Target, target
from .decide import Subject
from .dispatch import Dispatcher
from .memory import in_memory, is_batch, refuse_batches
from .notes import warn_once
from .once import without_derivative
from .outline import Facts
from .paths import count, interpreting, unable
from .signature import Halves, Signature
from .toolchain import NoCompiler

if TYPE_CHECKING:
    from ..algebra.gradient import Gradient
    from ..algebra.kept import Product
    from ..lang.algorithm import Algorithm
    from ..lang.schedule import Program

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Pair:
    """A gradient with what runs its two halves; ``public`` are the outputs that the caller sees."""

    gradient: Halves
    public: tuple[str, ...]
    forward: Variant
    backward: Variant
    names: tuple[str, ...]  #: of the inputs and scalars of a call


class Variant:
    """One algorithm with the kernels emitted for it so far. Where ``facts`` are known, it is made when something wants it."""

    def __init__(self, make: Callable[[], Algorithm], outputs: tuple[str, ...], subject: Subject, facts: Facts | None = None):
        self._make, self.outputs, self.subject = make, outputs, subject
        self._pairs: dict[tuple[tuple[str, ...], tuple[str, ...]], Pair] = {}
        self._facts = facts or Facts(Signature.of(self.algorithm))
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
        from ..algebra.prepare import prepare_algorithm

        return prepare_algorithm(self.plain, self.outputs)

    @cached_property
    def differentiated(self) -> Algorithm:
        """The algorithm as gradients are derived of it."""
        from ..algebra.prepare import differentiable_form

        return differentiable_form(self.plain, self.outputs)

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """What forward may hand to backward where sizes speak for it."""
        if self._facts.products is not None:
            return self._facts.products
        from ..algebra.products import chained_products

        return chained_products(self.differentiated, self.outputs)

    def check(self, op: str, tensors: dict[str, torch.Tensor]) -> None:
        """Raise ValueError, one line, where ranks or extents do not fit."""
        sizes, tied = self.signature.sizes, self._tied
        seen = {tied.get(label, label): (size, "the program", label) for label, size in sizes.items() if isinstance(size, int)}
        for name, t in tensors.items():
            labels = self.signature.inputs[name]
            if t.dim() != len(labels):
                raise ValueError(f"{op}: {name} has {len(labels)} dimensions; got shape {tuple(t.shape)}")
            for label, size in zip(labels, t.shape):
                if label is not None and seen.setdefault(tied.get(label, label), (size, name, label))[0] != size:
                    known, other, its = seen[tied.get(label, label)]
                    where = "" if its == label else f" along {its}; the two are one extent"
                    shapes = ", ".join(f"{n} {tuple(x.shape)}" for n, x in tensors.items())
                    raise ValueError(f"{op}: {name} has {size} along {label}, {other} has {known}{where}; shapes {shapes}")

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

    def pair_for(self, wanted: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> Pair:
        """Forward and backward for the gradients ``wanted`` of a call on ``tensors``."""
        return self.pair_at(wanted, self.signature.extents(tensors)) if self.products else self.pair(wanted)

    def pair_at(self, wanted: tuple[str, ...], sizes: Mapping[str, int | torch.SymInt]) -> Pair:
        """Forward and backward at these extents: products that are no larger than one of their operands are handed over."""
        from ..algebra.kept import kept_products

        return self.pair(wanted, kept_products(self.products, sizes, _surely))

    def pair(self, wanted: tuple[str, ...], kept: tuple[str, ...] = ()) -> Pair:
        """Forward and backward for the gradients ``wanted``; forward hands over those of the products ``kept`` that backward needs."""
        if (wanted, kept) not in self._pairs:
            derived = lru_cache(maxsize=None)(lambda: self._derived(wanted, kept))
            known = self._facts.halves(wanted, kept) or Halves.of(derived())
            self._pairs[wanted, kept] = self.pair(wanted, known.products) if known.products != kept else self._paired(wanted, known, derived)
        return self._pairs[wanted, kept]

    def _paired(self, wanted: tuple[str, ...], known: Halves, derived: Callable[[], Gradient]) -> Pair:
        forward, kept = self, known.products
        if known.outputs != self.outputs:
            subject = replace(self.subject, saved=True, wanted=wanted, kept=kept)
            forward = Variant(lambda: derived().forward, known.outputs, subject, known.forward and Facts(known.forward))
        subject = replace(self.subject, direction="backward", wanted=wanted, kept=kept)
        backward = Variant(lambda: derived().backward, tuple(known.grads.values()), subject, known.backward and Facts(known.backward))
        return Pair(known, self.outputs, forward, backward, (*self.signature.inputs, *self.signature.scalars))

    def _derived(self, wanted: tuple[str, ...], kept: tuple[str, ...]) -> Gradient:
        from ..algebra.gradient import gradient

        return gradient(self.differentiated, self.outputs, wanted, kept)

    def pairs(self) -> tuple[Pair, ...]:
        """The pairs derived so far."""
        return tuple({id(pair): pair for pair in self._pairs.values()}.values())

    def forward(self, op: str, tensors: dict[str, torch.Tensor], scalars: dict[str, object]) -> tuple[torch.Tensor, ...]:
        """The outputs by a generated kernel where one can run, else by the reference; counted.

        Where no kernel can be compiled for a GPU, and none is prebuilt for this call, that is the reference too, with a warning.
        """
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
        from .reference import evaluate

        count(op, "reference")
        return tuple(_own(r, tensors) for r in evaluate(self.algorithm, tensors, scalars, self.outputs))

    def program(self, sizes: dict[str, int], itemsize: int, gpu: Target) -> Program:
        """The algorithm with the formula's schedule for ``sizes``."""
        from ..codegen.formula import formula
        from ..lang.schedule import Program

        return Program(self.algorithm, formula(self.algorithm, self.outputs, sizes, itemsize, gpu))

    def sizes_from(self, shape: tuple[int, ...] | None) -> dict[str, int]:
        """Extents from a plain tuple: output labels first, then the others in order of declaration."""
        root = self.algorithm[self.outputs[0]]
        order = root.labels + tuple(label for label in self.algorithm.labels if label not in root.labels)
        shape = shape if shape is not None else (4096,) * len(order)
        if len(shape) > len(order) or len(shape) < len(root.labels):
            raise ValueError(f"shape names {len(root.labels)} to {len(order)} extents ({', '.join(order)}); got {tuple(shape)}")
        return dict(zip(order, (*shape, *(shape[-1:] * len(order)))))


class _Differentiable(torch.autograd.Function):
    """Forward and backward by the kernels of the derived gradient."""

    @staticmethod
    def forward(ctx, pair: Pair, op: str, names: tuple[str, ...], plain: dict[str, object], *values):
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
        with torch.no_grad():
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
