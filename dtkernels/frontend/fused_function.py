"""``dtkernels.fuse``: compile a plain torch function by tracing it to a DT program."""

from __future__ import annotations

import functools
import inspect
import keyword
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..lang.errors import DTError
from ..lang.parser import parse
from ..lang.spec import Spec
from ..runtime.bind.operator import Operator
from ..runtime.bounded_cache import BoundedCache
from ..runtime.log import log, warn_once
from ..runtime.path_counters import count
from .captures import _PLAIN, State, setting, state_of
from .sizes import Sizes
from .tracing import Traced, at, decided, is_tracing, place_of, place_text, trace
from .unsupported import UnsupportedOperation
from .values import SEED, Source
from .writer import CARRIER, WrittenProgram, cast_word, write

REMEMBERED = 1024  #: shapes of a program's calls; the oldest is evicted


@dataclass
class Compiled:
    """One program of a fused function: for calls of certain ranks, dtypes and settings whose sizes meet ``guards``."""

    operator: Operator | None
    written: WrittenProgram
    guards: tuple
    symbols: dict[Any, tuple[int, int]]
    spec: Any  #: the structure of the result
    leaves: tuple  #: its leaves; a number for the place of a tensor
    without_gradient: UnsupportedOperation | None
    constants: list[torch.Tensor]  #: inputs that the function makes of numbers
    numbers: list[Any]  #: those of ``constants``
    bound: BoundedCache[tuple, Bound] = field(default_factory=lambda: BoundedCache(REMEMBERED))  #: by the shapes of a call

    @property
    def text(self) -> str:
        return self.written.text

    def fits(self, tensors: list[torch.Tensor]) -> bool:
        """Tell whether the guards hold for these sizes."""
        env = self.sizes(tensors)
        broken = next((guard for guard in self.guards if not bool(evaluated(guard, env))), None)
        if broken is not None:
            log.info("dtkernels: fuse: sizes %s do not meet %s", {str(k): v for k, v in env.items()}, broken)
        return broken is None

    def sizes(self, tensors: list[torch.Tensor]) -> dict[Any, Any]:
        return {symbol: tensors[k].shape[dim] for symbol, (k, dim) in self.symbols.items()}

    def tables(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Return the constants on the device of a tensor; where a graph is traced, as operations of that graph."""
        if type(like) in (torch.Tensor, torch.nn.Parameter):
            return [t.to(like.device) for t in self.constants]
        return [torch.tensor(numbers, dtype=t.dtype, device=like.device) for t, numbers in zip(self.constants, self.numbers)]

    def bind(self, tensors: list[torch.Tensor]) -> Bound:
        """Compute the sizes that a call of these shapes needs."""
        env, w = self.sizes(tensors), self.written

        def steps(source: Source) -> tuple:
            return tuple((op, _concrete(args, env), dict(_concrete(kwargs, env)), place) for op, args, kwargs, place in source.steps)  # type: ignore[misc]

        return Bound(
            tuple((name, s.root, steps(s), tuple(evaluated(n, env) for n in shape)) for name, s, shape in w.inputs),
            tuple((name, s.root, steps(s)) if isinstance(s, Source) else (name, None, evaluated(s, env)) for name, s in w.scalars),
            tuple(evaluated(n, env) for n in w.carried),
            tuple(
                (w.funcs.index(r.func), tuple(evaluated(n, env) for n in r.shape), r.dtype, r.differentiated) if r.func else (None, r.source.root, steps(r.source), ())  # type: ignore[union-attr,arg-type]
                for r in w.results
            ),
            tuple(evaluated(v, env) if not isinstance(v, _Tensor) else v for v in self.leaves),
        )


@dataclass
class _Tensor:
    """The place of a tensor among the results."""

    place: int


@dataclass
class Bound:
    """A program at the sizes of one call."""

    inputs: tuple
    scalars: tuple
    carried: tuple
    results: tuple
    leaves: tuple

    def run(self, operator: Operator | None, tensors: list[torch.Tensor], spec: Any) -> Any:
        found: tuple = ()
        if operator is not None:
            given = {name: _shaped(_viewed(tensors[root], steps), shape) for name, root, steps, shape in self.inputs}
            for name, root, steps in self.scalars:
                given[name] = steps if root is None else _seed(tensors) if root == SEED.root else _number(_viewed(tensors[root], steps))
            if self.carried:
                like = tensors[self.inputs[0][1]]
                given[CARRIER] = like.new_empty((1,) * len(self.carried)).expand(self.carried)
            made = operator(**given)
            found = made if isinstance(made, tuple) else (made,)
        results = []
        for which, second, third, differentiated in self.results:
            if which is None:
                results.append(_viewed(tensors[second], third))
                continue
            one = found[which].reshape(second)
            one = one if one.dtype == third else one.to(third)
            kept = not one.requires_grad or any(tensors[k].requires_grad for k in differentiated)  # one node computes all results
            results.append(one if kept else one.detach())
        return tree_unflatten([results[v.place] if isinstance(v, _Tensor) else v for v in self.leaves], spec)


def _viewed(tensor: torch.Tensor, steps: tuple) -> torch.Tensor:
    found: Any = tensor
    for op, args, kwargs, place in steps:
        op = torch.ops.aten.reshape.default if op is torch.ops.aten.view.default else op
        found = op(found, *args, **kwargs)
        found = found if place is None else found[place]
    return found


def _shaped(tensor: torch.Tensor, shape: tuple) -> torch.Tensor:
    return tensor if tuple(tensor.shape) == shape else tensor.reshape(shape)


def _seed(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Draw a seed by torch's generator of the device: nothing waits for it, and CUDA graphs draw anew at each replay."""
    return torch.randint(2**62, (), device=tensors[0].device)


def _number(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float32) if tensor.dtype == torch.bool else tensor


def _concrete(value: Any, env: dict) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_concrete(v, env) for v in value)
    return evaluated(value, env)


def evaluated(value: Any, env: dict) -> Any:
    """Return a size or a guard at given sizes, which may be symbolic themselves."""
    import sympy

    if not isinstance(value, sympy.Basic):
        return value
    if value.is_Integer:
        return int(value)
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    return sympy_interp(PythonReferenceAnalysis, {s: env[s] for s in value.free_symbols}, value)


class Fused:
    """The programs of one function, by ranks, dtypes, broadcast pattern, numbers and flags."""

    def __init__(self, function: Callable, fallback: bool, name: str | None = None):
        self.function, self.fallback = function, fallback
        if name is not None and not (isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)):
            raise ValueError(f"fuse: name is {name!r}; allowed: a Python name")
        given = name or getattr(function, "__name__", "") or "fused"
        self.name = given if given.isidentifier() else "fused"
        self.programs: dict[tuple, list[Compiled | UnsupportedOperation]] = {}
        self._lock = threading.RLock()
        self.number = f"{self.name} {len(_known)}"
        _known[self.number] = self
        self.last: Compiled | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(args, kwargs, {})

    def call(self, args: tuple, kwargs: dict, stand_ins: dict[int, torch.Tensor]) -> Any:
        """Call the function. ``stand_ins``: what torch.compile gives for closed-over tensors, by their ids."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [v for v in leaves if isinstance(v, torch.Tensor)]
        objects = [(f"argument{k}", v) for k, v in enumerate(leaves) if not isinstance(v, (torch.Tensor, *_PLAIN))]
        state = state_of(self.function, objects)
        plain = tuple(setting(v) if isinstance(v, _PLAIN) else None if isinstance(v, torch.Tensor) else type(v) for v in leaves)
        every = [*tensors, *(stand_ins.get(id(t), t) for t in state.tensors)]
        key = (spec, plain, tuple(map(_kind, tensors)), tuple(state.key), torch.is_grad_enabled(), torch.get_default_dtype(), _autocast(every))
        try:
            _refuse_transforms(every)
            program = self.program(key, leaves, spec, tensors, state)
            if program.without_gradient is not None and torch.is_grad_enabled() and any(t.requires_grad for t in every):
                raise program.without_gradient
        except UnsupportedOperation as error:
            if not self.fallback:
                raise
            count(self.name, "torch")
            warn_once(f"{self.name} runs in torch: {error}")
            return self.function(*args, **kwargs)
        shapes = tuple(tuple(t.shape) for t in tensors)
        bound = program.bound.get(shapes) if not _symbolic(shapes) else None
        if bound is None:
            bound = program.bind(tensors)
            if not _symbolic(shapes):
                program.bound.put(shapes, bound)
        with torch.amp.autocast(every[0].device.type, enabled=False) if _autocast(every) else _nothing:
            return bound.run(program.operator, [*every, *program.tables(every[0])], program.spec)

    def program(self, key: tuple, leaves: list, spec: Any, tensors: list[torch.Tensor], state: State) -> Compiled:
        """Return the program for a call; trace one where none fits."""
        with self._lock:
            known = self.programs.setdefault(key, [])
            for one in known:
                if isinstance(one, UnsupportedOperation):
                    if one.applies(tensors):
                        raise one
                elif one.fits(tensors):
                    self.last = one
                    return one
            try:
                made = self.trace(leaves, spec, tensors, state)
            except UnsupportedOperation as error:
                known.append(_refused(error, error))
                raise
            except Exception as error:
                self.explain(error, leaves, spec)
                why = f"tracing raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                place = place_text(place_of(list(traceback.walk_tb(error.__traceback__)))) or getattr(error, "place", "")
                known.append(_refused(UnsupportedOperation("this function", why, place), error))
                raise known[-1] from error  # type: ignore[misc]
            known.append(made)
            self.last = made
            total = sum(len(v) for v in self.programs.values())
            log.info("dtkernels: fuse traced %s, its program %d", self.name, total)
            if total == 32:
                warn_once(f"{self.name} was traced 32 times; numbers and flags among its arguments each make a program: pass a number that varies as a tensor")
            return made

    def explain(self, error: Exception, leaves: list, spec: Any) -> None:
        """Raise what the function itself raises in torch, if anything."""
        if not any(isinstance(v, torch.Tensor) and not isinstance(v.shape, tuple) for v in leaves):
            args, kwargs = tree_unflatten([v.detach().clone() if isinstance(v, torch.Tensor) else v for v in leaves], spec)
            self.function(*args, **kwargs)

    def trace(self, leaves: list, spec: Any, tensors: list[torch.Tensor], state: State) -> Compiled:
        """Trace a call and compile its program."""
        from .interpret import Interpreter

        if not tensors:
            raise UnsupportedOperation("a call without tensors")
        for t in (*tensors, *state.tensors):
            if t.is_complex() or t.layout != torch.strided or t.is_nested:
                raise UnsupportedOperation(f"a tensor of {t.dtype}, {t.layout}")

        def call(given: list[torch.Tensor]) -> Any:
            fed = iter(given)
            args, kwargs = tree_unflatten([next(fed) if isinstance(v, torch.Tensor) else v for v in leaves], spec)
            return self.function(*args, **kwargs)

        stand_ins = [_hinted(t) for t in tensors]
        traced = trace(call, stand_ins, state.tensors)
        interpreter = Interpreter(traced, state.tensors, len(tensors))
        try:
            return self.written(traced, interpreter, leaves, spec, stand_ins, state)
        except UnsupportedOperation as error:
            error.decided = decided(traced.env, traced.symbols)
            raise
        except Exception as error:
            error.place = interpreter.builder.place  # type: ignore[attr-defined]  # of the operation at hand
            raise

    def written(self, traced: Traced, interpreter: Any, leaves: list, spec: Any, stand_ins: list[torch.Tensor], state: State) -> Compiled:
        """Write and compile the program of a trace."""
        results = interpreter.run()
        builder, sizes = interpreter.builder, Sizes(traced.env)
        flat_result, structure = tree_flatten(traced.result)
        _refuse_hidden_tensors(flat_result)
        places = iter(range(len(results)))
        found = tuple(_Tensor(next(places)) if isinstance(v, torch.Tensor) else _of_sizes(v, sizes) for v in flat_result)
        names = [*self.argument_names(leaves, spec), *state.names, *("table" for _ in interpreter.constants)]
        wanted = [_output_name(self.name, k, len(results), traced, interpreter) for k in range(len(results))]
        for k, node in enumerate(next(n for n in traced.module.graph.nodes if n.op == "output").args[0]):
            with at(traced.places.get(node)):
                results[k] = self.exact(builder, results[k])
        operator, written = self.compiled(builder, results, wanted, names, [*stand_ins, *state.tensors, *interpreter.constants])
        guards, symbols = decided(traced.env, traced.symbols)
        return Compiled(operator, written, guards, symbols, structure, found, builder.without_gradient, *_real(interpreter.constants, stand_ins[0].device))

    def exact(self, builder: Any, value: Any) -> Any:
        """Return a result so that integers made from integers are computed as integers."""
        if isinstance(value, Source) or value.dtype.is_floating_point or value.dtype == torch.bool:
            return value
        if builder.is_whole(value.expr):
            return replace(value, expr=builder.marked(value.expr))
        if cast_word(value.dtype) is None or builder.reads_integers(value.expr):
            raise UnsupportedOperation(f"a result of {value.dtype} made from sums, extremes or powers of integers", why="they are exact up to 2^24",
                                       allowed="floating point, truth values; + - * // % and bitwise arithmetic of integers")  # fmt: skip
        return value

    def compiled(self, builder: Any, results: list, wanted: list[str], names: list[str], tensors: list[torch.Tensor]) -> tuple[Operator | None, WrittenProgram]:
        """Write and compile the program; results that DT would give another dtype are cast."""
        if all(isinstance(r, Source) for r in results):
            return None, WrittenProgram("", [], [], (), [_passed(r) for r in results], ())
        casts: list[str | None] = [None] * len(results)
        for _ in range(2):
            known = len(builder.definitions)
            written = write(builder, results, wanted, names, casts)
            operator = Operator(self.spec(written))
            signature = operator.variant((), frozenset(), 0).signature
            given = {name: tensors[s.root] for name, s, _ in written.inputs}
            default = signature.result_dtype(given)
            right = [cast_word(r.dtype) if not isinstance(r, Source) and r.dtype != default else None for r in results]
            if default == torch.float64:
                right = [None if not isinstance(r, Source) and r.dtype.is_floating_point else c for r, c in zip(results, right)]
            if right == casts:
                break
            casts = right
            del builder.definitions[known:]
        return operator, written

    def spec(self, written: WrittenProgram) -> Spec:
        try:
            program = parse(written.text, self.name)
        except DTError as error:
            raise UnsupportedOperation("this function", why=f"{error}") from error
        return Spec(self.name, f"Traced from the torch function {self.name}.", program, source=self.name)

    def argument_names(self, leaves: list, spec: Any) -> list[str]:
        """Return a name for each tensor of a call: its parameter's."""
        args, kwargs = tree_unflatten(list(range(len(leaves))), spec)
        try:
            given = inspect.signature(self.function).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):
            given = {f"a{k}": v for k, v in enumerate((*args, *kwargs.values()))}
        names: dict[int, str] = {}
        for name, value in given.items():
            for place in tree_flatten(value)[0]:
                names[place] = name
        return [names.get(k, "a") for k, v in enumerate(leaves) if isinstance(v, torch.Tensor)]


def _refuse_transforms(tensors: list[torch.Tensor]) -> None:
    """Refuse calls under torch.vmap and torch.func, also those for which there is a program."""
    functorch = torch._C._functorch
    if functorch.peek_interpreter_stack() is None:
        return
    if any(functorch.is_batchedtensor(t) for t in tensors):
        raise UnsupportedOperation("torch.vmap of a fused function", allowed="a function written for leading dimensions")
    if any(functorch.is_functorch_wrapped_tensor(t) for t in tensors):
        raise UnsupportedOperation("torch.func.grad, vjp and jvp of a fused function", allowed="backward, torch.autograd.grad")


def _refuse_hidden_tensors(leaves: list) -> None:
    """Refuse results of classes that torch's trees do not know, where they hold tensors: those would be the trace's."""
    for value in leaves:
        held = State()
        if not isinstance(value, torch.Tensor):
            held.add(value, "result")
        if held.tensors:
            raise UnsupportedOperation(f"a result of class {type(value).__name__}", why="it holds tensors", allowed="tensors, tuples, lists, dicts, classes registered in torch.utils._pytree")


def _of_sizes(value: Any, sizes: Sizes) -> Any:
    """Return a result that is no tensor; what is made of sizes as an expression of them, a comparison as a guard."""
    if isinstance(value, torch.SymInt):
        return sizes.of(value)
    return value.node.expr if isinstance(value, torch.SymFloat) else bool(value) if isinstance(value, torch.SymBool) else value


def _refused(error: UnsupportedOperation, source: Exception) -> UnsupportedOperation:
    """Note for which sizes an error holds: those of which the trace decided alike."""
    found: Any = source
    while found is not None and getattr(found, "decided", None) is None:
        found = found.__cause__
    if found is not None:
        guards, symbols = found.decided
        error.applies = lambda tensors: all(bool(evaluated(g, {s: tensors[k].shape[dim] for s, (k, dim) in symbols.items()})) for g in guards)
    return error


def _real(constants: list[torch.Tensor], device: torch.device) -> tuple[list[torch.Tensor], list[Any]]:
    """Return tensors on a device, and their numbers, also while a graph is traced."""
    with torch.utils._python_dispatch._disable_current_modes():
        return [t.detach().to(device) for t in constants], [t.tolist() for t in constants]


def _passed(source: Source) -> Any:
    from .writer import Result

    return Result(None, source, source.shape, source.dtype)


def _output_name(name: str, place: int, total: int, traced: Any, interpreter: Any) -> str:
    output = next(n for n in traced.module.graph.nodes if n.op == "output")
    node = output.args[0][place]
    return interpreter.names.get(node) or (name if total == 1 else f"{name}{place + 1}")


def _kind(t: torch.Tensor) -> tuple:
    return (t.dtype, t.device.type, tuple(0 if n == 0 else 1 if n == 1 else 2 for n in t.shape))


def _symbolic(shapes: tuple) -> bool:
    return any(not isinstance(n, int) for shape in shapes for n in shape)


def _hinted(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor to trace with, of the call's sizes."""
    shape = [n if isinstance(n, int) else n.node.hint for n in t.shape]
    return torch.empty(shape, dtype=t.dtype, device="meta") if t.device.type == "meta" else _Like(shape, t.dtype, t.device)  # type: ignore[return-value]


class _Like:
    """The shape, dtype and device of a tensor."""

    def __init__(self, shape: list[int], dtype: torch.dtype, device: torch.device):
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device

    def dim(self) -> int:
        return len(self.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point


def _autocast(tensors: list[torch.Tensor]) -> torch.dtype | None:
    """Return the dtype of autocast where it is on."""
    device = tensors[0].device.type if tensors else "cpu"
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


class _Nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


_nothing = _Nothing()


_known: dict[str, Fused] = {}  #: every fused function of this process; graphs of torch.compile name them by these texts
_compiling = torch.compiler.is_dynamo_compiling


def _ready(number: str) -> bool:
    """Let Dynamo put calls into its graphs as they are; tell whether the function closes over tensors. Runs while Dynamo traces."""
    torch.compiler.allow_in_graph(_in_graph)
    return bool(state_of(_known[number].function, []).tensors)


_ready._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result, without importing it


def _in_graph(number: str, held: list[torch.Tensor], args: tuple, kwargs: dict) -> Any:
    """Call a fused function from a graph. ``held``: the graph's own parameters and buffers of a fused module."""
    fused = _known[number]
    module = getattr(fused.function, "__self__", None)
    real = _held(module) if isinstance(module, torch.nn.Module) else []
    return fused.call(tuple(args), kwargs, {id(t): given for t, given in zip(real, held)})


def _held(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def fuse(function: Callable | torch.nn.Module | None = None, *, fallback: bool = False, name: str | None = None) -> Any:
    """Compile a torch function or module to generated kernels, with gradients. A decorator.

    The function is traced at its first call for each combination of ranks, dtypes, dimensions of size 1, numbers and flags; other sizes use the
    same program. ``fused.dt`` is the DT text of the last call, ``fused.programs()`` all texts. Tensors that it closes over are inputs, and are
    differentiated too. Sums and intermediate values are float32; results have torch's dtypes. ``fallback=True`` runs the function in torch
    where it is not supported, which ``dtkernels.paths()`` counts as ``torch``. Raises UnsupportedOperation, one line with the user's file and line,
    for an operation that DT does not express. See docs/fuse.md.

    >>> @dtkernels.fuse
    ... def gate(x, w):
    ...     return torch.sigmoid(x @ w) * x
    """
    if function is None:
        return functools.partial(fuse, fallback=fallback, name=name)
    if isinstance(function, torch.nn.Module):
        return FusedModule(function, fallback, name)
    if not callable(function):
        raise TypeError(f"fuse takes a function or a module; found {type(function).__name__}")
    return _FusedFunction(function, Fused(function, fallback, name))


class _FusedFunction:
    """A fused function. ``dt`` is the program of the last call."""

    def __init__(self, function: Callable, state: Fused):
        functools.update_wrapper(self, function)
        self.state, self.function, self.number = state, function, state.number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _compiling():
            if _ready(self.number):  # it closes over tensors: Dynamo sees the function itself
                return self.function(*args, **kwargs)
            return _in_graph(self.number, [], args, kwargs)
        return self.function(*args, **kwargs) if is_tracing() else self.state(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> _FusedFunction:
        return self  # as of functions

    def __reduce__(self) -> str:
        return str(vars(self)["__qualname__"])  # pickled by name, as functions are

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    @property
    def dt(self) -> str:
        """The DT text of the program that the last call took; "" before the first."""
        return self.state.last.text if self.state.last is not None else ""

    def programs(self) -> tuple[str, ...]:
        """Return the DT texts of all programs traced so far."""
        return tuple(p.text for several in self.state.programs.values() for p in several if isinstance(p, Compiled))


class FusedModule(torch.nn.Module):
    """A module whose forward is fused. Its parameters are inputs of the program."""

    def __init__(self, module: torch.nn.Module, fallback: bool, name: str | None):
        super().__init__()
        self.module, self._settings = module, (fallback, name)
        self._fuse()

    def _fuse(self) -> None:
        fallback, name = self._settings
        self._fused = _FusedFunction(self.module.forward, Fused(self.module.forward, fallback, name or type(self.module).__name__))
        self._number = self._fused.number  # torch 2.11's compiler finds no attribute that has __get__

    def __getstate__(self) -> dict:
        return {k: v for k, v in super().__getstate__().items() if k != "_fused"}  # type: ignore[misc]

    def __setstate__(self, state: dict) -> None:
        """Make a copy, or an unpickled module, with programs of its own."""
        super().__setstate__(state)
        self._fuse()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if _compiling():
            _ready(self._number)
            return _in_graph(self._number, _held(self.module), args, kwargs)
        return self._fused(*args, **kwargs)

    @property
    def dt(self) -> str:
        """The DT text of the program that the last call took; "" before the first."""
        return self._fused.dt
