"""Products that are only added to each other share an accumulator; in large tiles each has a loop of its own."""

import pytest

from dtkernels.algebra.pipeline import prepare
from dtkernels.codegen.ir.nest import Accumulator, Loop, statements
from dtkernels.codegen.pipeline import lower, without
from dtkernels.lang import parse

TWO = "rdot(A[x, k], B[y, k], k) + rdot(C[x, k], D[y, k], k)"
TEXT = "Func f; In {inputs}; Var x, y; RVar {summed}; f[x, y] = {0}; f.block(x:128, y:{1}); f.tensorize(x:128, y:{1}, {tiles}); f.compile();"


def nest(sum_of_products, columns=128):
    inputs, summed = (", ".join(x for x in names if f"{x}[" in sum_of_products or f", {x}]" in sum_of_products) for names in ("ABCD", "kl"))
    tiles = ", ".join(f"{x}:64" for x in summed.split(", "))
    (kernel,) = lower(prepare(parse(TEXT.format(sum_of_products, columns, inputs=inputs, summed=summed, tiles=tiles))))
    found = [*statements(kernel.body)]
    return [s for s in found if isinstance(s, Accumulator)], [s for s in found if isinstance(s, Loop) and not s.tail]


@pytest.mark.parametrize("text", [TWO, f"maximum({TWO}, 0)", TWO + " + rdot(B[x, k], C[y, k], k)", "rdot(A[x, k], B[y, k], k) + rdot(C[x, l], D[y, l], l)"])
def test_products_that_are_added_have_one_accumulator(text):
    assert len(nest(text)[0]) == 1
    with without("accumulator_fusion"):
        assert len(nest(text)[0]) == text.count("rdot")


@pytest.mark.parametrize("text", [TWO.replace("+", "*"), TWO.replace("+", "-"), f"({TWO}) * rdot(A[x, k], B[y, k], k)", f"exp(rdot(A[x, k], B[y, k], k)) + {TWO[28:]}"])
def test_what_else_reads_an_accumulator_keeps_it(text):
    """The first factor of the third is read twice."""
    assert len(nest(text)[0]) == 2


@pytest.mark.parametrize("columns, shared, loops", [(128, False, 1), (256, False, 2), (256, True, 1)])
def test_large_tiles_take_one_product_after_another(columns, shared, loops):
    assert len(nest(TWO.replace("C[x, k]", "A[x, k]") if shared else TWO, columns)[1]) == loops
