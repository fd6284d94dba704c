# ruff: noqa: E501 (programs and error texts read best on one line)
"""What part 2 of the language adds, feature by feature, each in the smallest program that shows it."""

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from oracle import check
from small_programs import binary, random, unary

import dtkernels

inf, nan = float("inf"), float("nan")


# -- expressions ------------------------------------------------------------------------------------------------------

UNARY = ["exp(A[x])", "exp2(A[x])", "abs(A[x])", "erf(A[x])", "erfc(A[x])", "1 + erf(A[x])", "tanh(log1p(exp(A[x])))", "tanh(where(A[x] > 20, A[x], log1p(exp(A[x]))))", "floor(3 * A[x])", "sigmoid(A[x])", "tanh(A[x])", "-A[x]", "--A[x]", "sigmoid(40 * A[x])", "tanh(40 * A[x])"]
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


def test_one_and_a_tangent_keep_their_digits_where_they_cancel():
    a = torch.linspace(2.0, 40.0, 60)
    for sign, op in ((-1, "+"), (1, "-")):
        got = dtkernels.compile(unary(f"A[x] * (1 {op} tanh(A[x]))"))(A=sign * a)
        wanted = sign * a.double() * 2 / (1 + (2 * a.double()).exp())
        torch.testing.assert_close(got.double(), wanted, rtol=2e-5, atol=0)  # in float32 1 - tanh(4) has 4 digits, 1 - tanh(10) none


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


@pytest.mark.parametrize("schedule", ["", "e.fuse_at(f, x); f.block(x:2); f.tensorize(x:2, y:0);", "e.fuse_at(f, x); f.block(x:2); f.tensorize(x:2, y:4);",
                                      "s.fuse_at(f, x); e.fuse_at(f, y); f.block(x:1); f.tensorize(x:1, y:4);"])  # fmt: skip
@pytest.mark.parametrize("reduction, times", [("rsum", 7), ("rmax", 1), ("rmin", 1), ("rmean", 1)])
def test_reduction_over_a_label_that_a_func_has_and_its_value_has_not(reduction, times, schedule):
    program = f"Func s, e, f; In A; Var x; RVar y; s[x] = rsum(A[x, y], y); e[x, y] = s[x] + 1; f[x] = {reduction}(s[x] * e[x, y], y); {schedule}"
    a = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    s = a.double().sum(1)
    torch.testing.assert_close(dtkernels.compile(program)(A=a).double(), times * s * (s + 1), rtol=1e-5, atol=1e-5)


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
    with pytest.raises(dtkernels.DTError, match="an integer has at most 18 digits: found c of 101 bits"):
        dtkernels.compile("Func f; In A; Var x; Param c = 1; f[x] = c * A[x];", params={"c": 2**100})


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("expr, value", [("a * a * X[n]", 300.0), ("(1000 + a) * X[n]", 0.25), ("X[n] * exp(a)", 0.75), ("X[n] * sigmoid(-a)", 0.75), ("X[n] / sqrt(a)", 0.75), ("(1 - a) * X[n]", 0.75)])
def test_a_scalar_on_the_device_is_float32(expr, value, dtype):
    X = torch.rand(5) + 0.5
    program = dtkernels.compile(f"Func f; In X; SIn a; Var n; f[n] = {expr};")
    torch.testing.assert_close(program(X=X, a=torch.tensor(value, dtype=dtype)), program(X=X, a=value), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("expr", ["X[n] * (k * k)", "X[n] * (k + k)", "X[n] + (1 - k)", "X[n] + k * 1000", "X[(n + k * k) % 5]", "where(n * 100 < k * 2, X[n], 0)"])
def test_a_whole_number_on_the_device_has_32_bits(expr, dtype):
    X = torch.rand(5)
    program = dtkernels.compile(f"Func f; In X; SIn k; Var n; Extent n = X[0]; f[n] = {expr};")
    torch.testing.assert_close(program(X=X, k=torch.tensor(100, dtype=dtype)), program(X=X, k=100), rtol=0, atol=0)
