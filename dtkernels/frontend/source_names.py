"""Name the results of operations as the user's source does."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Mapping
from functools import lru_cache

import torch

from .tracing import Place, is_of_torch


def assigned_names(graph: torch.fx.Graph, places: Mapping[torch.fx.Node, Place]) -> dict[torch.fx.Node, str]:
    """Return the variable that each node's value is assigned to: that of the last node of a statement ``name = ...``."""
    last: dict[tuple[str, int], torch.fx.Node] = {}
    found: dict[torch.fx.Node, str] = {}
    before = None
    for node in graph.nodes:
        if (place := places.get(node)) is None or is_of_torch(place[0]):
            continue
        statement = _statement(place[0], place[1])
        if before is not None and statement != before and before in last:
            _close(found, last.pop(before), before)
        if statement is not None:
            last[statement] = node
        before = statement
    if before is not None and before in last:
        _close(found, last.pop(before), before)
    return found


def _close(found: dict[torch.fx.Node, str], node: torch.fx.Node, statement: tuple[str, int]) -> None:
    name = _targets(statement[0]).get(statement[1])
    if name:
        found[node] = name


def _statement(file: str, line: int) -> tuple[str, int] | None:
    start = _lines(file).get(line)
    return None if start is None else (file, start)


@lru_cache(maxsize=64)
def _assignments(file: str) -> tuple[tuple[int, int, str], ...]:
    """Return (first line, last line, name) of every assignment to one name."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    found = []
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else getattr(node, "target", None)
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and isinstance(target, ast.Name):
            found.append((node.lineno, node.end_lineno or node.lineno, target.id))
    return tuple(found)


@lru_cache(maxsize=64)
def _lines(file: str) -> dict[int, int]:
    """Return line -> first line of the assignment that it belongs to."""
    return {line: first for first, end, _ in _assignments(file) for line in range(first, end + 1)}


@lru_cache(maxsize=64)
def _targets(file: str) -> dict[int, str]:
    return {first: name for first, _, name in _assignments(file)}
