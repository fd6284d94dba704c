"""Calls of the programs of untuned_programs.py: their op, inputs, results, and how far from float64 those may be."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from untuned_program import Sizes, Untuned
from untuned_programs import PROGRAMS

import dtkernels

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def operator(name: str):
    """The op of a program; raises DTError where the program is refused."""
    op = f"untuned_{name}"
    text = re.sub(r"\bout\b", op, PROGRAMS[name].text)
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / f"{op}.yaml"
        spec.write_text(f"op: {op}\ndoc: |\n  A program that nobody tuned.\nalgorithm: |\n  {text}\n")
        return dtkernels.register(spec)


def tensors(program: Untuned, sizes: Sizes, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """The inputs, the same in every run."""
    torch.manual_seed(0)
    made = []
    for name, labels in program.inputs.items():
        shape, kind = [sizes[label] for label in labels], program.kinds.get(name, "")
        if kind.startswith("index:"):
            made.append(torch.randint(1, sizes[kind.removeprefix("index:")], shape, device=device))
        elif kind.startswith("sorted:"):
            made.append(torch.randint(sizes[kind.removeprefix("sorted:")], shape, device=device).sort().values)
        elif kind == "int8":
            made.append(torch.randint(-127, 128, shape, device=device, dtype=torch.int8))
        else:
            x = torch.randn(shape, device=device)
            x[x == 0] = 1.0  # where maximum(a, 0) has several derivatives
            x = x.abs() if kind == "positive" else x * 0.05 if kind in ("small", "fp32") else x
            made.append(x.to(torch.float32 if kind == "fp32" else dtype))
    return tuple(made)


def as_tuple(result) -> tuple:
    return result if isinstance(result, tuple) else (result,)


@dataclass
class Call:
    """One program at one size: its inputs, and in a backward (``wanted``) the inputs that it differentiates and the outputs' gradients."""

    name: str
    sizes: Sizes
    dtype: torch.dtype
    inputs: tuple[torch.Tensor, ...]
    scalars: tuple[float, ...]
    wanted: tuple[int, ...]
    grads: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, name: str, sizes: Sizes, dtype: torch.dtype, backward: bool, device: str) -> Call:
        program = PROGRAMS[name]
        scalars = program.small_scalars if sizes is program.small and program.small_scalars else program.scalars
        inputs = tensors(program, sizes, dtype, device)
        if not backward:
            return cls(name, sizes, dtype, inputs, scalars, (), ())
        with torch.no_grad():
            grads = tuple(torch.randn_like(o) for o in as_tuple(program.eager(*inputs, *scalars)))
        return cls(name, sizes, dtype, inputs, scalars, tuple(list(program.inputs).index(g) for g in program.grad), grads)

    def results(self, fn: Callable) -> list[torch.Tensor]:
        """The outputs of ``fn``, or the gradients."""
        if not self.wanted:
            with torch.no_grad():
                return list(as_tuple(fn(*self.inputs, *self.scalars)))
        leaves = [t.detach().requires_grad_(i in self.wanted) for i, t in enumerate(self.inputs)]
        return list(torch.autograd.grad(as_tuple(fn(*leaves, *self.scalars)), [leaves[i] for i in self.wanted], self.grads))

    def truth(self) -> list[torch.Tensor]:
        """The same by torch in float64."""
        inputs, grads = (tuple(t.double() if t.is_floating_point() else t for t in ts) for ts in (self.inputs, self.grads))
        return Call(self.name, self.sizes, torch.float64, inputs, self.scalars, self.wanted, grads).results(PROGRAMS[self.name].eager)


@dataclass
class Errors:
    """Of all outputs or gradients the largest: the norm of the difference over that of the truth, and the worst element's over its
    own size and the root mean square of all."""

    norm: float
    worst: float

    @classmethod
    def of(cls, got: list[torch.Tensor], truth: list[torch.Tensor]) -> Errors:
        norms, worst = [0.0], [0.0]
        for g, t in zip(got, truth, strict=True):
            if g.shape != t.shape:
                raise ValueError(f"shape {tuple(g.shape)}, expected {tuple(t.shape)}")
            off = (g.double() - t).abs()
            norms.append((off.norm() / t.norm().clamp_min(1e-300)).item())
            worst.append((off / (t.abs() + t.square().mean().sqrt()).clamp_min(1e-300)).max().item())
        return cls(*(math.nan if any(map(math.isnan, e)) else max(e) for e in (norms, worst)))

    def allowed(self, eager: Errors, call: Call) -> bool:
        """Within a few roundings to the dtype and those of its longest sum in float32, or near what torch's own form is off."""
        tolerance = torch.finfo(call.dtype).eps + 4 * torch.finfo(torch.float32).eps * math.sqrt(max(call.sizes.values()))
        return self.norm <= max(2 * tolerance, 2 * eager.norm) and self.worst <= max(16 * tolerance, 4 * eager.worst)


def runs(name: str) -> dict[str, int]:
    """How often each path of a program ran, forward and backward together."""
    found: dict[str, int] = {}
    for op in (f"untuned_{name}", f"untuned_{name} backward"):
        for path, count in dtkernels.paths().get(op, {}).items():
            found[path] = found.get(path, 0) + count
    return found


@contextmanager
def in_fixed_order() -> Iterator[None]:
    """No sum is made of atomic additions."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check(call: Call, op: Callable, times: int = 1) -> None:
    """Assert that a generated kernel ran, that it is right, and that it gives the same bits each time where sums are asked for in a fixed order."""
    before = runs(call.name).get("reference", 0)
    got = call.results(op)
    if times > 1:
        with in_fixed_order():
            first, *others = (call.results(op) for _ in range(times))
        same = all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
        assert same, f"{call.name} {call.sizes}: other bits in another run"
    assert runs(call.name)["reference"] == before, f"{call.name} {call.sizes}: by the reference"
    truth = call.truth()
    ours, eager = (Errors.of(r, truth) for r in (got, call.results(PROGRAMS[call.name].eager)))
    assert ours.allowed(eager, call), f"{call.name} {call.sizes} {call.dtype}: {ours}, torch's own form {eager}"
