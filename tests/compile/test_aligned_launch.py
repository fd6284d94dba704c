"""Compiled programs and calls that Triton launches: loads are as wide as what divides the arguments allows. Machine code without a GPU."""

import re
from types import SimpleNamespace

import pytest
import torch

import dtkernels
from dtkernels.codegen.target import target
from dtkernels.runtime.build import aligned_launch
from dtkernels.runtime.build.aligned_launch import AlignedKernel, compile_known, known_build
from dtkernels.runtime.build.triton_compile import kernel_named, record_launches

H100 = target("h100")
ROWS = "f.block(x:1, y:1024); f.tensorize(y:1024); f.num_warps(4);"
PRODUCT = "Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k); f.block(x:64, y:128); f.tensorize(x:64, y:128, k:64); f.num_warps(4);"
CONCATENATED = "Func f; In A, B; Var x, y, p; Extent p = A[1]; Extent y = A[1] + B[1]; f[x, y] = where(y < len(p), A[x, y + 0], B[x, y - len(p)]);"


def bytes_moved(text: str, *tensors: torch.Tensor) -> tuple[set[int], set[int]]:
    """Return the bytes of the loads from global memory and of the stores to it, in the kernel that a compiled program launches."""
    (launch,) = record_launches(dtkernels.compile(text).module, "f", tensors)
    ptx = compile_known(launch, H100).asm["ptx"]
    plain = {kind: {int(n or 1) * int(bits) // 8 for n, bits in re.findall(rf"\b{kind}\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx)} for kind in ("ld", "st")}
    copied = {int(n, 16) for n in re.findall(r"cp\.async\.c[ag]\.shared\.global\S* \[[^]]*\], \[[^]]*\], (0x\w+)", ptx)}
    return plain["ld"] | copied, plain["st"]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("length, dtype, width", [
    (5000, torch.bfloat16, 16), (5004, torch.bfloat16, 8), (5002, torch.bfloat16, 4), (5001, torch.bfloat16, 2),
    (5004, torch.float32, 16), (5002, torch.float32, 8), (5001, torch.float32, 4),
])  # fmt: skip
def test_rows_move_as_many_bytes_at_once_as_their_length_allows(length, dtype, width):
    assert bytes_moved("Func f; In A; Var x, y; f[x, y] = A[x, y] * 2;" + ROWS, empty(64, length, dtype=dtype)) == ({width}, {width})


@pytest.mark.parametrize("length, width", [(5008, 8), (5004, 4), (5001, 1)])
def test_rows_of_8_bits(length, width):
    """Of 1024 elements in 128 threads each has 8."""
    loads, _ = bytes_moved("Func f; In A; Var x, y; f[x, y] = A[x, y] * 2;" + ROWS, empty(64, length, dtype=torch.int8))
    assert loads == {width}


@pytest.mark.parametrize("length, width", [(5000, 16), (5004, 8)])
def test_the_operands_of_a_product_are_copied_in_whole_vectors(length, width):
    """Its other operand has rows of 3072 elements."""
    assert bytes_moved(PRODUCT, empty(3000, 3072), empty(3072, length)) == ({16, width}, {width})


def test_an_operand_of_lower_rank_than_the_result():
    text = "Func f; In A, w; Var b, x, y; f[b, y, x] = A[b, y, x] + w[x, y]; f.block(b:1, y:64, x:64); f.tensorize(y:64, x:64);"
    loads, _ = bytes_moved(text, empty(2, 1000, 1000), empty(1000, 1000))
    assert loads == {16}


def test_tensors_that_start_at_8_bytes():
    """A slice from the fifth column on."""
    (launch,) = record_launches(dtkernels.compile("Func f; In A; Var x, y; f[x, y] = A[x, y] * 2;" + ROWS).module, "f", (empty(64, 5000),))
    whole = torch.zeros(64, 5008, dtype=torch.bfloat16)
    assert known_build(SimpleNamespace(**{**vars(launch), "args": (whole[:, 4:], *launch.args[1:])})).multiples["A_ptr"] == 8


def test_two_tensors_in_a_row():
    """The second begins where the first ends: at a multiple of 16 bytes where the first has 1000 columns."""
    loads, _ = bytes_moved(CONCATENATED + ROWS, empty(8, 1000), empty(8, 2000))
    assert loads == {16}


class Jit:
    """A kernel as Triton makes it, which notes its launches."""

    def __init__(self, kernel, noted: list):
        self.kernel, self.noted, self.arg_names = kernel, noted, kernel.arg_names

    def __getitem__(self, grid):
        return lambda *args, **named: self.noted.append("jit")


def test_a_launch_is_compiled_once_for_what_divides_it_and_triton_takes_the_others(monkeypatch):
    module = dtkernels.compile("Func f; In A; Var x, y; f[x, y] = A[x, y] * 2;" + ROWS).module
    assert isinstance(module.f_kernel, AlignedKernel)
    kernel, noted, builds = kernel_named(module, "f_kernel"), [], []

    class Compiled:
        def __getitem__(self, grid):
            return lambda *args: noted.append((grid, args))

    def compile_here(kernel, types, constants, multiples, options):
        builds.append((multiples, options))
        return Compiled()

    monkeypatch.setattr(aligned_launch, "compile_here", compile_here)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    aligned = AlignedKernel(Jit(kernel, noted))
    for length in (5000, 5000, 3000, 4096, 5004, 5001):
        (launch,) = record_launches(module, "f", (empty(64, length),))
        aligned[launch.grid](*launch.args, **launch.constants, **launch.options)
    assert [m["A_stride_x"] for m, _ in builds] == [8, 4] and all(o == {"num_warps": 4, "num_stages": 3} for _, o in builds)
    assert noted[3] == "jit" and noted[5] == "jit" and all(isinstance(noted[i], tuple) for i in (0, 1, 2, 4))
    grid, values = noted[2]
    assert grid == (64 * 3, 1, 1) and len(values) == len(kernel.arg_names)
    given = dict(zip(kernel.arg_names, values))
    assert given["size_y"] == given["A_stride_x"] == 3000 and given["A_stride_y"] == 1 and given["BLOCK_y"] == 1024
