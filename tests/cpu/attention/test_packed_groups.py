"""Rows that share the other side of a product, packed into one tile: groups of any size, in blocks that no power of two is."""

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch

import dtkernels
from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.target import target
from dtkernels.lang import parse

CHAIN = """Func s, t, e, u, f; In Q, K, V; Var b, h, m, n; RVar l, d;
s[b, h, m, l] = rdot(Q[b, h, m, d], K[b, h / {g}, l, d], d); t[b, h, m] = rmax(s[b, h, m, l], l); e[b, h, m, l] = exp(s[b, h, m, l] - t[b, h, m]);
u[b, h, m] = rsum(e[b, h, m, l], l); f[b, h, m, n] = rdot(e[b, h, m, l], V[b, h / {g}, l, n], l) / u[b, h, m];
"""


def normal(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype, itemsize", [(torch.float16, 2), (torch.float32, 4)], ids=str)
@pytest.mark.parametrize("group, heads, rows, keys, width", [
    (19, 19, 1, 150, 32), (5, 15, 1, 77, 24), (3, 7, 2, 70, 40), (24, 48, 3, 65, 16), (7, 13, 1, 140, 18),
])  # fmt: skip
def test_groups_of_any_size(group, heads, rows, keys, width, dtype, itemsize):
    """The last group may have fewer heads than the others."""
    groups = -(-heads // group)
    q, k, v = (normal(2, n, m, width, dtype=dtype, seed=i) for i, (n, m) in enumerate(((heads, rows), (groups, keys), (groups, keys))))
    text = CHAIN.format(g=group)
    algorithm = prepare_algorithm(parse(text).algorithm, ("f",))
    sizes = {"b": 2, "h": heads, "m": rows, "n": width, "l": keys, "d": width}
    schedule = default_schedule(algorithm, ("f",), sizes, itemsize, target("h200"))
    assert itemsize == 4 or rows * 2 > group or schedule.sizes("f", "block")["h"] == group
    got = dtkernels.compile(text + str(schedule))(q, k, v).double()
    own = torch.arange(heads) // group
    scores = q.double() @ k.double()[:, own].transpose(-1, -2)
    truth = torch.softmax(scores, -1) @ v.double()[:, own]
    assert (got - truth).abs().max() < (2e-2 if dtype == torch.float16 else 1e-5)


@pytest.mark.parametrize("size", [1, 24, 100])
@pytest.mark.parametrize("block, tile", [(24, 32), (5, 8), (19, 32), (3, 4), (3, 16)])
def test_a_tile_wider_than_its_block_computes_the_block_alone(block, tile, size):
    text = f"Func f; In A; Var x, y; f[x, y] = 2 * A[x, y]; f.block(x:{block}, y:8); f.tensorize(x:{tile}, y:8);"
    a = normal(size, 11, dtype=torch.float32, seed=0)
    assert torch.equal(dtkernels.compile(text)(a), 2 * a)
