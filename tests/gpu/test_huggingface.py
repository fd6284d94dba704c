"""Patched Hugging Face models on a GPU: loss, logits and gradients no further from float64 than those of the model before, by kernels."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from dtkernels.integrations.huggingface import apply_to

import dtkernels

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 520, "num_hidden_layers": 2, "num_attention_heads": 4, **IDS}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256}
GPT2 = {"vocab_size": 1000, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 256, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
MODELS = {
    "llama": ("Llama", "ForCausalLM", GROUPED, ("rmsnorm", "swiglu", "rope", "cross_entropy")),
    "gemma2": ("Gemma2", "ForCausalLM", GROUPED, ("rmsnorm", "geglu", "rope", "cross_entropy")),
    "gpt2": ("GPT2", "LMHeadModel", {**GPT2, **IDS}, ("layernorm", "cross_entropy")),
}


def results(model) -> list[torch.Tensor]:
    """Loss, logits, and the gradient of every parameter, of a batch padded on the right."""
    ids = torch.randint(3, 1000, (2, 130), generator=torch.Generator().manual_seed(1)).cuda()
    mask = torch.ones_like(ids)
    mask[0, -30:] = 0
    out = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False)
    out.loss.backward()
    return [out.loss.detach(), out.logits.detach()[mask == 1], *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_patched_models_are_as_near_to_float64_as_before(name, dtype):
    kind, head, config, ops = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind + head)(getattr(transformers, kind + "Config")(**config)).cuda().to(dtype).train()
    truth = results(copy.deepcopy(model).double())
    theirs = results(copy.deepcopy(model))
    report, before = apply_to(model, ops="all"), dtkernels.paths()
    ours = results(model)
    after = dtkernels.paths()
    assert not report.fallbacks
    for op in (*ops, *(f"{op} backward" for op in ops)):
        ran, earlier = after[op], before.get(op, {"gpu": 0, "reference": 0})
        assert ran["gpu"] > earlier["gpu"] and ran["reference"] == earlier["reference"], (op, earlier, ran)
    for found, other, right in zip(ours, theirs, truth, strict=True):
        error, before_patch = ((x.double() - right).norm().item() for x in (found, other))
        assert found.dtype == other.dtype
        # one number, as the loss is, may be right by luck: what is asked for is no more than twice the error, and a few roundings
        assert error <= 2 * before_patch + 4 * torch.finfo(dtype).eps * right.norm().item()
