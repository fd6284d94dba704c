# ruff: noqa: E501 (programs read best on one line)
"""Operands of products that are computed once, in kernels of their own: the same values as in the product's loop, and right ones."""

import pytest
import torch

import dtkernels
from dtkernels.runtime.torch_support.tf32 import heeding_ieee

TILES = "f.block(m:16, n:16); f.tensorize(m:16, n:16, k:32);"
LEFT, RIGHT = ("f_left.block(m:16, k:16); f_left.tensorize(m:16, k:16);", "f_right.block(n:16, k:16); f_right.tensorize(n:16, k:16);")


def program(operands: str, inputs: str, more: str = "") -> str:
    return f"Func f; In {inputs}; Var m, n; RVar k; f[m, n] = rdot({operands}, k){more};" + TILES


def random(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def codes(*shape, dtype=torch.int8):
    low, high = (0, 256) if dtype == torch.uint8 else (-127, 128)
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1)).to(dtype)


A, B, W, CODES = random(37, 64), random(37, 64, seed=3), random(45, 64), codes(45, 64)
NIBBLES, SCALES = codes(45, 32, dtype=torch.uint8), random(45, 2)
UNPACKED = torch.stack((NIBBLES & 15, NIBBLES >> 4), -1).flatten(1).double() - 8
SILU = A.double() * torch.sigmoid(A.double())
#: name -> (text, statements, inputs, left operand, right operand before it is rounded, factor of columns)
FORMS = {
    "int8": (program("A[m, k], cast(W[n, k], bf16)", "A, W, s", " * s[n]"), RIGHT, (A, CODES, W[:, 0]), A, CODES.double(), W[:, 0]),
    "int8 as it is": (program("A[m, k], W[n, k]", "A, W"), RIGHT, (A, CODES), A, CODES.double(), None),
    "int4": (program("A[m, k], ((W[n, k / 2] >> (4 * (k % 2))) & 15) - 8", "A, W"), RIGHT, (A, NIBBLES), A, UNPACKED, None),
    "int4 in groups": (program("A[m, k], (((W[n, k / 2] >> (4 * (k % 2))) & 15) - 8) * s[n, k / 32]", "A, W, s"), RIGHT, (A, NIBBLES, SCALES), A,
                       UNPACKED * SCALES.double().repeat_interleave(32, 1), None),
    "e4m3": (program("A[m, k], W[n, k]", "A, W"), RIGHT, (A, W.to(torch.float8_e4m3fn)), A, W.to(torch.float8_e4m3fn).double(), None),
    "gated": (program("A[m, k] / (1 + exp(-A[m, k])) * B[m, k], W[n, k]", "A, B, W"), LEFT, (A, B, W), SILU * B.double(), W, None),
    "masked": (program("where(k <= m, A[m, k] * 2, 0), W[n, k]", "A, W"), LEFT, (A, W), (A.double() * 2).tril(), W, None),
    "both": (program("maximum(A[m, k] + b[k], 0), W[n, k] * c[k]", "A, b, W, c"), LEFT + RIGHT, (A, B[0], W, B[1]),
             (A.double() + B[0].double()).relu(), W.double() * B[1].double(), None),
    "turned round in float32": (program("A[m, k], W[k, n]", "A, W"), RIGHT, (A.float(), W.float().t().contiguous()), A, W, None),
    "both turned round in float32": (program("A[k, m], W[k, n]", "A, W"), LEFT + RIGHT, (A.float().t().contiguous(), W.float().t().contiguous()), A, W, None),
    "turned round to aligned rows in float32": (program("A[m, k], W[k, n]", "A, W"), RIGHT + "f_right.align(); f.stage(A); f.descriptor(A, f_right);",
                                                (A.float()[:, :63].contiguous(), W.float()[:, :63].t().contiguous()), A[:, :63], W[:, :63], None),
    "int8 beside float32": (program("A[m, k], W[n, k]", "A, W"), RIGHT, (A.float(), CODES), A, CODES.double(), None),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_stored_operands_change_no_value(name):
    text, statements, inputs, left, right, factor = FORMS[name]
    stored = dtkernels.compile(text + statements)
    got, inside = stored(*inputs), dtkernels.compile(text)(*inputs)
    reordered = name == "int4 in groups" or "turned" in name  # packed codes are added up place by place; the interpreter's BLAS adds turned operands in another order
    assert (torch.equal(got, inside) or reordered) and got.dtype == inside.dtype == inputs[0].dtype
    rounded = [t.double().to(inputs[0].dtype).double() for t in (left, right)]
    want = (rounded[0] @ rounded[1].t()) * (1 if factor is None else factor.double())
    most = (rounded[0].abs() @ rounded[1].abs().t()) * (1 if factor is None else factor.double().abs())
    step = torch.finfo(got.dtype).eps
    one_off = 2 * step if name in ("gated", "int4 in groups", "both") else 0.0  # float32 arithmetic may round an operand to its neighbour
    assert ((got.double() - want).abs() <= step * want.abs() + (64 * 2.0**-23 + one_off) * most).all()
    operand = f"{'float32' if name.endswith('float32') else 'bfloat16'}"
    assert operand == "float32" or "_out = torch.empty((size_n, size_k), dtype=torch.float32" not in stored.source


def test_the_product_reads_a_stored_operand_without_conversion():
    text, statements, *_ = FORMS["int8"]
    source = dtkernels.compile(text + statements).source
    assert "tl.dot(A.to(f_right.dtype), tl.trans(f_right), f_acc" in source and "f_right_out = torch.empty((size_n, size_k), dtype=A_bf16_dtype" in source


def test_ieee_products_may_be_insisted_on(monkeypatch):
    precision = heeding_ieee(lambda tensor: "tf32x3")
    assert precision(A) == "tf32x3"
    monkeypatch.setenv("DTKERNELS_FP32_PRODUCTS", "ieee")
    assert precision(A) == "ieee"
    module = dtkernels.compile(program("A[m, k], W[n, k]", "A, W") + "f.approximate(rdot);").module
    assert module.exact_products(torch.empty(1, device="meta")) == "ieee"
    monkeypatch.delenv("DTKERNELS_FP32_PRODUCTS")
    assert module.exact_products(torch.empty(1, device="meta")) == "tf32x3" and module.exact_products(A) == "ieee"


SIDES = "f_left.block(k:16, m:16); f_left.tensorize(k:16, m:16); f_right.block(k:16, n:16); f_right.tensorize(k:16, n:16); f.block(m:16, n:16); f.tensorize(m:16, n:16, k:1);"
PAIRED = {
    "distances": ("rsum((A[m, k] - B[n, k]) * (A[m, k] - B[n, k]), k)", lambda a, b: ((a[:, None] - b) ** 2).sum(-1)),
    "kernel of distances": ("exp(-0.1 * rsum(abs(A[m, k] - B[n, k]), k))", lambda a, b: torch.exp(-0.1 * (a[:, None] - b).abs().sum(-1))),
    "largest": ("rmax(A[m, k] + B[n, k], k)", lambda a, b: (a[:, None] + b).amax(-1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PAIRED)
def test_both_sides_of_a_sum_over_pairs_may_be_stored(name, dtype):
    """Copies are in float32 with rows side by side: what is computed of them has the same values."""
    formula, truth = PAIRED[name]
    text = f"Func f; In A, B; Var m, n; RVar k; f[m, n] = {formula};"
    run = dtkernels.compile(text + SIDES)
    a, b = random(37, 45, dtype=dtype), random(21, 45, dtype=dtype, seed=5)
    got, want = run(a, b), truth(a.double(), b.double())
    assert got.dtype == dtype and ((got.double() - want).abs() <= 2 * torch.finfo(dtype).eps * want.abs() + 64 * 2.0**-23 * want.abs().max()).all()
    assert "f_left_out = torch.empty((size_k, size_m), dtype=torch.float32" in run.source


def test_a_rounded_copy_changes_no_value():
    """``s`` stays in float32 where it is read element by element; products read the copy across and along."""
    text = """Func s, f; In A, B; Var m, n; RVar k, l; s[m, n] = rdot(A[m, k], A[n, k], k) + 0.001;
    f[m, n] = s[m, n] + rdot(s[m, l], s[l, n], l) + rdot(s[n, l], B[m, l], l);
    s.block(m:16, n:16); s.tensorize(m:16, n:16, k:32); f.block(m:16, n:16); f.tensorize(m:16, n:16, l:32);"""
    stored = dtkernels.compile(text.replace("s.block(m:16, n:16); s.tens", "s.fuse_at(s_rounded, n); s.store(); s_rounded.block(m:16, n:16); s_rounded.tens"))
    made = [line for line in stored.source.splitlines() if "torch.empty" in line]
    assert len(made) == 3 and sum("torch.float32" in line for line in made) == 1
    inputs = (A, random(37, 37))
    assert torch.equal(stored(*inputs), dtkernels.compile(text)(*inputs))


def test_a_product_stored_by_itself_changes_no_value():
    """Its operand may be stored too, under the name that it has inside the expression."""
    text = "Func f; In A, W, R; Var m, n; RVar k; f[m, n] = R[m, n] + where(R[m, n] > 0, rdot(A[m, k] * 2, W[n, k], k), 0); f.block(m:16, n:16); f.tensorize(m:16, n:16{});"
    inputs = (A, W, random(37, 45))
    apart = "f_dot.block(m:16, n:16); f_dot.tensorize(m:16, n:16, k:32);"
    inside = dtkernels.compile(text.format(", k:32"))(*inputs)
    for more in (apart, apart + LEFT):
        assert torch.equal(dtkernels.compile(text.format("") + more)(*inputs), inside)
