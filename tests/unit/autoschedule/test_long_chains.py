"""Chains of Funcs that each read the one before twice: written out, the last one has 2^n terms, and a rule that writes it out never ends."""

import pytest

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.algebra.rules.exponentials.max_subtraction import _exponents
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang.algorithm import Algorithm
from dtkernels.lang.parser import parse
from dtkernels.lang.schedule import Program

STEPS = 40


def chain(first: str, step: str, last: str, steps: int = STEPS) -> Algorithm:
    """Return a program of ``steps`` Funcs; ``step`` has the one before as ``$``."""
    labels = first[first.index("[") : first.index("]") + 1]
    lines = [first.replace("s[", "s0["), *(f"s{i + 1}{labels} = {step.replace('$', f's{i}')};" for i in range(steps))]
    funcs = ", ".join(f"s{i}" for i in range(steps + 1))
    return parse(f"Func {funcs}, f; In A; Var x; RVar y; " + " ".join(lines) + last.replace("$", f"s{steps}")).algorithm


CHAINS = {
    "Newton's steps on a number of each row": ("s[x] = rsum(A[x, y], y);", "$[x] - ($[x] * $[x] - 2) / (2 * $[x])", "f[x, y] = A[x, y] / $[x];"),
    "Newton's steps on each element": ("s[x, y] = A[x, y];", "$[x, y] - ($[x, y] * $[x, y] - 2) / (2 * $[x, y])", "f[x] = rsum($[x, y], y);"),
    "products of sums": ("s[x] = rsum(A[x, y], y) / len(y);", "$[x] * $[x]", "f[x] = rsum(A[x, y] * A[x, y], y) / len(y) - $[x] * $[x];"),
    "bisection": ("s[x] = rmax(A[x, y], y);", "$[x] + where(rsum(maximum(A[x, y] - $[x], 0), y) >= 1, 0.5, 0)", "f[x, y] = maximum(A[x, y] - $[x], 0);"),
}


@pytest.mark.parametrize("sizes", [{"x": 4096, "y": 4096}, {"x": 64, "y": 300000}], ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_a_long_chain_has_a_schedule_and_kernels(name, sizes):
    algorithm = prepare_algorithm(chain(*CHAINS[name]), ("f",))
    schedule = default_schedule(algorithm, ("f",), sizes, 2, target("h200"))
    assert {k for kernel in lower(Program(algorithm, schedule)) for k in kernel.writes} >= {"f"}


def test_each_exponent_of_a_chain_is_found_once():
    algorithm = chain("s[x, y] = A[x, y];", "$[x, y] + exp($[x, y]) * $[x, y]", "f[x] = rsum($[x, y], y);")
    found = [str(e) for e in _exponents(algorithm["f"].expr, algorithm)]
    assert sorted(found) == sorted(f"s{i}[x, y]" for i in range(STEPS))


@pytest.mark.parametrize("sizes", [{"x": 4096, "y": 4096}, {"x": 64, "y": 300000}], ids=str)
def test_a_chain_of_softmaxes_has_a_schedule_and_kernels(sizes):
    step = "exp($[x, y] - log(rsum(exp($[x, y]), y))) * $[x, y]"
    algorithm = prepare_algorithm(chain("s[x, y] = A[x, y];", step, "f[x, y] = $[x, y];", steps=7), ("f",))
    schedule = default_schedule(algorithm, ("f",), sizes, 2, target("h200"))
    assert lower(Program(algorithm, schedule))
