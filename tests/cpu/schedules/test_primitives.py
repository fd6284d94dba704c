# ruff: noqa: E501 (programs read best on one line)
"""Every schedule primitive beyond the published ones, alone and together, against the float64 reference."""

import pytest
import torch
from oracle import check
from small_programs import MASKED, random

import dtkernels


def source(text):
    return dtkernels.compile(text).source


# -- one loop's pipelining, launch options, constants -------------------------------------------------------------------

MM = "Func mm; In A, B; Var x, y; RVar k; mm[x, y] = rdot(A[x, k], B[k, y], k); "
TILED = "mm.block(x:16, y:32); mm.tensorize(x:16, y:32, k:16); "
ROWS = "Func total, f; In A; Var x; RVar y; total[x] = rsum(exp(A[x, y]), y); f[x, y] = exp(A[x, y]) / total[x]; total.fuse_at(f, x); "
ATT = MASKED.format(condition="l <= m + o", scalars="", m=16, l=8)
MM_SIZES = [(32, 64, 48), (37, 41, 19), (1, 1, 1), (100, 33, 0)]


def check_mm(schedule, sizes):
    m, n, k = sizes
    check(MM + schedule, *random((m, k), (k, n)))


@pytest.mark.parametrize("sizes", MM_SIZES)
@pytest.mark.parametrize("more", ["mm.stages(k:3);", "mm.unroll(k:2);", "mm.stages(k:2); mm.unroll(k:4);", "mm.maxnreg(168);", "mm.evict(A:first, B:last);",
                                  "mm.specialize(k);", "mm.specialize(x, y, k);", "mm.stages(k:4); mm.specialize(y); mm.evict(B:first); mm.maxnreg(64);"])  # fmt: skip
def test_options_change_no_value(more, sizes):
    check_mm(TILED + more, sizes)


def test_options_are_in_the_text():
    text = source(MM + TILED + "mm.stages(k:3); mm.unroll(k:2); mm.maxnreg(168); mm.evict(A:first); mm.specialize(k);")
    assert "tl.range(0, size_k, TILE_k, num_stages=3, loop_unroll_factor=2)" in text
    assert text.count('eviction_policy="evict_first"') == 1 and "maxnreg=168" in text and "size_k: tl.constexpr" in text


def test_options_of_a_fused_func_reach_the_loop_they_share():
    assert source(ATT + "e.stages(l:4);").count("num_stages=4)") == 2


@pytest.mark.parametrize("statement", ["stages(k:3)", "unroll(k:2)"])
def test_a_word_about_a_loop_that_is_not_there_is_refused(statement):
    with pytest.raises(dtkernels.DTError, match="names a loop: found k, which is done at once"):
        source(MM + f"mm.block(x:16, y:16); mm.tensorize(x:16, y:16, k:0); mm.{statement};")


@pytest.mark.parametrize("order", ["x, y", "y, x", "y", "x"])
@pytest.mark.parametrize("sizes", MM_SIZES)
def test_reorder(order, sizes):
    check_mm(f"mm.block(x:16, y:32); mm.tensorize(x:4, y:8, k:8); mm.reorder({order});", sizes)


def test_reorder_sets_the_order_of_loops():
    text = source(MM + "mm.block(x:16, y:32); mm.tensorize(x:4, y:8, k:8); mm.reorder(y, x);")
    assert text.index("for y_start") < text.index("for x_start") < text.index("for k_start")


def test_reduction_outside_an_output_loop_is_refused_unless_that_is_done_at_once():
    with pytest.raises(dtkernels.DTError, match="k outside the loop over y"):
        source(MM + "mm.block(x:16, y:32); mm.tensorize(x:16, y:8, k:8); mm.reorder(k, y);")
    check_mm("mm.block(x:16); mm.tensorize(x:16, y:0, k:8); mm.reorder(k, y);", (20, 30, 40))


@pytest.mark.parametrize("order", ["y, z", "z, y"])
def test_reorder_of_two_reduced_labels(order):
    text = f"Func f; In A; Var x; RVar y, z; f[x] = rsum(A[x, y, z], y, z); f.tensorize(y:4, z:2); f.reorder({order});"
    check(text, random((2, 7, 5)))
    first, second = (f"for {label}_start" for label in order.split(", "))
    assert source(text).index(first) < source(text).index(second)


# -- persistent programs ------------------------------------------------------------------------------------------------

PERSISTENT = [
    (MM + TILED + "mm.persistent();", [(37, 70), (70, 41)]),
    (MM + TILED + "mm.map(x:x1/2, y, x1); mm.persistent();", [(97, 70), (70, 99)]),
    (MM + TILED + "mm.map(x:x1/3, y:y1/2, y1, x1); mm.persistent(); mm.specialize(k);", [(97, 32), (32, 99)]),
    (ROWS + "f.block(x:2); f.tensorize(x:2, y:8); f.persistent();", [(23, 19)]),
    (ROWS + "f.block(x:1); f.tensorize(y:0); f.persistent();", [(5, 19)]),
    (ATT + "att.persistent();", [(50, 16), (33, 16), (33, 16)]),
    ("Func f; In A; Var x, y; f[x, y] = 2 * A[x, y]; f.block(x:4, y:8); f.tensorize(y:8, x:2); f.map(y, x); f.persistent();", [(19, 21)]),
    ("Func f; In A; Var x, y; f[x, y] = 2 * A[x, y]; f.tensorize(y:8, x:2); f.persistent();", [(19, 21)]),
]


@pytest.mark.parametrize("text, shapes", PERSISTENT)
def test_persistent(text, shapes):
    found = random(*shapes)
    check(text, *(found if isinstance(found, list) else [found]))


def test_persistent_launches_no_more_programs_than_blocks():
    text = source(MM + TILED + "mm.persistent();")
    assert "(min(triton.cdiv(size_x, 16) * triton.cdiv(size_y, 32), programs(mm_out, 2)),)" in text and "flatten=True" in text


# -- a reduction over several programs ------------------------------------------------------------------------------------

DECODE = """Func s, e, total, att; In Q, K, V; SIn group; Var b, h, m, n; RVar l, d;
s[b, h, m, l] = rdot(Q[b, h, m, d], K[b, h / group, l, d], d); e[b, h, m, l] = exp(s[b, h, m, l]); total[b, h, m] = rsum(e[b, h, m, l], l);
att[b, h, m, n] = rdot(e[b, h, m, l], V[b, h / group, l, n], l) / total[b, h, m];
s.fuse_at(att, l); e.fuse_at(att, l); total.fuse_at(att, l);
att.block(b:1, h:1, m:16); att.tensorize(m:16, n:0, d:0, l:16);
"""
SPLIT = [
    (MM + TILED + "mm.split(k:{});", [(20, 50), (50, 33)]),
    (MM + TILED + "mm.split(k:{}); mm.map(x:x1/2, y, x1); mm.persistent();", [(60, 50), (50, 33)]),
    (MM + "mm.block(x:16, y:32); mm.tensorize(x:4, y:8, k:8); mm.split(k:{});", [(20, 50), (50, 33)]),
    (MM + "mm.block(x:16, y:32); mm.tensorize(x:16, y:32, k:1); mm.split(k:{});", [(20, 5), (5, 33)]),
    (MM.replace("rdot(A[x, k], B[k, y], k)", "exp(rdot(A[x, k], B[k, y], k) / 9) * A[x, x / 99]") + TILED + "mm.split(k:{});", [(20, 50), (50, 33)]),
    (ATT + "att.split(l:{});", [(50, 16), (40, 16), (40, 16)]),
    (ATT + "total.split(l:{}); att.persistent();", [(50, 16), (40, 16), (40, 16)]),
    (MASKED.format(condition="m - l < w and l <= m", scalars="", m=16, l=8) + "att.split(l:{});", [(50, 16), (40, 16), (40, 16)]),
    (MASKED.format(condition="l > m", scalars="", m=16, l=8) + "att.split(l:{});", [(50, 16), (47, 16), (47, 16)]),
    (ROWS + "f.block(x:2, y:16); f.tensorize(x:2, y:8); f.split(y:{});", [(5, 45)]),
    (ROWS + "f.block(x:1); f.tensorize(y:8); f.split(y:{});", [(3, 45)]),
    (ROWS + "f.tensorize(x:2, y:8); f.split(y:{});", [(3, 45)]),
    ("Func f; In A; Var x; RVar y; f[x] = rmax(A[x, y], y) - rmin(A[x, y], y) + rmean(A[x, y], y); f.block(x:2); f.tensorize(x:2, y:4); f.split(y:{});", [(5, 29)]),
    ("Func f; In A; Var x; RVar y; f[x] = log(rsum(exp(A[x, y]), y)); f.block(x:2); f.tensorize(x:2, y:4); f.split(y:{});", [(5, 29)]),
    ("Func f; In A; Var x; RVar y, z; f[x] = rsum(A[x, y, z], y, z); f.tensorize(y:4, z:2); f.split(z:{});", [(3, 7, 9)]),
    ("Func f; In A; Var x; RVar y, z; f[x] = rsum(A[x, y, z], y, z); f.tensorize(y:4, z:0); f.split(y:{});", [(3, 7, 9)]),
    ("Func f; In A, B; Var x; RVar y; f[x] = B[x] * rsum(A[y], y); f.tensorize(y:8); f.split(y:{});", [(77,), (3,)]),
    ("Func mean, f; In A; Var x; RVar y; mean[x] = rmean(A[x, y], y); f[x] = rmean((A[x, y] - mean[x]) * (A[x, y] - mean[x]), y); mean.fuse_at(f, x); f.block(x:2); f.tensorize(x:2, y:8); f.split(y:{});", [(5, 45)]),
]  # fmt: skip


@pytest.mark.parametrize("parts", [1, 3, 5])
@pytest.mark.parametrize("text, shapes", SPLIT)
def test_split(text, shapes, parts):
    found = random(*shapes)
    check(text.format(parts), *(found if isinstance(found, list) else [found]))


@pytest.mark.parametrize("parts", [2, 7])
def test_split_of_decoding(parts):
    check(DECODE + f"att.split(l:{parts});", *random((2, 4, 3, 16), (2, 2, 70, 16), (2, 2, 70, 16)), 2)


@pytest.mark.parametrize("size", [0, 1, 3, 16, 17])
def test_split_of_any_extent_has_empty_parts(size):
    check(MM + "mm.block(x:16, y:16); mm.tensorize(x:16, y:16, k:16); mm.split(k:4);", *random((5, size), (size, 7)))
    check("Func f; In A; Var x; RVar y; f[x] = rmax(A[x, y], y); f.block(x:2); f.tensorize(x:2, y:4); f.split(y:5);", random((3, size)))


def test_split_gives_the_same_bits_every_time():
    program = dtkernels.compile(ATT + "att.split(l:3);")
    args = random((50, 16), (40, 16), (40, 16))
    assert all(torch.equal(program(*args), program(*args)) for _ in range(3))


@pytest.mark.parametrize("text, found", [
    (MM + "mm.block(x:16, y:16); mm.tensorize(x:16, y:16, k:0); mm.split(k:2);", "no loop that reduces over it"),
    (MM + TILED + "mm.split(x:2);", "no loop that reduces over it"),
    ("Func f; In A; Var x; RVar y, z; f[x] = rsum(A[x, y, z], y, z); f.tensorize(y:4, z:2); f.split(y:2, z:2);", "one label of a kernel is split"),
    ("Func mm, f; In A, B, C; Var m, n; RVar k, l; mm[m, l] = rdot(A[m, k], B[k, l], k); f[m, n] = rdot(mm[m, l], C[l, n], l); mm.fuse_at(f, l);"
     "f.block(m:16, n:16); f.tensorize(m:16, n:16, k:16, l:16); f.split(k:2);", "starts anew inside the loop over l"),
])  # fmt: skip
def test_splits_that_are_refused(text, found):
    with pytest.raises(dtkernels.DTError, match=found):
        source(text)


# -- tensor descriptors -----------------------------------------------------------------------------------------------------

BATCHED = """Func mm; In A, B; Var b, h, x, y; RVar k; mm[b, h, x, y] = rdot(A[b, h, x, k], B[b, h / 2, k, y], k);
mm.block(b:1, h:1, x:16, y:32); mm.tensorize(x:16, y:32, k:16); """
DESCRIPTOR = [
    (MM + TILED + "mm.descriptor(A, B, mm);", [(32, 64), (64, 48)]),
    (MM + TILED + "mm.descriptor(A);", [(32, 64), (64, 48)]),
    (MM + TILED + "mm.descriptor(mm); mm.map(x:x1/2, y, x1);", [(36, 20), (20, 36)]),
    (MM + TILED + "mm.descriptor(A, B, mm); mm.persistent(); mm.stages(k:3);", [(36, 20), (20, 44)]),
    (MM + TILED + "mm.descriptor(A, B, mm); mm.split(k:3);", [(36, 100), (100, 44)]),
    (MM + "mm.block(x:32, y:32); mm.tensorize(x:16, y:16, k:0); mm.descriptor(A, B, mm);", [(36, 20), (20, 44)]),
    (BATCHED + "mm.descriptor(A, B, mm);", [(2, 4, 20, 36), (2, 2, 36, 20)]),
    (ATT + "att.descriptor(Q, K, V, att);", [(36, 16), (28, 16), (28, 16)]),
    (ATT + "att.descriptor(K, V); att.split(l:2);", [(36, 16), (28, 16), (28, 16)]),
    (ROWS + "f.block(x:2); f.tensorize(x:2, y:8); f.descriptor(A, f);", [(5, 20)]),
    (ROWS + "f.block(x:2); f.tensorize(x:2, y:0); f.descriptor(A, f);", [(5, 20)]),
    (ROWS + "f.block(x:1); f.tensorize(y:0); f.descriptor(A, f);", [(5, 20)]),
    ("Func f; In A; Var x, y; f[x, y] = 2 * A[x, y] + A[x + 1, y]; f.block(x:1, y:16); f.tensorize(y:8); f.descriptor(A, f);", [(5, 20)]),
    ("Func f; In A; Var x; RVar y; f[x] = rmax(A[x, y], y); f.block(x:4); f.tensorize(x:4, y:8); f.descriptor(A, f);", [(8, 20)]),
]  # fmt: skip


@pytest.mark.parametrize("text, shapes", DESCRIPTOR)
def test_descriptor(text, shapes):
    found = random(*shapes)
    found = found if isinstance(found, list) else [found]
    check(text, *found)
    check(text, *(t.mT.contiguous().mT for t in found))  # strides that no descriptor takes: pointers
    check(text, *(torch.cat([t, t], -1)[..., 1 : t.shape[-1] + 1] for t in found))  # a start that is not aligned


@pytest.mark.parametrize("sizes", [*MM_SIZES, (5, 7, 3)])
def test_descriptor_of_any_size(sizes):
    check_mm(TILED + "mm.descriptor(A, B, mm);", sizes)


@pytest.mark.parametrize("text, found", [
    ("Func f; In A; Var x; f[x] = A[x] + A[x + 1]; f.block(x:16); f.tensorize(x:16); f.descriptor(A);", "the index"),
    ("Func f; In A; Var x, y; f[x, y] = A[x, y]; f.block(x:16, y:1); f.tensorize(x:16); f.descriptor(A);", "element by element"),
    ("Func f; In A; Var x; f[x] = A[x]; f.block(x:512); f.tensorize(x:512); f.descriptor(A);", "a tile of 512"),
    ("Func g, f; In A; Var x; g[x] = A[x]; f[x] = 2 * g[x]; f.block(x:16); f.tensorize(x:16); f.descriptor(A);", "descriptor names a tensor of the kernel"),
])  # fmt: skip
def test_descriptors_that_are_refused(text, found):
    with pytest.raises(dtkernels.DTError, match=found):
        source(text)


# -- warps and clusters -------------------------------------------------------------------------------------------------------

WARPS = [
    (MM + TILED + "mm.descriptor(A, B); mm.specialize_warps(k);", [(36, 20), (20, 44)]),
    (MM + TILED + "mm.descriptor(A, B, mm); mm.specialize_warps(k); mm.persistent(); mm.stages(k:3);", [(36, 20), (20, 44)]),
    (ATT + "att.descriptor(Q, K, V); total.specialize_warps(l);", [(36, 16), (28, 16), (28, 16)]),
    (MM + TILED + "mm.cluster(2);", [(36, 20), (20, 44)]),
]


@pytest.mark.parametrize("text, shapes", WARPS)
def test_specialized_warps_and_clusters(text, shapes):
    check(text, *random(*shapes))


def test_warps_specialize_in_the_form_with_descriptors_alone():
    pointers, descriptors = source(WARPS[1][0]).split("def mm_descriptor_kernel")
    assert "warp_specialize" not in pointers and "num_stages=3, warp_specialize=True" in descriptors and "flatten" not in descriptors.split("def mm(")[0]


@pytest.mark.parametrize("text, found", [
    (MM + TILED + "mm.num_warps(2); mm.descriptor(A, B); mm.specialize_warps(k);", r"whole warpgroups: found num_warps\(2\)"),
    (MM + TILED + "mm.specialize_warps(k);", "needs loads through descriptors"),
    (MM + TILED + "mm.descriptor(A, B); mm.specialize_warps(x);", "specialize_warps names a loop: found x"),
    (MM + TILED + "mm.cluster(3);", "a number of blocks in a cluster: found 3"),
])  # fmt: skip
def test_warps_and_clusters_that_are_refused(text, found):
    with pytest.raises(dtkernels.DTError, match=found):
        source(text)


# -- the walk over blocks, and what lies between kernels -------------------------------------------------------------------


@pytest.mark.parametrize("order", ["x:x1/3, y, x1", "x:x1/4, y:y1/2, x1, y1", "y:y1/5, x:x1/2, y1, x1", "y, x:x1/7, x1", "x:x1/100, y, x1"])
@pytest.mark.parametrize("shape", [(7, 45), (33, 17), (40, 40)])
def test_groups_of_blocks_of_any_count(order, shape):
    check(f"Func f; In A; Var x, y; f[x, y] = 2 * A[x, y]; f.block(x:4, y:8); f.tensorize(x:4, y:8); f.map({order});", random(shape))


def test_inside_of_a_group_before_the_group_is_refused():
    with pytest.raises(dtkernels.DTError, match="the inside of a group after the group: found 'x1' before x:x1/4"):
        source("Func f; In A; Var x, y; f[x, y] = A[x, y]; f.block(x:4, y:8); f.map(x1, x:x1/4, y);")


def test_what_only_products_consume_is_kept_in_the_dtype_of_the_product():
    text = "Func mm, f; In A, B, C; Var m, n; RVar k, l; mm[m, l] = rdot(A[m, k], B[k, l], k); f[m, n] = {}; "
    text += "mm.block(m:16, l:16); mm.tensorize(m:16, l:16, k:16); f.block(m:16, n:16); f.tensorize(m:16, n:16, l:16);"
    product, other = text.format("rdot(mm[m, l], C[l, n], l)"), text.format("rdot(mm[m, l] + 1, C[l, n], l)")
    assert "mm_out = torch.empty((size_m, size_l), dtype=C_dtype" in source(product) and "dtype=torch.float32" in source(other)
    args = [t.half() for t in random((20, 30), (30, 40), (40, 50))]
    for program in (product, other):
        check(program, *args)


# -- several things in one pass -------------------------------------------------------------------------------------------

GATED = """Func out, dw, db, da_col, da; In A, w, g; Var x, y;
out[x, y] = g[x, y] * w[y] * A[x, y]; dw[y] = rsum(g[x, y] * A[x, y], x); db[y] = rsum(g[x, y], x);
da_col[y] = rsum(g[x, y] * A[x, y] * A[x, y], x); da[] = rsum(da_col[y] * w[y], y);
dw.block(y:16); dw.tensorize(y:16, x:4);
"""
JOINED = "out.fuse_at(dw, x); db.fuse_at(dw, x); da_col.fuse_at(dw, x); da_col.store(); da.tensorize(y:0);"


@pytest.mark.parametrize("more", ["", "dw.split(x:3);", "dw.split(x:8);", "dw.split(x:3); dw.persistent();"])
@pytest.mark.parametrize("shape", [(21, 35), (4, 16), (1, 1)])
def test_outputs_and_sums_in_one_pass(shape, more):
    text = GATED + JOINED + more + "out.compile(); dw.compile(); db.compile(); da.compile();"
    check(text, *random(shape, (shape[1],), shape))
    kernels = source(text).count("@triton.jit")
    assert kernels == (3 if "split" in more else 2)


def test_what_is_stored_is_read_by_a_later_kernel():
    text = source(GATED + JOINED + "dw.compile(); db.compile(); out.compile(); da.compile();")
    assert "da_col_ptr" in text.split("def da_kernel(")[1].split(")")[0]
    again = source(GATED + JOINED.replace("da_col.store();", "") + "dw.compile(); db.compile(); out.compile(); da.compile();")
    assert "da_col_ptr" not in again


def test_what_is_stored_is_computed_before_it_is_read_whatever_is_defined_first():
    text = """Func a, f, g; In A; Var y; RVar x; a[y] = rsum(A[x, y], x); f[y] = a[y] + 1; g[y] = rsum(A[x, y] * A[x, y], x);
    a.fuse_at(g, x); a.store(); g.tensorize(x:4); f.compile(); g.compile();"""
    check(text, random((7, 5)))
    waiting = text.replace("g[y] = rsum(A[x, y] * A[x, y], x);", "g[y] = rsum(A[x, y] * f[y], x);")
    with pytest.raises(dtkernels.DTError, match="kernels run one after another: found f and g, each before the other by fuse_at"):
        dtkernels.compile(waiting)


GROUPED = """Func s, e, total, att; In Q, K, V; Var h, m, n; RVar l, d;
s[h, m, l] = rdot(Q[h, m, d], K[h / {group}, l, d], d); e[h, m, l] = exp(s[h, m, l]); total[h, m] = rsum(e[h, m, l], l);
att[h, m, n] = rdot(e[h, m, l], V[h / {group}, l, n], l) / total[h, m];
s.fuse_at(att, l); e.fuse_at(att, l); total.fuse_at(att, l);
att.block(h:{block}, m:1); att.tensorize(h:16, m:1, n:0, d:0, l:16);
"""


@pytest.mark.parametrize("more", ["", "att.split(l:3);"])
@pytest.mark.parametrize("group, block, heads", [(4, 4, 8), (3, 3, 9), (8, 4, 16), (16, 16, 16), (2, 2, 6), (5, 5, 10)])
def test_heads_that_share_keys_in_one_padded_tile(group, block, heads, more):
    text = GROUPED.format(group=group, block=block) + more
    check(text, *random((heads, 2, 16), (heads // group, 37, 16), (heads // group, 37, 16)))
    assert "tl.dot(" in source(text)


def test_a_padded_tile_is_not_for_descriptors():
    with pytest.raises(dtkernels.DTError, match="padded"):
        source(GROUPED.format(group=4, block=4) + "att.descriptor(Q);")


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_pipelined_loop_over_blocks(rows):
    text = "Func f, m; In A; Var x; RVar y; m[x] = rmax(A[x, y], y); f[x, y] = A[x, y] - m[x]; m.fuse_at(f, x); f.block(x:1); f.tensorize(x:1, y:0); f.persistent(); f.stages(x:3);"
    check(text, random((rows, 33)))
    assert "tl.num_programs(0), num_stages=3):" in source(text)
    assert source(text.replace("x:1, y:0", "y:0")) == source(text)  # a block of one index is done at once anyway


def test_an_approximate_tanh_is_exact_where_there_is_no_gpu():
    text = "Func f; In A; Var x; f[x] = tanh(A[x]); f.block(x:16); f.tensorize(x:16); f.approximate(tanh);"
    check(text, random((100,)))
    assert "tanh.approx.f32" in source(text)
    with pytest.raises(dtkernels.DTError, match="a function to approximate: found exp; allowed: tanh, log, log2, log1p, expm1, erfc, rdot"):
        source(text.replace("approximate(tanh)", "approximate(exp)"))


def test_split_products_are_exact_where_there_is_no_gpu():
    text = MM + TILED + "mm.approximate(rdot);"
    check(text, random((20, 33)), random((33, 15)))
    assert 'input_precision=EXACT if PRECISION == "ieee" else PRECISION' in source(text) and "EXACT=exact_products(A)" in source(text)
    with pytest.raises(dtkernels.DTError, match=r"approximate\(rdot\) is of what the kernel computes, after the algebra: found no rdot of a tile in the kernel of f"):
        source("Func f; In A; Var x; f[x] = tanh(A[x]); f.block(x:16); f.tensorize(x:16); f.approximate(rdot);")


@pytest.mark.parametrize("share", ["1/8", "1/4", "3/8", "1/2"])
@pytest.mark.parametrize("more", ["f.block(x:1); f.tensorize(x:1, y:0);", "f.block(x:4); f.tensorize(x:4, y:8); f.split(y:2);"])
def test_a_share_of_exponentials_is_exact_where_there_is_no_gpu(more, share):
    text = ROWS + more + f"f.approximate(exp:{share});"
    check(text, random((9, 37)))
    assert f"exp2_{share.replace('/', '_of_')}(" in source(text)


# -- the form of what is emitted ---------------------------------------------------------------------------------------


def test_a_shift_enters_exp_in_base_two_and_other_differences_do_not():
    text = source("Func t, f; In A; Var x; RVar y; t[x] = rsum(exp(A[x, y]), y); f[x, y] = exp(A[x, y]) / t[x]; t.fuse_at(f, x); f.block(x:1); f.tensorize(x:1, y:0);")
    assert "tl.exp2(A * 1.4426950408889634 - " in text and "tl.exp(" not in text
    text = source("Func f; In A, b; Var x, y; f[x, y] = exp(A[x, y] - b[x]); f.block(x:4, y:4); f.tensorize(x:4, y:4);")
    assert "tl.exp(A - b[:, None])" in text


def test_tiles_are_kept_the_way_round_that_products_take_them():
    text = source("""Func s, e, f; In Q, K, G; Var m, l, n; RVar d;
    s[m, l] = rdot(Q[m, d], K[l, d], d); e[m, l] = exp(s[m, l]); f[l, n] = rdot(G[m, n], e[m, l], m);
    s.fuse_at(f, m); e.fuse_at(f, m); f.block(l:16); f.tensorize(l:16, m:16, n:0, d:0);""")
    assert "tl.dot(K, tl.trans(Q)" in text and "tl.trans(e)" not in text


# -- copies with aligned rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", ["", "mm.descriptor(A, B);", "mm.descriptor(A, B, mm); mm.persistent();", "mm.split(k:2);", "mm.evict(B:first);"])
@pytest.mark.parametrize("shape", [(21, 35, 19), (16, 32, 16), (1, 1, 1)])
def test_a_product_of_copies_with_aligned_rows(shape, more):
    m, n, k = shape
    text = MM + "mm.block(x:16, y:16); mm.tensorize(x:16, y:16, k:16); mm.stage(A, B);" + more
    check(text, *random((m, k), (k, n)))
    assert source(text).count("_rows_kernel(") == 2 and "-(-size_k // 64) * 64" in source(text)


def test_a_func_between_kernels_with_aligned_rows():
    text = "Func a, f; In A, B; Var x, y, k; a[x, k] = A[x, k] + 1; f[x, y] = rdot(a[x, k], B[k, y], k); f.block(x:16, y:16); f.tensorize(x:16, y:16, k:16); a.align(); f.compile();"
    check(text, *random((21, 19), (19, 35)))
    assert "a_out = torch.empty((size_x, -(-size_k // 64) * 64)" in source(text)


def test_a_func_that_is_stored_where_it_is_fused_has_aligned_rows():
    text = "Func a, s, f; In A, B; Var x, y, k; a[x, k] = A[x, k] + 1; s[k] = rsum(a[x, k], x); f[x, y] = rdot(a[x, k], B[k, y], k) + s[0]; "
    text += "a.fuse_at(s, x); a.store(); f.block(x:16, y:16); f.tensorize(x:16, y:16, k:16); s.block(k:8); s.tensorize(k:8, x:4); f.compile();"
    with_rows = text + " a.align();"
    check(with_rows, *random((21, 19), (19, 35)))
    assert "a_out = torch.empty((size_x, -(-size_k // 64) * 64)" in source(with_rows)
    with pytest.raises(dtkernels.DTError, match="align is for a Func between kernels: found a; allowed: a Func that is not compiled, and not fused unless it is stored"):
        source(with_rows.replace("a.store(); ", ""))


@pytest.mark.parametrize("text, rule", [
    (MM + "mm.stage(mm);", "stage names an input"), (MM + "mm.align();", "align is for a Func between kernels"),
    ("Func f, g; In A, B; Var x; f[x] = A[x]; g[x] = B[x] + f[x]; g.stage(A);", "stage names an input of g: found A; allowed: B"), ("Func f; In A, B; Var x; f[x] = A[x + 1] + B[x]; f.stage(A);", "stage names an input"),
    ("Func f; In A, B, t; Var x; f[x] = A[t[x]] + B[x]; f.stage(t);", "stage names an input of numbers: found t, whose elements stand in an index; allowed: A, B"),
])  # fmt: skip
def test_what_cannot_be_copied_is_refused(text, rule):
    with pytest.raises(dtkernels.DTError, match=rule):
        dtkernels.compile(text)


def test_a_quotient_that_is_a_label_reads_like_the_label():
    text = """Func f; In A, B; Var g, x; RVar j; Extent j = 4; f[g, x] = rsum(A[(4 * g + j) / 4, x] * B[4 * g + j, x], j) + 0 * A[g, x];
    f.block(g:2, x:16); f.tensorize(g:2, x:16);"""
    a, b = random((3, 20), (12, 20))
    torch.testing.assert_close(dtkernels.compile(text)(A=a, B=b), a * b.view(3, 4, 20).sum(1))
    assert "// 4" not in source(text)
