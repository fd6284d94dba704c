"""Hooks of all modules (torch.nn.modules.module.register_module_...): each module is called itself while there are some, and apply_to's own runs call none."""

from collections import Counter

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from dtkernels.integrations.huggingface import apply_to
from huggingface_models import GROUPED, batch, of, outputs
from torch import nn
from torch.nn.modules import module as calls

GLOBAL = "global module hooks"


@pytest.fixture(autouse=True)
def by_the_reference(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")


def mixtral():
    return of("Mixtral", **GROUPED, num_local_experts=4, experts_implementation="eager")


def llama4():
    torch.manual_seed(0)
    sizes = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 32, "interleave_moe_layer_step": 1}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes))


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.chain, self.gate = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 8)), nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())

    def forward(self, x):
        return self.gate(self.chain(x))


def pairs():
    torch.manual_seed(0)
    return Pairs()


def adapted():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(of("Llama", **GROUPED), peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False))


#: how a model is made -> the ops, and some of the reasons that are counted
CASES = {
    "llama": (lambda: of("Llama", **GROUPED), ["auto", "linear_cross_entropy"], {GLOBAL: 3, f"its SiLUActivation has {GLOBAL}": 2}),
    "experts": (mixtral, ["auto", "experts"], {f"its SiLUActivation has {GLOBAL}": 2}),
    "experts of Llama 4": (llama4, ["experts"], {f"its Llama4TextExperts has {GLOBAL}": 2}),
    "adapters": (adapted, ["lora"], {f"its nn.Linear has {GLOBAL}": 3}),
    "adapters of the last layer": (adapted, ["linear_cross_entropy"], {GLOBAL: 1}),
    "pairs": (pairs, ["two_mm", "gate"], {f"its nn.Linear has {GLOBAL}": 2}),
}


def run(model):
    model.train()
    if not isinstance(model, Pairs):
        return outputs(model)
    model.zero_grad()
    out = model(torch.linspace(-1, 1, 24).view(3, 8).requires_grad_())
    out.square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


REGISTER = {
    "forward": lambda note: calls.register_module_forward_hook(lambda module, args, out: note(module)),
    "forward pre": lambda note: calls.register_module_forward_pre_hook(lambda module, args: note(module)),
    "backward": lambda note: calls.register_module_full_backward_hook(lambda module, into, out: note(module)),
    "backward pre": lambda note: calls.register_module_full_backward_pre_hook(lambda module, out: note(module)),
}


def called(model, kind) -> tuple[Counter, list]:
    """Return how often a hook was called with each module, and what the model computed."""
    seen: Counter = Counter()
    names = {id(module): name for name, module in model.named_modules()}
    handle = REGISTER[kind](lambda module: seen.update([names.get(id(module), f"a stray {type(module).__name__}")]))
    try:
        return seen, run(model)
    finally:
        handle.remove()


@pytest.mark.filterwarnings("ignore:For backward hooks to be called")
@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("name", CASES)
def test_every_module_is_called_while_there_are_hooks_of_all(name, kind):
    build, names, said = CASES[name]
    if build is llama4 and "backward" in kind:
        pytest.skip("the class adds to the result of a module in place, where torch allows no backward hooks")
    wanted, right = called(build(), kind)
    model = build()
    report = apply_to(model, ops=names)
    assert report.patched and not report.skipped
    seen, found = called(model, kind)
    assert seen == wanted and said.items() <= report.fallbacks.items(), str(report)
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-4)
    fallbacks = report.fallbacks.total()
    run(model)
    assert report.fallbacks.total() == fallbacks, "the handle is removed: the ops compute again"
    report.undo()


EVERY = [*REGISTER.values(), calls.register_module_module_registration_hook, calls.register_module_parameter_registration_hook, calls.register_module_buffer_registration_hook]


@pytest.mark.parametrize("name", CASES)
def test_apply_to_runs_and_makes_modules_unseen(name):
    build, names, _ = CASES[name]
    model, seen = build(), []
    handles = [register(lambda module, *_: seen.append(module)) for register in EVERY]
    before = [list(hooks.items()) for hooks in (calls._global_forward_hooks, calls._global_parameter_registration_hooks)]
    try:
        report = apply_to(model, ops=names)
        assert report.patched and not report.skipped and not seen, "hooks of all modules are no reason to skip one"
        with pytest.raises(ValueError):
            apply_to(model, ops="none")
        assert [list(hooks.items()) for hooks in (calls._global_forward_hooks, calls._global_parameter_registration_hooks)] == before
    finally:
        for handle in handles:
            handle.remove()
    assert not any((calls._global_forward_hooks, calls._global_backward_hooks, calls._global_module_registration_hooks))


def test_backward_hooks_that_come_to_a_last_layer_later():
    """torch cannot set them up on logits that are not made."""
    model = of("Llama", **GROUPED).train()
    right, seen = outputs(model), []
    report = apply_to(model, ops="linear_cross_entropy")
    handle = model.lm_head.register_full_backward_hook(lambda module, into, out: seen.append(out[0].shape))
    for ours, theirs in zip(outputs(model), right, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len(seen) == 1 and seen[0] == (*batch(model)["input_ids"].shape, 97) and report.fallbacks == {"backward hooks on the last layer": 1}
    handle.remove()
    outputs(model)
    assert report.paths["linear_cross_entropy"] == {"kernel": 0, "own path": 1, "reference": 1}


def test_experts_by_name_are_called_with_the_hooks_of_their_activation():
    model = mixtral()
    try:
        model.set_experts_implementation("dtkernels")
    except ValueError:
        pytest.skip("this version of transformers takes no registered names")
    wanted, right = called(mixtral(), "forward")
    acts = {name for name in wanted if name.endswith("act_fn")}
    seen, found = called(model, "forward")
    assert acts and acts <= set(seen)
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-4)
