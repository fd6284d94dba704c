"""Products and sums over slices and rows that data picks, in generated kernels, against float64: values, gradients, schedules."""

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from grouped_forms import FORMS, by_offsets, grouped, inputs
from oracle import check

import dtkernels

GROUPED = FORMS["grouped"][0]


def registered(name: str, text: str, folder):
    (path := folder / "form.yaml").write_text(f"op: {name}\ndoc: as in torch\nalgorithm: |\n  {text}\n")
    return dtkernels.register(path)


def agree(op, truth, given: dict, dtype=torch.float32, left_out: tuple[str, ...] = ()) -> None:
    """The result and the gradients of ``op`` against ``truth`` in float64: a few roundings to ``dtype``, and those of float32 sums."""
    floats = [n for n, t in given.items() if t.is_floating_point() and n not in left_out]
    ours = {n: t.to(dtype).requires_grad_() if n in floats else t for n, t in given.items()}
    exact = {n: ours[n].detach().double().requires_grad_() if n in floats else t for n, t in given.items()}
    got, want = op(**ours), truth(**exact)
    adjoint = torch.randn(got.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    found = torch.autograd.grad(got, [ours[n] for n in floats], adjoint)
    wanted = torch.autograd.grad(want, [exact[n] for n in floats], adjoint.double())
    for n, a, b in zip(("result", *floats), (got, *found), (want, *wanted), strict=True):
        near = 4 * torch.finfo(dtype).eps + 2e-6 * max(got.shape) ** 0.5
        scale = max(b.abs().max().item(), 1) * (1 if dtype == torch.float32 else 4)  # an intermediate value is rounded too
        torch.testing.assert_close(a.double(), b, rtol=near, atol=near * scale, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients_under_the_default_schedule(name, tmp_path):
    text, truth, shapes = FORMS[name]
    op = registered(f"grouped_{name}", text, tmp_path)
    agree(op, truth, inputs(shapes))
    assert dtkernels.paths()[f"grouped_{name}"]["interpreter"] == dtkernels.paths()[f"grouped_{name} backward"]["interpreter"] == 1


@pytest.mark.parametrize("name", ["gated", "combined"])
def test_half_precision(name, tmp_path):
    text, truth, shapes = FORMS[name]
    agree(registered(f"half_{name}", text, tmp_path), truth, inputs(shapes), torch.float16)


def test_an_index_outside_gives_zeros_and_so_does_no_row(tmp_path):
    op = registered("grouped_outside", GROUPED, tmp_path)
    given = inputs(FORMS["grouped"][2]) | {"e": torch.tensor([-3, 5, 99, 0, 4, 4, -1] * 10)}
    agree(op, grouped, given)
    assert op(torch.empty(0, 24), given["W"], given["e"][:0]).shape == (0, 20)
    assert op(given["A"], torch.empty(0, 24, 20), given["e"]).abs().max() == 0


def test_a_slice_that_is_not_finite_stays_with_blocks_that_have_it(tmp_path):
    """Rows of one index in a block of their own are not touched; what a gradient leaves out is multiplied by nothing."""
    op = registered("grouped_nan", GROUPED, tmp_path)
    given = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in inputs(FORMS["grouped"][2]).items()}
    given["e"] = torch.where(torch.arange(70) < 64, 1, 3)
    bad = given["W"].detach().clone()
    bad[2] = torch.nan
    assert torch.isfinite(op(given["A"], bad, given["e"])).all()
    result = op(given["A"], given["W"], given["e"])
    adjoint = torch.ones_like(result)
    adjoint[-1] = torch.nan
    (d_W,) = torch.autograd.grad(result, [given["W"]], adjoint)
    assert torch.isfinite(d_W[1]).all() and torch.isnan(d_W[3]).all() and (d_W[[0, 2, 4]] == 0).all()


@pytest.mark.parametrize("schedule", ["f.block(m:16, n:16); f.tensorize(m:16, n:16, g:1, k:16);", "f.block(m:32, n:16); f.tensorize(m:32, n:16, g:1, k:0);",
                                      "f.block(m:16, n:16); f.tensorize(m:16, n:16, g:2, k:8);", "f.block(m:16, n:16); f.tensorize(m:16, n:16, k:16); f.split(k:2);",
                                      "f.block(m:16, n:16); f.tensorize(m:16, n:16, k:16); f.split(g:2);", "f.block(m:16, n:16); f.tensorize(m:16, n:16, k:16); f.persistent();"])  # fmt: skip
@pytest.mark.parametrize("condition", ["e[m] == g", "lo[g] <= m and m < hi[g]", "e[m] == g and m < hi[g]", "e[m] <= g", "e[m] != g"])
def test_masks_over_slices_under_any_schedule(condition, schedule):
    given = {"e": torch.randint(-1, 6, (40,), generator=torch.Generator().manual_seed(2)), "lo": torch.tensor([0, 3, 3, 20, 39]), "hi": torch.tensor([3, 3, 20, 38, 99])}
    used = [n for n in given if f"{n}[" in condition]
    text = f"Func f; In A, W, {', '.join(used)}; Var m, n; RVar g, k; f[m, n] = rdot(where({condition}, A[m, k], 0), W[g, k, n], g, k); {schedule}"
    some = inputs({"A": (40, 24), "W": (5, 24, 20)})
    check(text, *some.values(), *(given[n] for n in used))


def test_groups_by_offsets(tmp_path):
    text = "Func f; In A, W, lo, hi; Var m, n; RVar g, k; f[m, n] = rdot(where(lo[g] <= m and m < hi[g], A[m, k], 0), W[g, k, n], g, k);"
    given = inputs({"A": (70, 24), "W": (4, 24, 20)}) | {"lo": torch.tensor([0, 9, 9, 50]), "hi": torch.tensor([9, 9, 50, 70])}
    agree(registered("grouped_offsets", text, tmp_path), by_offsets, given)
