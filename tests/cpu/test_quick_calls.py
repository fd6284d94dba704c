"""Calls that were made before: nothing is looked at twice, and whatever differs is noticed."""

import weakref

import stand_in_gpu
import torch
from pytest import fixture, mark, raises

import dtkernels
from dtkernels.ops.registry import SPECS
from dtkernels.runtime.operator import Operator

EAGER = {"relu": torch.relu, "softmax": lambda x: torch.softmax(x, -1), "dyt": lambda x, w, b, a: torch.tanh(a * x) * w + b}


@fixture
def gpu(monkeypatch):
    stand_in_gpu.use(monkeypatch)


def op_of(name: str) -> Operator:
    return Operator(SPECS / f"{name}.yaml")


def inputs_of(name: str, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    return [x, *torch.randn(2, shape[-1], generator=generator), torch.tensor([0.7])] if name == "dyt" else [x]


def unlooked(op: Operator, monkeypatch) -> None:
    """From here on a call that is looked at fails."""

    def looked(*args):
        raise AssertionError("a call like the last one was looked at")

    monkeypatch.setattr(op._quick, "key", looked)


def agree(op: Operator, name: str, inputs: list[torch.Tensor], grad: torch.Tensor | None = None) -> None:
    """Forward and backward of ``op`` as eager torch computes them."""
    ours, theirs = ([t.detach().requires_grad_() for t in inputs] for _ in range(2))
    mine, wanted = op(*ours), EAGER[name](*theirs)
    torch.testing.assert_close(mine, wanted)
    grad = torch.linspace(-1, 1, wanted.numel()).reshape(wanted.shape) if grad is None else grad
    found, known = torch.autograd.grad(mine, ours, grad), torch.autograd.grad(wanted, theirs, grad)
    torch.testing.assert_close(found, known)


@mark.parametrize("name", EAGER)
def test_calls_again_and_again_are_right_with_and_without_gradients(gpu, name, monkeypatch):
    op = op_of(name)
    for seed in range(4):
        inputs = [t + seed for t in inputs_of(name, 6, 16)]
        torch.testing.assert_close(op(*inputs), EAGER[name](*inputs))
    for _ in range(4):
        agree(op, name, inputs)
    with torch.no_grad():
        op(*inputs)
        unlooked(op, monkeypatch)
        torch.testing.assert_close(op(*inputs), EAGER[name](*inputs))


def test_a_known_training_call_is_not_looked_at_and_its_backward_neither(gpu, monkeypatch):
    from dtkernels.runtime.training import Training

    op, (x,) = op_of("softmax"), inputs_of("softmax", 6, 16)
    agree(op, "softmax", [x])
    agree(op, "softmax", [x])
    unlooked(op, monkeypatch)
    monkeypatch.setattr(Training, "back", lambda *args: 1 / 0)
    agree(op, "softmax", [x])


@mark.parametrize("name", EAGER)
def test_tensors_that_lie_elsewhere_in_sixteen_bytes_run_other_kernels(gpu, name):
    op = op_of(name)
    inputs = inputs_of(name, 6, 16)
    for _ in range(3):
        agree(op, name, inputs)
        with torch.no_grad():
            op(*inputs)
            moved = torch.empty(97)[1:].view(6, 16).copy_(inputs[0])
            torch.testing.assert_close(op(moved, *inputs[1:]), EAGER[name](moved, *inputs[1:]))
        agree(op, name, [moved, *inputs[1:]])
        agree(op, name, inputs, grad=torch.empty(97)[1:].view(6, 16).copy_(inputs[0]))


def test_other_shapes_strides_and_dtypes_are_noticed(gpu):
    op, (x,) = op_of("softmax"), inputs_of("softmax", 8, 8)
    for _ in range(3):
        for other in (x, x.t(), x[:4], x[:, :4], x.double().float().bfloat16(), x.reshape(2, 4, 8), x[None]):
            torch.testing.assert_close(op(other), torch.softmax(other, -1))
            agree(op, "softmax", [other], grad=torch.ones_like(other) * 2)


def test_gradients_that_arrive_expanded_or_transposed_are_noticed(gpu):
    op, (x,) = op_of("softmax"), inputs_of("softmax", 8, 8)
    for _ in range(3):
        for grad in (torch.ones(8, 8), torch.ones(1, 1).expand(8, 8), torch.randn(8, 8).t(), torch.randn(8, 1).expand(8, 8)):
            agree(op, "softmax", [x], grad=grad)


@mark.parametrize("name", ["relu", "dyt"])
def test_what_was_saved_may_come_back_in_another_layout(gpu, name):
    """As hooks give it that keep saved tensors elsewhere, contiguous."""
    op = op_of(name)
    x, *rest = inputs_of(name, 8, 8)
    for _ in range(3):
        agree(op, name, [x.t(), *rest])
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone().contiguous(), lambda t: t):
            agree(op, name, [x.t(), *rest])


def test_a_gradient_of_a_gradient_is_refused_however_often_it_was_computed(gpu):
    op, (x,) = op_of("softmax"), inputs_of("softmax", 4, 8)
    for _ in range(3):
        agree(op, "softmax", [x])
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(op(x)[0, 0], x, create_graph=True)
        with raises(RuntimeError, match="softmax: a gradient has no derivative"):
            grad.sum().backward()


def test_a_call_that_carries_a_tangent_is_refused_after_one_that_does_not(gpu):
    op, (x,) = op_of("softmax"), inputs_of("softmax", 4, 8)
    op(x), op(x)
    with torch.autograd.forward_ad.dual_level(), raises(NotImplementedError, match="forward-mode"):
        op(torch.autograd.forward_ad.make_dual(x, x))


def test_a_call_inside_no_grad_is_another_kind(gpu):
    op, (x,) = op_of("softmax"), inputs_of("softmax", 4, 8)
    x.requires_grad_()
    for _ in range(3):
        assert op(x).requires_grad and op(x).requires_grad
        with torch.no_grad():
            assert not op(x).requires_grad and not op(x).requires_grad
        assert not op(x.detach()).requires_grad


def test_a_dispatch_mode_sees_a_call_that_was_made_before(gpu):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        names: list[str] = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    op, (x,) = Operator(SPECS / "softmax.yaml"), inputs_of("softmax", 4, 8)
    op(x), op(x)
    with Seen() as seen:
        op(x)
    assert any("softmax" in name for name in seen.names)


def test_checkpointing_computes_again(gpu):
    from torch.utils.checkpoint import checkpoint

    op, (x,) = op_of("softmax"), inputs_of("softmax", 4, 8)
    for reentrant in (False, True, False):
        x = x.detach().requires_grad_()
        checkpoint(lambda t: op(t).square().sum(), x, use_reentrant=reentrant).backward()
        other = x.detach().requires_grad_()
        torch.softmax(other, -1).square().sum().backward()
        torch.testing.assert_close(x.grad, other.grad)


@mark.parametrize("name", EAGER)
def test_nothing_is_kept_alive_not_even_of_the_first_calls(gpu, name):
    op, kept = op_of(name), []
    for _ in range(3):
        given = [t.clone().requires_grad_() for t in inputs_of(name, 4, 8)]
        inside = [t * 1 for t in given]  # what backward keeps has a graph behind it, and that has the parameters of a model
        y = op(*inside)
        grad = torch.ones_like(y)
        y.backward(grad)
        op(*[t.detach() for t in given])
        kept += [weakref.ref(t) for t in (*given, *inside, y, grad, *[t.grad for t in given])]
    del given, inside, y, grad
    assert [r() for r in kept] == [None] * len(kept)


def test_without_torchs_guards_calls_are_looked_at_by_their_keys(gpu, monkeypatch):
    from dtkernels.runtime import same

    monkeypatch.setattr(same, "_Guards", None)
    op = op_of("dyt")
    for _ in range(3):
        agree(op, "dyt", inputs_of("dyt", 6, 16))
    assert not op._quick.last.same(*inputs_of("dyt", 6, 16)) and len(op._quick.known) == 1


def test_calls_are_counted_once(gpu):
    op, (x,) = op_of("softmax"), inputs_of("softmax", 6, 16)
    before = dict(dtkernels.paths().get("softmax", {"gpu": 0}))["gpu"]
    moved = torch.empty(97)[1:].view(6, 16).copy_(x)
    for t in (x, x, x, moved, x, moved):
        op(t)
    assert dtkernels.paths()["softmax"]["gpu"] == before + 6
