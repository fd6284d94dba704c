"""What hangs on modules inside a patched one, and modules and tensors that are not quite of their kind: as unpatched, and counted."""

import pytest
import torch
from dtkernels.integrations.huggingface import apply_to, patched
from torch import nn


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.act, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 8)

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


def _other_forward(module):
    module.forward = lambda x: 2 * type(module).forward(module, x)


STEPS_IN = {
    "hook": (lambda module: module.register_forward_hook(lambda *given: 2 * given[-1]), "hooks"),
    "pre-hook": (lambda module: module.register_forward_pre_hook(lambda _, given: (2 * given[0],)), "hooks"),
    "forward": (_other_forward, "a forward of its own"),
}


@pytest.mark.parametrize("way", STEPS_IN)
@pytest.mark.parametrize("inner, op", [("0.act", "swiglu"), ("1.1", "gate")])
def test_what_is_hung_on_an_activation_inside_an_op_still_happens(inner, op, way):
    torch.manual_seed(0)
    model, x = nn.Sequential(Gated(), nn.Sequential(nn.Linear(8, 5), nn.Sigmoid())), torch.randn(3, 8)
    plain, (hang, has) = model(x), STEPS_IN[way]
    report = apply_to(model, op)
    hang(model.get_submodule(inner))
    found = model(x)
    report.undo()
    torch.testing.assert_close(found, model(x))
    assert not torch.allclose(found, plain, atol=1e-3) and [reason.endswith(has) for reason in report.fallbacks] == [True]


def test_nested_tensors_go_to_torch():
    torch.manual_seed(0)
    model = nn.ModuleList(
        [nn.LayerNorm(8), nn.ReLU(), nn.Softmax(-1), nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 8)), Gated()]
    )
    x = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
    expected = [module(x).to_padded_tensor(0) for module in model]
    with patched(model, ops="all") as report:
        for module, wanted in zip(model, expected, strict=True):
            torch.testing.assert_close(module(x).to_padded_tensor(0), wanted)
    assert report.fallbacks == {"a nested tensor": 5}


def test_proxies_of_torch_fx_pass_through():
    torch.manual_seed(0)
    model, x = nn.Sequential(Gated()), torch.randn(3, 8)
    expected = model(x)
    with patched(model, "swiglu") as report:
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), expected)
    assert report.fallbacks == {"tensor type Proxy": 1}


def test_a_layernorm_that_lost_its_bias_runs_without():
    model, x = nn.LayerNorm(8), torch.randn(3, 8)
    report = apply_to(model, "layernorm")
    model.bias = None
    torch.testing.assert_close(model(x), nn.functional.layer_norm(x, (8,), model.weight))
    assert report.calls == {"layernorm": 1} and not report.fallbacks


def test_softmax_under_autocast_of_the_cpu_keeps_the_dtype():
    model, x = nn.Softmax(-1), torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16), patched(model, "softmax") as report:
        assert model(x.bfloat16()).dtype == torch.bfloat16 and model(x).dtype == torch.float32
    assert report.fallbacks == {"autocast of a 16-bit input": 1}


class Norm(nn.Module):
    def __init__(self, wide=False, note=False):
        super().__init__()
        self.weight, self.eps, self.wide, self.note, self.largest = nn.Parameter(torch.randn(8)), 1e-6, wide, note, None

    def forward(self, x):
        if self.note:
            self.largest = x.abs().max()
        y = x.float() if x.dtype != torch.float64 else x
        y = y * (y.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (y if self.wide else y.to(x.dtype)) * self.weight


def test_norms_that_note_something_or_return_another_dtype_are_left_alone():
    model = nn.ModuleList([Norm(), Norm(wide=True), Norm(note=True)])
    assert [row.module for row in apply_to(model, "rmsnorm").patched] == ["0"]
    assert model[1].bfloat16()(torch.randn(3, 8).bfloat16()).dtype == torch.float32
    model[2](torch.ones(3, 8))
    assert model[2].largest == 1


def turned(q, k=None, cos=None, sin=None):
    both = [x * cos[:, None] + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin[:, None] for x in (q, k) if x is not None]
    return both[0] if k is None else tuple(both)


class Indexer(nn.Module):
    def forward(self, x):
        return turned(x, cos=x[:, 0], sin=x[:, 1]), *turned(x, x, x[:, 0], x[:, 1])


def test_a_rotary_function_may_be_called_for_the_queries_alone():
    """As the indexer of Qwen4-Exp does."""
    module, x = Indexer(), torch.randn(2, 3, 5, 8)
    expected = module(x)
    with patched(module, ops="rope") as report:
        torch.testing.assert_close(module(x), expected)
    assert report.calls["rope"] == 2 and report.fallbacks == {"no k, cos or sin": 1}
