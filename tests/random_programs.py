# ruff: noqa: E501 (lists of choices read best on one line)
"""Random programs: algorithms of every form the language has. random_schedules.py draws their schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from random_cases import LAYOUTS, Input
from random_draws import Draws

from dtkernels.lang import Algorithm, Definition
from dtkernels.lang import expr as ex

LABELS = ("x", "y", "z", "k", "l")
ELEMENTS = 800  #: at most so many points in the space of all labels; tl.reduce is interpreted element by element
CONSTANTS = [0, 1, 2, 3, 0.5, 0.25, 1e-3]
SIZES = [3, 5, 8, 2, 9, 13, 16, 17, 20, 4, 6, 7, 11, 15, 1, 1]  #: of labels
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
INDEX_DTYPES = [torch.int64, torch.int32, torch.int8, torch.uint8]
NEG_INF = ex.Unary("-", ex.Const(math.inf))


@dataclass(frozen=True)
class Declared:
    """An input: the size of each dimension, what it holds (numbers, masks, whole numbers, or indices below ``bound``)."""

    sizes: tuple[int, ...]
    kind: str = "number"
    bound: int = 0


class Builder:
    """One random algorithm. ``form``: ``free``, or a form that a primitive drawn too rarely otherwise wants."""

    def __init__(self, draws: Draws):
        self.pick, self.chance, self.several, self.permuted, self.between = draws.pick, draws.chance, draws.several, draws.permuted, draws.between
        self.form = self.pick(["free"] * 13 + ["moments", "product", "parts"])
        self.labels = LABELS[: self.between(2, len(LABELS))]
        self.sizes = {label: self.pick(SIZES) for label in self.labels}
        while math.prod(self.sizes.values()) > ELEMENTS:
            self.sizes[max(self.sizes, key=self.sizes.get)] //= 2
        if self.chance(6):  # square: any label may index any dimension
            self.sizes = dict.fromkeys(self.labels, min(self.sizes.values()))
        elif self.chance(16):
            self.sizes[self.pick(self.labels)] = 0
        self.float = self.pick([torch.float32] * 6 + FLOATS[1:])
        self.mixed = self.chance(5)  #: floating-point inputs of several dtypes
        self.inputs: dict[str, Declared] = {}
        self.funcs: dict[str, Definition] = {}

    def input_of(self, name: str) -> Input:
        """The tensor that a declared input is drawn as."""
        d = self.inputs[name]
        layout = self.pick(LAYOUTS) if self.form == "free" else self.pick(["contiguous"] * 4 + ["transposed", "padded"])
        match d.kind:
            case "mask":
                return Input(d.sizes, self.pick([torch.bool, torch.bool, torch.uint8, torch.int32, torch.int8]), layout, 0, 1)
            case "index":
                dtype = self.pick(INDEX_DTYPES)
                out = self.chance(3)  # of range
                return Input(d.sizes, dtype, layout, -3 if out and dtype != torch.uint8 else 0, max(d.bound - 1, 0) + 3 * out)
            case "whole":
                dtype = self.pick([torch.int32, torch.int64, torch.int8, torch.uint8, torch.bool])
                return Input(d.sizes, dtype, layout, 0 if dtype == torch.uint8 else -3, self.pick([4, 1, 25]))
        most = self.pick([1.5] * 9 + [30.0])
        return Input(d.sizes, self.pick(FLOATS) if self.mixed else self.float, layout, -most, most)

    # -- algorithm --------------------------------------------------------------------------------------------------

    def algorithm(self) -> Algorithm:
        if self.form != "free":
            long = [33, 36, 40] if self.form != "moments" else [31, 32, 9]
            self.sizes = {label: self.pick([16, 20, *long[:2], 5, 24, long[2], 1]) for label in LABELS}
            self.labels = LABELS
            {"product": self.product_form, "parts": self.parts_form, "moments": self.moments_form}[self.form]()
        else:
            self.free_form()
            last = self.funcs[next(reversed(self.funcs))]
            if not any(a.tensor in self.inputs for d in self.funcs.values() for a in ex.accesses(d.expr)):
                reads = self.plain(last.labels, "number") if last.labels else ex.Reduce("sum", self.plain(self.labels[:1], "number"), self.labels[:1])
                self.funcs[last.name] = replace(last, expr=ex.Binary("+", last.expr, reads))
        definitions = tuple(self.funcs.values())
        nodes = [n for d in definitions for n in d.expr.walk()]
        reduced = {label for n in nodes if isinstance(n, (ex.Reduce, ex.Dot)) for label in n.labels}
        used = reduced | {label for d in definitions for label in d.labels} | {n.name for n in nodes if isinstance(n, ex.Label)}
        used |= {n.label for n in nodes if isinstance(n, ex.Len)}
        read = {n.tensor for n in nodes if isinstance(n, ex.Access)}
        named = {n.name for n in nodes if isinstance(n, (ex.Scalar, ex.Param))}
        algorithm = Algorithm(
            funcs=tuple(self.funcs), inputs=tuple(t for t in self.inputs if t in read), scalars=tuple(s for s in "sto" if s in named),
            params=tuple((p, v) for p, v in (("flag", self.chance(2)), ("span", self.pick([2, 3, 5]))) if p in named),  # not 1: x * 1 is x by itself
            vars=tuple(label for label in LABELS if label in used - reduced), rvars=tuple(label for label in LABELS if label in reduced),
            definitions=definitions,
        )  # fmt: skip
        return self.with_extents(algorithm)

    def with_extents(self, algorithm: Algorithm) -> Algorithm:
        """``algorithm`` with an ``Extent`` for each label that no input shows by itself."""
        for label in algorithm.labels:
            if algorithm.extent_source(label) is None and algorithm.constant_extent(label) is None:
                size = self.sizes[label]
                shown = [(name, dim) for name in algorithm.inputs for dim, n in enumerate(self.inputs[name].sizes) if n == size]
                # constants are positive
                told = (label, *self.pick(shown)) if shown and (size == 0 or self.chance(2)) else (label, "", size)
                algorithm = replace(algorithm, extents=(*algorithm.extents, told))
        return algorithm

    def free_form(self) -> None:
        waiting: list[Definition] = []
        for i in range(self.pick([1, 2, 2, 3, 3, 4])):
            used = self.several(waiting, 1, 2) if waiting else []
            kept = {label for d in used for label in d.labels if not self.chance(3)}
            own = tuple(self.permuted(self.some(kept or self.labels, 1, 4)))
            if self.chance(20):
                own = ()
            expr = self.number(own, 1 if used else 3)
            for d in used:
                expr = ex.Binary(self.pick("+*-"), self.use(d, own), expr)
            expr = self.covering(expr, own)
            self.funcs[f"f{i}"] = Definition(f"f{i}", own, ex.Cast(expr, self.pick(["fp32", "fp16", "bf16"])) if self.chance(10) else expr)
            waiting = [d for d in waiting if d not in used] + [self.funcs[f"f{i}"]]

    def product_form(self) -> None:
        """A matrix product, perhaps of a batch, of what another kernel makes, or with more around it."""
        batch = ("z",) if self.chance(4) else ()
        left, right = (self.plain((*batch, "x", "k"), "number"), self.plain((*batch, "k", "y") if self.chance(2) else ("k", "y"), "number"))
        if self.chance(2):
            left = self.func("a", (*batch, "x", "k"), self.pick([ex.Binary("*", left, self.plain(("k",), "number")), ex.Call("exp", (left,)), ex.Binary("+", left, ex.Const(1))]))
        product: ex.Expr = ex.Dot(left, right, ("k",))
        if self.chance(2):
            product = ex.Binary(self.pick("+*-"), product, self.number((*batch, "x", "y"), 1))
        self.funcs["f"] = Definition("f", (*batch, "x", "y"), product)

    def parts_form(self) -> None:
        """Two sums that read one matrix, cut along different labels of it; the first feeds a third Func, or is an output."""
        shared = self.plain(("x", "y"), "number")
        kind = self.pick(["dot", "sum", "max", "min"])
        if kind == "dot":
            self.funcs["g"] = Definition("g", ("x", "l"), ex.Dot(shared, self.operand(("l",), ("y",), 1), ("y",)))
            self.funcs["f"] = Definition("f", ("l", "y"), ex.Dot(self.plain(("x", "l"), "number"), shared, ("x",)))
        else:
            self.funcs["g"] = Definition("g", ("x",), ex.Reduce(kind, self.pick([shared, ex.Binary("*", shared, self.number(("x", "y"), 1))]), ("y",)))
            self.funcs["f"] = Definition("f", ("y",), ex.Reduce("sum", ex.Binary(self.pick("*+"), shared, self.number(("y",), 0)), ("x",)))
        if self.chance(2):
            g = self.funcs["g"]
            self.funcs["h"] = Definition("h", g.labels, ex.Binary("*", ex.Access("g", tuple(map(ex.Label, g.labels))), self.number(g.labels, 0)))

    def moments_form(self) -> None:
        """A variance, a covariance, or a sum of something times a deviation, and what is made of it and of a mean."""
        own, over = self.pick([(("x",), ("y",)), (("x",), ("y", "k")), (("x", "z"), ("y",))])
        deviations = []
        for name in "mn"[: self.pick([1, 2])]:
            terms = self.plain((*own, *over), "number")
            terms = self.pick([terms, ex.Binary("*", terms, self.plain(over, "number"))])
            deviations.append(ex.Binary("-", terms, self.func(name, own, self.mean(terms, over))))
        product = ex.Binary("*", deviations[0], self.pick([deviations[-1], deviations[-1], self.plain((*own, *over), "number")]))
        if len(deviations) == 2 and self.chance(2) or product.right not in deviations and len(deviations) == 2:
            product = ex.Binary(self.pick("+-"), product, ex.Binary("*", deviations[1], self.pick([deviations[1], ex.Const(3)])))
        v = self.func("v", own, self.mean(product, over))
        wide = self.chance(2)
        expr = ex.Binary("*", deviations[0], v) if wide else ex.Binary("+", v, deviations[0].right)
        self.funcs["f"] = Definition("f", (*own, *over) if wide else own, expr)

    @staticmethod
    def mean(terms: ex.Expr, over: tuple[str, ...]) -> ex.Expr:
        return ex.Reduce("mean", terms, over)

    def used(self) -> tuple[Definition, ...]:
        """The last Func and those that it is made from: unused ones are refused."""
        last = next(reversed(self.funcs))
        every = Algorithm(definitions=tuple(self.funcs.values()))
        return tuple(self.funcs[name] for name in every.needed_by((last,)))

    def func(self, name: str, labels: tuple[str, ...], expr: ex.Expr) -> ex.Expr:
        """Define a Func; its element."""
        self.funcs[name] = Definition(name, labels, expr)
        return ex.Access(name, tuple(map(ex.Label, labels)))

    def use(self, d: Definition, labels: tuple[str, ...]) -> ex.Expr:
        """An expression over ``labels`` in which ``d`` occurs, what else it has reduced."""
        if labels and self.chance(6):
            return self.func_element(d, labels)
        access: ex.Expr = ex.Access(d.name, tuple(map(ex.Label, d.labels)))
        over = tuple(label for label in d.labels if label not in labels)
        if self.chance(3):
            access = ex.Call(self.pick(["exp", "tanh", "abs"]), (access,))
        if not over:
            return access
        within = labels + over
        match self.pick(["dot", "sum", "max", "weighted"]):
            case "dot":
                return ex.Dot(access, self.operand(labels, over, 0), over)
            case "sum" | "max" as kind:
                arg = ex.Binary(self.pick("+*-"), access, self.number(within, 1)) if self.chance(2) else access
                return ex.Reduce(kind, self.covering(arg, over), over)
            case "weighted":  # softmax, attention and their like
                left = tuple(label for label in d.labels if label in labels)
                logits = self.covering(access, over)
                if left and self.chance(2):
                    logits = ex.Call("where", (self.range(left, over), logits, NEG_INF))
                weight = self.func(f"e{len(self.funcs)}", left + over, ex.Call("exp", (logits,)))
                total = self.func(f"d{len(self.funcs)}", left, ex.Reduce("sum", weight, over))
                value = self.operand(labels, over, 0)
                return ex.Dot(ex.Binary("/", weight, total), value, over) if self.chance(2) else ex.Binary("/", ex.Dot(weight, value, over), total)
        raise AssertionError

    def range(self, labels: tuple[str, ...], over: tuple[str, ...]) -> ex.Expr:
        """Causal and window masks, rows of different lengths, and their like."""
        at, along = ex.Label(self.pick(labels)), ex.Label(self.pick(over))
        width = self.pick([ex.Param("span"), ex.Scalar("o"), ex.Const(3)])
        causal = ex.Binary("<=", along, ex.Binary("+", at, width) if self.chance(2) else at)
        match self.pick(["causal", "after", "window", "optional", "ragged"]):
            case "causal":
                return causal
            case "after":
                return ex.Binary(self.pick([">", ">="]), along, at)
            case "window":
                return ex.Binary("and", ex.Binary("<", ex.Binary("-", at, along), width), causal)
            case "ragged":
                return ex.Binary("<", along, self.plain((at.name,), "whole"))
        return ex.Binary("or", ex.Unary("not", ex.Param("flag")), causal)

    def some(self, options, least: int, most: int) -> tuple[str, ...]:
        chosen = self.several(sorted(options), least, most)
        return tuple(label for label in LABELS if label in chosen)

    def covering(self, expr: ex.Expr, labels: tuple[str, ...]) -> ex.Expr:
        """``expr``, and an input over those of ``labels`` whose extent it does not tell; now and then an Extent tells it."""
        told = {i.name for a in ex.accesses(expr) if a.tensor in self.inputs for i in a.index if isinstance(i, ex.Label)}
        missing = tuple(label for label in labels if label not in told)
        if not missing or self.chance(8):
            return expr
        return ex.Binary(self.pick("+*-"), expr, self.plain(missing, "number"))

    # -- elements ---------------------------------------------------------------------------------------------------

    def declare(self, declared: Declared) -> str:
        name = {"number": "A", "mask": "M", "index": "T", "whole": "N"}[declared.kind] + str(len(self.inputs))
        self.inputs[name] = declared
        return name

    def plain(self, labels: tuple[str, ...], kind: str, bound: int = 0) -> ex.Access:
        """An element of an input over just ``labels``, each by itself; of an input known already where one fits."""
        order = self.permuted(labels)
        sizes = tuple(self.sizes[label] for label in order)
        fits = [name for name, d in self.inputs.items() if d.sizes == sizes and d.kind == kind]
        name = self.pick(fits) if fits and self.chance(3) else self.declare(Declared(sizes, kind, bound))
        return ex.Access(name, tuple(map(ex.Label, order)))

    def element(self, labels: tuple[str, ...], kind: str = "number") -> ex.Access:
        """An element of an input over some of ``labels``, by indices of every form."""
        known = [name for name, d in self.inputs.items() if d.kind == kind]
        if known and self.chance(3):
            name = self.pick(known)
            return ex.Access(name, self.indices(labels, self.inputs[name].sizes))
        found: list[ex.Expr] = []
        sizes: list[int] = []
        for label in self.permuted(self.some(labels, 1, 3)):
            if self.chance(3):
                sizes.append(0 if self.chance(24) else self.pick([1, 3, 5, 8, *self.sizes.values()]))
                found.append(self.index(labels, sizes[-1]))
            else:
                sizes.append(self.sizes[label])
                found.append(ex.Label(label))
        if self.chance(5):  # a diagonal, or an index of another form twice
            found.append(found[0])
            sizes.append(sizes[0])
        return ex.Access(self.declare(Declared(tuple(sizes), kind)), tuple(found))

    def func_element(self, d: Definition, labels: tuple[str, ...]) -> ex.Access:
        """An element of a Func: as it is defined, or by other indices, its diagonal among them."""
        if set(d.labels) <= set(labels) and not self.chance(5):
            return ex.Access(d.name, tuple(map(ex.Label, d.labels)))
        return ex.Access(d.name, self.indices(labels, tuple(self.sizes[label] for label in d.labels)))

    def indices(self, labels: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[ex.Expr, ...]:
        """Indices into a tensor of ``sizes``: labels of the same extent by themselves, or anything."""
        found: list[ex.Expr] = []
        for size in sizes:
            alike = [label for label in labels if self.sizes[label] == size]
            if found and sizes[len(found) - 1] == size and self.chance(4):
                found.append(found[-1])
            else:
                found.append(ex.Label(self.pick(alike)) if alike and not self.chance(3) else self.index(labels, size))
        return tuple(found)

    def index(self, labels: tuple[str, ...], size: int) -> ex.Expr:
        """Index arithmetic over ``labels``, for a dimension of ``size``."""
        if not labels:
            return ex.Const(self.between(0, max(size - 1, 0)))
        at = ex.Label(self.pick(labels))
        by = self.pick([ex.Const(self.between(2, 3)), ex.Scalar("o"), ex.Param("span")])
        match self.pick(["lookup"] * 6 + ["+", "-", "/", "*", "shifted quotient", "reverse", "wrap", "sum", "const"]):
            case "lookup":
                return self.lookup(labels, size)
            case "shifted quotient":
                return ex.Binary("/", ex.Binary("-", at, ex.Const(self.between(1, 5))), by)
            case "reverse":
                return ex.Binary("-", ex.Binary("-", ex.Len(at.name), ex.Const(1)), at)
            case "wrap":
                return ex.Binary("%", ex.Binary(self.pick("+-"), at, self.pick([by, ex.Const(1)])), self.pick([ex.Const(max(size, 1)), ex.Const(3)]))
            case "sum":
                return ex.Binary(self.pick("+-"), at, ex.Label(self.pick(labels)))
            case "const":
                return ex.Const(self.between(0, 3))
            case "+" | "-" as op:
                return ex.Binary(op, at, self.pick([by, ex.Const(1)]))
            case op:
                return ex.Binary(op, at, by)
        raise AssertionError

    def lookup(self, labels: tuple[str, ...], size: int, depth: int = 1) -> ex.Expr:
        """An element of an input of whole numbers below ``size``: alone, shifted, scaled, wrapped, or by another such."""
        if depth and self.chance(5):
            inner = self.pick([3, 5, 8])
            found: ex.Expr = ex.Access(self.declare(Declared((inner,), "index", size)), (self.lookup(labels, inner, depth - 1),))
        else:
            found = self.plain(self.some(labels, 1, 2), "index", size)
        match self.pick(["alone"] * 4 + ["shifted", "scaled", "halved", "wrapped", "moved"]):
            case "shifted":
                return ex.Binary(self.pick("+-"), found, self.pick([ex.Const(1), ex.Scalar("o"), ex.Const(2)]))
            case "scaled":
                return ex.Binary("*", found, self.pick([ex.Const(2), ex.Scalar("o")]))
            case "halved":
                return ex.Binary("/", found, ex.Const(2))
            case "wrapped":
                return ex.Binary("%", found, ex.Const(max(size, 1)))
            case "moved":
                return ex.Binary("+", found, ex.Label(self.pick(labels)))
        return found

    # -- expressions ------------------------------------------------------------------------------------------------

    def number(self, labels: tuple[str, ...], depth: int) -> ex.Expr:
        free = [label for label in self.labels if label not in labels]
        forms = ["leaf", "leaf"] + (["binary", "binary", "binary", "unary", "safe", "where"] + ["reduce", "reduce", "dot", "softmax"] * bool(free) if depth else [])
        match self.pick(forms):
            case "leaf":
                return self.leaf(labels)
            case "binary":
                fn = self.pick(["+", "-", "*", "/", "maximum", "minimum", "clamp"])
                args = self.number(labels, depth - 1), self.number(labels, depth - 1)
                if fn == "clamp":
                    args = args[0], *self.pick([(ex.Unary("-", ex.Const(0.5)), ex.Const(0.75)), (ex.Const(0), ex.Call("abs", args[1:])), (args[1], ex.Const(1))])
                if fn == "/":
                    args = args[0], ex.Binary("+", ex.Call("abs", args[1:]), ex.Const(0.5))
                return ex.Call(fn, args) if len(fn) > 1 else ex.Binary(fn, *args)
            case "unary":
                fn = self.pick(["-", "tanh", "sigmoid", "abs", "erf", "erfc", "exp", "exp2", "floor", "cast", "sin", "cos", "expm1", "round", "ceil", "trunc", "sign"])
                arg = self.number(labels, depth - 1)
                return ex.Unary("-", arg) if fn == "-" else ex.Cast(arg, self.pick(["fp32", "fp16", "bf16"])) if fn == "cast" else ex.Call(fn, (arg,))
            case "safe":
                arg = ex.Binary("+", ex.Call("abs", (self.number(labels, depth - 1),)), ex.Const(0.5))
                fn = self.pick(["sqrt", "rsqrt", "log", "log2", "log1p", "pow"])
                power = ex.Call("tanh", (self.number(labels, 0),)) if fn == "pow" and self.chance(2) else ex.Const(self.pick([2, 0.5, 3, 1.5, 6]))
                return ex.Call(fn, (arg, power) if fn == "pow" else (arg,))
            case "where":
                return ex.Call("where", (self.condition(labels, depth - 1), self.number(labels, depth - 1), self.number(labels, depth - 1)))
            case "reduce":
                over = self.some(free, 1, 2 if self.chance(5) else 1)
                arg = self.covering(self.number(labels + over, depth - 1), over)
                kind = self.pick(["sum", "sum", "sum", "max", "min", "mean", "prod"])
                if labels and self.chance(4):
                    nothing = {"max": NEG_INF, "min": ex.Const(math.inf)}.get(kind, ex.Const(int(kind == "prod")))
                    arg = ex.Call("where", (self.range(labels, over), arg, nothing))
                return ex.Reduce(kind, arg, over)
            case "dot":
                over = self.some(free, 1, 1)
                sides = [self.operand(labels, over, depth - 1) for _ in range(2)]
                return ex.Dot(*sides, over)
            case "softmax":
                over = self.some(free, 1, 1)
                weight = ex.Call("exp", (self.covering(self.number(labels + over, depth - 1), over),))
                value = ex.Reduce("sum", ex.Binary("*", weight, self.number(labels + over, 0)), over)
                return ex.Binary("/", value, ex.Reduce("sum", weight, over))
        raise AssertionError

    def operand(self, labels: tuple[str, ...], over: tuple[str, ...], depth: int) -> ex.Expr:
        own = self.some(labels, 0, 2) + over
        match self.pick(["plain"] * 3 + ["element", "whole"] + ["number"] * 3 * bool(depth)):
            case "plain":
                return self.plain(own, "number")
            case "element":
                return self.covering(self.element(own), over)
            case "whole":
                return self.covering(self.element(own, self.pick(["whole", "mask"])), over)
        return self.covering(self.number(own, depth - 1), over)

    def leaf(self, labels: tuple[str, ...]) -> ex.Expr:
        if not labels:
            return self.pick([ex.Const(self.pick(CONSTANTS)), ex.Scalar(self.pick("st"))])
        funcs = list(self.funcs.values())
        match self.pick(["input", "input", "const", "scalar", "param", "label", "len", "element", "element", "element", "whole", "remainder"] + ["func"] * 4 * bool(funcs)):
            case "input":
                return self.plain(self.some(labels, 1, 4), "number")
            case "const":
                return ex.Const(self.pick(CONSTANTS))
            case "scalar":
                return ex.Scalar(self.pick("st"))
            case "param":
                return ex.Param("span")
            case "label":
                return ex.Label(self.pick(labels))
            case "len":
                return ex.Len(self.pick(labels))
            case "func":
                known = [d for d in funcs if set(d.labels) <= set(labels)]
                return self.func_element(self.pick(known if known and not self.chance(4) else funcs), labels)
            case "element":
                return self.element(labels)
            case "whole":
                return self.element(labels, self.pick(["whole", "whole", "mask", "index"]))
            case "remainder":
                whole = self.pick([ex.Label(self.pick(labels)), ex.Len(self.pick(labels))])
                return ex.Binary("%", ex.Binary("+", whole, ex.Const(self.between(0, 3))), ex.Const(self.between(2, 5)))
        raise AssertionError

    def condition(self, labels: tuple[str, ...], depth: int) -> ex.Expr:
        if depth and self.chance(3):
            op = self.pick(["and", "or", "not"])
            args = [self.condition(labels, depth - 1) for _ in range(1 if op == "not" else 2)]
            return ex.Unary("not", *args) if op == "not" else ex.Binary(op, *args)
        if labels and self.chance(5):
            return self.element(labels, self.pick(["mask", "mask", "whole"]))
        if self.chance(8):
            return ex.Param("flag")
        if depth and self.chance(10) and (free := [label for label in self.labels if label not in labels]):
            over = self.some(free, 1, 1)
            inner = ex.Binary(self.pick(["<", ">="]), self.covering(self.number(labels + over, 0), over), self.number(labels, 0))
            return ex.Reduce(self.pick(["any", "all"]), inner, over)
        if self.chance(8):
            return ex.Call(self.pick(["isfinite", "isnan", "isinf"]), (self.number(labels, min(depth, 1)),))
        left = ex.Label(self.pick(labels)) if labels and self.chance(2) else self.number(labels, min(depth, 1))
        return ex.Binary(self.pick(["<", "<=", ">", ">=", "==", "!="]), left, self.number(labels, 0))
