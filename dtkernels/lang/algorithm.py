"""Represent the algorithm: the definition of every element of every Func."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from .errors import Position
from .expr import (
    FLOAT8,
    INTEGER_OPERATORS,
    INTEGERS,
    PLACES,
    RANDOM,
    TORCH_NAMES,
    Access,
    Binary,
    Call,
    Cast,
    Const,
    Dot,
    Expr,
    Label,
    Reduce,
    Reshape,
    Scalar,
    Scan,
    Unary,
    Write,
    accesses,
    free_labels,
    is_integer,
)
from .extents.formulas import constant_of, expanded
from .parts.apart_products import apart_product_names, with_apart_product
from .parts.batched_products import batched_product_names, lies_across, with_batched_product
from .parts.joined_terms import joined_term_names, with_joined_terms
from .parts.picked_terms import picked_term_names, with_picked_terms
from .parts.rounded_copies import rounded_copy_names, with_rounded_copy
from .parts.shared_sums import shared_sum_names, with_shared_sum


@dataclass(frozen=True)
class Definition:
    """``name[labels] = expr;``"""

    name: str
    labels: tuple[str, ...]
    expr: Expr
    pos: Position | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(self.labels)}] = {self.expr};"


IN_INDEX = "as it stands in an index"  #: why an input must hold integers


@dataclass(frozen=True)
class Algorithm:
    """Declarations and definitions, in source order.

    ``params`` maps each compile-time parameter to its default.
    """

    funcs: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    vars: tuple[str, ...] = ()
    rvars: tuple[str, ...] = ()
    params: tuple[tuple[str, int | bool], ...] = ()
    definitions: tuple[Definition, ...] = ()
    #: (label, input, dimension): declared extents, ``Extent j = K[1];``; input "" for a constant, ``Extent r = 4;``
    extents: tuple[tuple[str, str, int], ...] = ()
    #: (label, expression): extents that are worked out, ``Extent s = (A[1] - 3) / 2 + 1;``, see extents/formulas.py
    formulas: tuple[tuple[str, Expr], ...] = ()
    #: (input, the forward's inputs behind it): inputs of a derived backward that are computed values, see algebra/operand_types.py
    stands_for: tuple[tuple[str, tuple[str, ...]], ...] = field(default=(), compare=False, repr=False)
    #: inputs that hold integers or truth values in the calls that kernels are made for; masked loads never fill them with -inf
    integral: frozenset[str] = field(default=frozenset(), repr=False)
    #: inputs and scalars that hold integers, as a call has checked, though no index has them any more
    whole_inputs: frozenset[str] = field(default=frozenset(), repr=False)
    #: inputs and scalars of a derived backward that the forward indexes with: they hold integers, though here they are only compared
    indices: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    #: (input, "e4m3" or "e5m2"): inputs that hold float8 in the calls that kernels are made for
    float8: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    #: labels that the spec's schedules or sizes mention; renaming keeps them
    named: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    #: (input, dimensions) of inputs that nothing reads any more, and that tell extents
    ranks: tuple[tuple[str, int], ...] = field(default=(), compare=False, repr=False)
    #: Funcs that a schedule made of operands of products: they have the dtype of those, see codegen/prelower/named_operands.py
    operands: frozenset[str] = field(default=frozenset(), repr=False)
    #: (Func, scalar): gradients of scalars, which have the dtype of the scalar's tensor
    scalar_gradients: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @cached_property
    def _by_name(self) -> dict[str, Definition]:
        return {d.name: d for d in reversed(self.definitions)}  # on duplicates, which checks refuse, the first wins

    def __getitem__(self, func: str) -> Definition:
        return self._by_name[func]

    def __contains__(self, func: str) -> bool:
        return func in self._by_name

    @property
    def labels(self) -> tuple[str, ...]:
        return self.vars + self.rvars

    @property
    def names(self) -> frozenset[str]:
        """Return the names that are taken: of Funcs, inputs, scalars and labels."""
        return frozenset((*self.funcs, *self.inputs, *self.scalars, *self.labels))

    def with_definitions(self, definitions: tuple[Definition, ...]) -> Algorithm:
        """Replace the definitions; keep the inputs, and declare the Funcs to match."""
        return replace(self, definitions=definitions, funcs=tuple(d.name for d in definitions))

    def transform(self, change: Callable[[Expr], Expr]) -> Algorithm:
        """Return the algorithm with ``change`` applied to every node of every definition, inner ones first."""
        return self.with_definitions(tuple(replace(d, expr=d.expr.transform(change)) for d in self.definitions))

    def needed_by(self, outputs: tuple[str, ...]) -> tuple[str, ...]:
        """Return the Funcs that ``outputs`` depend on, including themselves, in order of definition."""
        if outputs in self._needed:
            return self._needed[outputs]
        seen: set[str] = set()
        todo = list(outputs)
        while todo:
            func = todo.pop()
            if func in seen:
                continue
            seen.add(func)
            todo += [a.tensor for a in accesses(self[func].expr) if a.tensor in self]
        self._needed[outputs] = tuple(d.name for d in self.definitions if d.name in seen)
        return self._needed[outputs]

    @cached_property
    def _needed(self) -> dict[tuple[str, ...], tuple[str, ...]]:
        """What ``needed_by`` has found: rules ask for the same outputs again and again."""
        return {}

    def limited_to(self, outputs: tuple[str, ...]) -> Algorithm:
        """Return the algorithm without the Funcs that ``outputs`` do not depend on."""
        needed = self.needed_by(outputs)
        return self.with_definitions(tuple(d for d in self.definitions if d.name in needed))

    def integer_inputs(self) -> frozenset[str]:
        """Return the inputs that must hold integers: those used in an index, ``W[t[x], y]``."""
        return (self._integer_tensors | self.whole_inputs) & frozenset(self.inputs)

    @cached_property
    def _integer_tensors(self) -> frozenset[str]:
        found = {inner.tensor for outer in self._accesses() for i in outer.index for inner in accesses(i)}
        operated = (n for d in self.definitions for n in d.expr.walk() if _takes_integers(n))
        return frozenset(found | {t for n in operated for t in _operands(n)})

    def reason_for_integers(self, name: str) -> str:
        """Return why the input ``name`` must hold integers, for an error message."""
        inside = {inner.tensor for outer in self._accesses() for i in outer.index for inner in accesses(i)}
        use = next((n for d in self.definitions for n in d.expr.walk() if _is_of_integers(n) and name in _operands(n)), None)
        if name in inside or use is None:
            return IN_INDEX
        return f"as {use.op} is of integers in {use}; of floats, pow(a, b) is a power and a - b * floor(a / b) a remainder"  # type: ignore[attr-defined]

    @cached_property
    def integer_funcs(self) -> dict[str, str]:
        """Return the Funcs that hold integers or truth values, with their torch dtype.

        They are a cast to such a dtype, or whole numbers in which a cast, the place of an extremum or an operator on integers takes part.
        Whole numbers of labels, sizes and inputs alone are float32, like any other value.
        """
        found: dict[str, str] = {}
        for d in self.definitions:
            if d.name in self.operands:
                continue
            if isinstance(d.expr, Cast):
                if d.expr.dtype in INTEGERS:
                    found[d.name] = d.expr.dtype
            elif is_integer(d.expr, self.integer_inputs() | found.keys(), self.integer_scalars()) and any(_makes_integers(n, found) for n in _values(d.expr)):
                found[d.name] = "int64"
        return found

    @cached_property
    def written(self) -> dict[str, str]:
        """Return the Funcs that are stored in an input, each with that input."""
        return {d.name: d.expr.place.tensor for d in self.definitions if isinstance(d.expr, Write)}

    def integer_tensors(self) -> frozenset[str]:
        """Return the inputs and Funcs whose elements are integers in arithmetic."""
        return self.integer_inputs() | {f for f, dtype in self.integer_funcs.items() if dtype != "bool"}

    @cached_property
    def float8_buffers(self) -> dict[str, str]:
        """Return the inputs and Funcs that are in float8 in memory, with their dtype."""
        made = {d.name: d.expr.dtype for d in self.definitions if isinstance(d.expr, Cast) and d.expr.dtype in FLOAT8}
        given = dict(self.float8)
        copied = {d.name: given[d.expr.tensor] for d in self.definitions if d.name in self.operands and isinstance(d.expr, Access) and d.expr.tensor in given}
        return given | made | copied | {f: given[t] for f, t in self.written.items() if t in given}

    def as_in_memory(self, e: Expr) -> Expr:
        """Return what a copy of ``e`` is made of: elements of a float8 input are cast to what they are, so that the copy is in float8 too."""
        form = dict(self.float8).get(e.tensor) if isinstance(e, Access) else None
        return Cast(e, form) if form else e

    @property
    def has_float8(self) -> bool:
        """Return whether any value is in float8, in memory or in between."""
        return bool(self.float8) or any(isinstance(n, Cast) and n.dtype in FLOAT8 for d in self.definitions for n in d.expr.walk())

    def own_dtype(self, func: str) -> str:
        """Return the torch dtype that ``func`` has by its definition; "" where that follows from the inputs."""
        e = self[func].expr
        if func in self.operands:
            form = self.float8_buffers.get(func)
            return FLOAT8[form].torch if form else ""
        return TORCH_NAMES[e.dtype] if isinstance(e, Cast) else self.integer_funcs.get(func, "")

    def integer_scalars(self) -> frozenset[str]:
        """Return the scalars used in an index or in arithmetic of integers alone, and those that one was made of before a schedule changed the program."""
        if not self.scalars:
            return frozenset()
        operated = (n for d in self.definitions for n in d.expr.walk() if _takes_integers(n) or isinstance(n, Binary) and n.op == "%")
        inside = frozenset(n.name for operator in operated for n in _leaves(operator) if isinstance(n, Scalar))
        inside |= self.whole_inputs & frozenset(self.scalars)
        return inside | frozenset(n.name for a in self._accesses() for i in a.index for n in i.walk() if isinstance(n, Scalar))

    def _accesses(self) -> Iterator[Access]:
        return (a for d in self.definitions for a in accesses(d.expr))

    def extent_source(self, label: str) -> tuple[str, int] | None:
        """Return the (input, dimension) whose size is the extent of ``label``; None if there is none."""
        sources = self.extent_sources(label)
        return sources[0] if sources else None

    def extent_sources(self, label: str) -> tuple[tuple[str, int], ...]:
        """Return every (input, dimension) that ``label``, or a label tied to it, indexes directly."""
        group = self.tied_labels(label)
        found = {(tensor, dim): own != label for own, tensor, dim in self.extents if own in group and tensor in self.inputs}
        for d in self.definitions:
            for access in accesses(d.expr):
                if access.tensor not in self.inputs:
                    continue
                for dim, index in enumerate(access.index):
                    if isinstance(index, Label) and index.name in group:
                        found.setdefault((access.tensor, dim), index.name != label)
        return tuple(sorted(found, key=lambda key: (found[key], self.inputs.index(key[0]), key[1])))

    def constant_extent(self, label: str) -> int | None:
        """Return the extent of ``label`` where the program declares a constant; else None."""
        group = self.tied_labels(label)
        said = next((size for own, tensor, size in self.extents if own in group and not tensor), None)
        return constant_of(self.extent_formulas(label)) if said is None and self.formulas else said

    def formulas_of(self, label: str) -> tuple[tuple[str, Expr], ...]:
        """Return the formulas declared for ``label`` and for labels tied to it, as written."""
        group = self.tied_labels(label) if self.formulas else frozenset()
        return tuple(f for f in self.formulas if f[0] in group)

    def extent_formulas(self, label: str) -> tuple[Expr, ...]:
        """Return the formulas for the extent of ``label`` in terms of sizes of inputs and numbers."""
        return tuple(self.in_sizes(formula) for _, formula in self.formulas_of(label))

    def in_sizes(self, formula: Expr) -> Expr:
        """Return a formula with the extents of labels in terms of sizes of inputs and numbers."""
        return expanded(formula, self._extent_expr)

    def plain_extent(self, label: str) -> Expr | None:
        """Return the extent of ``label`` without formulas, ``A[1]`` or a number; None if there is none."""
        group = self.tied_labels(label)
        said = next((size for own, tensor, size in self.extents if own in group and not tensor), None)
        if said is not None:
            return Const(said)
        source = self.extent_source(label)
        return Access(source[0], (Const(source[1]),)) if source else None

    def _extent_expr(self, label: str) -> Expr:
        plain = self.plain_extent(label)
        formulas = () if plain is not None else self.extent_formulas(label)
        return plain if plain is not None else formulas[0] if formulas else Access("", ())

    def tied_labels(self, label: str) -> frozenset[str]:
        """Return the labels that share the extent of ``label``: both index the same dimension, of an input or through a Func."""
        group, grown = {label}, True
        while grown:
            more = {name for pair in self._pairs if group & set(pair) for name in pair} - group
            group |= more
            grown = bool(more)
        return frozenset(group)

    def plain_labels(self, tensor: str) -> tuple[str | None, ...]:
        """Return, for each dimension of an input, the label with its extent; None where it is indexed by arithmetic only."""
        if tensor not in self._plain:
            self._plain[tensor] = self._plain_labels(tensor)
        return self._plain[tensor]

    @cached_property
    def _plain(self) -> dict[str, tuple[str | None, ...]]:
        """What ``plain_labels`` has found."""
        return {}

    def _plain_labels(self, tensor: str) -> tuple[str | None, ...]:
        found: list[str | None] = []
        for access in (a for d in self.definitions for a in accesses(d.expr) if a.tensor == tensor):
            labels = [i.name if isinstance(i, Label) else None for i in access.index]
            found = [a or b for a, b in zip(found, labels)] if found else labels
        told = {dim: label for label, name, dim in self.extents if name == tensor}
        if not found and (dims := [*told, *self._formula_dims(tensor)]):
            found = [None] * max(1 + max(dims), dict(self.ranks).get(tensor, 0))
        return tuple(label or told.get(dim) for dim, label in enumerate(found))

    def _formula_dims(self, tensor: str) -> list[int]:
        """Return the dimensions of an input whose sizes formulas read."""
        return [i.value for _, f in self.formulas for a in accesses(f) if a.tensor == tensor for i in a.index if isinstance(i, Const)]  # type: ignore[misc]

    @cached_property
    def _pairs(self) -> frozenset[tuple[str, str]]:
        return frozenset(self._plain_pairs())

    def _plain_pairs(self) -> Iterator[tuple[str, str]]:
        """Yield pairs of labels for the same dimension of a tensor."""
        first: dict[tuple[str, int], str] = {}
        for given, tensor, dim in self.extents:
            if tensor:
                yield first.setdefault((tensor, dim), given), given
        for access in (a for d in self.definitions for a in accesses(d.expr)):
            own = self[access.tensor].labels if access.tensor in self else (None,) * len(access.index)
            for dim, (label, index) in enumerate(zip(own, access.index)):
                if isinstance(index, Label):
                    yield label or first.setdefault((access.tensor, dim), index.name), index.name

    def __str__(self) -> str:
        lines = []
        for word, names in (("Func", self.funcs), ("In", self.inputs), ("SIn", self.scalars), ("Var", self.vars), ("RVar", self.rvars)):
            if names:
                lines.append(f"{word} {', '.join(names)};")
        if self.params:
            pairs = (f"{n} = {str(v).lower() if isinstance(v, bool) else v}" for n, v in self.params)
            lines.append(f"Param {', '.join(pairs)};")
        lines += [f"Extent {label} = {f'{tensor}[{dim}]' if tensor else dim};" for label, tensor, dim in self.extents]
        lines += [f"Extent {label} = {formula};" for label, formula in self.formulas]
        lines += [str(d) for d in self.definitions]
        return "\n".join(lines)


def _is_of_integers(node: Expr) -> bool:
    """Return whether ``node`` is an operator that integers alone have: ``%`` too, where an element is among what it is of."""
    remainder = isinstance(node, Binary) and node.op == "%" and any(isinstance(n, Access) for n in _leaves(node))
    return remainder or isinstance(node, Binary) and node.op in INTEGER_OPERATORS or isinstance(node, Unary) and node.op == "~"


def _takes_integers(node: Expr) -> bool:
    return _is_of_integers(node) or isinstance(node, Call) and node.fn in RANDOM


def _makes_integers(node: Expr, funcs: Mapping[str, str]) -> bool:
    if isinstance(node, Cast):
        return node.dtype in INTEGERS and node.dtype != "bool"
    return _is_of_integers(node) or isinstance(node, Reduce) and node.kind in PLACES or isinstance(node, Access) and node.tensor in funcs


def _values(node: Expr) -> Iterator[Expr]:
    """Yield the nodes below ``node`` but conditions, which choose a value and are no part of it."""
    yield node
    for child in node.args[1:] if isinstance(node, Call) and node.fn == "where" else node.children():
        yield from _values(child)


def _leaves(node: Expr) -> Iterator[Expr]:
    """Yield what arithmetic in ``node`` is made of: elements, scalars, and values that are converted or reduced."""
    if isinstance(node, (Binary, Unary)) or _takes_integers(node):
        for child in node.children():
            yield from _leaves(child)
    else:
        yield node


def _operands(node: Expr) -> Iterator[str]:
    return (n.tensor for n in _leaves(node) if isinstance(n, Access))


# -- operands of products and of sums over pairs, by name -------------------------------------------------------------

NESTED = (Dot, Reduce, Scan, Reshape)  #: what an operand with a name does not contain


def operand_names(algorithm: Algorithm) -> dict[str, Expr]:
    """Map the names that operands have in a schedule to their expressions: ``f_left`` and ``f_right``, of the second product or sum ``f_left2``."""
    taken = set(algorithm.names)
    found: dict[str, Expr] = {}
    for d in algorithm.definitions:
        for i, sides in enumerate(dict.fromkeys(filter(None, map(sides_of, d.expr.walk()))), 1):
            for side, e in zip(("left", "right"), sides):
                if _has_name(e) and e not in found.values():
                    name = f"{d.name}_{side}{i if i > 1 else ''}"
                    while name in taken:
                        name += "_"
                    found[name] = e
    return found


def sides_of(node: Expr) -> tuple[Expr, Expr] | None:
    """Return the operands of a product, or of a sum over all pairs of rows of two tensors, ``rsum(abs(A[x, k] - B[y, k]), k)``; None for another node."""
    return (node.left, node.right) if isinstance(node, Dot) else paired_sides(node)


def paired_sides(node: Expr) -> tuple[Access, Access] | None:
    """Return the two tensors of a reduction that each have its labels, and one of the result that the other lacks; None for another node."""
    if not isinstance(node, Reduce) or any(isinstance(n, NESTED) for n in node.arg.walk()):
        return None
    own = {*node.labels}
    read = [a for a in dict.fromkeys(accesses(node.arg)) if free_labels(a) & own and free_labels(a) - own]
    if len(read) != 2 or any(not isinstance(i, Label) for a in read for i in a.index) or any(not own <= free_labels(a) for a in read):
        return None
    left, right = (free_labels(a) - own for a in read)
    return (read[0], read[1]) if left - right and right - left else None


def _has_name(e: Expr) -> bool:
    """Return whether an operand is made of elements of tensors. A cast to float8 is read from memory as it is, if at all."""
    rounded = isinstance(e, Cast) and e.dtype in FLOAT8
    return not rounded and any(accesses(e)) and bool(free_labels(e)) and not any(isinstance(n, NESTED) for n in e.walk())


def with_operands(algorithm: Algorithm, names: Iterable[str]) -> Algorithm:
    """Return the algorithm with a Func for each operand, rounded copy, shared sum, product and the picked terms among ``names``, before the first Func that reads it."""
    wanted = {*names} - {*algorithm.funcs}
    sums = shared_sum_names(algorithm) if wanted else {}
    for name in (n for n in sums if n in wanted):
        algorithm = with_shared_sum(algorithm, name, sums[name])
    wanted -= {*sums}
    terms = picked_term_names(algorithm) if wanted else {}
    for name in (n for n in terms if n in wanted):
        algorithm = with_picked_terms(algorithm, name, terms[name])
    wanted -= {*terms}
    joined = joined_term_names(algorithm) if wanted else {}
    for name in (n for n in joined if n in wanted):
        algorithm = with_joined_terms(algorithm, name, joined[name])
    wanted -= {*joined}
    copies = rounded_copy_names(algorithm) if wanted else {}
    for name in (n for n in copies if n in wanted):
        algorithm = with_rounded_copy(algorithm, name, copies[name])
    wanted -= {*copies}
    apart = {name: dot for name, dot in (apart_product_names(algorithm) if wanted else {}).items() if name in wanted}
    products = apart | {name: dot for name, dot in (batched_product_names(algorithm) if wanted else {}).items() if name in wanted}
    wanted -= {*products}
    every = operand_names(algorithm) if wanted else {}
    for name in (n for n in every if n in wanted):
        side = every[name]
        labels, multiplied = _operand_labels(algorithm, side), _is_multiplied(algorithm, side)
        access = Access(name, tuple(Label(label) for label in labels))
        changed = tuple(replace(d, expr=_with_operand(d.expr, side, access)) for d in algorithm.definitions)
        products = {product: _with_operand(dot, side, access) for product, dot in products.items()}  # type: ignore[misc]
        first = next(i for i, (d, before) in enumerate(zip(changed, algorithm.definitions)) if d.expr != before.expr)
        algorithm = replace(
            algorithm.with_definitions((*changed[:first], Definition(name, labels, side, changed[first].pos), *changed[first:])),
            vars=(*algorithm.vars, *(label for label in algorithm.rvars if label in labels)),
            rvars=tuple(label for label in algorithm.rvars if label not in labels),
            operands=algorithm.operands | ({name} if multiplied else set()),
        )
    for name, dot in products.items():
        algorithm = (with_apart_product if name in apart else with_batched_product)(algorithm, name, dot)
    return algorithm


def _is_multiplied(algorithm: Algorithm, side: Expr) -> bool:
    """Return whether an operand is one of a product; that of a sum over pairs is stored in float32, in which it is computed."""
    return any(isinstance(n, Dot) and side in (n.left, n.right) for d in algorithm.definitions for n in d.expr.walk())


def _operand_labels(algorithm: Algorithm, side: Expr) -> tuple[str, ...]:
    """Return the labels of a stored operand, in the order of the algorithm.

    Of a copied tensor, or one that lies across products, those that are summed over come last, so that it lies contiguous along them.

    In a sum over pairs threads take rows side by side: the last label of those that the sum keeps comes last.
    """
    labels = [label for label in algorithm.labels if label in free_labels(side)]
    found = [n for d in algorithm.definitions for n in d.expr.walk() if side in (sides_of(n) or ())]
    if isinstance(side, Access) or any(isinstance(n, Dot) and lies_across(n, side) for n in found):
        summed = {label for n in found for label in n.labels}  # type: ignore[attr-defined]
        labels.sort(key=lambda label: label in summed)
        if not _is_multiplied(algorithm, side):
            last = max((i for i, label in enumerate(labels) if label not in summed), default=-1)  # of two sums each may keep what the other sums over
            labels.append(labels.pop(last))
    return tuple(labels)


def _with_operand(e: Expr, side: Expr, access: Access) -> Expr:
    def change(node: Expr) -> Expr:
        if isinstance(node, Dot):
            left, right = (access if s == side else s for s in (node.left, node.right))
            return replace(node, left=left, right=right)
        if isinstance(node, Reduce) and side in (paired_sides(node) or ()):
            return replace(node, arg=node.arg.transform(lambda n: access if n == side else n))
        return node

    return e.transform(change)
