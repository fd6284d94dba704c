"""Run a traced graph through the table: from ATen operations to DT expressions.

Views and in-place changes are resolved here. A view is read through its base at every use, so that it sees what was written to
the base since; a write to a view is a write to a part of the base.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..lang import expr as ex
from .aten.elementwise import choose_as, converted
from .aten.table import GROUPS, TABLE, VIEWS
from .aten.views import first_of
from .builder import Builder
from .sizes import Sizes
from .source_names import assigned_names
from .tracing import Traced, at, in_place, packet, place_text
from .unsupported import UnsupportedOperation
from .values import Source, Value, flat

_MODES = {torch._C._set_grad_enabled}
_AUTOCAST = {torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast}  #: the dtypes of what they enclose are known
LONG = 8  #: nodes from which on an expression that is read again, or has a name, gets a Func of its own
MOST = 60  #: nodes from which on any expression does
REPEATING = frozenset(GROUPS["activations"]) | {"pow", "square", "sinh", "cosh", "round", "trunc", "norm", "linalg_vector_norm", "normalize", "cosine_similarity", "glu"}
PERMUTING = frozenset({"transpose", "swapaxes", "swapdims", "t", "numpy_T", "mT", "matrix_H", "adjoint", "mH", "permute", "movedim", "moveaxis"})
SAME = frozenset({*GROUPS["casts and copies"], "positive", "expand", "expand_as", "broadcast_to"} - {"detach"})  #: where they return a view of one shape, it is the argument
Reader = Callable[[], Any]


@dataclass
class Tensor:
    """A tensor of the graph: a value of its own, or a view of another one."""

    value: Any = None  #: Value or Source
    version: int = 0
    base: Tensor | None = None
    view: Callable[[Any], Any] | None = None  #: from the base's value to this one's
    write_back: Callable[[Value, Value], Value] | None = None  #: (the base's value, this one's) -> the base's
    seen: int = -1

    @property
    def root(self) -> Tensor:
        return self if self.base is None else self.base.root

    def read(self) -> Any:
        if self.base is not None and self.seen != self.root.version:
            assert self.view is not None
            self.value, self.seen = self.view(self.base.read()), self.root.version
        return self.value

    def write(self, builder: Builder, value: Value) -> None:
        if self.base is None:
            if isinstance(self.value, Source):
                raise UnsupportedOperation("changing an argument in place", allowed="a new tensor, x = x + 1")
            self.value = builder.define(value) if len(value.expr._nodes) > MOST and value.dtype.is_floating_point else value  # what is written again is read again
            self.version += 1
            return
        if self.write_back is None:
            raise UnsupportedOperation("changing this view in place", allowed="slices, select, transposes of a new tensor")
        base = self.base.read()
        if isinstance(base, Source):
            raise UnsupportedOperation("changing an argument in place", allowed="a new tensor, x = x.clone()")
        self.base.write(builder, self.write_back(base, value))


class Interpreter:
    """Evaluate the nodes of one graph."""

    def __init__(self, traced: Traced, captured: Sequence[torch.Tensor], count: int):
        self.traced, self.captured, self.count = traced, captured, count
        self.builder = Builder(Sizes(traced.env), any(_is_double(n) for n in traced.module.graph.nodes) or any(t.dtype == torch.float64 for t in captured))
        self.known: dict[torch.fx.Node, Any] = {}
        self.names = assigned_names(traced.module.graph, traced.places)
        self.uses = {n: len(n.users) for n in traced.module.graph.nodes}
        self.recording = True  #: False inside torch.no_grad()
        self.constants: list[torch.Tensor] = []  #: tensors that the function makes of numbers
        for name, place in traced.custom:
            self.builder.place = place_text(place)
            self.builder.forbid_gradient(f"the gradient of {name}", "it is a torch.autograd.Function")

    def run(self) -> list[Any]:
        """Return the results: a Source where the function returns an input, else a Value."""
        inputs = iter(range(self.count))
        results: list[Any] = []
        for node in self.traced.module.graph.nodes:
            place = self.traced.places.get(node)
            self.builder.place = place_text(place) or self.builder.place
            with at(place):
                if node.op == "placeholder":
                    self.known[node] = self.source(next(inputs), node.meta["val"])
                elif node.op == "get_attr":
                    self.known[node] = self.constant(node)
                elif node.op == "output":
                    results = [self.known[n].read() for n in node.args[0]]
                elif isinstance(node.meta.get("val"), (torch.SymInt, int, torch.SymFloat, float, torch.SymBool, bool)):
                    self.known[node] = node.meta["val"]
                elif node.target is operator.getitem:
                    self.known[node] = self.known[node.args[0]][node.args[1]]  # type: ignore[index]
                    if self.known[node] is None and node.users:
                        raise UnsupportedOperation(f"the places that {packet(node.args[0])} returns", allowed="its values")  # type: ignore[arg-type]
                elif node.target in _MODES:
                    self.recording = bool(node.args[0])
                elif node.target in _AUTOCAST:
                    continue
                elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                    if not node.users and not node.target._schema.is_mutable:
                        continue  # a question that the function asked, such as torch.promote_types
                    self.known[node] = self.operation(node)
                else:
                    raise UnsupportedOperation(str(node.target))
        return results

    def source(self, root: int, fake: torch.Tensor, name: str = "") -> Tensor:
        shape = tuple(self.builder.sizes.of(n) for n in fake.shape)
        return Tensor(Source(root, (), shape, fake.dtype, name))

    def constant(self, node: torch.fx.Node) -> Tensor:
        """Return a closed-over tensor, which is an input too, or a number written as torch.tensor(2.0)."""
        held = getattr(self.traced.module, str(node.target))
        for k, t in enumerate(self.captured):
            if t is held:
                return self.source(self.count + k, held)
        held = getattr(held, "constant", None) if isinstance(held, FakeTensor) else held
        if held is None:
            raise UnsupportedOperation("a tensor that is neither an argument nor closed over", allowed="an argument, torch.tensor([...])")
        if not isinstance(held, torch.Tensor):
            raise UnsupportedOperation(f"a {type(held).__name__} of one's own", allowed="tensors, numbers")
        if held.is_complex() or held.layout != torch.strided or held.is_nested:
            raise UnsupportedOperation(f"a tensor of {held.dtype}, {held.layout}")
        if held.numel() == 1:
            value = self.builder.value(held.item(), held.dtype)
            return Tensor(replace(value, dims=((),) * held.dim()))
        self.constants.append(held)  # written out in the function: torch.tensor([1.0, 2.0])
        return self.source(self.count + len(self.captured) + len(self.constants) - 1, held, "table")

    def operation(self, node: torch.fx.Node) -> Any:
        name = packet(node)
        b = self.builder
        b.out, b.hint = node.meta.get("val"), self.names.get(node) or name
        refs: list[Tensor] = []
        args, kwargs = self.read(node.args, refs), self.read(node.kwargs, refs)
        if in_place(node):
            return self.changed(node, name, refs[0], args, kwargs)
        given = refs[0].read() if refs else None
        first = bool(refs and node.args) and refs[0] is self.known.get(node.args[0])  # type: ignore[arg-type]
        if isinstance(given, Source) and name not in VIEWS and _keeps(name, node):
            return refs[0] if name != "detach" else self.viewed(node, name, refs[0], args[1:], kwargs)
        if first and (name in VIEWS or _shares_memory(node)):
            found = self.viewed(node, name, refs[0], args[1:], kwargs)
            if _shares_memory(node) or isinstance(given, Source):
                return found
            return [Tensor(v.read()) for v in found] if isinstance(found, list) else Tensor(found.read())  # a copy: a write to it is none to the base
        made = translated(name, b, *self.short(name, self.values(args)), **self.values(kwargs))
        if isinstance(made, tuple):
            return [Tensor(self.recorded(self.kept(node, v, place))) if v is not None else None for place, v in enumerate(made)]
        return Tensor(self.recorded(self.kept(node, made)))

    def recorded(self, value: Value) -> Value:
        """Return a value that is computed now: inside torch.no_grad() no gradient passes through it."""
        return value if self.recording else self.builder.detached(value)

    def kept(self, node: torch.fx.Node, value: Value, place: int = 0) -> Value:
        """Give a value a Func where that is shorter to read and to compute: it is used again, or has a name."""
        fake = node.meta["val"][place] if isinstance(node.meta["val"], (tuple, list)) else node.meta["val"]
        value = replace(value, dtype=fake.dtype)
        long, named = len(value.expr._nodes), node in self.names
        worth = self.uses[node] > 1 and long > (3 if named else LONG) or named and long > LONG or long > MOST
        if worth and fake.dtype.is_floating_point and value.expr._accesses:
            return self.builder.define(value, self.names.get(node, "value"))
        return value

    def short(self, name: str, args: list) -> list:
        """Give the argument of a function that reads it several times a Func, where it is long."""
        if name not in REPEATING:
            return args
        long = [isinstance(v, Value) and v.dtype.is_floating_point and len(v.expr._nodes) > 4 and v.expr._accesses for v in args]
        return [self.builder.define(v, "inner") if again else v for v, again in zip(args, long)]

    def read(self, value: Any, refs: list[Tensor]) -> Any:
        """Replace the nodes in arguments by their values."""
        if isinstance(value, torch.fx.Node):
            found = self.known[value]
            if isinstance(found, Tensor):
                refs.append(found)
            return found
        if isinstance(value, (list, tuple)):
            return [self.read(v, refs) for v in value]
        return {k: self.read(v, refs) for k, v in value.items()} if isinstance(value, dict) else value

    def values(self, given: Any) -> Any:
        """Replace tensors in arguments by values."""
        if isinstance(given, Tensor):
            return self.builder.value(given.read())
        if isinstance(given, list):
            return [self.values(v) for v in given]
        return {k: self.values(v) for k, v in given.items()} if isinstance(given, dict) else given

    # -- views and in-place changes -----------------------------------------------------------------------------------------

    def viewed(self, node: torch.fx.Node, name: str, base: Tensor, args: list, kwargs: dict) -> Any:
        """Return a view. Of an input torch makes it, before the kernels; of a value it is other index variables."""
        b, out, recording = self.builder, node.meta["val"], self.recording
        fakes = out if isinstance(out, (list, tuple)) else [out]

        def view(value: Any, place: int) -> Any:
            b.out = out
            if isinstance(value, Source) and (name in VIEWS or name == "detach"):
                shape = tuple(b.sizes.of(n) for n in fakes[place].shape)
                step = (node.target, tuple(self.sized(args)), tuple(sorted(self.sized(kwargs).items())), place if isinstance(out, (list, tuple)) else None)
                after = () if recording else ((torch.ops.aten.detach.default, (), (), None),)
                return Source(value.root, (*value.steps, step, *after), shape, value.dtype, value.name)  # type: ignore[arg-type]
            made = translated(name, b, b.value(value), *self.values(args), **self.values(kwargs))
            made = made[place] if isinstance(made, tuple) else made
            return made if recording else b.detached(made)

        found = [Tensor(base=base, view=lambda v, p=p: view(v, p), write_back=self.inverse(name, args, p, node)) for p in range(len(fakes))]  # type: ignore[misc]
        for one in found:
            one.read()
        return found if isinstance(out, (list, tuple)) else found[0]

    def sized(self, value: Any) -> Any:
        """Replace symbolic sizes in arguments by their expressions."""
        if isinstance(value, (list, tuple)):  # a torch.Size too
            return tuple(self.sized(v) for v in value)
        if isinstance(value, dict):
            return {k: self.sized(v) for k, v in value.items()}
        return self.builder.sizes.of(value) if isinstance(value, torch.SymInt) else value

    def inverse(self, name: str, args: list, place: int, node: torch.fx.Node) -> Callable[[Value, Value], Value] | None:
        """Return how a write to a view changes its base; None where that is not supported."""
        b, out = self.builder, node.meta["val"]
        if name in PERMUTING:
            return lambda base, new: self.permuted_back(name, args, new)
        if name in ("view", "view_as", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten"):
            return lambda base, new: replace(b.reshaped(new, [b.extent(d) for d in base.dims]), dtype=base.dtype)
        if name in SAME and self.sized(out.shape) == self.sized(node.args[0].meta["val"].shape):  # type: ignore[union-attr]
            return lambda base, new: replace(new, dtype=base.dtype)
        if name == "detach":
            return self.behind_detach
        if name == "diagonal":
            return lambda base, new: self.on_diagonal(base, new, *args, **dict(node.kwargs))  # type: ignore[arg-type]
        if name not in ("slice", "narrow", "select"):
            return None

        def write(base: Value, new: Value) -> Value:
            dim = (args[0] if args else 0) % base.rank
            if name == "select":
                start = first_of(b, base, dim, args[1])
                new, size, step = replace(new, dims=(*new.dims[:dim], (), *new.dims[dim:])), 1, 1
            else:
                b.out = out
                start, size = first_of(b, base, dim, args[1] if len(args) > 1 else 0), b.shape[dim]
                step = args[3] if len(args) > 3 else 1
            return self.overwritten(base, new, dim, start, size, step)

        return write

    def overwritten(self, base: Value, new: Value, dim: int, start: Any, size: Any, step: int) -> Value:
        """Return the base with ``size`` elements along ``dim`` replaced, from ``start`` on."""
        b = self.builder
        if not flat(base.dims[dim]):
            return replace(new, dtype=base.dtype)
        whole = step == 1 and b.sizes.of(start) == 0 and flat(new.dims[dim]) and b.sizes.of(size) == b.extent(base.dims[dim])
        if whole and b.passes_gradient(new.expr) >= b.passes_gradient(base.expr):
            return replace(new, dtype=base.dtype)
        here, first, last = b.flat_index(base.dims[dim]), b.number(start), b.number(b.sizes.of(start + (size - 1) * step))
        back = ex.Binary("-", here, first)
        place = back if step == 1 else ex.Binary("/", back, ex.Const(step))
        moved = b.taken(new, dim, lambda _: place, base.dims[dim]) if flat(new.dims[dim]) else replace(new, dims=new.dims[:dim] + (base.dims[dim],) + new.dims[dim + 1 :])
        inside: ex.Expr = ex.Binary("and", ex.Binary(">=", here, first), ex.Binary("<=", here, last))
        if size == 1:
            inside = ex.Binary("==", here, first)
        if step != 1:
            inside = ex.Binary("and", inside, ex.Binary("==", ex.Binary("%", back, ex.Const(step)), ex.Const(0)))
        others = [k for k in range(base.rank) if k != dim]
        for k in others:
            if flat(moved.dims[k]):
                b.unify(base.dims[k], moved.dims[k])
        expr = b.moved(moved.expr, [moved.dims[k] for k in others], [base.dims[k] for k in others])
        return Value(base.dims, choose_as(base.dtype, inside, expr, base.expr), base.dtype)

    def permuted_back(self, name: str, args: list, new: Value) -> Value:
        """Return the base of a permuted view from the view's value."""
        order = TABLE[name](self.builder, Value(tuple((k,) for k in range(new.rank)), ex.Const(0), new.dtype), *args).dims  # type: ignore[arg-type,misc]
        return replace(new, dims=tuple(new.dims[order.index((k,))] for k in range(new.rank)))

    def behind_detach(self, base: Value, new: Value) -> Value:
        """Return a base whose detached view was written: torch's gradient of the base does not notice it."""
        if self.builder.passes_gradient(base.expr):
            self.builder.forbid_gradient("changing a detached view in place", "the tensor has a gradient")
        return replace(new, dtype=base.dtype)

    def on_diagonal(self, base: Value, new: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
        """Return the base with its diagonal replaced."""
        b, first, second = self.builder, dim1 % base.rank, dim2 % base.rank
        rows, columns = base.dims[first], base.dims[second]
        moved = b.taken(new, new.rank - 1, lambda at: at if offset >= 0 else ex.Binary("+", at, ex.Const(offset)), rows)
        others = [base.dims[k] for k in range(base.rank) if k not in (first, second)]
        for own, other in zip(others, moved.dims):
            if flat(other):
                b.unify(own, other)
        expr = b.moved(moved.expr, moved.dims[:-1], others)
        here = ex.Binary("==", ex.Binary("+", b.flat_index(rows), ex.Const(offset)), b.flat_index(columns))
        return Value(base.dims, choose_as(base.dtype, here, expr, base.expr), base.dtype)

    def changed(self, node: torch.fx.Node, name: str, target: Tensor, args: list, kwargs: dict) -> Tensor:
        """Run an in-place operation: compute its plain form and write that to the target."""
        b = self.builder
        if name not in TABLE:
            raise UnsupportedOperation(f"aten.{name}_").at(place_text(self.traced.places.get(node)))
        if isinstance(target.read(), Source):
            raise UnsupportedOperation("changing an argument in place", allowed="a new tensor, x = x + 1")
        made = translated(name, b, *self.values(args), **self.values(kwargs))
        before = b.value(target.read())
        if made == before and self.recording:  # y[:, 0] += 1 copies the view onto itself after the sum
            return target
        if not self.recording and b.passes_gradient(before.expr):
            b.forbid_gradient(f"{name}_ inside torch.no_grad", "the tensor has a gradient")
        made = self.recorded(converted(b, made, before.dtype))
        if len(made.expr._nodes) > LONG and made.dtype.is_floating_point and made.expr._accesses:
            made = b.define(made, self.names.get(node, name))
        target.write(b, made)
        return target


def translated(name: str, b: Builder, *args: Any, **kwargs: Any) -> Any:
    """Run an entry of the table; refuse arguments that it does not take."""
    signature = inspect.signature(TABLE[name])
    try:
        signature.bind(b, *args, **kwargs)
    except TypeError as error:
        raise UnsupportedOperation(f"aten.{name} with these arguments", why=str(error), allowed=", ".join(list(signature.parameters)[1:])) from None
    return TABLE[name](b, *args, **kwargs)


def _is_double(node: torch.fx.Node) -> bool:
    return node.op == "placeholder" and node.meta["val"].dtype == torch.float64


def _shares_memory(node: torch.fx.Node) -> bool:
    """Tell whether an operation's result, or the first of several, is in the memory of its first argument."""
    out, first = node.meta["val"], node.args[0].meta.get("val")  # type: ignore[union-attr]
    out = out[0] if isinstance(out, (list, tuple)) and out else out
    if not isinstance(out, torch.Tensor) or not isinstance(first, torch.Tensor):
        return False
    return out.untyped_storage()._cdata == first.untyped_storage()._cdata


def _keeps(name: str, node: torch.fx.Node) -> bool:
    """Tell whether an operation returns its input unchanged."""
    if name in ("clone", "contiguous", "alias", "detach", "lift_fresh"):
        return name == "detach" or name in ("contiguous", "alias", "lift_fresh")
    out, first = node.meta["val"], node.args[0] if node.args else None
    if name in ("to", "type_as", "float") and isinstance(first, torch.fx.Node):
        return out.dtype == first.meta["val"].dtype
    return name == "dropout" and bool(node.args[1] == 0 or not node.args[2])
