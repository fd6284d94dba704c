"""The host half of an emitted file, recorded while kernels are launched."""

import ctypes
import gc
import inspect
import weakref
from types import SimpleNamespace

import pytest
import torch
import triton

from dtkernels.codegen.emit import host_helpers
from dtkernels.codegen.emit.host_helpers import READY, SUPPORT
from dtkernels.ops.registry import SPECS
from dtkernels.runtime.launch import bound_launch
from dtkernels.runtime.launch.wrapper_recorder import _compiled, host_text, record

TEXT = f"""
import torch
import triton
import triton.language as tl
{SUPPORT["launch"]}
@triton.jit
def some_kernel(a):
    ...

def call(A):
    out = torch.empty((3,))
    launch(some_kernel, (1,), 3, A)
    return out
"""


class Kernel:
    """Finds too little shared memory for more than one stage."""

    def __init__(self):
        self.tried = []

    def __getitem__(self, grid):
        def run(*args, num_stages, **options):
            self.tried.append(num_stages)
            if num_stages > 1:
                raise triton.runtime.errors.OutOfResources(300000, 232448, "shared memory")
            return "compiled"

        return run


def test_a_launch_that_needs_fewer_stages_is_recorded_with_those():
    kernel = Kernel()
    notes = record(TEXT, (torch.zeros(3),), SimpleNamespace(tl=triton.language, triton=triton, some_kernel=kernel))
    assert kernel.tried == [3, 2, 1] and [note.compiled for note in notes.launches] == ["compiled"]


ALLOCATES = """
import torch
def call(x):
    part = torch.empty((4,), device=x.device)
    y = torch.empty((2,), device=x.device)
    return y
"""


def test_what_a_wrapper_allocates_is_freed_with_the_record_of_it():
    """At once: a first call of a large size would else hold its memory until Python looks for cycles."""
    gc.disable()
    try:
        notes = record(ALLOCATES, (torch.zeros(3),))
        held = [weakref.ref(t) for t in notes.allocated]
        assert held and all(ref() is not None for ref in held)
        del notes
        assert all(ref() is None for ref in held)
    finally:
        gc.enable()


SETS = """
import torch
import triton
def memory(size, alignment, stream):
    return torch.empty(size, dtype=torch.int8)
def call(x):
    triton.set_allocator(memory)
    y = torch.empty((2,), device=x.device)
    return y
"""


def test_the_memory_that_triton_is_told_of_can_still_be_had_when_the_wrapper_has_run():
    """Triton keeps the function; another kernel's launch may call it."""
    given, space = [], {}
    exec(SETS, space)
    module = SimpleNamespace(tl=triton.language, triton=SimpleNamespace(set_allocator=given.append, __version__="3.6.0"), memory=space["memory"])
    record(SETS, (torch.zeros(3),), module)
    assert [allocate(16, 1, 0).numel() for allocate in given] == [16]


def test_functions_that_are_ready_are_what_the_compiler_prints():
    assert set(SUPPORT) == {name for name, held in vars(host_helpers).items() if inspect.isfunction(held)}
    assert all(f"\n{inspect.getsource(getattr(host_helpers, name))}" == text for name, text in SUPPORT.items())
    assert all(len(_compiled(host_text(f"import torch\n{SUPPORT[f.__name__]}"))[1]) == 1 for f in READY)


@pytest.mark.parametrize("change, ready", [(lambda text: text, 1), (lambda text: text.replace("got shape", "given"), 0)])
def test_a_ready_function_stands_in_for_its_very_text_only(change, ready):
    """And a host text runs the same either way, refusing what it refuses."""
    text = change(host_text("import torch\n" + SUPPORT["extents"] + "\ndef call(A):\n    extents('call', [('A', A, ('x',))])\n    return torch.empty((3,))\n"))
    assert len(_compiled(text)[1]) == ready
    assert record(text, (torch.zeros(2),)).results[0].shape == (3,)
    with pytest.raises(ValueError, match="got shape" if ready else "given"):
        record(text, (torch.zeros(2, 2),))


def test_lengths_that_share_a_schedule_share_what_is_emitted(monkeypatch):
    """A cache of keys that grows is a new kind of call at each step, and printing kernels takes longer than a step."""
    from dtkernels.codegen.emit import module
    from dtkernels.runtime.bind.operator import Operator

    emitted, emit = [], module.emit
    monkeypatch.setattr(module, "emit", lambda program, *rest: emitted.append(program.schedule) or emit(program, *rest))
    op = Operator(SPECS / "softmax.yaml")
    for shape in ((5, 16), (6, 16), (7, 16), (5, 300), (6, 300)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(op(x), torch.softmax(x, -1))
    assert len(set(emitted)) == len(emitted) == 2


PIECES = f"""
import torch
import triton
import triton.language as tl
{SUPPORT["piece"]}
@triton.jit
def some_kernel(a, b):
    ...

def call(A):
    part = torch.empty((4, 2), dtype=torch.float32, device=A.device)
    out = torch.empty((6, 2), dtype=torch.float32, device=A.device)
    for first in range(0, 6, 4):
        size = min(4, 6 - first)
        some_kernel[(1,)](piece(A, (1,), first, size), piece(part, (0,), 0, size))
        some_kernel[(1,)](piece(part, (0,), 0, size), piece(out, (0,), first, size))
    return out
"""


def test_views_of_pieces_are_replayed_at_their_offsets(monkeypatch):
    """On other tensors of the same kind, by both ways to launch."""
    launched = []

    def launch(config, function, params, _):
        launched.append(tuple(ctypes.c_uint64.from_address(params[i]).value for i in range(2)))
        return 0

    monkeypatch.setattr(bound_launch, "driver", lambda: SimpleNamespace(launch=launch, overlaps=False))
    monkeypatch.setattr(bound_launch, "raw_stream", lambda index: 0)
    entry = SimpleNamespace(given=[(0, "a", "*fp32"), (1, "b", "*fp32")], scratch=(0, 1), blocks=1, threads=32, shared=0)
    bound = bound_launch.BoundLaunch(notes := record(PIECES, (a := torch.zeros(3, 6),)), (a,), {}, [(entry, None)] * len(notes.launches), torch.device("cpu"))
    assert bound.alone() is None and len(bound.allocations) == 2
    b = torch.zeros(3, 6)
    for run in (lambda: bound((b,))[0], lambda: bound.together()((b,))):
        launched.clear()
        out = run()
        (one, part), (again, first), (second, rest), (last, end) = launched
        assert (one, second) == (b.data_ptr(), b.data_ptr() + 16) and part == again == rest == last
        assert (first, end) == (out.data_ptr(), out.data_ptr() + 4 * 2 * 4) and out.shape == (6, 2)
