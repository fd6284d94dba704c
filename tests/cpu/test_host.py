"""The host half of an emitted file, recorded while kernels are launched."""

from types import SimpleNamespace

import torch
import triton

from dtkernels.codegen.triton_support import SUPPORT
from dtkernels.runtime.host import record

TEXT = f"""
import torch
import triton
import triton.language as tl
{SUPPORT["launch"]}
@triton.jit
def some_kernel(a):
    ...

def call(A):
    out = torch.empty((3,))
    launch(some_kernel, (1,), 3, A)
    return out
"""


class Kernel:
    """Finds too little shared memory for more than one stage."""

    def __init__(self):
        self.tried = []

    def __getitem__(self, grid):
        def run(*args, num_stages, **options):
            self.tried.append(num_stages)
            if num_stages > 1:
                raise triton.runtime.errors.OutOfResources(300000, 232448, "shared memory")
            return "compiled"

        return run


def test_a_launch_that_needs_fewer_stages_is_recorded_with_those():
    kernel = Kernel()
    notes = record(TEXT, (torch.zeros(3),), SimpleNamespace(tl=triton.language, triton=triton, some_kernel=kernel))
    assert kernel.tried == [3, 2, 1] and [note.compiled for note in notes.launches] == ["compiled"]
