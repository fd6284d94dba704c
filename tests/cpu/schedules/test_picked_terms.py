# ruff: noqa: E501 (programs read best on one line)
"""Sums over the elements that data picks, added to memory where their indices say: in the interpreter, by themselves and as gradients of gathers."""

import re
from inspect import signature

import pytest
import torch

import dtkernels
from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import differentiable_form, prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.errors import DTError
from dtkernels.lang.schedule import Program
from dtkernels.runtime.bind.operator import Operator
from dtkernels.runtime.build.source_cache import load_module

ROWS = "Func f; In X, t, A; Var v, k; RVar b; Extent v = A[0]; f[v, k] = rsum(where(t[b] == v, X[b, k] * 2, 0), b); "


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("schedule", [
    "f_terms.block(b:8, k:16); f_terms.tensorize(b:8, k:16); ", "f_terms.block(b:1, k:32); f_terms.tensorize(b:1, k:32); ",
    "f_terms.block(b:16, k:8); f_terms.tensorize(b:4, k:8); f.block(v:4); f.tensorize(v:4, k:0); ", "f_terms.block(b:4); f_terms.tensorize(b:4, k:0); ",
])  # fmt: skip
def test_each_term_is_added_to_the_element_that_its_index_names(schedule, dtype):
    x, a, t = torch.randn(37, 19), torch.empty(11, 1), torch.randint(0, 11, (37,), dtype=dtype)
    got = dtkernels.compile(ROWS + schedule + "f.accumulate_at(f_terms, k);")(X=x, t=t, A=a)
    truth = torch.zeros(11, 19, dtype=torch.float64).index_add_(0, t.long(), 2 * x.double())
    torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("schedule", ["f_terms.block(b:8, k:16); f_terms.tensorize(b:8, k:16); ", "f_terms.block(b:4); f_terms.tensorize(b:4, k:0); f.block(v:4); f.tensorize(v:4, k:0); "])
def test_rows_that_no_index_names_are_neither_cleared_nor_read(schedule, monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *shape, **more: torch.full(*shape, float("nan"), **more))  # what is read of memory that nothing wrote shows
    x, a, t = torch.randn(9, 19), torch.zeros(40, 1), torch.tensor([3, 39, 3, 0, -1, 40, 7, 3, 39])
    got = dtkernels.compile(ROWS + schedule + "f.accumulate_at(f_terms, k, named);")(X=x, t=t, A=a)
    inside = (t >= 0) & (t < 40)
    truth = torch.zeros(40, 19, dtype=torch.float64).index_add_(0, t[inside], 2 * x[inside].double())
    torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=1e-5)


def test_named_rows_are_those_that_data_names():
    with pytest.raises(DTError, match="named elements are those that data names"):
        dtkernels.compile("Func g, f; In X, Y; Var x; RVar y; g[y] = rsum(X[x, y], x); f[x] = rsum(X[x, y] * Y[y], y); f.block(x:4); f.tensorize(x:4, y:0); g.tensorize(x:0); g.accumulate_at(f, x, named); f.compile(); g.compile();")


def test_indices_outside_are_left_out():
    x, a, t = torch.ones(6, 3), torch.empty(4, 1), torch.tensor([-1, 0, 3, 4, 100, 3])
    got = dtkernels.compile(ROWS + "f_terms.block(b:4); f_terms.tensorize(b:4, k:0); f.accumulate_at(f_terms, k);")(X=x, t=t, A=a)
    assert got[:, 0].tolist() == [2, 0, 0, 4]


@pytest.mark.parametrize("how", ["", ", named"])
def test_numbers_that_are_no_places_are_left_out(how):
    x, a = torch.ones(9, 3), torch.empty(4, 1)
    t = torch.tensor([0.5, 0, 3, -1, 4, float("nan"), float("inf"), 3, -float("inf")])
    got = dtkernels.compile(ROWS + f"f_whole_terms.block(b:4); f_whole_terms.tensorize(b:4, k:0); f.accumulate_at(f_whole_terms, k{how});")(X=x, t=t, A=a)
    assert got[:, 0].tolist() == [2, 0, 0, 4]


JOINED = {
    "alone": ("{}", lambda first, second, A: first - second), "in arithmetic": ("A[v, k] * 2 - ({})", lambda first, second, A: 2 * A - (first - second)),
}  # fmt: skip


@pytest.mark.parametrize("how", ["", ", named"])
@pytest.mark.parametrize("cut", ["f_sums:2, b:4, k:8", "f_sums:1, b:8, k:32"])
@pytest.mark.parametrize("name", JOINED)
def test_several_sums_are_added_to_one(name, cut, how):
    around, reference = JOINED[name]
    text = "Func f; In X, w, s, t, A; Var v, k; RVar b; f[v, k] = " + around.format("rsum(where(s[b] == v, X[b, k] * w[b], 0), b) - rsum(where(t[b] + 1 == v, X[b, k], 0), b)") + ";"
    text += " Extent v = A[0];" if "A[" not in around else ""
    added = "f" if around == "{}" else "f_joined"
    x, w, a, s, t = torch.randn(37, 19), torch.randn(37), torch.randn(11, 19), torch.randint(-2, 13, (37,)), torch.randint(-2, 13, (37,))
    got = dtkernels.compile(f"{text} f_joined_terms.block({cut}); f_joined_terms.tensorize({cut}); {added}.accumulate_at(f_joined_terms, k{how}); f.block(v:4); f.tensorize(v:4, k:0); f.compile();")(X=x, w=w, s=s, t=t, A=a)
    hot = [(i == torch.arange(11)[:, None]).double() for i in (s, t + 1)]
    truth = reference(hot[0] @ (x * w[:, None]).double(), hot[1] @ x.double(), a.double())
    torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=1e-5)


SEGMENTS = {
    "means": ("f[s, d] = w[s] * rsum(where(g[n] == s, X[n, d], 0), n) / maximum(rsum(where(g[n] == s, 1, 0), n), 1);", lambda X, g, w, hot: w[:, None] * (hot @ X) / hot.sum(1).clamp(min=1)[:, None]),
    "of a condition": ("f[s, d] = w[s] + rsum(where(g[n] == s, where(X[n, d] > 0, X[n, d], 0), 0), n);", lambda X, g, w, hot: w[:, None] + hot @ X.clamp(min=0)),
    "bins": ("f[s, d] = w[s] + rsum(where(floor(g[n] / 2) == s, X[n, d], 0), n);", lambda X, g, w, hot: w[:, None] + (g // 2 == torch.arange(7)[:, None]).double() @ X),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("name", SEGMENTS)
def test_sums_of_segments_and_their_gradients(name, dtype, tmp_path):
    formula, reference = SEGMENTS[name]
    (tmp_path / "f.yaml").write_text(f"op: f\ndoc: |\n  Segments.\nalgorithm: |\n  Func f; In X, g, w; Var s, d; RVar n; {formula}\n")
    torch.manual_seed(0)
    given = {"X": torch.randn(61, 19).requires_grad_(), "g": torch.randint(-1, 8, (61,), dtype=dtype), "w": torch.randn(7).requires_grad_()}
    wide = {n: t.detach().double().requires_grad_(t.requires_grad) for n, t in given.items()}
    truth = reference(**wide, hot=(given["g"] == torch.arange(7)[:, None]).double())
    adjoint = torch.randn_like(truth)
    grads = dict(zip("Xw", torch.autograd.grad(truth, [wide["X"], wide["w"]], adjoint)))
    call = Operator(tmp_path / "f.yaml").bind(tuple(given.values()), {})
    pair = call.variant.pair_for(("X", "w"), call.fitted.tensors)
    known = {**{n: t.detach() for n, t in given.items()}, **{a: adjoint.float() for a in pair.gradient.adjoints.values()}, "f": truth.detach().float()}
    expected = {"f": truth} | {pair.gradient.grads[n]: grads[n] for n in "Xw"}
    for program in (pair.forward, pair.backward):
        sizes = {x: n * TIMES for x, n in program.signature.extents({n: known[n] for n in program.algorithm.inputs if n in known}).items()}
        schedule = default_schedule(program.algorithm, program.outputs, sizes, 4, target("h200"))
        assert schedule.unordered_sums() or program is pair.backward
        function = getattr(load_module(emit(Program(program.algorithm, schedule), program.outputs[0], target("h200")), program.outputs[0]), program.outputs[0])
        found = function(**{n: known[n] for n in signature(function).parameters})
        known |= dict(zip(program.outputs, found if isinstance(found, tuple | list) else [found]))
        for n in (n for n in program.outputs if n in expected):
            torch.testing.assert_close(known[n].double(), expected[n], rtol=1e-5, atol=1e-5)


GATHERS = {
    "rows": ("f[b, k] = A[t[b], k] * 2;", {"A": (11, 19), "t": (37,)}, lambda A, t: A[t] * 2),
    "two tables": ("f[b, k] = A[s[b], k] * B[t[b], k];", {"A": (9, 5), "B": (7, 5), "s": (23,), "t": (23,)}, lambda A, B, s, t: A[s] * B[t]),
    "one table twice": ("f[b, k] = A[s[b], k] * A[t[b], k];", {"A": (7, 5), "s": (23,), "t": (23,)}, lambda A, s, t: A[s] * A[t]),
    "sums of products": ("f[b] = rsum(A[s[b], j] * B[t[b], j], j);", {"A": (9, 5), "B": (7, 5), "s": (23,), "t": (23,)}, lambda A, B, s, t: (A[s] * B[t]).sum(-1)),
    "elements of rows": ("f[b, k] = A[b, t[b, k]];", {"A": (4, 13), "t": (4, 6)}, lambda A, t: A.gather(1, t)),
    "numbers": ("f[b, k] = exp(A[t[b, k]]);", {"A": (9,), "t": (4, 6)}, lambda A, t: A[t].exp()),
    "a product of rows": ("f[b, k] = rdot(A[t[b], j], B[j, k], j);", {"A": (11, 19), "B": (19, 8), "t": (21,)}, lambda A, B, t: A[t] @ B),
    "sums of rows": ("f[b, k] = rsum(A[t[b, j], k], j);", {"A": (10, 5), "t": (10, 3)}, lambda A, t: A[t].sum(1)),
    "indices from the end": ("f[b, k] = A[(t[b] - 12) % 11, k];", {"A": (11, 5), "t": (23,)}, lambda A, t: A[(t - 12) % 11]),
    "a difference": ("f[b, k] = A[b, k] - A[t[b], k];", {"A": (12, 7), "t": (12,)}, lambda A, t: A - A[t]),
}  # fmt: skip
TIMES = 1000  #: rows that a schedule is made for, relative to those that it runs at, where nothing is to be gained


def test_an_index_may_be_arithmetic_with_a_scalar():
    """As torch counts from the end: ``A[t]`` of a fused function is ``A[t[b] % n, k]``."""
    forward = differentiable_form(parse("Func f; In A, t; SIn n; Var b, k; f[b, k] = A[t[b] % n, k] * 3;").algorithm, ("f",))
    backward = prepare_algorithm(gradient(forward, ("f",), ("A",)).backward, ("d_A",))
    schedule = default_schedule(backward, ("d_A",), {"b": 8192, "k": 512, "A_0": 50000}, 4, target("h100"))
    assert schedule.unordered_sums()
    module = load_module(emit(Program(backward, schedule), "d_A", target("h100")), "d_A")
    a, t, adjoint = torch.empty(11, 19), torch.randint(-11, 11, (37,)), torch.randn(37, 19)
    given = {"A": a, "t": t, "d_f": adjoint, "n": 11}
    got = module.d_A(**{name: given[name] for name in signature(module.d_A).parameters})
    truth = torch.zeros(11, 19, dtype=torch.float64).index_add_(0, t % 11, 3 * adjoint.double())
    torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", GATHERS)
def test_gradients_of_gathers(name, tmp_path):
    formula, shapes, reference = GATHERS[name]
    tables = [n for n in shapes if n in "AB"]
    labels = sorted({x for x in "bk" if f"{x}," in formula.split("=")[0] or f"{x}]" in formula.split("=")[0]})
    (tmp_path / "g.yaml").write_text(
        f"op: g\ndoc: |\n  A gather.\nalgorithm: |\n  Func g; In {', '.join(shapes)}; Var {', '.join(labels)};{' RVar j;' if ', j)' in formula else ''}\n  {formula.replace('f[', 'g[', 1)}\n"
    )
    torch.manual_seed(0)
    given = {n: torch.randn(s).requires_grad_() if n in tables else torch.randint(0, _rows(n, formula, shapes), s) for n, s in shapes.items()}
    call = Operator(tmp_path / "g.yaml").bind(tuple(given.values()), {})
    pair = call.variant.pair_for(tuple(tables), call.fitted.tensors)
    result = reference(**given)
    adjoint = torch.randn_like(result)
    known = {**{n: t.detach() for n, t in given.items()}, pair.forward.outputs[0]: result.detach(), next(iter(pair.gradient.adjoints.values())): adjoint}
    program = pair.backward.algorithm
    sizes = {x: n * (8 if x in "jk" else TIMES) for x, n in pair.backward.signature.extents({n: known[n] for n in program.inputs}).items()}
    schedule = default_schedule(program, pair.backward.outputs, sizes, 4, target("h100"))
    assert schedule.unordered_sums()
    source = emit(Program(program, schedule), pair.backward.outputs[0], target("h100"))
    function = getattr(load_module(source, pair.backward.outputs[0]), pair.backward.outputs[0])
    found = function(**{n: known[n] for n in signature(function).parameters})
    found = dict(zip(pair.backward.outputs, found if isinstance(found, tuple | list) else [found]))
    for n, truth in zip(tables, torch.autograd.grad(result, [given[n] for n in tables], adjoint)):
        torch.testing.assert_close(found[pair.gradient.grads[n]], truth, rtol=1e-5, atol=1e-5)


def _rows(index: str, formula: str, shapes: dict[str, tuple[int, ...]]) -> int:
    """Return how many rows the tables have that ``index`` names one of."""
    if f"A[b, {index}" in formula:
        return shapes["A"][1]
    return min(shapes[table][0] for table in "AB" if re.search(rf"{table}\[\(?{index}\[", formula))
