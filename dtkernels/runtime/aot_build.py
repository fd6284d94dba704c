"""Compile the kernels of table rows ahead of time, on any machine. Needs Triton but no GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ..codegen.emit.module import emit, plain_labels, value_inputs
from ..codegen.target import Target
from ..lang import expr as ex
from ..lang.algorithm import Algorithm
from ..lang.extents.formulas import smallest_dimension
from ..lang.schedule import Program
from .bind.operator import Operator, Variant
from .build.source_cache import load_module
from .build.specialization import ANY_PRECISION, Build, builds
from .build.triton_compile import (
    KernelLaunch,
    compile_kernel,
    ir_of,
    plain_constant,
    plain_types,
    record_launches,
    split_multiples,
    stored_kernel_of,
)
from .launch.wrapper_recorder import host_text
from .reference.evaluator import extents
from .select.schedule_selection import scheduled
from .tables.kernel_store import KernelStore, KernelStores, StoredKernel, digest
from .tables.table import Row


class BuildError(ValueError):
    """The kernels of a row cannot be built; the message is one line."""


@dataclass
class BuiltKernels:
    """Kernels ready to be stored."""

    entries: list[StoredKernel] = field(default_factory=list)
    hosts: dict[str, str] = field(default_factory=dict)
    codes: dict[str, bytes] = field(default_factory=dict)

    def __iadd__(self, other: BuiltKernels) -> BuiltKernels:
        names = {e.name for e in self.entries}
        self.entries += [e for e in other.entries if e.name not in names]
        self.hosts |= other.hosts
        self.codes |= other.codes
        return self


def variant_of(operator: Operator, row: Row) -> tuple[Variant, Variant]:
    """Return (the forward as the caller sees it, the variant of the row). Raises BuildError where the op has no such variant."""
    for labels in range(1 if row.batched else 0, 4 if row.batched else 1):
        forward = operator.variant(tuple(sorted(row.params.items())), frozenset(row.batched), labels)
        found = forward
        if row.wanted:
            pair = forward.pair(row.wanted, row.kept)
            found = pair.backward if row.direction == "backward" else pair.forward
        if found.subject.key(row.dtype, frozenset(known_labels(found.algorithm))) == row.key:
            return forward, found
    raise BuildError(f"{row.title()}: the op has no such call; its labels are {', '.join(known_labels(found.algorithm))}")


def known_labels(algorithm: Algorithm) -> list[str]:
    """Return the labels with a known extent."""
    return [label for label in algorithm.labels if algorithm.plain_extent(label) is not None or algorithm.formulas_of(label)]


def meta_tensors(forward: Variant, variant: Variant, sizes: dict[str, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return tensors without storage for the inputs of ``variant``, with labels of these ``sizes``."""
    a = variant.algorithm
    nodes = [n for d in a.definitions for n in d.expr.walk()]
    values = {*value_inputs(a, list(a.inputs)), *(n.arg.tensor for n in nodes if isinstance(n, ex.Cast) and isinstance(n.arg, ex.Access))}
    saved: dict[str, torch.dtype] = {}
    for pair in forward.pairs():
        saved |= {o: getattr(torch, own) for o in pair.forward.outputs if (own := pair.forward.algorithm.own_dtype(o))}
    found, other = {}, {t: torch.int64 if t in a.integer_inputs() else torch.bool for t in a.inputs}
    for name in a.inputs:
        shape = tuple(sizes[label] if label in sizes else indexed_extent(a, name, dim, sizes) for dim, label in enumerate(plain_labels(a, name)))
        found[name] = torch.empty(shape, dtype=saved.get(name, dtype) if name in values else other[name], device="meta")
    return found


def indexed_extent(algorithm: Algorithm, tensor: str, dim: int, sizes: dict[str, int]) -> int:
    """Return the extent of a dimension that is indexed by arithmetic only: what formulas tell, else one more than the largest index."""
    indices = [a.index[dim] for d in algorithm.definitions for a in ex.accesses(d.expr) if a.tensor == tensor]
    reach = max([1, *(_largest(i, sizes) + 1 for i in indices)])
    return smallest_dimension(algorithm, tensor, dim, sizes, reach) if algorithm.formulas else reach


def _largest(index: ex.Expr, sizes: dict[str, int]) -> int:
    """Return the largest value of an index whose labels run over ``sizes``. Scalars count as 0."""
    match index:
        case ex.Label(name):
            return sizes.get(name, 1) - 1
        case ex.Const(value):
            return int(value)
        case ex.Len(label):
            return sizes.get(label, 1)
        case ex.Binary("+", left, right):
            return _largest(left, sizes) + _largest(right, sizes)
        case ex.Binary("*", left, right):
            return _largest(left, sizes) * _largest(right, sizes)
        case ex.Binary("/", left, ex.Const(value)):
            return _largest(left, sizes) // int(value)
        case ex.Binary("-", left, ex.Const(value)):
            return _largest(left, sizes) - int(value)
        case ex.Binary(_, left, _):
            return _largest(left, sizes)
    return 0


def rows_with_any_build(rows: Sequence[Row]) -> set[int]:
    """Return the places of the rows that also get the ``any`` build: the largest of each kind of call. It serves the other rows' calls too."""
    found: dict[tuple, int] = {}
    for i, row in enumerate(rows):
        best = found.setdefault(row.key, i)
        if math.prod(row.sizes.values()) > math.prod(rows[best].sizes.values()):
            found[row.key] = i
    return set(found.values())


class PreviousBuild:
    """Reuse the kernels of an earlier store: a kernel that would be compiled from the same IR is taken from there."""

    def __init__(self, store: KernelStore | KernelStores | None = None):
        self.store = store
        self.found: dict[str, list[StoredKernel]] = {}
        for entry in (store.entry(name) for name in store.names()) if store else ():
            self.found.setdefault(_kind(entry), []).append(entry)

    def __call__(self, launch: KernelLaunch, build: Build, host: str, target: Target) -> tuple[StoredKernel, bytes] | None:
        import triton

        constants = {k: plain_constant(v) for k, v in build.constants.items()}
        divisible, steps = split_multiples(build.multiples)
        wanted = StoredKernel(launch.kernel.__name__, host, "", target.arch, build.types, constants, divisible, 0, 0, steps=steps)
        alike = [e for e in self.found.get(_kind(wanted), ()) if e.ir and e.built == triton.__version__]
        real = {k: "ieee" if v == ANY_PRECISION else v for k, v in build.constants.items()}
        ir = ir_of(launch.kernel, build.types, real, build.multiples, launch.options, target) if alike else ""
        entry = next((e for e in alike if e.ir == ir), None)
        return (entry, self.store.code(entry.code)) if entry and self.store else None


def _kind(entry: StoredKernel) -> str:
    """Return the identity of an entry before compilation. Launch options are part of its host text."""
    return json.dumps([entry.kernel, entry.host, entry.arch, entry.types, sorted(entry.constants.items()), entry.divisible, sorted(entry.steps.items())])


def build_row(operator: Operator, row: Row, target: Target, widest: bool = True, earlier: PreviousBuild | None = None) -> BuiltKernels:
    """Compile the kernels of one row in every useful build. ``widest``: also for any layout and 64-bit sizes. Raises DTError, BuildError."""
    forward, variant = variant_of(operator, row)
    dtype = getattr(torch, ex.DTYPES[row.dtype])
    tensors = meta_tensors(forward, variant, row.sizes, dtype)
    if extents(variant.algorithm, tensors) != row.sizes:
        raise BuildError(f"{row.title()}: sizes are {extents(variant.algorithm, tensors)}")
    program = scheduled(variant.algorithm, row.schedule)
    if program.outputs() != variant.outputs:
        raise BuildError(f"{row.title()}: compiles {', '.join(program.outputs())}; wanted {', '.join(variant.outputs)}")
    built = BuiltKernels()
    for scalars in _scalar_kinds(variant.algorithm, row, dtype):
        built += _build(program, (*tensors.values(), *scalars), target, widest, earlier or PreviousBuild())
    return built


def _scalar_kinds(algorithm: Algorithm, row: Row, dtype: torch.dtype) -> list[tuple]:
    """Return the kinds of scalars to build for: numbers, and one-element tensors such as a layer's parameters.

    Scalars with a gradient are tensors only. Scalars that merely scale a matrix product, such as attention's scale, are numbers only, as
    they are in practice.
    """
    integers = {n.name for d in algorithm.definitions for a in ex.accesses(d.expr) for i in a.index for n in i.walk() if isinstance(n, ex.Scalar)}
    fixed = integers | factors_of_products(algorithm) - {*row.wanted}
    numbers = tuple(1 if s in integers else 0.5 for s in algorithm.scalars)
    tensors = tuple(n if s in fixed else torch.empty(1, dtype=dtype, device="meta") for s, n in zip(algorithm.scalars, numbers))
    kinds = [tuple(t if s in row.wanted else n for s, n, t in zip(algorithm.scalars, numbers, tensors)), tensors]
    return kinds[:1] if set(algorithm.scalars) <= {*row.wanted} | fixed else kinds


def factors_of_products(algorithm: Algorithm) -> set[str]:
    """Return the scalars that are a factor of a matrix product."""
    factors = {n for d in algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Binary) and n.op == "*"}
    sides = {(a, b) for n in factors for a, b in ((n.left, n.right), (n.right, n.left))}
    return {a.name for a, b in sides if isinstance(a, ex.Scalar) and any(isinstance(n, ex.Dot) for n in b.walk())}


def _build(program: Program, args: tuple, target: Target, widest: bool, earlier: PreviousBuild) -> BuiltKernels:
    import triton.language as tl

    source = emit(program, "call", target)
    host = host_text(source)
    named, text = digest(host.encode()), digest(source.encode())
    built = BuiltKernels(hosts={named: host})
    for launch in _launches(source, args):
        product = launch.kernel.is_gluon() or "tl.dot" in launch.kernel.src
        found = builds(tuple(launch.kernel.arg_names), launch.args, launch.constants, plain_types(launch), tl.int64, product=product)
        found = found if widest else found[:-1] or found
        for entry, code in _compile_all(launch, found, named, text, target, earlier):
            if entry.name not in {e.name for e in built.entries}:
                built.entries.append(entry)
                built.codes[entry.code] = code
    return built


def _launches(source: str, args: tuple) -> list[KernelLaunch]:
    """Return the launches for aligned tensors, and the other kernels that tensors with unaligned rows launch."""
    module = load_module(source, "prebuilt")
    found = record_launches(module, "call", args)
    names = {launch.kernel.__name__ for launch in found}
    padded = tuple(_padded(a) if isinstance(a, torch.Tensor) else a for a in args)
    return found + [launch for launch in record_launches(module, "call", padded) if launch.kernel.__name__ not in names]


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape with one element of padding between rows."""
    if tensor.dim() < 2:
        return tensor
    wide = torch.empty((*tensor.shape[:-1], tensor.shape[-1] + 1), dtype=tensor.dtype, device=tensor.device)
    return wide[..., : tensor.shape[-1]]


def _compile_all(launch: KernelLaunch, found: list[Build], host: str, source: str, target: Target, earlier: PreviousBuild) -> list[tuple[StoredKernel, bytes]]:
    """Compile every build, for both precisions of float32 products unless the first build shows that they do not differ."""
    if "PRECISION" not in launch.constants:
        return [_compile_one(launch, b, host, source, target, earlier) for b in found]
    made: list[tuple[StoredKernel, bytes]] = []
    precisions = ("ieee", "tf32") if "*fp32" in plain_types(launch).values() else ("ieee",)
    for b in found:
        if both := earlier(launch, Build(b.types, {**b.constants, "PRECISION": ANY_PRECISION}, b.multiples), host, target):
            made.append(both)
            continue
        pair = [_compile_one(launch, Build(b.types, {**b.constants, "PRECISION": p}, b.multiples), host, source, target, earlier) for p in precisions]
        if len({entry.code for entry, _ in pair}) == 1:
            precisions, entry = ("ieee",), pair[0][0]
            pair = [(replace(entry, constants={**entry.constants, "PRECISION": ANY_PRECISION}), pair[0][1])]
        made += pair
    return made


_known: dict[str, tuple[StoredKernel, bytes]] = {}  #: kernels compiled by this process; rows with one schedule share them


def _compile_one(launch: KernelLaunch, build: Build, host: str, source: str, target: Target, earlier: PreviousBuild) -> tuple[StoredKernel, bytes]:
    """Compile one build, or reuse it. ``source`` is the digest of the emitted file: different kernels may have one wrapper text."""
    constants = {k: plain_constant(v) for k, v in build.constants.items()}
    key = json.dumps([source, launch.kernel.__name__, target.name, build.types, constants, build.multiples, launch.options], sort_keys=True)
    if key not in _known and (kept := earlier(launch, build, host, target)):
        _known[key] = kept
    if key not in _known:
        compiled = compile_kernel(launch.kernel, build.types, build.constants, build.multiples, launch.options, target)
        if compiled.metadata.shared > target.shared_bytes:
            raise BuildError(f"{launch.kernel.__name__} takes {compiled.metadata.shared} bytes of shared memory; {target.name} has {target.shared_bytes}")
        _known[key] = stored_kernel_of(compiled, host, target.arch), compiled.asm["cubin"]
    return _known[key]
