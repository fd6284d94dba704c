"""LoRA layers of PEFT on the op: the same results, gradients and states as unpatched, and the same model after.

Most run the op's torch reference; one runs its kernels.
"""

import copy
import pickle

import pytest
import torch
from dtkernels.integrations.huggingface import apply_to, patched
from torch import nn

import dtkernels

peft = pytest.importorskip("peft")


@pytest.fixture(autouse=True)
def by_the_reference(request, monkeypatch):
    if "kernels" not in request.node.name:
        monkeypatch.delenv("TRITON_INTERPRET")
        monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Table(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(9, 24))


def adapted(dropout=0.0, adapters=("default",), base=Block, **more):
    """A block with LoRA on both layers; B is not zero, so that the adapters tell."""
    torch.manual_seed(0)
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["up", "down"], "lora_dropout": dropout, **more}
    model = peft.get_peft_model(base(), peft.LoraConfig(**config))
    for name in adapters[1:]:
        model.add_adapter(name, peft.LoraConfig(**{**config, "r": 8}))
    model.base_model.set_adapter(list(adapters))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_()
    return model


def step(model, x) -> list[torch.Tensor]:
    """The result and every gradient, that of the input too."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def close(found, expected):
    """To float32's rounding of sums of up to 96 terms, each as large as the largest number there is."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=96 * 2**-24 * b.abs().max().item(), rtol=0.0)


X = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("adapters", [("default",), ("default", "other")])
def test_results_and_gradients_agree(adapters):
    model = adapted(adapters=adapters)
    expected = step(model, X)
    with patched(model) as report:
        close(step(model, X), expected)
    assert report.calls["lora"] == 2 and not report.fallbacks and not report.skipped
    close(step(model, X), expected)


def test_layers_that_hold_their_weight_the_other_way_round():
    Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
    base = lambda: nn.ModuleDict({"up": Conv1D(40, 24), "down": Conv1D(24, 40)})  # noqa: E731
    model = adapted(base=base, fan_in_fan_out=True)
    model.base_model.model.forward = lambda x: model.down(torch.relu(model.up(x)))
    expected = step(model, X)
    with patched(model) as report:
        close(step(model, X), expected)
    assert report.calls["lora"] == 2 and not report.fallbacks and not report.skipped


def test_kernels_compute_it_forward_and_backward():
    model = adapted()
    expected = step(model, X)
    before = dtkernels.paths().get("lora", {}).get("interpreter", 0)
    with patched(model):
        close(step(model, X), expected)
    assert dtkernels.paths()["lora"]["interpreter"] == before + 2


def test_dropout_draws_the_same_numbers():
    model = adapted(dropout=0.4).train()
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(step(model, X))
        report = apply_to(model)
    close(*results)
    assert report.calls["lora"] == 2 and not report.fallbacks


def test_disabled_and_merged_adapters_take_the_layers_own_way():
    model = adapted()
    with torch.no_grad():
        whole = model(X)
        with model.disable_adapter():
            bare = model(X)
        with patched(model) as report:
            with model.disable_adapter():
                assert torch.equal(model(X), bare)
            model.merge_adapter()
            torch.testing.assert_close(model(X), whole, atol=1e-4, rtol=1e-4)
            assert not report.calls["lora"]
            model.unmerge_adapter()
            torch.testing.assert_close(model(X), whole, atol=1e-4, rtol=1e-4)
            assert report.calls["lora"] == 2
        torch.testing.assert_close(model.merge_and_unload()(X), whole, atol=1e-4, rtol=1e-4)


def test_adapters_chosen_while_patched_are_the_ones_used():
    model = adapted(adapters=("default", "other"))
    with torch.no_grad(), patched(model):
        both = model(X)
        model.set_adapter("other")
        one = model(X)
        assert not torch.allclose(both, one)
    torch.testing.assert_close(model(X), one, atol=1e-4, rtol=1e-4)


def test_autocast_casts_as_before():
    model = adapted()
    results = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(model(X))
        report = apply_to(model)
    assert results[0].dtype == results[1].dtype == torch.bfloat16 and report.calls["lora"] == 2 and not report.fallbacks
    torch.testing.assert_close(results[1].float(), results[0].float(), atol=0.1, rtol=0.05)


@pytest.mark.parametrize(
    "more, base, reason",
    [
        ({"use_dora": True}, Block, "a variant of LoRA such as DoRA"),
        ({"lora_bias": True}, Block, "a bias in the adapter"),
        ({"target_modules": ["0"]}, Table, "peft.tuners.lora.layer.Embedding is no LoRA layer over nn.Linear"),
    ],
)
def test_other_kinds_of_adapters_are_skipped_and_named(more, base, reason):
    model = adapted(base=base, **more)
    report = apply_to(model)
    assert not report.patched and {row.reason for row in report.skipped} == {reason}


def test_adapters_of_another_dtype_than_the_layer_fall_back_and_are_counted():
    model = adapted().half()
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            parameter.data = parameter.data.float()
    expected = model(X.half())
    report = apply_to(model)
    assert torch.equal(model(X.half()), expected)
    assert report.fallbacks == {"adapters and layer of different dtypes": 2}


def test_a_batch_of_mixed_adapters_takes_the_layers_own_way():
    model = adapted(adapters=("default", "other")).eval()
    names = ["default", "other", "__base__"]
    with torch.no_grad():
        expected = model(X, adapter_names=names)
        with patched(model) as report:
            assert torch.equal(model(X, adapter_names=names), expected)
    assert report.fallbacks == {"adapter_names": 2}


def test_a_second_patch_undo_copies_and_pickles():
    model = adapted()
    before = [{key: id(value) for key, value in vars(module).items()} for module in model.modules()]
    expected = model(X)
    first = apply_to(model)
    assert {row.state for row in apply_to(model).rows if row.op == "lora"} == {"already"}
    twin = copy.deepcopy(model)
    ours, theirs = (next(m for m in x.modules() if hasattr(m, "lora_A")) for x in (twin, model))
    assert ours.forward.args[1] is ours and theirs.forward.args[1] is theirs
    for other in (twin, pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(X), expected, atol=1e-4, rtol=1e-4)
    first.undo()
    assert [{key: id(value) for key, value in vars(module).items()} for module in model.modules()] == before


def test_saved_adapters_are_as_before(tmp_path):
    model = adapted()
    model.save_pretrained(tmp_path / "plain")
    with patched(model):
        model.save_pretrained(tmp_path / "patched")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "patched" / name).read_bytes()


class Chained(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(24, 8, bias=False), nn.Linear(8, 30), nn.ReLU(), nn.Linear(30, 5), nn.Sigmoid())


def test_chained_linears_and_gates_run_on_their_ops_when_asked():
    torch.manual_seed(0)
    for base, op in ((Chained, "two_mm"), (Chained, "gate")):
        model = base()
        expected = step(model, X)
        with patched(model, ops=op) as report:
            close(step(model, X), expected)
        assert report.calls == {op: 1} and not report.fallbacks
        assert "forward" not in vars(model)
    assert not apply_to(Chained(), ops=["two_mm"], dry_run=True).skipped
    wide = nn.Sequential(nn.Linear(24, 200, bias=False), nn.Linear(200, 30))
    assert not apply_to(wide, ops="two_mm").rows


@pytest.mark.parametrize("undone", [("two_mm", "gate"), ("gate", "two_mm")])
def test_a_chain_and_a_gate_in_one_sequential_each_run_on_their_op_and_leave_alone(undone):
    torch.manual_seed(0)
    model = Chained()
    expected, before = step(model, X), dict(vars(model))
    assert {row.op: row.state for row in apply_to(model, ops="all", dry_run=True).rows} == {"two_mm": "would patch", "gate": "would patch", "relu": "would patch"}
    reports = {op: apply_to(model, ops=op) for op in ("two_mm", "gate")}
    close(step(model, X), expected)
    close(step(pickle.loads(pickle.dumps(model)), X), expected)
    assert [report.calls[op] for op, report in reports.items()] == [1, 1]
    assert [row.state for row in apply_to(model, ops=["two_mm", "gate"]).rows] == ["already"] * 2
    for count, op in enumerate(undone, 1):
        reports[op].undo()
        close(step(model, X), expected)
        assert [reports[other].calls[other] for other in undone[:count]] == list(range(1, count + 1))
    assert vars(model) == before


def test_hooks_inside_a_chain_are_still_called():
    model, seen = Chained(), []
    report = apply_to(model, ops="two_mm")
    model[0].register_forward_hook(lambda *_: seen.append(1))
    model(X)
    assert seen == [1] and report.fallbacks == {"its nn.Linear has hooks": 1}
