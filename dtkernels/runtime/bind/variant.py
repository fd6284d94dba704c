"""Specialize one op: bind its parameters, run the forward, derive and run the gradient, choose the path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ...codegen.target import TARGETS, Target, target
from ..build.toolchain import NoCompiler
from ..dispatch.dispatcher import Dispatcher
from ..log import warn_once
from ..path_counters import checking, count, interpreting, unable
from ..select.schedule_selection import Call
from ..signature.arguments import Interface
from ..signature.given_sizes import free_labels, sizes_in_order
from ..signature.op_manifest import Facts
from ..signature.signature import Halves, Signature
from ..torch_support.dtypes import FLOAT8_NAMES, KERNEL_DTYPES
from ..torch_support.tensor_checks import check_written, in_memory, is_batch, refuse_batches
from ..torch_support.unsupported_autograd import without_derivative

if TYPE_CHECKING:
    from ...algebra.autodiff.gradient import Gradient
    from ...algebra.autodiff.rematerialization import Product
    from ...lang.algorithm import Algorithm
    from ...lang.schedule import Program


@dataclass(frozen=True)
class DifferentiablePair:
    """A gradient with the variants that run its two halves. ``public`` are the outputs that the caller sees."""

    gradient: Halves
    public: tuple[str, ...]
    forward: Variant
    backward: Variant
    names: tuple[str, ...]  #: the inputs and scalars of a call


class Variant:
    """One specialization of an op, with its kernels. Where ``facts`` are known, the algorithm is made on first use only."""

    def __init__(self, make: Callable[[], Algorithm], outputs: tuple[str, ...], subject: Call, facts: Facts | None = None):
        self._make, self.outputs, self.subject = make, outputs, subject
        self.written = self  #: the variant of the algorithm as the user wrote it
        self._pairs: dict[tuple[tuple[str, ...], tuple[str, ...]], DifferentiablePair] = {}
        self._again: dict[tuple[str, ...], tuple[Product, ...]] = {}
        self._facts = facts or Facts(Signature.of(self.algorithm, outputs if subject.direction == "forward" and not subject.saved else ()))
        self.signature = self._facts.signature
        self._tied = {} if facts else {label: min(self.algorithm.tied_labels(label)) for label in self.algorithm.labels}
        self.dispatch = Dispatcher(subject, self.signature, lambda: self.algorithm, outputs, device_target)

    @cached_property
    def plain(self) -> Algorithm:
        """The algorithm as written, with parameters bound and batch labels added."""
        return self._make()

    @cached_property
    def algorithm(self) -> Algorithm:
        """The prepared algorithm, which is lowered."""
        from ...algebra.pipeline import prepare_algorithm

        return prepare_algorithm(self.plain, self.outputs)

    @cached_property
    def evaluated(self) -> Algorithm:
        """The form of the algorithm that torch evaluates where it is to differentiate that by itself."""
        from ...algebra.pipeline import evaluated_form
        from ...lang import expr as ex

        detached = any(isinstance(n, ex.Call) and n.fn == "detach" for d in self.plain.definitions for n in d.expr.walk())
        return evaluated_form(self.plain, self.outputs) if detached else self.algorithm

    @cached_property
    def differentiated(self) -> Algorithm:
        """The form of the algorithm that gradients are derived from."""
        from ...algebra.pipeline import differentiable_form

        return differentiable_form(self.plain, self.outputs)

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """The products that forward may save for backward where the sizes make it worthwhile."""
        if self._facts.products is not None:
            return self._facts.products
        from ...algebra.autodiff.gradient import savable_products

        return savable_products(self.differentiated, self.outputs)

    def check(self, op: str, tensors: dict[str, torch.Tensor], given: dict[str, torch.Tensor], interface: Interface) -> None:
        """Raise ValueError, one line, where extents disagree. ``given`` are the caller's tensors, before they were bound to shapes."""
        sizes, tied = self.signature.sizes, self._tied
        seen: dict[str, tuple[str | None, str, int]] = {tied.get(label, label): (None, label, n) for label, n in sizes.items() if isinstance(n, int)}
        for name, t in tensors.items():
            labels = self.signature.inputs[name]
            if t.dim() != len(labels):
                raise interface.refuse_rank(op, self.signature, given, name)
            for label, size in zip(labels, t.shape):
                if label is not None and (known := seen.setdefault(tied.get(label, label), (name, label, size)))[2] != size:
                    raise interface.differing(op, self.signature, given, known, (name, label, size))
        if self.signature.agree or any(isinstance(s, tuple) and len(s) == 3 for s in sizes.values()):
            self._check_formulas(op, tensors)

    def _check_formulas(self, op: str, tensors: dict[str, torch.Tensor]) -> None:
        """Raise ValueError, one line, where an extent that is worked out is negative or disagrees with another source."""
        from ...lang.extents.sources import computed, source_text

        def at(tensor: str, dim: int) -> int:
            return tensors[tensor].shape[dim]

        for label, source in self.signature.sizes.items():
            if isinstance(source, tuple) and len(source) == 3 and (size := computed(source, at)) < 0:
                raise ValueError(f"{op}: the extent of {label} is {size}: {source_text(source)}; allowed: 0 or more")
        for label, source in self.signature.agree:
            size, wanted = computed(self.signature.sizes[label], at), computed(source, at)
            if size != wanted:
                raise ValueError(f"{op}: {label} has extent {wanted}, {source_text(source)}; inputs have {size}")

    def run(self, op: str, tensors: dict[str, torch.Tensor], scalars: dict[str, object]) -> tuple[torch.Tensor, ...]:
        """Return the outputs, differentiable where an input requires a gradient."""
        given = {**tensors, **scalars}
        wanted = tuple(n for n, v in given.items() if isinstance(v, torch.Tensor) and v.requires_grad)
        if not (torch.is_grad_enabled() and wanted):
            return self.forward(op, tensors, scalars)
        if self.signature.written:
            raise NotImplementedError(f"{op}: it changes {self.signature.written[0]} and has no gradient; allowed: torch.no_grad()")
        names = tuple(n for n, v in given.items() if isinstance(v, torch.Tensor))
        plain = {n: v for n, v in given.items() if n not in names}
        results = _Differentiable.apply(self.pair_for(wanted, tensors), op, names, plain, *(given[n] for n in names))
        return results[: len(self.outputs)]

    def pair_for(self, wanted: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> DifferentiablePair:
        """Return the forward and backward of a call on ``tensors`` for the gradients ``wanted``."""
        if not self.products and not self.is_number:
            return self.pair(wanted)
        dtype = self.signature.result_dtype(tensors)
        return self.pair_at(wanted, self.signature.extents(tensors), dtype.itemsize, dtype == torch.bfloat16)

    def pair_at(self, wanted: tuple[str, ...], sizes: Mapping[str, int | torch.SymInt], itemsize: int, wide: bool = False) -> DifferentiablePair:
        """Return the forward and backward at these extents, where results take ``itemsize`` bytes an element. ``wide``: their range is that of float32."""
        from ...algebra.autodiff.rematerialization import JOINT, is_adjoint_formed_in_forward, products_to_save

        needed = self.pair(wanted, tuple(p.name for p in self.products)).gradient.products
        saved = products_to_save(tuple(p for p in self.products if p.name in needed), sizes, itemsize, _statically_true)
        if wide and itemsize == 2 and self.is_number and (again := self._made_again(wanted)):
            elements = [prod(sizes.get(x, 1) if x else 1 for x in labels) * (2 if n in wanted else 1) for n, labels in self.signature.inputs.items()]
            if is_adjoint_formed_in_forward(again, saved, sizes, itemsize * sum(elements), _statically_true):
                return self.pair(wanted, (JOINT,))
        return self.pair(wanted, saved)

    @cached_property
    def is_number(self) -> bool:
        """Whether the only result is one number."""
        outline = self.signature.outline
        return len(self.outputs) == 1 and outline is not None and any(f.name == self.outputs[0] and not f.labels for f in outline.funcs)

    def _made_again(self, wanted: tuple[str, ...]) -> tuple[Product, ...]:
        """Return the product that forward and backward both make, and whose adjoint tells all gradients; none where there is none or several."""
        if wanted not in self._again:
            from ...algebra.autodiff.joint import products_in_both_directions

            found = products_in_both_directions(self.differentiated, self.outputs, wanted)
            self._again[wanted] = found if len(found) == 1 else ()
        return self._again[wanted]

    def pair(self, wanted: tuple[str, ...], kept: tuple[str, ...] = ()) -> DifferentiablePair:
        """Return the forward and backward for the gradients ``wanted``. Forward saves those of the products ``kept`` that backward needs."""
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
        from ...algebra.autodiff.joint import joint_gradient
        from ...algebra.autodiff.rematerialization import JOINT

        if kept == (JOINT,):
            return joint_gradient(self.differentiated, self.outputs, wanted)
        return gradient(self.differentiated, self.outputs, wanted, kept)

    def gradients(self, op: str, tensors: dict[str, torch.Tensor], scalars: dict[str, object], adjoints: dict[str, torch.Tensor], wanted: tuple[str, ...]):
        """Return the gradients of ``wanted`` by backward alone. Forward runs only where backward reads what it computes."""
        pair = self.pair(wanted)
        known = tensors | {pair.gradient.adjoints[o]: g for o, g in adjoints.items()}
        if not known.keys() >= {*pair.backward.signature.inputs}:
            known |= dict(zip(pair.forward.outputs, _run(pair.forward, op, tensors, scalars)))
        found = dict(zip(pair.gradient.grads, _run(pair.backward, f"{op} backward", known, scalars)))
        return tuple(found[n] for n in wanted)

    def pairs(self) -> tuple[DifferentiablePair, ...]:
        """Return the pairs derived so far."""
        return tuple({id(pair): pair for pair in self._pairs.values()}.values())

    def forward(self, op: str, tensors: dict[str, torch.Tensor], scalars: dict[str, object]) -> tuple[torch.Tensor, ...]:
        """Compute the outputs by a generated kernel where one can run, else by the reference; count the path.

        Falls back to the reference, with a warning, where no kernel can be compiled for the GPU and none is prebuilt for this call.
        """
        if self.signature.written:
            check_written(op, self.signature.written, tensors)
        if checking() and self.subject.direction == "forward":
            self._check_indices(op, tensors, scalars)
        path = choose_path(tensors)
        if len(self.outputs) > 1 and not all(t.numel() for t in tensors.values()):
            path = "reference"  # the kernel's own Func may be empty, which leaves no programs for the others
        if path != "reference":
            refuse_batches(op, (*tensors.values(), *scalars.values()))
            tensors, scalars = ({n: in_memory(v) for n, v in given.items()} for given in (tensors, scalars))
            try:
                results = tuple(self.dispatch(tensors, scalars))
                count(op, path)
                return self._with_arguments(results, tensors) if self.signature.written else results
            except NoCompiler as error:
                gpu = next(iter(tensors.values())).get_device()
                unable(gpu, f"no kernel can be compiled: {error}")
                warn_once(f"{op}: the torch reference runs on GPU {gpu}, since no kernel can be compiled: {error}")
        from ..reference.evaluator import evaluate

        count(op, "reference")
        written = self.algorithm.written
        results = evaluate(self.algorithm, tensors, scalars, self.outputs)
        return tuple(r if o in written else _as_kernel_result(r, tensors) for o, r in zip(self.outputs, results))

    def _with_arguments(self, results: tuple[torch.Tensor, ...], tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the results, with the call's own tensors in place of others for the same memory."""
        written = self.algorithm.written
        return tuple(tensors[written[o]] if o in written else r for o, r in zip(self.outputs, results))

    def _check_indices(self, op: str, tensors: dict[str, torch.Tensor], scalars: dict[str, object]) -> None:
        """Raise IndexError, one line, for a used element out of range."""
        from ..reference.index_checks import check_indices

        check_indices(op, self.written.plain, tensors, scalars, self.written.outputs)

    def program(self, sizes: dict[str, int], itemsize: int, gpu: Target) -> Program:
        """Combine the algorithm with the default schedule for ``sizes``."""
        from ...autoschedule.default_schedule import default_schedule
        from ...lang.schedule import Program

        return Program(self.algorithm, default_schedule(self.algorithm, self.outputs, sizes, itemsize, gpu))

    def sizes_from(self, shape: tuple[int, ...] | None) -> dict[str, int]:
        """Return the extents of all labels from a tuple in the order of ``free_labels``; None stands for 4096 each.

        Raises DTError where the count differs.
        """
        output = self.outputs[0]
        return sizes_in_order(self.algorithm, output, (4096,) * len(free_labels(self.algorithm, output)) if shape is None else shape, self.subject.op)


class _Differentiable(torch.autograd.Function):
    """Run the forward and backward kernels of the derived gradient."""

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
        saved = ctx.saved_tensors  # read once: checkpointing allows no second access
        known = {**ctx.plain, **dict(zip(ctx.kept, saved))}
        known |= {pair.gradient.adjoints[o]: g for o, g in zip(pair.public, grads)}
        a = backward.signature
        results: tuple[torch.Tensor, ...] = ()
        with torch.no_grad():
            if pair.gradient.grads:  # else no wanted input enters differentiably
                results = backward.forward(f"{ctx.op} backward", {n: known[n] for n in a.inputs}, {n: known[n] for n in a.scalars})
        found = dict(zip(pair.gradient.grads, results))
        shaped = tuple(_shaped_like(found.get(n), ctx.like.get(n)) for n in ctx.names)
        return (None, None, None, None, *without_derivative(ctx.op, shaped, (*saved, *grads)))


def _run(variant: Variant, op: str, tensors: dict[str, torch.Tensor], scalars: dict[str, object]) -> tuple[torch.Tensor, ...]:
    a = variant.signature
    return variant.forward(op, {n: tensors[n] for n in a.inputs}, {n: scalars[n] for n in a.scalars})


def _statically_true(condition: bool | torch.SymBool) -> bool:
    """Tell whether a comparison is statically true. Comparisons of symbolic sizes usually are not.

    torch.compile then saves a product, as torch itself does, and need not recompile for sizes on the other side.
    """
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def _as_kernel_result(result: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a result as kernels produce it: contiguous, in its own memory, and not a view.

    torch forbids in-place changes of a view that an autograd.Function returns.
    """
    if is_batch(result):
        return result
    result = result.contiguous()
    shared = (
        any(result.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in tensors.values()) if result.numel() else False
    )
    if shared:
        return result.clone()
    return result.data if result._is_view() and not torch._C._is_tracing() else result  # ``data`` would be lost in a trace


def _shaped_like(grad: torch.Tensor | None, like: tuple[torch.Size, torch.dtype] | None) -> torch.Tensor | None:
    return None if grad is None or like is None else grad.reshape(like[0]).to(like[1])


def choose_path(tensors: Mapping[Any, torch.Tensor]) -> str:
    """Return gpu, interpreter or reference, by device and dtype."""
    if any(t.is_floating_point() and t.dtype not in (*KERNEL_DTYPES, *FLOAT8_NAMES) for t in tensors.values()):
        return "reference"
    if next(iter(tensors.values())).is_cuda:
        return "gpu"
    return "interpreter" if interpreting() and next(iter(tensors.values())).device.type == "cpu" else "reference"


@lru_cache(maxsize=32)
def device_target(device: torch.device) -> Target:
    """Return the Target of ``device``. The interpreter counts as an H200."""
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
        bandwidth=_bandwidth(p),
        l2_bytes=p.L2_cache_size,
        warp_size=64 if hip else 32,
    )


def _bandwidth(p: Any) -> float:
    """Return bytes a second of a GPU's memory: the datasheet's, else by its memory clock and bus; 0 where neither is known."""
    named = next((t for t in TARGETS.values() if p.name.upper().startswith(f"NVIDIA {t.name.upper()}")), None)
    if named is not None:  # an instance of a partitioned GPU has a share of its memory, nearly as large as that of its multiprocessors
        return named.bandwidth * (min(1.0, p.multi_processor_count / named.multiprocessors) if " MIG " in p.name else 1.0)
    return 2e3 * getattr(p, "memory_clock_rate", 0) * getattr(p, "memory_bus_width", 0) / 8  # kHz, bits, two transfers a clock
