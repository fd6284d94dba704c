"""The algebra pipeline: the rules in the order they are applied, and the placement of the Funcs they derive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from ..lang import expr as ex
from ..lang.algorithm import Algorithm, Definition
from ..lang.schedule import Fused, Primitive, Program, Schedule, host
from .rules.canonicalize import hoist_reductions, mean_to_sum, name_reductions, reduce_invariants, sums_to_products
from .rules.center_moments import center_moments
from .rules.constant_folding import bind_parameters, drop_unused, fold_constants, keep_extents
from .rules.factor_hoisting import hoist_factors
from .rules.label_unification import unify_labels
from .rules.max_subtraction import masked_exponents, subtract_maxima
from .rules.shift_degree import Degree, degree
from .rules.sum_exp_addends import name_addends
from .rules.tanh_to_sigmoid import tanh_to_sigmoid


def stages(
    algorithm: Algorithm, outputs: tuple[str, ...], params: dict[str, int | bool] | None = None, inline: frozenset[str] | None = None
) -> Iterator[tuple[str, Algorithm]]:
    """Yield (name of the rule, algorithm after it), rule by rule. ``inline`` limits which Funcs are looked through."""
    algorithm = written = bind_parameters(algorithm, params)
    yield "bind_parameters", algorithm
    if inline is None:  # no schedule names the labels
        algorithm = unify_labels(algorithm)
        yield "share_labels", algorithm
    algorithm = mean_to_sum(algorithm)
    yield "mean_to_sum", algorithm
    algorithm = tanh_to_sigmoid(algorithm)
    yield "tanh_to_sigmoid", algorithm
    algorithm = center_moments(algorithm, outputs, inline)
    yield "center_moments", algorithm
    algorithm = hoist_factors(algorithm, outputs, inline)
    yield "pull_out", algorithm
    algorithm = reduce_invariants(algorithm)
    yield "reduce_invariants", algorithm
    if inline is None:
        algorithm = sums_to_products(algorithm)
        yield "sums_to_products", algorithm
    algorithm = hoist_reductions(algorithm)
    yield "hoist_reductions", algorithm
    if inline is None:
        algorithm = unify_labels(algorithm)
        yield "share_labels", algorithm
        algorithm = hoist_reductions(algorithm)
        yield "hoist_reductions", algorithm
    algorithm = name_addends(algorithm)
    yield "name_addends", algorithm
    algorithm = masked_exponents(algorithm, outputs)
    yield "masked_exponents", algorithm
    algorithm = hoist_reductions(subtract_maxima(algorithm, outputs))  # a shift's argument may hold reductions of its own
    yield "stabilize", algorithm
    needed = algorithm.needed_by(outputs)
    algorithm = algorithm.with_definitions(tuple(d for d in algorithm.definitions if d.name in needed))
    yield "fold_constants", keep_extents(drop_unused(fold_constants(algorithm)), written)


def prepare_algorithm(
    algorithm: Algorithm, outputs: tuple[str, ...], params: dict[str, int | bool] | None = None, inline: frozenset[str] | None = None
) -> Algorithm:
    """Return the algorithm as it is lowered: the last of ``stages``."""
    return [after for _, after in stages(algorithm, outputs, params, inline)][-1]


def differentiable_form(algorithm: Algorithm, outputs: tuple[str, ...]) -> Algorithm:
    """Return the form that is differentiated, with invariant factors outside their sums, so that sums of products equal the outputs again."""
    algorithm = center_moments(tanh_to_sigmoid(mean_to_sum(unify_labels(bind_parameters(algorithm)))), outputs)
    algorithm = unify_labels(hoist_reductions(sums_to_products(reduce_invariants(hoist_factors(algorithm, outputs)))))
    return name_reductions(masked_exponents(name_addends(hoist_reductions(algorithm)), outputs))


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
    kept = []
    for p in schedule.primitives:
        if p.func not in algorithm:
            continue
        if p.name == "fuse_at":
            consumer, label = p.args
            while consumer not in algorithm and consumer in fused:
                consumer, label = fused[consumer]
            p = Primitive(p.func, p.name, (consumer, label), p.pos)
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
        held = _held(d.name, users, fused, after, schedule)
        place = _place(d.name, [held] if held else users, fused, after)
        if place is not None:
            fused[d.name] = place
            new += [Primitive(d.name, "fuse_at", place), *([Primitive(d.name, "store")] if held else [])]
        elif like := next((u.name for u in users if _alike(u, d)), None):
            new += [replace(p, func=d.name) for p in schedule.primitives if p.func == like and p.name in _CUTS]
    return Schedule(tuple(new))


_CUTS = ("block", "tensorize", "map", "num_warps", "num_stages")  #: primitives that tile a kernel, whatever it computes


def _held(func: str, users: list[Definition], fused: Fused, algorithm: Algorithm, schedule: Schedule) -> Definition | None:
    """Return the user whose kernel also writes the inputs of ``func``, if ``func`` has several users with kernels of their own.

    ``func`` is fused there, since no kernel before that one could compute it.
    """
    if len(users) < 2 or any(u.name in fused for u in users):
        return None
    written = schedule.written()
    hosts = {host(f, fused) for f in algorithm.needed_by((func,)) if f in fused and f in written}
    return next((u for u in users if u.name in hosts), None)


def _alike(user: Definition, d: Definition) -> bool:
    """Return whether both reduce over the same labels and have the same labels."""
    over = [{label for n in x.expr.walk() if isinstance(n, (ex.Reduce, ex.Dot)) for label in n.labels} for x in (user, d)]
    return user.labels == d.labels and bool(over[0]) and over[0] == over[1]


def _place(func: str, users: list, fused: Fused, algorithm: Algorithm) -> tuple[str, str] | None:
    placed = [u for u in users if u.name in fused]
    if placed:
        first = next((u for u in placed if _reduces(u.expr)), placed[0])
        return fused[first.name]
    if len(users) > 1:
        loops = [(u.name, r.labels[-1]) for u in users if (r := _around(func, u))]
        again = _reduces(algorithm[func].expr) and all(loop in algorithm[func].labels for _, loop in loops)
        return loops[0] if loops and again else None
    (user,) = users
    inside = _around(func, user)
    if inside and _fits_inside(inside, algorithm[func]):
        return (user.name, inside.labels[-1])
    shared = [label for label in user.labels if label in algorithm[func].labels]
    return (user.name, shared[-1]) if shared else None


def _around(func: str, user: Definition) -> ex.Reduce | ex.Dot | None:
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
