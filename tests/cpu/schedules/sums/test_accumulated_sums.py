"""``accumulate_at``: a sum that the programs of another Func's kernel add up in memory, as they come or in a fixed order."""

import warnings

import pytest
import torch
from attention_sweep import arguments, one_sweep
from oracle import check
from small_programs import random

import dtkernels
from dtkernels.codegen.emit.module import emit
from dtkernels.runtime.build.source_cache import load_module

CHAIN = """Func s, g, f; In A, B, C; Var m, l, d, e;
s[m, l] = rdot(A[m, d], B[l, d], d); g[l, e] = rdot(s[m, l], C[m, e], m); f[m, d] = {}rdot(s[m, l], B[l, d], l){};
s.fuse_at(g, m); g.block(l:{}); g.tensorize(l:16, m:16, d:0, e:0); """
BOTH = "g.compile(); f.compile();"
SWEEP = CHAIN.format("", "", 16) + "f.accumulate_at(g, m); " + BOTH
COLUMNS = """Func r, g, f; In X, D, w; Var x, y; r[x] = rsum(D[x, y] * w[y] * X[x, y], y); g[x, y] = D[x, y] * w[y] - X[x, y] * r[x];
f[y] = rsum({} * X[x, y], x); r.fuse_at(g, x); g.block(x:16); g.tensorize(x:{}, y:0); f.tensorize(y:0); f.accumulate_at(g, {}{}); """
ORDERS = ["", ", ordered"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("before, after, block", [("", "", 16), ("", " * 2", 48), ("cast(", ", fp32)", 48)])
@pytest.mark.parametrize("sizes", [(19, 35, 9, 5), (1, 1, 1, 1)])
def test_terms_of_two_labels_are_added_where_the_product_is(before, after, block, order, sizes):
    m, l, d, e = sizes  # noqa: E741
    check(CHAIN.format(before, after, block) + f"f.accumulate_at(g, m{order}); f.block(m:16); f.tensorize(m:16, d:0); " + BOTH, *random((m, d), (l, d), (m, e)))


@pytest.mark.parametrize("terms", ["D[x, y]", "g[x, y]"])  # of a finished g, too
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tile, sizes", [(16, (40, 33)), (4, (40, 33)), (1, (17, 8)), (4, (1, 1))])
def test_columns_are_summed_where_rows_are_computed(terms, order, tile, sizes):
    x, y = sizes
    check(COLUMNS.format(terms, tile, "y" if terms[0] == "g" else "x", order) + BOTH, *random((x, y), (x, y), (y,)))


def test_columns_add_up_in_registers_before_memory():
    text = dtkernels.compile(COLUMNS.format("D[x, y]", 4, "x", "") + BOTH).source
    loop = text.split("for x_start in ")[1]
    assert "f_sum_acc += tl.sum(" in loop and loop.index("tl.store(") < loop.index("tl.atomic_add(") and text.count("tl.atomic_add(") == 1


def test_a_fixed_order_has_no_additions_of_several_programs():
    one, several = (dtkernels.compile(CHAIN.format("", "", block) + "f.accumulate_at(g, m, ordered); " + BOTH).source for block in (16, 48))
    assert "atomic_add" not in one and "debug_barrier" not in one, "each part is written once"
    assert "tl.debug_barrier()" in several and "f_parts_out = torch.empty((size_l_part, size_m, size_d), dtype=torch.float32" in several
    assert "(block_l) * f_parts_stride_l_part" in several, "each block has a part of its own"


@pytest.mark.parametrize("order", ORDERS)
def test_a_sum_of_no_terms_is_zero(order):
    found = dtkernels.compile(CHAIN.format("", " + 3", 16) + f"f.accumulate_at(g, m{order}); " + BOTH)
    a, b, c = random((5, 4), (0, 4), (5, 3))
    assert (found.f(a, b, c) == 3).all() and found.g(a, b, c).shape == (0, 3)


def test_terms_are_added_where_the_hosts_own_result_is_empty():
    text = "Func g, f; In X, Y; Var x, y; g[x, y] = X[x] * Y[y]; f[] = rsum(X[x] * X[x], x);"
    text = text.replace("f[]", "f[x0]").replace("In X, Y;", "In X, Y, Z;").replace("rsum(X[x] * X[x], x)", "rsum(X[x] * Z[x, x0], x)").replace("Var x, y;", "Var x, y, x0;")
    text += "g.block(x:4); g.tensorize(x:4, y:0); f.tensorize(x0:0); f.accumulate_at(g, x); g.compile(); f.compile();"
    x, z = random((6,), (6, 3))
    torch.testing.assert_close(dtkernels.compile(text).f(x, torch.empty(0), z), x @ z)


def test_float32_is_not_copied():
    kernels = []
    program = dtkernels.compile(SWEEP)
    kept = program.module.f_kernel
    program.module.f_kernel = type("Counted", (), {"__getitem__": lambda self, grid: kernels.append(grid) or kept[grid]})()
    a, b, c = random((20, 8), (20, 8), (20, 8))
    wide = program.f(a, b, c)
    assert not kernels and wide.dtype == torch.float32
    narrow = program.f(a.half(), b.half(), c.half())
    assert len(kernels) == 1 and narrow.dtype == torch.float16
    torch.testing.assert_close(narrow.float(), wide, rtol=2e-2, atol=2e-2)


def test_deterministic_algorithms_forbid_sums_in_any_order():
    a, b, c = random((20, 8), (20, 8), (20, 8))
    free, fixed = dtkernels.compile(SWEEP), dtkernels.compile(SWEEP.replace("f.accumulate_at(g, m)", "f.accumulate_at(g, m, ordered)"))
    expected = free.f(a, b, c)
    try:
        torch.use_deterministic_algorithms(True)
        with pytest.raises(RuntimeError, match=r"^f: f is added up in no fixed order.*allowed: accumulate_at\(\.\.\., ordered\)$"):
            free.f(a, b, c)
        torch.testing.assert_close(fixed.f(a, b, c), expected)
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="f: f is added up in no fixed order"):
            free.f(a, b, c)
    finally:
        torch.use_deterministic_algorithms(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(free.f(a, b, c), expected)


REFUSED = {
    "f.accumulate_at(q, m);": "accumulate_at names a Func: found 'q'",
    "f.accumulate_at(g, d);": "accumulate_at names a loop of g: found 'd'; allowed: l, e, m",
    "f.accumulate_at(g);": r"arguments of accumulate_at: found \(g\); allowed: \(func, label\) or \(func, label, ordered\)",
    "f.accumulate_at(g, m, sorted);": r"arguments of accumulate_at: found \(g, m, sorted\)",
    "f.accumulate_at(g, m); f.accumulate_at(g, l);": "a schedule says accumulate_at of f once",
    "f.accumulate_at(g, l); g.block(m:4);": r"a sum in blocks is of a kernel that adds to no other sum: found g.block\(m:4\)",
    "f.accumulate_at(g, e);": "go through the terms once: found e, which f and its terms lack",
    "f.accumulate_at(g, m, ordered); g.split(m:2);": r"split is of a kernel that adds to no other sum: found g.split\(m:2\)",
    "f.accumulate_at(g, m); g.cluster(2);": "cluster is of a kernel that adds to no other sum",
    "f.accumulate_at(g, m); f.store();": "store is of a Func that is fused",
    "g.accumulate_at(f, m); f.accumulate_at(g, m);": "f is computed in its own kernel: found f, which is added up elsewhere",
    "s.accumulate_at(g, m);": "s is computed there alone: found another statement places s",
    "f.accumulate_at(g, m, ordered); g.block(l:32); g.descriptor(f);": r"descriptor\(f_parts\): found additions in a fixed order",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused(text):
    program = CHAIN.format("", "", 16).replace("e:0", "e:4" if "(g, e)" in text else "e:0")
    program = program.replace("g.block(l:16); ", "") if "l:32" in text else program
    with pytest.raises(dtkernels.DTError, match=REFUSED[text]):
        dtkernels.compile(program + text + BOTH)


def test_other_reductions_and_needed_funcs_are_refused():
    with pytest.raises(dtkernels.DTError, match="f has one sum, and no other reduction: found f"):
        dtkernels.compile("Func g, f; In A; Var x, y; g[x, y] = A[x, y] + 1; f[y] = rmax(A[x, y], x); f.accumulate_at(g, x); f.compile(); g.compile();")
    with pytest.raises(dtkernels.DTError, match="g does not need f, which is finished after it"):
        dtkernels.compile("Func f, g; In A; Var x, y; f[y] = rsum(A[x, y], x); g[x, y] = A[x, y] / f[y]; f.accumulate_at(g, x); f.compile(); g.compile();")


FORMS = [{"causal": True}, {"causal": True, "group": 2}, {"capped": True, "starts": True, "ends": True}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("order, span", [("", 16), (", ordered", 32)])
@pytest.mark.parametrize("params", FORMS, ids=lambda p: " ".join(p))
def test_attentions_backward_in_one_sweep(params, order, span, dtype):
    program = one_sweep(params, 16, 16, span, order)
    given, exact = arguments(program, params, (1, 2, 37, 45, 16), dtype)
    found = load_module(emit(program, "call", None, True), "sweep").call(*given)
    for got, right in zip(found, exact):
        assert got.dtype == dtype
        rounding = torch.finfo(dtype).eps * (1 if dtype == torch.float16 else 8)  # of the operands of products of up to 45 terms, which add in float32
        torch.testing.assert_close(got.double(), right, rtol=4 * rounding, atol=4 * rounding * float(right.abs().max()))


@pytest.mark.parametrize("sizes", [(1, 4, 37, 45, 16), (2, 4, 64, 33, 8), (1, 4, 3, 2, 4)])
@pytest.mark.parametrize("params, split", [({"causal": True}, "m:3"), ({"causal": True, "group": 2}, "h_in:2"), ({"group": 4}, "h_in:3"), ({"group": 2}, "m:2")])
def test_programs_that_share_a_block_add_their_own_terms(params, split, sizes):
    program = one_sweep(params, 16, 16, more=f"d_K.split({split});")
    given, exact = arguments(program, params, sizes, torch.float32)
    for got, right in zip(load_module(emit(program, "call", None, True), "sweep").call(*given), exact):
        torch.testing.assert_close(got.double(), right, rtol=2.0**-18, atol=2.0**-18 * float(right.abs().max()))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes, split", [((1, 4, 37, 45, 16), ""), ((2, 4, 64, 33, 8), "{}:2"), ((1, 4, 3, 2, 4), "m:2")])
@pytest.mark.parametrize("params", [*FORMS, {"group": 4}], ids=lambda p: " ".join(p))
def test_a_block_of_all_keys_has_whole_sums_of_the_queries(params, sizes, split, order):
    split = split.format("h_in" if "group" in params else "m")
    program = one_sweep(params, 0, 16, order=order, more=f"d_total.fuse_at(d_K, m); {f'd_K.split({split});' if split else ''}")
    given, exact = arguments(program, params, sizes, torch.float32)
    text = emit(program, "call", None, True)
    assert "atomic_add" not in text and "d_Q_sum_ptr" not in text and text.count("@triton.jit\ndef d_") == 1 + bool(split)
    for got, right in zip(load_module(text, "sweep").call(*given), exact):
        torch.testing.assert_close(got.double(), right, rtol=2.0**-18, atol=2.0**-18 * float(right.abs().max()))


@pytest.mark.parametrize("before, after", [("", ""), ("", " * 2"), ("cast(", ", fp32)")])
@pytest.mark.parametrize("sizes", [(19, 35, 9, 5), (1, 1, 1, 1)])
def test_a_whole_sum_is_finished_where_its_terms_are(before, after, sizes):
    m, l, d, e = sizes  # noqa: E741
    text = CHAIN.format(before, after, 16).replace("g.block(l:16); g.tensorize(l:16", "g.tensorize(l:0") + "f.accumulate_at(g, m); " + BOTH
    check(text, *random((m, d), (l, d), (m, e)))
    assert dtkernels.compile(text).source.count("@triton.jit\ndef ") == 1


def test_one_sweep_has_five_products_and_no_other_kernel_of_them():
    text = emit(one_sweep({"causal": True}, 16, 16), "call")
    kernel = text.split("def d_K_kernel(")[1].split("@triton.jit")[0]
    loops = kernel.split("for m_start in ")[1:]
    assert len(loops) == 3 and [loop.count("tl.dot(") for loop in loops] == [5, 5, 5] and text.count("tl.dot(") == 15
    assert "range(m_begin" in loops[0] or "m_begin" in loops[0].split(":")[0], "queries before the first key of the block are left out"


def test_an_output_among_the_terms_comes_from_the_kernel_that_adds_them_up():
    text = (
        "Func f0, f1, f2; In A, B, C; Var y; RVar x; f0[y] = 1 - A[y]; f1[y, x] = f0[y] * B[y, x]; f2[y] = rdot(f1[y, x], C[y, x], x);"
        "f2.block(y:16); f1.fuse_at(f2, y); f2.accumulate_at(f0, y, ordered); f0.block(y:8); f2.tensorize(x:0); f0.compile(); f1.compile(); f2.compile();"
    )
    A, B, C = torch.randn(7), torch.randn(7, 20), torch.randn(7, 20)
    check(text, A, B, C)
    with pytest.raises(dtkernels.DTError, match="f1 is computed together with others: found a call of f1; allowed: f0, which returns f0, f1"):
        dtkernels.compile(text).f1(A=A, B=B, C=C)


def test_terms_that_another_kernel_makes_again_are_read_from_memory():
    text = (
        "Func f0, e1, d2, f1; In A, B, C; Var y; RVar x; f0[y, x] = A[y, x] * 2; e1[y, x] = exp(f0[y, x] + B[x]); d2[y] = rsum(e1[y, x], x); f1[y] = rsum(e1[y, x] * C[x], x) / d2[y];"
        "f1.accumulate_at(f0, x); e1.fuse_at(f1, y); d2.fuse_at(f1, x); f0.tensorize(x:0, y:16); f1.tensorize(x:4); f1.block(y:16); f1.compile(); d2.compile();"
    )
    check(text, torch.randn(17, 7), torch.randn(7), torch.randn(7))


@pytest.mark.parametrize("merge", ["y, x", "x, y"])
@pytest.mark.parametrize("ordered", ["", ", ordered"])
def test_a_merged_loop_that_would_repeat_terms_is_refused(merge, ordered):
    text = "Func g, f; In X, D; Var x, y;\ng[x, y] = D[x, y] * 2;\nf[y] = rsum(D[x, y] * X[x, y], x);\ng.compile(); f.compile(); f.tensorize(y:0); "
    with pytest.raises(dtkernels.DTError, match=r":5:1: accumulate_at: a merged loop goes over labels at which terms of .* are known: found p, also of y; allowed: merge without y"):
        dtkernels.compile(f"{text}f.accumulate_at(g, x{ordered});\ng.merge(p, {merge});").f(*random((8, 16), (8, 16)))


ROWS_BY_INDEX = """Func terms, f; In A, P, W, t; Var b, s, y, v; Extent v = W[0];
terms[b, s, y] = A[b, s, y] * (P[s, y] + W[t[b, s], y]); f[v, y] = rsum(where(t[b, s] == v, terms[b, s, y], 0), b, s);
f.accumulate_at(terms, y); terms.block(b:2, s:4, y:8); terms.tensorize(b:2, s:4, y:8); f.block(v:4); f.tensorize(v:4, y:0); f.compile();"""


def test_rows_are_added_where_an_index_says_in_tiles_of_any_order():
    """P lacks b, which therefore comes after s in the tiles; the loaded index is turned round with them."""
    a, p, w = random((3, 5, 11), (5, 11), (7, 11))
    t = torch.randint(7, (3, 5))
    assert "s[:, None, None]" in dtkernels.compile(ROWS_BY_INDEX).source
    terms = a.double() * (p.double() + w.double()[t])
    wanted = torch.zeros(7, 11, dtype=torch.float64).index_add_(0, t.reshape(-1), terms.reshape(-1, 11))
    torch.testing.assert_close(dtkernels.compile(ROWS_BY_INDEX).f(a, p, w, t).double(), wanted, rtol=1e-5, atol=1e-5)
