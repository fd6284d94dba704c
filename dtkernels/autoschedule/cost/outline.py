"""Reduce an algorithm to the facts that the cost model uses: the labels that each Func has, reads, multiplies and sums over.

An outline is small enough to be stored beside an op's signature, so that a first call need not parse the algorithm.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ...lang import expr as ex
    from ...lang.algorithm import Algorithm

Index = tuple[tuple[str, int], ...]  #: labels of an access, each with the number that divides it


SECTOR = 32  #: bytes that memory moves at least
WINDOW = "+"  #: between a tensor, a label of the result and the label of a window: "A+x+r" of ``A[x + r]``
VECTOR = 16  #: bytes that a thread loads at most at once

#: instructions of functions beside the special one, by their text (codegen/emit/triton/functions.py): a group norm of GELU had 106 for each element
LONG = {"erfc": 20, "erf": 20, "pow": 16, "sin": 16, "cos": 16, "atan": 16, "asin": 16, "acos": 16, "atan2": 20, "log1p": 8, "expm1": 8}


class Read(NamedTuple):
    """An access to an input or a Func.

    Of a window, as in ``A[x + r]``, the labels have the first one alone: loops over others read the same elements again.
    """

    tensor: str
    labels: Index
    last: tuple[str, ...]  #: labels in the last dimension, all of a window's


class Product(NamedTuple):
    """A product on the matrix units: the labels of both operands, those of its tile's rows and columns, and those that it adds over.

    A label that one side divides and the other has, ``K[h / group, l]``, is none of that side: rows that share it are multiplied together.
    """

    labels: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    reduced: tuple[str, ...]


class FuncOutline(NamedTuple):
    """What computing one element of a Func takes."""

    name: str
    labels: tuple[str, ...]
    reduced: tuple[str, ...]
    reads: tuple[Read, ...]
    products: tuple[Product, ...]
    heavy: int  #: special functions
    light: int  #: other arithmetic
    bounded: tuple[str, ...]  #: labels that are compared with one another, as in a causal mask; "l<=m" where the places themselves are; "A+x+r" where A is read in windows of r

    def picked_labels(self) -> set[str]:
        """Return the labels of the result that no term of its sum has: data says which element a term belongs to."""
        of_terms = [{x for x, _ in r.labels} for r in self.reads]
        return {*self.labels}.difference(*(own for own in of_terms if own & {*self.reduced}))

    def merged(self, names: dict[str, tuple[str, ...]]) -> FuncOutline | None:
        """Return the outline with one label for each run of ``names``; None where one has labels of a run that are not beside each other.

        A product that sums over some labels of a run keeps these, beside one that sums over all of them.
        """
        parts, firsts = {x for run in names.values() for x in run}, {run[0]: name for name, run in names.items()}
        alone = {x for p in self.products for run in names.values() if not {*run} <= {*p.reduced} for x in p.reduced if x in run and not {*run} & {*self.labels}}

        def one(labels: tuple[str, ...]) -> tuple[str, ...]:
            kept = {x for run in names.values() if not {*run} <= {*labels} for x in run if x in alone}
            return tuple([x if x in kept else firsts.get(x, x) for x in labels if x in firsts or x not in parts or x in kept])

        for labels in (self.labels, *(tuple([x for x, _ in r.labels]) for r in self.reads)):
            for run in names.values():
                at = next((i for i, x in enumerate(labels) if x in run), None)
                if at is not None and labels[at : at + len(run)] != run and not {*labels} & {*run} <= alone:
                    return None
        sides = [side for side in (self.reduced, *(side for p in self.products for side in p)) if parts & {*side} and not parts & {*side} <= alone]  # in any order
        if any(x in parts for word in self.bounded for x in re.split(r"[+]|<=", word)) or any({*run} & {*side} and not {*run} <= {*side} for side in sides for run in names.values()):
            return None
        if any(by > 1 and x in parts for r in self.reads for x, by in r.labels) or any(len(r.last) > 1 and parts & {*r.last} for r in self.reads):
            return None
        products = tuple([Product(*map(one, p)) for p in self.products])
        reads = tuple([r if parts & {x for x, _ in r.labels} <= alone else self._merged_read(r, names, one) for r in self.reads])
        return self._replace(labels=one(self.labels), reduced=(*one(self.reduced), *sorted(alone)), products=products, reads=reads)

    def _merged_read(self, r: Read, names: dict[str, tuple[str, ...]], one: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Read:
        by = dict(r.labels)
        return Read(r.tensor, tuple([(x, by.get(x, 1)) for x in one(tuple([x for x, _ in r.labels]))]), tuple([_run_of(x, names) for x in r.last]))


class Outline(NamedTuple):
    """The Funcs of a prepared algorithm, in order of definition."""

    funcs: tuple[FuncOutline, ...]
    aliases: tuple[tuple[str, tuple[str, ...]], ...]  #: a Func's label -> the labels that an access puts in its place
    cast: tuple[tuple[str, int], ...] = ()  #: a Func that is a cast to fewer than 4 bytes -> these bytes
    narrow: tuple[str, ...] = ()  #: Funcs that are stored between kernels in the dtype of the products that read them, or of the results

    @staticmethod
    def of(algorithm: Algorithm) -> Outline:
        """Return the outline of a prepared algorithm."""
        from ...codegen.analysis.dtype_propagation import narrow_buffers
        from ...codegen.analysis.product_types import cast_bytes

        cast = tuple((d.name, n) for d in algorithm.definitions if 0 < (n := cast_bytes(algorithm, d.name)) < 4)
        return Outline(tuple(_func(d.name, d.labels, d.expr) for d in algorithm.definitions), _aliases(algorithm), cast, tuple(sorted(narrow_buffers(algorithm))))

    @staticmethod
    def read(data: list) -> Outline:
        """Read what JSON made of an outline: lists in place of tuples."""
        funcs, aliases, cast, narrow = data
        made = tuple([_read_func(*f) for f in funcs])
        return Outline(made, tuple([(label, tuple(labels)) for label, labels in aliases]), tuple([(func, n) for func, n in cast]), tuple(narrow))

    def divided_by(self, number: int, instead: int) -> Outline:
        """Replace the number that divides labels in accesses: a manifest stands for all values of a parameter."""

        def changed(read: Read) -> Read:
            return read._replace(labels=tuple([(label, instead if by == number else by) for label, by in read.labels]))

        return self._replace(funcs=tuple([f._replace(reads=tuple(map(changed, f.reads))) for f in self.funcs]))

    @staticmethod
    def unknown(labels: tuple[str, ...]) -> Outline:
        """Return the outline that stands for an unknown algorithm: it reads and writes one tensor with all labels."""
        read = Read("", tuple([(x, 1) for x in labels]), labels[-1:])
        return Outline((FuncOutline("", labels, (), (read,), (), 1, 4, ()),), ())


def _run_of(label: str, names: dict[str, tuple[str, ...]]) -> str:
    """Return the label that stands for ``label``, if it is the last one of a run."""
    return next((name for name, run in names.items() if run[-1] == label), label)


def paired_terms(func: FuncOutline) -> tuple[str, ...]:
    """Return the labels that ``func`` sums over if two tensors each lack a label of the result that the other has, as in distances of all pairs of rows."""
    sides = [{x for x, _ in r.labels} for r in func.reads]
    sides = [{*func.labels} & side for side in sides if side & {*func.reduced}]
    pairs = any(a - b and b - a for i, a in enumerate(sides) for b in sides[:i])
    return func.reduced if pairs and not func.products else ()


class Known:
    """An outline with its Funcs by name, and the outputs. It is equal to itself alone, so that caches need not compare outlines.

    ``float8``: the Funcs whose products are all in float8; ``bytewise``: their operands that are in float8 in memory.
    """

    def __init__(self, outline: Outline, outputs: tuple[str, ...] = (), float8: frozenset[str] = frozenset(), bytewise: frozenset[str] = frozenset()):
        self.outline, self.outputs, self.float8, self.bytewise = outline, frozenset(outputs), float8, bytewise

    @staticmethod
    def of(algorithm: Algorithm, outputs: tuple[str, ...] = ()) -> Known:
        """Return what is known of a prepared algorithm and of the inputs that are float8 in its calls."""
        from ...algebra.operand_types import products
        from ...lang import expr as ex

        dots = products(algorithm) if algorithm.has_float8 else []
        float8 = {f for f, _, wanted in dots if wanted.float8} - {f for f, _, wanted in dots if not wanted.float8}
        read = {a.tensor for f, dot, _ in dots if f in float8 for a in ex.accesses(dot)}
        return Known(Outline.of(algorithm), outputs, frozenset(float8), frozenset(read & algorithm.float8_buffers.keys()))

    @cached_property
    def funcs(self) -> dict[str, FuncOutline]:
        return {f.name: f for f in self.outline.funcs}

    @cached_property
    def cast(self) -> dict[str, int]:
        return dict(self.outline.cast)

    @cached_property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        return dict(self.outline.aliases)

    @cached_property
    def pitches(self) -> dict[str, int]:
        """Labels whose extent is the row pitch of an input, if that is contiguous: the bytes that fast rows start at multiples of.

        Operands of products are loaded by whole sectors, others by vectors.
        """
        found: dict[str, int] = {}
        for f in self.outline.funcs:
            for r in f.reads:
                if r.tensor not in self.funcs and len(r.last) == 1 and len(r.labels) > 1:
                    found[r.last[0]] = max(found.get(r.last[0], 0), SECTOR if f.products else VECTOR)
        return found

    @cached_property
    def strides(self) -> frozenset[str]:
        """Labels whose extent is the row pitch of an input or output."""
        results = [f.labels[-1] for f in self.outline.funcs if f.name in self.outputs and len(f.labels) > 1]
        return frozenset(results).union(self.pitches)

    def merged(self, names: tuple[tuple[str, tuple[str, ...]], ...]) -> Known:
        """Return what is known with one label for each run of ``names`` in all Funcs that have the labels of a run beside each other."""
        if (found := self._merged.get(names)) is None:
            funcs = tuple([f.merged(dict(names)) or f for f in self.outline.funcs])
            found = self._merged[names] = Known(self.outline._replace(funcs=funcs), tuple(self.outputs), self.float8, self.bytewise)
        return found

    @cached_property
    def _merged(self) -> dict[tuple, Known]:
        return {}

    @cached_property
    def narrow(self) -> frozenset[str]:
        """Funcs that are stored between kernels in the dtype of the products that read them, or of the results."""
        return frozenset(self.outline.narrow)


def _read_func(name: str, labels: list, reduced: list, reads: list, products: list, heavy: int, light: int, bounded: list) -> FuncOutline:
    accesses = tuple([Read(tensor, tuple([(label, by) for label, by in index]), tuple(last)) for tensor, index, last in reads])
    made = tuple([Product(*map(tuple, p)) for p in products])
    return FuncOutline(name, tuple(labels), tuple(reduced), accesses, made, heavy, light, tuple(bounded))


def _func(name: str, labels: tuple[str, ...], expr: ex.Expr) -> FuncOutline:
    """Return the outline of a definition, kept with the expression: programs of a search differ in few of their Funcs."""
    known = vars(expr).get("_outline")
    if known is None:
        known = vars(expr)["_outline"] = _outline(expr)
    return known._replace(name=name, labels=labels)


def _outline(expr: ex.Expr) -> FuncOutline:
    """Return the outline of a Func without name and labels."""
    from ...lang import expr as ex

    reduced: dict[str, None] = {}
    reads: dict[Read, None] = {}
    products, heavy, light, bounded = [], 0, 0, set()
    once = {id(n) for a in ex.accesses(expr) for i in a.index if len(ex.free_labels(i)) < 2 for n in i.walk()}  # for a coordinate, not for each element
    places = {id(n) for a in ex.accesses(expr) for i in a.index for n in i.walk()}
    named: set[ex.Expr] = set()  # cse.py names what is costly, so that it is computed once
    for node in expr.walk():
        if isinstance(node, (ex.Reduce, ex.Dot)):
            reduced |= dict.fromkeys(node.labels)
        if isinstance(node, ex.Dot):
            products.append(_product(node))
        elif isinstance(node, ex.Access):
            reads[_read(node)] = None
            bounded |= {WINDOW.join((node.tensor, *pair)) for i in node.index if (pair := _window(i))}
        elif id(node) in once:
            continue
        elif isinstance(node, ex.Call):
            slow = node.fn in ex.SLOW
            heavy, light = heavy + (slow and node not in named), light + (LONG.get(node.fn, 0) * (node not in named) if slow else 1)
            named |= {node} if slow else set()
        elif isinstance(node, ex.Binary):
            light += 1
            quotient = node.op == "/" and id(node) not in places  # integers divide by a multiplication
            heavy += quotient and node not in named
            named |= {node} if quotient else set()
            if node.op in ("<", "<=", ">", ">="):
                sides = [{n.name for n in side.walk() if isinstance(n, ex.Label)} for side in (node.left, node.right)]
                bounded |= sides[0] ^ sides[1] if all(sides) else set()
                low, high = (node.left, node.right) if node.op in ("<", "<=") else (node.right, node.left)
                bounded |= {f"{low.name}<={high.name}"} if isinstance(low, ex.Label) and isinstance(high, ex.Label) else set()
    return FuncOutline("", (), tuple(reduced), tuple(reads), tuple(products), heavy, light, tuple(sorted(bounded)))


def _product(dot: ex.Dot) -> Product:
    from ...lang import expr as ex

    def own(side: ex.Expr, other: ex.Expr) -> set[str]:
        """Return the labels of a side without those that it only divides and the other has."""
        plain = (i for a in ex.accesses(side) for i in a.index if not (isinstance(i, ex.Binary) and i.op == "/"))
        return {n.name for i in plain for n in i.walk() if isinstance(n, ex.Label)} | (ex.free_labels(side) - ex.free_labels(other))

    left, right, both = own(dot.left, dot.right), own(dot.right, dot.left), ex.free_labels(dot.left) | ex.free_labels(dot.right)
    return Product(tuple(sorted(both)), tuple(sorted(left - right - {*dot.labels})), tuple(sorted(right - left - {*dot.labels})), dot.labels)


def _read(access: ex.Access) -> Read:
    from ...lang import expr as ex

    index: dict[str, int] = {}
    last: tuple[str, ...] = ()
    for i in access.index:
        divided = isinstance(i, ex.Binary) and i.op == "/" and isinstance(i.right, ex.Const)
        own = {n.name: None for n in i.walk() if isinstance(n, ex.Label)}
        by = int(i.right.value) if divided else 1  # type: ignore[attr-defined]
        index |= {label: min(by, index.get(label, by)) for label in ([*own][:1] if _is_window(i) else own)}
        last = tuple(own)
    return Read(access.tensor, tuple(index.items()), last)


def _is_window(index: ex.Expr) -> bool:
    """Return whether an index is one label shifted by others: ``x + r``, or ``2 * x + r - 1``; ``4 * i + j`` may be all of the elements."""
    from ...lang import expr as ex
    from ...lang.extents.linear_form import linear_form

    form = linear_form(index)
    labels = [atom for atom, times in form.items() if isinstance(atom, ex.Label) and times]
    return len(labels) > 1 and len([t for a, t in form.items() if a is not None and t]) == len(labels) and (abs(form[labels[0]]) == 1 or bool(form.get(None, 0)))


def _window(index: ex.Expr) -> tuple[str, str] | None:
    """Return the two labels of ``x + r``, or ``x - r + 1``: neighbours of the result share all but one place of such a window."""
    from ...lang import expr as ex
    from ...lang.extents.linear_form import linear_form

    terms = {atom: times for atom, times in linear_form(index).items() if atom is not None and times}
    labels = [atom.name for atom, times in terms.items() if isinstance(atom, ex.Label) and abs(times) == 1]
    return (labels[0], labels[1]) if len(labels) == len(terms) == 2 else None


def _aliases(algorithm: Algorithm) -> tuple[tuple[str, tuple[str, ...]], ...]:
    from ...lang import expr as ex

    found: dict[str, tuple[str, ...]] = {}
    for d in algorithm.definitions:
        for access in ex.accesses(d.expr):
            for own, i in zip(algorithm[access.tensor].labels if access.tensor in algorithm else (), access.index):
                labels = tuple(dict.fromkeys(n.name for n in i.walk() if isinstance(n, ex.Label)))
                if labels and labels != (own,):
                    found.setdefault(own, labels)
    return tuple(found.items())
