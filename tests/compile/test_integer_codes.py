"""Integers of few bits become numbers by moved bits: the machine instructions, run here for every code, give each exactly."""

import re
import struct

import pytest
import torch

from dtkernels.lang import parse
from dtkernels.show import Subject, Written, machine_code

TILES = " f.block(m:16, n:64); f.tensorize(m:16, n:64, k:128); f.num_warps(4);"
PLAIN = "Func f; In A, W; Var m, n; RVar k; f[m, n] = rdot(A[m, k], W[n, k], k);" + TILES
PACKED = "Func f; In A, W; Var m, n; RVar k; f[m, n] = rdot(A[m, k], ((W[n, k // {c}] >> ({bits} * (k % {c}))) & {mask}) - {less}, k);" + TILES


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("DTKERNELS_CACHE", str(tmp_path / "dtkernels"))


def ptx(text: str, dtype: str) -> str:
    ((_, compiled),) = machine_code(Subject(Written("f", parse(text), scheduled=True), "h100", (16, 128, 512), dtype))
    return compiled.asm["ptx"]


def blocks(text: str) -> list[str]:
    """The different pieces of inline assembly; registers outside are numbered in the order of their use, arguments first."""
    text = re.sub(r"^\s*\.loc.*\n", "", text, flags=re.MULTILINE)  # where in the source
    found = re.findall(r"// begin inline asm\n(.*?)// end inline asm", text, re.S)
    numbered = []
    for block in found:
        names = dict.fromkeys(re.findall(r"%r\d+", block))
        for i, name in enumerate(names):
            block = re.sub(rf"{name}\b", f"%{i}", block)
        numbered.append(block)
    return list(dict.fromkeys(b for b in numbered if "prmt" in b))


class Registers(dict):
    """Runs the instructions of one block on integers of 32 bits."""

    def value(self, text: str) -> int:
        return (int(text, 0) if re.match(r"-?\d", text) else self[text]) & 0xFFFFFFFF

    def run(self, block: str) -> None:
        for line in re.sub(r"[{}]", "", block).split(";"):
            if line.strip() and not line.strip().startswith(".reg"):
                fn, _, rest = line.strip().partition(" ")
                to, *given = [a.strip() for a in rest.split(",")]
                self[to] = getattr(self, fn.split(".")[0])(fn, *map(self.value, given)) & 0xFFFFFFFF

    def mov(self, fn, a):
        return a

    def shr(self, fn, a, by):
        return a >> by

    def xor(self, fn, a, b):
        return a ^ b

    def prmt(self, fn, a, b, which):
        both = struct.pack("<II", a, b)
        return int.from_bytes(bytes(both[which >> 4 * i & 7] for i in range(4)), "little")

    def lop3(self, fn, a, b, c, table):
        assert table == 0xEA
        return a & b | c

    def fma(self, fn, a, b, c):
        return lanes(fn, a, b, c, lambda x, y, z: x * y + z)

    def add(self, fn, a, b):
        return lanes(fn, a, b, 0, lambda x, y, _: x + y)


def lanes(fn: str, a: int, b: int, c: int, what) -> int:
    dtype = torch.bfloat16 if "bf16" in fn else torch.float16
    args = [torch.tensor([v & 0xFFFF, v >> 16], dtype=torch.int32).to(torch.uint16).view(dtype).double() for v in (a, b, c)]
    low, high = what(*args).to(dtype).view(torch.uint16).tolist()
    return low | high << 16


def numbers(value: int, dtype: torch.dtype) -> list[float]:
    return torch.tensor([value & 0xFFFF, value >> 16], dtype=torch.int32).to(torch.uint16).view(dtype).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("codes", ["int8", "uint8"])
def test_every_code_of_8_bits(codes, dtype):
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    text = ptx(PLAIN, f"{name},W={codes}")
    assert not re.search(r"cvt\.rn\.(bf16|f16|f32)\.[su](8|16|32)", text)
    (block,) = blocks(text)
    for first in range(0, 256, 4):
        registers = Registers({"%0": int.from_bytes(bytes(range(first, first + 4)), "little")})
        registers.run(block)
        want = [n - 256 * (codes == "int8" and n > 127) for n in range(first, first + 4)]
        assert numbers(registers["%1"], dtype) + numbers(registers["%2"], dtype) == want


@pytest.mark.parametrize("word, bits, less, dtype", [("uint8", 4, 8, torch.bfloat16), ("int32", 4, 8, torch.float16), ("int32", 3, 0, torch.bfloat16)], ids=str)
def test_every_place_in_a_pack(word, bits, less, dtype):
    count = 8 // bits if word == "uint8" else 8
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    found = blocks(ptx(PACKED.format(c=count, bits=bits, mask=2**bits - 1, less=less), f"{name},W={word}"))
    assert len(found) == count
    for place, block in enumerate(found):
        for code in range(2**bits):
            others = [(code + 5 * i + 1) % 2**bits for i in range(32 // bits)]
            if word == "uint8":
                packs = [[*others[:place], (code + i) % 2**bits, *others[place + 1 : count]] for i in range(4)]
                given = {"%0": sum(c << bits * p + 8 * i for i, pack in enumerate(packs) for p, c in enumerate(pack))}
                results = ["%1", "%2"]
            else:
                packs = [[*others[:place], (code + i) % 2**bits, *others[place + 1 :]] for i in range(2)]
                given = {f"%{i}": sum(c << bits * p for p, c in enumerate(pack)) for i, pack in enumerate(packs)}
                results = ["%2"]
            registers = Registers(given)
            registers.run(block)
            assert [n for r in results for n in numbers(registers[r], dtype)] == [pack[place] - less for pack in packs]
