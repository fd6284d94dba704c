"""Integers that take more room than results: schedules count their bytes, in shared memory too."""

import torch

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.target import TARGETS
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program
from dtkernels.runtime.select.schedule_selection import check_resources_of
from dtkernels.runtime.signature.signature import Signature, input_types

LONG = "Func n, m, f; In A, T; Var b; RVar y, x; n[b] = rmax(A[b, y, x] * T[b, y, x], y, x); f[b] = rsum(exp(A[b, y, x] * T[b, y, x] - n[b]), y, x); f.compile();"


def given(dtype, **sizes):
    return {"A": torch.empty(*sizes.values(), dtype=torch.bfloat16, device="meta"), "T": torch.empty(*sizes.values(), dtype=dtype, device="meta")}


def test_a_call_says_how_wide_its_integers_are():
    known = prepare_algorithm(parse(LONG.replace("m, ", "")).algorithm, ("f",))
    signature, sizes = Signature.of(known), {"b": 600, "y": 64, "x": 512}
    assert signature.typed(given(torch.int64, **sizes)) and not any(signature.typed(given(t, **sizes)) for t in (torch.int8, torch.bool, torch.bfloat16))
    types = input_types(given(torch.int64, **sizes))
    schedule = default_schedule(known, ("f",), sizes, types, TARGETS["h200"])
    check_resources_of(Program(known, schedule), ("f",), sizes, types, TARGETS["h200"])
