"""Check problems without a GPU: values at small sizes in Triton's interpreter or by the reference, and the default schedule's
kernels at the published sizes, compiled for a GPU that need not be there.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import tempfile
import warnings
from dataclasses import dataclass, field, replace

import torch
from problem import DTYPES, Problem, as_tuple, operations, operator, problems

from dtkernels.autoschedule.cost.coefficients import rates_of
from dtkernels.autoschedule.cost.outline import Known
from dtkernels.autoschedule.cost.predicted_time import predicted_time
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import Target
from dtkernels.lang.algorithm import with_operands
from dtkernels.lang.errors import error_line
from dtkernels.lang.expr import Cast
from dtkernels.lang.schedule import Program
from dtkernels.runtime.bind.variant import Variant
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import KernelLaunch, build, record_launches

GRID = (2**31 - 1, 65535, 65535)  #: programs of a launch along each axis
SPILLED = 64  #: bytes of a thread's stack from which on a kernel is said to spill
TRIPLED = 6  #: times as many operations as 16-bit products: three products in TF32, each at half the rate
LONG = 28.0  #: percent of the limit below which the predicted time is called long


@dataclass
class Checked:
    """What was found of one problem: its kernels, its predicted time, and everything that is wrong."""

    kernels: list[str] = field(default_factory=list)
    microseconds: float = math.nan
    limit: float = math.nan  #: microseconds that memory or the matrix units need
    wrong: list[str] = field(default_factory=list)

    @property
    def long(self) -> bool:
        """Return whether the predicted time is far above the limit."""
        return self.limit < LONG / 100 * self.microseconds

    def __str__(self) -> str:
        share = f"{100 * self.limit / self.microseconds:3.0f}% of the limit" if self.limit > 0 else "with gradients"
        said = f"predicted {self.microseconds:9.1f} us, {share}{' (long)' if self.long else ''}; {len(self.kernels)} kernels: {', '.join(self.kernels)}"
        return "; ".join([said, *self.wrong]) if self.kernels else "; ".join(self.wrong)


def error_allowed(problem: Problem, truth: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return how far each element may be from float64: roundings of the dtype and of a sum as long as the sizes allow, in float32."""
    longest = math.prod(sorted(problem.small.values())[-3:])
    tolerance = 4 * torch.finfo(dtype).eps + 8 * torch.finfo(torch.float32).eps * math.sqrt(longest)
    return problem.extra * tolerance * (truth.abs() + truth.square().mean().sqrt())


def check_values(level: int, name: str, dtype: str = "fp32", seed: int = 0) -> str:
    """Run a problem at its small sizes; return what is wrong, "" where nothing is."""
    problem = problems(level)[name]
    inputs = problem.tensors(problem.small, DTYPES[dtype], "cpu", seed)
    got = as_tuple(operator(level, name)(*inputs, *problem.scalars.values()))
    truth = as_tuple(problem.reference(*(t.double() if t.is_floating_point() else t for t in inputs), *problem.scalars.values()))
    for ours, expected in zip(got, truth, strict=True):
        if ours.shape != expected.shape:
            return f"shape {tuple(ours.shape)}, expected {tuple(expected.shape)}"
        if not expected.is_floating_point():
            wrong = ours != expected
        else:
            wrong = ~((ours.double() - expected).abs() <= error_allowed(problem, expected, DTYPES[dtype]))
        if wrong.any():
            return f"{int(wrong.sum())} of {wrong.numel()} elements are wrong, by up to {(ours.double() - expected.double()).abs().max().item():.2g}"
    return ""


@dataclass(frozen=True)
class Planned:
    """The default schedule of a problem at its published sizes, and the call that it is for."""

    problem: Problem
    variant: Variant
    program: Program
    values: tuple
    types: object  #: bytes of an element of every input, or the dtype of each
    sizes: dict[str, int]
    uniform: bool


def planned(level: int, name: str, dtype: str, target: Target, backward: bool = False) -> list[Planned]:
    """Return what a call at the published sizes would run on ``target``; with ``backward``, forward with what it saves, then backward.

    Raises DTError where it is refused.
    """
    problem = problems(level)[name]
    shapes = problem.shapes(problem.published)
    tensors = [torch.empty(s, dtype=problem.dtype(n, DTYPES[dtype]), device="meta") for n, s in shapes.items()]
    call = operator(level, name).bind((*tensors, *problem.scalars.values()), {})
    bound, scalars = call.fitted.tensors, call.scalars
    if not backward:
        return [_plan(problem, call.variant, bound, scalars, target)]
    pair = call.variant.pair_for(problem.differentiated(), bound)
    sizes, made = pair.forward.signature.extents(bound), {}
    for o in pair.forward.outputs:
        d = pair.forward.algorithm[o]
        own = torch.float32 if isinstance(d.expr, Cast) and d.expr.dtype == "fp32" else pair.forward.signature.result_dtype(bound)
        made[o] = torch.empty([sizes[x] for x in d.labels], dtype=own, device="meta")
    known = {**bound, **made, **{adjoint: made[o] for o, adjoint in pair.gradient.adjoints.items()}}
    inputs = {n: known[n] for n in pair.backward.signature.inputs}
    rest = {n: scalars[n] for n in pair.backward.signature.scalars}
    return [_plan(problem, pair.forward, bound, scalars, target), _plan(problem, pair.backward, inputs, rest, target)]


def _plan(problem: Problem, variant: Variant, bound: dict[str, torch.Tensor], scalars: dict[str, object], target: Target) -> Planned:
    dispatch = variant.dispatch
    types = dispatch.types(bound)
    program = dispatch.programs.plan(dispatch.choose(bound, target), types, target).program
    integral = frozenset(n for n, t in bound.items() if not t.is_floating_point())
    program = replace(program, algorithm=replace(program.algorithm, integral=integral))
    return Planned(problem, variant, program, (*bound.values(), *scalars.values()), types, variant.signature.extents(bound), not variant.signature.mixed(bound))


def limit(plan: Planned, dtype: str, target: Target) -> float:
    """Return the microseconds that memory needs for inputs and results, or the matrix units for the products, whichever are more."""
    moved = plan.problem.bytes(plan.problem.published, DTYPES[dtype].itemsize) / target.bandwidth * 1e6
    rates = rates_of(target.arch)[0]
    wide = max(rates.wide_rate, rates.rate / TRIPLED)
    rate = (rates.rate if dtype == "bf16" else wide) * target.multiprocessors
    return max(moved, operations(plan.problem, plan.variant.algorithm, plan.problem.published) / rate)


def check_schedule(level: int, name: str, dtype: str, target: Target, compiled: bool = True, backward: bool = False) -> Checked:
    """Plan a problem at its published sizes, and compile its kernels unless told not to."""
    found = Checked()
    try:
        for plan in planned(level, name, dtype, target, backward):
            _check_plan(found, plan, (name, dtype, target), compiled)
    except Exception as error:
        found.wrong.append(f"refused: {error_line(error, 300)}")
    return found


def _check_plan(found: Checked, plan: Planned, call: tuple[str, str, Target], compiled: bool) -> None:
    name, dtype, target = call
    source = emit(plan.program, "call", target, plan.uniform)
    launches = record_launches(load_module(source, f"{name}_{dtype}"), "call", plan.values)
    algorithm = with_operands(plan.program.algorithm, plan.program.schedule.subjects())
    predicted = predicted_time(str(plan.program.schedule), Known.of(algorithm, plan.variant.outputs), plan.sizes, DTYPES[dtype].itemsize, target)
    found.limit = limit(plan, dtype, target) if math.isnan(found.limit) else math.nan  # of a problem as it is asked for, and not of its gradients
    found.microseconds = predicted if math.isnan(found.microseconds) else found.microseconds + predicted
    for launch in launches:
        found.kernels.append(f"{launch.kernel.__name__} {'x'.join(map(str, launch.grid))}")
        found.wrong += _wrong_launch(launch, target, compiled)


def _wrong_launch(launch: KernelLaunch, target: Target, compiled: bool) -> list[str]:
    """Return what is wrong with one kernel: its grid, or its machine code."""
    wrong = []
    if any(n > most for n, most in zip(launch.grid, GRID)):
        wrong.append(f"grid {launch.grid}")
    if not compiled:
        return wrong
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            binary = build(launch, target)
    except Exception as error:
        return [*wrong, f"{launch.kernel.__name__} does not compile: {error_line(error)}"]
    if binary.metadata.shared > target.shared_bytes:
        wrong.append(f"{launch.kernel.__name__} takes {binary.metadata.shared} bytes of shared memory of {target.shared_bytes}")
    registers, stack = usage(binary)
    if stack > SPILLED:
        wrong.append(f"{launch.kernel.__name__} spills: {registers} registers, {stack} bytes of stack")
    return wrong


def usage(binary) -> tuple[int, int]:
    """Return the registers and the bytes of stack of a thread of a compiled kernel, as its binary says."""
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return tuple(int(re.search(rf"{what}:(\d+)", text)[1]) for what in ("REG", "STACK"))  # type: ignore[index, return-value]
