"""Forms that Triton compiles to something else than they say: the kernels of these programs avoid them. tests/gpu runs the same programs."""

import re

import pytest
from miscompiled_programs import PROGRAMS, inputs

from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches

H200 = target("h200")


def compiled(name):
    program = parse(PROGRAMS[name][0])
    module = load_module(emit(program, target=H200), "workarounds")
    return [build(launch, H200) for launch in record_launches(module, program.outputs()[0], tuple(inputs(name, "meta")))]


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n.startswith("sum of products")])
def test_a_sum_of_float32_products_stays_in_float32(name):
    for kernel in compiled(name):
        assert "tt.dot" not in kernel.asm["ttir"] and "mma" not in kernel.asm["ptx"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiles(name):
    assert all(kernel.asm["cubin"] for kernel in compiled(name))


def test_no_unrolled_range_ends_before_it_begins():
    ranges = re.findall(r"tl\.range\((\w+), (.*), TILE_\w, loop_unroll_factor=3\)", emit(parse(PROGRAMS["unrolled parts"][0])))
    assert [(begin, end) for begin, end in ranges] == [("k_from", "max(k_from, k_to)")]


def test_the_hardware_takes_no_integer_for_a_float():
    (kernel,) = compiled("tanh of integers")
    assert "cvt.rn.f32" in kernel.asm["ptx"] or "sitofp" in kernel.asm["ttir"]
