"""Parse DT text into a Program by recursive descent, one method per grammar rule."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

from . import expr as ex
from .algorithm import Algorithm, Definition
from .checks import check_program
from .errors import DEPTH, DTError, Position
from .hints import call_hint, token_hint
from .lexer import Places, Token, tokens
from .name_resolution import rename_nested_labels, resolve_names
from .schedule import PRIMITIVES, Argument, Grouped, Named, Primitive, Program, Schedule, Share, Sized

_DECLARATIONS = {"Func": "funcs", "In": "inputs", "SIn": "scalars", "Var": "vars", "RVar": "rvars"}
_STATEMENTS = f"a declaration ({', '.join((*_DECLARATIONS, 'Param', 'Extent'))}), a definition f[...] = ...; or a schedule statement f.block(...);"


def parse(text: str, source: str = "<string>", places: Places | None = None) -> Program:
    """Parse and check the program in ``text``.

    ``source`` names it in error messages. ``places`` maps offsets to lines and columns where the text is part of a file. Raises DTError.
    """
    start = Position(*(places(0) if places else (1, 1)), source)
    try:
        parser = _Parser(text, source, places)
        program = resolve_names(parser.program())
        program = replace(program, algorithm=rename_nested_labels(program.algorithm))
        check_program(program, {**parser.declared_at, "": start})
    except RecursionError:
        raise DTError("an expression is nested too deeply", allowed=DEPTH, at=start) from None
    return program


@lru_cache
def parse_expression(text: str) -> ex.Expr:
    """Parse an expression alone. Its names stay ``Name``: nothing is declared."""
    return _Parser(text, "<expression>", None).expression()


def parse_schedule(text: str, source: str = "<schedule>", places: Places | None = None) -> Schedule:
    """Parse a schedule alone. It must be checked against an algorithm later."""
    parser = _Parser(text, source, places)
    primitives = []
    while parser.token.kind != "end":
        primitives.append(parser.primitive(parser.expect("name", "a Func")))
    return Schedule(tuple(primitives))


class _Parser:
    def __init__(self, text: str, source: str, places: Places | None = None):
        self._tokens = list(tokens(text, source, places))
        self._at = 0
        self.declared_at: dict[str, Position] = {}

    # -- tokens ---------------------------------------------------------------------------------------------------

    @property
    def token(self) -> Token:
        return self._tokens[self._at]

    def _next(self) -> Token:
        token = self.token
        self._at += token.kind != "end"
        return token

    def accept(self, text: str) -> bool:
        if self.token.text == text and self.token.kind in ("symbol", "name"):
            self._next()
            return True
        return False

    def expect(self, what: str, meaning: str | None = None) -> Token:
        """Consume the next token, which must be of kind ``what`` (``name``, ``number``) or be the symbol ``what``."""
        token = self.token
        if token.kind == what or (token.kind == "symbol" and token.text == what):
            return self._next()
        if meaning and token.text == "=":
            raise DTError("syntax", found="'='", allowed=meaning, at=token.pos)
        raise self._syntax(meaning or (what if what in ("name", "number") else repr(what)))

    def _syntax(self, allowed: str) -> DTError:
        """Return the error for the next token. A hint for constructs of other languages replaces ``allowed``."""
        return DTError("syntax", found=repr(self.token.text), allowed=self._hint(self._at) or allowed, at=self.token.pos)

    def _hint(self, at: int) -> str:
        """Return the hint for token ``at``, if it is a construct of another language; "" for names of the program."""
        before, found, after = (self._tokens[i].text if 0 <= i < len(self._tokens) else "" for i in (at - 1, at, at + 1))
        return "" if found in self.declared_at else token_hint(before, found, after)

    def integer(self, meaning: str) -> int:
        negative = self.accept("-")
        token = self.expect("number", meaning)
        if not token.text.isdigit():
            raise DTError("syntax", found=repr(token.text), allowed=meaning, at=token.pos)
        return -_whole(token) if negative else _whole(token)

    # -- statements -----------------------------------------------------------------------------------------------

    def program(self) -> Program:
        declared: dict[str, list[str]] = {kind: [] for kind in _DECLARATIONS.values()}
        params: list[tuple[str, int | bool]] = []
        definitions: list[Definition] = []
        primitives: list[Primitive] = []
        extents: list[tuple[str, str, int]] = []
        formulas: list[tuple[str, ex.Expr]] = []
        while self.token.kind != "end":
            name = self.expect("name", _STATEMENTS)
            if name.text in _DECLARATIONS:
                declared[_DECLARATIONS[name.text]] += self._names()
            elif name.text == "Param" and self.token.kind == "name":
                params += self._params()
            elif name.text == "Extent" and self.token.kind == "name":
                label, value = self._extent()
                if isinstance(value, ex.Expr):
                    formulas.append((label, value))
                else:
                    extents.append((label, *value))
            elif self.token.text == "[":
                definitions.append(self._definition(name))
            elif self.token.text == ".":
                primitives.append(self.primitive(name))
            else:
                raise self._no_statement(name)
        names: dict[str, Any] = {k: tuple(v) for k, v in declared.items()}
        algorithm = Algorithm(**names, params=tuple(params), definitions=tuple(definitions), extents=tuple(extents), formulas=tuple(formulas))
        return Program(algorithm, Schedule(tuple(primitives)))

    def _no_statement(self, name: Token) -> DTError:
        """Return the error for text that starts with ``name`` and is not a statement."""
        token = self.token
        word = next((w for w in (*_DECLARATIONS, "Param", "Extent") if w.lower() == name.text.lower()), "")
        if token.kind == "name" and word:
            return DTError("syntax", found=repr(name.text), allowed=word, at=name.pos)
        if hint := self._hint(self._at - 1):
            return DTError("syntax", found=repr(name.text), allowed=hint, at=name.pos)
        if token.text in ("(", "="):
            return DTError("syntax", found=repr(token.text), allowed=f"{name.text}[x, ...] = expression;", at=token.pos)
        words = ", ".join((*_DECLARATIONS, "Param", "Extent"))
        return self._syntax(f"'[' or '.' after {name.text!r}, or a declaration ({words})")

    def _declare(self, token: Token) -> str:
        if token.text in self.declared_at:
            raise DTError("a name is declared once", found=f"{token.text!r} again", at=token.pos)
        if token.text in RESERVED:
            raise DTError("a name of the language cannot be declared", found=repr(token.text), at=token.pos)
        self.declared_at[token.text] = token.pos
        return token.text

    def _names(self) -> list[str]:
        names = [self._declare(self.expect("name", "a name to declare"))]
        while self.accept(","):
            names.append(self._declare(self.expect("name", "a name to declare")))
        self.expect(";")
        return names

    def _params(self) -> list[tuple[str, int | bool]]:
        found = []
        while True:
            name = self._declare(self.expect("name", "a parameter"))
            self.expect("=")
            found.append((name, self._param_value()))
            if not self.accept(","):
                self.expect(";")
                return found

    def _extent(self) -> tuple[str, tuple[str, int] | ex.Expr]:
        """Parse ``Extent j = K[1];`` (label j has the size of dimension 1 of input K), ``Extent r = 4;`` or ``Extent s = K[1] / 2;``."""
        name = self.expect("name", "a label")
        label = name.text
        self.declared_at.setdefault(f"Extent {label}", name.pos)
        self.expect("=")
        value = self.expression()
        self.expect(";", "';', or + - * / % between whole numbers")
        match value:
            case ex.Const(size) if type(size) is int:
                return label, ("", size)
            case ex.Access(tensor, (ex.Const(dim),)) if type(dim) is int:
                return label, (tensor, dim)
            case ex.Access(tensor, (ex.Unary("-", ex.Const(dim)),)) if type(dim) is int:
                return label, (tensor, -dim)  # refused by a check
        return label, value

    def _param_value(self) -> int | bool:
        for word, value in (("true", True), ("false", False)):
            if self.accept(word):
                return value
        return self.integer("an integer, true or false")

    def _definition(self, name: Token) -> Definition:
        self.expect("[")
        labels = []
        if not self.accept("]"):
            labels.append(self.expect("name", "a label").text)
            while self.accept(","):
                labels.append(self.expect("name", "a label").text)
            if self.token.text == "[":
                allowed = f"a sum of what belongs to each: {name.text}[i] = rsum(where({labels[-1]}[x] == i, ..., 0), x);"
                raise DTError("a definition has labels on its left", found=f"{labels[-1]}[...]", allowed=allowed, at=self.token.pos)
            self.expect("]")
        if self.token.text in ("+", "-", "*", "/"):
            allowed = f"one definition {name.text}[...] = expression; with sums as rsum(e, k)"
            raise DTError("a Func is defined once", found=f"{self.token.text}{self._tokens[self._at + 1].text}", allowed=allowed, at=self.token.pos)
        self.expect("=")
        expr = self.expression()
        self.expect(";")
        return Definition(name.text, tuple(labels), expr, name.pos)

    def primitive(self, func: Token) -> Primitive:
        self.expect(".")
        name = self.expect("name", "a schedule primitive")
        if name.text not in PRIMITIVES:
            raise DTError("unknown schedule primitive", found=repr(name.text), allowed=", ".join(PRIMITIVES), at=name.pos)
        self.expect("(")
        args: list[Argument] = []
        while not self.accept(")"):
            args.append(self._argument())
            if not self.accept(","):
                self.expect(")", f"{args[-1]}:size" if self.token.text == "=" else None)
                break
        self.expect(";")
        return Primitive(func.text, name.text, tuple(args), func.pos)

    def _argument(self) -> Argument:
        if self.token.kind == "number" or self.token.text == "-":
            return self.integer("an integer")
        name = self.expect("name", "a name or an integer").text
        if not self.accept(":"):
            return name
        if self.token.kind == "name":
            second = self._next().text
            if self.accept("/"):
                return Grouped(name, second, self.integer("a group size"))
            return Named(name, second)
        size = self.integer("an integer")
        return Share(name, size, self.integer("an integer")) if self.accept("/") else Sized(name, size)

    # -- expressions, loosest first -------------------------------------------------------------------------------

    def expression(self, tightest: int = 1) -> ex.Expr:
        """Parse binary operators by precedence climbing."""
        left = self._prefix(tightest)
        while (own := ex.PRECEDENCE.get(self.token.text, 0)) >= tightest and self.token.kind in ("symbol", "name"):
            op = self._next()
            right = self.expression(own + 1)
            left = ex.Binary(op.text, left, right, pos=op.pos)
            if own == ex.PRECEDENCE["<"] and self.token.text in ex.COMPARISONS:
                raise DTError(
                    "comparisons do not chain", found=repr(self.token.text), allowed="'and' between two comparisons", at=self.token.pos
                )
        return left

    def _prefix(self, tightest: int) -> ex.Expr:
        token = self.token
        if token.text == "not" and tightest <= ex.NOT_PRECEDENCE:
            self._next()
            return ex.Unary("not", self.expression(ex.NOT_PRECEDENCE), pos=token.pos)
        if token.text in ("-", "~"):
            self._next()
            return ex.Unary(token.text, self.expression(ex.NEGATE_PRECEDENCE), pos=token.pos)
        return self._atom()

    def _atom(self) -> ex.Expr:
        token = self._next()
        if token.kind == "number":
            return ex.Const(_whole(token) if token.text.isdigit() else _real(token), pos=token.pos)
        if token.text == "(":
            inner = self.expression()
            self.expect(")")
            return inner
        if token.kind != "name" or token.text in ("and", "or", "not"):
            self._at -= token.kind != "end"
            raise self._syntax("an expression")
        if token.text in ("inf", "true", "false"):
            return ex.Const({"inf": math.inf, "true": True, "false": False}[token.text], pos=token.pos)
        if self.token.text == "(":
            return self._call(token)
        if self.token.kind == "name" and self._hint(self._at - 1):  # for example ``if A[x] > 0`` or ``lambda x``
            self._at -= 1
            raise self._syntax("an expression")
        if self.accept("["):
            index = tuple(i.transform(_floor_division) for i in self._expressions("]"))
            if self.token.text == "[":
                raise DTError("syntax", found="'['", allowed=f"all indices in one pair of brackets: {token.text}[x, y]", at=self.token.pos)
            return ex.Access(token.text, index, pos=token.pos)
        return ex.Name(token.text, pos=token.pos)

    def _expressions(self, close: str) -> tuple[ex.Expr, ...]:
        if self.accept(close):
            return ()
        found = [self.expression()]
        while self.accept(","):
            found.append(self.expression())
        self.expect(close)
        return tuple(found)

    def _labels(self, example: str) -> tuple[str, ...]:
        labels = []
        while self.accept(","):
            labels.append(self.expect("name", "a label to reduce over").text)
        self.expect(")", f"labels by name: {example}" if self.token.text == "=" else "',' and a label to reduce over" if not labels else "')'")
        if not labels:
            raise DTError("a reduction names the label it runs over", found="none", allowed=example, at=self.token.pos)
        return tuple(labels)

    def _call(self, name: Token) -> ex.Expr:
        self.expect("(")
        if name.text == "len":
            label = self.expect("name", "a label").text
            self.expect(")")
            return ex.Len(label, pos=name.pos)
        if ex.REDUCTIONS.get(name.text) in ex.RANKED:
            return self._ranked(name)
        if name.text in ex.REDUCTIONS:
            arg = self.expression()
            return ex.Reduce(ex.REDUCTIONS[name.text], arg, self._labels(f"{name.text}(e, k)"), pos=name.pos)
        if name.text == "rdot":
            left = self.expression()
            self.expect(",", "',' and the second factor: rdot(a, b, k)")
            right = self.expression()
            return ex.Dot(left, right, self._labels("rdot(a, b, k)"), pos=name.pos)
        if name.text in ("rscan", "rrecur"):
            return self._scan(name)
        if name.text == "cast":
            arg = self.expression()
            self.expect(",")
            dtype = self.expect("name", "a dtype")
            self.expect(")")
            if dtype.text not in ex.TORCH_NAMES:
                raise DTError("unknown dtype", found=repr(dtype.text), allowed=", ".join(ex.TORCH_NAMES), at=dtype.pos)
            return ex.Cast(arg, dtype.text, pos=name.pos)
        if name.text == "write":
            return self._write(name)
        if name.text == "reshape":
            if self.accept(")"):
                raise DTError("reshape takes a value and its shape", found="nothing", allowed="reshape(e, x, 1)", at=name.pos)
            arg, *shape = self._expressions(")")
            return ex.Reshape(arg, tuple(shape), pos=name.pos)
        if name.text not in ex.FUNCTIONS:
            hint = f"{name.text}[...]" if name.text in self.declared_at else call_hint(name.text)
            allowed = hint or ", ".join([*ex.FUNCTIONS, *ex.REDUCTIONS, "rdot", "rscan", "rrecur", "cast", "reshape", "write", "len"])
            raise DTError("unknown function", found=repr(name.text), allowed=allowed, at=name.pos)
        args = self._expressions(")")
        count, most = (function := ex.FUNCTIONS[name.text]).arguments, function.most or function.arguments
        if most > count and not count <= len(args) <= most:
            raise DTError(f"{name.text} takes a seed and 1 to {most - 1} integers", found=f"{len(args)} argument(s)", allowed=f"{name.text}(seed, x, y)", at=name.pos)
        if most == count and len(args) != count:
            allowed = f"{name.text}[...] for an element of {name.text}" if name.text in self.declared_at else ""
            raise DTError(f"{name.text} takes {count} argument(s)", found=str(len(args)), allowed=allowed, at=name.pos)
        return ex.Call(name.text, args, pos=name.pos)

    def _write(self, name: Token) -> ex.Expr:
        """Parse the rest of ``write(e, K[t[x]])`` or ``write(e, K[t[x]], condition)``."""
        form = "write(e, K[i, j]) or write(e, K[i, j], condition)"
        value, *rest = self._expressions(")") or (ex.Const(0),)
        if not 1 <= len(rest) <= 2:
            raise DTError("write takes a value, an element of an In, and perhaps a condition", found=f"{len(rest) + 1} argument(s)", allowed=form, at=name.pos)
        if not isinstance(rest[0], ex.Access):
            raise DTError("a write names the element that it changes", found=str(rest[0]), allowed=form, at=rest[0].pos or name.pos)
        return ex.Write(value, rest[0], *rest[1:], pos=name.pos)

    def _ranked(self, name: Token) -> ex.Expr:
        """Parse the rest of ``rtopk(e, y, j)``."""
        form = f"{name.text}(e, k, j), j a label of constant extent or a number"
        arg = self.expression()
        self.expect(",", f"',' and a label to reduce over: {form}")
        label = self.expect("name", f"a label: {form}").text
        self.expect(",", f"',' and a rank, 0 for the largest: {form}")
        rank = self.expression()
        self.expect(")")
        return ex.Reduce(ex.REDUCTIONS[name.text], arg, (label,), rank, pos=name.pos)

    def _scan(self, name: Token) -> ex.Expr:
        """Parse the rest of ``rscan(sum, e, t)`` or ``rrecur(a, b, t)``, with ``exclusive`` and ``reversed`` after the label."""
        form = "rrecur(a, b, t)" if name.text == "rrecur" else "rscan(sum, e, t)"
        kind = "recur"
        if name.text == "rscan":
            token = self.expect("name", f"one of {', '.join(ex.SCANS)}: {form}")
            if (kind := token.text) not in ex.SCANS:
                raise DTError("unknown scan", found=repr(kind), allowed=f"{', '.join(ex.SCANS)}: {form}", at=token.pos)
            self.expect(",", f"',' and the terms: {form}")
        args = [self.expression()]
        if kind == "recur":
            self.expect(",", f"',' and what is added: {form}")
            args.append(self.expression())
        self.expect(",", f"',' and the label to run along: {form}")
        label, said = self.expect("name", f"a label: {form}").text, set()
        while self.accept(","):
            word = self.expect("name", "reversed" if kind == "recur" else "reversed, exclusive")
            if word.text not in ("reversed", *(["exclusive"] if kind != "recur" else [])) or word.text in said:
                raise DTError("how a scan runs", found=repr(word.text), allowed="reversed" if kind == "recur" else "reversed, exclusive", at=word.pos)
            said.add(word.text)
        self.expect(")")
        return ex.Scan(kind, tuple(args), label, "reversed" in said, "exclusive" in said, pos=name.pos)


def _floor_division(node: ex.Expr) -> ex.Expr:
    """Write ``//`` as ``/``, which rounds down in an index."""
    return ex.Binary("/", node.left, node.right, pos=node.pos) if isinstance(node, ex.Binary) and node.op == "//" else node


def _whole(token: Token) -> int:
    if len(token.text.lstrip("0")) > 18:
        raise DTError("an integer has at most 18 digits", found=f"{len(token.text)} digits", at=token.pos)
    return int(token.text)


def _real(token: Token) -> float:
    value = float(token.text)
    if math.isinf(value):
        raise DTError("a number is finite", found=token.text, allowed="inf, where that is meant", at=token.pos)
    return value


#: functions and reductions whose names a program may declare for something else
_NAMES = frozenset({*(name for name, f in ex.FUNCTIONS.items() if f.is_name), *ex.NEW_REDUCTIONS, "write"})
#: words that cannot be declared
RESERVED = (
    frozenset({*_DECLARATIONS, *ex.FUNCTIONS, *ex.REDUCTIONS, "rdot", "rscan", "rrecur", "cast", "reshape", "len", "inf", "true", "false", "and", "or", "not"}) - _NAMES
)
