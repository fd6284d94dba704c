"""Where no kernel runs, patched modules take their own path: bitwise the same results, no op is called, and the report says so."""

import contextlib
import copy
import pickle
import subprocess
from dataclasses import replace

import pytest
import stand_in_gpu
import torch

pytest.importorskip("transformers")

import transformers
from dtkernels.integrations.huggingface import apply_to, patched
from dtkernels.integrations.huggingface.attention import visible_keys
from dtkernels.integrations.huggingface.patching.call_stats import implementation_before
from torch import nn

import dtkernels
from dtkernels.codegen.target import target
from dtkernels.runtime import log, path_counters
from dtkernels.runtime.build import toolchain
from dtkernels.runtime.dispatch import dispatcher

REASON = "no kernel runs on a CPU"
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64, **IDS}
OPT = {**{k: v for k, v in SIZES.items() if k != "intermediate_size"}, "ffn_dim": 48, "word_embed_proj_dim": 32}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **IDS}
KINDS = {
    "llama": ("Llama", {**SIZES, "num_key_value_heads": 2}),
    "mistral with a window": ("Mistral", {**SIZES, "num_key_value_heads": 2, "sliding_window": 4}),
    "gemma2, eager, softcap": ("Gemma2", {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "attn_implementation": "eager"}),
    "llama, eager": ("Llama", {**SIZES, "attn_implementation": "eager"}),
    "gpt_oss, sinks": ("GptOss", {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "opt": ("OPT", {**OPT, "dropout": 0.0}),
    "gpt2": ("GPT2", {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
}
GIVEN = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))
PADDED = torch.ones(2, 9, dtype=torch.long).index_fill_(1, torch.tensor([0, 1]), 0)
PADDED[1] = 1


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.delenv("DTKERNELS_FALLBACK", raising=False)


@pytest.fixture
def no_op_runs():
    """No call reaches an op."""
    before = dtkernels.paths()
    yield
    assert dtkernels.paths() == before


def made(name: str):
    kind, config = KINDS[name]
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    implementation = config.pop("attn_implementation", None)
    model = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM"))(getattr(transformers, f"{kind}Config")(**config))
    if implementation:
        model.set_attn_implementation(implementation)
    return model.eval()


def inference(model):
    with torch.no_grad():
        return [model(GIVEN, use_cache=False).logits, model(GIVEN, attention_mask=PADDED, use_cache=False).logits]


def generation(model):
    return [model.generate(GIVEN, attention_mask=PADDED, max_new_tokens=6, do_sample=False, pad_token_id=0)]


def training(model):
    model.train().zero_grad()
    out = model(GIVEN, attention_mask=PADDED, labels=GIVEN, use_cache=False)
    out.loss.backward()
    return [out.loss.detach(), out.logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def checkpointed(model):
    model.gradient_checkpointing_enable()
    return training(model)


def compiled(model):
    torch._dynamo.reset()
    with torch.no_grad():
        return [torch.compile(model, backend="aot_eager", fullgraph=True)(GIVEN, use_cache=False)[0]]


@pytest.mark.parametrize("work", [inference, generation, training, checkpointed], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", KINDS)
def test_models_compute_what_they_did_before_bit_by_bit(name, work, no_op_runs):
    expected = work(made(name))
    model = made(name)
    report = apply_to(model, ops="all")
    for ours, theirs in zip(work(model), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert set(report.fallbacks) == {REASON} and report.fallbacks.total() == report.calls.total() > 0
    assert all(taken["own path"] == taken.total() for taken in report.paths.values())


@pytest.mark.parametrize("name", ["llama", "opt", "llama, eager"])
def test_under_torch_compile_the_graph_is_the_models_own(name, no_op_runs):
    expected = compiled(made(name))
    with patched(model := made(name), ops="all"):
        found = compiled(model)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_a_model_loaded_under_our_name_runs_sdpa_with_its_masks(no_op_runs, monkeypatch):
    expected = inference(made("llama")) + generation(made("llama"))
    kind, config = KINDS["llama"]
    model = made("llama")
    model.set_attn_implementation("dtkernels")
    found = inference(model) + generation(model)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral with a window", "llama, eager"])
def test_masks_are_those_of_the_attention_that_runs(name, masked):
    seen: dict[str, object] = {}

    def watch(model, key):
        attention = next(m for n, m in model.named_modules() if n.endswith("self_attn"))
        attention.register_forward_pre_hook(lambda _, args, kwargs: seen.__setitem__(key, kwargs["attention_mask"]), with_kwargs=True)
        with torch.no_grad():
            model(GIVEN, attention_mask=PADDED if masked else None, use_cache=False)

    watch(made(name), "before")
    with patched(model := made(name)):
        watch(model, "patched")
    before, after = seen["before"], seen["patched"]
    assert (before is None) == (after is None)
    if before is not None:
        assert before.dtype == after.dtype and torch.equal(before, after) and type(after) is torch.Tensor and not hasattr(after, visible_keys.NOTE)


MODULES = {
    "relu": (lambda: nn.ReLU(), (3, 8)),
    "softmax": (lambda: nn.Softmax(-1), (3, 8)),
    "two_mm": (lambda: nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 8)), (3, 8)),
    "gate": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), (3, 8)),
    "layernorm": (lambda: nn.LayerNorm(8), (3, 8)),
}


@pytest.mark.parametrize("op", MODULES)
def test_single_modules(op, no_op_runs):
    make, shape = MODULES[op]
    torch.manual_seed(0)
    module, x = make(), torch.randn(shape)
    expected = module(x)
    report = apply_to(module, ops=op)
    assert torch.equal(module(x), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(x), expected)
    assert report.fallbacks == {REASON: 1} and report.paths[op]["own path"] == 1
    assert "own path" in str(report) and f"{REASON}: 1" in str(report)


def test_lora_layers(no_op_runs):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(made("llama"), peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    expected = training(model)
    report = apply_to(model, ops="lora")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(training(model), expected, strict=True))
    assert report.fallbacks == {REASON: 4} and report.paths["lora"]["own path"] == 4


def test_a_gated_mlp_holds_no_more_tensors_than_before(no_op_runs):
    """The module's own forward lets go of gate before up is made; ours, which the op reads both of, does not."""
    model = made("llama")
    called = []
    report = apply_to(model, ops="swiglu")
    mlp = model.model.layers[0].mlp
    original = type(mlp).forward
    try:
        type(mlp).forward = lambda self, x: called.append(self) or original(self, x)
        inference(model)
    finally:
        type(mlp).forward = original
    assert len(called) == report.calls["swiglu"] == 4


def test_a_model_that_moves_to_a_gpu_takes_kernels_there_and_back_its_own_path(monkeypatch):
    model, x = nn.Sequential(nn.LayerNorm(8), nn.Softmax(-1)), torch.randn(3, 8)
    report = apply_to(model, ops=["layernorm", "softmax"])
    expected = model(x)
    with monkeypatch.context() as moved:
        stand_in_gpu.use(moved)
        torch.testing.assert_close(model(x), expected)
        torch.testing.assert_close(model(x), expected)
    assert torch.equal(model(x), expected)
    for op in ("layernorm", "softmax"):
        assert report.paths[op] == {"kernel": 2, "own path": 2, "reference": 0}
    assert "kernel 2, own path 2" in str(report)


def test_a_gpu_for_which_nothing_can_be_compiled_is_left_to_the_models_own_path(monkeypatch):
    module, x = nn.Softmax(-1), torch.randn(3, 8)
    report = apply_to(module, ops="softmax")
    stand_in_gpu.use(monkeypatch)
    module(x)
    path_counters.unable(x.get_device(), "kernels cannot be compiled: no C compiler")
    module(x)
    assert report.paths["softmax"] == {"kernel": 1, "own path": 1, "reference": 0}
    assert report.fallbacks == {"kernels cannot be compiled: no C compiler": 1}


BROKEN = {
    "no Triton": (ModuleNotFoundError("No module named 'triton'", name="triton"), "Triton cannot be imported"),
    "no C compiler": (RuntimeError("Failed to find C compiler. Please specify via CC environment variable"), "no C compiler works"),
    "a C compiler without headers": (subprocess.CalledProcessError(1, ["gcc"]), "no C compiler works"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_machine_that_cannot_compile_runs_the_reference_once_and_then_the_models_own_path(what, monkeypatch, caplog):
    def failing(*args):
        raise error

    error, said = BROKEN[what]
    module, x = nn.Softmax(-1), torch.randn(3, 8)
    report = apply_to(module, ops="softmax")
    stand_in_gpu.tensors_on_it(monkeypatch)
    monkeypatch.setattr(dispatcher.Dispatcher, "_stored", lambda *args, **kwargs: None)
    monkeypatch.setattr(dispatcher.Dispatcher, "_by_triton", failing)
    log.forget()
    before = dtkernels.paths().get("softmax", dict.fromkeys(path_counters.KINDS, 0))
    for _ in range(2):
        torch.testing.assert_close(module(x), x.softmax(-1))
    after = dtkernels.paths()["softmax"]
    assert after["reference"] == before["reference"] + 1 and after["gpu"] == before["gpu"]
    (reason,) = report.fallbacks
    assert reason.startswith("no kernel can be compiled") and said in reason and report.fallbacks[reason] == 1
    assert len([r for r in caplog.records if said in r.getMessage()]) == 1


def test_an_error_of_one_kernel_is_no_missing_compiler(monkeypatch):
    stand_in_gpu.tensors_on_it(monkeypatch)
    monkeypatch.setattr(dispatcher.Dispatcher, "_stored", lambda *args, **kwargs: None)
    monkeypatch.setattr(dispatcher.Dispatcher, "_by_triton", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dtkernels.ops.softmax(torch.randn(3, 8))
    assert not path_counters._unable
    assert "compute capability 6.1" in toolchain.missing(ValueError(), replace(target("h200"), arch=61))


def test_the_reference_is_run_where_it_is_asked_for(monkeypatch):
    module, x = nn.Softmax(-1), torch.randn(3, 8)
    report = apply_to(module, ops="softmax")
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")
    module(x)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    module(x)
    assert report.paths["softmax"] == {"kernel": 1, "own path": 0, "reference": 1} and not report.fallbacks
    assert "kernel 1, reference 1" in str(report)


def test_another_word_for_the_fallback_is_refused_in_one_line(monkeypatch):
    monkeypatch.setenv("DTKERNELS_FALLBACK", "torch")
    apply_to(module := nn.Softmax(-1), ops="softmax")
    with pytest.raises(ValueError, match="^DTKERNELS_FALLBACK is 'torch'; allowed: own, reference$"):
        module(torch.randn(3, 8))


def test_what_a_config_said_before_is_forgotten_with_it_and_not_saved(tmp_path):
    model = made("llama, eager")
    report = apply_to(model)
    assert implementation_before(id(model.config)) == "eager" and "dtkernels" not in str(sorted(vars(model.config)))
    copied = pickle.loads(pickle.dumps(model))
    for ours, theirs in zip(inference(copied), inference(made("llama, eager")), strict=True):
        torch.testing.assert_close(ours, theirs)
    report.undo()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(inference(model), inference(made("llama, eager")), strict=True))


@pytest.mark.parametrize("given", [{}, {"attention_mask": PADDED}])
def test_autocast_is_torchs_own(given, no_op_runs):
    def run(model):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return model(GIVEN, **given, use_cache=False).logits

    expected = run(made("llama"))
    with patched(model := made("llama"), ops="all"):
        assert torch.equal(run(model), expected)


def test_attention_weights_that_are_asked_for(no_op_runs):
    def weights(model):
        with torch.no_grad():
            return model(GIVEN, output_attentions=True, use_cache=False).attentions

    expected = weights(made("llama, eager"))
    with patched(model := made("llama, eager")):
        found = weights(model)
    assert len(found) == 2 and all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_other_devices_are_named(monkeypatch):
    """A device that is neither a CPU nor a GPU of CUDA or HIP."""
    module = nn.Softmax(-1).to("meta")
    report = apply_to(module, ops="softmax")
    with contextlib.suppress(NotImplementedError):
        assert module(torch.empty(3, 8, device="meta")).shape == (3, 8)
    assert report.fallbacks == {"no kernel runs on meta": 1}
