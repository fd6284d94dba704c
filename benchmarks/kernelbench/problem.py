"""Define what a problem of KernelBench is here: a DT file with the algorithm alone, and a declaration of sizes, inputs and reference.

A level has a folder of DT files, ``level1/019_relu.dt``, and a module that declares them, ``problems1.py``, with two dicts:
``PROBLEMS``, by the name of the DT file, and ``NOT_SAID``, by the same kind of name: why the language cannot express it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dtkernels.lang import expr as ex
from dtkernels.lang import parse
from dtkernels.lang.algorithm import Algorithm
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator
from dtkernels.runtime.reference.evaluator import extents

FOLDER = Path(__file__).resolve().parent
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}  #: absolute and relative, of the suite: every element against torch's own result

Sizes = dict[str, int]


@dataclass(frozen=True)
class Problem:
    """One problem. The DT text is in ``level<level>/<name>.dt``.

    ``reference`` is the problem in torch, in terms of the inputs and then the scalars of the DT file. Where the suite's module views
    a tensor otherwise (channels as groups of channels), the inputs have the shape of the DT file and the reference views them.
    ``inputs`` has one letter for each dimension; ``published`` and ``small`` have the size of each letter. ``kinds`` of inputs, all
    others are uniform in [0, 1) as in the suite:

    ``weight`` uniform within 1 / sqrt(of what follows the first dimension), ``bias`` uniform within 0.1, ``normal``, ``ones``, ``zeros``,
    ``index:v`` integers below v, ``mask`` truth values, ``sign`` -1 or 1, ``scaled`` uniform times one random number, ``softmax`` rows of
    probabilities, ``scaled softmax``, ``symmetric``, ``upper`` and ``lower`` triangular matrices, ``positive`` uniform in [0.5, 1.5).

    ``grad`` are the inputs that ``--backward`` differentiates: by default all that hold numbers; () where nothing is differentiable.
    ``flops`` counts the operations of products, where those that the text's products have along all of their labels are too many: half
    of a masked product is nothing. ``extra`` is the error beyond the dtype's that small sizes are allowed, as a
    factor, with its reason in a comment beside it.
    """

    reference: Callable
    inputs: dict[str, str]
    published: Sizes
    small: Sizes
    kinds: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    grad: tuple[str, ...] | None = None
    flops: Callable[[Sizes], float] | None = None
    extra: float = 1.0

    def shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """Return the shape of each input."""
        return {name: tuple(sizes[label] for label in labels) for name, labels in self.inputs.items()}

    def dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of an input where the others are of ``dtype``."""
        kind = self.kinds.get(name, "")
        return torch.int64 if kind.startswith("index:") else torch.bool if kind == "mask" else dtype

    def differentiated(self) -> tuple[str, ...]:
        """Return the inputs that have a gradient."""
        floating = (name for name in self.inputs if self.dtype(name, torch.float32) is torch.float32)
        return tuple(floating) if self.grad is None else self.grad

    def tensors(self, sizes: Sizes, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Return random inputs; the same for the same seed and device."""
        source = torch.Generator(device).manual_seed(seed)
        return tuple(_random(self.kinds.get(name, ""), shape, sizes, source).to(self.dtype(name, dtype)) for name, shape in self.shapes(sizes).items())

    def bytes(self, sizes: Sizes, itemsize: int) -> int:
        """Return the bytes of the inputs and of the results, each once."""
        moved = sum(math.prod(s) * self.dtype(n, DTYPES["fp32" if itemsize == 4 else "bf16"]).itemsize for n, s in self.shapes(sizes).items())
        with torch.no_grad():
            inputs = [torch.empty(s, dtype=self.dtype(n, torch.float32), device="meta") for n, s in self.shapes(sizes).items()]
            return moved + sum(t.numel() * (itemsize if t.is_floating_point() else t.itemsize) for t in as_tuple(self.reference(*inputs, *self.scalars.values())))


def _random(kind: str, shape: tuple[int, ...], sizes: Sizes, source: torch.Generator) -> torch.Tensor:
    """Return a random tensor of one of the kinds of ``Problem``."""
    at = {"device": source.device, "generator": source}
    if kind.startswith("index:"):
        return torch.randint(sizes[kind.removeprefix("index:")], shape, **at)
    if kind in ("mask", "sign"):
        drawn = torch.randint(2, shape, **at)
        return drawn if kind == "mask" else drawn * 2.0 - 1
    if kind in ("ones", "zeros"):
        return torch.full(shape, float(kind == "ones"), device=source.device)
    if kind == "normal":
        return torch.randn(shape, **at)
    drawn = torch.rand(shape, **at)
    if kind.startswith("scaled"):
        drawn *= torch.rand((), **at)
    if kind.endswith("softmax"):
        return torch.softmax(drawn, -1)
    if kind in ("weight", "bias"):
        return (2 * drawn - 1) * (0.1 if kind == "bias" else math.prod(shape[1:]) ** -0.5)
    changed = {"symmetric": lambda t: (t + t.mT) / 2, "upper": torch.triu, "lower": torch.tril, "positive": lambda t: t + 0.5}
    return changed[kind](drawn) if kind in changed else drawn


def as_tuple(result) -> tuple:
    """Return the results of a call as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def products(*labels: str, times: float = 2.0) -> Callable[[Sizes], float]:
    """Return a count of the operations of products along all of the labels, one letter each."""
    return lambda sizes: times * math.prod(sizes[label] for group in labels for label in group)


def operations(problem: Problem, algorithm: Algorithm, sizes: Sizes) -> float:
    """Return the operations of a problem's products: as declared, else along all labels of each product of its text."""
    if problem.flops is not None:
        return problem.flops(sizes)
    tensors = {name: torch.empty(shape, device="meta") for name, shape in problem.shapes(sizes).items()}
    extent = extents(algorithm, tensors)
    dots = [n for d in algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Dot)]
    return sum(2.0 * math.prod(extent[x] for x in {*ex.free_labels(n.left), *ex.free_labels(n.right), *n.labels}) for n in dots)


def levels() -> tuple[int, ...]:
    """Return the levels that are declared here."""
    return tuple(sorted(int(p.stem.removeprefix("problems")) for p in FOLDER.glob("problems?.py")))


def problems(level: int) -> dict[str, Problem]:
    """Return the problems of a level, by name."""
    return importlib.import_module(f"problems{level}").PROBLEMS


def not_said(level: int) -> dict[str, str]:
    """Return why problems of a level cannot be expressed, by name."""
    return importlib.import_module(f"problems{level}").NOT_SAID


def text(level: int, name: str) -> str:
    """Return the DT text of a problem."""
    return (FOLDER / f"level{level}" / f"{name}.dt").read_text(encoding="utf-8")


def spec(level: int, name: str) -> Spec:
    """Return a problem as a spec without schedules: each call takes the default schedule. Raises DTError where the text is refused."""
    path = FOLDER / f"level{level}" / f"{name}.dt"
    return Spec(f"kernelbench_{level}_{name}", f"Problem {name} of KernelBench's level {level}.", parse(text(level, name), str(path)), source=str(path))


def operator(level: int, name: str) -> Operator:
    """Return a problem as a differentiable op. Raises DTError where the text is refused."""
    return Operator(spec(level, name))
