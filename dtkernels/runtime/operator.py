"""An op made from a spec: binds a call, picks the path, runs it, differentiates it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ..algebra.batch import add_batch
from ..algebra.fold import bind_parameters
from ..algebra.gradient import Gradient, gradient
from ..algebra.prepare import differentiable_form, prepare_algorithm
from ..codegen.formula import formula
from ..codegen.target import Target, target
from ..codegen.triton_module import emit, plain_labels
from ..lang import expr as ex
from ..lang.algorithm import Algorithm
from ..lang.schedule import Program, Schedule
from ..lang.spec import Spec
from . import torch_ops
from .decide import Subject
from .dispatch import Dispatcher
from .once import refuse_forward_mode, without_derivative
from .paths import count
from .quick import QuickCalls
from .reference import evaluate
from .shapes import Fitted, fit
from .sharded import any_sharded, call_sharded
from .table import spec_hash

INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int32, torch.int64)
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


_compiling = torch.compiler.is_dynamo_compiling


class Asked(Exception):
    """Raised in place of a call that is only asked about; has its arguments."""


class Operator:
    """The callable behind ``dtkernels.ops.<name>``.

    Parameters are the spec's inputs, then its scalars, in order of declaration, by place or by name; compile-time
    parameters by name. Inputs may have more leading dimensions than declared; they are batched.
    """

    def __init__(self, spec: Spec):
        self.spec = spec
        self.__name__ = spec.op
        self.__doc__ = f"{spec.doc}\n\n{spec.algorithm}"
        self._variants: dict[tuple, Variant] = {}
        self._integers = spec.algorithm.integer_inputs()
        self._spec_hash = spec_hash(spec.algorithm)
        #: whether there are products for the matrix units; the setting of float32 products then matters, and autocast lowers
        self.products = any(isinstance(n, ex.Dot) for d in spec.algorithm.definitions for n in d.expr.walk())
        self._quick = QuickCalls(self.products)
        self._asking, self._asked = threading.Lock(), None
        torch_ops.known[spec.op] = self

    def __repr__(self) -> str:
        return f"<dtkernels op {self.spec.op}>"

    def __call__(self, *args, **kwargs):
        if _compiling():
            return torch_ops.call_entry(self.__name__, torch_ops.signature(self.__name__), args, kwargs)
        quick = self._quick
        key = quick.key(args, kwargs)
        run = quick.known.get(key)
        return run(args, kwargs) if run is not None else self._unknown(key, args, kwargs)

    def _unknown(self, key: tuple | None, args: tuple, kwargs: dict):
        """A call of a kind that was not seen before."""
        if self._asked is not None and self._asked == threading.get_ident():
            raise Asked(args, kwargs)
        refuse_forward_mode(self.spec.op, (*args, *kwargs.values()))
        if torch._C._are_functorch_transforms_active():
            torch_ops.ensure(self.spec.op)
            return torch_ops.recorded(self, args, kwargs)
        if any_sharded((*args, *kwargs.values())):
            return call_sharded(self, args, kwargs)
        if key is None and special(args, kwargs):
            return torch_ops.call_entry(self.spec.op, torch_ops.signature(self.spec.op), args, kwargs, opaque=True)
        if torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"):
            device = next((v.device.type for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)), "cpu")
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                dtype = self.autocast_dtype(device)
                cast = torch_ops.cast_to
                with torch.amp.autocast(device, enabled=False):
                    return self(*[cast(v, dtype) for v in args], **{n: cast(v, dtype) for n, v in kwargs.items()})
        bound = self.bind(args, kwargs)
        results = tuple(bound.fitted.restore(r) for r in bound.variant.run(self.spec.op, bound.fitted.tensors, bound.scalars))
        if key is not None:
            self._quick.learn(key, args, kwargs, bound, results)
        return results if len(results) > 1 else results[0]

    def plain(self, args: tuple, kwargs: dict):
        """A call without gradients that runs here and now, whatever asks for it."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.plain(args, kwargs)
        key = self._quick.key(args, kwargs)
        run = self._quick.known.get(key)
        if run is None:
            bound = self.bind(args, kwargs)
            results = tuple(bound.fitted.restore(r) for r in bound.variant.forward(self.spec.op, bound.fitted.tensors, bound.scalars))
            if key is not None:
                self._quick.learn(key, args, kwargs, bound, results)
            return results if len(results) > 1 else results[0]
        return run(args, kwargs)

    def autocast_dtype(self, device: str) -> torch.dtype | None:
        """The dtype of inputs under autocast: the lower one for matrix products, else what the spec says; None: as they are."""
        if self.spec.autocast is not None:
            return torch.float32 if self.spec.autocast == "fp32" else None
        return torch.get_autocast_dtype(device) if self.products else None

    def arguments(self, call: Callable[[], object]) -> tuple[tuple, dict]:
        """The arguments with which ``call()`` calls this op, which is not run."""
        with self._asking:
            known, self._quick.known = self._quick.known, {}
            self._asked = threading.get_ident()
            try:
                call()
            except Asked as asked:
                return asked.args[0], asked.args[1]
            finally:
                self._asked, self._quick.known = None, known
        raise RuntimeError(f"{self.spec.op} was not called")

    def bind(self, args: tuple, kwargs: dict) -> BoundCall:
        """The variant that a call runs, with its tensors in the shapes that it wants. Raises TypeError and ValueError, one line."""
        tensors, scalars, params = self.named(args, kwargs)
        core = self.variant(tuple(sorted(params.items())), frozenset(), 0)
        tensors = {name: tensors[name] for name in core.algorithm.inputs}
        self._check_types(tensors)
        fitted = fit(self.spec.op, core.algorithm, tensors)
        variant = self.variant(tuple(sorted(params.items())), fitted.batched, fitted.labels) if fitted.labels else core
        variant.check(self.spec.op, fitted.tensors)
        key = (tuple(sorted(params.items())), fitted.batched if fitted.labels else frozenset(), fitted.labels)
        return BoundCall(variant, tensors, fitted, {name: scalars[name] for name in variant.algorithm.scalars}, key)

    def variant(self, params: tuple, batched: frozenset[str], labels: int) -> Variant:
        """The op with its parameters bound and its batch labels added."""
        key = (params, batched, labels)
        if key not in self._variants:
            algorithm = add_batch(bind_parameters(self.spec.algorithm, dict(params)), batched, labels)
            subject = Subject(self.spec.op, self._spec_hash, params=params, batched=tuple(sorted(batched)) if labels else ())
            self._variants[key] = Variant(algorithm, self.spec.outputs, subject)
        return self._variants[key]

    def source(self, shape: tuple[int, ...] | None = None, gpu: str = "h200", dtype: torch.dtype = torch.bfloat16, **params) -> str:
        """The emitted file for labels of extents ``shape``: the output's labels in order, then the reduced ones. Needs no GPU."""
        variant = self.variant(tuple(sorted(params.items())), frozenset(), 0)
        return emit(variant.program(variant.sizes_from(shape), dtype.itemsize, target(gpu)))

    def named(self, args: tuple, kwargs: dict) -> tuple[dict, dict, dict]:
        """A call as inputs, scalars and parameters by name. Raises TypeError, one line, where names do not agree."""
        a = self.spec.algorithm
        names = a.inputs + a.scalars
        if len(args) > len(names):
            raise TypeError(f"{self.spec.op}: {len(args)} positional arguments; allowed: {', '.join(names)}")
        given = dict(zip(names, args))
        for name, value in kwargs.items():
            if name in given or name not in names + tuple(n for n, _ in a.params):
                allowed = ", ".join(names + tuple(n for n, _ in a.params))
                raise TypeError(f"{self.spec.op}: {'repeated' if name in given else 'unknown'} argument {name!r}; allowed: {allowed}")
            given[name] = value
        params = {n: given[n] for n, default in a.params if n in given and given[n] != default}
        needed = self.variant(tuple(sorted(params.items())), frozenset(), 0).algorithm
        for name in needed.inputs + needed.scalars:
            if given.get(name) is None:
                raise TypeError(f"{self.spec.op}: argument {name!r} is missing; allowed: {', '.join(names)}")
        return {n: given.get(n) for n in a.inputs}, {n: given.get(n) for n in a.scalars}, params

    def _check_types(self, tensors: dict[str, torch.Tensor]) -> None:
        first = next(iter(tensors))
        for name, t in tensors.items():
            if not isinstance(t, torch.Tensor):
                raise TypeError(f"{self.spec.op}: {name} is a {type(t).__name__}; allowed: a tensor")
            if t.device != tensors[first].device:
                raise ValueError(f"{self.spec.op}: {name} is on {t.device}, {first} is on {tensors[first].device}; allowed: one device")
            if (
                not t.is_floating_point()
                and t.dtype not in (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
                or t.is_complex()
            ):
                raise TypeError(f"{self.spec.op}: {name} is {t.dtype}; allowed: floating point, or bool and integers for masks")
            if name in self._integers and t.dtype not in INTEGER_DTYPES:
                raise TypeError(f"{self.spec.op}: {name} is {t.dtype}; allowed: int32, int64, int8 or uint8, as it stands in an index")


@dataclass(frozen=True)
class BoundCall:
    """One call of an op: what runs it, the tensors as given and as fitted, the scalars."""

    variant: Variant
    given: dict[str, torch.Tensor]
    fitted: Fitted
    scalars: dict[str, object]
    key: tuple  #: what ``Operator.variant`` gives the variant for


@dataclass(frozen=True)
class Pair:
    """A gradient with what runs its two halves; ``public`` are the outputs that the caller sees."""

    gradient: Gradient
    public: tuple[str, ...]
    forward: Variant
    backward: Variant
    names: tuple[str, ...]  #: of the inputs and scalars of a call


class Variant:
    """One algorithm, prepared, with the kernels emitted for it so far."""

    def __init__(self, algorithm: Algorithm, outputs: tuple[str, ...], subject: Subject):
        self.plain, self.outputs, self.subject = algorithm, outputs, subject
        self.algorithm = algorithm = prepare_algorithm(algorithm, outputs)
        self._pairs: dict[tuple[str, ...], Pair] = {}
        self.dims = {t: plain_labels(algorithm, t) for t in algorithm.inputs}
        self.dispatch = Dispatcher(subject, algorithm, outputs, device_target)

    def check(self, op: str, tensors: dict[str, torch.Tensor]) -> None:
        """Raise ValueError, one line, where ranks or extents do not fit."""
        seen: dict[str, tuple[int, str]] = {}
        for name, t in tensors.items():
            if t.dim() != len(self.dims[name]):
                raise ValueError(f"{op}: {name} has {len(self.dims[name])} dimensions; got shape {tuple(t.shape)}")
            for label, size in zip(self.dims[name], t.shape):
                if label is not None and seen.setdefault(label, (size, name))[0] != size:
                    known, other = seen[label]
                    shapes = ", ".join(f"{n} {tuple(x.shape)}" for n, x in tensors.items())
                    raise ValueError(f"{op}: {name} has {size} along {label}, {other} has {known}; shapes {shapes}")

    def run(self, op: str, tensors: dict[str, torch.Tensor], scalars: dict[str, object]) -> tuple[torch.Tensor, ...]:
        """The outputs, differentiable where an input asks for it."""
        given = {**tensors, **scalars}
        wanted = tuple(n for n, v in given.items() if isinstance(v, torch.Tensor) and v.requires_grad)
        if not (torch.is_grad_enabled() and wanted):
            return self.forward(op, tensors, scalars)
        names = tuple(n for n, v in given.items() if isinstance(v, torch.Tensor))
        plain = {n: v for n, v in given.items() if n not in names}
        results = _Differentiable.apply(self.pair(wanted), op, names, plain, *(given[n] for n in names))
        return results[: len(self.outputs)]

    def pair(self, wanted: tuple[str, ...]) -> Pair:
        """Forward and backward for the gradients ``wanted``."""
        if wanted not in self._pairs:
            found = gradient(differentiable_form(self.plain, self.outputs), self.outputs, wanted)
            forward = self
            if found.forward_outputs != self.outputs:
                forward = Variant(found.forward, found.forward_outputs, replace(self.subject, saved=True, wanted=wanted))
            backward = Variant(found.backward, tuple(found.grads.values()), replace(self.subject, direction="backward", wanted=wanted))
            self._pairs[wanted] = Pair(found, self.outputs, forward, backward, (*self.algorithm.inputs, *self.algorithm.scalars))
        return self._pairs[wanted]

    def pairs(self) -> tuple[Pair, ...]:
        """The pairs derived so far."""
        return tuple(self._pairs.values())

    def forward(self, op: str, tensors: dict[str, torch.Tensor], scalars: dict[str, object]) -> tuple[torch.Tensor, ...]:
        """The outputs by a generated kernel where one can run, else by the reference; counted."""
        path = choose_path(tensors)
        count(op, path)
        if path == "reference":
            return tuple(_own(r, tensors) for r in evaluate(self.algorithm, tensors, scalars, self.outputs))
        return tuple(self.dispatch(tensors, scalars))

    def program(self, sizes: dict[str, int], itemsize: int, gpu: Target) -> Program:
        """The algorithm with the formula's schedule for ``sizes``."""
        schedule: Schedule = formula(self.algorithm, self.outputs, sizes, itemsize, gpu)
        return Program(self.algorithm, schedule)

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
        forward = pair.forward
        results = forward.forward(op, {n: given[n] for n in forward.algorithm.inputs}, {n: given[n] for n in forward.algorithm.scalars})
        known = {**given, **dict(zip(forward.outputs, results))}
        kept = [n for n in (*pair.backward.algorithm.inputs, *pair.backward.algorithm.scalars) if n in known]
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
        inputs = {n: known[n] for n in backward.algorithm.inputs}
        with torch.no_grad():
            results = backward.forward(f"{ctx.op} backward", inputs, {n: known[n] for n in backward.algorithm.scalars})
        found = dict(zip(pair.gradient.grads, results))
        shaped = tuple(_like(found.get(n), ctx.like.get(n)) for n in ctx.names)
        return (None, None, None, None, *without_derivative(ctx.op, shaped, (*saved, *grads)))


def _own(result: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """A result as a kernel leaves it: contiguous, in memory of its own."""
    result = result.contiguous()
    shared = (
        any(result.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in tensors.values()) if result.numel() else False
    )
    return result.clone() if shared else result


def special(args: tuple, kwargs: dict) -> bool:
    """Whether tensors are not plain ones with data, or a dispatch mode is on: torch's dispatcher knows what to do with those."""
    if torch._C._len_torch_dispatch_stack():
        return True
    for v in (*args, *kwargs.values()):
        if isinstance(v, torch.Tensor):
            if type(v) not in (torch.Tensor, torch.nn.Parameter):
                return True
    return False


def _like(grad: torch.Tensor | None, like: tuple[torch.Size, torch.dtype] | None) -> torch.Tensor | None:
    return None if grad is None or like is None else grad.reshape(like[0]).to(like[1])


def choose_path(tensors: dict[str, torch.Tensor]) -> str:
    """gpu, interpreter or reference, by device and dtype."""
    if any(t.is_floating_point() and t.dtype not in KERNEL_DTYPES for t in tensors.values()) or not any(
        t.is_floating_point() for t in tensors.values()
    ):
        return "reference"
    if next(iter(tensors.values())).is_cuda:
        return "gpu"
    return "interpreter" if os.environ.get("TRITON_INTERPRET") == "1" and next(iter(tensors.values())).device.type == "cpu" else "reference"


@lru_cache(maxsize=32)
def device_target(device: torch.device) -> Target:
    """What is known of the GPU behind ``device``; the interpreter stands in for an H200."""
    if device.type != "cuda":
        return target("h200")
    p = torch.cuda.get_device_properties(device)
    hip = getattr(torch.version, "hip", None)
    shared = getattr(p, "shared_memory_per_block_optin", 101376)
    arch: int | str = p.gcnArchName.split(":")[0] if hip else p.major * 10 + p.minor
    return Target(p.name, "hip" if hip else "cuda", arch, p.multi_processor_count, 65536 if hip else shared, 1e12, 64 if hip else 32)
