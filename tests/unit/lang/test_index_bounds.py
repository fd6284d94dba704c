"""What formulas of extents prove about indices."""

import pytest

from dtkernels.lang import expr as ex
from dtkernels.lang import parse
from dtkernels.lang.extents.index_bounds import stays_inside


def inside(extent: str, index: str, taps: str = "") -> bool:
    text = f"Func f; In A, W; Var x; RVar r; Extent x = {extent}; {taps} f[x] = rsum(A[{index}] * W[r], r);"
    algorithm = parse(text).algorithm
    (access,) = (a for a in ex.accesses(algorithm["f"].expr) if a.tensor == "A")
    return stays_inside(algorithm, access.index[0], ex.Access("A", (ex.Const(0),)))


@pytest.mark.parametrize(
    "extent, index",
    [
        ("A[0] - W[0] + 1", "x + r"),
        ("(A[0] - W[0]) / 2 + 1", "2 * x + r"),
        ("(A[0] - 3 * (W[0] - 1) - 1) / 2 + 1", "2 * x + 3 * r"),
        ("A[0] - W[0] + 1", "x - r + len(r) - 1"),
        ("A[0] - 2", "x + 2"),
    ],
)
def test_a_window_that_ends_where_the_input_does_stays_inside(extent, index):
    assert inside(extent, index)


@pytest.mark.parametrize(
    "extent, index",
    [
        ("A[0] - W[0] + 2", "x + r"),
        ("A[0] - W[0] + 1", "x + r - 1"),
        ("(A[0] - W[0]) / 2 + 1", "2 * x + r + 1"),
        ("(A[0] - W[0]) / 2 + 1", "3 * x + r"),
        ("A[0] - W[0] + 1", "x * r"),
        ("A[0] + W[0] - 1", "x - r"),
        ("A[0]", "x / 2 + r"),
    ],
)
def test_other_indices_are_not_said_to_stay_inside(extent, index):
    assert not inside(extent, index)


def test_a_window_of_constant_extent_beside_another():
    assert inside("A[0] / 11", "11 * x + r", "Extent r = 11;") and not inside("A[0] / 11", "11 * x + r", "Extent r = 12;")
