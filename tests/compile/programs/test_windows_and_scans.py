"""Convolutions, pooling and scans under the default schedule, forward and gradients, to machine code for every target without a GPU."""

import math

import pytest
import torch
from scan_forms import FORMS as SCANS
from window_forms import FORMS as WINDOWS

from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import differentiable_form, prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches
from dtkernels.runtime.reference.evaluator import extents

GPUS = ("a100", "l40s", "h200", "b200", "mi300x")
CHOSEN = {
    **{name: (f.text, f.shapes) for name, f in WINDOWS.items() if name in ("conv1d, strided, dilated, padded", "conv2d", "conv3d", "max_pool1d", "nearest upsampling")},
    **{name: (SCANS[name][0], SCANS[name][2]) for name in ("cumsum", "cummax", "cumprod", "down columns", "exponential average", "selective scan")},
}  # fmt: skip

EVERYWHERE = ("conv2d", "down columns", "exponential average")  #: on all of them; the rest on one


def halves(name: str) -> dict:
    """(algorithm, outputs, shapes of inputs) of forward and backward."""
    text, given = CHOSEN[name]
    shapes = {n: tuple(4 * size if size > 8 else size for size in shape) for n, shape in given.items() if shape}
    algorithm = parse(text).algorithm
    outputs = parse(text).outputs()
    forward = prepare_algorithm(algorithm, outputs)
    sizes = extents(forward, {n: torch.empty(s, device="meta") for n, s in shapes.items()})
    found = gradient(differentiable_form(algorithm, outputs), outputs, tuple(shapes))
    more = {o: tuple(sizes[x] for x in found.forward[o].labels) for o in found.forward_outputs}
    more |= {adjoint: more[o] for o, adjoint in found.adjoints.items()}
    backward = tuple(found.grads.values())
    return {"forward": (forward, outputs, shapes), "backward": (prepare_algorithm(found.backward, backward), backward, {**shapes, **more})}


@pytest.mark.parametrize(("name", "gpu"), [(n, g) for n in CHOSEN for g in (GPUS if n in EVERYWHERE else ("h200",))])
def test_forward_and_gradients_compile(name, gpu):
    for algorithm, outputs, shapes in halves(name).values():
        tensors = {n: torch.empty(shapes[n], dtype=torch.bfloat16, device="meta") for n in algorithm.inputs}
        program = Program(algorithm, default_schedule(algorithm, outputs, extents(algorithm, tensors), 2, target(gpu)))
        module = load_module(emit(program, target=target(gpu)), "window")
        for output in outputs:
            launches = record_launches(module, output, (*tensors.values(), *(0.5 for _ in algorithm.scalars))) if hasattr(module, output) else ()
            for launch in launches:
                assert build(launch, target(gpu)).asm


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv3d", "patches"])
def test_a_convolution_of_many_channels_runs_on_the_matrix_units(name):
    """Forward, and both gradients."""
    form = WINDOWS[name]
    algorithm, outputs = parse(form.text).algorithm, parse(form.text).outputs()
    found = gradient(differentiable_form(algorithm, outputs), outputs, ("A", "W"))
    for a, results in ((algorithm, outputs), (found.backward, tuple(found.grads.values()))):
        a = prepare_algorithm(a, results)
        channels = {"b": 16, "c": 128, "o": 128, "r": 3, "s": 3, "q": 3, "n": 256}
        sizes = {x: a.constant_extent(x) or channels.get(x[0], 64) for x in a.labels}
        kernels = lower(Program(a, default_schedule(a, results, sizes, 2, target("h200"))))
        for kernel in kernels:
            if kernel.func.endswith("_rows") or "_part" in kernel.func:  # copies, and what adds up parts, multiply nothing
                continue
            assert "dot(" in str(kernel.body) or f"{kernel.func}_phases" in a or kernel.workspaces, kernel.func  # nor does what puts phases side by side
            assert math.prod(g.block for g in kernel.grid) >= 512, kernel.grid


@pytest.mark.parametrize("name", [n for n, f in WINDOWS.items() if "W" not in f.shapes])
def test_no_program_computes_one_element(name):
    form = WINDOWS[name]
    a = prepare_algorithm(parse(form.text).algorithm, parse(form.text).outputs())
    sizes = {x: a.constant_extent(x) or 64 for x in a.labels}
    for kernel in lower(Program(a, default_schedule(a, parse(form.text).outputs(), sizes, 2, target("h200")))):
        if kernel.func == "f":
            assert math.prod(g.block for g in kernel.grid) >= min(64, math.prod(sizes[x] for x in a["f"].labels)), kernel.grid
