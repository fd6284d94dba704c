"""Programs that Triton compiles wrongly when they are written another way, against float64."""

import numpy as np
import pytest
from miscompiled_programs import PROGRAMS, inputs

import dtkernels


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name):
    text, _, reference = PROGRAMS[name]
    given = inputs(name, "cuda")
    wanted = reference(*(x.double().cpu().numpy() for x in given))
    longest = max(max(x.shape) for x in given)
    error = 2.0**-10 if "tanh" in text else longest * 2.0**-22
    np.testing.assert_allclose(dtkernels.compile(text)(*given).cpu(), wanted, rtol=error, atol=error * np.abs(wanted).max())
