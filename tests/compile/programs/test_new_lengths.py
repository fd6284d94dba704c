"""What a cache of keys that grows compiles where no kernel is prebuilt: on tensors taken for those of an H200, launches that do nothing."""

import ctypes
from types import SimpleNamespace

import pytest
import stand_in_gpu
import torch

from dtkernels.algebra.pipeline import prepare
from dtkernels.autoschedule import default_schedule as formulas
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.ops.registry import SPECS
from dtkernels.runtime.bind.operator import Operator
from dtkernels.runtime.build import jit_kernels
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.specialization import narrowest, shared_build
from dtkernels.runtime.build.triton_compile import plain_types, record_launches
from dtkernels.runtime.dispatch import dispatcher
from dtkernels.runtime.launch import bound_launch
from dtkernels.runtime.select import table_loader


def _noting(found, build):
    """``build``, with the name of each kernel and what its integers are multiples of added to ``found``."""

    def noted(kernel, types, constants, multiples, *rest):
        found.append((kernel.__name__, multiples))
        return build(kernel, types, constants, multiples, *rest)

    return noted


@pytest.fixture
def builds(monkeypatch, tmp_path):
    """(kernel, multiples) of each compilation, None for the default schedule; there is no table."""
    monkeypatch.setenv("DTKERNELS_TABLES", str(tmp_path))
    table_loader.forget()
    driver = SimpleNamespace(launch=lambda *args: 0, function=lambda *args: ctypes.c_void_p(1), overlaps=True)
    for module in (dispatcher, bound_launch):
        monkeypatch.setattr(module, "driver", lambda: driver)
    monkeypatch.setattr(bound_launch, "raw_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    stand_in_gpu.tensors_on_it(monkeypatch)
    found, formula, build = [], formulas.default_schedule, jit_kernels.compile_kernel
    monkeypatch.setattr(formulas, "default_schedule", lambda *args: found.append(None) or formula(*args))
    monkeypatch.setattr(jit_kernels, "compile_kernel", _noting(found, build))
    yield found
    table_loader.forget()


def grow(lengths, found: list) -> list[str]:
    """The kernels that are compiled for these lengths in turn, each of which must run without Triton."""
    op, q = Operator(SPECS / "attention.yaml"), torch.randn(1, 8, 1, 64).bfloat16()
    for length in lengths:
        k = torch.empty(1, 2, length, 64, dtype=torch.bfloat16)
        op(q, k, k, scale=0.125, group=4)
    routes = [r for v in op._variants.values() for r in v.dispatch._routes.values()]
    assert len(routes) == len(lengths) and all(r.kind == "compiled" and isinstance(r.launch, bound_launch.BoundLaunch) for r in routes)
    return sorted(name for name, _ in filter(None, found))


def test_a_cache_that_grows_within_a_bucket_compiles_a_kernel_twice_at_most(builds):
    kernels = grow(range(2049, 2114), builds)
    assert kernels and max(map(kernels.count, kernels)) <= 2, kernels
    assert builds.count(None) <= 6


def test_the_same_kernels_are_compiled_in_any_order(builds):
    grow((2048, 2049, 2064), builds)
    forth = [b for b in builds if b]
    builds.clear()
    grow((2064, 2049, 2048), builds)
    assert len(forth) == len([b for b in builds if b]) and all(b in builds for b in forth)


def wanted(size: int, even: bool, *, inner: bool):
    """The build for one pointer, an extent and the strides of its tensor."""
    x = torch.empty(64, dtype=torch.float16)
    names, strides = ("A_ptr", "size_y", "A_stride_x", "A_stride_y", "EVEN_y"), (size, 1) if inner else (64, 64)
    types = {"A_ptr": "*fp16", "size_y": "i32", "A_stride_x": "i32", "A_stride_y": "i32", "EVEN_y": "constexpr"}
    return shared_build(names, (x, size, *strides), {"EVEN_y": even}, types)


def test_a_tensor_may_be_named_like_an_extent():
    """A Func ``size`` is the argument ``size_ptr``."""
    sums = torch.ones(64, dtype=torch.float16)
    types = {"size_ptr": "*fp16", "size_y": "i32", "EVEN_y": "constexpr"}
    assert shared_build(("size_ptr", "size_y", "EVEN_y"), (sums, 1), {"EVEN_y": False}, types).constants["size_y"] == 1


def test_only_what_makes_kernels_slower_tells_builds_apart():
    assert wanted(1001, False, inner=False) == wanted(1008, False, inner=False) != wanted(1024, True, inner=False)
    classes = [wanted(n, False, inner=True).multiples for n in (1001, 1002, 1004, 1008)]  # loads there are as wide as rows allow
    assert len({str(c) for c in classes}) == 4


def test_an_extent_of_one_is_a_constant():
    one = wanted(1, False, inner=False)
    assert one.types["size_y"] == "constexpr" and one.constants["size_y"] == 1
    assert wanted(2, False, inner=False).types["size_y"] == "i32"


@pytest.mark.parametrize("length", [4136, 4144])
def test_the_parts_of_a_split_sum_have_loads_of_16_bytes_at_any_multiple_of_8(length):
    """The buffer of parts has a dimension more than the operands: their rows had passed for those of a tensor of lower rank, and loads were 2 bytes wide."""
    program = "Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k); f.block(x:64, y:64); f.tensorize(x:64, y:64, k:64); f.split(k:3); f.compile();"
    tensors = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((192, length), (length, 168))]
    launches = record_launches(load_module(emit(prepare(parse(program)), "call", target("h200")), "split"), "call", tuple(tensors))
    part = next(launch for launch in launches if "part" in launch.kernel.__name__)
    build = narrowest(tuple(part.kernel.arg_names), part.args, part.constants, plain_types(part))
    assert build.multiples["size_k"] % 8 == 0 and build.multiples["A_stride_x"] % 8 == 0 and build.multiples["B_stride_k"] % 8 == 0


def test_a_kernel_that_adds_up_the_parts_of_one_number_is_specialized():
    program = "Func f; In A; RVar x, y; f[] = rsum(A[x, y], x, y); f.tensorize(x:1, y:1024); f.split(x:16); f.compile();"
    launches = record_launches(load_module(emit(prepare(parse(program)), "call", target("h200")), "whole"), "call", (torch.empty(64, 4096, device="meta"),))
    assert len(launches) == 2
    for launch in launches:
        assert all(step > 1 for step in narrowest(tuple(launch.kernel.arg_names), launch.args, launch.constants, plain_types(launch)).multiples.values())
