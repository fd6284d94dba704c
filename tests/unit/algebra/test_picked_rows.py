"""Products over slices and rows that data picks: which programs are rewritten, what nests and default schedules they get."""

import pytest

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.ir import nest
from dtkernels.codegen.pipeline import lower, without
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program

GROUPED = "Func f; In A, W, e; Var m, n; RVar g, k; f[m, n] = rdot(where({condition}, A[m, k], 0), W[g, k, n], g, k); f.block(m:16, n:16); f.tensorize(m:16, n:16, k:16);"
OFFSETS = GROUPED.replace(" e;", " lo, hi;").format(condition="lo[g] <= m and m < hi[g]")


def loops(body) -> list[nest.Loop]:
    return [s for s in nest.statements(body) if isinstance(s, nest.Loop)]


def kernel(text: str):
    (only,) = lower(parse(text))
    return only


def test_a_block_of_one_slice_has_no_mask_and_others_skip_what_no_row_has():
    one, inner, several, masked = loops(kernel(GROUPED.format(condition="e[m] == g")).body)
    assert (one.axis.label, inner.axis.label, several.axis.label, masked.axis.label) == ("g", "k", "g", "k")
    assert str(one.begin) == "g_full" and str(one.end) == "g_partial" and str(several.begin) == "g_several" and str(several.end) == "g_end"
    assert inner.when is None and str(masked.when) == "g_any"
    loads = [[s.value for s in loop.body if nest.is_load(s)] for loop in (inner, masked)]
    assert [load.only for load in loads[0]] == [None, None]
    assert [str(load.only) for load in loads[1]] == ["(e == g)", "None"]
    assert not any(isinstance(n, nest.Op) and n.fn == "where" for loop in (inner, masked) for v in nest.values(loop.body) for n in v.walk())


def test_groups_by_offsets_are_skipped_by_their_ends():
    outer, inner = loops(kernel(OFFSETS).body)
    test = next(s for s in outer.body if isinstance(s, nest.Let) and s.name == "g_any")
    assert str(inner.when) == "g_any" and "first(m)" in str(test.value) and not any(isinstance(n, nest.TileReduce) for n in test.value.walk())


@pytest.mark.parametrize("condition", ["A[m, 0] > g or e[m] == g", "e[k] == g"])
def test_a_condition_that_does_not_decide_the_step_skips_nothing(condition):
    body = kernel(GROUPED.format(condition=condition)).body
    assert all(loop.when is None for loop in loops(body)) and "g_any" not in nest.names_in(body)


def test_rows_through_a_descriptor_are_chosen_after_they_are_loaded():
    found = [s.value for s in nest.statements(kernel(GROUPED.format(condition="e[m] == g") + "f.descriptor(A);").body) if nest.is_load(s)]
    assert all(load.only is None for load in found if load.buffer == "A")


def test_the_pass_can_be_left_out():
    with without("load_masks"):
        body = kernel(GROUPED.format(condition="e[m] == g")).body
    assert all(s.value.only is None for s in nest.statements(body) if nest.is_load(s))


# -- the algebra --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Func f; In A, W, e; Var m; RVar k; f[m] = rdot(A[m, k], W[e[m], k], k);",  # no matrix without the index: rows and terms alone
        "Func f; In A, W, e; Var n; RVar k; f[n] = rdot(A[e[n], k], W[k, n], k);",  # the other operand has the label too
        "Func f; In A, W, e, d; Var m, n; RVar k; f[m, n] = rdot(A[m, k], W[e[m], k, d[n]], k);",  # picked twice
        "Func f; In A, W, e; Var m, n; RVar k; f[m, n] = rdot(A[m, k], W[e[k], k, n], k);",  # picked by what is summed
        "Func f; In A, W, e; Var m, n; RVar k; f[m, n] = rdot(A[m, k], exp(W[e[m], k, n]), k);",  # not 0 where the index is outside
        "Func f; In A, W, t; Var m, n; RVar k; f[m, n] = rdot(A[t[m], k], W[k, n], k);",  # rows of the other operand: loaded as they are
    ],
)
def test_what_is_no_product_over_slices_stays(text):
    algorithm = parse(text).algorithm
    assert "where(" not in str(prepare_algorithm(algorithm, ("f",)))


@pytest.mark.parametrize("terms", ["where(t[m] == r, D[m], 0)", "where(t[m] > r, D[m], 0)", "where(t[m] == 3, D[m], 0)"])
def test_sums_of_numbers_and_of_other_conditions_are_not_bounded(terms):
    algorithm = parse(f"Func f; In D, t; Var r; RVar m; Extent r = 9; f[r] = rsum({terms} + r, m);").algorithm
    assert prepare_algorithm(algorithm, ("f",)).funcs == ("f",)


# -- the default schedule -----------------------------------------------------------------------------------------------


def scheduled(text: str, sizes: dict[str, int]) -> tuple[Program, str]:
    algorithm = prepare_algorithm(parse(text).algorithm, ("f",))
    schedule = default_schedule(algorithm, ("f",), sizes, 2, target("h200"))
    return Program(algorithm, schedule), str(schedule)


def test_slices_are_walked_one_by_one_and_never_split():
    text = "Func f; In A, W, e; Var m, n; RVar k; f[m, n] = rdot(A[m, k], W[e[m], k, n], k);"
    for m, experts in ((4096, 8), (4096, 5000), (16, 5000)):
        _, said = scheduled(text, {"m": m, "n": 1024, "k": 512, "W_0": experts})
        assert "W_0:1," in said and "split(W_0" not in said and "k:1," not in said


def test_where_the_rows_of_a_slice_lie_is_found_once():
    text = "Func f; In A, D, e; Var g, k, n; RVar m; Extent g = 8; f[g, k, n] = rdot(where(e[m] == g, A[m, k], 0), where(e[m] == g, D[m, n], 0), m);"
    program, said = scheduled(text, {"g": 8, "k": 1024, "n": 1024, "m": 4096})
    assert [k.name for k in lower(program)] == ["f_first", "f_past", "f"] and "k:128, n:128, m:32" in said
    (walk,) = loops(lower(program)[-1].body)
    assert "m_begin" in str(walk.begin) and "m_end" in str(walk.end)
    assert all("e == g" in str(s.value.only) for s in walk.body if nest.is_load(s) and s.value.buffer in "AD")


def test_two_products_of_the_same_slices_share_a_loop():
    text = (
        "Func a, b, f; In A, W, V, e; Var m, n; RVar k; a[m, n] = rdot(A[m, k], W[e[m], k, n], k); b[m, n] = rdot(A[m, k], V[e[m], k, n], k);"
        "f[m, n] = a[m, n] * sigmoid(b[m, n]);"
    )
    program, _ = scheduled(text, {"m": 4096, "n": 1024, "k": 512, "W_0": 8})
    (only,) = lower(program)
    assert [sum(isinstance(n, nest.TileDot) for v in nest.values(loop.body) for n in v.walk()) for loop in loops(only.body)] == [2, 2, 2, 2]
