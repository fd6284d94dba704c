"""What a schedule chooses, kernel by kernel, is read from its text and printed again. Without torch."""

from pathlib import Path

import pytest

from dtkernels.autoschedule.cost.kernel_config import (
    Choices,
    FusedFunc,
    KernelConfig,
    ScheduleConfig,
    combined,
    joined,
    read_kernels,
    read_schedule,
)
from dtkernels.lang.parser import parse_schedule
from dtkernels.lang.schedule import PRIMITIVES
from dtkernels.runtime.tables.table import read_rows

TABLES = sorted((Path(__file__).resolve().parents[3] / "schedule_tables").glob("*/[!g]*.yaml"))
EVERY = """t.fuse_at(f, x); t.store(); s.parts_at(f, y); u.accumulate_at(f, k); v.accumulate_at(f, k, ordered); f.block(x:16, y:32); f.tensorize(x:16, y:32, k:0); f.map(x:x1/8, y, x1);
f.reorder(k, j); f.split(k:3); f.persistent(); f.ping_pong(); f.descriptor(A, B, f); f.stage(A, B:k); g.align(); g.chunk(y:64); f.stages(k:3, x:2); f.specialize_warps(k); f.unroll(j:2);
f.tail(x:8, y:16, k:64); f.stream(k:4); f.two_tiles(k, j); f.merge(p, x, y); f.merge(q, k, j);
f.evict(A:first, B:reread); f.approximate(tanh, exp:1/8); f.specialize(y); f.cluster(2); f.maxnreg(168); f.num_warps(8); f.num_stages(4); t.tensorize(l:64);
t.stages(l:2); s.block(m:16); s.num_warps(2); f.compile(); f.compile_to_kernel();"""


def statements(text: str) -> list[str]:
    return sorted(map(str, parse_schedule(text).primitives))


def test_every_primitive_is_read_and_printed():
    assert {p.name for p in parse_schedule(EVERY).primitives} == {*PRIMITIVES}, "a new primitive needs a field of Choices"
    found = read_schedule(EVERY)
    assert statements(str(found)) == statements(EVERY) and read_schedule(str(found)) == found
    f, g, s = found.kernels
    assert [k.func for k in found.kernels] == ["f", "g", "s"] and g.aligned and s.warps == 2
    assert f.fused == (FusedFunc("t", "f", "x", stored=True, own=Choices("t", tiles=(("l", 64),), stages_of=(("l", 2),))), FusedFunc("s", "f", "y", parted=True),
                       FusedFunc("u", "f", "k", added="any order"), FusedFunc("v", "f", "k", added="ordered"))  # fmt: skip
    assert f.written == {"t", "s", "u", "v"} and found.unordered_sums == {"u"} and f.parted == {"s"} and f.all_of("stages_of") == {"k": 3, "x": 2, "l": 2}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_rows_of_every_table_read_back_as_they_were(path):
    for row in read_rows(path.read_text(), str(path)):
        found = read_schedule(row.schedule)
        assert statements(str(found)) == statements(row.schedule), row.title()
        assert read_schedule(str(found)) == found
        for kernel in found.kernels:
            assert sorted(map(str, kernel.statements())) == sorted(kernel.texts())


def test_what_is_not_stated_is_not_printed():
    (f,) = read_kernels("f.block(x:4);")
    assert str(f) == "f.block(x:4);" and (f.num_warps, f.warps, f.stages) == (None, 4, 3)
    assert read_kernels("") == () and str(read_schedule("f.compile();")) == "f.compile();"


def test_statements_of_one_kind_add_up_and_the_last_of_a_label_counts():
    (f,) = read_kernels("f.tensorize(x:4); f.tensorize(y:8, x:16); f.descriptor(A); f.descriptor(B, A); f.num_warps(2); f.num_warps(8);")
    assert (f.tiles, f.descriptors, f.warps) == ((("x", 16), ("y", 8)), ("A", "B"), 8)


def test_statements_that_go_round_in_a_circle_are_read_without_end():
    assert {k.func for k in read_kernels("a.fuse_at(b, x); b.fuse_at(c, x); c.fuse_at(b, x);")} <= {"a", "b", "c"}


def test_a_kernel_may_want_rows_of_another_aligned():
    f, g = KernelConfig("f", descriptors=("g", "h"), aligns=("g", "h")), KernelConfig("g", blocks=(("x", 8),))
    assert str(f) == "g.align(); h.align(); f.descriptor(g, h);"
    assert joined([g, f]) == (KernelConfig("g", blocks=(("x", 8),), aligned=True), KernelConfig("f", descriptors=("g", "h"), aligns=("h",)))
    assert str(ScheduleConfig(joined([g, f]), (("f", "compile"),))) == "g.block(x:8); g.align();\nh.align(); f.descriptor(g, h);\nf.compile();"


def test_fields_of_several_are_combined():
    assert combined({"staged": ("A",), "persistent": True}, {}, {"staged": ("B", "A"), "descriptors": ("A",)}) == {
        "staged": ("A", "B"), "persistent": True, "descriptors": ("A",),
    }  # fmt: skip
