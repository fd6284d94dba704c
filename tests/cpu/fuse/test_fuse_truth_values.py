"""Tensors of truth values that are joined, padded, chosen, ordered and written to stay truth values."""

import pytest
import torch
import torch.nn.functional as F

import dtkernels


def written(x, key, value):
    x[key] = value
    return x


COLUMN, PLACES = (slice(None), slice(1, 3)), torch.tensor([[1], [0], [3]])
FUNCTIONS = {
    "cat": lambda m, n: torch.cat((torch.ones_like(m[:, :1]), m[:, 1:]), 1),
    "cat of equal parts": lambda m, n: torch.cat((m, n), 1),
    "cat with numbers": lambda m, n: torch.cat((m, n[:1].float()), 0),
    "stack": lambda m, n: torch.stack((m, ~n), -1),
    "pad": lambda m, n: F.pad(m, (1, 0), value=True) ^ F.pad(n, (0, 1)),
    "circular pad": lambda m, n: F.pad(m[None], (1, 1), mode="circular"),
    "diag_embed": lambda m, n: torch.diag_embed(m),
    "maximum": lambda m, n: torch.stack((torch.maximum(m, n), torch.minimum(m, n))),
    "where": lambda m, n: torch.where(m, n, False) | m.masked_fill(n, 0),
    "sort": lambda m, n: m.sort(1).values,
    "slice": lambda m, n: written(m.clone(), COLUMN, n[:, :2]),
    "diagonal": lambda m, n: m[:, :3].clone().fill_diagonal_(True),
    "index": lambda m, n: written(m.clone(), (slice(None), torch.tensor([1, -1])), n[:, :2]),
    "every row": lambda m, n: written(m.clone(), (torch.arange(m.shape[0]),), n),
    "scatter": lambda m, n: m.scatter(1, PLACES, n) | torch.zeros_like(m).scatter(1, PLACES, True),
    "index_fill": lambda m, n: m.index_fill(1, PLACES[0], True) & m.index_copy(1, PLACES[0], n[:, :1]),
    "added": lambda m, n: torch.index_put(m, (torch.arange(3) - 1,), n, accumulate=True),
    "slice_scatter": lambda m, n: torch.slice_scatter(m, n[:, :2], 1, 1, 3),
}


@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_truth_values_stay_truth_values(name, interpreted, monkeypatch):
    if not interpreted:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    generator = torch.Generator().manual_seed(2)
    m, n = (torch.rand(3, 4, generator=generator) > 0.5 for _ in range(2))
    got, want = dtkernels.fuse(FUNCTIONS[name])(m, n), FUNCTIONS[name](m, n)
    assert got.dtype == want.dtype and torch.equal(got, want)
