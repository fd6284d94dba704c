"""Derive the gradient of an algorithm, as Funcs.

Reverse accumulation over the Funcs: the adjoint of a Func is the sum of the contributions of its uses. A contribution is summed over the
labels of the use that the accessed element lacks. Where such a sum is over a product of two factors, it becomes a matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ...lang.errors import DTError
from ...lang.extents.formulas import inputs_of
from ...lang.extents.linear_form import linear_form
from ..index_inversion import Inverse, around, digits, places_in_order, solve, unknown
from ..operand_types import CAST, products, typed_as
from ..rules.canonicalize import fresh_name, rename_bound
from ..rules.center_moments import cancel_deviations
from ..rules.condition_folding import fold_condition
from ..rules.data_index.grouped_products import labels_without_data
from ..rules.func_cse import merge_equal_funcs
from ..rules.indices.remainder_sums import over_steps
from ..rules.indices.remainders import without_remainders
from ..rules.products.operand_cse import merge_equal_operands
from ..smart_constructors import (
    ZERO,
    add_with_common_factors,
    factors_of,
    is_zero,
    multiply,
    negate,
    replaced,
    simplify,
    sum_with_product,
    where,
)
from .centered_weights import center_weights, inline_scores, name_scores
from .chained_products import inner_products, with_named_products
from .derivative import Contribution, contributions
from .joined_sums import join_sums
from .rematerialization import Product
from .saved_tensors import choose_saved_tensors, reading_saved
from .scan_adjoint import Parts, scan_adjoint
from .total_sums import sum_rows_first


@dataclass(frozen=True)
class Gradient:
    """Forward, extended to return the tensors that backward needs, and backward.

    ``forward`` computes ``forward_outputs``: the outputs, then the saved extras. ``backward`` takes the inputs and saved
    values it mentions and the adjoint of each output (``adjoints``: output -> input name); it computes ``grads``
    (input or scalar -> Func). ``products``: those of ``forward_outputs`` that are products, see chained_products.py.
    """

    forward: Algorithm
    forward_outputs: tuple[str, ...]
    backward: Algorithm
    adjoints: dict[str, str]
    grads: dict[str, str]
    products: tuple[str, ...] = ()


def gradient(
    algorithm: Algorithm, outputs: tuple[str, ...], wanted: tuple[str, ...], products: tuple[str, ...] = (), exchange: bool = True
) -> Gradient:
    """Derive the backward of ``outputs`` with respect to the inputs and scalars ``wanted``.

    Before: ``y[x] = maximum(A[x], 0);``  After: ``d_A[x] = where(y[x] > 0, d_y[x], 0);`` with ``y`` and ``d_y`` inputs.

    Forward saves those of the Funcs ``products`` that backward would recompute. Inputs that do not enter the outputs differentiably are
    missing from ``grads``. Raises DTError for an expression without a derivative.
    """
    named = with_named_products(algorithm, products)
    if named is not algorithm:  # only what is made again otherwise: a name may hide that an output tells the value
        plain = gradient(algorithm, outputs, wanted, tuple(p for p in products if p in algorithm), exchange)
        again = {n for d in plain.backward.definitions for n in d.expr.walk() if isinstance(n, ex.Dot)}
        products = tuple(p for p in products if p in algorithm or sum_with_product(named[p].expr) in again)
        algorithm = with_named_products(algorithm, products)
    named = name_scores(algorithm, outputs, wanted)
    r, grads, backward = _reversed(named, outputs, wanted)
    centered, means = center_weights(named, outputs, backward, r.adjoints)
    if centered != backward:
        new = set(named.funcs) - set(algorithm.funcs)
        whole = inline_scores(named.with_definitions((*named.definitions, *means)), new)
        means = tuple(whole[m.name] for m in means)
        algorithm, backward = whole.with_definitions(tuple(d for d in whole.definitions if d not in means)), inline_scores(centered, new)
    elif named is not algorithm:
        r, grads, backward = _reversed(algorithm, outputs, wanted)
    saved = choose_saved_tensors(algorithm, outputs, backward, tuple(grads.values()), products, exchange).with_extra(means)
    single = {name for o, name in r.adjoint_inputs.items() if isinstance(e := algorithm[o].expr, ex.Cast) and e.dtype == "fp32"}
    backward = in_float32(saved.backward, single | {e for e in saved.extra if saved.forward.integer_funcs.get(e, "bool") == "bool"})
    if any(not algorithm[o].labels for o in outputs):  # rows are then made by a kernel of their own, and summed by another
        saved = replace(saved, forward=reading_saved(saved.forward, saved.extra))
    returned = outputs + saved.extra + saved.products
    backward = merge_equal_operands(merge_equal_funcs(join_sums(sum_rows_first(backward)), tuple(grads.values())))
    backward = _gradients_in_float32(algorithm, outputs, backward, grads)
    of_scalars = tuple((func, name) for name, func in grads.items() if name in algorithm.scalars)
    backward = replace(backward, stands_for=computed_input_sources(saved.forward, backward, r.adjoint_inputs), scalar_gradients=of_scalars)
    return Gradient(saved.forward, returned, backward, r.adjoint_inputs, grads, saved.products + saved.exact)


def _reversed(algorithm: Algorithm, outputs: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[_Reverse, dict[str, str], Algorithm]:
    """Return the reverse accumulation, the Func of each gradient, and forward and backward Funcs together."""
    r = _Reverse(algorithm, outputs)
    r.run()
    grads = {name: func for name in wanted if (func := r.collect(name)) is not None}
    grads = {name: func for name, func in grads.items() if r.reads(func)}  # a gradient that reads no adjoint is 0
    return r, grads, cancel_deviations(r.algorithm_of(tuple(grads.values())))


def savable_products(algorithm: Algorithm, outputs: tuple[str, ...]) -> tuple[Product, ...]:
    """Return the products that forward may save: those that enter products alone, and others that a backward makes again."""
    found = inner_products(algorithm, outputs)
    if all(p.against for p in found):
        return found
    wanted = tuple(n for n in (*algorithm.inputs, *algorithm.scalars) if n not in algorithm.integer_inputs())
    try:
        again = gradient(algorithm, outputs, wanted, tuple(p.name for p in found), exchange=False).products  # fewer gradients may exchange fewer sums
    except DTError:  # the call that asks for such a gradient says so
        again = ()
    return tuple(p for p in found if p.against or p.name in again)


def _gradients_in_float32(forward: Algorithm, outputs: tuple[str, ...], backward: Algorithm, grads: dict[str, str]) -> Algorithm:
    """Compute gradients of scalars in float32, and return those of inputs in it where results are cast, if the inputs feed no product or backward does not read them.

    The adjoint then has the dtype of the cast, or does not count if that is float32, and the gradient of a float32 bias that is only added
    would be rounded to 16 bits.

    Before: ``d_bias[n] = rsum(d_y[m, n], m);``  After: ``d_bias[n] = cast(rsum(d_y[m, n], m), fp32);``
    """
    cast = {e.dtype for o in outputs if isinstance(e := forward[o].expr, ex.Cast) and e.dtype in ex.DTYPES}
    feeding = {s for _, _, wanted in products(forward) for s in (*wanted.sources, *wanted.otherwise)}
    read = {a.tensor for d in backward.definitions for a in ex.accesses(d.expr)}
    narrow = cast != {"fp32"}
    kept = {func for n, func in grads.items() if n in forward.scalars or cast and (n not in read or narrow and n not in feeding)}

    def change(d: Definition) -> Definition:
        return replace(d, expr=ex.Cast(d.expr, "fp32")) if d.name in kept and not isinstance(d.expr, ex.Cast) else d

    return backward.with_definitions(tuple(map(change, backward.definitions)))


def computed_input_sources(forward: Algorithm, backward: Algorithm, adjoints: dict[str, str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """List the inputs of ``backward`` that are computed values (adjoints and saved tensors), each with the sources of its dtype.

    The gradients of a product are products of the same operand type, whatever the dtype of the results.
    """
    of = {adjoint: func for func, adjoint in adjoints.items()} | {name: name for name in forward.funcs}
    computed = [name for name in backward.inputs if name in of]
    known = frozenset(backward.inputs) - frozenset(computed)
    return tuple((n, tuple(sorted(s for s in typed_as(forward, of[n]) if s in known or s.startswith(CAST)))) for n in computed)


def in_float32(algorithm: Algorithm, names: set[str]) -> Algorithm:
    """Mark inputs that are always float32 with a cast, so that they do not promote results to float32.

    Before: ``d_A[x, y] = d_f[x, y] * s[x];``  After: ``d_A[x, y] = d_f[x, y] * cast(s[x], fp32);``
    """

    def change(node: ex.Expr) -> ex.Expr:
        match node:
            case ex.Access(tensor, _) if tensor in names:
                return ex.Cast(node, "fp32")
            case ex.Cast(ex.Cast(_, "fp32") as inner, "fp32"):
                return inner
        return node

    return algorithm.transform(change)


class _Reverse:
    def __init__(self, algorithm: Algorithm, outputs: tuple[str, ...]):
        self.algorithm, self.outputs = algorithm, outputs
        self.taken = set(algorithm.names)
        self.received: dict[str, list[Contribution]] = {}
        self.adjoint_inputs = {o: fresh_name(f"d_{o}", self.taken) for o in outputs}
        self.adjoints: dict[str, ex.Expr] = {}  #: Func -> its adjoint over its own labels
        self.new: list[Definition] = []
        self.new_labels: list[str] = []
        self.new_extents: list[tuple[str, str, int]] = []
        self.new_formulas: list[tuple[str, ex.Expr]] = []
        self.steps: dict[tuple[str, int, int], str] = {}
        self.shared: dict[object, str] = {}  #: key of a label -> label made for it

    def run(self) -> None:
        """Visit Funcs last to first; each passes its adjoint to the elements that it accesses."""
        for d in reversed(self.algorithm.definitions):
            if d.name not in self.algorithm.needed_by(self.outputs):
                continue
            adjoint = self._adjoint(d)
            if adjoint is None:
                continue
            self.adjoints[d.name] = adjoint
            value = ex.Access(d.name, tuple(ex.Label(label) for label in d.labels))
            parts: Parts = ((d.expr, adjoint),)
            if isinstance(d.expr, ex.Scan):
                made, parts = scan_adjoint(d, d.expr, adjoint, fresh_name(f"d_{d.name}_scan", self.taken))
                self.new.append(made)
            for c in (c for expr, part in parts for c in contributions(expr, part, d.labels, value if expr is d.expr else None)):
                self.received.setdefault(c.tensor, []).append(c)

    def _adjoint(self, d: Definition) -> ex.Expr | None:
        """Return the adjoint of a Func over its own labels: an input, a new Func, or both."""
        own = tuple(ex.Label(label) for label in d.labels)
        total: ex.Expr = ex.Access(self.adjoint_inputs[d.name], own) if d.name in self.adjoint_inputs else ZERO
        for c in self.received.get(d.name, []):
            total = add_with_common_factors(total, self._gathered(c, d.labels))
        if is_zero(total):
            return None
        if isinstance(total, ex.Access):
            return total
        name = fresh_name(f"d_{d.name}", self.taken)
        self.new.append(Definition(name, d.labels, simplify(fold_condition(total)), d.pos))
        return ex.Access(name, own)

    def collect(self, name: str) -> str | None:
        """Return the Func that is the gradient of input or scalar ``name``; None where it does not enter differentiably."""
        found = self.received.get(name, [])
        labels = self._labels_of(name, found)
        total: ex.Expr = ZERO
        for c in found:
            total = add_with_common_factors(total, self._gathered(c, labels))
        if is_zero(total):
            return None
        func = fresh_name(f"d_{name}", self.taken)
        self.new.append(Definition(func, labels, simplify(fold_condition(total))))
        return func

    def _labels_of(self, name: str, found: list[Contribution]) -> tuple[str, ...]:
        """Return a label for each dimension of an input: one that indexes it by itself, or a new one of that extent."""
        rank = len(found[0].index) if found else 0
        labels: list[str] = []
        for dim in range(rank):
            plain = [i.name for c in found if isinstance(i := c.index[dim], ex.Label)]
            label = next((p for p in plain if p not in labels), None)
            if label is None:
                index: object = found[0].index[dim]
                twice = self.shared.get(index) in labels  # two dimensions that one expression indexes
                label = self._label(index if _tells_extent(index) and not twice else (name, dim), f"{name}_{dim}", name, dim)
            labels.append(label)
        return tuple(labels)

    def _gathered(self, c: Contribution, target: tuple[str, ...]) -> ex.Expr:
        """Return ``c`` as an expression over ``target``: index arithmetic inverted, other labels summed."""
        names = {label: f"{label}'" for label in sorted((set(c.labels) | _bound(c.adjoint)) & set(target))}  # out of the target's way
        rename = {label: ex.Label(name) for label, name in names.items()}
        adjoint = ex.substitute(rename_bound(c.adjoint, names), rename)
        over = [names.get(label, label) for label in c.labels]
        solved: dict[str, ex.Expr] = {}
        conditions: list[ex.Expr] = []
        divides: list[tuple[str, ex.Expr]] = []
        at = [(ex.substitute(i, rename, index=True), label, dim) for dim, (label, i) in enumerate(zip(target, c.index))]
        for i, label, dim in sorted(at, key=lambda a: len(ex.free_labels(a[0])) > 1):  # what a sum of labels leaves free is known last
            i = ex.substitute(i, solved, index=True)
            free = [o for o in over if o not in solved]
            found = self._digits(i, ex.Label(label), free, adjoint) or self._solve(i, ex.Label(label), free, (c.tensor, dim), names)
            if not found:
                conditions.append(ex.Binary("==", ex.as_value(i), ex.Label(label)))
            for name, inverse in found:
                value = inverse.value
                over += inverse.new
                divides += [(name, when) for when in inverse.when]
                solved = {k: ex.substitute(v, {name: value}, index=True) for k, v in solved.items()} | {name: value}
                adjoint = self._vanishing(adjoint, name, 1 if inverse.when else 2) if inverse.new or inverse.when else adjoint
                if not isinstance(value, ex.Label) and not _is_remainder(value) and not _vanishes_outside(adjoint, name):
                    place = ex.as_value(value)
                    inside = ex.Binary("<", place, ex.Len(name.rstrip("'")))
                    conditions.append(ex.Binary("and", ex.Binary(">=", place, ZERO), inside))
        for name, condition in divides:
            adjoint = _masked(condition, adjoint, name)
        inner = {label.rstrip("'"): f"{label}'" for label in _bound(adjoint) & set().union(*map(ex.free_labels, solved.values()))}
        adjoint = ex.substitute(rename_bound(adjoint, {twin[:-1]: twin for twin in inner.values()}), solved)
        for condition in conditions:
            adjoint = where(ex.substitute(condition, solved), adjoint, ZERO)
        left = tuple(label for label in over if label not in solved)
        if any(o not in c.labels and o not in names.values() for o in left):  # remainders, which the conditions of a stride may decide
            adjoint, left = without_remainders(adjoint, left, replace(self.algorithm, extents=self.algorithm.extents + tuple(self.new_extents)))
        summed = self._over_steps(adjoint, left) if left else adjoint
        return self._restore(self._restore(summed, inner), names)

    def _over_steps(self, adjoint: ex.Expr, labels: tuple[str, ...]) -> ex.Expr:
        """Return the sum over ``labels``, over places of one remainder where a condition tells it: as a product that it may then be."""
        known = replace(self.algorithm, extents=(*self.algorithm.extents, *self.new_extents), formulas=(*self.algorithm.formulas, *self.new_formulas))
        node, outer, told = over_steps(ex.Reduce("sum", adjoint, labels), known, self.taken, self.steps)
        self.new_labels += told.rvars[len(known.rvars) :]
        self.new_extents += told.extents[len(known.extents) :]
        self.new_formulas += told.formulas[len(known.formulas) :]
        return reduce(lambda e, condition: where(condition, e, ZERO), outer, self._summed(node.arg, node.labels))

    def _vanishing(self, adjoint: ex.Expr, label: str, least: int) -> ex.Expr:
        """Return a product with Funcs for factors that may be no finite numbers past the last element of ``label``: elements of Funcs read 0 there.

        Before: ``d[b, h, m, n] / t[b, h, m] * exp(s[b, h, m, l])``, of heads ``h`` in groups, which only a condition keeps from 0 / 0
        After:  ``d_over[b, h, m, n] * e[b, h, m, l]``, which stays a matrix product

        Unchanged where fewer than ``least`` factors vary with the label.
        """
        factors = factors_of(adjoint)
        if sum(label in ex.free_labels(f) for f in factors) < least or _vanishes_outside(adjoint, label):
            return adjoint
        risky = [f for f in factors if not isinstance(f, ex.Access) and not _finite_outside(f, label)]
        if any(isinstance(n, (ex.Reduce, ex.Dot)) for f in risky for n in f.walk()):
            return adjoint
        elements = {f: self._factor(f) for f in dict.fromkeys(risky)}
        whole = reduce(multiply, (elements[f][1] if f in elements else f for f in factors))
        if not _vanishes_outside(whole, label):
            return adjoint
        self.new += [made for made, _ in elements.values()]
        return whole

    def _factor(self, e: ex.Expr) -> tuple[Definition, ex.Access]:
        """Return a new Func that is ``e``, in its labels' order and by their declared names, and its element in place of ``e``."""
        order = {x: i for i, x in enumerate(self.algorithm.labels)}
        labels = sorted(ex.free_labels(e), key=lambda x: (order.get(x.rstrip("'"), len(order)), x))
        name = fresh_name("factor", self.taken)
        made = Definition(name, tuple(x.rstrip("'") for x in labels), ex.substitute(e, {x: ex.Label(x.rstrip("'")) for x in labels}))
        return made, ex.Access(name, tuple(map(ex.Label, labels)))

    def _solve(
        self, index: ex.Expr, target: ex.Label, over: list[str], dimension: tuple[str, int], names: dict[str, str]
    ) -> tuple[tuple[str, Inverse], ...]:
        """Solve ``index = target`` for a label in ``index``, of the ``dimension`` of a tensor; nothing if no label has a unique solution.

        ``names``: label -> its temporary name while ``target`` uses its own.
        """
        match index:
            case ex.Binary("%", moved, ex.Len(round_)):  # moved round: every element goes to another, if what counts them goes no further than that
                if target.name not in self.algorithm.tied_labels(round_) and dimension not in self.algorithm.extent_sources(round_):
                    return ()
                twins = {twin: label for label, twin in names.items()}
                places = places_in_order(moved, round_, self.algorithm, {o: twins.get(o, o) for o in over})
                return ((places[0], around(moved, target, places, round_, self._remainder_label)),) if places else ()
        name = self._longest_unknown(index, over)
        return () if name is None else ((name, solve(index, target, name, self._remainder_label)),)

    def _digits(self, index: ex.Expr, target: ex.Label, over: list[str], adjoint: ex.Expr) -> tuple[tuple[str, Inverse], ...]:
        """Solve ``index = target`` for two labels that one element of the adjoint has both: elsewhere they are sides of a product, as windows are that do not overlap."""
        found = digits(index, target, over, lambda label: self.algorithm.constant_extent(label.rstrip("'")))
        both = {name for name, _ in found}
        return found if any(both <= {i.name for i in a.index if isinstance(i, ex.Label)} for a in ex.accesses(adjoint)) else ()

    def _longest_unknown(self, index: ex.Expr, over: list[str]) -> str | None:
        """Return the label to solve ``index`` for: one whose extent contains that of the usual one, if there is any, so that the sum over the shorter is left.

        Where ``v`` has the extent ``X[2] + W[2] - 1`` and ``r`` that of ``W``, ``v - r == x`` leaves the sum over ``r`` of ``v = x + r``. A constant is the
        shorter: of ``8 * i + u == x``, where ``u`` counts 8, it leaves the sum over ``u`` of ``i = (x - u) / 8``.
        """
        name = unknown(index, over)
        own = self.algorithm.plain_extent(name.rstrip("'")) if name else None
        if name is None or own is None:
            return name
        others = (o for o in over if o != name and o in ex.free_labels(index) and unknown(index, [o]) == o)
        if isinstance(own, ex.Const):
            return next((o for o in others if self.algorithm.constant_extent(o.rstrip("'")) is None), name)
        longer = (o for o in others if any(linear_form(f).get(own, 0) > 0 for f in self.algorithm.extent_formulas(o.rstrip("'"))))
        return next(longer, name)

    def _remainder_label(self, division: ex.Binary, name: str) -> str:
        """Return the label of the remainder of ``name`` in ``division``."""
        size = division.right.value  # type: ignore[attr-defined]
        within = sum(isinstance(n, ex.Binary) and n.op == "/" for n in division.left.walk())
        return self._label((name, size, within), f"{name}_in".replace("'", ""), "", int(size))

    def _label(self, stands_for: object, wish: str, tensor: str, size: int) -> str:
        """Return a new label with the extent of a dimension (or a constant one), shared by equal ``stands_for``."""
        if stands_for not in self.shared:
            self.shared[stands_for] = fresh_name(wish, self.taken)
            self.new_labels.append(self.shared[stands_for])
        self.new_extents.append((self.shared[stands_for], tensor, size))
        return self.shared[stands_for]

    def _restore(self, e: ex.Expr, names: dict[str, str]) -> ex.Expr:
        """Give renamed labels that are still summed a declared name of the same extent."""
        back = {}
        for label, twin in names.items():
            if any(isinstance(n, ex.Label) and n.name == twin or isinstance(n, (ex.Reduce, ex.Dot)) and twin in n.labels for n in e.walk()):
                back[twin] = fresh_name(f"{label}_", self.taken)
                self.new_labels.append(back[twin])
                source = self.algorithm.extent_source(label) or ("", self.algorithm.constant_extent(label))
                if source[1] is None:  # a label has one of the three
                    self.new_formulas.append((back[twin], self.algorithm.extent_formulas(label)[0]))
                else:
                    self.new_extents.append((back[twin], source[0], source[1]))
        return rename_bound(ex.substitute(e, {k: ex.Label(v) for k, v in back.items()}), back)

    def _summed(self, e: ex.Expr, labels: tuple[str, ...]) -> ex.Expr:
        """Return the sum over ``labels``: each addend alone; a product whose factors both have the label as a rdot."""
        if not labels:
            return e
        match e:
            case ex.Unary("-", arg):
                return negate(self._summed(arg, labels))
            case ex.Call("where", (c, a, b)) if is_zero(b) and not ex.free_labels(c) & set(labels):
                return where(c, self._summed(a, labels), ZERO)
            case ex.Call("where", (c, ex.Binary("*", a, b), zero)) if is_zero(zero) and (_is_number(a) or _is_number(b)):  # no side of a product
                number, rest = (a, b) if _is_number(a) else (b, a)
                return ex.Binary("*", number, self._summed(where(c, rest, zero), labels))
            case ex.Call("where", (c, ex.Binary("*", a, b), zero)) if is_zero(zero) and (product := self._masked_product(c, a, b, labels)):
                return product
            case ex.Binary("*", a, b):
                if not ex.free_labels(a) & set(labels):
                    return ex.Binary("*", a, self._summed(b, labels))
                if not ex.free_labels(b) & set(labels):
                    return ex.Binary("*", self._summed(a, labels), b)
                for one, other in ((a, b), (b, a)):  # over what one side alone has, that side is summed first
                    if alone := tuple(label for label in labels if label not in ex.free_labels(other)):
                        sides = (self._summed(one, alone), other) if one is a else (other, self._summed(one, alone))
                        return self._summed(ex.Binary("*", *sides), tuple(label for label in labels if label not in alone))
                return self._product(a, b, labels)
            case ex.Binary("/", a, b) if not ex.free_labels(b) & set(labels):
                return ex.Binary("/", self._summed(a, labels), b)
        return self._plain_sum(e, labels)

    def _plain_sum(self, e: ex.Expr, labels: tuple[str, ...]) -> ex.Expr:
        """Return a sum in one go; a sum to a single number sums down columns first, so that many programs share the work.

        Columns come first because gradients of values broadcast along rows are sums down columns too, and can share a loop.
        """
        if len(labels) > 1 and not ex.free_labels(e) - set(labels):
            return ex.Reduce("sum", ex.Reduce("sum", e, labels[:-1]), labels[-1:])
        return ex.Reduce("sum", e, labels)

    def _product(self, a: ex.Expr, b: ex.Expr, labels: tuple[str, ...]) -> ex.Expr:
        """Return a sum of products as a matrix product, if each side has a label that the other lacks."""
        pairs = [pair for pair in _digit_pairs(ex.Binary("*", a, b)) if not ex.free_labels(pair[0]) & set(labels)]
        digits: dict[ex.Expr, ex.Expr] = {i: ex.Label(str(i)) for pair in pairs for i in pair}  # rows and columns by themselves
        left, right = (labels_without_data(side) | ex.free_labels(side) & set(labels) for side in (replaced(a, digits), replaced(b, digits)))
        inner = tuple(label for label in labels if label in left and label in right)
        if inner and left - right and right - left and not (set(labels) - set(inner)):
            return ex.Dot(a, b, labels)
        return self._plain_sum(ex.Binary("*", a, b), labels)

    def _masked_product(self, c: ex.Expr, a: ex.Expr, b: ex.Expr, labels: tuple[str, ...]) -> ex.Expr | None:
        """Return a sum of products under the condition ``c`` as a matrix product with one masked factor; None if it is none.

        Before: ``rsum(where(e[m] == g, d[m, n] * A[m, k], 0), m)``
        After:  ``rdot(where(e[m] == g, d[m, n], 0), where(e[m] == g, A[m, k], 0), m)``

        Both factors are masked where that keeps the product one of matrices: no element that is left out is multiplied, not even by 0.

        Over what a condition on data lacks, the product is made first, no larger than that of forward: of a table's rows there may be many more than are picked.

        Before: ``rsum(where(t[m] == r, d[m, n] * W[k, n], 0), m, n)``  After: ``rsum(where(t[m] == r, rdot(d[m, n], W[k, n], n), 0), m)``

        Where one factor alone has more that is summed over, it is summed first.

        Before: ``rsum(where(t[m] == r, d[m, p, n] * W[k, n], 0), m, p, n)``
        After:  ``rdot(rsum(where(t[m] == r, d[m, p, n], 0), m, p), W[k, n], n)``
        """
        if not any(isinstance(side, ex.Access) or _is_part_of_row(side) for side in (a, b)):
            return None
        inner = tuple(label for label in labels if label not in ex.free_labels(c))
        product = self._product(a, b, inner) if inner and len(inner) < len(labels) and [*ex.accesses(c)] else ZERO
        if isinstance(product, ex.Dot):
            name = next(x.tensor for side in (a, b) for x in ex.accesses(side))
            return self._picked_sum(c, self._named(f"{name}_dot", product, c), tuple(label for label in labels if label not in inner))
        for one, other in ((a, b), (b, a)):
            alone = tuple(label for label in labels if label not in ex.free_labels(other))
            rest = tuple(label for label in labels if label not in alone)
            if alone and isinstance(one, ex.Access) and ex.free_labels(c) & set(labels) <= set(alone):
                masked = self._picked_sum(c, one, alone)
            elif not alone and set(labels) <= ex.free_labels(one) | ex.free_labels(c):
                masked = where(c, one, ZERO)
                if not (ex.free_labels(c) - ex.free_labels(other)) & ex.free_labels(one):
                    other = where(c, other, ZERO)
            else:
                continue
            left, right = labels_without_data(one) | ex.free_labels(c) - set(alone), labels_without_data(b if one is a else a)
            if rest and set(rest) <= left & right and left - right and right - left:
                sides = (masked, other) if one is a else (other, masked)
                picked_first = tuple(sorted(rest, key=lambda label: label not in ex.free_labels(c)))  # what the mask bounds is the outer loop
                return ex.Dot(*sides, picked_first)
        return None

    def _named(self, wish: str, e: ex.Expr, c: ex.Expr) -> ex.Access:
        """Return an element of a new Func that is ``e``; its rows are those that ``c`` picks."""
        return self._defined(wish, sorted(ex.free_labels(e), key=lambda label: (label not in ex.free_labels(c), label)), e)

    def _defined(self, wish: str, labels: list[str], e: ex.Expr) -> ex.Access:
        """Return an element of a new Func that is ``e``. Labels that have temporary names have declared ones in its definition."""
        element = ex.Access(fresh_name(wish, self.taken), tuple(map(ex.Label, labels)))
        both = self._restore(ex.Binary("*", element, e), {label.rstrip("'"): label for label in (*labels, *sorted(_bound(e))) if label.endswith("'")})
        assert isinstance(both, ex.Binary) and isinstance(both.left, ex.Access)
        self.new.append(Definition(element.tensor, tuple(i.name for i in both.left.index if isinstance(i, ex.Label)), both.right))
        return element

    def _picked_sum(self, c: ex.Expr, e: ex.Access, labels: tuple[str, ...]) -> ex.Expr:
        """Return the sum of the elements of ``e`` that ``c`` picks, as a Func of its own whose rows lie as those of ``e``."""
        summed = self._plain_sum(where(c, e, ZERO), labels)
        own = [i.name for i in e.index if isinstance(i, ex.Label)]
        return self._defined(f"{e.tensor}_sum", sorted(ex.free_labels(summed), key=lambda label: (label in own, own.index(label) if label in own else 0, label)), summed)

    def reads(self, func: str) -> bool:
        """Return whether ``func`` depends on an input."""
        whole = self.algorithm.with_definitions((*self.algorithm.definitions, *self.new))
        return any(a.tensor not in whole for name in whole.needed_by((func,)) for a in ex.accesses(whole[name].expr))

    def algorithm_of(self, grads: tuple[str, ...]) -> Algorithm:
        """Return forward and backward Funcs together, reduced to those that the gradients need."""
        a = self.algorithm
        adjoints = tuple(self.adjoint_inputs.values())
        definitions = a.definitions + tuple(self.new)
        extents = a.extents + tuple(dict.fromkeys(self.new_extents))
        formulas = a.formulas + tuple(dict.fromkeys(self.new_formulas))
        whole = replace(a, inputs=a.inputs + adjoints, rvars=a.rvars + tuple(self.new_labels), extents=extents, formulas=formulas, indices=a.integer_inputs() | a.integer_scalars())
        whole = told = whole.with_definitions(definitions)
        if formulas:  # what an adjoint's shape tells needs no formula, and so no input that only the formula reads
            whole = replace(whole, formulas=tuple(f for f in formulas if whole.extent_source(f[0]) is None or _tells_multiple(whole, *f)))
        needed = whole.needed_by(grads + self.outputs)  # outputs stay until it is known which are read
        kept = whole.with_definitions(tuple(d for d in definitions if d.name in needed))
        return replace(kept, formulas=tuple((label, told.extent_formulas(label)[0] if _lacks_extents(kept, formula) else formula) for label, formula in kept.formulas))


def _tells_multiple(algorithm: Algorithm, label: str, formula: ex.Expr) -> bool:
    """Return whether a label is divided by a number that its extent is a multiple of, as a formula of inputs that are read anyway says."""
    divisors = {n.right.value for d in algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Binary) and n.op in "/%" and isinstance(n.right, ex.Const) and label in ex.free_labels(n.left)}
    read = {a.tensor for d in algorithm.definitions for a in ex.accesses(d.expr)}
    form = {atom: times for atom, times in linear_form(algorithm.in_sizes(formula)).items() if times}
    return all(t in read for t, _ in inputs_of(formula)) and any(type(n) is int and n > 1 and not any(times % n for times in form.values()) for n in divisors)


def _lacks_extents(algorithm: Algorithm, formula: ex.Expr) -> bool:
    """Return whether a formula counts by a label whose extent ``algorithm`` does not know any more."""
    return any(isinstance(n, ex.Len) and algorithm.plain_extent(n.label) is None and not algorithm.formulas_of(n.label) for n in formula.walk())


def _tells_extent(index: object) -> bool:
    """Return whether inputs that ``index`` indexes have one extent there: the heads of keys and values, ``h / 4``. No other arithmetic says so."""
    match index:
        case ex.Binary("/", ex.Label(), ex.Const()):
            return True
    return False


def _bound(e: ex.Expr) -> set[str]:
    """Return the labels that reductions inside ``e`` run over."""
    return {label for n in e.walk() if isinstance(n, (ex.Reduce, ex.Dot)) for label in n.labels}


def _vanishes_outside(adjoint: ex.Expr, label: str) -> bool:
    """Return whether ``adjoint`` is 0 where ``label`` is past its extent: a product of an element that reads 0 there and finite factors."""
    match adjoint:
        case ex.Access(_, index):
            return any(isinstance(i, ex.Label) and i.name == label for i in index)
        case ex.Binary("*", a, b):
            return any(_vanishes_outside(x, label) and _finite_outside(y, label) for x, y in ((a, b), (b, a)))
        case ex.Binary("/", a, b):
            return _vanishes_outside(a, label) and label not in ex.free_labels(b)
        case ex.Unary("-", a):
            return _vanishes_outside(a, label)
        case ex.Call("where", (_, a, b)):
            return is_zero(b) and _vanishes_outside(a, label)
    return False


def _finite_outside(e: ex.Expr, label: str) -> bool:
    """Return whether ``e`` is known to be finite where ``label`` is past its extent and accesses read 0."""
    match e:
        case ex.Call("where", (ex.Binary("==", ex.Access() as tested, ex.Const(0)), other, _)) if _vanishes_outside(tested, label):
            return _finite_outside(other, label)
        case ex.Binary("/", _, b) if label in ex.free_labels(b):
            return False
        case ex.Call("exp" | "exp2" | "log" | "log2" | "rsqrt" | "sqrt", _) if label in ex.free_labels(e):
            return False
    return all(_finite_outside(child, label) for child in e.children())


def _masked(condition: ex.Expr, e: ex.Expr, label: str) -> ex.Expr:
    """Return ``e`` where ``condition`` holds, else 0. The factor that varies with ``label`` is masked, so that a product stays one."""
    match e:
        case ex.Binary("*", a, b) if (label in ex.free_labels(a)) != (label in ex.free_labels(b)):
            return ex.Binary("*", *(_masked(condition, x, label) if label in ex.free_labels(x) else x for x in (a, b)))
        case ex.Unary("-", a):
            return negate(_masked(condition, a, label))
    return where(condition, e, ZERO)


def _is_number(e: ex.Expr) -> bool:
    """Return whether ``e`` is one number for all elements: constants, extents and scalars."""
    return not any(isinstance(n, (ex.Access, ex.Label)) for n in e.walk())


def _digit_pairs(e: ex.Expr) -> list[tuple[ex.Expr, ex.Expr]]:
    """Return the remainders in ``e`` whose quotients it has too: ``t % 8`` with ``t / 8``."""
    nodes = {n for n in e.walk() if isinstance(n, ex.Binary) and n.op in "%/" and isinstance(n.right, ex.Const)}
    pairs = ((n, ex.Binary("/", n.left, n.right)) for n in nodes if n.op == "%")
    return [pair for pair in pairs if pair[1] in nodes]


def _is_part_of_row(e: ex.Expr) -> bool:
    """Return whether ``e`` is an element over a number of its row, which is 1 where the logarithm of a sum of exponentials is saved."""
    return isinstance(e, ex.Binary) and e.op == "/" and isinstance(e.left, ex.Access) and isinstance(e.right, ex.Access)


def _is_remainder(e: ex.Expr) -> bool:
    return isinstance(e, ex.Binary) and e.op == "%"
