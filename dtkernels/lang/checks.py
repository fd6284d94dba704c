"""Check programs: every rule that must hold before lowering, one function per rule."""

from __future__ import annotations

from . import expr as ex
from .algorithm import Algorithm, Definition
from .errors import DTError, Position
from .extents.formulas import check_formulas
from .reserved_names import check_names
from .schedule import Program
from .schedule_checks import check_effects, check_schedule

#: where each name is declared; "" is the start of the text
Places = dict[str, Position]


def check_program(program: Program, declared_at: Places | None = None) -> None:
    """Raise DTError for the first violated rule. ``declared_at`` has the positions of declarations."""
    check_algorithm(program.algorithm, declared_at or {})
    check_names(program.algorithm, declared_at or {})
    check_schedule(program.schedule, program.algorithm)


def check_given(program: Program, results: tuple[str, ...] = ()) -> None:
    """Raise DTError for parts of a user's program without effect: an unused Func, a schedule statement.

    ``results`` defaults to the program's outputs. ``parse`` does not check this: it also reads algorithms whose results are named
    elsewhere, and schedules that a tool varies.
    """
    _check_results(program, results or program.outputs())
    check_effects(program.schedule)


def check_algorithm(algorithm: Algorithm, declared_at: Places) -> None:
    """Check every rule about the algorithm alone."""
    if not algorithm.definitions:
        raise DTError("a program defines at least one Func", found="no definition", at=declared_at.get(""))
    _check_definitions(algorithm, declared_at)
    for definition in algorithm.definitions:
        _check_accesses(algorithm, definition)
        _check_labels(algorithm, definition)
        _check_remainders(algorithm, definition)
        expression_kind(definition.expr)
    _check_writes(algorithm)
    _check_used(algorithm, declared_at)
    _check_extents(algorithm, declared_at)


def _check_definitions(algorithm: Algorithm, declared_at: Places) -> None:
    seen: set[str] = set()
    for d in algorithm.definitions:
        if d.name not in algorithm.funcs:
            what = "an In" if d.name in algorithm.inputs else "not declared"
            raise DTError(
                "only a declared Func is defined",
                found=f"{d.name!r}, which is {what}",
                allowed=", ".join(algorithm.funcs) or "none declared",
                at=d.pos,
            )
        if d.name in seen:
            raise DTError("a Func is defined once", found=f"{d.name!r} again", at=d.pos)
        if len(set(d.labels)) != len(d.labels):
            raise DTError("a Func is defined over distinct labels", found=f"[{', '.join(d.labels)}]", at=d.pos)
        for label in d.labels:
            if label not in algorithm.labels:
                raise DTError("undeclared label", found=repr(label), allowed=", ".join(algorithm.labels), at=d.pos)
        seen.add(d.name)
    for func in algorithm.funcs:
        if func not in seen:
            raise DTError("a declared Func is defined", found=f"no definition of {func!r}", at=declared_at.get(func))


def _check_accesses(algorithm: Algorithm, definition: Definition) -> None:
    before = {d.name for d in algorithm.definitions[: algorithm.definitions.index(definition)]}
    ranks: dict[str, int] = {}
    for d in algorithm.definitions:
        for access in ex.accesses(d.expr):
            ranks.setdefault(access.tensor, len(access.index))
    for access in ex.accesses(definition.expr):
        if access.tensor in algorithm:
            if access.tensor not in before:
                raise DTError(
                    "a Func is defined before it is used",
                    found=repr(access.tensor),
                    allowed=", ".join(sorted(before)) or "no Func yet",
                    at=access.pos,
                )
            rank = len(algorithm[access.tensor].labels)
        elif access.tensor in algorithm.inputs:
            rank = ranks[access.tensor]
        else:
            raise DTError(
                "undeclared tensor", found=repr(access.tensor), allowed=", ".join(algorithm.inputs + algorithm.funcs), at=access.pos
            )
        if len(access.index) != rank:
            size = f"; len(k) of a label k for the size of a dimension, Extent k = {access};" if access.tensor in algorithm.inputs and isinstance(access.index[0], ex.Const) else ""
            raise DTError("rank mismatch", found=f"{access.tensor} with {len(access.index)} indices", allowed=f"{rank}{size}", at=access.pos)
        for index in access.index:
            _check_index(algorithm, index, access)


def _check_index(algorithm: Algorithm, index: ex.Expr, access: ex.Access) -> None:
    """Check that an index is integer arithmetic, possibly on an element of an input: ``W[t[x], y]``."""
    todo = [index]
    while todo:
        node = todo.pop()
        if isinstance(node, ex.Access) and (node.tensor in algorithm.inputs or node.tensor in algorithm.integer_tensors()):
            continue  # its own index is checked separately
        todo += node.children()
        ok = isinstance(node, (ex.Label, ex.Scalar, ex.Param, ex.Len)) or (isinstance(node, ex.Const) and type(node.value) is int)
        ok = ok or (isinstance(node, ex.Binary) and node.op in "+-*/%") or (isinstance(node, ex.Unary) and node.op == "-")
        ok = ok or (isinstance(node, ex.Binary) and node.op in ex.INTEGER_OPERATORS) or (isinstance(node, ex.Unary) and node.op == "~")
        if not ok:
            raise DTError(
                "an index is integer arithmetic on labels",
                found=str(node),
                allowed="labels, integers, SIn, parameters, len(), elements of an In or of a Func of integers (i[x] = cast(..., int32)), and + - * / % & | ^ ~ << >>",
                at=node.pos or access.pos,
            )


def _check_remainders(algorithm: Algorithm, definition: Definition) -> None:
    inputs, scalars = algorithm.integer_tensors(), algorithm.integer_scalars()
    within = {id(n) for a in ex.accesses(definition.expr) for i in a.index for n in i.walk()}  # indices are integers by another rule
    for node in definition.expr.walk():
        if isinstance(node, ex.Call) and node.fn in ex.RANDOM and (other := next((a for a in node.args if not ex.is_integer(a, inputs, scalars)), None)):
            allowed = "a seed and labels, integers, SIn, len(), integer inputs and + - * // % of them"
            raise DTError(f"{node.fn} is of whole numbers", found=str(other), allowed=allowed, at=other.pos or node.pos)
        if isinstance(node, (ex.Binary, ex.Unary)) and node.op in ("~", *ex.INTEGER_OPERATORS) and not ex.is_integer(node, inputs, scalars):
            raise DTError(
                f"{node.op} is of whole numbers",
                found=str(node),
                allowed="labels, integers, parameters, len(), integer inputs, casts to integers, and + - * % // & | ^ ~ << >> of them",
                at=node.pos,
            )
        if isinstance(node, ex.Binary) and node.op == "%" and id(node) not in within and not ex.is_integer(node, inputs, scalars):
            raise DTError(
                "% is of whole numbers",
                found=str(node),
                allowed="labels, integers, SIn, parameters, len(), integer inputs and + - * // % of them; a - b * floor(a / b) of other numbers",
                at=node.pos,
            )


def _check_labels(algorithm: Algorithm, definition: Definition) -> None:
    _check_reductions(algorithm, definition.expr, frozenset())
    for node in definition.expr.walk():
        if isinstance(node, (ex.Len, ex.Scan)) and node.label not in algorithm.labels:
            size = f"; len(k) with Extent k = {node.label}[0]; for the size of a dimension" if node.label in algorithm.inputs else ""
            raise DTError("undeclared label", found=repr(node.label), allowed=", ".join(algorithm.labels) + size, at=node.pos)
        if isinstance(node, ex.Reshape):
            own, shape = ex.free_labels(node.arg), {n.name if isinstance(n, ex.Label) else n for n in node.shape} - {ex.Const(1)}
            if own != shape:
                allowed = f"reshape({node.arg}, {', '.join([*sorted(own), '1'])})"
                raise DTError("reshape names the labels of its value, and 1", found=str(node), allowed=allowed, at=node.pos)
    stray = ex.free_labels(definition.expr) - set(definition.labels)
    if stray:
        label = sorted(stray)[0]
        at = next((n.pos for n in definition.expr.walk() if isinstance(n, ex.Label) and n.name == label), definition.pos)
        raise DTError(
            "a label on the right is on the left or reduced",
            found=f"{label!r} in {definition.name}",
            allowed=", ".join(definition.labels) or "none",
            at=at,
        )


def _check_reductions(algorithm: Algorithm, node: ex.Expr, bound: frozenset[str]) -> None:
    if isinstance(node, (ex.Reduce, ex.Dot)):
        for label in node.labels:
            if label not in algorithm.labels:
                raise DTError("undeclared label", found=repr(label), allowed=", ".join(algorithm.labels), at=node.pos)
        if bound & set(node.labels) or len(set(node.labels)) != len(node.labels):
            raise DTError("a label is reduced once", found=f"{', '.join(node.labels)} reduced twice", at=node.pos)
        bound |= frozenset(node.labels)
    for child in node.children():
        _check_reductions(algorithm, child, bound)


def _check_writes(algorithm: Algorithm) -> None:
    """Raise DTError for a write inside an expression, of what is no input, of what is read, or of several values to one element."""
    for d in algorithm.definitions:
        inner = next((n for n in d.expr.walk() if isinstance(n, ex.Write) and n is not d.expr), None)
        if inner is not None:
            raise DTError("a write is all of a definition", found=f"{inner} inside {d.name}", allowed=f"f[...] = {inner};", at=inner.pos)
    seen: dict[str, str] = {}
    for d in (d for d in algorithm.definitions if isinstance(d.expr, ex.Write)):
        place = d.expr.place  # type: ignore[attr-defined]
        tensor = place.tensor
        if tensor not in algorithm.inputs:
            raise DTError("a write changes an In", found=f"{tensor!r}", allowed=", ".join(algorithm.inputs), at=place.pos or d.pos)
        if tensor in seen:
            raise DTError("an In is written by one Func", found=f"{tensor} by {seen[tensor]} and {d.name}", allowed="one of them", at=d.pos)
        seen[tensor] = d.name
        missing = [x for x in d.labels if not any(x in ex.free_labels(i) for i in place.index)]
        if missing:
            raise DTError("every label of a write is in its index, so that each value has an element of its own", found=f"{place} without {missing[0]}",
                          allowed=f"a reduction over {missing[0]}", at=place.pos or d.pos)  # fmt: skip
    for d in algorithm.definitions:
        own = d.expr.place if isinstance(d.expr, ex.Write) else None
        for access in ex.accesses(d.expr):
            if access.tensor in seen and access is not own:
                raise DTError("what a program writes it does not read", found=f"{access} in {d.name}, which {seen[access.tensor]} writes",
                              allowed="two programs, one after the other", at=access.pos or d.pos)  # fmt: skip
            if access.tensor in algorithm and isinstance(algorithm[access.tensor].expr, ex.Write):
                raise DTError("a write is a result", found=f"{access.tensor}, read by {d.name}", allowed=f"{access.tensor}.compile(); and another program", at=access.pos)


def _check_written_results(algorithm: Algorithm, outputs: tuple[str, ...]) -> None:
    """Raise DTError for a write that no result is: it would not take place."""
    for d in algorithm.definitions:
        if isinstance(d.expr, ex.Write) and d.name not in outputs:
            raise DTError("a write is a result", found=f"{d.name} is not", allowed=f"{d.name}.compile();", at=d.pos)


def _check_used(algorithm: Algorithm, declared_at: Places) -> None:
    nodes = [n for d in algorithm.definitions for n in d.expr.walk()]
    used = {n.tensor for n in nodes if isinstance(n, ex.Access)} | {n.name for n in nodes if isinstance(n, (ex.Scalar, ex.Label, ex.Param))}
    used |= {label for n in nodes if isinstance(n, (ex.Reduce, ex.Dot)) for label in n.labels} | {
        n.label for n in nodes if isinstance(n, ex.Len)
    }
    used |= {label for d in algorithm.definitions for label in d.labels} | {tensor for _, tensor, _ in algorithm.extents}
    told = [n for _, formula in algorithm.formulas for n in formula.walk()]
    used |= {n.tensor for n in told if isinstance(n, ex.Access)} | {n.name for n in told if isinstance(n, ex.Param)}
    for word, names in (
        ("In", algorithm.inputs),
        ("SIn", algorithm.scalars),
        ("label", algorithm.labels),
        ("Param", tuple(n for n, _ in algorithm.params)),
    ):
        for name in names:
            if name not in used:
                raise DTError("what is declared is used", found=f"{word} {name!r} is not", at=declared_at.get(name))
    reduced = {label for n in nodes if isinstance(n, (ex.Reduce, ex.Dot)) for label in n.labels}
    for label in algorithm.rvars:
        if label not in reduced:
            raise DTError("an RVar is reduced somewhere", found=f"{label!r} is not", allowed=f"Var {label}", at=declared_at.get(label))
    results = {label for d in algorithm.definitions for label in d.labels}
    measured = {n.label for n in nodes if isinstance(n, ex.Len)} & {label for label, *_ in (*algorithm.extents, *algorithm.formulas)}
    for label in algorithm.vars:
        if label not in results | measured:
            raise DTError("a Var is a dimension of a Func", found=f"{label!r} is not", allowed=f"RVar {label}", at=declared_at.get(label))


def _check_results(program: Program, outputs: tuple[str, ...]) -> None:
    """Check that every Func is a result or contributes to one. A schedule statement is not a use."""
    _check_written_results(program.algorithm, outputs)
    needed = program.algorithm.needed_by(outputs)
    unused = next((d for d in program.algorithm.definitions if d.name not in needed), None)
    if unused is None:
        return
    said = any(program.schedule.of(outputs[0], name) for name in ("compile", "compile_to_kernel"))
    also = "" if said else f" {outputs[0]}.compile();"
    raise DTError("what is declared is used", found=f"Func {unused.name!r} is not, by the result{'s' * (len(outputs) > 1)} {', '.join(outputs)}",
                  allowed=f"{unused.name}.compile();{also} where it is a result too", at=unused.pos)  # fmt: skip


def _check_extents(algorithm: Algorithm, declared_at: Places) -> None:
    _check_declared_extents(algorithm, declared_at)
    check_formulas(algorithm, declared_at)
    nodes = [n for d in algorithm.definitions for n in d.expr.walk()]
    needed = {label for d in algorithm.definitions for label in d.labels} | {n.label for n in nodes if isinstance(n, ex.Len)}
    needed |= {label for n in nodes if isinstance(n, (ex.Reduce, ex.Dot)) for label in n.labels}
    needed |= {n.label for _, f in algorithm.formulas for n in f.walk() if isinstance(n, ex.Len)}
    for label in sorted(needed):
        if algorithm.plain_extent(label) is None and not algorithm.formulas_of(label):
            raise DTError(
                "the extent of a label comes from an input it indexes by itself",
                found=f"no input with {label!r} as a plain index",
                allowed=_extent_remedy(algorithm, label),
                at=declared_at.get(label),
            )


def _extent_remedy(algorithm: Algorithm, label: str) -> str:
    """Return a declaration that would give ``label`` an extent: the size of a dimension it indexes by arithmetic, or a number."""
    group = algorithm.tied_labels(label)
    reads = [a for d in algorithm.definitions for a in ex.accesses(d.expr) if a.tensor in algorithm.inputs]
    inside = ((a.tensor, dim) for a in reads for dim, index in enumerate(a.index) if group & ex.free_labels(index))
    tensor, dim = next(inside, (algorithm.inputs[0], 0) if algorithm.inputs else ("", 0))
    number = f"Extent {label} = 4;"
    return f"Extent {label} = {tensor}[{dim}]; for the size of that dimension, or a number, {number}" if tensor else number


def _check_declared_extents(algorithm: Algorithm, declared_at: Places) -> None:
    """Check ``Extent j = K[1];``: label, input and dimension exist, and labels of one extent have one number."""
    ranks = {access.tensor: len(access.index) for d in algorithm.definitions for access in ex.accesses(d.expr)}
    for label, tensor, dim in algorithm.extents:
        at = declared_at.get(f"Extent {label}")
        if label not in algorithm.labels:
            raise DTError("undeclared label", found=repr(label), allowed=", ".join(algorithm.labels), at=at)
        if tensor and tensor not in algorithm.inputs:
            raise DTError("an extent is a number or that of an input", found=f"{tensor}[{dim}]", allowed=", ".join(algorithm.inputs), at=at)
        rank = ranks.get(tensor, dim + 1)
        if tensor and not 0 <= dim < rank:
            raise DTError(f"a dimension of {tensor}", found=f"{tensor}[{dim}]", allowed=f"0 to {max(rank, 1) - 1}", at=at)
        one = algorithm.constant_extent(label)
        if not tensor and dim != one:
            raise DTError("a label has one extent", found=f"{one} and {dim} of {label}", allowed="one of them", at=at)


def expression_kind(expr: ex.Expr) -> str:
    """Return ``number``, ``boolean`` or ``either`` (elements and parameters); raise DTError for an operand of the wrong kind."""
    match expr:
        case ex.Const(value):
            return "boolean" if isinstance(value, bool) else "number"
        case ex.Access():
            return "either"
        case ex.Param():
            return "either"
        case ex.Unary("not", arg):
            return _require_kind("boolean", "boolean", arg)
        case ex.Binary("and" | "or", left, right):
            return _require_kind("boolean", "boolean", left, right)
        case ex.Binary(op, left, right) if op in ex.COMPARISONS:
            if op in ("==", "!=") and "boolean" in (expression_kind(left), expression_kind(right)):
                return _require_kind("boolean", "boolean", left, right)
            return _require_kind("number", "boolean", left, right)
        case ex.Call(fn, args) if ex.FUNCTIONS[fn].is_boolean:
            return _require_kind("number", "boolean", *args)
        case ex.Call("where", (condition, a, b)):
            _require_kind("boolean", "boolean", condition)
            kinds = {expression_kind(a), expression_kind(b)} - {"either"}
            if len(kinds) > 1:
                raise DTError("both values of where are of one kind", found=str(expr), at=expr.pos)
            return kinds.pop() if kinds else "either"
        case ex.Reshape(arg, _):
            return expression_kind(arg)
        case ex.Cast(arg, dtype):
            expression_kind(arg)
            return "boolean" if dtype == "bool" else "number"
        case ex.Reduce("any" | "all", arg, _):
            return _require_kind("boolean", "boolean", arg)
        case ex.Write(value, _, condition):
            _require_kind("boolean", "boolean", *([] if condition is None else [condition]))
            return _require_kind("number", "number", value)
    return _require_kind("number", "number", *expr.children())


def _require_kind(kind: str, result: str, *args: ex.Expr) -> str:
    for arg in args:
        if expression_kind(arg) not in (kind, "either"):
            allowed = "where(c, 1, 0) of a condition c" if kind == "number" else "a comparison: a != 0 of a number a"
            raise DTError(f"a {kind} is wanted here", found=f"{arg}, a {expression_kind(arg)}", allowed=allowed, at=arg.pos)
    return result
