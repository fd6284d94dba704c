"""Kernels of one call that overlap: where they wait, where they let the next one start, how they are launched."""

import ctypes
import re

import pytest
import torch

from dtkernels.algebra.pipeline import prepare
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches
from dtkernels.runtime.launch.cuda_driver import LaunchAttribute, launch_config
from dtkernels.runtime.launch.wrapper_recorder import host_text, record

H200 = target("h200")
CHAIN = """Func f, g, h; In A, B; Var x, y; RVar k;
f[x, y] = exp(A[x, y]); g[x] = rsum(f[x, k], k); h[x, y] = B[x, y] * 2;
f.block(x:4); f.tensorize(x:4, y:0); f.compile();
g.block(x:4); g.tensorize(x:4, k:0); g.compile();
h.block(x:4); h.tensorize(x:4, y:0); h.compile();
"""
ALONE = "Func f; In A; Var x, y; f[x, y] = exp(A[x, y]); f.block(x:4); f.tensorize(x:4, y:0); f.compile();"
WAIT, RELEASE, LOAD, STORE = r"griddepcontrol\.wait", r"griddepcontrol\.launch_dependents", r"ld\.global", r"st\.global"


def launches(gpu: str = "h200", text: str = CHAIN) -> list:
    program = parse(text)
    module = load_module(emit(prepare(program), "call", target(gpu)), "chain")
    return record_launches(module, "call", tuple(torch.empty(64, 256, device="meta") for _ in program.algorithm.inputs))


def places(ptx: str, pattern: str) -> list[int]:
    return [m.start() for m in re.finditer(pattern, ptx)]


@pytest.mark.parametrize("gpu", ["h200", "b200"])
def test_what_reads_waits_first_and_what_does_not_waits_last(gpu):
    f, g, h = launches(gpu)
    texts = [build(launch, target(gpu)).asm["ptx"] for launch in (f, g, h)]
    for ptx in texts:
        assert len(places(ptx, WAIT)) == 1  # else the end of the last kernel would not be the end of all
    assert max(places(texts[0], STORE)) < places(texts[0], WAIT)[0]  # nothing of the call comes before it
    assert places(texts[1], WAIT)[0] < min(places(texts[1], LOAD))
    assert max(places(texts[2], STORE)) < places(texts[2], WAIT)[0]  # it reads B alone


def test_the_next_kernel_may_start_at_the_stores_or_at_once_where_it_need_not_wait():
    f, g, h = (build(launch, H200).asm["ptx"] for launch in launches())
    assert max(places(f, LOAD)) < places(f, RELEASE)[0] < min(places(f, STORE))
    assert places(g, WAIT)[0] < places(g, RELEASE)[0] < min(places(g, LOAD))
    assert not places(h, RELEASE)


def test_programs_of_one_warp_may_start_at_once():
    """They wait beside the programs of the kernel before them; larger ones would keep some of those out."""
    f, g, _ = (build(launch, H200).asm["ptx"] for launch in launches(text=CHAIN.replace("g.compile();", "g.num_warps(1); g.compile();")))
    assert places(f, RELEASE)[0] < min(places(f, LOAD))
    assert places(g, WAIT)[0] < min(places(g, LOAD))


def test_all_but_the_first_are_launched_so():
    assert ["launch_pdl" in launch.options for launch in launches()] == [False, True, True]


@pytest.mark.parametrize("gpu,text", [("a100", CHAIN), ("mi300x", CHAIN), ("h200", ALONE)])
def test_gpus_without_it_and_single_kernels_are_left_alone(gpu, text):
    assert all("launch_pdl" not in launch.options and "DEPENDENT" not in launch.constants for launch in launches(gpu, text))


def test_the_file_for_one_gpu_runs_elsewhere():
    """Tensors that are on no such GPU: nothing waits, and nothing asks Triton for what it does not know."""
    a, b = torch.randn(8, 16), torch.randn(8, 16)
    notes = record(host_text(emit(prepare(parse(CHAIN)), "call", H200)), (a, b))
    assert [launch.constants["DEPENDENT"] for launch in notes.launches] == [False] * 3
    assert all("launch_pdl" not in launch.options for launch in notes.launches)


def test_without_elements_nothing_is_launched_before_what_the_caller_did_has_ended():
    """The first kernel is passed over where it has nothing to write; the next one must not take its place behind a stranger's kernel."""
    text = CHAIN.replace("f[x, y] = exp(A[x, y])", "f[x, y] = exp(A[x, y] + B[x, y])")
    program = parse(text)
    module = load_module(emit(prepare(program), "call", H200), "empty")
    found = record_launches(module, "call", (torch.empty(4, 0, device="meta"), torch.empty(4, 0, device="meta")))
    assert found and all("launch_pdl" not in launch.options for launch in found)


def test_a_launch_says_how_many_blocks_form_a_cluster_and_whether_it_overlaps():
    plain, _ = launch_config((7,), 128, 1024)
    assert (plain.grid_x, plain.grid_y, plain.attribute_count, plain.attributes) == (7, 1, 0, None)
    both, kept = launch_config((7, 2), 128, 1024, blocks=4, overlaps=True)
    assert (both.grid_x, both.grid_y, both.attribute_count) == (28, 2, 2)
    assert ctypes.sizeof(LaunchAttribute) == 72
    found = ctypes.cast(both.attributes, ctypes.POINTER(LaunchAttribute))
    assert [(found[i].kind, found[i].x) for i in range(2)] == [(4, 4), (6, 1)] and kept is not None


@pytest.mark.parametrize("persistent", [True, False])
def test_programs_that_stay_and_multiply_copies_start_after_them(persistent):
    """Beside the copies they took 1.17 times as long on an H100."""
    text = "Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k); f.block(x:64, y:64); f.tensorize(x:64, y:64, k:64); f.descriptor(A, B); f.stage(A, B);"
    module = load_module(emit(prepare(parse(text + " f.persistent();" * persistent)), "call", H200), "copies")
    found = record_launches(module, "call", (torch.empty(65, 67, device="meta", dtype=torch.bfloat16), torch.empty(67, 71, device="meta", dtype=torch.bfloat16)))
    assert ["launch_pdl" in launch.options for launch in found] == [False, True, not persistent]
