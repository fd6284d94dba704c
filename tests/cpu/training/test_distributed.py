"""DDP, FSDP2 and DTensor over two processes on CPUs, by the reference."""

import pytest
from distributed_cases import CASES
from several import run_together

NAMES = [c for c in CASES if c != "streams_of_each_device"]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """All cases in one pair of processes: starting one takes longer than a case."""
    return run_together("cpu", NAMES, tmp_path_factory.mktemp("together"))


@pytest.mark.parametrize("case", NAMES)
def test_two_processes(said, case):
    assert not said[case]
