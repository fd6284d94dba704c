"""apply_to and its report on modules without transformers: what is replaced, what is left alone, the way back."""

import copy
import io
import pickle
import subprocess
import sys
import types
from functools import partial

import pytest
import torch
from dtkernels.integrations.huggingface import PatchError, PatchReport, Row, apply_to, patched
from torch import nn


class Mlp(nn.Module):
    def __init__(self, **relu):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.ReLU(**relu), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class LoudReLU(nn.ReLU):
    def forward(self, x):
        return super().forward(x) + 1


def state(model):
    """Everything apply_to might leave behind: each module's own attributes, by identity."""
    return [{key: id(value) for key, value in vars(module).items()} for module in model.modules()]


def test_relu_modules_run_the_op_and_are_counted():
    model, x = Mlp(), torch.randn(3, 8)
    before = model(x)
    report = apply_to(model, "relu")
    torch.testing.assert_close(model(x), before)
    assert [(row.module, row.op, row.state) for row in report.rows] == [("act", "relu", "patched")]
    assert report.calls == {"relu": 1} and not report.fallbacks


def test_undo_restores_exactly_and_twice_is_once():
    model = Mlp()
    before = state(model)
    report = apply_to(model, "relu")
    assert state(model) != before
    report.undo()
    assert state(model) == before
    report.undo()
    assert state(model) == before and "undone" in str(report)


def test_classes_and_other_instances_are_untouched():
    before = dict(vars(nn.ReLU))
    model, other = Mlp(), Mlp()
    apply_to(model, "relu")
    assert dict(vars(nn.ReLU)) == before and "forward" not in vars(other.act)


def test_a_second_call_patches_nothing():
    model = Mlp()
    first, second = apply_to(model, "relu"), apply_to(model, "relu")
    assert [row.state for row in second.rows] == ["already"] and not second.patched
    second.undo()
    assert "forward" in vars(model.act)
    first.undo()
    assert "forward" not in vars(model.act)


def test_nested_blocks_restore_at_the_outermost():
    model = Mlp()
    before = state(model)
    with patched(model, "relu"):
        inside = state(model)
        with patched(model, "relu") as report:
            assert not report.patched
        assert state(model) == inside
    assert state(model) == before


def test_a_block_restores_when_it_fails():
    model = Mlp()
    before = state(model)
    with pytest.raises(KeyError), patched(model, "relu"):
        raise KeyError
    assert state(model) == before


def test_dry_run_changes_nothing():
    model = Mlp()
    before = state(model)
    report = apply_to(model, "relu", dry_run=True)
    assert state(model) == before
    assert [row.state for row in report.rows] == ["would patch"] and "1 would patch" in str(report)


def test_inplace_and_subclassed_relu_are_skipped_with_the_reason():
    assert "inplace" in apply_to(Mlp(inplace=True), "relu").skipped[0].reason
    assert apply_to(LoudReLU(), "relu").skipped[0].reason == "LoudReLU has a forward of its own"
    model = nn.ReLU()
    model.forward = torch.relu
    assert "replaced by somebody else" in apply_to(model, "relu").skipped[0].reason


def test_strict_raises_one_line_and_restores():
    model = nn.Sequential(nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU(inplace=True))
    before = state(model)
    with pytest.raises(PatchError, match=r"^strict: skipped relu in 1: inplace=True.* \(and 1 more\)$"):
        apply_to(model, "relu", strict=True)
    assert state(model) == before
    apply_to(Mlp(), "relu", strict=True)


def test_softmax_modules_only_on_request_and_over_the_last_dimension():
    last, middle, unsaid = nn.Softmax(-1), nn.Softmax(1), nn.Softmax()
    model = nn.ModuleList([last, middle, unsaid])
    assert not apply_to(model).rows
    report = apply_to(model, ops=["softmax"])
    assert [row.state for row in report.rows] == ["patched", "patched", "skipped"]
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(last(x), x.softmax(-1))
    torch.testing.assert_close(middle(x), x.softmax(1))
    torch.testing.assert_close(middle(x[0]), x[0].softmax(1))
    assert report.fallbacks == {"softmax over a dimension that is not the last": 1}
    assert report.calls == {"softmax": 3}
    last.dim = 0
    torch.testing.assert_close(last(x), x.softmax(0))


def test_an_activation_made_to_write_in_place_later_does():
    relu, x = nn.ReLU(), torch.linspace(-1, 1, 5)
    report = apply_to(nn.Sequential(relu), ops="relu")
    assert relu(x) is not x
    relu.inplace = True
    assert relu(x) is x and x.min() == 0
    assert report.fallbacks == {"inplace=True by now": 1}


def test_tensors_that_the_op_does_not_take_go_to_torch():
    model = nn.ReLU()
    report = apply_to(model, "relu")
    assert torch.equal(model(torch.tensor([-1, 2])), torch.tensor([0, 2]))
    assert model(torch.tensor(-1.0)) == 0
    assert report.fallbacks == {"dtype int64": 1, "scalar input": 1}


class Several(nn.Sequential):
    def __init__(self):
        layers = nn.Linear(12, 6, bias=False), nn.Linear(6, 9), nn.ReLU(), nn.Softmax(-1), nn.Linear(9, 7), nn.Sigmoid()
        super().__init__(*layers)


def _per_sample_gradients(model, x):
    return torch.vmap(torch.func.grad(lambda one: model(one).square().sum()))(x)


def _tangents(model, x):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        return torch.autograd.forward_ad.unpack_dual(model(dual)).tangent


TRANSFORMS = {
    "vmap": lambda model, x: torch.vmap(model)(x),
    "per-sample gradients": _per_sample_gradients,
    "jacobian": lambda model, x: torch.func.jacrev(model)(x[0]),
    "tangents": _tangents,
    "trace": lambda model, x: torch.jit.trace(model, x)(x + 1),
    "one vector": lambda model, x: model(x[0, 0]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_torch_does_with_plain_layers_works_on_patched_ones(name):
    torch.manual_seed(0)
    model, x = Several(), torch.randn(2, 4, 12)
    expected = TRANSFORMS[name](model, x)
    with patched(model, ops=["two_mm", "relu", "softmax", "gate"]) as report:
        torch.testing.assert_close(TRANSFORMS[name](model, x), expected, atol=1e-5, rtol=1e-5)
    assert report.calls.keys() == {"two_mm", "relu", "softmax", "gate"} and report.fallbacks.total() >= 2


def test_gradients_flow():
    model, x = Mlp(), torch.randn(3, 8)
    grads = []
    for _ in range(2):
        model.zero_grad()
        model(x).square().sum().backward()
        grads.append(model.up.weight.grad.clone())
        apply_to(model, "relu")
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), "torch.save"])
def test_copies_of_a_patched_model_work_and_count_for_themselves(clone):
    model, x = Mlp(), torch.randn(3, 8)
    report = apply_to(model, "relu")
    if clone == "torch.save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = clone(model)
    torch.testing.assert_close(twin(x), model(x))
    assert report.calls == {"relu": 1}
    assert [row.state for row in apply_to(twin, "relu").rows] == ["already"]


def hooked_forward(module, *args):
    """As accelerate wraps it."""
    return module._old_forward(*args)


def add_hook(module):
    module._hf_hook = object()
    module._old_forward = module.forward
    module.forward = partial(hooked_forward, module)


def remove_hook(module):
    del module._hf_hook
    module.forward = module._old_forward
    del module._old_forward


def test_accelerate_hooks_stay_outside_the_op():
    model, x = nn.ReLU(), torch.randn(4)
    add_hook(model)
    hook, before = model.forward, state(model)
    report = apply_to(model, "relu")
    assert model.forward is hook
    torch.testing.assert_close(model(x), x.relu())
    assert report.calls == {"relu": 1}
    report.undo()
    assert state(model) == before


@pytest.mark.parametrize("first", ["hook", "patch"])
def test_hooks_that_come_or_go_meanwhile_leave_no_op_behind(first):
    model, x = nn.ReLU(), torch.randn(4)
    if first == "hook":
        add_hook(model)
        report = apply_to(model, "relu")
        remove_hook(model)
    else:
        report = apply_to(model, "relu")
        add_hook(model)
    report.undo()
    torch.testing.assert_close(model(x), x.relu())
    assert not report.calls["relu"]
    if first == "patch":
        assert isinstance(model._old_forward, types.MethodType)


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
    assert report.fallbacks == {"it has no weight or no bias": 1}


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


def test_bad_input_gives_one_clear_line():
    with pytest.raises(TypeError, match="^apply_to needs a torch.nn.Module, got str$"):
        apply_to("bert")
    with pytest.raises(ValueError, match="^unknown op 'gelu'; apply_to knows attention, lora, relu, softmax, two_mm, gate, rmsnorm, "):
        apply_to(Mlp(), ops=["relu", "gelu"])


def test_the_report_gathers_layers_and_does_not_keep_the_model_alive():
    model = nn.Sequential(*[Mlp() for _ in range(3)])
    report = apply_to(model, "relu")
    model(torch.randn(2, 8))
    title, head, line = str(report).splitlines()
    assert title == "dtkernels: 3 patched" and head.split() == ["module", "op", "state", "calls", "fell", "back", "why"]
    assert line.split() == ["0-2.act", "(x3)", "relu", "patched", "3", "0"]
    del model
    report.undo()


def test_the_report_says_why():
    text = str(PatchReport([Row("a.b", "attention", "skipped", "it is special"), Row("", "relu", "patched")]))
    assert text.splitlines()[0] == "dtkernels: 1 patched, 1 skipped"
    assert "a.b" in text and "it is special" in text and "(the model)" in text
    assert str(apply_to(nn.Linear(2, 2))) == "dtkernels: nothing to patch"


def test_without_transformers_plain_modules_still_work(tmp_path):
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from torch import nn\n"
        "from dtkernels.integrations import huggingface as hf\n"
        "assert not hf.HAVE_TRANSFORMERS\n"
        "assert [row.state for row in hf.apply_to(nn.ReLU(), 'relu').rows] == ['patched']"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=tmp_path)


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
