"""A DT program as a callable."""

from __future__ import annotations

from types import ModuleType

from ..algebra.prepare import prepare
from ..codegen.triton_module import emit
from ..lang import parse
from ..lang.schedule import Program
from .cache import load_module


class CompiledProgram:
    """What ``dtkernels.compile`` returns: call it with tensors, read ``source`` for the emitted file.

    Calling runs the first wrapper, whose parameters are the inputs, then the scalars, in order of declaration. Where
    several Funcs are compiled each wrapper is an attribute: ``compiled.f(A=a)``.
    """

    def __init__(self, program: Program):
        self.program = program
        self.source = emit(prepare(program))
        self.outputs = program.outputs()
        self._module: ModuleType | None = None

    @property
    def module(self) -> ModuleType:
        """The imported file; imports triton."""
        if self._module is None:
            self._module = load_module(self.source, self.outputs[0])
        return self._module

    def __call__(self, *args, **kwargs):
        return getattr(self.module, self.outputs[0])(*args, **kwargs)

    def __getattr__(self, name: str):
        if name in self.__dict__.get("outputs", ()):
            return getattr(self.module, name)
        raise AttributeError(name)

    def __repr__(self) -> str:
        return f"<dtkernels program {', '.join(self.outputs)}>"


def compile(source: str, *, name: str = "<string>", params: dict[str, int | bool] | None = None) -> CompiledProgram:
    """Compile DT text to a callable.

    ``params`` gives values to compile-time parameters. Raises DTError, one line, where the program is refused.
    Example::

        double = dtkernels.compile("Func y; In A; Var i; y[i] = 2 * A[i]; y.block(i:1024); y.tensorize(i:1024);")
        double(A=torch.ones(5000, device="cuda"))
    """
    program = parse(source, name)
    if params or program.algorithm.params:
        from ..algebra.fold import bind_parameters

        program = Program(bind_parameters(program.algorithm, params), program.schedule)
    return CompiledProgram(program)
