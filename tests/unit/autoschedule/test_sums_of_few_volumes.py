"""Few volumes, each summed in several ways: one pass by many programs."""

import torch

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import TARGETS
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program
from dtkernels.runtime.signature.signature import Signature

DICE = (
    "Func p, n, m, q, f; In A, T; Var b, c; RVar y, x; p[b, c, y, x] = sigmoid(A[b, c, y, x]); n[b, c] = rsum(p[b, c, y, x] * T[b, c, y, x], y, x);"
    " m[b, c] = rsum(p[b, c, y, x], y, x); q[b, c] = rsum(A[b, c, y, x] * A[b, c, y, x], y, x); f[b, c] = n[b, c] / (m[b, c] + 1) + q[b, c]; f.compile();"
)


def program(text, itemsize=2, **sizes):
    known = prepare_algorithm(parse(text).algorithm, ("f",))
    return Program(known, default_schedule(known, ("f",), sizes, itemsize, TARGETS["h200"]))


def test_sums_of_one_volume_are_made_in_one_pass_by_many_programs():
    for y, x in ((512, 512), (333, 501), (100, 5000), (5000, 100)):
        made = program(DICE, b=8, c=4, y=y, x=x)
        reading = [k for k in lower(made) if "A" in k.reads]
        assert len(reading) == 1 and any(p.name == "split" for p in made.schedule.primitives), str(made.schedule)


def test_integers_that_take_more_room_than_results_have_room():
    """They are as wide in shared memory as in memory; a call says how wide."""
    known = prepare_algorithm(parse(DICE).algorithm, ("f",))
    given = {"A": torch.empty(8, 4, 512, 512, dtype=torch.bfloat16, device="meta"), "T": torch.empty(8, 4, 512, 512, dtype=torch.int64, device="meta")}
    signature = Signature.of(known)
    assert signature.typed(given) and not signature.typed({t: given["A"] for t in given})
    assert not signature.typed({"A": given["A"], "T": given["T"].to(torch.int8)})


