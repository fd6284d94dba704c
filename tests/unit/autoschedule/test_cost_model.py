"""The cost model: what it reads of a schedule and of an algorithm, what costs more, and what the choice among rows makes of it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from some_rows import BLOCKS, SPEC, row, take

from dtkernels.autoschedule.cost.kernel_config import read_kernels, tiled_labels
from dtkernels.autoschedule.cost.kernel_plan import plans
from dtkernels.autoschedule.cost.outline import Known, Outline
from dtkernels.autoschedule.cost.predicted_time import predicted_time
from dtkernels.codegen.target import target
from dtkernels.lang.parser import parse
from dtkernels.runtime.select.evidence import TimeModel, predictions, weight
from dtkernels.runtime.select.row_ranking import candidates
from dtkernels.runtime.select.size_buckets import bucket_anchor
from dtkernels.runtime.tables.table import read_rows

H200 = target("h200")
TABLES = sorted(p for p in (Path(__file__).parents[3] / "schedule_tables").glob("*/*.yaml") if p.stem != "gpu")
PRODUCT = "Func f; In A, B; Var x, y; RVar k; f[x, y] = sigmoid(rdot(A[x, k], B[k, y], k));"
ROWS = "Func t, f; In A; Var x; RVar y; t[x] = rsum(exp(A[x, y]), y); f[x, y] = exp(A[x, y]) / t[x];"


def known(text: str, *outputs: str) -> Known:
    algorithm = parse(text).algorithm
    return Known(Outline.of(algorithm), outputs or ("f",))


PRODUCTS, OF_ROWS = known(PRODUCT), known(ROWS)
BY_ROWS = "t.fuse_at(f, x); f.block(x:1); f.tensorize(x:1, y:0); f.num_warps(8); f.num_stages(3);"


def product(block: int = 128, depth: int = 64, more: str = "", stages: int = 4) -> str:
    return f"f.block(x:{block}, y:{block}); f.tensorize(x:{block}, y:{block}, k:{depth}); {more} f.num_warps(4); f.num_stages({stages});"


def us(schedule: str, x: int, y: int, k: int, itemsize: int = 2) -> float:
    return predicted_time(schedule, PRODUCTS, {"x": x, "y": y, "k": k}, itemsize, H200)


def test_what_a_schedule_chooses_is_read_from_its_text():
    text = """g.fuse_at(f, k); f.block(x:64, y:128); f.tensorize(x:64, y:128, k:0); f.map(x:x1/8, y, x1); f.split(k:4); f.persistent();
    f.descriptor(A, B); f.stage(A); f.specialize_warps(k); f.num_warps(8);
    f.num_stages(3); g.store(); f.compile();"""
    (f,) = read_kernels(text)
    assert (f.func, f.blocks, f.tiles, f.split) == ("f", (("x", 64), ("y", 128)), (("x", 64), ("y", 128), ("k", 0)), (("k", 4),))
    assert (f.warps, f.stages, f.persistent, f.descriptors, f.staged, f.specialized) == (8, 3, True, ("A", "B"), ("A",), ("k",))
    assert (f.order, f.members, f.written) == ((("x", "x1", 8), ("y", "", 0), ("x1", "", 0)), (("g", "k"),), {"g"})
    assert tiled_labels(text) == ({"x", "y", "k"}, ("k",)) and read_kernels("") == ()


def test_an_outline_survives_json():
    for found in (PRODUCTS.outline, OF_ROWS.outline):
        assert Outline.read(json.loads(json.dumps(found))) == found
    (f,) = PRODUCTS.outline.funcs
    assert (f.reduced, f.heavy) == (("k",), 1) and f.products[0].rows == ("x",) and f.products[0].columns == ("y",)
    assert PRODUCTS.pitches == {"k": 32, "y": 32}


def test_a_divided_label_joins_the_rows_of_a_product():
    grouped = Outline.of(parse("Func s; In Q, K; Var h, m, l; RVar d; s[h, m, l] = rdot(Q[h, m, d], K[h / 2, l, d], d);").algorithm)
    assert grouped.funcs[0].products[0].rows == ("h", "m")
    assert ("h", 2) in grouped.funcs[0].reads[1].labels and ("h", 8) in grouped.divided_by(2, 8).funcs[0].reads[1].labels


def test_work_is_counted_by_blocks_and_whole_tiles():
    (plan,) = plans(product(more="f.split(k:2);"), PRODUCTS)
    work = plan.at({"x": 1000, "y": 256, "k": 4096}, 2, H200, 2.0)
    assert work.programs == 8 * 2 * 2 and work.multiplied == 2 * 128 * 128 * 2048 and work.parts == 2
    assert work.merged == pytest.approx(2 * 1000 * 256 * 4) and work.memory == pytest.approx(2 * 4096 * (1000 + 256))


def test_more_waves_and_a_tile_past_the_end_cost_more():
    assert us(product(), 128 * 12, 128 * 12, 4096) > 1.3 * us(product(), 128 * 11, 128 * 11, 4096)  # one program for each multiprocessor, then a second
    assert us(product(), 1, 128, 4096) >= 0.9 * us(product(), 128, 128, 4096)
    assert us(product(), 4097, 4096, 4096) >= us(product(), 4096, 4096, 4096)
    sizes = [us(product(), n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192)]
    assert sizes == sorted(sizes)


def test_few_programs_gain_by_a_split_and_many_do_not():
    assert us(product(64, more="f.split(k:8);"), 64, 1024, 16384) < us(product(64), 64, 1024, 16384)
    assert us(product(more="f.split(k:8);"), 4096, 4096, 4096) > us(product(), 4096, 4096, 4096)


def test_rows_that_are_not_aligned_and_products_of_float32_cost_more():
    assert us(product(), 2048, 2049, 2049) > 1.5 * us(product(), 2048, 2048, 2048)
    assert us(product(), 2048, 2048, 2048, 4) > 4 * us(product(), 2048, 2048, 2048)


def test_a_sum_that_every_block_runs_over_costs_more():
    rows = "f.block(x:1); f.tensorize(x:1, y:0); t.fuse_at(f, x); f.num_warps(8);"
    again = "f.block(x:1, y:1024); f.tensorize(x:1, y:1024); t.fuse_at(f, x); f.num_warps(4);"
    there = ({"x": 4096, "y": 16384}, 2, H200)
    assert predicted_time(again, OF_ROWS, *there) > 2 * predicted_time(rows, OF_ROWS, *there)
    assert predicted_time(rows, OF_ROWS, {"x": 8192, "y": 16384}, 2, H200) > 1.5 * predicted_time(rows, OF_ROWS, *there)


def test_a_time_that_was_measured_corrects_the_model_and_fades():
    fast, slow = "f.block(x:64, y:64);\nf.tensorize(x:64, y:64);", "f.block(x:32, y:64);\nf.tensorize(x:32, y:64);"
    rows = [row(1024, 1024, fast, microseconds=500.0), row(1024, 2048, slow, microseconds=5.0)]
    near, far = (take(rows, n, n)[0] for n in (1100, 16000))
    assert near.row.schedule == slow and 0 < near.predicted < 500
    assert weight(0) == 1 > weight(1) > weight(4) > 0 and math.isfinite(far.predicted)


TRIANGLE = "Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(where(k <= x, A[x, k], 0), B[k, y], k);"


def test_a_triangle_costs_what_lies_in_it():
    """Half of a square. Of rows that end before the columns do, nothing behind the last row; of rows beyond them, nearly all."""
    schedule = "f.block(x:128, y:128); f.tensorize(x:128, y:128, k:64); f.num_warps(4); f.num_stages(4);"

    def time(text: str, x: int, k: int) -> float:
        return predicted_time(schedule, known(text), {"x": x, "y": 8192, "k": k}, 2, H200)

    assert 0.4 < time(TRIANGLE, 8192, 8192) / time(TRIANGLE.replace("k <= x", "A[x, k] > 0"), 8192, 8192) < 0.75
    assert time(TRIANGLE, 512, 32768) < 1.5 * time(TRIANGLE, 512, 512)
    assert 1.1 < 16 * time(TRIANGLE, 16384, 1024) / time(TRIANGLE, 16384, 16384) < 2.1


def test_a_row_bounds_what_other_schedules_take_at_its_sizes():
    """A schedule that the model finds far too fast is not taken where another was measured to be the fastest."""
    model = TimeModel.unknown(("x", "y"))
    other = "f.block(x:32, y:64);\nf.tensorize(x:32, y:64);"
    there = model.at(other, (("x", 1024), ("y", 1024)), "bf16")
    rows = [row(1024, 1024, microseconds=9 * there), row(65536, 1024, other, microseconds=model.at(other, (("x", 65536), ("y", 1024)), "bf16"))]
    assert take(rows, 1020, 1024)[0].row.schedule == BLOCKS


def test_a_time_of_two_steps_says_nothing_of_one():
    """A tile of 8192 columns goes over 16384 in two steps; over 6144 it takes one, a quarter of which is empty."""
    schedule = BY_ROWS.replace("y:0", "y:8192")
    model = TimeModel(OF_ROWS, H200, H200)
    timed = replace(row(4096, 16384, schedule), dtype="bf16", sizes={"x": 4096, "y": 16384}, microseconds=1.0, measured=True)
    one, two = ((("x", 4096), ("y", y)) for y in (6144, 12288))
    assert predictions([(0.5, timed)], model, one, lambda _: True)[schedule] >= model.at(schedule, one, "bf16")
    assert predictions([(0.5, timed)], model, two, lambda _: True)[schedule] < model.at(schedule, two, "bf16") / 4


def test_a_row_further_away_than_its_own_bounds_no_schedule():
    """A schedule that takes half of what the model says where it was timed does so beside it too, whatever was slow elsewhere."""
    schedule, other = BY_ROWS, BY_ROWS.replace("num_warps(8)", "num_warps(4)")
    model, here = TimeModel(OF_ROWS, H200, H200), (("x", 4096), ("y", 4096))

    def timed(x: int, text: str, part: float):
        there = replace(row(x, 4096, text), dtype="bf16", sizes={"x": x, "y": 4096})
        return replace(there, microseconds=part * model.at(schedule, tuple(there.sizes.items()), "bf16"), measured=True)

    near = [(0.1, timed(3900, schedule, 0.5)), (1.5, timed(1500, other, 2.0))]
    assert predictions(near, model, here, lambda _: True)[schedule] < 0.6 * model.at(schedule, here, "bf16")
    assert predictions([(2.0, near[0][1]), (0.1, near[1][1])], model, here, lambda _: True)[schedule] > 1.5 * model.at(schedule, here, "bf16")


def test_sizes_of_one_bucket_are_decided_alike():
    rows = [row(1024, 1024), row(4096, 1024, "f.block(x:32, y:64);\nf.tensorize(x:32, y:64);", microseconds=9.0)]
    assert bucket_anchor(3001) == bucket_anchor(2999)
    assert [c.row for c in take(rows, 3001, 999)] == [c.row for c in take(rows, 2999, 999)]


@pytest.mark.parametrize("pitch", [True, False])
def test_a_bucket_is_represented_by_a_size_of_its_own(pitch):
    for size in range(1, 5000):
        anchor = bucket_anchor(size, pitch)
        assert size <= anchor == bucket_anchor(anchor, pitch) and anchor < size + max(8, size / 4) + 1, size
        assert not pitch or math.gcd(anchor, 16) == math.gcd(size, 16)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_at_its_own_sizes_every_row_is_taken(path):
    rows = read_rows(path.read_text(), str(path))
    for own in rows:
        alike = [r for r in rows if r.key == own.key and r.sizes == own.sizes]
        assert candidates(rows, own.key, own.sizes, own.spec)[0].row in alike, own.title()


def test_another_version_of_the_spec_is_no_evidence():
    found = take([row(1000, 1000, microseconds=5.0, spec="f" * 12), row(1024, 1024)], 1010, 1010)
    assert [bool(c.refused) for c in found] == [False, True] and found[0].row.spec == SPEC


def test_a_strided_operand_is_a_matrix():
    """``A[c, (u + 1 - s) / 2]`` is read along u by one operand alone; ``K[h / 4]`` is shared by rows of another, and is none of its rows."""
    text = "Func f; In A, W; Var o, u; RVar c, s; Extent u = 2 * A[1]; f[o, u] = rdot(where((u + 1 - s) % 2 == 0, A[c, (u + 1 - s) / 2], 0), W[c, o, s], c, s);"
    (product,) = Outline.of(parse(text).algorithm).funcs[0].products
    assert (product.rows, product.columns, product.reduced) == (("u",), ("o",), ("c", "s"))
    text = "Func f; In Q, K; Var h, m, l; RVar d; f[h, m, l] = rdot(Q[h, m, d], K[h / 4, l, d], d);"
    (product,) = Outline.of(parse(text).algorithm).funcs[0].products
    assert (product.rows, product.columns) == (("h", "m"), ("l",))


def wide(more: str = "") -> str:
    return f"f.block(x:128, y:256); f.tensorize(x:128, y:256, k:64); {more} f.num_warps(8); f.num_stages(3);"


@pytest.mark.parametrize("more", ["f.persistent(); f.descriptor(A, B);", ""])
def test_rows_that_start_in_the_middle_of_a_sector_cost_a_product_more(more):
    """At 4104 columns rows of B start at odd multiples of 16 bytes, at 4112 at multiples of 32."""
    text = wide(more)
    assert us(text, 4096, 4104, 4096) > 1.1 * us(text, 4096, 4112, 4096)
    rows = {"x": 4096, "y": 4104}
    assert predicted_time(BY_ROWS, OF_ROWS, rows, 2, H200) < 1.05 * predicted_time(BY_ROWS, OF_ROWS, rows | {"y": 4112}, 2, H200), "rows are loaded by vectors of 16 bytes"


def test_copies_and_padded_rows_start_at_whole_sectors():
    text = wide("f.persistent(); f.descriptor(A, B); f.stage(B);")
    large = us(text, 8192, 8200, 8192), us(wide("f.persistent(); f.descriptor(A, B);"), 8192, 8200, 8192)
    assert large[0] < large[1], "a copy of B is worth its time"
    both = known("Func g, f; In A, B; Var x, y; RVar k; g[x, k] = A[x, k] * 2; f[x, y] = rdot(B[x, k], g[k, y], k);")
    sizes = {"x": 4096, "y": 4104, "k": 4096}
    plain, padded = (predicted_time(f"g.block(x:4, k:256); g.tensorize(x:4, k:256); {more} {wide()}", both, sizes, 2, H200) for more in ("", "g.align();"))
    assert padded < plain


def test_a_launch_counts_once_for_kernels_in_a_row():
    """Where a kernel is launched while the one before it runs: calls of two kernels had been predicted 3.9 us too long on an H100."""
    both = known("Func g, f; In A; Var x; g[x] = exp(A[x]); f[x] = exp(g[x]);")
    kernels = [f"{f}.block(x:1024); {f}.tensorize(x:1024); {f}.num_warps(4);" for f in "gf"]
    for gpu, least, most in ((H200, 1.0, 1.5), (target("a100"), 1.8, 2.1)):
        one, two = (predicted_time(text, both, {"x": 100}, 2, gpu) for text in (kernels[1], " ".join(kernels)))
        assert least * one < two < most * one


def test_what_lies_before_a_last_dimension_of_one_element_is_contiguous():
    """``B[k, y]`` with a single ``y`` is loaded like a row of A; as if by single elements, 8192 rows of 5120 were predicted to take 248 us, and took 43."""
    column = "f.block(x:2, y:1); f.tensorize(x:2, y:1, k:1024); f.num_warps(8); f.num_stages(1);"
    row = "f.block(x:1, y:2); f.tensorize(x:1, y:2, k:1024); f.num_warps(8); f.num_stages(1);"
    assert us(column, 8192, 1, 5120) < 60
    assert us(row, 1, 8192, 5120) > us(column, 8192, 1, 5120)  # here B lies across the sum


def test_programs_that_stay_store_rows_that_start_anywhere_for_longer():
    stay, plain = (f"f.block(x:64, y:256); f.tensorize(x:64, y:256, k:16); {more} f.num_warps(4); f.num_stages(2);" for more in ("f.persistent();", ""))
    assert us(stay, 7514, 13245, 16) > us(plain, 7514, 13245, 16)
    assert us(stay, 7514, 13245, 16) > 1.2 * us(stay, 7514, 13248, 16)


def test_the_outline_of_an_expression_is_made_once(monkeypatch):
    """Programs of a search differ in few of their Funcs; a row that is sorted twice has 69."""
    algorithm = parse("Func f, g; In A; Var x; RVar y; f[x] = rsum(exp(A[x, y]), y); g[x] = log(f[x]);").algorithm
    first = Outline.of(algorithm)
    monkeypatch.setattr("dtkernels.autoschedule.cost.outline._outline", None)
    assert Outline.of(replace(algorithm)) == first and [f.name for f in first.funcs] == ["f", "g"]
