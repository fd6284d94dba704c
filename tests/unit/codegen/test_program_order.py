"""The order of blocks under a mask: as many heads together as the L2 keeps what they read."""

import pytest

from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.target import target
from dtkernels.lang.parser import parse

CAUSAL = """
Func scores, seen, f; In Q, K, V; Var b, h, m, n; RVar l, d;
scores[b, h, m, l] = rdot(Q[b, h, m, d], K[b, h, l, d], d);
seen[b, h, m, l] = where(l <= m, scores[b, h, m, l], 0);
f[b, h, m, n] = rdot(seen[b, h, m, l], V[b, h, l, n], l);
f.compile();
"""


def order(text: str, gpu: str = "a100", **sizes: int) -> str:
    """The map of f that the default schedule prints, what is between its brackets; empty where there is none."""
    algorithm = parse(text).algorithm
    lines = str(default_schedule(algorithm, ("f",), sizes, 2, target(gpu))).splitlines()
    return next((line[len("f.map(") : -2] for line in lines if line.startswith("f.map(")), "")


def sizes(b: int, h: int, m: int, d: int) -> dict[str, int]:
    return dict(b=b, h=h, m=m, l=m, d=d, n=d)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (sizes(2, 10, 1000, 64), "m, b, h"),  # 5 MB in all, of the 31 that are kept
        (sizes(8, 16, 1024, 64), "b:b1/4, m, b1, h"),  # 4 MB for one of b
        (sizes(16, 32, 1024, 64), "b:b1/2, m, b1, h"),
        (sizes(4, 16, 4096, 64), "b, m, h"),  # 16 MB for one of b
        (sizes(4, 32, 4096, 64), "b, h:h1/16, m, h1"),
        (sizes(4, 32, 16384, 64), "b, h:h1/4, m, h1"),
        (sizes(1, 2, 262144, 64), ""),  # not even one head
    ],
)
def test_heads_go_together_while_the_l2_keeps_them(given, expected):
    assert order(CAUSAL, **given) == expected


def test_a_larger_l2_keeps_more_heads():
    assert order(CAUSAL, "l40s", **sizes(4, 32, 16384, 64)) == "b, h:h1/16, m, h1"


def test_what_all_heads_read_counts_once_for_each():
    """Keys of a quarter of the heads: one head reads as much as with keys of its own."""
    shared = CAUSAL.replace("K[b, h, l, d]", "K[b, h / 4, l, d]").replace("V[b, h, l, n]", "V[b, h / 4, l, n]")
    assert order(shared, **sizes(16, 32, 1024, 64)) == order(CAUSAL, **sizes(16, 32, 1024, 64))


def test_without_a_mask_blocks_stay_in_order():
    assert not order(CAUSAL.replace("l <= m", "d_is_even > 0").replace("In Q", "SIn d_is_even; In Q"), **sizes(16, 32, 1024, 64))
