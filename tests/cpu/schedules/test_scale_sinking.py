# ruff: noqa: E501 (programs read best on one line)
"""A scalar that multiplies what is maximised: behind the maximum where it is more than 0, in front of it elsewhere."""

import pytest
import stand_in_gpu
import torch
from oracle import check
from small_programs import random

import dtkernels
from dtkernels.ops.registry import SPECS
from dtkernels.runtime.bind.operator import Operator

ATTENTION = """Func s, seen, e, total, att; In Q, K, V; SIn scale; Var m, n; RVar l, d;
s[m, l] = scale * rdot(Q[m, d], K[l, d], d); seen[m, l] = SEEN; e[m, l] = exp(seen[m, l]); total[m] = rsum(e[m, l], l);
att[m, n] = rdot(e[m, l], V[l, n], l) / total[m];
s.fuse_at(att, l); seen.fuse_at(att, l); e.fuse_at(att, l); total.fuse_at(att, l); att.block(m:16); att.tensorize(m:16, n:0, d:0, l:16);
"""
PLAIN, CAUSAL = (ATTENTION.replace("SEEN", seen) for seen in ("s[m, l]", "where(l <= m, s[m, l], -inf)"))
BEHIND = "(scale if scale_positive else 1.0) * tl.max("


@pytest.mark.parametrize("scale", [0.3, 4.0, -0.3, -4.0, 0.0, 1e-30])
@pytest.mark.parametrize("text", [PLAIN, CAUSAL], ids=["plain", "causal"])
@pytest.mark.parametrize("on_device", [False, True])
def test_any_scale(text, scale, on_device):
    assert BEHIND in dtkernels.compile(text).source
    check(text, *random((37, 16), (37, 16), (37, 16)), torch.tensor(scale) if on_device else scale)


@pytest.mark.parametrize("text", [PLAIN, CAUSAL], ids=["plain", "causal"])
def test_a_scale_of_no_number_and_infinities(text):
    compiled = dtkernels.compile(text)
    q, k, v = random((20, 16), (20, 16), (20, 16))
    assert compiled(Q=q, K=k, V=v, scale=float("nan")).isnan().all()
    assert compiled(Q=q, K=k, V=v, scale=float("inf")).isnan().any()
    k[3] = float("inf")
    wanted = compiled(Q=q, K=k, V=v, scale=torch.tensor(0.5))  # in front of the maximum
    assert torch.equal(compiled(Q=q, K=k, V=v, scale=0.5).isnan(), wanted.isnan()) and wanted.isnan().any()


OTHERS = {
    "read elsewhere": PLAIN.replace("rsum(e[m, l], l)", "rsum(e[m, l] * abs(s[m, l]), l)"),
    "a bias behind the scale": ATTENTION.replace("SEEN", "s[m, l] + V[l, 0]"),
    "hidden by a number": ATTENTION.replace("SEEN", "where(l <= m, s[m, l], -5)"),
    "a product by a row's number": PLAIN.replace("scale * rdot", "scale * Q[m, 0] * rdot"),
}


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_what_is_left_as_it_is(text):
    assert "_positive" not in dtkernels.compile(text).source
    check(text, *random((20, 16), (20, 16), (20, 16)), 0.5)


@pytest.mark.parametrize("keys", [9, 12])
def test_the_sign_of_a_scale_is_another_kind_of_call(monkeypatch, keys):
    """Kernels know it: one bound for a scale above 0 would shift by the least score of a row where the scale is below, and overflow."""
    stand_in_gpu.use(monkeypatch)
    op = Operator(SPECS / "attention.yaml")
    q, k, v = (torch.randn(1, 2, n, 16, generator=torch.Generator().manual_seed(n)) for n in (3, keys, keys))
    for scale in (40.0, -40.0, 40.0, -40.0, -39.0, 39.0):
        wanted = torch.softmax(scale * q.double() @ k.double().mT, -1) @ v.double()
        torch.testing.assert_close(op(Q=q, K=k, V=v, scale=scale).double(), wanted, atol=1e-4, rtol=1e-4)
