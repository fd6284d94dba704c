"""Gradients that sum the adjoint of attention's scores with weights: no further from float64 than torch's own form, times two."""

import pytest
import torch

import dtkernels

KEYS, WIDTH = 80, 16
SCORE = "scale * rdot(Q[b, m, d], K[b, l, d], d)"


def attention(inputs: str, score: str, total: str = "rsum(e[b, m, l], l)", out: str = "rdot(e[b, m, l], V[b, l, n], l) / t[b, m]") -> str:
    return (
        f"Func s, e, t, OP; In Q, K, V, {inputs}; SIn scale; Var b, m, n; RVar l, d; s[b, m, l] = {score}; e[b, m, l] = exp(s[b, m, l]); "
        f"t[b, m] = {total}; OP[b, m, n] = {out};"
    )


def wide(x):
    return x if x.dtype == torch.float64 else x.float()


def behind():
    return torch.arange(KEYS) - torch.arange(KEYS)[:, None]


def causal(scores):
    return torch.where(behind() <= 0, scores, float("-inf"))


def products(q, k, scale):
    return wide(q @ k.mT * scale)


def attend(scores, v):
    return torch.softmax(scores, -1).to(v.dtype) @ v


def alibi(q, k, v, slope, scale):
    return attend(causal(products(q, k, scale) + wide(slope)[:, None, None] * behind()), v)


def relative(q, k, v, table, scale):
    return attend(products(q, k, scale) + wide(table)[:, behind() + KEYS - 1], v)


def temperature(q, k, v, temp, scale):
    return attend(wide(temp)[:, None, None] * products(q, k, scale), v)


def temperatures(q, k, v, temp, scale):
    return attend(wide(temp)[:, :, None] * products(q, k, scale), v)


def softcap(q, k, v, cap, scale):
    return attend(wide(cap)[:, None, None] * torch.tanh(products(q, k, scale) / wide(cap)[:, None, None]), v)


def sinks(q, k, v, slope, sink, scale):
    scores = causal(products(q, k, scale) + wide(slope)[:, None, None] * behind())
    scores = torch.cat([scores, wide(sink)[:, None, None].expand(*scores.shape[:2], 1)], -1)
    return torch.softmax(scores, -1)[..., :-1].to(v.dtype) @ v


def gated(q, k, v, slope, gate, scale):
    return (wide(gate)[:, None, None] * wide(alibi(q, k, v, slope, scale))).to(v.dtype)


SLOPE, INDEX = {"slope": torch.tensor([-0.25, 0.0625])}, "l - m + len(m) - 1"
BIAS = f"{SCORE} + slope[b] * (l - m)"
PROGRAMS = {
    "alibi": (attention("slope", f"where(l <= m, {BIAS}, -inf)"), alibi, SLOPE),
    "alibi in one Func": (
        f"Func OP; In Q, K, V, slope; SIn scale; Var b, m, n; RVar l, d;"
        f"OP[b, m, n] = rdot(exp(where(l <= m, {BIAS}, -inf)), V[b, l, n], l) / rsum(exp(where(l <= m, {BIAS}, -inf)), l);",
        alibi,
        SLOPE,
    ),
    "relative table": (attention("table", f"{SCORE} + table[b, {INDEX}]"), relative, {"table": torch.linspace(-3, 3, 4 * KEYS - 2).view(2, -1).sin()}),
    "temperature": (attention("temp", f"temp[b] * ({SCORE})"), temperature, {"temp": torch.tensor([0.5, 8.0])}),
    "temperature of a query": (attention("temp", f"temp[b, m] * ({SCORE})"), temperatures, {"temp": torch.linspace(0.5, 8, 2 * KEYS).view(2, -1)}),
    "softcap": (attention("cap", f"cap[b] * tanh({SCORE} / cap[b])"), softcap, {"cap": torch.tensor([20.0, 2.0])}),
    "sinks": (
        attention("slope, sink", f"where(l <= m, {BIAS}, -inf)", total="rsum(e[b, m, l], l) + exp(sink[b])"),
        sinks,
        SLOPE | {"sink": torch.tensor([20.0, -1.0])},
    ),
    "gated": (
        attention("slope, gate", f"where(l <= m, {BIAS}, -inf)", out="gate[b] * rdot(e[b, m, l], V[b, l, n], l) / t[b, m]"),
        gated,
        SLOPE | {"gate": torch.tensor([0.125, 2.0])},
    ),
}


def register(tmp_path, name: str, text: str):
    op = "centered_" + name.replace(" ", "_")
    path = tmp_path / f"{op}.yaml"
    path.write_text(f"op: {op}\ndoc: |\n  A test.\nalgorithm: |\n  {text.replace('OP', op)}\n")
    return op, dtkernels.register(path)


def gradients(fn, tensors, scale, adjoint):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    result = fn(*leaves, scale)
    return torch.autograd.grad(result, leaves, adjoint.to(result.dtype))


def drawn(dtype, offset):
    """Queries, keys and values, the keys with a mean of their own in each column; and an adjoint."""
    torch.manual_seed(0)
    q, k, v, adjoint = (torch.randn(2, KEYS, WIDTH) for _ in range(4))
    return [t.to(dtype) for t in (q, k + offset * torch.randn(2, 1, WIDTH), v)], adjoint.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_further_from_float64_than_torch(tmp_path, name, dtype):
    text, eager, parameters = PROGRAMS[name]
    op, ours = register(tmp_path, name, text)
    (tensors, adjoint), scale = drawn(dtype, 4.0), WIDTH**-0.5
    tensors += parameters.values()
    truth = gradients(eager, [t.double() for t in tensors], scale, adjoint.double())
    found, torchs = (gradients(fn, tensors, scale, adjoint) for fn in (ours, eager))
    assert dtkernels.paths()[f"{op} backward"]["reference"] == 0
    for label, got, theirs, true in zip(("Q", "K", "V", *parameters), found, torchs, truth, strict=True):
        off, allowed = ((x.double() - true).norm() / true.norm() for x in (got, theirs))
        assert off <= 2 * max(allowed, torch.finfo(dtype).eps / 16), (label, off, allowed)  # far less than a rounding is not asked for
        if label not in ("Q", "K", "V", "sink", "gate", "table"):
            assert off < 1e-5 * KEYS**0.5, (label, off)  # what is centered has float32's error, not that of what is stored


ROWS = "Func t, OP; In A, a; Var x, y; RVar z; t[x] = rsum(exp(A[x, z] * a[x]), z); OP[x, y] = "


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name, out, eager", [
    ("softmax", "exp(A[x, y] * a[x]) / t[x]", torch.softmax), ("log_softmax", "A[x, y] * a[x] - log(t[x])", torch.log_softmax)
])  # fmt: skip
def test_temperatures_of_logits_with_a_large_mean(tmp_path, name, out, eager, dtype):
    _, op = register(tmp_path, f"{name} of temperature", ROWS + out + ";")
    torch.manual_seed(0)
    logits, temperatures, adjoint = (1000 + 8 * torch.randn(9, 70)).to(dtype), torch.linspace(0.5, 1.5, 9), torch.randn(9, 70).to(dtype)

    def torchs(a, t, _):
        return eager(wide(a) * wide(t)[:, None], -1).to(a.dtype if name == "softmax" else wide(a).dtype)

    truth = gradients(torchs, [logits.double(), temperatures.double()], 0, adjoint.double())[1]
    found, theirs = (gradients(fn, [logits, temperatures], 0, adjoint)[1] for fn in (lambda a, t, _: op(a, t), torchs))
    off, allowed = ((x.double() - truth).norm() / truth.norm() for x in (found, theirs))
    assert off <= 4 * max(allowed, torch.finfo(dtype).eps / 4), (off, allowed)


def test_attention_with_a_written_score():
    """The slopes of heads, summed over a batch."""
    written = dtkernels.attention_spec(score="s + slope[h] * (l - m)", mask="l <= m", inputs="slope", name="sloping")
    (tensors, adjoint), slope = drawn(torch.bfloat16, 4.0), torch.tensor([-0.25])
    q, k, v = tensors

    def ours(slopes, scale):
        return written(q[:, None], k[:, None], v[:, None], scale=scale, slope=slopes)[:, 0]

    def eager(slopes, scale):
        return alibi(q.double(), k.double(), v.double(), slopes.expand(2), scale)

    got, true = gradients(ours, [slope], 0.25, adjoint)[0], gradients(eager, [slope.double()], 0.25, adjoint.double())[0]
    assert abs(got.double() - true) < 1e-5 * KEYS**0.5 * abs(true)


@pytest.mark.parametrize("slope", [-0.25, 0.25])
def test_a_query_that_sees_no_key(tmp_path, slope):
    text = attention("slope", f"where(l < m, {BIAS}, -inf)", out="where(t[b, m] == 0, 0, rdot(e[b, m, l], V[b, l, n], l) / t[b, m])")
    _, op = register(tmp_path, f"strict {slope < 0}", text)
    tensors, adjoint = drawn(torch.bfloat16, 0.0)
    tensors.append(torch.full((2,), slope))

    def eager(q, k, v, slopes, scale):
        scores = products(q, k, scale) + slopes[:, None, None] * behind()
        seen = (behind() < 0)[None]
        return torch.where(seen, torch.softmax(torch.where(seen, scores, -1e30), -1), 0) @ v

    got = gradients(op, tensors, 0.25, adjoint)
    truth = gradients(eager, [t.double() for t in tensors], 0.25, adjoint.double())
    assert ((got[3].double() - truth[3]).norm() / truth[3].norm()) < 1e-4
    assert all(t.isfinite().all() for t in got)
