# ruff: noqa: E501 (programs and error texts read best on one line)
"""Every program of the published language with the schedules it was shown with, against the float64 reference."""

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from oracle import check

ADD = "Func add_out; In A, B; SIn alpha; Var x, y; add_out[x, y] = alpha * (A[x, y] + B[x, y]);"
SWISH = "Func swish_out, tmp; In A; SIn beta; Var x, y; tmp[x, y] = sigmoid(beta * A[x, y]); swish_out[x, y] = A[x, y] * tmp[x, y];"
RELU = "Func relu_out; In A; Var x, y; relu_out[x, y] = maximum(0, A[x, y]);"
MM = "Func mm; In A, B; Var x, y; RVar k; mm[x, y] = rdot(A[x, k], B[k, y], k);"
MMSIGMOID = "Func mmsigmoid; In A, B; Var x, y; RVar k; mmsigmoid[x, y] = sigmoid(rdot(A[x, k], B[k, y], k));"
DYT = "Func dyt; In A, w, b; SIn alpha; Var x, y; dyt[x, y] = tanh(alpha * A[x, y]) * w[y] + b[y];"
SOFTMAX = """Func _sum, _softmax; In A; Var x; RVar y;
_sum[x] = rsum(exp(A[x, y]), y);
_softmax[x, y] = exp(A[x, y]) / reshape(_sum[x], x, 1);
"""
TWO_MM = """Func mm, _2mm; In A, B, C; Var m, n; RVar k, l;
mm[m, l] = rdot(A[m, k], B[k, l], k);
_2mm[m, n] = rdot(mm[m, l], C[l, n], l);
"""
ATTENTION = """Func mm, e, dvsr, sm, attention; In A, B, C; Var m, n; RVar k, l;
mm[m, l] = rdot(A[m, k], B[k, l], k) / sqrt(len(l));
e[m, l] = exp(mm[m, l]);  dvsr[m] = rsum(e[m, l], l);  sm[m, l] = e[m, l] / reshape(dvsr[m], m, 1);
attention[m, n] = rdot(sm[m, l], C[l, n], l);
"""

MM_SCHEDULE = "mm.tensorize(x:128, k:32, y:128); mm.block(x:128, y:128); mm.map(x:x1/8, y, x1); mm.num_warps(4); mm.num_stages(3);"
SOFTMAX_SCHEDULE = "_softmax.block(x:4); _softmax.tensorize(y:512); _softmax.tensorize(x:0); _softmax.num_warps(32); _sum.fuse_at(_softmax, x);"
TWO_MM_SCHEDULE = """_2mm.block(m:16); _2mm.tensorize(m:16); _2mm.tensorize(n:64); _2mm.tensorize(k:32); _2mm.tensorize(l:0);
_2mm.num_stages(4); _2mm.num_warps(4); """
ATTENTION_SCHEDULE = """attention.tensorize(m:16); attention.block(m:16); attention.tensorize(n:64); attention.tensorize(k:16);
attention.tensorize(l:0); attention.num_stages(8); attention.num_warps(8);
mm.fuse_at(e, l); dvsr.fuse_at(sm, m); sm.fuse_at(attention, m); e.fuse_at(attention, m);"""


def random(*shapes):
    torch.manual_seed(sum(map(sum, shapes)))
    return [torch.randn(*s) for s in shapes]


#: the schedules of part 1's table, for the program it shows them on
SCHEDULES_BY_EXAMPLE = [
    "",
    "add_out.block(x:4, y:64);",
    "add_out.block(x:4, y:64); add_out.tensorize(x:2, y:64);",
    "add_out.block(x:4, y:64); add_out.tensorize(x:2, y:64); add_out.map(y, x);",
    "add_out.block(x:1, y:256); add_out.tensorize(y:64); add_out.compile();",
]


@pytest.mark.parametrize("shape", [(8, 128), (1, 1), (5, 67), (3, 257)])
@pytest.mark.parametrize("schedule", SCHEDULES_BY_EXAMPLE)
def test_scaled_addition(schedule, shape):
    if "tensorize" not in schedule:  # single elements: slow in the interpreter
        shape = (min(shape[0], 5), min(shape[1], 67))
    a, b = random(shape, shape)
    check(ADD + schedule, a, b, 1.5)


@pytest.mark.parametrize("schedule", ["tmp.fuse_at(swish_out, y); swish_out.compile();",
                                      "swish_out.block(x:2, y:32); swish_out.tensorize(y:16); tmp.fuse_at(swish_out, y);"])  # fmt: skip
@pytest.mark.parametrize("shape", [(1, 1), (4, 32), (3, 37)])
def test_swish(schedule, shape):
    check(SWISH + schedule, *random(shape), 0.7)


@pytest.mark.parametrize("shape", [(8, 16), (1, 1), (9, 17), (50, 31)])
def test_swish_of_two_kernels(shape):
    check(SWISH + "swish_out.block(x:8, y:32); swish_out.tensorize(x:8, y:32); tmp.block(x:4, y:16); tmp.tensorize(y:16);", *random(shape), 0.7)


@pytest.mark.parametrize(
    "schedule, shape",
    [
        ("", (3, 5)),
        ("relu_out.block(x:8, y:16); relu_out.map(x:xi/4, y, xi);", (16, 32)),
        ("relu_out.block(x:8, y:16); relu_out.map(x:xi/4, y, xi);", (43, 19)),  # 6 blocks of x: a group of 4 and one of 2
        ("relu_out.block(x:8, y:16); relu_out.map(x:xi/4, y, xi);", (1, 1)),
        ("relu_out.block(x:1, y:128); relu_out.tensorize(y:128); relu_out.map(y, x);", (7, 384)),
        ("relu_out.block(x:1, y:128); relu_out.tensorize(y:128); relu_out.map(y, x);", (7, 131)),
        ("relu_out.block(x:1, y:128); relu_out.tensorize(y:128); relu_out.map(y, x);", (1, 1)),
    ],
)
def test_relu(schedule, shape):
    check(RELU + schedule, *random(shape))


@pytest.mark.parametrize("m, k, n", [(128, 32, 128), (256, 64, 128), (130, 67, 200), (1, 1, 1), (1100, 33, 129), (127, 3, 131)])
def test_matrix_product(m, k, n):
    check(MM + MM_SCHEDULE, *random((m, k), (k, n)))


def test_matrix_product_without_a_schedule():
    check(MM, *random((3, 5), (5, 2)))


@pytest.mark.parametrize("shape", [(4, 512), (8, 1024), (1, 1), (5, 513), (7, 1031), (2, 31)])
def test_softmax(shape):
    check(SOFTMAX + SOFTMAX_SCHEDULE, *random(shape))


@pytest.mark.parametrize("schedule", ["", "_sum.fuse_at(_softmax, x);"])
def test_softmax_of_single_elements(schedule):
    check(SOFTMAX + schedule, *random((3, 5)))


@pytest.mark.parametrize("m, k, l, n", [(32, 32, 32, 64), (64, 32, 32, 128), (1, 1, 1, 1), (37, 33, 31, 67), (17, 64, 64, 130)])
@pytest.mark.parametrize("fusion", ["mm.fuse_at(_2mm, m);", "mm.fuse_at(_2mm, l);"])
def test_two_matrix_products(fusion, m, k, l, n):  # noqa: E741
    check(TWO_MM + TWO_MM_SCHEDULE + fusion, *random((m, k), (k, l), (l, n)))


def test_two_matrix_products_fused_in_a_real_inner_loop():
    """With l cut into tiles the inner fusion is not the outer one."""
    schedule = TWO_MM_SCHEDULE.replace("l:0", "l:16") + "mm.fuse_at(_2mm, l);"
    check(TWO_MM + schedule, *random((37, 33), (33, 41), (41, 67)))


@pytest.mark.parametrize("schedule", ["", "mm.fuse_at(_2mm, m);", "mm.fuse_at(_2mm, l);"])
def test_two_matrix_products_of_single_elements(schedule):
    check(TWO_MM + schedule, *random((2, 3), (3, 4), (4, 3)))


@pytest.mark.parametrize("m, k, l, n", [(32, 32, 64, 64), (1, 1, 1, 1), (19, 17, 37, 67), (16, 48, 130, 5)])
@pytest.mark.parametrize("scale", ["len(l)", "len(k)"])
def test_attention(scale, m, k, l, n):  # noqa: E741
    check(ATTENTION.replace("len(l)", scale) + ATTENTION_SCHEDULE, *random((m, k), (k, l), (l, n)))


def test_attention_without_a_schedule():
    """Five kernels of single elements."""
    check(ATTENTION, *random((2, 3), (3, 4), (4, 2)))


@pytest.mark.parametrize("m, k, n", [(64, 32, 64), (1, 1, 1), (67, 33, 41)])
def test_matrix_product_and_sigmoid(m, k, n):
    schedule = "mmsigmoid.block(x:32, y:32); mmsigmoid.tensorize(x:32, y:32, k:16); mmsigmoid.map(x:x1/2, y, x1);"
    check(MMSIGMOID + schedule, *random((m, k), (k, n)))


def test_matrix_product_and_sigmoid_without_a_schedule():
    check(MMSIGMOID, *random((3, 4), (4, 2)))


@pytest.mark.parametrize("schedule", ["dyt.block(x:2, y:64); dyt.tensorize(x:2, y:64);", "dyt.block(x:1); dyt.tensorize(y:0);", "dyt.block(x:1, y:128); dyt.tensorize(y:32);"])
@pytest.mark.parametrize("shape", [(4, 128), (1, 1), (5, 131)])
def test_dyt(schedule, shape):
    check(DYT + schedule, *random(shape, shape[1:], shape[1:]), 0.5)


def test_dyt_without_a_schedule():
    check(DYT, *random((2, 3), (3,), (3,)), 0.5)
