"""Define tuning problems: kinds of calls (CallKind), each at several sizes (TuningProblem)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import torch

from ...algebra.rules.constant_folding import bind_parameters
from ...codegen.analysis.product_types import BYTES
from ...codegen.emit.module import plain_labels, value_inputs
from ...codegen.target import target
from ...lang import expr as ex
from ...lang.extents.formulas import inputs_of, source_of
from ...lang.extents.sources import computed
from ...lang.tuning_space import Shapes
from ...ops.registry import register, registered, shipped, shipped_names
from ...runtime.aot_build import factors_of_products, indexed_extent, known_labels
from ...runtime.bind.operator import Operator, Variant
from ...runtime.select.evidence import TimeModel
from ...runtime.signature.spec_hash import spec_hash
from ...runtime.tables.table import Row, saved_words
from .journal import HALF

SPEC_FILES = (".yaml", ".yml")


@dataclass(frozen=True)
class CallKind:
    """One kind of call: what the rows of a table must match exactly. ``op`` is a shipped op, or the path of a spec."""

    op: str
    direction: str
    dtype: str
    params: tuple[tuple[str, int | bool], ...] = ()
    wanted: tuple[str, ...] = ()
    saved: bool = False
    kept: tuple[str, ...] = ()

    @cached_property
    def _hash(self) -> int:
        return hash((self.op, self.direction, self.dtype, self.params, self.wanted, self.saved, self.kept))

    def __hash__(self) -> int:
        return self._hash  # a dictionary key, looked up thousands of times a second

    def __reduce__(self) -> tuple:
        return CallKind, (self.op, self.direction, self.dtype, self.params, self.wanted, self.saved, self.kept)  # hashes differ between processes

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, ex.DTYPES[self.dtype])

    @property
    def itemsize(self) -> int:
        return BYTES[self.dtype]

    def title(self) -> str:
        """Return a short name."""
        words = [Path(self.op).stem, self.direction + saved_words(self.saved, self.kept), self.dtype, *(f"{k}={v}" for k, v in self.params)]
        return " ".join(words).lower()

    def text(self) -> str:
        """Return the key of the journal; it changes with the algorithm."""
        kind = [self.op, self.direction, self.dtype, list(map(list, self.params)), list(self.wanted), self.saved]
        kind += [list(self.kept)] if self.kept else []
        return json.dumps([*kind, algorithm_hash(self)], separators=(",", ":"))


@dataclass(frozen=True)
class TuningProblem:
    """A kind of call at one size of each label."""

    group: CallKind
    sizes: tuple[tuple[str, int], ...]
    held_out: bool = False

    @cached_property
    def _hash(self) -> int:
        return hash((self.group, self.sizes, self.held_out))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple:
        return TuningProblem, (self.group, self.sizes, self.held_out)

    @property
    def extents(self) -> dict[str, int]:
        return dict(self.sizes)

    def text(self) -> str:
        """Return the key of the journal."""
        return self._text

    @cached_property
    def _text(self) -> str:
        return f"{self.group.text()}{HALF}{' '.join(f'{k}={v}' for k, v in self.sizes)}"

    def title(self) -> str:
        """Return a short name."""
        return f"{self.group.title()} {' '.join(f'{k}={v}' for k, v in self.sizes)}"


def operator_of(op: str) -> Operator:
    """Return the op of that name, or of the spec at that path."""
    if op.endswith(SPEC_FILES):
        return _from_file(op)
    return registered(op) or shipped(op)


@lru_cache(maxsize=16)
def _from_file(path: str) -> Operator:
    return register(path)


@lru_cache(maxsize=256)
def variants_of(group: CallKind) -> tuple[Variant, Variant]:
    """Return (the forward variant that callers see, the variant that the group tunes)."""
    forward = operator_of(group.op).variant(group.params, frozenset(), 0)
    if not group.wanted:
        return forward, forward
    pair = forward.pair(group.wanted, group.kept)
    return forward, pair.backward if group.direction == "backward" else pair.forward


@lru_cache(maxsize=256)
def time_model(group: CallKind) -> TimeModel:
    """Return the cost model of a kind of call, on the GPU that most times were measured on."""
    own, to = variants_of(group)[1], target("h200")
    return TimeModel(own.dispatch.known_outline, to, to)


@lru_cache(maxsize=256)
def algorithm_hash(group: CallKind) -> str:
    """Hash what is computed, not how it is compiled."""
    return hashlib.sha256(str(variants_of(group)[1].algorithm).encode()).hexdigest()[:12]


def row_of(work: TuningProblem, schedule: str, **more) -> Row:
    """Make a table's row for ``work``."""
    g = work.group
    operator = operator_of(g.op)
    return Row(operator.spec.op, g.direction, g.dtype, work.extents, schedule, spec_hash(operator.spec.algorithm), dict(g.params), g.wanted, g.saved, g.kept, **more)


# -- from shapes to works -----------------------------------------------------------------------------------------------


def op_names(asked: str, tool: str = "tune", least: int = 1) -> tuple[str, ...]:
    """Parse names: ``all`` shipped ops with shapes to tune on, or names and spec files separated by commas. Exits with one line on an error."""
    if asked == "all":
        return tuple(n for n in shipped_names() if shipped(n).spec.shapes)
    names = tuple(n for n in asked.split(",") if n)
    if len(names) < least:
        raise SystemExit(f"{tool}: --ops names none; allowed: all, {', '.join(shipped_names())}, or the path of a spec")
    for n in names:
        if n in shipped_names():
            continue
        if not n.endswith(SPEC_FILES):
            raise SystemExit(f"{tool}: no op {n!r}; allowed: all, {', '.join(shipped_names())}, or the path of a spec")
        if not Path(n).is_file():
            raise SystemExit(f"{tool}: no such file: {n}")
    return names


def problems_of(op: str, shapes: Iterable[Shapes], dtypes: tuple[str, ...] = ()) -> list[TuningProblem]:
    """Return every problem that the shapes ask for, each once, in the order in which groups learn from one another."""
    found: dict[tuple, TuningProblem] = {}
    for entry in shapes:
        for dtype in sorted(entry.dtypes, key=("bf16", "fp16", "fp32").index):
            if dtypes and dtype not in dtypes:
                continue
            for group in _groups(op, entry, dtype):
                labels = known_labels(variants_of(group)[1].algorithm)
                for sizes in (s for s in entry.each() if not group.wanted or _kept(group, s) == group.kept):
                    extents = tuple((label, _extent(group, label, sizes)) for label in labels)
                    found.setdefault((group, extents), TuningProblem(group, extents, entry.held_out))
    return list(found.values())


def _groups(op: str, entry: Shapes, dtype: str) -> Iterator[CallKind]:
    defaults = dict(operator_of(op).spec.algorithm.params)
    for name in entry.params:
        if name not in defaults:
            raise SystemExit(f"tune: {op}: shapes name the parameter {name!r}; allowed: {', '.join(defaults) or 'none'}")
    bind_parameters(operator_of(op).spec.algorithm, entry.params)  # refuses a number for a truth value
    params = tuple(sorted((k, v) for k, v in entry.params.items() if v != defaults[k]))
    plain = CallKind(op, "forward", dtype, params)
    forward = variants_of(plain)[0]
    _check_names(op, entry, forward)
    if "forward" in entry.directions:
        yield plain
    if "backward" in entry.directions:
        wanted = entry.wanted or differentiable(forward)
        for kept in dict.fromkeys(_kept(CallKind(op, "backward", dtype, params, wanted), sizes) for sizes in entry.each()):
            if forward.pair(wanted, kept).forward is not forward:
                yield CallKind(op, "forward", dtype, params, wanted, True, kept)
            yield CallKind(op, "backward", dtype, params, wanted, False, kept)


def _check_names(op: str, entry: Shapes, forward: Variant) -> None:
    """Exit with one line if an entry names an unknown label or input."""
    a = forward.algorithm
    for name in entry.sizes:
        if name not in a.labels and name not in operator_of(op).spec.algorithm.labels:  # which only another variant may have
            raise SystemExit(f"tune: {op}: shapes name the label {name!r}; allowed: {', '.join(known_labels(a))}")
    inputs = (*value_inputs(a, list(a.inputs)), *a.scalars)
    for name in entry.wanted:
        if name not in inputs:
            raise SystemExit(f"tune: {op}: shapes want the gradient of {name!r}; allowed: {', '.join(inputs)}")


def _kept(group: CallKind, sizes: dict[str, int]) -> tuple[str, ...]:
    """Return the products that forward keeps for backward at these sizes."""
    plain = replace(group, direction="forward", wanted=(), saved=False, kept=())
    forward, _ = variants_of(plain)
    extents = {label: _extent(plain, label, sizes) for label in known_labels(forward.algorithm)} if forward.products else {}
    return forward.pair_at(group.wanted, extents, BYTES[group.dtype]).gradient.products


def differentiable(variant: Variant) -> tuple[str, ...]:
    """Return inputs and scalars that a training step usually wants gradients of: tensors of values, and scalars except factors of products."""
    a = variant.algorithm
    return tuple(value_inputs(a, list(a.inputs))) + tuple(s for s in a.scalars if s not in factors_of_products(a))


def _extent(group: CallKind, label: str, sizes: dict[str, int]) -> int:
    """Return the size of a label: from the shapes, from the label that a gradient renamed, or from the input dimension that it indexes."""
    for name in (label, label.rstrip("_"), label.rstrip("_0123456789'")):
        if name in sizes:
            return sizes[name]
    forward, variant = variants_of(group)
    if (constant := variant.algorithm.constant_extent(label)) is not None:
        return constant
    source, formulas = variant.algorithm.extent_source(label), variant.algorithm.extent_formulas(label)
    shapes = _input_shapes(group, tuple(sorted(sizes.items())))
    if source is not None and source[0] in shapes:
        return shapes[source[0]][source[1]]
    if (formula := next((f for f in formulas if all(t in shapes for t, _ in inputs_of(f))), None)) is not None:
        return computed(source_of(formula), lambda tensor, dim: shapes[tensor][dim])
    raise SystemExit(f"tune: {group.op}: its shapes give no size of {label}; given: {', '.join(sizes)}")


@lru_cache(maxsize=64)
def _input_shapes(group: CallKind, sizes: tuple[tuple[str, int], ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the op's inputs where its labels have these sizes, but for those that data indexes; nothing where a label of its own has none."""
    spec, known = operator_of(group.op).spec.algorithm, dict(sizes)
    a = bind_parameters(spec, {**dict(spec.params), **dict(group.params)})
    known |= {x: n for x in a.labels if (n := a.constant_extent(x)) is not None}
    if any(x not in known and a.plain_extent(x) is not None for x in a.labels):
        return {}
    by_data = {n.tensor for d in a.definitions for n in ex.accesses(d.expr) for i in n.index if any(ex.accesses(i))}
    told = [t for t in a.inputs if t not in by_data or None not in plain_labels(a, t)]
    return {t: tuple(known[x] if x in known else indexed_extent(a, t, d, known) for d, x in enumerate(plain_labels(a, t))) for t in told}


def size_distance(a: TuningProblem, b: TuningProblem) -> float:
    """Return the distance of two problems' sizes in log2."""
    other = b.extents
    return math.sqrt(sum(math.log2(n / other[label]) ** 2 for label, n in a.sizes if label in other))
