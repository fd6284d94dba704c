# ruff: noqa: E501 (programs read best on one line)
"""Few volumes, each summed in several ways, and outputs that share what they read: one pass."""

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import TARGETS
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program

DICE = (
    "Func p, n, m, q, f; In A, T; Var b, c; RVar y, x; p[b, c, y, x] = sigmoid(A[b, c, y, x]); n[b, c] = rsum(p[b, c, y, x] * T[b, c, y, x], y, x);"
    " m[b, c] = rsum(p[b, c, y, x], y, x); q[b, c] = rsum(A[b, c, y, x] * A[b, c, y, x], y, x); f[b, c] = n[b, c] / (m[b, c] + 1) + q[b, c]; f.compile();"
)


RANGE = "Func lo, f; In A; Var y; RVar x; lo[y] = rmin(A[x, y], x); f[y] = (rmax(A[x, y], x) - lo[y]) / 255; lo.compile(); f.compile();"
NOISE = "Func z, f; In A, B; Var x, y; z[x, y] = A[x, y] + exp(B[x, y]); f[x] = rsum(exp(B[x, y]) - A[x, y], y); z.compile(); f.compile();"
TAPS = "Func n, f; In A; Var b, t, c; RVar k; Extent k = 25; Extent t = A[1]; n[t] = rsum(where(t + k - 12 >= 0 and t + k - 12 < len(t), 1, 0), k); f[b, t, c] = rsum(A[b, t + k - 12, c] / n[t + k - 12], k);"


def program(text, *outputs, itemsize=2, **sizes):
    outputs = outputs or ("f",)
    known = prepare_algorithm(parse(text).algorithm, outputs)
    return Program(known, default_schedule(known, outputs, sizes, itemsize, TARGETS["h200"]))


def test_sums_of_one_volume_are_made_in_one_pass_by_many_programs():
    for y, x in ((512, 512), (333, 501), (100, 5000), (5000, 100)):
        made = program(DICE, b=8, c=4, y=y, x=x)
        reading = [k for k in lower(made) if "A" in k.reads]
        assert len(reading) == 1 and any(p.name == "split" for p in made.schedule.primitives), str(made.schedule)


def test_outputs_that_share_what_they_read_are_made_in_one_pass():
    for text, outputs in ((RANGE, ("lo", "f")), (NOISE, ("z", "f"))):
        for x, y in ((16384, 512), (5003, 3000)):
            made = program(text, *outputs, x=x, y=y)
            assert len([k for k in lower(made) if "A" in k.reads]) == 1, str(made.schedule)


def test_windows_beside_a_vector_over_them_are_gone_over_place_by_place():
    """The index of the vector is not what tensors are contiguous along."""
    for c in (862, 64):
        assert program(TAPS, b=32, t=720, c=c, k=25).schedule.sizes("f", "tensorize")["k"] == 1
