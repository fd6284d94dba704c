"""Sums over places that data names: one term is taken, wherever the condition stands."""

import pytest

from dtkernels.algebra.rules.data_index.compared_terms import pick_compared_terms
from dtkernels.algebra.rules.data_index.sums_before_picks import sum_before_picks
from dtkernels.lang import parse

INSIDE = "(t_place[x] >= 0 and t_place[x] < len(e))"

TAKEN = {
    "a product over it": ("In W, v, t;", "f[x, y] = rdot(where(t[x] == e, W[e, y], 0), where(t[x] == e, v[e], 0), e);"),
    "a factor": ("In W, v, t;", "f[x, y] = rsum(where(t[x] == e, W[e, y], 0) * v[x], e);"),
}  # fmt: skip


@pytest.mark.parametrize("where", TAKEN)
def test_one_term_is_taken(where):
    inputs, text = TAKEN[where]
    made = pick_compared_terms(parse(f"Func f; {inputs} Var x, y; RVar e; {text}").algorithm)
    assert str(made["t_place"]) == "t_place[x] = cast(t[x], int64);"
    assert INSIDE in str(made["f"]) and not any(r in str(made["f"]) for r in ("rsum", "rdot"))
    assert "W[t_place[x], y]" in str(made["f"])


def test_a_place_of_another_label_of_the_sum_joins_its_conditions():
    text = "Func h, f; In W, s, t; Var u, e, y; RVar i, x; Extent e = W[0]; h[u, y] = W[u, y] * 2; f[e, y] = rsum(where(s[x] == e, where(t[x] == i, h[i, y], 0), 0), i, x);"
    made = pick_compared_terms(parse(text).algorithm)
    assert "h[t_place[x], y]" in str(made["f"])
    assert str(made["f"]).startswith("f[e, y] = rsum(where(s[x] == e and (t[x] == t_place[x]") and str(made["f"]).endswith("x);")


KEPT = {
    "terms that reduce": ("Func f; In W, t; Var x; RVar e, z;", "f[x] = rsum(where(t[x] == e, rsum(W[e, z], z), 0), e);"),
    "another addend": ("Func f; In W, v, t; Var x, y; RVar e;", "f[x, y] = rsum(where(t[x] == e, W[e, y], 0) + v[e], e);"),
    "a product over more": ("Func f; In W, V, t; Var x, y; RVar e, z;", "f[x, y] = rdot(where(t[x] == e, W[e, z], 0), V[z, y], e, z);"),
}  # fmt: skip


@pytest.mark.parametrize("why", KEPT)
def test_sums_of_more_than_one_term_stay(why):
    algorithm = parse(" ".join(KEPT[why])).algorithm
    assert pick_compared_terms(algorithm) == algorithm


@pytest.mark.parametrize(("sum", "first"), [
    ("rsum(where(R[m, l] == v, A[w, h, m, l], 0), w, m, l)", "f_sum[h, m, l] = rsum(A[w, h, m, l], w)"),
    ("rsum(where(R[m, l] == v and m < l, A[w, h, m, l], 0), l, w, m)", "f_sum[h, m, l] = rsum(A[w, h, m, l], w)"),
    ("rsum(where(R[m, l] == v and w < l, A[w, h, m, l], 0), l, w, m)", None),  # a condition has the label
    ("rsum(where(R[m, w] == v, A[w, h, m, l], 0), m, w, l)", "f_sum[w, h, m] = rsum(A[w, h, m, l], l)"),
    ("rsum(where(R[m, l] == v, A[w, h, m, l] * A[w, h, l, m], 0), w, m, l)", None),
    ("rsum(where(m == v, A[w, h, m, l], 0), w, m, l) + R[0, 0]", None),  # no data
    ("rmax(where(R[m, l] == v, A[w, h, m, l], 0), w, m, l)", None),
])  # fmt: skip
def test_what_no_condition_tells_apart_is_summed_first(sum, first):
    algorithm = parse(f"Func f; In R, A; Var v, h; RVar w, m, l; Extent v = 9; f[v, h] = {sum};").algorithm
    made = sum_before_picks(algorithm)
    assert made == algorithm if first is None else str(made["f_sum"]) == f"{first};"
