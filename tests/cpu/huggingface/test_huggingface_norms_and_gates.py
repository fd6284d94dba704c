"""Norms, gated MLPs, rotary embeddings and the loss of Hugging Face models: found by what they compute, same numbers, exact way back."""

import copy
import pickle
import weakref
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from dtkernels.integrations.huggingface import OPS, apply_to, patched
from huggingface_models import GROUPED, IDS, SMALL, batch, of, outputs, state
from torch import nn
from torch.nn import functional as F

MORE = ("rmsnorm", "layernorm", "swiglu", "geglu", "rope", "cross_entropy")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **IDS}
OPT = {key: value for key, value in SMALL.items() if key != "intermediate_size"} | {"ffn_dim": 48, "word_embed_proj_dim": 32}
T5 = {"vocab_size": 97, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 4, "feed_forward_proj": "gated-gelu"}


#: model -> (how it is made, op -> how many modules of it are patched)
MODELS = {
    "llama": (lambda: of("Llama", **GROUPED), {"rmsnorm": 5, "swiglu": 2, "rope": 2, "cross_entropy": 1}),
    "gemma2": (lambda: of("Gemma2", **GROUPED, attn_implementation="eager"), {"rmsnorm": 9, "geglu": 2, "rope": 2, "cross_entropy": 1}),
    "qwen3": (lambda: of("Qwen3", **GROUPED), {"rmsnorm": 9, "swiglu": 2, "rope": 2, "cross_entropy": 1}),
    "qwen2_moe": (lambda: of("Qwen2Moe", **GROUPED, **EXPERTS), {"rmsnorm": 5, "swiglu": 2, "rope": 2, "cross_entropy": 1}),
    "phi3": (lambda: of("Phi3", **SMALL, num_key_value_heads=2), {"rmsnorm": 5, "swiglu": 2, "rope": 2, "cross_entropy": 1}),
    "gpt2": (lambda: of("GPT2", "LMHeadModel", **GPT2), {"layernorm": 5, "cross_entropy": 1}),
    "opt": (lambda: of("OPT", **OPT), {"layernorm": 5, "cross_entropy": 1}),
    "bert": (lambda: of("Bert", "Model", **SMALL), {"layernorm": 5}),
}
DECODERS = [name for name in MODELS if name != "bert"]


@pytest.fixture(autouse=True)
def by_the_reference(monkeypatch, request):
    if "kernels" not in request.keywords:
        monkeypatch.delenv("TRITON_INTERPRET")
        monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients_agree_and_the_model_is_the_same_after(name):
    build, counts = MODELS[name]
    model = build()
    expected = outputs(model)
    model.zero_grad()
    before = state(model)
    with patched(model, ops=MORE) as report:
        found = outputs(model)
        assert {op: sum(row.op == op for row in report.patched) for op in counts} == counts
        assert not report.skipped and not report.fallbacks and not report.already
        assert all(report.calls[op] >= n for op, n in counts.items())
    model.zero_grad()
    assert state(model) == before
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-4)


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_kernels_compute_what_the_model_did(name):
    import dtkernels

    model = MODELS[name][0]()
    with torch.no_grad():
        expected = model(**batch(model))
        before = {op: dict(count) for op, count in dtkernels.paths().items()}
        with patched(model, ops=MORE) as report:
            found = model(**batch(model))
    torch.testing.assert_close(found.loss, expected.loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.logits, expected.logits, atol=2e-5, rtol=2e-4)
    assert not report.fallbacks
    for op in MODELS[name][1]:
        ran = dtkernels.paths()[op]
        assert ran["reference"] == before.get(op, {}).get("reference", 0), f"{op} ran its reference, not a kernel"


@pytest.mark.parametrize("name", DECODERS)
def test_generation_is_identical(name):
    model = MODELS[name][0]()
    given = {key: value for key, value in batch(model).items() if key != "labels"}

    def tokens():
        return model.generate(**given, max_new_tokens=5, min_new_tokens=5, do_sample=False).tolist()

    expected = tokens()
    with patched(model, ops="all") as report:
        assert tokens() == expected
    assert not report.fallbacks and report.calls["attention"] == 2 * 5


def test_auto_takes_what_is_measured_and_all_takes_everything():
    from dtkernels.integrations.huggingface.apply import DEFAULTS

    model = MODELS["llama"][0]()
    assert {row.op for row in apply_to(model, dry_run=True).rows} == set(DEFAULTS) & {"attention", "add_rmsnorm", *MODELS["llama"][1]}
    assert {row.op for row in apply_to(model, ops="all", dry_run=True).rows} == {"attention", "add_rmsnorm", *MODELS["llama"][1]}
    assert set(DEFAULTS) <= set(OPS)
    assert all((Path(__file__).parents[3] / "benchmarks" / file).is_file() for file in DEFAULTS.values())


def test_a_second_call_and_nested_blocks_change_nothing():
    model = MODELS["llama"][0]()
    before = state(model)
    with patched(model, ops="all"):
        inside = state(model)
        with patched(model, ops="all") as report:
            assert not report.patched and {row.state for row in report.rows} == {"already"}
        assert state(model) == inside
    assert state(model) == before


def test_classes_files_and_other_models_are_untouched():
    model, other = MODELS["llama"][0](), MODELS["llama"][0]()
    modeling = transformers.models.llama.modeling_llama
    before, classes = dict(vars(modeling)), {type(module): dict(vars(type(module))) for module in model.modules()}
    untouched = state(other)
    with patched(model, ops="all"):
        model(**batch(model))
        assert dict(vars(modeling)) == before and state(other) == untouched
        assert all(dict(vars(cls)) == own for cls, own in classes.items())


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_copies_of_a_patched_model_work_and_count_for_themselves(clone):
    model = MODELS["llama"][0]()
    report = apply_to(model, ops="all")
    twin = clone(model)
    torch.testing.assert_close(twin(**batch(model)).loss, model(**batch(model)).loss)
    assert report.calls["rope"] == 2 and report.calls["cross_entropy"] == 1
    again = apply_to(twin, ops="all")
    assert {row.state for row in again.rows} == {"already"} and again.calls["rope"] == 2


def test_the_loss_is_divided_by_the_number_given_and_takes_shifted_labels():
    model = MODELS["llama"][0]()
    given = batch(model)
    shifted = F.pad(given["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    for more in ({"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7)}, {"shift_labels": shifted}):
        expected = model(**given, **more).loss
        with patched(model, ops="cross_entropy") as report:
            torch.testing.assert_close(model(**given, **more).loss, expected)
        assert report.calls == {"cross_entropy": 1} and not report.fallbacks
    model.loss_function = F.cross_entropy
    assert not apply_to(model, ops="cross_entropy").rows  # somebody's own


def test_sixteen_bit_models_are_nearer_to_the_truth_than_before():
    model = MODELS["llama"][0]()
    truth = model(**batch(model)).logits.detach()
    model = model.to(torch.bfloat16)
    with torch.no_grad():
        theirs = model(**batch(model)).logits
        with patched(model, ops=MORE) as report:
            ours = model(**batch(model)).logits
    assert ours.dtype == theirs.dtype and not report.fallbacks
    assert (ours - truth).norm() < 1.1 * (theirs - truth).norm()


def test_autocast_gives_the_same_dtypes_and_numbers():
    model = MODELS["qwen3"][0]()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(**batch(model))
        with patched(model, ops=MORE) as report:
            found = model(**batch(model))
    assert found.logits.dtype == expected.logits.dtype and found.loss.dtype == expected.loss.dtype
    torch.testing.assert_close(found.logits, expected.logits, atol=0.03, rtol=0.03)
    assert set(report.fallbacks) <= {"input and weight of different dtypes", "q, k, cos and sin of different dtypes or devices"}


def test_gradient_checkpointing_and_compiling_take_the_patched_way():
    model = MODELS["llama"][0]()
    expected = outputs(model)
    report = apply_to(model, ops=MORE)
    model.train().gradient_checkpointing_enable()
    for ours, theirs in zip(outputs(model), expected):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-4)
    assert report.calls["rope"] == 4  # each layer's forward twice
    model.gradient_checkpointing_disable()
    model.eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**batch(model)).loss, expected[0], atol=1e-5, rtol=1e-5)


class Norm(nn.Module):
    """An RMSNorm under names of its own."""

    def __init__(self, width: int, eps: float = 1e-5, plus: float = 0.0, clamp: float | None = None):
        super().__init__()
        self.weight, self.tiny, self.plus, self.clamp = nn.Parameter(torch.randn(width)), eps, plus, clamp

    def forward(self, t, scale=None):
        t = t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + self.tiny) * (self.weight + self.plus)
        t = t if self.clamp is None else t.clamp(-self.clamp, self.clamp)
        return t if scale is None else t * scale


def test_norms_are_found_by_what_they_compute():
    model = nn.ModuleList([Norm(8), Norm(8, plus=1.0), nn.RMSNorm(8, eps=1e-3), Norm(8, plus=0.5), Norm(8, clamp=1.0), nn.RMSNorm(8)])
    x = torch.randn(3, 8)
    expected = [norm(x) for norm in model]
    report = apply_to(model, ops="rmsnorm")
    assert [row.module for row in report.patched] == ["0", "1", "2", "5"] and not report.skipped
    for norm, wanted in zip(model, expected):
        torch.testing.assert_close(norm(x), wanted)
    model[0].tiny = 0.5  # read at every call
    torch.testing.assert_close(model[0](x), Norm.forward(model[0], x))
    torch.testing.assert_close(model[0](x, scale=2.0), Norm.forward(model[0], x, 2.0))
    torch.testing.assert_close(model[0](x.double()), Norm.forward(model[0], x.double()))
    assert report.fallbacks == {"arguments other than one tensor": 1, "dtype float64": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_without_an_eps_takes_that_of_torch(dtype):
    model = nn.Sequential(nn.RMSNorm(8), nn.RMSNorm(8, elementwise_affine=False)).to(dtype)
    x = (torch.randn(3, 8) * 1e-3).to(dtype)  # its squares are near eps
    expected = [norm(x) for norm in model]
    report = apply_to(model, ops="rmsnorm")
    for norm, wanted in zip(model, expected):
        torch.testing.assert_close(norm(x), wanted)
    assert report.calls["rmsnorm"] == 2 and not report.fallbacks


def test_modules_that_look_like_norms_are_left_alone():
    fixed = nn.Module()
    fixed.register_buffer("weight", torch.ones(8))  # no parameter
    model = nn.ModuleList([fixed, nn.Embedding(3, 8), nn.PReLU(8), nn.Identity(), nn.LayerNorm((2, 8))])
    assert not apply_to(model, ops=["rmsnorm", "swiglu", "geglu", "rope", "cross_entropy"]).rows
    reasons = [row.reason for row in apply_to(model, ops="layernorm").rows]
    assert reasons == ["it normalizes more than the last dimension"]


class Gated(nn.Module):
    def __init__(self, activation=F.silu, dropout: float = 0.0, swapped: bool = False):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(8, 12, bias=False), nn.Linear(12, 8)
        self.activation, self.dropout, self.swapped = activation, nn.Dropout(dropout), swapped

    def forward(self, x):
        a, b = (self.b(x), self.a(x)) if self.swapped else (self.a(x), self.b(x))
        return self.c(self.dropout(self.activation(a) * b))


class Bounded(Gated):
    def forward(self, x):
        return self.c(self.activation(self.a(x)).clamp(max=7.0) * self.b(x))


def test_gated_mlps_are_found_by_what_they_compute():
    kinds = [Gated(), Gated(swapped=True), Gated(F.gelu), Gated(nn.GELU("tanh")), Gated(torch.tanh), Bounded(), Gated(dropout=0.5)]
    model, x = nn.ModuleList(kinds).eval(), torch.randn(3, 8)
    expected = [mlp(x) for mlp in model]
    before = state(model)
    report = apply_to(model, ops=["swiglu", "geglu"])
    assert {row.module: row.op for row in report.patched} == {"0": "swiglu", "1": "swiglu", "2": "geglu", "3": "geglu", "6": "swiglu"}
    for mlp, wanted in zip(model, expected):
        torch.testing.assert_close(mlp(x), wanted)
    assert report.calls == {"swiglu": 3, "geglu": 2} and not report.fallbacks and not report.skipped
    report.undo()
    assert state(model) == before


def test_a_gated_mlp_with_dropout_is_the_op_outside_of_training():
    always, fixed, later = Gated(dropout=0.5), Gated(dropout=0.5), Gated()
    model, x = nn.ModuleList([always, fixed, later]).train(), torch.randn(3, 8)
    report = apply_to(model, ops="swiglu")
    fixed.eval().dropout.train()  # dropout outside of training, to measure how sure a model is
    later.dropout.p = 0.5
    for mlp in model:
        torch.manual_seed(1)
        found = mlp(x)
        torch.manual_seed(1)
        assert torch.equal(found, Gated.forward(mlp, x))
    assert report.fallbacks == {"it computes something else in training": 3}
    for mlp in model.eval():
        torch.testing.assert_close(mlp(x), Gated.forward(mlp, x))
    assert report.fallbacks.total() == 3 and report.calls["swiglu"] == 6


class KeptInFloat32(Gated):
    """As T5's, whose last layer stays in float32."""

    def forward(self, x):
        return self.c((self.activation(self.a(x)) * self.b(x)).to(self.c.weight.dtype))


def test_a_layer_kept_in_another_dtype_gets_what_its_class_gives_it():
    model, x = KeptInFloat32().bfloat16(), torch.randn(3, 8).bfloat16()
    model.c.float()
    with patched(model, ops="swiglu") as report:
        assert torch.equal(model(x), KeptInFloat32.forward(model, x))
        assert report.fallbacks == {"linear layers of different dtypes": 1}
        model.c.bfloat16()
        assert model(x).dtype == torch.bfloat16 and report.fallbacks.total() == 1


def test_gated_mlps_call_their_layers_so_that_lora_and_hooks_still_work():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(MODELS["llama"][0](), peft.LoraConfig(target_modules=["gate_proj", "down_proj"], init_lora_weights=False))
    seen = []
    model.base_model.model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: seen.append(1))
    expected = model(**batch(model.base_model.model)).logits
    with patched(model, ops="all") as report:
        torch.testing.assert_close(model(**batch(model.base_model.model)).logits, expected, atol=2e-5, rtol=2e-4)
    assert report.calls["swiglu"] == 2 and report.calls["lora"] == 4 and seen == [1, 1] and not report.fallbacks


def test_what_a_gated_mlp_multiplied_is_not_held_while_down_runs():
    """Else a prefill's peak has one tensor of its tokens more than without the patch."""
    mlp, outputs, held = Gated(), [], []
    for layer in (mlp.a, mlp.b):
        layer.register_forward_hook(lambda _m, _i, made: outputs.append(weakref.ref(made)))
    mlp.c.register_forward_pre_hook(lambda *_: held.extend(ref() is not None for ref in outputs))
    with torch.no_grad(), patched(nn.Sequential(mlp).eval(), ops=["swiglu"]) as report:
        mlp(torch.randn(3, 8))
    assert report.calls["swiglu"] == 1 and held == [False, False]


def test_probing_leaves_random_numbers_and_training_alone():
    model = MODELS["llama"][0]()
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    apply_to(model, ops="all", dry_run=True)
    assert torch.equal(torch.randn(4), expected) and not any(module.training for module in model.modules())


def test_a_rotary_function_that_was_replaced_later_is_the_one_that_runs(monkeypatch):
    model = MODELS["llama"][0]()
    modeling = transformers.models.llama.modeling_llama
    report = apply_to(model, ops="rope")
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", lambda q, k, cos, sin: (0 * q, 0 * k))
    ours = model(**batch(model)).logits
    report.undo()
    torch.testing.assert_close(ours, model(**batch(model)).logits)
    assert report.fallbacks == {"its modeling file has another rotary function now": 2}


def test_what_else_a_modeling_file_says_by_now_is_what_runs(monkeypatch):
    model = MODELS["llama"][0]()
    modeling, attention = transformers.models.llama.modeling_llama, type(model.model.layers[0].self_attn)
    eager, forward = modeling.eager_attention_forward, attention.forward
    model.set_attn_implementation("eager")
    report = apply_to(model, ops="rope")
    before = model(**batch(model)).logits
    monkeypatch.setattr(modeling, "eager_attention_forward", lambda module, q, k, v, *args, **given: eager(module, q, k, 2 * v, *args, **given))
    ours = model(**batch(model)).logits
    assert not report.fallbacks and report.calls["rope"] == 4
    monkeypatch.setattr(attention, "forward", lambda *args, **given: (3 * (found := forward(*args, **given))[0], *found[1:]))
    changed = model(**batch(model)).logits
    assert report.fallbacks == {"its class has another forward now": 2}
    report.undo()
    torch.testing.assert_close(changed, model(**batch(model)).logits)
    monkeypatch.setattr(attention, "forward", forward)
    torch.testing.assert_close(ours, model(**batch(model)).logits)
    assert not torch.allclose(ours, before) and not torch.allclose(changed, ours)


def test_an_activation_that_was_replaced_later_is_the_one_that_runs():
    for name in ("llama", "gemma"):
        model = MODELS[name][0]() if name in MODELS else of("Gemma", **GROUPED)
        report = apply_to(model, ops=["swiglu", "geglu"])
        model(**batch(model))
        assert not report.fallbacks
        model.model.layers[0].mlp.act_fn = nn.ReLU()
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
            ours = copied(**batch(model)).logits
        assert report.fallbacks == {"another activation or number than when it was patched": 1}
        report.undo()
        torch.testing.assert_close(ours, model(**batch(model)).logits)


def test_norms_and_relu_leave_the_dimensions_in_memory_as_torch_leaves_them():
    """Models turn a result back and call `view`, and dropout draws its numbers in the order of the memory."""
    x = torch.randn(2, 3, 4, 8)
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(8)
    for module, views in (norm, (x, x.transpose(1, 2), x[:, ::2])), (nn.ReLU(), (x, x.permute(0, 3, 1, 2), x[:, :, ::2].transpose(0, 1))):
        for view in views:
            expected = module(view)
            with patched(module, ops="all") as report:
                got = module(view)
            assert got.stride() == expected.stride() and report.calls.total() == 1 and not report.fallbacks
            torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
