"""Form the adjoint of a long product in the forward of a number, so that backward does not make the product again.

The gradients of a number are linear in its adjoint, which is a number too. Where backward would make a long product again, forward, which has its
elements at hand, computes the product's adjoint for an adjoint of 1 instead::

    z[x, y] = rdot(H[x, k], W[y, k], k);    s[x] = rsum(exp(z[x, y]), y);    loss[] = rsum(log(s[x]), x);

Before, backward makes ``z`` again: four products in all. After, forward computes::

    z_kept[x, y] = cast(z[x, y], bf16);     unit_d_z[x, y] = exp(z_kept[x, y] - log(s[x]));

and backward, which scales its sums, ``d_H[x, k] = rdot(unit_d_z[x, y], W[y, k], y) * d_loss[]``. The product lies in bfloat16 in between, and its rows are
reduced as rounded, as in torch.
"""

from __future__ import annotations

from dataclasses import replace

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ..rules.canonicalize import fresh_name
from ..rules.constant_folding import drop_unused, with_plain_vars
from ..rules.func_cse import merge_equal_funcs
from ..smart_constructors import ONE, simplify, sum_with_product
from .chained_products import multiples, with_named_products
from .gradient import Gradient, computed_input_sources, gradient, in_float32
from .rematerialization import JOINT, Product


def products_in_both_directions(algorithm: Algorithm, outputs: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[Product, ...]:
    """Return the matrices that forward and backward of one number both multiply, if adjoints in their place tell all gradients; none otherwise."""
    found = _in_both_directions(algorithm, outputs, wanted)
    return found if found and _adjoint_of_product(algorithm, gradient(algorithm, outputs, wanted, tuple(p.name for p in found))) else ()


def _in_both_directions(algorithm: Algorithm, outputs: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[Product, ...]:
    if len(outputs) != 1 or algorithm[outputs[0]].labels:
        return ()
    backward = gradient(algorithm, outputs, wanted, ()).backward
    again = {n for d in backward.definitions for n in d.expr.walk() if isinstance(n, ex.Dot)}
    named = with_named_products(algorithm)
    pairs = ((d, dot) for d in named.definitions if (dot := sum_with_product(d.expr)) and dot in again and len(d.labels) > 1)
    return tuple(Product(d.name, (), d.labels, dot.labels, multiples(named, d)) for d, dot in pairs)


def joint_gradient(algorithm: Algorithm, outputs: tuple[str, ...], wanted: tuple[str, ...]) -> Gradient:
    """Derive a forward that computes a number and a product's adjoint for an adjoint of 1, and the backward that makes gradients of it."""
    g = gradient(algorithm, outputs, wanted, tuple(p.name for p in _in_both_directions(algorithm, outputs, wanted)))
    cut = _adjoint_of_product(algorithm, g)
    assert cut is not None, "asked for where there is none"
    taken = {*g.forward.names, *g.backward.labels, *g.backward.inputs, *g.backward.funcs}
    unit = fresh_name(f"unit_{cut}", taken)
    forward = _joined(g, {p: fresh_name(f"{p}_kept", taken) for p in g.products if p in g.backward.inputs}, {cut: unit}, taken)
    forward = merge_equal_funcs(drop_unused(with_plain_vars(forward.limited_to((*outputs, unit)))), (*outputs, unit))
    backward = _scaled(_rest(g, cut), {cut: unit}, g)
    backward = replace(backward, stands_for=computed_input_sources(forward, backward, g.adjoints))
    return Gradient(forward, (*outputs, unit), backward, g.adjoints, g.grads, (JOINT,))


def _adjoint_of_product(algorithm: Algorithm, g: Gradient) -> str | None:
    """Return the Func of a backward that reads products saved, and after which it reads inputs of ``algorithm`` alone; None if there is none."""
    shapes = [{*g.forward[p].labels} for p in g.products]
    if len(shapes) != 1:
        return None
    for d in reversed(g.backward.definitions):
        if {*d.labels} == shapes[0] and d.name not in g.grads.values() and not any(isinstance(n, (ex.Reduce, ex.Dot, ex.Scan)) for n in d.expr.walk()):
            rest = _rest(g, d.name)
            read = {a.tensor for e in rest.definitions for a in ex.accesses(e.expr)}
            if read - {*rest.funcs} <= {*algorithm.inputs, d.name} and not read & {*g.grads.values()}:
                return d.name
    return None


def _rest(g: Gradient, cut: str) -> Algorithm:
    """Return what backward computes of the Func ``cut`` for its gradients."""
    return g.backward.with_definitions(tuple(d for d in g.backward.definitions if d.name != cut)).limited_to((*g.grads.values(),))


def _joined(g: Gradient, kept: dict[str, str], units: dict[str, str], taken: set[str]) -> Algorithm:
    """Return forward and backward as one algorithm, with the number's adjoint 1, in which all but the products read them as ``kept``, in bfloat16."""
    again = {d.name: fresh_name(f"{d.name}_again", taken) for d in g.backward.definitions if d.name in g.forward and d.name not in units}
    adjoints = {*g.adjoints.values()}

    def changed(d: Definition, names: dict[str, str]) -> Definition:
        def change(node: ex.Expr) -> ex.Expr:
            if isinstance(node, ex.Cast) and node.arg == ONE:
                return ONE
            if not isinstance(node, ex.Access):
                return node
            return ONE if node.tensor in adjoints else replace(node, tensor=names.get(node.tensor, node.tensor))

        return replace(d, name=names.get(d.name, d.name) if d.name not in kept else d.name, expr=simplify(d.expr.transform(change)))

    definitions: list[Definition] = []
    names, later = dict(kept), again | units | kept
    for d, known in (*((d, names) for d in g.forward.definitions), *((d, later) for d in g.backward.definitions)):
        made, own = changed(d, known), tuple(map(ex.Label, d.labels))
        if isinstance(made.expr, ex.Access) and made.expr.tensor in kept.values() and made.expr.index == own:
            known[d.name] = made.expr.tensor  # a logit without softcap or bias is the product itself
            continue
        definitions.append(made)
        if known is names and d.name in kept:
            definitions.append(Definition(kept[d.name], d.labels, ex.Cast(ex.Access(d.name, own), "bf16")))
    a, b = g.forward, g.backward
    whole = replace(
        a,
        inputs=tuple(dict.fromkeys((*a.inputs, *(t for t in b.inputs if t not in a and t not in adjoints)))),
        scalars=tuple(dict.fromkeys((*a.scalars, *b.scalars))),
        rvars=(*a.rvars, *(x for x in b.labels if x not in a.labels)),
        extents=tuple(dict.fromkeys((*a.extents, *(e for e in b.extents if e[1] in (*a.inputs, ""))))),
        formulas=tuple(dict.fromkeys((*a.formulas, *b.formulas))),
    )
    return whole.with_definitions(tuple(definitions))


def _scaled(rest: Algorithm, units: dict[str, str], g: Gradient) -> Algorithm:
    """Return ``rest`` of the adjoint for an adjoint of 1, and with each gradient multiplied by the number's adjoint. Gradients in float32 stay so."""
    (adjoint,) = (ex.Access(name, ()) for name in g.adjoints.values())
    definitions = []
    for d in rest.definitions:
        e = d.expr.transform(lambda n: replace(n, tensor=units.get(n.tensor, n.tensor)) if isinstance(n, ex.Access) else n)
        if d.name in g.grads.values():
            e = ex.Cast(ex.Binary("*", e.arg, adjoint), "fp32") if isinstance(e, ex.Cast) and e.dtype == "fp32" else ex.Binary("*", e, adjoint)
        definitions.append(replace(d, expr=e))
    whole = replace(rest, inputs=tuple(dict.fromkeys((*rest.inputs, *units.values()))))
    return in_float32(drop_unused(with_plain_vars(whole.with_definitions(tuple(definitions)))), {adjoint.tensor})
