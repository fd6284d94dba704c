"""A small table of default schedules, with its kernels, for tests of the launch path.

    python tests/small_tables.py FOLDER [GPU]        needs no GPU; set DTKERNELS_TEST_TABLES=FOLDER for tests/gpu to take it

Building takes minutes where cores are few, so a GPU machine may be handed a folder that was built elsewhere.
"""

import subprocess
import sys
from pathlib import Path

from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.target import Target, target
from dtkernels.ops.registry import shipped
from dtkernels.runtime.aot_build import known_labels
from dtkernels.runtime.select.schedule_selection import gpu_of
from dtkernels.runtime.signature.spec_hash import spec_hash
from dtkernels.runtime.tables.table import Row, write_gpu, write_rows

ROOT = Path(__file__).parents[1]
#: op -> extents of its labels, inputs to differentiate, dtypes
CALLS = {
    "relu": ({"x": 1048576}, ("A",), ("fp32", "bf16")),
    "softmax": ({"x": 512, "y": 2048}, ("A",), ("fp32", "bf16")),
    "dyt": ({"x": 512, "y": 2048}, ("A", "w", "b", "alpha"), ("fp32", "bf16")),
    "mmsigmoid": ({"x": 512, "y": 512, "k": 512}, ("A", "B"), ("fp32",)),
}


def rows_of(op: str, to: Target) -> list[Row]:
    """Forward and backward rows of one op."""
    sizes, wanted, dtypes = CALLS[op]
    operator, rows = shipped(op), []
    core = operator.variant((), frozenset(), 0)
    for dtype in dtypes:
        for names in ((), wanted):
            variant = core.pair(names).backward if names else core
            own = {label: sizes.get(label) or sizes[label.rstrip("_")] for label in known_labels(variant.algorithm)}
            text = str(default_schedule(variant.algorithm, variant.outputs, own, 4 if dtype == "fp32" else 2, to))
            rows.append(
                Row(
                    op,
                    "backward" if names else "forward",
                    dtype,
                    own,
                    text,
                    spec_hash(operator.spec.algorithm),
                    wanted=names,
                    measured=False,
                )
            )
    return rows


def build(folder: Path, to: Target) -> None:
    """Write the table of ``to`` under ``folder`` and compile its kernels."""
    inside = folder / gpu_of(to).folder
    for op in CALLS:
        write_rows(inside / f"{op}.yaml", rows_of(op, to))
    write_gpu(inside, gpu_of(to))
    subprocess.run([sys.executable, str(ROOT / "tools" / "build.py"), "--tables", str(folder)], check=True, timeout=900)


if __name__ == "__main__":
    build(Path(sys.argv[1]), target(sys.argv[2] if len(sys.argv) > 2 else "h200"))
