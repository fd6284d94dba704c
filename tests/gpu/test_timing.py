"""The captures of the benchmark on a GPU: a call that cannot be captured is timed as it is, and disturbs nothing after it."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from common import timing


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_call_that_waits_leaves_torch_usable(foreseen, monkeypatch):
    if not foreseen:  # torch does not find every wait: then the capture itself fails
        monkeypatch.setattr(timing, "_without_waiting", lambda fn: fn())
    x = torch.randn(1000, device="cuda")
    call, in_graph = timing.captured(lambda: lambda: torch.ones(5, device="cuda").sum().item() * x)
    assert not in_graph and torch.equal(call(), 5 * x)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.manual_seed(3)
    first = torch.randn(100, device="cuda")
    torch.cuda.manual_seed(3)
    assert torch.equal(first, torch.randn(100, device="cuda"))


def test_a_capture_after_one_that_failed_replays(monkeypatch):
    monkeypatch.setattr(timing, "_without_waiting", lambda fn: fn())
    x, y = torch.zeros(1000, device="cuda"), torch.ones(1000, device="cuda")
    assert not timing.captured(lambda: lambda: y.sum().item())[1]
    replay, in_graph = timing.captured(lambda: lambda: x.add_(y))
    torch.cuda.synchronize()
    before = x.clone()
    replay()
    assert in_graph and torch.equal(x, before + 1)
