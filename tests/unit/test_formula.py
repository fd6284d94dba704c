"""What the formula makes of products of products and of narrow rows. Without torch."""

import pytest

from dtkernels.algebra.prepare import prepare_algorithm
from dtkernels.codegen.formula import formula
from dtkernels.codegen.target import target
from dtkernels.lang import parse

TEXT = """Func s, f; In Q, K, G; Var b, m, l, n; RVar d;
s[b, m, l] = exp(rdot(Q[b, m, d], K[b, l, d], d));
f[b, l, n] = rdot({0}, {1}, m);"""
SIDES = ("s[b, m, l]", "G[b, m, n]")


@pytest.mark.parametrize("sides", [SIDES, SIDES[::-1]])
@pytest.mark.parametrize("itemsize, rows", [(2, 128), (4, 64)])
@pytest.mark.parametrize("n", [64, 160, 256])
def test_blocks_are_of_what_both_products_have(sides, itemsize, rows, n):
    algorithm = prepare_algorithm(parse(TEXT.format(*sides)).algorithm, ("f",))
    schedule = formula(algorithm, ("f",), {"b": 32, "m": 2048, "l": 2048, "n": n, "d": 256}, itemsize, target("a100"))
    blocks = schedule.sizes("f", "block")
    assert schedule.fused()["s"][0] == "f" and blocks["b"] == 1 and "n" not in blocks and blocks["l"] in (rows, 64), str(schedule)
    assert not schedule.sizes("f", "split"), "programs are many without"


@pytest.mark.parametrize("width", [40, 64, 197, 256])
def test_narrow_rows_that_are_written_again_are_few_in_a_program(width):
    text = "Func t, f; In A; Var x; RVar y; t[x] = rsum(exp(A[x, y]), y); f[x, y] = exp(A[x, y]) / t[x];"
    elements = {}
    for output in ("f", "t"):
        algorithm = prepare_algorithm(parse(text).algorithm, (output,))
        schedule = formula(algorithm, (output,), {"x": 16384, "y": width}, 2, target("h200"))
        elements[output] = schedule.sizes(output, "block")["x"] * (1 << (width - 1).bit_length()), schedule.number(output, "num_warps")
    assert elements == {"f": (1024, 2), "t": (4096, 4)}


@pytest.mark.parametrize("right, sizes, heads", [
    ("c[b, s, d]", {}, 4), ("c[b, s, d]", {"h": 2}, 2), ("c[b, s, d]", {"h": 1}, 1),
    ("c[b, s, d]", {"s": 64}, 1), ("c[d]", {}, 1), ("c[b, h, s, d]", {}, 1), ("c[h, d]", {}, 1),
])  # fmt: skip
def test_what_an_input_lacks_is_taken_several_at_a_time(right, sizes, heads):
    """As queries by a table of angles: what is loaded of it serves several heads, where programs stay many and it is more than a row."""
    algorithm = prepare_algorithm(parse(f"Func f; In A, c; Var b, h, s, d; f[b, h, s, d] = A[b, h, s, d] * {right};").algorithm, ("f",))
    schedule = formula(algorithm, ("f",), {"b": 4, "h": 32, "s": 4096, "d": 128, **sizes}, 2, target("h200"))
    assert schedule.sizes("f", "block") == {"b": 1, "h": heads, "s": 8, "d": 128}
    assert schedule.sizes("f", "tensorize") == schedule.sizes("f", "block")
