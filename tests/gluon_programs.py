"""Programs of the form that Gluon is printed for, and one step beyond it."""

ATTENTION = """Func s, e, total, att; In Q, K, V; SIn scale; Var b, h, m, n; RVar l, d;
s[b, h, m, l] = SCORE; e[b, h, m, l] = exp(s[b, h, m, l]); total[b, h, m] = rsum(e[b, h, m, l], l);
att[b, h, m, n] = rdot(e[b, h, m, l], V[b, h / GROUP, l, n], l) * where(total[b, h, m] == 0, 0, 1 / total[b, h, m]);
s.fuse_at(att, l); e.fuse_at(att, l); total.fuse_at(att, l);
att.block(b:1, h:1, m:128); att.tensorize(m:128, n:0, d:0, l:128);
att.descriptor(Q, K, V, att); att.persistent(); att.num_warps(8); att.stages(l:2); att.specialize_warps(l);
"""
SCORE = "scale * rdot(Q[b, h, m, d], K[b, h / GROUP, l, d], d)"
PRODUCT = """Func mm; In A, B; Var x, y; RVar k; mm[x, y] = sigmoid(rdot(A[x, k], B[k, y], k));
mm.block(x:128, y:256); mm.tensorize(x:128, y:256, k:64); mm.map(x:x1/8, y, x1); mm.persistent();
mm.descriptor(A, B, mm); mm.stages(k:4); mm.num_warps(8); mm.specialize_warps(k);
"""
#: forms of it: sizes of the block, and what is added
PRODUCTS = {
    "whole": ("x:128, y:256", ""),
    "in turn": ("x:64, y:256", "mm.ping_pong();"),
    **{f"parts of {columns}": (f"x:128, y:{columns}", "") for columns in (96, 144, 160, 192)},
    "parts in turn": ("x:64, y:192", "mm.ping_pong();"),
    "three parts": ("x:128, y:112", ""),
}


def product(name: str, result: str = "sigmoid(rdot(A[x, k], B[k, y], k))") -> str:
    """The product in one of its forms. Of several parts the results leave by the copy engine one after the other."""
    block, more = PRODUCTS[name]
    tiled = PRODUCT.replace("block(x:128, y:256)", f"block({block})").replace("tensorize(x:128, y:256,", f"tensorize({block},")
    return tiled.replace("sigmoid(rdot(A[x, k], B[k, y], k))", result) + more


def attention(score: str = SCORE, group: int = 1) -> str:
    """Attention whose scores are ``score``, query heads in groups."""
    return ATTENTION.replace("SCORE", score).replace("h / GROUP", f"h / {group}" if group > 1 else "h")


CAUSAL = f"where(l <= m, {SCORE}, -inf)"
WINDOW = f"where(l <= m and m - l < 300, {SCORE}, -inf)"
