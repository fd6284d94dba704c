# ruff: noqa: E501 (programs read best on one line)
"""What the default schedule makes of products of products, of products side by side and of narrow rows. Without torch."""

import pytest

from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import differentiable_form, prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.autoschedule.fit_resources import element_bytes, first_too_large
from dtkernels.autoschedule.fusion import KEPT, fusion
from dtkernels.codegen.ir.nest import is_load, statements
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.algorithm import with_operands
from dtkernels.lang.schedule import Program

TEXT = """Func s, f; In Q, K, G; Var b, m, l, n; RVar d;
s[b, m, l] = exp(rdot(Q[b, m, d], K[b, l, d], d));
f[b, l, n] = rdot({0}, {1}, m);"""
SIDES = ("s[b, m, l]", "G[b, m, n]")


@pytest.mark.parametrize("sides", [SIDES, SIDES[::-1]])
@pytest.mark.parametrize("itemsize, rows", [(2, 128), (4, 64)])
@pytest.mark.parametrize("n", [64, 160, 256])
def test_blocks_are_of_what_both_products_have(sides, itemsize, rows, n):
    algorithm = prepare_algorithm(parse(TEXT.format(*sides)).algorithm, ("f",))
    schedule = default_schedule(algorithm, ("f",), {"b": 32, "m": 2048, "l": 2048, "n": n, "d": 256}, itemsize, target("a100"))
    blocks = schedule.sizes("f", "block")
    assert schedule.fused()["s"][0] == "f" and blocks["b"] == 1 and "n" not in blocks and blocks["l"] in (rows, 64), str(schedule)
    assert not schedule.sizes("f", "split"), "programs are many without"


@pytest.mark.parametrize("rows", [100, 128])
def test_one_wave_that_weights_bound_loads_long_steps(rows):
    """Problem 2/068 of KernelBench took 146 us on an H200 with steps of 128 terms, 175 with 64."""
    algorithm = prepare_algorithm(parse("Func y, f; In X, W, u; SIn c; Var b, o; RVar k; y[b, o] = rdot(X[b, k], W[o, k], k) + u[o]; f[b, o] = minimum(y[b, o], c) - c;").algorithm, ("f",))
    schedule = default_schedule(algorithm, ("f",), {"b": rows, "o": 16384, "k": 16384}, 2, target("h200"))
    assert schedule.sizes("f", "tensorize") == {"b": 128, "o": 128, "k": 128}, str(schedule)


@pytest.mark.parametrize("width", [40, 64, 197, 256])
def test_narrow_rows_that_are_written_again_are_few_in_a_program(width):
    text = "Func t, f; In A; Var x; RVar y; t[x] = rsum(exp(A[x, y]), y); f[x, y] = exp(A[x, y]) / t[x];"
    elements = {}
    for output in ("f", "t"):
        algorithm = prepare_algorithm(parse(text).algorithm, (output,))
        schedule = default_schedule(algorithm, (output,), {"x": 16384, "y": width}, 2, target("h200"))
        elements[output] = schedule.sizes(output, "block")["x"] * (1 << (width - 1).bit_length()), schedule.number(output, "num_warps")
    assert elements["f"] == (1024, 2) and elements["t"] in ((4096, 4), (2048, 2))


@pytest.mark.parametrize("right, sizes, heads", [
    ("c[b, s, d]", {}, 4), ("c[b, s, d]", {"h": 2}, 2), ("c[b, s, d]", {"h": 1}, 1),
    ("c[b, s, d]", {"s": 64}, 1), ("c[d]", {}, 1), ("c[b, h, s, d]", {}, 1), ("c[h, d]", {}, 1),
])  # fmt: skip
def test_what_an_input_lacks_is_taken_several_at_a_time(right, sizes, heads):
    """As queries by a table of angles: what is loaded of it serves several heads, where programs stay many and it is more than a row."""
    algorithm = prepare_algorithm(parse(f"Func f; In A, c; Var b, h, s, d; f[b, h, s, d] = A[b, h, s, d] * {right};").algorithm, ("f",))
    schedule = default_schedule(algorithm, ("f",), {"b": 4, "h": 32, "s": 4096, "d": 128, **sizes}, 2, target("h200"))
    assert schedule.sizes("f", "block") == {"b": 1, "h": heads, "s": 8, "d": 128}
    assert schedule.sizes("f", "tensorize") == schedule.sizes("f", "block")


def scheduled(text, sizes, itemsize=2, wrt=()):
    """The default schedule of ``f``, or of its gradients, on an H200."""
    written, outputs = parse(text).algorithm, ("f",)
    if wrt:
        found = gradient(differentiable_form(written, outputs), outputs, wrt)
        written, outputs = found.backward, tuple(found.grads.values())
    algorithm = prepare_algorithm(written, outputs)
    sizes = {label: next(n for x, n in sizes.items() if x in (label, *algorithm.tied_labels(label))) for label in algorithm.labels}
    program = Program(algorithm, default_schedule(algorithm, outputs, sizes, itemsize, target("h200")))
    stored = with_operands(algorithm, program.schedule.subjects())
    lacks = first_too_large(lower(program), sizes, element_bytes(stored, outputs, itemsize), target("h200"))
    assert lacks is None, program.schedule
    return program.schedule


GATED = "Func u, f; In A, W, V; Var x, y; RVar k; u[x, y] = rdot(A[x, k], W[{0}], k); f[x, y] = u[x, y] * sigmoid(u[x, y]) * rdot(A[x, k], V[{0}], k);"
SUM = "Func f; In A, B, C, D; Var x, y; RVar k, l; f[x, y] = rdot(A[x, k], B[k, y], k) + rdot(C[x, l], D[l, y], l);"


@pytest.mark.parametrize("sizes", [(4096, 11008, 4096), (2048, 2048, 2048), (512, 4096, 4096)])
@pytest.mark.parametrize("text, read", [(GATED.format("k, y"), "AWV"), (GATED.format("y, k"), "AWV"), (SUM, "ABCD")])
def test_products_side_by_side_are_tiled_as_one(text, read, sizes):
    """By pointers where they share an operand: persistent programs took 1.2 times as long for two results on an H100 (benchmarks/h100/product_probes.json).

    A sum that fills the GPU with tiles of one accumulator takes these, by pointers too: 976 us for 1015 (benchmarks/h100/product_schedules.json).
    """
    schedule = scheduled(text, dict(zip("xykl", (*sizes, sizes[-1]))))
    one = text == SUM and sizes[0] * sizes[1] >= 119 * 128 * 256
    assert schedule.sizes("f", "block") == {"x": 128, "y": 256 if one else 128}, "accumulators together as those of 128 x 256"
    assert schedule.number("f", "num_warps") == 8 and schedule.number("f", "num_stages") == 3
    assert bool(schedule.of("f", "persistent")) == (text == SUM and not one)
    if text == SUM and not one:
        assert {*schedule.names("f", "descriptor")} == {*read, "f"}


@pytest.mark.parametrize("sizes", [(1024, 1024, 1024), (128, 11008, 4096), (16, 11008, 4096), (4097, 4099, 4001), (300, 20, 500)])
@pytest.mark.parametrize("wrt", [(), ("A", "W", "V")])
def test_no_kernel_of_several_products_is_left_with_one_stage(sizes, wrt):
    schedule = scheduled(GATED.format("k, y"), dict(zip("xyk", sizes)), wrt=wrt)
    for root in {p.func for p in schedule.primitives if p.name == "num_stages"}:
        assert schedule.number(root, "num_stages") > 1, str(schedule)


def test_gradients_of_products_side_by_side():
    """What is no product of inputs alone is an operand of its own kernel too; sums of two products each take all their operands."""
    schedule = scheduled(GATED.format("k, y"), {"x": 4096, "y": 11008, "k": 4096}, wrt=("A", "W", "V"))
    assert "operand" not in schedule.fused() and schedule.fused()["d_V"][0] == "d_W"
    assert schedule.sizes("d_W", "block") == {"k": 128, "y": 128} and not schedule.of("d_W", "persistent")
    assert schedule.sizes("d_u", "block") == {"x": 128, "y": 128}, (
        "of 128 x 256 no more than one stage has room beside what is read with it"
    )
    assert all(schedule.number(f, "num_stages") == 3 for f in ("d_u", "d_A", "d_W"))


@pytest.mark.parametrize("j", [11008, 64])
def test_an_operand_made_of_a_large_product_is_computed_once(j):
    text = "Func u, h, f; In X, W, V; Var x, y; RVar k, j; u[x, j] = rdot(X[x, k], W[j, k], k); h[x, j] = u[x, j] * sigmoid(u[x, j]); f[x, y] = rdot(h[x, j], V[y, j], j);"
    fused = scheduled(text, {"x": 4096, "y": 4096, "k": 4096, "j": j}).fused()
    assert "h" not in fused and fused.get("u") in (("h", "j"), None)


@pytest.mark.parametrize("act, rows, alone", [("maximum({}, 0)", 4096, True), ("{}", 4096, True), ("{}", 64, False), ("maximum({}, 0)", 256, True)])
def test_a_plain_sum_shares_a_product_only_where_that_loads_what_it_sums_and_not_twice_for_long(act, rows, alone):
    product = "rdot(A[x, k], B[k, y], k) + z[y]"
    text = f"Func f; In A, B, z; Var x, y; RVar k; f[x, y] = {act.format(product)};"
    schedule = scheduled(text, {"x": rows, "y": 4096, "k": 4096}, wrt=("A", "B", "z"))
    assert ("d_z" not in schedule.fused()) == alone, str(schedule)
    assert schedule.number("d_B", "num_stages") >= (2 if rows == 64 else 3) and (rows == 64 or {*schedule.names("d_B", "descriptor")} >= {"A"})


@pytest.mark.parametrize("results", [True, False])
def test_results_that_leave_no_room_for_loads_ahead_are_stored_by_pointers(results):
    """A residual beside the product, on an H200: 468.6 us so, 759 with two stages and the descriptor."""
    plain = "Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[y, k], k);"
    added = "Func f; In R, A, B; Var x, y; RVar k; f[x, y] = R[x, y] + rdot(A[x, k], B[y, k], k);"
    schedule = scheduled(plain if results else added, {"x": 4096, "y": 4096, "k": 11008})
    assert {*schedule.names("f", "descriptor")} == ({"A", "B", "f"} if results else {"A", "B"}) and schedule.number("f", "num_stages") == 3


@pytest.mark.parametrize("sizes", [{"b": 8, "x": 2048, "y": 2048, "k": 2048}, {"b": 64, "x": 1024, "y": 1024, "k": 128}], ids=str)
def test_products_of_many_batches_stay_and_load_by_descriptors_as_one_does(sizes):
    schedule = scheduled("Func f; In A, B; Var b, x, y; RVar k; f[b, x, y] = rdot(A[b, x, k], B[b, k, y], k);", sizes)
    assert schedule.of("f", "persistent") and {*schedule.names("f", "descriptor")} == {"A", "B", "f"}


@pytest.mark.parametrize("sides", ["X[i, n], X[j, n]", "X[n, i], X[n, j]"])
def test_both_sides_of_a_product_may_be_of_one_tensor(sides):
    schedule = scheduled(f"Func f; In X; Var i, j; RVar n; f[i, j] = rdot({sides}, n);", {"i": 4096, "j": 4096, "n": 8192})
    assert {*schedule.names("f", "descriptor")} == {"X", "f"} and schedule.of("f", "persistent")


def test_a_swept_product_has_blocks_as_large_as_a_product_by_itself_where_they_are_enough():
    """The logarithm of the sum of all exponentials of 32000 columns, on an H200: 709 us so, 1131 in blocks of 64 x 128."""
    text = "Func u, f; In A, W; Var x; RVar y, k; u[x, y] = rdot(A[x, k], W[y, k], k); f[x] = log(rsum(exp(u[x, y]), y));"
    large, small = (scheduled(text, {"x": x, "y": 32000, "k": 2048}) for x in (4096, 64))
    assert (large.sizes("f", "tensorize"), large.sizes("f", "split")) == ({"x": 128, "y": 256, "k": 64}, {"y": 4})
    assert "u" not in small.fused(), "32 programs would sweep it; what they make has 8 MB and stays in the L2"


def test_a_faster_way_to_fuse_is_not_taken_where_it_stores_much_more():
    """500 MB of logits, which the usual way never stores."""
    text = "Func u, f; In A, W; Var x; RVar y, k; u[x, y] = rdot(A[x, k], W[y, k], k); f[x] = log(rsum(exp(u[x, y]), y));"
    algorithm = prepare_algorithm(parse(text).algorithm, ("f",))
    found = fusion(algorithm, ("f",), {"x": 4096, "y": 32000, "k": 2048}, 2, target("h200"))
    ways = list(found.ways())
    assert max(map(found.keeps, ways)) > KEPT and all(found.keeps(w) <= KEPT for w in ways[: found.by_time(ways).index(ways[0])])


def test_gradients_that_share_a_sum_have_kernels_of_their_own_where_one_would_be_slower():
    """Both gradients of a chain of products with few rows: one kernel of both took 73 and 170 us on an H100, two of 5 us each."""
    text = "Func mm, f; In A, B, C; Var m, n; RVar k, l; mm[m, l] = rdot(A[m, k], B[k, l], k); f[m, n] = rdot(mm[m, l], C[l, n], l);"
    schedule = scheduled(text, {"m": 13, "n": 123, "k": 14311, "l": 3}, wrt=("A", "B", "C"))
    assert not {"d_B", "d_C"} & {*schedule.fused()}, schedule


def test_few_long_rows_are_split_over_programs():
    text = "Func s, f; In A; Var x, y; s[x] = rsum(exp(A[x, y]), y); f[x, y] = exp(A[x, y]) / s[x];"
    few, many = (scheduled(text, {"x": x, "y": 1000000}) for x in (2, 4096))
    assert few.sizes("f", "split")["y"] >= 8 and few.fused() == {"s": ("f", "x"), **few.fused()} and not any(p.name == "split" for p in many.primitives)
    assert scheduled("Func f; In A; RVar y; f[] = rsum(A[y] * A[y], y);", {"y": 1000000}).sizes("f", "split")["y"] >= 8


@pytest.mark.parametrize("k, apart", [(1024, True), (128, False)])
def test_a_sum_of_what_a_product_does_not_take_is_made_once_and_not_by_each_of_its_blocks(k, apart):
    """The gradient of a norm beside that of a product: four blocks of columns had read all of another matrix for it, each."""
    text = "Func s, f; In A, B, P; Var x, n; RVar y; s[x] = rsum(P[x, y] * P[x, y], y); f[x, n] = rdot(A[x, y], B[y, n], y) + s[x];"
    fused = scheduled(text, {"x": 8192, "y": 8192, "n": k}).fused()
    assert ("s" not in fused) == apart, fused


def test_a_narrow_row_of_a_product_that_is_held_streams_as_a_narrow_product_does():
    """The softmax over 64 experts: 128 blocks are enough for 132 multiprocessors, and deep steps keep their loads on the way."""
    text = "Func p, f; In A, W; Var x, y; RVar k; p[x, y] = rdot(A[x, k], W[y, k], k); f[x, y] = exp(p[x, y]) / rsum(exp(p[x, y]), y);"
    schedule = scheduled(text, {"x": 8192, "y": 64, "k": 4096})
    assert schedule.sizes("f", "tensorize") == {"x": 64, "y": 0, "k": 128} and schedule.number("f", "num_stages") == 5


# -- products that are reduced, and convolutions ---------------------------------------------------------------------------

IMAGE = """In A, W; Var b, o, v, u; RVar c, r, s; Extent v = A[2] - W[2] + 1; Extent u = A[3] - W[3] + 1;
    y[b, o, v, u] = rdot(A[b, c, v + r, u + s], W[o, c, r, s], c, r, s);"""
IMAGE_SIZES = {"b": 128, "o": 64, "v": 126, "u": 126, "c": 64, "r": 3, "s": 3}
ROWS_OF_GROUPS = """Func y, m, f; In A, W; Var b, g, c; RVar k; y[b, g, c] = rdot(A[b, k], W[g, c, k], k);
    m[b, g] = rmean(y[b, g, c], c); f[b, g, c] = y[b, g, c] - m[b, g];"""


def test_a_convolution_whose_images_are_normalized_is_made_once():
    """Its mean runs over both labels of an image, which no tile of a product holds: each pixel had made the whole image again."""
    fused = scheduled(f"Func y, m, f; {IMAGE} m[b, o] = rmean(y[b, o, v, u], v, u); f[b, o, v, u] = y[b, o, v, u] - m[b, o];", IMAGE_SIZES).fused()
    assert "y" not in fused, fused


@pytest.mark.parametrize("c, merged", [(16, True), (32, True), (64, True), (128, False)])
def test_a_product_whose_rows_are_normalized_in_groups_has_full_tiles(c, merged):
    """A group of 16 columns fills an eighth of a tile: several are one label. The product is stored, and its groups are reduced by another kernel."""
    schedule = scheduled(ROWS_OF_GROUPS, {"b": 1024, "g": 8192 // c, "c": c, "k": 8192})
    assert "y" not in schedule.fused() and schedule.fused()["m"] == ("f", "g"), str(schedule)
    block = schedule.sizes("y", "block")
    assert block["g_c" if merged else "c"] >= 128 and (merged or block["g"] == 1)


def test_a_long_product_whose_rows_are_reduced_is_made_once():
    """Where a kernel swept its rows it made the product twice, for the maximum and for the sum."""
    text = "Func y, c, l, f; In X, W; Var b; RVar o, k; y[b, o] = rdot(X[b, k], W[o, k], k); c[b, o] = clamp(y[b, o], -9, 9); l[b] = log(rsum(exp(c[b, o]), o)); f[b] = l[b] * l[b];"
    schedule = scheduled(text, {"b": 1024, "o": 8192, "k": 8192})
    assert schedule.fused().get("l_shift") == ("l", "o"), str(schedule)  # one loop over the row for both


def test_the_least_channel_is_stored_where_it_is_summed_along_the_image():
    """It is small, and the product of which it is the least is not stored."""
    fused = scheduled(f"Func y, l, f; {IMAGE.replace('Var b, o, v, u; RVar c', 'Var b, u; RVar v, o, c')} l[b, v, u] = rmin(y[b, o, v, u], o); f[b, u] = rsum(l[b, v, u], v);", IMAGE_SIZES).fused()
    assert fused.get("y", ("",))[0] == "l" and "l" not in fused, fused


def test_windows_of_windows_are_made_once():
    text = f"""Func y, p, f; {IMAGE.replace('RVar c', 'Var m, n, e, d; RVar i, j, c')} Extent i = 2; Extent j = 2; Extent m = v / 2; Extent n = u / 2; Extent e = m / 2; Extent d = n / 2;
        p[b, o, m, n] = rmean(y[b, o, 2 * m + i, 2 * n + j], i, j); f[b, o, e, d] = rmax(p[b, o, 2 * e + i, 2 * d + j], i, j);"""
    fused = scheduled(text, {**IMAGE_SIZES, "i": 2, "j": 2, "m": 63, "n": 63, "e": 31, "d": 31}).fused()
    assert "p" not in fused, fused


def test_long_sums_are_not_left_to_the_few_programs_that_read_them():
    text = "Func s, f; In A; Var b; RVar c, y; s[b, c] = rsum(A[b, c, y] * A[b, c, y], y); f[b] = rsum(sqrt(s[b, c]), c);"
    assert "s" not in scheduled(text, {"b": 16, "c": 512, "y": 262144}).fused()
    assert "s" in scheduled(text, {"b": 4096, "c": 8, "y": 1024}).fused()


def test_rows_of_a_product_that_few_programs_would_sweep_are_stored():
    text = "Func u, f; In A, W; Var x; RVar y, k; u[x, y] = rdot(A[x, k], W[y, k], k); f[x] = rmax(u[x, y], y);"
    assert "u" not in scheduled(text, {"x": 1024, "y": 512, "k": 8192}).fused()
    assert "u" in scheduled(text, {"x": 1024, "y": 32000, "k": 8192}).fused()


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_tile_of_a_convolution_lies_along_the_rows_of_its_images(itemsize):
    """Of copies with channels last, whose rows are loaded whole wherever a window begins."""
    schedule = scheduled(f"Func y; {IMAGE}".replace("y[b", "f[b").replace("Func y", "Func f"), IMAGE_SIZES, itemsize)
    name, parts = next(iter(schedule.merged("f").items()), ("u", ("v", "u")))
    assert parts[-2:] == ("v", "u") and schedule.sizes("f", "block")[name] >= 64 and [str(p) for p in schedule.of("f", "stage")] == ["f.stage(A:c, W:c);"]


def test_of_a_volume_that_is_too_large_to_hold_elements_that_follow_one_another_are_summed():
    """Both columns had been held whole, with 16 elements of each line: 32 of a thread, of three kinds."""
    text = "Func m, f; In A; Var b, o, v, u; m[b] = rmean(A[b, o, v, u], o, v, u); f[b, o, v, u] = A[b, o, v, u] - m[b];"
    tiles = scheduled(text, {"b": 512, "o": 4, "v": 254, "u": 254}).sizes("f", "tensorize")
    assert {*tiles} == {"b", "o_v_u"} and 0 < tiles["o_v_u"] <= 16384, tiles


MEANS = """Func m, v, f; In A; Var n, c, s; m[n] = rmean(A[n, c, s], c, s); v[n] = rmean((A[n, c, s] - m[n]) * (A[n, c, s] - m[n]), c, s);
f[n, c, s] = (A[n, c, s] - m[n]) * rsqrt(v[n] + 1);"""


@pytest.mark.parametrize("n, c, s, kernels", [(200, 1, 70000, 1), (256, 10, 4096, 1), (4, 1, 1000000, 2), (8, 16, 65536, 2)])
def test_rows_and_volumes_too_large_to_hold_are_read_twice(n, c, s, kernels):
    """Once for mean and variance, by as many programs as the GPU keeps busy, and once more to be written."""
    schedule = scheduled(MEANS, {"n": n, "c": c, "s": s})
    assert schedule.fused()["m"] == ("v", "s") and schedule.fused()["v"] == ("f", "n"), str(schedule)
    found = lower(Program(prepare_algorithm(parse(MEANS).algorithm, ("f",)), schedule))
    assert len(found) == kernels and sum(s.value.buffer == "A" for k in found for s in statements(k.body) if is_load(s)) == 2
    if kernels == 2:
        assert {g.label for g in found[1].grid} == {"n", "c", "s"}, "the merge has a program for each piece of each row"


@pytest.mark.parametrize("n, c, s", [(8192, 1, 8192), (256, 8, 4096)])
def test_what_can_be_held_is_read_once(n, c, s):
    schedule = scheduled(MEANS, {"n": n, "c": c, "s": s})
    (kernel,) = lower(Program(prepare_algorithm(parse(MEANS).algorithm, ("f",)), schedule))
    assert sum(s.value.buffer == "A" for s in statements(kernel.body) if is_load(s)) == 1


def test_a_dimension_of_one_element_does_not_make_a_transpose():
    """Rows that share a vector are summed several at a time, or each program reads the whole vector again."""
    schedule = scheduled("Func f; In A, v; Var x, y; RVar k; Extent y = v[1]; f[x, y] = rsum(A[x, k] * v[k, 0], k);", {"x": 2048, "y": 1, "k": 1048576})
    assert schedule.sizes("f", "block")["x"] >= 4, str(schedule)


@pytest.mark.parametrize("y, copied", [(11176, ("B",)), (11168, ())])
def test_operands_whose_rows_start_within_sectors_are_copied_where_that_is_faster(y, copied):
    """Of 11176 elements every second row starts at an odd multiple of 16 bytes; copies take 160 of the 250 us that they save on an H100."""
    schedule = scheduled("Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k);", {"x": 4096, "y": y, "k": 10240})
    assert schedule.names("f", "stage") == copied and {"A", "B"} <= {*schedule.names("f", "descriptor")}


@pytest.mark.parametrize("k, padded", [(3000, True), (3008, False)])
def test_what_a_kernel_writes_for_a_product_has_rows_of_whole_sectors(k, padded):
    schedule = scheduled("Func g, f; In A, B; Var x, y; RVar k; g[x, k] = exp(A[x, k]); f[x, y] = rdot(g[x, k], B[k, y], k) * rsum(g[x, k], k);", {"x": 1000, "y": 2000, "k": k})
    assert "g_rounded" in {p.func for p in schedule.primitives if p.name == "block"}, "it is written, as the product takes it"
    assert bool(schedule.of("g_rounded", "align")) == padded
