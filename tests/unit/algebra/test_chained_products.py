"""Products that forward hands to backward: which ones, at which sizes, and what their kernels do. Without torch."""

import pytest
from command_line import run

from dtkernels.algebra.autodiff.chained_products import chained_products
from dtkernels.algebra.autodiff.gradient import gradient, savable_products
from dtkernels.algebra.autodiff.rematerialization import products_to_save
from dtkernels.algebra.pipeline import differentiable_form, prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule, schedules
from dtkernels.codegen.ir.nest import Store, statements
from dtkernels.codegen.pipeline import lower, lower_one
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program
from dtkernels.lang.spec import load_spec
from dtkernels.ops.registry import SPECS, shipped_names
from dtkernels.runtime.tables.table import Row, call_kind_text, read_rows, rows_text

H200 = target("h200")
CHAIN = "Func mm, y; In A, B, C; SIn s; Var m, n; RVar l, k;\n"
LORA = {"m": 8192, "n": 4096, "k": 4096, "l": 16}


def form(name: str, **params):
    """The differentiated form of a shipped op and its outputs."""
    from dtkernels.algebra.rules.constant_folding import bind_parameters

    spec = load_spec(SPECS / f"{name}.yaml")
    return differentiable_form(bind_parameters(spec.algorithm, params), spec.outputs), spec.outputs


def names(text: str, outputs: tuple[str, ...] = ("y",)) -> list[str]:
    return [p.name for p in chained_products(differentiable_form(parse(text).algorithm, outputs), outputs)]


@pytest.mark.parametrize(
    "body, found",
    [
        ("mm[m, l] = rdot(A[m, k], B[k, l], k); y[m, n] = rdot(mm[m, l], C[l, n], l);", ["mm"]),
        ("mm[m, l] = s * rdot(A[m, k], B[k, l], k); y[m, n] = rdot(mm[m, l], C[l, n], l);", ["y_dot"]),
        ("mm[m, l] = rdot(A[m, k], B[k, l], k); y[m, n] = A[m, n] + s * rdot(C[l, n], mm[m, l], l);", ["mm"]),
        ("mm[m, l] = rdot(A[m, k], B[k, l], k); y[m, n] = rdot(exp(mm[m, l]), C[l, n], l);", []),
        ("mm[m, l] = rdot(A[m, k], B[k, l], k); y[m, n] = rdot(maximum(mm[m, l], 0), C[l, n], l);", []),
        ("mm[m, l] = rdot(A[m, k], B[k, l], k); y[m, n] = rdot(where(l <= m, mm[m, l], 0), C[l, n], l);", []),
        ("mm[m, l] = exp(rdot(A[m, k], B[k, l], k)); y[m, n] = rdot(mm[m, l], C[l, n], l);", []),
        ("mm[m, l] = rdot(A[m, k], B[k, l], k); y[m, n] = rdot(mm[m, l], C[l, n], l) + tanh(mm[m, n]);", []),  # used otherwise too
        ("mm[m, l] = A[m, l] * s; y[m, n] = rdot(mm[m, l], C[l, n], l) + rdot(A[m, k], B[k, n], k);", []),  # no product
    ],
)
def test_a_product_is_handed_over_where_it_enters_products_alone(body, found):
    assert names((CHAIN if " s " in body or " s;" in body else CHAIN.replace("SIn s; ", "")) + body) == found


def test_of_the_shipped_ops_only_chains_have_such_products():
    assert {op for op in shipped_names() if chained_products(*form(op))} == {"two_mm", "lora"}
    for params in ({"causal": True}, {"group": 4}, {"masked": True, "sinks": True}, {"capped": True, "biased": True}):
        assert not chained_products(*form("attention", **params)), "scores are as large as no memory is"


@pytest.mark.parametrize(
    "sizes, kept",
    [
        ({"m": 8192, "k": 4096, "l": 16}, True),
        ({"m": 64, "k": 64, "l": 64}, True),  # as large as an operand: kept
        ({"m": 64, "k": 32, "l": 33}, False),
        ({"m": 32, "k": 32, "l": 4096}, True),  # smaller than B
        ({"m": 33, "k": 32, "l": 4096}, False),
        ({"m": 8192, "k": 64, "l": 8192}, False),  # as scores of attention would be
    ],
)
def test_it_is_kept_where_it_is_no_larger_than_an_operand(sizes, kept):
    (product,) = chained_products(*form("two_mm"))
    m, k, l = (sizes[x] for x in "mkl")  # noqa: E741
    assert kept == (m * l <= max(m * k, k * l))
    assert products_to_save((product,), sizes, 2) == (("mm",) if kept else ())


def test_an_unknown_comparison_keeps():
    """As torch.compile asks where sizes are symbols."""
    (product,) = chained_products(*form("two_mm"))
    assert products_to_save((product,), {"m": 8192, "k": 64, "l": 8192}, 2, lambda _: False) == ("mm",)


def test_backward_reads_the_product_that_forward_returns():
    algorithm, outputs = form("two_mm")
    g = gradient(algorithm, outputs, ("A", "B", "C"), ("mm",))
    assert g.forward_outputs == ("two_mm", "mm") and g.products == ("mm",) and "mm" not in g.backward
    assert [str(d) for d in g.backward.definitions] == [
        "d_mm[m, l] = rdot(d_two_mm[m, n], C[l, n], n);",
        "d_A[m, k] = rdot(d_mm[m, l], B[k, l], l);",
        "d_B[k, l] = rdot(d_mm[m, l], A[m, k], m);",
        "d_C[l, n] = rdot(d_two_mm[m, n], mm[m, l], m);",
    ]
    only = gradient(algorithm, outputs, ("C",), ("mm",)).backward
    assert sorted(only.inputs) == ["d_two_mm", "mm"], "A and B need not be kept then"


def test_what_backward_does_not_need_is_not_returned():
    algorithm, outputs = form("two_mm")
    for wanted in (("A",), ("B",), ("A", "B")):
        g = gradient(algorithm, outputs, wanted, ("mm",))
        assert g.forward_outputs == outputs and g.products == () and g == gradient(algorithm, outputs, wanted)


def test_attention_hands_over_what_it_did():
    algorithm, outputs = form("attention")
    assert gradient(algorithm, outputs, ("Q", "K", "V"), ("scores",)).forward_outputs == ("attention", "total_log", "scores")
    g = gradient(algorithm, outputs, ("Q", "K", "V"), products_to_save(savable_products(algorithm, outputs), {}, 2))
    assert g.forward_outputs == ("attention", "total_log") and g == gradient(algorithm, outputs, ("Q", "K", "V"))


# -- kernels ------------------------------------------------------------------------------------------------------------


def saving(sizes: dict[str, int], kind: str = "two_mm") -> tuple[Program, tuple[str, ...]]:
    algorithm, outputs = form(kind)
    g = gradient(algorithm, outputs, algorithm.inputs, ("mm",))
    prepared = prepare_algorithm(g.forward, g.forward_outputs)
    return Program(prepared, default_schedule(prepared, g.forward_outputs, sizes, 2, H200)), g.forward_outputs


@pytest.mark.parametrize("kind", ["two_mm", "lora"])
@pytest.mark.parametrize("sizes", [LORA, LORA | {"l": 8}, LORA | {"l": 128}, {"m": 64, "n": 128, "k": 32, "l": 32}])
def test_the_kernel_that_computes_the_product_stores_it_once(kind, sizes):
    program, outputs = saving(sizes, kind)
    assert program.outputs() == outputs == (kind, "mm")
    (kernel,) = (k for k in lower(program) if "mm" in k.writes)
    assert kernel.func == kind, "fused, as without gradients"
    assert sum(isinstance(s, Store) and s.buffer == "mm" for s in statements(kernel.body)) == 1
    assert {g.label for g in kernel.grid} <= {"m"}, "no two programs store the same element"


@pytest.mark.parametrize("kind", ["two_mm", "lora"])
@pytest.mark.parametrize("sizes", [{"m": 33, "n": 300, "k": 70, "l": 17}, {"m": 1024, "n": 1024, "k": 64, "l": 64}])
def test_of_few_rows_blocks_of_columns_each_make_and_store_a_short_product(kind, sizes):
    (kernel,) = lower(saving(sizes, kind)[0])
    blocks = {g.label: g.block for g in kernel.grid}
    assert {*blocks} == {"m", "n"} and {*kernel.writes} == {kind, "mm"}
    assert -(-sizes["n"] // blocks["n"]) * sizes["l"] <= sizes["n"], "no more of it together than of the output"


def test_a_large_product_has_a_kernel_of_its_own_that_the_next_reads():
    program, _ = saving(dict.fromkeys("mnkl", 2048))
    first, second = lower(program)
    assert first.writes == ("mm",) and "mm" in second.reads and second.writes == ("two_mm",)


def backward_of(sizes: dict[str, int], itemsize: int = 2) -> Program:
    algorithm, outputs = form("two_mm")
    g = gradient(algorithm, outputs, ("A", "B", "C"), ("mm",))
    outs = tuple(g.grads.values())
    prepared = prepare_algorithm(g.backward, outs)
    return Program(prepared, default_schedule(prepared, outs, sizes, itemsize, H200))


def test_the_backward_at_the_sizes_of_lora_reads_each_large_tensor_once():
    """d_y for two of four gradients, A for one while another is written; sums over 8192 rows are cut over programs."""
    kernels = {k.name: k for k in lower(backward_of(LORA))}
    assert list(kernels) == ["d_C_part", "d_C", "d_mm", "d_B_part", "d_B"]
    assert "d_A" in kernels["d_B_part"].writes and "d_mm_parts" in kernels["d_C_part"].writes
    assert all(sum(t in k.reads for k in kernels.values()) == 1 for t in ("d_two_mm", "A"))


@pytest.mark.parametrize("changed, shared", [({"l": 128}, {"d_A"}), ({"m": 1024, "n": 4096, "k": 4096}, set()), ({"l": 256}, set()), ({"k": 4095, "n": 4095}, set())])
def test_one_pass_serves_two_sums_where_the_shared_side_is_narrow_and_the_other_large(changed, shared):
    schedule = backward_of(LORA | changed).schedule
    assert {p.func for p in schedule.primitives if p.name in ("fuse_at", "parts_at") and p.func != "d_mm"} == shared
    assert not [p for p in schedule.primitives if p.name == "parts_at"]
    assert not [p for p in backward_of(LORA, 4).schedule.primitives if p.name == "parts_at"], "measured for two bytes an element"


@pytest.mark.parametrize("inner", [17, 25])
def test_a_narrow_operand_whose_rows_are_no_multiple_of_16_goes_through_a_descriptor(inner):
    schedule = backward_of(LORA | {"l": inner}).schedule
    assert schedule.names("d_B", "descriptor") == ("d_mm",) and schedule.names("d_C", "descriptor") == ("mm",)
    assert bool(schedule.of("d_mm", "align")) == bool(schedule.of("d_C", "stage"))
    assert not schedule.fused(), "d_mm of such rows is laid out by a kernel of its own"
    forward = saving(LORA | {"l": inner})[0].schedule
    assert forward.names("two_mm", "descriptor") == ("B",) and forward.names("two_mm", "stage") == ("B",)


@pytest.mark.parametrize("inner", [96, 128])
def test_a_side_of_up_to_128_is_held_whole_where_the_sum_is_long(inner):
    schedule = backward_of(LORA | {"l": inner}).schedule
    assert [schedule.sizes(f, "block")["l"] for f in ("d_mm", "d_C")] == [128] * 2 and schedule.sizes("d_B", "tensorize")["l"] == 0
    assert all(schedule.of(f, "split") for f in ("d_B", "d_C"))


def test_a_short_sum_is_not_cut_over_programs():
    """The kernel that merges the parts takes longer than the steps that are saved."""
    schedule = backward_of({"m": 1024, "n": 1024, "k": 64, "l": 64}).schedule
    assert not [p for p in schedule.primitives if p.name == "split"] and backward_of(LORA).schedule.of("d_B", "split")


def test_every_way_that_the_default_schedule_fuses_is_another():
    algorithm, outputs = form("two_mm")
    g = gradient(algorithm, outputs, ("A", "B", "C"), ("mm",))
    prepared = prepare_algorithm(g.backward, outs := tuple(g.grads.values()))
    found = [str(s) for s in schedules(prepared, outs, LORA, 2, H200)]
    assert len(found) == len({*found}) >= 2


def test_a_kernel_by_itself_comes_with_the_copies_made_for_it():
    program = backward_of(LORA | {"l": 17})
    parts = ["d_C_part"] if program.schedule.of("d_C", "split") else []
    assert [k.name for k in lower_one(program, "d_C")] == ["mm_rows", *parts, "d_C"]
    assert [k.name for k in lower_one(program, "d_mm")] == ["d_mm"]


# -- rows and the command line --------------------------------------------------------------------------------------------


def row(**more) -> Row:
    return Row("two_mm", "backward", "bf16", {"m": 1}, "", "0" * 12, wanted=("A", "B", "C"), **more)


def test_a_row_says_which_products_it_reads_and_rows_without_are_as_they_were():
    kept, plain = row(kept=("mm",)), row()
    assert kept.key != plain.key and call_kind_text(kept.key) != call_kind_text(plain.key)
    assert read_rows(rows_text([kept, plain]), "t") == (plain, kept) and "kept: [mm]" in rows_text([kept]) and "kept" not in rows_text([plain])
    assert call_kind_text(plain.key) == '["two_mm", "backward", [], ["A", "B", "C"], false, [], "bf16", ["m"]]', "stores are found by it"
    assert kept.title() == "two_mm, backward (mm), bf16, m=1" and row(saved=True, kept=("mm",)).title() == "two_mm, backward (saving mm), bf16, m=1"


def test_the_backward_that_is_shown_is_that_of_the_sizes(capsys):
    small = run(capsys, "show", "two_mm", "--backward", "--stage", "algorithm", "--shape", "64x64x16x64")
    large = run(capsys, "show", "two_mm", "--backward", "--stage", "algorithm", "--shape", "64x64x64x16")
    assert "mm" in parse(small).algorithm.inputs and "mm" in parse(large).algorithm.funcs
