"""Trace a Python function to a graph of ATen operations on tensors of symbolic sizes (torch.fx ``make_fx``, before autograd and decompositions)."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from .aten.decompositions import FUNCTIONS
from .aten.table import TABLE, supported
from .unsupported import UnsupportedOperation

Place = tuple[str, int]
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_REQUIRES_GRAD, _DATA = torch.Tensor.requires_grad.__get__, torch.Tensor.data.__get__  # type: ignore[attr-defined]
_AUGMENTED = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")}
_TRACED = "traced_function"  #: the frame that the traced function is called from
_NUMBERS = {"item", "tolist", "numpy", "__float__", "__int__", "__index__", "__bool__", "__complex__"}
MOST_RETRACES = 8  #: each takes operations apart that the table lacks


@dataclass
class Traced:
    """A traced function. ``places`` has the user's file and line of each node; ``symbols`` the (tensor, dimension) of each size."""

    module: torch.fx.GraphModule
    env: Any
    symbols: dict[Any, tuple[int, int]]
    places: dict[torch.fx.Node, Place]
    result: Any  #: what the function returned
    custom: list[tuple[str, Place | None]]  #: the torch.autograd.Functions that it calls


def packet(node: torch.fx.Node) -> str:
    """Return the name of an operation without overload and trailing underscore."""
    name = node.target._schema.name.split("::")[-1]  # type: ignore[union-attr]
    return name[:-1] if in_place(node) else name


def in_place(node: torch.fx.Node) -> bool:
    """Tell whether an operation changes its first argument."""
    schema = node.target._schema  # type: ignore[union-attr]
    return schema.name.endswith("_") and not schema.name.endswith("__") and schema.is_mutable


def trace(call: Callable[[list[torch.Tensor]], Any], tensors: Sequence[torch.Tensor], captured: Sequence[torch.Tensor]) -> Traced:
    """Trace ``call`` on stand-ins for ``tensors``. Raises UnsupportedOperation; errors of the function itself pass through."""
    supported()
    table: dict[Any, Callable] = {}
    for _ in range(MOST_RETRACES):
        traced = _traced(call, tensors, table)
        lacking = [n for n in traced.module.graph.nodes if _operation(n) and packet(n) not in TABLE]
        lacking = [n for n in lacking if n.users or n.target._schema.is_mutable]
        if not lacking:
            return traced
        for node in {n.target: n for n in reversed(lacking)}.values():  # the first use of each
            if (apart := _decomposition(node.target)) is None or node.target in table:
                raise _lacking(node, traced)
            table[node.target] = apart
    raise _lacking(lacking[0], traced)


def _lacking(node: torch.fx.Node, traced: Traced) -> UnsupportedOperation:
    error = UnsupportedOperation(_named(node), place=place_text(traced.places.get(node)))
    error.decided = decided(traced.env, traced.symbols)
    return error


def place_text(place: Place | None) -> str:
    return f"{place[0]}:{place[1]}" if place else ""


def _named(node: torch.fx.Node) -> str:
    """Return the name of an operation with its namespace."""
    return node.target._schema.name.replace("::", ".")  # type: ignore[union-attr]


def _operation(node: torch.fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return not node.target._schema.name.startswith("aten::sym_")


def _decomposition(target: Any) -> Callable | None:
    """Return a decomposition of an operation into others, ours or torch's own."""
    from torch._decomp import get_decompositions

    from .aten.decompositions import DECOMPOSITIONS

    if own := DECOMPOSITIONS.get(target._schema.name.split("::")[-1]):
        return own
    if found := get_decompositions([target]).get(target):
        return found
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return target.decompose if target.has_kernel_for_dispatch_key(composite) else None


def _traced(call: Callable[[list[torch.Tensor]], Any], tensors: Sequence[torch.Tensor], table: dict) -> Traced:
    """Trace; what depends on data raises UnsupportedOperation."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound

    places, noisy = Places(), logging.getLogger("torch._subclasses.fake_tensor")
    level = noisy.level
    noisy.setLevel(logging.CRITICAL)  # an error of the function reaches the caller, once
    try:
        return _trace(call, tensors, table, places)
    except (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException, PendingUnbackedSymbolNotFound) as error:
        raise _depends_on_data(places) from error
    except RuntimeError as error:
        if "Cannot call numel() on tensor with symbolic" in str(error):  # torch 2.11, of a mask's elements
            raise _depends_on_data(places) from error
        if "Cannot cast FakeTensor" in str(error):  # item() of what is computed
            raise UnsupportedOperation("a number that depends on data", allowed="a tensor of one element").at(place_text(places.now)) from error
        raise
    finally:
        noisy.setLevel(level)


def _depends_on_data(places: Places) -> UnsupportedOperation:
    return UnsupportedOperation("a decision or a size that depends on data", allowed="torch.where").at(place_text(places.now))


def _trace(call: Callable[[list[torch.Tensor]], Any], tensors: Sequence[torch.Tensor], table: dict, places: Places) -> Traced:
    from torch._dynamo.source import LocalSource
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad() if not torch.is_grad_enabled() else torch.enable_grad():
        env = ShapeEnv(duck_shape=False)
        mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
        stand_ins: list[torch.Tensor] = []
        symbols: dict[Any, tuple[int, int]] = {}
        for k, t in enumerate(tensors):
            context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * t.dim())
            plain = torch.empty(t.shape, dtype=t.dtype, device="meta")
            symbolic = mode.from_tensor(plain, symbolic_context=context, source=LocalSource(f"t{k}"))
            with mode:
                stand_ins.append(torch.empty(symbolic.shape, dtype=t.dtype, device=t.device))
            for dim, n in enumerate(symbolic.shape):
                if isinstance(n, torch.SymInt):
                    symbols[n.node.expr] = (k, dim)
        results = []

        def traced_function(*given: torch.Tensor) -> Any:
            with places, _autograd_functions(places):
                results.append(call(list(given)))
            return _tensors_in(results[-1])

        try:
            with mode:
                module = make_fx(traced_function, decomposition_table=table, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True)(*stand_ins)
        except Exception as error:
            error.decided = decided(env, symbols)  # type: ignore[attr-defined]  # read by fused_function
            raise
    return Traced(module, env, symbols, places.found(module), results[-1], places.custom)


def decided(env: Any, symbols: dict[Any, tuple[int, int]]) -> tuple[tuple, dict[Any, tuple[int, int]]]:
    """Return the decisions about sizes that a trace made, and the (tensor, dimension) of each size."""
    return tuple(g.expr for g in env.guards if g.expr.free_symbols <= set(symbols)), symbols


def _tensors_in(result: Any) -> list[torch.Tensor]:
    from torch.utils._pytree import tree_leaves

    return [v for v in tree_leaves(result) if isinstance(v, torch.Tensor)]


class Places(TorchFunctionMode):
    """Note the user's file and line of each traced operation."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, Place] = {}
        self._last: Any = None
        self.now: Place | None = None  #: of the latest operation
        self.custom: list[tuple[str, Place | None]] = []  #: calls of torch.autograd.Function

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.now = _user_place() or self.now
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UnsupportedOperation("torch.vmap, torch.func.grad and the like inside a function", allowed="operations on leading dimensions; backward").at(place_text(self.now))
        if function == _REQUIRES_GRAD and not sys._getframe(1).f_code.co_filename.startswith(_OWN):
            raise UnsupportedOperation("requires_grad", why="stand-ins need no gradient", allowed="a flag among the arguments").at(place_text(self.now))
        if args and _changes_first(function) and _closed_over(args[0]):  # no stand-in: torch would change it now
            raise UnsupportedOperation("changing a tensor in place that it closes over", allowed="a new tensor").at(place_text(self.now))
        with at(self.now):
            _refuse_numbers(getattr(function, "__name__", ""), args)
        function = torch.Tensor.detach if function == _DATA else FUNCTIONS.get(function, function)  # a trace does not see where ``data`` comes from
        result = function(*args, **(kwargs or {}))
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        mode = get_proxy_mode()
        if mode is not None and (place := self.now) is not None:
            for node in _from_the_end(mode.tracer.graph):
                if node is self._last:
                    break
                self.by_name.setdefault(node.name, place)
            self._last = next(_from_the_end(mode.tracer.graph), None)
        return result

    def found(self, module: torch.fx.GraphModule) -> dict[torch.fx.Node, Place]:
        return {node: self.by_name[node.name] for node in module.graph.nodes if node.name in self.by_name}


def _refuse_numbers(name: str, args: tuple) -> None:
    """Refuse numbers that a trace would keep: those of closed-over tensors, which may change, and of an index without dimensions, of which torch takes the number."""
    if name in _NUMBERS and _closed_over(args[0]):
        raise UnsupportedOperation("a number taken from a tensor that it closes over", why="it may change", allowed="the tensor itself, x * scale; a number")
    if name not in ("__getitem__", "__setitem__"):
        return
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    tensors = [i for i in index if isinstance(i, torch.Tensor) and not i.dim() and i.dtype != torch.bool]
    bounds = [n for i in index if isinstance(i, slice) for n in (i.start, i.stop, i.step)]
    if any(map(_closed_over, bounds)) or any(not isinstance(i, FakeTensor) or i.constant is None for i in tensors):  # an argument, computed, or closed over
        raise UnsupportedOperation("indexing by a tensor without dimensions", why="torch takes its number, which depends on data", allowed="x[i[None]], which keeps the dimension with size 1")


def _closed_over(value: Any) -> bool:
    """Tell whether a value is a tensor that is no stand-in."""
    return type(value) in (torch.Tensor, torch.nn.Parameter)


def _changes_first(function: Any) -> bool:
    """Tell whether a function of torch changes its first argument, by its name: ``add_``, ``__setitem__``, ``__iadd__``."""
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or name.endswith("_") and not name.startswith("_") or name in _AUGMENTED


def _from_the_end(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    return iter(reversed(graph.nodes))


def is_of_torch(file: str) -> bool:
    return file.startswith((_OWN[0], "<frozen"))


def place_of(frames: Sequence[tuple[Any, int]]) -> Place | None:
    """Return the user's place among (frame, line), outermost first: the innermost one of the traced function that is neither torch's nor ours.

    Of a function that is torch's own, such as the forward of ``nn.LSTM``, it is the innermost forward of a module.
    """
    traced = next((k for k in range(len(frames) - 1, -1, -1) if frames[k][0].f_code.co_name == _TRACED and frames[k][0].f_code.co_filename == __file__), len(frames))
    inside = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in frames[traced + 1 :] if not f.f_code.co_filename.startswith(_OWN[1])]
    users = [one for one in inside if not is_of_torch(one[0])]
    found = users or [one for one in inside if one[2] == "forward"] or inside[:1]
    return found[-1][:2] if found else None


def _user_place() -> Place | None:
    """Return the user's place in the function that is being traced."""
    frame, frames = sys._getframe(2), list[tuple[Any, int]]()
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        if frame.f_code.co_name == _TRACED and frame.f_code.co_filename == __file__:
            break
        frame = frame.f_back  # type: ignore[assignment]
    return place_of(frames[::-1])


_watching = threading.local()  #: ``places``: where this thread notes calls of torch.autograd.Function
_watchers: list[Places] = []  #: of all threads that trace
_watchers_lock = threading.Lock()
_apply = torch.autograd.Function.__dict__["apply"]


@classmethod  # type: ignore[misc]
def _noted_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if (places := getattr(_watching, "places", None)) is not None:
        places.custom.append((cls.__name__, _user_place()))
    return _apply.__get__(None, cls)(*args, **kwargs)


def is_tracing() -> bool:
    """Tell whether this thread traces a function: what it calls then runs as it is written."""
    return getattr(_watching, "places", None) is not None


@contextmanager
def _autograd_functions(places: Places) -> Iterator[None]:
    """Note calls of ``torch.autograd.Function``: a trace shows their forward alone. Torch has no hook for that."""
    before, _watching.places = getattr(_watching, "places", None), places
    with _watchers_lock:
        _watchers.append(places)
        torch.autograd.Function.apply = _noted_apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        _watching.places = before
        with _watchers_lock:
            _watchers.remove(places)
            if not _watchers:
                torch.autograd.Function.apply = _apply  # type: ignore[method-assign]


@contextmanager
def at(place: Place | None) -> Iterator[None]:
    """Give errors of an operation the user's place."""
    try:
        yield
    except UnsupportedOperation as error:
        raise error.at(place_text(place)) from None
