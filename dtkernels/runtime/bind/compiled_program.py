"""Compile a DT program to a callable: ``dtkernels.compile``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import ModuleType

from ...algebra.pipeline import prepare
from ...autoschedule.fit_resources import element_bytes
from ...codegen.analysis.resources import MOST_ELEMENTS, check_resources, whole_extent_labels
from ...codegen.emit.module import emit
from ...codegen.ir.nest import DescriptorStore, Loop, Store, statements
from ...codegen.pipeline import check_unused_statements, lower, prelower
from ...codegen.target import Target
from ...lang import DTError, Position, parse
from ...lang.algorithm import with_operands
from ...lang.checks import check_given
from ...lang.errors import DEPTH
from ...lang.extents.formulas import inputs_of, source_of
from ...lang.extents.sources import computed
from ...lang.schedule import Program
from ..build.source_cache import load_module
from ..path_counters import checking, interpreting
from ..reference.launch_context import one_kernel_at_a_time


class CompiledProgram:
    """The result of ``dtkernels.compile``: call it with tensors, or read the emitted file in ``source``.

    A call runs the first wrapper. Its parameters are the inputs, then the scalars, in order of declaration. Where several Funcs are
    compiled, each wrapper is an attribute: ``compiled.f(A=a)``. ``check_indices``: raise IndexError for an index out of range, see
    ``index_checks``.
    """

    def __init__(self, program: Program, check_indices: bool = False):
        self.program, self.check_indices = program, check_indices
        self.prepared = prepare(program)
        self.source = emit(self.prepared)
        self.outputs = program.outputs()
        self._module: ModuleType | None = None
        self._fit: ArgumentCheck | None = None
        self._narrow: dict[tuple, ModuleType] = {}  #: inputs that hold integers, and those in float8 -> the file for such calls

    @property
    def module(self) -> ModuleType:
        """The imported emitted file. Imports triton."""
        if self._module is None:
            self._module = load_module(self.source, self.outputs[0])
        return self._module

    def __call__(self, /, *args, **kwargs):
        on_cpu = any(getattr(getattr(v, "device", None), "type", "") == "cpu" for v in (*args, *kwargs.values()))
        if on_cpu and not interpreting():
            raise RuntimeError(f"{self.outputs[0]}: its tensors are on the CPU; allowed: a GPU, or TRITON_INTERPRET=1 set before Python starts")
        return self._run(self.outputs[0], *args, **kwargs)

    def __getattr__(self, name: str):
        if name in self.__dict__.get("outputs", ()):
            return partial(self._run, name)
        raise AttributeError(name)

    def _run(self, name: str, /, *args, **kwargs):
        if name in self.program.without_wrapper():
            raise DTError(f"{name} is compiled to a kernel alone", found="a call", allowed=f"module.{name}_kernel, launched by you, or {name}.compile()")
        from ..torch_support.tensor_checks import check_written, in_memory
        from ..torch_support.unsupported_autograd import without_backward

        self._fit = self._fit or ArgumentCheck(self.prepared)
        self._check_kinds(name, args, kwargs)
        self._warn_of_order(name)
        self._fit.written(name, args, kwargs)
        self._fit.check(args, kwargs)
        if written := self.program.algorithm.written.values():
            tensors = self._fit.tensors(args, kwargs)
            check_written(name, (n for n in written if n in tensors), tensors)
        run = getattr(self._module_for(args, kwargs), name, None)
        if run is None:
            root, together = self._fit.hosts[name], self._fit.together(name)
            where = root if root in together else together[0]
            raise DTError(f"{name} is computed together with others", found=f"a call of {name}",
                          allowed=f"{where}, which returns {', '.join(together)}")  # fmt: skip
        try:
            with one_kernel_at_a_time():
                given, named = tuple(map(in_memory, args)), {n: in_memory(v) for n, v in kwargs.items()}
                results = without_backward(name, lambda: run(*given, **named), (*given, *named.values()))
            if self.check_indices or checking():
                self._check_indices(name, given, named)
            return results
        except Exception as error:
            if "exceeds triton maximum tensor numel" in str(error):
                raise DTError(f"a tensor operation of {name} has at most {MOST_ELEMENTS} elements", found="more at these sizes") from error
            if not _from_compiler(error):
                raise
            said = str(error).strip().splitlines() or ["no message"]
            line = next((text for text in said if "fatal" in text), said[-1])  # the message of ptxas, without the rest that Triton prints
            raise DTError(f"Triton does not compile {name} by this schedule", found=f"{type(error).__name__}: {line}") from error

    def _warn_of_order(self, name: str) -> None:
        """Warn of sums in no fixed order where torch asks for warnings alone; else the wrapper raises RuntimeError."""
        if sums := self.prepared.schedule.unordered_sums():
            from ..torch_support.determinism import fixed_order, refuses_any_order

            if fixed_order() and not refuses_any_order():
                warnings.warn(f"{name}: {', '.join(sums)} is added up in no fixed order; accumulate_at(..., ordered) has one", stacklevel=4)

    def _check_indices(self, name: str, args: tuple, kwargs: dict) -> None:
        """Raise IndexError, one line, for a used element out of range.

        Runs after the wrapper, which has checked the arguments. Kernels read nothing out of range.
        """
        from ..reference.index_checks import check_indices

        a = self.prepared.algorithm
        given = dict(zip(a.inputs + a.scalars, args)) | kwargs
        check_indices(name, self.program.algorithm, given, given, self._fit.together(name))  # type: ignore[union-attr]

    def _module_for(self, args: tuple, kwargs: dict) -> ModuleType:
        """Return the imported file, or one that fills no integer input with -inf where the first one does, or that reads inputs in float8."""
        from ..torch_support.dtypes import float8_inputs

        assert self._fit is not None
        tensors = self._fit.tensors(args, kwargs)
        integral, float8 = frozenset(n for n, t in tensors.items() if not t.is_floating_point()), float8_inputs(tensors)
        if not integral and not float8:
            return self.module
        if (integral, float8) not in self._narrow:
            algorithm = replace(self.prepared.algorithm, integral=integral, float8=float8)
            source = emit(replace(self.prepared, algorithm=algorithm))
            self._narrow[integral, float8] = self.module if source == self.source else load_module(source, self.outputs[0])
        return self._narrow[integral, float8]

    def _check_kinds(self, name: str, args: tuple, kwargs: dict) -> None:
        """Raise TypeError, one line, for an argument that no kernel takes."""
        import torch

        from ..signature.arguments import refuse_layout, type_name
        from ..signature.signature import check_integers, check_magnitude
        from ..torch_support.dtypes import FLOAT8_NAMES

        a, whole = self.prepared.algorithm, self.program.algorithm.integer_scalars()
        for n, value in (*zip(a.inputs + a.scalars, args), *kwargs.items()):
            if value is None and len(self.outputs) > 1 or n not in a.inputs + a.scalars:
                continue  # an argument of another wrapper, or one that the wrapper refuses
            kind = "a tensor" if n in a.inputs else "a number or a one-element tensor"
            if not isinstance(value, torch.Tensor) and (n in a.inputs or not hasattr(value, "__float__")):
                raise TypeError(f"{name}: {n} is {type_name(value)}; allowed: {kind}")
            check_magnitude(name, n, value)
            if n in whole:
                check_integers(name, n, value)
            if not isinstance(value, torch.Tensor):
                continue
            refuse_layout(name, n, value)
            if n in a.scalars and value.dtype in FLOAT8_NAMES:
                raise TypeError(f"{name}: {n} is {value.dtype}; allowed: a real number of 16 bits or more")
            if value.is_meta:  # a kernel would run on no memory
                raise TypeError(f"{name}: {n} is on the meta device; allowed: {kind} with data, or an op, dtkernels.register(...)")

    def __reduce__(self):
        """Copy and pickle by the program: the imported file cannot be copied."""
        return CompiledProgram, (self.program, self.check_indices)

    def __repr__(self) -> str:
        return f"<dtkernels program {', '.join(self.outputs)}>"


def _from_compiler(error: Exception) -> bool:
    """Tell whether Triton's compiler raised this: one of its own classes, or the bare RuntimeError of a failed pass."""
    if type(error).__name__ == "InterpreterError":
        return False  # raised by a kernel, not by the compiler
    own = any(c.__module__.startswith("triton.") for c in type(error).__mro__)
    return own or isinstance(error, RuntimeError) and "PassManager" in str(error)


class ArgumentCheck:
    """Check that a GPU has the resources that the kernels need; once per GPU, dtype and relevant size."""

    def __init__(self, program: Program):
        self.program, self.algorithm, self.outputs = program, (algorithm := program.algorithm), program.outputs()
        self.kernels = lower(program)
        self.hosts = {w: k.func for k in self.kernels for w in k.writes}  #: Func that is written -> the Func whose kernel writes it
        lowered = prelower(program)
        self.added = {a.func for a in lowered.accumulated if not a.complete}
        self.extents = lowered.algorithm  #: has the labels that ``merge`` declares too
        self.inputs, self.places = algorithm.inputs, {label: self.extents.extent_source(label) for label in whole_extent_labels(self.kernels)}
        self.constants = {label: self.extents.constant_extent(label) for label, source in self.places.items() if source is None}
        self.formulas = {label: source_of(f[0]) for label, n in self.constants.items() if n is None and (f := self.extents.extent_formulas(label))}
        self.seen: set[tuple] = set()

    def _computed(self, label: str, tensors: dict) -> int | None:
        """Return the extent of a label that no input indexes by itself: a constant, or what its formula gives; None where that lacks a tensor."""
        if (constant := self.extents.constant_extent(label)) is not None:
            return constant
        formula = next(iter(self.extents.extent_formulas(label)), None)
        if formula is None or any(t not in tensors or tensors[t].dim() <= dim for t, dim in inputs_of(formula)):
            return None
        size = computed(source_of(formula), lambda tensor, dim: tensors[tensor].shape[dim])
        return size if size >= 0 else None  # the wrapper refuses it

    def together(self, name: str) -> tuple[str, ...]:
        """Return the outputs of the wrapper that computes ``name``."""
        return tuple(o for o in self.outputs if self.hosts[o] == self.hosts[name])

    def tensors(self, args: tuple, kwargs: dict) -> dict:
        import torch

        given = dict(zip(self.inputs, args)) | kwargs
        return {n: t for n in self.inputs if isinstance(t := given.get(n), torch.Tensor)}

    def check(self, args: tuple, kwargs: dict) -> None:
        """Raise DTError, one line, where a kernel exceeds the resources of the GPU that holds these tensors."""
        tensors = self.tensors(args, kwargs)
        first = next(iter(tensors.values()), None)
        if first is not None and first.is_cuda:
            from ..torch_support.tf32 import allows_tf32
            from .operator import device_target

            self.on(tensors, device_target(first.device), allows_tf32())

    def written(self, name: str, args: tuple, kwargs: dict) -> None:
        """Raise DTError where no program writes a buffer that ``name`` needs: the kernel's grid, or the loop with the store, is empty here."""
        tensors = self.tensors(args, kwargs)
        sized = all(tensor or size for _, tensor, size in self.algorithm.extents) and not self.algorithm.formulas
        if all(t.numel() for t in tensors.values()) and sized:
            return
        needed = self.algorithm.needed_by(self.together(name))

        def empty(label: str) -> bool:
            place = self.algorithm.extent_source(label)
            if place is None:
                return self._computed(label, tensors) == 0
            return place[0] in tensors and tensors[place[0]].shape[place[1] :][:1] == (0,)

        def left(buffers: Iterable[str]) -> str | None:
            stored = (b for b in buffers if b in needed and b in self.outputs and b not in self.added)  # what is added to is cleared before
            return next((b for b in stored if not any(map(empty, self.algorithm[b].labels))), None)

        for kernel in self.kernels:
            root = kernel.writes[0] if kernel.writes[0] in self.algorithm else kernel.func  # the latter of one that stores parts of a sum
            if root in needed and any(map(empty, self.algorithm[root].labels)) and (other := left(kernel.writes)):
                raise DTError(f"{other} is computed in the kernel of {root}, which has no programs here", found=f"{root} of no elements",
                              allowed=f"{other} in a kernel of its own")  # fmt: skip
            for loop in (s for s in statements(kernel.body) if isinstance(s, Loop) and empty(s.axis.label)):
                if stored := left(s.buffer for s in statements(loop.body) if isinstance(s, (Store, DescriptorStore))):
                    label = loop.axis.label
                    raise DTError(f"{stored} is stored in a loop over {label}", found=f"{label} of no elements", allowed=f"{stored} in a kernel of its own")

    def on(self, tensors: dict, target: Target, tf32: bool) -> None:
        """Do the same as ``check`` for any GPU. The tensors need not be on it."""
        sizes = {label: place and tensors[place[0]].shape[place[1]] for label, place in self.places.items() if place is None or place[0] in tensors}
        sizes |= {label: self._computed(label, tensors) for label in self.formulas}
        key = (target.name, tf32, *sizes.values(), *(t.dtype for t in tensors.values()))
        if key in self.seen:
            return
        if len(sizes) == len(self.places):
            from ..signature.signature import input_types

            types = input_types(tensors)
            itemsizes = element_bytes(with_operands(self.algorithm, self.program.schedule.subjects()), self.outputs, types)
            for kernel in lower(replace(self.program, algorithm=types.typed(self.algorithm))):
                check_resources(kernel, self.constants | {k: n for k, n in sizes.items() if n is not None}, itemsizes, target, tf32)  # type: ignore[arg-type]
        self.seen.add(key)


def check_text(source: object) -> None:
    """Raise for a source that is not DT text: TypeError, or DTError for a path."""
    if not isinstance(source, str):
        remedy = "; allowed: its text, path.read_text()" if isinstance(source, os.PathLike) else ""
        raise TypeError(f"a program is DT text; found {type(source).__name__}{remedy}")
    path = source.strip()
    if path and not any(c in path for c in "\n;=#") and (path.endswith((".dt", ".yaml", ".yml", ".txt")) or os.sep in path or os.path.isfile(path)):
        there = os.path.isfile(path)
        spec = path.endswith((".yaml", ".yml"))
        allowed = f"dtkernels.register({path!r}) for a spec" if spec else f"the text itself, pathlib.Path({path!r}).read_text()"
        raise DTError("compile takes DT text", found=f"the path {path!r}{'' if there else ', and no such file is there'}", allowed=allowed)


def compile(
    source: str, *, name: str = "<string>", params: dict[str, int | bool] | None = None, check_indices: bool = False
) -> CompiledProgram:
    """Compile DT text to a callable.

    ``params`` binds compile-time parameters. ``check_indices=True`` makes every call raise IndexError where an index that depends on data
    is out of range; otherwise such an element reads 0. ``DTKERNELS_CHECK=1`` does the same for all programs and ops. Compiled programs
    have no gradients; ops do, ``dtkernels.register``. Raises DTError, one line, where the program is refused, and TypeError where
    ``source`` is not text. Example::

        double = dtkernels.compile("Func y; In A; Var i; y[i] = 2 * A[i]; y.block(i:1024); y.tensorize(i:1024);")
        double(A=torch.ones(5000, device="cuda"))
    """
    check_text(source)
    if params is not None and not isinstance(params, Mapping):
        raise TypeError(f"params is {type(params).__name__}; allowed: a dict of names and numbers, or None")
    program = parse(source, name)
    check_given(program)
    try:
        several = bool(program.algorithm.params)
        if params or several:
            from ...algebra.rules.constant_folding import bind_parameters

            program = Program(bind_parameters(program.algorithm, params), program.schedule)
        compiled = CompiledProgram(program, check_indices)
        if not several:  # a primitive without effect in one variant may have one in another
            check_unused_statements(compiled.prepared)
        return compiled
    except RecursionError:
        raise DTError("an expression is nested too deeply", allowed=DEPTH, at=Position(1, 1, name)) from None
