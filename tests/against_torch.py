"""Values and every gradient of an op beside those of a formula in torch."""

import torch


def normal(*shape, seed=0):
    """Return float64 values that depend on the shape and the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def compare(ours, theirs, tensors, tolerance=1e-9):
    """Values and gradients of both, for tensors of floating point; ``tensors`` may hold others."""
    results = []
    for function in (ours, theirs):
        given = [t.clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
        found = function(*given)
        found = found if isinstance(found, tuple) else (found,)
        weighted = sum((f.double() * normal(*f.shape, seed=i)).sum() for i, f in enumerate(found))
        grads = torch.autograd.grad(weighted, [t for t in given if t.requires_grad], allow_unused=True)
        results.append([*(f.detach().double() for f in found), *(torch.zeros(()) if g is None else g.double() for g in grads)])
    for a, b in zip(*results):
        assert a.shape == b.shape or not a.dim() or not b.dim()
        torch.testing.assert_close(a, b.expand_as(a) if not b.dim() else b, atol=tolerance, rtol=tolerance, equal_nan=True, check_dtype=False)


def simplex(x):
    """By sorting, as in the paper."""
    ordered, count = x.sort(-1, descending=True).values, torch.arange(1, x.shape[-1] + 1)
    inside = (1 + count * ordered > ordered.cumsum(-1)).sum(-1, keepdim=True)
    return (x - (ordered.cumsum(-1).gather(-1, inside - 1) - 1) / inside).clamp(min=0)
