"""What a row's schedule wastes at other sizes than its own, and what the choice among rows makes of it. Without torch."""

import pytest
from some_rows import ROWS_HELD, row, take

from dtkernels.lang.parser import parse_schedule
from dtkernels.runtime.select.quantization_cost import LAUNCH, cuts, quantization_cost
from dtkernels.runtime.select.table_loader import tables_folder
from dtkernels.runtime.tables.table import read_rows

TUNED = {"by": {"multiprocessors": 132}}
SQUARES = "f.block(x:128, y:128);\nf.tensorize(x:128, y:128);"


def test_what_a_row_wastes_is_what_its_blocks_cost_beside_the_work():
    own = row(2048, 2048, SQUARES, **TUNED)  # 256 blocks in two waves
    worth = 1500**2 / 2048**2
    assert quantization_cost(own, {"x": 1500, "y": 1500}) == pytest.approx(1 / worth)  # 144 blocks, which take two waves too
    assert quantization_cost(own, {"x": 2048, "y": 2048}) == 1 == quantization_cost(own, {"x": 4224, "y": 1024})  # 264 blocks fill both waves
    assert quantization_cost(row(2048, 2048, SQUARES), {"x": 1500, "y": 1500}) == 1, "of how many multiprocessors it is not said"
    assert quantization_cost(row(2048, 2048, "", **TUNED), {"x": 1500, "y": 1500}) == 1, "nothing is cut"


def test_the_tiles_of_every_row_are_read_as_the_parser_reads_them():
    files = [path for path in sorted(tables_folder().rglob("*.yaml")) if path.name != "gpu.yaml"]
    texts = {row.schedule for path in files for row in read_rows(path.read_text(), path.name)}
    assert texts
    for text in texts:
        statements = [p for p in parse_schedule(text).primitives if p.name in ("block", "tensorize", "split")]
        assert cuts(text) == tuple((p.func, p.name, tuple((a.label, a.size) for a in p.args)) for p in statements), text


def test_a_label_held_whole_wastes_up_to_the_next_power_of_two():
    assert quantization_cost(row(13200, 1024, ROWS_HELD, **TUNED), {"x": 13200, "y": 600}) == pytest.approx(1024 / 600)
    assert quantization_cost(row(13200, 600, ROWS_HELD, **TUNED), {"x": 13200, "y": 1024}) == 1, "what is wasted less than at its own sizes is no gain"


def test_parts_of_a_sum_are_programs():
    one, split = "f.block(x:16);\nf.tensorize(x:16, y:64);", "f.block(x:16);\nf.tensorize(x:16, y:64);\nf.split(y:8);"
    fewer = {"x": 256, "y": 4096}  # 16 blocks of 132, after 128 of 132
    assert quantization_cost(row(2048, 4096, one, **TUNED), fewer) == pytest.approx(8)
    assert quantization_cost(row(2048, 4096, split, **TUNED), fewer) == pytest.approx(1)  # from 1024 programs, 7.76 waves of 8, to 128


def test_next_to_a_launch_little_is_wasted():
    fewer, long, short = {"x": 64, "y": 64}, row(1408, 1408, SQUARES, **TUNED, microseconds=1000.0), row(1408, 1408, SQUARES, **TUNED, microseconds=LAUNCH + 1)
    assert quantization_cost(long, fewer) > 50 and 1 < quantization_cost(short, fewer) < 1.5


def test_a_row_that_wastes_is_further_away_and_one_that_wastes_much_is_refused():
    found = take([row(2048, 2048, SQUARES, **TUNED), row(1000, 1000, SQUARES, **TUNED)], 1500, 1500)
    assert found[0].row.sizes["x"] == 1000 and found[0].distance > found[1].distance and found[0].reach < found[1].reach and not found[1].refused
    assert "quantization cost" in found[1].distance_text() and found[0].wasted < found[1].wasted < 2
    (few,) = take([row(2048, 2048, SQUARES, **TUNED)], 900, 900)
    assert few.distance < 2 and "quantization cost 2.6x is more than 2x" in few.refused
    (same,) = take([row(2048, 2048, SQUARES, **TUNED)], 2048, 2048)
    assert (same.distance, same.wasted, same.refused, same.distance_text()) == (0, 1, "", "distance 0.00")
