# ruff: noqa: E501 (programs read best on one line)
"""Operands of products with kernels of their own: their names, and when the default schedule stores one. Without torch."""

import pytest

from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import differentiable_form, prepare, prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.analysis.product_types import InputTypes
from dtkernels.codegen.pipeline import lower, prelower
from dtkernels.codegen.target import target
from dtkernels.lang import DTError, parse
from dtkernels.lang.algorithm import operand_names, with_operands
from dtkernels.lang.parts.apart_products import apart_product_names
from dtkernels.lang.parts.rounded_copies import rounded_copy_names
from dtkernels.lang.schedule import Program
from dtkernels.tuning.search.candidates import readers

INT8 = "Func f; In A, W, s; Var m, n; RVar k; f[m, n] = s[n] * rdot(A[m, k], cast(W[n, k], bf16), k);"
INT4 = "Func f; In A, W, s; Var m, n; RVar k; f[m, n] = rdot(A[m, k], (((W[n, k / 2] >> (4 * (k % 2))) & 15) - 8) * s[n, k / 128], k);"
GATED = "Func f; In A, B, W; Var m, n; RVar k; f[m, n] = rdot(A[m, k] / (1 + exp(-A[m, k])) * B[m, k], W[k, n], k);"
NORM = "Func t, f; In A, w, W; Var m, n; RVar k; t[m] = rmean(A[m, k] * A[m, k], k); f[m, n] = rdot(A[m, k] * rsqrt(t[m] + 1e-6) * w[k], W[n, k], k);"
BOTH = "Func f; In A, b, W, c; Var m, n; RVar k; f[m, n] = rdot(maximum(A[m, k] + b[k], 0), W[n, k] * c[k], k);"
BATCHED = "Func f; In A, W, s; Var b, m, n; RVar k; f[b, m, n] = rdot(A[b, m, k], cast(W[b, n, k], bf16) * s[b, k], k);"
PLAIN = "Func f; In A, W; Var m, n; RVar k; f[m, n] = rdot(A[m, k], W[n, k], k);"


def stored(text: str, rows: int, types: dict[str, str] | None = None, wrt=(), columns: int = 4096, cut: bool = False) -> set[str]:
    """The operands that the default schedule gives kernels of their own at so many rows, on an H100; ``cut``: in pieces."""
    algorithm, outputs = parse(text).algorithm, ("f",)
    if wrt:
        found = gradient(differentiable_form(algorithm, outputs), outputs, wrt)
        algorithm, outputs = found.backward, tuple(found.grads.values())
    algorithm = prepare_algorithm(algorithm, outputs)
    kinds = {t: (types or {}).get(t, "bf16") for t in algorithm.inputs}
    sizes = {label: 4096 for label in algorithm.labels} | {"m": rows, "n": columns, "b": 4}
    schedule = default_schedule(algorithm, outputs, sizes, InputTypes(tuple(kinds.items())), target("h100"))
    kernels = {k.func for k in lower(Program(algorithm, schedule))}
    assert kernels == {p.func for p in schedule.primitives if p.name == "block"} - {*schedule.fused()}, str(schedule)
    found = kernels & {*operand_names(algorithm)}
    assert {p.func for p in schedule.primitives if p.name == "chunk"} == (found if cut else set()), str(schedule)
    assert rows < 4096 or all(any(name in schedule.names(o, "descriptor") for o in outputs) for name in found), "the product of a stored operand is one of any two matrices"
    return found


FORMS = {"nn": "A[m, k], W[k, n]", "nt": "A[m, k], W[n, k]", "tn": "A[k, m], W[k, n]", "tt": "A[k, m], W[n, k]"}


def turned(form: str, sizes: dict[str, int], wrt: tuple[str, ...] = (), itemsize: int = 4, gpu: str = "h100") -> dict[str, tuple[str, ...]]:
    """Return the operands that the default schedule stores for a product, with their labels in memory."""
    algorithm, outputs = parse(f"Func f; In A, W; Var m, n; RVar k; f[m, n] = rdot({FORMS[form]}, k);").algorithm, ("f",)
    if wrt:
        found = gradient(differentiable_form(algorithm, outputs), outputs, wrt)
        algorithm, outputs = found.backward, tuple(found.grads.values())
    algorithm = prepare_algorithm(algorithm, outputs)
    schedule = default_schedule(algorithm, outputs, sizes, itemsize, target(gpu))
    lower(Program(algorithm, schedule))
    return {d.name: d.labels for d in with_operands(algorithm, schedule.subjects()).definitions if d.name not in algorithm}


LARGE = {"m": 4096, "n": 4096, "k": 4096}


@pytest.mark.parametrize("form, found", [("nn", {"f_right": ("n", "k")}), ("tn", {"f_left": ("m", "k"), "f_right": ("n", "k")}), ("nt", {}), ("tt", {"f_left": ("m", "k")})])
def test_float32_operands_that_lie_across_the_sum_are_stored_along_it(form, found):
    """Measured on an H100 at 4096 cubed: 1613 us where both lie along the sum, 2228 where the columns' operand lies across it.

    At 2048 x 4096 x 8192 with both across 2774 us; 2317 where a copy of the columns' operand lies along the sum, 1757 where copies of both do.
    """
    assert turned(form, LARGE) == found
    assert turned(form, LARGE, itemsize=2) == turned(form, LARGE, gpu="a100") == turned(form, LARGE, gpu="mi300x") == {} and turned(form, LARGE | {"m": 16}) == {}


def test_a_gradient_turns_what_it_sums_over_a_label_of_the_result():
    """The sum of d_W runs over rows, a label that comes before that of the columns."""
    assert turned("nt", LARGE, ("W",)) == {"d_W_left": ("n", "m"), "d_W_right": ("k", "m")}


def test_no_operand_is_turned_where_float32_products_are_single(monkeypatch):
    monkeypatch.setenv("DTKERNELS_FP32_PRODUCTS", "ieee")
    assert turned("nn", LARGE) == {}


@pytest.mark.parametrize("text, types, found", [
    (INT8, {"W": "int8"}, {"f_right"}), (INT4, {"W": "uint8"}, {"f_right"}), (GATED, {}, {"f_left"}), (NORM, {}, {"f_left"}), (BOTH, {}, {"f_left", "f_right"}),
    (BATCHED, {"W": "int8"}, {"f_right"}), (PLAIN, {"W": "int8"}, {"f_right"}), (PLAIN, {"W": "e4m3"}, {"f_right"}),
    (PLAIN, {}, set()), (PLAIN, {"A": "e4m3", "W": "e4m3"}, set()),  # what products multiply as it is
])  # fmt: skip
def test_operands_are_stored_where_many_rows_read_them(text, types, found):
    """Measured on an H100 at 4096 rows: each of these is 1.5 to 14 times as fast stored; at 16 rows none."""
    assert stored(text, 4096, types) == found and stored(text, 16, types) == set()


def test_gradients_store_the_operands_of_both_products():
    assert stored(INT8, 4096, {"W": "int8"}, ("A",)) == {"d_A_left", "d_A_right"}
    assert stored(INT8, 16, {"W": "int8"}, ("A",)) == set()


SQUARED = "Func s, f; In Y; SIn a; Var m, n; RVar k, l; s[m, n] = rdot(Y[m, k], Y[n, k], k); f[m, n] = a * s[m, n] + rdot(s[m, l], s[l, n], l);"


@pytest.mark.parametrize("rows, itemsize, found", [(2048, 2, True), (2000, 2, True), (2048, 4, False), (32, 2, False)])
def test_what_products_and_others_read_is_stored_for_both(rows, itemsize, found):
    """A product in 16 bits that loads float32 takes 1.7 to 2.4 times as long: S_descriptor of a Newton-Schulz step 44 us on an H200, where cuBLAS takes 18."""
    algorithm = prepare_algorithm(parse(SQUARED).algorithm, ("f",))
    sizes = dict.fromkeys(algorithm.labels, rows) | {"k": 4096}
    schedule = default_schedule(algorithm, ("f",), sizes, itemsize, target("h200"))
    assert schedule.fused().get("s") == (("s_rounded", "n") if found else None)
    assert len(lower(Program(algorithm, schedule))) == 2, "one kernel stores both"


MASKED = "Func f; In A, W, M, R, z; SIn p; Var m, n; RVar k; f[m, n] = R[m, n] + where(M[m, n] > 0, rdot(A[m, k], W[n, k], k) + z[n], 0) / (1 - p);"


@pytest.mark.parametrize("text, rows, found", [(MASKED, 4096, True), (MASKED, 64, False), (MASKED.replace("R[m, n] + where(M[m, n] > 0", "where(z[n] > 0").replace("M, R, ", ""), 4096, False)])
def test_a_product_is_stored_before_what_is_made_of_it_with_tensors_of_its_size(text, rows, found):
    """The tiles that leave room for such tensors take longer than the way was predicted to: 295 us on an H200, where a product and a kernel after it take 201."""
    algorithm = prepare_algorithm(parse(text).algorithm, ("f",))
    schedule = default_schedule(algorithm, ("f",), {"m": rows, "n": 4096, "k": 4096}, 2, target("h200"))
    kernels = lower(Program(algorithm, schedule))
    assert ("f_dot" in {k.func for k in kernels}) == found


def test_names_of_products_inside_expressions():
    text = "Func f, g; In A, W, R; Var m, n; RVar k; f[m, n] = R[m, n] * rdot(A[m, k], W[n, k], k) + rdot(R[m, k], W[n, k], k); g[m, n] = rdot(A[m, k], R[n, k], k);"
    assert [*apart_product_names(parse(text).algorithm)] == ["f_dot", "f_dot2"]


def test_a_copy_is_named_where_a_product_and_another_read_a_func():
    names = rounded_copy_names(parse(SQUARED.replace("Func s", "Func s_rounded, s").replace("s[m, n] =", "s_rounded[m, n] = Y[m, n]; s[m, n] =", 1)).algorithm)
    assert names == {"s_rounded_": "s"}
    assert rounded_copy_names(parse(SQUARED.replace("a * s[m, n]", "a")).algorithm) == {}, "what products alone read is stored as they take it"


def test_the_memory_limit_holds_for_operands(monkeypatch):
    monkeypatch.setenv("DTKERNELS_MEMORY_LIMIT", "31")
    assert stored(INT8, 4096, {"W": "int8"}, cut=True) == {"f_right"}
    monkeypatch.setenv("DTKERNELS_MEMORY_LIMIT", "32")
    assert stored(INT8, 4096, {"W": "int8"}) == {"f_right"}


def test_names_tell_sides_and_products_and_avoid_those_of_the_program():
    text = "Func f; In A, B, f_left; Var m, n; RVar k; f[m, n] = rdot(A[m, k] + 1, B[k, n] * 2, k) - rdot(A[m, k] + 1, f_left[k, n] * 2, k) * rdot(cast(A[m, k], e4m3), cast(B[k, n], e4m3), k);"
    names = operand_names(parse(text).algorithm)
    assert {name: str(e) for name, e in names.items()} == {"f_left_": "A[m, k] + 1", "f_right": "B[k, n] * 2", "f_right2": "f_left[k, n] * 2"}


def test_a_statement_makes_a_func_that_equal_operands_share():
    text = "Func g, f; In A, W, V; Var m, n; RVar k; g[m, n] = rdot(A[m, k] + 1, W[k, n], k); f[m, n] = g[m, n] * rdot(A[m, k] + 1, V[k, n], k);"
    tiles = "g.fuse_at(f, k); f.block(m:16, n:16); f.tensorize(m:16, n:16, k:16); g_left.block(m:16, k:16); g_left.tensorize(m:16, k:16);"
    made = prelower(prepare(parse(text + tiles)))
    assert [str(d) for d in made.algorithm.definitions] == [
        "g_left[m, k] = A[m, k] + 1;", "g[m, n] = rdot(g_left[m, k], W[k, n], k);", "f[m, n] = g[m, n] * rdot(g_left[m, k], V[k, n], k);",
    ]  # fmt: skip
    assert prelower(prepare(parse(text + tiles.split(" g_left")[0]))).algorithm.funcs == ("g", "f")


def test_a_name_that_no_operand_has_is_refused():
    with pytest.raises(DTError, match=r"a schedule is on a Func of the program: found 'f_rigth'; allowed: f, f_left, f_right$"):
        parse(PLAIN + "f_rigth.block(n:16);")
    with pytest.raises(DTError, match="label"):
        parse(PLAIN + "f_right.block(m:16);")


PAIR = "Func f; In A, B; Var m, n; RVar k; f[m, n] = rsum(abs(A[m, k] - B[{}]), k);"


@pytest.mark.parametrize("index, rows, types, found", [
    ("n, k", 2048, "bf16", {"f_left": ("k", "m"), "f_right": ("k", "n")}), ("n, k", 2048, "fp32", {"f_left": ("k", "m"), "f_right": ("k", "n")}),
    ("k, n", 2048, "bf16", {"f_left": ("k", "m")}), ("n, k", 64, "bf16", {}), ("n, k", 1024, "bf16", {}), ("n, k", 2048, "int32", {}),
])  # fmt: skip
def test_sides_of_sums_over_pairs_are_stored_with_their_rows_side_by_side(index, rows, types, found):
    """2048 x 2048 distances of 128 terms took 68 us so on an H100, 105 of rows as they lie. Integers stay exact as they are."""
    algorithm = prepare_algorithm(parse(PAIR.format(index)).algorithm, ("f",))
    sizes, kinds = {"m": rows, "n": rows, "k": 128}, InputTypes((("A", types), ("B", types)))
    schedule = default_schedule(algorithm, ("f",), sizes, kinds, target("h100"))
    kernels = {k.func for k in lower(Program(algorithm, schedule))}
    assert kernels == {"f", *found}
    assert {d.name: d.labels for d in with_operands(algorithm, schedule.subjects()).definitions if d.name != "f"} == found


@pytest.mark.parametrize("term, named", [
    ("abs(A[m, k] - B[n, k])", True), ("abs(A[m, k] - B[n, k]) * w[k]", True), ("abs(A[m, k] - B[n, k] - A[m, k + 1])", False), ("abs(A[m, k] - B[n, k + 1])", False),
    ("abs(A[m, k] - B[n, k] - B[m, k])", False), ("abs(A[m, k] - B[n, m] * w[k])", False), ("abs(A[m, k] - w[k]) + B[n, 0]", False),
])  # fmt: skip
def test_sums_over_pairs_have_names_for_two_sides_alone(term, named):
    used = "".join(f", {t}" for t in "ABw" if f"{t}[" in term)[2:]
    found = operand_names(parse(f"Func f; In {used}; Var m, n; RVar k; f[m, n] = rsum({term}, k); Extent k = A[1];").algorithm)
    assert {*found} == ({"f_left", "f_right"} if named else set())


def test_the_tuner_finds_the_reader_of_a_stored_side():
    algorithm = prepare_algorithm(parse(PAIR.format("n, k")).algorithm, ("f",))
    assert readers(algorithm, "f_left.block(k:16, m:16); f_right.block(k:16, n:16); f.block(m:64, n:64);") == {"f_left": "f", "f_right": "f"}


def test_a_product_is_stored_beside_its_larger_operands_where_its_diagonal_is_read():
    """Fused, each block sums its own rows of the diagonal again: correlations of 8192 rows of 512 took 291 us (an H200, torch.compile 117)."""
    text = "Func m, c, f; In A; Var i, j; RVar n; m[i] = rmean(A[n, i], n); c[i, j] = rmean((A[n, i] - m[i]) * (A[n, j] - m[j]), n); f[i, j] = c[i, j] * rsqrt(c[i, i]) * rsqrt(c[j, j]);"
    algorithm = prepare_algorithm(parse(text).algorithm, ("f",))
    schedule = default_schedule(algorithm, ("f",), dict(n=8192, i=512, j=512), 2, target("h200"))
    assert "c" not in schedule.fused() and {"c_left", "c_right"} <= {*schedule.subjects()}, str(schedule)
