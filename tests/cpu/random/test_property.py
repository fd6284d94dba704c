# ruff: noqa: E501 (programs read best on one line)
"""Random algorithms under random schedules: a schedule is refused with a message, or the kernel is right; as ops, gradients too.

Algorithms are built as values and printed, so every case also says whether `parse(str(program)) == program`. Without end: tests/fuzz.py.
"""

import os
import subprocess
import sys
from collections import Counter

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from fuzz import CASES_OF_A_SEED
from oracle import check
from random_cases import case_of
from random_runs import Wrong, run

from dtkernels.lang.schedule import PRIMITIVES

CASES = int(os.environ.get("DTKERNELS_CASES", 500))
SEED = int(os.environ.get("DTKERNELS_SEED", 0))  #: another one, other cases; those of a seed are those of tests/fuzz.py
CHUNKS = 10

counts: Counter = Counter()
refusals: Counter = Counter()
as_ops: Counter = Counter()
drawn: Counter = Counter()  #: primitives of the programs that were right


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_any_schedule_is_refused_or_right(chunk):
    for i in range(chunk, CASES, CHUNKS):
        number = SEED * CASES_OF_A_SEED + i
        case = case_of(number)
        try:
            found = run(case)
        except Exception as error:
            raise AssertionError(f"python tests/fuzz.py --case {number}\n{case}\n{error}") from error
        assert found.kind != "unexpected refusal", f"python tests/fuzz.py --case {number}\n{case}\n{found.rule}"
        counts[found.kind] += 1
        as_ops[found.as_op] += 1
        if found.kind == "refused":
            refusals[found.rule.split("(")[0]] += 1
        if found.kind == "right":
            drawn.update({p.name for p in case.program.schedule.primitives})


def all_ran() -> None:
    if sum(counts.values()) < CASES:
        pytest.skip("the property test did not run, or failed")


def test_every_primitive_is_drawn_and_right_somewhere():
    """Runs after the property test, like the next one."""
    all_ran()
    if CASES >= 500:
        undrawn = {"chunk"}  # test_chunk.py has it
        assert set(PRIMITIVES) - undrawn == set(drawn), sorted(set(PRIMITIVES) - set(drawn))


def test_most_schedules_are_not_refused():
    """The tests before this one say little if they refuse most or compare nothing. Runs after them."""
    all_ran()
    assert counts["too long"] <= CASES / 20, counts
    assert counts["refused"] <= CASES / 2, refusals.most_common()
    assert counts["right"] >= CASES / 3, counts
    assert as_ops["right"] >= CASES / 4, as_ops
    assert all(count <= max(CASES / 6, 5) for count in refusals.values()), refusals.most_common()


def test_a_case_is_the_same_each_time():
    for number in (0, 17, 4_000_123):
        again = case_of(number)
        assert str(case_of(number)) == str(again)
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(case_of(number).tensors().values(), again.tensors().values()))


def test_a_wrong_result_is_seen(monkeypatch):
    """The same comparison as above, of results that are a little off."""
    import random_runs

    right = random_runs.outputs_of
    monkeypatch.setattr(random_runs, "outputs_of", lambda *args, **kwargs: {n: t + 0.01 * t.abs().max() + 0.01 for n, t in right(*args, **kwargs).items()})
    seen = 0
    for number in range(20):
        try:
            run(case_of(number))
        except Wrong:
            seen += 1
    assert seen >= 5


#: what the test above found, shrunk: (program, shapes of its inputs)
FOUND = {
    "two labels index one dimension": ("Func f; In A; Var k; RVar l; f[k] = rsum(A[l], l) + A[k];", [(5,)]),
    "cast of a constant": ("Func f; In A; Var k; f[k] = cast(0, fp32) + A[k];", [(5,)]),
    "not of a scalar condition": ("Func f; In A; Var k; f[k] = A[k] + where(not k > 3, 3, 4);", [(6,)]),
    "a block and a whole extent of one label": (
        "Func g, f; In B; RVar x, y; g[y] = rsum(B[y, x], x); f[x] = rsum(B[y, x] * g[y], y); g.fuse_at(f, y); f.tensorize(x:0, y:2); f.block(x:16);", [(5, 2)]),
    "an output inside a kernel that is none": (
        "Func g, h, f; In A; Var x; g[x] = A[x] + 1; h[x] = g[x] * 2; f[x] = h[x] - 3; g.fuse_at(h, x); f.compile(); g.compile();", [(5,)]),
    "one truth value and a tile of them": (
        "Func f; In A, B, C; Var x, y; f[x, y] = where(A[x] < B[x] and A[x] < C[y] or B[x] < 0, A[x], C[y]); f.tensorize(y:2); f.block(x:1, y:2);", [(3,), (3,), (5,)]),
    "integers through where": ("Func f; In A; Var x, y; f[x, y] = A[x, y] + sqrt(where(x > y, x, 2)); f.tensorize(x:0, y:0);", [(4, 4)]),
    "integers through a Func": ("Func g, f; In A; Var l; g[l] = l; f[l] = exp(g[l]) + A[l]; g.fuse_at(f, l);", [(5,)]),
    "a hoisted load under the name of an inner one": (
        "Func g, f; In A, B; RVar x, y; g[y] = rsum(A[x] * B[y], x); f[x] = rmax(g[y] * A[x], y); g.fuse_at(f, y); f.tensorize(x:2, y:2);", [(15,), (9,)]),
    "reductions in reductions in both sides of a quotient": (
        """Func g, f; In A, B, C; RVar x, y, l;
        g[x] = rsum(exp(rsum(x, l) / rsum(exp(len(l) + A[l]), l)) * B[y], y) / rsum(exp(rsum(x, l) / rsum(exp(len(l) + A[l]), l)), y);
        f[l] = rdot(exp(g[x]), C[l, x], x) * (3 / (abs(3) + 0.5));""", [(4,), (4,), (4, 7)]),
    "a block's index under the name of an inner loop": (
        "Func g, f; In A, B; Var z; RVar x; g[z] = rmin(A[x] + B[z, x], x); f[z, x] = g[z] * A[x]; g.fuse_at(f, z); f.block(x:4); f.tensorize(x:4);", [(9,), (3, 9)]),
    "infinities that cancel outside an extent": (
        "Func f; In A, B; Var x; RVar y; f[x] = rmax(A[x, y] - minimum(A[x, y], A[x, y]) + B[y], y); f.tensorize(y:4);", [(3, 5), (5,)]),
    "an extent that only a dropped branch tells": (
        "Func f; In A, B; Var x; RVar y; Param p = false; f[x] = rsum(where(p, A[x, y], B[x]), y);", [(3, 5), (3,)]),
    "an output in a loop that never runs": (
        "Func g, f; In A, B; Var x; RVar y; g[x] = 2 * A[x]; f[x] = g[x] + rsum(g[x] * B[y], y); g.fuse_at(f, y); g.compile(); f.compile();", [(3,), (0,)]),
    "a split around another reduction over its label": (
        """Func g, h, f; In A, B; Var x; RVar y, z; g[x] = rsum(A[y, x], y); h[z, y, x] = g[x] * B[z, y, x]; f[x] = rmax(h[z, y, x], z, y);
        h.fuse_at(f, x); g.fuse_at(h, z); f.tensorize(y:2, z:2); f.split(y:3);""", [(13, 3), (4, 13, 3)]),
    "a split after an output of another loop": (
        """Func g, h, f; In A, B, C; Var z; RVar y, k; g[y, z] = A[y] + B[z]; h[z] = rsum(tanh(g[y, z]), y) * rmin(C[k], k); f[z] = h[z] * 2;
        h.tensorize(y:8, k:2, z:0); h.split(k:2); g.fuse_at(h, z); f.compile(); g.compile();""", [(6,), (5,), (10,)]),
    "an integer cast to bf16": ("Func f; In A; Var x, y; f[x, y] = cast(y, bf16) + cast(len(x), bf16) * A[x, y]; f.tensorize(x:2, y:4);", [(3, 5)]),
    "five Funcs of one element": (
        """Func f0, f1, e2, d3, f2; In A0, A4; Var z; RVar x, y, k;
        f0[k, x, z] = where(A0[z], 1, rdot(A0[y], 1, y)); f1[z, x] = rmax(f0[k, x, z] + A0[k], k); e2[z, x] = f1[z, x]; d3[z] = 1;
        f2[z] = rdot(e2[z, x], A4[x], x) * d3[z]; f0.fuse_at(f1, x); e2.fuse_at(d3, z); d3.fuse_at(f2, z); f2.tensorize(z:0); f1.fuse_at(e2, x); f2.tensorize(y:4);""", [(1,), (1,)]),
    "softmax over two labels of a Func computed inside": (
        """Func f0, e1, d2, f1; In A0, A1, A2, A3, A4, A5; SIn s; Var x; RVar y, z, k;
        f0[k, z, x] = where(rdot(A0[y], A1[k, y], y) != 0.001, rmin(z + A0[y], y), rsum(A2[k, x + 3, z, y], y)) + A0[x];
        e1[x, k, z] = exp(exp(f0[k, z, x] / 4) - A3[k, z]); d2[x] = rsum(e1[x, k, z], k, z);
        f1[x] = (rdot(e1[x, k, z] / d2[x], A4[k, z], k, z) - s) * A5[x];
        f1.tensorize(y:4); e1.fuse_at(f1, x); d2.fuse_at(f1, x); f1.tensorize(x:16); f0.fuse_at(e1, k);""", [(5,), (5, 5), (5, 5, 5, 5), (5, 5), (5, 5), (5,)]),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.filterwarnings("ignore")
def test_found_before(name):
    text, shapes = FOUND[name]
    torch.manual_seed(0)
    check(text, *(torch.randn(s) for s in shapes), *([0.75] if "SIn" in text else []))


SAME_TEXT = """
import random, sys
import dtkernels
for text in sys.stdin.read().split("----"):
    print(dtkernels.compile(text).source)
"""

PROGRAMS = """Func mm, e, dvsr, sm, attention; In A, B, C; Var m, n; RVar k, l;
mm[m, l] = rdot(A[m, k], B[k, l], k) / sqrt(len(k));
e[m, l] = exp(mm[m, l]); dvsr[m] = rsum(e[m, l], l); sm[m, l] = e[m, l] / dvsr[m];
attention[m, n] = rdot(sm[m, l], C[l, n], l);
attention.block(m:16); attention.tensorize(m:16, n:0, k:0, l:16);
dvsr.fuse_at(attention, l); e.fuse_at(attention, l); mm.fuse_at(e, l); sm.fuse_at(attention, l);
----
Func g, f; In A, B; SIn s; Var x, y; RVar z;
g[x, y] = rmax(A[x, y, z] * s, z) + rsum(A[x, y, z], z); f[x, y] = tanh(g[x, y] * B[y, x]) + floor(x / 2);
g.tensorize(y:8, z:4); f.block(x:4, y:8); f.tensorize(x:4, y:8); f.map(x:x1/2, y:y1/2, x1, y1); f.compile(); g.compile();
"""


def test_text_does_not_depend_on_the_hash_seed():
    texts = []
    for seed in ("0", "1", "4242"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", SAME_TEXT], input=PROGRAMS, env=env, capture_output=True, text=True, timeout=120, check=True)
        texts.append(done.stdout)
    assert texts[0] == texts[1] == texts[2] and texts[0].count("@triton.jit") >= 3
