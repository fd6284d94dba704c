# ruff: noqa: E501 (programs and error texts read best on one line)
"""Scans in the text, in the algebra, in the gradient and in the nest, and what is refused."""

import pytest

from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import differentiable_form, prepare, prepare_algorithm
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.ir.nest import nest_text
from dtkernels.codegen.pipeline import check_unused_statements, lower
from dtkernels.lang import DTError, parse
from dtkernels.runtime.signature.dim_collapse import collapsible_label

ROWS = "Func f; In A; Var x, t; f[x, t] = "
TWO = "Func g, f; In A; Var x, t; g[x, t] = rscan(sum, A[x, t], t); f[x, t] = "


def algebra(text: str) -> list[str]:
    return [str(d) for d in prepare_algorithm(parse(text).algorithm, ("f",)).definitions]


@pytest.mark.parametrize("scan", ["rscan(sum, A[x, t], t)", "rscan(max, A[x, t], t, reversed)", "rscan(prod, A[x, t], t, exclusive)", "rrecur(A[x, t], 1, t, reversed)"])
def test_text_and_value_are_the_same_again(scan):
    program = parse(ROWS + scan + ";")
    assert parse(str(program)) == program and scan in str(program)


def test_each_scan_gets_a_func():
    assert algebra(ROWS + "A[x, t] / rscan(sum, A[x, t], t);") == ["f_sum[x, t] = rscan(sum, A[x, t], t);", "f[x, t] = A[x, t] / f_sum[x, t];"]
    assert algebra("Func f; In A; Var y, x; f[y, x] = rscan(sum, rscan(sum, A[y, x], x), y);") == [
        "f_sum[y, x] = rscan(sum, A[y, x], x);", "f[y, x] = rscan(sum, f_sum[y, x], y);"]  # fmt: skip


def test_exclusive_is_the_scan_of_earlier_terms():
    assert algebra(ROWS + "rscan(prod, A[x, t], t, exclusive);") == ["f[x, t] = rscan(prod, where(t == 0, 1, A[x, t - 1]), t);"]
    assert algebra(ROWS + "rscan(max, A[x, t], t, exclusive, reversed);") == ["f[x, t] = rscan(max, where(t == len(t) - 1, -inf, A[x, t + 1]), t, reversed);"]


def test_no_factor_and_no_maximum_is_moved_through_a_scan():
    """A factor that varies along the scan stays in it, and nothing is subtracted from the argument of its exp."""
    text = "Func f; In A, B; Var x; RVar t; f[x] = rsum(B[x] * rscan(sum, exp(A[x, t]), t), t);"
    assert algebra(text) == ["f_sum[x, t] = rscan(sum, exp(A[x, t]), t);", "f[x] = rsum(f_sum[x, t], t) * B[x];"]


def test_sums_inside_get_funcs_of_their_own():
    assert algebra("Func f; In A; Var x, t; RVar k; f[x, t] = rscan(sum, rsum(A[x, t, k], k), t);") == ["f_term[x, t] = rsum(A[x, t, k], k);", "f[x, t] = rscan(sum, f_term[x, t], t);"]


GRADIENTS = {
    "rscan(sum, A[x, t], t)": ["d_f_scan[x, t] = rscan(sum, d_f[x, t], t, reversed);", "d_A[x, t] = d_f_scan[x, t];"],
    "rscan(sum, A[x, t], t, reversed)": ["d_f_scan[x, t] = rscan(sum, d_f[x, t], t);", "d_A[x, t] = d_f_scan[x, t];"],
    "rrecur(0.5, A[x, t], t)": ["d_f_scan[x, t] = rrecur(where(t == len(t) - 1, 0, 0.5), d_f[x, t], t, reversed);", "d_A[x, t] = d_f_scan[x, t];"],
    "rscan(max, A[x, t], t)": ["d_f_scan[x, t] = rrecur(where(t == len(t) - 1, 0, where(A[x, t + 1] >= f[x, t], 0, 1)), d_f[x, t], t, reversed);",
                               "d_A[x, t] = where(t == 0 or A[x, t] >= f[x, t - 1], d_f_scan[x, t], 0);"],
}  # fmt: skip


@pytest.mark.parametrize("scan", GRADIENTS)
def test_the_gradient_runs_the_other_way(scan):
    found = gradient(differentiable_form(parse(ROWS + scan + ";").algorithm, ("f",)), ("f",), ("A",))
    assert [str(d) for d in found.backward.definitions] == GRADIENTS[scan]


def test_a_batch_is_not_folded_into_the_scan():
    a = prepare_algorithm(parse("Func f; In A; Var t, x; f[t, x] = rscan(sum, A[t, x], t);").algorithm, ("f",))
    assert collapsible_label(a, "t") is None


def test_tiles_carry_what_the_last_one_left():
    (kernel,) = lower(prepare(parse(ROWS + "rscan(sum, A[x, t], t); f.block(x:4); f.tensorize(x:4, t:64);")))
    text = nest_text(kernel)
    assert "accumulate f_carry[x] from 0.0" in text and "scan_sum(A, t)" in text and "f_carry <- sum(where(" in text
    (kernel,) = lower(prepare(parse(ROWS + "rscan(sum, A[x, t], t); f.block(x:4); f.tensorize(x:4, t:0);")))
    assert "carry" not in nest_text(kernel)
    (kernel,) = lower(prepare(parse(ROWS + "rscan(sum, A[x, t], t); f.block(x:4); f.tensorize(x:4);")))
    assert "scan_sum" not in nest_text(kernel) and "f_carry <- f" in nest_text(kernel)


ERRORS = {
    ROWS + "rscan(mean, A[x, t], t);": "t.dt:1:41: unknown scan: found 'mean'; allowed: sum, prod, max, min: rscan(sum, e, t)",
    ROWS + "rscan(sum, A[x, t], q);": "t.dt:1:35: undeclared label: found 'q'; allowed: x, t",
    ROWS + "rscan(sum, A[x, t]);": "t.dt:1:53: syntax: found ')'; allowed: ',' and the label to run along: rscan(sum, e, t)",
    ROWS + "rscan(sum, A[x, t], t, backwards);": "t.dt:1:58: how a scan runs: found 'backwards'; allowed: reversed, exclusive",
    ROWS + "rrecur(A[x, t], A[x, t], t, exclusive);": "t.dt:1:63: how a scan runs: found 'exclusive'; allowed: reversed",
    ROWS + "rscan(sum, A[x, t], t); f.block(t:8);": "t.dt:1:59: one program runs through a scan: found f in blocks of t, along which f runs; allowed: tiles of t, f.tensorize(t:64), and blocks of other labels",
    ROWS + "rscan(sum, A[x, t], t); f.tensorize(x:4, t:4); f.reorder(t, x);": "t.dt:1:25: the loop along a scan is inside all other loops: found f along t, with a loop inside; allowed: reorder(x, t)",
    TWO + "g[x, t - 1] + g[x, t]; g.fuse_at(f, t); f.tensorize(t:8);": "t.dt:1:28: a scan is computed at each element in turn: found g at (t - 1); allowed: g in a kernel of its own",
    TWO + "rscan(sum, g[x, t], t, reversed); g.fuse_at(f, t); f.tensorize(t:8);": "t.dt:1:28: scans of both directions along a label share a tile: found g, the other way along t; allowed: tensorize(t:0), or g in a kernel of its own",
    TWO.replace("f[x, t]", "f[x]") + "rsum(g[x, t], t); g.fuse_at(f, t); f.tensorize(t:4); f.split(t:2);": "t.dt:1:122: split(t:2): found g in the loop over t, which one program runs through; allowed: g in a kernel of its own",
    TWO.replace("f[x, t]", "f[x]").replace("t);", "t, reversed);").replace("x, t;", "x, t; RVar k; Extent k = A[1];") + "rsum(g[x, k], k); g.fuse_at(f, k); f.tensorize(k:4);": "t.dt:1:53: a loop along a scan runs the way that the scan does: found g in a loop over k, the other way; allowed: a loop over t, or g in a kernel of its own",
    TWO + "g[x, t] * 2; g.chunk(t:8);": "t.dt:1:85: a scan is not cut into pieces: found chunk(t:8), along which g runs; allowed: another label",
}  # fmt: skip


@pytest.mark.parametrize("text", ERRORS)
def test_errors(text):
    with pytest.raises(DTError) as error:
        prepared = prepare(parse(text, "t.dt"))
        check_unused_statements(prepared)
        emit(prepared)
    assert str(error.value) == ERRORS[text]
