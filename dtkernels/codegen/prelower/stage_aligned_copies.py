"""Stage inputs through copies whose rows start at multiples of 64 elements: ``f.stage(A)``.

Before::

    f[x, y] = rdot(A[x, k], B[k, y], k);

After, with a separate kernel for the copy, whose buffer has rows of an aligned length::

    A_rows[x, k] = A[x, k];
    f[x, y] = rdot(A_rows[x, k], B[k, y], k);

With ``f.stage(A:x)`` the rows of the copy lie along ``x``, its last dimension. Images with channels first are read so with channels last, whatever
arithmetic indexes the other dimensions::

    f[o, x] = rdot(A[c, x + r], W[o, c, r], c, r);                         f.stage(A:c)

    A_rows[A_1, c] = A[c, A_1];
    f[o, x] = rdot(A_rows[x + r, c], W[o, c, r], c, r);

A dimension that is read in windows beyond its ends has room for these in the copy, filled with zeros, so that no load needs a mask (window_margins.py).

Loads of 16 bytes and tensor descriptors then work even where the caller's layout prevents them. Kernels that stage the same input share one
copy. A Func that another kernel computes needs none for aligned rows: ``f.stage(g)`` is ``g.align()``. With rows along another label, ``f.stage(g:c)``,
it is copied as an input is.

If an input is read only as ``exp(x - where(A > -inf, A, 0))``, the copy holds the shift in base two: the kernel computes
``exp2(log2(e) * x - A_rows)``, where ``A_rows`` is ``log2(e) * where(A > -inf, A, 0)``.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ...lang.errors import DTError
from ...lang.extents.linear_form import is_at_label
from ...lang.schedule import Bare, Evict, Merge, Names, Primitive, Program, Schedule, Sized, Sizes, Stage
from ...lang.schedule_checks import labels_in_kernel, reduction_labels
from .kernel_partition import funcs_in_kernel
from .partial_sums import free_name
from .window_margins import Margin, copied_windows

LOG2_E = ex.Const(math.log2(math.e))
ROWS, COLUMNS = 4, 256  #: block of a copy: 16 bytes a thread, with little waste past the end of a row
SIDE, TAPS = 64, 16  #: of a block of a copy with other rows: both reads and writes are of whole cache lines, or of all taps
SHORT, BESIDE = 16, 256  #: the same of rows that the reader's kernel specializes: a few vectors


def stage_aligned_copies(program: Program) -> Program:
    """Replace each ``stage`` in ``program`` by a Func that copies the input it names."""
    asked = [p for p in program.schedule.primitives if isinstance(p, Stage)]
    known: dict[tuple[str, bool, str], str] = {}
    margins = {(tensor, along): copied_windows(program, tensor, along) for p in asked for tensor, along in p.copies if along}
    for p in asked:
        for tensor, along in p.copies:
            program = _stage(program, p, tensor, along, known, margins.get((tensor, along), {}))
    return replace(program, schedule=Schedule(tuple(p for p in program.schedule.primitives if p.name != "stage"))) if asked else program


def _stage(program: Program, p: Primitive, tensor: str, along: str, known: dict[tuple[str, bool, str], str], margins: dict[int, Margin]) -> Program:
    algorithm: Algorithm = program.algorithm  # type: ignore[assignment]
    members = funcs_in_kernel(program, p.func)
    if tensor in algorithm:
        _check_stored(program, p, tensor, members)
        if not along:
            return _aligned(program, p, tensor)
        algorithm, own, last = _labels_of_func(program, p, tensor, along, margins)
    else:
        last = along = _label_of_dimension(algorithm, members, tensor, along)
        algorithm, own = _own_labels(algorithm, p, tensor, along, margins)
    order = tuple(sorted(range(len(own)), key=lambda d: own[d] == last))  # stable: the label asked for comes last
    shift = _read_as_shift(tensor, algorithm, members) if not along else None
    name, made = _copy_of(tensor, shift is not None, along, program, known)
    plain = ex.Access(tensor, tuple(margins[d].read(label) if d in margins else ex.Label(label) for d, label in enumerate(own)))
    labels = tuple(own[d] for d in order)
    copy = Definition(name, labels, algorithm.as_in_memory(plain) if shift is None else ex.Binary("*", shift, LOG2_E))

    def change(node: ex.Expr) -> ex.Expr:
        match node:
            case ex.Access(other, index) if other == tensor:
                return replace(node, tensor=name, index=tuple(margins[d].moved(index[d]) if d in margins else index[d] for d in order))
            case ex.Call("exp", (ex.Binary("-", x, s),)) if shift is not None and is_shift(s) and next(ex.accesses(s)).tensor == name:
                return ex.Call("exp2", (ex.Binary("-", ex.Binary("*", x, LOG2_E), next(ex.accesses(s))),))
        return node

    changed = tuple(replace(d, expr=d.expr.transform(change)) if d.name in members else d for d in algorithm.definitions)
    loops = {*labels_in_kernel(p.func, algorithm, program.schedule)}
    moving = {x for d in algorithm.definitions if d.name in members for a in ex.accesses(d.expr) if a.tensor == tensor for x, i in zip(own, a.index) if is_at_label(i)}
    if changed == algorithm.definitions or not all(loops & algorithm.tied_labels(x) for x in ((along,) if along else own) if x not in moving):
        raise DTError(f"stage names an input of {p.func}", found=tensor, allowed=", ".join(sorted(_inputs(algorithm, members))) or "none", at=p.pos)
    changed = tuple(d for d in changed if d.name != name)  # shared: it moves before the first of its readers
    readers = {*members} if tensor not in algorithm else set()
    first = next(i for i, d in enumerate(changed) if d.name in readers or any(a.tensor == name for a in ex.accesses(d.expr)))
    copied = () if made else _turned(program, p.func, name, own, last) if own[-1] != labels[-1] else _copying(name, labels)
    new = Schedule((*_renamed(program.schedule, members, tensor, name), *copied, *program.implied()))
    algorithm = replace(algorithm.with_definitions((*changed[:first], copy, *changed[first:])), vars=_vars(algorithm, own), rvars=_rest(algorithm, own))
    return replace(program, algorithm=algorithm, schedule=new)


def _label_of_dimension(algorithm: Algorithm, members: set[str], tensor: str, along: str) -> str:
    """Return what the dimension of ``tensor`` is called that a kernel reads along ``along``: other kernels may read it by another label."""
    read = (a.index for m in sorted(members) for a in ex.accesses(algorithm[m].expr) if a.tensor == tensor)
    dims = (d for index in read for d, i in enumerate(index) if i == ex.Label(along))
    own = next((algorithm.plain_labels(tensor)[d] for d in dims), None)
    return own or along


def _own_labels(algorithm: Algorithm, p: Primitive, tensor: str, along: str, margins: dict[int, Margin]) -> tuple[Algorithm, tuple[str, ...]]:
    """Return the labels of a copy's dimensions, those of the input; a dimension that arithmetic indexes gets one of its own if other rows are asked for."""
    written = set(algorithm.written.values())
    numbers = [t for t in algorithm.inputs if t not in algorithm.integer_inputs() and t not in written]  # a copy can hold these
    if tensor in written:
        raise DTError("stage copies an input that is read alone", found=f"{tensor}, which is written", allowed=", ".join(numbers) or "none", at=p.pos)
    if tensor not in numbers:
        raise DTError("stage names an input of numbers", found=f"{tensor}, whose elements stand in an index", allowed=", ".join(numbers) or "none", at=p.pos)
    labels = algorithm.plain_labels(tensor)
    if along:
        for d in (d for d, label in enumerate(labels) if label is None or label in labels[:d] or d in margins):
            if d in margins:
                algorithm, fresh = _with_margin_label(algorithm, margins[d], labels[:d])
            else:
                fresh = free_name(f"{tensor}_{d}", algorithm)
                algorithm = replace(algorithm, vars=(*algorithm.vars, fresh), extents=(*algorithm.extents, (fresh, tensor, d)))
            labels = (*labels[:d], fresh, *labels[d + 1 :])
    if not _are_distinct_labels(labels):
        allowed = ", ".join(t for t in numbers if _are_distinct_labels(algorithm.plain_labels(t))) or "none: it has no such"
        raise DTError("stage names an input that labels index by themselves", found=tensor, allowed=allowed, at=p.pos)
    if along and along not in labels:
        allowed = ", ".join(str(x) for x in labels if not str(x).startswith(f"{tensor}_"))
        raise DTError(f"the rows of a copy of {tensor} lie along a label that indexes it by itself", found=along, allowed=allowed or "none", at=p.pos)
    return algorithm, tuple(str(label) for label in labels)


def _labels_of_func(program: Program, p: Primitive, func: str, along: str, margins: dict[int, Margin]) -> tuple[Algorithm, tuple[str, ...], str]:
    """Return the same for a Func, and which label lies along its rows: dimensions have labels of their own, ``along`` is one by which the kernel of ``p`` reads it."""
    algorithm: Algorithm = program.algorithm  # type: ignore[assignment]
    own = algorithm[func].labels
    for d in margins:
        algorithm, fresh = _with_margin_label(algorithm, margins[d], own[:d])
        own = (*own[:d], fresh, *own[d + 1 :])
    read = [a.index for m in sorted(funcs_in_kernel(program, p.func)) for a in ex.accesses(algorithm[m].expr) if a.tensor == func]
    plain = {i.name: d for index in read for d, i in enumerate(index) if isinstance(i, ex.Label) and d not in margins}
    if along not in plain:
        raise DTError(f"the rows of a copy of {func} lie along a label that indexes it by itself", found=along, allowed=", ".join(plain) or "none", at=p.pos)
    return algorithm, own, own[plain[along]]


def _with_margin_label(algorithm: Algorithm, margin: Margin, taken: tuple[str | None, ...]) -> tuple[Algorithm, str]:
    """Return the label of a dimension with margins, one that another copy has made for the same extent if there is one, else a new one."""
    known = (x for x, extent in algorithm.formulas if extent == margin.extent and x.startswith(margin.label) and x not in taken)
    if label := next(known, ""):
        return algorithm, label
    label = free_name(margin.label, algorithm)
    return replace(algorithm, vars=(*algorithm.vars, label), formulas=(*algorithm.formulas, (label, margin.extent))), label


def _renamed(schedule: Schedule, members: set[str], tensor: str, name: str) -> tuple[Primitive, ...]:
    """Return the statements, with the copy in the place of the input where the kernel of ``members`` reads it."""

    def renamed(q: Primitive) -> Primitive:
        if q.func in members and isinstance(q, Evict):
            return replace(q, args=tuple(replace(a, name=name) if a.name == tensor else a for a in q.policies))
        if q.func in members and isinstance(q, Names) and q.name == "descriptor":
            return replace(q, args=tuple(name if t == tensor else t for t in q.names))
        return q

    return tuple(map(renamed, schedule.primitives))


def _copying(name: str, labels: tuple[str, ...]) -> tuple[Primitive, ...]:
    """Return the schedule of a copy with the rows of the input."""
    tile = tuple(Sized(label, COLUMNS if label == labels[-1] else ROWS if label in labels[-2:-1] else 1) for label in labels)
    return Sizes(name, "block", tile), Sizes(name, "tensorize", tile), Bare(name, "align")


def _turned(program: Program, reader: str, name: str, own: tuple[str, ...], along: str) -> tuple[Primitive, ...]:
    """Return the schedule of a copy whose rows lie along another label: tiles of it and of all dimensions after it, which are few elements where they are taps."""
    after = own[own.index(along) + 1 :]
    tiles = program.schedule.sizes(reader, "tensorize")
    taps = all(x in reduction_labels(program.algorithm, reader) and tiles.get(x, 1) == 1 for x in after)
    merged = free_name("_".join(after), program.algorithm) if len(after) > 1 else after[0]
    together = (Merge(name, "merge", (merged, *after)),) if len(after) > 1 else ()
    side, beside = (SHORT, BESIDE) if along in program.schedule.names(reader, "specialize") else (SIDE, SIDE)
    tile = (*(Sized(x, 1) for x in own if x != along and x not in after), Sized(merged, TAPS if taps else beside), Sized(along, side))
    return *together, Sizes(name, "block", tile), Sizes(name, "tensorize", tile), Bare(name, "align")


def _are_distinct_labels(labels: tuple[str | None, ...]) -> bool:
    """Return whether each dimension is indexed by one bare label, different from the others."""
    return bool(labels) and None not in labels and len(set(labels)) == len(labels)


def _check_stored(program: Program, p: Primitive, func: str, members: set[str]) -> None:
    """Raise DTError unless the kernel of ``p`` reads the Func from memory, where another one keeps it for the program's own kernels."""
    algorithm: Algorithm = program.algorithm  # type: ignore[assignment]
    stored = {q.func for q in program.schedule.primitives if q.name == "store"}
    taken = ({*program.schedule.fused()} - stored) | {*program.outputs()}
    read = {a.tensor for m in members for a in ex.accesses(algorithm[m].expr)}
    between = sorted(f for f in (read & set(algorithm.funcs)) - members - taken)
    if func not in between:
        allowed = ", ".join([*between, *sorted(_inputs(algorithm, members))])
        raise DTError("stage names an input, or what another kernel makes for this one", found=func, allowed=allowed, at=p.pos)


def _aligned(program: Program, p: Primitive, func: str) -> Program:
    """Align the rows of a Func."""
    if program.schedule.of(func, "align"):
        return program
    return replace(program, schedule=Schedule((*program.schedule.primitives, Bare(func, "align", pos=p.pos))))


def is_shift(expr: ex.Expr) -> bool:
    """Match ``where(A > -inf, A, 0)``, or its form in base two, which is never -inf."""
    match expr:
        case ex.Binary("*", s, factor) if factor == LOG2_E:
            return is_shift(s)
        case ex.Call("where", (ex.Binary(">", a, ex.Unary("-", ex.Const(math.inf))), b, ex.Const(0))):
            return a == b and isinstance(a.arg if isinstance(a, ex.Cast) else a, ex.Access)
    return False


def _read_as_shift(tensor: str, algorithm: Algorithm, members: set[str]) -> ex.Expr | None:
    """Return the one ``where(A > -inf, A, 0)`` that ``members`` subtract inside exp; None if they read the input in another way."""
    nodes = [n for m in members for n in algorithm[m].expr.walk()]
    taken = [n.args[0].right for n in nodes if isinstance(n, ex.Call) and n.fn == "exp" and isinstance(n.args[0], ex.Binary) and n.args[0].op == "-"]
    shifts = [s for s in taken if is_shift(s) and {a.tensor for a in ex.accesses(s)} == {tensor}]
    inside = sum(1 for s in shifts for _ in ex.accesses(s))
    other = sum(isinstance(n, ex.Access) and n.tensor == tensor for n in nodes) - inside
    return shifts[0] if len(set(shifts)) == 1 and not other else None


def _copy_of(tensor: str, shift: bool, along: str, program: Program, known: dict[tuple[str, bool, str], str]) -> tuple[str, bool]:
    """Return the Func that copies an input, or holds it as a shift, and whether another kernel already makes it."""
    key = tensor, shift, along
    if key in known:
        return known[key], True
    algorithm: Algorithm = program.algorithm  # type: ignore[assignment]
    known[key] = free_name(f"{tensor}_rows", algorithm)
    return known[key], False


def _inputs(algorithm: Algorithm, members: set[str]) -> set[str]:
    return {a.tensor for m in members for a in ex.accesses(algorithm[m].expr)} & set(algorithm.inputs)


def _vars(algorithm: Algorithm, own: tuple[str, ...]) -> tuple[str, ...]:
    return algorithm.vars + tuple(label for label in own if label in algorithm.rvars)


def _rest(algorithm: Algorithm, own: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(label for label in algorithm.rvars if label not in own)
