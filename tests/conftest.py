"""The tiers of tests, by folder. Each runs in a process that suits it (`make test` starts them so):

unit      no torch, no Triton          compile   kernels to machine code, no GPU needed
cpu       TRITON_INTERPRET=1           gpu       an NVIDIA GPU

A test collected in a process that cannot run its tier is skipped, and pytest's summary says why. Files that take longest come
first, so that processes that share the files of a tier end together.
"""

import gc
import os
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
os.environ["DTKERNELS_USER"] = str(Path(tempfile.gettempdir()) / f"dtkernels-tests-{os.getuid()}")  # no tables of whoever runs the tests
os.environ["DTKERNELS_TRUST_TABLES"] = "1"  # tests write stores of their own; those of trust unset it
LONGEST = (
    "test_untuned_programs.py", "test_fuse.py", "test_tuning.py", "test_tuning_again.py", "test_tuning_workers.py", "test_fit_resources.py", "test_ops_targets.py",
    "test_sharded_layer.py", "test_graph_calls.py", "test_golden.py", "test_ring_attention.py", "test_symbolic_replay.py", "test_prebuilt.py", "test_cli.py",
    "test_distributed.py", "test_property.py", "test_compiled_ops.py", "test_algebra_rules.py", "test_compile_backend.py",
)  # fmt: skip
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=True)
def registered_by_a_test_goes_with_it():
    """The ops that a test registers end with it: files share a process in an order that differs from run to run."""
    name = "dtkernels.ops.registry"  # imports torch, which the tier unit goes without
    before = dict(sys.modules[name]._registered) if name in sys.modules else {}
    yield
    if name in sys.modules:
        sys.modules[name]._registered = before


def pytest_collection_finish():
    """Leave out of garbage collections what was imported, most of a million objects that stay: a tenth of the time went there."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10000, 20, 20)


def pytest_unconfigure():
    """Have the end of the process free it all: Triton's bindings report what is left as a leak."""
    gc.unfreeze()


@cache
def gpu_found() -> bool:
    import torch  # here, so that the unit tier runs without it

    return torch.cuda.is_available()


def reason_to_skip(tier: str) -> str | None:
    """Why this process cannot run tests of that tier; None if it can."""
    if tier == "cpu" and not INTERPRETED:
        return "tests/cpu runs generated kernels in Triton's interpreter: set TRITON_INTERPRET=1"
    if tier in ("compile", "gpu") and INTERPRETED:
        return f"tests/{tier} needs Triton's compiler: unset TRITON_INTERPRET"
    if tier == "gpu" and not gpu_found():
        return "no GPU: torch.cuda.is_available() is False"
    return None


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    for item in items:
        inside = item.path.is_relative_to(TESTS)
        tier = item.path.relative_to(TESTS).parts[0] if inside else ""
        if tier == "gpu":
            item.add_marker(pytest.mark.gpu)
        elif item.get_closest_marker("gpu"):
            tier = "gpu"
        if reason := reason_to_skip(tier):
            item.add_marker(pytest.mark.skip(reason=reason))
