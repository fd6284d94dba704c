"""Conditions on indices that are decided without running anything, and those that must not be."""

import itertools

import pytest

from dtkernels.algebra.rules.condition_folding import fold_condition
from dtkernels.lang.parser import parse

DECIDED = [
    ("d < len(d)", True), ("d >= 0", True), ("d + 1 > 0", True), ("d + 1 <= len(d)", True), ("d < 0", False), ("d < -x", False),
    ("d - len(d) / 2 < len(d) / 2", True), ("d - floor(len(d) / 2) < len(d) / 2", True), ("d + floor(len(d) / 3) >= 0", True),
    ("2 * d - len(d) < len(d) - 1", True), ("d >= len(d) + x", False), ("x < len(x) and d >= 0", True),
]  # fmt: skip
OPEN = ["d < len(d) - 1", "d < len(d) / 2", "d - len(x) < 0", "d + floor(len(d) / 2) < len(d) / 2", "d < 3", "d * x >= 0", "d + len(x) > d", "len(d) > 1", "d + s >= 0",
        "len(x) - 1 >= -d", "d + floor(len(d) / 2) < len(d)"]  # fmt: skip


def expression(condition: str):
    return parse(f"Func y; In A; SIn s; Var x, d; y[x, d] = where({condition}, s * A[x, d], 0);").algorithm.definitions[0].expr


@pytest.mark.parametrize(("condition", "holds"), DECIDED)
def test_what_holds_everywhere_or_nowhere_is_decided(condition, holds):
    assert str(fold_condition(expression(condition))) == ("s * A[x, d]" if holds else "0")
    for width, height in itertools.product(range(1, 8), repeat=2):
        for d, x in itertools.product(range(width), range(height)):
            assert evaluated(condition, d, x, width, height) is holds


@pytest.mark.parametrize("condition", OPEN)
def test_what_depends_on_the_element_or_the_call_stays(condition):
    e = expression(condition)
    assert fold_condition(e) == e


def evaluated(condition: str, d: int, x: int, width: int, height: int) -> bool:
    import math

    text = condition.replace("len(d)", str(width)).replace("len(x)", str(height))
    return bool(eval(text, {"d": d, "x": x, "floor": math.floor}))
