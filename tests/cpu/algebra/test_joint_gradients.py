# ruff: noqa: E501 (programs read best on one line)
"""Adjoints of a product that the forward of a number forms: right, formed only where that saves a long product, and in the product's own memory."""

import pytest
import stand_in_gpu
import torch
import torch.nn.functional as F

import dtkernels
from dtkernels.algebra.autodiff import rematerialization
from dtkernels.algebra.autodiff.rematerialization import JOINT
from dtkernels.autoschedule import summed_products
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.autoschedule.fusion import Fusion
from dtkernels.autoschedule.rules import gemm_row_reduction
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang import expr as ex
from dtkernels.lang.schedule import Program
from dtkernels.lang.spec import parse_spec
from dtkernels.ops.losses import summed_rows
from dtkernels.ops.registry import shipped
from dtkernels.runtime.bind.operator import Operator

HEAD = "Func z, s, out; In H, W, t; Var x; RVar y, k; z[x, y] = rdot(H[x, k], W[y, k], k); s[x] = rsum(exp(z[x, y]), y); "
LOSSES = {
    "sum": HEAD + "out[] = cast(rsum(log(s[x]) - z[x, t[x]], x), fp32);",
    "mean": HEAD + "out[] = cast(rmean(log(s[x]) - z[x, t[x]], x), fp32);",
    "masked": HEAD + "out[] = cast(rsum(where(t[x] == 3, 0, log(s[x]) - z[x, t[x]]), x), fp32);",
    "squared": HEAD + "out[] = cast(rsum(log(s[x]) * log(s[x]) - z[x, t[x]], x), fp32);",
    "bias": HEAD.replace("W, t;", "W, t, b;").replace(", k); s", ", k) + b[y]; s") + "out[] = cast(rsum(log(s[x]) - z[x, t[x]], x), fp32);",
    "softcap": HEAD.replace("= rdot(H[x, k], W[y, k], k)", "= 5 * tanh(rdot(H[x, k], W[y, k], k) / 5)") + "out[] = cast(rsum(log(s[x]) - z[x, t[x]], x), fp32);",
    "squares": "Func z, out; In H, W, t; Var x; RVar y, k; z[x, y] = rdot(H[x, k], W[y, k], k); out[] = cast(rsum(rsum((z[x, y] - t[x]) * (z[x, y] - t[x]), y), x), fp32);",
    "another sum": "Func z, s, out; In H, W, t; Var x; RVar y, k; z[x, y] = rdot(H[x, k], W[y, k], k); s[x] = rsum(z[x, y] * z[x, y], y); out[] = cast(rsum(sqrt(s[x]) + 0 * t[x], x), fp32);",
}


def operator(name: str) -> Operator:
    return Operator(parse_spec(f"op: out\ndoc: a loss\nalgorithm: |\n  {LOSSES[name]}\n"))


def truth(name: str, h: torch.Tensor, w: torch.Tensor, t: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    z = h @ w.T
    z = z + b if b is not None else 5 * torch.tanh(z / 5) if name == "softcap" else z
    if name == "squares":
        return ((z - t[:, None]) ** 2).sum()
    if name == "another sum":
        return (z * z).sum(1).sqrt().sum()
    rows = F.cross_entropy(z, t, reduction="none")
    if name == "masked":
        rows = torch.where(t == 3, 0, rows)
    if name == "squared":
        rows = rows - z.logsumexp(1) + z.logsumexp(1) ** 2
    return rows.mean() if name == "mean" else rows.sum()


def inputs(dtype=torch.bfloat16, rows=21, classes=67, hidden=48):
    torch.manual_seed(0)
    h, w, b = torch.randn(rows, hidden), torch.randn(classes, hidden) * 0.3, torch.randn(classes)
    return [v.to(dtype).requires_grad_() for v in (h, w, b)], torch.randint(classes, (rows,))


@pytest.fixture
def short(monkeypatch):
    """Sums of 16 terms count as long."""
    monkeypatch.setattr(rematerialization, "LONG", 16)


def forms(op: Operator, wanted=("H", "W"), sizes=None, itemsize=2, wide=True) -> bool:
    pair = op.variant((), frozenset(), 0).pair_at(wanted, sizes or {"x": 4096, "y": 128256, "k": 4096}, itemsize, wide)
    return pair.gradient.products == (JOINT,)


@pytest.fixture
def narrow(monkeypatch):
    """Rows of 16 elements count as too long to hold, and sums of 16 terms as worth a kernel of their own; the usual way to fuse is taken."""
    for module, name in ((summed_products, "LONG"), (summed_products, "WHOLE_SIDE"), (gemm_row_reduction, "WHOLE_SIDE")):
        monkeypatch.setattr(module, name, 16)
    monkeypatch.setattr(Fusion, "by_time", lambda self, ways: ways)  # small sizes have no use for it


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_float64(name, short):
    """The product is rounded to bfloat16, and its rows are reduced as rounded: an element of exp(z) is off by 2^-8 of z, as torch's own logits make it."""
    (h, w, b), t = inputs()
    given = {"H": h, "W": w, "t": t} | ({"b": b} if name == "bias" else {})
    op = operator(name)
    got = op(**given)
    (3 * got).backward(retain_graph=True)
    wide = [v.detach().double().requires_grad_() for v in (h, w, b)]
    want = truth(name, *wide[:2], t, wide[2] if name == "bias" else None)
    (3 * want).backward()
    assert got.dtype == torch.float32 and torch.allclose(got.double(), want, rtol=2**-8)
    largest = float((wide[0] @ wide[1].T).detach().abs().max())
    for own, other in zip((h, w, *([b] if name == "bias" else [])), wide):
        error = float((own.grad.double() - other.grad).abs().max() / other.grad.abs().max())
        assert error < 2**-8 * largest, error
    assert any(p.gradient.products == (JOINT,) for p in op.variant((), frozenset(), 0).pairs())
    again = h.grad.clone()
    got.backward()  # another adjoint, of the same forward
    assert torch.allclose((h.grad - again).double() * 3, again.double(), atol=0.02 * float(again.abs().max()))


@pytest.mark.parametrize("name", ["sum", "masked", "softcap", "another sum"])
def test_a_number_whose_rows_are_reduced_where_their_product_is_made(name, narrow, monkeypatch):
    """Without gradients: one kernel for the product and the sums of its rows, others for what picks elements of it and for the number."""
    ways = []

    def beside_first(self, found):
        ways.extend(sorted(found, key=lambda way: not any(p.func.startswith("z") and p.args[0] in ("s", "out_log") for p in way[0] if p.name == "fuse_at")))
        return ways[-len(found) :]

    monkeypatch.setattr(Fusion, "by_time", beside_first)
    (h, w, _), t = inputs(torch.float32)
    with torch.no_grad():
        got = operator(name)(H=h, W=w, t=t)
    assert {"s", "out_log"} & {*ways[0][1]} and "z" not in ways[0][1] and torch.allclose(got.double(), truth(name, h.double(), w.double(), t, None), rtol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_three_products_in_all(name):
    """One in forward, and one for each gradient in backward, which scales its sums."""
    pair = operator(name).variant((), frozenset(), 0).pair(("H", "W"), (JOINT,))
    dots = [[n for d in half.algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Dot)] for half in (pair.forward, pair.backward)]
    assert [len(d) for d in dots] == [1, 2]
    assert not {"z_kept", "s"} & {*pair.backward.signature.inputs}


def test_where_the_gradient_is_formed_in_forward(monkeypatch):
    op = operator("sum")
    assert forms(op)
    assert not forms(op, itemsize=4), "float32"
    assert not forms(op, wide=False), "float16, in which a sum for an adjoint of 1 may overflow"
    assert not forms(op, sizes={"x": 4096, "y": 128256, "k": 512}), "a product of short sums is made again faster than it is stored and read"
    assert forms(op, sizes={"x": 8192, "y": 128256, "k": 4096}), "2.0 GiB of logits, where the weight, the rows and their gradients take 2.1"
    assert not forms(op, sizes={"x": 16384, "y": 128256, "k": 4096}), "4 GiB of logits"
    assert not forms(op, wanted=("H",), sizes={"x": 16384, "y": 64128, "k": 4096}), "2 GiB of logits, where the caller holds 0.75"
    assert not forms(Operator(parse_spec(f"op: out\ndoc: rows\nalgorithm: |\n  {HEAD}out[x] = cast(log(s[x]) - z[x, t[x]], fp32);\n"))), "a number a row"
    monkeypatch.setenv("DTKERNELS_MEMORY_LIMIT", "100")
    assert not forms(op)
    monkeypatch.setenv("DTKERNELS_MEMORY_LIMIT", "4096")
    assert forms(op, sizes={"x": 16384, "y": 128256, "k": 4096})


@pytest.mark.parametrize("name", ["sum", "bias"])
def test_the_adjoint_takes_the_memory_of_the_product(name):
    """The product in bfloat16 has a kernel of its own, with descriptors; one pass reduces its rows, and the adjoint is stored where it was."""
    forward = operator(name).variant((), frozenset(), 0).pair(("H", "W"), (JOINT,)).forward
    sizes, gpu = {"x": 4096, "y": 128256, "k": 4096}, target("h100")
    program = Program(forward.algorithm, default_schedule(forward.algorithm, forward.outputs, sizes, 2, gpu))
    kernels, kept = lower(program), "z_kept"
    assert kernels[0].writes == (kept,) and kept in kernels[0].descriptors, str(program.schedule)
    assert sum(kept in k.reads for k in kernels) == 3, "the sums of its rows, the elements that are picked, and the adjoint"
    assert not any(p.name == "chunk" for p in program.schedule.primitives), "within what was allowed already"
    unit = forward.outputs[1]
    assert f"{unit}_out = {kept}_out if dtype == {kept}_out.dtype else" in emit(program, "call", gpu, True)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"z_loss": 1e-2}, {"label_smoothing": 0.1}, {"shift": True}], ids=lambda o: next(iter(o), "plain"))
def test_the_last_layers_loss_takes_it(options, reduction, short):
    (h, w, b), t = inputs(rows=24)
    t = t.reshape(4, 6)
    t[0, :2] = -100
    loss = dtkernels.ops.linear_cross_entropy(h.reshape(4, 6, -1), w, t, b, reduction=reduction, **options)
    grads = torch.autograd.grad(2 * loss, (h, w, b))
    rows = dtkernels.ops.linear_cross_entropy(h.reshape(4, 6, -1), w, t, b, reduction="none", **options)
    counted = (t[..., 1:] if options.get("shift") else t) != -100
    other = rows.sum() / (1 if reduction == "sum" else counted.sum())
    assert torch.allclose(loss, other, rtol=2**-8)
    largest = float((h @ w.T + b).abs().max().detach())
    for own, wanted in zip(grads, torch.autograd.grad(2 * other, (h, w, b))):
        assert (own - wanted).abs().max() <= 2**-8 * (1 + largest) * wanted.abs().max()
    count = dtkernels.paths().get(f"{summed_rows.name_of_sum('linear_cross_entropy')} backward", {})
    assert count.get("interpreter")


def test_calls_of_a_gpu_share_the_buffer(monkeypatch, short):
    """Through the host half of the file, on tensors that stand in for a GPU's: the alias is bound, and cached, like any buffer."""
    stand_in_gpu.use(monkeypatch)
    op = Operator(shipped("linear_cross_entropy_sum").spec)
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        h, w = (torch.randn(n, 64, dtype=torch.bfloat16).requires_grad_() for n in (32, 512))
        t = torch.randint(512, (32,))
        op(H=h, W=w, t=t).backward()
        wide = [v.detach().double().requires_grad_() for v in (h, w)]
        F.cross_entropy(wide[0] @ wide[1].T, t, reduction="sum").backward()
        found += [float((a.grad.double() - b.grad).abs().max() / b.grad.abs().max()) for a, b in zip((h, w), wide)]
    assert max(found) < 0.1 and any(p.gradient.products == (JOINT,) for p in op.variant((), frozenset(), 0).pairs())


def test_compiled_calls_take_it(short):
    (h, w, _), t = inputs()

    def step(h, w, t):
        return dtkernels.ops.linear_cross_entropy(h, w, t)

    want = torch.autograd.grad(step(h, w, t), (h, w))
    got = torch.autograd.grad(torch.compile(step, backend="aot_eager", fullgraph=True)(h, w, t), (h, w))
    assert all(torch.equal(a, b) for a, b in zip(got, want))
