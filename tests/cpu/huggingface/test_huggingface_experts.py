"""Experts of mixtures in Hugging Face models: found by what they compute, same numbers as the loop over experts, exact way back."""

import copy
import pickle
from functools import cache
from importlib import import_module

import pytest
import torch

pytest.importorskip("transformers.integrations.moe")

import transformers
from dtkernels.integrations.huggingface import apply_to, patched
from dtkernels.integrations.huggingface.layers.expert_forms import Unit, form_of
from huggingface_models import GROUPED, SMALL, batch, of, outputs, state
from torch import nn

from dtkernels import ops

LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 2, "topk_group": 1}
MODELS = {
    "Mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {**GROUPED, "num_hidden_layers": 1, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16},
    "GptOss": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "DeepseekV3": {**SMALL, **LATENT, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    "Olmoe": {**SMALL, "num_hidden_layers": 1, "num_experts": 8, "num_experts_per_tok": 8},
}


@pytest.fixture(autouse=True)
def by_the_reference(monkeypatch, request):
    torch._dynamo.reset()
    if "kernels" not in request.keywords:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")


def model_of(name: str):
    return of(name, **MODELS[name], experts_implementation="eager")


@pytest.mark.parametrize("name", MODELS)
def test_logits_gradients_and_tokens_agree_and_the_model_is_the_same_after(name):
    """A few roundings of float32 in sums of up to 48 terms; the whole model under one graph."""
    model = model_of(name)
    given = {key: value for key, value in batch(model).items() if key != "labels"}
    expected, tokens = outputs(model), model.generate(**given, max_new_tokens=4, min_new_tokens=4, do_sample=False).tolist()
    model.zero_grad()
    before = state(model)
    layers = 2 if name in ("Mixtral", "GptOss") else 1
    with patched(model, ops="experts") as report:
        found = outputs(model)
        assert len(report.patched) == layers and not report.skipped and not report.fallbacks and report.calls == {"experts": layers}
        assert "mlp.experts" in str(report) and "reference" in str(report)
        assert model.generate(**given, max_new_tokens=4, min_new_tokens=4, do_sample=False).tolist() == tokens
    model.zero_grad()
    assert state(model) == before
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-4)
    with patched(model, ops="experts"):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(**batch(model))
    torch.testing.assert_close(compiled.logits.detach(), expected[1], atol=2e-5, rtol=2e-4)


@cache
def experts(name: str) -> nn.Module:
    """One experts module: 4 experts, hidden states of 16, 8 between."""
    kind, _, cls = name.partition(".")
    sizes = {"hidden_size": 16, "intermediate_size": 8, "moe_intermediate_size": 8, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_attention_heads": 4}
    config = getattr(transformers, kind + "Config")(**sizes, moe_num_experts=4, hidden_activation="gelu_pytorch_tanh", swiglu_limit=1.5, mlp_hidden_act="relu2")
    config._experts_implementation = "eager"
    folder, _, cls = cls.partition("/")
    module = getattr(import_module(f"transformers.models.{folder}.modeling_{folder}"), cls)(config)
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


#: module -> transposed, with biases, the gated unit
FORMS = {
    "Mixtral.mixtral/MixtralExperts": (False, False, Unit()),
    "GptOss.gpt_oss/GptOssExperts": (True, True, Unit("silu", True, "alpha", "limit", 1.0)),
    "AriaText.aria/AriaExperts": (True, False, Unit()),
    "Gemma4Text.gemma4/Gemma4TextExperts": (False, False, Unit("gelu_tanh")),
    "DeepseekV4.deepseek_v4/DeepseekV4Experts": (False, False, Unit("silu", False, None, "limit")),
    "NemotronH.nemotron_h/NemotronHExperts": (False, False, None),
}


def form_case(name: str) -> nn.Module:
    try:
        module = copy.deepcopy(experts(name))
    except (AttributeError, ImportError):
        pytest.skip("this version of transformers has no such model")
    if not hasattr(module, "_apply_gate"):
        pytest.skip("this version of transformers does not dispatch these experts")
    return module


def routed(tokens: int, each: int, only: int = 4) -> list[torch.Tensor]:
    """Hidden states, experts among the first ``only``, and their weights."""
    generator = torch.Generator().manual_seed(tokens + each)
    value, index = torch.randn(tokens, only, generator=generator).softmax(-1).topk(each)
    return [torch.randn(tokens, 16, generator=generator), index, value]


def results(module: nn.Module, hidden, index, weights) -> list[torch.Tensor]:
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    out = module(hidden, index, weights)
    adjoint = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    return [out.detach(), *torch.autograd.grad(out, [hidden, weights, *module.parameters()], adjoint.to(out.dtype))]


@pytest.mark.parametrize("name", FORMS)
def test_forms_are_found_by_what_they_compute(name):
    """Without gradients too: plain units take another op there. Experts without a token, and a token whose choices are dropped."""
    module, (transposed, biased, unit) = form_case(name), FORMS[name]
    form = form_of(module)
    assert form is not None and (form.transposed, form.biased, form.unit) == (transposed, biased, unit)
    cases = [routed(7, 2), routed(5, 1, only=2), routed(3, 4)]
    expected = [results(module, *case) for case in cases]
    report = apply_to(module, ops="experts")
    for case, wanted in zip(cases, expected):
        for ours, theirs in zip(results(module, *case), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(module(*case), wanted[0], atol=1e-5, rtol=1e-4)
    hidden, index, weights = routed(3, 2)
    index[1] = 4  # no such expert: how a token that is dropped is marked
    with torch.no_grad():
        assert not module(hidden, index, weights)[1].any()
        assert module(hidden[:0], index[:0], weights[:0]).shape == (0, 16)
    assert not report.fallbacks and report.calls["experts"] == 8


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["Mixtral.mixtral/MixtralExperts", "GptOss.gpt_oss/GptOssExperts"])
def test_kernels_compute_what_the_loop_did(name):
    import dtkernels

    module, case = form_case(name), routed(7, 2)
    expected = results(module, *case)
    with patched(module, ops="experts") as report:
        before = {op: dict(count) for op, count in dtkernels.paths().items()}
        found = results(module, *case)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert report.paths["experts"] == {"kernel": 1, "own path": 0, "reference": 0}
    for op in ("grouped_linear", "packed_glu", "sum_rows"):
        assert dtkernels.paths()[op]["interpreter"] > before.get(op, {}).get("interpreter", 0)


def test_on_a_cpu_without_kernels_the_own_path_runs_and_is_said(monkeypatch):
    monkeypatch.delenv("DTKERNELS_FALLBACK")
    module = form_case("Mixtral.mixtral/MixtralExperts")
    with patched(module, ops="experts") as report:
        module(*routed(3, 2))
    assert report.paths["experts"]["own path"] == 1 and "no kernel runs on a CPU" in str(report)


def test_half_precision_and_autocast_are_as_near_to_the_truth_as_the_loop():
    case = routed(40, 2)
    truth = results(form_case("Mixtral.mixtral/MixtralExperts"), *case)[0]
    module = form_case("Mixtral.mixtral/MixtralExperts").to(torch.bfloat16)
    hidden, index, weights = case
    for given in ((hidden.to(torch.bfloat16), index, weights), (hidden, index, weights)):
        autocast = given[0].dtype == torch.float32
        run = module.float() if autocast else module
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            theirs = run(*given)
            with patched(run, ops="experts") as report:
                ours = run(*given)
        assert ours.dtype == theirs.dtype and not report.fallbacks
        assert (ours - truth).norm() < 1.1 * (theirs - truth).norm()


def test_the_name_works_without_a_patch_and_takes_what_transformers_would_where_it_does_not():
    """In one graph as well. transformers 5.0 refuses other names than its own."""
    model = model_of("Qwen3Moe")
    expected = outputs(model)
    try:
        model.set_experts_implementation("dtkernels")
    except ValueError:
        pytest.skip("this version of transformers takes no registered names")
    for ours, theirs in zip(outputs(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**batch(model)).logits, expected[1], atol=2e-5, rtol=2e-4)
    module, case = form_case("Mixtral.mixtral/MixtralExperts").to(torch.bfloat16), routed(4, 2)
    module.config._experts_implementation = "grouped_mm"
    wanted = module(*case)  # hidden states in float32
    module.config._experts_implementation = "dtkernels"
    assert torch.equal(module(*case), wanted)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"])
def test_a_copy_works_and_a_second_call_patches_nothing(clone):
    module, case = form_case("GptOss.gpt_oss/GptOssExperts"), routed(4, 2)
    wanted = module(*case)
    report = apply_to(module, ops="experts")
    twin = clone(module)
    torch.testing.assert_close(twin(*case), wanted, atol=1e-5, rtol=1e-4)
    assert {row.state for row in apply_to(twin, ops="experts").rows} == {"already"}
    report.undo()
    assert "forward" not in vars(module)


def test_what_is_left_alone_has_its_reason():
    """Sharded and quantised weights, other computations, classes outside the interface; and calls that differ from what was patched."""
    reasons = []
    for change in ("_is_expert_parallel", "float8", "norm", "act_fn"):
        module = form_case("Mixtral.mixtral/MixtralExperts")
        if change == "_is_expert_parallel":
            module._is_expert_parallel = True
        elif change == "float8":
            module.down_proj = nn.Parameter(module.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)
        elif change == "norm":
            module.post_norm = nn.LayerNorm(16)
        else:
            module.down_proj = nn.Parameter(module.down_proj.detach().transpose(1, 2).contiguous())
        reasons += [row.reason for row in apply_to(module, ops="experts").skipped]
    other = "MixtralExperts computes something else than two products by expert and an activation between"
    assert reasons == ["its experts are sharded", "its weights are quantised or sharded", other, other]

    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_experts = 3
            self.a, self.b = nn.Parameter(torch.zeros(3, 4, 5)), nn.Parameter(torch.zeros(3, 5, 4))

    (row,) = apply_to(Outside(), ops="experts").skipped
    assert row.reason == "Outside does not use transformers' interface for experts"

    module, (hidden, index, weights) = form_case("Mixtral.mixtral/MixtralExperts"), routed(4, 2)
    report = apply_to(module, ops="experts")
    module(hidden, top_k_index=index, top_k_weights=weights)
    assert not report.fallbacks
    module.act_fn = nn.Tanh()
    torch.testing.assert_close(module(hidden, index, weights), type(module).forward(module, hidden, index, weights))
    assert report.fallbacks == {"another activation than when it was patched": 1}


def test_an_activation_of_the_modules_own_is_called_as_it_is():
    """Also where somebody replaced it, or hooks it, since."""
    module, case = form_case("NemotronH.nemotron_h/NemotronHExperts"), routed(4, 2)
    report = apply_to(module, ops="all")
    module.act_fn = nn.Tanh()
    module.act_fn.register_forward_hook(lambda _, inputs, output: 2 * output)
    torch.testing.assert_close(module(*case), type(module).forward(module, *case), atol=1e-5, rtol=1e-4)
    assert report.paths["experts"] == {"kernel": 0, "own path": 0, "reference": 1}


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: ops.packed_glu(torch.ones(2, 3), torch.ones(2)), "packed \\(M, 2 N\\)"),
        (lambda: ops.packed_glu(torch.ones(2, 4), torch.ones(2), activation="relu"), "allowed: silu, gelu_tanh, gelu"),
        (lambda: ops.packed_glu(torch.ones(2, 4), torch.ones(2), limit=-1.0), "limit is -1.0"),
        (lambda: ops.packed_glu(torch.ones(2, 4), torch.ones(2), activation="gelu", alpha=2.0), "alpha is 2.0"),
        (lambda: ops.grouped_linear(torch.ones(2, 3), torch.ones(2, 3, 4), torch.zeros(2, dtype=torch.int64)), "K is 3 in a, 4 in weight"),
        (lambda: ops.grouped_linear(torch.ones(2, 4), torch.ones(2, 3, 4), torch.zeros(2, dtype=torch.int64), None, torch.ones(2)), "scale is that of bias"),
    ],
)
def test_bad_arguments_of_the_ops_are_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("each", [1, 3])
def test_llama_4_runs_the_chosen_experts_alone(each):
    """It multiplies inputs by scores, and runs every expert on every token; its own results are the same but for rounding."""
    module = pytest.importorskip("transformers.models.llama4.modeling_llama4").Llama4TextMoe
    config = transformers.Llama4TextConfig(hidden_size=16, intermediate_size=24, num_local_experts=6, num_experts_per_tok=each, hidden_act="silu")
    torch.manual_seed(0)
    model = module(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    x = torch.randn(2, 5, 16, requires_grad=True)

    def found():
        out, logits = model(x)
        return [out, logits, *torch.autograd.grad(out.square().sum() + logits.sum(), [x, *model.parameters()])]

    expected = found()
    with patched(model, ops="experts") as report:
        for ours, theirs in zip(found(), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(model(x)[0], expected[0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x)[0], expected[0], atol=1e-5, rtol=1e-4)
        assert [(row.module, row.state) for row in report.rows] == [("", "patched")] and report.calls == {"experts": 2} and not report.fallbacks
        model.experts.act_fn = nn.Tanh()
        torch.testing.assert_close(model(x)[0], type(model).forward(model, x)[0])
        assert report.fallbacks == {"another activation than when it was patched": 1}
    assert "forward" not in vars(model)


def test_lora_on_the_weights_of_experts_and_checkpointing_take_the_patched_way():
    """PEFT adds to the weights while a forward runs; the op reads the sum."""
    peft = pytest.importorskip("peft")
    model = model_of("Qwen3Moe")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    given = batch(model)

    def found():
        adapted.zero_grad()
        loss = adapted(**given).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in adapted.parameters() if p.grad is not None)]

    expected = found()
    with patched(adapted, ops="experts") as report:
        runs = [found()]
        model.train().gradient_checkpointing_enable()
        runs.append(found())
    assert report.calls == {"experts": 3} and not report.fallbacks
    for run in runs:
        for ours, theirs in zip(run, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-4)
