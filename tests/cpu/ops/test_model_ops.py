"""Ops of newer models and options of the losses, against float64 formulas written with torch: values and every gradient, in float32 by the interpreter."""

import pytest
import torch
import torch.nn.functional as F
from against_torch import compare, normal, simplex

from dtkernels import ops

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
TARGET = torch.tensor([3, 0, 8, -100, 2])


def to(dtype, *tensors):
    return [t.to(dtype) for t in tensors]


def over(x, modulation):
    """A modulation (C,), (B, C) or of the shape of x, made to broadcast."""
    return modulation if modulation.dim() == 1 or modulation.shape == x.shape else modulation.reshape(x.shape[0], *[1] * (x.dim() - 2), -1)


@DTYPES
@pytest.mark.parametrize("shape", [(7,), (2, 7), (2, 5, 7)], ids=str)
def test_modulated_rmsnorm(shape, dtype):
    def theirs(x, w, s, z=None):
        return F.rms_norm(x, (7,), w + 1, 1e-6) * (1 + over(x, s)) + (0 if z is None else over(x, z))

    tensors = to(dtype, normal(2, 5, 7), normal(7), normal(*shape), normal(*shape, seed=1))
    for count in (3, 4):
        compare(lambda *t: ops.modulated_rmsnorm(*t, offset=1), theirs, tensors[:count], 2e-5)


def test_modulated_rmsnorm_of_nothing_and_rmsnorm_without_a_weight():
    assert ops.modulated_rmsnorm(torch.ones(0, 5, 7), torch.ones(7), torch.ones(0, 7)).shape == (0, 5, 7)
    assert ops.modulated_rmsnorm(torch.ones(2, 0, 7), torch.ones(7), torch.ones(2, 7)).shape == (2, 0, 7)
    compare(lambda x: ops.rmsnorm(x, None), lambda x: F.rms_norm(x, (7,), None, 1e-6), to(torch.float32, normal(5, 7)), 1e-5)


@DTYPES
def test_attention_residual(dtype):
    def theirs(blocks, query, weight):
        share = (F.rms_norm(blocks, (7,), weight, 1e-6) * query).sum(-1).softmax(0)
        return (share[..., None] * blocks).sum(0)

    compare(ops.attention_residual, theirs, to(dtype, normal(3, 2, 5, 7), normal(7), normal(7, seed=1)), 2e-5)


@DTYPES
@pytest.mark.parametrize("out", [1, 4])
def test_mix_streams(out, dtype):
    def theirs(streams, mixing, output=None, gain=None):
        return mixing @ streams + (0 if output is None else gain[..., None] * output[..., None, :])

    tensors = to(dtype, normal(2, 3, 4, 9), normal(2, 3, out, 4), normal(2, 3, 9), normal(2, 3, out))
    compare(ops.mix_streams, theirs, tensors, 2e-5)
    compare(ops.mix_streams, theirs, tensors[:2], 2e-5)


def rotated(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


@DTYPES
@pytest.mark.parametrize("sections", [(2, 1, 3), (0, 6, 0)], ids=str)
def test_multimodal_rope(sections, dtype):
    def theirs(q, k, cos, sin):
        cos, sin = (torch.cat([m[i % 3] for i, m in enumerate(t.split(list(sections) * 2, -1))], -1)[:, None] for t in (cos, sin))
        return q * cos + rotated(q) * sin, k * cos + rotated(k) * sin

    tensors = to(dtype, normal(2, 4, 5, 12), normal(2, 2, 5, 12), normal(3, 2, 5, 12), normal(3, 2, 5, 12, seed=1))
    compare(lambda *t: ops.multimodal_rope(*t, sections), theirs, tensors, 2e-5)


@DTYPES
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"dilation": 2}, {"sparse": True}], ids=str)
def test_multi_token_attention(options, dtype):
    def theirs(scores, weight, bias=None):
        length, dilation = scores.shape[-1], options.get("dilation", 1)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        if options.get("sparse"):
            rows = [torch.cat((simplex(scores[..., i, : i + 1]), scores.new_zeros(*scores.shape[:2], length - 1 - i)), -1) for i in range(length)]
            shares = torch.stack(rows, -2)
        else:
            shares = scores.masked_fill(~seen, -float("inf")).softmax(-1)
        found = F.conv2d(shares, weight, bias, padding=dilation * (weight.shape[-1] // 2), dilation=dilation, groups=options.get("groups", 1))
        return found.masked_fill(~seen, 0)

    tensors = to(dtype, normal(2, 4, 7, 7), normal(6, 4 // options.get("groups", 1), 3, 3), normal(6))
    for count in (2, 3) if dtype == torch.float64 else (3,):
        compare(lambda *t: ops.multi_token_attention(*t, **options), theirs, tensors[:count], 5e-5)


@DTYPES
def test_logprobs(dtype):
    def theirs(logits):
        found = F.log_softmax(logits / 0.7, -1)
        return found.gather(-1, TARGET.clamp(min=0)[:, None])[:, 0], -(found.exp() * found).sum(-1)

    compare(lambda x: ops.logprobs(x, TARGET.clamp(min=0), temperature=0.7), theirs, to(dtype, normal(5, 9)), 2e-5)


def weighted(logits, weight=None, softcap=None, z_loss=0.0, label_smoothing=0.0, reduction="mean"):
    """Torch's cross entropy has no gradient for the weight."""
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    counts, classes = TARGET != -100, logits.shape[-1]
    weight = logits.new_ones(classes) if weight is None else weight
    less = -F.log_softmax(logits, -1)
    picked = weight[TARGET.clamp(min=0)] * less.gather(-1, TARGET.clamp(min=0)[:, None])[:, 0]
    rows = ((1 - label_smoothing) * picked + label_smoothing * (weight * less).sum(-1) / classes) * counts
    squares = z_loss * torch.logsumexp(logits, -1) ** 2 * counts
    if reduction == "none":
        return rows + squares
    if reduction == "sum":
        return rows.sum() + squares.sum()
    return rows.sum() / (weight[TARGET.clamp(min=0)] * counts).sum() + squares.sum() / counts.sum()


@DTYPES
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weighted_cross_entropy(reduction, dtype):
    for options in ({}, {"softcap": 3.0, "z_loss": 0.1}, {"label_smoothing": 0.2, "z_loss": 0.1}):
        for tensors in ((normal(5, 9),), (normal(5, 9), normal(9).abs())):
            compare(lambda *t: ops.weighted_cross_entropy(t[0], TARGET, *t[1:], reduction=reduction, **options), lambda *t: weighted(*t, reduction=reduction, **options), to(dtype, *tensors), 2e-5)  # noqa: B023, E501
    theirs = F.cross_entropy(normal(5, 9), TARGET, normal(9).abs(), label_smoothing=0.2)
    torch.testing.assert_close(weighted(normal(5, 9), normal(9).abs(), label_smoothing=0.2), theirs)  # the formula above is torch's


def divergence(name, student, teacher):
    """Of probabilities for tvd, else of log-probabilities; the mean over the rows that are not ignored."""
    if name == "tvd":
        rows = (student - teacher).abs().sum(-1) / 2
    elif name.endswith("jsd"):
        middle = (0.5 * student.exp() + 0.5 * teacher.exp()).log()
        rows = (0.5 * teacher.exp() * (teacher - middle) + 0.5 * student.exp() * (student - middle)).sum(-1)
    else:
        rows = (teacher.exp() * (teacher - student)).sum(-1)
    return rows[TARGET != -100].mean()


@DTYPES
@pytest.mark.parametrize("name", ["kl_divergence", "jsd", "tvd"])
def test_divergences_ignore_rows_and_take_probabilities(name, dtype):
    normalize = torch.softmax if name == "tvd" else torch.log_softmax
    student, teacher = to(dtype, normal(5, 9), normal(5, 9, seed=1))
    op = getattr(ops, name)
    compare(lambda a, b: op(a, b, target=TARGET), lambda a, b: divergence(name, normalize(a, -1), normalize(b, -1)), (student, teacher), 2e-5)
    given = {"inputs": "probs" if name == "tvd" else "log_probs"}
    compare(lambda a, b: op(a, b, target=TARGET, **given), lambda a, b: divergence(name, a, b), (normalize(student, -1), normalize(teacher, -1)), 2e-5)
    broken = student.clone().index_fill_(0, torch.tensor([3]), float("nan"))
    assert op(broken, teacher, target=TARGET).isfinite()  # what is ignored is not read into the mean


@DTYPES
@pytest.mark.parametrize("name", ["linear_kl", "linear_jsd"])
def test_divergences_of_last_layers_ignore_rows(name, dtype):
    tensors = to(dtype, normal(5, 3), normal(9, 3), normal(5, 4), normal(9, 4))
    compare(lambda *t: getattr(ops, name)(*t, target=TARGET), lambda h, w, g, v: divergence(name, (h @ w.T).log_softmax(-1), (g @ v.T).log_softmax(-1)), tensors, 5e-5)


X, W = torch.ones(2, 5, 8), torch.ones(8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.modulated_rmsnorm(X, W, torch.ones(3, 8)), ValueError, "modulated_rmsnorm: x is .* scale and shift"),
        (lambda: ops.modulated_rmsnorm(X, W, W, torch.ones(2, 8)), ValueError, "modulated_rmsnorm: x is"),
        (lambda: ops.modulated_rmsnorm(X, None, W), TypeError, "weight is None; allowed: a tensor"),
        (lambda: ops.attention_residual(X, W, torch.ones(7)), ValueError, "blocks is"),
        (lambda: ops.mix_streams(X, torch.ones(2, 3, 4)), ValueError, "mixing"),
        (lambda: ops.mix_streams(X, torch.ones(2, 3, 5), W), ValueError, "output and gain are given together"),
        (lambda: ops.multimodal_rope(*[torch.ones(1, 1, 2, 4)] * 2, *[torch.ones(3, 1, 2, 4)] * 2, (1, 1, 1)), ValueError, "add up to D / 2, 2; got"),
        (lambda: ops.multimodal_rope(*[torch.ones(1, 1, 2, 4)] * 4, (1, 1, 0)), ValueError, "cos and sin"),
        (lambda: ops.multi_token_attention(torch.ones(1, 2, 4, 4), torch.ones(2, 2, 2, 2)), ValueError, "with R odd"),
        (lambda: ops.multi_token_attention(torch.ones(1, 2, 4, 4), torch.ones(2, 2, 3, 3), padding=0), ValueError, "padding keeps the size"),
        (lambda: ops.logprobs(X, torch.ones(2, 5)), TypeError, "target is torch.float32; allowed: integers"),
        (lambda: ops.logprobs(X, torch.ones(2, dtype=torch.int64)), ValueError, "target has a class for each row"),
        (lambda: ops.weighted_cross_entropy(X, torch.ones(2, 5, dtype=torch.int64), torch.ones(5)), ValueError, "weight is"),
        (lambda: ops.jsd(X, X, target=torch.ones(2, dtype=torch.int64)), ValueError, "jsd: target has a class for each row"),
        (lambda: ops.tvd(X, X, inputs="log_probs"), ValueError, "tvd: inputs is 'log_probs'; allowed: logits, probs"),
        (lambda: ops.linear_kl(X, torch.ones(4, 8), X, torch.ones(4, 8), target=X[..., 0]), TypeError, "target is torch.float32"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_in_one_line(call, error, message):
    with pytest.raises(error, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_targets_out_of_range(monkeypatch):
    logits, target = torch.zeros(2, 3), torch.tensor([1, 3])
    assert ops.weighted_cross_entropy(logits, target, reduction="none").isinf().tolist() == [False, True]
    assert ops.logprobs(logits, target).logprobs[1] == -float("inf")
    monkeypatch.setenv("DTKERNELS_CHECK", "1")
    for op in (ops.weighted_cross_entropy, ops.logprobs):
        with pytest.raises(IndexError, match=r"target is 3 at \[1\]; allowed: 0 to 2"):
            op(logits, target)


def test_backward_under_autocast_computes_what_it_computes_outside(monkeypatch):
    """torch.autocast may be on where backward runs; the reference's products were then rounded to 16 bits, other than in forward."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")
    tensors = [10 * t.float() for t in (normal(5, 33), normal(9, 33), normal(5, 34), normal(9, 34))]
    found = []
    for inside in (False, True):
        hidden = tensors[0].clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = ops.linear_jsd(hidden, *tensors[1:])
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        found.append(hidden.grad)
    assert torch.equal(*found)
