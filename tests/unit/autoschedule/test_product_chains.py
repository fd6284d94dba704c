# ruff: noqa: E501 (programs read best on one line)
"""What the default schedule makes of layers before a row reduction, of triangular operands, of short sums and of sums of products. Without torch."""

import pytest

from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import differentiable_form, prepare_algorithm
from dtkernels.autoschedule.cost.outline import Known
from dtkernels.autoschedule.cost.predicted_time import predicted_time
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program

H100 = target("h100")
TWO = """Func y, h, z, f; In X, W, V; Var b; RVar o, p, k;
y[b, o] = rdot(X[b, k], W[o, k], k); h[b, o] = sigmoid(y[b, o]); z[b, p] = rdot(h[b, o], V[p, o], o); f[b] = {0};"""
LOGSUMEXP, LARGEST = "log(rsum(exp(z[b, p]), p))", "rmax(z[b, p], p)"
THREE = """Func h, g, z, f; In X, W, V, U; Var b; RVar o, q, p, k; h[b, o] = sigmoid(rdot(X[b, k], W[o, k], k));
g[b, q] = tanh(rdot(h[b, o], V[q, o], o)); z[b, p] = rdot(g[b, q], U[p, q], q); f[b] = rmax(z[b, p], p);"""
LARGE = {"b": 16384, "k": 2048, "o": 4096, "p": 1024, "q": 2048}


def prepared(text, wrt=()):
    written, outputs = parse(text).algorithm, ("f",)
    if wrt:
        found = gradient(differentiable_form(written, outputs), outputs, wrt)
        written, outputs = found.backward, tuple(found.grads.values())
    return prepare_algorithm(written, outputs), outputs


def scheduled(text, sizes, wrt=(), itemsize=2):
    algorithm, outputs = prepared(text, wrt)
    sizes = {label: next(n for x, n in sizes.items() if x in (label, *algorithm.tied_labels(label))) for label in algorithm.labels}
    schedule = default_schedule(algorithm, outputs, sizes, itemsize, H100)
    lower(Program(algorithm, schedule))
    return schedule


@pytest.mark.parametrize("reduction", [LOGSUMEXP, LARGEST])
@pytest.mark.parametrize("classes", [128, 1024, 10000])
def test_a_layer_is_computed_once_before_a_row_reduction(reduction, classes):
    """One kernel made the first layer again for each tile of the second: 19139 us on an H100 for 1024 classes, 590 by two kernels."""
    schedule = scheduled(TWO.format(reduction), {**LARGE, "p": classes})
    assert schedule.fused()["y"][0] == "h" and "h" not in schedule.fused() and schedule.fused()["z"][0] == "f", str(schedule)


def test_each_of_three_layers_is_computed_once():
    schedule = scheduled(THREE, LARGE)
    assert not {"h", "g"} & {*schedule.fused()} and schedule.fused()["z"][0] == "f", str(schedule)


def test_gradients_compute_each_layer_once():
    """The first one is stored in float32 and, for products, in 16 bits, by one kernel."""
    schedule = scheduled(TWO.format(LOGSUMEXP), LARGE, ("X", "W", "V"))
    fused = schedule.fused()
    assert not {"d_z", "d_y"} & {*fused} and fused["d_h"][0] == "d_y", fused
    assert fused["h"][0] == "h_rounded" and schedule.of("h", "store"), fused


def test_a_narrow_layer_stays_in_the_kernel_of_the_next():
    assert scheduled(TWO.format(LOGSUMEXP), {**LARGE, "o": 64}).fused().keys() >= {"y", "h", "z"}


def test_the_model_counts_how_often_a_layer_is_made_again():
    algorithm, outputs = prepared(TWO.format(LARGEST))
    text = "y.fuse_at(f, b);\nh.fuse_at(f, b);\nz.fuse_at(f, p);\nf.block(b:32);\nf.tensorize(b:32, p:128, k:64, o:64);\nf.num_warps(4);\nf.num_stages(3);\nf.compile();"
    few, many = (predicted_time(text, Known.of(algorithm, outputs), {**LARGE, "p": p}, 2, H100) for p in (128, 1024))
    assert 5 * few < many, "eight tiles of the second layer, each of which makes the first"


UPPER = "Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(where(x <= k, A[x, k], 0), {0}, k);"


@pytest.mark.parametrize("other", ["where(k <= y, B[k, y], 0)", "B[k, y]"])
def test_triangular_operands_stay_in_the_loop(other):
    """A stored operand hides which tiles are zeros: 218 us for 85 on an H100."""
    schedule = scheduled(UPPER.format(other), {"x": 4096, "y": 4096, "k": 4096})
    assert {p.func for p in schedule.primitives} == {"f"} and schedule.sizes("f", "block") == {"x": 128, "y": 128}


def test_a_triangular_operand_in_odd_rows_is_stored():
    schedule = scheduled(UPPER.format("where(k <= y, B[k, y], 0)"), {"x": 4097, "y": 4097, "k": 4097})
    assert {p.func for p in schedule.primitives} > {"f"}


@pytest.mark.parametrize("k, columns", [(64, 256), (67, 128), (128, 128), (384, 128), (768, 256)])
def test_results_of_short_sums_are_small(k, columns):
    text = "Func f; In A, B; Var b, x, y; RVar k; f[b, x, y] = rdot(A[b, x, k], B[b, k, y], k);"
    assert scheduled(text, {"b": 64, "x": 1024, "y": 1024, "k": k}).sizes("f", "block") == {"b": 1, "x": 128, "y": columns}


def test_blocks_of_merged_columns_go_in_groups_of_rows():
    """205 us for 222 on an H100."""
    text = """Func y, mean, var, f; In X, W; Var b, g, c; RVar k; y[b, g, c] = rdot(X[b, k], W[g, c, k], k); mean[b, g] = rmean(y[b, g, c], c);
    var[b, g] = rmean((y[b, g, c] - mean[b, g]) * (y[b, g, c] - mean[b, g]), c); f[b, g, c] = (y[b, g, c] - mean[b, g]) * rsqrt(var[b, g] + 0.00001);"""
    schedule = scheduled(text, {"b": 1024, "g": 512, "c": 16, "k": 8192})
    assert schedule.of("y", "merge") and schedule.of("y", "map")


def test_a_scaled_mean_and_the_variance_about_it_take_one_pass():
    text = """Func y, z, mean, var, f; In X, W, s; Var b, o; RVar k; y[b, o] = rdot(X[b, k], W[o, k], k); z[b, o] = y[b, o] * s[o];
    mean[o] = rmean(z[b, o], b); var[o] = rmean((z[b, o] - mean[o]) * (z[b, o] - mean[o]), b); f[b, o] = (z[b, o] - mean[o]) * rsqrt(var[o] + 0.00001);"""
    schedule = scheduled(text, {"b": 16384, "o": 4096, "k": 4096})
    assert schedule.fused()["mean"] == ("var", "b") and schedule.of("mean", "store")


SUM = "Func f; In {2}; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k) + rdot({0}, {1}, k);"


@pytest.mark.parametrize("sides, columns", [(("C[x, k]", "D[k, y]", "A, B, C, D"), 256), (("A[x, k]", "D[k, y]", "A, B, D"), 128)])
def test_a_sum_of_products_takes_the_tile_of_one_product(sides, columns):
    """Where they share an operand one loop loads it once, and has no room for that."""
    schedule = scheduled(SUM.format(*sides), {"x": 4096, "y": 4096, "k": 11008})
    assert schedule.sizes("f", "block") == {"x": 128, "y": columns} and schedule.number("f", "num_stages") == 3


LATENT = """Func s, e, t, f; In Q, P, K, C, V; SIn scale; Var b, {q}, n; RVar l, d, r;
s[b, h, m, l] = where({mask}, scale * (rdot(Q[b, {q}, d], K[b, {k}, d], d) + rdot(P[b, {q}, r], C[b, l, r], r)), -inf); e[b, h, m, l] = exp(s[b, h, m, l]);
t[b, h, m] = rsum(e[b, h, m, l], l); f[b, {q}, n] = rdot(e[b, h, m, l], V[b, {k}, n], l) / t[b, h, m];"""


@pytest.mark.parametrize("mask", ["l <= m", "l >= m - 500 and l <= m", "l >= 0"])
@pytest.mark.parametrize(("q", "k"), [("m, h", "l, h"), ("h, m", "h, l")])
def test_scores_that_add_up_two_products_have_tiles_of_both(mask, q, k):
    """One of the two advanced by single elements, and gradients had heads, along which keys differ, as the rows of a tile: 4.9 s on an H200."""
    sizes = {"b": 1, "m": 2048, "l": 2048, "h": 16, "d": 128, "r": 64, "n": 128}
    schedule = scheduled(LATENT.format(mask=mask, q=q, k=k), sizes, ("Q", "P", "K", "C", "V"))
    tiles = {p.func: {s.label: s.size for s in p.sizes} for p in schedule.primitives if p.name == "tensorize"}
    assert all(tile.get(x, 0) != 1 for tile in tiles.values() for x in "dr") and all(tile.get("h", 1) == 1 for tile in tiles.values()), str(schedule)
    rows = {f: max(tile.get("m", 1), tile.get("l", 1)) for f, tile in tiles.items() if {"m", "l"} <= tile.keys()}
    assert rows and min(rows.values()) >= 64, str(schedule)


TALKING = """Func s, x, p, y, f; In Q, K, V, P, R; Var b, m, o, n; RVar h, g, l, d; s[b, h, m, l] = rdot(Q[b, h, m, d], K[b, h, l, d], d);
x[b, g, m, l] = rdot(s[b, h, m, l], P[h, g], h); p[b, g, m, l] = exp(x[b, g, m, l]) / rsum(exp(x[b, g, m, l]), l);
y[b, o, m, l] = rdot(p[b, g, m, l], R[g, o], g); f[b, o, m, n] = rdot(y[b, o, m, l], V[b, o, l, n], l);"""
HEADS = {"b": 4, "h": 16, "g": 16, "o": 16, "m": 512, "l": 512, "d": 64, "n": 64}
RIDGE = "Func d, f; In Q, X, alpha; SIn gamma; Var m, t; RVar n, k; d[m, n] = rsum((Q[m, k] - X[n, k]) * (Q[m, k] - X[n, k]), k); f[m, t] = rdot(exp(-gamma * d[m, n]), alpha[n, t], n);"
LATE = "Func f; In Q, D; Var a, b; RVar i, j, k; f[a, b] = rsum(rmax(rdot(Q[a, i, k], D[b, j, k], k), j), i);"


@pytest.mark.parametrize("sizes", [HEADS, {**HEADS, "b": 3, "h": 12, "g": 12, "o": 12, "m": 300, "l": 300, "d": 80, "n": 80}, {**HEADS, "m": 2048, "l": 2048}])
def test_products_between_products_are_made_once(sizes):
    """Heads are mixed before and after the softmax: scores of all heads were made again for each head, 1067 us on an H200, torch.compile 182."""
    schedule = scheduled(TALKING, sizes)
    fused = schedule.fused()
    assert not {"x", "y", "p"} & fused.keys() and fused["p_sum"][0] == "p", str(schedule)


@pytest.mark.parametrize("sizes", [{"m": 4096, "n": 4096, "k": 64, "t": 16}, {"m": 3000, "n": 2040, "k": 30, "t": 7}])
def test_gradients_of_distances_are_products(sizes):
    """Sums over differences of rows were no products, and made the kernel matrix again for each column: 133 ms on an H200, torch 0.6."""
    algorithm, _ = prepared(RIDGE, ("Q", "X", "alpha"))
    assert {"d_Q_dot", "d_X_dot"} <= {*algorithm.funcs} and "- X[n, k]" not in str(algorithm["d_Q"].expr), str(algorithm)
    schedule = scheduled(RIDGE, sizes, ("Q", "X", "alpha"))
    assert predicted_time(str(schedule), Known.of(algorithm, ("d_Q", "d_X", "d_alpha")), sizes, 2, H100) < 1000, str(schedule)


def test_rows_that_share_the_largest_element_are_counted_where_it_is_found():
    """The label of the count was another than that of the row: three kernels went over the scores, and products made their operand from them again."""
    fused = scheduled(LATE, {"a": 16, "i": 32, "b": 256, "j": 256, "k": 128}, ("Q", "D")).fused()
    assert fused["f_max"][0] == fused["d_f_dot_sum"][0] == "d_f_dot" and "d_f_dot" not in fused, fused


TWINS = """Func ma, mb, va, vb, c, f; In A, B; SIn lam; RVar n, i, j; ma[i] = rmean(A[n, i], n); mb[j] = rmean(B[n, j], n); va[i] = rmean((A[n, i] - ma[i]) * (A[n, i] - ma[i]), n);
vb[j] = rmean((B[n, j] - mb[j]) * (B[n, j] - mb[j]), n); c[i, j] = rmean((A[n, i] - ma[i]) * (B[n, j] - mb[j]), n) * rsqrt(va[i]) * rsqrt(vb[j]); f[] = rsum(where(i == j, (c[i, j] - 1) * (c[i, j] - 1), lam * c[i, j] * c[i, j]), i, j);"""


def test_gradients_make_a_correlation_once():
    """Three kernels made it, in float32, of 1024 x 2048 x 2048: 710 of 1404 us predicted for an H200."""
    algorithm, _ = prepared(TWINS, ("A", "B"))
    assert str(algorithm).count("fp32), n)") == 1, str(algorithm)
