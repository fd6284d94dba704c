# ruff: noqa: E501 (programs read best on one line)
"""Random algorithms under random schedules: a schedule is refused with a message, or the kernel is right.

Algorithms are built as values and printed, so every case also says whether `parse(str(program)) == program`.
"""

import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass

import bounds  # noqa: F401 (an access outside the tensors raises)
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import STEP, as_numpy, check, compared, dtype_name, evaluate, host, mismatches, outputs_of

import dtkernels
from dtkernels.lang import Algorithm, Definition, DTError, Primitive, Program, Schedule, parse
from dtkernels.lang import expr as ex
from dtkernels.lang.schedule import Grouped, Sized

LABELS = ("x", "y", "z", "k", "l")
CASES = 320
ELEMENTS = 4000  #: at most so many points in the space of all labels; tl.reduce is interpreted element by element
STEPS = 120  #: at most so many innermost steps a kernel, times its Funcs; the interpreter takes about a millisecond for each
CONSTANTS = [0, 1, 2, 3, 0.5, 0.25, 1e-3]


class Builder:
    """One random program; every choice is drawn, so that hypothesis can shrink it."""

    def __init__(self, draw):
        self.draw = draw
        self.labels = LABELS[: draw(st.integers(2, len(LABELS)))]
        self.sizes = {label: draw(st.integers(1, 20)) for label in self.labels}
        while math.prod(self.sizes.values()) > ELEMENTS:
            self.sizes[max(self.sizes, key=self.sizes.get)] //= 2
        if draw(st.integers(0, 5)) == 0:  # square: any label may index any dimension
            self.sizes = dict.fromkeys(self.labels, min(self.sizes.values()))
        self.square = len(set(self.sizes.values())) == 1
        self.inputs: dict[str, tuple[str, ...]] = {}
        self.funcs: dict[str, Definition] = {}
        self.scalars: set[str] = set()

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
            own = tuple(self.draw(st.permutations(self.some(kept or self.labels, 1, 3))))
            expr = self.number(own, 1 if used else 3)
            for d in used:
                expr = ex.Binary(self.pick("+*-"), self.use(d, own), expr)
            self.funcs[f"f{i}"] = Definition(f"f{i}", own, self.covering(expr, own))
            waiting = [d for d in waiting if d not in used] + [self.funcs[f"f{i}"]]
        definitions = tuple(self.funcs.values())
        nodes = [n for d in definitions for n in d.expr.walk()]
        reduced = {label for n in nodes if isinstance(n, (ex.Reduce, ex.Dot)) for label in n.labels}
        used = reduced | {label for d in definitions for label in d.labels}
        read = {n.tensor for n in nodes if isinstance(n, ex.Access)}
        return Algorithm(
            funcs=tuple(self.funcs), inputs=tuple(t for t in self.inputs if t in read),
            scalars=tuple(s for s in ("s", "t") if any(isinstance(n, ex.Scalar) and n.name == s for n in nodes)),
            vars=tuple(label for label in LABELS if label in used - reduced), rvars=tuple(label for label in LABELS if label in reduced),
            definitions=definitions,
        )  # fmt: skip

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
                weight = self.func(f"e{len(self.funcs)}", left + over, ex.Call("exp", (self.covering(access, over),)))
                total = self.func(f"d{len(self.funcs)}", left, ex.Reduce("sum", weight, over))
                value = self.operand(labels, over, 0)
                return ex.Dot(ex.Binary("/", weight, total), value, over) if self.chance(2) else ex.Binary("/", ex.Dot(weight, value, over), total)
        raise AssertionError

    def some(self, options, least: int, most: int) -> tuple[str, ...]:
        chosen = self.draw(st.lists(st.sampled_from(sorted(options)), min_size=least, max_size=most, unique=True))
        return tuple(label for label in LABELS if label in chosen)

    def covering(self, expr: ex.Expr, labels: tuple[str, ...]) -> ex.Expr:
        """``expr``, and an input over those of ``labels`` whose extent it does not tell."""
        told = {i.name for a in ex.accesses(expr) if a.tensor in self.inputs for i in a.index if isinstance(i, ex.Label)}
        missing = tuple(label for label in labels if label not in told)
        return ex.Binary(self.pick("+*-"), expr, self.input(missing)) if missing else expr

    def input(self, labels: tuple[str, ...]) -> ex.Expr:
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
                return ex.Unary("-", arg) if fn == "-" else ex.Cast(arg, "fp32") if fn == "cast" else ex.Call(fn, (arg,))
            case "safe":
                arg = ex.Binary("+", ex.Call("abs", (self.number(labels, depth - 1),)), ex.Const(0.5))
                return ex.Call(self.pick(["sqrt", "rsqrt", "log", "log2"]), (arg,))
            case "where":
                return ex.Call("where", (self.condition(labels, depth - 1), self.number(labels, depth - 1), self.number(labels, depth - 1)))
            case "reduce":
                over = self.some(free, 1, 2 if self.chance(5) else 1)
                arg = self.covering(self.number(labels + over, depth - 1), over)
                return ex.Reduce(self.pick(["sum", "sum", "max", "min", "mean"]), arg, over)
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
        match self.pick(["input", "input", "const", "scalar", "label", "len", "shift"] + ["func"] * 4 * bool(funcs) if labels else ["const", "scalar"]):
            case "input":
                return self.input(self.some(labels, 1, len(labels)))
            case "const":
                return ex.Const(self.pick(CONSTANTS))
            case "scalar":
                return ex.Scalar(self.pick("st"))
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
        match self.pick(["+", "-", "/", "*", "both"]):
            case "both":
                return ex.Binary("/", ex.Binary("-", index, ex.Const(self.draw(st.integers(1, 5)))), ex.Const(self.draw(st.integers(2, 3))))
            case op:
                return ex.Binary(op, index, ex.Const(self.draw(st.integers(1, 3))))

    def condition(self, labels: tuple[str, ...], depth: int) -> ex.Expr:
        if depth and self.chance(3):
            op = self.pick(["and", "or", "not"])
            args = [self.condition(labels, depth - 1) for _ in range(1 if op == "not" else 2)]
            return ex.Unary("not", *args) if op == "not" else ex.Binary(op, *args)
        left = ex.Label(self.pick(labels)) if labels and self.chance(2) else self.number(labels, min(depth, 1))
        return ex.Binary(self.pick(["<", "<=", ">", ">=", "==", "!="]), left, self.number(labels, 0))

    # -- schedule -----------------------------------------------------------------------------------------------------

    def schedule(self, algorithm: Algorithm) -> Schedule:
        output = algorithm.definitions[-1].name
        needed = algorithm.needed_by((output,))
        statements: list[Primitive] = []
        fused: dict[str, tuple[str, str]] = {}
        for func in needed[:-1]:
            users = [u for u in needed if any(a.tensor == func for a in ex.accesses(algorithm[u].expr))]
            if not self.chance(4):
                user = self.pick(users)
                loops = (*algorithm[user].labels, *_reduced(algorithm, user))
                fused[func] = (user, self.pick(loops))
                statements.append(Primitive(func, "fuse_at", fused[func]))
        for root in (f for f in needed if f not in fused):
            statements += self.kernel(algorithm, root, [f for f in needed if host(f, fused) == root])
        if fused and self.chance(4):
            statements += [Primitive(f, "compile") for f in self.draw(st.permutations([output, self.pick(fused)]))]
        return Schedule(tuple(self.draw(st.permutations(statements))))

    def kernel(self, algorithm: Algorithm, root: str, members: list[str]) -> list[Primitive]:
        own = algorithm[root].labels
        labels = tuple(dict.fromkeys(label for m in [root, *members] for label in (*algorithm[m].labels, *_reduced(algorithm, m))))
        tiles = {label: self.pick([1, 2, 4, 8, 16, 0]) for label in labels}
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
            statements.append(Primitive(root, "reorder", tuple(self.draw(st.permutations(own)))))
        if self.chance(3):
            statements.append(Primitive(root, "num_warps", (self.pick([1, 2, 4, 8]),)))
        return statements

    def trips(self, label: str, tile: int, block: int | None) -> int:
        """How often the loops over ``label``, its blocks included, go round."""
        if block is None:
            return math.ceil(self.sizes[label] / tile) if tile else 1
        return math.ceil(self.sizes[label] / block) * (block // (tile or block))

    def walk(self, labels: tuple[str, ...]) -> tuple:
        split = {label: f"{label}_in" for label in self.some(labels, 0, 2)}
        order = list(self.draw(st.permutations(labels)))
        for label, inner in split.items():
            order.insert(self.draw(st.integers(order.index(label) + 1, len(order))), inner)
        return tuple(Grouped(name, split[name], self.pick([1, 2, 3, 4])) if name in split else name for name in order)


def _reduced(algorithm: Algorithm, func: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(label for n in algorithm[func].expr.walk() if isinstance(n, (ex.Reduce, ex.Dot)) for label in n.labels))


@dataclass(frozen=True)
class Case:
    program: Program
    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype
    seed: int

    def __repr__(self) -> str:
        return f"\n{self.program}# {self.shapes} {self.dtype}, seed {self.seed}\n"


@st.composite
def cases(draw) -> Case:
    builder = Builder(draw)
    algorithm = builder.algorithm()
    program = Program(algorithm, builder.schedule(algorithm))
    shapes = {name: tuple(builder.sizes[label] for label in builder.inputs[name]) for name in algorithm.inputs}
    dtype = torch.float16 if builder.chance(8) else torch.float32
    return Case(program, shapes, dtype, draw(st.integers(0, 3)))


counts: Counter = Counter()
refusals: Counter = Counter()


def run(case: Case) -> str:
    """Compile, run, compare; what came of it."""
    program, text = case.program, str(case.program)
    assert parse(text) == program, f"reads back as another program:\n{text}\n{parse(text)}"
    assert str(parse(text)) == text
    try:
        compiled = dtkernels.compile(text)
    except DTError as refused:
        assert "\n" not in str(refused)
        refusals[refused.rule] += 1
        return "refused"
    torch.manual_seed(case.seed)
    tensors = {name: (torch.rand(shape) * 3 - 1.5).to(case.dtype) for name, shape in case.shapes.items()}
    scalars = {"s": 0.75, "t": -1.25}
    read = parse(str(compiled.program)).algorithm
    used = dtkernels.algebra.prepare.prepare(parse(text)).algorithm
    arguments = {n: tensors[n] for n in used.inputs} | {n: scalars[n] for n in used.scalars}
    assert set(used.inputs) <= set(read.inputs)
    name = dtype_name(next(iter(arguments[n] for n in used.inputs)))
    want = evaluate(text, {n: as_numpy(t) for n, t in tensors.items()}, scalars, operands=name)
    for func, got in outputs_of(compiled, **arguments).items():
        assert dtype_name(got) in STEP
        wrong = mismatches(as_numpy(got), want[func], dtype_name(got))
        assert not wrong, f"{func}: {len(wrong)} of {want[func].v.size} wrong, first {wrong[0]}\n{compiled.source}"
        if not compared(want[func]):
            return "nothing to compare"
    return "right"


@settings(deadline=None, max_examples=CASES, derandomize=True, database=None, print_blob=False,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example])  # fmt: skip
@given(cases())
@pytest.mark.filterwarnings("ignore")
def test_any_schedule_is_refused_or_right(case):
    with np.errstate(all="ignore"):
        counts[run(case)] += 1


def test_most_schedules_are_not_refused():
    """The test before this one says little if it refuses most or compares nothing. Runs after it."""
    total = sum(counts.values())
    if total < CASES // 2:
        pytest.skip("the property test did not run")
    assert counts["refused"] <= total / 2, refusals.most_common()
    assert counts["right"] >= total / 3, counts


#: what the test above found, shrunk: (program, shapes of its inputs)
FOUND = {
    "two labels index one dimension": ("Func f; In A; Var k; RVar l; f[k] = rsum(A[l], l) + A[k];", [(5,)]),
    "cast of a constant": ("Func f; In A; Var k; f[k] = cast(0, fp32) + A[k];", [(5,)]),
    "not of a scalar condition": ("Func f; In A; Var k; f[k] = A[k] + where(not k > 3, 3, 4);", [(6,)]),
    "a block and a whole extent of one label": (
        "Func g, f; In B; RVar x, y; g[y] = rsum(B[y, x], x); f[x] = rsum(B[y, x] * g[y], y); g.fuse_at(f, y); f.tensorize(x:0, y:2); f.block(x:16);", [(5, 2)]),
    "an output inside a kernel that is none": (
        "Func g, h, f; In A; Var x; g[x] = A[x] + 1; h[x] = g[x] * 2; f[x] = h[x] - 3; g.fuse_at(h, x); f.compile(); g.compile();", [(5,)]),
    "one truth value and a tile of them": (
        "Func f; In A, B, C; Var x, y; f[x, y] = where(A[x] < B[x] and A[x] < C[y] or B[x] < 0, A[x], C[y]); f.tensorize(y:2); f.block(x:1, y:2);", [(3,), (3,), (5,)]),
    "integers through where": ("Func f; In A; Var x, y; f[x, y] = A[x, y] + sqrt(where(x > y, x, 2)); f.tensorize(x:0, y:0);", [(4, 4)]),
    "integers through a Func": ("Func g, f; In A; Var l; g[l] = l; f[l] = exp(g[l]) + A[l]; g.fuse_at(f, l);", [(5,)]),
    "a hoisted load under the name of an inner one": (
        "Func g, f; In A, B; RVar x, y; g[y] = rsum(A[x] * B[y], x); f[x] = rmax(g[y] * A[x], y); g.fuse_at(f, y); f.tensorize(x:2, y:2);", [(15,), (9,)]),
    "reductions in reductions in both sides of a quotient": (
        """Func g, f; In A, B, C; RVar x, y, l;
        g[x] = rsum(exp(rsum(x, l) / rsum(exp(len(l) + A[l]), l)) * B[y], y) / rsum(exp(rsum(x, l) / rsum(exp(len(l) + A[l]), l)), y);
        f[l] = rdot(exp(g[x]), C[l, x], x) * (3 / (abs(3) + 0.5));""", [(4,), (4,), (4, 7)]),
    "five Funcs of one element": (
        """Func f0, f1, e2, d3, f2; In A0, A4; Var z; RVar x, y, k;
        f0[k, x, z] = where(A0[z], 1, rdot(A0[y], 1, y)); f1[z, x] = rmax(f0[k, x, z] + A0[k], k); e2[z, x] = f1[z, x]; d3[z] = 1;
        f2[z] = rdot(e2[z, x], A4[x], x); f0.fuse_at(f1, x); e2.fuse_at(d3, z); d3.fuse_at(f2, z); f2.tensorize(z:0); f1.fuse_at(e2, x); f2.tensorize(y:4);""", [(1,), (1,)]),
    "softmax over two labels of a Func computed inside": (
        """Func f0, e1, d2, f1; In A0, A1, A2, A3, A4, A5; SIn s; Var x; RVar y, z, k;
        f0[k, z, x] = where(rdot(A0[y], A1[k, y], y) != 0.001, rmin(z + A0[y], y), rsum(A2[k, x + 3, z, y], y)) + A0[x];
        e1[x, k, z] = exp(exp(f0[k, z, x] / 4) - A3[k, z]); d2[x] = rsum(e1[x, k, z], k, z);
        f1[x] = (rdot(e1[x, k, z] / d2[x], A4[k, z], k, z) - s) * A5[x];
        f1.tensorize(y:4); e1.fuse_at(f1, x); d2.fuse_at(f1, x); f1.tensorize(x:16); f0.fuse_at(e1, k);""", [(5,), (5, 5), (5, 5, 5, 5), (5, 5), (5, 5), (5,)]),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.filterwarnings("ignore")
def test_found_before(name):
    text, shapes = FOUND[name]
    torch.manual_seed(0)
    check(text, *(torch.randn(s) for s in shapes), *([0.75] if "SIn" in text else []))


SAME_TEXT = """
import random, sys
import dtkernels
for text in sys.stdin.read().split("----"):
    print(dtkernels.compile(text).source)
"""

PROGRAMS = """Func mm, e, dvsr, sm, attention; In A, B, C; Var m, n; RVar k, l;
mm[m, l] = rdot(A[m, k], B[k, l], k) / sqrt(len(k));
e[m, l] = exp(mm[m, l]); dvsr[m] = rsum(e[m, l], l); sm[m, l] = e[m, l] / dvsr[m];
attention[m, n] = rdot(sm[m, l], C[l, n], l);
attention.block(m:16); attention.tensorize(m:16, n:0, k:0, l:16);
dvsr.fuse_at(attention, l); e.fuse_at(attention, l); mm.fuse_at(e, l); sm.fuse_at(attention, l);
----
Func g, f; In A, B; SIn s; Var x, y; RVar z;
g[x, y] = rmax(A[x, y, z] * s, z) + rsum(A[x, y, z], z); f[x, y] = tanh(g[x, y] * B[y, x]) + floor(x / 2);
g.tensorize(y:8, z:4); f.block(x:4, y:8); f.tensorize(x:4, y:8); f.map(x:x1/2, y:y1/2, x1, y1); f.compile(); g.compile();
"""


def test_text_does_not_depend_on_the_hash_seed():
    texts = []
    for seed in ("0", "1", "4242"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", SAME_TEXT], input=PROGRAMS, env=env, capture_output=True, text=True, timeout=120, check=True)
        texts.append(done.stdout)
    assert texts[0] == texts[1] == texts[2] and texts[0].count("@triton.jit") >= 3
