"""A last layer whose vocabulary is sharded over processes: two, and three of which one has no class. Those of three run kernels in Triton's interpreter."""

import pytest
from several import run_together
from sharded_layer_cases import CASES, REFERENCE_CASES

MODEL_CASES = ["tensor_parallel", "tensor_parallel_that_is_skipped", "tensor_parallel_of_transformers", "fsdp2", "fsdp2_that_frees_the_weight"]


@pytest.fixture(scope="module")
def said_by_three(tmp_path_factory):
    """All cases in one set of processes: starting one takes longer than a case."""
    return run_together("cpu", list(CASES), tmp_path_factory.mktemp("three"), file="sharded_layer_cases.py", world=3, interpret=True)


@pytest.mark.parametrize("case", CASES)
def test_three_processes_agree_with_the_whole(said_by_three, case):
    assert not said_by_three[case]


@pytest.fixture(scope="module")
def said_by_two(tmp_path_factory):
    pytest.importorskip("transformers.distributed.tensor_parallel")
    return run_together("cpu", [*REFERENCE_CASES, *MODEL_CASES], tmp_path_factory.mktemp("two"), file="sharded_model_cases.py", reference=True)


@pytest.mark.parametrize("case", [*REFERENCE_CASES, *MODEL_CASES])
def test_two_processes_agree_with_the_whole(said_by_two, case):
    assert not said_by_two[case]
