# ruff: noqa: E501 (programs read best on one line)
"""Programs whose inputs differ in dtype, in the interpreter: values against float64, and where operands are rounded."""

import math

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from operand_programs import ALIBI, APART, FUSED, RULE, product
from oracle import check

import dtkernels
from dtkernels.lang import parse
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int8": torch.int8, "int64": torch.int64}
NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SIZES = {"x": 37, "y": 21, "k": 40, "z": 19, "m": 23, "n": 18, "l": 33}
SHAPES = {"slopes": "1", "W[t[x / 16], y, k]": "3yk", "t[x / 16]": "3", "s[y, k / 8]": "y5"}


def tensors(text: str, dtypes: dict[str, str]) -> list[torch.Tensor]:
    """Random inputs of a program."""
    algorithm, made = parse(text).algorithm, []
    generator = torch.Generator().manual_seed(0)
    for name in algorithm.inputs:
        labels = next((shape for use, shape in SHAPES.items() if use.split("[")[0] == name and (use in text or use == name)), None)
        shape = [SIZES.get(c) or int(c) for c in labels] if labels else [SIZES[label] for label in algorithm.plain_labels(name)]
        dtype = DTYPES[dtypes[name]]
        if dtype.is_floating_point:
            made.append((torch.randn(shape, generator=generator) * 0.5).to(dtype))
        else:
            made.append(torch.randint(0, 3, shape, generator=generator).to(dtype))
    return made


@pytest.mark.parametrize("name", RULE)
def test_values(name):
    """Within the rounding of the product's own dtype, which for one of float32 is none."""
    text, dtypes, expected = RULE[name]
    low = [d for d in ("bf16", "fp16") if d in expected]
    check(text, *tensors(text, dtypes), operands=NAMES[low[0]] if low else "float32")


def ones(*shape: int, dtype: str = "fp16", value: float = 1.0) -> torch.Tensor:
    return torch.full(shape, value, dtype=DTYPES[dtype])


NEAR = 1 + 2.0**-13  #: 1 in float16 and bfloat16

#: expression, dtypes of A, W and g, whether the computed operand A * g is rounded to 16 bits
ROUNDED = [
    ("rdot(A[x, k] * g[k], W[y, k], k)", ("fp16", "fp16", "fp32"), True),
    ("rdot(A[x, k] * g[k], W[y, k], k)", ("bf16", "bf16", "fp32"), True),
    ("rdot(A[x, k] * g[k], W[y, k], k)", ("fp16", "fp32", "fp32"), False),
    ("rdot(W[y, k], A[x, k] * g[k], k)", ("fp16", "fp16", "fp32"), True),
    ("rdot(cast(A[x, k] * g[k], fp32), W[y, k], k)", ("fp16", "fp16", "fp32"), False),
    ("rdot(A[x, k] * g[k], cast(W[y, k], fp32), k)", ("fp16", "fp16", "fp32"), False),
    ("rdot(cast(A[x, k] * g[k], fp16), W[y, k], k)", ("fp32", "fp32", "fp32"), True),
    ("rdot(A[x, k] * g[k], cast(W[y, k], fp16), k)", ("fp32", "fp32", "fp32"), True),
    ("rdot(A[x, k] * g[k], W[y, k] * g[k] / g[k], k)", ("fp16", "fp16", "fp32"), False),
    ("rdot(A[x, k] * g[k], W[y, k], k)", ("int8", "fp16", "fp32"), True),
]


@pytest.mark.parametrize("expr, dtypes, rounded", ROUNDED)
@pytest.mark.parametrize("between", [False, True])
def test_where_a_computed_operand_is_rounded(expr, dtypes, rounded, between):
    a, w, g = dtypes
    text = product(expr, "A, W, g")
    if between and "cast(A" not in expr:  # a Func of its own, stored by another kernel
        text = product(expr.replace("A[x, k] * g[k]", "h[x, k]"), "A, W, g", "h[x, k] = A[x, k] * g[k];", "h, ") + "h.block(x:4); h.tensorize(x:4, k:16); out.compile();"
    out = dtkernels.compile(text)(A=ones(16, 32, dtype=a), W=ones(16, 32, dtype=w), g=ones(32, dtype=g, value=NEAR))
    assert torch.allclose(out.float(), torch.full((16, 16), 32.0 if rounded else 32 * NEAR), rtol=2.0**-18, atol=0)


@pytest.mark.parametrize("schedule", [FUSED, APART])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_result_is_the_promoted_dtype(schedule, dtype):
    given = tensors(ALIBI, {"Q": dtype, "K": dtype, "V": dtype, "slopes": "fp32"})
    (out,) = check(ALIBI + schedule, *given, operands=NAMES[dtype]).values()
    assert out.dtype == torch.float32


ALIBI_OP = """op: mixed_alibi
doc: |
  Attention with a slope for each head.
algorithm: |
  Func s, e, d, mixed_alibi; In Q, K, V, slopes; Var b, m, n; RVar l, k;
  s[b, m, l] = rdot(Q[b, m, k], K[b, l, k], k) * 0.25 + slopes[b] * (l - m);
  e[b, m, l] = exp(s[b, m, l]); d[b, m] = rsum(e[b, m, l], l);
  mixed_alibi[b, m, n] = OUT;
"""


@pytest.fixture(params=["rdot(e[b, m, l], V[b, l, n], l) / d[b, m]", "cast(rdot(e[b, m, l], V[b, l, n], l) / d[b, m], {dtype})"])
def alibi(request, tmp_path):
    def made(dtype: str):
        path = tmp_path / "mixed_alibi.yaml"
        path.write_text(ALIBI_OP.replace("OUT", request.param.format(dtype=dtype)))
        return dtkernels.register(path)

    return made


def eager(q, k, v, slopes):
    at = torch.arange(q.shape[1], dtype=q.dtype)
    return torch.softmax(q @ k.mT * 0.25 + slopes[:, None, None] * (at[None] - at[:, None]), -1) @ v


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_an_op_and_its_gradients(alibi, dtype):
    """Kernels of both directions multiply 16 bits; the bystander's gradient is float32, and as exact as the products are."""
    op = alibi(dtype)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 36, 24).to(DTYPES[dtype]).requires_grad_() for _ in range(3))
    slopes = torch.tensor([0.1, -0.03], requires_grad=True)
    out = op(q, k, v, slopes)
    adjoint = torch.randn(out.shape).to(out.dtype)
    grads = torch.autograd.grad(out, (q, k, v, slopes), adjoint)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v, slopes)]
    want = eager(*exact)
    wanted = torch.autograd.grad(want, exact, adjoint.double())
    assert [g.dtype for g in grads] == [DTYPES[dtype]] * 3 + [torch.float32]
    tolerance = 8 * torch.finfo(DTYPES[dtype]).eps
    for got, true in zip((out, *grads), (want, *wanted)):
        assert (got.double() - true).norm() <= tolerance * true.norm()


def test_the_gradient_of_a_float32_bias_is_not_rounded(tmp_path):
    path = tmp_path / "cast_bias.yaml"
    path.write_text("op: cast_bias\ndoc: |\n  A product and a bias, in 16 bits.\nalgorithm: |\n"
                    "  Func cast_bias; In X, W, b; Var m, n; RVar k;\n  cast_bias[m, n] = cast(rdot(X[m, k], W[n, k], k) + b[n], fp16);\n")  # fmt: skip
    op = dtkernels.register(path)
    x, w, b = torch.randn(77, 32).half(), torch.randn(18, 32).half(), torch.randn(18, requires_grad=True)
    out = op(x, w, b)
    adjoint = (torch.rand(out.shape) + 1).half()
    (grad,) = torch.autograd.grad(out, b, adjoint)
    assert out.dtype == torch.float16 and grad.dtype == torch.float32
    assert torch.allclose(grad.double(), adjoint.double().sum(0), rtol=2.0**-20, atol=0)


def test_shipped_ops_multiply_their_own_dtype():
    """A float32 bias or residual: the result is float32, the product is not."""
    x, w = (torch.randn(n, 48).half() for n in (20, 36))
    bias, residual = torch.randn(36), torch.randn(20, 36)
    want = torch.sigmoid(x.double() @ w.double().T + bias.double()) * residual.double()
    out = dtkernels.ops.gate(x, w, bias, residual)
    assert out.dtype == torch.float32 and torch.allclose(out.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8])
def test_integers_alone(dtype):
    """No floating-point type is there to take: float32."""
    a, w = (torch.randint(0, 3, (n, 40)).to(dtype) for n in (18, 17))
    for text in (product("rdot(A[x, k], W[y, k], k)", "A, W"), product("rdot(A[x, k], W[y, k], k) * g[x]", "A, W, g")):
        given = {"A": a, "W": w} | ({"g": ones(18, dtype="bf16", value=0.5)} if "g[" in text else {})
        out = dtkernels.compile(text)(**given)
        want = (a.double() @ w.double().T) * (0.5 if "g[" in text else 1)
        assert torch.equal(out.double(), want.to(out.dtype).double())
    alone = dtkernels.compile(product("rdot(A[x, k], A[y, k], k)", "A"))(A=a)
    assert torch.equal(alone.double(), a.double() @ a.double().T)


def test_a_scalar_input_has_no_say():
    text = product("rdot(A[x, k] * alpha, W[y, k], k)", "A, W").replace("Var x", "SIn alpha; Var x").replace("A[x, k] * alpha", "A[x, k] * exp(alpha * k)")
    given = {"A": ones(16, 32), "W": ones(16, 32)}
    out = dtkernels.compile(text)(**given, alpha=math.log(NEAR) / 31)
    assert out.dtype == torch.float16
    out = dtkernels.compile(text)(**given, alpha=torch.tensor(0.0))
    assert out.dtype == torch.float16 and torch.equal(out, ones(16, 16, value=32.0))


@pytest.mark.parametrize("dtypes", [("bf16",) * 3, ("fp16",) * 3, ("fp32",) * 3, ("bf16", "bf16", "fp32")])
def test_a_product_that_a_normalization_reads_is_rounded_once(dtypes):
    """Rounding errors of the statistics are averaged; results of float32 see no rounding at all."""
    text = """Func y, mean, var, f; In X, W, g; Var b, o; RVar k; y[b, o] = rdot(X[b, k], W[o, k], k) + g[o]; mean[o] = rmean(y[b, o], b);
    var[o] = rmean((y[b, o] - mean[o]) * (y[b, o] - mean[o]), b); f[b, o] = (y[b, o] - mean[o]) * rsqrt(var[o] + 0.00001);"""
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(shape, generator=generator).to(DTYPES[d]) for shape, d in zip([(80, 40), (24, 40), (24,)], dtypes))
    got = Operator(Spec("layer", "A layer.", parse(text)))(x, w, g)
    y = x.double() @ w.double().T + g.double()
    scale = (y.var(0, correction=0) + 1e-5).rsqrt()
    want = (y - y.mean(0)) * scale
    step = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-24}[got.dtype]
    off = step * y.abs() * scale  # of an element; the mean of a column is off by as much in the middle, at most
    bound = 2 * step * want.abs() + off + off.mean(0) * (1 + want.abs()) + 2e-5
    assert got.dtype == (DTYPES[dtypes[0]] if len({*dtypes}) == 1 else torch.float32) and ((got.double() - want).abs() <= bound).all()
