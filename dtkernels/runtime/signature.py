"""What a call must know of an op before any kernel runs: names, ranks, where extents and dtypes come from.

All of it follows from the spec. For the ops of the package it is also written beside the spec, as JSON with the checksum
of the spec's file, so that a first call need not read the algorithm: ``python tools/outlines.py`` writes those files.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..lang.algorithm import Algorithm
    from ..lang.spec import Spec

#: batch labels and batched inputs need the algorithm: outlines hold the plain ranks only
Key = tuple[tuple[tuple[str, "int | bool"], ...], frozenset[str], int]


@dataclass(frozen=True)
class Signature:
    """Of one prepared algorithm."""

    inputs: dict[str, tuple[str | None, ...]]  #: the label of each dimension, None where only index arithmetic enters
    scalars: tuple[str, ...]
    values: tuple[str, ...]  #: inputs whose dtype enters the results'
    sizes: dict[str, tuple[str, int] | int]  #: label -> (input, dimension) or a constant
    rows: dict[str, tuple[str, ...]]  #: labels that may stand for more rows, if these inputs and no others have them
    precise: bool  #: whether the setting of float32 products matters

    @staticmethod
    def of(algorithm: Algorithm) -> Signature:
        """The signature of a prepared algorithm."""
        from ..codegen.triton_module import plain_labels, value_inputs
        from ..lang import expr as ex
        from .joining import rows_of

        inputs = {n: plain_labels(algorithm, n) for n in algorithm.inputs}
        precise = any(isinstance(n, ex.Dot) for d in algorithm.definitions for n in d.expr.walk())
        firsts = dict.fromkeys(labels[0] for labels in inputs.values() if labels and labels[0])
        rows = {label: found for label in firsts if (found := rows_of(algorithm, label)) is not None}
        return Signature(inputs, algorithm.scalars, tuple(value_inputs(algorithm, list(inputs))), size_sources(algorithm), rows, precise)

    def extents(self, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
        """The extent of every label from the shapes of the inputs."""
        return {label: tensors[s[0]].shape[s[1]] if isinstance(s, tuple) else s for label, s in self.sizes.items()}

    def pitches(self) -> frozenset[str]:
        """Labels whose extent is the distance of one row of an input from the next, where it is contiguous."""
        return frozenset(labels[-1] for labels in self.inputs.values() if len(labels) > 1 and labels[-1])

    def result_dtype(self, tensors: dict[str, torch.Tensor]) -> torch.dtype:
        """The promoted dtype of the inputs whose values enter the results."""
        return promoted([tensors[n].dtype for n in self.values if n in tensors and tensors[n].is_floating_point()])


def size_sources(algorithm: Algorithm) -> dict[str, tuple[str, int] | int]:
    """Where the extent of every label that has one comes from."""
    found: dict[str, tuple[str, int] | int] = {}
    for label in algorithm.labels:
        if (constant := algorithm.constant_extent(label)) is not None:
            found[label] = constant
        elif (source := algorithm.extent_source(label)) is not None:
            found[label] = (source[0], source[1])
    return found


def promoted(dtypes: list[torch.dtype]) -> torch.dtype:
    """The dtype of a result; float32 where there is nothing to go by."""
    result = dtypes[0] if dtypes else torch.float32
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, dtype)
    return result


ANY_NUMBER = 2  #: stands in outlines for every number from 2 on; what a signature says is the same for all of them


@dataclass(frozen=True)
class Outline:
    """Of one op."""

    op: str
    inputs: tuple[str, ...]
    scalars: tuple[str, ...]
    params: tuple[tuple[str, int | bool], ...]
    outputs: tuple[str, ...]
    spec: str  #: ``spec_hash`` of the algorithm
    integers: tuple[str, ...]  #: inputs that hold integers, which stand in an index
    products: bool  #: whether there are products for the matrix units
    compiled: str
    autocast: str | None
    signatures: dict[Key, Signature] = field(default_factory=dict)

    def signature(self, params: tuple, batched: frozenset[str], labels: int) -> Signature | None:
        """The signature of a variant, if it is known without the algorithm."""
        alike = tuple((n, v if isinstance(v, bool) or v < ANY_NUMBER else ANY_NUMBER) for n, v in params)
        return self.signatures.get((alike, batched, labels))

    @staticmethod
    def of(spec: Spec) -> Outline:
        """The outline of a spec, without signatures."""
        from ..lang import expr as ex
        from .table import spec_hash

        a = spec.algorithm
        products = any(isinstance(n, ex.Dot) for d in a.definitions for n in d.expr.walk())
        integers = tuple(sorted(a.integer_inputs()))
        return Outline(
            spec.op, a.inputs, a.scalars, tuple(a.params), spec.outputs, spec_hash(a), integers, products, spec.compiled, spec.autocast
        )


# -- beside the spec ------------------------------------------------------------------------------------------------------


def outline_path(spec: Path) -> Path:
    """Where the outline of a spec's file lies."""
    return spec.with_suffix(".json")


def outline_text(outline: Outline, spec: bytes) -> str:
    """The JSON of an outline of the spec whose file holds ``spec``."""
    names = ("op", "inputs", "scalars", "params", "outputs", "spec", "integers", "products", "compiled", "autocast")
    head = {"file": hashlib.sha256(spec).hexdigest(), **{n: getattr(outline, n) for n in names}}
    lines = [json.dumps({"params": dict(params), **vars(s)}) for (params, _, _), s in outline.signatures.items()]
    return json.dumps(head)[:-1] + ', "signatures": [\n' + ",\n".join(lines) + "\n]}\n"


def read_outline(spec: Path) -> Outline | None:
    """The outline that lies beside a spec's file, if it is of the file as it is now."""
    try:
        data = json.loads(outline_path(spec).read_bytes())
        if data.pop("file") != hashlib.sha256(spec.read_bytes()).hexdigest():
            return None
        signatures = {(tuple(sorted(s.pop("params").items())), frozenset(), 0): _signature(s) for s in data.pop("signatures")}
        plain = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return Outline(**{**plain, "params": tuple(tuple(p) for p in data["params"])}, signatures=signatures)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _signature(data: dict) -> Signature:
    return Signature(
        {n: tuple(labels) for n, labels in data["inputs"].items()},
        tuple(data["scalars"]),
        tuple(data["values"]),
        {label: tuple(s) if isinstance(s, list) else s for label, s in data["sizes"].items()},
        {label: tuple(names) for label, names in data["rows"].items()},
        data["precise"],
    )
