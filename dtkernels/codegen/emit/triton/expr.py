"""Print tiles as Triton expressions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeGuard

from ....algebra.operand_types import CAST, OperandType
from ....lang.expr import COMPARISONS, DTYPES, FLOAT8, INTEGERS, RANDOM
from ...analysis.product_types import Operands
from ...held_terms import FLOAT8_DEPTH, MOST_IMPRECISE
from ...ir import nest
from ...ir.layout import as_no_matrix_product, preferred_dim_order
from ...ir.nest import (
    Axis,
    BlockNumber,
    Const,
    DescriptorLoad,
    EveryNth,
    Guard,
    Load,
    Local,
    Op,
    Position,
    Repeat,
    Scalar,
    ScaleFactor,
    Size,
    Start,
    Step,
    Tile,
    TileDot,
    TileReduce,
    TileScan,
)
from ...ir.value_type import is_boolean, is_integer, never_negative
from .functions import CALLS, HELPER_OF, ON_NUMBERS, WITH_CALLED

#: Python's binding strength of what is printed; larger is tighter
_OR, _AND, _COMPARE, _ADD, _MULTIPLY, _UNARY, _ATOM = range(1, 8)
IN_FP16 = OperandType((f"{CAST}fp16",))  #: of products in float8 by tiles that are too shallow; the wrapper does not know of it
BITS = ("&", "|", "^", "<<", ">>")  #: operators on the bits of integers
_INFIX = {"+": ("+", _ADD), "-": ("-", _ADD), "*": ("*", _MULTIPLY), "/": ("/", _MULTIPLY)}


class ExpressionPrinter:
    """Prints the tiles of one kernel; ``raw`` are locals that hold a buffer's own dtype."""

    def __init__(self, raw: frozenset[str], loads: dict[str, Load | DescriptorLoad], operands: Operands,
                 start_of: Callable[[Axis], str], step_of: Callable[[Axis], str], size_of: Callable[[str], str],
                 approximate: tuple[str, ...] = ()):  # fmt: skip
        self.approximate = approximate
        self.raw, self.loads, self.operands = raw, loads, operands
        self.types: dict[OperandType | None, None] = {}  #: types of operands that the kernel is passed
        self.start_of, self.step_of, self.size_of = start_of, step_of, size_of
        self.block_of: Callable[[str], str] = lambda label: f"block_{label}"
        self.float8 = operands.algorithm.float8_buffers
        self.integral = operands.algorithm.integral
        self.product = ""  #: the dtype of the product whose operand is printed
        self.helpers: set[str] = set()

    def text(self, tile: Tile, order: tuple[Axis, ...]) -> str:
        """Return ``tile`` shaped to broadcast against ``order``."""
        return self._print(tile, order)[0]

    def _print(self, tile: Tile, order: tuple[Axis, ...]) -> tuple[str, int]:
        match tile:
            case Const(value):
                return _constant(value)
            case Scalar(name):
                return name, _ATOM
            case Size(label):
                return self.size_of(label), _ATOM
            case Start(axis):
                return self.start_of(axis), _ATOM
            case BlockNumber(label):
                return self.block_of(label), _ATOM
            case Step(axis):
                return self.step_of(axis), _ATOM
            case Position(axis):
                return self.arrange(axis.name, () if axis.scalar else (axis,), order), _ATOM
            case Local(name, axes, kind):
                text = self.converted(name, "tl.float32") if name in self.raw and kind == "number" else name
                return self.arrange(text, axes, order), _ATOM
            case ScaleFactor(Scalar(name), inside):
                return (f"(1.0 if {name}_positive else {name})" if inside else f"({name} if {name}_positive else 1.0)"), _ATOM
            case TileReduce():
                return self._reduce(tile, order), _ATOM
            case TileDot():
                return self._dot(tile, order), _ATOM
            case TileScan():
                return self._scan(tile, order), _ATOM
            case EveryNth(arg, axis, group):
                whole = tuple(a for a in arg.axes if a != axis) + (axis,)
                return self.arrange(self._every(self.text(arg, whole), tile), (*whole[:-1], group), order), _ATOM
            case Repeat(arg, axis, group):
                whole = tuple(a for a in (*order, *sorted(nest.axes_of(arg), key=lambda a: a.name)) if a in nest.axes_of(arg) - {group})
                whole = (*dict.fromkeys(whole), *([] if group.scalar else [group]))
                return self.arrange(self._repeat(self.text(arg, whole), tile, whole), (*(a for a in whole if a != group), axis), order), _ATOM
        own = tuple(a for a in order if a in nest.axes_of(tile))
        if isinstance(tile, Guard):
            text, strength = self._guard(tile, own)
        elif isinstance(tile, Op):
            text, strength = self._op(tile, own)
        else:
            raise AssertionError(f"{type(tile).__name__} in an expression")
        if own == order or not own:
            return text, strength
        return self.arrange(f"({text})" if strength < _ATOM else text, own, order), _ATOM

    def _op(self, op: Op, order: tuple[Axis, ...]) -> tuple[str, int]:
        fn, args = op.fn, op.args
        if fn in ("+", "-", "*") and is_integer(op):
            args = (_wide_beside(args[0], args[1], fn), _wide_beside(args[1], args[0], fn))
        if fn in _INFIX:
            symbol, own = _INFIX[fn]
            return f"{self._at(args[0], order, own)} {symbol} {self._at(args[1], order, own + 1)}", own
        if fn in BITS:
            return f"({self._bits(args[0], order, fn == '<<')} {fn} {self._bits(args[1], order)})", _ATOM
        if fn in COMPARISONS:
            return f"{self._compared(args[0], args[1], order)} {fn} {self._compared(args[1], args[0], order)}", _COMPARE
        single = [a for a in args if not nest.axes_of(a)]
        if fn in ("and", "or") and len(single) == 1:  # the interpreter cannot combine one truth value with a tile of them by & or |
            tile = self._truth(args[1] if args[0] is single[0] else args[0], order)
            return f"tl.where({_bare(self._truth(single[0], ()))}, {f'{tile}, False' if fn == 'and' else f'True, {tile}'})", _ATOM
        if fn in ("and", "or"):
            symbol, own = ("&", _ATOM) if fn == "and" else ("|", _ATOM)  # & and | bind tighter than comparisons: always in parentheses
            return f"({self._truth(args[0], order)} {symbol} {self._truth(args[1], order)})", own
        if fn == "not" and not nest.axes_of(args[0]):  # ~ of a Python truth value, which the interpreter has here, is -1 or -2
            return f"({self._truth(args[0], order)} == 0)", _ATOM
        if fn == "not":
            return f"~{self._truth(args[0], order)}", _UNARY
        if fn == "~":
            return f"~{self._bits(args[0], order)}", _UNARY
        if fn == "neg":
            return f"-{self._at(args[0], order, _UNARY)}", _UNARY
        if fn.startswith("cast:") and fn[5:] in INTEGERS:
            return self._to_integer(args[0], fn[5:], order), _ATOM
        if fn.startswith(("cast:", "code:")) and fn[5:] in FLOAT8:
            helper = f"{'round_to' if fn.startswith('cast:') else 'code_of'}_{fn[5:]}"
            self.helpers |= {helper, f"code_of_{fn[5:]}", f"from_{fn[5:]}"}
            return f"{helper}({self._number(args[0], order)}, FLOAT8)", _ATOM
        if fn.startswith("cast:"):
            return self._cast(args[0], f"tl.{DTYPES[fn[5:]]}", order), _ATOM
        if fn in ("//", "%") and never_negative(args[0]) and never_negative(op):
            return f"{self._at(args[0], order, _MULTIPLY)} {fn} {self._at(args[1], order, _MULTIPLY + 1)}", _MULTIPLY
        if fn in self.approximate and nest.axes_of(op):
            self.helpers |= WITH_CALLED[f"hardware_{fn}"]
            return f"hardware_{fn}({self._float(args[0], order, fn)}, ON_GPU)", _ATOM
        if fn.startswith(("exp:", "exp2:")):
            base, share = fn.split(":")
            name = f"exp2_{share.replace('/', '_of_')}"
            self.helpers.add(name)
            if math.prod(a.tile or 1 for a in nest.axes_of(op)) < int(share.split("/")[1]):  # perhaps fewer than are computed together
                name = f"{name}_if_wide"
                self.helpers.add(name)
            scaled = self.text(args[0], order) if base == "exp2" else f"{self._at(args[0], order, _MULTIPLY)} * {math.log2(math.e)!r}"
            return f"{name}({scaled}, EXP_DEGREE)", _ATOM
        if fn in HELPER_OF:
            self.helpers |= WITH_CALLED[HELPER_OF[fn]]
        if fn in RANDOM:
            texts = [self.text(a.transform(_in_64_bits) if isinstance(a, Op) else a, order) for a in args] + ["0"] * (5 - len(args))
            return CALLS[fn].format(*texts, len(args) <= 3), _ATOM
        if fn == "key":
            return CALLS[fn].format(self._number(args[0], order), self.text(args[1], order)), _ATOM
        if fn in ON_NUMBERS:
            return CALLS[fn].format(*(self._number(a, order) for a in args)), _ATOM
        first = self._truth(args[0], order) if fn == "where" else self._float(args[0], order, fn)
        return CALLS[fn].format(_bare(first), *(self.text(a, order) for a in args[1:]), self.product or "tl.float32"), _ATOM  # the last for "bits" alone

    def _cast(self, tile: Tile, dtype: str, order: tuple[Axis, ...]) -> str:
        """Rounded to ``dtype``, as float32; integers by way of float32, since the interpreter takes their bits for a bfloat16."""
        way = ("tl.float32", dtype) if is_integer(tile) else (dtype,)
        if nest.axes_of(tile):
            return self._at(tile, order, _ATOM) + "".join(f".to({d})" for d in way) + ".to(tl.float32)"
        return f"tl.cast({self.text(tile, order)}, {way[0]})" + "".join(f".to({d})" for d in way[1:]) + ".to(tl.float32)"

    def _to_integer(self, tile: Tile, dtype: str, order: tuple[Axis, ...]) -> str:
        """Return ``tile`` as integers in the range of ``dtype``; as truth values for bool."""
        if dtype == "bool":
            return self._truth(tile, order)
        least, most = INTEGERS[dtype]
        if is_integer(tile):
            helper, value = "to_range", f"tl.cast({self.text(tile, order)}, tl.int64)"
        else:
            helper, value = "to_int64" if dtype == "int64" else "to_int32", self._number(tile, order)
        self.helpers.add(helper)
        return f"{helper}({value}{'' if helper == 'to_int64' else f', {least}, {most}'})"

    def _at(self, tile: Tile, order: tuple[Axis, ...], strength: int) -> str:
        text, own = self._print(tile, order)
        return f"({text})" if own < strength else text

    def _truth(self, tile: Tile, order: tuple[Axis, ...]) -> str:
        """Return a condition; a loaded element is true where it is not 0."""
        if is_boolean(tile):
            return self._at(tile, order, _ATOM)
        return f"({self._at(tile, order, _COMPARE + 1)} != 0)"

    def _float(self, tile: Tile, order: tuple[Axis, ...], fn: str) -> str:
        text = self.text(tile, order)
        return (
            f"{self._at(tile, order, _MULTIPLY)} * 1.0"
            if is_integer(tile) and fn not in ("maximum", "minimum", "abs", "//", "%", "min", "max", "cdiv", "place", "largest_key", "wide", "bits")
            else text
        )

    def _bits(self, tile: Tile, order: tuple[Axis, ...], wide: bool = False) -> str:
        """Return an operand of an operator on bits: in 32 bits at least, as arithmetic on the result may not fit into 8."""
        if wide:
            return f"tl.cast({self.text(tile, order)}, tl.int64)"
        if isinstance(tile, Local) and tile.name in self.loads:
            self.helpers.add("in_32_bits")
            return f"in_32_bits({self.text(tile, order)})"
        return self._at(tile, order, _ATOM)

    def _compared(self, tile: Tile, other: Tile, order: tuple[Axis, ...]) -> str:
        """Return a side of a comparison. Triton refuses to compare integers of 8 bits with a constant that they cannot hold."""
        if isinstance(other, Const) and isinstance(other.value, int) and isinstance(tile, Local) and tile.name in self.loads and is_integer(tile):
            if not 0 <= other.value <= INTEGERS["int8"][1]:
                return self._bits(tile, order, wide=not INTEGERS["int32"][0] <= other.value <= INTEGERS["int32"][1])
        return self._at(tile, order, _COMPARE + 1)

    def _number(self, tile: Tile, order: tuple[Axis, ...]) -> str:
        """Return an argument of a function as a tensor of float32."""
        if isinstance(tile, Const):
            return f"tl.full([], {_constant(tile.value)[0]}, tl.float32)"
        if is_boolean(tile) or is_integer(tile):
            return f"{self._at(tile, order, _ATOM)}.to(tl.float32)" if nest.axes_of(tile) else f"tl.cast({self.text(tile, order)}, tl.float32)"
        return self.text(tile, order)

    def _guard(self, guard: Guard, order: tuple[Axis, ...]) -> tuple[str, int]:
        inside = " & ".join(self.arrange(f"{a.name}_ok", () if a.scalar else (a,), order) for a in guard.axes)
        return f"tl.where({inside}, {self.text(guard.arg, order)}, {_constant(guard.neutral)[0]})", _ATOM

    def _reduce(self, tile: TileReduce, order: tuple[Axis, ...]) -> str:
        inner = preferred_dim_order(tile.arg)
        text = self.text(as_no_matrix_product(tile.arg, inner) if tile.kind == "sum" else tile.arg, inner)
        for axis in sorted(tile.axes, key=inner.index, reverse=True):  # the last dimension lies in threads and warps: what is left for warps to exchange is short
            at = inner.index(axis)
            inner = inner[:at] + inner[at + 1 :]
            if tile.kind in ("prod", "key"):
                self.helpers |= {"product_of_two"} if tile.kind == "prod" else set()
                text = f"tl.reduce({text}, {at}, product_of_two)" if tile.kind == "prod" else f"tl.max({text}, {at})"
            elif tile.kind == "sum" or not tile.keeps_nan:
                text = f"tl.{tile.kind}({text}, {at})"
            else:
                self.helpers.add(f"nan_{tile.kind}")
                text = f"tl.reduce({text}, {at}, nan_{tile.kind})"
        return self.arrange(text, inner, order)

    def _scan(self, tile: TileScan, order: tuple[Axis, ...]) -> str:
        inner = preferred_dim_order(tile)
        dim = inner.index(tile.axis)
        shape = ", ".join(map(self.step_of, inner))
        way = ", reverse=True" if tile.reverse else ""
        args = [self.text(a, inner) if nest.axes_of(a) == set(inner) else f"tl.broadcast_to({self.text(a, inner)}, [{shape}])" for a in tile.args]
        if tile.kind in ("sum", "prod"):
            return self.arrange(f"tl.cum{tile.kind}({args[0]}, {dim}{way})", inner, order)
        if tile.kind == "recur":
            self.helpers.add("linear_recurrence")
            return self.arrange(f"tl.associative_scan(({', '.join(args)}), {dim}, linear_recurrence{way})[1]", inner, order)
        self.helpers.add(f"nan_{tile.kind}")
        return self.arrange(f"tl.associative_scan({args[0]}, {dim}, nan_{tile.kind}{way})", inner, order)

    def arrange(self, text: str, have: tuple[Axis, ...], order: tuple[Axis, ...]) -> str:
        """Return ``text`` with dimensions ``have`` shaped to broadcast against ``order``."""
        return arrange(text, have, order)

    # -- matrix products --------------------------------------------------------------------------------------------

    def _dot(self, dot: TileDot, order: tuple[Axis, ...], older: Tile | None = None) -> str:
        left, right = dot.left, dot.right
        rows, columns = (tuple(nest.axes_of(s) - set(dot.axes)) for s in (left, right))
        own = tuple(a for a in order if a in rows + columns)
        if own == columns + rows:  # the transposed product comes out in the order that is wanted
            left, right, rows, columns = right, left, columns, rows
        kind = self.operands.type_of(dot)
        if kind is not None and kind.float8 and _depth(dot) < FLOAT8_DEPTH:
            kind = IN_FP16
        parts = [self._operand(left, right, kind, rows + dot.axes), self._operand(right, left, kind, dot.axes + columns)]
        depth = _depth(dot) if kind is not None and kind.float8 else 0
        apart = older if FLOAT8_DEPTH <= depth <= MOST_IMPRECISE and "rdot" not in self.approximate else None
        if older is not None and apart is None:
            parts.append(self.text(older, rows + columns))
        if depth >= FLOAT8_DEPTH:
            parts.append(f"max_num_imprecise_acc={None if apart is not None or 'rdot' in self.approximate else min(depth, MOST_IMPRECISE)}")
        precision = 'EXACT if PRECISION == "ieee" else PRECISION' if "rdot" in self.approximate else "PRECISION"
        made = f"tl.dot({', '.join(parts)}, input_precision={precision})"
        if apart is not None:  # the sum of a step is added in float32: by max_num_imprecise_acc, ptxas would wait for each instruction
            made = f"{self._at(apart, rows + columns, _ATOM)} + {made}"
        return self.arrange(made, rows + columns, order)

    def accumulate(self, older: Tile, dot: TileDot, order: tuple[Axis, ...]) -> str:
        """Return ``older + dot`` as one matrix instruction."""
        return self._dot(dot, order, older)

    def _operand(self, tile: Tile, other: Tile, kind: OperandType | None, order: tuple[Axis, ...]) -> str:
        """Return an operand in the product's type: a loaded tile of that type unchanged, anything else rounded to it."""
        other = nest.loaded(other)
        if isinstance(tile, EveryNth):
            whole = tuple(a for a in tile.arg.axes if a != tile.axis) + (tile.axis,)
            text = self._every(self._operand(tile.arg, other, kind, whole), tile)
            return self.arrange(text, (*whole[:-1], tile.group), order)
        if self._needs_no_conversion(tile, kind):
            return self.arrange(tile.name, tile.axes, order)
        dtype = f"{other.name}.dtype" if self._needs_no_conversion(other, kind) else self._type(kind)
        before, self.product = self.product, dtype
        try:
            return self._converted_operand(tile, dtype, order)
        finally:
            self.product = before

    def _converted_operand(self, tile: Tile, dtype: str, order: tuple[Axis, ...]) -> str:
        if isinstance(tile, Local) and tile.name in self.raw and tile.kind == "number":
            return self.arrange(self.converted(tile.name, dtype), tile.axes, order)
        if is_integer(tile):  # the interpreter takes the bits of integers for those of a bfloat16
            dtype = f"tl.float32).to({dtype}"
        return f"{self._at(tile, order, _ATOM)}.to({dtype})"

    def _every(self, text: str, tile: EveryNth) -> str:
        """Return the elements of ``text`` at one place of each group along its last dimension."""
        self.helpers.add("every_second")
        count, part = tile.group.every, tile.part
        while count > 1:
            text, count, part = f"every_second({text}, {part % 2})", count // 2, part // 2
        return text

    def _repeat(self, text: str, tile: Repeat, axes: tuple[Axis, ...]) -> str:
        """Return ``text``, whose last dimension is the group's, with each of its elements several times."""
        others, count = [self.step_of(a) for a in axes if a != tile.group], tile.axis.tile // tile.group.tile
        many, whole = ", ".join([*others, str(tile.group.tile), str(count)]), ", ".join([*others, self.step_of(tile.axis)])
        return f"tl.reshape(tl.broadcast_to({text}[{', '.join(':' for _ in axes)}, None], [{many}]), [{whole}])"

    def converted(self, name: str, dtype: str) -> str:
        """Return a loaded tile converted to another dtype; float8 is given by its bits where the GPU lacks the type."""
        buffer = self.loads[name].buffer
        if (form := self.float8.get(buffer)) is not None:
            return self.from_float8(form, name, dtype)
        if buffer in self.integral and self.product:
            self.helpers.add("number_of")
            return f"number_of({name}, {dtype}, PAIRS, {self.product})"
        return f"{name}.to({dtype})"

    def from_float8(self, form: str, text: str, dtype: str) -> str:
        """Return ``text``, loaded elements in the float8 dtype ``form``, in another dtype."""
        self.helpers.add(f"from_{form}")
        return f"from_{form}({text}, {dtype})"

    def _needs_no_conversion(self, tile: Tile, kind: OperandType | None) -> TypeGuard[Local]:
        return isinstance(tile, Local) and tile.name in self.loads and self.operands.needs_no_conversion(self.loads[tile.name].buffer, kind)

    def _type(self, kind: OperandType | None) -> str:
        """Return a product's type where neither operand is loaded in it: that of a pointer of such elements, else what the wrapper passes."""
        if kind is IN_FP16:
            return "tl.float16"
        held = (load.buffer for load in self.loads.values() if self.operands.needs_no_conversion(load.buffer, kind))
        if (buffer := next(held, None)) is not None:
            return f"{buffer}_ptr.dtype.element_ty"
        self.types[kind] = None
        return self.operands.constant(kind)


def _depth(dot: TileDot) -> int:
    """Return how many elements a step of a product sums; a whole extent is ``FLOAT8_DEPTH`` at least (``whole`` in the wrapper)."""
    return math.prod(a.tile or FLOAT8_DEPTH for a in dot.axes)


def _wide_beside(tile: Tile, other: Tile, fn: str) -> Tile:
    """Return an operand of integer arithmetic in 64 bits, where it is made of bits in fewer and the result may not fit."""
    if not (isinstance(tile, Op) and tile.fn in (*BITS, "~")):
        return tile
    sides = [_largest(t) for t in (tile, other)]
    fits = None not in sides and (math.prod(sides) if fn == "*" else sum(sides)) < 2**31  # type: ignore[arg-type]
    return tile if fits else Op("wide", (tile,))


def _largest(tile: Tile) -> int | None:
    """Return the largest magnitude of a number, or of bits that are masked by one; None for anything else."""
    match tile:
        case Const(value):
            return abs(int(value))
        case Op("&", args):
            return min((int(a.value) for a in args if isinstance(a, Const) and a.value >= 0), default=None)
    return None


def _in_64_bits(tile: Tile) -> Tile:
    """Return an index as 64 bits, so that arithmetic on it does not wrap around."""
    return Op("wide", (tile,)) if isinstance(tile, (Position, Scalar, Size, Start, Step)) else tile


def arrange(text: str, have: tuple[Axis, ...], order: tuple[Axis, ...]) -> str:
    """Return ``text`` with dimensions ``have`` brought to ``order``, with length 1 where it has none."""
    if not have or have == order:
        return text
    wanted = tuple(a for a in order if a in have)
    if wanted != have:
        text = f"tl.trans({text})" if len(have) == 2 else f"tl.permute({text}, {tuple(have.index(a) for a in wanted)})"
    if len(wanted) == len(order):
        return text
    return f"{text}[{', '.join(':' if a in have else 'None' for a in order)}]"


def _bare(text: str) -> str:
    """Return ``text`` without parentheses around all of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and i < len(text) - 1:
            return text
    return text[1:-1]


def _constant(value: int | float | bool) -> tuple[str, int]:
    if isinstance(value, float) and math.isinf(value):
        return ('float("inf")' if value > 0 else 'float("-inf")'), _ATOM
    return repr(value), _UNARY if not isinstance(value, bool) and value < 0 else _ATOM
