"""Random programs: every rule of the algebra keeps their values, and derived gradients are those of torch.autograd."""

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
import oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtkernels.algebra import pipeline
from dtkernels.algebra.rules.canonicalize import mean_to_sum
from dtkernels.algebra.rules.constant_folding import bind_parameters, drop_unused
from dtkernels.lang import Algorithm, Program, Schedule, parse
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator
from dtkernels.runtime.reference.evaluator import evaluate

CASES = 250
LABELS = ("x", "y", "z")
INPUTS = {"A": "xy", "B": "yz", "C": "xz", "u": "x", "v": "y", "w": "z"}
SETTINGS = settings(deadline=None, max_examples=CASES, derandomize=True, database=None, print_blob=False,
                    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example])  # fmt: skip


class Builder:
    """Text of one random program over three labels, rich in what the rules look for."""

    def __init__(self, draw, differentiable: bool):
        self.draw, self.differentiable = draw, differentiable
        self.square = draw(st.booleans())
        self.sizes = {label: draw(st.integers(1, 4)) for label in LABELS}
        if self.square:
            self.sizes = dict.fromkeys(LABELS, self.sizes["x"])
        self.funcs: dict[str, tuple[str, str]] = {}  #: name -> labels, definition

    def pick(self, options):
        return self.draw(st.sampled_from(list(options)))

    def chance(self, one_in: int) -> bool:
        return self.draw(st.integers(1, one_in)) == one_in

    def some(self, labels: str, least: int = 0) -> str:
        if not labels:
            return ""
        return "".join(self.draw(st.lists(st.sampled_from(sorted(labels)), min_size=least, max_size=len(labels), unique=True)))

    def func(self, labels: str, text: str) -> str:
        """Define a Func; how to access it."""
        name = f"f{len(self.funcs)}"
        index = ", ".join(labels)
        self.funcs[name] = labels, f"{name}[{index}] = {text};"
        return f"{name}[{index}]"

    def index(self, label: str, labels: str) -> str:
        """``label``, now and then a neighbour, or another one where all extents are equal."""
        if self.square and self.chance(8):
            return self.pick(labels)
        return self.pick([f"{label} + 1", f"{label} - 1", f"{label} / 2"]) if self.chance(10) else label

    def access(self, labels: str) -> str:
        known = {**INPUTS, **{f: own for f, (own, _) in self.funcs.items()}}
        fits = [t for t, own in known.items() if own and (set(own) <= set(labels) or self.square and labels)]
        if not fits:
            return self.pick(["s", "0.5", "2"])
        tensor = self.pick(fits)
        return f"{tensor}[{', '.join(self.index(i if i in labels else self.pick(labels), labels) for i in known[tensor])}]"

    def expr(self, labels: str, depth: int = 2) -> str:
        if not depth or self.chance(5):
            return self.access(labels) if labels and not self.chance(6) else self.pick(["s", "0.5", "2", "0", "1"])
        free = "".join(label for label in LABELS if label not in labels)
        kinds = ["binary", "binary", "unary", "where"] + ["reduce", "reduce", "dot", "softmax", "logsumexp", "moment"] * bool(free)
        return getattr(self, self.pick(kinds))(labels, depth - 1)

    def binary(self, labels: str, depth: int) -> str:
        a, b = self.expr(labels, depth), self.expr(labels, depth)
        op = self.pick(["+", "-", "*", "*", "/", "maximum", "minimum"])
        return f"{op}({a}, {b})" if len(op) > 1 else f"({a}) / (0.5 + abs({b}))" if op == "/" else f"(({a}) {op} ({b}))"

    def unary(self, labels: str, depth: int) -> str:
        a = self.expr(labels, depth)
        safe = ["sqrt", "rsqrt", "log", "log2", "log1p"]
        fn = self.pick(["-", "exp", "exp", "exp2", "tanh", "tanh", "tanh", "tanh", "sigmoid", "erf", "abs", "sin", "cos", "expm1", *safe] + ["floor", "round", "sign"] * (not self.differentiable))
        if fn == "tanh" and self.chance(2):
            return f"{self.pick(['', '0.25 * '])}(1 {self.pick('+-')} tanh(0.5 * {a}))"
        return f"{fn}(0.5 + abs({a}))" if fn in safe else f"{fn}(tanh({a}))" if fn.startswith("exp") and self.chance(2) else f"{fn}({a})"

    def where(self, labels: str, depth: int) -> str:
        left = self.pick(labels) if labels and self.chance(2) else self.expr(labels, 0)
        condition = f"{left} {self.pick(['<', '<=', '>', '=='])} {self.expr(labels, 0)}"
        return f"where({condition}, {self.expr(labels, depth)}, {self.expr(labels, depth)})"

    def over(self, labels: str) -> str:
        return self.some("".join(label for label in LABELS if label not in labels), 1)

    def reduce(self, labels: str, depth: int) -> str:
        over = self.over(labels)
        return f"{self.pick(['rsum', 'rsum', 'rmax', 'rmin', 'rmean'])}({self.expr(labels + over, depth)}, {', '.join(over)})"

    def dot(self, labels: str, depth: int) -> str:
        over = self.over(labels)

        def side() -> str:
            return f"({self.access(labels + over)}) {self.pick('*/')} (1.5 + tanh({self.access(self.some(labels + over, 1))}))"

        return f"rdot({side()}, {side()}, {', '.join(over)})"

    def parts(self, labels: str) -> tuple[bool, str, str]:
        """Whether to define a Func for a part, its labels, those to reduce. Without one a bound label must stay in sight."""
        apart = self.chance(2)
        return apart, self.some(labels) if apart else labels, self.over(labels)

    def exponential(self, labels: str) -> str:
        a = self.expr(labels, 1)
        return f"exp(where({self.pick(labels)} <= {self.pick(labels)}, {a}, -inf))" if self.chance(3) else f"exp({a})"

    def softmax(self, labels: str, depth: int) -> str:
        """A quotient of sums of exponentials, its parts Funcs or not; now and then one that is no softmax."""
        apart, own, over = self.parts(labels)
        e = self.exponential(own + over)
        if apart:
            e = self.func(own + over, e)
        total = f"rsum({e}, {', '.join(over)})"
        value = self.access(labels + over)
        if self.chance(2):
            return f"{self.pick(['rsum', 'rmax'])}({e} * {value}, {', '.join(over)}) / {total}"
        total = self.func(own, total)
        if own and self.chance(6):
            total = total.replace("[" + own[0], f"[{self.index(own[0], labels)}")
        guarded = f"where({total} == 0, 0, 1 / {total})"
        return self.pick([f"rdot({e} / {total}, {value}, {', '.join(over)})", f"rdot({e}, {value}, {', '.join(over)}) * {guarded}"])

    def logsumexp(self, labels: str, depth: int) -> str:
        apart, own, over = self.parts(labels)
        total = f"rsum(exp({self.expr(own + over, 1)}), {', '.join(over)})"
        return f"log({self.func(own, total) if apart else total})"

    def moment(self, labels: str, depth: int) -> str:
        """A covariance about 0 less the product of the means, or almost that."""
        apart, own, over = self.parts(labels)
        a = self.expr(own + over, 1)
        b = a if self.chance(2) else self.expr(own + over, 1)
        f, g = (self.func(own + over, t) for t in (a, b)) if apart else (f"({a})", f"({b})")
        by = ", ".join(over)
        means = [f"rmean({t}, {by})" for t in (f, g)]
        means = [self.func(own, m) for m in means] if self.chance(2) else means
        return self.pick([f"rmean({f} * {g}, {by}) - {means[0]} * {means[1]}", f"rmean({f} * {f}, {by}) - {means[1]} * {means[0]}"])

    def text(self) -> str:
        for _ in range(self.draw(st.integers(1, 3))):
            labels = self.some("xyz", 1)
            self.func(labels, self.expr(labels))
        labels = self.some("xyz", 1)
        rest = [label for label in LABELS if label not in labels]
        everything = "u[x] * v[y] * w[z]"  # gives every label an extent
        self.func(labels, f"{self.expr(labels, 3)} + {f'rsum({everything}, ' + ', '.join(rest) + ')' if rest else everything}")
        body = "\n".join(d for _, d in self.funcs.values())
        own = [label for label in LABELS if any(label in labels for labels, _ in self.funcs.values())]
        reduced = [label for label in LABELS if label not in own]
        declared = {
            "Func": self.funcs, "In": [t for t in INPUTS if f"{t}[" in body], "SIn": ["s"] if re.search(r"\bs\b", body) else [],
            "Var": own, "RVar": reduced,
        }  # fmt: skip
        return "\n".join([*(f"{word} {', '.join(names)};" for word, names in declared.items() if names), body])


@dataclass(frozen=True)
class Case:
    algorithm: Algorithm
    sizes: tuple[int, ...]
    seed: int

    def __repr__(self) -> str:
        return f"\n{self.algorithm}\n# {self.sizes}, seed {self.seed}\n"

    def _repr_pretty_(self, printer, cycle):
        printer.text(repr(self))

    def inputs(self) -> dict[str, np.ndarray]:
        extent, rng = dict(zip(LABELS, self.sizes)), np.random.default_rng(self.seed)
        return {name: rng.uniform(-1.5, 1.5, [extent[label] for label in own]) for name, own in INPUTS.items()}


@st.composite
def cases(draw, differentiable: bool = False) -> Case:
    builder = Builder(draw, differentiable)
    return Case(parse(builder.text()).algorithm, tuple(builder.sizes.values()), draw(st.integers(0, 9)))


counts: Counter = Counter()


def stages(algorithm: Algorithm, outputs: tuple[str, ...]) -> list[tuple[str, Algorithm]]:
    return [(rule.name, after) for rule, after in pipeline.stages(algorithm, outputs)]


def values(algorithm: Algorithm, case: Case) -> dict[str, oracle.Value]:
    """Every Func by the brute force of oracle.py, in float64, and how far float32 would be off."""
    inputs = {name: array for name, array in case.inputs().items() if name in case.algorithm.inputs}
    run = oracle._Evaluation(case.algorithm, inputs, {"s": 0.75}, {}, "float32")
    run.algorithm = algorithm  # its labels have the extents that the program as written gives them
    shapes = {name: array.shape for name, array in inputs.items()}
    for label, formula in algorithm.formulas:  # of labels that rules made
        run.sizes.setdefault(label, oracle._size(formula, run.sizes, shapes, {}))
    with np.errstate(all="ignore"):
        return run.run()


def differences(got: oracle.Value, want: oracle.Value) -> list[str]:
    """Where two float64 evaluations differ by more than float64 rounding, which is what float32 may be off, scaled down.

    The rules are exact for real numbers: what is not finite (a division by 0, a row without a term) need only stay so.
    """
    with np.errstate(all="ignore"):
        bound = (got.e + want.e) * 2.0**-29 * 8 + 1e-300
        unknown = np.isnan(bound) | (want.e > 1e-2 * (1 + np.abs(want.v)))  # a comparison of equal numbers, decided by rounding
        same = (~np.isfinite(got.v) & ~np.isfinite(want.v)) | (np.abs(got.v - want.v) <= bound)
    return [f"{got.v[tuple(i)]!r}, not {want.v[tuple(i)]!r} +- {bound[tuple(i)]:.2g}" for i in np.argwhere(~(same | unknown))]


@SETTINGS
@given(cases())
@pytest.mark.filterwarnings("ignore")
def test_every_rule_keeps_every_value(case):
    output = case.algorithm.definitions[-1].name
    want, before = values(case.algorithm, case)[output], case.algorithm
    counts["compared"] += bool(oracle.compared(want))
    for rule, after in stages(case.algorithm, (output,)):
        if after.definitions != before.definitions:
            counts[rule] += 1
            wrong = differences(values(after, case)[output].to(want.labels), want)
            assert not wrong, f"{rule}: {wrong[0]}\n{before}\n-->\n{after}"
        before = after
    assert parse(str(drop_unused(before))).algorithm == drop_unused(before)


def test_rules_were_put_to_the_test():
    """The test before this one says little if no rule finds anything to do. Runs after it."""
    if not counts:
        pytest.skip("the property test did not run")
    assert counts["compared"] > CASES * 0.8, counts
    for rule in ("bind_parameters", "mean_to_sum", "tanh_to_sigmoid", "center_moments", "hoist_invariant_factors", "fold_invariant_reductions",
                 "extract_nested_reductions", "subtract_maxima"):
        assert counts[rule] >= 10, counts


# -- gradients ------------------------------------------------------------------------------------------------------------


def by_autograd(case: Case, tensors: dict[str, torch.Tensor], adjoint: torch.Tensor) -> list[torch.Tensor]:
    """Gradients by torch through the program as written, evaluated in float64."""
    plain = mean_to_sum(bind_parameters(case.algorithm))
    leaves = {n: t.detach().requires_grad_() for n, t in tensors.items()}
    (result,) = evaluate(plain, {n: leaves[n] for n in plain.inputs}, {n: leaves[n] for n in plain.scalars}, (plain.definitions[-1].name,))
    return list(torch.autograd.grad(result, list(leaves.values()), adjoint, materialize_grads=True))


@SETTINGS
@given(cases(differentiable=True))
@pytest.mark.filterwarnings("ignore")
def test_derived_gradients_are_those_of_autograd(case):
    tensors = {n: torch.from_numpy(a) for n, a in case.inputs().items() if n in case.algorithm.inputs}
    tensors |= {n: torch.tensor(0.75, dtype=torch.float64) for n in case.algorithm.scalars}
    variant = Operator(Spec("random", "", Program(case.algorithm, Schedule(())))).variant((), frozenset(), 0)
    used = {n: t.clone().requires_grad_() for n, t in tensors.items() if n in variant.algorithm.inputs + variant.algorithm.scalars}
    (result,) = variant.run("random", {n: used[n] for n in variant.algorithm.inputs}, {n: used[n] for n in variant.algorithm.scalars})
    if not result.isfinite().all():  # what a NaN contributes is anyone's choice
        return
    torch.manual_seed(case.seed)
    adjoint = torch.randn_like(result)
    ours = dict(zip(used, torch.autograd.grad(result, list(used.values()), adjoint, materialize_grads=True)))
    truth = by_autograd(case, tensors, adjoint)
    nearby = [by_autograd(case, {n: t * (1 + 1e-11 * torch.randn_like(t)) for n, t in tensors.items()}, adjoint) for _ in range(2)]
    scale = max((t[t.isfinite()].abs().max().item() for t in truth if t.isfinite().any()), default=0.0)
    for at, (name, want) in enumerate(zip(tensors, truth)):
        noise = sum((other[at] - want).abs() for other in nearby)  # large where a kink is near or the sum cancels
        bound = 1e-10 * (1 + scale) + 10 * noise
        got = ours.get(name, torch.zeros_like(want))
        wrong = want.isfinite() & ~((got - want).abs() <= bound) & ~noise.isnan()
        counts["gradients"] += int(want.isfinite().sum())
        assert not wrong.any(), f"{name}: {got} not {want}\n{variant.pair(tuple(used)).backward.plain}"


def test_gradients_were_compared():
    """Runs after the test before this one."""
    if "gradients" not in counts:
        pytest.skip("the property test did not run")
    assert counts["gradients"] > 10 * CASES
