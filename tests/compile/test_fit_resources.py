# ruff: noqa: E501 (programs read best on one line)
"""Kernels that a GPU has no room for: refused at the call, once looked at for each GPU, dtype and size; never proposed by the default schedule."""

from functools import cache

import pytest
import torch

import dtkernels
from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.algebra.rules.constant_folding import bind_parameters
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.autoschedule.fit_resources import element_bytes, first_too_large, fit_resources
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import TARGETS, target
from dtkernels.lang import DTError, parse
from dtkernels.lang.algorithm import with_operands
from dtkernels.lang.schedule import Program
from dtkernels.lang.spec import load_spec
from dtkernels.runtime.bind.compiled_program import ArgumentCheck
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches
from dtkernels.show import SPECS, shipped

MM = "Func mm; In A, B; Var x, y; RVar k; mm[x, y] = rdot(A[x, k], B[k, y], k); mm.block(x:128, y:{y}); mm.tensorize(x:128, y:{y}, k:64); mm.num_warps(8); mm.num_stages({stages}); "
ROWS = "Func t, f; In A; Var x; RVar y; t[x] = rsum(exp(A[x, y]), y); f[x, y] = exp(A[x, y]) / t[x]; t.fuse_at(f, x); f.block(x:1); f.tensorize(y:0);"


def looked_at(text, gpu, *shapes, dtype=torch.bfloat16):
    program = dtkernels.compile(text)
    names = parse(text).algorithm.inputs
    fit = ArgumentCheck(program.prepared)
    fit.on({n: torch.empty(s, dtype=dtype, device="meta") for n, s in zip(names, shapes)}, target(gpu), False)
    return fit


def test_a_call_is_refused_on_a_gpu_without_room():
    looked_at(MM.format(y=256, stages=4), "h200", (512, 512), (512, 512))
    with pytest.raises(DTError, match="mm on l40s: bytes of shared memory: found 147456; allowed: at most 101376"):
        looked_at(MM.format(y=256, stages=4), "l40s", (512, 512), (512, 512))
    with pytest.raises(DTError, match="mm on h200: bytes of shared memory"):  # twice as wide
        looked_at(MM.format(y=256, stages=4), "h200", (512, 512), (512, 512), dtype=torch.float32)


def test_whole_extents_are_looked_at_for_each_size_alone():
    fit = looked_at(ROWS, "h200", (64, 8192))
    with pytest.raises(DTError, match="elements of one tensor: found 2097152"):
        fit.on({"A": torch.empty(64, 2**20 + 1, device="meta")}, target("h200"), False)
    fit.on({"A": torch.empty(999, 8192, dtype=torch.bfloat16, device="meta")}, target("h200"), False)
    assert len(fit.seen) == 1  # more rows are no other case


def test_tensors_that_lie_on_no_gpu_are_not_looked_at():
    fit = ArgumentCheck(dtkernels.compile(MM.format(y=256, stages=8)).prepared)
    fit.check((torch.empty(4, 4), torch.empty(4, 4)), {})
    assert not fit.seen


def test_a_schedule_is_narrowed_until_it_fits():
    program = parse(MM.format(y=256, stages=8))
    sizes = dict.fromkeys("xyk", 4096)
    for gpu, dtype in ((g, d) for g in TARGETS for d in (2, 4)):
        smaller = fit_resources(program, sizes, dtype, target(gpu))
        assert first_too_large(lower(smaller), sizes, element_bytes(program.algorithm, ("mm",), dtype), target(gpu)) is None, (gpu, dtype)
        assert smaller.schedule.number("mm", "num_stages") < 8


@pytest.mark.parametrize("products, stages, left", [(2, 3, 3), (2, 8, 4), (1, 8, 4)])
def test_stages_go_only_where_that_helps(products, stages, left):
    """Accumulators that registers do not hold ask for narrower tiles, at whose stages nothing is wrong then."""
    text = MM.format(y=256, stages=stages)
    if products > 1:
        text = text.replace("In A, B;", "In A, B, C;").replace("rdot(A[x, k], ", "rdot(A[x, k], C[k, y], k) * rdot(A[x, k], ")
    program = parse(text)
    schedule = fit_resources(program, dict.fromkeys("xyk", 4096), 2, target("h200")).schedule
    assert schedule.sizes("mm", "block") == {"x": 128, "y": 256 // products} and schedule.number("mm", "num_stages") == left


@cache
def prepared(op):
    spec = load_spec(SPECS / f"{op}.yaml")
    return spec, prepare_algorithm(spec.algorithm, spec.outputs)


def test_an_h100_has_the_room_of_an_h200():
    assert all(getattr(target("h100"), n) == getattr(target("h200"), n) for n in ("backend", "arch", "multiprocessors", "shared_bytes", "l2_bytes", "warp_size"))


@pytest.mark.parametrize("op, gpu", [(op, gpu) for op in shipped() for gpu in TARGETS if gpu != "h100"])
def test_the_default_schedule_proposes_what_fits(op, gpu):
    spec, algorithm = prepared(op)
    for size, other in ((64, 16), (1000, 128), (4096, 4096), (65536, 128)):
        sizes = {label: other if i % 2 else size for i, label in enumerate(algorithm.labels)}
        for itemsize in (2, 4):
            program = Program(algorithm, default_schedule(algorithm, spec.outputs, sizes, itemsize, target(gpu)))
            stored = with_operands(algorithm, program.schedule.subjects())
            assert first_too_large(lower(program), sizes, element_bytes(stored, spec.outputs, itemsize), target(gpu)) is None, program.schedule


BETWEEN = "Func g, f; In A, B, C; Var x, y; RVar k; g[x, y] = rdot(A[x, k], B[k, y], k); f[x, y] = g[x, y] * g[x, y] - C[x, y] * tanh(g[x, y]);"

BESIDE = "Func f; In A, B, C; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k) * rdot(A[x, k], C[k, y], k);"


@pytest.mark.parametrize("gpu", ["h200", "b200"])
def test_what_is_stored_through_descriptors_while_the_next_tiles_come_has_room_too(gpu):
    """A float32 tile between kernels; a tile beside a product; two products, of which Triton fails on some where they are in one loop."""
    spec = load_spec(SPECS / "gate.yaml")
    gate = bind_parameters(spec.algorithm, {"biased": True, "gates": True})
    for algorithm, outputs in ((gate, spec.outputs), (parse(BETWEEN).algorithm, ("g", "f")), (parse(BESIDE).algorithm, ("f",))):
        prepared = prepare_algorithm(algorithm, outputs)
        program = Program(prepared, default_schedule(prepared, outputs, dict.fromkeys(prepared.labels, 4096), 2, target(gpu)))
        module = load_module(emit(program, "call", target(gpu)), "fit")
        ranks = {n: len(prepared.plain_labels(n)) for n in prepared.inputs}
        args = tuple(torch.empty((4096,) * ranks[n], dtype=torch.bfloat16, device="meta") for n in prepared.inputs)
        for launch in record_launches(module, "call", args):
            assert build(launch, target(gpu)).metadata.shared <= target(gpu).shared_bytes, program.schedule
