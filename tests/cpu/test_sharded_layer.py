"""A last layer whose vocabulary is sharded over two processes and, unevenly, over three; kernels in Triton's interpreter."""

import pytest
from several import run_together
from sharded_layer_cases import CASES


@pytest.fixture(scope="module", params=[2, 3])
def said(request, tmp_path_factory):
    """All cases in one set of processes: starting one takes longer than a case."""
    return run_together("cpu", list(CASES), tmp_path_factory.mktemp("together"), file="sharded_layer_cases.py", world=request.param, interpret=True)


@pytest.mark.parametrize("case", CASES)
def test_processes_agree_with_the_whole(said, case):
    assert not said[case]
