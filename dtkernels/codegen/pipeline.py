"""Lowering from top to bottom: the passes that turn a program and its schedule into the kernels that are printed.

    Program --PROGRAM_PASSES--> Program --lower_kernel--> Kernel, one for each Func that is not fused
            --split_k--> Kernels --NEST_PASSES--> Kernels --tail_wave--> Kernels
            --POINTER_FORM, DESCRIPTOR_FORM--> what a printer spells out

Every pass takes its noun and returns a new one; printers rewrite nothing. ``python -m dtkernels show OP --stage passes``
prints a kernel after each pass that changed it. ``--without NAME`` leaves a pass out, as ``without`` does here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache

from ..lang import expr as ex
from ..lang.errors import DTError
from ..lang.schedule import Accumulation, Program, host
from ..lang.schedule_checks import check_merged
from .analysis.dependent_launch import links
from .ir.nest import Kernel
from .lower.launch_parameters import with_launch_parameters
from .lower.lowering import check_unused_in_kernel, lower_kernel
from .lower.merged_labels import declare_merged_labels
from .lower.schedule_options import KernelOptions
from .prelower.accumulated_sums import accumulate_sums, zeroing_program
from .prelower.chunked_funcs import chunk_funcs
from .prelower.kernel_partition import funcs_in_kernel, kernel_roots
from .prelower.named_operands import name_operands
from .prelower.partial_sums import add_partial_sums, free_name
from .prelower.stage_aligned_copies import stage_aligned_copies
from .target import Target
from .transforms.arithmetic.accumulator_fusion import fuse_accumulators
from .transforms.arithmetic.cse import eliminate_common_subexpressions
from .transforms.arithmetic.exp2_emulation import emulate_exp2
from .transforms.arithmetic.exp_to_exp2 import rewrite_exp_to_exp2
from .transforms.arithmetic.guard_elimination import eliminate_guards
from .transforms.arithmetic.scale_sinking import sink_scales
from .transforms.dce import cleared, without_stores
from .transforms.loops.distinct_names import keep_names_apart
from .transforms.loops.interior_blocks import specialize_interior_blocks
from .transforms.loops.joined_loops import distribute_loops, join_loops
from .transforms.loops.loop_partition import partition_loops
from .transforms.loops.split_k import UniformInBlock, split_k
from .transforms.loops.tail_wave import add_tail_wave
from .transforms.loops.unrolled_ranges import bound_unrolled_ranges
from .transforms.memory.duplicate_wgmma_loads import duplicate_wgmma_loads
from .transforms.memory.eviction_hints import add_eviction_hints
from .transforms.memory.load_masks import sink_masks_into_loads
from .transforms.memory.offset_hoisting import hoist_offsets
from .transforms.memory.tensor_descriptors import use_descriptors, use_pointers
from .transforms.tiles.dot_scheduling import schedule_dots
from .transforms.tiles.held_windows import hold_windows
from .transforms.tiles.packed_codes import read_packed_once
from .transforms.tiles.repeated_elements import repeat_elements
from .transforms.tiles.step_scales import scale_steps
from .transforms.tiles.tile_dim_order import order_tile_dims
from .transforms.tiles.tile_orientation import orient_tiles
from .transforms.tiles.tile_parts import cut_tiles_into_parts
from .transforms.warp_specialize.backend_select import descriptor_form, warp_specialized
from .transforms.warp_specialize.plan import WarpSpecializedKernel

#: Program -> Program
PROGRAM_PASSES: tuple[tuple[str, Callable[[Program], Program]], ...] = (
    ("named_operands", name_operands),
    ("partial_sums", add_partial_sums),
    ("accumulated_sums", accumulate_sums),
    ("stage_aligned_copies", stage_aligned_copies),
    ("merged_labels", declare_merged_labels),
    ("chunked_funcs", chunk_funcs),
)

#: Kernel -> Kernel, each kernel by itself; ``split_k`` comes before these, ``tail_wave`` after
NEST_PASSES: tuple[tuple[str, Callable[[Kernel, KernelOptions], Kernel]], ...] = (
    ("guard_elimination", eliminate_guards),
    ("cse", eliminate_common_subexpressions),
    ("accumulator_fusion", fuse_accumulators),
    ("held_windows", hold_windows),
    ("loop_partition", partition_loops),
    ("exp_to_exp2", rewrite_exp_to_exp2),
    ("scale_sinking", sink_scales),
    ("load_masks", sink_masks_into_loads),
    ("tile_orientation", orient_tiles),
    ("dot_scheduling", schedule_dots),
    ("exp2_emulation", emulate_exp2),
    ("duplicate_wgmma_loads", duplicate_wgmma_loads),
    ("tile_dim_order", order_tile_dims),
    ("eviction_hints", add_eviction_hints),
    ("packed_codes", read_packed_once),
    ("repeated_elements", repeat_elements),
    ("step_scales", scale_steps),
    ("tile_parts", cut_tiles_into_parts),
    ("distinct_names", keep_names_apart),
)

#: Kernel -> Kernel, the form that reaches memory by pointers alone, and the last passes of both forms that Triton compiles
POINTER_FORM: tuple[tuple[str, Callable[[Kernel], Kernel]], ...] = (("pointers", use_pointers), ("joined_loops", join_loops))
TRITON_FORM: tuple[tuple[str, Callable[[Kernel], Kernel]], ...] = (
    ("distributed_loops", distribute_loops),
    ("interior_blocks", specialize_interior_blocks),
    ("offset_hoisting", hoist_offsets),
    ("unrolled_ranges", bound_unrolled_ranges),
)

#: the passes that may be left out: the result stays right, and is slower. Without the others it would be wrong.
OPTIONAL = (
    *("split_k", *(name for name, run in NEST_PASSES if run not in (cut_tiles_into_parts, keep_names_apart)), "tail_wave", "descriptors", "warp_specialize"),
    *(*(name for name, run in TRITON_FORM if run is not bound_unrolled_ranges), "dependent_launch"),
)

_left_out: ContextVar[frozenset[str]] = ContextVar("passes left out", default=frozenset())


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Leave passes out while the context lasts, for debugging. Raises DTError for a name that is none of ``OPTIONAL``."""
    for name in names:
        if name not in OPTIONAL:
            raise DTError("no pass of that name can be left out", found=repr(name), allowed=", ".join(OPTIONAL))
    token = _left_out.set(_left_out.get() | set(names))
    try:
        yield
    finally:
        _left_out.reset(token)


# -- Program -> Kernels -----------------------------------------------------------------------------------------------


def lower(program: Program) -> tuple[Kernel, ...]:
    """Return the kernels of ``program`` in the order they run: one for each Func that is compiled or not fused."""
    return _lower(program, program.algorithm.stands_for, _left_out.get())


@lru_cache(maxsize=16)  # the default schedule, the resource check and the printer each ask for the kernels of one program
def _lower(program: Program, stands_for: tuple, left_out: frozenset[str]) -> tuple[Kernel, ...]:
    """Lower a program. The other arguments are part of the cache's key: equality of algorithms leaves out ``stands_for``."""
    program = prelower(program)
    return tuple(kernel for root in kernel_roots(program) for kernel in lower_root(program, root))


def prelower(program: Program) -> Program:
    """Return the program with the Funcs that its schedule adds: partial sums, and copies with aligned rows."""
    for _, run in PROGRAM_PASSES:
        program = run(program)
    return program


def lower_one(program: Program, root: str) -> tuple[Kernel, ...]:
    """Return the kernels of one Func that is not fused, as ``lower`` makes them.

    Kernels that make its copies come first, those that add up its partial sums last.
    """
    made = prelower(program)
    fused = made.schedule.fused()
    read = {a.tensor for f in funcs_in_kernel(made, root) for a in ex.accesses(made.algorithm[f].expr)}
    copies = tuple(f for f in made.algorithm.funcs if f in read and f not in program.algorithm and f not in fused)
    parts = {f for f in fused if host(f, fused) == root and f not in program.algorithm}
    sums = (d.name for d in made.algorithm.definitions if parts & {a.tensor for a in ex.accesses(d.expr)})
    return tuple(kernel for func in (*copies, root, *sums) for kernel in lower_root(made, func))


def check_unused_statements(program: Program) -> None:
    """Raise DTError for a statement that changes nothing in the kernels.

    For schedules that a user wrote. What the default schedule and the tuner make may be without effect at some sizes.
    """
    check_merged(program.schedule, program.algorithm)
    made = prelower(program)
    for root in kernel_roots(made):
        check_unused_in_kernel(made, KernelOptions(made, root))


def lower_root(program: Program, root: str, trace: Trace | None = None) -> tuple[Kernel, ...]:
    """Return the kernels of one Func of a prelowered program; ``trace`` is called with each pass and its result.

    Kernels that clear what it adds to come first.
    """
    options, left_out = KernelOptions(program, root), _left_out.get()
    tell = trace or (lambda name, kernels: None)
    raw = lower_kernel(program, options)
    if _is_only_added(program, root):
        raw = replace(raw, body=without_stores(raw.body, root), writes=tuple(w for w in raw.writes if w != root))
    tell("lowering", _finished((raw,), options) if trace else (raw,))
    kernels = (raw,) if "split_k" in left_out else _split(program, raw, options)
    tell("split_k", _finished(kernels, options) if trace else kernels)
    for name, run in NEST_PASSES:
        if name not in left_out:
            kernels = tuple(run(k, options) for k in kernels)
        tell(name, _finished(kernels, options) if trace else kernels)
    kernels = _finished(kernels, options)
    if "descriptors" in left_out:
        kernels = tuple(replace(k, descriptors=()) for k in kernels)
    if "eviction_hints" in left_out:
        kernels = tuple(replace(k, evict=()) for k in kernels)
    kernels = _with_possible_descriptors(kernels, options)
    if not left_out & {"tail_wave", "descriptors"}:  # a tail is for kernels with descriptors
        kernels = add_tail_wave(kernels, program, root, lambda smaller: lower_root(smaller, root))
    tell("tail_wave", kernels)
    return (*(k for a in program.accumulated if a.host == root and not a.complete for k in _zeroing_kernels(program, a, raw)), *kernels)


def _is_only_added(program: Program, root: str) -> bool:
    """Return whether elements of a Func are only added to sums by its own kernel: nothing reads them from memory."""
    if root in program.outputs() or not any(a.host == root for a in program.accumulated):
        return False
    others = {f for other in kernel_roots(program) if other != root for f in funcs_in_kernel(program, other)}  # some of them of this kernel too
    return not any(a.tensor == root for f in others for a in ex.accesses(program.algorithm[f].expr))


def _with_possible_descriptors(kernels: tuple[Kernel, ...], options: KernelOptions) -> tuple[Kernel, ...]:
    """Refuse descriptors that cannot be printed; the kernel that merges parts goes without where those that make them can have theirs."""
    found, refused = [], None
    for k in kernels:
        try:
            if k.descriptors:
                use_descriptors(k, options.where("descriptor"))
        except DTError as error:
            k, refused = replace(k, descriptors=()), refused or error
        found.append(k)
    if refused is not None and not any(k.descriptors for k in found[:-1]):
        raise refused
    return tuple(found)


def _zeroing_kernels(program: Program, accumulation: Accumulation, adding: Kernel) -> tuple[Kernel, ...]:
    """Return the kernel that sets a sum in memory to 0 before the programs of another add to it: all of it, or the elements that those of ``adding`` add to."""
    name = free_name(f"{accumulation.func}_zero", program.algorithm)
    if accumulation.named:
        options = KernelOptions(program, accumulation.host)
        kernel = replace(adding, name=name, body=cleared(adding.body, accumulation.func), writes=(accumulation.func,))
        for run in (order_tile_dims, keep_names_apart):
            kernel = run(kernel, options)
        return (replace(with_launch_parameters(kernel, options), evict=(), descriptors=()),)
    return tuple(replace(k, name=name, func=accumulation.host) for k in lower_root(zeroing_program(program, accumulation), accumulation.func))


def _split(program: Program, kernel: Kernel, options: KernelOptions) -> tuple[Kernel, ...]:
    """Split a kernel's reductions; lower it again where an element loaded once for a block keeps its parts from being told apart."""
    try:
        return split_k(kernel, options)
    except UniformInBlock:
        return split_k(lower_kernel(program, options, once_a_block=False), options)


def _finished(kernels: tuple[Kernel, ...], options: KernelOptions) -> tuple[Kernel, ...]:
    return tuple(with_launch_parameters(k, options) for k in kernels)


# -- Kernels -> what is printed ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forms:
    """The printed forms of a kernel. The wrapper launches the form with descriptors where the tensors and the GPU allow it."""

    pointers: Kernel | None  #: None of the kernel of a tail wave, which exists with descriptors alone
    descriptors: Kernel | WarpSpecializedKernel | None = None


def forms(kernels: tuple[Kernel, ...], target: Target | None, once: bool = True, float8: frozenset[str] | None = None) -> tuple[Forms, ...]:
    """Return the forms of each kernel of one call and of their tail waves, in the order they are launched.

    ``once``: each is launched once. In a loop over pieces the next kernel overwrites what another reads, and waits for its end.
    ``float8``: the buffers that are in float8, of a program that has such values; warp-specialized kernels multiply them, and do nothing else with them.
    """
    left_out = _left_out.get()
    overlapping = once and target is not None and target.has_dependent_launch and "dependent_launch" not in left_out
    linked = links([one for k in kernels for one in (k, *k.tail)]) if overlapping else {}
    found = []
    for kernel in kernels:
        for one in (kernel, *kernel.tail):
            one = replace(one, link=linked.get(one.name))
            pointers = triton_form(pointer_form(one)) if one.name == kernel.name else None
            found.append(Forms(pointers, _through_descriptors(one, target, float8) if kernel.descriptors else None))
    return tuple(found)


def pointer_form(kernel: Kernel) -> Kernel:
    """Return the kernel that reaches memory by pointers alone."""
    for _, run in POINTER_FORM:
        kernel = run(kernel)
    return kernel


def triton_form(kernel: Kernel) -> Kernel:
    """Return the kernel after the passes that both forms of Triton's text have last."""
    for name, run in TRITON_FORM:
        kernel = kernel if name in _left_out.get() else run(kernel)
    return kernel


def _through_descriptors(kernel: Kernel, target: Target | None, float8: frozenset[str] | None) -> Kernel | WarpSpecializedKernel:
    plan = "left out" if "warp_specialize" in _left_out.get() else warp_specialized(kernel, target)
    if isinstance(plan, str) or float8 is not None and (not plan.float8 or float8 & {*kernel.writes}):
        return triton_form(descriptor_form(kernel))
    return plan


# -- for people -------------------------------------------------------------------------------------------------------

Trace = Callable[[str, tuple[Kernel, ...]], None]


def stages(program: Program, target: Target | None = None) -> Iterator[tuple[str, str, Program | tuple[Kernel | WarpSpecializedKernel, ...]]]:
    """Yield (Func or "", name of the pass, its result), pass by pass, up to the printed kernels."""
    yield "", "program", program
    for name, run in PROGRAM_PASSES:
        program = run(program)
        yield "", name, program
    for root in kernel_roots(program):
        told: list[tuple[str, tuple[Kernel, ...]]] = []
        kernels = lower_root(program, root, lambda name, left, told=told: told.append((name, left)))  # type: ignore[misc]
        for name, left in told:
            yield root, name, left
        for printed in forms(kernels, target, program.pieces is None):
            if printed.pointers is not None:
                yield root, "printed (pointers)", (printed.pointers,)
            if printed.descriptors is not None:
                yield root, "printed (descriptors)", (printed.descriptors,)
