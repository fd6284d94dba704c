"""Every row of every table that is shipped, without a GPU: a call of its sizes takes it, and its kernels are there."""

import sys
from itertools import groupby
from pathlib import Path

import pytest

from dtkernels.codegen.target import TARGETS
from dtkernels.runtime.select.schedule_selection import choose, nearest, target_for
from dtkernels.runtime.select.table_loader import forget, op_table
from dtkernels.runtime.tables.table import Row, read_gpu, read_rows

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

from dtkernels.tuning.records.problems import CallKind, variants_of  # noqa: E402

TABLES = sorted(p for p in (ROOT / "schedule_tables").glob("*/*.yaml") if p.stem != "gpu")


@pytest.fixture(autouse=True)
def own_tables(monkeypatch):
    monkeypatch.setenv("DTKERNELS_TABLES", str(ROOT / "schedule_tables"))
    forget()
    yield
    forget()


def kind(row: Row) -> CallKind:
    return CallKind(row.op, row.direction, row.dtype, tuple(sorted(row.params.items())), tuple(row.wanted), row.saved, tuple(row.kept))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_call_of_a_rows_sizes_takes_that_row_prebuilt(path):
    gpu, rows = read_gpu(path.parent), read_rows(path.read_text(), str(path))
    to = target_for(gpu)
    store = op_table(path.stem, gpu).store
    assert rows and to is not None and store is not None
    built, wrong = set(store.names()), []
    for group, same in groupby(sorted(rows, key=lambda row: str(kind(row))), key=kind):
        _, variant = variants_of(group)
        for row in same:
            asked = (variant.subject, row.dtype, dict(row.sizes), to, variant.dispatch.known_outline)
            first, quick = choose(*asked).usable[:1], nearest(*asked)
            taken = [c.row.title() for c in (*first, quick) if c is not None and (not c.exact or c.row != row)]
            if not first or quick is None or taken or not row.binaries or not built.issuperset(row.binaries):
                wrong.append(f"{row.title()}: takes {', '.join(taken) or 'no row'}; {len(row.binaries)} kernels, {len(built.intersection(row.binaries))} there")
    assert not wrong


def test_there_are_tables():
    assert {"nvidia_h200"} < {path.parent.name for path in TABLES}


@pytest.mark.parametrize("group, heads, wanted", [(5, 40, 5), (19, 19, 19), (4, 32, 4)])
def test_a_row_for_groups_of_another_size_does_not_keep_the_default_schedule_out(group, heads, wanted):
    """One query of 40 heads on 8 of keys took 82 us by a row that reads keys once a query head, 39 by the default schedule."""
    _, variant = variants_of(CallKind("attention", "forward", "bf16", (("group", group),)))
    to, sizes = TARGETS["h200"], {"b": 3, "h": heads, "m": 1, "n": 128, "l": 7777, "d": 128}
    dispatch = variant.dispatch
    choice = choose(variant.subject, "bf16", sizes, to, dispatch.known_outline)
    taken = dispatch.programs.plan(dispatch.programs.compete(choice, "bf16", 2, dispatch.known_outline, to), 2, to)
    assert taken.program.schedule.sizes("attention", "block")["h"] == wanted
    assert group == 4 or taken.candidate is None
