# ruff: noqa: E501 (programs and error texts read best on one line)
"""Extents that are worked out from others: what is read, what is printed, what the wrapper computes, what is refused."""

import pytest

from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.batch import add_batch
from dtkernels.algebra.pipeline import differentiable_form, prepare, prepare_algorithm
from dtkernels.algebra.rules.constant_folding import bind_parameters
from dtkernels.codegen.emit.module import emit
from dtkernels.lang import DTError, parse
from dtkernels.lang.extents.formulas import size_of_labels, smallest_dimension
from dtkernels.runtime.signature.given_sizes import free_labels, sizes_in_order
from dtkernels.runtime.signature.signature import Signature

POOL = "Func f; In A; Var c, x; RVar r; Param k = 3, s = 2; Extent r = k; Extent x = (A[1] - len(r)) / s + 1; f[c, x] = rsum(A[c, s * x + r], r);"


def test_text_and_value_are_the_same_again():
    program = parse(POOL)
    assert "Extent x = (A[1] - len(r)) / s + 1;" in str(program)
    assert parse(str(program)) == program
    bound = bind_parameters(program.algorithm, {"s": 4})
    assert "Extent x = (A[1] - 3) / 4 + 1;" in str(bound) and "Extent r = 3;" in str(bound)
    assert parse(str(bound)).algorithm == bound


def test_a_number_is_a_constant():
    a = bind_parameters(parse("Func f; In A; Var x; RVar r; Param k = 7; Extent r = k / 2 * 2 - 1 + -7 % 4; f[x] = rsum(A[x] * r, r);").algorithm)
    assert a.constant_extent("r") == 6 and not a.formulas


def test_the_wrapper_works_it_out():
    text = emit(prepare(parse(POOL + "f.block(x:8); f.tensorize(x:8);")))
    assert "size_x = (A.shape[1] - 3) // 2 + 1" in text
    assert "the extent of x is {size_x}: (A[1] - 3) / 2 + 1; allowed: 0 or more" in text


def test_inputs_that_also_tell_the_extent_are_held_to_it():
    text = emit(parse("Func f; In A, B; Var x; Extent x = A[0] / 2; f[x] = A[2 * x] * B[x];"))
    assert "if sizes['x'] != A.shape[0] // 2:" in text


def test_a_batch_moves_the_dimensions():
    batched = add_batch(bind_parameters(parse(POOL).algorithm), frozenset({"A"}), 2)
    assert dict(batched.formulas)["x"] == parse("Func f; In A; Var x; Extent x = (A[3] - 3) / 2 + 1; f[x] = A[0, 0, 0, x + 0];").algorithm.formulas[0][1]


def test_a_backward_takes_no_input_for_an_extent_that_an_adjoint_tells():
    program = parse(POOL)
    found = gradient(differentiable_form(program.algorithm, ("f",)), ("f",), ("A",)).backward
    assert not found.formulas and "x" not in found.labels


def test_a_backward_keeps_an_extent_that_nothing_else_tells():
    text = "Func s; In A; Var x; RVar y; Extent y = A[1] / 2; s[x] = rsum(exp(A[x, 2 * y]), y);"
    found = gradient(differentiable_form(parse(text).algorithm, ("s",)), ("s",), ("A",)).backward
    assert Signature.of(prepare_algorithm(found, found.funcs[-1:])).sizes


def test_shapes_that_labels_imply():
    a = prepare_algorithm(parse(POOL).algorithm, ("f",))
    assert free_labels(a, "f") == ("c", "x")  # A's second dimension has no label: the extent of x tells it
    assert smallest_dimension(a, "A", 1, {"x": 10, "r": 3, "c": 1}, 1) == 21
    b = prepare_algorithm(parse("Func f; In A; Var x, y; Extent y = len(x) * 2; f[x, y] = A[x] + y;").algorithm, ("f",))
    assert free_labels(b, "f") == ("x",) and size_of_labels(b, "y", {"x": 5}) == 10
    assert sizes_in_order(b, "f", (5,), "f") == {"x": 5, "y": 10}


ERRORS = {
    "Extent x = len(x) + 1;": "t.dt:1:32: an extent does not depend on itself: found x = len(x) + 1",
    "Extent x = len(y) + 1; Extent y = 2 * x;": "t.dt:1:32: an extent does not depend on itself: found x = len(y) + 1",
    "Extent x = B[0] + 1;": "t.dt:1:36: an extent is worked out from whole numbers: found B[0]; allowed: integers, parameters, A[0] for the size of a dimension, len(x), other extents and + - * / %",
    "Extent x = A[3] - 1;": "t.dt:1:36: a dimension of A: found A[3]; allowed: 0 to 0",
    "Extent x = A[0] / 0;": "t.dt:1:41: an extent is divided by a number or a parameter that is not 0: found A[0] / 0",
    "Extent x = A[0] / A[0];": "t.dt:1:41: an extent is divided by a number or a parameter that is not 0: found A[0] / A[0]",
    "Extent x = 1.5;": "t.dt:1:36: an extent is worked out from whole numbers: found 1.5; allowed: integers, parameters, A[0] for the size of a dimension, len(x), other extents and + - * / %",
    "Extent x = 2 - 5;": "t.dt:1:32: an extent is 0 or more: found -3 for x",
    "Extent x = A[0] * g;": "t.dt:1:43: an extent is worked out from whole numbers: found 'g'; allowed: integers, parameters, A[0] for the size of a dimension, len(x), other extents and + - * / %",
    "Extent x = A[0] - 1; Extent x = 3;": "t.dt:1:32: the extent of a label is declared once: found A[0] - 1 too for x",
    "Extent z = A[0] - 1;": "t.dt:1:32: undeclared label: found 'z'; allowed: x, y",
    "Extent x = A[0] + len(q);": "t.dt:1:43: undeclared label: found 'q'; allowed: x, y",
}


@pytest.mark.parametrize("declared", ERRORS)
def test_errors(declared):
    with pytest.raises(DTError) as error:
        parse("Func f; In A; Var x, y; " + declared + " f[x, y] = A[x + 1] + y * 0 + 0 * len(y);", "t.dt")
    assert str(error.value) == ERRORS[declared]
