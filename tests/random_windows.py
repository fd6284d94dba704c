# ruff: noqa: E501 (programs read best on one line)
"""Random programs of windows, worked-out extents and scans, with random tiles: random_programs.py has the other forms."""

from __future__ import annotations

from random_draws import Draws

TILES = (1, 2, 4, 8, 16)


def window_program(draws: Draws) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """A reduction or a product of strided, dilated and padded windows; the text with a schedule, and the shapes of its inputs."""
    s, d, p = draws.between(1, 3), draws.between(1, 3), draws.between(0, 3)
    width, size, channels = draws.between(1, 4), draws.between(12, 23), draws.between(1, 5)
    extent = f"(A[1] + {2 * p} - {d} * (len(r) - 1) - 1) / {s} + 1"
    at = f"{s} * x + {d} * r - {p}"
    kind = draws.pick(["rdot", "rsum", "rmean", "rmax", "rmin", "up"])
    tiles = f"f.block(x:{(b := draws.pick(TILES))}); f.tensorize(x:{draws.pick([t for t in TILES if t <= b])}"
    if kind == "rdot":
        text = f"Func f; In A, W; Var o, x; RVar c, r; Extent x = {extent}; f[o, x] = rdot(A[c, {at}], W[o, c, r], c, r); {tiles}, c:{draws.pick((0, *TILES))}, r:{draws.pick(TILES)}, o:{draws.pick((0, 1, 2))});"
        return text, ((channels, size), (draws.between(1, 5), channels, width))
    if kind == "up":
        return f"Func f; In A; Var c, x; Extent x = {s} * A[1] + {p}; f[c, x] = A[c, x / {s}] - A[c, (x + {d}) % len(x) / {s}]; {tiles});", ((channels, size),)
    text = f"Func f; In A; Var c, x; RVar r; Extent r = {width}; Extent x = {extent}; f[c, x] = {kind}(A[c, {at}] * (1 + r), r); {tiles}, r:{draws.pick((0, 1, 2, 4))});"
    return text, ((channels, size),)


def scan_program(draws: Draws) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """A scan of computed terms, alone or inside an expression, along either dimension, and perhaps a scan of that."""
    form = draws.pick(["x, t", "t, x"])
    term = draws.pick(["A[{0}]", "tanh(A[{0}])", "0.5 * A[{0}] - t", "where(A[{0}] > 0, A[{0}], 0)", "1"]).format(form)
    how = draws.pick(["", ", reversed", ", exclusive", ", reversed, exclusive"])
    kind = draws.pick(["sum", "prod", "max", "min", "recur"])
    scan = f"rrecur(sigmoid(A[{form}]), {term}, t{how.replace(', exclusive', '')})" if kind == "recur" else f"rscan({kind}, {term}, t{how})"
    tiles = f"block(x:{(b := draws.pick(TILES))}); {{0}}.tensorize(x:{draws.pick([n for n in TILES if n <= b])}, t:{draws.pick((0, *TILES))});"
    shape = (draws.between(1, 9), draws.between(1, 14))
    last = draws.pick(["g[{0}]", "g[{0}] * A[{0}]", "A[{0}] - g[{0}]", "rscan(sum, g[{0}], x)"]).format(form)
    fused = "g.fuse_at(f, t); f." + tiles.format("f") if "rscan" not in last and draws.chance(2) else "g." + tiles.format("g")
    return f"Func g, f; In A; Var x, t; g[{form}] = {scan}; f[{form}] = {last} + A[{form}]; {fused}", (shape,)
