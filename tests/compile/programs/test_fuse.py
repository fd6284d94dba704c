"""Programs of ``dtkernels.fuse`` compile for every target, forward and backward, by the default schedule."""

import fused_positions  # noqa: F401 (it adds cases)
import pytest
import torch
from fused_functions import CASES, arguments

import dtkernels
from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.lang.schedule import Program

NAMES = [name for name, case in CASES.items() if case.compiled]
GPUS = ["a100", "h200", "b200", "mi300x"]


@pytest.fixture(scope="module")
def programs():
    """name -> the algorithms of forward and backward, with their outputs."""
    found = {}
    for name in NAMES:
        fused = dtkernels.fuse(CASES[name].function)
        fused(*arguments(CASES[name].calls[0], torch.float32))
        variant = fused.state.last.operator.variant((), frozenset(), 0)
        inputs = tuple(n for n in variant.signature.inputs if n not in variant.algorithm.integer_inputs())
        derived = gradient(variant.differentiated, variant.outputs, inputs)
        backward = tuple(derived.grads.values())
        found[name] = [(variant.algorithm, variant.outputs), (prepare_algorithm(derived.backward, backward), backward)]
    return found


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", NAMES)
def test_the_source_is_emitted(name, gpu, programs):
    sizes = dict.fromkeys(programs[name][0][0].labels, 512)
    for algorithm, outputs in programs[name]:
        here = sizes | {label: 512 for label in algorithm.labels}
        source = emit(Program(algorithm, default_schedule(algorithm, outputs, here, 2, target(gpu))), target=target(gpu))
        compile(source, name, "exec")
        assert "@triton.jit" in source or "@gluon.jit" in source
