"""torch.compile of programs that nobody patched: what the graph pass replaces, what it leaves alone and why, and that results stay what they were."""

import math

import pytest
import torch
import torch.nn.functional as F
from dtkernels.integrations.torch_compile import report
from dtkernels.integrations.torch_compile.backend import ReplacementPass
from dtkernels.integrations.torch_compile.table import INDUCTOR, TABLE
from torch.utils.checkpoint import checkpoint

import dtkernels

BACKEND = dtkernels.compile_backend.using("all", backend="aot_eager")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """The ops compute their reference; without this nothing is replaced on a CPU."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")
    torch._dynamo.reset()
    report.forget()


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def repeated(x, n=2):
    batch, heads, length, width = x.shape
    return x[:, :, None, :, :].expand(batch, heads, n, length, width).reshape(batch, heads * n, length, width)


def sdpa_grouped(q, k, v):
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), is_causal=True).transpose(1, 2).contiguous()


def sdpa_flags(q, k, v, flags):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=flags, scale=0.3, enable_gqa=True)


def written_out(q, k, v, flags):
    scores = torch.matmul(q, repeated(k).transpose(2, 3)) * 0.4
    scores = scores.masked_fill(~flags, torch.finfo(scores.dtype).min)
    weights = F.dropout(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), p=0.0, training=True)
    return torch.matmul(weights, repeated(v))


def with_softcap(q, k, v, flags):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, repeated(k)) / math.sqrt(q.shape[-1])
    scores = torch.tanh(scores / 3.0) * 3.0
    scores = scores + torch.where(flags, 0.0, -3e38)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1).to(v.dtype), repeated(v))


def rms(x, w):
    wide = x.to(torch.float32)
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rms_difference(x, w):
    return (x.float() / torch.sqrt((x.float() ** 2).mean(-1, keepdim=True) + 1e-6) * (1.0 + w.float())).type_as(x)


def rms_torch(x, w):
    return F.rms_norm(x, (w.shape[0],), w, 1e-5)


def layer(x, w, b):
    return F.layer_norm(x, (w.shape[0],), w, b, 1e-5)


def loss(x, w, t):
    return F.cross_entropy(F.linear(x, w).float().view(-1, w.shape[0]), t.view(-1))


def shifted_loss(x, w, t):
    logits = torch.tanh(F.linear(x, w) / 3.0) * 3.0
    return F.cross_entropy(logits[:, :-1].contiguous().view(-1, w.shape[0]), t[:, 1:].reshape(-1), label_smoothing=0.1, reduction="sum")


Q, K, X, W = (2, 4, 7, 8), (2, 2, 7, 8), (2, 5, 16), (16,)
FLAGS = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(0)) > 0.3
FLAGS[..., 0] = True
CLASSES = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(1))
CLASSES[0, 2] = -100
PROGRAMS = {
    "sdpa with repeated heads": ("attention", sdpa_grouped, (Q, K, K), ()),
    "sdpa with flags": ("attention", sdpa_flags, (Q, K, K), (FLAGS,)),
    "attention written out": ("attention", written_out, (Q, K, K), (FLAGS,)),
    "attention with a softcap": ("attention", with_softcap, (Q, K, K), (FLAGS,)),
    "rms norm": ("rmsnorm", rms, (X, W), ()),
    "rms norm of a difference": ("rmsnorm", rms_difference, (X, W), ()),
    "torch's rms norm": ("rmsnorm", rms_torch, (X, W), ()),
    "layer norm": ("layernorm", layer, (X, W, W), ()),
    "torch's rms norm with its eps": ("rmsnorm", lambda x, w: F.rms_norm(x, (16,), w), (X, W), ()),
    "layer norm with torch's eps": ("layernorm", lambda x, w, b: F.layer_norm(x, (16,), w, b), (X, W, W), ()),
    "silu gate": ("swiglu", lambda a, b: F.silu(a) * b, (X, X), ()),
    "gelu gate": ("geglu", lambda a, b: b * F.gelu(a, approximate="tanh"), (X, X), ()),
    "low rank": ("lora", lambda y, x, a, b: y + F.linear(F.linear(x, a), b) * 0.5, (X, X, (3, 16), (16, 3)), ()),
    "low rank by products": ("lora", lambda y, x, a, b: x @ a.t() @ b.mT * 0.5 + y, (X, X, (3, 16), (16, 3)), ()),
    "loss of a last layer": ("linear_cross_entropy", loss, (X, (11, 16)), (CLASSES,)),
    "loss of a product": ("linear_cross_entropy", lambda x, w, t: F.cross_entropy((x @ w.t()).view(-1, 11), t.view(-1)), (X, (11, 16)), (CLASSES,)),
    "loss of a product with a bias": ("linear_cross_entropy", lambda x, w, b, t: F.cross_entropy((b + x @ w.T).view(-1, 11), t.view(-1)), (X, (11, 16), (11,)), (CLASSES,)),
    "loss of a capped, cut last layer": ("linear_cross_entropy", shifted_loss, (X, (11, 16)), (CLASSES,)),
}


def results(call, inputs):
    found = call(*inputs)
    return [found, *torch.autograd.grad(found.float().sin().sum(), [t for t in inputs if t.requires_grad])]


def replaced() -> dict:
    return {op: dict(states) for op, states in dtkernels.replacements().items()}


NARROW = ["attention with a softcap", "rms norm", "rms norm of a difference", "loss of a capped, cut last layer"]  #: with casts in them


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in PROGRAMS), *((name, torch.bfloat16) for name in NARROW)])
def test_replaced_with_gradients(name, dtype):
    op, program, shapes, others = PROGRAMS[name]
    inputs = [*(normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)), *others]
    got = results(torch.compile(program, backend=BACKEND, fullgraph=True), inputs)
    assert replaced() == {op: {"replaced": 1}}
    wide = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in inputs]
    assert got[0].dtype == program(*inputs).dtype and got[0].stride() == program(*inputs).stride()
    eps = torch.finfo(dtype).eps
    for found, right in zip(got, results(program, wide)):
        scale = max(1.0, right.abs().max().item())
        torch.testing.assert_close(found.double(), right.double(), rtol=0, atol=(8 * eps if dtype == torch.bfloat16 else 256 * eps) * scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_eps_of_torch_is_that_of_the_dtype_it_computes_in(dtype):
    x, w = (normal(4, 16) * 1e-3).to(dtype), normal(16, seed=1, dtype=dtype)
    compiled = torch.compile(lambda x, w: F.rms_norm(x, (16,), w), backend=BACKEND)
    torch.testing.assert_close(compiled(x, w), F.rms_norm(x, (16,), w))
    assert replaced() == {"rmsnorm": {"replaced": 1}}


def test_every_row_of_the_table_is_tried():
    assert {row.op for row in TABLE} == {op for op, *_ in PROGRAMS.values()}


@pytest.mark.parametrize("name", ["sdpa with repeated heads", "rms norm", "loss of a capped, cut last layer"])
def test_new_lengths_do_not_compile_again(name):
    op, program, shapes, others = PROGRAMS[name]
    compiled = torch.compile(program, backend=BACKEND, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (9, 13):
            inputs = [normal(*(length if at == len(s) - 2 and len(s) > 2 else n for at, n in enumerate(s)), seed=i) for i, s in enumerate(shapes)]
            inputs += [torch.randint(0, 11, (2, length)) for _ in others]
            torch.testing.assert_close(results(compiled, inputs), results(program, inputs), rtol=1e-3, atol=1e-4)
    assert replaced() == {op: {"replaced": 1}}


def compiled_and_eager(program, *inputs, backend=BACKEND):
    torch.testing.assert_close(torch.compile(program, backend=backend, fullgraph=True)(*inputs), program(*inputs), rtol=1e-4, atol=1e-4)
    return replaced()


def weights_too(q, k, v):
    weights = F.softmax(q @ k.transpose(-1, -2), -1)
    return weights @ v, weights


def written_inside(q, k, v):
    q = q * 1
    scores = q @ k.transpose(-1, -2)
    scores += 1.0
    return F.softmax(scores, -1) @ v


def key_written_after_the_scores(q, k, v):
    k = k * 1
    scores = q @ k.transpose(-1, -2)
    k.zero_()
    return F.softmax(scores, -1) @ v + k


def a_copy_that_is_written(q, k, v):
    wide = q.to(torch.bfloat16).float()
    wide.add_(2)
    return rms(wide, v[0, 0, 0])


def half_without_gradients(q, k, v):
    with torch.no_grad():
        weights = F.softmax(q @ k.transpose(-1, -2), -1)
    return weights @ v


LEFT = {
    weights_too: {"attention": {"something else reads what would not be computed": 1}},
    written_inside: {},
    key_written_after_the_scores: {"attention": {"something is written to in between": 1}},
    a_copy_that_is_written: {"rmsnorm": {"replaced": 1}},
    half_without_gradients: {"attention": {"grad mode or autocast changes inside it": 1}},
    lambda q, k, v: F.scaled_dot_product_attention(q.double(), k.double(), v.double()): {"attention": {"dtypes float64, float64, float64": 1}},
    lambda q, k, v: F.softmax((q @ k.mT).masked_fill(FLAGS, -1.0), -1) @ v: {"attention": {"hidden scores that are not -inf": 1}},
    lambda q, k, v: F.softmax(q @ k.mT, 1) @ v: {},
    lambda q, k, v: F.layer_norm(q, (8,), k[0, 0, 0], v[0, 0, 0], 1e-5) + F.rms_norm(q, (7, 8), k[0, 0], 1e-5): {
        "layernorm": {"replaced": 1}, "rmsnorm": {"a norm over more than the last dimension": 1}
    },
    lambda q, k, v: F.silu(q) * v[:, :1]: {"swiglu": {"gate and up of different shapes": 1}},
}


@pytest.mark.parametrize("program", LEFT, ids=lambda f: f.__name__)
def test_left_alone_and_told_why(program):
    q, k, v = (normal(*Q, seed=i).detach() for i in range(3))
    assert compiled_and_eager(program, q, k, v) == LEFT[program]


def test_dropout_is_left_alone():
    torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), backend=BACKEND)(normal(*Q))
    assert replaced() == {"attention": {"dropout": 1}}


def test_logits_that_are_returned_are_made_once():
    def both(x, w):
        logits = F.linear(x, w)
        return logits, F.cross_entropy(logits.view(-1, 11), CLASSES.view(-1))

    assert compiled_and_eager(both, normal(*X), normal(11, 16)) == {"linear_cross_entropy": {"something else reads what would not be computed": 1}}


def test_what_auto_replaces_is_what_was_measured():
    auto = dtkernels.compile_backend.using(backend="aot_eager")
    q, k = normal(*Q), normal(*K, seed=1)
    with torch.no_grad():
        assert compiled_and_eager(sdpa_grouped, q, k, k, backend=auto) == {"attention": {"replaced": 1}}
        compiled_and_eager(sdpa_flags, q, k, k, FLAGS, backend=auto)
    compiled_and_eager(sdpa_grouped, q, k, k, backend=auto)
    compiled_and_eager(rms, normal(*X), normal(*W), backend=auto)
    mask, gradients = "a mask that is a matrix: sdpa was faster", "gradients without a mask: sdpa was faster"
    assert replaced() == {"attention": {"replaced": 1, mask: 1, gradients: 1}, "rmsnorm": {INDUCTOR: 1}}
    assert str(dtkernels.replacements()).splitlines()[0].split() == ["op", "graph", "nodes", "state"]


def test_one_op_by_name_leaves_the_others_uncounted():
    def two(x, w, up):
        return F.silu(rms(x, w)) * up

    named = dtkernels.compile_backend.using(["swiglu"], backend="aot_eager")
    assert compiled_and_eager(two, normal(*X), normal(*W), normal(*X, seed=2), backend=named) == {"swiglu": {"replaced": 1}}
    with pytest.raises(ValueError, match="unknown op 'norm'; allowed: auto, all, attention"):
        dtkernels.compile_backend.using("norm")


def test_what_an_op_refuses_stays_as_it_was(monkeypatch):
    def refuse(*args):
        raise ValueError("rmsnorm: not this one")

    for row in (row for row in TABLE if row.op == "rmsnorm"):
        monkeypatch.setitem(row.__dict__, "emit", refuse)
    assert compiled_and_eager(rms, normal(*X), normal(*W)) == {"rmsnorm": {"refused: rmsnorm: not this one": 1}}


def test_a_model_of_transformers_that_nobody_patched():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attn_implementation="eager"))
    tokens = torch.arange(18).view(2, 9)

    def step(tokens):
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    found = []
    for call in (step, torch.compile(step, backend=BACKEND, fullgraph=True)):
        loss = call(tokens)
        loss.backward()
        found.append([loss, *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)
    assert replaced() == {"linear_cross_entropy": {"replaced": 1}, "rmsnorm": {"replaced": 3}, "swiglu": {"replaced": 1}, "attention": {"replaced": 1}}


def test_nothing_is_replaced_where_no_kernel_runs(monkeypatch):
    monkeypatch.delenv("DTKERNELS_FALLBACK")
    assert compiled_and_eager(rms, normal(*X), normal(*W)) == {"rmsnorm": {"no kernel runs on a CPU": 1}}


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_checkpointing(reentrant):
    def program(x, w):
        return checkpoint(rms, x, w, use_reentrant=reentrant) * 2

    found = []
    for call in (torch.compile(program, backend=BACKEND, fullgraph=True), lambda x, w: rms(x, w) * 2):
        x, w = normal(*X), normal(*W)
        call(x, w).sin().sum().backward()
        found.append((x.grad, w.grad))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert replaced() == {"rmsnorm": {"replaced": 1}}


def test_by_options_of_inductor_and_from_its_cache(tmp_path, monkeypatch):
    """The second compilation takes what the first left on disk, and counts all the same."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    inputs = normal(*X), normal(*W)
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(rms, fullgraph=True, options=dtkernels.inductor_options("all"))
        torch.testing.assert_close(results(compiled, inputs), results(rms, inputs), rtol=1e-4, atol=1e-4)
        counters = torch._dynamo.utils.counters["aot_autograd"]
        found.append((counters["autograd_cache_miss"], counters["autograd_cache_hit"]))
    assert found == [(1, 0), (0, 1)] and replaced() == {"rmsnorm": {"replaced": 2}}


def test_the_key_of_a_pass_is_of_what_it_does(monkeypatch):
    one, same, other = ReplacementPass("all"), ReplacementPass("all"), ReplacementPass("auto")
    assert one == same and one.uuid() == same.uuid() and other != one and other.uuid() != one.uuid()
    before = one.uuid()
    monkeypatch.setenv("DTKERNELS_FALLBACK", "own")
    assert one.uuid() != before
