"""What each rule of the algebra derives, as DT text. Torch is not needed."""

import ast
import inspect
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

import dtkernels.algebra as algebra
from dtkernels.algebra import pipeline
from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.batch import add_batch
from dtkernels.algebra.pipeline import differentiable_form, prepare_algorithm
from dtkernels.algebra.rearrangement import number_of_steps
from dtkernels.algebra.rules.canonicalize import (
    conditions_to_numbers,
    drop_detach,
    extract_equal_products,
    extract_nested_reductions,
    extract_reductions_for_gradient,
    fold_invariant_reductions,
    mean_to_sum,
)
from dtkernels.algebra.rules.center_moments import center_moments
from dtkernels.algebra.rules.constant_folding import bind_parameters, fold_constants
from dtkernels.algebra.rules.data_index.compared_terms import pick_compared_terms
from dtkernels.algebra.rules.data_index.data_bounds import bound_picked_sums
from dtkernels.algebra.rules.data_index.grouped_products import group_products
from dtkernels.algebra.rules.data_index.sums_before_picks import sum_before_picks
from dtkernels.algebra.rules.erf_to_erfc import erf_to_erfc
from dtkernels.algebra.rules.exponentials.max_subtraction import move_masks_into_exponentials, subtract_maxima
from dtkernels.algebra.rules.exponentials.row_values import extract_row_values
from dtkernels.algebra.rules.exponentials.shift_degree import FREE, Degree, degree
from dtkernels.algebra.rules.exponentials.sum_exp_addends import extract_sum_exp_addends
from dtkernels.algebra.rules.factor_hoisting import hoist_invariant_factors, hoist_row_factors
from dtkernels.algebra.rules.func_cse import share_products
from dtkernels.algebra.rules.indices.digit_products import separate_digits
from dtkernels.algebra.rules.indices.divided_indices import divide_indices
from dtkernels.algebra.rules.indices.inverted_windows import invert_windows
from dtkernels.algebra.rules.indices.phases import separate_phases
from dtkernels.algebra.rules.indices.remainder_sums import sum_over_steps
from dtkernels.algebra.rules.indices.remainders import pick_remainders
from dtkernels.algebra.rules.indices.results_by_phase import compute_results_by_phase
from dtkernels.algebra.rules.indices.shared_groups import share_groups
from dtkernels.algebra.rules.indices.slice_values import name_slices
from dtkernels.algebra.rules.indices.strided_sums import sum_over_elements
from dtkernels.algebra.rules.label_unification import unify_labels
from dtkernels.algebra.rules.products.distributed_sums import distribute_differences
from dtkernels.algebra.rules.products.operand_cse import merge_equal_operands
from dtkernels.algebra.rules.products.product_columns import sum_product_operands
from dtkernels.algebra.rules.products.product_elements import make_picked_elements, sum_rows_first
from dtkernels.algebra.rules.products.scaled_products import scale_operands
from dtkernels.algebra.rules.products.sliced_products import multiply_slices_at_once
from dtkernels.algebra.rules.products.sums_as_products import nest_contractions, sums_to_float32_products, sums_to_matrix_products
from dtkernels.algebra.rules.scans import extract_scans
from dtkernels.algebra.rules.separate_sums import separate_reductions
from dtkernels.algebra.rules.tanh_of_log1p import tanh_of_log1p
from dtkernels.algebra.rules.tanh_to_sigmoid import tanh_to_sigmoid
from dtkernels.algebra.rules.unit_labels import drop_unit_labels
from dtkernels.algebra.smart_constructors import simplify
from dtkernels.algebra.top_k import expand_top_k
from dtkernels.lang import DTError, parse
from dtkernels.lang import expr as ex
from dtkernels.lang.algorithm import Algorithm
from dtkernels.lang.spec import load_spec

SPECS = Path(__file__).parents[3] / "dtkernels" / "specs"
PAD = "pad_"
KNOWN = {"and", "or", "not", "true", "false", "inf", "fp32", "fp16", "bf16"}


def read(text: str) -> Algorithm:
    """The algorithm of statements without declarations: names that stand alone are labels, ``eps`` and ``c0`` scalars.

    One more Func over every label gives each an extent.
    """
    params = re.findall(r"Param (\w+) = \w+;", text)
    names = [n for n in dict.fromkeys(re.findall(r"\b[A-Za-z_]\w*\b(?!\s*[\[(])", re.sub(r"Param [^;]*;", "", text))) if n not in KNOWN]
    scalars = [n for n in names if n in ("eps", "c0")]
    labels = [n for n in names if n not in scalars and n not in params]
    funcs = re.findall(r"(?:^|;)\s*(\w+)\[[^\]]*\]\s*=(?!=)", re.sub(r"Param [^;]*;", "", text))
    inputs = [t for t in dict.fromkeys(re.findall(r"(\w+)\[", text)) if t not in funcs]
    lines = [f"Func {PAD}, {', '.join(funcs)};", f"In {PAD}in, {', '.join(inputs)};", f"Var {', '.join(labels)};"]
    lines += [f"SIn {', '.join(scalars)};"] if scalars else []
    index = ", ".join(labels)
    return parse("\n".join([*lines, re.sub(r"(Param [^;]*;)", r"\1\n", text), f"{PAD}[{index}] = {PAD}in[{index}];"])).algorithm


def lines(algorithm: Algorithm) -> list[str]:
    """Its definitions, without the Func that ``read`` adds."""
    return [str(d) for d in algorithm.definitions if d.name != PAD]


def with_unit_label(algorithm: Algorithm) -> Algorithm:
    """With u of one element, and without the Func that ``read`` adds, whose input would be checked for it."""
    return replace(algorithm, extents=(("u", "", 1),)).with_definitions(algorithm.definitions[:-1])


def with_phases(algorithm: Algorithm) -> Algorithm:
    """With two phases of x."""
    return replace(algorithm, extents=(("x_phase", "", 2),), formulas=(("x_step", number_of_steps("x", 0, 2)),))


def outputs(algorithm: Algorithm) -> tuple[str, ...]:
    return tuple(d.name for d in algorithm.definitions[-2:])


def op(name: str, **params) -> tuple[Algorithm, tuple[str, ...]]:
    spec = load_spec(SPECS / f"{name}.yaml")
    return bind_parameters(spec.algorithm, params), spec.outputs


def derived(name: str, scalars: bool = True, **params):
    """The gradient of a shipped op with respect to every input, and to its ``scalars``."""
    a, outs = op(name, **params)
    return gradient(differentiable_form(a, outs), outs, a.inputs + (a.scalars if scalars else ()))


# -- docstrings ---------------------------------------------------------------------------------------------------------

RULES = {
    "bind_parameters": (bind_parameters, lambda a: bind_parameters(a)),
    "fold_constants": (fold_constants, lambda a: fold_constants(a)),
    "expand_top_k": (expand_top_k, lambda a: expand_top_k(replace(a, extents=(("j", "", 2),)))),
    "extract_scans": (extract_scans, lambda a: extract_scans(a)),
    "drop_detach": (drop_detach, lambda a: drop_detach(a)),
    "conditions_to_numbers": (conditions_to_numbers, lambda a: conditions_to_numbers(a)),
    "mean_to_sum": (mean_to_sum, lambda a: mean_to_sum(a)),
    "tanh_to_sigmoid": (tanh_to_sigmoid, lambda a: tanh_to_sigmoid(a)),
    "erf_to_erfc": (erf_to_erfc, lambda a: erf_to_erfc(a)),
    "separate_reductions": (separate_reductions, lambda a: separate_reductions(a)),
    "tanh_of_log1p": (tanh_of_log1p, lambda a: tanh_of_log1p(a)),
    "center_moments": (center_moments, lambda a: center_moments(a, (*outputs(a), "m"))),
    "group_products": (group_products, lambda a: group_products(a)),
    "bound_picked_sums": (bound_picked_sums, lambda a: bound_picked_sums(a)),
    "hoist_invariant_factors": (hoist_invariant_factors, lambda a: hoist_invariant_factors(a, outputs(a))),
    "sum_product_operands": (sum_product_operands, lambda a: sum_product_operands(a, outputs(a))),
    "drop_unit_labels": (drop_unit_labels, lambda a: drop_unit_labels(with_unit_label(a), (a.definitions[-2].name,))),
    "fold_invariant_reductions": (fold_invariant_reductions, lambda a: fold_invariant_reductions(a)),
    "sums_to_matrix_products": (sums_to_matrix_products, lambda a: sums_to_matrix_products(a)),
    "unify_labels": (unify_labels, lambda a: unify_labels(a)),
    "extract_nested_reductions": (extract_nested_reductions, lambda a: extract_nested_reductions(a)),
    "multiply_slices_at_once": (multiply_slices_at_once, lambda a: multiply_slices_at_once(a)),
    "extract_reductions_for_gradient": (extract_reductions_for_gradient, lambda a: extract_reductions_for_gradient(a)),
    "extract_sum_exp_addends": (extract_sum_exp_addends, lambda a: extract_sum_exp_addends(a)),
    "move_masks_into_exponentials": (move_masks_into_exponentials, lambda a: move_masks_into_exponentials(a, outputs(a))),
    "extract_row_values": (extract_row_values, lambda a: extract_row_values(a)),
    "subtract_maxima": (subtract_maxima, lambda a: subtract_maxima(a, outputs(a))),
    "invert_windows": (invert_windows, lambda a: invert_windows(a, outputs(a))),
    "name_slices": (name_slices, lambda a: name_slices(replace(a, formulas=(("g", ex.Binary("*", ex.Const(2), ex.Len("j"))),)))),
    "sum_over_elements": (sum_over_elements, lambda a: sum_over_elements(a)),
    "separate_phases": (separate_phases, lambda a: separate_phases(a)),
    "sum_over_steps": (sum_over_steps, lambda a: sum_over_steps(a)),
    "divide_indices": (divide_indices, lambda a: divide_indices(replace(a, extents=(("p", "", 2),)))),
    "separate_digits": (separate_digits, lambda a: separate_digits(a)),
    "compute_results_by_phase": (compute_results_by_phase, lambda a: compute_results_by_phase(with_phases(a), outputs(a))),
    "hoist_row_factors": (hoist_row_factors, lambda a: hoist_row_factors(a, outputs(a))),
    "nest_contractions": (nest_contractions, lambda a: nest_contractions(a)),
    "distribute_differences": (distribute_differences, lambda a: distribute_differences(a)),
    "sums_to_float32_products": (sums_to_float32_products, lambda a: sums_to_float32_products(a)),
    "extract_equal_products": (extract_equal_products, lambda a: extract_equal_products(a)),
    "merge_equal_operands": (merge_equal_operands, lambda a: merge_equal_operands(a)),
    "share_products": (share_products, lambda a: share_products(a, outputs(a))),
    "scale_operands": (scale_operands, lambda a: scale_operands(a, outputs(a)[-1:])),
    "make_picked_elements": (make_picked_elements, lambda a: make_picked_elements(a, outputs(a))),
    "sum_rows_first": (sum_rows_first, lambda a: sum_rows_first(a, outputs(a))),
    "share_groups": (share_groups, lambda a: share_groups(a)),
    "sum_before_picks": (sum_before_picks, lambda a: sum_before_picks(a)),
    "pick_compared_terms": (pick_compared_terms, lambda a: pick_compared_terms(a)),
    "pick_remainders": (pick_remainders, lambda a: pick_remainders(replace(a, extents=(("p", "", 2),)))),
    "add_batch": (add_batch, lambda a: add_batch(a, frozenset({"A"}), 1)),
    "gradient": (gradient, lambda a: gradient(a, (a.definitions[0].name,), ("A",)).backward),
}


def documented(rule) -> tuple[list[str], list[str]]:
    """The texts before and after that a rule's docstring gives, as statements."""
    doc = inspect.cleandoc(rule.__doc__)
    found = re.search(r"Before:(.*?)After[^:]*:\s*(``.*?``(?:,\s*``.*?``)*)", doc, re.S)
    assert found, f"{rule.__name__} has no before and after"
    sides = [[re.sub(r"\s+", " ", s).strip() for s in re.findall(r"``(.*?)``", part, re.S)] for part in found.groups()]
    assert len(sides[0]) == len(sides[1]) > 0
    as_statement = [[s if s.endswith(";") else f"{'f[m, n]' if '[m' in s else 'f[x]'} = {s};" for s in side] for side in sides]
    return as_statement[0], as_statement[1]


@pytest.mark.parametrize("name", RULES)
def test_docstring_says_what_the_rule_does(name):
    rule, apply = RULES[name]
    for before, after in zip(*documented(rule)):
        assert lines(apply(read(before))) == [s + ";" for s in re.split(r";\s*", after.rstrip(";"))]


def test_every_rule_of_the_pipeline_is_documented_under_its_name():
    listed = (pipeline.DROP_DETACH, *pipeline.RULES, *pipeline.LOWERING_RULES, *pipeline.GRADIENT_RULES)
    assert {rule.name for rule in listed} <= {name for name in RULES if RULES[name][0].__name__ == name}


def test_no_rule_names_an_op():
    ops = {p.stem for p in SPECS.glob("*.yaml")} | {"flash", "layernorm", "rmsnorm"}
    for path in Path(algebra.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and "\n" not in n.value}
        assert not ops & (names | texts), path.name


# -- gradients ----------------------------------------------------------------------------------------------------------


def test_attention_saves_the_output_and_the_logarithm_of_the_sum():
    g = derived("attention", scalars=False)
    assert g.forward_outputs == ("attention", "total_log")
    assert str(g.forward["total_log"]) == "total_log[b, h, m] = cast(log(total[b, h, m]), fp32);"
    assert sorted(g.backward.inputs) == ["K", "Q", "V", "attention", "d_attention", "total_log"]
    assert g.backward.scalars == ("scale",)
    assert g.grads == {"Q": "d_Q", "K": "d_K", "V": "d_V"}


def test_the_gradient_of_attentions_scale_takes_one_number_a_row_more():
    g = derived("attention")
    assert g.forward_outputs == ("attention", "total_log", "total_mean")
    assert str(g.backward["d_scale"]).count("- cast(total_mean[b, h, m], fp32)") == 1


def test_attention_backward_is_that_of_flash_attention():
    text = lines(derived("attention", scalars=False).backward)
    assert "d_total[b, h, m] = -rsum(d_attention[b, h, m, n] * attention[b, h, m, n], n);" in text
    assert "d_e[b, h, m, l] = rdot(d_attention[b, h, m, n], V[b, h, l, n], n) + d_total[b, h, m];" in text
    assert "d_scores[b, h, m, l] = d_e[b, h, m, l] * e[b, h, m, l];" in text
    assert "d_Q[b, h, m, d] = rdot(d_scores[b, h, m, l] * scale, K[b, h, l, d], l);" in text
    assert "d_K[b, h, l, d] = rdot(d_scores[b, h, m, l] * scale, Q[b, h, m, d], m);" in text
    assert "d_V[b, h, l, n] = rdot(d_attention[b, h, m, n], e[b, h, m, l], m);" in text
    assert not any("rmax" in line for line in text)


def test_a_sink_is_shifted_with_the_sum_it_is_added_to_and_back():
    a, outs = op("attention", sinks=True)
    text = lines(prepare_algorithm(a, outs))
    assert "rest[b, h, m] = exp(sink[h] - where(total_shift[b, h, m] > -inf, total_shift[b, h, m], 0));" in text
    assert "total[b, h, m] = rsum(e[b, h, m, l], l) + rest[b, h, m];" in text
    g = derived("attention", scalars=False, sinks=True)
    assert g.forward_outputs == ("attention", "total_log") and "attention" in g.backward.inputs
    text = lines(g.backward)
    assert "d_total[b, h, m] = -rsum(d_attention[b, h, m, n] * attention[b, h, m, n], n);" in text
    assert "d_sink[h] = rsum(d_total[b, h, m] * rest[b, h, m], b, m);" in text


def test_what_no_parameter_asks_for_leaves_no_trace():
    a, _ = op("attention")
    assert [d.name for d in a.definitions if any(d.name in str(e.expr) for e in a.definitions)] == ["scores", "e", "total"]
    assert a.inputs == ("Q", "K", "V") and a.scalars == ("scale",)


def test_grouped_heads_are_summed():
    text = "\n".join(lines(derived("attention", group=4).backward))
    assert "d_V[b, K_1, l, n] = rdot(d_attention[b, 4 * K_1 + h_in, m, n], e[b, 4 * K_1 + h_in, m, l], m, h_in);" in text


def test_softmax_backward_reads_only_its_output():
    g = derived("softmax")
    assert g.forward_outputs == ("softmax",) and sorted(g.backward.inputs) == ["d_softmax", "softmax"]
    assert lines(g.backward) == [
        "d_total[x] = -rsum(d_softmax[x, y] * softmax[x, y], y);",
        "d_A[x, y] = (d_softmax[x, y] + d_total[x]) * softmax[x, y];",
    ]


def test_sigmoid_of_a_product_reads_its_output():
    assert "mmsigmoid" in derived("mmsigmoid").backward.inputs and "rdot(A" not in str(derived("mmsigmoid").backward)


def test_sums_to_one_number_go_by_columns_first():
    assert any(re.match(r"d_alpha\[\] = cast\(rsum\(rsum\(.*, x\), y\), fp32\);", line) for line in lines(derived("dyt").backward))


def test_what_does_not_enter_differentiably_has_no_gradient():
    a = read("y[x] = floor(A[x]) + where(B[x] > 0, C[x], 0);")
    assert set(gradient(a, ("y",), ("A", "B", "C")).grads) == {"C"}


def test_a_row_whose_sum_is_zero_keeps_the_gradient_of_its_branch():
    a = read("t[x] = rsum(exp(A[x, y]), y);  f[x, y] = where(t[x] == 0, B[x], exp(A[x, y]) * where(t[x] == 0, 0, 1 / t[x]));")
    text = str(gradient(differentiable_form(a, ("f",)), ("f",), ("A", "B")).backward)
    assert "d_B[x] = where(cast(t_log[x], fp32) == -inf, rsum(d_f[x, y], y), 0);" in text


# -- stability ----------------------------------------------------------------------------------------------------------

SHIFT = "where({0} > -inf, {0}, 0)"


def shifted(text: str) -> list[str]:
    a = read(text)
    return lines(subtract_maxima(a, outputs(a)))


def test_the_spec_of_attention_has_neither_a_maximum_nor_a_running_sum():
    text = (SPECS / "attention.yaml").read_text()
    assert "max" not in text and "running" not in text


def test_published_softmax_and_attention_get_a_maximum():
    before = parse("""Func _sum, _softmax; In A; Var x; RVar y;
        _sum[x] = rsum(exp(A[x, y]), y);  _softmax[x, y] = exp(A[x, y]) / reshape(_sum[x], x, 1);""").algorithm
    mu = SHIFT.format("_sum_shift[x]")
    assert lines(prepare_algorithm(before, ("_softmax",))) == [
        "_sum_shift[x] = rmax(A[x, y], y);",
        f"_sum[x] = rsum(exp(A[x, y] - {mu}), y);",
        f"_softmax[x, y] = exp(A[x, y] - {mu}) / _sum[x];",
    ]
    before = parse("""Func mm, e, dvsr, sm, attention; In A, B, C; Var m, n; RVar k, l;
        mm[m, l] = rdot(A[m, k], B[k, l], k) / sqrt(len(l));  e[m, l] = exp(mm[m, l]);  dvsr[m] = rsum(e[m, l], l);
        sm[m, l] = e[m, l] / reshape(dvsr[m], m, 1);  attention[m, n] = rdot(sm[m, l], C[l, n], l);""").algorithm
    assert lines(prepare_algorithm(before, ("attention",))) == [
        "mm[m, l] = rdot(A[m, k], B[k, l], k) / sqrt(len(l));",
        "dvsr_shift[m] = rmax(mm[m, l], l);",
        f"e[m, l] = exp(mm[m, l] - {SHIFT.format('dvsr_shift[m]')});",
        "dvsr[m] = rsum(e[m, l], l);",
        "attention[m, n] = where(len(l) == 0, 0, rdot(e[m, l], C[l, n], l) / dvsr[m]);",
    ]


def test_logarithms_get_the_shift_back():
    mu = SHIFT.format("s_shift[x]")
    assert shifted("s[x] = rsum(exp(A[x, y]), y);  f[x, y] = A[x, y] - log(s[x]);")[2] == f"f[x, y] = A[x, y] - (log(s[x]) + {mu});"
    mu = SHIFT.format("f_shift[x]")
    assert shifted("f[x] = log(rsum(exp(A[x, y]), y));")[1] == f"f[x] = log(rsum(exp(A[x, y] - {mu}), y)) + {mu};"
    text = shifted("s[x] = rsum(exp(A[x, y]), y);  f[z] = log(s[z + 1]);")
    assert text[2] == f"f[z] = log(s[z + 1]) + {SHIFT.format('s_shift[z + 1]')};"


def test_each_softmax_of_a_program_gets_its_own_maximum():
    text = shifted("s[x] = rsum(exp(A[x, y]), y);  t[x] = rsum(exp(B[x, y]), y);  f[x, y] = exp(A[x, y]) / s[x] - exp(B[x, y]) / t[x];")
    assert "s_shift[x] = rmax(A[x, y], y);" in text and "t_shift[x] = rmax(B[x, y], y);" in text
    assert text[4] == f"f[x, y] = exp(A[x, y] - {SHIFT.format('s_shift[x]')}) / s[x] - exp(B[x, y] - {SHIFT.format('t_shift[x]')}) / t[x];"


def test_rows_and_columns_of_one_matrix():
    text = shifted("s[x] = rsum(exp(A[x, y]), y);  t[y] = rsum(exp(A[x, y]), x);  f[x, y] = 2 * A[x, y] - log(s[x]) - log(t[y]);")
    assert "s_shift[x] = rmax(A[x, y], y);" in text and "t_shift[y] = rmax(A[x, y], x);" in text
    text = shifted("s[x] = rsum(exp(A[x, y]), y);  t[y] = rsum(exp(A[x, y]), x);  f[x, y] = exp(A[x, y]) / s[x] + exp(A[x, y]) / t[y];")
    rows, columns = SHIFT.format("s_shift[x]"), SHIFT.format("t_shift[y]")
    assert text[4] == f"f[x, y] = exp(A[x, y] - {rows}) / s[x] + exp(A[x, y] - {columns}) / t[y];"


UNCHANGED = {
    "exp alone": "f[x] = exp(A[x]);",
    "the sum is a result": "f[x] = rsum(exp(A[x, y]), y);",
    "the sum enters a result": "s[x] = rsum(exp(A[x, y]), y);  f[x, y] = exp(A[x, y]) / (1 + s[x]);",
    "one exp too many": "s[x] = rsum(exp(A[x, y]), y);  f[x, y] = exp(A[x, y]) * exp(A[x, y]) / s[x];",
    "sum over rows of sums": "s[x] = rsum(exp(A[x, y]), y);  t[z] = rsum(s[x] * B[z], x);  f[x, y, z] = exp(A[x, y]) / t[z] * B[z];",
    "another row's sum": "s[x] = rsum(exp(A[x, y]), y);  f[x, y] = exp(A[x, y]) / s[x + 1];",
    "the sum of the other label": "s[x] = rsum(exp(A[x, y]), y);  f[x, y] = exp(A[x, y]) / s[y];",
    "the largest sum": "s[x] = rsum(exp(A[x, y]), y);  f[x, z] = s[x] / rmax(s[x], x) * B[z];",
    "held against a number": "s[x] = rsum(exp(A[x, y]), y);  f[x, y] = where(s[x] > 1, exp(A[x, y]) / s[x], 0);",
    "inside another function": "s[x] = rsum(exp(A[x, y]), y);  f[x, y] = tanh(s[x]) * A[x, y];",
}


@pytest.mark.parametrize("text", UNCHANGED.values(), ids=UNCHANGED)
def test_no_shift_where_a_result_would_change(text):
    a = read(text)
    assert subtract_maxima(a, outputs(a)) == a


# -- degree -------------------------------------------------------------------------------------------------------------

#: with mu and p[x] = p + mu[x], s[x] = v * exp(mu[x]), free A
DEGREES = {
    "A[x]": FREE, "s[x]": (1, 0), "p[x]": (0, 1), "-p[x]": (0, -1), "-s[x]": (1, 0),
    "exp(p[x])": (1, 0), "exp(-p[x])": (-1, 0), "exp(2 * p[x])": (2, 0), "exp(p[x] / 2)": (Fraction(1, 2), 0), "log(s[x])": (0, 1),
    "exp(s[x])": None, "log(p[x])": None, "exp2(p[x])": None, "tanh(s[x])": None, "tanh(A[x])": FREE,
    "s[x] * s[x]": (2, 0), "s[x] / s[x]": FREE, "A[x] / s[x]": (-1, 0), "A[x] * s[x]": (1, 0), "s[x] * p[x]": None,
    "s[x] + s[x]": (1, 0), "s[x] + A[x]": None, "s[x] + p[x]": None, "p[x] - p[x]": FREE, "p[x] + A[x]": (0, 1), "p[x] + p[x]": (0, 2),
    "p[x] * A[x]": None, "3 * p[x]": (0, 3), "p[x] * 0": None, "1 / p[x]": None, "2 / s[x]": (-1, 0),
    "maximum(s[x], 0)": (1, 0), "maximum(s[x], 1)": None, "maximum(p[x], -inf)": (0, 1), "minimum(p[x], A[x])": None,
    "sqrt(s[x])": (Fraction(1, 2), 0), "rsqrt(s[x] * s[x])": (-1, 0), "abs(s[x])": (1, 0), "abs(p[x])": None,
    "where(A[x] > 0, s[x], 0)": (1, 0), "where(A[x] > 0, p[x], -inf)": (0, 1), "where(A[x] > 0, s[x], 1)": None,
    "where(s[x] > 1, A[x], 0)": None,
    "where(s[x] == 0, A[x], 0)": FREE, "where(p[x] > -inf, p[x], 0)": (0, 1), "where(s[x] < s[x], A[x], 0)": FREE,
    "where(p[x] > 0, p[x], 0)": None,
    "cast(s[x], fp32)": (1, 0), "cast(s[x], bf16)": None,
    "rsum(s[x] * B[x, y], y)": (1, 0), "rsum(p[x] * B[x, y], y)": None, "rsum(s[x], x)": None,
    "rdot(s[x], B[x, y], y)": (1, 0), "rdot(s[y], B[x, y], y)": None,
    "rmax(p[x] + B[x, y], y)": (0, 1), "rmax(p[x], x)": None, "rmin(s[y], y)": None,
    "s[x] / s[y]": None, "s[x + 1] / s[x + 1]": FREE, "p[x + 1] - p[x]": None, "s[x] + s[y]": None, "s[x + 1]": (1, 0),
}  # fmt: skip


@pytest.mark.parametrize("text", DEGREES)
def test_degree(text):
    head = "Func s, p, f; In A, B; Var x, y; s[x] = A[x]; p[x] = A[x];"
    expr = parse(f"{head} f[x, y] = {text} + A[x] * s[x] * p[x] * B[x, y];").algorithm["f"].expr
    found = degree(expr.left, {"s": Degree(times=Fraction(1)), "p": Degree(plus=Fraction(1))})
    want = DEGREES[text]
    assert found == want if want is None else (found.times, found.plus) == ((0, 0) if want is FREE else want)


# -- pull-out, means, invariants, moments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before,after",
    [
        ("f[m] = rsum(2 * A[m, l], l);", "f[m] = rsum(A[m, l], l) * 2;"),
        ("f[m] = rsum(A[m, l] / d[m] * v[l], l);", "f[m] = where(len(l) == 0, 0, rsum(A[m, l] * v[l], l) / d[m]);"),
        ("f[m, n] = rdot(d[m] * A[m, l], V[l, n] * w[n], l);", "f[m, n] = rdot(A[m, l], V[l, n], l) * d[m] * w[n];"),
        ("f[m] = rsum(d[m] / A[m, l], l);", "f[m] = rsum(d[m] / A[m, l], l);"),
        ("f[m] = rsum(A[m, l] + d[m], l);", "f[m] = rsum(A[m, l] + d[m], l);"),
        ("f[m] = rmax(A[m, l] * d[m], l);", "f[m] = rmax(A[m, l] * d[m], l);"),
        ("s[m, l] = A[m, l] / d[m];  f[m] = rsum(s[m, l] * v[l], l);", "f[m] = where(len(l) == 0, 0, rsum(A[m, l] * v[l], l) / d[m]);"),
        ("f[m] = where(d[m] == 0, 0, rsum(A[m, l] / d[m], l));", "f[m] = where(d[m] == 0, 0, rsum(A[m, l], l) / d[m]);"),
        ("f[m] = rsum(A[m, l] / 3, l);", "f[m] = rsum(A[m, l], l) / 3;"),
        ("s[m, l] = A[m, l] / rsum(A[m, k], k);  f[k] = rdot(s[k, l], v[l], l);", None),
    ],
)
def test_hoist_invariant_factors(before, after):
    a = read(before)
    assert lines(hoist_invariant_factors(a, outputs(a))) == ([after] if after else lines(a))


def test_hoisting_looks_only_through_funcs_it_may():
    a = read("s[m, l] = A[m, l] / d[m];  f[m, n] = rdot(s[m, l], V[l, n], l);")
    assert lines(hoist_invariant_factors(a, outputs(a), inline=frozenset())) == lines(a)


def test_mean_over_two_labels():
    assert lines(mean_to_sum(read("f[x] = rmean(A[x, y, z], y, z);"))) == ["f[x] = rsum(A[x, y, z], y, z) / len(y) / len(z);"]


def test_a_reduction_over_an_absent_label():
    a = read("f[x] = rsum(A[x, y], y, z) + rmin(A[x, y], y, z);")
    assert lines(fold_invariant_reductions(a)) == ["f[x] = rsum(A[x, y], y) * len(z) + where(len(z) > 0, rmin(A[x, y], y), inf);"]


@pytest.mark.parametrize(
    "before,after",
    [
        (
            "f[x] = rmean(A[x, c] * A[x, c], c) - rmean(A[x, c], c) * rmean(A[x, c], c);",
            "f[x] = rsum((A[x, c] - MEAN) * (A[x, c] - MEAN), c) / len(c);",
        ),
        (
            "m[x] = rmean(A[x, c], c);  q[x] = rmean(A[x, c] * A[x, c], c);  f[x] = q[x] - m[x] * m[x];",
            "f[x] = rsum((A[x, c] - m[x]) * (A[x, c] - m[x]), c) / len(c);",
        ),
        (
            "f[x] = (rdot(A[x, c], A[x, c], c) - rsum(A[x, c], c) * rsum(A[x, c], c) / len(c)) / (len(c) - 1);",
            "f[x] = rdot(A[x, c] - MEAN, A[x, c] - MEAN, c) / (len(c) - 1);",
        ),
        (
            "m[x] = rmean(A[x, c], c);  f[x, y] = rdot(A[x, c], A[y, c], c) / len(c) - m[x] * m[y];",
            "f[x, y] = rdot(A[x, c] - m[x], A[y, c] - m[y], c) / len(c);",
        ),
        (
            "m[x] = rmean(A[x, c], c);  n[x] = rmean(B[x, c], c);  f[x] = rmean(A[x, c] * B[x, c], c) - n[x] * m[x];",
            "f[x] = rsum((A[x, c] - m[x]) * (B[x, c] - n[x]), c) / len(c);",
        ),
        (
            "m[x] = rmean(A[x, c], c);  f[x] = rsqrt(rmean(A[x, c] * A[x, c], c) + 0.5 - m[x] * m[x]);",
            "f[x] = rsqrt(rsum((A[x, c] - m[x]) * (A[x, c] - m[x]), c) / len(c) + 0.5);",
        ),
        (
            "m[x] = rmean(A[x, c], c);  f[x] = B[x, 0] - (m[x] * m[x] - rmean(A[x, c] * A[x, c], c));",
            "f[x] = B[x, 0] - -(rsum((A[x, c] - m[x]) * (A[x, c] - m[x]), c) / len(c));",
        ),
        ("m[x] = rmean(A[x, c], c);  f[x] = rmean(A[x, c] * A[x, c], c) + 0.5 + m[x] * m[x];", None),
        ("m[x] = rmean(A[x, c], c);  n[x] = rmean(B[x, c], c);  f[x] = rmean(A[x, c] * A[x, c], c) - n[x] * m[x];", None),
        ("f[x] = rsum(A[x, c] * A[x, c], c) - rsum(A[x, c], c) * rsum(A[x, c], c);", None),
        ("f[x] = rmean(A[x, c] * A[x, c], c) + rmean(A[x, c], c) * rmean(A[x, c], c);", None),
    ],
)  # fmt: skip
def test_moments(before, after):
    a = mean_to_sum(read(before))
    text = lines(center_moments(a, outputs(a)))
    assert text[-1] == (after.replace("MEAN", "rsum(A[x, c], c) / len(c)") if after else lines(a)[-1])
    assert not any(line.startswith("q[") for line in text)


def test_simplify():
    expr = read("f[x] = 0 + 1 * A[x] / 1 - 0 * B[x] + where(1 == 1, A[x], B[x]) + rsum(0 * C[x, y], y) - -A[x];").definitions[0].expr
    assert str(simplify(expr)) == "A[x] + A[x] + A[x]"


def test_unknown_parameters_are_refused():
    with pytest.raises(DTError, match="unknown parameter: found 'window'; allowed: causal, starts, ends, masked, capped, biased, sinks, group"):
        op("attention", window=4)


def test_an_operand_of_two_products_is_a_func_of_its_own():
    text = lines(derived("mmsigmoid").backward)
    assert text[0].startswith("operand[x, y] = ") and text[1:] == [
        "d_A[x, k] = rdot(operand[x, y], B[k, y], y);",
        "d_B[k, y] = rdot(operand[x, y], A[x, k], x);",
    ]
    assert not any("operand" in line for op in ("attention", "two_mm") for line in lines(derived(op).backward))


# -- sums of products and dimensions of one element ------------------------------------------------------------------------


def after_rules(text: str, *wanted: str) -> list[str]:
    return [str(d) for d in prepare_algorithm(parse(text).algorithm, wanted).definitions]


def test_a_pooled_product_multiplies_by_pooled_weights():
    text = "Func y, f; In X, W; Var b, p; RVar r, k; y[b, p, r] = rdot(X[b, k], W[p, r, k], k) / 2; f[b, p] = exp(rmean(y[b, p, r], r));"
    assert after_rules(text, "f") == ["f_operand[p, k] = rsum(W[p, r, k], r);", "f[b, p] = exp(rdot(X[b, k], f_operand[p, k], k) / 2 / len(r));"]


def test_the_mean_of_an_image_after_a_convolution_sums_the_image():
    text = """Func y, f; In A, W; Var b, o, v, u; RVar c, r, s; Extent v = A[2] - W[2] + 1; Extent u = A[3] - W[3] + 1;
        y[b, o, v, u] = rdot(A[b, c, v + r, u + s], W[o, c, r, s], c, r, s); f[b, o] = rmean(y[b, o, v, u], v, u);"""
    made = after_rules(text, "f")
    assert made[0] == "f_operand[b, c, r, s] = rsum(A[b, c, v + r, u + s], v, u);"
    assert made[1] == "f[b, o] = rdot(f_operand[b, c, r, s], W[o, c, r, s], c, r, s) / len(v) / len(u);"


@pytest.mark.parametrize(
    "uses",
    [
        "f[b] = rsum(y[b, o] * y[b, o], o);",
        "f[b] = rsum(y[b, o], o) + rmax(y[b, o], o);",
        "f[b] = rsum(exp(y[b, o]), o);",
        "f[b] = rsum(y[b, o] * v[b, o], o);",
    ],
)
def test_a_product_that_something_else_needs_is_made(uses):
    text = f"Func y, f; In X, W{', v' * ('v[' in uses)}; Var b; RVar o, k; y[b, o] = rdot(X[b, k], W[o, k], k); {uses}"
    assert "y[b, o] = rdot(X[b, k], W[o, k], k);" in after_rules(text, "f")


def test_an_output_product_is_made():
    text = "Func y, f; In X, W; Var b, o; RVar k; y[b, o] = rdot(X[b, k], W[o, k], k); f[b] = rsum(y[b, o], o); f.compile(); y.compile();"
    assert "f[b] = rsum(y[b, o], o);" in after_rules(text, "f", "y")


def test_a_label_that_both_operands_have_is_summed_with_the_product():
    text = "Func y, f; In X, W; Var b; RVar o, k; y[b, o] = rdot(X[b, o, k], W[o, k], k); f[b] = rsum(y[b, o], o);"
    assert "y[b, o] = rdot(X[b, o, k], W[o, k], k);" in after_rules(text, "f")


def test_one_element_of_an_input_is_checked_and_stays():
    text = "Func f; In A; Var x; RVar u; Extent u = 1; f[x] = rsum(A[x, u], u);"
    assert after_rules(text, "f") == ["f[x] = rsum(A[x, u], u);"]


def test_a_shifted_dimension_of_one_element_stays():
    """What lies outside reads 0."""
    text = "Func m, f; In A; Var x, u; RVar y; Extent u = 1; m[x, u] = rmax(A[x, y], y); f[x, u] = m[x, u - 1];"
    assert after_rules(text, "f")[-1] == "f[x, u] = m[x, u - 1];"


def test_numbers_are_summed_along_the_rows_that_the_backward_sums_anyway():
    text = lines(derived("polynorm", scalars=False).backward)
    assert "d_w_rows[x] = rsum(d_polynorm[x, y] * A[x, y], y);" in text
    assert "d_one[x] = d_w_rows[x] * w[2];" in text
    assert not any(line.startswith("d_w") and ", x);" in line and "A[x, y]" in line for line in text)
