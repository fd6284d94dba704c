"""Tell where a match must be left alone: gradients or autocast change inside it, something is written to, or something else reads its inside."""

from __future__ import annotations

import torch
from torch import fx

from .canonical import aliased, cast_from, example
from .matcher import Match

_HARMLESS = ("_log_api_usage_once", "_assert_async", "_check", "_check_is_size", "getattr", "size", "dim", "item", "sym_size", "numel", "stride")
_READS_SHAPE = ("size", "dim", "numel", "stride", "sym_size", "sym_size.int", "ndimension")


def transforms(graph: fx.Graph) -> bool:
    """Return whether torch.func transforms are traced in a graph; ops have no rule for them."""
    return any("functorch" in str(n.target) or "vmap" in str(n.target) for n in graph.nodes if n.op == "call_function")


def regions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return for each node how many nodes before it may have changed a state, such as the grad mode or autocast."""
    found, count = {}, 0
    for node in graph.nodes:
        if node.op == "call_function" and example(node) is None and getattr(node.target, "__name__", "") not in _HARMLESS:
            count += 1
        found[node] = count
    return found


def written(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node may write to."""
    tensors = [a for a in node.all_input_nodes if isinstance(example(a), torch.Tensor)]
    if node.op == "call_method":
        name = str(node.target)
        return tensors[:1] if name.endswith("_") and not name.endswith("__") or name in ("__setitem__", "set_") else []
    if node.op != "call_function":
        return tensors if node.op == "call_module" else []
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return tensors
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        overloads = [node.target] if isinstance(node.target, torch._ops.OpOverload) else [getattr(node.target, n) for n in node.target.overloads()]
        return tensors if any(o._schema.is_mutable for o in overloads) else []
    name, module = getattr(node.target, "__name__", ""), getattr(node.target, "__module__", "") or ""
    inplace = module in ("_operator", "operator") and (name in ("setitem", "delitem") or name.startswith("i") and name not in ("invert", "is_", "is_not", "index", "indexOf", "inv"))
    if inplace or name.endswith("_") and not name.endswith("__") and module not in ("_operator", "operator") or "out" in node.kwargs or node.kwargs.get("inplace") or name in ("dropout", "relu") and True in node.args:
        return tensors
    return [] if module.startswith(("torch", "_operator", "operator", "math", "builtins")) or not module else tensors


def _storage(node: object) -> int | None:
    found = example(node)
    if not isinstance(found, torch.Tensor):
        return None
    try:
        return found.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return None


def why_unsafe(match: Match, result: fx.Node, region: dict[fx.Node, int], place: dict[fx.Node, int]) -> str | None:
    """Return why a match cannot be replaced where it stands; None if it can."""
    covered = set(match.covered)
    if len({region[n] for n in covered}) > 1:
        return "grad mode or autocast changes inside it"
    for node in covered - {result}:
        outside = [u for u in node.users if u not in covered and not _reads_shape(u)]
        if outside and not _is_cheap(node):
            return "something else reads what would not be computed"
    captured = [v for v in match.captured.values() if isinstance(v, fx.Node)]
    stores = {_storage(n) for n in (*covered, *captured)}
    first, last = min(place[n] for n in covered), place[result]
    for node in result.graph.nodes:
        if first < place.get(node, -1) < last and any(_storage(a) in stores or _storage(a) is None for a in written(node)):
            return "something is written to in between"
    return None


def _is_cheap(node: fx.Node) -> bool:
    return aliased(node) is not None or cast_from(node, widening=True) is not None


def _reads_shape(node: fx.Node) -> bool:
    return str(node.target) in _READS_SHAPE or getattr(node.target, "__name__", "") == "getattr" and node.args[1] in ("shape", "dtype", "device", "ndim")
