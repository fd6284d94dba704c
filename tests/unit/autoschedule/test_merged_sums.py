# ruff: noqa: E501 (programs read best on one line)
"""Sums of products over several labels, beside a product over some of them: tiles of whole vectors. Without torch."""

import pytest

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.cost.kernel_plan import plans
from dtkernels.autoschedule.cost.outline import Known
from dtkernels.autoschedule.cost.predicted_time import predicted_time
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.autoschedule.rules.candidates.merged_sums import run_of
from dtkernels.codegen.target import target
from dtkernels.lang import expr as ex
from dtkernels.lang import parse

BOTH = "Func f; In A, W, X, V; Var t, o; RVar i, g; f[t, o] = rdot(A[t, i, g], W[o, i, g], i, g) + rdot(X[t, i], V[o, i], i);"
SIZES = {"t": 4096, "o": 512, "i": 256, "g": 8}
TILES = "f.block(t:128, o:128); f.tensorize(t:128, o:128, {}); f.num_warps(8); f.num_stages(4); f.compile();"


def schedule(text: str, **sizes: int):
    algorithm = prepare_algorithm(parse(text).algorithm, ("f",))
    return default_schedule(algorithm, ("f",), sizes or SIZES, 2, target("h200"))


@pytest.mark.parametrize("text", [BOTH, BOTH.replace("W[o, i, g]", "W[i, g, o]"), BOTH.replace(", i, g) +", ", g, i) +")])
def test_labels_of_a_sum_that_lie_side_by_side_are_one_beside_a_product_over_some_of_them(text):
    found = schedule(text)
    assert [*found.merged("f").values()] == [("i", "g")], str(found)
    tiles = found.sizes("f", "tensorize")
    assert min(tiles["i_g"], tiles["i"]) >= 16 and "g" not in tiles


@pytest.mark.parametrize("text", [BOTH.replace("W[o, i, g]", "W[o, g, i]"), BOTH.replace("A[t, i, g]", "A[i, t, g]"), BOTH.replace("A[t, i, g]", "A[t, i, g + 1]")])
def test_labels_that_lie_apart_stay(text):
    dots = [n for n in prepare_algorithm(parse(text).algorithm, ("f",))["f"].expr.walk() if isinstance(n, ex.Dot)]
    assert [run_of(d) for d in dots] == [(), ()] and not schedule(text).merged("f")


def test_elements_that_lie_apart_are_priced_by_the_lines_that_a_warp_loads():
    """A product of 4096 x 512 and 2048 terms in tiles along 256 of them, 8 elements apart, took some 880 us of an H200."""
    known = Known.of(prepare_algorithm(parse(BOTH).algorithm, ("f",)), ("f",))
    apart, merged = TILES.format("i:64, g:1"), "f.merge(i_g, i, g);" + TILES.format("i:64, i_g:64")
    slow, fast = (predicted_time(s, known, SIZES, 2, target("h200")) for s in (apart, merged))
    assert slow > 5 * fast


def test_a_product_over_some_labels_of_a_run_keeps_them():
    known = Known.of(prepare_algorithm(parse(BOTH).algorithm, ("f",)), ("f",))
    (plan,) = plans("f.merge(i_g, i, g);" + TILES.format("i:64, i_g:64"), known)
    assert [p.reduced for p in plan.root.products] == [("i_g",), ("i",)] and plan.root.reduced == ("i_g", "i")
    assert {r.tensor: r.last for r in plan.root.reads} == {"A": ("i_g",), "W": ("i_g",), "X": ("i",), "V": ("i",)}
