"""Residual sums and the norms that read them: one op for both, in any layer whose class says so, with the same results and gradients."""

import copy
import pickle

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from dtkernels.integrations.huggingface import apply_to
from dtkernels.integrations.huggingface.patching.normed_sums import hang, take_normed
from dtkernels.integrations.huggingface.residuals.sum_statements import first_norm, norm_behind, rewritten
from huggingface_models import GROUPED, SMALL, batch, of, outputs, state
from torch import nn

OPS = ["rmsnorm", "add_rmsnorm"]
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
#: model -> calls of the op with gradients, and without: a layer's own norm, and that of the next layer or behind the last one
MODELS = {
    "Llama": (GROUPED, 2, 4),
    "Qwen3": (GROUPED, 2, 4),
    "Granite": ({**GROUPED, "residual_multiplier": 0.3}, 2, 4),
    "Gemma2": ({**GROUPED, **WINDOW}, 2, 4),  # norms before the sum and after it
    "Phi3": ({**SMALL, "num_key_value_heads": 2}, 2, 4),
    "Olmo2": (GROUPED, 0, 1),  # no norm reads a sum, but for the one behind the last layer
}


@pytest.fixture(autouse=True)
def by_the_reference(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")


def close(found, right):
    assert len(found) == len(right)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(**{**batch(model), "labels": None}, use_cache=False).logits


def llama():
    return of("Llama", **GROUPED)


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    config, with_gradients, without = MODELS[name]
    model = of(name, **config)
    right, plain, before = outputs(model), logits(model), state(model)
    report = apply_to(model, ops=OPS)
    close(outputs(model), right)
    assert report.calls["add_rmsnorm"] == with_gradients and not report.fallbacks
    norms = report.calls["rmsnorm"]
    close([logits(model)], [plain])
    assert report.calls["add_rmsnorm"] == with_gradients + without, str(report)
    assert report.calls["rmsnorm"] == 2 * norms, "the norm of a next layer is called, and has its result already"
    report.undo()
    assert state(model) == before
    close(outputs(model), right)


def test_against_float64():
    """In bfloat16, no further from the float64 model than the module's own forward is."""
    model = llama()
    exact = logits(copy.deepcopy(model).double())
    model.bfloat16()
    own = (logits(model).double() - exact).norm()
    apply_to(model, ops=OPS)
    assert 0 < (logits(model).double() - exact).norm() < 1.1 * own


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    """A norm hangs on a sum while a reentrant checkpoint runs without gradients. The last norm, which runs with them, leaves it."""
    model = llama().train()
    right = outputs(model)
    report = apply_to(model, ops=OPS)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for first in (True, False):
        layer_of(model).gradient_checkpointing = first
        close(outputs(model), right)
    assert not report.fallbacks
    # two layers, each twice where it is checkpointed; without gradients the next norm's besides
    assert report.calls["add_rmsnorm"] == (4 + 3 + (2 + 1 if reentrant else 0))


def test_a_subclass_has_its_own_decorator_of_checkpoints():
    """FSDP2 gives a layer another class after it was patched: a checkpoint must still be one."""
    model = llama().train()
    right = outputs(model)
    report = apply_to(model, ops=OPS)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer.__class__ = type("Sharded", (type(layer),), {})
    close(outputs(model), right)
    assert report.calls["add_rmsnorm"] == 4 and not report.fallbacks, "forward and, in backward, forward again"


def test_copies_and_files():
    model = llama()
    right = logits(model)
    report = apply_to(model, ops=OPS)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        close([logits(twin)], [right])
        record, module, *_, following = twin.model.layers[0].forward.args
        assert module is twin.model.layers[0] and following.norm is twin.model.layers[1].input_layernorm and record.calls == 2
    assert not report.calls["add_rmsnorm"] and apply_to(model, ops=OPS).already


def test_compiled():
    model = llama()
    right = logits(model)
    apply_to(model, ops=OPS)
    close([logits(torch.compile(model, backend="aot_eager", fullgraph=True))], [right])


def layer_of(model) -> nn.Module:
    return model.model.layers[0]


def hooked(model):
    layer_of(model).post_attention_layernorm.register_forward_hook(lambda module, args, out: 2 * out)
    layer_of(model).input_layernorm.register_forward_pre_hook(lambda module, args: (3 * args[0],))


def replaced(model):
    layer_of(model).post_attention_layernorm.forward = lambda x: x + 1


def in_place(model):
    def doubled(module, args, out):
        out.mul_(2)

    layer_of(model).register_forward_hook(doubled)


def other_result(model):
    model.model.layers[0].register_forward_hook(lambda module, args, out: 2 * out)


def skips(model):
    """The second layer is left out: what hangs on the first one's result is for nobody."""
    model.model.layers = model.model.layers[:1]


CHANGES = {
    hooked: "hooks on its norm",
    replaced: "its norm has a forward of its own",
    in_place: None,
    other_result: None,
    skips: None,
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_others_change_is_heeded(change):
    model, twin = llama(), llama()
    report = apply_to(model, ops=OPS)
    change(model)
    change(twin)
    close([logits(model)], [logits(twin)])
    assert set(report.fallbacks) == ({CHANGES[change]} if CHANGES[change] else set())


class OnePlus(nn.Module):
    """The same attributes, another formula."""

    def __init__(self, width=32):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.linspace(-0.5, 0.5, width)), 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * (1 + self.weight)


OTHERS = {
    "Identity": nn.Identity,
    "nn.LayerNorm": lambda: nn.LayerNorm(32),
    "nn.RMSNorm": lambda: nn.RMSNorm(32),
    "another formula": OnePlus,
    "the same class": lambda: transformers.models.llama.modeling_llama.LlamaRMSNorm(32),
}


@pytest.mark.parametrize("place", ["post_attention_layernorm", "input_layernorm", "norm"])
@pytest.mark.parametrize("other", OTHERS)
def test_a_norm_that_is_replaced_after_patching_is_called(other, place):
    """It ended in an AttributeError, or was computed by the formula of the norm before."""
    model, twin = llama().train(), llama().train()
    report = apply_to(model, ops=OPS)
    for one in (model, twin):
        torch.manual_seed(0)
        holder = one.model if place == "norm" else one.model.layers[1]
        setattr(holder, place, OTHERS[other]())
    close(outputs(model), outputs(twin))
    said = {"another norm than when it was patched": 1} if place == "post_attention_layernorm" else {}
    assert report.fallbacks == said and report.calls["add_rmsnorm"] == 2
    close([logits(copy.deepcopy(model))], [logits(twin)])
    close([logits(model)], [logits(twin)])
    report.undo()
    close(outputs(model), outputs(twin))


def test_a_norm_that_is_no_module_now_is_called():
    model, twin = llama(), llama()
    report = apply_to(model, ops=OPS)
    for one in (model, twin):
        del layer_of(one).post_attention_layernorm
        layer_of(one).post_attention_layernorm = torch.tanh
    close([logits(model)], [logits(twin)])
    assert report.fallbacks == {"another norm than when it was patched": 1}


@pytest.mark.parametrize("clone", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["itself", "deepcopy", "pickle"])
def test_a_norm_whose_class_or_weight_is_another_now_is_called(clone, monkeypatch):
    model, twin = llama(), llama()
    apply_to(model, ops="add_rmsnorm")
    norm = type(layer_of(model).post_attention_layernorm)
    with monkeypatch.context() as patch:
        patch.setattr(norm, "forward", lambda self, x: 2 * x * self.weight)
        now = clone(model)
        close([logits(now)], [logits(twin)])
        record = layer_of(now).forward.args[0]
        assert record.fallbacks == {"another norm than when it was patched": 1}
    for one in (model, twin):
        layer_of(one).post_attention_layernorm.__class__ = type("Halved", (norm,), {"forward": lambda self, x: x / 2})
    close([logits(model)], [logits(twin)])


def test_inference_mode_counts_no_writes():
    model = llama()
    right = logits(model)
    report = apply_to(model, ops=OPS)
    with torch.inference_mode():
        found = model(**{**batch(model), "labels": None}, use_cache=False).logits
    close([found], [right])
    assert report.calls["add_rmsnorm"] == 2, "norms of the next layer are computed by themselves"


def test_what_hangs_on_a_sum_is_taken_once():
    norm, total, normed = nn.Identity(), torch.ones(3), torch.zeros(3)
    with torch.no_grad():
        hang(total, norm, normed)
        assert take_normed(total, norm) is normed and take_normed(total, norm) is None
        hang(total, norm, normed)
        assert take_normed(total, nn.Identity()) is None
        hang(total, norm, normed)
        total.add_(1)
        assert take_normed(total, norm) is None
        hang(total, norm, normed)
    assert take_normed(total, norm) is None, "with gradients it has none"


@pytest.mark.parametrize("change", ["dtype", "stride", "shape"])
def test_other_sums_are_torchs(change):
    model = llama()
    layer = layer_of(model)
    inner = layer.self_attn.o_proj.forward

    def other(x):
        out = inner(x)
        return {"dtype": out.double(), "stride": out.mT.contiguous().mT, "shape": out[:, :1]}[change]

    layer.self_attn.o_proj.forward = other
    model.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0].float(),))
    if change == "dtype":
        layer.post_attention_layernorm.register_forward_pre_hook(lambda module, args: (args[0].float(),))
        layer.mlp.register_forward_hook(lambda module, args, out: out.double())
    right = logits(model)
    report = apply_to(model, ops=OPS)
    close([logits(model)], [right])
    assert report.fallbacks.total() >= 1, str(report)


class Block(nn.Module):
    """A layer of no library. ``scale`` is read through a closure-free global, ``super`` through a cell."""

    def __init__(self, width=8):
        super().__init__()
        self.first, self.second = (transformers.models.llama.modeling_llama.LlamaRMSNorm(width) for _ in range(2))
        self.inside, self.outside = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, factor=2.0):
        kept = x
        y = self.inside(self.first(x)) * factor
        total = kept + y
        normed = self.second(total)
        if factor > 0:
            total = total + self.outside(normed)
        y = total + super().__len__() if factor > 5 else total
        x = kept + y
        return x


class Stack(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(blocks), transformers.models.llama.modeling_llama.LlamaRMSNorm(8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return x


def test_layers_of_ones_own():
    torch.manual_seed(0)
    model, x = Stack([Block(), Block()]), torch.randn(3, 8)
    right = model(x)
    assert first_norm(Block) is None and norm_behind(Stack, "blocks") == "norm" and norm_behind(Stack, "others") is None
    report = apply_to(model, ops=OPS)
    close([model(x)], [right])
    assert report.calls["add_rmsnorm"] == 2
    with torch.no_grad():
        close([model(x)], [right])
    assert report.calls["add_rmsnorm"] == 5, "the last block's sum is normed for the stack"
    Block.forward, own = lambda self, x: x, Block.forward
    try:
        assert torch.equal(model(x), model.norm(x)) and report.fallbacks == {"its class has another forward now": 2}
    finally:
        Block.forward = own


def test_source_that_is_not_the_code():
    """A forward that was made from another text than the file holds, or from none, is left alone."""
    found = rewritten(Block.forward)
    assert found.norms == ["second"] and found.last and found.code.co_filename == __file__
    assert found.code.co_firstlineno == Block.forward.__code__.co_firstlineno
    scope: dict = {"nn": nn}
    exec("class Other(nn.Module):\n    def forward(self, x):\n        y = x + x\n        z = self.n(y)\n        return y * z", scope)
    assert rewritten(scope["Other"].forward) is None

    def forward(self, x):
        y = x + x
        z = self.n(y)
        return y * z

    forward.__code__ = forward.__code__.replace(co_consts=(*forward.__code__.co_consts, "another"))
    assert rewritten(forward) is None
