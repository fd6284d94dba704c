"""Cases: a random program and the tensors to call it with, each made from one number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from random_draws import Draws

from dtkernels.lang import Program

SCALARS = {"s": 0.75, "t": -1.25, "o": 2}  #: o is an integer: it stands in indices and masks


@dataclass(frozen=True)
class Input:
    """A tensor to be drawn: integers from ``low`` to ``high``, both included, or numbers between them."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    low: float = -1.5
    high: float = 1.5

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} {self.layout}, {self.low:g} to {self.high:g}"

    def tensor(self, seed: int) -> torch.Tensor:
        """The tensor; a slice has a start that is not its storage's, and steps of 2."""
        generator = torch.Generator().manual_seed(seed)
        match self.layout:
            case "transposed":
                return self._drawn(tuple(reversed(self.shape)), generator).permute(*reversed(range(len(self.shape))))
            case "sliced":
                return self._drawn(tuple(2 * n + 1 for n in self.shape), generator)[tuple(slice(1, None, 2) for _ in self.shape)]
            case "padded":  # rows of a wider tensor
                wide = self._drawn((*self.shape[:-1], self.shape[-1] + 3), generator)
                return wide[..., 1 : 1 + self.shape[-1]]
            case "expanded":
                return self._drawn((1, *self.shape[1:]), generator).expand(self.shape)
            case "expanded last":
                return self._drawn((*self.shape[:-1], 1), generator).expand(self.shape)
        return self._drawn(self.shape, generator)

    def _drawn(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        if self.dtype == torch.bool:
            return torch.rand(shape, generator=generator) < 0.6
        if self.dtype.is_floating_point:
            return (torch.rand(shape, generator=generator) * (self.high - self.low) + self.low).to(self.dtype)
        return torch.randint(int(self.low), int(self.high) + 1, shape, generator=generator).to(self.dtype)


LAYOUTS = ("contiguous", "contiguous", "transposed", "sliced", "padded", "expanded", "expanded last")


@dataclass(frozen=True)
class Case:
    """A program and what to call it with. ``wanted``: inputs and scalars whose gradients are compared; () for none."""

    program: Program
    inputs: dict[str, Input]
    scalars_on_device: bool = False
    params: dict[str, int | bool] = field(default_factory=dict)
    wanted: tuple[str, ...] = ()
    seed: int = 0

    def __str__(self) -> str:
        tensors = "\n".join(f"# {name}: {i}" for name, i in self.inputs.items())
        more = [f"params {self.params}"] * bool(self.params) + ["scalars are tensors"] * self.scalars_on_device
        more += [f"gradients of {', '.join(self.wanted)}"] * bool(self.wanted)
        return f"{self.program}{tensors}\n# {', '.join([*more, f'seed {self.seed}'])}"

    def tensors(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """A tensor for each input; its strides and offset are kept on any device."""
        found = {name: i.tensor(self.seed + 31 * at) for at, (name, i) in enumerate(self.inputs.items())}
        return {name: moved(t, device) for name, t in found.items()}

    def scalars(self, device: str = "cpu") -> dict[str, float | int | torch.Tensor]:
        if not self.scalars_on_device:
            return dict(SCALARS)
        return {n: torch.tensor([v] if self.seed % 2 else v, device=device) for n, v in SCALARS.items()}


def moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """``tensor`` on ``device`` in the same layout: its storage is moved, and seen in the same way."""
    if device == "cpu":
        return tensor
    count = tensor.untyped_storage().nbytes() // max(tensor.element_size(), 1)
    whole = tensor.as_strided((count,), (1,), 0).to(device)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def elements(sizes: Sequence[int]) -> int:
    return math.prod(sizes)


def case_from(draws: Draws) -> Case:
    """The case that ``draws`` choose."""
    from random_programs import Builder
    from random_schedules import Scheduler

    builder = Builder(draws)
    algorithm = builder.algorithm()
    schedule = Scheduler(builder, algorithm).schedule()
    inputs = {name: builder.input_of(name) for name in algorithm.inputs}
    params = {
        name: draws.pick([True, False]) if isinstance(value, bool) else draws.pick([2, 4])
        for name, value in algorithm.params if draws.chance(2)
    }  # fmt: skip
    scalars_on_device = draws.chance(4)
    wanted = tuple(n for n, i in inputs.items() if i.dtype.is_floating_point and not draws.chance(4))
    if scalars_on_device:
        wanted += tuple(n for n in algorithm.scalars if n in "st")
    wanted = wanted if draws.chance(3) else ()
    return Case(Program(algorithm, schedule), inputs, scalars_on_device, params, wanted, draws.below(1000))


def case_of(number: int) -> Case:
    """The case of ``number``: the same in every run."""
    return case_from(Draws(number))
