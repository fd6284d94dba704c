"""Labels that lie beside one another everywhere are scheduled as one: which ones, what the schedule says, and what it is predicted to take."""

import pytest

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.cost.kernel_plan import plans
from dtkernels.autoschedule.cost.outline import Known
from dtkernels.autoschedule.cost.predicted_time import predicted_time
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.autoschedule.stand_ins.merged_labels import MergedLabels
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program

H200 = target("h200")
GATED = "Func v, s; In X, D; Var b, y, x, j; v[b, y, x, j] = D[b, y, x, j] * sigmoid(X[b, y, x, j]); s[j] = rsum(v[b, y, x, j], b, y, x);"
LINEAR = "Func v, s; In X, W; Var b, y, x, j; RVar f; v[b, y, x, j] = rdot(X[b, y, x, f], W[j, f], f); s[j] = rsum(v[b, y, x, j], b, y, x);"
SIZES = dict(b=8, y=30, x=30, j=96)
HEADS = "Func s; In Q, K; Var b, h, m, l; RVar d; s[b, h, m, l] = rdot(Q[b, h, m, d], K[b, h, l, d], d);"


def prepared(text, *outputs):
    return prepare_algorithm(parse(text).algorithm, outputs)


def runs(text, *outputs, **sizes):
    found = MergedLabels.of(prepared(text, *outputs), outputs, sizes)
    return set(found.runs.values()) if found else set()


def test_rows_of_a_sum_are_one_label():
    found = MergedLabels.of(prepared(GATED, "v", "s"), ("v", "s"), SIZES)
    assert found.sizes == dict(b_y_x=7200, j=96)
    assert str(found.algorithm).splitlines()[-2:] == ["v[b_y_x, j] = D[b_y_x, j] * sigmoid(X[b_y_x, j]);", "s[j] = rsum(v[b_y_x, j], b_y_x);"]


@pytest.mark.parametrize(
    "text, outputs, sizes",
    [
        (LINEAR, ("v", "s"), SIZES | dict(f=384)),  # kernels of products that one label had chosen were slow with several
        (HEADS, ("s",), dict(b=2, h=3, m=64, l=64, d=64)),  # they number what is repeated
        ("Func f; In A; Var x, y; f[x, y] = where(y <= x, A[x, y], 0);", ("f",), dict(x=64, y=64)),  # places are compared
        ("Func f; In A; Var x, y; f[x, y] = A[x, y] + A[y, x];", ("f",), dict(x=64, y=64)),
        ("Func f; In A; Var x, y; RVar r; Extent y = A[1] - 2; Extent r = 3; f[x, y] = rsum(A[x, y + r], r);", ("f",), dict(x=64, y=64)),
        ("Func f; In A; Var z; RVar x, y; f[z] = rargmax(A[z, x, y], x, y);", ("f",), dict(z=4, x=64, y=64)),  # a place of two numbers
        ("Func f; In A; Var x, y; f[x, y] = exp(A[x, y]);", ("f",), dict(x=1, y=64)),  # nothing is gained
        ("Func f; In A; Var x, y; f[x, y] = exp(A[x, y]);", ("f",), dict(x=0, y=64)),
    ],
)
def test_other_labels_are_not(text, outputs, sizes):
    assert not runs(text, *outputs, **sizes)


def test_two_labels_of_one_dimension_are_merged_alike_or_not_at_all():
    """``t`` and ``s`` count the same dimension of ``X``; a run of one alone would give it another number of dimensions here and there."""
    text = "Func u, f; In X, W; Var b, s, e; RVar t; u[b, s, e] = rdot(W[s, t], X[b, t, e], t); f[b, s, e] = u[b, s, e] + X[b, s, e];"
    assert not runs(text, "f", b=4, s=64, t=64, e=64)
    assert runs("Func f; In A; Var x, y; f[x, y] = A[x, y] * 2;", "f", x=7, y=9) == {("x", "y")}


def test_a_default_schedule_merges_labels_where_that_is_predicted_to_be_faster():
    norm = "Func s, f; In V, g; Var o, i, k; s[o] = rsum(V[o, i, k] * V[o, i, k], i, k); f[o, i, k] = g[o] * V[o, i, k] / sqrt(s[o]);"
    assert default_schedule(prepared(norm, "f"), ("f",), dict(o=1001, i=777, k=7), 2, H200).merged("f") == {"i_k": ("i", "k")}


def test_the_schedule_merges_in_each_kernel_that_has_the_labels():
    algorithm = prepared(GATED, "v", "s")
    merged = MergedLabels.of(algorithm, ("v", "s"), SIZES)
    schedule = merged.restored(algorithm, default_schedule(merged.algorithm, ("v", "s"), merged.sizes, 2, H200))
    made = [k.func for k in lower(Program(algorithm, schedule))]
    assert all(schedule.merged(f) == {"b_y_x": ("b", "y", "x")} for f in made if "_part" not in f and f in algorithm), str(schedule)
    assert not any({"b", "y", "x"} & {*schedule.sizes(f, "tensorize")} for f in ("v", "s"))


def test_a_merged_label_is_predicted_like_the_one_label_that_it_is():
    algorithm, outputs = prepared(GATED, "v", "s"), ("v", "s")
    merged = MergedLabels.of(algorithm, outputs, SIZES)
    schedule = default_schedule(merged.algorithm, outputs, merged.sizes, 2, H200)
    alone = predicted_time(str(schedule), Known.of(merged.algorithm, outputs), merged.sizes, 2, H200)
    restored, known = str(merged.restored(algorithm, schedule)), Known.of(algorithm, outputs)
    assert predicted_time(restored, known, SIZES, 2, H200) == pytest.approx(alone)
    assert all(plan.runs == {"b_y_x": ("b", "y", "x")} for plan in plans(restored, known))


def test_a_merged_label_whose_parts_lie_apart_is_counted_by_its_parts():
    """A window product's rows are merged, though its input has more of each than the result."""
    text = "Func f; In A, W; Var b, o, y, x; RVar c, r; Extent y = A[2] - 2; Extent r = 3; f[b, o, y, x] = rdot(A[b, c, y + r, x], W[o, c, r], c, r);"
    text += " f.merge(p, y, x); f.block(o:64, p:64); f.tensorize(o:64, p:64, c:32);"
    program = parse(text)
    (plan,) = plans(str(program.schedule), Known.of(prepared(text, "f"), ("f",)))
    assert plan.runs == {} and plan.merged == {"p": ("y", "x")}


RECURRENCE = (
    "Func k, c, f; In X, W, V; Var n, t, o; RVar i; k[n, t, o] = rdot(X[n, t, i], W[o, i], i); c[n, t, o] = rdot(X[n, t, i], V[o, i], i);"
    "f[n, t, o] = rrecur(1 - sigmoid(k[n, t, o]), sigmoid(k[n, t, o]) * c[n, t, o], t);"
)


@pytest.mark.parametrize("sizes", [dict(n=13, t=301, i=400, o=776), dict(n=13, t=304, i=400, o=777)])
def test_products_merge_labels_along_which_another_kernel_runs_in_order(sizes):
    """No schedule had been legal: a rule merged the rows of the products, which are those of the recurrence."""
    algorithm = prepared(RECURRENCE, "f")
    schedule = default_schedule(algorithm, ("f",), sizes, 2, H200)
    assert schedule.sizes("k", "tensorize") and schedule.merged("f") == {} and len(lower(Program(algorithm, schedule))) == 3


def test_a_program_for_which_no_way_to_fuse_is_legal_gets_a_plain_schedule(monkeypatch):
    monkeypatch.setattr("dtkernels.autoschedule.fusion.Fusion.is_legal", lambda *_: False)
    schedule = default_schedule(prepared(RECURRENCE, "f"), ("f",), dict(n=2, t=8, i=16, o=16), 2, H200)
    assert str(schedule) == "f.compile();"
