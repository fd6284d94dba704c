# ruff: noqa: E501 (programs read best on one line)
"""Programs whose products or sums read slices and rows that data picks: by index, by offsets, scattered."""

import torch


def slices(W, e):
    """The slices of W by index, and zeros for an index outside."""
    inside = ((e >= 0) & (e < len(W))).to(W.dtype)
    return W[e.clamp(0, len(W) - 1)] * inside.reshape(*e.shape, *[1] * (W.dim() - 1))


def grouped(A, W, e):
    return torch.einsum("mk,mkn->mn", A, slices(W, e))


def gated(A, W, V, e):
    return torch.nn.functional.silu(torch.einsum("mk,mnk->mn", A, slices(W, e))) * torch.einsum("mk,mnk->mn", A, slices(V, e))


def by_offsets(A, W, lo, hi):
    rows = torch.arange(len(A))
    member = ((lo[:, None] <= rows) & (rows < hi[:, None])).to(A.dtype)
    return torch.einsum("gm,mk,gkn->mn", member, A, W)


def scattered(D, t):
    return torch.zeros(9, D.shape[1], dtype=D.dtype).index_add(0, t, D)


#: name -> (algorithm, in torch, shapes of its inputs; ("index", below, ...) are integers, ("sorted", below, ...) in order)
FORMS = {
    "grouped": ("Func f; In A, W, e; Var m, n; RVar k; f[m, n] = rdot(A[m, k], W[e[m], k, n], k);", grouped, {"A": (70, 24), "W": (5, 24, 20), "e": ("index", 5, 70)}),
    "grouped_sorted": ("Func f; In A, W, e; Var m, n; RVar k; f[m, n] = rdot(A[m, k], W[e[m], k, n], k);", grouped, {"A": (70, 24), "W": (5, 24, 20), "e": ("sorted", 5, 70)}),
    "grouped_sum": ("Func f; In A, W, e; Var m, n; RVar k; f[m, n] = rsum(A[m, k] * W[e[m], k, n], k);", grouped, {"A": (33, 24), "W": (5, 24, 20), "e": ("sorted", 5, 33)}),
    "slices_first": ("Func f; In A, W, e; Var n, m; RVar k; f[n, m] = rdot(W[e[m], k, n], A[m, k], k);", lambda A, W, e: grouped(A, W, e).T, {"A": (33, 24), "W": (5, 24, 20), "e": ("sorted", 5, 33)}),
    "gated": ("Func u, f; In A, W, V, e; Var m, n; RVar k; u[m, n] = rdot(A[m, k], W[e[m], n, k], k); f[m, n] = u[m, n] * sigmoid(u[m, n]) * rdot(A[m, k], V[e[m], n, k], k);", gated,
              {"A": (40, 24), "W": (4, 20, 24), "V": (4, 20, 24), "e": ("sorted", 4, 40)}),
    "weighted": ("Func f; In A, W, w, e; Var m, n; RVar k; f[m, n] = w[m] * rdot(A[m, k], W[e[m], k, n], k);", lambda A, W, w, e: w[:, None] * grouped(A, W, e),
                 {"A": (40, 24), "W": (4, 24, 20), "w": (40,), "e": ("sorted", 4, 40)}),
    "gathered": ("Func f; In A, W, t; Var m, n; RVar k; f[m, n] = rdot(A[t[m], k], W[k, n], k);", lambda A, W, t: A[t] @ W, {"A": (30, 24), "W": (24, 20), "t": ("index", 30, 50)}),
    "gathered_and_grouped": ("Func f; In A, W, t, e; Var m, n; RVar k; f[m, n] = rdot(A[t[m], k], W[e[m], k, n], k);", lambda A, W, t, e: grouped(A[t], W, e),
                             {"A": (10, 24), "W": (4, 24, 20), "t": ("index", 10, 40), "e": ("sorted", 4, 40)}),
    "blocks": ("Func f; In A, W, e; Var m, n; RVar k; f[m, n] = rdot(A[m, k], W[e[m / 8], k, n], k);", lambda A, W, e: grouped(A, W, e.repeat_interleave(8)[: len(A)]),
               {"A": (61, 24), "W": (4, 24, 20), "e": ("index", 4, 8)}),
    "batched": ("Func f; In A, W, e; Var b, m, n; RVar k; f[b, m, n] = rdot(A[b, m, k], W[b, e[b, m], k, n], k);",
                lambda A, W, e: torch.stack([grouped(*one) for one in zip(A, W, e)]), {"A": (2, 20, 24), "W": (2, 4, 24, 20), "e": ("sorted", 4, 2, 20)}),
    "scattered": ("Func f; In D, t; Var r, n; RVar m; Extent r = 9; f[r, n] = rsum(where(t[m] == r, D[m, n], 0), m);", scattered, {"D": (50, 20), "t": ("sorted", 9, 50)}),
    "scattered_at_random": ("Func f; In D, t; Var r, n; RVar m; Extent r = 9; f[r, n] = rsum(where(t[m] == r, D[m, n], 0), m);", scattered, {"D": (50, 20), "t": ("index", 9, 50)}),
    "combined": ("Func f; In Y, w, p; Var t, n; RVar j; f[t, n] = rsum(w[t, j] * Y[p[t, j], n], j);", lambda Y, w, p: torch.einsum("tj,tjn->tn", w, Y[p]),
                 {"Y": (60, 20), "w": (30, 2), "p": ("index", 60, 30, 2)}),
}  # fmt: skip


def inputs(shapes: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of the shapes of a form."""
    generator, given = torch.Generator().manual_seed(seed), {}
    for name, s in shapes.items():
        if isinstance(s[0], str):
            t = torch.randint(0, s[1], s[2:], generator=generator)
            given[name] = t.sort(-1).values if s[0] == "sorted" else t
        else:
            given[name] = torch.randn(s, generator=generator)
    return given
