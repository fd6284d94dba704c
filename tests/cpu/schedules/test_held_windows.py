"""Several neighbours of a result in one thread, which loads once what their windows share: against the float64 reference."""

import pytest
from oracle import check
from small_programs import random

from dtkernels.codegen import pipeline
from dtkernels.codegen.ir.nest import Let, Load, statements
from dtkernels.lang import parse
from dtkernels.lang.errors import DTError

MEANS = "Func f; In A; Var b, t, c; RVar k; Extent k = 5; Extent t = A[1]; f[b, t, c] = rsum(A[b, t + k - 2, c], k);"
BACK = MEANS.replace("t + k - 2", "t - k + 2")
QUOTIENTS = """Func n, d, f; In A, B, C; Var b, t, c; RVar k; Extent k = 5; Extent t = A[1]; n[t] = C[t] * C[t] + 1; d[b, t, c] = A[b, t, c] - B[b, t, c];
f[b, t, c] = B[b, t, c] + rsum(where(t - k + 2 >= 0 and t - k + 2 < len(t), d[b, t - k + 2, c] / n[t - k + 2], 0), k); n.fuse_at(f, c); d.fuse_at(f, c);"""
LARGEST = MEANS.replace("rsum(A[b, t + k - 2, c], k)", "rmax(where(t + k - 2 >= 0 and t + k - 2 < len(t), A[b, t + k - 2, c], -inf), k)")
TAPS = "Func f; In A, W; Var b, h, t, c; RVar r, k; Extent h = A[1]; Extent t = A[2]; f[b, h, t, c] = rsum(A[b, h + r - 1, t + k - 2, c] * W[r, k, c], r, k);"
WEIGHTS = "Func f; In G, A; Var k, c; RVar b, t; Extent k = 5; f[k, c] = rsum(G[b, t, c] * A[b, t + k - 2, c], b, t);"
UNROLLED = "f.block(b:1, t:{own}, c:8); f.tensorize(k:1, b:1, t:{own}, c:8); f.unroll(t:{own}, k:{steps});"


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("own", [2, 3, 4])
@pytest.mark.parametrize("text", [MEANS, BACK, LARGEST])
def test_windows(text, own, steps):
    check(text + UNROLLED.format(own=own, steps=steps), random((2, 7, 11)))


@pytest.mark.parametrize("steps", [2, 5])
def test_quotients_in_windows(steps):
    check(QUOTIENTS + UNROLLED.format(own=4, steps=steps), *random((2, 9, 5), (2, 9, 5), (9,)))


def test_windows_inside_others():
    schedule = "f.block(b:1, h:1, t:4, c:8); f.tensorize(r:1, k:1, b:1, h:1, t:4, c:8); f.unroll(t:4, k:5); f.specialize(r, k);"
    check(TAPS + schedule, *random((2, 4, 7, 5), (3, 5, 5)))


@pytest.mark.parametrize("split", ["", "f.split(b:2);"])
def test_places_of_a_window_are_results(split):
    check(WEIGHTS + "f.block(k:5, c:8); f.tensorize(b:1, t:1, k:5, c:8); f.unroll(k:5, t:3);" + split, *random((3, 7, 5), (3, 7, 5)))


def loads(text: str) -> int:
    (kernel,) = pipeline.lower(parse(text))
    return sum(isinstance(s, Let) and isinstance(s.value, Load) for s in statements(kernel.body))


def test_what_windows_share_is_loaded_once():
    assert loads(MEANS + UNROLLED.format(own=4, steps=5)) == 8
    with pipeline.without("held_windows"):
        assert loads(MEANS + UNROLLED.format(own=4, steps=5)) == 1  # in a loop over five
    assert loads(QUOTIENTS + UNROLLED.format(own=4, steps=5)) == 3 * 8 + 3 * 4  # of the results' own places too


def test_a_split_loop_keeps_its_steps():
    check(MEANS + UNROLLED.format(own=4, steps=2) + "f.split(k:2);", random((2, 7, 11)))


def test_a_label_is_unrolled_in_whole_blocks():
    with pytest.raises(DTError, match="unroll names a loop: found t"):
        pipeline.lower(parse(MEANS + "f.block(t:4, c:8); f.tensorize(k:1, t:4, c:8); f.unroll(t:2);"))
