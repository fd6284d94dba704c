"""TRL's trainers on patched models: the same losses and gradients as on unpatched ones. Skipped, with the reason, where trl is not installed."""

import pytest

pytest.importorskip("trl", reason="trl is not installed; pip install trl runs these")
pytest.importorskip("transformers")

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import dtkernels

WORDS = ["<pad>", "<eos>", "<unk>", *"the cat dog sat ran on under mat tree and".split()]
SIZES = {"vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **TOKENS)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, **TOKENS, head_dim=16)),
}
TEXTS = [{"text": "the cat sat on the mat"}, {"text": "the dog ran under the tree and sat"}]
PAIRS = [
    {"prompt": "the cat", "chosen": " sat on the mat", "rejected": " ran under"},
    {"prompt": "the dog ran", "chosen": " under the tree", "rejected": " on the mat and sat"},
]
PROMPTS = [{"prompt": "the cat"}, {"prompt": "the dog ran"}]


@pytest.fixture(autouse=True)
def by_the_reference(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")


def made(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.dim() > 1 else parameter.add_(0.1)
    return model


def tokenizer():
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left")


def reward(completions, **_):
    return [float(text.count("the") - text.count("cat")) for text in completions]


def trained(method, name, folder, patch):
    """Train for three steps. Return what the trainer logged of each step, the weights, and the report."""
    model = made(name)
    report = dtkernels.apply_to(model) if patch else None
    common = {"output_dir": str(folder), "max_steps": 3, "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "logging_steps": 1}
    common |= {"save_strategy": "no", "learning_rate": 1e-2, "seed": 3, "optim": "sgd"}  # AdamW would divide rounding errors by themselves
    if method == "sft":
        options = SFTConfig(**common, per_device_train_batch_size=2, max_length=16)
        trainer = SFTTrainer(model, args=options, train_dataset=Dataset.from_list(TEXTS * 4), processing_class=tokenizer())
    elif method == "dpo":
        options = DPOConfig(**common, per_device_train_batch_size=2, max_length=16)
        trainer = DPOTrainer(model, ref_model=made(name), args=options, train_dataset=Dataset.from_list(PAIRS * 4), processing_class=tokenizer())
    else:
        options = GRPOConfig(**common, per_device_train_batch_size=4, num_generations=4, max_completion_length=6)
        trainer = GRPOTrainer(model, reward_funcs=reward, args=options, train_dataset=Dataset.from_list(PROMPTS * 4), processing_class=tokenizer())
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    steps = [[entry[key] for key in ("loss", "grad_norm", "entropy")] for entry in trainer.state.log_history if "loss" in entry]
    return torch.tensor(steps), {name: p.detach().clone() for name, p in model.named_parameters()}, report


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
def test_trainers_have_the_same_losses_patched_and_unpatched(method, name, tmp_path):
    right, weights, _ = trained(method, name, tmp_path, patch=False)
    found, ours, report = trained(method, name, tmp_path, patch=True)
    assert right.shape == (3, 3) and right[:, 1].max() > 0.1  # something was learned
    torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)
    for key, wanted in weights.items():
        torch.testing.assert_close(ours[key], wanted, atol=1e-4, rtol=1e-3)
    assert all(report.calls[op] > 0 for op in ("attention", "rmsnorm", "swiglu")) and not report.fallbacks
