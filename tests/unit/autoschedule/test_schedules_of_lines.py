# ruff: noqa: E501 (programs read best on one line)
"""Default schedules of programs in a few lines: what is stored, how often a product is made, what stays in one kernel. Predicted times on an H100."""

import pytest

from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import differentiable_form, prepare_algorithm
from dtkernels.autoschedule.cost.outline import Known
from dtkernels.autoschedule.cost.predicted_time import predicted_time
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.analysis.product_types import typed
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.algorithm import with_operands

H100 = target("h100")
NORM = "Func m, v, h, f; In X, w, W; Var n, o; RVar c; m[n] = rmean(X[n, c], c); v[n] = rmean((X[n, c] - m[n]) * (X[n, c] - m[n]), c); h[n, c] = (X[n, c] - m[n]) * rsqrt(v[n] + 0.001) * w[c]; f[n, o] = rdot(h[n, c], W[o, c], c);"
RMS = "Func h, f; In X, w, W; Var n, o, c; h[n, c] = X[n, c] * rsqrt(rmean(X[n, c] * X[n, c], c) + 0.001) * w[c]; f[n, o] = rdot(h[n, c], W[o, c], c);"
LOSS = "Func s, f; In A, B; Var i, j; RVar d; s[i, j] = rdot(A[i, d], B[j, d], d); f[] = rmean(log(rsum(exp(s[i, j]), j)) - s[i, i], i);"
ROUTES = "Func s, f; In A, B, t; Var i; RVar j, d; s[i, j] = rdot(A[i, d], B[j, d], d); f[] = rmean(log(rsum(exp(s[i, j]), j)) - s[i, t[i]], i);"
TOTAL = "Func s, f; In A, B; Var i, j; RVar d; s[i, j] = rdot(A[i, d], B[j, d], d); f[] = rsum(log1p(exp(-s[i, j])), i, j);"
COSINE = "Func a, b, s, t, f; In Q, K, V, z; Var h, m, n; RVar l, d; a[h, m, d] = Q[h, m, d] * rsqrt(rsum(Q[h, m, d] * Q[h, m, d], d)); b[h, l, d] = K[h, l, d] * rsqrt(rsum(K[h, l, d] * K[h, l, d], d)); s[h, m, l] = exp(rdot(a[h, m, d], b[h, l, d], d) * exp(z[h])); t[h, m] = rsum(s[h, m, l], l); f[h, m, n] = rdot(s[h, m, l], V[h, l, n], l) / t[h, m];"
WEIGHTS = "Func s, p, f; In Q, K, V; Var h, m, n, l; RVar d; s[h, m, l] = rdot(Q[h, m, d], K[h, l, d], d); p[h, m, l] = exp(s[h, m, l]) / rsum(exp(s[h, m, l]), l); f[h, m, n] = rdot(p[h, m, l], V[h, l, n], l);"
MAMBA = "Func h, f; In D, A, B, C; Var b, t, d, n; h[b, t, d, n] = rrecur(exp(D[b, t, d] * A[d, n]), D[b, t, d] * B[b, t, n], t); f[b, t, d] = rsum(h[b, t, d, n] * C[b, t, n], n);"
HEADS = {"h": 64, "m": 2048, "l": 2048, "d": 64, "n": 64}


def scheduled(algorithm, outputs, sizes, in_order=False):
    algorithm = prepare_algorithm(algorithm, outputs)
    sizes = {x: next(n for y, n in sizes.items() if y == x or y in algorithm.tied_labels(x)) for x in algorithm.labels}
    found = default_schedule(algorithm, outputs, sizes, 2, H100, in_order)
    known = Known.of(with_operands(algorithm, found.subjects()), outputs)
    return algorithm, found, predicted_time(str(found), known, sizes, typed(algorithm, sizes, 2)[1], H100)


def forward(text, sizes):
    program = parse(text)
    return scheduled(program.algorithm, program.outputs(), sizes)


ROWS, PAIRS = {"n": 8192, "c": 2048, "o": 2048}, {"i": 8192, "j": 8192, "d": 512}


@pytest.mark.parametrize("text, stored", [(NORM, "f_left"), (RMS, "h")])
def test_a_norm_before_a_product_is_one_pass_and_a_product(text, stored):
    """Rows are read once: their sums, and the operand that they make, come from one kernel."""
    algorithm, found, _ = forward(text, ROWS)
    inside = {f: root for f, (root, _) in found.fused().items()}
    own = [f for f in (*algorithm.needed_by(("f",)), stored) if f not in inside]
    assert set(own) == {stored, "f"}, found
    assert found.sizes(stored, "tensorize")["c"] == 0, found


@pytest.mark.parametrize("text", [LOSS, ROUTES, TOTAL])
def test_a_loss_over_a_product_does_not_store_it(text):
    assert "s" in forward(text, PAIRS)[1].fused()


@pytest.mark.parametrize("text, microseconds", [(COSINE, 450), (WEIGHTS, 250)])
def test_factors_of_rows_leave_attention(text, microseconds):
    """86 us are the bound of the matrix units; with operands that each block computes COSINE took 476 us."""
    algorithm, _, took = forward(text, HEADS)
    assert took < microseconds
    assert not {"a", "b", "p"} & set(algorithm.funcs)


def test_the_product_that_others_are_made_of_is_not_the_main_one():
    """Blocks of one column of the result, each of which makes every score again, took 4.7 s."""
    program = parse(COSINE)
    found = gradient(differentiable_form(program.algorithm, ("f",)), ("f",), program.algorithm.inputs)
    assert scheduled(found.backward, tuple(found.grads.values()), HEADS)[2] < 2500


def test_the_count_of_largest_elements_is_made_once():
    """For each of 67 million elements it took half an hour."""
    program = parse("Func f; In A, B; RVar i, j, d; f[] = rmax(rdot(A[i, d], B[j, d], d), i, j);")
    found = gradient(differentiable_form(program.algorithm, ("f",)), ("f",), ("A", "B"))
    assert scheduled(found.backward, tuple(found.grads.values()), PAIRS)[2] < 2000


FALL = "Func v, f; In A; Var x; RVar t; v[x, t] = rscan(sum, A[x, t], t); f[x] = rmax(rscan(max, v[x, t], t) - v[x, t], t);"
CDF = "Func a, f; In A, B; Var x; RVar t; a[x, t] = exp(A[x, t]) / rsum(exp(A[x, t]), t) - exp(B[x, t]) / rsum(exp(B[x, t]), t); f[x] = rsum(abs(rscan(sum, a[x, t], t)), t);"
RANKS = "Func f; In A; Var x; RVar t; f[x] = rsum(log(rscan(sum, exp(A[x, t]), t, reversed)) - A[x, t], t);"
WAYS = "Func f; In A; Var x; RVar t; f[x] = rmax(rscan(sum, A[x, t], t) * rscan(max, A[x, t], t, reversed), t);"
DOWN = "Func f; In A; Var x; RVar t; f[x] = rmax(rscan(sum, A[t, x], t), t);"


@pytest.mark.parametrize("text, t, kernels", [(FALL, 1024, 1), (FALL, 20000, 1), (CDF, 1000, 1), (RANKS, 512, 1), (WAYS, 4096, 1), (WAYS, 5000, 2), (DOWN, 2048, 1)])
def test_scans_are_computed_where_what_reads_them_runs_along(text, t, kernels):
    """Those of both directions where a row is held."""
    algorithm, found, _ = forward(text, {"x": 4096, "t": t})
    assert len(algorithm.funcs) - sum(p.name == "fuse_at" for p in found.primitives) == kernels, found


GATE = "Func c, f; In A, B; Var b, t; RVar j; c[b, t] = rscan(sum, A[b, t], t); f[b, t] = rsum(where(j <= t, exp(c[b, t] - c[b, j]) * B[b, j], 0), j);"


def test_sums_over_different_labels_have_tiles_of_their_own():
    """Together they had one row a program: 10.9 ms, predicted."""
    found = gradient(differentiable_form(parse(GATE).algorithm, ("f",)), ("f",), ("A",))
    assert scheduled(found.backward, tuple(found.grads.values()), {"b": 256, "t": 512, "j": 512})[2] < 250


def test_steps_of_a_scan_are_loaded_together():
    _, found, took = forward(MAMBA, {"b": 4, "t": 2048, "d": 2048, "n": 16})
    assert found.sizes("f", "tensorize")["t"] >= 8 and took < 300


@pytest.mark.parametrize("form", ["plain", "scaled"])
def test_a_block_of_a_sum_of_what_data_picks_has_one_element_of_the_label_that_picks(form):
    """What lies between the first element of one class and the last of another is nearly everything: 4 s for a gradient of 1 GiB on an H100.

    Where the order of sums is free, each term is added where its index says (tests/unit/codegen/test_picked_terms.py).
    """
    value = {"plain": "W[t[x], y]", "scaled": "W[t[x], y] * s[x]"}[form]
    program = parse(f"Func f; In W, t{', s' if form == 'scaled' else ''}; Var x, y; f[x, y] = {value}; Extent y = W[1];")
    g = gradient(differentiable_form(program.algorithm, ("f",)), ("f",), ("W",))
    algorithm, found, _ = scheduled(g.backward, ("d_W",), {"x": 4096, "y": 4096, "W_0": 128256}, in_order=True)
    blocks = {label: size.size for p in found.primitives if p.name == "block" and p.func == "d_W" for label, size in ((s.label, s) for s in p.args)}
    assert blocks["W_0"] == 1 and blocks["y"] == 512, str(found)
    bounds = {label.label: label.size for p in found.primitives if p.name == "block" and p.func == "d_W_first" for label in p.args}
    assert bounds == {"W_0": 16}, "each index that is loaded is compared with 16 classes"


STEPS = 24
CHAIN = "Func low, {}, top, f; In A; Var x; RVar y; low[x] = rmax(A[x, y], y) - 1; {} top[x] = (rsum(where(A[x, y] > b{n}[x], A[x, y], 0), y) - 1) / rsum(where(A[x, y] > b{n}[x], 1, 0), y); f[x, y] = maximum(A[x, y] - top[x], 0);".format(
    ", ".join(f"b{i}" for i in range(1, STEPS + 1)),
    " ".join(f"b{i}[x] = {before}[x] + where(rsum(maximum(A[x, y] - {before}[x] - {2.0**-i:.17g}, 0), y) >= 1, {2.0**-i:.17g}, 0);" for i in range(1, STEPS + 1) for before in [f"b{i - 1}" if i > 1 else "low"]),
    n=STEPS,
)


def test_a_chain_of_values_that_are_each_read_twice():
    """Looked at once for each use it would be looked at 2^24 times; forward saves its last value, not the 24 sums that make it."""
    program = parse(CHAIN)
    _, found, _ = scheduled(program.algorithm, ("f",), {"x": 4096, "y": 4096})
    assert sum(p.name == "block" for p in found.primitives) == 1, "one kernel holds the row"
    g = gradient(differentiable_form(program.algorithm, ("f",)), ("f",), ("A",))
    assert g.forward_outputs == ("f", f"b{STEPS}_kept", "top_sum_kept")
