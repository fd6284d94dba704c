"""What compiling keeps so as not to find it again: the texts are the same, and nothing of it travels or takes part in equality."""

import copy
import pickle

from dtkernels import show
from dtkernels.codegen import pipeline
from dtkernels.codegen.ir import tile
from dtkernels.lang import expr as ex
from dtkernels.lang import parse

TEXT = "Func f; In A, B; Var x; RVar y; f[x] = rsum(exp(A[x, y]) * (1 + B[y]), y);"


def body() -> ex.Expr:
    return parse(TEXT).algorithm["f"].expr


def test_an_expression_finds_what_is_below_it_once():
    e = body()
    assert e.children() is e.children()
    assert [str(n) for n in e.walk()] == [
        "rsum(exp(A[x, y]) * (1 + B[y]), y)", "exp(A[x, y]) * (1 + B[y])", "exp(A[x, y])", "A[x, y]", "x", "y", "1 + B[y]", "1", "B[y]", "y",
    ]  # fmt: skip
    assert [a.tensor for a in ex.accesses(e)] == ["A", "B"] and next(iter(e.walk())) is e


def test_a_node_with_another_below_it_is_another():
    e = body()
    before = list(e.walk())
    changed = e.transform(lambda n: ex.Access("C", n.index) if isinstance(n, ex.Access) and n.tensor == "B" else n)
    assert [a.tensor for a in ex.accesses(changed)] == ["A", "C"] and list(e.walk()) == before


def test_what_is_kept_takes_no_part_in_equality_and_does_not_travel():
    used, fresh = body(), body()
    size = len(pickle.dumps(used))
    list(ex.accesses(used))
    assert used == fresh and hash(used) == hash(fresh) and repr(used) == repr(fresh)
    assert len(pickle.dumps(used)) == size and pickle.loads(pickle.dumps(used)) == used == copy.deepcopy(used)


def test_a_tile_finds_what_is_below_it_once():
    a, b = tile.Size("x"), tile.Const(2)
    both = tile.Op("*", (a, tile.Op("+", (b, a))))
    assert both.children() is both.children() == (a, tile.Op("+", (b, a)))
    assert list(both.walk()) == [both, a, both.args[1], b, a]


def test_a_program_is_lowered_once_from_the_default_schedule_to_the_text():
    pipeline._lower.cache_clear()
    show.Subject(show.read("attention"), given={"causal": True}).text("triton")
    assert pipeline._lower.cache_info().misses <= 2 <= pipeline._lower.cache_info().hits
