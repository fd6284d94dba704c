# ruff: noqa: E501 (programs and error texts read best on one line)
"""What part 2 of the language adds, feature by feature, each in the smallest program that shows it."""

import ast
import math
import os
import subprocess
import sys

import bounds  # noqa: F401 (an access outside the tensors raises)
import numpy as np
import pytest
import torch
from oracle import check

import dtkernels

inf, nan = float("inf"), float("nan")


def random(*shapes, seed=0):
    torch.manual_seed(seed)
    found = [torch.randn(*s) for s in shapes]
    return found if len(found) > 1 else found[0]


def unary(expression, schedule="f.block(x:8); f.tensorize(x:8);"):
    return f"Func f; In A; Var x; f[x] = {expression}; {schedule}"


def binary(expression, schedule="f.block(x:8); f.tensorize(x:8);"):
    return f"Func f; In A, B; Var x; f[x] = {expression}; {schedule}"


# -- expressions ------------------------------------------------------------------------------------------------------

UNARY = ["exp(A[x])", "exp2(A[x])", "abs(A[x])", "erf(A[x])", "floor(3 * A[x])", "sigmoid(A[x])", "tanh(A[x])", "-A[x]", "--A[x]", "sigmoid(40 * A[x])", "tanh(40 * A[x])"]
POSITIVE = ["log(A[x])", "log2(A[x])", "sqrt(A[x])", "rsqrt(A[x])"]


@pytest.mark.parametrize("schedule", ["", "f.block(x:8); f.tensorize(x:8);", "f.tensorize(x:0);"])
@pytest.mark.parametrize("expression", UNARY)
def test_functions(expression, schedule):
    check(unary(expression, schedule), random((13,)))


@pytest.mark.parametrize("expression", POSITIVE)
def test_functions_of_positive_numbers(expression):
    check(unary(expression), random((13,)).abs() + 0.1)
    check(unary(expression, ""), random((3,)).abs() + 0.1)


def test_functions_at_their_edges():
    a = torch.tensor([0.0, -0.0, inf, -inf, nan, -1.0, 1e-3, -88.0, 88.0])
    for expression in UNARY + POSITIVE:
        check(unary(expression), a)


@pytest.mark.parametrize("expression", ["A[x] + B[x]", "A[x] - B[x]", "A[x] * B[x]", "A[x] / B[x]", "maximum(A[x], B[x])", "minimum(A[x], B[x])", "A[x] - (B[x] - A[x])",
                                        "A[x] / (B[x] / A[x])", "-(A[x] + B[x]) * 2 - -3", "A[x] * (B[x] + 1) / 2", "1 / 3 * A[x]", "2e-3 * A[x] + .5"])  # fmt: skip
def test_arithmetic(expression):
    a, b = random((13,), (13,))
    check(binary(expression) if "B[" in expression else unary(expression), *((a, b) if "B[" in expression else (a,)))


@pytest.mark.parametrize("op", ["<", "<=", ">", ">=", "==", "!="])
def test_comparisons(op):
    a = torch.tensor([1.0, 2.0, 2.0, nan, 1.0, inf, -inf, nan, 0.0])
    b = torch.tensor([2.0, 2.0, 1.0, 1.0, nan, inf, inf, nan, -0.0])
    check(binary(f"where(A[x] {op} B[x], 5, A[x])"), a, b)


@pytest.mark.parametrize("condition", ["A[x] > 0 and B[x] > 0", "A[x] > 0 or B[x] > 0", "not A[x] > 0", "not (A[x] > 0 or B[x] > 0) or A[x] > B[x]", "A[x] > 0 and not B[x] > 0", "(A[x] > 0) == (B[x] > 0)",
                                       "(A[x] > 0) != (B[x] > 0)", "where(A[x] > 0, B[x] > 0, B[x] < -1)", "true and A[x] < B[x]", "false or A[x] < B[x]"])  # fmt: skip
@pytest.mark.parametrize("schedule", ["f.block(x:8); f.tensorize(x:8);", ""])
def test_logic(condition, schedule):
    check(binary(f"where({condition}, A[x], B[x] + 7)", schedule), *random((13,), (13,)))


def test_a_condition_is_a_number_when_stored():
    check(unary("A[x] > 0"), random((13,)))


def test_an_element_is_true_where_it_is_not_zero():
    a, b = torch.tensor([0.0, -0.0, 1.0, -2.0, nan]), torch.arange(5.0)
    check(binary("where(A[x], B[x], -1)"), a, b)
    check(binary("where(not A[x], B[x], -1)"), a, b)
    check(binary("where(A[x] and B[x] > 3, B[x], -1)"), a, b)


def test_boolean_input_is_a_mask():
    m = torch.tensor([True, False, True, True, False])
    got = check(binary("where(A[x], B[x], -inf)"), m, random((5,)), dtype="float32")["f"]
    assert torch.isinf(got).tolist() == [False, True, False, False, True]


def test_where_does_not_leak_the_other_side():
    check(unary("where(A[x] > 0, log(A[x]), 0)"), torch.tensor([1.0, -1.0, 0.0, 2.0]))
    check(unary("where(A[x] > 0, 1 / A[x], inf)"), torch.tensor([1.0, -1.0, 0.0, 2.0]))


def test_inf():
    check(unary("maximum(A[x], -inf)"), random((5,)))
    check(unary("minimum(A[x], inf) + where(x == 2, inf, 0)"), random((5,)))


@pytest.mark.parametrize("tile", [0, 1, 4, 16])
@pytest.mark.parametrize("reduction", ["rsum", "rmax", "rmin", "rmean"])
def test_reductions(reduction, tile):
    for size in (1, 7, 16, 17):
        check(f"Func f; In A; Var x; RVar y; f[x] = {reduction}(A[x, y], y); f.block(x:2); f.tensorize(x:2, y:{tile});", random((3, size)) - 5)


@pytest.mark.parametrize("reduction", ["rsum", "rmax", "rmin", "rmean"])
@pytest.mark.parametrize("tiles", ["y:4, z:4", "y:0, z:4", "y:4, z:0", "y:0, z:0", "y:1, z:8"])
def test_reduction_over_two_labels(reduction, tiles):
    check(f"Func f; In A; Var x; RVar y, z; f[x] = {reduction}(A[x, y, z] * A[x, y, z] - 3, y, z); f.tensorize({tiles});", random((2, 5, 7)))


def test_reduction_of_reductions():
    check("Func f; In A; Var x; RVar y, z; f[x] = rmax(rsum(A[x, y, z], z), y); f.tensorize(y:4, z:8);", random((2, 5, 7)))
    check("Func f; In A; Var x; RVar y; f[x] = rsum(A[x, y], y) / rmax(A[x, y], y) + rmin(A[x, y], y); f.tensorize(y:4);", random((3, 9)) + 6)


def test_reduction_of_what_lacks_the_label():
    check("Func f; In A, B; Var x; RVar y; f[x] = rsum(A[x], y) + rsum(B[y], y); f.tensorize(y:4);", random((3,)), random((7,)))


def test_variance():
    text = """Func mean, var; In A; Var x; RVar y;
    mean[x] = rmean(A[x, y], y);
    var[x] = rmean((A[x, y] - mean[x]) * (A[x, y] - mean[x]), y);
    """
    for schedule in ("mean.fuse_at(var, x); var.block(x:2); var.tensorize(x:2, y:4);", "", "mean.fuse_at(var, x); var.tensorize(x:0, y:0);"):
        check(text + schedule, random((3, 9)) + 2)


def test_cast():
    a = random((65,)) * 3
    got = check(unary("cast(A[x], fp16)"), a, dtype="float16")["f"]
    assert torch.equal(got, a.half())
    assert torch.equal(check(unary("cast(A[x], fp16) + 0"), a)["f"], a.half().float())
    got = check(unary("cast(A[x], bf16)"), a, dtype="bfloat16")["f"]  # the interpreter rounds to bfloat16 toward zero
    assert torch.equal(check(unary("cast(A[x], bf16) + 0"), a)["f"], got.float())
    got = check(unary("cast(A[x], fp32)"), a.half(), dtype="float32")["f"]
    assert torch.equal(got, a.half().float())


def test_label_as_a_value():
    check("Func f; In A; Var x, y; f[x, y] = A[x, y] + x * 10 - y; f.block(x:2, y:4); f.tensorize(x:2, y:4);", random((5, 7)))
    check("Func f; In A; Var x, y; f[x, y] = A[x, y] + x / 2 + sqrt(y); f.block(x:2, y:4); f.tensorize(x:2, y:4);", random((5, 7)))
    check("Func f; In A; Var x; RVar y; f[x] = rsum(where(y <= x, A[x, y], 0), y); f.tensorize(y:4);", random((5, 7)))


def test_division_outside_an_index_is_not_rounded():
    check("Func f; In A; Var x; f[x] = A[x] * (x / 4) + 1 / 2 + len(x) / 4; f.tensorize(x:4); f.block(x:4);", random((7,)))


def test_len():
    check("Func f; In A; Var x; RVar y; f[x] = rsum(A[x, y], y) / len(y) + len(x); f.tensorize(y:4);", random((3, 9)))


@pytest.mark.parametrize("scalar", [2.5, -3, torch.tensor(2.5), torch.tensor([2.5]), torch.tensor([[2.5]]), torch.tensor(2)])
def test_scalar_input_as_number_and_as_tensor(scalar):
    text = "Func f; In A; SIn alpha, beta; Var x; f[x] = alpha * A[x] + beta / (alpha + 1); f.block(x:8); f.tensorize(x:8);"
    check(text, random((13,)), scalar, 0.5)


def test_scalar_of_several_elements_is_refused():
    f = dtkernels.compile("Func f; In A; SIn alpha; Var x; f[x] = alpha * A[x];")
    with pytest.raises(ValueError, match=r"^f: alpha is a number or a one-element tensor; got shape \(2,\)$"):
        f(random((3,)), torch.ones(2))


# -- index arithmetic -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["", "f.block(x:4); f.tensorize(x:4);", "f.tensorize(x:0);", "f.block(x:1);"])
@pytest.mark.parametrize("index", ["x + 1", "x - 1", "x - 30", "2 * x", "x / 2", "(x - 3) / 2", "2 * x - 3", "-x + 4", "x * x"])
def test_shifted_access(index, schedule):
    """Outside the tensor reads 0."""
    check(f"Func f; In A; Var x; f[x] = A[x] + 10 * A[{index}]; {schedule}", random((7,)))


@pytest.mark.parametrize("schedule", ["", "f.block(x:4); f.tensorize(x:4);", "f.tensorize(x:0);", "f.block(x:1);"])
def test_reversed_access(schedule):
    check(f"Func f; In A; Var x; f[x] = A[x] + 10 * A[len(x) - 1 - x]; {schedule}", random((7,)))


@pytest.mark.parametrize("offset", [0, 2, -3, torch.tensor(2), torch.tensor([-1])])
def test_shift_by_a_scalar(offset):
    check("Func f; In A; SIn offset; Var x; f[x] = A[x] - A[x + offset]; f.block(x:4); f.tensorize(x:4);", random((7,)), offset)


def test_shifts_in_two_dimensions():
    text = "Func f; In A; Var x, y; f[x, y] = A[x, y] * 4 - A[x + 1, y] - A[x - 1, y] - A[x, y + 1] - A[x, y - 1]; "
    check(text + "f.block(x:2, y:4); f.tensorize(x:2, y:4);", random((5, 7)))
    check(text + "f.block(x:1, y:8); f.tensorize(y:8);", random((5, 7)))


def test_convolution():
    text = "Func f; In A, w; Var x; RVar k; f[x] = rsum(A[x + k] * w[k], k); f.block(x:4); f.tensorize(x:4, k:0);"
    with pytest.raises(dtkernels.DTError, match="the extent of a label comes from an input it indexes by itself"):
        dtkernels.compile(text)
    text = "Func f; In A, w; Var x; RVar k; f[x] = 0 * A[x] + rsum(A[x + k] * w[k], k); f.block(x:4); f.tensorize(x:4, k:TILE);"
    for tile in ("0", "1", "2"):
        check(text.replace("TILE", tile), random((9,)), random((3,)))


def test_shifted_func():
    text = "Func d, f; In A; Var x; d[x] = A[x] * A[x]; f[x] = d[x] - d[x - 1]; "
    for schedule in ("d.block(x:4); f.block(x:4); f.tensorize(x:4);", "d.fuse_at(f, x); f.block(x:4); f.tensorize(x:4);", "d.fuse_at(f, x);", ""):
        check(text + schedule, random((7,)) + 3)


def test_shifted_func_reads_zero_outside():
    """Also where its value there would not be 0."""
    text = "Func d, f; In A; Var x; d[x] = A[x] + 5; f[x] = d[x - 1] + 10 * d[x + 2]; "
    for schedule in ("d.block(x:4); f.block(x:4); f.tensorize(x:4);", "d.fuse_at(f, x); f.block(x:4); f.tensorize(x:4);"):
        check(text + schedule, random((7,)))


GROUPED = """Func s, e, d, f; In Q, K, V; SIn g; Var b, h, m, n; RVar l, k;
s[b, h, m, l] = rdot(Q[b, h, m, k], K[b, h / g, l, k], k) / sqrt(len(k));
e[b, h, m, l] = exp(s[b, h, m, l]);
d[b, h, m] = rsum(e[b, h, m, l], l);
f[b, h, m, n] = rdot(e[b, h, m, l] / d[b, h, m], V[b, h / g, l, n], l);
f.block(b:1, h:1, m:16); f.tensorize(m:16, n:0, k:0, l:16);
s.fuse_at(e, l); e.fuse_at(f, l); d.fuse_at(f, l);
"""


@pytest.mark.parametrize("group", [1, 2, 4, torch.tensor(2)])
def test_grouped_query_attention(group):
    heads = 4 // int(group)
    check(GROUPED, random((2, 4, 17, 8)), random((2, heads, 33, 8)), random((2, heads, 33, 5)), group)


# -- parameters -------------------------------------------------------------------------------------------------------

WINDOW = """Func s, e, d, f; In Q, K, V; Var m, n; RVar l, k; Param causal = false, window = 0;
s[m, l] = where((not causal or l <= m) and (window == 0 or m - l < window), rdot(Q[m, k], K[l, k], k) / sqrt(len(k)), -inf);
e[m, l] = exp(s[m, l]);
d[m] = rsum(e[m, l], l);
f[m, n] = rdot(e[m, l] / d[m], V[l, n], l);
f.block(m:16); f.tensorize(m:16, n:0, k:0, l:16);
s.fuse_at(e, l); e.fuse_at(f, l); d.fuse_at(f, l);
"""


@pytest.mark.parametrize("params", [None, {"causal": True}, {"causal": True, "window": 5}, {"window": 3, "causal": True}])
def test_parameters(params):
    check(WINDOW, random((37, 8)), random((37, 8)), random((37, 5)), params=params)


def test_parameter_default_and_free_variant():
    text = "Func f; In A, B; Var x; Param twice = true, c = -3; f[x] = where(twice, 2 * A[x], B[x]) + c; f.tensorize(x:0);"
    a, b = random((5,)), random((5,), seed=1)
    check(text, a, b, params={"twice": False, "c": 4})
    assert "B" not in dtkernels.compile(text).source.split("def f(")[1].split(")")[0], "an input that only the other variant reads is no parameter"
    assert torch.allclose(dtkernels.compile(text)(a), 2 * a - 3)


def test_unknown_parameter():
    with pytest.raises(dtkernels.DTError, match="unknown parameter: found 'causl'; allowed: causal, window"):
        dtkernels.compile(WINDOW, params={"causl": True})
    with pytest.raises(dtkernels.DTError, match="parameter causal is bool"):
        dtkernels.compile(WINDOW, params={"causal": 1})


# -- labels -----------------------------------------------------------------------------------------------------------


def test_broadcast_by_label():
    text = "Func f; In A, w, s, c; Var x, y; f[x, y] = A[x, y] * w[y] / s[x] + c[x]; f.block(x:2, y:8); f.tensorize(x:2, y:4);"
    check(text, random((5, 7)), random((7,)), random((5,)).abs() + 1, random((5,)))


def test_outer_product_and_broadcast_of_a_func():
    check("Func f; In A, B; Var x, y; f[x, y] = A[x] * B[y]; f.block(x:4, y:4); f.tensorize(x:4, y:4);", random((5,)), random((7,)))
    text = "Func a, f; In A, B; Var x, y; a[x] = A[x] * A[x]; f[x, y] = a[x] + B[y]; f.block(x:4, y:4); f.tensorize(x:4, y:4); "
    for fusion in ("", "a.fuse_at(f, x);", "a.fuse_at(f, y);"):
        check(text + fusion, random((5,)), random((7,)))


def test_value_without_the_label():
    check("Func f; In A, B; Var x, y; f[x, y] = A[x] + 0 * rsum(B[y], y); f.tensorize(x:0, y:0);", random((5,)), random((7,)))


@pytest.mark.parametrize("schedule", ["", "f.block(x:4, y:4); f.tensorize(x:4, y:4);", "f.block(y:8); f.tensorize(y:8);", "f.tensorize(x:0); f.block(y:1); f.reorder(y, x);"])
def test_transpose(schedule):
    check("Func f; In A; Var x, y; f[x, y] = A[y, x]; " + schedule, random((7, 5)))
    check("Func f; In A, B; Var x, y; f[x, y] = A[y, x] - B[x, y]; " + schedule, *random((7, 5), (5, 7)))


def test_permutations_of_three_dimensions():
    for index in ("x, y, z", "z, x, y", "y, z, x", "z, y, x"):
        shape = [dict(x=3, y=5, z=4)[label] for label in index.split(", ")]
        check(f"Func f; In A, B; Var x, y, z; f[x, y, z] = A[{index}] * B[y]; f.block(x:2, y:4); f.tensorize(x:2, y:4, z:4);", random(shape), random((5,)))


def test_rank_one_and_four():
    check("Func f; In A; Var x; f[x] = 2 * A[x]; f.block(x:32); f.tensorize(x:16);", random((67,)))
    text = "Func f; In A, B; Var a, b, c, d; f[a, b, c, d] = A[a, b, c, d] * B[d, b]; "
    for schedule in ("f.block(a:1, b:1, c:2, d:8); f.tensorize(c:2, d:4);", "f.block(b:2); f.tensorize(d:0, c:2);", "f.block(a:2, b:2, c:2, d:2); f.tensorize(a:2, b:2, c:2, d:2); f.map(d, a:a1/2, c, b, a1);"):
        check(text + schedule, random((3, 2, 3, 5)), random((5, 2)))


def test_result_without_dimensions():
    check("Func f; In A; RVar x; f[] = rsum(A[x], x); f.tensorize(x:4);", random((9,)))


@pytest.mark.parametrize("order", ["b, x, y", "x, b, y", "x, y, b"])
def test_batched_product(order):
    text = f"Func f; In A, B; Var b, x, y; RVar k; f[{order}] = rdot(A[b, x, k], B[k, b, y], k); f.block(b:1, x:16, y:16); f.tensorize(x:16, y:16, k:16);"
    check(text, random((2, 19, 33)), random((33, 2, 17)))


@pytest.mark.parametrize("a, b", [("x, k", "y, k"), ("k, x", "k, y"), ("k, x", "y, k")])
def test_products_of_transposed_matrices(a, b):
    sizes = dict(x=19, y=33, k=21)
    text = f"Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[{a}], B[{b}], k); f.block(x:16, y:32); f.tensorize(x:16, y:16, k:16);"
    check(text, *random(*([sizes[label] for label in index.split(", ")] for index in (a, b))))
    check(text.replace("f[x, y]", "f[y, x]"), *random(*([sizes[label] for label in index.split(", ")] for index in (a, b))))


def test_matrix_times_vector_and_dot_over_two_labels():
    check("Func f; In A, v; Var x; RVar k; f[x] = rdot(A[x, k], v[k], k); f.block(x:16); f.tensorize(x:16, k:16);", random((19, 33)), random((33,)))
    text = "Func f; In A, B; Var x, y; RVar j, k; f[x, y] = rdot(A[x, j, k], B[j, k, y], j, k); f.block(x:16, y:16); f.tensorize(x:16, y:16, k:16);"
    check(text, random((17, 3, 18)), random((3, 18, 5)))


def test_small_tiles_of_a_product():
    """Below what the matrix units take."""
    check("Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k); f.block(x:4, y:8); f.tensorize(x:4, y:8, k:2);", *random((5, 7), (7, 11)))


def test_an_output_over_a_reduction_label():
    check("Func s, f; In A; Var x; RVar y; s[x] = rsum(A[x, y], y); f[x, y] = A[x, y] - s[x]; s.fuse_at(f, x); f.block(x:2); f.tensorize(x:2, y:8);", random((5, 19)))


# -- strides, sizes, dtypes -------------------------------------------------------------------------------------------

SCALE_ROWS = "Func f; In A, w; Var x, y; f[x, y] = A[x, y] * w[y]; f.block(x:4, y:8); f.tensorize(x:4, y:8);"


def test_strided_inputs():
    a, w = random((9, 26), (13, 3))
    check(SCALE_ROWS, a[:, ::2], w[:, 1])
    check(SCALE_ROWS, a.T[::2, :].contiguous().T, w[:, 1])
    check(SCALE_ROWS, a[2:7, 1:14], w[:, 0])
    check(SCALE_ROWS, random((13, 9)).T, w[:, 2])


def test_expanded_inputs():
    check(SCALE_ROWS, random((1, 13)).expand(9, 13), random((1,)).expand(13))
    check(SCALE_ROWS, random((9, 1)).expand(9, 13), random((13,)))


def test_product_of_strided_inputs():
    text = "Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k); f.block(x:16, y:16); f.tensorize(x:16, y:16, k:16);"
    check(text, random((33, 19)).T, random((33, 34))[:, ::2])
    check(text, random((19, 1)).expand(19, 33), random((1, 17)).expand(33, 17))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_compute(shape):
    for schedule in ("f.block(x:4, y:8); f.tensorize(x:4, y:8);", "f.block(x:4); f.tensorize(x:4, y:0);", "", "f.tensorize(x:0, y:0);"):
        got = dtkernels.compile(f"Func f; In A; Var x, y; f[x, y] = 2 * A[x, y]; {schedule}")(torch.zeros(shape))
        assert got.shape == shape


@pytest.mark.parametrize("reduction", ["rsum", "rmax", "rmin"])
@pytest.mark.parametrize("tile", [0, 1, 4])
def test_reduction_over_nothing(reduction, tile):
    check(f"Func f; In A; Var x; RVar y; f[x] = {reduction}(A[x, y], y); f.block(x:2); f.tensorize(x:2, y:{tile});", torch.zeros(3, 0))


def test_product_over_nothing():
    text = "Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k); f.block(x:16, y:16); f.tensorize(x:16, y:16, k:TILE);"
    for tile in ("16", "0"):
        check(text.replace("TILE", tile), torch.zeros(5, 0), torch.zeros(0, 3))


def test_half_precision():
    a, b = random((19, 33), (33, 17))
    mm = "Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k); f.block(x:16, y:16); f.tensorize(x:16, y:16, k:16);"
    check(mm, a.half(), b.half(), dtype="float16")
    check(mm, a.half(), b, dtype="float32")
    check(SCALE_ROWS, a.half(), a[0].half(), dtype="float16")
    check(SCALE_ROWS, a.half(), a[0], dtype="float32")
    check(SCALE_ROWS, a.bfloat16(), a[0].bfloat16(), dtype="bfloat16")
    check(SCALE_ROWS, a.bfloat16(), a[0].half(), dtype="float32")


def test_sums_of_halves_accumulate_in_float32():
    a = torch.full((2, 4096), 1.0, dtype=torch.float16)
    a[:, 0] = 2048.0  # where a float16 sum is stuck: 2048 + 1 = 2048; the result is 3071.5, rounded
    for tile in (0, 64, 1024):
        got = dtkernels.compile(f"Func f; In A; Var x; RVar y; f[x] = rsum(A[x, y], y) / 2; f.block(x:2); f.tensorize(x:2, y:{tile});")(a)
        assert got.tolist() == [3072.0] * 2 and got.dtype == torch.float16


def test_softmax_of_halves():
    check(SOFTMAX + "s.fuse_at(f, x); f.block(x:2); f.tensorize(x:2, y:8);", random((5, 19)).half(), dtype="float16")


def test_unfused_intermediates_are_float32():
    text = "Func t, f; In A; Var x; t[x] = A[x] * 1000; f[x] = t[x] / 1000;"
    got = check(text, torch.full((3,), 100.0, dtype=torch.float16), dtype="float16")["f"]
    assert got.tolist() == [100.0] * 3


# -- what must stay what it is ------------------------------------------------------------------------------------------


def test_a_nan_stays_a_nan():
    a, b = torch.tensor([nan, 1.0, nan, -1.0]), torch.tensor([0.0, nan, nan, 0.0])
    check(binary("maximum(A[x], B[x])"), a, b)
    check(binary("minimum(A[x], B[x])"), a, b)
    check(unary("maximum(0, A[x])"), a)
    check(unary("maximum(A[x], 0)"), a)
    check(unary("where(A[x] > 0, A[x], 0)"), a)


@pytest.mark.parametrize("reduction", ["rmax", "rmin", "rsum", "rmean"])
@pytest.mark.parametrize("schedule", ["f.tensorize(y:0);", "f.tensorize(y:4);", "f.tensorize(x:2, y:4); f.block(x:2);", ""])
def test_a_nan_in_a_row_stays(reduction, schedule):
    a = random((4, 9))
    a[0, 0] = a[1, 8] = a[2, 4] = nan
    check(f"Func f; In A; Var x; RVar y; f[x] = {reduction}(A[x, y], y); {schedule}", a)


SOFTMAX = "Func s, f; In A; Var x; RVar y; s[x] = rsum(exp(A[x, y]), y); f[x, y] = exp(A[x, y]) / s[x]; "
SOFTMAX_SCHEDULES = {
    "fused, whole rows": "s.fuse_at(f, x); f.block(x:2); f.tensorize(x:2, y:0);",
    "fused, tiles": "s.fuse_at(f, x); f.block(x:2); f.tensorize(x:2, y:8);",
    "two kernels": "s.block(x:2); s.tensorize(x:2, y:8); f.block(x:2, y:8); f.tensorize(x:2, y:8);",
    "single elements": "s.fuse_at(f, x);",
}


@pytest.mark.parametrize("schedule", SOFTMAX_SCHEDULES.values(), ids=SOFTMAX_SCHEDULES)
def test_softmax_of_large_logits(schedule):
    a = random((3, 19)) * 1e4
    got = dtkernels.compile(SOFTMAX + schedule)(a)
    torch.testing.assert_close(got, torch.softmax(a.double(), -1).float(), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("schedule", SOFTMAX_SCHEDULES.values(), ids=SOFTMAX_SCHEDULES)
def test_softmax_with_infinities_and_nans(schedule):
    a = random((5, 19))
    a[0, 3:] = -inf
    a[1] = -inf  # nothing to share: 0 / 0, as in torch
    a[2, 5] = nan
    a[3, :9] = -inf
    got = dtkernels.compile(SOFTMAX + schedule)(a)
    torch.testing.assert_close(got, torch.softmax(a, -1), equal_nan=True, rtol=2e-5, atol=1e-7)


def test_log_sum_exp_of_large_logits():
    text = "Func f; In A; Var x; RVar y; f[x] = log(rsum(exp(A[x, y]), y)); "
    a = random((3, 19)) * 1e4
    for schedule in ("f.tensorize(y:0);", "f.tensorize(y:8);", "f.block(x:2); f.tensorize(x:2, y:8);", ""):
        torch.testing.assert_close(dtkernels.compile(text + schedule)(a), torch.logsumexp(a, -1), rtol=1e-6, atol=1e-6)


CAUSAL = """Func s, e, d, f; In Q, K, V; Var m, n; RVar l, k;
s[m, l] = where(l <= m, rdot(Q[m, k], K[l, k], k), -inf);
e[m, l] = exp(s[m, l]); d[m] = rsum(e[m, l], l); f[m, n] = rdot(e[m, l] / d[m], V[l, n], l); """
ATTENTION_SCHEDULES = {
    "streaming": "f.block(m:16); f.tensorize(m:16, n:0, k:0, l:16); s.fuse_at(e, l); e.fuse_at(f, l); d.fuse_at(f, l);",
    "rows": "f.block(m:16); f.tensorize(m:16, n:0, k:0, l:0); s.fuse_at(e, l); e.fuse_at(f, m); d.fuse_at(f, m);",
    "kernels": "s.tensorize(m:0, l:0, k:0); e.tensorize(m:0, l:0); d.tensorize(m:0, l:8); f.tensorize(m:0, n:0, l:16);",
}


@pytest.mark.parametrize("schedule", ATTENTION_SCHEDULES.values(), ids=ATTENTION_SCHEDULES)
@pytest.mark.parametrize("scale", [1, 3e3])
def test_causal_attention(schedule, scale):
    q, k, v = random((37, 8), (37, 8), (37, 5))
    got = dtkernels.compile(CAUSAL + schedule)(q * scale, k, v)
    mask = torch.ones(37, 37, dtype=torch.bool).tril()
    scores = ((q * scale) @ k.T).double().masked_fill(~mask, -inf)  # float32 scores, so that only what follows is compared
    want = torch.softmax(scores, -1) @ v.double()
    # at scale 3e3 a score of ~1e5 carries a float32 rounding of ~1e-2, which moves the weights by that
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5 if scale == 1 else 0.2)
    if scale == 1:
        check(CAUSAL + schedule, q, k, v)


@pytest.mark.parametrize("schedule", ATTENTION_SCHEDULES.values(), ids=ATTENTION_SCHEDULES)
def test_attention_of_a_row_that_sees_nothing(schedule):
    """0 / 0 as the text says; other rows are not touched by it."""
    text = CAUSAL.replace("l <= m", "l < m")
    q, k, v = random((19, 8), (19, 8), (19, 5))
    got = dtkernels.compile(text + schedule)(q, k, v)
    assert torch.isnan(got[0]).all() and torch.isfinite(got[1:]).all()
    assert torch.allclose(got[1], v[0].expand(5), atol=1e-6)


# -- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x, y", [(16, 16), (43, 19), (1, 1), (3, 50)])
@pytest.mark.parametrize("order", ["", "f.map(y, x);", "f.map(x, y);", "f.map(x:x1/4, y, x1);", "f.map(x:x1/3, y, x1);", "f.map(x:x1/8, y:y1/4, x1, y1);", "f.map(x:x1/2, y:y1/4, y1, x1);",
                                   "f.map(x:x1/2, x1, y);", "f.map(y, x:x1/4, x1);", "f.map(x:x1/100, y, x1);", "f.map(y);", "f.map(x:x1/1, y, x1);"])  # fmt: skip
def test_map(order, x, y):
    """Any walk over the blocks, partial last groups included, computes every element."""
    a = random((x, y)) + 10
    check(f"Func f; In A; Var x, y; f[x, y] = 2 * A[x, y]; f.block(x:4, y:4); f.tensorize(x:4, y:4); {order}", a)


@pytest.mark.parametrize("order", ["f.map(x:x1/2, y:y1/2, z:z1/2, z1, y1, x1);", "f.map(z, x:x1/2, y, x1);", "f.map(x:x1/2, y:y1/3, y1, z, x1);"])
def test_map_of_three_labels(order):
    check(f"Func f; In A; Var x, y, z; f[x, y, z] = 2 * A[x, y, z]; f.block(x:1, y:2, z:4); f.tensorize(y:2, z:4); {order}", random((3, 7, 11)))


@pytest.mark.parametrize("order", ["f.reorder(y, x);", "f.reorder(x, y);", "f.reorder(y);"])
def test_reorder(order):
    check(f"Func f; In A, w; Var x, y; f[x, y] = A[x, y] * w[y]; f.block(x:4, y:8); f.tensorize(x:2, y:4); {order}", random((5, 19)), random((19,)))


def test_every_fusion_of_a_chain():
    text = "Func a, b, f; In A; Var x, y; a[x, y] = A[x, y] + 1; b[x, y] = a[x, y] * a[x, y]; f[x, y] = b[x, y] - a[x, y]; f.block(x:4, y:8); f.tensorize(x:4, y:4); "
    for a in ("", "a.fuse_at(f, x);", "a.fuse_at(f, y);", "a.fuse_at(b, x);", "a.fuse_at(b, y);"):
        for b in ("", "b.fuse_at(f, x);", "b.fuse_at(f, y);"):
            try:
                check(text + a + b, random((5, 11)))
            except dtkernels.DTError as refused:
                assert a and not b, (a, b, refused)  # a lies inside the kernel of b, which is not f's


@pytest.mark.parametrize("fused", ["", "t.fuse_at(f, x);", "t.fuse_at(f, y);"])
def test_unfused_funcs_are_kernels_of_their_own(fused):
    text = "Func t, f; In A; Var x, y; t[x, y] = exp(A[x, y]); f[x, y] = t[x, y] + 1; f.tensorize(y:4);" + fused
    check(text, random((3, 5)))
    assert dtkernels.compile(text).source.count("@triton.jit") == (1 if fused else 2)


def test_num_warps_and_stages_reach_the_launch():
    source = dtkernels.compile(unary("A[x]", "f.block(x:8); f.tensorize(x:8); f.num_warps(16); f.num_stages(5);")).source
    assert "num_warps=16" in source and "num_stages=5" in source


# -- several outputs ----------------------------------------------------------------------------------------------------

TWO = "Func g, f; In A; Var x, y; g[x, y] = exp(A[x, y]); f[x, y] = g[x, y] * 2; f.block(x:4, y:8); f.tensorize(x:4, y:8); "


def test_two_outputs_of_one_kernel():
    text = TWO + "g.fuse_at(f, x); f.compile(); g.compile();"
    a = random((5, 11))
    check(text, a)
    compiled = dtkernels.compile(text)
    assert compiled.source.count("@triton.jit") == 1
    f, g = compiled(a)
    torch.testing.assert_close(f, 2 * torch.exp(a))
    torch.testing.assert_close(g, torch.exp(a))


def test_outputs_come_in_the_order_of_the_compile_statements():
    a = random((5, 11))
    g, f = dtkernels.compile(TWO + "g.fuse_at(f, x); g.compile(); f.compile();").f(a)
    torch.testing.assert_close(f, 2 * torch.exp(a))
    torch.testing.assert_close(g, torch.exp(a))


def test_two_outputs_of_two_kernels():
    text = TWO + "f.compile(); g.compile();"
    a = random((5, 11))
    check(text, a)
    compiled = dtkernels.compile(text)
    torch.testing.assert_close(compiled.f(a), 2 * torch.exp(a))
    torch.testing.assert_close(compiled.g(a), torch.exp(a))


def test_statistics_as_second_output():
    """What training attention saves: the output and the row's log-sum-exp."""
    text = """Func lse, p, f; In A; Var x; RVar y;
    lse[x] = log(rsum(exp(A[x, y]), y)); f[x, y] = exp(A[x, y] - lse[x]); p[x] = rmax(A[x, y], y);
    lse.fuse_at(f, x); f.block(x:2); f.tensorize(x:2, y:8); p.block(x:2); p.tensorize(x:2, y:8); f.compile(); lse.compile(); p.compile();"""
    check(text, random((5, 19)))


def test_last_func_is_compiled_by_default():
    text = "Func g, f; In A; Var x; g[x] = 2 * A[x]; f[x] = 3 * A[x]; "
    assert dtkernels.compile(text)(torch.ones(2)).tolist() == [3.0, 3.0]
    assert dtkernels.compile(text + "g.compile();")(torch.ones(2)).tolist() == [2.0, 2.0]


# -- the emitted file ---------------------------------------------------------------------------------------------------

EMITTED = """Func d, my_func; In B, A; SIn s, r; Var x, y;
d[x, y] = A[x, y] - B[x, y];
my_func[x, y] = s * d[x, y] + r * A[x, y];
my_func.block(x:4, y:8); my_func.tensorize(x:4, y:8); d.fuse_at(my_func, y); my_func.compile();"""


def test_emitted_file_stands_alone(tmp_path):
    (tmp_path / "emitted.py").write_text(dtkernels.compile(EMITTED).source)
    (tmp_path / "use.py").write_text("""
import importlib.util, inspect, sys
assert importlib.util.find_spec("dtkernels") is None
import torch, emitted
assert list(inspect.signature(emitted.my_func).parameters) == ["B", "A", "s", "r"]
a, b = torch.arange(15.).reshape(3, 5), torch.ones(3, 5)
torch.testing.assert_close(emitted.my_func(b, a, 2, torch.tensor(0.5)), 2 * (a - b) + 0.5 * a)
assert "dtkernels" not in sys.modules
print("right")
""")
    site = str(tmp_path)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": site}
    # -S: no .pth files, so an editable install of dtkernels is not on the path; the packages are added by hand
    packages = [p for p in sys.path if p.endswith("site-packages")]
    start = f"import sys; sys.path[:0] = {[site, *packages]!r}; import runpy; runpy.run_path('use.py')"
    done = subprocess.run([sys.executable, "-S", "-E", "-c", start], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "right\n", done.stderr


def test_emitted_file_imports_torch_and_triton_only():
    for text in (EMITTED, CAUSAL + ATTENTION_SCHEDULES["streaming"]):
        tree = ast.parse(dtkernels.compile(text).source)
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names} | {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert names == {"torch", "triton", "triton.language"}


def test_wrapper_takes_keywords_and_checks_their_number():
    f = dtkernels.compile(EMITTED)
    a, b = random((3, 5), (3, 5))
    torch.testing.assert_close(f(A=a, B=b, s=1, r=0), a - b)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        f(a, b, 1)


def test_compile_is_the_same_from_run_to_run():
    assert dtkernels.compile(EMITTED).source == dtkernels.compile(EMITTED).source


# -- inputs that do not fit -----------------------------------------------------------------------------------------------

MM = "Func mm; In A, B; Var x, y; RVar k; mm[x, y] = rdot(A[x, k], B[k, y], k);"


@pytest.mark.parametrize(
    "shapes, said",
    [
        (((3, 4), (5, 6)), "mm: B has 5 along k, another input has 4"),
        (((3, 4), (4,)), "mm: B has 2 dimensions (k, y); got shape (4,)"),
        (((3, 4, 1), (4, 6)), "mm: A has 2 dimensions (x, k); got shape (3, 4, 1)"),
    ],
)
def test_wrong_shapes(shapes, said):
    with pytest.raises(ValueError) as error:
        dtkernels.compile(MM)(*(torch.zeros(s) for s in shapes))
    assert str(error.value) == said


def test_one_label_twice():
    text = "Func f; In A; Var x; f[x] = A[x, x]; f.tensorize(x:0);"
    check(text, random((5, 5)))
    with pytest.raises(ValueError, match="^f: A has 6 along x, another input has 5$|^f: A has 6 along x.*5"):
        dtkernels.compile(text)(torch.zeros(5, 6))


def test_wrong_shape_through_a_shared_label():
    f = dtkernels.compile("Func f; In A, w; Var x, y; f[x, y] = A[x, y] * w[y];")
    with pytest.raises(ValueError, match="^f: w has 4 along y, another input has 3$"):
        f(torch.zeros(2, 3), torch.zeros(4))
    with pytest.raises(ValueError, match="^f: w has 1 along y, another input has 3$"):
        f(torch.zeros(2, 3), torch.zeros(1))


def test_wrong_dtype():
    with pytest.raises(TypeError, match="^mm: B is torch.float64; allowed: float32, float16, bfloat16, and bool or integers for masks$"):
        dtkernels.compile(MM)(torch.zeros(3, 4), torch.zeros(4, 5, dtype=torch.float64))


def test_numpy_is_no_tensor():
    with pytest.raises((TypeError, AttributeError, ValueError)):
        dtkernels.compile(MM)(np.zeros((3, 4)), np.zeros((4, 5)))


def test_math_of_the_reference_itself():
    """The oracle against closed forms, once, so that it is not its own judge."""
    from oracle import evaluate

    a = np.array([[1.0, 2.0], [3.0, 4.0]])
    softmax = evaluate(SOFTMAX, {"A": a})["f"].v
    assert np.allclose(softmax[0], [1 / (1 + math.e), math.e / (1 + math.e)])
    shifted = evaluate("Func f; In A; Var x; f[x] = A[x] + A[x - 1] + A[2 * x] + A[(x - 1) / 2];", {"A": np.array([1.0, 2.0, 4.0])})["f"].v
    assert shifted.tolist() == [1 + 0 + 1 + 0, 2 + 1 + 4 + 1, 4 + 2 + 0 + 1]
    reduced = evaluate("Func f; In A; Var x; RVar y; f[x] = rmax(A[x, y], y) + 10 * rmin(A[x, y], y) + 100 * rmean(A[x, y], y) + 1000 * rdot(A[x, y], A[x, y], y);", {"A": a})["f"].v
    assert reduced.tolist() == [2 + 10 + 150 + 5000, 4 + 30 + 350 + 25000]
    error = evaluate("Func f; In A; Var x; f[x] = exp(1000 * A[x]) + 1 / (0.1 * A[x] - 0.1);", {"A": np.array([1.0, 0.0])})["f"].e
    assert np.isinf(error[0]) and error[1] < 1e-3
