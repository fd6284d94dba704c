"""Programs that nobody tuned, in the interpreter, forward and gradients, in float32 and in their own dtypes, against float64."""

import pytest
from untuned_calls import DTYPES, Call, check, operator
from untuned_programs import PROGRAMS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name):
    program, op = PROGRAMS[name], operator(name)
    for dtype in dict.fromkeys(("fp32", *program.dtypes)):
        for backward in (False, True) if program.grad else (False,):
            check(Call.of(name, program.small, DTYPES[dtype], backward, "cpu"), op)
