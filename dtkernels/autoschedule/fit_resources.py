"""Shrink a schedule until its kernels fit the shared memory and registers of the GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..codegen.analysis.dtype_propagation import narrow_buffers
from ..codegen.analysis.product_types import BYTES, ElementBytes, InputTypes, cast_bytes, typed_buffers, typed_inputs
from ..codegen.analysis.resources import check_resources, spills
from ..codegen.ir.nest import Kernel, has_matrix_product
from ..codegen.pipeline import lower, prelower
from ..codegen.powers_of_two import next_power_of_two
from ..codegen.target import Target
from ..lang.algorithm import Algorithm
from ..lang.errors import DTError
from ..lang.schedule import Names, Number, Primitive, Program, Schedule, Sized, Sizes

_NARROWEST = 16  #: of a tile of a product
_NARROWED = 4  #: times that a kernel's tile is narrowed for that, at most


def fit_resources(program: Program, sizes: dict[str, int], itemsize: int | InputTypes, target: Target) -> Program:
    """Return ``program``, with fewer stages and then narrower tiles as far as its kernels need more than ``target`` has.

    Unchanged where nothing smaller can be lowered; what is wrong is then told when it is compiled.
    """
    itemsizes = element_bytes(program.algorithm, program.outputs(), itemsize)  # type: ignore[arg-type]

    def has_room(func: str, tried: Program) -> bool:
        return can_be_lowered(tried) and first_too_large(tuple(k for k in lower(tried) if _stated(tried, k.func) == func), sizes, itemsizes, target) is None

    while (kernel := first_too_large(lower(program), sizes, itemsizes, target)) is not None:
        smaller = next((p for p in _smaller(program, kernel, sizes, has_room) if can_be_lowered(p)), None)
        if smaller is None:
            return program
        program = smaller
    return program


def fit_registers(program: Program, sizes: dict[str, int], itemsize: int | InputTypes, target: Target, time: Callable[[Schedule], float]) -> Program:
    """Return ``program`` with narrower tiles of kernels that are expected to spill: of those that fit, the fastest by ``time``."""
    itemsizes = element_bytes(program.algorithm, program.outputs(), itemsize)  # type: ignore[arg-type]
    for _ in range(_NARROWED):
        spilling = next((k for k in lower(program) if not k.tail and spills(k, sizes, itemsizes, target)), None)
        if spilling is None:
            break
        narrower = _narrower(program, _stated(program, spilling.func), has_matrix_product(spilling.body))
        tried = [p for p in narrower if can_be_lowered(p) and first_too_large(lower(p), sizes, itemsizes, target) is None]
        if not tried:
            break
        program = min(tried, key=lambda p: time(p.schedule))
    return program


def _narrower(program: Program, func: str, product: bool) -> Iterator[Program]:
    """Yield the program with tiles of half a block, or of three quarters of a product's, for each label of which the kernel's tile is the whole block."""
    tiles, blocks = program.schedule.sizes(func, "tensorize"), program.schedule.sizes(func, "block")
    for label in (x for x, tile in tiles.items() if tile == blocks.get(x) and tile >= 4 * _NARROWEST):
        for size in (tiles[label] * 3 // 4, tiles[label] // 2)[not product :]:
            yield _with(program, *(Sizes(func, name, (Sized(label, size),)) for name in ("tensorize", "block")))


def element_bytes(algorithm: Algorithm, outputs: tuple[str, ...], itemsize: int | InputTypes) -> dict[str, int]:
    """Return bytes per element of each buffer that is not always float32.

    ``itemsize``: bytes per element of the inputs, or their dtypes.
    """
    copies = {f"{t}_rows": t for t in algorithm.inputs}  # see stage_aligned_copies.py
    cast = {d.name: n for d in algorithm.definitions if (n := cast_bytes(algorithm, d.name))}
    if isinstance(itemsize, int):
        return cast | dict.fromkeys((*copies, *algorithm.inputs, *outputs, *narrow_buffers(algorithm)), itemsize)
    algorithm = itemsize.typed(algorithm)
    typed = {**typed_buffers(algorithm), **typed_inputs(algorithm)}
    buffers = {t: BYTES[itemsize.operand(wanted) if wanted else itemsize.result(algorithm)] for t, wanted in typed.items()}
    inputs = {t: BYTES.get(dtype, 8) for t, dtype in itemsize.of}
    made = {copy: inputs.get(t, 4) for copy, t in copies.items()} | inputs | buffers | dict.fromkeys(algorithm.float8_buffers, 1)  # inputs as kernels get them
    return ElementBytes(itemsize, made | dict.fromkeys(outputs, BYTES[itemsize.result(algorithm)]) | cast)


def first_too_large(kernels: tuple[Kernel, ...], sizes: dict[str, int], itemsizes: dict[str, int], target: Target) -> Kernel | None:
    """Return the first kernel that exceeds the GPU's resources."""
    for kernel in kernels:
        try:
            check_resources(kernel, sizes, itemsizes, target)
        except DTError:
            return kernel
    return None


def _stated(program: Program, func: str) -> str:
    """Return the Func that statements of ``program`` name for the kernel of ``func``: a sum over pieces has those of its result."""
    if func in program.algorithm:
        return func
    pieces = prelower(program).pieces
    return dict(pieces.sums).get(func, func) if pieces else func


def can_be_lowered(program: Program) -> bool:
    """Return whether a program is legal. A schedule of parts need not be one of the whole: there may be statements about an input that a Func lacks."""
    try:
        lower(program)
    except DTError:
        return False
    return True


def _smaller(program: Program, kernel: Kernel, sizes: dict[str, int], has_room: Callable[[str, Program], bool]) -> Iterator[Program]:
    """Yield variants of one kernel that need fewer resources, the cheapest to give up first.

    Results of a product are stored by pointers, which need no shared memory; then as many stages as there is room for, two at least,
    since one stage loads nothing ahead; then its widest label half as wide, then the next; then a stage less. Stages stay as they are
    where fewer do not help, as where accumulators lack registers: narrower tiles have room for them.
    """
    schedule, sizes = program.schedule, sizes | {label: math.prod(sizes[x] for x in parts) for label, parts in kernel.merged}
    kernel = replace(kernel, func=_stated(program, kernel.func))
    loads = tuple(t for t in kernel.descriptors if t not in kernel.writes)
    if has_matrix_product(kernel.body) and 0 < len(loads) < len(kernel.descriptors):
        by_pointers = _with(program, Names(kernel.func, "descriptor", loads))
        if has_room(kernel.func, by_pointers):
            yield by_pointers
    stages = range(kernel.num_stages - 1, 0, -1) if has_matrix_product(kernel.body) else ()
    fewer = [_with(program, Number(kernel.func, "num_stages", (n,))) for n in stages]
    yield from (p for p in fewer[:-1] if has_room(kernel.func, p))
    narrowest = _NARROWEST if has_matrix_product(kernel.body) else 1
    tiles, blocks = schedule.sizes(kernel.func, "tensorize"), schedule.sizes(kernel.func, "block")
    widths = {label: tile or next_power_of_two(sizes[label]) for label, tile in tiles.items()}
    for label in sorted((w for w in widths if widths[w] > narrowest), key=lambda w: -widths[w]):
        half = Sized(label, widths[label] // 2)
        changed = [Sizes(kernel.func, "tensorize", (half,))]
        changed += [Sizes(kernel.func, "block", (half,))] if blocks.get(label) == tiles[label] else []
        yield _with(program, *changed)
    yield from fewer


def _with(program: Program, *more: Primitive) -> Program:
    """Add statements to the program; each replaces an earlier statement of the same kind."""
    said = {p.name: p for p in more}
    kept = []
    for p in program.schedule.primitives:
        new = said.get(p.name)
        if new is None or p.func != new.func:
            kept.append(p)
        elif p.name == "descriptor":
            kept.append(new)
        elif isinstance(p, Sizes) and isinstance(new, Sizes):
            sizes = {a.label: a for a in (*p.sizes, *new.sizes)}
            kept.append(replace(p, args=tuple(sizes[a.label] for a in p.sizes)))
    kept += [p for p in more if p.name == "num_stages"]
    return replace(program, schedule=Schedule(tuple(kept)))
