"""The DyT module and the converter: values, training, what is replaced and what is refused."""

import copy

import pytest
import torch
from torch import nn

from dtkernels.nn import DyT, convert_norms_to_dyt


def test_it_starts_as_the_paper_says_and_computes_what_it_says():
    layer = DyT(5, init_alpha=0.8)
    assert {n: p.shape for n, p in layer.named_parameters()} == {"alpha": (1,), "weight": (5,), "bias": (5,)}
    with torch.no_grad():
        layer.weight.normal_()
        layer.bias.normal_()
    x = torch.randn(2, 3, 5)
    torch.testing.assert_close(layer(x), torch.tanh(0.8 * x) * layer.weight + layer.bias, atol=1e-6, rtol=1e-5)


def test_every_parameter_learns():
    layer, x = DyT(4), torch.randn(8, 4)
    layer(x).square().sum().backward()
    twin = copy.deepcopy(layer)
    twin.zero_grad()
    (torch.tanh(twin.alpha * x) * twin.weight + twin.bias).square().sum().backward()
    for ours, theirs in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)


class SomeRMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


def test_norms_of_every_kind_are_replaced_and_nothing_else():
    shared = nn.LayerNorm(4)
    inner = nn.Sequential(nn.Linear(4, 6), SomeRMSNorm(6))
    model = nn.ModuleDict({"a": shared, "b": inner, "c": shared, "d": nn.BatchNorm1d(4), "e": nn.RMSNorm(3)})
    assert convert_norms_to_dyt(model, init_alpha=0.2) is model
    assert isinstance(model["a"], DyT) and model["a"] is model["c"] and model["a"].channels == 4
    assert isinstance(model["b"][1], DyT) and isinstance(model["e"], DyT) and isinstance(model["d"], nn.BatchNorm1d)
    assert model["e"].alpha.item() == pytest.approx(0.2)
    with pytest.raises(ValueError, match="found no normalization layer in ModuleDict"):
        convert_norms_to_dyt(model)


def test_which_layers_are_replaced_can_be_said():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
    convert_norms_to_dyt(model, which=lambda name, module: name == "2")
    assert isinstance(model[0], nn.LayerNorm) and isinstance(model[2], DyT)
    with pytest.raises(ValueError, match="1 is a Linear without a one-dimensional weight"):
        convert_norms_to_dyt(model, which=lambda name, module: name == "1")
    with pytest.raises(TypeError, match="got a LayerNorm itself"):
        convert_norms_to_dyt(nn.LayerNorm(4))


def test_a_transformer_trains_with_it():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    model = convert_norms_to_dyt(transformers.LlamaForCausalLM(config))
    assert sum(isinstance(m, DyT) for m in model.modules()) == 3
    ids = torch.randint(50, (2, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
