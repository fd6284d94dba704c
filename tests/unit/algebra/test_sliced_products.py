"""Products of which definitions take slices: made once, what is saved of them, and in which kernels. Without torch."""

import pytest

from dtkernels.algebra.autodiff.gradient import gradient, savable_products
from dtkernels.algebra.autodiff.rematerialization import products_to_save
from dtkernels.algebra.pipeline import differentiable_form, prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.ir.nest import Store, statements
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang import expr as ex
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program

HEAD = "Func {}, y; In X, W, c, V; Var m, n; RVar k;"
SLICES = ("n + 0", "n + len(n)", "n + 2 * len(n)", "n + 3 * len(n)")


def program(*slices: str, added: str = " + c[{0}]", result: str = "") -> str:
    """A program of which each definition takes one slice of a product, and their product by element."""
    funcs = [f"f{i}" for i in range(len(slices))]
    body = " ".join(f"{f}[m, n] = tanh(rdot(X[m, k], W[{s}, k], k){added.format(s)});" for f, s in zip(funcs, slices))
    head = HEAD.format(", ".join(funcs)).replace(", c", ", c" if "c[" in added else "").replace(", V", ", V" if "V[" in body + result else "")
    return f"{head} Extent n = X[1]; {body} y[m, n] = {result or ' * '.join(f'{f}[m, n]' for f in funcs)};"


def form(text: str):
    return differentiable_form(parse(text).algorithm, ("y",))


def products(algorithm) -> list[ex.Dot]:
    return [n for d in algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Dot)]


@pytest.mark.parametrize("slices, made", [(SLICES, 1), (SLICES[:3], 1), ((SLICES[2], SLICES[0], SLICES[1]), 1), (SLICES[:2], 2), (SLICES[1:], 3), (("n", *SLICES[1:3]), 3)])
def test_slices_next_to_each_other_are_of_one_product(slices, made):
    """Two are left as they are, which one kernel makes side by side; so are those with a gap before them, and a plain index, which says how long ``W`` is."""
    assert len(products(form(program(*slices)))) == made


def test_each_gradient_is_one_product_and_the_sum_is_saved():
    algorithm = form(program(*SLICES))
    sizes = {"m": 4096, "n": 1024, "k": 1024}
    kept = products_to_save(savable_products(algorithm, ("y",)), sizes, 2)
    assert kept == ("f0_slices",)
    backward = gradient(algorithm, ("y",), ("X", "W", "c"), kept)
    found = prepare_algorithm(backward.backward, tuple(backward.grads.values()))
    assert len(products(found)) == 2 and str(found["d_W"]) == "d_W[W_0, k] = rdot(d_f0_slices[m, W_0 - 0], X[m, k], m);"


def test_the_memory_limit_counts_all_slices(monkeypatch):
    found = savable_products(form(program(*SLICES)), ("y",))
    sizes = {"m": 4096, "n": 1024, "k": 1024}
    for mebibytes, kept in (("31", ()), ("32", ("f0_slices",))):
        monkeypatch.setenv("DTKERNELS_MEMORY_LIMIT", mebibytes)
        assert products_to_save(found, sizes, 2) == kept


def test_what_is_added_in_some_slices_alone_stays():
    text = program(*SLICES[:3]).replace(" + c[n + 2 * len(n)]", "")
    assert str(next(d for d in form(text).definitions if d.name == "f0_slices").expr) == "rdot(X[m, k], W[n_slices + 0, k], k)"


def test_slices_that_products_read_as_they_are_stay_apart():
    """Queries, keys and values are stored each as its readers take it."""
    text = program(*SLICES[:3], added="", result="rdot(f0[m, l], V[n, l], l) + f1[m, n] * f2[m, n]").replace("RVar k;", "RVar k, l;").replace("tanh(", "(")
    assert len(products(prepare_algorithm(parse(text).algorithm, ("y",)))) == 4
    assert len(products(prepare_algorithm(parse(text.replace("(rdot(X", "tanh(rdot(X")).algorithm, ("y",)))) == 2


@pytest.mark.parametrize("rows, kernels", [(16, 1), (4096, 2), (4000, 2)])
def test_slices_are_made_where_they_are_taken_of_few_rows(rows, kernels):
    algorithm = prepare_algorithm(parse(program(*SLICES)).algorithm, ("y",))
    sizes = {"m": rows, "n": 1024, "k": 1024, "n_slices": 4096}
    schedule = default_schedule(algorithm, ("y",), sizes, 2, target("h200"))
    assert len(lower(Program(algorithm, schedule))) == kernels
    assert ("f0_slices" in schedule.fused()) == (kernels == 1)


def test_no_product_of_all_slices_is_kept_beyond_a_limit_that_the_user_sets(monkeypatch):
    algorithm = prepare_algorithm(parse(program(*SLICES)).algorithm, ("y",))
    sizes = {"m": 4096, "n": 1024, "k": 1024, "n_slices": 4096}
    for mebibytes, kernels in (("64", 2), ("63", 1)):
        monkeypatch.setenv("DTKERNELS_MEMORY_LIMIT", mebibytes)
        assert len(lower(Program(algorithm, default_schedule(algorithm, ("y",), sizes, 2, target("h200"))))) == kernels


def test_the_gradients_of_slices_are_stored_by_the_kernel_that_computes_them():
    """Each element of the gradient of a product would compute those of all its slices; the kernel of the slices stores them side by side."""
    algorithm = form(program(*SLICES[:3]))
    backward = gradient(algorithm, ("y",), ("X", "W", "c"), ("f0_slices",))
    outputs = tuple(backward.grads.values())
    found = prepare_algorithm(backward.backward, outputs)
    sizes = {"m": 4096, "n": 1024, "k": 1024, "n_slices": 3072, "W_0": 3072, "c_0": 3072}
    schedule = default_schedule(found, outputs, sizes, 2, target("h200"))
    kernels = lower(Program(found, schedule))
    (first,) = (k for k in kernels if "d_f0_slices" in k.writes)
    assert first.writes == ("d_f0_slices",) and [f"{s.index[1]}" for s in statements(first.body) if isinstance(s, Store)] == ["n", "(n + len(n))", "(n + (2 * len(n)))"]
