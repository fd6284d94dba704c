"""Programs whose inputs differ in dtype, with the dtype that each product has by the rule of docs/numbers.md."""

ALIBI = """Func s, e, d, att; In Q, K, V, slopes; Var m, n; RVar l, k;
s[m, l] = rdot(Q[m, k], K[l, k], k) * 0.25 + slopes[0] * (l - m);
e[m, l] = exp(s[m, l]); d[m] = rsum(e[m, l], l);
att[m, n] = rdot(e[m, l], V[l, n], l) / d[m];"""
FUSED = """att.block(m:16); att.tensorize(m:16, n:0, k:0, l:16); s.fuse_at(att, l); e.fuse_at(att, l); d.fuse_at(att, l);"""
APART = """s.block(m:16); s.tensorize(m:16, l:16, k:0); e.block(m:16); e.tensorize(m:16, l:0); d.block(m:16); d.tensorize(m:16, l:0);
att.block(m:16); att.tensorize(m:16, n:0, l:16); att.compile();"""
TILES = "out.block(x:16, y:16); out.tensorize(x:16, y:16, k:16);"


def product(expr: str, inputs: str, more: str = "", funcs: str = "") -> str:
    """A program of one Func ``out``, with schedule."""
    return f"Func {funcs}out; In {inputs}; Var x, y{', k' if funcs else ''}; {'' if funcs else 'RVar k; '}{more} out[x, y] = {expr}; {TILES}"


#: name -> (text, dtype of each input, dtype of each product in order of definition)
RULE = {
    "a float32 addend": (product("rdot(A[x, k], W[y, k], k) + b[y]", "A, W, b"), {"A": "bf16", "W": "bf16", "b": "fp32"}, ["bf16"]),
    "a float32 factor": (product("rdot(A[x, k], W[y, k], k) * b[y]", "A, W, b"), {"A": "bf16", "W": "bf16", "b": "fp32"}, ["bf16"]),
    "alibi": (ALIBI + FUSED, {"Q": "bf16", "K": "bf16", "V": "bf16", "slopes": "fp32"}, ["bf16", "bf16"]),
    "alibi apart": (ALIBI + APART, {"Q": "fp16", "K": "fp16", "V": "fp16", "slopes": "fp32"}, ["fp16", "fp16"]),
    "values of another dtype": (ALIBI + FUSED, {"Q": "bf16", "K": "bf16", "V": "fp32", "slopes": "bf16"}, ["bf16", "fp32"]),
    "two inputs": (product("rdot(A[x, k], W[y, k], k)", "A, W"), {"A": "bf16", "W": "fp32"}, ["fp32"]),
    "two halves": (product("rdot(A[x, k], W[y, k], k)", "A, W"), {"A": "bf16", "W": "fp16"}, ["fp32"]),
    "a norm's weight": (
        product("rdot(A[x, k] * r[x] * g[k], W[y, k], k)", "A, W, g, r"),
        {"A": "bf16", "W": "bf16", "g": "fp32", "r": "fp32"},
        ["bf16"],
    ),
    "two computed sides": (
        product("rdot(A[x, k] * g[k], W[y, k] * h[k], k)", "A, W, g, h"),
        {"A": "bf16", "W": "bf16", "g": "bf16", "h": "fp32"},
        ["fp32"],
    ),
    "two sides made of products": (
        "Func p, q, out; In A, B, C, b; Var x, y, z; RVar k; p[x, z] = maximum(rdot(A[x, k], B[z, k], k) + b[z], 0);"
        "q[y, z] = exp(rdot(C[y, k], B[z, k], k) * b[z]); out[x, y] = rdot(p[x, z], q[y, z], z);"
        "p.block(x:16, z:16); p.tensorize(x:16, z:16, k:16); q.block(y:16, z:16); q.tensorize(y:16, z:16, k:16);"
        "out.block(x:16, y:16); out.tensorize(x:16, y:16, z:16); out.compile();",
        {"A": "fp16", "B": "fp16", "C": "fp16", "b": "fp32"},
        ["fp16", "fp16", "fp16"],
    ),
    "an input of two products": (
        product("rdot(A[x, k], W[y, k], k) + rdot(A[x, k], V[y, k], k)", "A, W, V"),
        {"A": "bf16", "W": "bf16", "V": "fp32"},
        ["bf16", "fp32"],
    ),
    "a masked operand": (
        product("rdot(where(k <= x, A[x, k], 0), W[y, k], k)", "A, W"),
        {"A": "fp32", "W": "bf16"},
        ["fp32"],
    ),
    "a cast to float32": (product("rdot(cast(A[x, k], fp32), W[y, k], k)", "A, W"), {"A": "bf16", "W": "bf16"}, ["fp32"]),
    "a computed side cast to float32": (
        product("rdot(cast(A[x, k] * g[k], fp32), W[y, k], k)", "A, W, g"),
        {"A": "bf16", "W": "bf16", "g": "fp32"},
        ["fp32"],
    ),
    "two casts": (product("rdot(cast(A[x, k], fp16), cast(W[y, k], fp16), k)", "A, W"), {"A": "fp32", "W": "fp32"}, ["fp16"]),
    "a cast beside an input": (product("rdot(cast(A[x, k], fp16), W[y, k], k)", "A, W"), {"A": "fp32", "W": "fp32"}, ["fp32"]),
    "int8 weights": (
        product("rdot(A[x, k], cast(W[y, k], bf16) * s[y], k)", "A, W, s"),
        {"A": "bf16", "W": "int8", "s": "fp32"},
        ["bf16"],
    ),
    "int8 weights scaled in groups": (
        product("rdot(A[x, k], W[y, k] * s[y, k / 8], k)", "A, W, s"),
        {"A": "bf16", "W": "int8", "s": "fp32"},
        ["bf16"],
    ),
    "an integer side": (product("rdot(A[x, k], W[y, k], k) + b[y]", "A, W, b"), {"A": "fp16", "W": "int8", "b": "fp32"}, ["fp16"]),
    "a computed side and an integer one": (
        product("rdot(A[x, k] * A[x, k], W[y, k], k) + b[y]", "A, W, b"),
        {"A": "fp16", "W": "int8", "b": "fp32"},
        ["fp16"],
    ),
    "two integer sides": (product("rdot(A[x, k], W[y, k], k) * b[y]", "A, W, b"), {"A": "int8", "W": "int8", "b": "bf16"}, ["fp32"]),
    "an expert's weights": (
        product("rdot(A[x, k], W[t[x / 16], y, k], k) * g[x]", "A, W, t, g"),
        {"A": "bf16", "W": "bf16", "t": "int64", "g": "fp32"},
        ["bf16"],
    ),
    "a Func between kernels": (
        product("rdot(h[x, k], W[y, k], k)", "A, W, g", "h[x, k] = A[x, k] * g[k];", "h, ") + "h.block(x:4); h.tensorize(x:4, k:16); out.compile();",
        {"A": "bf16", "W": "bf16", "g": "fp32"},
        ["bf16"],
    ),
}
