"""Rows of a table for tests, and the choice among them."""

from __future__ import annotations

from dtkernels.runtime.select.row_ranking import candidates
from dtkernels.runtime.tables.table import Row

SPEC = "0123456789ab"
ROWS_HELD = "f.block(x:1);\nf.tensorize(y:0, x:1);\nf.num_warps(4);"
BLOCKS = "f.block(x:64, y:64);\nf.tensorize(x:64, y:64);"


def row(x: int = 1024, y: int = 1024, schedule: str = BLOCKS, **more) -> Row:
    return Row(**{"op": "f", "direction": "forward", "dtype": "bf16", "sizes": {"x": x, "y": y}, "schedule": schedule, "spec": SPEC, **more})


def take(found, x, y, **more):
    return candidates(found, row(**more).key, {"x": x, "y": y}, SPEC)
