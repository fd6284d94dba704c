"""Form the gradients of one number in its forward, so that backward only scales them.

The gradients of a number are linear in its adjoint, which is a number too. A backward that makes long products again that forward had already made
takes them from forward instead, which has their elements at hand::

    z[x, y] = rdot(H[x, k], W[y, k], k);    s[x] = rsum(exp(z[x, y]), y);    loss[] = rsum(log(s[x]), x);

Before, backward makes ``z`` again: four products in all. After, forward computes::

    z_kept[x, y] = cast(z[x, y], bf16);     d_z[x, y] = exp(z_kept[x, y] - log(s[x]));
    unit_d_H[x, k] = rdot(d_z[x, y], W[y, k], y);    unit_d_W[y, k] = rdot(d_z[x, y], H[x, k], x);

and backward ``d_H[x, k] = d_loss[] * unit_d_H[x, k]``. In between the product lies in bfloat16, as torch stores it.
"""

from __future__ import annotations

from dataclasses import replace

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ..rules.canonicalize import fresh_name
from ..rules.constant_folding import drop_unused, with_plain_vars
from ..rules.func_cse import merge_equal_funcs
from ..smart_constructors import ONE, simplify
from .chained_products import product_of, with_named_products
from .gradient import Gradient, gradient, in_float32
from .rematerialization import JOINT, Product


def products_made_again(algorithm: Algorithm, outputs: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[Product, ...]:
    """Return the matrices that forward and backward of one number both multiply; none where the result is no number."""
    if len(outputs) != 1 or algorithm[outputs[0]].labels:
        return ()
    backward = gradient(algorithm, outputs, wanted, ()).backward
    again = {n for d in backward.definitions for n in d.expr.walk() if isinstance(n, ex.Dot)}
    named = with_named_products(algorithm)
    found = ((d, dot) for d in named.definitions if (dot := product_of(d.expr)) and dot in again and len(d.labels) > 1)
    return tuple(Product(d.name, (), d.labels, dot.labels) for d, dot in found)


def joint_gradient(algorithm: Algorithm, outputs: tuple[str, ...], wanted: tuple[str, ...]) -> Gradient:
    """Derive a forward that computes a number and its gradients for an adjoint of 1, and the backward that scales them."""
    kept = tuple(p.name for p in products_made_again(algorithm, outputs, wanted))
    g = gradient(algorithm, outputs, wanted, kept)
    taken = {*g.forward.names, *g.backward.labels, *g.backward.inputs, *g.backward.funcs}
    units = {func: fresh_name(f"unit_{func}", taken) for func in g.grads.values()}
    forward = _joined(g, {p: fresh_name(f"{p}_kept", taken) for p in g.products}, units, taken)
    forward = merge_equal_funcs(forward, (*outputs, *units.values()))
    backward = _scaled(g, units, g.adjoints[outputs[0]])
    return Gradient(forward, (*outputs, *units.values()), backward, g.adjoints, g.grads, (JOINT,))


def _joined(g: Gradient, kept: dict[str, str], units: dict[str, str], taken: set[str]) -> Algorithm:
    """Return forward and backward as one algorithm, with the number's adjoint 1 and the products ``kept`` in bfloat16 between them."""
    again = {d.name: fresh_name(f"{d.name}_again", taken) for d in g.backward.definitions if d.name in g.forward and d.name not in units}
    names = again | units | kept
    adjoints = {*g.adjoints.values()}

    def change(node: ex.Expr) -> ex.Expr:
        if isinstance(node, ex.Cast) and node.arg == ONE:
            return ONE
        if not isinstance(node, ex.Access):
            return node
        return ONE if node.tensor in adjoints else replace(node, tensor=names.get(node.tensor, node.tensor))

    held = [Definition(name, (d := g.forward[p]).labels, ex.Cast(ex.Access(p, tuple(map(ex.Label, d.labels))), "bf16")) for p, name in kept.items()]
    later = [Definition(names.get(d.name, d.name), d.labels, simplify(d.expr.transform(change)), d.pos) for d in g.backward.definitions]
    a, b = g.forward, g.backward
    whole = replace(
        a,
        inputs=tuple(dict.fromkeys((*a.inputs, *(t for t in b.inputs if t not in a and t not in adjoints)))),
        scalars=tuple(dict.fromkeys((*a.scalars, *b.scalars))),
        rvars=(*a.rvars, *(x for x in b.labels if x not in a.labels)),
        extents=tuple(dict.fromkeys((*a.extents, *(e for e in b.extents if e[1] in (*a.inputs, ""))))),
        formulas=tuple(dict.fromkeys((*a.formulas, *b.formulas))),
    )
    return drop_unused(with_plain_vars(whole.with_definitions((*a.definitions, *held, *later))))


def _scaled(g: Gradient, units: dict[str, str], adjoint: str) -> Algorithm:
    """Return the backward that multiplies each gradient by the number's adjoint. Gradients in float32 stay so."""
    definitions, single = [], set()
    for func, unit in units.items():
        d = g.backward[func]
        single |= {unit} if isinstance(d.expr, ex.Cast) and d.expr.dtype == "fp32" else set()
        scaled: ex.Expr = ex.Binary("*", ex.Access(unit, tuple(map(ex.Label, d.labels))), ex.Access(adjoint, ()))
        definitions.append(Definition(func, d.labels, ex.Cast(scaled, "fp32") if unit in single else scaled))
    labels = tuple(dict.fromkeys(x for d in definitions for x in d.labels))
    found = Algorithm(funcs=(), inputs=(*units.values(), adjoint), vars=labels).with_definitions(tuple(definitions))
    return in_float32(found, {adjoint, *single})
