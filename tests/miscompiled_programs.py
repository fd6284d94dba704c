"""Programs that Triton compiled wrongly on a GPU, each as (text, shapes of its inputs, float64 reference)."""

import numpy as np
import torch


def _ratio(a, w):
    e = np.exp(a)
    return (e @ w) / e.sum(1, keepdims=True)


def _product(k: int) -> tuple:
    text = f"Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k); f.block(x:16, y:16); f.tensorize(x:16, y:16, k:{k});"
    return text, ((33, 40), (40, 24)), lambda a, b: a @ b


PROGRAMS = {
    "sum of products, 4 terms at once": _product(4),
    "sum of products, 8 terms at once": _product(8),
    "sum of products with exponentials": (
        "Func e, f; In A, W; Var x, y; RVar k; e[x, k] = exp(A[x, k]); f[x, y] = rdot(e[x, k], W[k, y], k) / rsum(e[x, k], k);"
        "e.fuse_at(f, k); f.block(x:16, y:16); f.tensorize(x:16, y:16, k:8);",
        ((20, 40), (40, 20)),
        _ratio,
    ),
    "unrolled parts": (
        "Func f; In A; Var x; RVar k; f[x] = rsum(A[x, k], k); f.block(x:8); f.tensorize(x:8, k:8); f.split(k:3); f.unroll(k:3);",
        ((5, 4),),
        lambda a: a.sum(1),
    ),
    "tanh of integers": (
        "Func f; In A; Var x, y; f[x, y] = A[x, y] * tanh((y + 2) % 4); f.block(x:4, y:16); f.tensorize(x:4, y:16); f.approximate(tanh);",
        ((5, 20),),
        lambda a: a * np.tanh((np.arange(20) + 2) % 4),
    ),
    "shared exponentials of a narrow tile": (
        "Func f; In A; Var x; RVar k; f[x] = rsum(exp(A[x, k]), k); f.block(x:1); f.tensorize(k:4); f.approximate(exp:1/8);",
        ((5, 11),),
        lambda a: np.exp(a).sum(1),
    ),
    "shared exponentials of a whole extent": (
        "Func f; In A; Var x; RVar k; f[x] = rsum(exp(A[x, k]), k); f.block(x:1); f.tensorize(k:0); f.approximate(exp:1/4);",
        ((5, 2),),
        lambda a: np.exp(a).sum(1),
    ),
}


def inputs(name: str, device: str = "cpu") -> list[torch.Tensor]:
    """Random float32 inputs of a program, the same each time."""
    _, shapes, _ = PROGRAMS[name]
    return [
        torch.tensor(np.random.default_rng(i).uniform(-1.5, 1.5, shape), dtype=torch.float32, device=device)
        for i, shape in enumerate(shapes)
    ]
