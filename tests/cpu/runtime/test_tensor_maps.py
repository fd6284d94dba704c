"""Tensor maps among the arguments of bound launches: where they point, what they say, and that both follow the call."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from dtkernels.codegen.emit.module import emit
from dtkernels.lang.parser import parse
from dtkernels.runtime.build.specialization import fits
from dtkernels.runtime.launch import bound_launch
from dtkernels.runtime.launch.symbolic_replay import Allocating, LaunchTemplate, stand_ins
from dtkernels.runtime.launch.tensor_map import WORDS, map_type, plain_map_type
from dtkernels.runtime.launch.wrapper_recorder import host_text, record
from dtkernels.runtime.tables.kernel_store import Encoding, StoredKernel

MM = """Func mm; In A, B; Var x, y; RVar k;
mm[x, y] = rdot(A[x, k], B[k, y], k);
mm.block(x:64, y:32); mm.tensorize(x:64, y:32, k:16); mm.descriptor(A, B, mm); mm.compile();"""
CHAIN = """Func mm, f; In A, B, C; Var x, y, z; RVar k;
mm[x, z] = rdot(A[x, k], B[k, z], k); f[x, y] = rdot(mm[x, z], C[z, y], z);
mm.block(x:64, z:32); mm.tensorize(x:64, z:32, k:16); mm.descriptor(A, B, mm);
f.block(x:64, y:32); f.tensorize(x:64, y:32, z:16); f.descriptor(mm, C, f); f.compile();"""
SAID = {"swizzle": 2, "elem_size": 2, "elem_type": 10, "block_size": [64, 16], "fp4_padded": False}


def host(text: str) -> str:
    return host_text(emit(parse(text), "call"))


def entry_for(launch) -> StoredKernel:
    types = {}
    for name, value in zip(launch.names, launch.args):
        types[name] = map_type(value) or ("*bf16" if isinstance(value, torch.Tensor) else "i32")
    types |= dict.fromkeys(launch.constants, "constexpr")
    maps = {n: SAID for n, t in types.items() if t.startswith("tensordesc<")}
    return StoredKernel(launch.kernel, "", "", 90, types, launch.constants, (), 128, 0, maps=maps)


@pytest.fixture
def launched(monkeypatch):
    """The maps of each launch: (address, an extent and a stride that were encoded, the numbers passed behind it)."""
    found: list[list[tuple]] = []
    entries: list[StoredKernel] = []

    def launch(config, function, params, _):
        places, maps = iter(params), []
        word = lambda address, i=0: ctypes.c_uint64.from_address(address + 8 * i).value  # noqa: E731
        for kind in (t for t in entries[len(found) % len(entries)].types.values() if t != "constexpr"):
            first = next(places)
            if kind.startswith("tensordesc<"):
                behind = [word(next(places)) for _ in range(4)]
                maps.append((word(first), word(first, 1), word(first, WORDS - 1), *behind))
        found.append(maps)
        return 0

    monkeypatch.setattr(bound_launch, "driver", lambda: SimpleNamespace(launch=launch, overlaps=False))
    monkeypatch.setattr(bound_launch, "raw_stream", lambda index: 0)
    monkeypatch.setattr(bound_launch, "encoded", lambda shape, strides, how: (0, shape[0], *[0] * (WORDS - 3), strides[0]))
    return found, entries


def bind(notes, values, entries) -> bound_launch.BoundLaunch:
    entries[:] = [entry_for(launch) for launch in notes.launches]
    return bound_launch.BoundLaunch(notes, values, {}, [(e, ctypes.c_void_p(1)) for e in entries], torch.device("cpu"))


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def test_maps_point_to_the_tensors_of_each_call(launched):
    """Also the result's, whichever way a call is launched."""
    found, entries = launched
    bound = bind(record(host(MM), (a := bf16(96, 48), b := bf16(48, 64))), (a, b), entries)
    again = bf16(96, 48), bf16(48, 64)
    for run in (lambda: bound(again)[0], lambda: bound.together()(again), lambda: bound.alone()(again)):
        found.clear()
        out = run()
        ((one, two, result),) = found
        assert one == (again[0].data_ptr(), 96, 48, 96, 48, 48, 1), "address, what was encoded, extents, strides"
        assert two == (again[1].data_ptr(), 48, 64, 48, 64, 64, 1) and result == (out.data_ptr(), 96, 64, 96, 64, 64, 1)


def test_what_one_kernel_writes_another_reads_through_a_map(launched):
    """One allocation of memory between them has one address in both."""
    found, entries = launched
    bound = bind(record(host(CHAIN), values := (bf16(96, 48), bf16(48, 32), bf16(32, 64))), values, entries)
    for run in (lambda: bound(values)[0], lambda: bound.together()(values)):
        found.clear()
        out = run()
        (_, _, made), (read, _, result) = found
        assert made == read and result[0] == out.data_ptr() != made[0] and made[1:] == (96, 32, 96, 32, 32, 1)


def test_other_sizes_have_other_maps(launched):
    """A template encodes them for the sizes of each call, and leaves those of the call that it was made from."""
    found, entries = launched
    text, values = host(MM), (bf16(96, 48), bf16(48, 64))
    first = bind(record(text, values), values, entries)
    (tape, stands), allocating = stand_ins(values), Allocating()
    notes = record(text.replace("is_cuda and (torch.version.hip or torch.cuda.get_device_capability(tensor.device) < (9, 0))", "is_cuda and False"), stands, None, allocating)
    notes.allocated = allocating.allocated
    template = LaunchTemplate(tape, bind(notes, stands, entries))
    other = bf16(160, 32), bf16(32, 64)
    out = template.at(other)(other)[0]
    assert found.pop() == [(other[0].data_ptr(), 160, 32, 160, 32, 32, 1), (other[1].data_ptr(), 32, 64, 32, 64, 64, 1), (out.data_ptr(), 160, 64, 160, 64, 64, 1)]
    first(values)
    assert found.pop()[0] == (values[0].data_ptr(), 96, 48, 96, 48, 48, 1)


def test_a_kernel_takes_maps_of_its_own_boxes_and_dtype_alone():
    (launch,) = record(host(MM), (bf16(96, 48), bf16(48, 64))).launches
    entry = entry_for(launch)
    assert entry.types["A_desc"] == "tensordesc<bf16[64, 16]>"
    assert fits(entry, launch.names, launch.args, launch.constants)
    (half,) = record(host(MM), (bf16(96, 48).half(), bf16(48, 64).half())).launches
    (wide,) = record(host(MM.replace("x:64", "x:128")), (bf16(256, 48), bf16(48, 64))).launches
    for other in (half, wide):
        assert other.names == launch.names and not fits(entry, launch.names, other.args, launch.constants)


def test_an_entry_keeps_how_its_maps_are_read():
    (launch,) = record(host(MM), (bf16(96, 48), bf16(48, 64))).launches
    entry = entry_for(launch)
    same = StoredKernel.parse(entry.text())
    assert same == entry and same.encodings["B_desc"] == Encoding(2, 10, 2, (64, 16))
    with pytest.raises(KeyError):
        Encoding.of({**SAID, "fp4_padded": True})


def test_the_layout_of_gluon_is_no_part_of_a_map_s_type():
    layout = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, transposed=False, fp4_padded=False, cga_layout=[])"
    assert plain_map_type(f"tensordesc<bf16[64, 64],{layout}>") == "tensordesc<bf16[64, 64]>" == plain_map_type("tensordesc<bf16[64, 64]>")
    assert plain_map_type("*bf16") == "*bf16"
