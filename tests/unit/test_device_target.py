"""What a schedule is told of the GPU that is there, from what torch says of it."""

from types import SimpleNamespace

import pytest
import torch

from dtkernels.codegen.target import Target, target
from dtkernels.runtime.bind.variant import device_target


@pytest.fixture
def properties(monkeypatch):
    """Says what torch says of every GPU; what was asked before is not remembered."""

    def say(hip: str | None, **given):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**given))
        monkeypatch.setattr(torch.version, "hip", hip, raising=False)
        device_target.cache_clear()

    yield say
    device_target.cache_clear()


def test_of_an_nvidia_gpu(properties):
    properties(None, name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448, L2_cache_size=52428800)
    found = device_target(torch.device("cuda", 0))
    assert found == Target("NVIDIA H200", "cuda", 90, 132, 232448, found.bandwidth, 52428800, warp_size=32, registers=target("h200").registers)


def test_of_an_amd_gpu(properties):
    properties("7.0", name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304, L2_cache_size=4194304)
    found = device_target(torch.device("cuda", 0))
    assert found == Target("AMD Instinct MI300X", "hip", "gfx942", 304, 65536, found.bandwidth, 4194304, warp_size=64)
