"""The kernels that are shipped for this GPU, on others those for an H200: each row's, on tensors of its sizes, against a reference in higher precision."""

import gc
import sys
import tempfile
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path

import pytest
import torch
from filelock import FileLock  # torch needs it too

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from dtkernels.runtime.bind.operator import Variant  # noqa: E402
from dtkernels.runtime.tables.table import Row, read_gpu, read_rows  # noqa: E402
from dtkernels.tuning.records import inputs_and_reference  # noqa: E402
from dtkernels.tuning.records.problems import CallKind, TuningProblem, variants_of  # noqa: E402

TABLES = {read_gpu(folder).name: folder for folder in sorted((ROOT / "schedule_tables").glob("nvidia_*"))}
GPU = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
TABLE = TABLES.get(GPU, ROOT / "schedule_tables" / "nvidia_h200")
OWN = GPU in TABLES  #: only on the table's own GPU a call is bound to run the row of its sizes
DEVICE = "cuda"
SHARED = 2**22  #: elements of an intermediate up to which several processes compute references on one GPU
pytestmark = pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the shipped kernels that were measured are of compute capability 9.0")


def shipped() -> list[tuple[str, list[Row]]]:
    """The rows of every kind of call, by what the kind is called."""
    rows = [r for path in sorted(TABLE.glob("*.yaml")) if path.stem != "gpu" for r in read_rows(path.read_text(), str(path)) if not r.batched]
    kinds = [(" ".join(map(str, (r.op, r.direction, r.dtype, *sorted(r.params), "saving" * r.saved, *r.wanted, *r.kept))), r) for r in rows]
    return [(name, [r for _, r in found]) for name, found in groupby(sorted(kinds, key=lambda kind: kind[0]), key=lambda kind: kind[0])]


@pytest.mark.parametrize("rows", [pytest.param(rows, id=name) for name, rows in shipped()])
def test_each_row_computes_what_it_is_for(rows):
    wrong = [f"{row.title()}: {why}" for row in rows if (why := fault(row))]
    assert not wrong


def alone():
    """Held by one process of a GPU at a time: the reference of the largest rows takes half of its memory."""
    return FileLock(Path(tempfile.gettempdir()) / f"dtkernels_{torch.cuda.get_device_properties(0).uuid}.lock") if DEVICE == "cuda" else nullcontext()


def fault(row: Row) -> str:
    """What is wrong with a call of a row's sizes."""
    group = CallKind(row.op, row.direction, row.dtype, tuple(sorted(row.params.items())), tuple(row.wanted), row.saved, tuple(row.kept))
    _, variant = variants_of(group)
    with alone() if inputs_and_reference.largest(variant.algorithm, row.sizes) > SHARED else nullcontext():
        return compared(row, group, variant)


def compared(row: Row, group: CallKind, variant: Variant) -> str:
    made = inputs_and_reference.make(TuningProblem(group, tuple(row.sizes.items())), tuple(variant.outputs), DEVICE)
    inputs, scalars = variant.algorithm.inputs, variant.algorithm.scalars
    given = dict(zip((*inputs, *scalars), made.values))
    route, results = variant.dispatch.bind({n: given[n] for n in inputs}, {n: given[n] for n in scalars})
    told = [f"{name}: {why}" for name, got in zip(variant.outputs, results) if (why := inputs_and_reference.wrong(got, made.right[name], group.torch_dtype))]
    if OWN and (route.kind != "prebuilt" or route.candidate is None or dict(route.candidate.row.sizes) != dict(row.sizes)):
        told.append(f"a call ran {route.kind}, {route.candidate.row.title() if route.candidate else 'the default schedule'}")
    del made, given, results
    gc.collect()
    torch.cuda.empty_cache()  # others may run beside this process
    return "; ".join(told)
