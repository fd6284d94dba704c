"""Random schedules, read kernel by kernel and printed again: the same kernels come of both texts."""

from dataclasses import replace

import pytest
from random_cases import case_of

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.cost.kernel_config import read_schedule
from dtkernels.codegen.emit.module import emit
from dtkernels.lang import DTError, Program
from dtkernels.lang.parser import parse_schedule

MODULE = "import torch"


def emitted(program: Program) -> str:
    try:
        return emit(program)
    except DTError as error:
        return str(error).partition("\n")[0]


@pytest.mark.parametrize("chunk", range(4))
def test_the_same_kernels_come_of_what_is_printed(chunk):
    compared = 0
    for number in range(chunk, 160, 4):
        drawn = case_of(number).program
        algorithm = prepare_algorithm(drawn.algorithm, drawn.outputs())
        program = replace(drawn, algorithm=algorithm, schedule=parse_schedule(str(drawn.schedule)))
        found = read_schedule(str(program.schedule))
        printed = parse_schedule(str(found))
        assert read_schedule(str(printed)) == found, number
        text = emitted(program) if all(p.func in algorithm for p in drawn.schedule.primitives) else ""
        if text.startswith(MODULE):
            compared += 1
            assert text == emitted(replace(program, schedule=printed)), number
    assert compared > 12
