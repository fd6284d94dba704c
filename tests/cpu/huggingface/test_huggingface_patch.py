"""apply_to and its report on modules without transformers: what is replaced, what is left alone, the way back."""

import copy
import io
import pickle
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

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


def test_bad_input_gives_one_clear_line():
    with pytest.raises(TypeError, match="^apply_to needs a torch.nn.Module, got str$"):
        apply_to("bert")
    with pytest.raises(ValueError, match="^unknown op 'gelu'; apply_to knows attention, lora, relu, relu_squared, softmax, two_mm, gate, rmsnorm, "):
        apply_to(Mlp(), ops=["relu", "gelu"])


def test_the_report_gathers_layers_and_does_not_keep_the_model_alive():
    model = nn.Sequential(*[Mlp() for _ in range(3)])
    report = apply_to(model, "relu")
    model(torch.randn(2, 8))
    title, head, line = str(report).splitlines()
    assert title == "dtkernels: 3 patched" and head.split() == ["module", "op", "state", "calls", "path", "why"]
    assert line.split() == ["0-2.act", "(x3)", "relu", "patched", "3", "kernel"]
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


def test_integrations_are_attributes_that_are_loaded_when_they_are_read():
    """`dtkernels.integrations` raised AttributeError until something else had imported it."""
    code = (
        "import sys, dtkernels\n"
        "assert {'huggingface', 'peft', 'torch_compile'} <= set(dir(dtkernels.integrations)) and 'integrations' in dir(dtkernels)\n"
        "assert not {'torch', 'transformers', 'peft', 'dtkernels.integrations.huggingface'} & set(sys.modules)\n"
        "assert callable(dtkernels.integrations.torch_compile.compile_backend) and 'transformers' not in sys.modules\n"
        "assert dtkernels.integrations.huggingface.apply_to is dtkernels.apply_to and dtkernels.integrations.peft.patch_lora\n"
        "assert not hasattr(dtkernels.integrations, 'other')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parents[3])
