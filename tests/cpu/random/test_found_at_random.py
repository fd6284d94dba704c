# ruff: noqa: E501 (programs read best on one line)
"""What tests/fuzz.py found, shortened: programs, and gradients of programs, that were wrong or ended in an error."""

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from oracle import check

from dtkernels.lang import parse
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator


def op_of(text: str) -> Operator:
    return Operator(Spec("found", "Found at random.", parse(text)))


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 0.5


def test_a_sum_has_another_axis_than_the_label_it_is_computed_for():
    """The ``z`` of ``d_b`` is the ``k`` of ``d_A``, whose whole extent the sum over ``k`` took for its own."""
    op = op_of("""Func b, f; In A, B, C; Var x, y, z, k; b[z] = exp(A[z]) + B[z]; f[x, y, z, k] = b[z] + A[k] + C[x, y];""")
    a, b, c = rand(3).requires_grad_(), rand(3, seed=1), rand(3, 3, seed=2)
    adjoint = rand(3, 3, 3, 3, seed=3)
    (got,) = torch.autograd.grad(op(a, b, c), a, adjoint)
    exact = a.detach().double().requires_grad_()
    want = (exact.exp() + b)[:, None] + exact + c[:, :, None, None]
    torch.testing.assert_close(got.double(), torch.autograd.grad(want, exact, adjoint.double())[0], rtol=1e-5, atol=1e-5)


def test_gradient_through_an_index_times_a_scalar():
    op = op_of("Func f; In A, B, T; SIn o; Var x; f[x] = A[x * o] * B[x] + A[T[x] * o];")
    a, b, t = rand(9).requires_grad_(), rand(5, seed=1), torch.tensor([0, 3, 1, 4, 7])
    (got,) = torch.autograd.grad(op(a, b, t, 2).sum(), a)
    want = torch.zeros(9)
    for x in range(5):
        want[2 * x] += b[x]
        if 2 * t[x] < 9:
            want[2 * t[x]] += 1
    torch.testing.assert_close(got, want)


def test_a_gradient_that_reads_nothing_that_arrives_is_zero():
    for value in ("floor(A[x])", "floor(minimum(A[x], B[x]) * 3)", "rsum(exp(A[y]) * 0, y) / rsum(exp(A[y]), y)"):
        op = op_of(f"Func f; In A, B; Var x; {'RVar y; ' * ('y' in value)}f[x] = {value} + B[x];")
        a, b = rand(5).requires_grad_(), rand(5, seed=1)
        (got,) = torch.autograd.grad(op(a, b).sum(), a, allow_unused=True)
        assert got is None or not got.any()


@pytest.mark.parametrize("beside", ["rsum(C[x, l], l)", "rmax(C[x, l] * A[x, l], l)"])
def test_the_default_schedule_takes_a_sum_beside_a_product(beside):
    op = op_of(f"Func f; In A, B, C; Var x, y; RVar k, l; f[x, y] = rdot(A[x, k], B[k, y], k) + {beside};")
    a, b, c = rand(20, 40), rand(40, 17, seed=1), rand(20, 40, seed=2)
    extra = c.sum(1) if "rsum" in beside else (c * a).amax(1)
    torch.testing.assert_close(op(a, b, c), a @ b + extra[:, None], rtol=1e-4, atol=1e-4)


def test_parts_are_made_from_what_another_kernel_makes():
    check("""Func g, f, h; In A, B; SIn s; Var x; RVar y, k; g[x] = rmin(A[y, x] * rsum(B[k] * 2, k), y); f[y] = rsum(A[y, x] * len(y), x);
    h[x] = g[x] * s; f.block(y:16); f.tensorize(y:16, x:16); g.block(x:16); g.tensorize(x:16); h.block(x:16); h.tensorize(x:16);
    g.parts_at(f, y); f.compile(); h.compile();""", rand(24, 7), rand(24, seed=1), 0.75)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_the_reference_reads_indices_of_any_integers(dtype):
    """torch takes a uint8 index for a mask, and 8 bits wrap around. An empty input has the reference run."""
    op = op_of("Func f, g; In A, E, T; Var x; RVar k; f[x] = A[T[x] * 3 - 1]; g[x] = A[T[x]] + rsum(E[x, k], k); f.compile(); g.compile();")
    a, t = rand(300), torch.tensor([0, 100, 99, 1], dtype=dtype)
    f, g = op(a, torch.zeros(4, 0), t)
    at = t.long() * 3 - 1
    torch.testing.assert_close(f, torch.where(at >= 0, a[at.clamp(0)], 0.0))
    torch.testing.assert_close(g, a[t.long()])


def test_a_label_keeps_its_extent_where_another_takes_the_access_that_told_it():
    """The gradient's form: ``rsum(B[x], x)`` beside ``B[y]`` runs over ``y``, and nothing shows the extent of ``x`` to the other sum."""
    op = op_of("""Func g, f; In A, B; Var y; RVar x, z; g[y, z] = rmean(A[y, z] * (x % 2), x); f[y] = rmax(g[y, z] * rsum(B[y] * B[x], x), z);""")
    a, b = rand(8, 10).requires_grad_(), rand(8, seed=1)
    out = op(a, b)
    want = (a * (torch.arange(8) % 2).float().mean())[:, :] * (b * b.sum())[:, None]
    torch.testing.assert_close(out, want.amax(1))
    torch.testing.assert_close(*(torch.autograd.grad(f.sum(), a)[0] for f in (out, want.amax(1))))


@pytest.mark.parametrize("g", ["rsum(A[x, j] * B[k, j], j)", "rmax(A[j, k] + B[x, j], j)"])
@pytest.mark.parametrize("f", ["rsum(g[x, k], k) + rdot(A[x, k], C[k, y], k)", "rdot(A[x, k], C[k, y], k) + rsum(g[x, k], k)"])
def test_a_load_of_an_inner_loop_has_a_pointer_of_its_own(f, g):
    """Both loops name their load ``A``; the offsets that the outer loop computes ahead are of its own load alone."""
    check(f"""Func g, f; In A, B, C; Var x, y; RVar k, j; g[x, k] = {g}; f[x, y] = {f};
    g.fuse_at(f, k); f.block(x:16, y:16); f.tensorize(x:16, y:16, k:16);""", rand(20, 20), rand(20, 20, seed=1), rand(20, 20, seed=2))  # fmt: skip


def test_an_input_that_only_tells_an_extent_keeps_its_dimensions():
    """``k`` is that of ``T``, so that nothing asks for the last dimension of ``A``, which was taken for a batch."""
    op = op_of("""Func f; In T, M, A, B, C; Var x, y, k; RVar z; Param flag = false;
    f[x, y, k] = where(M[T[k]] < A[x, y, k] and flag, rsum(B[z], z), rdot(B[z], C[z], z));""")
    b, c = rand(5), rand(5, seed=1)
    out = op(torch.zeros(4, dtype=torch.int32), rand(1), rand(2, 3, 4), b, c)
    torch.testing.assert_close(out, (b @ c).expand(2, 3, 4))


@pytest.mark.parametrize("value", ["exp2(x)", "exp(x - 3)", "exp2(x) + exp(A[x])"])
def test_a_share_of_exponentials_of_whole_numbers(value):
    check(f"Func f; In A; Var x; f[x] = {value} * A[x]; f.block(x:16); f.tensorize(x:16); f.approximate(exp:1/4);", rand(9))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("value", ["rmax(N[x, k], k)", "rmax(N[x, k] - 10, k)", "rsum(exp(N[x, k]) * A[x], k) / rsum(exp(N[x, k]), k)"])
def test_whole_numbers_are_never_infinite_outside_a_tile(value, dtype):
    """A maximum and a sum of exponentials load -inf past the extent, which no integer is."""
    n = (-torch.arange(55).reshape(5, 11) % 5 - (5 if dtype != torch.uint8 else 0)).to(dtype)
    n = torch.zeros_like(n) if dtype == torch.bool else n
    text = f"Func f; In N, A; Var x; RVar k; f[x] = {value} + A[x];"
    check(text + "f.block(x:4); f.tensorize(x:4, k:8);", n, rand(5))
    got, (want,) = op_of(text)(n, a := rand(5)), check(text + "f.tensorize(x:0, k:0);", n, a).values()
    torch.testing.assert_close(got, want)


def test_an_element_that_may_lie_outside_is_zero_there_and_not_taken_for_infinite():
    check("""Func f; In T, N, A, B; Var x, y; RVar z; f[x, y] = rsum(exp(N[T[x]] + A[z]) * B[y], z) / rsum(exp(N[T[x]] + A[z]), z);
    f.tensorize(x:2, y:16, z:8); f.block(x:2, y:16);""", torch.tensor([0, 2, 1]), rand(3), rand(3, seed=1), rand(17, seed=2))  # fmt: skip


@pytest.mark.parametrize("value", ["rdot(D[z], C[x / 2] + A[z], z)", "rsum(D[z] * C[x / 2], z)", "rmax(D[z] * C[x / 2], z)"])
def test_parts_of_a_split_sum_of_one_element_a_block_are_told_apart(value):
    inputs = "C, D, A, E" if "A[" in value else "C, D, E"
    text = f"Func f; In {inputs}; Var x; RVar z; f[x] = {value} + E[x]; f.block(x:2); f.tensorize(x:2); f.split(z:2);"
    tensors = {"C": rand(4), "D": rand(9, seed=1), "A": rand(9, seed=2), "E": rand(7, seed=3)}
    check(text, *(tensors[name] for name in inputs.split(", ")))


@pytest.mark.parametrize("tile", [2, 4, 16, 0])
def test_a_quotient_is_one_for_a_block_and_not_for_a_tile_of_a_sum(tile):
    check(f"""Func g, f; In A, C; Var x, y; g[y] = rsum(A[x] * C[x / 2], x); f[x, y] = A[x] * C[x / 2] + g[y] * A[y];
    g.fuse_at(f, y); f.block(x:2, y:4); f.tensorize(x:2, y:4); g.tensorize(x:{tile});""", rand(20), rand(10, seed=1))  # fmt: skip


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_what_depends_on_a_group_reads_a_dimension_of_any_length(rows):
    """``A`` may have fewer rows than there are groups, or more: the label of groups does not have its extent."""
    op = op_of("Func m, f; In A, B; Var x; RVar y; m[x] = rsum(exp(A[x / 2, y]), y); f[x] = log(1 + m[x]) + B[x];")
    a, b = rand(rows, 5), rand(9, seed=1)
    padded = torch.cat([a, torch.zeros(9, 5)]) if rows < 5 else a
    want = torch.log(1 + padded.exp().sum(1).repeat_interleave(2)[:9]) + b
    torch.testing.assert_close(op(a, b), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64])
def test_indices_of_any_width_bound_a_loop(dtype):
    """The gradient of what an index picks loops from its smallest to its largest: neither 1e9 nor 127 + 1 has 8 bits."""
    op = op_of("Func f; In A, T, B; Var x; RVar y; f[x] = rsum(A[T[x], y] * B[x, y], y);")
    a, t, b = rand(128, 3).requires_grad_(), torch.tensor([127, 3, 5, 0, 127], dtype=dtype), rand(5, 3, seed=1)
    (got,) = torch.autograd.grad(op(a, t, b).sum(), a)
    torch.testing.assert_close(got, torch.zeros(128, 3).index_add(0, t.long(), b))


def test_a_volume_with_an_empty_dimension_is_nothing():
    op = op_of("Func f; In A, B; Var x; RVar y, z, k, l; f[x] = rsum(A[x, y, z, k, l] * B[y, z, k, l], y, z, k, l) + B[0, 0, 0, x];")
    a, b = rand(3, 2, 2, 0, 3), rand(2, 2, 0, 3)
    assert not op(a, b).any()


def test_gradients_of_a_sum_that_is_held_whole_have_a_schedule():
    """The rule for rows that are stored while they are reduced named the stages of a loop that is none."""
    op = op_of("Func g, f; In A, B, C, D; Var y, k; RVar x, z; g[k] = rdot(A[x], B[x], x) * C[k]; f[y] = g[y - 2] + rsum(exp(g[y] + A[z]) * D[y, z], z) / rsum(exp(g[y] + A[z]), z);")
    leaves = [rand(*shape, seed=i).requires_grad_() for i, shape in enumerate([(4,), (4,), (4,), (4, 4)])]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    g = (exact[0] * exact[1]).sum() * exact[2]
    want = torch.cat([g.new_zeros(2), g[:2]]) + (torch.softmax(g[:, None] + exact[0], 1) * exact[3]).sum(1)
    for got, right in zip(torch.autograd.grad(op(*leaves).sum(), leaves), torch.autograd.grad(want.sum(), exact)):
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-5)


def test_a_shared_sum_in_the_factors_of_another_is_computed_once():
    op = op_of("Func a, b, f; In A, B, C; Var y, z; RVar x, k; a[y] = rsum(exp(B[x] * A[y]), x); b[] = rsum(exp(C[k]), k); f[z, y] = tanh(clamp(rsum(exp(B[x] * A[y]) * 3, x) / a[y], b[], 1) + C[z]);")
    leaves = [rand(n, seed=i).requires_grad_() for i, n in enumerate((6, 4, 4))]
    torch.autograd.grad(op(*leaves).sum(), leaves)


def test_an_op_that_reads_no_tensor_with_its_parameters_says_so():
    spec = Spec("found", "Found at random.", parse("Func f; In A; SIn t; RVar z; Param flag = false; f[] = t - where(flag, ceil(t), rsum(A[z], z));"))
    with pytest.raises(ValueError, match="^found: reads no tensor with flag=True; allowed: parameters with which it reads one$"):
        Operator(spec)(torch.rand(3), 2.5, flag=True)


@pytest.mark.parametrize("number", ["0", "0.1", "-inf"])
def test_a_cast_of_a_number_is_rounded_and_is_no_integer(number):
    """In a kernel that makes parts of a sum, constants are worked out."""
    check(f"""Func c, g, m, f; In A, B, D; SIn s; Var x; RVar y; Extent x = 20; c[] = cast({number}, fp16); g[y] = exp(c[]) - A[y, y] * 3;
    m[] = rmax(g[y] * B[y], y) * (s - 2); f[x] = m[] + D[x]; c.fuse_at(g, y); g.fuse_at(m, y); m.fuse_at(f, x); f.tensorize(x:16, y:4); f.block(y:4);""",
          torch.rand(16, 16), torch.rand(16), torch.rand(20), 2.5)  # fmt: skip


def test_what_a_constant_choice_leaves_without_use_has_no_kernel():
    op = op_of("""Func g, f; In A, T, B, C; Var y, z, k, l; RVar x; Extent k = 2;
    g[y, l, z, k] = where(l < (y + 1) % 4, log(abs(rmin(T[x, y, l], x)) + 0.5), rsum(exp(A[l, k] * B[x]), x)); f[z] = g[0, 0, z, z - z] - C[z];""")
    a, t, b, c = torch.rand(3, 2), torch.rand(2, 4, 3), torch.rand(5), torch.rand(2)
    want = ((t[:, 0, 0].min(0).values.abs() + 0.5).log() - c)
    torch.testing.assert_close(op(a, t, b, c), want)


def test_the_order_of_programs_of_nothing():
    op = op_of("""Func s, e, d, f; In Q, K, V; Var h, m, n; RVar l, k; s[h, m, l] = rdot(Q[h, m, k], K[h, l, k], k); e[h, m, l] = exp(where(l <= m, s[h, m, l], -inf));
    d[h, m] = rsum(e[h, m, l], l); f[h, m, n] = rdot(e[h, m, l], V[h, l, n], l) / d[h, m];""")
    assert op(torch.rand(0, 3, 4), torch.rand(0, 5, 4), torch.rand(0, 5, 4)).shape == (0, 3, 4)
