# ruff: noqa: E501 (programs read best on one line)
"""What the default schedule makes of programs that move memory. Without torch."""

from itertools import permutations

import pytest

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program


def scheduled(text, itemsize=2, gpu="h200", **sizes):
    """The default schedule of a program's outputs, and its kernels."""
    program = parse(text)
    algorithm = prepare_algorithm(program.algorithm, program.outputs())
    schedule = default_schedule(algorithm, program.outputs(), sizes, itemsize, target(gpu))
    return schedule, lower(Program(algorithm, schedule))


@pytest.mark.parametrize("sizes", [{"x": 16384, "y": 4096, "b": 3}, {"x": 33, "y": 300, "b": 7}, {"x": 3, "y": 1 << 22, "b": 1}, {"x": 1 << 22, "y": 8, "b": 2}], ids=str)
@pytest.mark.parametrize("text", [
    "Func f; In A; RVar {}; f[] = rsum(A[{}] * A[{}], {});", "Func f; In A; RVar {}; f[] = rmax(A[{}], {});",
    "Func f; In A, w; RVar {}; f[] = rmean(A[{}] * w[x], {});", "Func f; In A; Var z; RVar {}; f[z] = rsum(A[z, {}], {});",
])  # fmt: skip
def test_a_sum_names_its_labels_in_any_order(text, sizes):
    """Each terms' place in memory says what a step takes: the last label of what is read first."""
    for own in ("xy", "bxy"):
        index, each = ", ".join(own), {c: sizes[c] for c in own} | ({"z": 64} if "z" in text else {})
        found = {}
        for order in permutations(own):
            filled = text.format(index, *[index] * (text.count("{}") - 2), ", ".join(order))
            schedule, _ = scheduled(filled, **each)
            found[order] = (schedule.sizes("f", "tensorize"), schedule.sizes("f", "split"), schedule.number("f", "num_warps"))
        first = found[tuple(own)]
        assert all(f == first for f in found.values()), found
        along = next(size for label, size in first[0].items() if "y" in label.split("_"))  # by itself or merged with others
        assert min(along or each["y"], each["y"]) >= min(each["y"], 512), first


@pytest.mark.parametrize("order", [*permutations("bxc")], ids="".join)
def test_columns_summed_over_several_labels_stay_wide(order):
    """Of what is summed over two labels and more, few rows are taken at once, not a few of each: 32 x 32 left room for 2 columns."""
    schedule, _ = scheduled(f"Func f; In A; Var y; RVar b, x, c; f[y] = rsum(A[b, x, c, y], {', '.join(order)});", b=32, x=2048, c=40, y=2048)
    assert schedule.sizes("f", "block") == {"y": 128} and schedule.sizes("f", "tensorize") in ({"c": 32, "x": 1, "b": 1, "y": 128}, {"b_x_c": 32, "y": 128})


ACROSS = [
    ("Func f; In A; Var y, x; f[y, x] = A[x, y] * 2;", "xy"), ("Func f; In A, B; Var x, y; f[x, y] = A[y, x] + B[x, y];", "xy"),
    ("Func f; In A; Var b, y, x; f[b, y, x] = A[b, x, y];", "xy"), ("Func f; In A; Var b, z, y, x; f[b, z, y, x] = A[b, x, z, y];", "xy"),
    ("Func f; In A; Var y, x; f[y, x] = A[x, y + 1]; Extent y = A[1];", "xy"), ("Func u, f; In A, B; Var x, y; u[y, x] = A[y, x] * 3; f[x, y] = u[y, x] + B[x, y];", "xy"),
    ("Func f; In A, B; Var z, x, y; f[z, x, y] = A[y, x] + B[z, x, y];", "xy"), ("Func f; In A, B; Var x, y, z; f[x, y, z] = A[z, x, y] + B[y, z, x];", "xyz"),
    ("Func f; In A, B; Var x; RVar y; f[x] = rsum(A[x, y] * B[y, x], y);", "xy"), ("Func f; In A, B; RVar x, y; f[] = rsum(A[x, y] * B[y, x], x, y);", "xy"),
]  # fmt: skip


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("extent", [4096, 1021])
@pytest.mark.parametrize("text, across", ACROSS)
def test_what_is_read_along_one_label_and_written_along_another_is_a_block_of_both(text, across, extent, itemsize):
    """A row of 1024 elements would be read by 1024 sectors of memory, of each of which 2 bytes are wanted."""
    schedule, _ = scheduled(text, itemsize, x=extent, y=extent, z=128, b=8)
    tile = schedule.sizes("f", "tensorize")
    wide = {label.split("_")[-1]: size for label, size in tile.items() if size != 1}  # the last of merged ones
    assert wide.keys() == {*across}
    assert min(wide.values()) * itemsize >= (128 if len(across) == 2 else 32)


@pytest.mark.parametrize("text, block", [
    ("Func f; In A; Var b, h, s, d; f[b, h, s, d] = A[b, s, h, d] * 2;", {"b": 1, "h": 1, "s": 8, "d": 128}),  # both lie along d
    ("Func f; In A; Var b, c, s; f[b, c, s] = A[b, s, c];", {"b": 1, "c": 4, "s": 1024}),  # of three channels a block has all
])  # fmt: skip
def test_other_blocks_are_of_rows(text, block):
    labels = parse(text).algorithm["f"].labels
    schedule, _ = scheduled(text, **{label: {"b": 64, "h": 12, "s": 4096, "d": 128, "c": 3}[label] for label in labels})
    assert schedule.sizes("f", "block") == block


def test_small_transposes_are_cut_into_enough_blocks():
    schedule, _ = scheduled("Func f; In A; Var y, x; f[y, x] = A[x, y];", x=256, y=256)
    assert schedule.sizes("f", "block") == {"y": 16, "x": 16}


NORM = "Func h, q, f; In A, B; Var x; RVar y; h[x, y] = A[x, y] + B[x, y]; q[x] = rmean(h[x, y] * h[x, y], y); f[x, y] = h[x, y] * rsqrt(q[x] + 1); h.compile(); f.compile();"
SCALE = "Func s, f; In A; Var x; RVar y; s[x] = rmax(abs(A[x, y]), y); f[x, y] = A[x, y] / s[x]; s.compile(); f.compile();"
MOMENTS = "Func m, f; In A; Var x; RVar y; m[x] = rmean(A[x, y], y); f[x] = rmean((A[x, y] - m[x]) * (A[x, y] - m[x]), y); m.compile(); f.compile();"
LOGARITHM = "Func t, l, f; In A; Var x; RVar y; t[x] = rsum(exp(A[x, y]), y); l[x] = log(t[x]); f[x, y] = exp(A[x, y]) / t[x]; l.compile(); f.compile();"
RANGE = "Func a, z, f; In A; Var x; RVar y; a[x] = rmin(A[x, y], y); z[x] = rmax(A[x, y], y); f[x, y] = (A[x, y] - a[x]) / (z[x] - a[x]); f.compile(); z.compile(); a.compile();"


@pytest.mark.parametrize("x, y", [(8192, 4096), (37, 301), (8192, 32768), (1, 1000)])
@pytest.mark.parametrize("text", [NORM, SCALE, MOMENTS, LOGARITHM, RANGE], ids=["norm", "scale", "moments", "logarithm", "range"])
def test_outputs_that_rows_are_read_for_share_a_kernel(text, x, y):
    schedule, found = scheduled(text, x=x, y=y)
    assert len(found) == 1 and schedule.sizes("f", "tensorize")["y"] == 0, str(schedule)


@pytest.mark.parametrize("text, sizes, count", [
    (SCALE, {"x": 4, "y": 1 << 20}, 3),  # a row longer than a program holds: its maximum in parts, merged
    ("Func c, f; In A; Var x, y; c[y] = rmax(A[x, y], x); f[x, y] = A[x, y] / c[y]; c.compile(); f.compile();", {"x": 4096, "y": 4096}, 3),  # down columns
    ("Func v, f; In A, u; Var x, y; v[x] = exp(u[x]); f[x, y] = A[x, y] * v[x]; v.compile(); f.compile();", {"x": 4096, "y": 4096}, 2),  # blocks of a row
])  # fmt: skip
def test_what_several_programs_would_write_has_a_kernel_of_its_own(text, sizes, count):
    schedule, found = scheduled(text, **sizes)
    assert len(found) == count and not {"s", "c", "v"} & {*schedule.fused()}, str(schedule)


def test_rows_wider_than_what_is_summed_are_written_by_small_blocks():
    """Nine columns made of three took 724 us in blocks of 1024 x 16, whose threads hold 128 elements and as many values of rows (an H200, torch.compile 104)."""
    text = "Func n, f; In R; Var b, j; RVar k; Extent j = 9; n[b] = rsqrt(rsum(R[b, k] * R[b, k], k)); f[b, j] = where(j == 0, n[b], where(j == 1, R[b, 0] * n[b], R[b, 1] * n[b] * j));"
    schedule, _ = scheduled(text, b=1 << 20, j=9, k=3)
    assert schedule.sizes("f", "block") == {"b": 64, "j": 16} and schedule.number("f", "num_warps") == 4, str(schedule)
