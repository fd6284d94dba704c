"""Residual sums and their norms in one kernel: fewer kernels, and no further from float64."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from dtkernels.integrations.huggingface import apply_to
from torch.profiler import ProfilerActivity, profile

LAYERS = 3
SIZES = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 520, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
IDS = torch.randint(3, 1000, (2, 65), generator=torch.Generator().manual_seed(0))


def llama(dtype):
    torch.manual_seed(0)
    with torch.device("cuda"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(dtype)


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS.cuda(), use_cache=False).logits


def gradients(model):
    model.zero_grad()
    model(input_ids=IDS.cuda(), labels=IDS.cuda(), use_cache=False).loss.backward()
    return [p.grad.double() for p in model.parameters()]


def kernels(work) -> int:
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    return sum(e.device_type == torch.autograd.DeviceType.CUDA for e in found.events())


def error(found, exact) -> float:
    return (sum((a.double() - b).square().sum() for a, b in zip(found, exact, strict=True)) / sum(b.square().sum() for b in exact)).sqrt().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_fewer_kernels_and_no_larger_error(dtype):
    """A layer has two sums: each is joined to the norm that reads it, the second only without gradients."""
    model = llama(dtype)
    twin = copy.deepcopy(model).double()
    exact, exact_gradients = logits(twin), gradients(twin)
    found = {}
    for ops in (["rmsnorm"], ["rmsnorm", "add_rmsnorm"]):
        report = apply_to(model, ops=ops)
        found[len(ops)] = error([logits(model)], [exact]), error(gradients(model), exact_gradients), kernels(lambda: logits(model))
        assert not report.fallbacks, str(report)
        report.undo()
    assert found[2][2] == found[1][2] - 2 * LAYERS, found
    assert found[2][0] <= 1.2 * found[1][0] and found[2][1] <= 1.2 * found[1][1], found


def test_the_sum_is_torchs_bit_by_bit():
    from dtkernels import ops

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        a, b, w = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in ((4, 1, 2048), (4, 1, 2048), (2048,)))
        assert torch.equal(ops.add_rmsnorm(a, b, w)[1], a + b)
