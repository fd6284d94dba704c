# ruff: noqa: E501 (programs read best on one line)
"""Products with weights of int8, and of four bits packed in integers: one scale, scales of rows, columns and groups, either side; values and gradients."""

import re
from dataclasses import replace

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch

import dtkernels
from dtkernels.codegen.emit.module import emit
from dtkernels.lang import parse
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator

M, N, K, GROUP = 33, 40, 64, 16
GENERATOR = torch.Generator().manual_seed(0)
W8 = torch.randint(-127, 128, (N, K), generator=GENERATOR).to(torch.int8)
W4 = torch.randint(0, 16, (N, K), generator=GENERATOR)
INT32 = sum(W4[:, i::8] << (4 * i) for i in range(8))
INT32 = torch.where(INT32 >= 2**31, INT32 - 2**32, INT32).to(torch.int32)
UINT8 = (W4[:, ::2] | W4[:, 1::2] << 4).to(torch.uint8)
UNPACKED = {8: "(((W[n, k // 8] >> (4 * (k % 8))) & 15) - 8)", 2: "(((W[n, k // 2] >> (4 * (k % 2))) & 15) - 8)", 1: "W[n, k]"}
#: name -> (scale, its shape, the same for every weight)
SCALES = {
    "tensor": ("s[0]", (1,), lambda s: s),
    "row": ("s[n]", (N,), lambda s: s[:, None]),
    "column": ("s[k]", (K,), lambda s: s),
    "group": (f"s[n, k / {GROUP}]", (N, K // GROUP), lambda s: s.repeat_interleave(GROUP, 1)),
}
WEIGHTS = {"int8": (1, W8, W8), "int4 in int32": (8, INT32, W4 - 8), "int4 in uint8": (2, UINT8, W4 - 8)}


def op_of(weight: str, scale: str, first: bool = False) -> Operator:
    sides = ["A[m, k]", f"{UNPACKED[WEIGHTS[weight][0]]} * {SCALES[scale][0]}"]
    return Operator(Spec("narrow", "A product.", parse(f"Func f; In A, W, s; Var m, n; RVar k; f[m, n] = rdot({', '.join(sides[::-1] if first else sides)}, k);")))


@pytest.mark.parametrize("weight, scale, first", [*((w, s, False) for w in WEIGHTS for s in SCALES), *((w, "group", True) for w in WEIGHTS)])
def test_values_and_gradients(weight, scale, first):
    _, packed, plain = WEIGHTS[weight]
    a = torch.randn(M, K, generator=GENERATOR).half().requires_grad_()
    s = (torch.rand(SCALES[scale][1], generator=GENERATOR) / 16).half().requires_grad_()
    got = op_of(weight, scale, first)(a, packed, s)
    exact = [t.detach().double().requires_grad_() for t in (a, s)]
    want = exact[0] @ (plain * SCALES[scale][2](exact[1])).T
    adjoint = torch.randn(M, N, generator=GENERATOR).half()
    assert got.dtype == torch.float16
    for mine, theirs in zip((got, *torch.autograd.grad(got, (a, s), adjoint)), (want, *torch.autograd.grad(want, exact, adjoint.double()))):
        assert mine.dtype == torch.float16
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-3, atol=4e-3 * theirs.abs().max().item())


def test_float8_is_decoded_from_its_bits():
    """Every finite number of e4m3, subnormal ones included."""
    codes = torch.tensor([c for c in range(256) if c & 127 != 127] + [0, 0], dtype=torch.uint8).reshape(8, 32)
    value = "(1 - 2 * (W[n, k] >> 7)) * where(((W[n, k] >> 3) & 15) == 0, (W[n, k] & 7) * 2, 8 + (W[n, k] & 7)) * exp2(((W[n, k] >> 3) & 15) - 10)"
    got = dtkernels.compile(f"Func f; In W, A; Var n, k; f[n, k] = {value} + A[n, k]; f.block(n:4, k:32); f.tensorize(n:4, k:32);")(codes, torch.zeros(8, 32))
    assert torch.equal(got, codes.view(torch.float8_e4m3fn).float())
    op = Operator(Spec("float8", "A product.", parse(f"Func f; In A, W; Var m, n; RVar k; f[m, n] = rdot(A[m, k], {value}, k);")))
    a = torch.randn(17, 32, generator=GENERATOR).half()
    torch.testing.assert_close(op(a, codes).double(), a.double() @ codes.view(torch.float8_e4m3fn).double().T, rtol=2e-3, atol=4)


def test_a_weight_is_read_in_its_own_dtype():
    """Converted in registers, not by the wrapper: once as int8, and never written again."""
    text = "Func f; In A, W, s; Var m, n; RVar k; f[m, n] = rdot(A[m, k], W[n, k], k) * s[n]; f.block(m:16, n:16); f.tensorize(m:16, n:16, k:16);"
    compiled = dtkernels.compile(text)
    a, s = torch.randn(M, K).half(), torch.rand(N).half()
    torch.testing.assert_close(compiled(a, W8, s).double(), a.double() @ (W8 * s.double()[:, None]).T, rtol=2e-3, atol=0.3)
    program = replace(compiled.prepared, algorithm=replace(compiled.prepared.algorithm, integral=frozenset("W")))
    for uniform in (False, True):
        source = emit(program, "call", uniform=uniform)
        assert not re.search(r"\bW\.to\((dtype|A_W_dtype)\)(?! if)", source) and "number_of(W, A.dtype, PAIRS, A.dtype)" in source
