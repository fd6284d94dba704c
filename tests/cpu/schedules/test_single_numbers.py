# ruff: noqa: E501 (programs read best on one line)
"""Loops over products that also read a number a row, as attention's backward does: copies with aligned rows, and the last tile by itself."""

import pytest
from oracle import check
from small_programs import random

import dtkernels

TEXT = """Func s, e, u, d, f, g; In Q, K, O, t; Var b, m, l, n, k;
s[b, m, l] = rdot(Q[b, m, k], K[b, l, k], k);
e[b, m, l] = {e};
u[b, m] = rsum(O[b, m, n], n);
d[b, m, l] = e[b, m, l] * (rdot(O[b, m, n], K[b, l, n], n) + u[b, m]);
f[b, l, k] = rdot(d[b, m, l], Q[b, m, k], m);
g[b, l, n] = rdot(e[b, m, l], O[b, m, n], m);
s.fuse_at(f, m); e.fuse_at(f, m); d.fuse_at(f, m); g.fuse_at(f, m);
u.block(b:1, m:16); u.tensorize(b:1, m:16, n:0);
f.block(b:1, l:16); f.tensorize(b:1, l:16, k:0, n:0, m:16); {more}
f.compile(); g.compile();
"""
SHIFT = "exp(s[b, m, l] - where(t[b, m] > -inf, t[b, m], 0))"
MASKED = "where(l <= m, " + SHIFT + ", 0)"


def text(more, e=SHIFT):
    return TEXT.replace("{e}", e).replace("{more}", more)


def source(more, e=SHIFT):
    return dtkernels.compile(text(more, e)).source


def kernel(source, name):
    """The text of one kernel."""
    return source.split(f"def {name}_kernel(")[1].split("@triton.jit")[0].split("\ndef ")[0]


def inputs(rows):
    q, k, o, t = random((2, rows, 16), (2, 21, 16), (2, rows, 16), (2, rows))
    t[0, 0] = float("-inf")
    return q / 4, k, o, t


@pytest.mark.parametrize("e", [SHIFT, MASKED, SHIFT + " + t[b, m] * 0"])
@pytest.mark.parametrize("more", ["", "f.stage(t);", "f.stage(t, u);", "f.stage(u, t); f.descriptor(Q, O, t, u);"])
@pytest.mark.parametrize("rows", [1, 16, 37, 48])
def test_results_are_the_same_however_numbers_are_read(rows, more, e):
    q, k, o, t = inputs(rows)
    check(text(more, e), q, k, o, t.nan_to_num(neginf=-3.0) if "+" in e else t)


def test_the_copy_of_a_shift_is_never_minus_infinity():
    made = source("f.stage(t);")
    assert "tl.where(t > " in kernel(made, "t_rows") and "tl.where(t" not in kernel(made, "f")
    assert "* 1.4426950408889634" in kernel(made, "t_rows") and "t_rows * " not in kernel(made, "f"), "in base two"
    assert kernel(made, "f").count("tl.exp2(") == kernel(source(""), "f").count("tl.exp2(")
    both = source("f.stage(t);", SHIFT + " + t[b, m] * 0")
    assert "tl.where(t > " not in kernel(both, "t_rows") and "tl.where(t_rows > " in kernel(both, "f")


def test_staging_what_another_kernel_makes_aligns_its_rows():
    assert source("f.stage(u);") == source("u.align();") != source("")
    assert "u_out = torch.empty((size_b, -(-size_m // 64) * 64)" in source("f.stage(u);")


def test_where_rows_of_numbers_start_is_said_in_the_kernel():
    """Of a build for any number of rows Triton does not see it in the strides."""
    made = source("f.stage(t, u);")
    for name in ("t_rows", "u"):
        assert f"tl.multiple_of(b * {name}_stride_b, 16)" in kernel(made, "f")
    assert "multiple_of" not in source("") + source("f.stage(Q);").replace("t_rows", "")


@pytest.mark.parametrize("more, rule", [
    ("f.stage(g);", "stage names an input, or what another kernel makes for this one: found g; allowed: u, K, O, Q, t"),
    ("f.stage(e);", "stage names an input, or what another kernel makes for this one: found e"),
    ("u.stage(t);", "stage names an input of u: found t; allowed: O"),
])  # fmt: skip
def test_what_cannot_be_staged_is_said(more, rule):
    with pytest.raises(dtkernels.DTError, match=rule):
        source(more)


def test_what_a_descriptor_brings_is_added_behind_the_product():
    made = source("f.stage(t, u); f.descriptor(Q, O, t, u);")
    assert "- (-u)[:, None]" in kernel(made, "f_descriptor") or "- (-u)[None, :]" in kernel(made, "f_descriptor")
    assert "-u)" not in kernel(made, "f")


@pytest.mark.parametrize("e, loops", [(SHIFT, 2), (MASKED, 3)])
def test_the_last_tile_of_a_loop_with_two_sums_loads_nothing_ahead(e, loops):
    def over_m(text):
        return [line.strip() for line in text.splitlines() if line.strip().startswith("for m_start")]

    *whole, tail = over_m(kernel(source("", e), "f"))
    assert len(whole) + 1 == loops and tail.endswith("num_stages=1):") and not any("num_stages=1" in w for w in whole)


def test_between_the_diagonal_and_the_last_tile_only_that_asks_for_the_extent():
    first, middle, tail = kernel(source("", MASKED), "f").split("for m_start")[1:]
    assert "m_ok" not in first and "m_ok" not in middle and "m_ok" in tail
    assert all(("tl.where(l[:, None] <= m" in loop) == (loop is not middle) for loop in (first, middle, tail))
