"""Products of float32 as three in TF32: when the default schedule asks for them. Without torch."""

import pytest

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.cost.candidate_time import CandidateTime
from dtkernels.autoschedule.cost.kernel_config import read_kernels
from dtkernels.autoschedule.cost.predicted_time import predicted_time
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.autoschedule.problem import SchedulingProblem
from dtkernels.codegen.target import target
from dtkernels.lang import parse

FORMS = {"nt": "B[y, k]", "nn": "B[k, y]"}
#: microseconds on an H100: form, x, y, k -> (rows, columns, depth, warps, parts, whether three in TF32) -> time
MEASURED = {
    ("nt", 4096, 4096, 4096): {(128, 64, 32, 4, 1, 1): 1613, (128, 128, 32, 8, 1, 1): 1687, (128, 128, 16, 4, 1, 0): 4896, (128, 128, 32, 8, 1, 0): 6311},
    ("nn", 4096, 4096, 4096): {(256, 64, 32, 8, 1, 1): 2228, (128, 64, 32, 4, 1, 1): 2444, (64, 64, 32, 4, 1, 0): 3081, (128, 64, 16, 4, 1, 0): 3331},
    ("nt", 2048, 2048, 2048): {(128, 64, 32, 8, 1, 1): 212, (64, 64, 32, 4, 1, 1): 232, (128, 128, 16, 4, 1, 1): 454, (64, 64, 32, 4, 1, 0): 1213, (32, 64, 32, 4, 1, 0): 2289},
    ("nn", 2048, 2048, 2048): {(256, 64, 32, 8, 1, 1): 284, (128, 128, 32, 8, 1, 1): 475, (64, 128, 32, 4, 1, 1): 757, (64, 64, 32, 4, 1, 0): 378, (32, 64, 32, 4, 1, 0): 471},
    ("nn", 1000, 3000, 2000): {(32, 128, 32, 4, 1, 1): 285, (256, 64, 32, 8, 1, 1): 564, (128, 64, 32, 4, 1, 1): 854, (64, 64, 32, 4, 1, 0): 322},
    ("nt", 512, 512, 4096): {(128, 64, 32, 8, 8, 1): 38, (128, 64, 32, 8, 1, 1): 134, (128, 128, 16, 4, 8, 0): 116, (128, 128, 16, 4, 1, 0): 826},
}  # fmt: skip


def problem(form: str, x: int, y: int, k: int, gpu: str = "h100") -> SchedulingProblem:
    algorithm = prepare_algorithm(parse(f"Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], {FORMS[form]}, k);").algorithm, ("f",))
    return SchedulingProblem(algorithm, ("f",), {"x": x, "y": y, "k": k}, 4, target(gpu))


def chosen(form: str, x: int, y: int, k: int, gpu: str = "h100", itemsize: int = 4):
    p = problem(form, x, y, k, gpu)
    return default_schedule(p.algorithm, ("f",), p.sizes, itemsize, p.target)


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: "-".join(map(str, case)))
def test_predicted_times_are_near_measured_ones(case):
    """So the fastest is predicted to be within a tenth of the fastest, whichever form the operands have."""
    time, predicted = CandidateTime(problem(*case), "f", ["f"]).microseconds, {}
    for (rows, columns, depth, warps, parts, tripled), us in MEASURED[case].items():
        text = f"f.block(x:{rows}, y:{columns}); f.tensorize(x:{rows}, y:{columns}, k:{depth}); f.map(x:x1/8, y, x1); f.num_warps({warps});"
        text += f" f.split(k:{parts});" * (parts > 1) + " f.approximate(rdot);" * tripled
        predicted[us] = time(read_kernels(text)[0])
        shape = problem(*case)
        assert predicted_time(text, shape.known, shape.sizes, shape.itemsize, shape.target) == predicted[us], "a candidate and a total price it alike"
        assert 0.6 < predicted[us] / us < 1.4, (text, us, predicted[us])
    assert predicted[min(predicted)] < 1.1 * min(predicted.values()), predicted


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: "-".join(map(str, case)))
def test_large_products_are_three_in_tf32_where_the_gpu_has_it(case, monkeypatch):
    assert chosen(*case).names("f", "approximate") == ("rdot",)
    assert chosen(*case, "mi300x").names("f", "approximate") == () and chosen(*case, itemsize=2).names("f", "approximate") == ()
    monkeypatch.setenv("DTKERNELS_FP32_PRODUCTS", "ieee")
    assert chosen(*case).names("f", "approximate") == ()


def test_a_product_in_float32_beside_one_of_16_bits_with_as_much_work_decides_the_tiles():
    text = "Func f, g; In A, B; Var x, y; RVar k; g[x, y] = rdot(A[x, k], B[k, y], k); f[x, y] = g[x, y] + rsum(exp(A[x, k]) * exp(B[k, y]), k);"
    algorithm = prepare_algorithm(parse(text).algorithm, ("f", "g"))
    found = default_schedule(algorithm, ("f", "g"), dict.fromkeys("xyk", 4096), 2, target("h200"))
    assert found.names("f", "approximate") == ("rdot",)


QUADRATIC = "Func f; In X, m, P; Var b, c; RVar i, j; f[b, c] = rsum((X[b, i] - m[c, i]) * P[i, j] * (X[b, j] - m[c, j]), i, j);"


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_float32_product_whose_rows_are_summed_in_its_kernel_is_three_in_tf32(itemsize, monkeypatch):
    algorithm, sizes = prepare_algorithm(parse(QUADRATIC).algorithm, ("f",)), dict(b=4096, c=64, i=256, j=256)
    found = default_schedule(algorithm, ("f",), sizes, itemsize, target("h200"))
    assert found.names("f", "approximate") == ("rdot",) and found.sizes("f", "block")["c"] == 64
    monkeypatch.setenv("DTKERNELS_FP32_PRODUCTS", "ieee")
    assert default_schedule(algorithm, ("f",), sizes, itemsize, target("h200")).names("f", "approximate") == ()
