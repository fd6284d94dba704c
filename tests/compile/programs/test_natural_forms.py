"""The kernels of default schedules of programs as mathematics has them: no product made more often than twice, no row read by every element."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from natural_forms import FORMS
from nest_work import blocks, work_of

from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import differentiable_form, prepare_algorithm
from dtkernels.autoschedule.cost.kernel_config import read_kernels
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang import expr as ex
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program

LARGE = {3: 32, 5: 64, 7: 8192, 16: 128, 20: 4096, 24: 512, 32: 128, 33: 64, 40: 1024, 50: 65536, 77: 4096, 300: 4096, 304: 4100, 1000: 1 << 20}  #: of an extent in a test, in use


def totals(algorithm, outputs, sizes: dict[str, int], extents: dict[str, list[int]]) -> tuple[float, float]:
    """(bytes moved, operations of products) of the kernels of the default schedule, as the tuner counts them."""
    program = Program(algorithm, default_schedule(algorithm, outputs, sizes, 2, target("h200")))
    merged = {name: math.prod(sizes[x] for x in parts) for k in read_kernels(str(program.schedule)) for name, parts in k.merges.items()}
    sizes = {f"{t}_{i}": n for t, shape in extents.items() for i, n in enumerate(shape)} | sizes | merged
    found = [0.0, 0.0]
    for kernel in lower(program):
        parts = {g.label: g.parts for g in kernel.grid if g.parts} | {w.part: w.parts for w in kernel.workspaces}
        shared = max((g.parts for g in kernel.grid), default=0) or 1
        work = work_of(kernel.body, 1.0, {**sizes, **parts}, {t: 2 for t in (*algorithm.inputs, *outputs)})
        found = [f + n / shared * blocks(kernel, sizes) for f, n in zip(found, work, strict=True)]
    return found[0], found[1]


def needed(algorithm, outputs, sizes: dict[str, int]) -> tuple[float, float]:
    """The same of every input read, every output written and every product made once."""
    dots = [(d, n) for d in algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Dot)]
    flops = sum(2 * math.prod(sizes[x] for x in {*ex.free_labels(n.left), *ex.free_labels(n.right)}) for _, n in dots)
    tensors = [algorithm.plain_labels(t) for t in algorithm.inputs] + [algorithm[o].labels for o in outputs]
    return sum(2 * math.prod(sizes[x] for x in labels if x) for labels in tensors), flops


def sizes_of(algorithm, extents: dict[str, list[int]]) -> dict[str, int]:
    known = {label: n for t in algorithm.inputs for label, n in zip(algorithm.plain_labels(t), extents[t]) if label}
    return {label: next(known[x] for x in (label, *algorithm.tied_labels(label)) if x in known) for label in algorithm.labels}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", FORMS)
def test_no_work_is_done_over_and_over(name, backward):
    text, _, shapes, _ = FORMS[name]
    program = parse(text)
    outputs = program.outputs()
    algorithm = forward = prepare_algorithm(program.algorithm, outputs)
    extents = {t: [LARGE[n] for n in shape] for t, shape in shapes.items()}
    sizes = sizes_of(algorithm, extents)
    if backward:
        found = gradient(differentiable_form(program.algorithm, outputs), outputs, program.algorithm.inputs)
        saved = prepare_algorithm(found.forward, found.forward_outputs)
        extents |= {t: [sizes_of(saved, extents)[x] for x in saved[t].labels] for t in found.forward_outputs}
        extents |= {d: [sizes[x] for x in forward[o].labels] for o, d in found.adjoints.items()}
        outputs = tuple(found.grads.values())
        algorithm = prepare_algorithm(found.backward, outputs)
        sizes = sizes_of(algorithm, extents)
    moved, operations = totals(algorithm, outputs, sizes, extents)
    least, products = needed(algorithm, outputs, sizes)
    assert operations <= 2.1 * products
    if not products:  # a sweep down columns for each of two sums, one to write; a window is read from nearby again,
        # and of what meets all of the other side a block of 16 by 32 serves itself
        assert moved <= 4.1 * least * (LARGE[5] if "each channel" in name else 1) + (any(word in name for word in ("distances", "weighted"))) * math.prod(sizes.values()) * 4 / 10
