"""Random programs of float8 and of largest elements in the interpreter, against float64; DTKERNELS_SEED moves the draws."""

import os

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from oracle import outputs_of
from random_draws import Draws
from random_narrow import float8_program, top_k_program

import dtkernels
from dtkernels.lang import parse

CASES = 20
START = CASES * int(os.environ.get("DTKERNELS_SEED", 0))


@pytest.mark.parametrize("number", range(START, START + CASES))
@pytest.mark.parametrize("kind", [float8_program, top_k_program])
def test_random_program(kind, number):
    drawn = kind(Draws(number))
    assert parse(str(parse(drawn.text))) == parse(drawn.text)
    program = dtkernels.compile(drawn.text)
    results = outputs_of(program, **dict(zip(program.prepared.algorithm.inputs, drawn.tensors, strict=True)))
    for got, want in zip(results.values(), drawn.want, strict=True):
        if drawn.tolerance:
            torch.testing.assert_close(got.double(), want, rtol=drawn.tolerance, atol=drawn.tolerance * max(1.0, want.abs().max().item()) / 8, msg=lambda m: f"{drawn.text}\n{m}")
        else:
            assert torch.equal(got.nan_to_num(1e9), want.nan_to_num(1e9)), drawn.text
