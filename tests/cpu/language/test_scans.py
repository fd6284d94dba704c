# ruff: noqa: E501 (programs read best on one line)
"""Scans: values and gradients of default schedules in the interpreter and of the reference, and every way to tile them."""

import pytest
import torch
from scan_forms import FORMS

import dtkernels


def register(name, text, tmp_path):
    path = tmp_path / "form.yaml"
    path.write_text(f"op: {name}\ndoc: as in torch\nalgorithm: |\n  {text}\n")
    return dtkernels.register(path)


@pytest.mark.parametrize("reference", [False, True], ids=["kernel", "reference"])
@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients(name, reference, tmp_path, monkeypatch):
    text, truth, shapes = FORMS[name]
    if reference:
        monkeypatch.delenv("TRITON_INTERPRET")
    op = f"scan_{list(FORMS).index(name)}{'_reference' * reference}"
    call, generator = register(op, text, tmp_path), torch.Generator().manual_seed(0)
    given = {n: torch.randn(shape, generator=generator) if shape else torch.tensor(0.7) for n, shape in shapes.items()}
    ours = {n: t.clone().requires_grad_() for n, t in given.items()}
    exact = {n: t.double().requires_grad_() for n, t in given.items()}
    got, want = call(**ours), truth(**exact)
    scale = max(want.abs().max().item(), 1)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=4e-6 * scale)
    adjoint = torch.randn(got.shape, generator=generator)
    found, wanted = torch.autograd.grad(got, list(ours.values()), adjoint), torch.autograd.grad(want, list(exact.values()), adjoint.double())
    for n, a, b in zip(shapes, found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5 * max(b.abs().max().item(), scale), msg=lambda m, n=n: f"d_{n}: {m}")
    path = "reference" if reference else "interpreter"
    assert dtkernels.paths()[op][path] == dtkernels.paths()[f"{op} backward"][path] == 1


TILES = {"elements": "", "columns": "f.block(x:2); f.tensorize(x:2);", "tiles": "f.block(x:2); f.tensorize(x:2, t:8);", "at once": "f.block(x:4); f.tensorize(x:4, t:0);", "few rows": "f.block(x:4); f.tensorize(x:2, t:4);"}  # fmt: skip
SCANS = {
    "sum, A[x, t], t": lambda a: a.cumsum(1), "prod, A[x, t], t": lambda a: a.cumprod(1), "max, A[x, t], t": lambda a: a.cummax(1).values,
    "min, A[x, t], t, reversed": lambda a: a.flip(1).cummin(1).values.flip(1), "sum, A[x, t], t, exclusive, reversed": lambda a: a.flip(1).cumsum(1).flip(1) - a,
    "max, A[x, t], t, exclusive": lambda a: torch.cat([torch.full_like(a[:, :1], -torch.inf), a.cummax(1).values[:, :-1]], 1),
}  # fmt: skip


@pytest.mark.parametrize("width", [1, 8, 13])
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("scan", SCANS)
def test_every_tiling_gives_the_same(scan, tiles, width):
    a = torch.randn(5, width, generator=torch.Generator().manual_seed(width))
    found = dtkernels.compile(f"Func f; In A; Var x, t; f[x, t] = rscan({scan}); {TILES[tiles]}")(a)
    torch.testing.assert_close(found.double(), SCANS[scan](a.double()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tile", ["n:0", "n:0, t:4", "n:0, t:0"])
@pytest.mark.parametrize("name", ["selective scan", "gated linear attention"])
def test_a_scan_is_read_where_it_is_made(name, tile):
    text, truth, shapes = FORMS[name]
    own, wide = ("h", "d") if name == "selective scan" else ("S", "v")
    tile = tile if name == "selective scan" else tile.replace("n:", "k:")
    compiled = dtkernels.compile(f"{text} {own}.fuse_at(y, t); y.block(b:1, {wide}:4); y.tensorize({wide}:4, {tile});")
    assert compiled.source.count("torch.empty") == 1, "the states are stored"
    given = [torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(shapes.values())]
    torch.testing.assert_close(compiled(*given).double(), truth(*(g.double() for g in given)), rtol=1e-4, atol=1e-5)


REDUCED = {
    "sums": ("rscan(sum, A[x, t], t, reversed)", "f[x] = rsum(s[x, t], t);", lambda A, W: A.flip(1).cumsum(1).sum(1)),
    "recurrences": ("rrecur(0.5, A[x, t], t, reversed)", "f[x] = rsum(s[x, t] * t, t);", lambda A, W: sum(0.5 ** (u - t) * A[:, u] * t for u in range(22) for t in range(u + 1))),
    "places": ("rscan(max, A[x, t], t, reversed)", "f[x] = rargmin(s[x, t], t);", lambda A, W: A.flip(1).cummax(1).values.flip(1).argmin(1)),
    "products": ("rscan(sum, A[x, t], t, reversed)", "f[x, o] = rdot(s[x, t], W[t, o], t);", lambda A, W: A.flip(1).cumsum(1).flip(1) @ W),
}


@pytest.mark.parametrize("schedule", ["", "s.fuse_at(f, t);", "s.fuse_at(f, t); f.tensorize(t:4);", "s.fuse_at(f, x); f.tensorize(x:2, t:4);", "s.fuse_at(f, x); f.tensorize(t:0);"])
@pytest.mark.parametrize("name", REDUCED)
def test_what_runs_from_the_end_is_reduced_from_the_end(name, schedule):
    scan, reduction, truth = REDUCED[name]
    A, W = torch.randn(3, 22), torch.randn(22, 6)
    inputs = {"A": A, "W": W} if name == "products" else {"A": A}
    got = dtkernels.compile(f"Func s, f; In {', '.join(inputs)}; Var x, o, t; s[x, t] = {scan}; {reduction} {schedule}".replace("x, o, t;", "x, o, t;" if name == "products" else "x, t;"))(**inputs)
    torch.testing.assert_close(got.double(), truth(A.double(), W.double()).double(), rtol=1e-5, atol=1e-4)


def test_an_element_that_is_not_a_number_stays_so_from_there_on():
    a = torch.tensor([[1.0, torch.nan, 2.0, 3.0, 4.0, 5.0]])
    for kind in ("sum", "prod", "max", "min"):
        found = dtkernels.compile(f"Func f; In A; Var x, t; f[x, t] = rscan({kind}, A[x, t], t); f.tensorize(t:2);")(a)
        assert found[0].isnan().tolist() == [False, *[True] * 5], kind


def test_rows_of_any_leading_dimensions_are_not_joined_with_the_scan(tmp_path):
    call, a = register("scan_batched", "Func f; In A; Var t, x; f[t, x] = rscan(sum, A[t, x], t);", tmp_path), torch.randn(2, 3, 7, 4)
    torch.testing.assert_close(call(a), a.cumsum(2), rtol=1e-5, atol=1e-5)


def test_nothing_to_scan(tmp_path):
    assert register("scan_empty", "Func f; In A; Var x, t; f[x, t] = rscan(sum, A[x, t], t);", tmp_path)(torch.randn(3, 0)).shape == (3, 0)


def test_integers_and_masks_are_numbers():
    text = "Func f; In A; Var x, t; f[x, t] = rscan(sum, A[x, t], t); f.tensorize(t:4);"
    for a in (torch.randint(0, 9, (3, 11)), torch.rand(3, 11) > 0.5):
        torch.testing.assert_close(dtkernels.compile(text)(a), a.float().cumsum(1))
