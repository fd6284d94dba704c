# ruff: noqa: E501 (programs read best on one line)
"""Sums over the elements that data picks: their terms by name, added to memory where their indices say. Without torch."""

from dataclasses import replace

import pytest

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.cost.kernel_plan import plans
from dtkernels.autoschedule.cost.outline import Known
from dtkernels.autoschedule.cost.predicted_time import _work, predicted_time
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.algorithm import with_operands
from dtkernels.lang.errors import DTError
from dtkernels.lang.parts.joined_terms import joined_term_names
from dtkernels.lang.parts.picked_terms import picked_term_names
from dtkernels.lang.schedule import Program
from dtkernels.runtime.select.shape_buckets import ScheduleCache

HEAD = "Func f; In X, t, A; Var v, k; RVar b; Extent v = A[0]; "
ROWS = HEAD + "f[v, k] = rsum(where(t[b] == v, X[b, k] * 2, 0), b); "
PICKED = {
    "rows": (ROWS, "f_terms[b, k] = X[b, k] * 2;", "f[v, k] = rsum(where(t[b] == v, f_terms[b, k], 0), b);"),
    "with another condition": (
        HEAD + "f[v, k] = rsum(where(t[b] == v and X[b, k] > 0, X[b, k], 0), b);",
        "f_terms[b, k] = where(X[b, k] > 0, X[b, k], 0);", "f[v, k] = rsum(where(t[b] == v, f_terms[b, k], 0), b);",
    ),
    "with arithmetic around": (
        "Func f; In X, t, A; Var v, k; RVar b; f[v, k] = A[v, k] - rsum(where(v == t[b], X[b, k], 0), b);",
        "f_terms[b, k] = X[b, k];", "f[v, k] = A[v, k] - rsum(where(t[b] == v, f_terms[b, k], 0), b);",
    ),
    "two labels": (
        "Func f; In X, s, t, A; Var v, w; RVar b; Extent v = A[0]; Extent w = A[1]; f[v, w] = rsum(where(s[b] == v and t[b] == w, X[b], 0), b);",
        "f_terms[b] = X[b];", "f[v, w] = rsum(where(s[b] == v and t[b] == w, f_terms[b], 0), b);",
    ),
    "one condition inside another": (
        "Func f; In X, s, t, A; Var v, w; RVar b; Extent v = A[0]; Extent w = A[1]; f[v, w] = rsum(where(s[b] == v, where(t[b] == w and b > 1, X[b], 0), 0), b);",
        "f_terms[b] = where(b > 1, X[b], 0);", "f[v, w] = rsum(where(s[b] == v and t[b] == w, f_terms[b], 0), b);",
    ),
    "a count": ("Func f; In t, A; Var v; RVar b; Extent v = A[0]; f[v] = rsum(where(t[b] == v, 1, 0), b);", "f_terms[b] = 1;", "f[v] = rsum(where(t[b] == v, f_terms[b], 0), b);"),
}  # fmt: skip
NOT_PICKED = {
    "a maximum": HEAD + "f[v, k] = rmax(where(t[b] == v, X[b, k], 0), b);",
    "terms that vary with the element": HEAD + "f[v, k] = rsum(where(t[b] == v, X[b, k] * v, 0), b);",
    "a product of rows": "Func f; In X, Y, t, A; Var v, n; RVar b, k; Extent v = A[0]; f[v, n] = rsum(where(t[b] == v, rdot(X[b, k], Y[k, n], k), 0), b);",
    "not 0 elsewhere": HEAD + "f[v, k] = rsum(where(t[b] == v, X[b, k], 1), b);",
}  # fmt: skip


def prepared(text: str, outputs=("f",)):
    return prepare_algorithm(parse(text).algorithm, outputs)


@pytest.mark.parametrize("name", PICKED)
def test_terms_and_the_sum_over_them(name):
    text, terms, added = PICKED[name]
    algorithm = with_operands(parse(text).algorithm, ["f_terms"])
    assert [str(d) for d in algorithm.definitions] == [terms, added]


@pytest.mark.parametrize("name", NOT_PICKED)
def test_sums_without_such_terms(name):
    assert not picked_term_names(parse(NOT_PICKED[name]).algorithm)


def test_terms_at_whole_numbers():
    algorithm = with_operands(parse(ROWS).algorithm, ["f_whole_terms"])
    assert [str(d) for d in algorithm.definitions] == [
        "f_whole_terms[b, k] = where(t[b] == cast(t[b], int64), X[b, k] * 2, 0);", "f[v, k] = rsum(where(cast(t[b], int64) == v, f_whole_terms[b, k], 0), b);",
    ]  # fmt: skip


def test_each_of_several_sums_has_a_func():
    text = "Func f; In X, s, t, A; Var v, k; RVar b; Extent v = A[0]; f[v, k] = rsum(where(s[b] == v, X[b, k], 0), b) + rsum(where(t[b] == v, X[b, k], 0), b);"
    algorithm = with_operands(parse(text).algorithm, ["f_terms", "f_terms2"])
    assert [d.name for d in algorithm.definitions] == ["f_terms", "f_picked", "f_terms2", "f_picked2", "f"]
    assert str(algorithm["f"]) == "f[v, k] = f_picked[v, k] + f_picked2[v, k];"


SUMS = "Func f; In X, w, s, t, A; Var v, k; RVar b; Extent v = A[0]; f[v, k] = {};"
FIRST, SECOND = "rsum(where(s[b] == v, X[b, k] * w[b], 0), b)", "rsum(where(t[b] == v, X[b, k], 0), b)"


@pytest.mark.parametrize("expression, added, rest", [
    (f"{FIRST} - {SECOND}", "f", ""), (f"A[v, k] * ({FIRST} - {SECOND})", "f_joined", "A[v, k] * f_joined[v, k]"),
])  # fmt: skip
def test_several_sums_are_one_with_joined_terms(expression, added, rest):
    algorithm = with_operands(parse(SUMS.format(expression)).algorithm, ["f_joined_terms"])
    assert [str(d) for d in algorithm.definitions] == [
        "f_joined_terms[f_sums, b, k] = where(f_sums == 0, X[b, k] * w[b], -X[b, k]);",
        f"{added}[v, k] = rsum(where(where(f_sums == 0, s[b], t[b]) == v, f_joined_terms[f_sums, b, k], 0), b, f_sums);",
        *([f"f[v, k] = {rest};"] if rest else []),
    ]  # fmt: skip
    assert algorithm.constant_extent("f_sums") == 2


@pytest.mark.parametrize("expression", [FIRST, f"{FIRST} * {SECOND}", f"{FIRST} + A[v, k]", f"{FIRST} + rsum(where(t[b] == k, X[b, v], 0), b)"])
def test_other_sums_have_no_joined_terms(expression):
    assert not joined_term_names(parse(SUMS.format(expression) if "t[" in expression else SUMS.format(expression).replace("t, ", "")).algorithm)


def test_sums_are_joined_by_default():
    """The gradient of an image that is sampled between four elements took 1.8 ms, predicted, 175 us by four sums in memory, 50 by one."""
    algorithm = replace(prepared(SUMS.format(f"{FIRST} - {SECOND}")), indices=frozenset("st"))
    schedule = default_schedule(algorithm, ("f",), dict(v=20000, k=64, b=200000), 2, target("h200"))
    assert schedule.unordered_sums() == ("f",) and "f_joined_terms" in str(schedule), str(schedule)
    assert [k.name for k in lower(Program(algorithm, schedule))] == ["f_sum_zero", "f_joined_terms", "f"]


@pytest.mark.parametrize("in_order, indices, adds", [(False, {"t"}, "f_terms"), (True, {"t"}, ""), (False, set(), "f_whole_terms"), (True, set(), "")])
def test_the_default_schedule_adds_where_order_is_free(in_order, indices, adds):
    algorithm = replace(prepared(ROWS), indices=frozenset(indices))
    sizes = {"v": 20000, "k": 64, "b": 200000}
    schedule = default_schedule(algorithm, ("f",), sizes, 2, target("h100"), in_order=in_order)
    assert bool(schedule.unordered_sums()) == bool(adds)
    kernels = lower(Program(algorithm, schedule))
    assert [k.name for k in kernels][:2] == (["f_sum_zero", adds] if adds else ["f_first", "f_past"])
    microseconds = predicted_time(str(schedule), Known.of(with_operands(algorithm, schedule.subjects()), ("f",)), sizes, 2, target("h100"))
    assert microseconds < 100 if adds else microseconds > 10000


@pytest.mark.parametrize("text, sizes", [
    ("Func f; In X, t, N, A; Var v, k; RVar b, s; Extent v = A[0]; f[v, k] = rsum(where(t[b, s] == v, where(s < N[b], X[b, k], 0), 0), b, s);", dict(v=50000, k=256, b=4096, s=64)),
    ("Func f; In t, A; Var v; RVar b; Extent v = A[0]; f[v] = rsum(where(t[b] == v, 1, 0), b);", dict(v=20000, b=200000)),
    ("Func f; In X, A, w; Var v, k; RVar b; Extent v = A[0]; f[v, k] = rsum(where(floor(w[b] * 20) == v, X[b, k], 0), b);", dict(v=500, k=64, b=200000)),
])  # fmt: skip
def test_terms_that_data_masks_or_that_read_nothing_or_whose_places_are_computed_are_added(text, sizes):
    """The gradient of a masked bag of rows took 0.6 s, predicted, in place of 0.2 ms."""
    found = default_schedule(prepared(text), ("f",), sizes, 2, target("h200"))
    assert found.unordered_sums(), str(found)


def test_products_of_rows_of_two_tensors_are_not_added():
    text = "Func f; In X, Y, t, A; Var v, k, n; RVar b; Extent v = A[0]; f[v, k, n] = rsum(where(t[b] == v, X[b, k] * Y[b, n], 0), b);"
    found = default_schedule(replace(prepared(text), indices=frozenset({"t"})), ("f",), dict(v=8, k=256, n=256, b=4096), 2, target("h200"))
    assert not found.unordered_sums()


def test_few_terms_are_still_looked_for():
    algorithm = replace(prepared(ROWS), indices=frozenset({"t"}))
    schedule = default_schedule(algorithm, ("f",), {"v": 4, "k": 64, "b": 4}, 2, target("h100"))
    assert not schedule.unordered_sums()


@pytest.mark.parametrize("schedule, words", [
    ("f_terms.block(b:8, k:16); f_terms.tensorize(b:8, k:16); f.accumulate_at(f_terms, k, ordered); f.compile();", "elements that data names are added to in any order"),
    ("f_term.block(b:8); f.compile();", "f_terms"),
])  # fmt: skip
def test_refusals(schedule, words):
    with pytest.raises(DTError, match=words):
        program = parse(ROWS + schedule)
        lower(Program(prepare_algorithm(program.algorithm, ("f",)), program.schedule))


def test_beside_rows_of_a_table_the_additions_have_their_time():
    algorithm, sizes = replace(prepared(ROWS), indices=frozenset({"t"})), {"v": 20000, "k": 64, "b": 200000}
    cache = ScheduleCache(lambda: algorithm, ("f",))
    text = str(default_schedule(algorithm, ("f",), sizes, 2, target("h100")))
    known = cache._with_terms(text)
    assert known is not None and predicted_time(text, known, sizes, 2, target("h100")) > 20
    assert cache._with_terms(str(default_schedule(algorithm, ("f",), sizes, 2, target("h100"), in_order=True))) is None


def test_rows_of_a_table_that_few_terms_name_are_neither_cleared_nor_read():
    """The gradient of 32000 rows of which 8192 are looked up took 106 us, 60 of them for the other rows (an H200)."""
    algorithm = replace(prepared(ROWS), indices=frozenset({"t"}))
    large, small = (default_schedule(algorithm, ("f",), dict(v=v, b=8192, k=1024), 2, target("h200")) for v in (32000, 4000))
    assert "f.accumulate_at(f_terms, k, named);" in str(large), str(large)
    assert "f.accumulate_at(f_terms, k);" in str(small), str(small)


def test_terms_of_few_rows_take_turns():
    """8192 terms of each of two rows took 117 us (an H200), predicted to take 45."""
    algorithm = with_operands(prepared(ROWS), ["f_terms"])
    text = "f.accumulate_at(f_terms, k); f_terms.block(b:4, k:512); f_terms.tensorize(b:4, k:512); f.compile();"
    times = [predicted_time(text, Known.of(algorithm, ("f",)), dict(v=v, b=16384, k=768), 2, target("h200")) for v in (2, 16384)]
    assert times[0] > 100 and times[0] > 1.3 * times[1], times


def test_bins_of_a_histogram_are_added_to_sector_by_sector():
    """Beside rows of columns, which are added to side by side, each addition moves a sector."""
    text = "Func f; In A; Var x, k; RVar y; Extent k = 64; f[x, k] = rsum(where(floor(A[x, y]) == k, 1, 0), y);"
    schedule = "f_whole_terms.block(x:1, y:512); f_whole_terms.tensorize(x:1, y:512); f.accumulate_at(f_whole_terms, y); f.compile();"
    known = Known.of(with_operands(prepared(text), ["f_whole_terms"]), ("f",))
    work = [w for p in plans(schedule, known) if (w := _work(p, (("x", 4096), ("y", 4096), ("k", 64)), 2, target("h200"))).added]
    assert [w.added for w in work] == [32.0 * 512]
