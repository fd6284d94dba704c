# ruff: noqa: E501 (programs read best on one line)
"""Gathered elements and diagonals in generated kernels, against float64: values and gradients, padded tiles, any schedule."""

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from indexed_forms import FORMS
from oracle import check

import dtkernels
from dtkernels.lang import parse
from dtkernels.lang.errors import DTError


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def places(below: int, *shape: int, dtype=torch.int64) -> torch.Tensor:
    """Indices, some of them just outside."""
    return torch.randint(-1, below + 1, shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients_under_the_default_schedule(name, tmp_path):
    text, truth, shapes, _ = FORMS[name]
    (path := tmp_path / "form.yaml").write_text(f"op: indexed_{name}\ndoc: as in torch\nalgorithm: |\n  {text}\n")
    op, generator = dtkernels.register(path), torch.Generator().manual_seed(0)
    given = {n: torch.randint(0, s[1], s[2:], generator=generator) if s[0] == "index" else torch.randn(s, generator=generator) for n, s in shapes.items()}
    floats = [n for n, t in given.items() if t.is_floating_point()]
    ours = {n: t.clone().requires_grad_(n in floats) for n, t in given.items()}
    exact = {n: t.double().requires_grad_() if n in floats else t for n, t in given.items()}
    got, want = op(**ours), truth(**exact)
    terms = max(d for s in shapes.values() for d in s if isinstance(d, int))
    near = {"rtol": terms**0.5 * 2e-6, "atol": terms**0.5 * 2e-6}
    torch.testing.assert_close(got.double(), want, **near)
    adjoint = torch.randn(got.shape, generator=generator)
    found = torch.autograd.grad(got, [ours[n] for n in floats], adjoint)
    wanted = torch.autograd.grad(want, [exact[n] for n in floats], adjoint.double())
    for n, a, b in zip(floats, found, wanted, strict=True):
        scale = max(b.abs().max().item(), 1)
        torch.testing.assert_close(a.double(), b, rtol=near["rtol"], atol=near["atol"] * scale, msg=lambda m, n=n: f"d_{n}: {m}")
    assert dtkernels.paths()[f"indexed_{name}"]["interpreter"] == dtkernels.paths()[f"indexed_{name} backward"]["interpreter"] == 1


# -- sums over gathered elements --------------------------------------------------------------------------------------

#: schedules under which a tile of the 5 terms is padded, or not
PADDED = ["", "f.block(b:2, c:4); f.tensorize(b:2, c:4, s:0);", "f.block(b:2, c:4); f.tensorize(b:2, c:4, s:4);", "f.block(b:4, c:8); f.tensorize(b:1, c:8, s:8);",
          "f.block(b:4); f.tensorize(b:4, c:0, s:2);", "f.block(b:16, c:16); f.tensorize(b:16, c:16, s:16);", "f.block(b:2, c:4); f.tensorize(b:2, c:4, s:2); f.split(s:2);",
          "f.block(b:2, c:4); f.tensorize(b:2, c:4, s:4); f.evict(t:first);", "f.block(b:2, c:4); f.tensorize(b:2, c:4, s:1); f.persistent();"]  # fmt: skip
T = places(6, 3, 5)
W = numbers(6, 7).abs() + 1
#: name -> (what is reduced to f[b, c], further inputs)
GATHERED = {
    "sum": ("rsum(W[t[b, s], c], s)", {}),
    "mean": ("rmean(W[t[b, s], c], s)", {}),
    "largest, all negative": ("rmax(W[t[b, s], c] - 9, s)", {}),
    "smallest, all positive": ("rmin(W[t[b, s], c] + 9, s)", {}),
    "logarithm of a sum": ("log(rsum(exp(W[t[b, s], c]), s))", {}),
    "product of two": ("rdot(W[t[b, s], c], W[t[b, s], c], s)", {}),
    "with what is not gathered": ("rdot(W[t[b, s], c], v[b, s], s)", {"v": numbers(3, 5)}),
    "a factor without s": ("rsum(W[t[b, s], c] * w[c], s)", {"w": numbers(7)}),
    "a square": ("rsum(W[t[b, s], c] * W[t[b, s], c], s)", {}),
    "a root, cast": ("rsum(cast(sqrt(W[t[b, s], c]), bf16), s)", {}),
    "the next row": ("rsum(W[t[b, s] + 1, c], s)", {}),
    "an index shifted": ("rsum(W[t[b, s + 1], c], s) + 0 * rsum(t[b, s], s)", {}),
    "an index of an index": ("rsum(W[u[t[b, s]], c], s)", {"u": places(6, 6)}),
    "rows of ragged lengths": ("rsum(where(s < n[b], W[t[b, s], c], 0), s)", {"n": torch.tensor([2, 9, 7])}),
    "largest of ragged lengths": ("rmax(where(s < n[b], W[t[b, s], c], -inf), s)", {"n": torch.tensor([2, 9, 7])}),
    "counts": ("rsum(where(t[b, s] == c, 1, 0), s) * w[c]", {"w": numbers(7)}),
    "an integer factor": ("rsum(W[t[b, s], c] * t[b, s], s)", {}),
    "two dimensions gathered": ("rsum(W[t[b, s], t[b, s]] * w[c], s)", {"w": numbers(7)}),
}  # fmt: skip


@pytest.mark.parametrize("name", GATHERED)
def test_padded_terms_of_gathered_elements_add_nothing(name):
    expression, more = GATHERED[name]
    inputs = {n: v for n, v in {"W": W, "t": T, **more}.items() if f"{n}[" in expression}
    for schedule in PADDED:
        if "t:first" in schedule and "t[" not in expression:
            continue
        check(f"Func f; In {', '.join(inputs)}; Var b, c; RVar s; f[b, c] = {expression}; {schedule}", *inputs.values())


@pytest.mark.parametrize("place", ["", "g.fuse_at(f, s);", "g.fuse_at(f, b);"])
def test_a_func_of_gathered_elements(place):
    for schedule in PADDED[:6]:
        check(f"Func g, f; In W, t; Var b, c; RVar s; g[b, s, c] = 2 * W[t[b, s], c]; f[b, c] = rsum(g[b, s, c], s); {schedule} {place}", W, T)


def test_sums_over_two_labels():
    for schedule in ("", "f.block(c:4); f.tensorize(b:4, c:4, s:8);", "f.tensorize(b:0, c:0, s:0);", "f.block(c:4); f.tensorize(b:2, c:4, s:0);"):
        check(f"Func f; In W, t; Var c; RVar b, s; f[c] = rsum(W[t[b, s], c], b, s); {schedule}", W, T)


def test_products_of_gathered_rows_by_the_matrix_units():
    a, b, t = numbers(6, 20), numbers(6, 33), places(6, 21)
    for tile in (0, 16, 32):
        schedule = f"f.block(b:16, c:16); f.tensorize(b:16, c:16, s:{tile});"
        check(f"Func f; In A, B, t; Var b, c; RVar s; f[b, c] = rdot(A[t[s], c], B[t[s], b], s); {schedule}", a, b, t)
        check(f"Func f; In A, B, t; Var b, c; RVar s; f[b, c] = rdot(A[t[s], c], B[b, s], s); {schedule}", a, numbers(33, 21), t)


@pytest.mark.parametrize("expression", [
    "rsum(A[b, (s + len(s) / 2) % len(s)] * B[c, (s + len(s) / 2) % len(s)] + 0 * A[b, s], s)",  # an index that is shared has a name
    "rmax(A[b, s] - sqrt(B[c, s] - 1), s)",  # past the extent the root is of -1
    "rsum(exp(A[b, s] - log(B[c, s])), s)",
])  # fmt: skip
def test_a_guard_stays_where_padded_terms_are_not_neutral(expression):
    for schedule in PADDED[:7]:
        check(f"Func f; In A, B; Var b, c; RVar s; f[b, c] = {expression}; {schedule}", numbers(3, 5), numbers(7, 5).abs() + 1.5)


@pytest.mark.parametrize("expression, t", [
    ("A[2 * t[x] + 1]", [100, 3, -1]), ("A[t[x] - 1]", [0, 3, 255]), ("A[2 * t[x]]", [0, 130, 149]), ("A[3 - t[x]]", [0, 1, 3]), ("A[t[x] % len(x)]", [200, 1, 3]),
    ("A[t[x] / 2] + A[(t[x] - 7) / 2]", [100, 1, 3]), ("A[x + 300 * t[x]]", [-1, 1, 0]), ("A[t[x]] + where(t[x] - 1 < 0, 5, 6)", [0, 1, 3]), ("A[t[x]] + t[x] * t[x]", [100000, 1, 3]),
    ("A[t[x]] + where(t[x] < 300, 5, 6)", [100, 1, 3]), ("A[t[x]] + maximum(t[x], -1)", [0, 1, 3]),
])  # fmt: skip
def test_arithmetic_on_integers_does_not_wrap_around(expression, t):
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.int64):
        if not torch.iinfo(dtype).min <= min(t) <= max(t) <= torch.iinfo(dtype).max:
            continue
        for schedule in ("", "f.block(x:4); f.tensorize(x:4);"):
            check(f"Func f; In A, t; Var x; Extent x = t[0]; f[x] = {expression}; {schedule}", numbers(300), torch.tensor(t, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64], ids=str)
def test_sums_of_integers_do_not_wrap_around(dtype):
    t = torch.randint(1, 100 if dtype.itemsize == 1 else 100000, (3, 11), dtype=dtype)
    for schedule in ("", "f.block(b:2); f.tensorize(b:2, s:0);", "f.block(b:2); f.tensorize(b:2, s:4);"):
        check(f"Func f; In W, t; Var b; RVar s; f[b] = rsum(t[b, s] * t[b, s], s) + 0 * W[t[b, 0]]; {schedule}", numbers(7), t)


# -- diagonals --------------------------------------------------------------------------------------------------------

PRODUCT = "s[m, l] = rdot(A[m, k], B[l, k], k);"
FACTORS = {"A": numbers(5, 9), "B": numbers(5, 9, seed=1)}
#: name -> (Vars, RVars, algorithm, inputs)
DIAGONALS = {
    "of a product": ("m l", "k", f"{PRODUCT} d[m] = s[m, m];", FACTORS),
    "and a row": ("m l", "k", f"{PRODUCT} d[m, l] = s[m, l] - s[m, m] - s[l, l];", FACTORS),
    "trace": ("l", "m k", f"{PRODUCT} d[] = rsum(s[m, m], m);", FACTORS),
    "contrast": ("m", "l k", f"{PRODUCT} d[m] = log(rsum(exp(s[m, l]), l)) - s[m, m];", FACTORS),
    "of a sum": ("m l", "k", "s[m, l] = rsum(A[m, k] * B[l, k] * B[l, k], k); d[m] = s[m, m];", FACTORS),
    "under another name": ("m l", "k", "s[m, l] = rsum(A[m, k] * B[l, k], k); d[k] = s[k, k];", {"A": numbers(5, 5), "B": numbers(5, 5)}),
    "batch last": ("m l b", "", "s[m, l, b] = A[m, l, b] * 2; d[m, b] = s[m, m, b];", {"A": numbers(5, 5, 3)}),
    "batch first": ("m l b", "", "s[b, m, l] = A[b, m, l] * 2; d[b, m] = s[b, m, m];", {"A": numbers(3, 5, 5)}),
    "batch between": ("m l b", "", "s[m, b, l] = A[m, b, l] * 2; d[b, m] = s[m, b, m];", {"A": numbers(5, 3, 5)}),
    "of a cube": ("m l k", "", "s[m, l, k] = A[m, l, k] + 1; d[m] = s[m, m, m];", {"A": numbers(4, 4, 4)}),
    "both ways round": ("m l", "", "s[m, l] = A[m, l] + 1; d[m, l] = s[m, m] + s[m, l] * s[l, m];", {"A": numbers(5, 5)}),
    "beside it": ("m l", "", "s[m, l] = A[m, l] + 1; d[m] = s[m, m + 1];", {"A": numbers(5, 5)}),
    "of an input": ("m", "", "s[m] = A[m, m] * A[m, m]; d[m] = s[m] + A[m, m];", {"A": numbers(5, 5)}),
}  # fmt: skip


def program(name: str) -> tuple[str, tuple[str, ...], tuple[str, ...], dict[str, torch.Tensor]]:
    """The text without a schedule, the labels of the result, the others, and the inputs."""
    own, summed, algorithm, inputs = DIAGONALS[name]
    declared = "".join(f"{word} {', '.join(names.split())}; " for word, names in (("Var", own), ("RVar", summed)) if names)
    text = f"Func s, d; In {', '.join(inputs)}; {declared}{algorithm} "
    labels = parse(text).algorithm["d"].labels
    return text, labels, tuple(x for x in (own + " " + summed).split() if x not in labels), inputs


@pytest.mark.parametrize("stored", [False, True], ids=["", "both stored"])
@pytest.mark.parametrize("name", DIAGONALS)
def test_diagonals_wherever_they_are_computed(name, stored):
    """Each schedule is right, or is refused because what is stored would not be all of it."""
    text, labels, inner, inputs = program(name)
    ran = 0
    for block, tile, rest in ((0, 0, 0), (4, 4, 0), (4, 4, 2), (16, 16, 16), (4, 1, 4), (16, 0, 4)):
        cut = f"d.block({', '.join(f'{x}:{block}' for x in labels)}); " if labels and block else ""
        sizes = ", ".join([f"{x}:{tile or block}" for x in labels] + [f"{x}:{rest}" for x in inner])
        for place in ["", *(f"s.fuse_at(d, {x}); " for x in [*labels, *inner])]:
            schedule = f"{cut}d.tensorize({sizes}); {place}" + ("s.compile(); d.compile();" if stored else "")
            try:
                check(text + schedule, *inputs.values())
                ran += 1
            except DTError as error:
                assert any(w in str(error) for w in ("an output is computed over all its labels", "names a loop of", "names a label of", "fuse")), error
    assert ran


def test_an_output_read_at_its_diagonal_is_stored_whole():
    """Its diagonal alone was written, the rest was what lay in memory."""
    text, _, _, inputs = program("of a product")
    with pytest.raises(DTError, match="an output is computed over all its labels: found s is not, where it is fused"):
        dtkernels.compile(text + "s.fuse_at(d, m); s.compile(); d.compile();")
    check(text + "s.fuse_at(d, m); d.block(m:4); d.tensorize(m:4, l:0, k:0); s.compile(); d.compile();", *inputs.values())


# -- what a mask range decides ----------------------------------------------------------------------------------------

CONDITIONS = ("l <= m", "l == m", "l > m", "l != m", "l <= m and m - l < 20", "l < 33")
SCHEDULES = ("f.block(m:16); f.tensorize(m:16, n:0, l:16);", "f.block(m:16); f.tensorize(m:1, n:0, l:16);", "f.block(m:16); f.tensorize(m:16, n:0, l:1);",
             "f.tensorize(m:0, n:0, l:0);", "f.block(m:16, n:16); f.tensorize(m:16, n:16, l:32); f.split(l:2);")  # fmt: skip


@pytest.mark.parametrize("value", ["a[m]", "2", "a[m] * 2", "a[l]", "3 * a[l] + 1"])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_terms_that_lose_a_label_where_a_mask_is_settled(condition, value):
    """In the loop without masks ``where(l <= m, a[m], 0)`` is ``a[m]``, still a term for each ``l``."""
    a, b = numbers(41), numbers(41, 20)
    head = "In a, B; Var m, n; RVar l; Extent l = a[0]; Extent m = a[0]; e[m, l] = where({}, {}, {});"
    for schedule in SCHEDULES:
        product = head.format(condition, value, 0) + " f[m, n] = rdot(e[m, l], B[l, n], l) + rsum(e[m, l], l) + 0 * a[m];"
        check(f"Func e, f; {product} {schedule} e.fuse_at(f, l);", a, b)
        soft = head.format(condition, value, "-inf") + " z[m] = rsum(exp(e[m, l]), l); f[m, n] = rdot(exp(e[m, l]), B[l, n], l) / (z[m] + 1) + 0 * a[m];"
        check(f"Func e, z, f; {soft} {schedule} e.fuse_at(f, l); z.fuse_at(f, l);", a, b)
