"""What a schedule is told of the GPU that is there, from what torch says of it."""

from types import SimpleNamespace

import pytest
import torch

from dtkernels.codegen.target import Target, target
from dtkernels.runtime.bind.variant import device_target
from dtkernels.runtime.select.row_ranking import nearest_gpu
from dtkernels.runtime.select.schedule_selection import gpu_of
from dtkernels.runtime.tables.table import Gpu


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


ASKED = {"major": 9, "minor": 0, "multi_processor_count": 132, "shared_memory_per_block_optin": 232448, "L2_cache_size": 52428800}


@pytest.mark.parametrize("name, more, table", [
    ("NVIDIA H100 80GB HBM3", {}, "nvidia_h100"),  # as the datasheet of the H100 says, whatever the clocks are
    ("NVIDIA GH200 480GB", {"memory_clock_rate": 2619000, "memory_bus_width": 6144}, "nvidia_h200"),
    ("NVIDIA H800", {"memory_clock_rate": 2619000, "memory_bus_width": 5120}, "nvidia_h100"),
])  # fmt: skip
def test_a_gpu_without_a_table_takes_that_of_the_gpu_with_the_most_similar_bandwidth(properties, name, more, table):
    properties(None, name=name, **ASKED, **more)
    tables = {"nvidia_h100": Gpu("NVIDIA H100", 90, 132, 3.35e12), "nvidia_h200": Gpu("NVIDIA H200", 90, 132, 4.8e12)}
    assert nearest_gpu(tables, gpu_of(device_target(torch.device("cuda", 0)))) == table


def test_an_instance_of_a_partitioned_gpu_has_its_share_of_the_bandwidth(properties):
    properties(None, name="NVIDIA H100 80GB HBM3 MIG 3g.40gb", **{**ASKED, "multi_processor_count": 60, "L2_cache_size": 26214400})
    found = device_target(torch.device("cuda", 0))
    assert (found.multiprocessors, found.l2_bytes) == (60, 26214400) and found.bandwidth == pytest.approx(3.35e12 * 60 / 132)
    tables = {"nvidia_h100": Gpu("NVIDIA H100", 90, 132, 3.35e12), "nvidia_h200": Gpu("NVIDIA H200", 90, 132, 4.8e12)}
    assert nearest_gpu(tables, gpu_of(found)) == "nvidia_h100"


def test_a_gpu_of_unknown_bandwidth_is_compared_by_its_multiprocessors_alone(properties):
    properties(None, name="NVIDIA H800", **ASKED)
    assert gpu_of(device_target(torch.device("cuda", 0))).bandwidth == 0
