"""Calls that were made before: nothing is looked at twice, and whatever differs is noticed."""

import math
import sys
import weakref

import stand_in_gpu
import torch
from pytest import fixture, mark, raises
from torch.utils.checkpoint import checkpoint

import dtkernels
from dtkernels.ops.registry import SPECS
from dtkernels.runtime.bind.operator import Operator
from dtkernels.runtime.dispatch import call_cache
from dtkernels.runtime.launch import bound_launch

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

    monkeypatch.setattr(op._call_cache, "key", looked)


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


@mark.parametrize("first", ["stand-in", "interpreter"])
def test_calls_of_a_stand_in_end_with_it(first, monkeypatch):
    """An op of the process keeps what it cached before, which the stand-in does not find, and nothing of what it caches there."""
    op, x, launches = op_of("softmax"), inputs_of("softmax", 3, 8)[0], []
    compute = stand_in_gpu.Computing._compute
    monkeypatch.setattr(stand_in_gpu.Computing, "_compute", lambda *args: launches.append(args) or compute(*args))

    def launched() -> int:
        launches.clear()
        for _ in range(2):
            leaf = x.clone().requires_grad_()
            torch.testing.assert_close(op(x), torch.softmax(x, -1))
            found, wanted = (torch.autograd.grad(checkpoint(softmax, leaf, use_reentrant=False), leaf, x) for softmax in (op, EAGER["softmax"]))
            torch.testing.assert_close(found, wanted)
        return len(launches)

    if first == "interpreter":
        assert launched() == 0
    with monkeypatch.context() as stand_in:
        stand_in_gpu.use(stand_in)
        assert launched() == 8  # each time a call, one inside the checkpoint, that one again, and the backward
        assert op._call_cache.known
    assert launched() == 0 and not op._call_cache.known


def test_a_known_training_call_is_not_looked_at_and_its_backward_neither(gpu, monkeypatch):
    from dtkernels.runtime.dispatch.autograd_cache import AutogradCall

    op, (x,) = op_of("softmax"), inputs_of("softmax", 6, 16)
    agree(op, "softmax", [x])
    agree(op, "softmax", [x])
    unlooked(op, monkeypatch)
    monkeypatch.setattr(AutogradCall, "back", lambda *args: 1 / 0)
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
    from dtkernels.runtime.torch_support import tensor_guards

    monkeypatch.setattr(tensor_guards, "_Guards", None)
    op = op_of("dyt")
    for _ in range(3):
        agree(op, "dyt", inputs_of("dyt", 6, 16))
    assert not op._call_cache.last.same(*inputs_of("dyt", 6, 16)) and len(op._call_cache.known) == 1


def test_calls_are_counted_once(gpu):
    op, (x,) = op_of("softmax"), inputs_of("softmax", 6, 16)
    before = dict(dtkernels.paths().get("softmax", {"gpu": 0}))["gpu"]
    moved = torch.empty(97)[1:].view(6, 16).copy_(x)
    for t in (x, x, x, moved, x, moved):
        op(t)
    assert dtkernels.paths()["softmax"]["gpu"] == before + 6


# -- a function in front of an op ------------------------------------------------------------------------------------------


@fixture
def attention(gpu, monkeypatch):
    """(the function, what works out what its op is called with)"""
    stand_in_gpu.fresh_ops(monkeypatch)
    return dtkernels.ops.attention, sys.modules["dtkernels.ops.attention"]


def heads(queries: int = 1, keys: int = 12, width: int = 16, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(keys)
    return [torch.randn(2, n, t, width, generator=generator).to(dtype) for n, t in ((4, queries), (2, keys), (2, keys))]


def inline_access(q, k, v, mask=None, *, causal=False, scale=0.25, softcap=None, sinks=None, offset=0) -> torch.Tensor:
    """In float64."""
    q, k, v = (t.double() for t in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
    scores = scale * q @ k.mT
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + int(offset)), -torch.inf)
    rest = 0 if sinks is None else sinks.double().exp()[:, None, None]
    return (scores.exp() / (scores.exp().sum(-1, keepdim=True) + rest)) @ v


def padding(keys: int = 12) -> torch.Tensor:
    return torch.arange(keys).ge(torch.tensor([[0], [4]]))[:, None, None]


GIVEN = {
    "plain": {}, "scale": {"scale": 0.5}, "causal": {"causal": True}, "masked": {"mask": padding()},
    "capped": {"softcap": 2.0, "mask": padding()},
    "sinks": {"sinks": torch.tensor([0.0, 1.0, -1.0, 2.0])},
}  # fmt: skip


@mark.parametrize("name", GIVEN)
@mark.parametrize("queries", [1, 12])
def test_what_an_op_is_called_with_is_not_worked_out_again(attention, name, queries, monkeypatch):
    call, module = attention
    for _ in range(2):
        call(*heads(queries), **GIVEN[name])
    monkeypatch.setattr(module, "spec_arguments", lambda *args: 1 / 0)
    op = "attention_flags" if "mask" in GIVEN[name] else "attention"
    before = dtkernels.paths()[op]["gpu"]
    for seed in range(3):
        inputs = [t + seed for t in heads(queries)]
        given = {n: v.roll(seed, 0) if isinstance(v, torch.Tensor) else v for n, v in GIVEN[name].items()}
        torch.testing.assert_close(call(*inputs, **given).double(), inline_access(*inputs, **given), atol=1e-5, rtol=1e-5)
    assert dtkernels.paths()[op]["gpu"] == before + 3


def test_whatever_differs_from_a_call_before_is_noticed(attention):
    call, _ = attention
    q, k, v = heads(3)
    moved = torch.empty(q.numel() + 1)[1:].view(q.shape).copy_(q)
    others = [((q, k, v), given) for given in GIVEN.values()]
    others += [((q, k, v), {"scale": 1}), ((q, k, v), {"scale": torch.tensor(0.3)}), ((q, k, v), {"causal": True, "offset": torch.tensor([2])})]
    others += [((q, k, v), {"mask": torch.randn(2, 4, 3, 12)}), ((moved, k, v), {}), ((q, k, q[:, 2:, :1].expand(2, 2, 12, 16)), {})]
    others += [((q[:, :, :2], k, v), {}), ((q, k[:, :, :7], v[:, :, :7]), {}), ((q[:1], k[:1], v[:1]), {}), ((q.mT.contiguous().mT, k, v), {})]
    others += [((q, k, k), {}), ((q.requires_grad_(), k, v), {})]
    for _ in range(3):
        call(q.detach(), k, v)  # what all the others are compared with
        for inputs, given in others:
            result = call(*inputs, **given)
            torch.testing.assert_close(result.double(), inline_access(*inputs, **given), atol=1e-5, rtol=1e-5)
            assert result.requires_grad == inputs[0].requires_grad


def test_a_call_before_says_nothing_under_modes_tangents_autocast_and_gradients(attention, monkeypatch):
    call, module = attention
    q, k, v = heads()
    for _ in range(3):
        q.requires_grad_()
        with torch.no_grad():
            call(q, k, v), call(q, k, v)
        assert call(q, k, v).requires_grad
        with torch.no_grad(), monkeypatch.context() as patch:
            patch.setattr(module, "spec_arguments", lambda *args: 1 / 0)
            assert not call(q, k, v).requires_grad
            with raises(ZeroDivisionError), torch.autocast("cpu", dtype=torch.bfloat16):
                call(q, k, v)
            with raises(ZeroDivisionError), torch.autograd.forward_ad.dual_level():
                call(q, k, v)
            with raises(ZeroDivisionError), torch.utils._python_dispatch.TorchDispatchMode():
                call(q, k, v)
            patch.setattr(call_cache, "allows_tf32", lambda: not torch.backends.cuda.matmul.allow_tf32)
            with raises(ZeroDivisionError):
                call(q, k, v)


def test_a_number_that_is_a_tensor_now_is_not_compared_with_what_it_was(attention):
    call, _ = attention
    q, k, v = heads()
    for _ in range(3):
        call(q, k, v, scale=0.5)
        scale = torch.tensor(0.5, requires_grad=True)
        assert torch.autograd.grad(call(q, k, v, scale=scale).sum(), scale)[0].isfinite()


def test_a_call_ready_for_another_shape_gives_the_result_in_it_and_nothing_where_tensors_lie_elsewhere(attention):
    call, module = attention
    q, k, v = heads()
    moved = torch.empty(129)[1:].view(q.shape).copy_(q)
    call(moved, k, v), call(moved, k, v)
    assert module.ready((2, 1, 4, 16), module.AttentionArgs(q, k, v)) is None  # a kernel that takes q from anywhere may count on k
    call(q, k, v)
    run = module.ready((2, 1, 4, 16), module.AttentionArgs(q, k, v))
    wanted = inline_access(q, k, v).transpose(1, 2)
    torch.testing.assert_close(run((q, k, v)).double(), wanted, atol=1e-5, rtol=1e-5)
    assert run((moved, k, v)) is None
    torch.testing.assert_close(call(q, k, v).double(), wanted.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_nothing_of_a_call_before_is_kept_alive(attention):
    call, module = attention
    q, k, v = heads()
    call(q, k, v, padding()), call(q, k, v, padding())
    run, kept = module.ready((2, 1, 4, 16), module.AttentionArgs(q, k, v, padding())), [weakref.ref(t) for t in (q, k, v)]
    assert run is not None
    del q, k, v
    assert [r() for r in kept] == [None] * 3


def test_what_lies_between_several_kernels_is_one_piece_of_memory_of_parts_that_do_not_overlap(attention, monkeypatch):
    together, found = bound_launch.BoundLaunch.together, []
    monkeypatch.setattr(bound_launch.BoundLaunch, "together", lambda bound: found.append(bound) or together(bound))
    call, _ = attention
    inputs = heads(keys=40000)
    for seed in range(3):
        given = [t + seed for t in inputs]
        torch.testing.assert_close(call(*given).double(), inline_access(*given), atol=1e-5, rtol=1e-5)
    bound = found[0]
    assert len(bound._plans) > 1 and len(bound.allocations) > 2
    frame = bound._free[-1]
    spans = {frame.slots[slot]: math.prod(bound.allocations[j][0]) * bound.allocations[j][1].itemsize for j, slot in bound.made if j not in bound.results}
    assert len(spans) == len(bound.allocations) - 1
    begins = sorted(spans)
    assert all(begin + spans[begin] <= after for begin, after in zip(begins, begins[1:]))


def test_calls_by_turns_are_known_again_though_more_than_are_compared(attention, monkeypatch):
    call, module = attention
    given = [(heads(keys=keys), {"scale": scale, "mask": mask}) for keys in range(9, 13) for scale in (0.5, 1, 1.0, True) for mask in (None, padding(keys))]
    assert len(given) > call_cache.FRONTS
    for inputs, options in given:
        call(*inputs, **options)
    monkeypatch.setattr(module, "spec_arguments", lambda *args: 1 / 0)
    for inputs, options in given:
        torch.testing.assert_close(call(*inputs, **options).double(), inline_access(*inputs, **options), atol=1e-5, rtol=1e-5)
    q, k, v = heads(keys=9)
    for other in ((q.mT.contiguous().mT, k, v), (q, k[:1].expand(2, 2, 9, 16), v), (q.bfloat16(), k.bfloat16(), v.bfloat16()), (q.requires_grad_(), k, v)):
        with raises(ZeroDivisionError):
            call(*other, scale=0.5)


def test_lists_and_tensors_for_numbers_reach_the_op_after_calls_that_are_known(attention):
    call, _ = attention
    for _ in range(3):
        call(*heads(keys=9))
        q, k, v = heads(3, keys=9)
        wanted = call(q, k, v, window=(1, 0))
        torch.testing.assert_close(call(q, k, v, window=[1, 0]), wanted)
        with raises((TypeError, ValueError, AttributeError)):
            call(None, k, v)


def test_of_ever_new_lengths_the_oldest_is_no_longer_known(attention, monkeypatch):
    call, module = attention
    monkeypatch.setattr(module.attention.operator()._call_cache.named, "limit", 5)
    for keys in range(9, 19):
        call(*heads(keys=keys))
    assert [name[3][0][2] for name in module.attention.operator()._call_cache.named] == [14, 15, 16, 17, 18]


def test_shapes_of_a_result_share_the_storage_of_arguments_and_other_orders_do_not(attention):
    call, module = attention
    q, k, v = heads(keys=13)
    call(q, k, v, scale=0.25), call(q, k, v, scale=0.25)
    run = module.ready((2, 1, 4, 16), module.AttentionArgs(q, k, v, scale=0.25))
    (route,) = module.attention.operator().bind((), module.spec_arguments(module.AttentionArgs(q, k, v, scale=0.25))).variant.dispatch._routes.values()
    bound, wanted = route.launch, inline_access(q, k, v)
    assert bound.shaped([(8, 1, 16)])._free is bound._free and bound.shaped([(8, 1, 16)], [1, 0, 2, 3])._free is not bound._free
    for seed in range(3):  # one after the other from one storage, each with pointers and a number of its own
        torch.testing.assert_close(run((q, k, v)).double(), wanted.transpose(1, 2), atol=1e-5, rtol=1e-5)
        other = [t + seed for t in (q, k, v)]
        torch.testing.assert_close(call(*other, scale=0.5).double(), inline_access(*other, scale=0.5), atol=1e-5, rtol=1e-5)
    assert len(bound._free) + len(bound._taken) == 1
