"""What people train with, around a patched model: after two optimizer steps the weights are those of the unpatched one."""

import copy
import io

import pytest
import torch

pytest.importorskip("transformers")

from dtkernels.integrations.huggingface import apply_to
from huggingface_models import GROUPED, llama, of
from torch import nn

IDS = torch.randint(3, 97, (4, 2, 9), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def by_the_reference(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def accumulated(model, folder):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, sgd(model))
    for ids in IDS:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, ids))
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model)


def trainer(model, folder):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    sizes = {"max_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 0.01}
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no", "use_cpu": True}
    data = [{"input_ids": row, "labels": row} for ids in IDS for row in ids]
    Trainer(model, TrainingArguments(folder, **sizes, **quiet), train_dataset=data).train()
    return model


def scaled(model, folder):
    """Mixed precision in fp16, whose gradients a scaler keeps from vanishing."""
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1024.0), sgd(model)
    for ids in IDS[:2]:
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, ids)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 1024, "a gradient overflowed, and its step was left out"
    return model


def averaged(model, folder):
    """An average of weights is a deep copy; it runs patched, by weights of its own."""
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = sgd(model)
    for ids in IDS[:2]:
        loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    loss_of(average, IDS[2]).backward()
    assert all(p.grad is not None for p in average.module.parameters()) and all(p.grad is None for p in model.parameters())
    return average.module


def zero3(model, folder):
    """DeepSpeed's third stage, by a stand-in: a module's own weights are there while its forward or backward runs, and else freed."""

    def gather(module, *_):
        for p in module._parameters.values():
            if p is not None:
                p.data = whole[p]

    def free(module, *_):
        for p in module._parameters.values():
            if p is not None:
                p.data = torch.empty(0)

    whole = {p: p.data for p in model.parameters()}
    for module in model.modules():
        module.register_forward_pre_hook(gather)
        module.register_forward_hook(free)
        module.register_full_backward_pre_hook(gather)
        free(module)
    for ids in IDS[:2]:
        loss_of(model, ids).backward()
        assert {p.shape for p in model.parameters()} != {(0,)}, "backward has gathered them"
        for module in model.modules():
            gather(module)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
        for module in model.modules():
            free(module)
    for module in model.modules():
        gather(module)
    return model


class Packed(nn.Linear):
    """A linear layer with a weight of 4 bits, two in a byte, as that of bitsandbytes is."""

    def __init__(self, layer: nn.Linear):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.scale = layer.weight.detach().abs().amax(1, keepdim=True) / 7
        levels = ((layer.weight.detach() / self.scale).round() + 8).to(torch.uint8)
        self.weight = nn.Parameter(levels[:, ::2] + 16 * levels[:, 1::2], requires_grad=False)

    def forward(self, x):
        levels = torch.stack([self.weight % 16, self.weight // 16], -1).flatten(1)
        return nn.functional.linear(x, (levels.float() - 8) * self.scale)


def with_adapters(model, **more):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], **more))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def packed():
    model = llama()
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in parent.named_children():
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Packed(child))
    return with_adapters(model)


def trained(model, folder):
    optimizer = sgd(model)
    for ids in IDS[:2]:
        loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


#: name -> (the model, what trains it, reasons for calls of a module's own path, the largest difference of weights)
STACKS = {
    "accelerate": (llama, accumulated, set(), 1e-5),
    "Trainer": (llama, trainer, set(), 1e-4),
    "fp16 with a scaler": (llama, scaled, {"q, k, cos and sin of different dtypes or devices"}, 2e-3),
    "EMA": (llama, averaged, set(), 1e-5),
    "ZeRO-3": (llama, zero3, {"hooks on its norm", "its SiLUActivation has hooks"}, 1e-5),
    "LoRA": (lambda: with_adapters(llama()), trained, set(), 1e-5),
    "DoRA": (lambda: with_adapters(llama(), use_dora=True), trained, set(), 1e-5),
    "QLoRA": (packed, trained, set(), 1e-5),
}


@pytest.mark.parametrize("name", STACKS)
def test_weights_after_two_steps(name, tmp_path):
    make, train, reasons, tolerance = STACKS[name]
    model, twin = make(), make()
    report = apply_to(model)
    found, right = train(model, str(tmp_path)), train(twin, str(tmp_path))
    start = dict(make().named_parameters())
    moved = 0.0
    for (key, one), other in zip(found.named_parameters(), right.parameters(), strict=True):
        assert (one - other).abs().max() <= tolerance, key
        moved = max(moved, (other - start[key]).abs().max().item())
    assert moved > 10 * tolerance, "training moves weights by more than the tolerance"
    assert set(report.fallbacks) == reasons, str(report)
    ran = {op for op, calls in report.calls.items() if calls}
    assert ran >= {"attention", "rmsnorm", "add_rmsnorm", "swiglu", "rope", "cross_entropy"} and (name != "LoRA" or "lora" in ran)
    assert (name not in ("DoRA", "QLoRA")) or {row.op for row in report.skipped} == {"lora"}


def test_files(tmp_path):
    """Weights and whole models through torch.save and safetensors: weights know of no patch, a whole model stays patched."""
    model = llama().eval()
    with torch.no_grad():
        right = model(input_ids=IDS[0]).logits
        apply_to(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        whole = torch.load(file, weights_only=False)
        assert "forward" in vars(whole.model.norm)
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        fresh = of("Llama", **GROUPED)
        fresh.load_state_dict({key: 0 * value for key, value in fresh.state_dict().items()})
        fresh.load_state_dict(torch.load(tmp_path / "weights.pt"))
        model.save_pretrained(tmp_path)
        assert (tmp_path / "model.safetensors").exists()
        again = type(model).from_pretrained(tmp_path)
        for other in (whole, fresh, again, copy.deepcopy(model)):
            torch.testing.assert_close(other(input_ids=IDS[0]).logits, right, atol=1e-5, rtol=1e-5)
