# ruff: noqa: E501 (programs read best on one line)
"""Default schedules of sums down columns, over volumes and over windows, on an H100. Without torch."""

from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import differentiable_form, prepare_algorithm
from dtkernels.autoschedule.cost.kernel_plan import plans
from dtkernels.autoschedule.cost.outline import Known
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.autoschedule.problem import SchedulingProblem
from dtkernels.codegen.ir.nest import is_load, statements
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.schedule import Schedule


def chosen(text: str, output: str = "f", itemsize: int = 4, **sizes: int) -> Schedule:
    algorithm = prepare_algorithm(parse(text).algorithm, (output,))
    return default_schedule(algorithm, (output,), sizes, itemsize, target("h100"))


def policies(schedule: Schedule) -> set[str]:
    return {str(p) for p in schedule.primitives if p.name == "evict"}


RMS = "Func s, f; In A; Var b, i, j; RVar c; s[b, i, j] = rmean(A[b, c, i, j] * A[b, c, i, j], c); f[b, c, i, j] = A[b, c, i, j] * rsqrt(s[b, i, j] + 1e-5);"
DOWN = "Func f; In A; Var b, z; RVar y; f[b, z] = rsum(A[b, y, z], y);"
TOTAL = "Func f; In A; RVar x, y; f[] = rsum(A[x, y] * A[x, y], x, y);"
ROWS = "Func f; In A, v; Var x; RVar y; f[x] = rsum(A[x, y] * v[y], y);"
BATCH = """Func m, v, f; In A; Var c; RVar b, i, j; m[c] = rmean(A[b, c, i, j], b, i, j); v[c] = rmean((A[b, c, i, j] - m[c]) * (A[b, c, i, j] - m[c]), b, i, j);
f[b, c, i, j] = (A[b, c, i, j] - m[c]) * rsqrt(v[c] + 1e-5);"""
POOL = "Func f; In A; Var b, y, x; RVar r, s; Extent r = 3; Extent s = 3; Extent y = (A[1] - 3) / 2 + 1; Extent x = (A[2] - 3) / 2 + 1; f[b, y, x] = rmax(A[b, 2 * y + r, 2 * x + s], r, s);"
LINE = "Func f; In A; Var b, x; RVar r; Extent r = 8; Extent x = A[1] - 7; f[b, x] = rmean(A[b, x + r], r);"
TAPS = "Func f; In A, W; Var b, s, c; RVar k; f[b, s, c] = rsum(A[b, s + k - 3, c] * W[c, k], k); Extent s = A[1]; Extent k = 4;"


def test_columns_are_held_side_by_side_in_runs_of_256_bytes():
    assert chosen(RMS, b=112, c=64, i=512, j=512).sizes("f", "block")["j"] == 64
    assert chosen(RMS, itemsize=2, b=112, c=64, i=512, j=512).sizes("f", "block")["j"] == 128


def test_columns_of_rows_that_start_anywhere_are_narrow_and_long():
    assert chosen(DOWN, b=128, y=4096, z=4095).sizes("f", "tensorize") == {"b": 1, "y": 128, "z": 32}
    assert chosen(DOWN, b=128, y=4096, z=4096).sizes("f", "tensorize") == {"b": 1, "y": 32, "z": 128}


def test_parts_that_are_numbers_are_merged_in_vectors():
    assert chosen(TOTAL, itemsize=2, x=16384, y=4096).sizes("f", "split")["x"] % 64 == 0


def test_what_is_read_once_leaves_the_cache_first():
    """At a few times the L2's size; not what fits there, for kernels that follow, nor what is much larger."""
    assert policies(chosen(ROWS, itemsize=2, x=14336, y=4096)) == {"f.evict(A:first);"}
    assert policies(chosen(ROWS, itemsize=2, x=4096, y=4096)) == policies(chosen(ROWS, itemsize=2, x=143360, y=4096)) == set()
    assert policies(chosen(ROWS, itemsize=2, x=14337, y=4095)) == set()  # rows share sectors
    twice = ROWS.replace("Func f;", "Func g, f;").replace("f[x] =", "g[x] = rmax(A[x, y], y); f[x] = g[x] +")
    assert "first" not in str(chosen(twice.replace("A[x, y] * v[y]", "A[x, y] * (v[y] - g[x])"), itemsize=2, x=143, y=409600))


def test_a_volume_of_few_channels_is_summed_by_many_programs_first():
    schedule = chosen(BATCH, b=64, c=64, i=512, j=512)
    assert {"v"} <= {p.func for p in schedule.primitives if p.name == "split"} and "v" not in schedule.fused(), str(schedule)
    assert schedule.sizes("v", "tensorize")["j"] == 0  # whole lines of it
    few = chosen(BATCH, b=8, c=256, i=16, j=16)
    assert "v" in few.fused(), str(few)


def test_windows_of_several_labels_are_gone_over_place_by_place():
    schedule = chosen(POOL, b=64, y=255, x=255, r=3, s=3)
    assert {schedule.sizes("f", "tensorize")[x] for x in "rs"} == {1} and set(schedule.names("f", "specialize")) == {"r", "s"}, str(schedule)


def test_a_window_along_contiguous_elements_is_held():
    schedule = chosen(LINE, b=8192, x=65529, r=8)
    assert schedule.sizes("f", "tensorize")["r"] == 8 and schedule.names("f", "specialize") == ("r",), str(schedule)


def test_another_window_is_unrolled_with_the_results_that_share_it():
    schedule = chosen(TAPS, itemsize=2, b=2, s=2048, c=4096, k=4)
    results = schedule.sizes("f", "block")["s"]
    assert schedule.sizes("f", "tensorize")["k"] == 1 and schedule.sizes("f", "unroll") == {"s": results, "k": 4}, str(schedule)


MEANS = "Func f; In A; Var b, s, c; RVar k; Extent k = 25; Extent s = A[1]; f[b, s, c] = rsum(A[b, s + k - 12, c], k);"
WEIGHTS = "Func f; In A, G; Var r, k, c; RVar b, h, s; Extent r = 7; Extent k = 7; f[r, k, c] = rsum(G[b, h, s, c] * A[b, h + r - 3, s + k - 3, c], b, h, s);"


def test_the_neighbours_of_a_long_window_are_few_and_those_of_weights_are_all_of_them():
    """Sums over 25 places took 348 us, and their gradient 3156 (32 x 720 x 862, bfloat16, an H200)."""
    means = chosen(MEANS, itemsize=2, b=32, s=720, c=862, k=25)
    assert means.sizes("f", "unroll") == {"s": 16, "k": 25}, str(means)
    weights = chosen(WEIGHTS, itemsize=2, b=16, h=56, s=56, c=96, r=7, k=7)
    assert weights.sizes("f", "unroll").keys() == {"s", "k"} and weights.sizes("f", "unroll")["k"] == 7 and weights.sizes("f", "split"), str(weights)
    along = chosen("Func f; In A; Var b, s; RVar k; Extent k = 25; Extent s = A[1]; f[b, s] = rsum(A[b, s + k - 12], k);", itemsize=2, b=4096, s=4096, k=25)
    assert "s" not in along.sizes("f", "unroll"), "lanes go along what lies contiguous"


def test_windows_that_a_loop_goes_over_are_loaded_in_each_step():
    """A kernel was predicted to load each element once, and to take 30 us of 349 for these sums."""
    algorithm = prepare_algorithm(parse(MEANS).algorithm, ("f",))
    sizes, known = dict(b=32, s=720, c=862, k=25), Known.of(algorithm, ("f",))
    text = "f.block(b:1, s:32, c:64); f.tensorize(k:1, b:1, s:32, c:64); f.num_warps(2); f.compile();"
    held = "f.block(b:1, s:16, c:128); f.tensorize(k:1, b:1, s:16, c:128); f.unroll(s:16, k:25); f.num_warps(4); f.compile();"
    (looped,), (single,) = ([plan.at(sizes, 2, target("h200"), 1.6) for plan in plans(t, known)] for t in (text, held))
    assert looped.short * looped.programs > 12 * 32 * 720 * 862
    assert single.short * single.programs < 3 * 32 * 720 * 7 * 128
    assert single.steps == 1 and looped.steps == 25


def test_phases_of_a_step_are_no_positions():
    """The few taps of each phase of a strided transposed convolution are constants of its kernel: 2088 us for 4019 (KernelBench 1/072 on an H100)."""
    extents = "Extent p = 2; Extent x = A[2]; Extent k = (W[2] - 1) / 2 + 1;"
    text = f"Func f; In A, W; Var b, o, p, x; RVar c, k; {extents} f[p, b, o, x] = rdot(A[b, c, x - k], W[c, o, p + 2 * k], c, k);"
    algorithm = prepare_algorithm(parse(text).algorithm, ("f",))
    sizes = {"p": 2, "b": 16, "o": 64, "x": 4096, "c": 64, "k": 3}
    schedule = default_schedule(algorithm, ("f",), {x: sizes[x] for x in algorithm.labels}, 2, target("h100"))
    assert "k" in schedule.names("f", "specialize"), str(schedule)


CONV = "In X, W; Var b, v, u{more}; RVar {reduced}c, r, s; Extent v = X[2] - W[2] + 1; Extent u = X[3] - W[3] + 1; {extents}y[b, o, v, u] = rdot(X[b, c, v + r, u + s], W[o, c, r, s], c, r, s); "
SIZES = {"b": 64, "o": 64, "v": 126, "u": 126, "c": 64, "r": 3, "s": 3}


def sized(text: str, **more: int) -> Schedule:
    algorithm = prepare_algorithm(parse(text).algorithm, ("f",))
    known = SIZES | more
    return default_schedule(algorithm, ("f",), {x: known[x] for x in algorithm.labels}, 2, target("h200"))


def test_channels_of_a_convolution_are_reduced_in_its_kernel_from_copies():
    """The least channel of each pixel, 1.9 ms for 14.3 on an H200 (KernelBench 2/032)."""
    schedule = sized("Func y, f; " + CONV.format(more="", reduced="o, ", extents="") + "f[b, v, u] = rmin(y[b, o, v, u], o);")
    assert "y" in schedule.fused() and {str(p) for p in schedule.primitives if p.name == "stage"} == {"f.stage(X:c, W:c);"}, str(schedule)
    assert {*schedule.names("f", "specialize")} == {"r", "s"}, str(schedule)


def test_a_convolution_that_windows_read_has_a_kernel_of_its_own():
    """In the kernel of the maximum each place of a window made it again: 115.7 ms for 3.0 on an H200 (KernelBench 2/010)."""
    pooled = CONV.format(more=", o, m, n", reduced="i, j, ", extents="Extent i = 2; Extent j = 2; Extent m = v / 2; Extent n = u / 2; ")
    sizes = {"m": 63, "n": 63, "i": 2, "j": 2}
    assert "y" not in sized("Func y, f; " + pooled + "f[b, o, m, n] = rmax(y[b, o, 2 * m + i, 2 * n + j], i, j);", **sizes).fused()
    found = sized("Func y, z, f; " + pooled + "z[b, o, v, u] = tanh(y[b, o, v, u]); f[b, o, m, n] = rmax(z[b, o, 2 * m + i, 2 * n + j], i, j);", **sizes)
    assert "y" not in found.fused(), str(found)


def test_gradients_of_a_convolution_read_a_stored_operand_and_are_alone_in_their_kernels():
    text = "Func y, f; " + CONV.format(more=", o", reduced="", extents="") + "f[b, o, v, u] = tanh(y[b, o, v, u]);"
    made = gradient(differentiable_form(parse(text).algorithm, ("f",)), ("f",), ("X", "W"))
    backward, outputs = prepare_algorithm(made.backward, tuple(made.grads.values())), tuple(made.grads.values())
    sizes = SIZES | {x: 128 for x in backward.labels if x.startswith("X_")}
    schedule = default_schedule(backward, outputs, {x: sizes[x] for x in backward.labels}, 2, target("h200"))
    assert "d_y" not in schedule.fused() and not {p.args[0] for p in schedule.primitives if p.name == "fuse_at"} & {"d_X", "d_W"}, str(schedule)
    staged = {str(p) for p in schedule.primitives if p.name == "stage"}
    assert any("d_y:o" in s for s in staged), f"channels last, as inputs are copied: {staged}"


def test_few_channels_are_read_in_vectors_of_copies():
    """Eight channels in bfloat16 are one load; sixteen fill a step of the matrix units, tap after tap."""
    text = "Func y, f; " + CONV.format(more=", o", reduced="", extents="") + "f[b, o, v, u] = tanh(y[b, o, v, u]);"
    few, more = sized(text, c=8), sized(text, c=16)
    (merged,) = (parts for parts in few.merged("f").values() if "c" in parts)
    assert merged[-1] == "c" and {"X:c", "W:c"} == {str(a) for p in few.of("f", "stage") for a in p.args} and "c" in few.names("f", "specialize")
    assert not any("c" in parts for parts in more.merged("f").values())


def test_several_functions_of_a_convolution_of_few_channels_are_in_its_kernel():
    """Taps and channels are labels of the sum of a fused Func there: KernelBench 2/087 took 4.5 ms on an H200 in three kernels, 1.9 in one."""
    text = CONV.format(more=", o", reduced="", extents="") + "z[b, o, v, u] = maximum(y[b, o, v, u], 0); f[b, o, v, u] = z[b, o, v, u] * tanh(z[b, o, v, u]);"
    schedule = sized("Func y, z, f; " + text, c=8)
    assert {"y", "z"} <= schedule.fused().keys() and any("c" in parts for parts in schedule.merged("f").values()), str(schedule)


def test_a_dimension_that_windows_index_counts_as_far_as_they_reach():
    problem = SchedulingProblem(prepare_algorithm(parse(POOL).algorithm, ("f",)), ("f",), dict(b=2, y=15, x=31, r=3, s=3), 2, target("h200"))
    assert problem.elements("A") == 2 * 31 * 63


def test_rows_of_three_dimensions_are_held_as_one_where_each_element_has_an_address():
    """A weight norm of 1001 x 777 x 7 spilled 208 bytes of a thread and took 34 us, predicted to take 17 (bfloat16, an H200)."""
    norm = "Func s, f; In V, g; Var o, i, k; s[o] = rsum(V[o, i, k] * V[o, i, k], i, k); f[o, i, k] = g[o] * V[o, i, k] / sqrt(s[o]);"
    schedule = chosen(norm, itemsize=2, o=1001, i=777, k=7)
    assert [p for p in schedule.primitives if p.name == "merge"], str(schedule)


def test_axes_of_an_index_are_in_the_order_of_its_strides():
    """Else each step of the sum would transpose a tile: 42 us for 38 MB (an H200)."""
    program = parse(
        "Func f; In G, A; Var c; RVar v, j; Extent v = 8; Extent j = 8; f[c] = rsum(G[v, j, c] * A[(8 * v + j + 3) % 64, c], v, j); f.block(c:16); f.tensorize(v:0, j:0, c:16); f.compile();"
    )
    (kernel,) = lower(program)
    assert {tuple(a.label for a in s.axes) for s in statements(kernel.body) if is_load(s)} == {("v", "j", "c")}
