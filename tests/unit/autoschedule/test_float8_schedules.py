"""Schedules of products in float8: tiles of as many bytes as in 16 bits, descriptors where rows allow them, operands along the sum."""

import pytest

import dtkernels
from dtkernels.autoschedule.cost.outline import Known
from dtkernels.autoschedule.cost.predicted_time import predicted_time
from dtkernels.autoschedule.default_schedule import default_schedule, proposals
from dtkernels.autoschedule.fit_resources import element_bytes, first_too_large
from dtkernels.codegen.analysis.product_types import InputTypes
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang.algorithm import with_operands
from dtkernels.lang.schedule import Program, Schedule

H100, A100 = target("h100"), target("a100")
NT = "Func f; In A, W; Var m, n; RVar k; f[m, n] = cast(rdot(A[m, k], W[n, k], k), bf16);"
NN, TN = NT.replace("W[n, k]", "W[k, n]"), NT.replace("A[m, k]", "A[k, m]")
SCALED = "Func f; In A, W, s, t; Var m, n; RVar k; f[m, n] = cast(rdot(A[m, k], W[n, k], k) * s[m] * t[n], bf16);"
LARGE = {"m": 4096, "n": 4096, "k": 4096}


def types(text: str, dtype: str = "e4m3") -> InputTypes:
    inputs = dtkernels.compile(text).prepared.algorithm.inputs
    return InputTypes(tuple((x, dtype if x in "AW" else "fp32") for x in inputs))


def schedule(text: str, sizes: dict[str, int], gpu=H100, of: InputTypes | None = None) -> Schedule:
    return default_schedule(dtkernels.compile(text).prepared.algorithm, ("f",), sizes, of or types(text), gpu)


@pytest.mark.parametrize("text", [NT, SCALED], ids=["product", "scales"])
def test_tiles_have_as_many_bytes_as_in_16_bits(text):
    for sizes in (LARGE, {"m": 8192, "n": 1024, "k": 8192}):
        found = schedule(text, sizes)
        assert found.sizes("f", "tensorize")["k"] >= 128 and {"A", "W", "f"} <= {*found.names("f", "descriptor")}
    assert schedule(NT, {"m": 16, "n": 14336, "k": 4096}).sizes("f", "tensorize")["k"] >= 128


def test_every_proposal_is_legal_and_fits():
    """Also of few rows, of rows that are no multiples of 16 bytes, of short sums, and of a copied operand."""
    for text, sizes in ((NT, LARGE), (NT, {"m": 16, "n": 4096, "k": 4096}), (NN, {"m": 1000, "n": 3001, "k": 1999}), (TN, {"m": 640, "n": 512, "k": 48})):
        algorithm, of = dtkernels.compile(text).prepared.algorithm, types(text)
        count = 0
        for whole, root, configs in proposals(algorithm, ("f",), sizes, of, H100):
            others = tuple(p for p in whole.primitives if p.func != root or p.name in ("fuse_at", "store", "compile"))
            for config in configs[:12]:
                program = Program(of.typed(algorithm), Schedule((*others, *config.statements())))
                kernels, count = lower(program), count + 1
                assert first_too_large(kernels, sizes, element_bytes(program.algorithm, ("f",), of), H100) is None, config
        assert count >= 5


@pytest.mark.parametrize("k, n, staged, stored", [(2016, 3000, set(), True), (2008, 3000, {"A", "W"}, True), (2016, 3001, set(), False)])
def test_descriptors_are_of_rows_of_whole_16_bytes(k, n, staged, stored):
    found = schedule(NT, {"m": 4096, "n": n, "k": k})
    assert {*found.names("f", "stage")} == staged
    assert ("f" in found.names("f", "descriptor")) == stored, "rows of the result have 2 bytes an element"


@pytest.mark.parametrize("text, copied, labels", [(NN, "f_right", ("n", "k")), (TN, "f_left", ("m", "k"))])
def test_an_operand_across_the_sum_is_turned_first_where_it_is_read_again(text, copied, labels):
    found = schedule(text, LARGE)
    assert tuple(found.sizes(copied, "block")) == labels and copied in found.names("f", "descriptor")
    algorithm = with_operands(types(text).typed(dtkernels.compile(text).prepared.algorithm), found.subjects())
    assert algorithm.float8_buffers[copied] == "e4m3" and element_bytes(algorithm, ("f",), types(text))[copied] == 1
    few = {**LARGE, "m": 16} if text == NN else {**LARGE, "n": 16}
    assert copied not in schedule(text, few).subjects(), "one block reads it"
    assert copied not in schedule(text, LARGE, A100).subjects(), "this GPU multiplies in fp16"
    assert copied not in schedule(text, LARGE, of=types(text, "bf16")).subjects()


def test_other_gpus_and_mixed_formats_take_the_schedules_of_16_bits():
    narrow = InputTypes((("A", "fp16"), ("W", "fp16")))
    assert schedule(NT, LARGE, A100) == schedule(NT, LARGE, A100, narrow)
    assert schedule(NT, LARGE, of=InputTypes((("A", "e4m3"), ("W", "e5m2")))).sizes("f", "tensorize") == schedule(NT, LARGE, of=narrow).sizes("f", "tensorize")


def test_the_matrix_units_are_predicted_to_be_faster_where_they_multiply_float8():
    text = "f.block(m:128, n:128); f.tensorize(m:128, n:128, k:128); f.descriptor(A, W, f); f.persistent(); f.num_warps(8); f.num_stages(4); f.compile();"
    algorithm = dtkernels.compile(NT).prepared.algorithm
    plain, float8 = Known.of(algorithm, ("f",)), Known.of(types(NT).typed(algorithm), ("f",))
    times = {gpu.name: predicted_time(text, float8, LARGE, 2, gpu) / predicted_time(text, plain, LARGE, 2, gpu) for gpu in (H100, A100)}
    assert 0.45 < times["h100"] < 0.8 and times["a100"] > 0.8, "reads alone are of fewer bytes there"
    shallow = text.replace("k:128", "k:16")  # multiplied in fp16
    assert predicted_time(shallow, float8, LARGE, 2, H100) > 0.8 * predicted_time(shallow, plain, LARGE, 2, H100)
