"""A causal language model whose last layer is sharded, patched: loss and gradients are those of the whole, unpatched model in one process."""

from __future__ import annotations

import copy
import inspect
import sys

import torch
import torch.distributed as dist
import transformers
from dtkernels.integrations.huggingface import apply_to
from dtkernels.integrations.huggingface.layers.last_layer import LazyLogits
from sharded_layer_cases import REFERENCE_CASES
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
IDS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(2))
LABELS = IDS.clone().index_fill_(1, torch.tensor([0, 4]), -100)
OP = ["linear_cross_entropy"]


def made(**more):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | more))).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.dim() > 1 else parameter.add_(0.1)
    return model


def step(model, reads: bool = False):
    """Return loss, logits, gradients and the sums of the logits, which are read before backward, if at all."""
    outputs = model(IDS, labels=LABELS, use_cache=False)
    unmade = type(outputs.logits) is LazyLogits and outputs.logits.made is None
    sums = outputs.logits.sum(-1).detach() if reads else None
    outputs.loss.backward()
    grads = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()}
    return outputs.loss.detach(), grads, sums, unmade


def close(found, right) -> None:
    for got, exact in [(found[0], right[0]), *((found[1][n], right[1][n]) for n in right[1])]:
        torch.testing.assert_close(got, exact, atol=1e-5, rtol=1e-4)


def agrees(model, whole) -> None:
    """Hold the loss and the gradients against the whole model's, with logits that stay unmade, and then with logits that are read."""
    for reads in (False, True):
        found, right = step(model, reads), step(whole, reads)
        assert found[3]
        close(found, right)
        if reads:
            torch.testing.assert_close(found[2], right[2])
        model.zero_grad(), whole.zero_grad()


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def parallelized(first: str) -> None:
    """torch's parallelize_module, before or after the patch; 97 classes do not divide evenly."""
    whole = made()
    model, style = copy.deepcopy(whole), ColwiseParallel(output_layouts=Replicate())
    if first == "patch":
        report = apply_to(model, ops=OP)
    parallelize_module(model, mesh(), {"lm_head": style})
    if first == "shards":
        report = apply_to(model, ops=OP)
    agrees(model, whole)
    assert report.calls == {OP[0]: 2} and not report.fallbacks and not report.skipped, str(report)
    report.undo()
    assert type(model(IDS, labels=LABELS).logits) is torch.Tensor


def tensor_parallel() -> None:
    parallelized("shards")
    parallelized("patch")


def tensor_parallel_that_is_skipped() -> None:
    """Logits that stay sharded, or a DTensor, keep their path, and the report says so."""
    for style in (ColwiseParallel(output_layouts=Shard(-1)), ColwiseParallel(output_layouts=Replicate(), use_local_output=False)):
        model = parallelize_module(made(), mesh(), {"lm_head": style})
        report = apply_to(model, ops=OP)
        assert type(model(IDS).logits) is not LazyLogits
        assert "its hooks do not gather the logits" in str(report), str(report)
        report.undo()


def _takes_a_plan() -> bool:
    """Return whether transformers' function takes the plan; that of older releases takes the model's."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    return "tp_plan" in inspect.signature(apply_tensor_parallelism).parameters


def _parallelize(model, style: str) -> None:
    """Shard the last layer by transformers' own plan."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan = {"lm_head": style, "lm_head.weight": style}
    if _takes_a_plan():
        apply_tensor_parallelism(model, mesh(), plan)
    else:
        model._tp_plan = plan
        apply_tensor_parallelism(model, mesh())


def tensor_parallel_of_transformers() -> None:
    """The plan of the model itself, for its last layer."""

    whole = made() if _takes_a_plan() else made(vocab_size=98)  # older ones gather even shards alone
    model = copy.deepcopy(whole)
    style = model._tp_plan["lm_head"]
    _parallelize(model, style)
    assert isinstance(model.lm_head.weight, DTensor)
    report = apply_to(model, ops=OP)
    agrees(model, whole)
    assert report.calls == {OP[0]: 2} and not report.fallbacks, str(report)
    forward = model.lm_head.forward
    report.undo()
    assert model.lm_head.forward is not forward and type(model(IDS, labels=LABELS).logits) is torch.Tensor
    local = copy.deepcopy(whole)
    _parallelize(local, "colwise")
    assert "does not gather the logits" in str(apply_to(local, ops=OP))


def fsdp2() -> None:
    """fully_shard of the layers and the model, of the last layer with its weight kept, tied or not; patched before and after."""
    for tied, own, first in ((False, False, "shards"), (True, False, "patch"), (False, True, "patch"), (False, True, "shards")):
        whole = made(tie_word_embeddings=tied)
        model = copy.deepcopy(whole)
        if first == "patch":
            report = apply_to(model, ops=OP)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh())
        if own:
            fully_shard(model.lm_head, mesh=mesh(), reshard_after_forward=False)
        fully_shard(model, mesh=mesh())
        if first == "shards":
            report = apply_to(model, ops=OP)
        agrees(model, whole)
        assert report.calls == {OP[0]: 2} and not report.fallbacks and not report.skipped, str(report)


def fsdp2_that_frees_the_weight() -> None:
    """A last layer whose weight is gone after its forward keeps its path, patched before or after."""
    for first in ("patch", "shards"):
        whole = made()
        model = copy.deepcopy(whole)
        report = apply_to(model, ops=OP) if first == "patch" else None
        fully_shard(model.lm_head, mesh=mesh(), reshard_after_forward=True)
        fully_shard(model, mesh=mesh())
        report = report or apply_to(model, ops=OP)
        found = step(model)
        assert not found[3] and "its weight is freed after its forward" in str(report), str(report)
        close(found, step(whole))


CASES = {f.__name__: f for f in (tensor_parallel, tensor_parallel_that_is_skipped, tensor_parallel_of_transformers, fsdp2, fsdp2_that_frees_the_weight)}


if __name__ == "__main__":
    from several import run_cases

    run_cases({**CASES, **REFERENCE_CASES}, *sys.argv[1:])
