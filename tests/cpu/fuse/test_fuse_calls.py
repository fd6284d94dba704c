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
    "aten.sort": lambda x: torch.sort(x).values,
    "aten.multinomial": lambda x: torch.multinomial(x.abs(), 2) * 1.0,
    "changing an argument in place": lambda x: x.add_(1),
    "depends on data": lambda x: x if x.sum() > 0 else -x,
    "an index that is computed": lambda x: x[:, (x[0] > 2).long()],
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_refused_names_the_operation_and_the_line(said):
    fused = dtkernels.fuse(REFUSED[said])
    for _ in range(2):
        with pytest.raises(UnsupportedOperation) as error:
            fused(torch.ones(3, 3))
        assert said in str(error.value) and "\n" not in str(error.value)
        assert "test_fuse_calls.py:" in str(error.value)


def test_integers():
    @dtkernels.fuse
    def places(x, t):
        return x.argmax(-1), x.max(-1).indices, (x > 0).sum(-1), (x * 3).to(torch.int32), x[x.argmin(0)].sum(-1)

    x = torch.randn(5, 7)
    for got, want in zip(places(x, x), places.__wrapped__(x, x), strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want)
    with pytest.raises(UnsupportedOperation, match="2\\^24"):
        dtkernels.fuse(lambda t, x: t * 2)(torch.arange(3), x)


def test_detach_of_a_computed_value_is_refused_where_it_matters():
    fused = dtkernels.fuse(lambda x: (x * 2).detach() * x)
    same(fused(torch.ones(3, 2)), torch.full((3, 2), 2.0))
    with pytest.raises(UnsupportedOperation, match="detach"):
        fused(torch.ones(3, 2, requires_grad=True))


def test_an_error_of_the_function_is_its_own():
    with pytest.raises(RuntimeError, match="cannot be multiplied|same reduction dim"):
        dtkernels.fuse(lambda x, w: x @ w)(torch.ones(3, 2), torch.ones(3, 3))
    with pytest.raises(ZeroDivisionError):
        dtkernels.fuse(lambda x: x * (1 / 0))(torch.ones(3))


def test_fallback_runs_torch_and_is_counted(caplog):
    @dtkernels.fuse(fallback=True)
    def ordered_rows(x):
        return x.sort(-1).values * 2

    for _ in range(2):
        same(ordered_rows(torch.tensor([[3.0, 1.0]])), torch.tensor([[2.0, 6.0]]))
    assert dtkernels.paths()["ordered_rows"]["torch"] == 2
    assert sum("ordered_rows runs in torch" in r.getMessage() for r in caplog.records) == 1


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
