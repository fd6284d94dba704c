"""Write a builder's definitions as a DT program: readable names, declarations, extents."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch

from ..lang import expr as ex
from ..lang.algorithm import Algorithm
from ..lang.algorithm import Definition as Written
from ..lang.reserved_names import CALLED, LAUNCHED, TAKEN
from .builder import DTYPE_WORDS, INTEGER_WORDS, Builder, Definition
from .unsupported import UnsupportedOperation
from .values import SEED, Axis, Index, IndexLabel, Joined, Size, Source, Value, divided, flat

LETTERS = ("x", "y", "z", "u", "v", "i", "j", "k", "l", "m", "n", "o", "p", "q", "r", "s", "t", "a", "b", "c", "d", "e", "g", "h", "w")
CARRIER = "extent_of"  #: an input without data, whose sizes are extents that no other input shows


@dataclass
class Result:
    """One result of a call: a Func's, in the shape that torch gives it, or an input as it is."""

    func: str | None
    source: Source | None
    shape: tuple
    dtype: torch.dtype
    differentiated: frozenset[int] = frozenset()  #: the tensors of a call that a gradient passes to, by number


@dataclass
class WrittenProgram:
    """A program's text and how a call feeds it. ``shapes``: for each input its sizes where dimensions are dropped or split."""

    text: str
    inputs: list[tuple[str, Source, tuple]]  #: (name, tensor, sizes that the program takes)
    scalars: list[tuple[str, Source | Any]]  #: (name, one-element tensor or size)
    carried: tuple  #: sizes of the carrier
    results: list[Result]
    funcs: tuple[str, ...]


@dataclass
class Writer:
    """One program being written."""

    builder: Builder
    names: set[str] = field(default_factory=set)
    funcs: dict[str, str] = field(default_factory=dict)  #: a definition's own name -> the readable one
    tensors: dict[str, str] = field(default_factory=dict)
    letters: dict[int, str] = field(default_factory=dict)  #: id of an axis -> its label
    labels: dict[str, Axis] = field(default_factory=dict)  #: label -> axis
    sizes: dict[str, Any] = field(default_factory=dict)  #: scalar -> size

    def fresh(self, wanted: str) -> str:
        """Return a name like ``wanted`` that nothing has."""
        wanted = re.sub(r"\W", "_", wanted) or "value"
        wanted = f"v{wanted}" if wanted[0].isdigit() or wanted.startswith("_") else wanted
        number, name = 1, wanted
        while name in self.names or name in TAKEN | CALLED | LAUNCHED or name in _WORDS or self._derived(name):
            number += 1
            name = f"{wanted}{number}" if not wanted[-1].isdigit() else f"{wanted}_{number}"
        self.names.add(name)
        return name

    def _derived(self, name: str) -> bool:
        """Tell whether the emitted file would derive one name from the other."""
        return any(a.startswith(f"{b}_") and a.removeprefix(f"{b}_") in _SUFFIXES for o in self.names for a, b in ((o, name), (name, o)))

    # -- names of index variables -----------------------------------------------------------------------------------------

    def label_of(self, leaf: Index, local: dict[str, str]) -> str:
        """Return the label of an unsplit index variable in one definition: its axis's, with a number where that is taken."""
        if leaf.name not in local:
            axis = leaf.axis.root()
            letter = self.letters.get(id(axis))
            if letter is None:
                free = [x for x in LETTERS if x not in self.names]
                letter = self.letters[id(axis)] = free[0] if free else self.fresh("x1")
                self.names.add(letter)
            number, name = 1, letter
            while name in local.values():
                number += 1
                name = f"{letter}{number}"
            self.names.add(name)
            local[leaf.name] = name
            self.labels[name] = axis
        return local[leaf.name]

    # -- expressions ------------------------------------------------------------------------------------------------------

    def expression(self, expr: ex.Expr, local: dict[str, str], inside: bool = False) -> ex.Expr:
        """Write an expression with the labels of one definition. ``inside``: within an index."""
        match expr:
            case IndexLabel():
                return self.position(expr.index, local)
            case Size(value):
                return self.size(value, inside)
            case ex.Access(tensor, index):
                return ex.Access(self.tensors.get(tensor) or self.funcs[tensor], tuple(self.indices(tensor, index, local)))
            case ex.Scalar(name):
                return ex.Scalar(self.tensors[name])
            case ex.Reduce(kind, arg, over, rank):
                return ex.Reduce(kind, self.expression(arg, local), self.bound(over, local), None if rank is None else self.expression(rank, local))
            case ex.Scan(_, args, along):
                return replace(expr, args=tuple(self.expression(a, local) for a in args), label=self.along(along, local))
            case ex.Dot(left, right, over):
                return ex.Dot(self.expression(left, local), self.expression(right, local), self.bound(over, local))
        return simplified(expr.rebuild(lambda child: self.expression(child, local, inside)))

    def bound(self, over: Sequence[str], local: dict[str, str]) -> tuple[str, ...]:
        return tuple(self.label_of(leaf, local) for name in over for leaf in self.builder.bound[name].leaves())

    def along(self, name: str, local: dict[str, str]) -> str:
        """Return the label that a scan runs along."""
        own, place = next((i, d.place) for d in self.builder.definitions for i in d.indices if i.name == name)
        if len(own.leaves()) > 1:
            raise UnsupportedOperation("partial results along a dimension that is split afterwards", place=place, allowed="a reshape of other dimensions")
        return self.label_of(own, local)

    def position(self, index: Index, local: dict[str, str]) -> ex.Expr:
        """Return the position along an index variable, by the labels of its leaves."""
        leaves = index.leaves()
        total: ex.Expr = ex.Label(self.label_of(leaves[0], local))
        for leaf in leaves[1:]:
            one = ex.Label(self.label_of(leaf, local))
            total = ex.Binary("+", ex.Binary("*", total, self.size(leaf.axis.root().size, True)), one)
        return total

    def indices(self, tensor: str, index: tuple[ex.Expr, ...], local: dict[str, str]) -> Iterator[ex.Expr]:
        """Yield the indices of an access, one for each unsplit axis of the tensor."""
        for axis, one in zip(self.axes(tensor), index):
            yield from self.along_leaves(axis, one, local)

    def along_leaves(self, axis: Axis, one: ex.Expr, local: dict[str, str]) -> Iterator[ex.Expr]:
        """Yield the positions along the leaves of an axis, of which ``one`` is the position."""
        leaves = axis.leaves()
        if isinstance(one, IndexLabel) and one.index.axis.root() is axis.root():
            yield from (ex.Label(self.label_of(leaf, local)) for leaf in one.index.leaves())
            return
        if isinstance(one, Joined) and [leaf.root() for i in one.own for leaf in i.axis.leaves()] == [leaf.root() for leaf in leaves]:
            for own, part in zip(one.own, one.positions()):
                yield from self.along_leaves(own.axis, part, local)
            return
        found = self.expression(one, local, True)
        if isinstance(found, ex.Label):  # along another axis: its extent is not this one's
            found = ex.Binary("+", found, ex.Const(0))
        for k, leaf in enumerate(leaves):
            inner = sympy.prod([rest.size for rest in leaves[k + 1 :]])
            part = found if inner == 1 else divided("/", found, self.size(inner, True))
            yield part if k == 0 else divided("%", part, self.size(leaf.size, True))

    def axes(self, tensor: str) -> list[Axis]:
        """Return the axes of a tensor as it was first accessed."""
        for known in self.builder.inputs.values():
            if known.name == tensor:
                return known.axes
        return [i.axis for d in self.builder.definitions if d.name == tensor for i in d.indices]

    def size(self, value: Any, inside: bool) -> ex.Expr:
        """Write a size: a number, the length of a label, sums and products of these, else a scalar that the call computes."""
        value = self.builder.sizes.of(value)
        if value.is_Integer:
            return self.builder.number(int(value))
        if (name := next((n for n, axis in self.labels.items() if self.builder.sizes.of(axis.size) == value), None)) is not None:
            return ex.Len(name)
        if isinstance(value, (sympy.Add, sympy.Mul)) and all(self._plain(arg) for arg in value.args):
            operator = "+" if isinstance(value, sympy.Add) else "*"
            found = self.size(value.args[-1], inside)
            for arg in value.args[-2::-1]:
                found = ex.Binary(operator, found, self.size(arg, inside))
            return found
        name = next((n for n, known in self.sizes.items() if known == value), None)
        if name is None:
            name = self.fresh("count")
            self.sizes[name] = value
        return ex.Scalar(name)

    def _plain(self, value: Any) -> bool:
        return value.is_Integer or any(self.builder.sizes.of(axis.size) == value for axis in self.labels.values())


_WORDS = frozenset(
    {
        *(name for name, row in ex.FUNCTIONS.items() if not row.is_name), *ex.REDUCTIONS,
        "cast", "len", "reshape", "rdot", "inf", "true", "false", "and", "or", "not", "Func", "In", "SIn", "Var", "RVar", "Param", "Extent", "f",
    }
)  # fmt: skip
#: what the emitted file appends to names
_SUFFIXES = frozenset(
    {
        "ptr", "desc", "at", "out", "kernel", "stride", "size", "ok", "start", "first", "tile", "part", "piece", "chunk", "from", "to", "on_device", "positive",
    }
)  # fmt: skip


def simplified(expr: ex.Expr) -> ex.Expr:
    """Drop a factor of 1; add up whole numbers: a + 1 - 1 is a + 0, which in an index is not a."""
    match expr:
        case ex.Binary("*", a, ex.Const(1)) | ex.Binary("*", ex.Const(1), a) | ex.Binary("/", a, ex.Const(1)):
            return a
        case ex.Binary("+", ex.Const(int() as first), ex.Const(int() as second)):
            return ex.Const(first + second)
        case ex.Binary("+" | "-" as op, ex.Binary("+" | "-" as inner, a, ex.Const(int() as first)), ex.Const(int() as second)):
            total = (first if inner == "+" else -first) + (second if op == "+" else -second)
            return ex.Binary("+" if total >= 0 else "-", a, ex.Const(abs(total)))
    return expr


def write(builder: Builder, results: Sequence[Any], names: Sequence[str], inputs: Sequence[str], casts: Sequence[str | None]) -> WrittenProgram:
    """Write the program that computes ``results``. ``names``: of the results; ``inputs``: of the tensors of a call; ``casts``: a DT dtype for each result."""
    funcs: list[str] = []
    made: list[Result] = []
    for value, name, cast in zip(results, names, casts):
        if isinstance(value, Source):
            made.append(Result(None, value, value.shape, value.dtype))
            continue
        differentiated = builder.differentiated(value.expr) if value.dtype.is_floating_point else frozenset[int]()
        if not differentiated and isinstance(value.expr, ex.Call) and value.expr.fn == "detach":
            value = replace(value, expr=value.expr.args[0])
        func = _result(builder, value, name, cast, funcs)
        funcs.append(func)
        made.append(Result(func, None, tuple(builder.extent(d) for d in value.dims), value.dtype, differentiated))
    writer = Writer(builder)
    definitions = _needed(builder.definitions, funcs)
    used = _inputs_of(definitions)
    known = [i for i in builder.inputs.values() if i.name in used]
    for d in definitions:
        writer.funcs[d.name] = ""
    for i in known:
        writer.tensors[i.name] = writer.fresh(i.source.name if i.source is SEED else inputs[i.source.root])
    for d in definitions:
        writer.funcs[d.name] = writer.fresh(d.hint)
    written = _definitions(writer, definitions)
    if not any(i.axes for i in known):
        raise UnsupportedOperation("a function of numbers and one-element tensors alone", allowed="one that reads a tensor of two elements or more: x[0] is a tensor of one")
    return _declared(writer, known, written, made, {f: writer.funcs[f] for f in funcs})


def _result(builder: Builder, value: Value, name: str, cast: str | None, before: list[str]) -> str:
    """Return the Func that holds a result; define it where none is laid out as the result."""
    wanted = [leaf for d in value.dims for leaf in flat(d)]
    match value.expr:
        case ex.Access(tensor, index) if cast is None and value.dtype != torch.bool:
            own = next((d for d in builder.definitions if d.name == tensor), None)
            plain = [leaf for i in index if isinstance(i, IndexLabel) for leaf in i.index.leaves()]
            if own is not None and tensor not in before and len(plain) == sum(len(i.leaves()) for i in own.indices) and [p.name for p in plain] == [w.name for w in wanted]:
                own.hint = name if own.hint in _GENERIC else own.hint
                return tensor
    expr = builder.numeric(value) if value.dtype == torch.bool else value.expr
    builder.define(replace(value, expr=ex.Cast(expr, cast) if cast and not isinstance(expr, ex.Cast) else expr), name)
    return builder.definitions[-1].name


_GENERIC = frozenset({"value", "sum", "product", "summed", "loss", "total"})


def _needed(definitions: list[Definition], funcs: list[str]) -> list[Definition]:
    by_name = {d.name: d for d in definitions}
    needed, todo = set(), list(funcs)
    while todo:
        name = todo.pop()
        if name not in needed:
            needed.add(name)
            todo += [a.tensor for a in ex.accesses(by_name[name].expr) if a.tensor in by_name]
    return [d for d in definitions if d.name in needed]


def _inputs_of(definitions: list[Definition]) -> set[str]:
    nodes = [n for d in definitions for n in d.expr.walk()]
    return {n.tensor for n in nodes if isinstance(n, ex.Access)} | {n.name for n in nodes if isinstance(n, ex.Scalar)}


def _definitions(writer: Writer, definitions: list[Definition]) -> list[Written]:
    locals_: list[dict[str, str]] = []
    for d in reversed(definitions):  # the results' labels get the first letters
        local: dict[str, str] = {}
        for i in d.indices:
            for leaf in i.leaves():
                writer.label_of(leaf, local)
        locals_.insert(0, local)
    for d, local in zip(definitions, locals_):  # all labels before any size is written
        for node in d.expr.walk():
            if isinstance(node, (ex.Reduce, ex.Dot)):
                writer.bound(node.labels, local)
    written = []
    for d, local in zip(definitions, locals_):
        labels = tuple(local[leaf.name] for i in d.indices for leaf in i.leaves())
        written.append(Written(writer.funcs[d.name], labels, writer.expression(d.expr, local)))
    return written


def _declared(writer: Writer, known: list, written: list[Written], made: list[Result], funcs: dict[str, str]) -> WrittenProgram:
    builder = writer.builder
    used = {a.tensor for d in written for a in ex.accesses(d.expr)}
    tensors = [i for i in known if i.axes and writer.tensors[i.name] in used]
    scalars: list[tuple[str, Any]] = [(writer.tensors[i.name], i.source) for i in known if not i.axes]
    scalars += list(writer.sizes.items())
    names = tuple(writer.tensors[i.name] for i in tensors)
    left = {label for d in written for label in d.labels}
    seen = [label for label in writer.labels if label in left or any(label in n.labels for d in written for n in d.expr.walk() if isinstance(n, (ex.Reduce, ex.Dot)))]
    algorithm = Algorithm(
        tuple(d.name for d in written), names, tuple(n for n, _ in scalars), tuple(x for x in seen if x in left), tuple(x for x in seen if x not in left),
        definitions=tuple(written),
    )  # fmt: skip
    extents: list[tuple[str, str, int]] = []
    carried: list[Any] = []
    formulas: list[str] = []
    for label in seen:
        algorithm_now = replace(algorithm, extents=tuple(extents))
        if algorithm_now.extent_source(label) is not None or algorithm_now.constant_extent(label) is not None:
            continue
        size = builder.sizes.of(writer.labels[label].size)
        place = next(((writer.tensors[i.name], dim) for i in tensors for dim, leaf in enumerate(x for a in i.axes for x in a.leaves()) if builder.sizes.of(leaf.size) == size), None)
        if size.is_Integer:
            extents.append((label, "", int(size)))
        elif place is not None:
            extents.append((label, *place))
        elif (formula := _formula(size, _shown_sizes(writer, tensors))) is not None:
            formulas.append(f"Extent {label} = {formula};")
        else:
            if size not in carried:
                carried.append(size)
            extents.append((label, CARRIER, carried.index(size)))
    inputs = (*names, CARRIER) if carried else names
    algorithm = replace(algorithm, inputs=inputs, extents=tuple(extents))
    outputs = tuple(dict.fromkeys(funcs[r.func] for r in made if r.func is not None))
    text = "\n".join([str(algorithm), *formulas, *(f"{name}.compile();" for name in outputs)])
    for r in made:
        r.func = funcs[r.func] if r.func is not None else None
    return WrittenProgram(
        text,
        [(writer.tensors[i.name], i.source, tuple(leaf.size for a in i.axes for leaf in a.leaves())) for i in tensors],
        scalars, tuple(carried), made, outputs,
    )  # fmt: skip


def _shown_sizes(writer: Writer, tensors: list) -> dict[Any, str]:
    """Return size -> how a formula writes it: ``A[1]``, of a split dimension ``A[1] * A[2]``."""
    found: dict[Any, str] = {}
    for i in tensors:
        dim = 0
        for axis in i.axes:
            parts = [f"{writer.tensors[i.name]}[{dim + k}]" for k in range(len(axis.leaves()))]
            dim += len(parts)
            found.setdefault(writer.builder.sizes.of(axis.root().size), parts[0] if len(parts) == 1 else f"({' * '.join(parts)})")
    return found


def _formula(size: Any, shown: dict[Any, str]) -> str | None:
    """Write a size as an extent's formula; None where that is impossible."""
    from torch.utils._sympy.functions import FloorDiv

    if size in shown:
        return shown[size]
    if size.is_Integer:
        return str(int(size)) if size >= 0 else None
    if isinstance(size, FloorDiv) and size.args[1].is_Integer:
        inner = _formula(size.args[0], shown)
        return None if inner is None else f"{_grouped(inner)} / {size.args[1]}"
    if isinstance(size, (sympy.Add, sympy.Mul)):
        minus = [a for a in size.args if isinstance(size, sympy.Add) and a.could_extract_minus_sign()]
        plus = [_formula(a, shown) for a in size.args if a not in minus]
        less = [_formula(-a, shown) for a in minus]
        if not plus or None in plus or None in less:
            return None
        if isinstance(size, sympy.Mul):
            return " * ".join(map(_grouped, plus))  # type: ignore[arg-type]
        return " + ".join(map(str, reversed(plus))) + "".join(f" - {_grouped(p)}" for p in less)  # type: ignore[arg-type]
    return None


def _grouped(text: str) -> str:
    return f"({text})" if " " in text else text


def cast_word(dtype: torch.dtype) -> str | None:
    """Return DT's name of a dtype; None where it has none."""
    return DTYPE_WORDS.get(dtype) or INTEGER_WORDS.get(dtype)
