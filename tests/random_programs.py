# ruff: noqa: E501 (lists of choices read best on one line)
"""Random programs: algorithms of every form the language has, under schedules of every primitive.

Programs are built as values, every choice drawn, so that hypothesis can shrink them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from oracle import host

from dtkernels.lang import Algorithm, Definition, Primitive, Program, Schedule
from dtkernels.lang import expr as ex
from dtkernels.lang.schedule import Grouped, Named, Sized

LABELS = ("x", "y", "z", "k", "l")
ELEMENTS = 4000  #: at most so many points in the space of all labels; tl.reduce is interpreted element by element
STEPS = 120  #: at most so many innermost steps a kernel, times its Funcs; the interpreter takes about a millisecond for each
CONSTANTS = [0, 1, 2, 3, 0.5, 0.25, 1e-3]
SCALARS = {"s": 0.75, "t": -1.25, "o": 2}  #: o is an integer: it stands in indices and masks
LAYOUTS = ("contiguous", "contiguous", "transposed", "sliced", "expanded")


@dataclass(frozen=True)
class Case:
    """A program and what to call it with."""

    program: Program
    shapes: dict[str, tuple[int, ...]]
    masks: tuple[str, ...]
    dtype: torch.dtype
    layout: str
    scalars_on_device: bool
    params: dict[str, int | bool] = field(default_factory=dict)
    seed: int = 0

    def __repr__(self) -> str:
        more = ", ".join([str(self.dtype), self.layout, *(f"{m} a mask" for m in self.masks), *(["scalars as tensors"] if self.scalars_on_device else [])])
        return f"\n{self.program}# {self.shapes} {more}, params {self.params}, seed {self.seed}\n"

    def tensors(self) -> dict[str, torch.Tensor]:
        """An input for each name, laid out as the case says."""
        torch.manual_seed(self.seed)
        return {name: self._mask(shape) if name in self.masks else self._laid_out(shape) for name, shape in self.shapes.items()}

    def scalars(self) -> dict[str, float | int | torch.Tensor]:
        return {n: torch.tensor([v] if self.seed % 2 else v) if self.scalars_on_device else v for n, v in SCALARS.items()}

    def _mask(self, shape: tuple[int, ...]) -> torch.Tensor:
        drawn = torch.rand(shape) < 0.6
        return drawn if self.seed % 2 else drawn.to(torch.int32 if self.seed else torch.uint8)

    def _laid_out(self, shape: tuple[int, ...]) -> torch.Tensor:
        def drawn(*s: int) -> torch.Tensor:
            return (torch.rand(s) * 3 - 1.5).to(self.dtype)

        match self.layout:
            case "transposed":
                return drawn(*reversed(shape)).permute(*reversed(range(len(shape))))
            case "sliced":  # steps of 2 and a start that is not the storage's
                return drawn(*(2 * n + 1 for n in shape))[tuple(slice(1, None, 2) for _ in shape)]
            case "expanded":
                return drawn(1, *shape[1:]).expand(shape)
        return drawn(*shape)


class Builder:
    """One random program."""

    def __init__(self, draw):
        self.draw = draw
        self.labels = LABELS[: draw(st.integers(2, len(LABELS)))]
        self.sizes = {label: draw(st.integers(1, 20)) for label in self.labels}
        while math.prod(self.sizes.values()) > ELEMENTS:
            self.sizes[max(self.sizes, key=self.sizes.get)] //= 2
        if self.chance(6):  # square: any label may index any dimension
            self.sizes = dict.fromkeys(self.labels, min(self.sizes.values()))
        elif self.chance(16):
            self.sizes[self.pick(self.labels)] = 0
        self.square = len(set(self.sizes.values())) == 1
        self.inputs: dict[str, tuple[str, ...]] = {}
        self.masks: dict[str, tuple[str, ...]] = {}
        self.funcs: dict[str, Definition] = {}

    def pick(self, options):
        return self.draw(st.sampled_from(list(options)))

    def chance(self, one_in: int) -> bool:
        return self.draw(st.integers(1, one_in)) == one_in

    # -- algorithm --------------------------------------------------------------------------------------------------

    def algorithm(self) -> Algorithm:
        waiting: list[Definition] = []
        for i in range(self.pick([1, 2, 2, 3, 3, 4])):
            used = self.draw(st.lists(st.sampled_from(waiting), min_size=1, max_size=2, unique=True)) if waiting else []
            kept = {label for d in used for label in d.labels if not self.chance(3)}
            own = tuple(self.draw(st.permutations(self.some(kept or self.labels, 1, 4))))
            expr = self.number(own, 1 if used else 3)
            for d in used:
                expr = ex.Binary(self.pick("+*-"), self.use(d, own), expr)
            expr = self.covering(expr, own)
            self.funcs[f"f{i}"] = Definition(f"f{i}", own, ex.Cast(expr, self.pick(["fp32", "fp16", "bf16"])) if self.chance(10) else expr)
            waiting = [d for d in waiting if d not in used] + [self.funcs[f"f{i}"]]
        definitions = self.used()
        nodes = [n for d in definitions for n in d.expr.walk()]
        reduced = {label for n in nodes if isinstance(n, (ex.Reduce, ex.Dot)) for label in n.labels}
        used = reduced | {label for d in definitions for label in d.labels}
        read = {n.tensor for n in nodes if isinstance(n, ex.Access)}
        named = {n.name for n in nodes if isinstance(n, (ex.Scalar, ex.Param))}
        return Algorithm(
            funcs=tuple(d.name for d in definitions), inputs=tuple(t for t in (*self.inputs, *self.masks) if t in read), scalars=tuple(s for s in SCALARS if s in named),
            params=tuple((p, v) for p, v in (("flag", self.chance(2)), ("span", self.pick([1, 2, 5]))) if p in named),
            vars=tuple(label for label in LABELS if label in used - reduced), rvars=tuple(label for label in LABELS if label in reduced),
            definitions=definitions,
        )  # fmt: skip

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
                    logits = ex.Call("where", (self.range(left, over), logits, ex.Unary("-", ex.Const(math.inf))))
                weight = self.func(f"e{len(self.funcs)}", left + over, ex.Call("exp", (logits,)))
                total = self.func(f"d{len(self.funcs)}", left, ex.Reduce("sum", weight, over))
                value = self.operand(labels, over, 0)
                return ex.Dot(ex.Binary("/", weight, total), value, over) if self.chance(2) else ex.Binary("/", ex.Dot(weight, value, over), total)
        raise AssertionError

    def range(self, labels: tuple[str, ...], over: tuple[str, ...]) -> ex.Expr:
        """Causal and window masks, and their like."""
        at, along = ex.Label(self.pick(labels)), ex.Label(self.pick(over))
        width = self.pick([ex.Param("span"), ex.Scalar("o"), ex.Const(3)])
        causal = ex.Binary("<=", along, ex.Binary("+", at, width) if self.chance(2) else at)
        match self.pick(["causal", "after", "window", "optional"]):
            case "causal":
                return causal
            case "after":
                return ex.Binary(self.pick([">", ">="]), along, at)
            case "window":
                return ex.Binary("and", ex.Binary("<", ex.Binary("-", at, along), width), causal)
        return ex.Binary("or", ex.Unary("not", ex.Param("flag")), causal)

    def some(self, options, least: int, most: int) -> tuple[str, ...]:
        chosen = self.draw(st.lists(st.sampled_from(sorted(options)), min_size=least, max_size=most, unique=True))
        return tuple(label for label in LABELS if label in chosen)

    def covering(self, expr: ex.Expr, labels: tuple[str, ...]) -> ex.Expr:
        """``expr``, and an input over those of ``labels`` whose extent it does not tell."""
        told = {i.name for a in ex.accesses(expr) if a.tensor in self.inputs for i in a.index if isinstance(i, ex.Label)}
        missing = tuple(label for label in labels if label not in told)
        return ex.Binary(self.pick("+*-"), expr, self.input(missing)) if missing else expr

    def input(self, labels: tuple[str, ...]) -> ex.Access:
        """An input over just ``labels``."""
        for name, own in self.inputs.items():
            if set(own) == set(labels) and self.chance(2):
                return ex.Access(name, tuple(map(ex.Label, own)))
            if self.square and len(own) == len(labels) and self.chance(2):
                return ex.Access(name, tuple(map(ex.Label, labels)))
        name = f"A{len(self.inputs)}"
        self.inputs[name] = tuple(self.draw(st.permutations(labels)))
        return ex.Access(name, tuple(map(ex.Label, self.inputs[name])))

    def number(self, labels: tuple[str, ...], depth: int) -> ex.Expr:
        free = [label for label in self.labels if label not in labels]
        forms = ["leaf", "leaf"] + (["binary", "binary", "binary", "unary", "safe", "where"] + ["reduce", "reduce", "dot", "softmax"] * bool(free) if depth else [])
        match self.pick(forms):
            case "leaf":
                return self.leaf(labels)
            case "binary":
                fn = self.pick(["+", "-", "*", "/", "maximum", "minimum"])
                args = self.number(labels, depth - 1), self.number(labels, depth - 1)
                if fn == "/":
                    args = args[0], ex.Binary("+", ex.Call("abs", args[1:]), ex.Const(0.5))
                return ex.Call(fn, args) if len(fn) > 1 else ex.Binary(fn, *args)
            case "unary":
                fn = self.pick(["-", "tanh", "sigmoid", "abs", "erf", "exp", "exp2", "floor", "cast"])
                arg = self.number(labels, depth - 1)
                return ex.Unary("-", arg) if fn == "-" else ex.Cast(arg, self.pick(["fp32", "fp16", "bf16"])) if fn == "cast" else ex.Call(fn, (arg,))
            case "safe":
                arg = ex.Binary("+", ex.Call("abs", (self.number(labels, depth - 1),)), ex.Const(0.5))
                return ex.Call(self.pick(["sqrt", "rsqrt", "log", "log2"]), (arg,))
            case "where":
                return ex.Call("where", (self.condition(labels, depth - 1), self.number(labels, depth - 1), self.number(labels, depth - 1)))
            case "reduce":
                over = self.some(free, 1, 2 if self.chance(5) else 1)
                arg = self.covering(self.number(labels + over, depth - 1), over)
                kind = self.pick(["sum", "sum", "max", "min", "mean"])
                if labels and self.chance(4):
                    nothing = {"max": ex.Unary("-", ex.Const(math.inf)), "min": ex.Const(math.inf)}.get(kind, ex.Const(0))
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
        return self.input(own) if not depth or self.chance(2) else self.covering(self.number(own, depth - 1), over)

    def leaf(self, labels: tuple[str, ...]) -> ex.Expr:
        funcs = [d for d in self.funcs.values() if set(d.labels) <= set(labels)]
        match self.pick(["input", "input", "const", "scalar", "param", "label", "len", "shift"] + ["func"] * 4 * bool(funcs) if labels else ["const", "scalar"]):
            case "input":
                return self.input(self.some(labels, 1, len(labels)))
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
                d = self.pick(funcs)
                return ex.Access(d.name, tuple(map(ex.Label, d.labels)))
            case "shift":
                access = self.input(self.some(labels, 1, len(labels)))
                at = self.draw(st.integers(0, len(access.index) - 1))
                return ex.Access(access.tensor, access.index[:at] + (self.shifted(access.index[at]),) + access.index[at + 1 :])
        raise AssertionError

    def shifted(self, index: ex.Expr) -> ex.Expr:
        by = self.pick([ex.Const(self.draw(st.integers(1, 3))), ex.Scalar("o"), ex.Param("span")])
        match self.pick(["+", "-", "/", "*", "both"]):
            case "both":
                return ex.Binary("/", ex.Binary("-", index, ex.Const(self.draw(st.integers(1, 5)))), by)
            case op:
                return ex.Binary(op, index, by)

    def condition(self, labels: tuple[str, ...], depth: int) -> ex.Expr:
        if depth and self.chance(3):
            op = self.pick(["and", "or", "not"])
            args = [self.condition(labels, depth - 1) for _ in range(1 if op == "not" else 2)]
            return ex.Unary("not", *args) if op == "not" else ex.Binary(op, *args)
        if labels and self.chance(6):
            own = self.some(labels, 1, 2)
            name = f"M{len(self.masks)}"
            self.masks[name] = own
            return ex.Access(name, tuple(map(ex.Label, own)))
        if self.chance(8):
            return ex.Param("flag")
        left = ex.Label(self.pick(labels)) if labels and self.chance(2) else self.number(labels, min(depth, 1))
        return ex.Binary(self.pick(["<", "<=", ">", ">=", "==", "!="]), left, self.number(labels, 0))


class Scheduler:
    """A random schedule of one algorithm."""

    def __init__(self, builder: Builder, algorithm: Algorithm):
        self.b, self.algorithm, self.pick, self.chance = builder, algorithm, builder.pick, builder.chance

    def schedule(self) -> Schedule:
        algorithm, output = self.algorithm, self.algorithm.definitions[-1].name
        needed = algorithm.needed_by((output,))
        statements: list[Primitive] = []
        fused: dict[str, tuple[str, str]] = {}
        for func in needed[:-1]:
            users = [u for u in needed if any(a.tensor == func for a in ex.accesses(algorithm[u].expr))]
            if not self.chance(4):
                user = self.pick(users)
                loops = (*algorithm[user].labels, *reduced(algorithm, user))
                fused[func] = (user, self.pick(loops))
                statements.append(Primitive(func, "fuse_at", fused[func]))
        statements += [Primitive(f, "store") for f in fused if self.chance(6)]
        for root in (f for f in needed if f not in fused):
            statements += self.kernel(root, [f for f in needed if host(f, fused) == root])
        if fused and self.chance(4):
            statements += [Primitive(f, "compile") for f in self.b.draw(st.permutations([output, self.pick(fused)]))]
        return Schedule(tuple(self.b.draw(st.permutations(statements))))

    def kernel(self, root: str, members: list[str]) -> list[Primitive]:
        algorithm, own = self.algorithm, self.algorithm[root].labels
        labels = tuple(dict.fromkeys(label for m in [root, *members] for label in (*algorithm[m].labels, *reduced(algorithm, m))))
        tiles = {label: self.pick([1, 2, 4, 8, 16, 0]) for label in labels}
        while math.prod(self.width(label, tile) for label, tile in tiles.items()) > ELEMENTS:
            label = max(labels, key=lambda label: self.width(label, tiles[label]))
            tiles[label] = self.width(label, tiles[label]) // 2
        blocks = {label: tiles[label] * self.pick([1, 1, 2, 3]) or 16 for label in own if not self.chance(3)}
        while len(members) * math.prod(self.trips(label, tiles[label], blocks.get(label)) for label in labels) > STEPS:
            label = max(labels, key=lambda label: self.trips(label, tiles[label], blocks.get(label)))
            tiles[label] = 16
            blocks |= {label: 16} if label in blocks else {}
        statements = [Primitive(root, "tensorize", (Sized(label, tile),)) for label, tile in tiles.items() if tile != 1]
        statements += [Primitive(root, "block", (Sized(label, block),)) for label, block in blocks.items()]
        if blocks and self.chance(2):
            statements.append(Primitive(root, "map", self.walk(tuple(blocks))))
        if own and self.chance(3):
            inner = tuple(label for label in labels if label not in own)
            named = self.b.some(inner, 0, 1) if inner and self.chance(3) else ()
            statements.append(Primitive(root, "reorder", tuple(self.b.draw(st.permutations(own + named)))))
        loops = self.loops(root, members, labels, tiles)
        launch = [p for p in self.launch(root) if all(p.name != q.name for q in loops)]  # a thing is said once
        return statements + launch + loops + self.memory(root, members)

    def launch(self, root: str) -> list[Primitive]:
        numbers = {"num_warps": [1, 2, 4, 8], "num_stages": [1, 2, 4], "maxnreg": [64, 168], "cluster": [1, 2, 4]}
        found = [Primitive(root, name, (self.pick(values),)) for name, values in numbers.items() if self.chance(4)]
        return found + ([Primitive(root, "persistent")] if self.chance(4) else [])

    def loops(self, root: str, members: list[str], labels: tuple[str, ...], tiles: dict[str, int]) -> list[Primitive]:
        """Words on single loops: mostly on loops that are there, now and then on any label."""
        looped = [label for label in labels if tiles[label] != 0]
        summed = [label for m in members for label in reduced(self.algorithm, m) if tiles[label] != 0]
        where = labels if self.chance(10) else looped
        found = [Primitive(root, name, (Sized(self.pick(where), self.pick([1, 2, 3])),)) for name in ("stages", "unroll") if where and self.chance(6)]
        if self.chance(6):
            found.append(Primitive(root, "specialize", (self.pick(labels),)))
        if (summed or self.chance(10)) and self.chance(3):
            found.append(Primitive(self.pick([root, *members]), "split", (Sized(self.pick(summed or labels), self.pick([1, 2, 3, 5])),)))
        if summed and self.chance(12):
            found += [Primitive(root, "specialize_warps", (self.pick(summed),)), Primitive(root, "num_warps", (4,))]
        return [p for p in found if all(getattr(a, "label", a) in self.within(p.func, members) for a in p.args) or p.name == "num_warps"]

    def within(self, func: str, members: list[str]) -> set[str]:
        """Labels that a word on ``func`` may name."""
        return {label for m in (members if func == members[-1] else [func]) for label in (*self.algorithm[m].labels, *reduced(self.algorithm, m))}

    def memory(self, root: str, members: list[str]) -> list[Primitive]:
        read = dict.fromkeys(a.tensor for m in members for a in ex.accesses(self.algorithm[m].expr) if a.tensor in self.algorithm.inputs)
        tensors, found = [*read, root], []
        if self.chance(4):
            chosen = self.b.draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=3, unique=True))
            found.append(Primitive(root, "descriptor", tuple(chosen)))
        if read and self.chance(6):
            found.append(Primitive(root, "evict", (Named(self.pick(read), self.pick(["first", "last", "reread"])),)))
        return found

    def width(self, label: str, tile: int) -> int:
        """How many elements along ``label`` are done at once."""
        return tile or 1 << max(0, self.b.sizes[label] - 1).bit_length()

    def trips(self, label: str, tile: int, block: int | None) -> int:
        """How often the loops over ``label``, its blocks included, go round."""
        size = self.b.sizes[label]
        if block is None:
            return math.ceil(size / tile) if tile else 1
        return math.ceil(size / block) * (block // (tile or block))

    def walk(self, labels: tuple[str, ...]) -> tuple:
        split = {label: f"{label}_in" for label in self.b.some(labels, 0, 3)}
        order = list(self.b.draw(st.permutations(labels)))
        for label, inner in split.items():
            order.insert(self.b.draw(st.integers(order.index(label) + 1, len(order))), inner)
        return tuple(Grouped(name, split[name], self.pick([1, 2, 3, 4])) if name in split else name for name in order)


def reduced(algorithm: Algorithm, func: str) -> tuple[str, ...]:
    """Labels that reductions in the definition of ``func`` run over."""
    return tuple(dict.fromkeys(label for n in algorithm[func].expr.walk() if isinstance(n, (ex.Reduce, ex.Dot)) for label in n.labels))


@st.composite
def cases(draw) -> Case:
    """A random program with inputs of random shapes, dtypes and layouts."""
    builder = Builder(draw)
    algorithm = builder.algorithm()
    program = Program(algorithm, Scheduler(builder, algorithm).schedule())
    own = {**builder.inputs, **builder.masks}
    shapes = {name: tuple(builder.sizes[label] for label in own[name]) for name in algorithm.inputs}
    params = {name: builder.pick([True, False]) if isinstance(value, bool) else builder.pick([1, 3]) for name, value in algorithm.params if builder.chance(2)}
    dtype = builder.pick([torch.float32] * 6 + [torch.float16, torch.bfloat16])
    masks = tuple(name for name in algorithm.inputs if name in builder.masks)
    return Case(program, shapes, masks, dtype, builder.pick(LAYOUTS), builder.chance(4), params, draw(st.integers(0, 3)))
