"""The eager reference of a program."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.lang import parse
from dtkernels.runtime.reference.evaluator import evaluate


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations made and that are still alive."""

    def __init__(self):
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        made = function(*arguments, **(keywords or {}))
        storage = made.untyped_storage()
        if storage._cdata not in self.alive:
            self.alive[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.most = max(self.most, sum(self.alive.values()))
        return made


def test_what_no_other_func_reads_is_let_go():
    steps = "".join(f"f{i}[x] = f{i - 1}[x] + 1; " for i in range(1, 20))
    text = f"Func {', '.join(f'f{i}' for i in range(20))}; In A; Var x; f0[x] = A[x] * 2; {steps}"
    algorithm = prepare_algorithm(parse(text).algorithm, ("f0", "f19"), inline=frozenset())
    a = torch.randn(4096)
    with LiveBytes() as live:
        first, last = evaluate(algorithm, {"A": a}, {}, ("f0", "f19"))
    assert torch.allclose(first, 2 * a) and torch.allclose(last, 2 * a + 19)
    assert live.most <= 5 * a.nbytes + 1024, "f0, which is an output, and what a step reads and writes"
