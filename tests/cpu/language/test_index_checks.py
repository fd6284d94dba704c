# ruff: noqa: E501 (programs read best on one line)
"""Indices out of range: 0 from kernels; IndexError with the index, its bound and the place where checks are asked for."""

import os
import pickle
import subprocess
import sys

import pytest
import torch

import dtkernels
from dtkernels.lang import Program, Schedule, parse
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator

GATHER = "Func f; In W, t; Var x, y;\nf[x, y] = W[t[x], y];"
BAG = "Func f; In W, t; Var b, c; RVar s;\nf[b, c] = rsum(W[t[b, s], c], s);"
NLL = "Func d, f; In A, t; Var x; RVar y;\nd[x] = rsum(exp(A[x, y]), y);\nf[x] = log(d[x]) - A[x, t[x]];"
W, A = torch.arange(12.0).reshape(4, 3), torch.randn(3, 5)
index = torch.tensor


def checked(text: str, *args, **kwargs) -> torch.Tensor:
    return dtkernels.compile(text, name="t.dt", check_indices=True)(*args, **kwargs)


#: (program, arguments) -> what the error says
WRONG = {
    "a row that is not there": (GATHER, (W, index([3, 4, 1])), "f: t.dt:2:11: W[t[x], y]: index t[x] is 4 at x = 1; allowed along dimension 0 of W: 0 to 3"),
    "a negative index": (GATHER, (W, index([3, -1, 1])), "f: t.dt:2:11: W[t[x], y]: index t[x] is -1 at x = 1; allowed along dimension 0 of W: 0 to 3"),
    "one byte": (GATHER, (W, index([3, 200, 200], dtype=torch.uint8)), "f: t.dt:2:11: W[t[x], y]: index t[x] is 200 at x = 1; allowed along dimension 0 of W: 0 to 3; 2 such elements"),
    "in a sum": (BAG, (W, index([[0, 1], [2, 9]])), "f: t.dt:2:16: W[t[b, s], c]: index t[b, s] is 9 at b = 1, s = 1; allowed along dimension 0 of W: 0 to 3"),
    "a class that is not there": (NLL, (A, index([0, 5, -100])), "f: t.dt:3:20: A[x, t[x]]: index t[x] is 5 at x = 1; allowed along dimension 1 of A: 0 to 4; 2 such elements"),
    "shifted": ("Func f; In W, t; Var x;\nf[x] = W[t[x] + 1];", (W[:, 0], index([0, 3])), "f: t.dt:2:8: W[t[x] + 1]: index t[x] + 1 is 4 at x = 1; allowed along dimension 0 of W: 0 to 3"),
    "one byte shifted": ("Func f; In W, t; Var x;\nf[x] = W[t[x] - 1];", (W[:, 0], index([1, 0], dtype=torch.uint8)), "f: t.dt:2:8: W[t[x] - 1]: index t[x] - 1 is -1 at x = 1; allowed along dimension 0 of W: 0 to 3"),
    "an index of an index": ("Func f; In W, t, p; Var x;\nf[x] = W[t[p[x]]];", (W[:, 0], index([0, 3]), index([0, 2])), "f: t.dt:2:10: t[p[x]]: index p[x] is 2 at x = 1; allowed along dimension 0 of t: 0 to 1"),
    "a column by number": ("Func f; In W; SIn c; Var x;\nf[x] = W[x, c];", (W, 3), "f: t.dt:2:8: W[x, c]: index c is 3; allowed along dimension 1 of W: 0 to 2"),
    "a constant column": ("Func f; In W; Var x;\nf[x] = W[x, 3];", (W,), "f: t.dt:2:8: W[x, 3]: index 3 is 3; allowed along dimension 1 of W: 0 to 2"),
    "of a Func": ("Func g, f; In A, t; Var x, y;\ng[y] = A[y] * 2;\nf[x] = g[t[x]];", (A[0], index([5])), "f: t.dt:3:8: g[t[x]]: index t[x] is 5 at x = 0; allowed along dimension 0 of g: 0 to 4"),
    "of an empty tensor": ("Func f; In W, t; Var x;\nf[x] = W[t[x]];", (W[:0, 0], index([0])), "f: t.dt:2:8: W[t[x]]: index t[x] is 0 at x = 0; allowed along dimension 0 of W: none, it is empty"),
    "chosen by where": ("Func f; In W, t; Var x;\nf[x] = where(t[x] >= 0, W[t[x]], 0);", (W[:, 0], index([-7, 8])), "f: t.dt:2:25: W[t[x]]: index t[x] is 8 at x = 1; allowed along dimension 0 of W: 0 to 3"),
    "the other side of where": ("Func f; In W, t; Var x;\nf[x] = where(t[x] >= 0, 0, W[t[x]]);", (W[:, 0], index([-7, 8])), "f: t.dt:2:28: W[t[x]]: index t[x] is -7 at x = 0; allowed along dimension 0 of W: 0 to 3"),
    "in a condition": ("Func f; In W, t; Var x;\nf[x] = where(W[t[x]] > 0, 1, t[x]);", (W[:, 0], index([4])), "f: t.dt:2:14: W[t[x]]: index t[x] is 4 at x = 0; allowed along dimension 0 of W: 0 to 3"),
    "through a Func that is chosen": ("Func g, f; In W, t; Var x;\ng[x] = W[t[x]];\nf[x] = where(t[x] < 9, g[x], 0);", (W[:, 0], index([9, 4])), "f: t.dt:2:8: W[t[x]]: index t[x] is 4 at x = 1; allowed along dimension 0 of W: 0 to 3"),
    "through a Func that is gathered": ("Func g, f; In W, t, p; Var x, y;\ng[y] = W[t[y]];\nf[x] = g[p[x]];", (W[:, 0], index([9, 4]), index([1])), "f: t.dt:2:8: W[t[y]]: index t[y] is 4 at y = 1; allowed along dimension 0 of W: 0 to 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_index_out_of_range_is_named(name):
    text, args, said = WRONG[name]
    with pytest.raises(IndexError) as error:
        checked(text, *args)
    assert str(error.value) == said
    dtkernels.compile(text)(*args)  # unchecked: 0


RIGHT = {
    "in range": (GATHER, (W, index([3, 0]))),
    "labels that are shifted": ("Func f; In A; Var x;\nf[x] = A[x] - A[x - 1] + A[x + len(x)];", (A[0],)),
    "a shift by a number": ("Func f; In A; SIn o; Var x;\nf[x] = A[x] - A[x - o];", (A[0], 3)),
    "not chosen": ("Func f; In W, t; Var x;\nf[x] = where(t[x] >= 0 and t[x] < 4, W[t[x]], -1);", (W[:, 0], index([-7, 8, 2]))),
    "not chosen further out": ("Func g, f; In W, t; Var x;\ng[x] = W[t[x]];\nf[x] = where(t[x] == -100, 0, -g[x]);", (W[:, 0], index([-100, 2]))),
    "not gathered further out": ("Func g, f; In W, t, p; Var x, y;\ng[y] = W[t[y]] * 2;\nf[x] = g[p[x]];", (W[:, 0], index([9, 3]), index([1, 1]))),
    "after and": ("Func f; In W, t; Var x;\nf[x] = where(t[x] < 4 and W[t[x]] > 0, 1, t[x]);", (W[:, 0], index([8, 2]))),
    "after or": ("Func f; In W, t; Var x;\nf[x] = where(t[x] > 3 or W[t[x]] > 0, 1, t[x]);", (W[:, 0], index([8, 2]))),
    "terms of a sum that are left out": ("Func f; In W, t, n; Var b; RVar s;\nf[b] = rsum(where(s < n[b], W[t[b, s]], 0), s);", (W[:, 0], index([[1, 9], [2, 3]]), index([1, 2]))),
    "of no elements": (GATHER, (W, index([], dtype=torch.int64))),
    "labels under one name": ("Func f; In W, t; Var x;\nf[x] = where(t[x] < 0, 0, rsum(W[t[x]] * W[x], x));".replace("t[x] < 0", "W[x] < 0"), (W[:, 0], index([0, 1, 2, 3]))),
    "mean and reshape": ("Func f; In W, t; Var x; RVar y;\nf[x] = reshape(rmean(where(t[x] < 4, W[t[x], y], 0), y), x, 1);", (W, index([8, 2]))),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_not_asked_for_or_by_intention_is_not_reported(name):
    text, args = RIGHT[name]
    assert torch.equal(checked(text, *args), dtkernels.compile(text)(*args))


def test_an_output_of_several_is_checked_by_itself():
    text = "Func f, g; In W, t; Var x, y;\nf[x] = W[t[x]]; g[y] = W[y] * 2;\nf.compile(); g.compile();"
    program = dtkernels.compile(text, check_indices=True)
    assert program.g(W=W[:, 0]).tolist() == [0.0, 6.0, 12.0, 18.0]
    with pytest.raises(IndexError, match="index t\\[x\\] is 4"):
        program.f(W=W[:, 0], t=index([4]))


def test_a_copy_checks_too():
    program = pickle.loads(pickle.dumps(dtkernels.compile(GATHER, check_indices=True)))
    with pytest.raises(IndexError):
        program(W, index([4]))


def test_wrong_arguments_are_refused_as_ever():
    with pytest.raises(TypeError):
        checked(GATHER, W)
    with pytest.raises(ValueError):
        checked(GATHER, W[0], index([1]))


@pytest.fixture
def nll(tmp_path, monkeypatch):
    monkeypatch.setenv("DTKERNELS_CHECK", "1")
    path = tmp_path / "nll.yaml"
    path.write_text("op: own_nll\ndoc: d\nalgorithm: |\n  Func total, own_nll; In A, t; Var x; RVar y;\n  total[x] = rsum(exp(A[x, y]), y);\n  own_nll[x] = log(total[x]) - A[x, t[x]];\n")
    return dtkernels.register(path)


def test_a_registered_op_is_checked(nll):
    said = r"own_nll: .*nll.yaml:6:32: A\[.*, t\[.*\]\]: index .* is 5 at .*= 1; allowed along dimension 1 of A: 0 to 4$"
    with pytest.raises(IndexError, match=said):
        nll(A, index([0, 5, 2]))
    with pytest.raises(IndexError, match=said):
        nll(A.clone().requires_grad_(), index([0, 5, 2]))
    with pytest.raises(IndexError, match="index .* is 5"):
        nll(A.expand(2, 3, 5), index([[0, 1, 2], [3, 4, 5]]))
    nll(A.clone().requires_grad_(), index([0, 4, 2])).sum().backward()


@pytest.mark.parametrize("compiled", ["kernel", "fuse"])
def test_an_op_in_a_compiled_function_is_checked_when_it_runs(compiled, tmp_path, monkeypatch):
    monkeypatch.setenv("DTKERNELS_CHECK", "1")
    path = tmp_path / "pick.yaml"
    path.write_text(f"op: own_pick_{compiled}\ndoc: d\nalgorithm: 'Func f; In A, t; Var x; f[x] = A[x, t[x]];'\ncompiled: {compiled}\n")
    op = dtkernels.register(path)
    function = torch.compile(lambda a, t: op(a * 2, t) + 1, backend="eager", fullgraph=True)
    assert function(A, index([0, 1, 2])).shape == (3,)
    for a in (A, A.clone().requires_grad_()):
        with pytest.raises(IndexError, match="index t\\[x\\] is 7 at x = 1"):
            function(a, index([0, 7, 2]))


def test_a_target_of_cross_entropy_is_checked(monkeypatch):
    assert dtkernels.ops.cross_entropy(A, index([0, 5, 1]), reduction="none")[1] == float("inf")
    monkeypatch.setenv("DTKERNELS_CHECK", "1")
    with pytest.raises(IndexError, match=r"^cross_entropy: target is 5 at \[1\]; allowed: 0 to 4, or -100$"):
        dtkernels.ops.cross_entropy(A, index([0, 5, 1]))
    assert dtkernels.ops.cross_entropy(A, index([0, -100, 1])).isfinite()


def test_other_ops_run_as_ever_under_checks(monkeypatch):
    monkeypatch.setenv("DTKERNELS_CHECK", "1")
    q = torch.randn(1, 2, 8, 16)
    dtkernels.ops.attention(q, q, q, causal=True)
    dtkernels.ops.softmax(A.clone().requires_grad_()).sum().backward()
    assert dtkernels.ops.softmax(A.to("meta")).shape == A.shape


def test_the_variable_is_read_by_a_fresh_process():
    code = f"import torch, dtkernels; dtkernels.compile({GATHER!r})(torch.ones(4, 3), torch.tensor([4]))"
    env = os.environ | {"DTKERNELS_CHECK": "1", "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stderr.strip().splitlines()[-1].startswith("IndexError: f: <string>:2:11: W[t[x], y]: index t[x] is 4 at x = 0")


def test_a_position_that_arithmetic_leaves_is_held_within_a_shorter_input():
    """The gradient of ``A[x / 2]`` runs over x = 2*i + r, where ``B[x / 2]`` is ``B[i]``: B may be shorter than A."""
    program = parse("Func f; In A, B, C; Var x;\nf[x] = A[x / 2] * where(C[x] > 0, B[x / 2], 1);")
    op = Operator(Spec("shorter", "", Program(program.algorithm, Schedule(()))))
    a, c = torch.ones(4, requires_grad=True), torch.ones(8)
    b = torch.tensor([2.0, 3.0, float("nan"), float("nan")])[:2]  # what lies behind its end is not read
    out = op(a, b, c)
    out.sum().backward()
    torch.testing.assert_close(out, torch.tensor([2.0, 2, 3, 3, 0, 0, 0, 0]))
    torch.testing.assert_close(a.grad, torch.tensor([4.0, 6, 0, 0]))


def test_integers_as_the_condition_of_a_load():
    """A number that is tested for truth as it is masks the load of what it picks."""
    f = dtkernels.compile(
        "Func f; In M, A, B; Var z, k, y; RVar x; f[z, k, y] = rdot(where(M[x, k], A[x, k, y], 0), B[x, z], x); f.block(z:1, k:8, y:16); f.tensorize(z:1, k:8, y:16, x:1);"
    )
    m, a, b = torch.randint(3, (5, 7), dtype=torch.int32), torch.randn(5, 7, 9), torch.randn(5, 2)
    assert torch.allclose(f(m, a, b), torch.einsum("xky,xz->zky", torch.where(m[..., None] != 0, a, 0), b), atol=1e-5)
