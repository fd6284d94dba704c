"""Sums of few long rows, of siblings in one pass, and of whole tensors, under the default schedule: what is fused, and that it is right."""

import pytest
import torch
import torch.nn.functional as F

from dtkernels.lang import parse
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator

MEAN = "mean[x] = rmean(A[x, y], y); var[x] = rmean((A[x, y] - mean[x]) * (A[x, y] - mean[x]), y);"
TOTAL = "total[x] = rsum(exp(A[x, y]), y);"
LONG, SHORT = (2, 33001), (5, 301)
#: name -> (text, in torch, shape of A, and of P where it has one)
FORMS = {
    "softmax of few long rows": (f"Func total, f; In A; Var x; RVar y; {TOTAL} f[x, y] = exp(A[x, y]) / total[x];", lambda A: torch.softmax(A, 1), LONG),
    "log softmax of few long rows": (f"Func total, f; In A; Var x; RVar y; {TOTAL} f[x, y] = A[x, y] - log(total[x]);", lambda A: torch.log_softmax(A, 1), LONG),
    "layer norm of few long rows": (
        f"Func mean, var, f; In A; Var x; RVar y; {MEAN} f[x, y] = (A[x, y] - mean[x]) * rsqrt(var[x] + 0.00001);", lambda A: F.layer_norm(A, A.shape[1:]), LONG),
    "batch norm of long columns": (
        "Func mean, var, f; In A; Var c; RVar b, i; mean[c] = rmean(A[b, c, i], b, i); var[c] = rmean((A[b, c, i] - mean[c]) * (A[b, c, i] - mean[c]), b, i);"
        "f[b, c, i] = (A[b, c, i] - mean[c]) * rsqrt(var[c] + 0.00001);", lambda A: F.batch_norm(A, None, None, training=True), (34, 2, 1001)),
    "mean of logarithms of sums": (f"Func total, f; In A; RVar x, y; {TOTAL} f[] = rmean(log(total[x]) - A[x, 0], x);", lambda A: (A.logsumexp(1) - A[:, 0]).mean(), SHORT),
    "the same of long rows": (f"Func total, f; In A; RVar x, y; {TOTAL} f[] = rmean(log(total[x]) - A[x, 0], x);", lambda A: (A.logsumexp(1) - A[:, 0]).mean(), LONG),
    "sums of siblings": (
        "Func p, q, f; In A; RVar x, y; p[x] = rsum(A[x, y] * A[x, y], y); q[x] = rsum(abs(A[x, y]), y); f[] = rmean(maximum(sqrt(p[x]) - q[x] + 250, 0), x);",
        lambda A: ((A**2).sum(1).sqrt() - A.abs().sum(1) + 250).clamp_min(0).mean(), SHORT),
    "three siblings": (
        "Func p, q, r, f; In A; RVar x, y; p[x] = rsum(A[x, y] * A[x, y], y); q[x] = rsum(abs(A[x, y]), y); r[x] = rmax(A[x, y], y); f[] = rsum(sqrt(p[x]) - q[x] + r[x], x);",
        lambda A: ((A**2).sum(1).sqrt() - A.abs().sum(1) + A.amax(1)).sum(), SHORT),
    "a sum of what is made element by element": (
        "Func d, f; In A; RVar x, y; d[x, y] = abs(A[x, y] - 0.25); f[] = rmean(where(d[x, y] < 1, 0.5 * d[x, y] * d[x, y], d[x, y] - 0.5), x, y);",
        lambda A: F.smooth_l1_loss(A, torch.full_like(A, 0.25)), SHORT),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_it_is_right(name, backward):
    text, truth, shape = FORMS[name]
    torch.manual_seed(0)
    A = torch.randn(shape) * 3
    op = Operator(Spec("few_rows", "Sums.", parse(text)))
    grad = torch.randn(truth(A).shape)

    def results(fn, a, g):
        a = a.clone().requires_grad_(backward)
        out = fn(a)
        return torch.autograd.grad(out, a, g)[0] if backward else out

    got, expected = results(op, A, grad), results(truth, A.double(), grad.double())
    size = expected.abs() + expected.square().mean().sqrt()
    assert ((got - expected).abs() <= 64 * 2**-24 * size).all(), ((got - expected).abs() / size).max()


def kernels(name: str, sizes: dict[str, int]) -> dict[str, int]:
    """The kernels of the default schedule at these sizes, with the programs of each and the parts of its sum."""
    from dtkernels.algebra.pipeline import prepare_algorithm
    from dtkernels.autoschedule.default_schedule import default_schedule
    from dtkernels.codegen.pipeline import lower
    from dtkernels.codegen.target import target
    from dtkernels.lang.schedule import Program

    program = parse(FORMS[name][0])
    algorithm = prepare_algorithm(program.algorithm, program.outputs())
    found = lower(Program(algorithm, default_schedule(algorithm, program.outputs(), sizes, 2, target("h200"))))
    return {k.name: _programs(k, sizes) for k in found}


def _programs(kernel, sizes: dict[str, int]) -> int:
    count = 1
    for g in kernel.grid:
        count *= g.parts or -(-sizes[g.label] // g.block)
    return count


@pytest.mark.parametrize("name", [n for n, form in FORMS.items() if "few long rows" in n])
def test_few_long_rows_keep_the_whole_gpu_busy(name):
    programs = kernels(name, {"x": 16, "y": 1 << 22})
    assert all(n >= 132 for kernel, n in programs.items() if kernel.endswith("part") or kernel == "f"), programs
    assert any(kernel.endswith("part") for kernel in programs), programs


def test_rows_that_fill_the_gpu_stay_in_one_kernel():
    assert list(kernels("softmax of few long rows", {"x": 4096, "y": 393216})) == ["f"]
    assert list(kernels("softmax of few long rows", {"x": 16, "y": 4096})) == ["f"]


@pytest.mark.parametrize(("name", "others"), [("mean of logarithms of sums", ["total"]), ("sums of siblings", ["q"]), ("three siblings", ["q"]), ("a sum of what is made element by element", [])])
def test_no_input_is_read_by_two_kernels(name, others):
    """Sums of the same rows share a kernel, and what is made element by element is not stored for a sum of everything."""
    made = [k for k in kernels(name, {"x": 32768, "y": 8192}) if not k.startswith("f")]
    assert made == others, made
