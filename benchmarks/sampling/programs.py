"""The programs of tests/untuned_programs.py as the tuner's problems, and workers that know them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [p for p in (str(ROOT / "tests"),) if p not in sys.path]

import torch  # noqa: E402
from untuned_calls import DTYPES, operator  # noqa: E402
from untuned_program import Sizes, Untuned  # noqa: E402
from untuned_programs import PROGRAMS  # noqa: E402

import dtkernels  # noqa: E402
from dtkernels.lang.tuning_space import Shapes  # noqa: E402
from dtkernels.tuning.records.problems import TuningProblem, problems_of  # noqa: E402

PREFIX = "untuned_"  #: of the name that a program is registered under


def names(only: re.Pattern) -> tuple[str, ...]:
    """Return the programs in whose names ``only`` is found."""
    return tuple(name for name in PROGRAMS if only.search(name))


def problems(asked: Iterable[str], directions: Iterable[str]) -> Iterator[TuningProblem]:
    """Yield the timed sizes of programs, each forward and backward: the first size of every program first."""
    asked = tuple(asked)
    register_programs(asked)
    for i in range(max((len(PROGRAMS[name].sizes) for name in asked), default=0)):
        for name in (n for n in asked if i < len(PROGRAMS[n].sizes)):
            program = PROGRAMS[name]
            for dtype in program.dtypes:
                labels = _extents(name, program, program.sizes[i], DTYPES[dtype])
                for direction in (d for d in directions if d == "forward" or program.grad):
                    wanted = program.grad if direction == "backward" else ()
                    shapes = Shapes({label: (n,) for label, n in labels.items()}, {}, (dtype,), (direction,), wanted)
                    found = problems_of(PREFIX + name, [shapes])
                    yield next(w for w in found if w.group.direction == direction and not w.group.saved)


def _extents(name: str, program: Untuned, sizes: Sizes, dtype: torch.dtype) -> dict[str, int]:
    """Return the extents of all labels of the forward, also of those that the program's sizes do not name."""
    kinds = {name: program.kinds.get(name, "").partition(":")[0] for name in program.inputs}
    known = {"index": torch.int64, "sorted": torch.int64, "int8": torch.int8, "fp32": torch.float32}
    tensors = [torch.empty([sizes[x] for x in labels], device="meta", dtype=known.get(kinds[n], dtype)) for n, labels in program.inputs.items()]
    return dtkernels.explain(PREFIX + name, *tensors, *program.scalars, gpu="h200").forward.sizes


def register_programs(asked: Iterable[str]) -> None:
    """Register programs as ops of this process."""
    for name in asked:
        operator(name)


def make_knowing(index: int, make: Callable, asked: tuple[str, ...], *rest):
    """Make the handler of a worker process that knows the programs ``asked``."""
    register_programs(asked)
    return make(index, *rest)
