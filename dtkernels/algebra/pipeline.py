"""The algebra from top to bottom: the rules that rewrite an algorithm before it is lowered or differentiated.

    Algorithm --RULES with DROP_DETACH, then LOWERING_RULES--> Algorithm to lower
    Algorithm --RULES, then GRADIENT_RULES--> Algorithm to differentiate

Every rule is exact in real arithmetic and returns a new algorithm. ``python -m dtkernels show OP --stage algebra`` prints the algorithm
after each rule that changed it. ``place_derived`` gives the Funcs that the rules made a place in a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from ..lang import expr as ex
from ..lang.algorithm import Algorithm, Definition, with_operands
from ..lang.schedule import Bare, FuseAt, Fused, Primitive, Program, Schedule, host
from .rules.canonicalize import (
    conditions_to_numbers,
    drop_detach,
    extract_equal_products,
    extract_nested_reductions,
    extract_reductions_for_gradient,
    fold_invariant_reductions,
    mean_to_sum,
)
from .rules.center_moments import center_moments
from .rules.constant_folding import bind_parameters, drop_unused, fold_constants, keep_extents
from .rules.data_index.compared_terms import pick_compared_terms
from .rules.data_index.data_bounds import bound_picked_sums
from .rules.data_index.grouped_products import group_products
from .rules.data_index.sums_before_picks import sum_before_picks
from .rules.erf_to_erfc import erf_to_erfc
from .rules.exponentials.max_subtraction import move_masks_into_exponentials, subtract_maxima
from .rules.exponentials.row_values import extract_row_values
from .rules.exponentials.shift_degree import Degree, degree
from .rules.exponentials.sum_exp_addends import extract_sum_exp_addends
from .rules.factor_hoisting import hoist_invariant_factors, hoist_row_factors
from .rules.func_cse import share_products
from .rules.indices.digit_products import separate_digits
from .rules.indices.divided_indices import divide_indices
from .rules.indices.inverted_windows import invert_windows
from .rules.indices.phases import separate_phases
from .rules.indices.remainder_sums import sum_over_steps
from .rules.indices.remainders import pick_remainders
from .rules.indices.results_by_phase import compute_results_by_phase
from .rules.indices.shared_groups import share_groups
from .rules.indices.slice_values import name_slices
from .rules.indices.strided_sums import sum_over_elements
from .rules.label_unification import unify_labels
from .rules.products.distributed_sums import distribute_differences
from .rules.products.operand_cse import merge_equal_operands
from .rules.products.product_columns import sum_product_operands
from .rules.products.product_elements import make_picked_elements, sum_rows_first
from .rules.products.scaled_products import scale_operands
from .rules.products.sliced_products import multiply_slices_at_once
from .rules.products.sums_as_products import nest_contractions, sums_to_float32_products, sums_to_matrix_products
from .rules.scans import extract_scans
from .rules.separate_sums import separate_reductions
from .rules.tanh_of_log1p import tanh_of_log1p
from .rules.tanh_to_sigmoid import tanh_to_sigmoid
from .rules.unit_labels import drop_unit_labels
from .top_k import expand_top_k


@dataclass(frozen=True)
class Context:
    """What rules depend on besides the algorithm that they rewrite."""

    bound: Algorithm  #: the algorithm with its parameters bound, before any other rule
    outputs: tuple[str, ...]
    inline: frozenset[str] | None = None  #: Funcs that a written schedule lets rules look through; None: no schedule is written, all of them


class Rule(NamedTuple):
    name: str
    apply: Callable[[Algorithm, Context], Algorithm]
    summary: str
    unscheduled_only: bool = False  #: left out where a schedule is written: it names labels and reductions as they are


#: after the first of RULES, where the algorithm is lowered: a derivative needs what this drops
DROP_DETACH = Rule("drop_detach", lambda a, c: drop_detach(a), "replace detach(a) by a")

#: Algorithm -> Algorithm, before lowering and before differentiation
RULES = (
    Rule("bind_parameters", lambda a, c: c.bound, "replace parameters by their values and drop branches never taken"),
    Rule("expand_top_k", lambda a, c: expand_top_k(a), "rewrite the largest elements as one maximum after another"),
    Rule("extract_scans", lambda a, c: extract_scans(a), "give each scan its own Func"),
    Rule("unify_labels", lambda a, c: unify_labels(a), "give labels that index one dimension one name", unscheduled_only=True),
    Rule("drop_unit_labels", lambda a, c: drop_unit_labels(a, c.outputs), "drop dimensions of one element and reductions over them", unscheduled_only=True),
    Rule("mean_to_sum", lambda a, c: mean_to_sum(a), "rewrite means as sums divided by an extent"),
    Rule("conditions_to_numbers", lambda a, c: conditions_to_numbers(a), "rewrite reductions of conditions as those of ones and zeros"),
    Rule("tanh_to_sigmoid", lambda a, c: tanh_to_sigmoid(a), "rewrite 1 + tanh(a) as 2 * sigmoid(2 * a)"),
    Rule("erf_to_erfc", lambda a, c: erf_to_erfc(a), "rewrite 1 + erf(a) as erfc(-a)"),
    Rule("pick_remainders", lambda a, c: pick_remainders(a), "replace labels that a condition on a remainder decides by their values", unscheduled_only=True),
    Rule("sum_over_steps", lambda a, c: sum_over_steps(a), "sum over the places of one remainder, not over all under a condition", unscheduled_only=True),
    Rule("divide_indices", lambda a, c: divide_indices(a), "divide indices by numbers of which they are multiples, plus something smaller", unscheduled_only=True),
    Rule("center_moments", lambda a, c: center_moments(a, c.outputs, c.inline), "compute variances and covariances from deviations"),
    Rule("hoist_invariant_factors", lambda a, c: hoist_invariant_factors(a, c.outputs, c.inline), "hoist factors out of sums they do not depend on"),
    Rule("share_groups", lambda a, c: share_groups(a, c.outputs), "reduce once for a group what depends on an index by its group alone", unscheduled_only=True),
    Rule("sum_product_operands", lambda a, c: sum_product_operands(a, c.outputs), "sum an operand where only sums of a product are read", unscheduled_only=True),
    Rule("fold_invariant_reductions", lambda a, c: fold_invariant_reductions(a), "evaluate reductions over a label that their terms lack"),
    Rule("sums_to_matrix_products", lambda a, c: sums_to_matrix_products(a), "rewrite sums of products of two inputs as rdot", unscheduled_only=True),
    Rule("extract_nested_reductions", lambda a, c: extract_nested_reductions(a), "give a reduction inside another its own Func"),
    Rule("unify_labels", lambda a, c: unify_labels(a), "give labels that index one dimension one name", unscheduled_only=True),
    Rule("extract_nested_reductions", lambda a, c: extract_nested_reductions(a, invariant=True), "give a reduction inside another, or without a label of its Func, its own", unscheduled_only=True),
    Rule("extract_sum_exp_addends", lambda a, c: extract_sum_exp_addends(a), "give what is added to a sum of exponentials its own Func"),
    Rule("move_masks_into_exponentials", lambda a, c: move_masks_into_exponentials(a, c.outputs), "rewrite a masked exp as exp of -inf where masked"),
)

#: the rules that follow where the algorithm is lowered
LOWERING_RULES = (
    Rule("pick_compared_terms", lambda a, c: pick_compared_terms(a), "replace a sum over places that data names by the term of that place", unscheduled_only=True),
    Rule("sum_before_picks", lambda a, c: sum_before_picks(a), "sum what a condition on data does not tell apart before what it picks", unscheduled_only=True),
    Rule("hoist_row_factors", lambda a, c: hoist_row_factors(a, c.outputs), "hoist factors made of sums of rows out of sums of these rows", unscheduled_only=True),
    Rule("group_products", lambda a, c: group_products(a), "rewrite products with slices that data picks as sums over the slices", unscheduled_only=True),
    Rule("bound_picked_sums", lambda a, c: bound_picked_sums(a), "bound sums over the elements that data picks by the first and the last of them", unscheduled_only=True),
    Rule("extract_row_values", lambda a, c: extract_row_values(a), "name values of rows that another sum adds up", unscheduled_only=True),
    Rule("subtract_maxima", lambda a, c: subtract_maxima(a, c.outputs), "subtract the maximum from arguments of exp where it cancels"),
    Rule("nest_contractions", lambda a, c: nest_contractions(a), "sum two factors first where several labels are summed over", unscheduled_only=True),
    Rule("distribute_differences", lambda a, c: distribute_differences(a), "sum the sides of a difference of rows by themselves, as matrix products", unscheduled_only=True),
    Rule("sums_to_float32_products", lambda a, c: sums_to_float32_products(a), "rewrite sums of products of computed factors as rdot in float32", unscheduled_only=True),
    Rule("extract_nested_reductions", lambda a, c: extract_nested_reductions(a), "give a reduction inside another its own Func"),
    Rule("extract_equal_products", lambda a, c: extract_equal_products(a), "give a product that a definition has more than once its own Func", unscheduled_only=True),
    Rule("share_products", lambda a, c: share_products(a, c.outputs), "let definitions that contain the same product read it from one Func", unscheduled_only=True),
    Rule("merge_equal_operands", lambda a, c: merge_equal_operands(a), "give a computed operand that several products take its own Func", unscheduled_only=True),
    Rule("scale_operands", lambda a, c: scale_operands(a, c.outputs), "multiply operands by the numbers that added products are multiplied by", unscheduled_only=True),
    Rule("multiply_slices_at_once", lambda a, c: multiply_slices_at_once(a), "make one product where definitions take three or more slices of it", unscheduled_only=True),
    Rule("make_picked_elements", lambda a, c: make_picked_elements(a, c.outputs), "make the elements that are picked of a product by themselves", unscheduled_only=True),
    Rule("sum_rows_first", lambda a, c: sum_rows_first(a, c.outputs), "sum rows of a product before its columns", unscheduled_only=True),
    Rule("invert_windows", lambda a, c: invert_windows(a, c.outputs), "read an element once for all windows that hold it", unscheduled_only=True),
    Rule("sum_over_elements", lambda a, c: sum_over_elements(a), "sum over the elements that a stride reaches, not over all places", unscheduled_only=True),
    Rule("separate_phases", lambda a, c: separate_phases(a), "compute transposed convolutions phase by phase", unscheduled_only=True),
    Rule("separate_digits", lambda a, c: separate_digits(a), "compute products of a label's remainder and quotient with a label for each", unscheduled_only=True),
    Rule("compute_results_by_phase", lambda a, c: compute_results_by_phase(a, c.outputs), "compute what is made of phases by phase, and put it in order last", unscheduled_only=True),
    Rule("name_slices", lambda a, c: name_slices(a), "give what a Func holds in each of its slices its own Func", unscheduled_only=True),
    Rule("separate_reductions", lambda a, c: separate_reductions(a), "give reductions over different labels of one definition Funcs of their own", unscheduled_only=True),
    Rule("tanh_of_log1p", lambda a, c: tanh_of_log1p(a), "rewrite tanh(log1p(exp(a))) as a quotient"),
    Rule("fold_constants", lambda a, c: _fold_constants(a, c), "do arithmetic on constants and remove what no output needs"),
)

#: the rules that follow where the algorithm is differentiated: sums of products equal the outputs again, with factors outside them
GRADIENT_RULES = (
    Rule("multiply_slices_at_once", lambda a, c: multiply_slices_at_once(a), "make one product where definitions take three or more slices of it"),
    Rule("extract_reductions_for_gradient", lambda a, c: extract_reductions_for_gradient(a), "give reductions that derivatives refer to their own Func"),
)


def _fold_constants(algorithm: Algorithm, context: Context) -> Algorithm:
    folded = fold_constants(algorithm.limited_to(context.outputs))
    return keep_extents(drop_unused(folded.limited_to(context.outputs)), context.bound)


def apply_rules(rules: tuple[Rule, ...], algorithm: Algorithm, context: Context) -> Iterator[tuple[Rule, Algorithm]]:
    """Yield each rule with the algorithm after it."""
    for rule in rules:
        if context.inline is None or not rule.unscheduled_only:
            algorithm = rule.apply(algorithm, context)
            yield rule, algorithm


def stages(
    algorithm: Algorithm, outputs: tuple[str, ...], params: dict[str, int | bool] | None = None, inline: frozenset[str] | None = None
) -> Iterator[tuple[Rule, Algorithm]]:
    """Yield each rule with the algorithm after it, up to the algorithm to lower. ``inline`` limits which Funcs are looked through."""
    context = Context(bind_parameters(algorithm, params), outputs, inline)
    return apply_rules((RULES[0], DROP_DETACH, *RULES[1:], *LOWERING_RULES), context.bound, context)


def prepare_algorithm(
    algorithm: Algorithm, outputs: tuple[str, ...], params: dict[str, int | bool] | None = None, inline: frozenset[str] | None = None
) -> Algorithm:
    """Return the algorithm to lower: the last of ``stages``."""
    return [after for _, after in stages(algorithm, outputs, params, inline)][-1]


def evaluated_form(algorithm: Algorithm, outputs: tuple[str, ...]) -> Algorithm:
    """Return the algorithm as torch evaluates it where it differentiates what it evaluates: as it is lowered, but with ``detach``."""
    context = Context(bind_parameters(algorithm), outputs)
    return [after for _, after in apply_rules((*RULES, *LOWERING_RULES), context.bound, context)][-1]


def differentiable_form(algorithm: Algorithm, outputs: tuple[str, ...]) -> Algorithm:
    """Return the algorithm to differentiate."""
    context = Context(bind_parameters(algorithm), outputs)
    rules = (Rule("expand_top_k", lambda a, c: expand_top_k(a, picked=True), r.summary) if r.name == "expand_top_k" else r for r in RULES)
    return [after for _, after in apply_rules((*rules, *GRADIENT_RULES), context.bound, context)][-1]


def prepare(program: Program, params: dict[str, int | bool] | None = None) -> Program:
    """Apply every rule to a program and carry its schedule over to the Funcs that result."""
    schedule, outputs = program.schedule, program.outputs()
    inline = frozenset(schedule.fused()) - frozenset(outputs)
    algorithm = prepare_algorithm(program.algorithm, outputs, params, inline)
    schedule = _without_removed(schedule, algorithm)
    return Program(algorithm, schedule + place_derived(program.algorithm, algorithm, schedule))


def _without_removed(schedule: Schedule, algorithm: Algorithm) -> Schedule:
    """Drop statements on Funcs that the algebra removed; a Func that was fused into one moves to where that one was fused."""
    fused = schedule.fused()
    algorithm = with_operands(algorithm, schedule.subjects())
    kept = []
    for p in schedule.primitives:
        if p.func not in algorithm:
            continue
        if isinstance(p, FuseAt) and p.name == "fuse_at":
            consumer, label = p.consumer, p.label
            while consumer not in algorithm and consumer in fused:
                consumer, label = fused[consumer]
            p = replace(p, args=(consumer, label))
        kept.append(p)
    return Schedule(tuple(kept))


def place_derived(before: Algorithm, after: Algorithm, schedule: Schedule) -> Schedule:
    """Fuse each Func that the algebra made into the loop of the reduction that uses it, where it is needed first.

    A Func that several kernels read is tiled like the reduction that uses it. If it is inside the loop of each, each kernel computes it.
    """
    fused = schedule.fused()
    new: list[Primitive] = []
    for d in reversed(after.definitions):
        if d.name in before.funcs:
            continue
        users = [u for u in after.definitions if any(a.tensor == d.name for a in ex.accesses(u.expr))]
        held = _host_of_inputs(d.name, users, fused, after, schedule)
        place = _fusion_point(d.name, [held] if held else users, fused, after)
        if place is not None:
            fused[d.name] = place
            new += [FuseAt(d.name, "fuse_at", place), *([Bare(d.name, "store")] if held else [])]
        elif like := next((u.name for u in users if _same_iteration_space(u, d)), None):
            new += [replace(p, func=d.name) for p in schedule.primitives if p.func == like and p.name in _TILING_PRIMITIVES]
    return Schedule(tuple(new))


_TILING_PRIMITIVES = ("block", "tensorize", "map", "num_warps", "num_stages")  #: primitives that tile a kernel, whatever it computes


def _host_of_inputs(func: str, users: list[Definition], fused: Fused, algorithm: Algorithm, schedule: Schedule) -> Definition | None:
    """Return the user whose kernel also writes the inputs of ``func``, if ``func`` has several users with kernels of their own.

    ``func`` is fused there, since no kernel before that one could compute it.
    """
    if len(users) < 2 or any(u.name in fused for u in users):
        return None
    written = schedule.written()
    hosts = {host(f, fused) for f in algorithm.needed_by((func,)) if f in fused and f in written}
    return next((u for u in users if u.name in hosts), None)


def _same_iteration_space(user: Definition, d: Definition) -> bool:
    """Return whether both reduce over the same labels and have the same labels."""
    over = [{label for n in x.expr.walk() if isinstance(n, (ex.Reduce, ex.Dot)) for label in n.labels} for x in (user, d)]
    return user.labels == d.labels and bool(over[0]) and over[0] == over[1]


def _fusion_point(func: str, users: list, fused: Fused, algorithm: Algorithm) -> tuple[str, str] | None:
    placed = [u for u in users if u.name in fused]
    if placed:
        first = next((u for u in placed if _reduces(u.expr)), placed[0])
        return fused[first.name]
    if len(users) > 1:
        loops = [(u.name, r.labels[-1]) for u in users if (r := _enclosing_reduction(func, u))]
        again = _reduces(algorithm[func].expr) and all(loop in algorithm[func].labels for _, loop in loops)
        return loops[0] if loops and again else None
    (user,) = users
    inside = _enclosing_reduction(func, user)
    if inside and _fits_inside(inside, algorithm[func]):
        return (user.name, inside.labels[-1])
    shared = [label for label in user.labels if label in algorithm[func].labels]
    return (user.name, shared[-1]) if shared else None


def _enclosing_reduction(func: str, user: Definition) -> ex.Reduce | ex.Dot | None:
    """Return the reduction of ``user`` whose terms contain ``func``."""
    reductions = (r for r in user.expr.walk() if isinstance(r, (ex.Reduce, ex.Dot)))
    return next((r for r in reductions if any(a.tensor == func for a in ex.accesses(r))), None)


def _fits_inside(reduction: ex.Reduce | ex.Dot, d: Definition) -> bool:
    """Return whether ``d`` can be computed in the loop of ``reduction``: it varies there, or the sum can be rescaled when it changes."""
    if reduction.labels[-1] in d.labels:
        return True
    found = degree(reduction, {d.name: Degree(plus=Fraction(1))})
    return found is not None and found.times < 0


def _reduces(expr: ex.Expr) -> bool:
    return any(isinstance(n, (ex.Reduce, ex.Dot)) for n in expr.walk())
