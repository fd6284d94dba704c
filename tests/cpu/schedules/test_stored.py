"""What a loop stores while it goes on: finished values alone; and what is computed from what another kernel stores."""

import pytest
import torch
from oracle import check
from small_programs import random

import dtkernels
from dtkernels.lang.spec import parse_spec

SOFTMAX = """Func {funcs}; In A; Var x; RVar y;
{shift}e[x, y] = exp(A[x, y]{less}); d[x] = rsum(e[x, y], y); f[x, y] = e[x, y] / d[x];
e.fuse_at(d, y); d.block(x:2); d.tensorize(x:2, y:{tile}); {more} f.block(x:2, y:16); f.tensorize(x:2, y:16);
"""
DERIVED = {"funcs": "e, d, f", "shift": "", "less": ""}
WRITTEN = {"funcs": "m, e, d, f", "shift": "m[x] = rmax(A[x, y], y); ", "less": " - m[x]"}


@pytest.mark.parametrize("form, more, moving", [(DERIVED, "e.store();", "d_shift"), (WRITTEN, "m.fuse_at(d, y); e.store();", "m"),
                                                (WRITTEN, "m.fuse_at(d, y); f.compile(); d.compile(); e.compile();", "m")])  # fmt: skip
def test_what_moves_with_an_unfinished_maximum_is_not_stored(form, more, moving):
    with pytest.raises(dtkernels.DTError, match=f"made from finished reductions: found e, by {moving}, in the loop over y .*; allowed: tensorize\\(y:0\\), or e"):
        dtkernels.compile(SOFTMAX.format(tile=16, more=more, **form))


@pytest.mark.parametrize("form, more", [(DERIVED, "e.store();"), (WRITTEN, "m.fuse_at(d, x); e.store();")])
def test_what_is_whole_is_stored(form, more):
    check(SOFTMAX.format(tile=0, more=more, **form), 5 * random((5, 50)))


def test_what_does_not_move_is_stored_in_the_loop_of_a_sum_that_does():
    check("""Func p, e, d, f; In A; Var x; RVar y; p[x, y] = A[x, y] * 2; e[x, y] = exp(p[x, y]); d[x] = rsum(e[x, y], y);
    f[x, y] = e[x, y] / d[x] + p[x, y]; p.fuse_at(d, y); e.fuse_at(d, y); p.store();
    d.block(x:2); d.tensorize(x:2, y:16); f.block(x:2, y:16); f.tensorize(x:2, y:16);""", 5 * random((5, 50)))  # fmt: skip


@pytest.mark.parametrize("more", ["t.store();", "t.compile(); q.compile();"])
def test_a_shift_made_from_what_a_kernel_stores_is_computed_there(more):
    """No statement of the schedule names the shift of u; in a kernel of its own it would come before and after that of u."""
    check(f"""Func t, p, u, q; In A, B; Var x; RVar y; t[x] = rsum(exp(A[x, y]), y); p[x, y] = exp(A[x, y]) / t[x];
    u[x] = rsum(exp(p[x, y] * B[x, y]), y); q[x, y] = exp(p[x, y] * B[x, y]) / u[x];
    t.fuse_at(u, x); p.fuse_at(u, y); u.block(x:1); u.tensorize(y:16); q.block(x:1, y:16); q.tensorize(y:16); {more}
    {"u.compile();" if "compile" in more else ""}""", *random((5, 43), (5, 43)))  # fmt: skip


NORM = """Func r, n; In A; Var x; RVar y; r[x] = 1 + rsum(A[x, y] * A[x, y], y); n[x, y] = A[x, y] * r[x];
n.block(x:4); n.tensorize(x:4, y:16); r.block(x:4); r.tensorize(x:4, y:16); n.compile(); r.compile(); """
FUSED = NORM.replace("r.block(x:4);", "r.fuse_at(n, x);")


def test_an_output_in_the_kernel_of_one_without_elements():
    """The kernel has no programs then, and what it would have stored is nobody's."""
    with pytest.raises(dtkernels.DTError, match="r is computed in the kernel of n, which has no programs here: found n of no elements; allowed: r in a kernel"):
        dtkernels.compile(FUSED)(torch.empty(7, 0))
    assert torch.equal(dtkernels.compile(NORM).r(torch.empty(7, 0)), torch.ones(7))
    n, r = dtkernels.compile(FUSED)(torch.empty(0, 5))
    assert n.shape == (0, 5) and r.shape == (0,)


def test_an_output_in_the_kernel_of_the_parts_of_a_sum_without_elements():
    call = dtkernels.compile("""Func r, s, n; In A, B, C; Var x, z; RVar y; r[x] = rsum(A[y, x], y); s[x, y] = tanh(r[x]) + C[y];
    n[x, z] = rdot(s[x, y], B[y, z], y); r.fuse_at(s, x); s.fuse_at(n, z); r.split(y:5); n.block(x:4, z:4); n.tensorize(x:4, z:4);
    n.compile(); r.compile();""")
    a, c = torch.randn(5, 6), torch.randn(5)
    torch.testing.assert_close(call(a, torch.randn(5, 3), c)[1], a.sum(0))
    with pytest.raises(dtkernels.DTError, match="r is computed in the kernel of n, which has no programs here"):
        call(a, torch.empty(5, 0), c)


def test_what_is_stored_in_a_loop_without_steps_is_refused():
    text = "Func s, y; In A; RVar x, c; s[x] = 2 * A[x, 0]; y[] = rsum(rsum(tanh(A[x, c] * s[x]), c), x); s.fuse_at(y, c); y.compile(); s.compile();"
    call = dtkernels.compile(text)
    a = torch.randn(3, 5)
    assert torch.equal(call(a)[1], 2 * a[:, 0]) and call(a[:0])[1].shape == (0,)
    with pytest.raises(dtkernels.DTError, match="^s is stored in a loop over c: found c of no elements; allowed: s in a kernel of its own$"):
        call(a[:, :0])
    beside = dtkernels.compile(text.replace("Func s, y;", "Func s, y, f;").replace("RVar x, c;", "RVar x, c; Var i, j; f[i, j] = A[i, j];") + " f.compile();")
    assert beside.f(a[:, :0]).shape == (3, 0), "a wrapper of what needs none of it"


def test_an_op_of_several_outputs_of_which_one_has_no_elements(monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    from dtkernels.runtime.bind.operator import Operator

    op = Operator(parse_spec("op: scaled\ndoc: x\nalgorithm: |\n  " + NORM.split("n.block")[0].replace("\n", "\n  ") + "\n  n.compile(); r.compile();\n"))
    n, r = op(torch.empty(7, 0))
    assert n.shape == (7, 0) and torch.equal(r, torch.ones(7))


PRODUCT = "Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k); f.block(x:16, y:16); f.tensorize(x:16, y:16, k:{}); "


def test_products_of_bfloat16_in_the_interpreter():
    a, b = (t.bfloat16() for t in random((20, 32), (32, 24)))
    for left, right in ((a, b), (a, b.float())):
        got = dtkernels.compile(PRODUCT.format(16))(left, right)
        assert torch.allclose(got.double(), a.double() @ b.double(), rtol=2**-7, atol=2**-7)
    check(PRODUCT.format(16) + "f.descriptor(A, B);", a.half(), b, dtype="float32")
