# ruff: noqa: E501 (formulas read best on one line)
"""Losses on logits, last layers and log-probabilities, and norms, against float64 formulas written with torch: values and every gradient."""

import pytest
import torch
import torch.nn.functional as F
from against_torch import compare, normal, simplex

from dtkernels import ops


def masks(rows, length, seed=0):
    return torch.rand(rows, length, generator=torch.Generator().manual_seed(seed)) < 0.7


X, V, K, J = 11, 37, 13, 7  # an odd vocabulary
HIDDEN, WEIGHT, BIAS = normal(X, K), normal(V, K, seed=1), normal(V, seed=2)
TARGET = torch.randint(V, (X,), generator=torch.Generator().manual_seed(3))
TARGET[2] = TARGET[7] = -100


def cross_entropy(h, w, b=None, t=TARGET, smoothing=0.0, cap=None, z=0.0, reduction="mean"):
    logits = F.linear(h, w, b)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    rows = F.cross_entropy(logits, t, label_smoothing=smoothing, reduction="none") + z * torch.logsumexp(logits, -1) ** 2 * (t != -100)
    return rows if reduction == "none" else rows.sum() if reduction == "sum" else rows.sum() / (t != -100).sum()


OPTIONS = [
    ({}, {}),
    ({"reduction": "none"}, {"reduction": "none"}),
    ({"reduction": "sum", "label_smoothing": 0.2}, {"reduction": "sum", "smoothing": 0.2}),
    ({"softcap": 3.0, "z_loss": 0.01}, {"cap": 3.0, "z": 0.01}),
    ({"softcap": 2.0, "z_loss": 0.1, "label_smoothing": 0.1, "reduction": "none"}, {"cap": 2.0, "z": 0.1, "smoothing": 0.1, "reduction": "none"}),
]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), OPTIONS)
def test_linear_cross_entropy(ours, theirs, biased):
    tensors = (HIDDEN, WEIGHT, BIAS) if biased else (HIDDEN, WEIGHT)
    loss = lambda h, w, b=None: ops.linear_cross_entropy(h, w, TARGET, b, **ours)  # noqa: E731
    compare(loss, lambda *t: cross_entropy(*t, **theirs), tensors, 3e-5)  # the result is float32


@pytest.mark.parametrize(("ours", "theirs"), OPTIONS[:1] + OPTIONS[-1:])
def test_linear_cross_entropy_by_kernels(ours, theirs):
    tensors = [t.float() for t in (HIDDEN, WEIGHT, BIAS)]
    compare(lambda h, w, b: ops.linear_cross_entropy(h, w, TARGET, b, **ours), lambda *t: cross_entropy(*t, **theirs), tensors, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_product_of_low_rank_is_added(dtype):
    tensors = [t.to(dtype) for t in (HIDDEN, WEIGHT, normal(X, 3, seed=5), normal(V, 3, seed=6))]
    ours, theirs = OPTIONS[-1]
    truth = lambda h, w, p, q: cross_entropy(torch.cat((h, p), -1), torch.cat((w, q), -1), **theirs)  # noqa: E731
    compare(lambda h, w, p, q: ops.linear_cross_entropy(h, w, TARGET, lora=(p, q), **ours), truth, tensors, 1e-4)


def test_what_one_shard_adds():
    """Log-sum-exp and the logit of the target, 0 where the shard has it not; with smoothing a share of all logits."""
    target, h = torch.tensor([0, -1, V, 5]), HIDDEN[:4]

    def theirs(h, w, b):
        z = 2 * torch.tanh(F.linear(h, w, b) / 2)
        picked = torch.where((target >= 0) & (target < V), z.gather(-1, target.clamp(0, V - 1)[:, None])[:, 0], 0)
        return z.logsumexp(-1), 0.9 * picked + 0.1 / 50 * z.sum(-1)

    call = lambda h, w, b: tuple(ops.linear_logsumexp(h, w, target, b, softcap=2.0, label_smoothing=0.1, classes=50))  # noqa: E731
    compare(call, theirs, (h, WEIGHT, BIAS), 3e-5)


def test_shift_and_leading_dimensions():
    h, t = normal(2, 6, K), torch.arange(12).view(2, 6)
    compare(lambda h, w: ops.linear_cross_entropy(h, w, t, shift=True), lambda h, w: F.cross_entropy((h @ w.T)[:, :-1].reshape(-1, V), t[:, 1:].reshape(-1)), (h, WEIGHT), 3e-5)
    assert ops.linear_cross_entropy(h, WEIGHT, t, reduction="none").shape == (2, 6)


def test_rows_that_are_all_ignored():
    loss = ops.linear_cross_entropy(HIDDEN, WEIGHT, torch.full((X,), -100))
    assert loss.isnan() and ops.linear_cross_entropy(HIDDEN, WEIGHT, torch.full((X,), -100), reduction="sum") == 0


def test_a_weight_that_needs_no_gradient():
    h = HIDDEN.float().requires_grad_()
    ops.linear_cross_entropy(h, WEIGHT.float(), TARGET).backward()
    wanted = HIDDEN.clone().requires_grad_()
    cross_entropy(wanted, WEIGHT).backward()
    torch.testing.assert_close(h.grad.double(), wanted.grad, atol=1e-5, rtol=1e-5)


def test_hidden_and_weight_of_different_dtypes():
    h, w = HIDDEN.half().requires_grad_(), WEIGHT.float().requires_grad_()
    loss = ops.linear_cross_entropy(h, w, TARGET)
    loss.backward()
    assert (loss.dtype, h.grad.dtype, w.grad.dtype) == (torch.float32, torch.float16, torch.float32)
    torch.testing.assert_close(loss.double(), cross_entropy(HIDDEN.half().double(), WEIGHT), atol=1e-4, rtol=1e-4)


def test_targets_out_of_range(monkeypatch):
    target = torch.tensor([3, V, 1])
    assert ops.linear_cross_entropy(HIDDEN[:3].float(), WEIGHT.float(), target, reduction="none").isinf().tolist() == [False, True, False]
    assert ops.linear_logprobs(HIDDEN[:3].float(), WEIGHT.float(), target).logprobs[1] == -float("inf")
    monkeypatch.setenv("DTKERNELS_CHECK", "1")
    for op in (ops.linear_cross_entropy, ops.linear_logprobs):
        with pytest.raises(IndexError, match=rf"target is {V} at \[1\]; allowed: 0 to {V - 1}"):
            op(HIDDEN[:3].float(), WEIGHT.float(), target)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.linear_cross_entropy(HIDDEN, WEIGHT.T, TARGET), ValueError, "hidden is .* and weight"),
        (lambda: ops.linear_cross_entropy(HIDDEN, WEIGHT, TARGET[:3]), ValueError, "target has a class for each row"),
        (lambda: ops.linear_cross_entropy(HIDDEN, WEIGHT, TARGET.double()), TypeError, "target is torch.float64; allowed: integers"),
        (lambda: ops.linear_cross_entropy(HIDDEN, WEIGHT, TARGET, BIAS[:3]), ValueError, "bias is"),
        (lambda: ops.linear_cross_entropy(HIDDEN, WEIGHT, TARGET, softcap=0), ValueError, "softcap is 0; allowed: above 0"),
        (lambda: ops.linear_cross_entropy(HIDDEN, WEIGHT, TARGET, softcap="1"), TypeError, "softcap is '1'; allowed: a number"),
        (lambda: ops.linear_cross_entropy(HIDDEN, WEIGHT, TARGET, label_smoothing=2), ValueError, "label_smoothing is 2; allowed: 0 to 1"),
        (lambda: ops.linear_cross_entropy(HIDDEN, WEIGHT, TARGET, reduction="all"), ValueError, "reduction is 'all'"),
        (lambda: ops.linear_cross_entropy(HIDDEN, WEIGHT, TARGET, lora=(HIDDEN, WEIGHT[:3])), ValueError, "lora is .* and .V, R.; got shapes"),
        (lambda: ops.linear_cross_entropy(HIDDEN, WEIGHT, TARGET, lora=HIDDEN), TypeError, "lora is Tensor; allowed: a pair of tensors"),
        (lambda: ops.linear_cross_entropy(HIDDEN, WEIGHT, TARGET, lora=(3, HIDDEN)), TypeError, r"lora\[0\] is a int; allowed: a tensor"),
        (lambda: ops.linear_cross_entropy(HIDDEN, WEIGHT, TARGET, group="all"), TypeError, "group is str; allowed: a torch.distributed.ProcessGroup"),
        (lambda: ops.linear_cross_entropy(3, WEIGHT, TARGET), TypeError, "hidden is a int"),
        (lambda: ops.linear_logprobs(HIDDEN, WEIGHT, TARGET, temperature=0), ValueError, "temperature is 0; allowed: above 0"),
        (lambda: ops.kl_divergence(HIDDEN, HIDDEN, log_target=False), ValueError, "log_target is False with inputs=.logits."),
        (lambda: ops.jsd(HIDDEN, HIDDEN, 1.0), ValueError, "beta is 1.0"),
        (lambda: ops.tvd(HIDDEN, WEIGHT), ValueError, "student, teacher have one shape"),
        (lambda: ops.linear_kl(HIDDEN, WEIGHT, HIDDEN, WEIGHT[:3]), ValueError, "shapes are hidden"),
        (lambda: ops.dpo(*[HIDDEN] * 4, HIDDEN > 0, WEIGHT > 0), ValueError, "rejected, reference_rejected, rejected_mask have one shape"),
        (lambda: ops.groupnorm(HIDDEN, 5, BIAS[:K], BIAS[:K]), ValueError, "groups divides the 13 channels; got 5"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_in_one_line(call, error, message):
    with pytest.raises(error, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def logprobs(h, w, b=None, cap=None, temperature=1.0):
    logits = F.linear(h, w, b)
    logits = (logits if cap is None else cap * torch.tanh(logits / cap)) / temperature
    found = torch.log_softmax(logits, -1)
    return found.gather(-1, TARGET.clamp(min=0)[:, None])[:, 0], -(found.exp() * found).sum(-1)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"softcap": 3.0, "temperature": 2.0}])
def test_linear_logprobs(options):
    theirs = {"cap" if n == "softcap" else n: v for n, v in options.items()}
    compare(lambda h, w, b: tuple(ops.linear_logprobs(h, w, TARGET.clamp(min=0), b, **options)), lambda *t: logprobs(*t, **theirs), (HIDDEN, WEIGHT, BIAS), 1e-4)


def test_linear_logprobs_by_kernels():
    compare(lambda h, w: tuple(ops.linear_logprobs(h, w, TARGET.clamp(min=0))), logprobs, [HIDDEN.float(), WEIGHT.float()], 2e-4)


# -- distillation -----------------------------------------------------------------------------------------------------


def kl(s, t, reverse=False, temperature=1.0):
    p, q = torch.log_softmax(t / temperature, -1), torch.log_softmax(s / temperature, -1)
    p, q = (q, p) if reverse else (p, q)
    return (p.exp() * (p - q)).sum(-1)


def jensen_shannon(s, t, beta=0.5, temperature=1.0):
    p, q = torch.softmax(t / temperature, -1), torch.softmax(s / temperature, -1)
    m = beta * p + (1 - beta) * q
    return (beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum(-1)


def variation(s, t, temperature=1.0):
    return (torch.softmax(s / temperature, -1) - torch.softmax(t / temperature, -1)).abs().sum(-1) / 2


LOGITS = {
    "kl_divergence": (kl, [{}, {"reverse": True}, {"temperature": 2.0}]),
    "jsd": (jensen_shannon, [{}, {"beta": 0.1, "temperature": 0.5}]),
    "tvd": (variation, [{}, {"temperature": 3.0}]),
}
OF_LAYERS = {"linear_kl": (kl, [{}, {"reverse": True, "temperature": 2.0}]), "linear_jsd": (jensen_shannon, [{}, {"beta": 0.3, "temperature": 2.0}])}


@pytest.mark.parametrize("reverse", [False, True])
def test_kl_divergence_takes_probabilities_as_torch_does(reverse):
    """Results and gradients against float64; forward, a class of probability 0 adds nothing, as in torch.nn.functional.kl_div."""
    generator = torch.Generator().manual_seed(4)
    student, teacher = (torch.randn(7, 33, generator=generator).log_softmax(-1) for _ in range(2))
    teacher = teacher.exp()
    if not reverse:
        teacher[:, ::5] = 0
    exact, given = student.double().requires_grad_(), student.clone().requires_grad_()
    if reverse:
        wanted = (exact.exp() * (exact - teacher.double().log())).sum(-1)
    else:
        wanted = F.kl_div(exact, teacher.double(), reduction="none").sum(-1)
    found = ops.kl_divergence(given, teacher, inputs="log_probs", log_target=False, reverse=reverse, reduction="none")
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    adjoint = torch.linspace(-1, 1, 7)
    (ours,), (right,) = torch.autograd.grad(found, given, adjoint), torch.autograd.grad(wanted, exact, adjoint.double())
    torch.testing.assert_close(ours.double(), right, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", LOGITS)
def test_distillation_of_logits(name):
    theirs, options = LOGITS[name]
    for given in options:
        for dtype, tolerance in ((torch.float64, 3e-5), (torch.float32, 2e-4)):  # the reference, the kernel
            tensors = [normal(5, V).to(dtype), normal(5, V, seed=1).to(dtype) * 2]
            compare(lambda s, t: getattr(ops, name)(s, t, reduction="none", **given), lambda s, t: theirs(s, t, **given), tensors, tolerance)  # noqa: B023


@pytest.mark.parametrize("name", OF_LAYERS)
def test_distillation_of_layers(name):
    theirs, options = OF_LAYERS[name]
    for given, dtype, tolerance in ((options[0], torch.float32, 5e-4), (options[1], torch.float64, 1e-4)):
        tensors = [t.to(dtype) for t in (HIDDEN, WEIGHT, normal(X, J, seed=4), normal(V, J, seed=5))]
        compare(lambda *t: getattr(ops, name)(*t, reduction="none", **given), lambda h, w, g, v: theirs(h @ w.T, g @ v.T, **given), tensors, tolerance)  # noqa: B023


def test_cosine_distance():
    for dtype, tolerance in ((torch.float64, 3e-6), (torch.float32, 1e-4)):
        compare(lambda a, b: ops.cosine_distance(a, b, reduction="none"), lambda a, b: 1 - F.cosine_similarity(a, b, -1), [normal(4, 19).to(dtype), normal(4, 19, seed=1).to(dtype)], tolerance)


# -- preference -------------------------------------------------------------------------------------------------------

B, S, R = 5, 9, 7
CHOSEN, REJECTED = -normal(B, S).abs() - 0.1, -normal(B, R).abs() - 0.1
REFERENCES = (-normal(B, S, seed=1).abs(), -normal(B, R, seed=1).abs())
MASKS = (masks(B, S), masks(B, R, 1))


def summed(x, mask):
    return (x * mask).sum(-1)


def mean(x, mask):
    return summed(x, mask) / mask.sum(-1)


def smoothed(margin, share):
    return -(1 - share) * F.logsigmoid(margin) - share * F.logsigmoid(-margin)


def odds(x):
    return x - torch.log1p(-x.exp())


PAIRS = {
    "simpo": (lambda a, b, m, n, beta=2.0, gamma=1.0, label_smoothing=0.0: smoothed(beta * (mean(a, m) - mean(b, n)) - gamma, label_smoothing), [{}, {"label_smoothing": 0.1, "gamma": 0.3}]),
    "orpo": (lambda a, b, m, n, beta=0.1: -mean(a, m) - beta * F.logsigmoid(odds(mean(a, m)) - odds(mean(b, n))), [{}, {"beta": 2.0}]),
    "cpo": (lambda a, b, m, n, beta=0.1, alpha=1.0, label_smoothing=0.0: smoothed(beta * (summed(a, m) - summed(b, n)), label_smoothing) - alpha * mean(a, m), [{}, {"alpha": 0.5, "label_smoothing": 0.2}]),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_preference_without_a_reference(name):
    theirs, options = PAIRS[name]
    for given in options:
        compare(lambda a, b: getattr(ops, name)(a, b, *MASKS, reduction="none", **given), lambda a, b: theirs(a, b, *MASKS, **given), (CHOSEN, REJECTED), 1e-5)  # noqa: B023


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, {"beta": 0.5, "label_smoothing": 0.1}, {"beta": 500.0}])
def test_dpo(options, dtype):
    def theirs(a, b, c, d, beta=0.1, label_smoothing=0.0):
        return smoothed(beta * (summed(a - c, MASKS[0]) - summed(b - d, MASKS[1])), label_smoothing)

    compare(lambda *t: ops.dpo(*t, *MASKS, reduction="none", **options), lambda *t: theirs(*t, **options), [t.to(dtype) for t in (CHOSEN, REJECTED, *REFERENCES)], 1e-4)


def test_dpo_begins_with_a_gradient():
    """The policy is the reference at first: half of beta a token, where the derivative of a maximum would be 0."""
    a = CHOSEN.clone().requires_grad_()
    ops.dpo(a, REJECTED, CHOSEN, REJECTED, *MASKS, reduction="sum").backward()
    torch.testing.assert_close(a.grad, -0.05 * MASKS[0].double())


def test_kto():
    good = torch.tensor([True, False, True, True, False])

    def theirs(a, c, kl, beta=0.1, w=(1.0, 1.0)):
        reward = summed(a - c, MASKS[0]) - kl
        return torch.where(good, w[0] * (1 - torch.sigmoid(beta * reward)), w[1] * (1 - torch.sigmoid(-beta * reward)))

    given = {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.7, "kl": 0.3}
    compare(lambda a, c: ops.kto(a, c, MASKS[0], good, reduction="none", **given), lambda a, c: theirs(a, c, 0.3, 0.4, (1.5, 0.7)), (CHOSEN, REFERENCES[0]), 1e-5)


@pytest.mark.parametrize("referred", [False, True])
def test_grpo(referred):
    old, advantages = CHOSEN + 0.3 * normal(B, S, seed=5), normal(B, seed=6)

    def theirs(a, o, v, c=None, low=0.2, high=0.28, beta=0.05):
        ratio = (a - o).exp()
        term = -torch.minimum(ratio * v[:, None], ratio.clamp(1 - low, 1 + high) * v[:, None])
        term = term if c is None else term + beta * ((c - a).exp() - (c - a) - 1)
        return mean(term, MASKS[0])

    tensors = (CHOSEN, old, advantages, *REFERENCES[:1][: int(referred)])
    compare(lambda a, o, v, c=None: ops.grpo(a, o, MASKS[0], v, c, epsilon_high=0.28, beta=0.05, reduction="none"), theirs, tensors, 1e-5)


# -- norms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_norms_and_activations(dtype):
    x, r, w = (t.to(dtype) for t in (normal(5, 19), normal(5, 19, seed=1), normal(19, seed=2)))
    compare(lambda x, r, w: ops.add_rmsnorm(x, r, w, offset=1), lambda x, r, w: (F.rms_norm(x + r, (19,), w + 1, 1e-6), x + r), (x, r, w), 1e-4)
    image, c, z = (t.to(dtype) for t in (normal(3, 6, 4, 5), normal(6), normal(6, seed=3)))
    compare(lambda x, c, z: ops.groupnorm(x, 2, c, z), lambda x, c, z: F.group_norm(x, 2, c, z), (image, c, z), 1e-4)

    def poly(x, w, b):
        n = lambda v: v * torch.rsqrt((v * v).mean(-1, keepdim=True) + 1e-6)  # noqa: E731
        return w[0] * n(x**3) + w[1] * n(x**2) + w[2] * n(x) + b

    compare(ops.polynorm, poly, (x, normal(3).to(dtype), normal(1).to(dtype)), 1e-3 if dtype == torch.float32 else 1e-8)
    compare(ops.relu_squared, lambda x: F.relu(x) ** 2, (x,), 1e-5)


def test_embedding_and_its_gradient():
    index = torch.tensor([[3, 1, 3], [0, 6, 3]])
    for dtype in (torch.float64, torch.float32):
        compare(lambda w: ops.embedding(w, index), lambda w: F.embedding(index, w), (normal(7, 5).to(dtype),), 1e-5)


def turned(x, cos, sin, interleaved=False):
    size = cos.shape[-1]
    a, rest = x[..., :size], x[..., size:]
    if interleaved:
        other = torch.stack((-a[..., 1::2], a[..., ::2]), -1).flatten(-2)
    else:
        other = torch.cat((-a[..., size // 2 :], a[..., : size // 2]), -1)
    return torch.cat((a * cos[:, None] + other * sin[:, None], rest), -1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_sparsemax(dtype):
    compare(ops.sparsemax, simplex, (normal(6, 23).to(dtype),), 1e-5)
    compare(ops.sparsemax, simplex, (0.1 * normal(3, 9).to(dtype),), 1e-5)


def test_an_element_at_the_threshold_of_sparsemax_shares_the_gradient_of_all_or_of_none():
    """-1/3 is the threshold of three zeros, and the fourth element is that, rounded down: it may count as part of the support or not, but for all alike."""
    x, weights = torch.tensor([[0.0, 0.0, 0.0, -1 / 3]]), torch.tensor([[1.0, 2.0, 4.0, 8.0]])
    (found,) = torch.autograd.grad((ops.sparsemax(x.requires_grad_()) * weights).sum(), x)
    three, four = weights - weights[:, :3].mean(), weights - weights.mean()
    three[0, 3] = 0
    assert min((found - three).abs().max(), (found - four).abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", [4, 10])
def test_partial_rope(size, interleaved, dtype):
    tensors = [t.to(dtype) for t in (normal(2, 4, 5, 10), normal(2, 2, 5, 10), normal(2, 5, size), normal(2, 5, size, seed=1))]
    compare(lambda *t: ops.partial_rope(*t, interleaved=interleaved), lambda q, k, c, s: (turned(q, c, s, interleaved), turned(k, c, s, interleaved)), tensors, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_qk_norm_rope(dtype):
    tensors = [t.to(dtype) for t in (normal(2, 4, 5, 8), normal(2, 2, 5, 8), normal(8), normal(8, seed=1), normal(2, 5, 8), normal(2, 5, 8, seed=1))]

    def theirs(q, k, w, v, c, s):
        return tuple(turned(F.rms_norm(x, (8,), weight + 1, 1e-6), c, s) for x, weight in ((q, w), (k, v)))

    compare(lambda *t: ops.qk_norm_rope(*t, offset=1), theirs, tensors, 1e-4)


# -- logits of -inf -----------------------------------------------------------------------------------------------------

INF = float("-inf")


def masked_logits():
    """Rows that both mask alike, that only the teacher masks, and that nobody masks."""
    s, t = normal(5, V), normal(5, V, seed=1)
    s[0, 3] = t[0, 3] = s[1, :9] = t[1, :9] = t[2, 7] = INF
    return s, t


def log_softmaxes(*logits):
    """Finite ones: 0 times them is 0."""
    return [F.log_softmax(z, -1).clamp_min(-1e30) for z in logits]


def divergence(s, t):
    a, b = log_softmaxes(s, t)
    return (b.exp() * (b - a)).sum(-1)


def shannon(s, t):
    a, b = log_softmaxes(s, t)
    m = torch.logaddexp(a, b) - torch.log(torch.tensor(2.0, dtype=a.dtype))
    return (a.exp() * (a - m) + b.exp() * (b - m)).sum(-1) / 2


def entropy(z):
    (a,) = log_softmaxes(z)
    return -(a.exp() * a).sum(-1)


MASKED = {
    "kl": (lambda s, t: ops.kl_divergence(s, t, reduction="none"), divergence),
    "jsd": (lambda s, t: ops.jsd(s, t, reduction="none"), shannon),
    "tvd": (lambda s, t: ops.tvd(s, t, reduction="none"), lambda s, t: (s.softmax(-1) - t.softmax(-1)).abs().sum(-1) / 2),
    "entropy": (lambda s, t: ops.logprobs(t, torch.full((5,), 20))[1], lambda s, t: entropy(t)),
    "entropy of a last layer": (
        lambda s, t: ops.linear_logprobs(normal(5, K).float(), normal(V, K, seed=1).float(), torch.full((5,), 20), t[1])[1],
        lambda s, t: entropy(F.linear(normal(5, K).float().double(), normal(V, K, seed=1).float().double(), t[1])),
    ),
}


@pytest.mark.parametrize("name", MASKED)
def test_a_logit_of_minus_infinity_counts_as_nothing(name):
    ours, truth = MASKED[name]
    found, wanted = ([z.to(dtype).requires_grad_() for z in masked_logits()] for dtype in (torch.float32, torch.float64))
    got, expected = ours(*found), truth(*wanted)
    used = slice(1 if name.startswith("entropy") else 0, 2)
    adjoint = torch.linspace(-1, 2, 5)
    grads, true = (torch.autograd.grad(o, z[used], adjoint.to(o.dtype)) for o, z in ((got, found), (expected, wanted)))
    for a, b in ((got, expected), *zip(grads, true, strict=True)):
        assert a.isfinite().all() and (a.double() - b).abs().max() < 1e-5 * (1 + b.abs().max())


def test_a_divergence_from_what_is_ruled_out_is_infinite():
    s, t = (z.float() for z in masked_logits())
    s[3, 5] = INF
    assert ops.kl_divergence(s, t, reduction="none").isinf().tolist() == [False, False, False, True, False]
