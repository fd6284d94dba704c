"""Small Hugging Face models with random weights, a batch for them, and what a patch may change in them."""

import torch
import transformers

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL = {**SIZES, "max_position_embeddings": 64, **IDS}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}


def of(name: str, kind: str = "ForCausalLM", **config):
    torch.manual_seed(0)
    model = getattr(transformers, name + kind)(getattr(transformers, name + "Config")(**config))
    with torch.no_grad():  # weights of norms are all ones, or zeros, until somebody trains them
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def llama():
    """Return a Llama of grouped heads that trains."""
    return of("Llama", **GROUPED).train()


def batch(model) -> dict[str, torch.Tensor]:
    """Two sequences, one of them padded on the left; labels where the model has a loss."""
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    labels = {"labels": ids.masked_fill(mask == 0, -100)} if hasattr(model, "lm_head") else {}
    return {"input_ids": ids, "attention_mask": mask, **labels}


def state(model):
    """What a patch might leave behind: every module's own attributes and every config's values."""
    modules = [{key: id(value) for key, value in vars(module).items()} for module in model.modules()]
    return modules, [dict(vars(module.config)) for module in model.modules() if hasattr(module, "config")]


def outputs(model) -> list[torch.Tensor]:
    """Loss (or hidden states), logits, and the gradient of every parameter."""
    model.zero_grad()
    given = batch(model)
    out = model(**given)
    loss = out[0] if "labels" in given else out[0].square().mean()
    loss.backward()
    return [loss.detach(), out[1].detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
