"""Call an op: bind the arguments, choose the path, run, differentiate."""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad

from ..dispatch.call_cache import CallCache, Repeat
from ..select.schedule_selection import Call
from ..signature.arguments import Interface, refuse_layout, type_name
from ..signature.op_manifest import OpManifest, read_manifest
from ..signature.shape_binding import BoundShapes, bind_shapes
from ..signature.signature import check_integers, check_magnitude
from ..torch_support.dtypes import FLOAT8_NAMES, INTEGER_DTYPES, KERNEL_DTYPES
from ..torch_support.unsupported_autograd import refuse_forward_mode
from . import library_ops
from .variant import DifferentiablePair, Variant, choose_path, device_target

if TYPE_CHECKING:
    from inspect import Signature

    from ...lang.spec import Spec

__all__ = ["KERNEL_DTYPES", "ArgumentsRequested", "BoundCall", "Operator", "DifferentiablePair", "Variant", "choose_path", "device_target"]
MOST_OF_A_PARAMETER = 10**18 - 1  #: the language has no integers of more digits
_compiling = torch.compiler.is_dynamo_compiling
_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._is_tracing
_grad_enabled = torch.is_grad_enabled


class ArgumentsRequested(Exception):
    """Raised in place of a call whose arguments are asked for; holds them."""


class Operator:
    """The callable behind ``dtkernels.ops.<name>``.

    Parameters are the spec's inputs, then its scalars, in order of declaration, positional or by name; compile-time parameters by name.
    Inputs may have more leading dimensions than declared; they are batched.
    """

    traced = False  #: whether this stands in for an operator while torch.compile traces a call

    def __init__(self, spec: Spec | Path, interface: Interface | None = None, shipped: bool = False):
        """``spec``: a spec, or the file of one. A file with a manifest beside it is parsed only when more than the manifest is needed.

        ``interface``: the caller's names of the arguments, where a front function renames them. ``shipped``: it is an op of the package.
        """
        self._from, self.interface = spec, interface or Interface()
        manifest = read_manifest(spec) if isinstance(spec, Path) else None
        self.manifest = manifest or OpManifest.of(self.spec)
        self.name = self.__name__ = self.manifest.op
        self._names = self.manifest.inputs + self.manifest.scalars
        self._variants: dict[tuple, Variant] = {}
        self._call_cache = CallCache(self.manifest.products)
        self._asking = threading.Lock()
        self._asked: int | None = None  #: the thread whose arguments are asked for
        self.entry = library_ops.enter(self, shipped)

    @cached_property
    def spec(self) -> Spec:
        """The parsed spec."""
        from ...lang.spec import load_spec

        return load_spec(self._from) if isinstance(self._from, Path) else self._from

    @cached_property
    def __signature__(self) -> Signature:
        """The parameters of a call, for ``inspect.signature`` and ``help``."""
        from .op_documentation import signature_of

        return signature_of(self)

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        from .op_documentation import document

        return document(self)

    def __repr__(self) -> str:
        return f"<dtkernels op {self.name}>"

    def __copy__(self) -> Operator:
        return self

    def __deepcopy__(self, memo: dict) -> Operator:
        """Return the op itself: it depends on nothing but its arguments."""
        return self

    def __call__(self, /, *args, **kwargs):  # an input may be named self
        if _compiling():
            return library_ops.call_entry(self.entry, library_ops.signature(self.entry), args, kwargs)
        call_cache = self._call_cache
        last = call_cache.last
        if len(args) == last.count and not kwargs and not _modes() and forward_ad._current_level < 0 and last.same(*args):
            if (last.grad is None or last.grad is _grad_enabled()) and (found := last.again(args, kwargs)) is not None:
                return found
        key = call_cache.key(args, kwargs)
        known = call_cache.known.get(key)
        if known is None:
            return self._unknown(key, args, kwargs)
        if (found := known.run(args, kwargs)) is None:
            return self._unknown(key, args, kwargs)
        call_cache.last = known
        return found

    def repeat(self, tensors: tuple[torch.Tensor, ...], settings: tuple):
        """Repeat a front function's call that ``fresh`` cached; None where none applies."""
        return self._call_cache.repeat(tensors, settings)

    def ready(self, tensors: tuple[torch.Tensor, ...], settings: tuple, shape: tuple[int, ...]) -> Callable[[tuple], object] | None:
        """Return ``repeat`` for a caller that guards the tensors itself: (tensors) -> the result in ``shape``, or None."""
        return self._call_cache.ready(tensors, settings, shape)

    def fresh(self, tensors: tuple[torch.Tensor, ...], settings: tuple, given: dict):
        """Call the op with ``given`` by name and cache the call. ``given`` must depend only on ``settings`` and properties of ``tensors``, not contents."""
        result = self(**given)
        self._call_cache.remember(tensors, settings, given)
        return result

    def _unknown(self, key: tuple | None, args: tuple, kwargs: dict):
        """Run a call that the call cache does not know, and cache it."""
        if self._asked is not None and self._asked == threading.get_ident():
            raise ArgumentsRequested(args, kwargs)
        for name, value in (*zip(self._names, args), *kwargs.items()):
            if isinstance(value, torch.Tensor):
                refuse_layout(self.name, self.interface.name(name), value)
        refuse_forward_mode(self.name, (*args, *kwargs.values()))
        if torch._C._are_functorch_transforms_active():
            library_ops.ensure(self.entry)
            return library_ops.recorded(self, args, kwargs)
        if any_sharded((*args, *kwargs.values())):
            from .dtensor import call_sharded

            return call_sharded(self, args, kwargs)
        if key is None and special(args, kwargs):
            return library_ops.call_entry(self.entry, library_ops.signature(self.entry), args, kwargs, opaque=True)
        if torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"):
            device = next((v.device.type for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)), "cpu")
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                dtype = self.autocast_dtype(device)
                cast = library_ops.cast_to
                with torch.amp.autocast(device, enabled=False):
                    return self(*[cast(v, dtype) for v in args], **{n: cast(v, dtype) for n, v in kwargs.items()})
        bound = self.bind(args, kwargs)
        results = tuple(bound.fitted.restore(r) for r in bound.variant.run(self.name, bound.fitted.tensors, bound.scalars))
        if key is not None:
            self._call_cache.learn(key, args, kwargs, bound, results, self._names)
        return results if len(results) > 1 else results[0]

    def plain(self, args: tuple, kwargs: dict):
        """Run a call eagerly and without gradients, in any mode."""
        last = self._call_cache.last
        if not kwargs and len(args) == last.count and last.grad is not True and last.same(*args) and (found := last.again(args, kwargs)) is not None:
            return found
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.plain(args, kwargs)
        key = self._call_cache.key(args, kwargs)
        known = self._call_cache.known.get(key)
        if known is not None and (found := known.run(args, kwargs)) is not None:
            self._call_cache.last = known
            return found
        bound = self.bind(args, kwargs)
        results = tuple(bound.fitted.restore(r) for r in bound.variant.forward(self.name, bound.fitted.tensors, bound.scalars))
        if key is not None:
            self._call_cache.learn(key, args, kwargs, bound, results, self._names)
        return results if len(results) > 1 else results[0]

    def repeatable(self, args: tuple, kwargs: dict, tensors: tuple[torch.Tensor, ...]) -> Repeat | None:
        """Return how a call that ``plain`` has run can be repeated on other ``tensors``, those among the arguments; None where it cannot."""
        with torch.no_grad():
            return self._call_cache.repeatable(self.name, args, kwargs, tensors)

    def remembered(self, tensors: tuple[torch.Tensor, ...], settings: tuple, given: dict):
        """Run a call with ``given`` by name as ``plain`` does, and cache it as ``fresh`` does, for ``repeat``."""
        result = self.plain((), given)
        self._call_cache.remember(tensors, settings, given)
        return result

    def gradients(self, wanted: tuple[str, ...], adjoints: dict[str, torch.Tensor], /, **given) -> tuple[torch.Tensor, ...]:
        """Return the gradients of the inputs ``wanted`` for those of all outputs, ``adjoints``, without autograd and without forward.

        Inputs have the ranks of the declaration. Raises TypeError and ValueError, one line, as a call does.
        """
        with torch.no_grad():
            bound = self.bind((), given)
            if bound.fitted.batch or bound.fitted.labels or bound.fitted.dropped:
                raise ValueError(f"{self.name}: gradients of inputs with further dimensions; allowed: the ranks that the op declares")
            return bound.variant.gradients(self.name, bound.fitted.tensors, bound.scalars, adjoints, wanted)

    def autocast_dtype(self, device: str) -> torch.dtype | None:
        """Return the dtype of inputs under autocast: the lower precision for matrix products, else as the spec says; None for no cast."""
        if self.manifest.written:
            return None  # a cast would be of a copy
        if self.manifest.autocast is not None:
            return torch.float32 if self.manifest.autocast == "fp32" else None
        return torch.get_autocast_dtype(device) if self.manifest.products else None

    def arguments(self, call: Callable[[], object]) -> tuple[tuple, dict]:
        """Return the arguments that ``call()`` passes to this op, without running it."""
        with self._asking:
            known, self._call_cache = self._call_cache, CallCache(self.manifest.products)
            self._asked = threading.get_ident()
            try:
                call()
            except ArgumentsRequested as asked:
                return asked.args[0], asked.args[1]
            finally:
                self._asked, self._call_cache = None, known
        raise RuntimeError(f"{self.name} was not called")

    def bind(self, args: tuple, kwargs: dict) -> BoundCall:
        """Select the variant of a call and bind its tensors to the declared shapes. Raises TypeError and ValueError, one line."""
        tensors, scalars, params = self.named(args, kwargs)
        core = self.variant(tuple(sorted(params.items())), frozenset(), 0)
        tensors = {name: tensors[name] for name in core.signature.inputs}
        if not tensors:
            said = ", ".join(f"{name}={value}" for name, value in sorted(params.items()))
            raise ValueError(f"{self.name}: reads no tensor{' with ' * bool(said)}{said}; allowed: parameters with which it reads one")
        self._check_types(tensors)
        device = next(iter(tensors.values())).device
        scalars = {name: self._scalar(name, scalars[name], device) for name in core.signature.scalars}
        self.interface.check(self.name, core.signature, tensors)
        fitted = bind_shapes(self.name, core.signature, tensors, self.interface)
        variant = self.variant(tuple(sorted(params.items())), fitted.batched, fitted.labels) if fitted.labels else core
        variant.check(self.name, fitted.tensors, tensors, self.interface)
        key = (tuple(sorted(params.items())), fitted.batched if fitted.labels else frozenset(), fitted.labels)
        return BoundCall(variant, tensors, fitted, {name: scalars[name] for name in variant.signature.scalars}, key)

    def variant(self, params: tuple, batched: frozenset[str], labels: int) -> Variant:
        """Return the specialization for these parameters and batch labels; cached."""
        key = (params, batched, labels)
        if key not in self._variants:
            subject = Call(self.name, self.manifest.spec, params=params, batched=tuple(sorted(batched)) if labels else ())
            make = lambda: self._algorithm(params, batched, labels)  # noqa: E731
            self._variants[key] = Variant(make, self.manifest.outputs, subject, self.manifest.facts(*key))
        return self._variants[key]

    def _algorithm(self, params: tuple, batched: frozenset[str], labels: int):
        from ...algebra.batch import add_batch
        from ...algebra.rules.constant_folding import bind_parameters

        return add_batch(bind_parameters(self.spec.algorithm, dict(params)), batched, labels)

    def source(self, shape: tuple[int, ...] | None = None, gpu: str = "h200", dtype: torch.dtype = torch.bfloat16, **params) -> str:
        """Return the emitted source for labels of extents ``shape``: the output's labels in order, then the reduced ones. Needs no GPU."""
        from ...codegen.emit.module import emit
        from ...codegen.target import target

        variant = self.variant(tuple(sorted(params.items())), frozenset(), 0)
        return emit(variant.program(variant.sizes_from(shape), dtype.itemsize, target(gpu)), target=target(gpu))

    def named(self, args: tuple, kwargs: dict) -> tuple[dict, dict, dict]:
        """Split the arguments into inputs, scalars and parameters by name. Raises TypeError, one line, for wrong names."""
        a, names = self.manifest, self._names
        if len(args) > len(names):
            raise TypeError(f"{self.name}: {len(args)} positional arguments; allowed: {', '.join(names)}")
        given = dict(zip(names, args))
        for name, value in kwargs.items():
            if name in given or name not in names + tuple(n for n, _ in a.params):
                allowed = ", ".join(names + tuple(n for n, _ in a.params))
                raise TypeError(f"{self.name}: {'repeated' if name in given else 'unknown'} argument {name!r}; allowed: {allowed}")
            given[name] = value
        params = {n: value for n, default in a.params if n in given and (value := self._parameter(n, given[n], default)) != default}
        needed = self.variant(tuple(sorted(params.items())), frozenset(), 0).signature
        for name in (*needed.inputs, *needed.scalars):
            if given.get(name) is None:
                kind = "a tensor" if name in a.inputs else "a number or a one-element tensor"
                found = "is None" if name in given else "is missing"
                raise TypeError(f"{self.name}: {self.interface.name(name)} {found}; allowed: {kind}")
        return {n: given.get(n) for n in a.inputs}, {n: given.get(n) for n in a.scalars}, params

    def _parameter(self, name: str, value: object, default: int | bool) -> int | bool:
        """Check a compile-time parameter: a bool or an integer. True is not 1, and 1.0 is not 1: they would share a cache key."""
        public = self.interface.name(name)
        if isinstance(value, bool) == isinstance(default, bool) and hasattr(value, "__index__") and not isinstance(value, torch.Tensor):
            number = value if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]  # NumPy's integers too
            if abs(number) > MOST_OF_A_PARAMETER:
                raise ValueError(f"{self.name}: parameter {public} is {number}; allowed: integers of at most 18 digits")
            return number
        allowed = "True or False" if isinstance(default, bool) else "an integer"
        raise TypeError(f"{self.name}: parameter {public} is {value!r}; allowed: {allowed}")

    def _scalar(self, name: str, value: object, device: torch.device) -> object:
        """Convert a scalar to what kernels take: a Python number, which is part of the call key, or a tensor on the inputs' device."""
        public = self.interface.name(name)
        if name in self.manifest.whole:
            check_integers(self.name, public, value)
        if isinstance(value, torch.Tensor):
            refuse_layout(self.name, public, value)
            if value.numel() != 1:
                raise ValueError(f"{self.name}: {public} is a number or a one-element tensor; got shape {tuple(value.shape)}")
            if value.is_complex() or value.dtype in FLOAT8_NAMES:
                raise TypeError(f"{self.name}: {public} is {value.dtype}; allowed: a real number of 16 bits or more")
            if value.device == device:
                return value
            if value.device.type != "cpu":
                raise ValueError(f"{self.name}: {public} is on {value.device}, the inputs are on {device}; allowed: one device, or a CPU's number")
            return value.to(device)
        check_magnitude(self.name, public, value)
        # symbolic numbers: Inductor fills them in, and may return a whole float as an integer
        if isinstance(value, int | float | torch.SymInt | torch.SymFloat):
            return value
        if not hasattr(value, "__float__") or getattr(value, "shape", ()) not in ((), (1,)):
            raise TypeError(f"{self.name}: {public} is {type_name(value)}; allowed: a number or a one-element tensor")
        value = value.item() if hasattr(value, "item") else value
        return operator.index(value) if hasattr(value, "__index__") else float(value)  # type: ignore[arg-type]

    def _check_types(self, tensors: dict[str, torch.Tensor]) -> None:
        first = next(iter(tensors))
        for name, t in tensors.items():
            public = self.interface.name(name)
            if not isinstance(t, torch.Tensor):
                raise TypeError(f"{self.name}: {public} is {type_name(t)}; allowed: a tensor")
            refuse_layout(self.name, public, t)
            if t.device != tensors[first].device:
                raise ValueError(f"{self.name}: {public} is on {t.device}, {self.interface.name(first)} is on {tensors[first].device}; allowed: one device")
            if name in self.manifest.integers and t.dtype not in INTEGER_DTYPES:
                raise TypeError(f"{self.name}: {public} is {t.dtype}; allowed: int32, int64, int8 or uint8, {self.spec.algorithm.reason_for_integers(name)}")
            if not (t.is_floating_point() or t.dtype in (torch.bool, *INTEGER_DTYPES)):
                raise TypeError(f"{self.name}: {public} is {t.dtype}; allowed: floating point, bool, {', '.join(str(d).removeprefix('torch.') for d in INTEGER_DTYPES)}")
        for name, t in tensors.items():
            if t.is_floating_point() and t.dtype.itemsize == 1:
                public = self.interface.name(name)
                if t.dtype not in FLOAT8_NAMES:
                    raise TypeError(f"{self.name}: {public} is {t.dtype}; allowed: {', '.join(map(str, FLOAT8_NAMES))}, or dtypes of 16 bits and more")
                if t.requires_grad and torch.is_grad_enabled():
                    raise TypeError(f"{self.name}: {public} is {t.dtype} and requires a gradient, and float8 has none; allowed: {public}.detach()")


@dataclass(frozen=True)
class BoundCall:
    """One bound call of an op: its variant, the tensors as given and as bound to shapes, the scalars."""

    variant: Variant
    given: dict[str, torch.Tensor]
    fitted: BoundShapes
    scalars: dict[str, object]
    key: tuple  #: the arguments of ``Operator.variant``


def special(args: tuple, kwargs: dict) -> bool:
    """Tell whether torch's dispatcher must handle a call: tensor subclasses, fake tensors, dispatch modes, torch.jit.trace.

    A trace must record the reference's operations, not kernels.
    """
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
    if _modes() or _tracing() and choose_path(dict(enumerate(tensors))) != "reference":
        return True
    return any(type(v) not in (torch.Tensor, torch.nn.Parameter) for v in tensors)


def any_sharded(values) -> bool:
    """Tell whether a value is a DTensor."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and any(isinstance(v, kind) for v in values)
