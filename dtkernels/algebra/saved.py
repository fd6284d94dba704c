"""What the forward saves for the backward.

Outputs are at hand anyway. Where a sum of exponentials enters, its logarithm is saved and used as the shift of those
exponentials: by the degree argument of degree.py any shift leaves the gradients unchanged, and under this one the sum
itself is 1. An expression that then equals an output is read instead of computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from ..lang import expr as ex
from ..lang.algorithm import Algorithm, Definition
from .build import ONE, simplify
from .degree import Degree, degree
from .fold import drop_unused
from .normalize import fresh_name
from .stability import matches, shift_value


@dataclass(frozen=True)
class Saved:
    """The two programs, and the Funcs that forward returns besides its outputs."""

    forward: Algorithm
    backward: Algorithm
    extra: tuple[str, ...]


def choose_saved(forward: Algorithm, outputs: tuple[str, ...], backward: Algorithm, grads: tuple[str, ...]) -> Saved:
    """Replace in ``backward`` what forward can hand over: log-sum-exps, then outputs."""
    extra: list[Definition] = []
    for d in forward.definitions:
        if d.name in backward and d.name not in outputs and (argument := _summed_exponent(d, forward)) is not None:
            name = fresh_name(f"{d.name}_log", {*backward.funcs, *backward.inputs, *backward.scalars, *backward.labels, *forward.funcs})
            shifted = _shift_by(backward, d, argument, name, grads)
            if shifted is not None:
                backward = shifted
                logarithm = ex.Call("log", (ex.Access(d.name, tuple(map(ex.Label, d.labels))),))
                extra.append(Definition(name, d.labels, ex.Cast(logarithm, "fp32")))
    backward = _needed(_read_outputs(backward, outputs), grads)
    used = tuple(e for e in extra if e.name in backward.inputs)
    with_extra = forward.with_definitions(forward.definitions + used) if used else forward
    return Saved(with_extra, backward, tuple(e.name for e in used))


def _summed_exponent(d: Definition, algorithm: Algorithm) -> ex.Expr | None:
    """The argument if ``d`` is a plain sum of exponentials, the exponential possibly a Func of its own."""
    if not (isinstance(d.expr, ex.Reduce) and d.expr.kind == "sum"):
        return None
    term = d.expr.arg
    while isinstance(term, ex.Access) and term.tensor in algorithm:
        inner = algorithm[term.tensor]
        term = ex.substitute(inner.expr, dict(zip(inner.labels, term.index)))
    return term.args[0] if isinstance(term, ex.Call) and term.fn == "exp" else None


def _shift_by(backward: Algorithm, total: Definition, argument: ex.Expr, name: str, grads: tuple[str, ...]) -> Algorithm | None:
    """``backward`` with exp(argument) shifted by the saved logarithm and the sum itself 1; None if gradients would change."""
    known: dict[str, Degree | None] = {name: Degree(plus=Fraction(1))}
    definitions = []
    for d in backward.definitions:
        if d.name == total.name:
            known[d.name] = Degree(times=Fraction(-1))
            continue
        expr = _shifted(d.expr, argument, name, total.labels)
        known[d.name] = degree(expr, known)
        definitions.append(replace(d, expr=expr))
    if any(known[g] is None or not known[g].free for g in grads):  # type: ignore[union-attr]
        return None

    def one(node: ex.Expr) -> ex.Expr:
        return ONE if isinstance(node, ex.Access) and node.tensor == total.name else node

    kept = tuple(replace(d, expr=simplify(d.expr.transform(one))) for d in definitions)
    changed = replace(backward, inputs=(*backward.inputs, name)).with_definitions(kept)
    return _inline_copies(changed, grads)


def _shifted(expr: ex.Expr, argument: ex.Expr, name: str, labels: tuple[str, ...]) -> ex.Expr:
    def change(node: ex.Expr) -> ex.Expr:
        if isinstance(node, ex.Call) and node.fn == "exp" and (names := matches(argument, node.args[0])) is not None:
            index = tuple(ex.Label(names.get(label, label)) for label in labels)
            return ex.Call("exp", (ex.Binary("-", node.args[0], shift_value(ex.Cast(ex.Access(name, index), "fp32"))),))
        return node

    return expr.transform(change)


def _inline_copies(algorithm: Algorithm, keep: tuple[str, ...]) -> Algorithm:
    """Drop Funcs that only rename another or a constant."""
    copies = {d.name: d for d in algorithm.definitions if d.name not in keep and isinstance(d.expr, (ex.Access, ex.Const, ex.Scalar))}

    def change(node: ex.Expr) -> ex.Expr:
        while isinstance(node, ex.Access) and node.tensor in copies:
            d = copies[node.tensor]
            node = ex.substitute(d.expr, dict(zip(d.labels, node.index)))
        return node

    kept = tuple(replace(d, expr=simplify(d.expr.transform(change))) for d in algorithm.definitions if d.name not in copies)
    return algorithm.with_definitions(kept)


def _read_outputs(backward: Algorithm, outputs: tuple[str, ...]) -> Algorithm:
    """Outputs that backward mentions become inputs, and so does any Func or expression that equals one."""
    for output in outputs:
        if output not in backward:
            continue
        d = backward[output]
        own = tuple(map(ex.Label, d.labels))
        if isinstance(d.expr, ex.Access) and d.expr.tensor in backward and d.expr.index == own:
            backward = _renamed(backward, d.expr.tensor, output)  # the output is that Func
        else:
            backward = _replaced(backward, output, d.expr, ex.Access(output, own))
        backward = replace(backward, inputs=(*backward.inputs, output)).with_definitions(tuple(x for x in backward.definitions if x.name != output))
    return backward


def _renamed(backward: Algorithm, func: str, output: str) -> Algorithm:
    def change(node: ex.Expr) -> ex.Expr:
        return replace(node, tensor=output) if isinstance(node, ex.Access) and node.tensor == func else node

    return backward.with_definitions(tuple(replace(d, expr=d.expr.transform(change)) for d in backward.definitions if d.name != func))


def _replaced(backward: Algorithm, output: str, body: ex.Expr, value: ex.Expr) -> Algorithm:
    def change(node: ex.Expr) -> ex.Expr:
        return value if node == body else node

    return backward.with_definitions(tuple(d if d.name == output else replace(d, expr=d.expr.transform(change)) for d in backward.definitions))


def _needed(backward: Algorithm, grads: tuple[str, ...]) -> Algorithm:
    needed = backward.needed_by(grads)
    return drop_unused(backward.with_definitions(tuple(d for d in backward.definitions if d.name in needed)))
