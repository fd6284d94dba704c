"""Passes are optional: with any one of them left out kernels give the same results, to rounding."""

import numpy as np
import pytest
import torch

import dtkernels
from dtkernels.codegen import pipeline
from dtkernels.codegen.ir import nest
from dtkernels.lang import parse

pytestmark = pytest.mark.kernels

ATTENTION = """
Func s, e, total, f; In Q, K, V; Var m, n; RVar l, d;
s[m, l] = where(l <= m, rdot(Q[m, d], K[l, d], d), -inf);
e[m, l] = exp(s[m, l]);
total[m] = rsum(e[m, l], l);
f[m, n] = rdot(e[m, l] / total[m], V[l, n], l);
s.fuse_at(f, l); e.fuse_at(f, l); total.fuse_at(f, l);
f.block(m:16); f.tensorize(m:16, l:16, d:0, n:0); f.descriptor(K, V, f); f.specialize_warps(l); f.num_warps(4); f.approximate(exp:1/4);
"""
SPLIT = """
Func f; In A; Var x; RVar k;
f[x] = rsum(A[x, k] * A[x, k], k);
f.block(x:4); f.tensorize(x:4, k:16); f.split(k:4); f.evict(A:reread);
"""
MAPPED = "Func f; In A; Var x; f[x] = exp(A[x]) + exp(A[x]); f.block(x:64); f.tensorize(x:64);"
TAIL = """
Func f; In A, B; Var x, y; RVar k;
f[x, y] = rdot(A[x, k], B[k, y], k);
f.block(x:32, y:32); f.tensorize(x:32, y:32, k:16); f.persistent(); f.descriptor(A, B, f); f.tail(x:16, y:16);
"""


def attention(q, k, v):
    s = np.where(np.tri(len(q), len(k), dtype=bool), q @ k.T, -np.inf)
    e = np.exp(s - s.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True) @ v


PROGRAMS = {
    "attention": (ATTENTION, [(37, 16), (37, 16), (37, 16)], attention),
    "split": (SPLIT, [(7, 131)], lambda a: (a * a).sum(1)),
    "mapped": (MAPPED, [(1001,)], lambda a: 2 * np.exp(a)),
    "tail": (TAIL, [(70, 40), (40, 72)], lambda a, b: a @ b),
}


@pytest.mark.parametrize("left_out", ["", *pipeline.OPTIONAL])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_pass_left_out_changes_no_result(name, left_out):
    text, shapes, wanted = PROGRAMS[name]
    values = [np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate(shapes)]
    with pipeline.without(*filter(None, [left_out])):
        found = dtkernels.compile(text)(*(torch.tensor(v, dtype=torch.float32) for v in values))
    longest = max(max(shape) for shape in shapes)
    np.testing.assert_allclose(found, wanted(*values), rtol=0, atol=longest * 2**-22 * np.abs(wanted(*values)).max())


def test_a_pass_left_out_is_left_out():
    def exponentials(kernel):
        return sum(n.fn == "exp" for v in nest.values(kernel.body) for n in v.walk() if isinstance(n, nest.Op))

    program = parse(MAPPED)
    (with_it,) = pipeline.lower(program)
    with pipeline.without("cse"):
        (without_it,) = pipeline.lower(program)
    assert (exponentials(with_it), exponentials(without_it)) == (1, 2)
    assert pipeline.lower(program) == (with_it,)


def test_a_pass_that_is_none_is_refused_in_one_line():
    with pytest.raises(dtkernels.DTError, match="'csee'.*cse"), pipeline.without("csee"):
        pass
