# ruff: noqa: E501 (programs read best on one line)
"""Integers in the language: elements of an input in an index, inputs that equal a label, remainders; and their gradients."""

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from oracle import check

import dtkernels

LINE = ["", "f.block(x:4); f.tensorize(x:4);", "f.tensorize(x:0);"]
PLANE = ["", "f.block(x:4, y:4); f.tensorize(x:4, y:4);", "f.block(x:2); f.tensorize(y:0);", "f.tensorize(x:0, y:0);"]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("schedule", PLANE)
def test_rows_picked_by_an_input(schedule, dtype):
    """An embedding; what lies outside reads 0."""
    t = torch.tensor([3, 0, 4, 4, 2, 99, 1], dtype=dtype)
    check(f"Func f; In W, t; Var x, y; f[x, y] = 2 * W[t[x], y]; {schedule}", numbers(5, 6), t)


@pytest.mark.parametrize("schedule", LINE)
def test_one_element_of_each_row(schedule):
    t = torch.tensor([3, 0, -1, 4, 5, -100, 2])
    check(f"Func f; In A, t; Var x; RVar y; f[x] = A[x, t[x]] - rsum(A[x, y], y); {schedule}", numbers(7, 5), t)


@pytest.mark.parametrize("schedule", LINE)
def test_arithmetic_around_an_element_and_an_element_of_an_element(schedule):
    s, t = torch.tensor([1, 0, 2]), torch.tensor([2, 2, 0, 1, 9])
    check(f"Func f; In A, s, t; Var x; f[x] = A[2 * t[x] + 1]  + 10 * A[s[t[x]] + x]; {schedule}", numbers(7), s, t)


@pytest.mark.parametrize("schedule", ["f.block(x:2); f.tensorize(x:2, k:0);", "f.block(x:2); f.tensorize(x:2, k:2);", ""])
def test_an_index_that_a_reduction_runs_over(schedule):
    """A sum over neighbours that an input lists."""
    n = torch.tensor([[0, 1, 2], [4, 4, -1], [3, 0, 77]])
    check(f"Func f; In A, n, w; Var x; RVar k; f[x] = rsum(w[k] * A[n[x, k]], k); {schedule}", numbers(5), n, numbers(3))


@pytest.mark.parametrize("schedule", PLANE)
def test_a_label_equals_an_element(schedule):
    """One-hot rows; what is an index too is compared as the integer it is, where float32 would not tell two of them apart."""
    t = torch.tensor([3, 0, -1, 5, 9])
    check(f"Func f; In A, t; Var x, y; f[x, y] = A[x, y] - where(y == t[x], 1, 0); {schedule}", numbers(5, 6), t)
    base = 2**24
    large = f"Func f; In A, t; Var x, y; f[x, y] = A[x, y] + A[x, t[x]] + where(y + {base} == t[x], 1, 0); {schedule}"
    check(large, numbers(3, 4), torch.tensor([base, base + 1, base + 3]))


@pytest.mark.parametrize("schedule", LINE)
@pytest.mark.parametrize("index", ["(x + 3) % len(x)", "(x - 2) % len(x)", "(-x) % 5", "x % 3", "(x * x) % 7 / 2", "(x + len(x) / 2) % len(x)",
                                   "(x - len(x) / 2) % len(x)", "(len(x) / 3 - x) % len(x)", "(x + x) % len(x)", "(x + len(x)) % len(x)", "(2 * x - len(x)) % len(x)"])  # fmt: skip
def test_remainder_in_an_index(schedule, index):
    """It takes the sign of the divisor, as Python's does."""
    check(f"Func f; In A; Var x; f[x] = A[x] + 10 * A[{index}]; {schedule}", numbers(7))


@pytest.mark.parametrize("schedule", LINE)
@pytest.mark.parametrize("by", [1, 2, 3])
def test_an_index_beside_a_part_of_an_extent(schedule, by):
    """Nowhere rounded, whether the part is whole or not."""
    for size in (6, 7, 8):
        for op in ("<", "<=", ">", ">="):
            check(f"Func f; In A; Var x; f[x] = A[x] * where(x {op} len(x) / {by}, 2, 3) + where(len(x) / {by} {op} x + 1, 5, 7); {schedule}", numbers(size))


@pytest.mark.parametrize("schedule", LINE)
def test_remainder_as_a_value(schedule):
    check(f"Func f; In A; Var x; f[x] = A[x] + where(x % 2 == 0, -A[x + 1], A[x - 1]) + (x - 4) % 3; {schedule}", numbers(9))
    t = torch.tensor([-7, 7, 0, 4, 123456789])
    check(f"Func f; In A, t; Var x; f[x] = A[x] * where(t[x] % 4 == 1, 1, 0) + A[t[x] % len(x)]; {schedule}", numbers(5), t)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16], ids=str)
def test_an_index_of_other_dtype_is_refused(dtype):
    kernel = dtkernels.compile("Func f; In W, t; Var x, y; f[x, y] = W[t[x], y];")
    with pytest.raises(TypeError, match=f"f: t is {dtype}; allowed: int32, int64, int8 or uint8, as it stands in an index"):
        kernel(W=numbers(3, 4), t=torch.zeros(5, dtype=dtype))


# -- as registered ops, with their gradients --------------------------------------------------------------------------

TURNED = "A[(x + len(x) / 2) % len(x)]"
HALVES = f"Func g, f; In A, t; Var x; g[x] = where(x < len(x) / 2, -{TURNED}, {TURNED}); f[x] = A[x] * A[x] + g[x] * g[x] * g[x]"
GRADIENTS = {
    "embedding": ("Func f; In W, t; Var x, y; f[x, y] = W[t[x], y];", lambda w, t: torch.nn.functional.embedding(t, w), (5, 6), [3, 0, 4, 4, 2, 0, 1]),
    "picked": ("Func f; In A, t; Var x; RVar y; f[x] = A[x, t[x]] * rsum(A[x, y], y);", lambda a, t: a.gather(1, t[:, None])[:, 0] * a.sum(1), (4, 5), [3, 0, 4, 2]),
    "one_hot": ("Func f; In A, t; Var x; RVar y; f[x] = rsum(where(y == t[x], A[x, y], 0), y);", lambda a, t: a.gather(1, t[:, None])[:, 0], (4, 5), [3, 0, 4, 2]),
    "rolled": ("Func f; In A, t; Var x; f[x] = A[(x + 3) % len(x)] * A[x] + 0 * t[x];", lambda a, t: a.roll(-3) * a, (7,), [0] * 7),
    "rolled_back": ("Func f; In A, t; Var x; f[x] = A[(x - 2) % len(x)] + 0 * t[x];", lambda a, t: a.roll(2), (7,), [0] * 7),
    "halves": (f"{HALVES} + 0 * t[x];", lambda a, t: a * a + torch.cat((-a[4:], a[:4])) ** 3, (8,), [0] * 8),
    "odd_halves": (f"{HALVES} + 0 * t[x];", lambda a, t: a * a + torch.cat((-a.roll(-3)[:4], a.roll(-3)[4:])) ** 3, (7,), [0] * 7),
    "repeated": ("Func f; In A, t; Var x; f[x] = A[x % 3] + 0 * t[x];", lambda a, t: a[torch.arange(7) % 3], (3,), [0] * 7),
    "pairs": ("Func f; In A, t; Var x; f[x] = where(x % 2 == 0, -A[x + 1], A[x - 1]) + 0 * t[x];", lambda a, t: torch.stack((-a[1::2], a[::2]), 1).flatten(), (8,), [0] * 8),
}  # fmt: skip


@pytest.mark.parametrize("reference", [False, True], ids=["kernel", "reference"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name, reference, tmp_path, monkeypatch):
    text, truth, shape, places = GRADIENTS[name]
    path = tmp_path / "spec.yaml"
    path.write_text(f"op: integers_{name}\ndoc: as in torch\nalgorithm: |\n  {text}\n")
    op = dtkernels.register(path)
    if reference:
        monkeypatch.delenv("TRITON_INTERPRET")
    a, t = numbers(*shape).requires_grad_(), torch.tensor(places)
    exact = a.detach().double().requires_grad_()
    got, want = op(a, t), truth(exact, t)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    adjoint = numbers(*got.shape, seed=1)
    (found,), (wanted,) = torch.autograd.grad(got, a, adjoint), torch.autograd.grad(want, exact, adjoint.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_what_goes_round_goes_back_without_a_sum():
    """The gradient of a rotation is the rotation back, not a sum over all places."""
    from dtkernels.algebra.autodiff.gradient import gradient
    from dtkernels.lang import parse

    found = gradient(parse("Func f; In A, B; Var x; f[x] = A[(x + 3) % len(x)] + B[x];").algorithm, ("f",), ("A",))
    assert "rsum" in str(found.backward["d_A"]), "A may be longer than f"
    found = gradient(parse("Func f; In A; Var x; f[x] = A[x] + A[(x + 3) % len(x)];").algorithm, ("f",), ("A",))
    assert str(found.backward["d_A"]) == "d_A[x] = d_f[x] + d_f[(x - 3) % len(x)];"


def test_a_choice_of_two_signs_goes_back_as_one():
    """What is read once forward is read once backward, and the text of it reads back."""
    from dtkernels.algebra.autodiff.gradient import gradient
    from dtkernels.lang import parse

    found = gradient(parse(f"Func f; In A; Var x; f[x] = A[x] + where(x < len(x) / 2, -{TURNED}, {TURNED});").algorithm, ("f",), ("A",))
    back = "d_f[(x - len(x) / 2) % len(x)]"
    assert str(found.backward["d_A"]) == f"d_A[x] = d_f[x] + where((x - floor(len(x) / 2)) % len(x) < len(x) / 2, -{back}, {back});"
    assert parse(str(found.backward)).algorithm == found.backward


def test_batches_join_the_rows_that_are_picked_from(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(
        "op: integers_pick\ndoc: one a row\nalgorithm: |\n  Func f; In A, t; Var x; RVar y; f[x] = A[x, t[x]] / rsum(A[x, y], y);\n"
    )
    op = dtkernels.register(path)
    a, t = numbers(2, 3, 5), torch.tensor([[0, 4, 2], [1, 1, 3]])
    torch.testing.assert_close(op(a, t), a.gather(2, t[..., None])[..., 0] / a.sum(2))


def test_cpu_tensors_without_the_interpreter_are_one_clear_line(monkeypatch):
    kernel = dtkernels.compile("Func f; In A; Var x; f[x] = 2 * A[x];")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="f: its tensors are on the CPU; allowed: a GPU, or TRITON_INTERPRET=1 set before Python starts"):
        kernel(A=numbers(3))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_numbers_made_of_integers_alone_are_float32(dtype):
    n = torch.arange(5).to(dtype)
    half = dtkernels.compile("Func f; In N; Var x; f[x] = N[x] / 2;")(n)
    mean = dtkernels.compile("Func f; In N; RVar x; f[] = rmean(N[x], x);")(n)
    assert half.dtype == mean.dtype == torch.float32
    assert half.tolist() == (n.double() / 2).tolist() and mean.item() == pytest.approx(n.double().mean().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("place", ["s.fuse_at(f, l);", "s.block(m:4, l:256); s.tensorize(m:4, l:256);"])
def test_whole_numbers_beside_a_product_keep_their_value(place, dtype):
    """A length that 16 bits round: 1021 is 1020 in bfloat16, and 2051 is 2052 in float16. The last two that count are told apart."""
    length = {torch.bfloat16: 1021, torch.float16: 2051}[dtype]
    program = f"Func s, f; In A, N, B; Var m, n; RVar l; s[m, l] = where(l < N[m], A[m, l], 0); f[m, n] = rdot(s[m, l], B[l, n], l); f.block(m:16); f.tensorize(m:16, n:0, l:64); {place}"
    b = torch.zeros(2100, 16, dtype=dtype)
    b[length - 2 : length + 2] = torch.tensor([1, 2, 4, 8], dtype=dtype)[:, None]
    f = dtkernels.compile(program)(A=torch.ones(3, 2100, dtype=dtype), N=torch.tensor([length, length - 1, length + 1]), B=b)
    assert f.dtype == dtype and f[:, 0].tolist() == [3, 1, 7] and (f == f[:, :1]).all()


INTEGERS_ALONE = {
    "bits": ("f[i, j] = (X[i, j] >> 1) & 85;", lambda X: (X >> 1) & 85),
    "sums": ("f[i] = rsum(X[i, j], j);", lambda X: X.sum(1)),
    "places": ("f[i] = rargmax(X[i, j], j);", lambda X: X.argmax(1)),
    "conditions": ("f[i, j] = X[i, j] > 500;", lambda X: X > 500),
    "casts": ("f[i, j] = cast(X[i, j] * 0.5, fp16);", lambda X: X * 0.5),
    "products": ("f[i, k] = rdot(X[i, j], Y[k, j], j);", lambda X: X.double() @ X.double().T),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", INTEGERS_ALONE)
def test_an_op_of_integers_alone_runs_kernels(name, dtype, tmp_path):
    body, truth = INTEGERS_ALONE[name]
    op = f"alone_{name}_{str(dtype).removeprefix('torch.')}"
    labels = "i, k; RVar j" if "k]" in body else "i; RVar j" if body.startswith("f[i] ") else "i, j"
    path = tmp_path / "op.yaml"
    path.write_text(f"op: {op}\ndoc: as in torch\nalgorithm: |\n  Func {op}; In X{', Y' if 'Y[' in body else ''}; Var {labels}; {body.replace('f[', f'{op}[', 1)}\n")
    X = torch.randint(0, 1000 if dtype != torch.uint8 else 256, (5, 70), generator=torch.Generator().manual_seed(0)).to(dtype)
    got = dtkernels.register(path)(X=X, **({"Y": X} if "Y[" in body else {}))
    torch.testing.assert_close(got.double(), truth(X.long()).double(), rtol=1e-6 if name != "casts" else 2**-11, atol=0)
    assert dtkernels.paths()[op]["interpreter"] == 1


def test_an_integer_read_outside_its_extent_is_an_integer():
    text = "Func i, f; In A, W; Var x; i[x] = cast(floor(A[x]), int64); f[x] = W[i[x - 1] {more}] + 0 * A[x]; i.fuse_at(f, x);"
    a, w = torch.tensor([1.5, 3.2, 0.1, 5.9]), torch.arange(6.0)
    before = torch.tensor([0, 1, 3, 0])  # outside it reads 0
    for more, place in (("", before), ("& 1", before & 1), (">> 1", before >> 1)):
        assert torch.equal(dtkernels.compile(text.format(more=more))(a, w), w[place])


@pytest.mark.parametrize("text", ["f[x] = A[x] + (x + c) // 0;", "f[x] = A[x] + 1 // c;", "f[x] = A[x] + x % c;", "f[x] = A[x / c] + A[x];"])
def test_an_integer_is_not_divided_by_zero(text):
    with pytest.raises(dtkernels.DTError, match="an integer is divided by 0"):
        dtkernels.compile(f"Func f; In A; Param c = 0; Var x; {text}")


def test_integers_that_no_float_holds():
    program = dtkernels.compile("Func f; In A; SIn s; Var x; f[x] = s * A[x];")
    with pytest.raises(ValueError, match="^f: s is an integer of 1329 bits; allowed: numbers that a float holds$"):
        program(A=torch.ones(3), s=10**400)
    with pytest.raises(ValueError, match="^dyt: alpha is an integer of 1329 bits; allowed: numbers that a float holds$"):
        dtkernels.ops.dyt(torch.ones(2, 3), 10**400, torch.ones(3), torch.ones(3))
    with pytest.raises(TypeError, match="^params is list; allowed: a dict of names and numbers, or None$"):
        dtkernels.compile("Func f; In A; Var x; f[x] = A[x];", params=[1])


def test_remainders_of_a_scalar():
    program = dtkernels.compile("Func f; In A; SIn s; Var x; f[x] = A[x] + (x - 3) % s;")
    for number in (3, torch.tensor(3)):
        assert torch.equal(program(torch.zeros(5), number), torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0]))
    with pytest.raises(TypeError, match="^f: s is 2.5; allowed: an integer"):
        program(torch.zeros(5), 2.5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_a_remainder_of_an_input_is_an_exact_integer_and_may_be_an_index(dtype):
    t, w = torch.tensor([7, -3, 1000003, 50, -11], dtype=dtype), numbers(7, 3)
    text = "Func h, f; In t, W; Var x, y, r; Extent r = W[0]; h[x] = (t[x] * 2654435761 + 7) % len(r); f[x, y] = W[h[x], y]; h.compile(); f.compile();"
    made = dtkernels.compile(text + "h.tensorize(x:0); f.tensorize(y:0);")
    places, rows, want = made.h(t=t, W=w), made.f(t=t, W=w), (t.long() * 2654435761 + 7) % 7
    assert places.dtype == torch.int64 and torch.equal(places, want) and torch.equal(rows, w[want])


@pytest.mark.parametrize("operator", ["%", "^"])
def test_floats_beside_an_operator_on_integers_are_refused_with_what_to_write(operator):
    allowed = f"allowed: int32, int64, int8 or uint8, as {operator} is of integers in A[x] {operator} 2; of floats, pow(a, b) is a power"
    with pytest.raises(TypeError, match="^f: A is torch.float32; " + allowed.translate({ord(c): "\\" + c for c in "^[]()"})):
        dtkernels.compile(f"Func f; In A; Var x; f[x] = A[x] {operator} 2;")(A=numbers(3))
