# ruff: noqa: E501 (programs read best on one line)
"""Several labels as one, copies with other rows, and joined loops: convolutions and other products, against the float64 reference."""

import re

import pytest
import torch
from oracle import check
from small_programs import random
from window_forms import FORMS

import dtkernels
from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.autoschedule.stand_ins.merged_labels import MergedLabels
from dtkernels.codegen.lower.merged_labels import declare_merged_labels
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.runtime.build.source_cache import load_module

CONV = FORMS["conv2d"].text
TILED = "f.block(b:1, o:16, y:1, x:16); f.tensorize(b:1, o:16, x:16, c:16);"
MERGED = "f.merge(p, b, y, x); f.block(o:16, p:32); f.tensorize(o:16, p:32, c:16);"
SUMS = "f.merge(p, b, y, x); f.merge(k, c, r, s); f.block(o:16, p:32); f.tensorize(o:16, p:32, k:16);"
SCHEDULES = {
    "a tile along one label": TILED,
    "copies with channels last": TILED + "f.stage(A:c, W:c);",
    "copies with outputs last": TILED + "f.stage(A:c, W:o);",
    "positions as one": MERGED,
    "positions as one, of copies": MERGED + "f.stage(A:c, W:c);",
    "positions of one image": "f.merge(p, y, x); f.block(b:1, o:16, p:16); f.tensorize(b:1, o:16, p:16, c:16); f.stage(A:c);",
    "channels and taps as one": SUMS,
    "channels and taps as one, taps known": SUMS + "f.specialize(r, s);",
    "channels and taps in parts": SUMS + "f.split(k:3);",
    "taps first": MERGED + "f.reorder(r, s, c);",
    "persistent": MERGED + "f.persistent(); f.map(o, p);",
    "positions cut into loops": "f.merge(p, b, y, x); f.block(o:16, p:64); f.tensorize(o:16, p:16, c:16);",
    "positions one by one": "f.merge(p, b, y, x); f.block(p:4); f.tensorize(c:0, r:0, s:0);",
    "through descriptors": TILED.replace("y:1, x:16", "y:1, x:16") + "f.stage(A:c, W:c); f.descriptor(W);",
}


@pytest.mark.parametrize("shapes", [((2, 3, 10, 11), (4, 3, 3, 3)), ((3, 20, 5, 7), (18, 20, 3, 2)), ((1, 1, 3, 3), (1, 1, 1, 1)), ((2, 16, 8, 33), (16, 16, 2, 5))])
@pytest.mark.parametrize("name", SCHEDULES)
def test_convolutions(name, shapes):
    check(CONV + SCHEDULES[name], *random(*shapes))


def test_inputs_that_do_not_lie_dense():
    a, w = random((2, 20, 9, 14), (18, 20, 3, 6))
    for schedule in (MERGED, MERGED + "f.stage(A:c, W:c);", SUMS):
        check(CONV + schedule, a[..., ::2], w[..., 1:4])
        check(CONV + schedule, a.transpose(2, 3), w.transpose(0, 1)[:, :20].contiguous().transpose(0, 1))


GROUPS = (
    "Func mean, var, f; In A, gamma; Var b, g, o, y, x; mean[b, g] = rmean(A[b, g, o, y, x], o, y, x);"
    "var[b, g] = rmean((A[b, g, o, y, x] - mean[b, g]) * (A[b, g, o, y, x] - mean[b, g]), o, y, x);"
    "f[b, g, o, y, x] = (A[b, g, o, y, x] - mean[b, g]) * rsqrt(var[b, g] + 0.00001) * gamma[g, o];"
)
CHANNELS = GROUPS.replace("[b, g]", "[o]").replace("o, y, x);", "b, g, y, x);").replace("gamma[g, o]", "gamma[o]")


@pytest.mark.parametrize("text", [GROUPS, CHANNELS], ids=["groups", "channels"])
def test_sums_over_images_of_odd_sizes_go_along_both_dimensions_as_one(text):
    """As the rules choose it at a large size, at a small one."""
    algorithm = prepare_algorithm(parse(text).algorithm, ("f",))
    schedule = default_schedule(algorithm, ("f",), dict(b=16, g=8, o=8, y=258, x=258), 2, target("h200"))
    assert any(("y", "x") in schedule.merged(f).values() for f in algorithm.funcs), str(schedule)
    check(text + str(schedule), *random((2, 3, 5, 17, 19), (3, 5) if text is GROUPS else (5,)))


POINTWISE = "Func f; In A, W; Var b, o, y, x; RVar c; f[b, o, y, x] = rdot(A[b, c, y, x], W[o, c], c);"


@pytest.mark.parametrize("given", ["dense", "a part of rows", "turned"])
@pytest.mark.parametrize("labels", ["y, x", "b, y, x", "x, y"])
def test_labels_that_every_tensor_has_together(labels, given):
    text = POINTWISE + f"f.merge(p, {labels}); f.block({'' if 'b' in labels else 'b:1, '}o:16, p:32); f.tensorize({'' if 'b' in labels else 'b:1, '}o:16, p:32, c:16);"
    a, w = random((2, 20, 5, 9), (17, 20))
    check(text, {"dense": a, "a part of rows": random((2, 20, 5, 11), (1,))[0][..., 1:10], "turned": a.transpose(2, 3)}[given], w)


def test_a_merged_label_in_blocks_of_one():
    check("Func f; In A; Var x, y; f[y, x] = 2 * A[x, y]; f.merge(p, x, y); f.block(p:1);", random((5, 9), (1,))[0])


def test_tensors_of_merged_labels_are_read_as_one_dimension_where_they_are():
    source = dtkernels.compile(POINTWISE + "f.merge(p, y, x); f.block(b:1, o:16, p:32); f.tensorize(b:1, o:16, p:32, c:16);").source
    assert "(p[None, :]) * A_stride_x if DENSE_A_2_3 else" in source and "DENSE_f_2_3=f_out.stride(2) == size_x * f_out.stride(3)" in source


GROUPED = "Func f; In A, W; Var b, k; RVar g, c; f[b, k] = rdot(A[b, g, c], W[g, c, k], g, c); f.merge(p, g, c); f.block(b:16, k:16); f.tensorize(b:16, k:16, p:16);"
DESCRIBED = {
    "a result": POINTWISE + "f.merge(p, y, x); f.block(b:1, o:16, p:32); f.tensorize(b:1, o:16, p:32, c:16); f.descriptor(A, f);",
    "a sum": GROUPED + "f.descriptor(A, W, f);",
    "parts of a sum": GROUPED + "f.descriptor(A, W); f.split(p:3);",
}


@pytest.mark.parametrize("given", ["dense", "a part of rows", "turned", "one row for all"])
@pytest.mark.parametrize("name", DESCRIBED)
def test_merged_dimensions_are_one_of_a_descriptor(name, given):
    """Where they lie dense; pointers go along the labels one by one elsewhere."""
    a, w = random((2, 20, 5, 8), (17, 20)) if name == "a result" else random((19, 5, 12), (5, 12, 20))
    last = a.dim() - 2, a.dim() - 1
    forms = {
        "dense": a, "a part of rows": a.repeat_interleave(2, -1)[..., : a.shape[-1]],
        "turned": a.transpose(*last).contiguous().transpose(*last), "one row for all": a[..., :1, :].expand_as(a),
    }  # fmt: skip
    source = dtkernels.compile(DESCRIBED[name]).source
    taken = re.search(rf"if (A\.stride.*) and described\(\(joined_dimensions\(A, {last[0]}, {last[1]}\), (\(.*?\))\)", source)
    module = load_module(source, "merged_descriptors")
    sizes = {"A": forms[given], "W": w, "size_x": 8, "size_c": 12, "f_out": torch.empty(2, 17, 5, 8)}
    dense = eval(taken[1], sizes)
    assert dense == (given == "dense")
    assert not dense or module.described((module.joined_dimensions(a, *last), eval(taken[2])))
    check(DESCRIBED[name], forms[given], w)


@pytest.mark.parametrize("name", ["conv1d, strided, dilated, padded", "conv2d with a bias", "conv3d", "transposed conv1d", "patches"])
def test_other_windows(name):
    form = FORMS[name]
    first = dtkernels.lang.parse(form.text).algorithm["f"]
    positions = [x for x in first.labels if x != "o"]
    text = form.text + f"f.merge(p, {', '.join(positions)}); f.block(o:16, p:16); f.tensorize(o:16, p:16, c:16);"
    check(text, *random(*form.shapes.values()))


def test_epilogues_and_fused_funcs_know_each_label():
    text = "Func s, f; In A, W, v; Var b, o, y, x; RVar c, r; Extent x = A[3] - W[2] + 1; s[b, o, y, x] = rdot(A[b, c, y, x + r], W[o, c, r], c, r); f[b, o, y, x] = where(y < x, s[b, o, y, x], 0) * v[y] + o; "
    more = "s.fuse_at(f, x); f.merge(p, b, y, x); f.block(o:16, p:32); f.tensorize(o:16, p:32); s.tensorize(c:16);"
    check(text + more, *random((2, 17, 3, 9), (5, 17, 3), (3,)))


def test_a_sum_over_merged_labels_without_a_product():
    check("Func f; In A; Var x; RVar y, z; f[x] = rsum(exp(A[x, y, z]), y, z); f.merge(k, y, z); f.block(x:4); f.tensorize(x:4, k:16);", *random((7, 5, 9), (1,))[:1])
    check("Func f; In A; Var x; RVar y, z; f[x] = rmax(A[x, y, z], y, z); f.merge(k, y, z); f.block(x:4); f.tensorize(x:4, k:16); f.split(k:2);", *random((7, 5, 9), (1,))[:1])


GRADIENT = "Func d; In D, A; Var o, c, r; RVar b, x; Extent r = A[2] - D[2] + 1; d[o, c, r] = rdot(D[b, o, x], A[b, c, x + r], b, x);"


@pytest.mark.parametrize("more", ["", "d.stage(D:o, A:c);", "d.split(k:4);", "d.split(k:4); d.stage(D:o, A:c);"])
def test_products_over_positions(more):
    check(GRADIENT + "d.merge(k, b, x); d.block(o:16, c:16, r:1); d.tensorize(o:16, c:16, k:16);" + more, *random((3, 18, 11), (3, 17, 13)))


REFUSED = {
    "f.merge(p, y, c);": "merge names labels of the result, or labels of one sum",
    "f.merge(p, y, u);": "merge names a label of f: found 'u'",
    "f.merge(x, y, b);": "merge gives the labels a new name: found 'x'",
    "f.merge(p, y);": "arguments of merge",
    "f.merge(p, y, y);": "merge names a label once: found 'y' twice",
    "f.merge(p, y, x); f.merge(q, b, y);": "merge names a label once",
    "f.merge(p, y, x);": "block names a label that f has a loop or blocks along: found y, which is a part of p; allowed: p",
    "f.stage(A:x);": "the rows of a copy of A lie along a label that indexes it by itself: found x",
    "f.stage(A:u);": "stage names a label of f: found 'u'",
}


@pytest.mark.parametrize("more", REFUSED)
def test_what_is_refused(more):
    with pytest.raises(dtkernels.DTError, match=REFUSED[more]):
        dtkernels.compile(CONV + TILED + more)


def test_labels_of_the_result_that_a_fused_sum_goes_over_are_of_the_result():
    text = "Func t, f; In A; Var b, y, x; t[b] = rsum(A[b, y, x], y, x); f[b, y, x] = A[b, y, x] - t[b]; "
    text += "t.fuse_at(f, b); f.merge(p, y, x); f.block(b:1, p:16); f.tensorize(b:1, p:16);"
    declared = declare_merged_labels(parse(text)).algorithm
    assert "p" in declared.vars and "p" not in declared.rvars


def test_descriptors_of_tensors_with_two_runs_of_dimensions_as_one():
    """The later run is joined first: the numbers of its dimensions are those of the tensor as it is."""
    text = "Func f; In Z, X; Var d, e, s; RVar b, m; f[d, e, s] = rdot(Z[b, m, e, s], X[b, m, d], b, m); f.merge(k, b, m); f.merge(p, e, s);"
    text += "f.block(d:16, p:16); f.tensorize(d:16, p:16, k:16); f.descriptor(Z);"
    assert "joined_dimensions(joined_dimensions(Z, 2, 3), 0, 1)" in dtkernels.compile(text).source
    check(text, *random((3, 20, 8, 5), (3, 20, 17)))


COPIED = "Func r, s; In D, g; Var b, y, x, o; r[b, y, x, o] = 2 * D[b, y, x, o]; s[o] = rsum(D[b, y, x, o], b, y, x) * g[o]; r.compile(); s.compile(); r.fuse_at(s, x); s.merge(p, b, y, x); "


@pytest.mark.parametrize("given", ["dense", "turned"])
@pytest.mark.parametrize(
    "more",
    ["s.block(o:4); s.tensorize(p:16, o:4);", "s.block(o:4); s.tensorize(p:0, o:4);", "s.block(o:4); s.tensorize(p:8, o:4); s.split(p:3);"],
)
def test_an_output_is_stored_in_a_merged_loop_or_tile(more, given):
    d, g = random((2, 5, 7, 9), (9,))
    check(COPIED + more, d if given == "dense" else d.transpose(1, 2).contiguous().transpose(1, 2), g)


def test_a_diagonal_of_merged_labels_is_not_all_of_an_output():
    text = "Func r, s; In D; Var x, y, o; r[x, y] = 2 * D[x, y]; s[o] = rsum(r[x, x] * D[x, o], x); r.fuse_at(s, x); s.block(o:4); s.tensorize(x:4, o:4);"
    with pytest.raises(dtkernels.DTError, match="an output is computed over all its labels: found r is not"):
        dtkernels.compile(text + "r.compile(); s.compile();")


COLUMNS = (
    "Func d, c, e; In X, D, g; Var b, y, x, j; d[b, y, x, j] = D[b, y, x, j] * sigmoid(X[b, y, x, j] * g[j]); c[j] = rsum(d[b, y, x, j], b, y, x);"
    "e[j] = rsum(d[b, y, x, j] * X[b, y, x, j], b, y, x);"
)
NORM = (
    "Func u, h, g, f; In X, D, s; Var b, c, y, x; u[b, c, y, x] = D[b, c, y, x] * sigmoid(X[b, c, y, x] * s[b, c]); h[b, c] = rsum(u[b, c, y, x], y, x);"
    "g[b, c] = rsum(u[b, c, y, x] * X[b, c, y, x], y, x); f[b, c, y, x] = u[b, c, y, x] * s[b, c];"
)


@pytest.mark.parametrize(
    "text, outputs, sizes, shapes",
    [
        (COLUMNS, ("d", "c", "e"), dict(b=16, y=14, x=14, j=3040), ((2, 5, 7, 40), (2, 5, 7, 40), (40,))),
        (NORM, ("h", "g", "f"), dict(b=32, c=256, y=27, x=27), ((2, 3, 5, 7), (2, 3, 5, 7), (2, 3))),
    ],
    ids=["columns", "norm"],
)
@pytest.mark.parametrize("given", ["dense", "turned"])
def test_schedules_of_algorithms_with_merged_labels_are_right_at_small_sizes(text, outputs, sizes, shapes, given):
    algorithm = prepare_algorithm(parse(text).algorithm, outputs)
    merged = MergedLabels.of(algorithm, outputs, sizes)
    schedule = merged.restored(algorithm, default_schedule(merged.algorithm, outputs, merged.sizes, 2, target("h200")))
    assert any("y" in parts for f in algorithm.funcs for parts in schedule.merged(f).values()), str(schedule)
    first, *rest = random(*shapes)
    check(text + str(schedule), first if given == "dense" else first.transpose(1, 2).contiguous().transpose(1, 2), *rest)


@pytest.mark.parametrize("schedule", ["f.tensorize(t:16, o:16, i:16, m:32);", "f.tensorize(t:16, o:16, m:16);", "f.tensorize(t:16, o:16, i:16, m:16); f.split(m:2);"])
def test_a_product_over_some_of_the_labels_of_a_merged_sum_goes_along_these(schedule):
    text = "Func f; In A, W, X, V; Var t, o; RVar i, g; f[t, o] = rdot(A[t, i, g], W[o, i, g], i, g) + rdot(X[t, i], V[o, i], i); f.merge(m, i, g); f.block(t:16, o:16);"
    check(text + schedule, *random((19, 13, 5), (21, 13, 5), (19, 13), (21, 13)))
