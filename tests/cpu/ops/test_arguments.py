"""What a caller gives: shapes that fit, shapes and types that do not and are named as the caller knows them, and what an op says of itself."""

import inspect
import pydoc

import pytest
import torch

import dtkernels


@pytest.fixture(autouse=True)
def by_reference(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def own(tmp_path):
    """(name, algorithm) -> a registered op."""

    def make(op: str, algorithm: str, more: str = ""):
        (tmp_path / f"{op}.yaml").write_text(f"op: {op}\ndoc: The {op} of a test.\nalgorithm: '{algorithm}'\n{more}")
        return dtkernels.register(tmp_path / f"{op}.yaml")

    return make


def ones(*shape: int, **kind) -> torch.Tensor:
    return torch.ones(shape, **kind)


# -- shapes -----------------------------------------------------------------------------------------------------------------

REFUSED = [
    ("rmsnorm", [(3, 4), (3, 4)], "x is (3, 4), weight is (3, 4): weight has 2 dimensions; allowed: x (..., C), weight (C)"),
    ("rmsnorm", [(2, 3, 4), (2, 4)], "x is (2, 3, 4), weight is (2, 4): weight has 2 dimensions; allowed: x (..., C), weight (C)"),
    ("rmsnorm", [(3, 4), ()], "x is (3, 4), weight is (): weight has 0 dimensions; allowed: x (..., C), weight (C)"),
    ("rmsnorm", [(3, 4), (1,)], "x is (3, 4), weight is (1,): C is 4 in x, 1 in weight; allowed: x (..., C), weight (C)"),
    ("layernorm", [(3, 4), (3, 4), (4,)], "x is (3, 4), weight is (3, 4), bias is (4,): weight has 2 dimensions; allowed: x (..., C), weight (C), bias (C)"),
    ("layernorm", [(3, 4), (4,), (3, 4)], "x is (3, 4), weight is (4,), bias is (3, 4): bias has 2 dimensions; allowed: x (..., C), weight (C), bias (C)"),
    ("gate", [(3, 4), (2, 3, 4)], "x is (3, 4), weight is (2, 3, 4): weight has 3 dimensions; allowed: x (..., M, K), weight (N, K)"),
    ("gate", [(3, 4), (5, 4), (3, 5)], "x is (3, 4), weight is (5, 4), bias is (3, 5): bias has 2 dimensions; allowed: x (..., M, K), weight (N, K), bias (N)"),
    (
        "gate",
        [(3, 4), (5, 4), (5,), (2, 3, 5)],
        "x is (3, 4), weight is (5, 4), bias is (5,), times is (2, 3, 5): times has other leading dimensions; "
        "allowed: x (..., M, K), weight (N, K), bias (N), times (..., M, N)",
    ),
    ("swiglu", [(3, 4), (3, 5)], "gate is (3, 4), up is (3, 5); allowed: one shape"),
    ("swiglu", [(3, 4), (4,)], "gate is (3, 4), up is (4,); allowed: one shape"),
    ("swiglu", [(3, 4), (4, 3)], "gate is (3, 4), up is (4, 3); allowed: one shape"),
    ("geglu", [(3, 4), (1, 4)], "gate is (3, 4), up is (1, 4); allowed: one shape"),
    ("geglu", [(4,), (3, 4)], "gate is (4,), up is (3, 4); allowed: one shape"),
    ("mmsigmoid", [(4,), (4,)], "a is (4,), b is (4,): b has 1 dimension; allowed: a (..., M, K), b (K, N) or (..., K, N)"),
    ("mmsigmoid", [(1,), (4,)], "a is (1,), b is (4,): b has 1 dimension; allowed: a (..., M, K), b (K, N) or (..., K, N)"),
    (
        "two_mm",
        [(2, 3, 4), (3, 4, 5), (5, 6)],
        "a is (2, 3, 4), b is (3, 4, 5): leading dimensions do not broadcast; allowed: a (..., M, K), b (K, L) or (..., K, L), c (L, N) or (..., L, N)",
    ),
    (
        "lora",
        [(2, 3, 6), (2, 3, 4), (5, 7), (6, 5)],
        "x is (2, 3, 4), a is (5, 7): K is 4 in x, 7 in a; allowed: y (..., M, N), x (..., M, K), a (L, K) or (..., L, K), b (N, L) or (..., N, L)",
    ),
    ("rope", [(1, 2, 3, 4), (1, 2, 3, 4), (5, 4), (5, 4)], "q is (1, 2, 3, 4), cos is (5, 4); allowed: q (B, H, S, D), cos (S, D), (1, S, D) or (B, S, D)"),
    (
        "rope",
        [(1, 2, 3, 4), (1, 2, 7, 4), (3, 4), (3, 4)],
        "q is (1, 2, 3, 4), k is (1, 2, 7, 4): S is 3 in q, 7 in k; allowed: q (B, H, S, D), k (B, G, S, D), cos (B, S, D), sin (B, S, D)",
    ),
    (
        "attention",
        [(1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 6, 4)],
        "k is (1, 2, 5, 4), v is (1, 2, 6, 4): L is 5 in k, 6 in v; allowed: q (..., H, M, D), k (..., G, L, D), v (..., G, L, N)",
    ),
    (
        "attention",
        [(2, 2, 3, 4), (3, 2, 5, 4), (3, 2, 5, 4)],
        "q is (2, 2, 3, 4), k is (3, 2, 5, 4): a leading dimension is 2 in q, 3 in k; allowed: q (..., H, M, D), k (..., G, L, D), v (..., G, L, N)",
    ),
]


@pytest.mark.parametrize("op, shapes, said", REFUSED, ids=[f"{op}-{shapes}" for op, shapes, _ in REFUSED])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shapes_are_named_as_they_were_passed(op, shapes, said, device):
    with pytest.raises(ValueError) as caught:
        getattr(dtkernels.ops, op)(*(ones(*shape, device=device) for shape in shapes))
    assert str(caught.value) == f"{op}: {said}"


def test_dyt_names_its_weights_too():
    with pytest.raises(ValueError, match=r"^dyt: x is \(3, 4\), weight is \(4,\), bias is \(3, 4\): bias has 2 dimensions; allowed: x \(..., C\), weight \(C\), bias \(C\)$"):
        dtkernels.ops.dyt(ones(3, 4), 1.0, ones(4), ones(3, 4))


@pytest.mark.kernels
def test_kernels_refuse_the_same(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=r"^rmsnorm: x is \(3, 4\), weight is \(3, 4\): weight has 2 dimensions"):
        dtkernels.ops.rmsnorm(ones(3, 4), ones(3, 4))
    program = dtkernels.compile("Func f; In A, w; Var x, y; f[x, y] = A[x, y] * w[y];")
    with pytest.raises(ValueError, match=r"^f: w has 1 dimensions \(y\); got shape \(3, 4\)$"):
        program(ones(3, 4), ones(3, 4))


NORM = "Func {op}; In A, w; Var x, y; {op}[x, y] = A[x, y] * w[y];"
ROWS = "Func {op}; In A, s; Var x, y; {op}[x, y] = A[x, y] * s[x];"
THROUGH = "Func m, {op}; In A, w; Var x; RVar y; m[x] = rmean(A[x, y], y); {op}[x, y] = (A[x, y] - m[x]) * w[y];"
LEADING = {NORM: "w", ROWS: "s", THROUGH: "w"}


@pytest.mark.parametrize("text", LEADING)
def test_an_input_of_lower_rank_brings_no_dimensions_of_its_own(text, own):
    """By the rank that the program declares: in ``A[x, y] * w[y]`` leading dimensions are those of A."""
    op, low = own("lower", text.format(op="lower")), LEADING[text]
    for a, b in (((4, 4), (4, 4)), ((4, 4), (1, 4)), ((1, 4, 4), (2, 4)), ((2, 4, 4), (3, 4)), ((2, 4, 4), (1, 2, 4)), ((4,), (3, 4))):
        with pytest.raises(ValueError) as caught:
            op(ones(*a), ones(*b))
        assert str(caught.value).startswith(f"lower: A is {a}, {low} is {b}: {low} has ") and "; allowed: A (..., x, y), " in str(caught.value)
    a, b = torch.randn(5, 2, 4, 4), torch.randn(5, 1, 4)
    torch.testing.assert_close(op(a, b), torch.stack([torch.stack([op(x, b[i, 0]) for x in rows]) for i, rows in enumerate(a)]))
    torch.testing.assert_close(op(a, b[2, 0]), torch.stack([torch.stack([op(x, b[2, 0]) for x in rows]) for rows in a]))


def test_what_is_looked_up_brings_the_dimensions_of_a_call(own):
    """``t`` has a lower rank than ``W``, and its rows are those of the result."""
    embed = own("embed", "Func embed; In W, t; Var x, y; embed[x, y] = W[t[x], y];")
    table, places = torch.randn(10, 4), torch.randint(10, (2, 3, 5))
    assert torch.equal(embed(table, places), table[places])
    several = torch.randn(2, 1, 10, 4)
    assert torch.equal(embed(several, places), torch.stack([several[i, 0][places[i]] for i in range(2)]))
    bag = own("bag", "Func bag; In W, t, n; Var b, c; RVar s; bag[b, c] = rsum(where(s < n[b], W[t[b, s], c], 0), s);")
    assert bag(table, places, ones(2, 3, dtype=torch.int64)).shape == (2, 3, 4)
    with pytest.raises(ValueError, match=r"^bag: .*: n has leading dimensions that W, t lack; allowed: W \(..., _, c\), t \(..., b, s\), n \(b\) or \(..., b\)$"):
        bag(table, places[0], ones(3, 3, dtype=torch.int64))


def test_a_convolution_takes_many_signals(own):
    signal, kernel = torch.randn(3, 9), torch.randn(3, 4)
    op = own("convolved", "Func convolved; In A, w; Var s, c; RVar k; Extent s = A[0]; convolved[s, c] = rsum(A[s + k - 1] * w[k, c], k);")
    wanted = torch.nn.functional.conv1d(signal[:, None], kernel.T[:, None], padding=1).transpose(1, 2)
    torch.testing.assert_close(op(signal, kernel), wanted)


def test_products_broadcast_their_leading_dimensions():
    a, b, c = torch.randn(2, 1, 3, 4), torch.randn(5, 4, 6), torch.randn(6, 7)
    torch.testing.assert_close(dtkernels.ops.mmsigmoid(a, b), torch.sigmoid(a @ b))
    torch.testing.assert_close(dtkernels.ops.two_mm(a, b, c), a @ b @ c)
    torch.testing.assert_close(dtkernels.ops.two_mm(a[0, 0], b, c), a[0, 0] @ b @ c)
    y, down, up = torch.randn(2, 3, 8), torch.randn(2, 6, 4), torch.randn(8, 6)
    torch.testing.assert_close(dtkernels.ops.lora(y, a[:, 0], down, up, 0.5), y + 0.5 * (a[:, 0] @ down.mT) @ up.T)


# -- types ------------------------------------------------------------------------------------------------------------------

CALLS = {
    "softmax": ("x", [(3, 4)]),
    "relu": ("x", [(3, 4)]),
    "rmsnorm": ("x", [(3, 4), (4,)]),
    "layernorm": ("x", [(3, 4), (4,), (4,)]),
    "swiglu": ("gate", [(3, 4), (3, 4)]),
    "geglu": ("gate", [(3, 4), (3, 4)]),
    "two_mm": ("a", [(3, 4), (4, 5), (5, 6)]),
    "mmsigmoid": ("a", [(3, 4), (4, 5)]),
    "gate": ("x", [(3, 4), (5, 4)]),
    "lora": ("y", [(3, 6), (3, 4), (5, 4), (6, 5)]),
    "attention": ("q", [(1, 2, 3, 4)] * 3),
    "rope": ("q", [(1, 2, 3, 4), (1, 2, 3, 4), (3, 4), (3, 4)]),
    "cross_entropy": ("logits", [(3, 4), (3,)]),
}


def arguments(op: str, **kind) -> list[torch.Tensor]:
    tensors = [torch.randn(shape, **kind) for shape in CALLS[op][1]]
    return [tensors[0], torch.zeros(tensors[1].shape, dtype=torch.int64, device=tensors[1].device)] if op == "cross_entropy" else tensors


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([ones(2, 4), ones(3, 4)], layout=layout)


UNFIT = {
    "is None; allowed: a tensor": lambda x: None,
    "is a list; allowed: a tensor": lambda x: x.tolist(),
    "is a ndarray; allowed: a tensor": lambda x: x.numpy(),
    "is a nested tensor; allowed: a tensor with strides": lambda x: nested(torch.strided),
    "is a nested tensor; allowed: a tensor with strides ": lambda x: nested(torch.jagged),
    "is of layout torch.sparse_coo; allowed: a tensor with strides": lambda x: x.to_sparse(),
    "is torch.complex64; allowed: floating point, bool, uint8, int8, int32, int64": lambda x: x.to(torch.complex64),
    "is torch.int16; allowed: floating point, bool, uint8, int8, int32, int64": lambda x: x.to(torch.int16),
}


@pytest.mark.filterwarnings("ignore:.*nested.*")
@pytest.mark.parametrize("said", UNFIT)
@pytest.mark.parametrize("op", CALLS)
def test_what_an_op_does_not_take_is_named(op, said):
    given = arguments(op)
    given[0] = UNFIT[said](given[0])
    with pytest.raises(TypeError) as caught:
        getattr(dtkernels.ops, op)(*given)
    assert str(caught.value) == f"{op}: {CALLS[op][0]} {said.strip()}"


@pytest.mark.parametrize("op", [op for op in CALLS if len(CALLS[op][1]) > 1])
def test_tensors_are_on_one_device(op):
    given = arguments(op)
    given[0] = given[0].to("meta")
    with pytest.raises(ValueError, match=rf"^{op}: \w+ is on cpu, {CALLS[op][0]} is on meta; allowed: one device$"):
        getattr(dtkernels.ops, op)(*given)


def test_dtypes_that_no_kernel_reads_are_named():
    allowed = "torch.float8_e4m3fn, torch.float8_e5m2, or dtypes of 16 bits and more"
    with pytest.raises(TypeError, match=f"^rmsnorm: x is torch.float8_e4m3fnuz; allowed: {allowed}$"):
        dtkernels.ops.rmsnorm(ones(3, 4).to(torch.float8_e4m3fnuz), ones(4))


def test_an_op_of_ones_own_says_what_is_missing(own):
    op = own("scaled", "Func scaled; In A, w; SIn s; Var x, y; scaled[x, y] = A[x, y] * w[y] * s;")
    for call, said in (
        (lambda: op(ones(3, 4)), "w is missing; allowed: a tensor"),
        (lambda: op(ones(3, 4), None, 1.0), "w is None; allowed: a tensor"),
        (lambda: op(ones(3, 4), ones(4)), "s is missing; allowed: a number or a one-element tensor"),
        (lambda: op(ones(3, 4), ones(4), None), "s is None; allowed: a number or a one-element tensor"),
        (lambda: op(ones(3, 4), ones(4), 1j), "s is a complex; allowed: a number or a one-element tensor"),
        (lambda: op(ones(3, 4), ones(4), ones(1, dtype=torch.complex64)), "s is torch.complex64; allowed: a real number of 16 bits or more"),
    ):
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value) == f"scaled: {said}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("op", CALLS)
def test_meta_tensors_give_meta_results(op, dtype):
    """Of the shape and dtype that tensors with data give, forward and backward."""
    function, found = getattr(dtkernels.ops, op), {}
    for device in ("cpu", "meta"):
        given = [t.requires_grad_() if t.is_floating_point() else t for t in arguments(op, device=device, dtype=dtype)]
        results = function(*given)
        results = results if isinstance(results, tuple) else (results,)
        grads = torch.autograd.grad(results, [t for t in given if t.requires_grad], [torch.ones_like(r) for r in results])
        assert {t.device.type for t in (*results, *grads)} == {device}
        found[device] = [(t.shape, t.dtype) for t in (*results, *grads)]
    assert found["cpu"] == found["meta"]


@pytest.mark.parametrize("op", CALLS)
def test_torch_func(op):
    """Gradients are right; what else it offers is refused in one line."""
    function, given = getattr(dtkernels.ops, op), arguments(op)

    def total(x):
        results = function(x, *given[1:])
        return sum(r.square().sum() for r in (results if isinstance(results, tuple) else (results,)))

    leaf = given[0].clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(total)(given[0]), torch.autograd.grad(total(leaf), leaf)[0])
    with pytest.raises(NotImplementedError, match=f"^{op}: torch.vmap is not supported; allowed: leading dimensions, which the op maps over by itself$"):
        torch.vmap(function)(*(t[None] for t in given))
    with pytest.raises(NotImplementedError, match=f"^{op}: forward-mode differentiation is not supported; allowed: backward$"):
        torch.func.jvp(total, (given[0],), (given[0],))


@pytest.mark.kernels
def test_a_compiled_program_names_what_it_does_not_take(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    program = dtkernels.compile("Func f; In A, w; Var x, y; f[x, y] = A[x, y] * w[y];")
    for a, said in (
        (None, "is None; allowed: a tensor"),
        (nested(torch.strided), "is a nested tensor; allowed: a tensor with strides"),
        (ones(3, 4).to_sparse(), "is of layout torch.sparse_coo; allowed: a tensor with strides"),
        (ones(3, 4, device="meta"), "is on the meta device; allowed: a tensor with data, or an op, dtkernels.register(...)"),
    ):
        with pytest.raises(TypeError) as caught:
            program(a, ones(4))
        assert str(caught.value) == f"f: A {said}"


# -- what there is ------------------------------------------------------------------------------------------------------------


def test_names_are_listed():
    assert set(dtkernels.__all__) <= set(dir(dtkernels)) and not {"importlib", "sys", "Path", "annotations"} & set(dir(dtkernels))
    assert {*CALLS, "register"} <= set(dir(dtkernels.ops)) and not {"registered", "annotations"} & set(dir(dtkernels.ops))
    for name in set(dtkernels.__all__) - {"apply_to", "patched"}:  # these two need transformers
        getattr(dtkernels, name)


def test_an_op_of_ones_own_is_listed_and_describes_itself(own):
    text = "Func looked_up; In A, t, z; SIn eps; Var x, y; Param shifted = false, times = 2; looked_up[x, y] = times * A[t[x], y] + eps + where(shifted, z[y], 0);"
    op = own("looked_up", text, "parameters: {shifted: z is added, times: a factor}\ndtypes: [bf16]\n")
    assert "looked_up" in dir(dtkernels.ops)
    signature = inspect.signature(dtkernels.ops.looked_up)
    assert list(signature.parameters) == ["A", "t", "z", "eps", "shifted", "times"]
    assert signature.parameters["z"].default is None and signature.parameters["times"].default == 2
    assert str(signature).startswith("(A: torch.Tensor, t: torch.Tensor, z: torch.Tensor | None = None, ")
    signature.bind(ones(2, 3), torch.zeros(2, dtype=torch.int64), eps=1.0, times=3)
    said = pydoc.plain(pydoc.render_doc(op))
    for line in (
        "looked_up(A, t, z=None, eps=None, *, shifted=False, times=2)",
        "The looked_up of a test.",
        "A: (..., _, y)",
        "t: (..., x), integers",
        "z: (y) or (..., y), or None where the parameters need none",
        "eps: a number or a one-element tensor\n",
        "shifted: True or False, False unless given; z is added",
        "times: an integer, 2 unless given; a factor",
        "Returns (..., x, y). It is tuned for bfloat16.",
        "looked_up[x, y] = times * A[t[x], y] + eps + where(shifted, z[y], 0);",
    ):
        assert line in said, line
