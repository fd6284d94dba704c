"""Captures of the benchmark, with a stand-in for torch.cuda: what fails is timed without a graph, and torch is left usable.

tests/gpu/test_timing.py asks the same of a GPU.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from common import timing


class Cuda:
    """torch.cuda as far as captures need it: after a capture that cannot be ended stream, pool and generator stay as they were in it."""

    def __init__(self):
        self.stream, self.pools, self.capturing, self.waiting_is_refused, self.replayed = "default", [], False, False, 0

    def wait(self):
        """What ``.item()`` does."""
        if self.waiting_is_refused:
            raise RuntimeError("called a synchronizing CUDA operation")
        self.spoil()

    def spoil(self):
        """What is not allowed in a capture."""
        if self.generator.capturing:
            self.spoiled = True
            raise RuntimeError("operation not permitted when stream is capturing")

    def draw(self):
        if self.generator.capturing and self.stream == "default":
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")


class Generator:
    def __init__(self, seed=7):
        self.seed, self.capturing = seed, False

    def clone_state(self):
        return Generator(self.seed)

    def graphsafe_set_state(self, other):
        self.__dict__ = other.__dict__


@pytest.fixture
def cuda(monkeypatch):
    """Stands for torch.cuda in tools/common/timing.py."""
    found = Cuda()
    found.generator, found.spoiled = Generator(), False

    class Stream:
        def wait_stream(self, other):
            pass

    class On:
        def __init__(self, stream):
            self.to = stream

        def __enter__(self):
            self.before, found.stream = found.stream, self.to

        def __exit__(self, *_):
            found.stream = self.before

    class Graph(On):
        def __init__(self, graph, pool, stream):
            super().__init__(stream)
            self.pool = pool

        def __enter__(self):
            super().__enter__()
            found.pools.append(self.pool)
            found.generator.capturing, found.spoiled = True, False

        def __exit__(self, *_):
            if found.spoiled:
                raise RuntimeError("operation failed due to a previous error during capture")
            found.pools.remove(self.pool)
            found.generator.capturing = False
            super().__exit__()

    class CUDAGraph:
        def replay(self):
            found.replayed += 1

    stand_ins = {
        "Stream": Stream, "stream": On, "graph": Graph, "CUDAGraph": CUDAGraph, "graph_pool_handle": lambda: (0, 1), "synchronize": lambda: None,
        "current_stream": lambda: found.stream, "set_stream": lambda s: setattr(found, "stream", s), "current_device": lambda: 0,
        "get_sync_debug_mode": lambda: int(found.waiting_is_refused), "set_sync_debug_mode": lambda m: setattr(found, "waiting_is_refused", m == "error"),
        "default_generators": (found.generator,),
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: found.pools.remove(pool), raising=False)
    return found


def usable(cuda: Cuda) -> bool:
    """Whether the next workload finds torch as the first one did."""
    cuda.draw()
    return cuda.stream == "default" and cuda.pools == [] and not cuda.waiting_is_refused and cuda.generator.seed == 7


def test_a_call_is_captured_after_it_ran_a_few_times(cuda):
    calls = []
    call, in_graph = timing.captured(lambda: lambda: calls.append((cuda.stream != "default", cuda.generator.capturing)))
    assert in_graph and calls == [(True, False)] * 3 + [(True, True)] and usable(cuda)
    call()
    assert cuda.replayed == 1 and len(calls) == 4


def test_a_call_that_waits_is_never_captured(cuda):
    def waits():
        assert not cuda.generator.capturing
        cuda.wait()
        return 3

    call, in_graph = timing.captured(lambda: waits)
    assert not in_graph and call() == 3 and usable(cuda)


def test_a_capture_that_fails_leaves_torch_usable(cuda):
    call, in_graph = timing.captured(lambda: lambda: cuda.spoil() or 5)
    assert not in_graph and call() == 5 and usable(cuda)
    assert timing.captured(lambda: lambda: None)[1]


def test_what_cannot_run_at_all_raises_its_own_error(cuda):
    with pytest.raises(TypeError, match="unsupported operand"):
        timing.captured(lambda: lambda: 1 + "x")
    assert usable(cuda)


def test_each_round_begins_with_another_and_the_median_counts(monkeypatch):
    order = []

    def taken(fn, milliseconds):
        order.append(fn())
        return {"a": [9.0, 1.0, 5.0], "b": [2.0, 2.0, 8.0], "c": [3.0, 4.0, 3.0]}[fn()][order.count(fn()) - 1]

    monkeypatch.setattr(timing, "gpu_time", taken)
    assert timing.interleaved_times({who: lambda who=who: who for who in "abc"}) == {"a": 5.0, "b": 2.0, "c": 3.0}
    assert "".join(order) == "abcbcacab"
