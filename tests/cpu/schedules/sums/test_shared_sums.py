# ruff: noqa: E501 (programs read best on one line)
"""Sums that several sums share, by name in a schedule; and sums that a program makes once, not in each iteration of a loop that they lack. Against float64."""

import pytest
from oracle import check
from small_programs import random

from dtkernels.algebra.pipeline import prepare
from dtkernels.codegen.ir.nest import Loop
from dtkernels.codegen.pipeline import lower
from dtkernels.lang import parse

TWO = """Func a, f, b; In D, A, w, r; Var n, c, s; a[n] = rsum(D[n, c, s] * w[c] * A[n, c, s], c, s);
f[n, c, s] = D[n, c, s] + a[n]; b[c] = rsum(A[n, c, s] * (r[n] * D[n, c, s]), n, s);
b.block(c:4); b.tensorize(c:4, n:2); f.compile(); b.compile(); """


@pytest.mark.parametrize("schedule", [
    "a_sum.block(n:1, c:4); a_sum.tensorize(n:1, c:4, s:16); a.fuse_at(f, n); f.block(n:1, s:16); f.tensorize(n:1, c:0, s:16);",
    "a_sum.block(n:1, c:4); a_sum.tensorize(n:1, c:4, s:16); a_sum.split(s:2); a.block(n:2); a.tensorize(n:2, c:0); f.block(n:1, c:2, s:16); f.tensorize(n:1, c:2, s:16);",
    "a_sum.fuse_at(a, c); a_sum.store(); a.fuse_at(f, n); f.block(n:1); f.tensorize(n:1, c:2, s:0);",
    "a_sum.fuse_at(f, n); a_sum.store(); a.fuse_at(f, n); f.block(n:1); f.tensorize(n:1, c:0, s:0);",
])  # fmt: skip
def test_a_shared_sum_is_computed_where_a_schedule_says(schedule):
    check(TWO + schedule, *random((3, 5, 37), (3, 5, 37), (5,), (3,)))


NORM = """Func m, v, f; In A; Var c; RVar b, i; m[c] = rmean(A[b, c, i], b, i); v[c] = rmean((A[b, c, i] - m[c]) * (A[b, c, i] - m[c]), b, i);
f[b, c, i] = (A[b, c, i] - m[c]) * rsqrt(v[c] + 0.00001); v.fuse_at(f, c); """


@pytest.mark.parametrize("mean", ["m.fuse_at(v, i);", "m.fuse_at(f, c);"])
@pytest.mark.parametrize("tiles", ["f.block(c:1); f.tensorize(b:1, i:16);", "f.block(c:2); f.tensorize(c:2, b:2, i:0);", "f.block(c:1); f.tensorize(b:1, i:0); f.split(b:2);"])
def test_sums_are_made_before_loops_over_labels_that_they_lack(mean, tiles):
    """The loop over b comes first among the labels of f, and c has none: v would be summed anew for each b."""
    check(NORM + mean + tiles, random((5, 3, 37)))
    for kernel in lower(prepare(parse(NORM + mean + tiles))):
        inside = [s for loop in kernel.body if isinstance(loop, Loop) and not loop.reduces for s in loop.body]
        assert not any(isinstance(s, Loop) and s.reduces for s in inside), kernel.name
