"""Calls of fused functions: what is closed over, modules, errors, other dtypes, torch.compile, sizes that decide."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtkernels
from dtkernels.frontend import UnsupportedOperation, fused_function


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


class Block(nn.Module):
    def __init__(self, width=8, heads=2, dropout=0.0):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop, self.heads = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(dropout), heads

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def same(got, want):
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def all_same(ours, theirs, got, want):
    same(got, want)
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(0))
    for a, b in zip(torch.autograd.grad((got * weights).sum(), ours), torch.autograd.grad((want * weights).sum(), theirs), strict=True):
        same(a, b)


def test_a_module_and_its_parameters():
    torch.manual_seed(0)
    module = Block()
    fused = dtkernels.fuse(module)
    for shape in ((2, 5, 8), (3, 4, 8)):
        x = torch.randn(shape, requires_grad=True)
        wanted = [x, *module.parameters()]
        all_same(wanted, wanted, fused(x), module(x))
    assert len(fused._fused.programs()) == 1
    with torch.no_grad():
        module.down.bias.add_(1)
    module.norm.weight = nn.Parameter(torch.full((8,), 2.0))
    same(fused(x), module(x))
    assert set(fused.state_dict()) == {f"module.{name}" for name in module.state_dict()}


def test_dropout_drops_in_training_and_in_eval_is_nothing():
    module = Block(dropout=0.5)
    fused, x = dtkernels.fuse(module), torch.randn(2, 5, 8)
    assert not torch.equal(fused(x), fused(x))
    module.eval()
    same(fused(x), module(x))


SCALE, FACTOR = torch.tensor([1.0, 2.0, 3.0]), 2.0


def test_closed_over_values_are_read_at_each_call(monkeypatch):
    @dtkernels.fuse
    def scaled(x):
        return x * SCALE + FACTOR

    x = torch.ones(4, 3)
    same(scaled(x), x * SCALE + FACTOR)
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    monkeypatch.setitem(globals(), "SCALE", torch.tensor([7.0, 8.0, 9.0]))
    same(scaled(x), x * SCALE + 5)


def test_a_method_reads_its_object():
    class Scaler:
        factor = 3.0

        def __init__(self, factor=3.0):
            self.factor = factor

        @dtkernels.fuse
        def run(self, x):
            return x * self.factor

    one, other = Scaler(), Scaler(4.0)
    assert [one.run(torch.ones(2))[0].item(), other.run(torch.ones(2))[0].item()] == [3, 4]
    one.factor = 5.0
    assert one.run(torch.ones(2))[0].item() == 5


def test_a_branch_on_a_size_is_a_guard(caplog):
    @dtkernels.fuse
    def branching(x):
        return x * 2 if x.shape[0] > 4 else x * 3

    with caplog.at_level(logging.INFO, "dtkernels"):
        assert [branching(torch.ones(n, 2))[0, 0].item() for n in (3, 5, 2, 9)] == [3, 2, 3, 2]
    assert len(branching.programs()) == 2
    assert sum("traced branching" in r.getMessage() for r in caplog.records) == 2


def test_shapes_of_calls_are_remembered_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(fused_function, "REMEMBERED", 3)
    fused = dtkernels.fuse(lambda x, w: torch.sigmoid(x) * w)
    for rows in (2, 3, 4, 5, 6, 2):
        x, w = torch.randn(rows, 4), torch.randn(4)
        same(fused(x, w), torch.sigmoid(x) * w)
    ((program,),) = fused.state.programs.values()
    assert [shapes[0][0] for shapes in program.bound] == [5, 6, 2]


def test_numbers_flags_and_size_1_select_programs():
    @dtkernels.fuse
    def shifted(x, y, by=1.0, *, twice=False):
        return (x + y) * (2 if twice else 1) + by

    for x, y, named in [((4, 3), (4, 3), {}), ((4, 3), (3,), {}), ((4, 3), (4, 1), {"by": 2}), ((1, 3), (4, 1), {"twice": True}), ((5, 2), (5, 2), {})]:
        a, b = torch.randn(x), torch.randn(y)
        same(shifted(a, b, **named), shifted.__wrapped__(a, b, **named))
    assert len(shifted.programs()) == 4


def test_empty_and_strided_arguments():
    @dtkernels.fuse
    def product(x, w):
        return torch.softmax(x @ w, -1)

    for x, w in [(torch.ones(0, 3), torch.ones(3, 2)), (torch.ones(3, 0), torch.ones(0, 2)), (torch.randn(8, 6).t(), torch.randn(4, 16)[:, ::2].t())]:
        same(product(x, w), product.__wrapped__(x, w))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_have_the_dtype_of_torch(dtype):
    @dtkernels.fuse
    def mixed(x, w, scale):
        h = x @ w
        return h * scale, h.float() * 2, (h > 0).to(dtype), h > 0

    given = torch.randn(6, 8).to(dtype), torch.randn(8, 4).to(dtype), torch.rand(4)
    for got, want in zip(mixed(*given), mixed.__wrapped__(*given), strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=6e-2)


def test_autocast_multiplies_in_its_dtype():
    @dtkernels.fuse
    def product(x, w):
        return x @ w

    x, w = torch.randn(6, 8), torch.randn(8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = product(x, w), x @ w
    assert got.dtype == want.dtype == torch.bfloat16
    assert "rdot(cast(x" in product.dt
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)


def test_results_that_are_no_tensors_keep_their_places():
    @dtkernels.fuse
    def several(x):
        return {"x": x, "row": x[0], "twice": [x * 2, None, x.shape[1], "text"]}

    found = several(torch.ones(2, 3))
    assert found["x"].shape == (2, 3) and found["row"].shape == (3,)
    assert found["twice"][1:] == [None, 3, "text"] and found["twice"][0].sum() == 12
    assert several(torch.ones(2, 5))["twice"][2] == 5


REFUSED = {
    "sort of 120 elements": lambda x: torch.sort(x.repeat(40, 1), 0).values,
    "aten.linalg_inv_ex": lambda x: torch.linalg.inv(x + 3 * torch.eye(3)),
    "the places that cummax returns": lambda x: torch.cummax(x, 1).indices * x,
    "requires_grad": lambda x: x * 2 if x.requires_grad else x,
    "a number that depends on data": lambda x: x * x.max().item(),
    "writing several values at a mask": lambda x: torch.index_put(x * 1, (x > 0,), torch.arange(9.0)),
    "aten.multinomial": lambda x: torch.multinomial(x.abs(), 2) * 1.0,
    "changing an argument in place": lambda x: x.add_(1),
    "changing this view in place": lambda x: (x * 1).unfold(0, 2, 1).zero_(),
    "a decision or a size that depends on data": lambda x: torch.combinations(x[0]),
    "partial results along a dimension that is split": lambda x: x.flatten().cumsum(0).view(3, 3),
    "depends on data": lambda x: x if x.sum() > 0 else -x,
    "indexing by truth values": lambda x: x[x > 2],
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_refused_names_the_operation_and_the_line(said):
    fused = dtkernels.fuse(REFUSED[said])
    for _ in range(2):
        with pytest.raises(UnsupportedOperation) as error:
            fused(torch.ones(3, 3))
        assert said in str(error.value) and "\n" not in str(error.value)
        assert "test_fuse_calls.py:" in str(error.value)


def test_a_refusal_holds_for_the_sizes_that_decide_alike():
    fused = dtkernels.fuse(lambda x: x.sort(-1).values)
    for size in (150, 6, 150, 7):
        x = torch.arange(2.0 * size).flip(0).view(2, size)
        if size > 32:
            with pytest.raises(UnsupportedOperation, match="sort of 150"):
                fused(x)
        else:
            assert torch.equal(fused(x), x.sort(-1).values)

    @dtkernels.fuse
    def branching(x):
        return x.unique() if x.shape[0] > 4 else x * 2

    for size in (6, 2, 8, 3):
        if size > 4:
            with pytest.raises(UnsupportedOperation, match="test_fuse_calls.py:.*unique"):
                branching(torch.ones(size, 2))
        else:
            assert torch.equal(branching(torch.ones(size, 2)), torch.full((size, 2), 2.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_eps_of_a_norm_is_that_of_the_dtype_torch_computes_in(dtype):
    x, w = (torch.randn(4, 16) * 1e-3).to(dtype), torch.rand(16).to(dtype)
    fused = dtkernels.fuse(lambda x, w: F.rms_norm(x, (16,), w))
    torch.testing.assert_close(fused(x, w), F.rms_norm(x, (16,), w))


def test_random_integers_and_tensors_filled_with_random_numbers():
    @dtkernels.fuse
    def drawn(x):
        steps = torch.randint(2, 7, (2000,))
        return steps, torch.randint_like(steps, 3), torch.empty(2000).normal_(3.0, 0.5), torch.normal(x, 2.0), torch.empty(2000).uniform_(2, 4), x[steps]

    x = torch.full((2000,), 5.0)
    steps, like, normal, around, uniform, _ = drawn(x)
    assert steps.dtype == like.dtype == torch.int64
    assert set(steps.tolist()) == {2, 3, 4, 5, 6} and set(like.tolist()) == {0, 1, 2}
    assert abs(normal.mean().item() - 3) < 0.1 and abs(normal.std().item() - 0.5) < 0.05
    assert abs(around.mean().item() - 5) < 0.3 and abs(around.std().item() - 2) < 0.2
    assert uniform.min() >= 2 and uniform.max() < 4 and abs(uniform.mean().item() - 3) < 0.1


def test_integers():
    @dtkernels.fuse
    def places(x, t):
        return x.argmax(-1), x.max(-1).indices, (x > 0).sum(-1), (x * 3).to(torch.int32), x[x.argmin(0)].sum(-1)

    x = torch.randn(5, 7)
    for got, want in zip(places(x, x), places.__wrapped__(x, x), strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want)
    with pytest.raises(UnsupportedOperation, match="2\\^24"):
        dtkernels.fuse(lambda t, x: t.sum())(torch.arange(3), x)


def wide_integers(a, b):
    places = torch.arange(a.shape[0])
    kept = torch.where(a > b, a, b) + places, a * 2 - b, a // b, a % b, torch.div(a, b, rounding_mode="trunc"), torch.fmod(a, b), (a ^ b) & 255, a >> 3, -a, a.abs(), ~b
    return *kept, torch.maximum(a, b).clamp(min=3), a == b + 1, (a % 7).float() / 2, a[(places + 1) % a.shape[0]], F.pad(a, (1, 0), value=-100), a + (a % 7).div(2).long() * 3


def narrow_integers(a, u):
    return a + a, a * 3, -a, u - 9, ~u, u << 3, a << 2, u >> 4, (u & 15).float() - 8, a.int() + 100, a.to(torch.uint8), u.to(torch.int8), (a + a).float()


@pytest.mark.parametrize("interpreted", [False, True])
def test_integers_of_integers_are_exact_and_wrap_around_as_in_torch(interpreted, monkeypatch):
    if interpreted:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    big = 2**40
    wide = torch.tensor([big + 1, -5, 2**33, 7, -big]), torch.tensor([3, big + 2, -9, 6, big])
    narrow = torch.tensor([-128, -1, 5, 127], dtype=torch.int8), torch.tensor([0, 7, 200, 255], dtype=torch.uint8)
    for function, given in ((wide_integers, wide), (narrow_integers, narrow)):
        for got, want in zip(dtkernels.fuse(function)(*given), function(*given), strict=True):
            assert got.dtype == want.dtype and got.tolist() == want.tolist()


def test_no_gradient_passes_through_what_is_detached():
    def loss(x, y):
        with torch.no_grad():
            centre = (x * 2).mean(-1, keepdim=True)
        return ((x - centre) * y).sum(-1) + (x * y).detach().sum(), (x * 2).detach(), (x > 0).float()

    ours, theirs = ([torch.randn(4, 5, generator=torch.Generator().manual_seed(k)).requires_grad_() for k in range(2)] for _ in range(2))
    got, want = dtkernels.fuse(loss)(*ours), loss(*theirs)
    assert [g.requires_grad for g in got] == [w.requires_grad for w in want] == [True, False, False]
    all_same(ours, theirs, got[0], want[0])


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return -grad


def test_a_gradient_of_ones_own_is_refused():
    """A trace shows the forward alone."""
    fused = dtkernels.fuse(lambda x: Reversed.apply(x * 2))
    same(fused(torch.ones(3, 2)), torch.full((3, 2), 2.0))
    with pytest.raises(UnsupportedOperation, match=r"test_fuse_calls.py:\d+: .*gradient of Reversed"):
        fused(torch.ones(3, 2, requires_grad=True))


def test_tables_that_the_function_writes_out():
    def weighted(x):
        return x * torch.tensor([0.5, 2.0, -1.0], dtype=x.dtype)[None, :], torch.tensor([[1, 2], [3, 4]]).sum(0).float() + x[:, :2]

    x = torch.randn(4, 3)
    for got, want in zip(dtkernels.fuse(weighted)(x), weighted(x), strict=True):
        same(got, want)


def test_an_error_of_the_function_is_its_own():
    with pytest.raises(RuntimeError, match="cannot be multiplied|same reduction dim"):
        dtkernels.fuse(lambda x, w: x @ w)(torch.ones(3, 2), torch.ones(3, 3))
    with pytest.raises(ZeroDivisionError):
        dtkernels.fuse(lambda x: x * (1 / 0))(torch.ones(3))


def test_fallback_runs_torch_and_is_counted(caplog):
    @dtkernels.fuse(fallback=True)
    def distinct_numbers(x):
        return x.unique() * 2

    for _ in range(2):
        same(distinct_numbers(torch.tensor([[3.0, 1.0]])), torch.tensor([2.0, 6.0]))
    assert dtkernels.paths()["distinct_numbers"]["torch"] == 2
    assert sum("distinct_numbers runs in torch" in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_inside_torch_compile(dynamic):
    torch._dynamo.reset()

    @dtkernels.fuse(name=f"compiled_gate_{dynamic}")
    def compiled_gate(x, w):
        h = x @ w
        return torch.softmax(h / h.shape[-1], -1) * F.silu(h)

    plain = compiled_gate.__wrapped__
    compiled = torch.compile(lambda x, w: compiled_gate(x + 1, w).cos() * 2, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for x, w in (((6, 8), (8, 4)), ((5, 9), (9, 3))):
        ours, theirs = ([torch.randn(s, generator=torch.Generator().manual_seed(1)).requires_grad_() for s in (x, w)] for _ in range(2))
        all_same(ours, theirs, compiled(*ours), plain(theirs[0] + 1, theirs[1]).cos() * 2)
    assert dtkernels.paths()[f"compiled_gate_{dynamic}"]["reference"] == 2


def test_tables_and_stopped_gradients_inside_torch_compile():
    torch._dynamo.reset()

    @dtkernels.fuse
    def rounded(x):
        return (x + (x.round() - x).detach()) * torch.tensor([1.0, 2.0, 3.0], device=x.device)

    compiled = torch.compile(lambda x: rounded(x * 1).cos(), fullgraph=True, backend="aot_eager")
    ours, theirs = (torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    all_same([ours], [theirs], compiled(ours), rounded.__wrapped__(theirs).cos())


def test_a_module_inside_torch_compile():
    torch._dynamo.reset()
    module = Block()
    compiled, x = torch.compile(dtkernels.fuse(module, name="compiled_block"), fullgraph=True, backend="aot_eager"), torch.randn(2, 5, 8, requires_grad=True)
    wanted = [x, *module.parameters()]
    all_same(wanted, wanted, compiled(x), module(x))
    assert dtkernels.paths()["compiled_block"]["reference"] == 1


def test_what_fuse_takes():
    with pytest.raises(TypeError, match="fuse takes a function or a module; found int"):
        dtkernels.fuse(3)
    with pytest.raises(UnsupportedOperation, match="without tensors"):
        dtkernels.fuse(lambda a, b: a * b)(2, 3)
