"""A DT program as a callable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from types import ModuleType

from ..algebra.prepare import prepare
from ..codegen.fit import element_bytes
from ..codegen.lower import lower
from ..codegen.nest import Loop, Put, Store, statements
from ..codegen.resources import MOST_ELEMENTS, check_resources, whole_labels
from ..codegen.target import Target
from ..codegen.triton_module import emit
from ..lang import DTError, Position, parse
from ..lang.schedule import Program, host
from .cache import load_module
from .paths import in_turn, interpreting


class CompiledProgram:
    """What ``dtkernels.compile`` returns: call it with tensors, read ``source`` for the emitted file.

    Calling runs the first wrapper, whose parameters are the inputs, then the scalars, in order of declaration. Where
    several Funcs are compiled each wrapper is an attribute: ``compiled.f(A=a)``.
    """

    def __init__(self, program: Program):
        self.program = program
        self.prepared = prepare(program)
        self.source = emit(self.prepared)
        self.outputs = program.outputs()
        self._module: ModuleType | None = None
        self._fit: Fit | None = None
        self._integral: dict[frozenset[str], ModuleType] = {}  #: inputs that hold integers -> the file for such calls

    @property
    def module(self) -> ModuleType:
        """The imported file; imports triton."""
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
        from .memory import in_memory
        from .once import without_backward

        self._fit = self._fit or Fit(self.prepared)
        self._check_kinds(name, args, kwargs)
        self._fit.written(name, args, kwargs)
        self._fit.check(args, kwargs)
        run = getattr(self._module_for(args, kwargs), name, None)
        if run is None:
            root, together = host(name, self.prepared.schedule.fused()), self._fit.together(name)
            where = root if root in together else together[0]
            raise DTError(f"{name} is computed together with others", found=f"a call of {name}",
                          allowed=f"{where}, which returns {', '.join(together)}")  # fmt: skip
        try:
            with in_turn():
                given, named = tuple(map(in_memory, args)), {n: in_memory(v) for n, v in kwargs.items()}
                return without_backward(name, lambda: run(*given, **named), (*given, *named.values()))
        except Exception as error:
            if "exceeds triton maximum tensor numel" in str(error):
                raise DTError(f"a tensor operation of {name} has at most {MOST_ELEMENTS} elements", found="more at these sizes") from error
            if not _from_compiler(error):
                raise
            said = str(error).strip().splitlines() or ["no message"]
            line = next((text for text in said if "fatal" in text), said[-1])  # ptxas's own, of which Triton prints much more
            raise DTError(f"Triton does not compile {name} by this schedule", found=f"{type(error).__name__}: {line}") from error

    def _module_for(self, args: tuple, kwargs: dict) -> ModuleType:
        """The imported file, or, where inputs hold integers that its kernels fill with -inf outside their tiles, one that does not."""
        assert self._fit is not None
        integral = frozenset(n for n, t in self._fit.tensors(args, kwargs).items() if not t.is_floating_point())
        if not integral:
            return self.module
        if integral not in self._integral:
            algorithm = replace(self.prepared.algorithm, integral=integral)
            source = emit(replace(self.prepared, algorithm=algorithm))
            self._integral[integral] = self.module if source == self.source else load_module(source, self.outputs[0])
        return self._integral[integral]

    def _check_kinds(self, name: str, args: tuple, kwargs: dict) -> None:
        """Raise TypeError, one line, for an argument that no kernel takes."""
        import torch

        from .signature import check_whole

        a, whole = self.prepared.algorithm, self.program.algorithm.integer_scalars()
        for n, value in (*zip(a.inputs + a.scalars, args), *kwargs.items()):
            if value is None and len(self.outputs) > 1 or n not in a.inputs + a.scalars:
                continue  # what another wrapper reads; what the wrapper refuses
            kind = "a tensor" if n in a.inputs else "a number or a one-element tensor"
            if not isinstance(value, torch.Tensor) and (n in a.inputs or not hasattr(value, "__float__")):
                raise TypeError(f"{name}: {n} is a {type(value).__name__}; allowed: {kind}")
            if n in whole:
                check_whole(name, n, value)
            if not isinstance(value, torch.Tensor):
                continue
            interpreted = value.is_meta and interpreting()  # elsewhere launches may be recorded alone
            if interpreted or value.layout is not torch.strided:
                found = "on the meta device" if interpreted else f"of layout {value.layout}"
                raise TypeError(f"{name}: {n} is {found}; allowed: {kind} with strides and data")

    def __reduce__(self):
        """Copies and pickles are made of the program: the imported file has no copy."""
        return CompiledProgram, (self.program,)

    def __repr__(self) -> str:
        return f"<dtkernels program {', '.join(self.outputs)}>"


def _from_compiler(error: Exception) -> bool:
    """Whether Triton's compiler raised this: its own classes, or the bare RuntimeError of a pass that gives up."""
    if type(error).__name__ == "InterpreterError":
        return False  # what a kernel did, not what the compiler said
    own = any(c.__module__.startswith("triton.") for c in type(error).__mro__)
    return own or isinstance(error, RuntimeError) and "PassManager" in str(error)


class Fit:
    """Whether the GPU of a call has what the kernels need; looked at once for each GPU, dtype and size that matters."""

    def __init__(self, program: Program):
        self.algorithm, self.outputs = algorithm, _ = program.algorithm, program.outputs()
        self.fused = program.schedule.fused()
        self.kernels = lower(program)
        self.inputs, self.places = algorithm.inputs, {label: algorithm.extent_source(label) for label in whole_labels(self.kernels)}
        self.constants = {label: algorithm.constant_extent(label) for label, source in self.places.items() if source is None}
        self.seen: set[tuple] = set()

    def together(self, name: str) -> tuple[str, ...]:
        """What the wrapper that computes ``name`` returns."""
        return tuple(o for o in self.outputs if host(o, self.fused) == host(name, self.fused))

    def tensors(self, args: tuple, kwargs: dict) -> dict:
        import torch

        given = dict(zip(self.inputs, args)) | kwargs
        return {n: t for n in self.inputs if isinstance(t := given.get(n), torch.Tensor)}

    def check(self, args: tuple, kwargs: dict) -> None:
        """Raise DTError, one line, where a kernel takes more than the GPU that holds these tensors has."""
        tensors = self.tensors(args, kwargs)
        first = next(iter(tensors.values()), None)
        if first is not None and first.is_cuda:
            from .operator import device_target
            from .precision import allows_tf32

            self.on(tensors, device_target(first.device), allows_tf32())

    def written(self, name: str, args: tuple, kwargs: dict) -> None:
        """Raise DTError where nobody writes what ``name`` needs: its kernel has no programs here, or it is stored in a loop of no steps."""
        tensors = self.tensors(args, kwargs)
        if all(t.numel() for t in tensors.values()) and all(tensor or size for _, tensor, size in self.algorithm.extents):
            return
        needed = self.algorithm.needed_by(self.together(name))

        def empty(label: str) -> bool:
            place = self.algorithm.extent_source(label)
            if place is None:
                return self.algorithm.constant_extent(label) == 0
            return place[0] in tensors and tensors[place[0]].shape[place[1] :][:1] == (0,)

        def left(buffers: Iterable[str]) -> str | None:
            return next((b for b in buffers if b in needed and b in self.outputs and not any(map(empty, self.algorithm[b].labels))), None)

        for kernel in self.kernels:
            root = kernel.writes[0]
            if root in needed and any(map(empty, self.algorithm[root].labels)) and (other := left(kernel.writes)):
                raise DTError(f"{other} is computed in the kernel of {root}, which has no programs here", found=f"{root} of no elements",
                              allowed=f"{other} in a kernel of its own")  # fmt: skip
            for loop in (s for s in statements(kernel.body) if isinstance(s, Loop) and empty(s.axis.label)):
                if stored := left(s.buffer for s in statements(loop.body) if isinstance(s, (Store, Put))):
                    label = loop.axis.label
                    raise DTError(f"{stored} is stored in a loop over {label}", found=f"{label} of no elements", allowed=f"{stored} in a kernel of its own")

    def on(self, tensors: dict, target: Target, tf32: bool) -> None:
        """The same for any GPU, and tensors that need not lie on it."""
        sizes = {label: place and tensors[place[0]].shape[place[1]] for label, place in self.places.items() if place is None or place[0] in tensors}
        key = (target.name, tf32, *sizes.values(), *(t.dtype for t in tensors.values()))
        if key in self.seen:
            return
        if len(sizes) == len(self.places):
            from .signature import input_types

            itemsizes = element_bytes(self.algorithm, self.outputs, input_types(tensors))
            for kernel in self.kernels:
                check_resources(kernel, sizes | self.constants, itemsizes, target, tf32)  # type: ignore[arg-type]
        self.seen.add(key)


def compile(source: str, *, name: str = "<string>", params: dict[str, int | bool] | None = None) -> CompiledProgram:
    """Compile DT text to a callable.

    ``params`` gives values to compile-time parameters. Gradients are for ops, ``dtkernels.register``. Raises DTError, one line, where the program is refused, TypeError where it is no text.
    Example::

        double = dtkernels.compile("Func y; In A; Var i; y[i] = 2 * A[i]; y.block(i:1024); y.tensorize(i:1024);")
        double(A=torch.ones(5000, device="cuda"))
    """
    if not isinstance(source, str):
        raise TypeError(f"a program is DT text; found {type(source).__name__}")
    program = parse(source, name)
    try:
        if params or program.algorithm.params:
            from ..algebra.fold import bind_parameters

            program = Program(bind_parameters(program.algorithm, params), program.schedule)
        return CompiledProgram(program)
    except RecursionError:
        raise DTError("an expression is nested too deeply", at=Position(1, 1, name)) from None
