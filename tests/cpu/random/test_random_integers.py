"""Random programs of integers, roundings, places and conditions in the interpreter, against torch; DTKERNELS_SEED moves the draws."""

import os

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from oracle import outputs_of
from random_draws import Draws
from random_integers import integer_program, place_program, rounding_program

import dtkernels
from dtkernels.lang import parse

CASES = 30
START = CASES * int(os.environ.get("DTKERNELS_SEED", 0))


@pytest.mark.parametrize("number", range(START, START + CASES))
@pytest.mark.parametrize("kind", [integer_program, rounding_program, place_program])
def test_random_program(kind, number):
    drawn = kind(Draws(number))
    assert parse(str(parse(drawn.text))) == parse(drawn.text)
    program = dtkernels.compile(drawn.text)
    (got,) = outputs_of(program, **dict(zip(program.prepared.algorithm.inputs, drawn.tensors, strict=True))).values()
    (want,) = drawn.want
    assert got.dtype == want.dtype or want.dtype == torch.int64 and not got.is_floating_point(), (drawn.text, got.dtype)
    torch.testing.assert_close(got.to(want.dtype), want, rtol=1e-6 if want.is_floating_point() else 0, atol=0, equal_nan=True, msg=lambda m: f"{drawn.text}\n{m}")
