"""Read a node of a traced graph as one operation under one name, however the program spelled it: ``x ** 2``, ``x.pow(2)``, ``torch.square(x)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from dtkernels.runtime.torch_support.dtypes import KERNEL_DTYPES, rms_norm_eps

HIDDEN = -1e9  #: a score that is set to this, or lower, has a weight of 0


@dataclass(frozen=True)
class Operation:
    """What a node computes, with the nodes ``within`` it: a name, its operands (nodes and numbers), and what else was said by keyword."""

    name: str
    operands: tuple = ()
    said: dict[str, Any] = field(default_factory=dict)
    within: tuple[Node, ...] = ()


OTHER = Operation("")
_NAMES = {
    "add": "add", "mul": "mul", "multiply": "mul", "truediv": "div", "div": "div", "true_divide": "div", "divide": "div", "square": "square", "rsqrt": "rsqrt",
    "mean": "mean", "softmax": "softmax", "matmul": "matmul", "bmm": "matmul", "linear": "linear", "silu": "silu", "gelu": "gelu", "tanh": "tanh",
    "sigmoid": "sigmoid", "where": "where", "masked_fill": "masked_fill", "scaled_dot_product_attention": "sdpa", "layer_norm": "layer_norm",
    "rms_norm": "rms_norm", "cross_entropy": "cross_entropy", "dropout": "dropout", "pow": "pow", "transpose": "transpose", "permute": "permute",
    "reshape": "reshape", "view": "reshape", "flatten": "reshape", "contiguous": "alias", "to": "cast", "float": "cast", "half": "cast", "bfloat16": "cast", "type": "cast",
    "type_as": "cast", "getitem": "getitem", "sqrt": "sqrt", "reciprocal": "reciprocal", "einsum": "einsum", "getattr": "getattr", "t": "t", "swapaxes": "transpose",
}  # fmt: skip
#: how many of the first arguments are operands
_OPERANDS = {
    "add": 2, "mul": 2, "div": 2, "square": 1, "rsqrt": 1, "matmul": 2, "linear": 3, "silu": 1, "tanh": 1, "sigmoid": 1, "where": 3, "masked_fill": 3, "alias": 1,
    "reshape": 1, "cast": 1, "sqrt": 1, "reciprocal": 1,
}  # fmt: skip
_ARGUMENTS = {
    "sdpa": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "cross_entropy": ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"),
    "dropout": ("input", "p", "training", "inplace"),
    "linear": ("input", "weight", "bias"),
    "softmax": ("input", "dim", "_stacklevel", "dtype"),
    "mean": ("input", "dim", "keepdim"),
    "gelu": ("input", "approximate"),
    "masked_fill": ("input", "mask", "value"),
    "where": ("condition", "input", "other"),
    "add": ("input", "other"),
    "mul": ("input", "other"),
    "div": ("input", "other"),
    "silu": ("input", "inplace"),
}
_OPERANDS_BY_NAME = {
    "sdpa": ("query", "key", "value", "attn_mask"), "layer_norm": ("input", "weight", "bias", "eps"), "rms_norm": ("input", "weight", "eps"), "cross_entropy": ("input", "target"),
}  # fmt: skip


def example(value: object) -> Any:
    """Return the tensor without data, or the number, that a node stands for; anything else itself."""
    return value.meta.get("example_value", value.meta.get("val")) if isinstance(value, Node) else value


def number_of(value: object) -> object:
    """Return a Python number where ``value`` is one, a node of a symbolic number itself, and None for anything else."""
    if isinstance(value, Node):
        found = example(value)
        if isinstance(found, (torch.SymFloat, torch.SymInt)):
            known = found.node.maybe_as_float() if isinstance(found, torch.SymFloat) else found.node.maybe_as_int()
            return value if known is None else known
        return number_of(found) if isinstance(found, (int, float)) else constant(value)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def constant(node: Node) -> float | None:
    """Return the number that a tensor without dimensions was made of: ``torch.full((), -inf)``, ``torch.tensor(8.0)``."""
    name = getattr(node.target, "__name__", "")
    if node.op == "call_function" and name == "full" and not node.args[0] and isinstance(node.args[1], (int, float)):
        return float(node.args[1])
    return float(node.args[0]) if node.op == "call_function" and name == "tensor" and isinstance(node.args[0], (int, float)) else None


def named(node: Node) -> dict[str, Any]:
    """Return the arguments of a node by name."""
    names = _ARGUMENTS[_NAMES[called(node)]]
    return {**dict(zip(names, node.args)), **node.kwargs}


def called(node: Node) -> str:
    """Return the name of torch's function or method that a node calls, "" for another's. ``__eq__``, as torch 2.11 traces ``==``, is "eq"."""
    if node.op == "call_method":
        name = str(node.target)
        return name[2:-2] if name.startswith("__") and name.endswith("__") else name
    if node.op != "call_function":
        return ""
    module = getattr(node.target, "__module__", None) or ""
    ours = module.startswith("torch") or module in ("_operator", "operator", "builtins") or type(node.target).__name__ == "builtin_function_or_method"
    return getattr(node.target, "__name__", "") if ours and not isinstance(node.target, torch._ops.OpOverload) else ""


def operation(node: Node) -> Operation:
    """Return the operation of a node; ``OTHER`` for those that no pattern has."""
    name = _NAMES.get(called(node), "")
    if not name or "out" in node.kwargs:
        return OTHER
    said = named(node) if name in _ARGUMENTS else dict(node.kwargs)
    given = tuple(said[n] if n in said else None for n in _ARGUMENTS[name]) if name in _ARGUMENTS else node.args
    special = _SPECIAL.get(name)
    if special is not None:
        return special(node, given, said)
    if said.get("alpha", 1) != 1 or said.get("rounding_mode") is not None or said.get("inplace"):
        return OTHER
    if name in _OPERANDS_BY_NAME:
        said = _with_eps(name, said)
        return Operation(name, tuple(said.get(n) for n in _OPERANDS_BY_NAME[name]), said)
    return Operation(name, tuple(given[: _OPERANDS.get(name, 1)]), said)


def _with_eps(name: str, said: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a norm with torch's own ``eps`` where none is given."""
    if name == "layer_norm":
        return {"eps": 1e-5, **said}
    if name == "rms_norm" and said.get("eps") is None and isinstance(example(said.get("input")), torch.Tensor):
        return {**said, "eps": rms_norm_eps(example(said["input"]).dtype)}
    return said


def _pow(node: Node, given: tuple, said: dict) -> Operation:
    name = {2: "square", -0.5: "rsqrt", 0.5: "sqrt"}.get(given[1], "") if isinstance(given[1], (int, float)) else ""
    return Operation(name, given[:1]) if name else OTHER


def _mul(node: Node, given: tuple, said: dict) -> Operation:
    return Operation("square", given[:1]) if given[0] is given[1] else Operation("mul", given[:2])


def _div(node: Node, given: tuple, said: dict) -> Operation:
    if said.get("rounding_mode") is not None:
        return OTHER
    below = given[1]
    if isinstance(below, Node) and operation(below).name == "sqrt":  # x / sqrt(v), and 1 / sqrt(v)
        root = operation(below).operands
        return Operation("rsqrt", root, within=(below,)) if given[0] == 1 else Operation("div_sqrt", (given[0], *root), within=(below,))
    return Operation("div", given[:2])


def _reciprocal(node: Node, given: tuple, said: dict) -> Operation:
    return Operation("rsqrt", operation(given[0]).operands, within=given[:1]) if operation(given[0]).name == "sqrt" else OTHER


def _mean(node: Node, given: tuple, said: dict) -> Operation:
    dim = given[1][0] if isinstance(given[1], (tuple, list)) and len(given[1]) == 1 else given[1]
    last = dim == -1 or dim is not None and dim == (_rank(given[0]) or 0) - 1
    return Operation("mean_last", given[:1]) if last and said.get("keepdim") and said.get("dtype") in (None, torch.float32) else OTHER


def _softmax(node: Node, given: tuple, said: dict) -> Operation:
    dim = said.get("dim")
    last = dim == -1 or dim is not None and dim == (_rank(given[0]) or 0) - 1
    return Operation("softmax", given[:1]) if last and said.get("dtype") in (None, *KERNEL_DTYPES) else OTHER


def _transposed(node: Node, given: tuple, said: dict) -> Operation:
    """Return "transposed", the swap of the last two dimensions, for each spelling of it."""
    rank, name = _rank(given[0]), called(node)
    if name in ("transpose", "swapaxes"):
        dims = list(given[1:3])
    elif name == "t":
        return Operation("transposed", given[:1]) if rank in (2, None) else OTHER
    elif name == "getattr":
        return Operation("transposed", given[:1]) if given[1] == "mT" or given[1] == "T" and rank == 2 else OTHER
    else:
        order = list(given[1]) if isinstance(given[1], (tuple, list)) else list(given[1:])
        n = len(order)
        order = [d % n if isinstance(d, int) else d for d in order]
        return Operation("transposed", given[:1]) if order == [*range(n - 2), n - 1, n - 2] else OTHER
    if not all(isinstance(d, int) for d in dims):
        return OTHER
    dims = sorted(d - rank if d >= 0 and rank is not None else d for d in dims)
    return Operation("transposed", given[:1]) if dims == [-2, -1] else OTHER


def _dropout(node: Node, given: tuple, said: dict) -> Operation:
    idle = number_of(said.get("p", 0.5)) == 0 or said.get("training", True) is False
    return Operation("alias", given[:1]) if idle else OTHER


def _cast(node: Node, given: tuple, said: dict) -> Operation:
    """Return a cast between floating dtypes, or an alias where nothing changes; moves to other devices are neither."""
    before, after = example(given[0]), example(node)
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or before.device != after.device:
        return OTHER
    if before.dtype == after.dtype:
        return Operation("alias", given[:1])
    return Operation("cast", given[:1]) if before.dtype in KERNEL_DTYPES and after.dtype in KERNEL_DTYPES else OTHER


def _einsum(node: Node, given: tuple, said: dict) -> Operation:
    """Return a product of matrices where the equation is one: "bhqd,bhkd->bhqk" or "bhqk,bhkd->bhqd"."""
    operands = given[1:] if len(given) == 3 else tuple(given[1]) if len(given) == 2 and isinstance(given[1], (tuple, list)) else ()
    text = given[0].replace(" ", "") if isinstance(given[0], str) else ""
    if len(operands) != 2 or "->" not in text or "." in text:
        return OTHER
    (a, b), out = text.split("->")[0].split(","), text.split("->")[1]
    if len(a) != len(b) or len(a) < 2 or a[:-2] != b[:-2] or a[:-2] != out[:-2] or len(set(a + b)) != len(a) + 1:
        return OTHER
    if a[-1] == b[-2] and out[-2:] == a[-2] + b[-1]:
        return Operation("matmul", operands)
    return Operation("matmul_transposed", operands) if a[-1] == b[-1] and out[-2:] == a[-2] + b[-2] else OTHER


_SPECIAL: dict[str, Callable[[Node, tuple, dict], Operation]] = {
    "pow": _pow, "mul": _mul, "div": _div, "reciprocal": _reciprocal, "mean": _mean, "softmax": _softmax, "transpose": _transposed, "permute": _transposed, "t": _transposed,
    "getattr": _transposed, "dropout": _dropout, "cast": _cast, "einsum": _einsum,
}  # fmt: skip


def _rank(value: object) -> int | None:
    found = example(value)
    return found.dim() if isinstance(found, torch.Tensor) else None


WRITTEN = "dtkernels_written"  #: in the meta of nodes whose memory something writes to: they are not what they were made of


def aliased(node: object) -> Node | None:
    """Return the input that a node passes on unchanged, such as ``contiguous`` and dropout in eval mode; None if it computes something."""
    return _passed_on(node, "alias")


def _passed_on(node: object, name: str) -> Node | None:
    if not isinstance(node, Node) or (found := operation(node)).name != name:
        return None
    before = found.operands[0]
    return None if WRITTEN in node.meta or WRITTEN in before.meta else before


def cast_from(node: object, widening: bool) -> Node | None:
    """Return the input of a cast between floating dtypes; with ``widening``, only where no number changes."""
    before = _passed_on(node, "cast")
    if before is None:
        return None
    assert isinstance(node, Node)
    exact = torch.promote_types(example(before).dtype, example(node).dtype) == example(node).dtype
    return before if exact or not widening else None


