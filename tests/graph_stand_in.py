"""A stand-in for CUDA graphs on a CPU: a tape of operations that is run again on the same tensors.

As in a capture, the recorded function's operations leave no trace until the tape is played, numbers among their arguments stay
what they were, and what Python does besides happens once.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors(value) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Tape(TorchDispatchMode):
    """Run operations and write them down; keep what the tensors that they write to held before."""

    def __init__(self):
        super().__init__()
        self.lines, self.before = [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = tensors((args, kwargs))
        if func._schema.is_mutable:
            for tensor in given:
                self.before.setdefault(memory(tensor), (tensor, tensor.untyped_storage().clone()))
        result = func(*args, **kwargs)
        read = {memory(tensor) for tensor in given}
        made = [tensor for tensor in tensors(result) if memory(tensor) not in read]
        self.lines.append((func, args, kwargs, made))
        return result

    def rewind(self) -> None:
        for tensor, was in self.before.values():
            tensor.untyped_storage().copy_(was)
        for _, _, _, made in self.lines:
            for tensor in made:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)

    def play(self) -> None:
        for func, args, kwargs, made in self.lines:
            again = tensors(func(*args, **kwargs))
            for tensor, value in zip(made, again if made else [], strict=True):
                tensor.copy_(value)


class TapeRecorder:
    """The recorder of a device that has tapes in place of graphs. ``replays`` counts what was played, ``tapes`` what was recorded."""

    def __init__(self):
        self.tapes, self.replays, self.warm_ups = [], 0, 0
        self.fails: Exception | None = None

    def warm_up(self, device, function):
        self.warm_ups += 1
        return function()

    def read_by_caller(self, device, tensors) -> None:
        assert all(tensor.device == device for tensor in tensors)

    def capture(self, device, function):
        tape = Tape()
        try:
            with tape:
                result = function()
            if self.fails is not None:
                raise self.fails
        finally:
            tape.rewind()
        self.tapes.append(tape)

        def play():
            self.replays += 1
            tape.play()

        return play, result

    def wait(self, device, stream):
        return None
