"""Elements that several kernels would make are made and stored by one of them, and what is as large as the caller's tensors is not cut."""

import pytest

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.ir.nest import has_matrix_product, statements
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.show import Subject, Written

GATED = "Func u, y; In A, W, V; Var m, n; RVar k; u[m, n] = rdot(A[m, k], W[k, n], k); y[m, n] = u[m, n] * sigmoid(u[m, n]) * rdot(A[m, k], V[k, n], k);"
RELU = "Func y; In A, B, z; Var m, n; RVar k; y[m, n] = maximum(rdot(A[m, k], B[k, n], k) + z[n], 0);"


def kernels(text: str, sizes: tuple[int, int, int], backward: bool = True) -> list:
    program = parse(text)
    wanted = program.algorithm.inputs if backward else None
    return list(lower(Subject(Written("f", program, scheduled=False), "h100", dict(zip("mnk", sizes)), "bf16", {}, wanted).program))


def chunks(text: str, sizes: tuple[int, int, int]) -> list[str]:
    program = parse(text)
    schedule = Subject(Written("f", program, scheduled=False), "h100", dict(zip("mnk", sizes)), "bf16", {}, program.algorithm.inputs).program.schedule
    return [str(p) for p in schedule.primitives if p.name == "chunk"]


def test_both_gradients_of_a_gated_unit_are_made_by_one_kernel():
    made = [k for k in kernels(GATED, (4096, 11008, 4096)) if "d_y" in k.reads]
    assert [set(k.writes) for k in made] == [{"d_u", "d_y_product"}]


def test_a_gradient_is_stored_by_the_kernel_that_sums_it_for_the_bias():
    first, *rest = kernels(RELU, (1000, 3000, 2000))
    assert {"d_y_product"} < {*first.writes} and not any("d_y" in k.reads for k in rest), "d_y is read once"
    assert sum("d_y_product" in k.reads for k in rest) == 2


def test_rows_that_start_anywhere_are_laid_out_by_a_kernel_of_their_own():
    (made,) = [k for k in kernels(RELU, (1000, 3001, 2000)) if "d_y" in k.reads]
    assert made.writes == ("d_y_product",) and made.aligned == ("d_y_product",)


@pytest.mark.parametrize("limit, cut", [(None, False), ("256", True), ("0", False), ("2048", False)])
def test_only_a_limit_that_is_set_cuts_what_is_no_larger_than_the_callers_tensors(limit, cut, monkeypatch):
    if limit is not None:
        monkeypatch.setenv("DTKERNELS_MEMORY_LIMIT", limit)
    assert bool(chunks(GATED, (8192, 14336, 4096))) == cut


@pytest.mark.parametrize("n", [256, 1000])
def test_a_product_compared_with_its_extremum_is_made_once_where_a_tile_holds_its_rows(n):
    made = kernels("Func y; In A, B; Var m; RVar n, k; y[m] = rmax(rdot(A[m, k], B[k, n], k), n);", (4096, n, 128))
    products = [k for k in made if has_matrix_product(k.body)]
    compared = [k for k in made if " == " in "\n".join(map(str, statements(k.body)))]
    assert compared and any(k in products for k in compared) == (n <= 256), "else its tiles, made again, may add up to other values"


MODULATED = """Func u, d, s, g, f, h; In X, D, a; Var b, c, y, x; u[b, c, y, x] = X[b, c, y, x] * a[b, c]; d[b, c, y, x] = D[b, c, y, x] * sigmoid(u[b, c, y, x]);
s[b, c] = rsum(d[b, c, y, x], y, x); g[b, c] = rsum(d[b, c, y, x] * X[b, c, y, x], y, x); f[b, c, y, x] = d[b, c, y, x] * a[b, c]; h[c] = rsum(s[b, c] * g[b, c], b);"""


def test_a_result_is_stored_by_the_kernel_of_the_sums_along_its_rows():
    """Two kernels took 121 us where one pass over the same elements takes about 80 (32 x 256 x 64 x 64, an H200)."""
    algorithm = prepare_algorithm(parse(MODULATED).algorithm, ("f", "h"))
    schedule = default_schedule(algorithm, ("f", "h"), dict(b=32, c=256, y=64, x=64), 2, target("h200"))
    assert schedule.fused()["f"] == ("g", "x"), str(schedule)
    long = default_schedule(algorithm, ("f", "h"), dict(b=32, c=256, y=512, x=512), 2, target("h200"))
    assert "f" not in long.fused(), "rows that no program holds"
