# ruff: noqa: E501 (programs read best on one line)
"""Random programs of float8 and of largest elements, with random tiles and what they are in float64: random_programs.py has the other forms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from random_draws import Draws

FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LEFT = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32)
#: text of a scale of W[n, k], its shape, and what it is of k and n
SCALES = {
    "": ((1,), lambda s, n, k: s * 0 + 1),
    " * s[0]": ((1,), lambda s, n, k: s),
    " * s[n]": (("n",), lambda s, n, k: s[n]),
    " * s[k]": (("k",), lambda s, n, k: s[k]),
    " * s[n, k / 4]": (("n", "g"), lambda s, n, k: s[n, k // 4]),
}


@dataclass(frozen=True)
class Drawn:
    """A program, the tensors to call it with, what its results are, and how far they may be off relative to the largest."""

    text: str
    tensors: tuple[torch.Tensor, ...]
    want: tuple[torch.Tensor, ...]
    tolerance: float = 0.0


def float8_program(draws: Draws) -> Drawn:
    """A product with a side in float8, the other in any dtype, perhaps with scales, masked, of what another Func casts, or cast itself."""
    generator = torch.Generator().manual_seed(draws.below(1000))
    m, n, k = (draws.pick([1, 5, 16, 20, 33]) for _ in range(3))
    left, right = draws.pick(LEFT), draws.pick(list(FLOAT8.values()))
    a, w = torch.randn(m, k, generator=generator).to(left), torch.randn(n, k, generator=generator).to(right)
    said = draws.pick(list(SCALES))
    shape, spread = SCALES[said]
    s = torch.rand([{"n": n, "k": k, "g": -(-k // 4)}.get(size, size) for size in shape], generator=generator) + 0.5
    made = draws.pick(["", "", "e4m3", "e5m2"])
    first, exact = ("g[m, k]", round_to(2 * a.double(), made)) if made else ("A[m, k]", a.double())
    if masked := draws.chance(3):
        first, exact = f"where(k <= m, {first}, 0)", exact * (torch.arange(k) <= torch.arange(m)[:, None])
    scale = spread(s.double(), torch.arange(n)[:, None], torch.arange(k))
    want = exact @ (w.double() * scale).T
    product, result = f"rdot({first}, W[n, k]{said}, k)", draws.pick(["", "", "bf16"])
    product = f"cast({product}, {result})" if result else product
    tiles = f"f.block(m:{(b := draws.pick([16, 32]))}, n:16); f.tensorize(m:{b}, n:16, k:{draws.pick([0, 16, 32])});"
    tiles += draws.pick(["", "f.descriptor(W);", "f.split(k:2);", "f.stage(W);"]) if not masked and not made and "split" not in tiles else ""
    how = draws.pick(["g.fuse_at(f, k);", "g.block(m:4, k:16); g.tensorize(m:4, k:16);"]) if made else ""
    funcs, kind = ("g, f", "Var m, n, k;") if made else ("f", "Var m, n; RVar k;")
    text = f"Func {funcs}; In A, W{', s' if said else ''}; {kind} {f'g[m, k] = cast(2 * A[m, k], {made}); ' if made else ''}f[m, n] = {product}; {how} {tiles} f.compile();"
    coarse = left == torch.bfloat16 or result == "bf16"
    return Drawn(text, (a, w, s) if said else (a, w), (want,), 2**-6 if coarse else 2**-9)


def round_to(x: torch.Tensor, name: str) -> torch.Tensor:
    """``x``, which is in the range, in a float8 dtype of torch's conversion."""
    return x.float().to(FLOAT8[name]).double() if name else x


def top_k_program(draws: Draws) -> Drawn:
    """The largest elements of rows or columns, and their places, of what is computed with few roundings; ties, NaNs and infinities among them."""
    generator = torch.Generator().manual_seed(draws.below(1000))
    rows, size, count = draws.between(1, 6), draws.pick([1, 3, 8, 17, 30]), draws.pick([1, 2, 3])
    a, w = torch.randn(rows, size, generator=generator), torch.rand(size, generator=generator)
    if draws.chance(2):
        a = torch.round(2 * a)  # ties
    for value in (torch.nan, torch.inf, -torch.inf):
        a = torch.where((torch.rand(a.shape, generator=generator) < 0.2) & torch.tensor(draws.chance(3)), value, a)
    text, e = draws.pick([("{A}", a), ("-{A}", -a), ("abs({A})", a.abs()), ("{A} * w[y]", a * w), ("where({A} > 0, {A}, 0)", torch.where(a > 0, a, 0))])
    own, last = draws.pick([("x, y", "x, j"), ("y, x", "j, x")])
    text = text.replace("{A}", f"A[{own}]")
    places = torch.tensor([sorted(range(size), key=lambda i, r=r: ((0, 0.0) if r[i] != r[i] else (1, -r[i]), i)) for r in e.tolist()])[:, :count]
    places = torch.cat([places, places.new_zeros(rows, max(count - size, 0))], 1)
    values = torch.where(torch.arange(count) < size, e.gather(1, places), -torch.inf)
    turned = [t.T if last == "j, x" else t for t in (values, places)]
    tiles = f"block(x:{(b := draws.pick([4, 8]))}, j:8); {{0}}.tensorize(x:{b}, j:8, y:{draws.pick([0, 0, 8, 16])});"
    tiles = "f." + tiles.format("f") + " i." + tiles.format("i")
    inputs = "A, w" if "w[y]" in text else "A"
    program = f"Func f, i; In {inputs}; Var x, j; RVar y; Extent j = {count}; f[{last}] = rtopk({text}, y, j); i[{last}] = rargtopk({text}, y, j); {tiles} f.compile(); i.compile();"
    return Drawn(program, (a.T if own == "y, x" else a, w)[: 1 + ("w[y]" in text)], tuple(turned))
