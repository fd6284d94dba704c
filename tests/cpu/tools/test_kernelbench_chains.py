"""KernelBench's level 2: every text by the reference at small sizes against float64, a sample of the kernels and gradients in the interpreter."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "kernelbench"))

from problem import as_tuple, operator, problems, spec  # noqa: E402

from dtkernels.algebra.pipeline import prepare_algorithm  # noqa: E402
from dtkernels.runtime.reference.evaluator import evaluate  # noqa: E402

EPS = torch.finfo(torch.float32).eps
PROBLEMS = problems(2)
INTERPRETED = ("018", "030", "033", "055", "088", "098", "025")  #: one of each way that products are fused and summed
DIFFERENTIATED = ("018", "062", "098")


def named(number: str) -> str:
    return next(name for name in PROBLEMS if name.startswith(number))


def doubled(inputs):
    return tuple(t.double() if t.is_floating_point() else t for t in inputs)


def assert_near(got: torch.Tensor, truth: torch.Tensor, terms: int) -> None:
    """Within roundings of float32 of sums of so many terms, of values as large as the largest; normalization divides by a deviation."""
    assert got.shape == truth.shape
    largest = max(truth.abs().max().item(), 1.0)
    torch.testing.assert_close(got.double(), truth, rtol=0, atol=64 * EPS * terms**0.5 * largest)


def test_all_hundred_are_there():
    assert len(PROBLEMS) == 100 and {int(name[:3]) for name in PROBLEMS} == set(range(1, 101))


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_text_says_what_the_problem_computes(name):
    """The algorithm as it is lowered, after every rule of the algebra, in torch operations."""
    problem, wanted = PROBLEMS[name], spec(2, name)
    inputs = problem.tensors(problem.small, torch.float32, "cpu")
    truth = problem.reference(*doubled(inputs), *problem.scalars.values())
    prepared = prepare_algorithm(wanted.algorithm, wanted.outputs)
    tensors = {n: t for n, t in zip(problem.inputs, inputs) if n in prepared.inputs}
    (got,) = as_tuple(evaluate(prepared, tensors, dict(problem.scalars), wanted.outputs))
    assert_near(got, truth, 128)


@pytest.mark.parametrize("number", INTERPRETED)
def test_kernels_of_the_default_schedule(number):
    name = named(number)
    problem = PROBLEMS[name]
    inputs = problem.tensors(problem.small, torch.float32, "cpu", seed=1)
    got = operator(2, name)(*inputs, *problem.scalars.values())
    assert_near(got, problem.reference(*doubled(inputs), *problem.scalars.values()), 128)


@pytest.mark.parametrize("number", DIFFERENTIATED)
def test_gradients(number):
    name = named(number)
    problem = PROBLEMS[name]
    inputs = problem.tensors(problem.small, torch.float32, "cpu", seed=2)
    ours, exact = (tuple(t.detach().requires_grad_() for t in made) for made in (inputs, doubled(inputs)))
    result = operator(2, name)(*ours, *problem.scalars.values())
    truth = problem.reference(*exact, *problem.scalars.values())
    adjoint = torch.randn(result.shape, generator=torch.Generator().manual_seed(3))
    found = torch.autograd.grad(result, ours, adjoint)
    for got, wanted in zip(found, torch.autograd.grad(truth, exact, adjoint.double())):
        assert_near(got, wanted, 128 * max(1, result.numel() // got.numel()))
