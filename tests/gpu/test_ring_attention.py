"""Ring attention over two GPUs."""

import pytest
import torch
from ring_cases import CASES
from several import run_together

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs 2 GPUs; found {torch.cuda.device_count()}")


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """All cases in one pair of processes: starting one takes longer than a case."""
    return run_together("cuda", list(CASES), tmp_path_factory.mktemp("ring"), file="ring_cases.py")


@pytest.mark.parametrize("case", CASES)
def test_two_gpus(said, case):
    assert not said[case]
