"""Programs that nobody tuned, large enough for pipelined loops and matrix instructions: against float64, and the same bits twice.

In the interpreter no load is late and no operand is rounded on its way to a matrix instruction: what default schedules get wrong there
shows here alone.
"""

import pytest
import torch
from untuned_calls import DTYPES, Call, check, operator
from untuned_programs import PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name):
    program, op = PROGRAMS[name], operator(name)
    for sizes in program.checked:
        for dtype in program.dtypes:
            for backward in (False, True) if program.grad else (False,):
                check(Call.of(name, sizes, DTYPES[dtype], backward, "cuda"), op, times=2)
                torch.cuda.empty_cache()
