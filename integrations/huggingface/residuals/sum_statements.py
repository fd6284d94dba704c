"""Find residual sums that a norm reads in the source of a class's forward, and rewrite the forward with one call for both.

    hidden_states = residual + hidden_states                       hidden_states, residual = add_and_norm(self, "N", residual, hidden_states)
    residual = hidden_states
    hidden_states = self.N(hidden_states)

    hidden_states = residual + hidden_states                       hidden_states = add_last(self, residual, hidden_states)
    return hidden_states

All other statements stay what they are. The code that the source compiles to must be the code that the class has.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

from torch import nn

from ..patching.source_inspection import once_a_class

JOINED, LAST = "_dtkernels_add_and_norm", "_dtkernels_add_last"  # the names of the two calls


@dataclass
class Found:
    """What a forward holds: ``code`` with calls in place of sums; ``norms``, children that follow a sum; ``last``: whether one is returned."""

    code: types.CodeType
    joined: frozenset[str] | None = None
    norms: list[str] = field(default_factory=list)
    last: bool = False


@dataclass
class _Source:
    tree: ast.Module
    function: ast.FunctionDef

    @property
    def itself(self) -> str:
        return self.function.args.args[0].arg


def rewritten(forward: types.FunctionType, joined: frozenset[str] | None = None) -> Found | None:
    """Return a forward with its sums joined to norms; None if it has none, or its source is missing.

    ``joined``: the children among those that follow a sum that are norms; None for all.
    """
    source = _source(forward)
    if source is None or _code(source, forward) is None:
        return None
    found = Found(forward.__code__, joined)
    for node in ast.walk(source.function):
        for name in ("body", "orelse"):
            if isinstance(statements := getattr(node, name, None), list):
                setattr(node, name, _joined(statements, source.itself, found))
    if not (found.norms or found.last):
        return None
    ast.fix_missing_locations(source.tree)
    found.code = cast(types.CodeType, _compiled(source, forward))
    return found


@once_a_class
def first_norm(cls: type[nn.Module]) -> str | None:
    """Return the name of the child that a forward calls with its first argument, before anything changes that; None if there is none."""
    source = _source(inspect.unwrap(cls.forward))
    if source is None or len(source.function.args.args) < 2:
        return None
    given = source.function.args.args[1].arg
    for statement in source.function.body:
        if (name := _norm_of(statement, source.itself, given)) is not None:
            return name
        if given in _assigned(statement):
            return None
    return None


@once_a_class
def norm_behind(cls: type[nn.Module], layers: str) -> str | None:
    """Return the name of the child that a forward calls with the result of a loop over its child ``layers``."""
    source = _source(inspect.unwrap(cls.forward))
    if source is None:
        return None
    for statements in _blocks(source.function):
        for i, statement in enumerate(statements):
            loops = isinstance(statement, ast.For) and any(_child(n, source.itself) == layers for n in ast.walk(statement.iter))
            if loops and i + 1 < len(statements):
                made = _assigned(statement)
                return next((name for total in made if (name := _norm_of(statements[i + 1], source.itself, total)) is not None), None)
    return None


def _joined(statements: list[ast.stmt], itself: str, found: Found) -> list[ast.stmt]:
    done: list[ast.stmt] = []
    while statements:
        taken, made = _join(statements, itself, found)
        done += made or statements[:1]
        statements = statements[taken or 1 :]
    return done


def _join(statements: list[ast.stmt], itself: str, found: Found) -> tuple[int, list[ast.stmt]]:
    """Return how many of the first statements are replaced, and by what."""
    total, added = _sum(statements[0])
    if total is None or added is None or len(statements) < 2:
        return 0, []
    call = [ast.Name(itself, ast.Load()), added.left, added.right]
    returned = statements[1]
    if isinstance(returned, ast.Return) and isinstance(returned.value, ast.Name) and returned.value.id == total:
        found.last = True
        return 1, [ast.copy_location(ast.Assign([ast.Name(total, ast.Store())], _call(LAST, call)), statements[0])]
    copy = _renamed(statements[1], total)
    place = 1 if copy is None else 2
    norm = _norm_of(statements[place], itself, total) if place < len(statements) else None
    if norm is None or found.joined is not None and norm not in found.joined:
        return 0, []
    normed = cast(ast.Name, cast(ast.Assign, statements[place]).targets[0]).id
    kept = copy if normed == total else total
    if kept is None:
        return 0, []  # nothing else reads the sum
    found.norms.append(norm)
    call.insert(1, ast.Constant(norm))
    targets = ast.Tuple([ast.Name(normed, ast.Store()), ast.Name(kept, ast.Store())], ast.Store())
    made: list[ast.stmt] = [ast.copy_location(ast.Assign([targets], _call(JOINED, call)), statements[0])]
    return place + 1, made + (statements[1:2] if copy is not None and kept != copy else [])


def _call(name: str, args: list) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), args, [])


def _sum(statement: ast.stmt) -> tuple[str | None, ast.BinOp | None]:
    """Return (name, sum) of ``name = a + b``."""
    name, value = _assignment(statement)
    return (name, value) if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) else (None, None)


def _renamed(statement: ast.stmt, total: str) -> str | None:
    """Return the name in ``name = total``."""
    name, value = _assignment(statement)
    return name if isinstance(value, ast.Name) and value.id == total else None


def _norm_of(statement: ast.stmt, itself: str, total: str) -> str | None:
    """Return the child N in ``name = self.N(total)``."""
    _, value = _assignment(statement)
    if not isinstance(value, ast.Call) or value.keywords or len(value.args) != 1:
        return None
    (given,) = value.args
    return _child(value.func, itself) if isinstance(given, ast.Name) and given.id == total else None


def _assignment(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(target := statement.targets[0], ast.Name):
        return target.id, statement.value
    return None, None


def _child(node: ast.AST, itself: str) -> str | None:
    """Return the name in ``self.name``."""
    return node.attr if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == itself else None


def _assigned(statement: ast.stmt) -> list[str]:
    return [n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def _blocks(function: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function):
        for name in ("body", "orelse"):
            if isinstance(statements := getattr(node, name, None), list):
                yield statements


def _source(function: object) -> _Source | None:
    """Return the syntax tree of a method, alone in a class of the same name, so that it compiles to the same code."""
    if not inspect.isfunction(function):
        return None
    owner = function.__qualname__.rpartition(".")[0].rpartition(".")[2]
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse("".join([f"class {owner}:\n", *lines]))  # the lines as they are: a docstring is a constant of the code
    except (OSError, TypeError, SyntaxError):
        return None
    inside = cast(ast.ClassDef, tree.body[0])
    made = inside.body[0] if len(tree.body) == len(inside.body) == 1 else None
    if not isinstance(made, ast.FunctionDef) or not made.args.args:
        return None
    made.decorator_list = []
    ast.increment_lineno(tree, first - 2)
    tree.body[:0] = _imports(function)
    return _Source(tree, made)


def _imports(function: types.FunctionType) -> list[ast.stmt]:
    """Return imports of the names that the file of a function imports: Python compiles a call of their attributes in another way."""
    scope = function.__globals__
    named = _names(function.__code__)
    names = [n for n in named if n in scope and getattr(scope[n], "__module__", None) != scope.get("__name__")]
    return [ast.fix_missing_locations(ast.Import([ast.alias(n)])) for n in names]


def _names(code: types.CodeType) -> list[str]:
    """Return the names that a code and those inside it look up."""
    return [*code.co_names, *(name for inner in _codes(code) for name in _names(inner))]


def _code(source: _Source, forward: types.FunctionType) -> types.CodeType | None:
    """Return the code that a source compiles to, if the function has the same."""
    code = _compiled(source, forward)
    return code if code is not None and _same(code, forward.__code__) else None


def _compiled(source: _Source, forward: types.FunctionType) -> types.CodeType | None:
    flags = forward.__code__.co_flags & __future__.annotations.compiler_flag
    module = compile(source.tree, forward.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    return next((code for inside in _codes(module) for code in _codes(inside) if code.co_name == forward.__code__.co_name), None)


def _codes(code: types.CodeType) -> list[types.CodeType]:
    return [held for held in code.co_consts if isinstance(held, types.CodeType)]


def _same(one: types.CodeType, other: types.CodeType) -> bool:
    """Return whether two codes do the same, wherever their lines are."""
    names = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags")
    if any(getattr(one, name) != getattr(other, name) for name in names) or len(one.co_consts) != len(other.co_consts):
        return False
    pairs = zip(one.co_consts, other.co_consts, strict=True)
    return all(_same(a, b) if isinstance(a, types.CodeType) and isinstance(b, types.CodeType) else type(a) is type(b) and a == b for a, b in pairs)
