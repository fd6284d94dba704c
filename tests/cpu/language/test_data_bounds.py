# ruff: noqa: E501 (programs read best on one line)
"""Loops whose bounds are data: a mask that compares the label with what was loaded before the loop."""

import pytest
import torch
from oracle import check
from small_programs import MASKED, random

import dtkernels

#: rows: empty, in order, out of order, all of the keys, and beyond both ends
LO = torch.tensor([0, 0, 3, 3, 9, 9, 40, 12, 5, 0, 33, 34, 35, 36, -4, 2, 0, 1, 2, 3, 30])
HI = torch.tensor([0, 5, 9, 9, 9, 20, 40, 10, 35, 35, 35, 35, 35, 99, -1, 3, 0, 35, 2, 8, 31])
PROGRAM = MASKED.replace("In Q, K, V;", "In Q, K, V, {inputs};")
CONDITIONS = ["lo[m] <= l and l < hi[m]", "l < hi[m]", "not l < lo[m]", "l >= lo[m] and l <= m + hi[m]", "l > m - lo[m] and l < hi[m] - 2", "l == lo[m]", "l != lo[m]",
              "l < hi[m] or l == 3", "2 * l < hi[m]", "l < minimum(lo[m], hi[m])", "l < hi[m] and l % 2 == 0"]  # fmt: skip


def run(condition, lo, hi, m=8, l=8):  # noqa: E741 (labels)
    used = [(n, t) for n, t in (("lo", lo), ("hi", hi)) if n in condition]
    text = PROGRAM.format(condition=condition, scalars="", m=m, l=l, inputs=", ".join(n for n, _ in used))
    check(text, *random((21, 16), (35, 16), (35, 16)), *(t for _, t in used))
    return text


@pytest.mark.parametrize("condition", CONDITIONS)
def test_values(condition):
    run(condition, LO, HI)


@pytest.mark.parametrize("tiles", [(16, 16), (4, 32), (1, 8), (1, 1), (8, 1), (16, 0), (32, 4)])
def test_values_by_tile(tiles):
    run("lo[m] <= l and l < hi[m]", LO, HI, *tiles)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int8, torch.float32])
def test_values_of_any_dtype(dtype):
    run("lo[m] <= l and l < hi[m]", LO.to(dtype), HI.to(dtype))


def test_numbers_that_are_no_integers():
    run("lo[m] <= l and l < hi[m]", LO + 0.5, HI - 0.25)
    run("lo[m] < l and l <= hi[m]", LO + 0.5, HI - 0.25)
    infinite = HI.float()
    infinite[1::4] = torch.inf
    run("lo[m] <= l and l < hi[m]", -infinite, infinite)


def test_where_a_bound_is_nan_nothing_is_seen():
    lo, hi = LO.float(), HI.float()
    lo[3], hi[8] = torch.nan, torch.nan
    text = PROGRAM.format(condition="lo[m] <= l and l < hi[m]", scalars="", m=8, l=8, inputs="lo, hi")
    q, k, v = random((21, 16), (35, 16), (35, 16))
    found = dtkernels.compile(text)(q, k, v, lo, hi)
    keys = torch.arange(35)
    seen = (lo[:, None] <= keys) & (keys < hi[:, None])
    wanted = torch.where(seen.any(1, keepdim=True), torch.softmax(torch.where(seen, (q @ k.T).double(), -torch.inf), -1), 0.0) @ v.double()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


def loops(text, label="l"):
    return [part.split(":")[0] for part in dtkernels.compile(text).source.split(f"for {label}_start in ")[1:]]


def test_tiles_that_no_row_sees_are_skipped():
    text = run("lo[m] <= l and l < hi[m]", LO, HI)
    assert loops(text) == ["range(l_begin, min(l_full, l_end), TILE_l)", "range(l_full, l_partial, TILE_l)", "range(l_partial, l_end, TILE_l)"]
    source = dtkernels.compile(text).source
    assert "l_end = min(size_l, tl.max(tl.where(m_ok, ceil_to_int(hi), -1000000000), 0))" in source
    whole = source.split("for l_start in ")[2]
    assert "lo[:, None]" not in whole and "l_ok" not in whole


@pytest.mark.parametrize("condition", ["l < t[l]", "l < hi[m] + t[l]", "t[l] < m", "l < hi[m] * lo[m]"])
def test_what_is_not_known_before_the_loop_is_no_bound(condition):
    text = PROGRAM.format(condition=condition, scalars="", m=8, l=8, inputs=", ".join(n for n in ("lo", "hi", "t") if f"{n}[" in condition))
    assert not any("l_end" in loop or "l_begin" in loop for loop in loops(text))


def test_one_bound_of_a_block():
    """``N[b]`` is one number for a block: no reduction."""
    text = ("Func s, f; In A, N; Var b, x; RVar y; s[b, x, y] = where(y < N[b], A[b, x, y], 0); f[b, x] = rsum(s[b, x, y], y);"
            " s.fuse_at(f, y); f.block(b:1, x:4); f.tensorize(b:1, x:4, y:8);")  # fmt: skip
    a = random((4, 9, 30))
    check(text, a, torch.tensor([0, 30, 7, 45]))
    assert "y_end = min(size_y, ceil_to_int(N))" in dtkernels.compile(text).source


@pytest.mark.parametrize("parts", [2, 4])
def test_a_split_loop_ends_in_every_part(parts):
    text = PROGRAM.format(condition="lo[m] <= l and l < hi[m]", scalars="", m=8, l=4, inputs="lo, hi") + f"att.split(l:{parts});"
    check(text, *random((21, 16), (35, 16), (35, 16)), LO, HI)
    assert "tl.max(tl.where(m_ok" in dtkernels.compile(text).source
