"""Read and write op manifests: precomputed signatures and gradients beside a spec, so that a first call parses and derives nothing.

A manifest is JSON with the checksum of the spec's file, written by ``python tools/write_manifests.py``. It holds signatures for the
usual parameters, and gradients for the calls that the shipped tables have rows for. Each is one line, and a call parses only the
lines that it needs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...autoschedule.cost.outline import Outline
from .signature import Halves, Signature

if TYPE_CHECKING:
    from ...algebra.autodiff.rematerialization import Product
    from ...lang.spec import Spec

ANY_NUMBER = 2  #: stands for every integer from 2 on: their signatures are equal
Params = tuple[tuple[str, "int | bool"], ...]
_HEAD = ("op", "inputs", "scalars", "params", "outputs", "spec", "integers", "products", "compiled", "autocast")


class Facts(NamedTuple):
    """The precomputed facts of a variant. ``products`` is None where unknown."""

    signature: Signature
    products: tuple[Product, ...] | None = None
    halves: Callable[[tuple[str, ...], tuple[str, ...]], Halves | None] = lambda wanted, kept: None


@dataclass(frozen=True)
class OpManifest:
    """The manifest of one op."""

    op: str
    inputs: tuple[str, ...]
    scalars: tuple[str, ...]
    params: Params
    outputs: tuple[str, ...]
    spec: str  #: ``spec_hash`` of the algorithm
    integers: tuple[str, ...]  #: integer inputs, which are used in an index
    products: bool  #: whether there are matrix products
    compiled: str
    autocast: str | None
    lines: tuple[str, ...] = ()  #: signatures and gradients as JSON
    whole: tuple[str, ...] = ()  #: scalars used in an index
    written: tuple[str, ...] = ()  #: for each output the input that it is stored in; "" for a result of its own; () for none

    def facts(self, params: Params, batched: frozenset[str], labels: int) -> Facts | None:
        """Return the facts of a variant, if present. Batch labels and batched inputs need the algorithm itself."""
        alike = tuple((n, v if isinstance(v, bool) or v < ANY_NUMBER else ANY_NUMBER) for n, v in params)
        if batched or labels or (data := self._line(_signature_key(alike))) is None:
            return None
        signature, number = _signature(data["signature"]), next((v for _, v in params if not isinstance(v, bool) and v > ANY_NUMBER), None)
        if number is not None and signature.outline is not None:
            signature = replace(signature, outline=signature.outline.divided_by(ANY_NUMBER, number))
        return Facts(signature, tuple(map(_product, data["products"])), lambda wanted, kept: self.halves(params, wanted, kept))

    def halves(self, params: Params, wanted: tuple[str, ...], kept: tuple[str, ...]) -> Halves | None:
        """Return the halves of a gradient, if present."""
        data = self._line(_gradient_key(params, wanted, kept))
        if data is None:
            return None
        signatures = (data[half] and _signature(data[half]) for half in ("forward", "backward"))
        return Halves(tuple(data["outputs"]), data["adjoints"], data["grads"], tuple(data["products"]), *signatures)

    def _line(self, key: str) -> dict | None:
        """Parse the line that starts with ``key``."""
        found = next((line for line in self.lines if line.startswith(key)), None)
        return json.loads(found.rstrip(",")) if found else None

    def keys(self) -> tuple[list[Params], list[tuple[Params, tuple[str, ...], tuple[str, ...]]]]:
        """Return (parameters with a signature, (parameters, wanted, kept) with a gradient)."""
        data = [json.loads(line.rstrip(",")) for line in self.lines]
        signatures = [tuple(d["params"].items()) for d in data if "signature" in d]
        return signatures, [(tuple(d["params"].items()), tuple(d["wanted"]), tuple(d["kept"])) for d in data if "wanted" in d]

    @staticmethod
    def of(spec: Spec) -> OpManifest:
        """Return the manifest of a spec, without lines."""
        from ...lang import expr as ex
        from .spec_hash import spec_hash

        a = spec.algorithm
        products = any(isinstance(n, ex.Dot) for d in a.definitions for n in d.expr.walk())
        integers = tuple(sorted(a.integer_inputs()))
        return OpManifest(
            spec.op, a.inputs, a.scalars, tuple(a.params), spec.outputs, spec_hash(a), integers, products, spec.compiled, spec.autocast,
            whole=tuple(sorted(a.integer_scalars())), written=tuple(a.written.get(o, "") for o in spec.outputs) if a.written else (),
        )


# -- beside the spec ------------------------------------------------------------------------------------------------------


def manifest_path(spec: Path) -> Path:
    """Return the path of the manifest beside a spec's file."""
    return spec.with_suffix(".json")


def _signature_key(params: Params) -> str:
    return f'{{"params": {json.dumps(dict(params))}, "signature": '


def _gradient_key(params: Params, wanted: tuple[str, ...], kept: tuple[str, ...]) -> str:
    return f'{{"params": {json.dumps(dict(params))}, "wanted": {json.dumps(wanted)}, "kept": {json.dumps(kept)}, '


def signature_line(params: Params, signature: Signature, products: Iterable[Product]) -> str:
    """Format the line of a variant."""
    plain = [(p.name, p.against, p.labels, p.terms, *([p.multiples] if p.multiples else ())) for p in products]
    return json.dumps({"params": dict(params), "signature": _as_json(signature), "products": plain})


def gradient_line(params: Params, wanted: tuple[str, ...], kept: tuple[str, ...], halves: Halves) -> str:
    """Format the line of a gradient."""
    plain = halves._asdict() | {half: s and _as_json(s) for half, s in (("forward", halves.forward), ("backward", halves.backward))}
    return json.dumps({"params": dict(params), "wanted": wanted, "kept": kept, **plain})


def manifest_text(manifest: OpManifest, spec: bytes) -> str:
    """Format a manifest. ``spec`` is the content of the spec's file."""
    head = {"file": hashlib.sha256(spec).hexdigest(), **{n: getattr(manifest, n) for n in _HEAD}}
    head |= {n: getattr(manifest, n) for n in ("whole", "written") if getattr(manifest, n)}
    return json.dumps(head)[:-1] + ', "lines": [\n' + ",\n".join(manifest.lines) + "\n]}\n"


def read_manifest(spec: Path) -> OpManifest | None:
    """Read the manifest beside a spec's file; None where it is missing or of another version of the file."""
    try:
        head, *lines, end = manifest_path(spec).read_text().splitlines()
        data = json.loads(head + end)
        if data.pop("file") != hashlib.sha256(spec.read_bytes()).hexdigest():
            return None
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return OpManifest(**{**plain, "params": tuple(tuple(p) for p in data["params"]), "lines": tuple(lines)})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _product(data: list) -> Product:
    from ...algebra.autodiff.rematerialization import Product

    name, against, labels, terms, *multiples = data
    found = [(label, times, of) for label, times, of in (multiples[0] if multiples else ())]
    return Product(name, tuple((tuple(own), tuple(other)) for own, other in against), tuple(labels), tuple(terms), tuple(found))


def _signature(data: dict) -> Signature:
    return Signature(
        {n: tuple(labels) for n, labels in data["inputs"].items()},
        tuple(data["scalars"]),
        tuple(data["values"]),
        {label: _source(s) for label, s in data["sizes"].items()},
        {label: tuple(names) for label, names in data["rows"].items()},
        data["precise"],
        tuple(data.get("leaders", ())),
        data.get("firsts", {}),
        Outline.read(data["outline"]) if "outline" in data else None,
        tuple(data.get("written", ())),
        tuple(map(_source, data.get("agree", ()))),
        tuple(data.get("codes", ())),
    )


def _source(data: Any) -> Any:
    return tuple(map(_source, data)) if isinstance(data, list) else data


def _as_json(signature: Signature) -> dict:
    """Convert a signature for JSON."""
    return {name: value for name, value in vars(signature).items() if value or name not in ("leaders", "firsts", "outline", "written", "agree", "codes")}
