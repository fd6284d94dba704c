"""Replace in one graph what ops compute better: match, check, add the op's call, remove what nothing reads any more."""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from dtkernels.runtime.path_counters import no_kernel

from .builder import Builder, same_shape
from .canonical import example, operation
from .mask_numbers import sweep
from .matcher import Match, matches
from .report import REPLACED, count
from .safety import mark_written, regions, transforms, why_unsafe
from .table import Replacement, Wanted

#: operators whose subgraphs run as they stand, perhaps again in backward
_ENTERED = ("tag_activation_checkpoint", "invoke_subgraph", "wrap")


def replace(module: fx.GraphModule, wanted: Wanted) -> int:
    """Rewrite a traced module in place, and those inside it that checkpointing runs. Returns the number of replacements."""
    done = sum(replace(inner, wanted) for inner in _inner(module))
    here = replace_in_graph(module.graph, wanted)  # where nothing is replaced, masks may be gone
    module.graph.lint()
    module.recompile()
    return done + here


def _inner(module: fx.GraphModule) -> list[fx.GraphModule]:
    entered = [n for n in module.graph.nodes if n.op == "call_function" and getattr(n.target, "__name__", "") in _ENTERED]
    names = dict.fromkeys(str(a.target) for n in entered for a in n.all_input_nodes if a.op == "get_attr")
    return [m for name in names if isinstance(m := getattr(module, name, None), fx.GraphModule)]


def replace_in_graph(graph: fx.Graph, wanted: Wanted) -> int:
    """Rewrite one graph in place. Returns the number of replacements."""
    found: Counter = Counter()
    nodes = list(graph.nodes)
    if transforms(graph):
        count(len(nodes), Counter({("any op", "torch.func transforms"): 1}))
        return 0
    mark_written(graph)
    region, place = regions(graph), {node: i for i, node in enumerate(nodes)}
    gone: set[fx.Node] = set()
    for node in reversed(nodes):
        if node in gone or not isinstance(example(node), FakeTensor) or not operation(node).name:
            continue
        for row in wanted.rows():
            match = next(matches(row.form, node, Match()), None)
            if match is None:
                continue
            why = _replaced(row, match, node, wanted, region, place)
            found[row.op, why or REPLACED] += 1
            if why is None:
                gone |= _remove(match)
            break
    sweep(graph)
    count(len(nodes), found)
    return sum(n for (_, state), n in found.items() if state == REPLACED)


def _replaced(row: Replacement, match: Match, node: fx.Node, wanted: Wanted, region: dict, place: dict) -> str | None:
    """Replace a match, or return why it is left alone."""
    tensors = [example(v) for v in match.captured.values() if isinstance(v, fx.Node) and isinstance(example(v), torch.Tensor)]
    if not all(type(t) is FakeTensor for t in tensors):
        return "tensors of a class of their own"
    if len({t.device for t in tensors if t.dim()}) > 1:
        return "tensors on several devices"
    why = no_kernel(tensors[0]) or row.refuse(match, node)
    if why is None and (why := wanted.leaves(row, match, node)) is not None and row.ease is not None:
        row.ease(match, node)
    if (why := why or why_unsafe(match, node, region, place)) is not None:
        return why
    builder, before, was = Builder(node), node.prev, example(node)
    try:
        new = row.emit(builder, match, node)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:  # the op's own checks, on tensors without data
        return _undone(before, node, f"refused: {str(error).splitlines()[0][:120]}")
    if not same_shape(example(new), was):
        return _undone(before, node, "a result of another shape")
    laid = builder.laid_out_as(builder.cast(new, was.dtype), was)
    if laid is None:
        return _undone(before, node, "a result whose strides are not those of an order of dimensions")
    node.replace_all_uses_with(laid)
    for added in _between(before, node):  # later matches look at these, too
        region[added], place[added] = region[node], place[node]
    return None


def _between(before: fx.Node, node: fx.Node) -> list[fx.Node]:
    found, at = [], node.prev
    while at is not before:
        found.append(at)
        at = at.prev
    return found


def _undone(before: fx.Node, node: fx.Node, why: str) -> str:
    for added in _between(before, node):
        node.graph.erase_node(added)
    return why


def _remove(match: Match) -> set[fx.Node]:
    """Erase the covered nodes that nothing reads any more, users first."""
    gone: set[fx.Node] = set()
    pending = list(dict.fromkeys(match.covered))
    while ready := [n for n in pending if not n.users]:
        for node in ready:
            node.graph.erase_node(node)
            gone.add(node)
        pending = [n for n in pending if n not in gone]
    return gone
