"""Random programs of windows, extents and scans in the interpreter, against the float64 oracle; DTKERNELS_SEED moves the draws."""

import os

import pytest
import torch
from oracle import check
from random_draws import Draws
from random_windows import scan_program, window_program

from dtkernels.lang import parse

START = 40 * int(os.environ.get("DTKERNELS_SEED", 0))


@pytest.mark.parametrize("number", range(START, START + 40))
@pytest.mark.parametrize("kind", [window_program, scan_program])
def test_random_program(kind, number):
    text, shapes = kind(Draws(number))
    assert parse(str(parse(text))) == parse(text)
    generator = torch.Generator().manual_seed(number)
    check(text, *(torch.rand(shape, generator=generator) * 2 - 1 for shape in shapes))
