"""Weighted sums of differences between rows, as products: far from 0 they lose no more digits than near it."""

import pytest
import torch

import dtkernels

FORCES = """op: forces
doc: |
  Forces between points.
algorithm: |
  Func w, forces; In R, q; Var i, c; RVar j, k; w[i, j] = pow(rsum(pow(R[i, k] - R[j, k], 2), k) + 0.1, -1.5);
  forces[i, c] = rsum(q[j] * w[i, j] * (R[i, c] - R[j, c]), j);
"""


def forces(r, q):
    apart = r[:, None] - r
    return ((q * (apart.square().sum(-1) + 0.1) ** -1.5)[..., None] * apart).sum(1)


@pytest.mark.parametrize("offset", [0, 1000])
def test_forces_between_points_far_from_the_origin(tmp_path, offset):
    (tmp_path / "forces.yaml").write_text(FORCES)
    op = dtkernels.register(tmp_path / "forces.yaml")
    torch.manual_seed(0)
    r, q = 4 * torch.rand(40, 3) + offset, torch.randn(40)
    truth = forces(r.double(), q.double())
    assert (op(r, q) - truth).norm() < 2e-5 * truth.norm()  # 2e-3 at 1000, where sides were summed as they are
    got, wanted = (torch.autograd.functional.vjp(fn, (r, q), torch.ones(40, 3))[1][0] for fn in (op, forces))
    assert torch.allclose(got, wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item())


def test_a_point_near_which_a_weight_is_largest_is_not_summed_with_itself(tmp_path):
    (tmp_path / "forces.yaml").write_text(FORCES.replace("0.1", "1e-6"))
    op = dtkernels.register(tmp_path / "forces.yaml")
    torch.manual_seed(0)
    r, q = 4 * torch.rand(40, 3), torch.randn(40)
    apart = r.double()[:, None] - r.double()
    truth = ((q * (apart.square().sum(-1) + 1e-6) ** -1.5)[..., None] * apart).sum(1)
    assert (op(r, q) - truth).norm() < 2e-5 * truth.norm()  # 9, where a weight of 1e9 is on both sides
