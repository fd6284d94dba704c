# ruff: noqa: E501 (programs read best on one line)
"""In one step of a loop, products that something waits for come before products that are only summed, where that changes no number."""

import pytest

from dtkernels.algebra.pipeline import prepare
from dtkernels.codegen.ir.nest import (
    Assign,
    Axis,
    Const,
    Index,
    Let,
    Local,
    Loop,
    Op,
    Position,
    Statement,
    Store,
    TileDot,
    has_matrix_product,
    statements,
)
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.transforms.tiles.dot_scheduling import with_dots_first
from dtkernels.lang import parse

BOTH = """Func s, e, g, c, dv, dk; In Q, K, V, D; Var l, n, k; RVar h, m, i, j;
s[h, m, l] = rdot(Q[h, m, i], K[l, i], i); e[h, m, l] = exp(s[h, m, l]);
g[h, m, l] = rdot(D[h, m, j], V[l, j], j); c[h, m, l] = g[h, m, l] * e[h, m, l];
dk[l, k] = rdot(c[h, m, l], Q[h, m, k], h, m); dv[l, n] = rdot(e[h, m, l], D[h, m, n], h, m);
s.fuse_at(dk, m); e.fuse_at(dk, m); g.fuse_at(dk, m); c.fuse_at(dk, m); dv.fuse_at(dk, m);
dk.block(l:16); dk.tensorize(l:16, k:0, n:0, h:1, m:16, i:0, j:0); dk.compile(); dv.compile();"""

M, L, N = (Axis(name, name, 16) for name in "mln")
A, B, C, D = (Local(name, (M, L)) for name in "abcd")


def dot(left, right) -> TileDot:
    return TileDot(left, right, (L,))


def add(name: str, value) -> Assign:
    return Assign(name, (M, M), Op("+", (Local(name, (M, M)), value)))


def let(name: str, value) -> Let:
    return Let(name, value, (M, L))


def step(*body: Statement) -> tuple[Statement, ...]:
    """What ``with_dots_first`` makes of one step of an inner loop."""
    (outer,) = with_dots_first((Loop(N, "extent", (Loop(L, "extent", body, reduces=True),)),))
    return outer.body[0].body


def test_a_product_that_is_summed_comes_behind_a_product_that_is_used():
    (kernel,) = lower(prepare(parse(BOTH)))
    loops = [s for s in statements(kernel.body) if isinstance(s, Loop) and has_matrix_product(s.body) and s.axis.label == "m"]
    assert loops
    for loop in loops:
        order = [s.name for s in loop.body if isinstance(s, (Let, Assign)) and any(isinstance(n, TileDot) for n in s.value.walk())]
        assert order == ["s", "g", "dv", "dk_acc"]


def test_what_the_sum_is_of_stays_before_it():
    body = (let("e", Op("exp", (A,))), add("sum", dot(Local("e", (M, L)), B)), let("g", dot(C, D)), let("h", Op("*", (Local("g", (M, L)), A))))
    assert [getattr(s, "name", "") for s in step(*body)] == ["e", "g", "sum", "h"]


def test_sums_keep_their_order():
    body = (add("first", dot(A, B)), add("second", dot(C, D)), let("g", dot(A, C)))
    assert [s.name for s in step(*body)] == ["g", "first", "second"]


@pytest.mark.parametrize("between", [
    let("seen", Local("sum", (M, M))),  # reads the sum
    add("sum", A),  # adds to it
    Assign("a", (M, L), B),  # changes what is summed
    Loop(N, "extent", (Index(N, "loop"),)),
    Store("out", (Position(M),), Local("sum", (M, M)), (M,)),
])  # fmt: skip
def test_a_sum_stays_where_something_in_between_depends_on_it(between):
    body = (add("sum", dot(A, B)), between, let("g", dot(C, D)))
    assert step(*body) == body


def test_a_product_that_reads_the_sum_stays_behind_it():
    body = (add("sum", dot(A, B)), let("g", dot(Local("sum", (M, M)), D)))
    assert step(*body) == body


def test_outside_of_inner_loops_and_without_a_later_product_nothing_moves():
    straight = (add("sum", dot(A, B)), let("g", dot(C, D)))
    assert with_dots_first(straight) == straight
    outermost = (Loop(L, "extent", straight, reduces=True),)  # slower, as measured
    assert with_dots_first(outermost) == outermost
    for body in ((let("g", dot(C, D)), add("sum", dot(A, B))), (add("sum", A), let("g", dot(C, D))), (add("sum", dot(A, B)), let("g", Const(1.0)))):
        assert step(*body) == body
