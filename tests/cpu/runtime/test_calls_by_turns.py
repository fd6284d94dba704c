"""Calls of all sorts by turns, made again with other contents: each gives what float64 gives, whatever was known from before."""

import random

import numpy as np
import stand_in_gpu
import torch
from pytest import mark

import dtkernels

CALLS = 200
MODES = (torch.enable_grad, torch.enable_grad, torch.no_grad, torch.inference_mode)


class Draw:
    """Arguments drawn at random: the same ones but for contents where the state of ``rng`` is the same."""

    def __init__(self, rng: random.Random):
        self.rng = rng

    def tensor(self, *shape: int, grad: bool | None = None) -> torch.Tensor:
        way = self.rng.choice(("plain", "plain", "plain", "transposed", "expanded", "moved", "padded", "mirrored"))
        found = torch.randn(shape)
        if way == "transposed" and len(shape) > 1:
            found = found.mT.contiguous().mT
        elif way == "expanded":
            found = found[..., :1].expand(shape)
        elif way == "moved":
            found = torch.randn(found.numel() + 3)[self.rng.randrange(1, 4) :][: found.numel()].view(shape)
        elif way == "padded":
            found = torch.randn((*shape[:-1], shape[-1] + self.rng.choice((1, 4))))[..., : shape[-1]]
        elif way == "mirrored":
            found = torch.randn(shape, dtype=torch.complex64).conj().imag
        return found.detach().requires_grad_(self.rng.random() < 0.5 if grad is None else grad)

    def number(self) -> object:
        value = self.rng.choice((0.5, 0.75, 1.0, 2.0, -0.5, -1.0))
        kinds = (value, value, int(2 * value), np.float64(value), np.float32(value), torch.tensor(value), torch.tensor([value], requires_grad=True))
        return self.rng.choice(kinds)

    def call(self) -> tuple[str, list, dict]:
        r, c = self.rng.choice(((0,), (2,), (3,), (2, 2))), self.rng.choice((4, 8))
        t, flag = self.tensor, lambda: self.rng.random() < 0.5
        makers = {
            "softmax": lambda: ([t(*r, c)], {}),
            "relu": lambda: ([t(*r, c)], {}),
            "dyt": lambda: ([t(*r, c), self.number(), t(c), t(c)], {}),
            "rmsnorm": lambda: ([t(*r, c), t(c), self.rng.choice((0.5, 1, torch.tensor(0.25)))], {"offset": self.rng.randrange(3)}),
            "geglu": lambda: ([x := t(*r, c), x if flag() else t(*r, c)], {"exact": flag()}),
            "mmsigmoid": lambda: ([t(*r, c), t(c, 4)], {}),
            "lora": lambda: ([t(*r, 8), t(*r, c), t(4, c), t(8, 4), self.number()], {}),
            "gate": lambda: ([t(*r, c), t(8, c), t(8) if flag() else None, t(*r, 8) if flag() else None], {}),
            "rope": lambda: ([t(2, 2, 3, c), t(2, 1, 3, c), t(3, c), t(3, c)], {}),
            "attention": self.attention,
        }
        op = self.rng.choice([*makers, "attention", "attention"])
        return op, *makers[op]()

    def attention(self) -> tuple[list, dict]:
        t, flag, m, n = self.tensor, lambda: self.rng.random() < 0.3, self.rng.choice((1, 1, 3)), self.rng.choice((0, 3, 4))
        given: dict = {}
        if flag():
            given["mask"] = t(2, 4, m, n) if flag() else torch.rand(2, 1, 1, n) < 0.7
        if flag():
            given["scale"] = self.rng.choice((0.5, -0.5, 1, True, torch.tensor(0.5)))
        if flag():
            given |= {"window": self.rng.choice(((1, 0), (None, 1), [1, 0])), "offset": self.rng.choice((0, 1, torch.tensor(1)))}
        if flag():
            given |= {"softcap": self.rng.choice((1, 1.0, 2.0)), "sinks": t(4)}
        k = t(2, 2, n, 8)
        return [t(2, 4, m, 8), k, k if flag() else t(2, 2, n, 8)], given


def exact(values: list) -> list:
    """The same in float64; what is one object stays one."""
    known: dict[int, object] = {}
    floats = lambda v: isinstance(v, torch.Tensor) and v.is_floating_point()  # noqa: E731
    return [known.setdefault(id(v), v.detach().double().clone().requires_grad_(v.requires_grad) if floats(v) else v) for v in values]


def leaves(values: list) -> list[torch.Tensor]:
    return list({id(v): v for v in values if isinstance(v, torch.Tensor) and v.requires_grad}.values())


def agree(ours: object, wanted: object, what: str) -> None:
    for mine, right in zip(ours, wanted, strict=True):  # type: ignore[call-overload]
        if mine is not None and right is not None:  # None is 0 where nothing is asked of a result
            torch.testing.assert_close(mine.detach().double(), right.detach(), atol=1e-4, rtol=1e-4, equal_nan=True, msg=lambda text: f"{what}: {text}")


@mark.parametrize("seed", range(2))
def test_every_call_is_as_if_it_were_the_first(seed, monkeypatch):
    stand_in_gpu.use(monkeypatch)
    operators = stand_in_gpu.fresh_ops(monkeypatch)
    torch.manual_seed(seed)
    rng, drawn = random.Random(seed), []
    draw = Draw(rng)
    for i in range(CALLS):
        again = rng.choice(drawn) if drawn and rng.random() < 0.6 else None
        now = rng.getstate()
        rng.setstate(again or now)
        op, args, kwargs = draw.call()
        if again:
            rng.setstate(now)
        else:
            drawn.append(now)
        values, rights = [*args, *kwargs.values()], exact([*args, *kwargs.values()])
        call, what = getattr(dtkernels.ops, op), f"call {i}, {op}"
        with rng.choice(MODES)():
            ours, wanted = call(*args, **kwargs), call(*rights[: len(args)], **dict(zip(kwargs, rights[len(args) :])))
            ours, wanted = (r if isinstance(r, tuple) else (r,) for r in (ours, wanted))
            agree(ours, wanted, what)
            assert [r.requires_grad for r in ours] == [r.requires_grad for r in wanted], what
            if ours[0].requires_grad:
                grads = [draw.tensor(*r.shape, grad=False) for r in ours[: rng.choice((1, 2))]]
                mine = torch.autograd.grad(ours[: len(grads)], leaves(values), grads, allow_unused=True)
                agree(mine, torch.autograd.grad(wanted[: len(grads)], leaves(rights), [g.double() for g in grads], allow_unused=True), what)
    assert sum(len(o._call_cache.known) for o in operators.values()) > CALLS / 8
