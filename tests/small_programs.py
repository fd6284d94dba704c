# ruff: noqa: E501 (programs read best on one line)
"""Programs of one line, and numbers for them."""

import torch


def random(*shapes, seed=0):
    """Normal numbers of each shape; a tensor for one shape, a list for several."""
    torch.manual_seed(seed)
    found = [torch.randn(*s) for s in shapes]
    return found if len(found) > 1 else found[0]


def unary(expression, schedule="f.block(x:8); f.tensorize(x:8);"):
    """``expression`` of A[x]."""
    return f"Func f; In A; Var x; f[x] = {expression}; {schedule}"


def binary(expression, schedule="f.block(x:8); f.tensorize(x:8);"):
    """``expression`` of A[x] and B[x]."""
    return f"Func f; In A, B; Var x; f[x] = {expression}; {schedule}"


CAUSAL = """Func s, e, d, f; In Q, K, V; Var m, n; RVar l, k;
s[m, l] = where(l <= m, rdot(Q[m, k], K[l, k], k), -inf);
e[m, l] = exp(s[m, l]); d[m] = rsum(e[m, l], l); f[m, n] = rdot(e[m, l] / d[m], V[l, n], l); """
ATTENTION_SCHEDULES = {
    "streaming": "f.block(m:16); f.tensorize(m:16, n:0, k:0, l:16); s.fuse_at(e, l); e.fuse_at(f, l); d.fuse_at(f, l);",
    "rows": "f.block(m:16); f.tensorize(m:16, n:0, k:0, l:0); s.fuse_at(e, l); e.fuse_at(f, m); d.fuse_at(f, m);",
    "kernels": "s.tensorize(m:0, l:0, k:0); e.tensorize(m:0, l:0); d.tensorize(m:0, l:8); f.tensorize(m:0, n:0, l:16);",
}
MASKED = """Func s, e, total, att; In Q, K, V; {scalars} Var m, n; RVar l, d; Param w = 5, o = 3;
s[m, l] = where({condition}, rdot(Q[m, d], K[l, d], d) + 0 * w + 0 * o, -inf);
e[m, l] = exp(s[m, l]); total[m] = rsum(e[m, l], l);
att[m, n] = rdot(e[m, l], V[l, n], l) * where(total[m] == 0, 0, 1 / total[m]);
s.fuse_at(att, l); e.fuse_at(att, l); total.fuse_at(att, l);
att.block(m:{m}); att.tensorize(m:{m}, n:0, d:0, l:{l});
"""
