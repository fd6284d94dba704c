"""How persistent programs share blocks whose loops a mask makes longer or shorter: the printed loops, run by Python. Without torch."""

from types import SimpleNamespace

import pytest

from dtkernels.algebra.pipeline import prepare
from dtkernels.codegen.emit.triton.grid import grid_lines
from dtkernels.codegen.pipeline import lower
from dtkernels.lang import parse

MASKED = """
Func scores, seen, f; In Q, K, V; Var b, h, m, n; RVar l, d;
scores[b, h, m, l] = rdot(Q[b, h, m, d], K[b, h, l, d], d);
seen[b, h, m, l] = where({}, scores[b, h, m, l], 0);
f[b, h, m, n] = rdot(seen[b, h, m, l], V[b, h, l, n], l);
scores.fuse_at(f, l); seen.fuse_at(f, l);
f.block(b:1, h:1, m:128); f.tensorize(b:1, h:1, m:128, l:64, n:0, d:0); f.persistent(); f.num_warps(8); {} f.compile();
"""
ORDERS = {"heads": "", "rows": "f.map(m, b, h);", "rows of a batch": "f.map(b, m, h);", "rows of few heads": "f.map(b, h:inner/4, m, inner);", "rows of many heads": "f.map(b, h:inner/16, m, inner);"}


class Names:
    """What the lines call the sizes and blocks of a label."""

    def __init__(self) -> None:
        self.tiles: dict[str, str] = {}

    def size(self, label: str) -> str:
        return f"size_{label}"

    def block(self, label: str) -> str:
        return f"BLOCK_{label}"

    def block_index(self, label: str) -> str:
        return label if label in "bh" else f"block_{label}"


def shares(mask: str, order: str, programs: int, **sizes: int) -> list[list[tuple[int, int, int]]]:
    """The blocks that each program takes, in order."""
    (kernel,) = lower(prepare(parse(MASKED.format(mask, order))))
    names = Names()
    lines, depth = grid_lines(kernel, names, balanced=True)
    text = "\n".join([*lines, "    " * depth + "taken.append((b, h, block_m))"])
    found = []
    for program in range(programs):
        tl = SimpleNamespace(
            range=range, program_id=lambda _, p=program: p, num_programs=lambda _: programs, cdiv=lambda a, b: -(-a // b),
            where=lambda c, a, b: a if c else b, cast=lambda x, _: x,
        )  # fmt: skip
        given = {f"size_{x}": n for x, n in sizes.items()} | {"BLOCK_m": 128, "INDEX": int, "taken": (taken := [])} | {n: int(x) for n, x in names.tiles.items()}
        exec("def run():\n" + text + "\nrun()", {"tl": tl, **given})
        found.append(taken)
    return found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mask", ["l <= m", "l >= m"])
@pytest.mark.parametrize("programs, b, h, m", [(132, 4, 16, 2048), (132, 2, 28, 2333), (7, 3, 5, 700), (132, 1, 1, 300), (132, 2, 66, 129), (3, 2, 6, 1000)])
def test_every_block_is_taken_once(order, mask, programs, b, h, m):
    taken = [block for share in shares(mask, ORDERS[order], programs, b=b, h=h, m=m, l=m, d=64, n=64) for block in share]
    assert sorted(taken) == [(i, j, k) for i in range(b) for j in range(h) for k in range(-(-m // 128))]


@pytest.mark.parametrize("order, h, m", [("heads", 16, 2048), ("rows", 16, 2048), ("rows of many heads", 32, 4096)])
@pytest.mark.parametrize("mask", ["l <= m", "l >= m"])
def test_programs_share_long_and_short_loops(mask, order, h, m):
    """One block after the other, without regard to their loops, leaves one program with up to 1.7 times the work of the average."""
    count = m // 128
    work = [sum(k + 1 if mask == "l <= m" else count - k for *_, k in share) for share in shares(mask, ORDERS[order], 132, b=4, h=h, m=m, l=m, d=64, n=64)]
    assert max(work) <= 1.06 * sum(work) / len(work)


@pytest.mark.parametrize("mask", ["l <= m", "l >= m"])
def test_the_longest_come_first(mask):
    first = [share[0][2] for share in shares(mask, ORDERS["rows"], 64, b=4, h=16, m=2048, l=2048, d=64, n=64)]
    assert set(first) == {15 if mask == "l <= m" else 0}
