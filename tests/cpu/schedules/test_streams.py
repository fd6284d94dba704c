"""One pass for two products (skinny_gemm_pair.py), odd sizes and few rows: the numbers of the schedules that the default schedule makes."""

import pytest
from oracle import check
from small_programs import random

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.default_schedule import schedules
from dtkernels.autoschedule.rules import chained_gemm, skinny_gemm_pair
from dtkernels.codegen.target import target
from dtkernels.lang import parse

BACKWARD = """Func s, f, d, e; In X, C, B, A, W; Var m, n, k, l;
s[m, l] = rdot(X[m, n], C[l, n], n); d[m, k] = rdot(s[m, l], B[k, l], l);
e[k, l] = rdot(A[m, k], s[m, l], m); f[l, n] = rdot(W[m, l], X[m, n], m);
"""
CHAIN = "Func mm, f; In A, B, C; Var m, n; RVar l, k; mm[m, l] = rdot(A[m, k], B[k, l], k); f[m, n] = rdot(mm[m, l], C[l, n], l);"


def made(text, outputs, sizes):
    algorithm = prepare_algorithm(parse(text).algorithm, outputs)
    return f"{algorithm}\n{next(schedules(algorithm, outputs, sizes, 2, target('h200')))}"  # of the usual way to fuse, whatever is predicted


@pytest.mark.parametrize("l", [8, 40, 128])
def test_both_products_of_a_narrow_operand_and_both_of_a_large_one(monkeypatch, l):  # noqa: E741
    monkeypatch.setattr(skinny_gemm_pair, "STREAMED", 1)
    m, n, k = 300, 264, 136
    text = made(BACKWARD, ("d", "e", "f"), {"m": m, "n": n, "k": k, "l": l})
    assert "d.fuse_at(e, m);" in text and ("s.parts_at(f, n);" in text) == (l <= 64)
    check(text, *random((m, n), (l, n), (k, l), (m, k), (m, l)))


@pytest.mark.parametrize("sizes", [(70, 331, 33, 17), (130, 300, 64, 64)])
def test_blocks_of_columns_of_few_rows(sizes):
    m, n, k, r = sizes
    text = made(CHAIN, ("f",), {"m": m, "n": n, "k": k, "l": r})
    assert "f.block(m:64, n:64);" in text
    check(text, *random((m, k), (k, r), (r, n)))


def test_a_chain_whose_large_operand_is_not_aligned(monkeypatch):
    monkeypatch.setattr(chained_gemm, "MERGED", 1)  # so that short sums count as long ones
    m, n, k, r = 300, 331, 333, 17
    text = made(CHAIN, ("f",), {"m": m, "n": n, "k": k, "l": r})
    assert "f.stage(B, C);" in text and "f.descriptor(B, C);" in text
    check(text, *random((m, k), (k, r), (r, n)))


@pytest.mark.parametrize("text", ["f[x, y] = rdot(A[x, k], B[k, y], k);", "f[x, y] = rdot(A[k, x], B[k, y], k);"])
def test_programs_that_wait_are_many(text):
    """On an H200 4591 x 19 x 2163 took 22.8 us in 216 programs of 64 rows, 39.7 in 287 of 16 rows without a split."""
    sizes = {"x": 4093, "y": 17, "k": 8191}
    schedule = parse(made(f"Func f; In A, B; Var x, y; RVar k; {text}", ("f",), sizes)).schedule
    blocks = schedule.sizes("f", "block")
    programs = -(-sizes["x"] // blocks["x"]) * max(1, schedule.sizes("f", "split").get("k", 1))
    assert schedule.sizes("f", "split") and 132 < programs <= 4 * 132
