"""DDP, FSDP2 and DTensor over two GPUs."""

import pytest
import torch
from distributed_cases import CASES
from several import run_together

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs 2 GPUs; found {torch.cuda.device_count()}")


NAMES = list(CASES)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """All cases in one pair of processes: starting one takes longer than a case."""
    return run_together("cuda", NAMES, tmp_path_factory.mktemp("together"))


@pytest.mark.parametrize("case", NAMES)
def test_two_gpus(said, case):
    assert not said[case]
