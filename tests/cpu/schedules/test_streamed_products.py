# ruff: noqa: E501 (programs read best on one line)
"""Products with one row, one column or a sum of one term: schedules without matrix units, under the interpreter and in the lowered text."""

import pytest
import torch
from oracle import check
from small_programs import random

import dtkernels
from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.problem import SchedulingProblem
from dtkernels.autoschedule.rules.candidates.streamed_gemm import streamed_candidates
from dtkernels.autoschedule.rules.streams.rank_one import rank_one_configs
from dtkernels.codegen.target import target
from dtkernels.lang import parse

HEAD = "Func f; In A, B; Var x, y; RVar k; "
ROW_MAJOR, COLUMN_MAJOR = HEAD + "f[x, y] = sigmoid(rdot(A[x, k], B[k, y], k)); ", HEAD + "f[x, y] = rdot(A[x, k], B[y, k], k) + y; "
GATED = "Func f; In A, B, C; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k) * sigmoid(rdot(A[x, k], C[k, y], k)); "
BATCH = "Func f; In A, B; Var b, x, y; RVar k; f[b, x, y] = rdot(A[b, x, k], B[b / 2, k, y], k); "
GATHERED = "Func f; In A, B, t; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[t[y], k], k); "


def proposed(text: str, sizes: dict[str, int]) -> list[str]:
    """Some of the schedules that the rule proposes: with and without parts, the narrowest and the widest."""
    algorithm = prepare_algorithm(parse(text).algorithm, ("f",))
    found = [str(c) for c in streamed_candidates(SchedulingProblem(algorithm, ("f",), sizes, 4, target("h200")), "f", ["f"])]
    split = [c for c in found if "split" in c]
    return list(dict.fromkeys([found[0], found[-1], *split[-1:]]))


@pytest.mark.parametrize("text, sizes, shapes", [
    (ROW_MAJOR, {"x": 1, "y": 75, "k": 300}, ((1, 300), (300, 75))), (ROW_MAJOR, {"x": 77, "y": 1, "k": 301}, ((77, 301), (301, 1))),
    (ROW_MAJOR, {"x": 33, "y": 517, "k": 1}, ((33, 1), (1, 517))), (ROW_MAJOR, {"x": 33, "y": 70, "k": 5}, ((33, 5), (5, 70))),
    (COLUMN_MAJOR, {"x": 1, "y": 75, "k": 300}, ((1, 300), (75, 300))), (COLUMN_MAJOR, {"x": 77, "y": 1, "k": 301}, ((77, 301), (1, 301))),
    (GATED, {"x": 1, "y": 75, "k": 300}, ((1, 300), (300, 75), (300, 75))), (BATCH, {"b": 4, "x": 1, "y": 40, "k": 70}, ((4, 1, 70), (2, 70, 40))),
    (ROW_MAJOR, {"x": 3, "y": 75, "k": 130}, ((3, 130), (130, 75))), (COLUMN_MAJOR, {"x": 77, "y": 5, "k": 131}, ((77, 131), (5, 131))),
    (GATED, {"x": 2, "y": 75, "k": 130}, ((2, 130), (130, 75), (130, 75))),
])  # fmt: skip
def test_every_form_of_thin_product_has_right_candidates(text, sizes, shapes):
    schedules = proposed(text, sizes)
    assert len(schedules) > 1
    for schedule in schedules:
        check(text + schedule, *random(*shapes))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_terms_of_16_bits_are_multiplied_in_float32(dtype):
    a, b = random((1, 1000), (1000, 37))
    kernel = dtkernels.compile(ROW_MAJOR + "f.block(x:1, y:16); f.tensorize(x:1, y:16, k:64); f.stages(k:3);")
    a, b = a.to(dtype), b.to(dtype)
    truth = torch.sigmoid(a.double() @ b.double())
    assert (kernel(A=a, B=b).double() - truth).abs().max() <= 2 * torch.finfo(dtype).eps * truth.abs().max()


@pytest.mark.parametrize("m, n, k", [(37, 70, 300), (5, 1, 1025), (1, 33, 700)])
def test_a_product_of_rank_one(m, n, k):
    text = "Func s, f; In A, B, C; Var m, n; RVar k, l; s[m, l] = rdot(A[m, k], B[k, l], k); f[m, n] = rdot(s[m, l], C[l, n], l); "
    algorithm = prepare_algorithm(parse(text).algorithm, ("f",))
    (config,) = rank_one_configs(SchedulingProblem(algorithm, ("f",), {"m": m, "n": n, "k": k, "l": 1}, 4, target("h100")), "f", ["s", "f"])
    check(f"{text} s.fuse_at(f, l); {config}", *random((m, k), (k, 1), (1, n)))


def test_gathered_rows():
    a, b = random((1, 300), (50, 300))
    t = torch.randint(50, (20,))
    for schedule in proposed(GATHERED, {"x": 1, "y": 20, "k": 300})[:2]:
        got = dtkernels.compile(GATHERED + schedule)(A=a, B=b, t=t)
        torch.testing.assert_close(got, a @ b[t].T, rtol=1e-5, atol=1e-4)


def test_terms_are_added_to_one_another_after_the_loop_where_registers_hold_them():
    held = dtkernels.compile(ROW_MAJOR + "f.block(x:1, y:16); f.tensorize(x:1, y:16, k:64);").source
    assert "f_acc += A[:, None] * B" in held and held.index("tl.sum(f_acc") > held.index("f_acc +=")
    rows = dtkernels.compile(ROW_MAJOR + "f.block(x:3, y:16); f.tensorize(x:3, y:16, k:64);").source
    assert all(f"f_acc_{i} += A_{i}[:, None] * B" in rows for i in range(3)) and rows.count("tl.load(B_ptr") + rows.count("B_ptr + k") == 1
    many = dtkernels.compile(ROW_MAJOR + "f.block(x:8, y:64); f.tensorize(x:8, y:64, k:64); f.num_warps(4);").source
    assert "f_acc += tl.sum(" in many, "32768 terms are 256 in each of 128 threads"
