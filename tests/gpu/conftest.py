"""What every test on a GPU does."""

import pytest
import torch


@pytest.fixture(autouse=True)
def memory_goes_back():
    """Give cached memory back after each test: others may run beside this process."""
    yield
    torch.cuda.empty_cache()
