"""Plan sums over the elements that data picks as additions to memory, each term where its index says: the gradients of gathers.

Before, each row of ``d_A`` goes over the terms between the first and the last of its own, with indices in any order over most of them::

    d_A[v, k] = rsum(where(b >= d_A_first[v] and b < d_A_past[v] and t[b] == v, d_f[b, k], 0), b);

After, a kernel over the terms, which adds each to its row by atomic additions, beside one that clears the sum and one that converts it::

    d_A_terms[b, k] = d_f[b, k];        d_A_sum[t[b], k] += d_A_terms[b, k];        d_A[v, k] = d_A_sum[v, k];

Only where the order of additions is free. Data that may hold other numbers than integers are compared with the places that they are as such.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from ..lang import expr as ex
from ..lang.algorithm import with_operands
from ..lang.parts.joined_terms import joined_term_names
from ..lang.parts.picked_terms import WHOLE, PickedTerms, picked_term_names
from ..lang.schedule import NAMED, AccumulateAt
from .accumulated_outputs import accumulated_tiles
from .memory_limit import share_for_memory
from .problem import SchedulingProblem, Way

ADDED = 0.5  #: the part of the usual way's predicted time below which terms are added: the model knows atomic additions less well


def added_terms(shape: SchedulingProblem) -> dict[str, str]:
    """Return the Funcs of terms by the names that they have in a schedule, with the Func that adds each.

    Those whose terms vary as elements of one tensor do, but for the labels that are summed over: products of two tensors' rows, as in the gradients of
    weights of experts, are sums for the matrix units.
    """
    algorithm, found = shape.algorithm, dict[str, str]()
    known = algorithm.indices | algorithm.integer_tensors() | algorithm.integer_scalars()
    picked = picked_term_names(algorithm)
    owners = Counter(terms.owner for name, terms in picked.items() if WHOLE not in name)
    for name, joined in joined_term_names(algorithm).items():
        if owners[joined.owner] == len(joined.sums) and all(_varies_as_one(s) and _has_integers(s, known) for s in joined.sums):
            found[name] = joined.adding
            picked = {n: terms for n, terms in picked.items() if terms.owner != joined.owner}
    for name, terms in picked.items():
        if terms.adding not in found.values() and _varies_as_one(terms) and _has_integers(terms, known):
            found[name] = terms.adding
    return found


def _varies_as_one(terms: PickedTerms) -> bool:
    """Return whether terms vary as elements of one tensor do, but for the labels that are summed over."""
    own = ex.free_labels(terms.value) - {*terms.node.labels}
    return not own or any(own <= ex.free_labels(a) for a in ex.accesses(terms.value))


def _has_integers(terms: PickedTerms, known: frozenset[str]) -> bool:
    return all(_is_integer(data, known) for _, data in terms.places)


def _is_integer(data: ex.Expr, known: frozenset[str]) -> bool:
    """Return whether data are integers: elements of tensors of such, and arithmetic that keeps them whole."""
    match data:
        case ex.Access(name) | ex.Scalar(name):
            return name in known
        case ex.Binary("+" | "-" | "*" | "//" | "%" | "&" | "|" | "^" | "<<" | ">>", a, b):
            return _is_integer(a, known) and _is_integer(b, known)
        case ex.Cast(_, dtype):
            return dtype in ex.INTEGERS and dtype != "bool"
        case ex.Const(value):
            return isinstance(value, int)
    return isinstance(data, (ex.Label, ex.Len))


def problem_of_terms(shape: SchedulingProblem, names: dict[str, str]) -> tuple[SchedulingProblem, SchedulingProblem]:
    """Return the whole problem, with Funcs of the terms, and that of its kernels without the sums over them: these are inputs there, the terms outputs."""
    whole = with_operands(shape.algorithm, names).limited_to(shape.outputs)
    sums = tuple(f for f in dict.fromkeys(names.values()) if f in whole)
    outputs = (*(o for o in shape.outputs if o not in sums), *(name for name in names if name in whole))
    rest = whole.with_definitions(tuple(d for d in whole.definitions if d.name not in sums))
    rest = replace(rest, inputs=(*rest.inputs, *sums)).limited_to(outputs)
    counted = {x: n for x, tensor, n in whole.extents if not tensor}
    shape = replace(shape, sizes=shape.sizes | {x: n for x, n in counted.items() if x not in shape.sizes})
    return replace(shape, algorithm=whole), replace(shape, algorithm=rest, outputs=outputs)


def with_additions(whole: SchedulingProblem, names: dict[str, str], way: Way, named: bool = False) -> Way:
    """Return a way to fuse the kernels without the sums, with the statements that add the terms up inside the innermost loop of the terms' kernel.

    ``named``: of sums with more rows than terms, those that no term is added to are neither cleared nor read.
    """
    fused, tiles = way
    for name, func in names.items():
        own, terms = ({*whole.algorithm[f].labels} for f in (func, name))
        few = named and math.prod(whole.sizes[x] for x in own - terms) > math.prod(whole.sizes[x] for x in terms - own)
        added = AccumulateAt(func, "accumulate_at", (name, whole.algorithm[name].labels[-1], *([NAMED] if few else [])))
        fused, tiles = (*fused, added), accumulated_tiles(whole, added, tiles)
    return fused, tiles


def share_of_additions(whole: SchedulingProblem, names: dict[str, str]) -> float:
    """Return the share of the usual way's time below which terms are added, which takes memory for the sums."""
    kept = sum(4 * whole.elements(f) for f in names.values())
    return min(ADDED, share_for_memory(whole, 0, kept, kept))


__all__ = ["added_terms", "problem_of_terms", "share_of_additions", "with_additions"]
