"""Which masks a model is written for, told from its files: of transformers, of a user's one script, or of nobody."""

import importlib
import sys

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from dtkernels.integrations.huggingface import patched
from dtkernels.integrations.huggingface.attention.masks import dtkernels_mask

TOKENS = 97
SCRIPT = """
import transformers
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class Config(transformers.PretrainedConfig):
    model_type = "script"


class Headless(transformers.PretrainedConfig):  # of which no model says that it is its own
    model_type = "headless"


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.is_causal = config, True
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        return function(self, q, k, v, None, scaling=0.4)[0]


class Model(transformers.PreTrainedModel):
    config_class = Config
    _supports_sdpa = _supports_attention_backend = True

    def __init__(self, config):
        super().__init__(config)
        self.attention = Attention(config)
        self.post_init()

    def forward(self, x):
        return self.attention(x)
"""


@pytest.fixture(autouse=True)
def by_the_reference(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")


def written(folder, monkeypatch, name: str, text: str):
    """A user's one file with config and model, in no package."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


@pytest.fixture
def script(tmp_path, monkeypatch):
    return written(tmp_path, monkeypatch, "model_of_a_user", SCRIPT)


def test_a_model_written_in_one_script_stays_causal_without_a_mask(script):
    torch.manual_seed(0)
    model, x = script.Model(script.Config()).eval(), torch.randn(2, 7, 16)
    expected = model(x)
    with patched(model) as report:
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
    assert report.calls["attention"] == 1 and not report.fallbacks


@pytest.mark.parametrize("config", ["Config", "Headless"])
def test_configs_in_no_package_get_the_masks_of_sdpa(script, config):
    given = {"batch_size": 1, "q_length": 4, "kv_length": 4, "config": getattr(script, config)()}
    assert dtkernels_mask(**given, attention_mask=torch.tensor([[False, True, True, True]])).dtype == torch.bool
    assert dtkernels_mask(**given) is None


@pytest.mark.skipif(not hasattr(transformers, "DeepseekV4Config"), reason="this version of transformers has no such model")
def test_attention_that_puts_its_own_numbers_beside_the_mask_gets_numbers():
    rope = {name: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5} for name in ("main", "compress")}
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "o_groups": 2, "o_lora_rank": 8}
    index = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 2}
    more = {"vocab_size": TOKENS, "sliding_window": 4, "layer_types": ["sliding_attention", "compressed_sparse_attention"], "rope_parameters": rope, "max_position_embeddings": 64}
    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**sizes, **experts, **index, **more)).eval()
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        expected = model(ids).logits
        with patched(model) as report:
            torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)
    assert report.calls["attention"] == 2 and not report.fallbacks


CUTS = """
import transformers
from torch import nn


class Config(transformers.PretrainedConfig):
    model_type = "cuts"


class Model(transformers.PreTrainedModel):
    config_class = Config
    _supports_sdpa = True

    def queries(self, x, mask):
        return x if mask is None and self.config._attn_implementation == "sdpa" else x[:, -2:]
"""


def test_a_model_that_asks_for_sdpa_by_name_is_never_left_without_a_mask(tmp_path, monkeypatch):
    """It may take what only masks tell from each other for granted: such as that what it cuts off is cut off the mask."""
    config = written(tmp_path, monkeypatch, "model_that_cuts", CUTS).Config()
    mask = dtkernels_mask(batch_size=1, q_length=4, kv_length=4, config=config)
    assert torch.equal(mask[0, 0], torch.ones(4, 4, dtype=torch.bool).tril())


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="this version of transformers has no such model")
def test_queries_that_are_cut_off_leave_the_others_causal():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"head_dim": 16, "global_head_dim": 16, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "sliding_window": 4}
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size": TOKENS, "vocab_size_per_layer_input": TOKENS}
    results = []
    for name in ("eager", "dtkernels"):
        torch.manual_seed(0)
        config = transformers.Gemma4TextConfig(**sizes, **more, **layers)
        model = transformers.Gemma4ForCausalLM._from_config(config, attn_implementation=name).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            results.append(model(torch.arange(3, 7)[None], logits_to_keep=2).logits)
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)


WEIGHTS = """
import transformers
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class Config(transformers.PretrainedConfig):
    model_type = "weights"


def eager_attention_forward(module, q, k, v, mask, scaling, **kwargs):
    weights = (q @ k.transpose(2, 3) * scaling).softmax(-1)
    return (weights @ v).transpose(1, 2).contiguous(), weights


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.is_causal, self.qkv = config, False, nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        return function(self, q, k, v, None, scaling=0.4)


class Model(transformers.PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.attention = Attention(config)
        self.post_init()

    def forward(self, x, **kwargs):
        output, weights = self.attention(x)
        return BaseModelOutput(last_hidden_state=output.flatten(2), attentions=(weights,))


class Asked(Model):
    def forward(self, x, output_attentions=False, **kwargs):
        output, weights = self.attention(x)
        return BaseModelOutput(last_hidden_state=output.flatten(2), attentions=(weights,) if output_attentions else None)
"""


def test_a_model_that_returns_attention_weights_unasked_goes_on_doing_so(tmp_path, monkeypatch):
    """As BridgeTower does: it hands nothing on by which attention could know that the weights are read."""
    file, x = written(tmp_path, monkeypatch, "model_that_gives_weights", WEIGHTS), torch.randn(2, 7, 16)
    model = file.Model(file.Config()).eval()
    expected = model(x).attentions[0]
    with patched(model) as report:
        assert torch.equal(model(x).attentions[0], expected)
    assert [row.reason for row in report.skipped] == ["Model returns attention weights unasked: only eager attention computes them"]
    with patched(file.Asked(file.Config()).eval()) as report:
        assert [row.op for row in report.patched] == ["attention"] and not report.skipped


MIXED = """
import transformers
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class Config(transformers.PretrainedConfig):
    model_type = "mixed"


class Elsewhere(nn.Module):  # of another model of the file
    def forward(self, x):
        return ALL_ATTENTION_FUNCTIONS


class Own(nn.Module):
    def forward(self, x, attention_mask=None):
        return (x @ x.transpose(1, 2)).softmax(-1) @ x


class Model(transformers.PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.own = Own()
        self.post_init()

    def forward(self, x):
        return self.own(x)


class ForMore(transformers.PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.model = Model(config)
        self.post_init()

    def forward(self, x):
        return self.model(x)
"""


TORCHS = MIXED.replace("(x @ x.transpose(1, 2)).softmax(-1) @ x", "nn.functional.scaled_dot_product_attention(x, x, x)")


@pytest.mark.parametrize("text", [MIXED, TORCHS], ids=["softmax", "torch's"])
def test_attention_of_its_own_is_told_of_where_the_file_knows_the_interface_too(tmp_path, monkeypatch, text):
    """As the text part of GIT, beside a vision part that goes through the interface, and the windows of SAM's image encoder."""
    file = written(tmp_path, monkeypatch, "model_of_two_kinds", text)
    for name, model in ("", file.Model(file.Config())), ("model", file.ForMore(file.Config())):
        with patched(model) as report:
            assert [(row.module, row.reason) for row in report.skipped] == [(name, "Own does not use transformers' AttentionInterface")]
