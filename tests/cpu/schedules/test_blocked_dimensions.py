"""Reductions over blocks of a tensor by their default schedule, and the rest of what a quantizer by blocks computes."""

import pytest
import torch

from dtkernels.lang import parse
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator

TEXT = (
    "Func s, f; In W; Var p, q, o, i; RVar r, c; Extent p = W[0] / 24; Extent q = W[1] / 32; Extent r = 24; Extent c = 32;"
    "s[p, q] = {}(abs(W[24 * p + r, 32 * q + c]), r, c); f[o, i] = W[o, i] / s[o / 24, i / 32]; s.compile(); f.compile();"
)


@pytest.mark.parametrize("kind", ["rmax", "rsum"])
def test_blocks_are_reduced(kind):
    torch.manual_seed(0)
    W = torch.randn(72, 64)
    got = Operator(Spec("blocks", "Elements over what their block is reduced to.", parse(TEXT.format(kind))))(W)
    blocks = W.double().abs().reshape(3, 24, 2, 32)
    s = blocks.amax((1, 3)) if kind == "rmax" else blocks.sum((1, 3))
    f = W.double() / s.repeat_interleave(24, 0).repeat_interleave(32, 1)
    for mine, theirs in zip(got, (s, f), strict=True):
        assert (mine.double() - theirs).abs().max() <= 1e-6 * theirs.abs().max()
