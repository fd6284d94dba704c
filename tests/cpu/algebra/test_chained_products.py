"""Gradients of products of products, where forward hands the inner product over and where it is computed again, against float64."""

import itertools

import pytest
import torch
from op_cases import normal

import dtkernels
from dtkernels.lang import Program, Schedule, parse
from dtkernels.lang.spec import Spec
from dtkernels.ops.registry import shipped
from dtkernels.runtime.bind.operator import Operator

KEPT = [(5, 7, 17, 3), (33, 65, 40, 17), (40, 300, 70, 64), (3, 40, 4, 20)]  #: m, n, k, l; the last: smaller than B, not than A
AGAIN = [(20, 7, 3, 16), (33, 300, 8, 40)]
THREE = """Func p, q, y; In A, B, C, D; Var m, n; RVar i, j, k;
p[m, i] = rdot(A[m, k], B[k, i], k); q[m, j] = rdot(p[m, i], C[i, j], i); y[m, n] = rdot(q[m, j], D[j, n], j);"""


def agree(ours, truth, tensors: dict[str, torch.Tensor], wanted: tuple[str, ...] = ()) -> None:
    """Result and gradients against float64: roundings to the dtype of operands of every product, and float32 sums."""
    wanted = wanted or tuple(tensors)
    given = {n: t.clone().requires_grad_(n in wanted) for n, t in tensors.items()}
    exact = {n: t.double().requires_grad_(n in wanted) for n, t in tensors.items()}
    result, right = ours(**given), truth(**exact)
    dtype = next(iter(tensors.values())).dtype
    assert result.shape == right.shape and result.dtype == dtype
    grad = normal(*result.shape, dtype=dtype, device="cpu", seed=9)
    found = torch.autograd.grad(result, [given[n] for n in wanted], grad)
    truths = torch.autograd.grad(right, [exact[n] for n in wanted], grad.double())
    for name, got, want in [("result", result, right), *zip(wanted, found, truths)]:
        scale = want.square().mean().sqrt().item() + 1e-30  # of a sum of many terms, to which each adds its rounding
        error, bound = (got.double() - want).abs().max().item(), 24 * torch.finfo(dtype).eps * max(scale, want.abs().max().item())
        assert got.dtype == dtype and error <= bound, f"{name} of {wanted}: {error:.2e} > {bound:.2e}"


def made(op: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    m, n, k, l = shape  # noqa: E741
    sides = {"A": (m, k), "B": (k, l), "C": (l, n)} if op == "two_mm" else {"Y": (m, n), "X": (m, k), "A": (l, k), "B": (n, l)}
    return {name: normal(*s, dtype=dtype, device="cpu", seed=i) for i, (name, s) in enumerate(sides.items())}


def call(op: str, given: dict):
    return shipped(op)(**given) if op == "two_mm" else shipped(op)(**given, scale=0.5)


def truth(op: str, t: dict) -> torch.Tensor:
    return t["A"] @ t["B"] @ t["C"] if op == "two_mm" else t["Y"] + 0.5 * (t["X"] @ t["A"].T) @ t["B"].T


def is_kept(result: torch.Tensor, m: int, l: int) -> bool:  # noqa: E741
    return (m, l) in [tuple(t.shape) for t in result.grad_fn.saved_tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", KEPT + AGAIN, ids=str)
@pytest.mark.parametrize("op", ["two_mm", "lora"])
def test_gradients_are_right_whether_the_product_is_kept_or_not(op, shape, dtype):
    tensors = {n: t * 0.2 if dtype == torch.float16 else t for n, t in made(op, shape, dtype).items()}
    agree(lambda **t: call(op, t), lambda **t: truth(op, t), tensors)


@pytest.mark.parametrize("shape", [KEPT[1], AGAIN[1]], ids=["kept", "again"])
@pytest.mark.parametrize("op", ["two_mm", "lora"])
def test_every_choice_of_gradients(op, shape):
    tensors = made(op, shape)
    for wanted in itertools.chain(*(itertools.combinations(tensors, n) for n in range(1, len(tensors) + 1))):
        agree(lambda **t: call(op, t), lambda **t: truth(op, t), tensors, wanted)


@pytest.mark.parametrize("path", ["interpreter", "reference"])
def test_the_product_is_kept_where_it_is_no_larger_than_an_operand(path, monkeypatch):
    if path == "reference":
        monkeypatch.delenv("TRITON_INTERPRET")
    for shape in KEPT + AGAIN:
        given = {n: t.requires_grad_() for n, t in made("two_mm", shape).items()}
        assert is_kept(shipped("two_mm")(**given), shape[0], shape[3]) == (shape in KEPT), shape
        given["C"] = given["C"].detach()
        assert not is_kept(shipped("two_mm")(**given), shape[0], shape[3]), "no gradient of C: nothing reads it"


def test_with_a_gradient_of_the_last_factor_alone_only_the_product_is_kept():
    given = made("two_mm", KEPT[1])
    given["C"].requires_grad_()
    (saved,) = shipped("two_mm")(**given).grad_fn.saved_tensors
    assert tuple(saved.shape) == (33, 17)
    torch.testing.assert_close(saved, given["A"] @ given["B"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_it_is_kept_in_the_dtype_of_the_result(dtype):
    given = {n: t.requires_grad_() for n, t in made("two_mm", KEPT[1], dtype).items()}
    result = shipped("two_mm")(**given)
    (kept,) = [t for t in result.grad_fn.saved_tensors if t.shape == (33, 17)]
    assert kept.dtype == result.dtype == dtype


def test_gradcheck_in_float64():
    for shape in ((3, 4, 5, 2), (6, 4, 2, 5)):
        leaves = [t.requires_grad_() for t in made("two_mm", shape, torch.float64).values()]
        assert torch.autograd.gradcheck(shipped("two_mm"), leaves)


def test_batches_keep_a_product_for_each():
    a, b, c = (normal(*s, dtype=torch.float32, device="cpu", seed=i) for i, s in enumerate([(2, 3, 5, 9), (9, 4), (4, 6)]))
    agree(lambda a, b, c: dtkernels.ops.two_mm(a, b, c), lambda a, b, c: a @ b @ c, {"a": a, "b": b, "c": c})
    shared = normal(5, 9, dtype=torch.float32, device="cpu"), normal(2, 9, 4, dtype=torch.float32, device="cpu"), normal(2, 4, 6, dtype=torch.float32, device="cpu")
    agree(lambda a, b, c: dtkernels.ops.two_mm(a, b, c), lambda a, b, c: a @ b @ c, dict(zip("abc", shared)))


@pytest.mark.parametrize("sizes, kept", [((6, 9, 4, 3, 5), {"p", "q"}), ((9, 2, 8, 3, 5), {"q"}), ((9, 8, 4, 6, 5), {"p"}), ((9, 2, 8, 10, 5), set())])
def test_each_product_of_a_longer_chain_is_judged_by_itself(sizes, kept):
    m, k, i, j, n = sizes
    op = Operator(Spec("chain", "", Program(parse(THREE).algorithm, Schedule(()))))
    tensors = {name: normal(*s, dtype=torch.float32, device="cpu", seed=x) for x, (name, s) in enumerate({"A": (m, k), "B": (k, i), "C": (i, j), "D": (j, n)}.items())}
    variant = op.variant((), frozenset(), 0)
    assert set(variant.pair_for(tuple("ABCD"), tensors).forward.outputs) - {"y"} == kept
    agree(lambda **t: op(**t), lambda **t: t["A"] @ t["B"] @ t["C"] @ t["D"], tensors)


def test_an_empty_side_gives_zeros():
    for shape in ((0, 4, 5, 2), (4, 0, 5, 2), (4, 5, 0, 2), (4, 5, 3, 0)):
        given = {n: t.requires_grad_() for n, t in made("two_mm", shape).items()}
        result = shipped("two_mm")(**given)
        for t, grad in zip(given.values(), torch.autograd.grad(result, list(given.values()), torch.ones_like(result))):
            assert grad.shape == t.shape and not grad.any()
