# ruff: noqa: E501 (programs read best on one line)
"""Random programs of integers: bits, casts that saturate, places, conditions over rows and random numbers, with what torch says they are."""

from __future__ import annotations

import torch
from random_draws import Draws
from random_narrow import Drawn

WIDTHS = {"int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64}
ROUNDINGS = {"round": torch.round, "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc, "": torch.trunc}  #: a cast alone drops the fraction
TILES = ("", "f.block(x:4); f.tensorize(x:4);", "f.block(x:2, y:8); f.tensorize(x:2, y:8);", "f.block(x:1); f.tensorize(y:0);", "f.tensorize(x:4, y:4);")


def integer_program(draws: Draws) -> Drawn:
    """Arithmetic of integers of any width, stored as 64 bits or saturated to fewer."""
    generator = torch.Generator().manual_seed(draws.below(1000))
    rows, size = draws.between(1, 9), draws.between(1, 19)
    width = draws.pick(["int8", "uint8", "int32", "int64"])
    largest = 2 ** (20 if width == "int64" else 6)
    n = torch.randint(0 if width == "uint8" else -largest, largest, (rows, size), generator=generator).to(WIDTHS[width])
    m = torch.randint(-50, 50, (size,), generator=generator).to(torch.int32)
    left, right, y = n.long(), m.long(), torch.arange(size)
    forms = [
        ("(N[x, y] & 12) | (M[y] ^ 3)", (left & 12) | (right ^ 3)),
        ("(N[x, y] ^ M[y]) >> 2", (left ^ right) >> 2),
        ("(~N[x, y] << (y & 3)) + (M[y] & 1)", (~left << (y & 3)) + (right & 1)),
        ("(N[x, y] // 5) - ((M[y] & 7) << 1)", left.div(5, rounding_mode="floor") - ((right & 7) << 1)),
        ("where(M[y] > 0, N[x, y] & 255, (M[y] | 1) // 3)", torch.where(right > 0, left & 255, (right | 1).div(3, rounding_mode="floor"))),
        ("(N[x, y] // 3) % 4 + (M[y] & 3)", left.div(3, rounding_mode="floor").remainder(4) + (right & 3)),
    ]
    text, want = draws.pick(forms)
    stored = draws.pick(["", *WIDTHS])
    if stored:
        info = torch.iinfo(WIDTHS[stored])
        text, want = f"cast({text}, {stored})", want.clamp(info.min, info.max).to(WIDTHS[stored])
    return Drawn(f"Func f; In N, M; Var x, y; f[x, y] = {text}; {draws.pick(TILES)} f.compile();", (n, m), (want,))


def rounding_program(draws: Draws) -> Drawn:
    """Numbers that are rounded in some direction and saturated; NaNs and infinities among them."""
    generator = torch.Generator().manual_seed(draws.below(1000))
    a = torch.randn(draws.between(1, 9), draws.between(1, 19), generator=generator) * draws.pick([2, 100, 1e6])
    for value in (torch.nan, torch.inf, -torch.inf):
        a = torch.where((torch.rand(a.shape, generator=generator) < 0.1) & torch.tensor(draws.chance(3)), value, a)
    a = a.to(draws.pick([torch.float32, torch.float16, torch.bfloat16]))
    how, stored = draws.pick(list(ROUNDINGS)), draws.pick(list(WIDTHS))
    info = torch.iinfo(WIDTHS[stored])
    exact = [0 if v != v else max(info.min, min(info.max, int(v))) if abs(v) != torch.inf else (info.max if v > 0 else info.min) for v in ROUNDINGS[how](a.double()).flatten().tolist()]
    inner = f"{how}(A[x, y])" if how else "A[x, y]"
    return Drawn(f"Func f; In A; Var x, y; f[x, y] = cast({inner}, {stored}); {draws.pick(TILES)} f.compile();", (a,), (torch.tensor(exact).to(WIDTHS[stored]).view(a.shape),))


def place_program(draws: Draws) -> Drawn:
    """Places of extrema of rows or columns, perhaps in an index, and conditions over them; ties and NaNs among the elements."""
    generator = torch.Generator().manual_seed(draws.below(1000))
    rows, size = draws.between(1, 9), draws.between(1, 33)
    a, b = torch.randn(rows, size, generator=generator), torch.randn(size, generator=generator)
    a = torch.round(2 * a) if draws.chance(2) else a
    a = torch.where((torch.rand(a.shape, generator=generator) < 0.1) & torch.tensor(draws.chance(3)), torch.nan, a)
    own = draws.pick(["x, y", "y, x"])
    kind = draws.pick(["rargmax", "rargmin", "rany", "rall", "index"])
    if kind == "rany":
        text, want = f"where(rany(A[{own}] > B[y], y), 1, -1) + B[0]", torch.where((a > b).any(1), 1, -1) + b[0]
    elif kind == "rall":
        text, want = f"where(rall(A[{own}] < 2 or isnan(A[{own}]), y), B[0], 0)", torch.where(((a < 2) | a.isnan()).all(1), b[0], 0)
    elif kind == "index":
        text, want = "B[p[x]] * 2", b[a.argmax(1)] * 2
    else:
        text, want = f"{kind}(A[{own}], y)", (a.argmax if kind == "rargmax" else a.argmin)(1)
    tiles = draws.pick(["", "f.block(x:4); f.tensorize(x:4, y:8);", "f.block(x:1); f.tensorize(y:0);", "f.block(x:2); f.tensorize(x:2, y:4); f.split(y:2);"])
    places = f"p[x] = rargmax(A[{own}], y);" if kind == "index" else ""
    tiles = "" if places else tiles
    return Drawn(f"Func {'p, ' * bool(places)}f; In A{', B' * ('B[' in text)}; Var x; RVar y; {places} f[x] = {text}; {tiles} f.compile();", (a.T.contiguous() if own == "y, x" else a, b)[: 1 + ("B[" in text)], (want,))
