"""Reserve names that the emitted file uses itself; programs may not declare them."""

from __future__ import annotations

import keyword
from collections.abc import Collection, Iterator

from .algorithm import Algorithm
from .errors import DTError, Position
from .expr import FLOAT8
from .schedule import APPROXIMATIONS, SHARES

#: names that every emitted file imports, defines or calls
TAKEN = frozenset(
    {
        *keyword.kwlist, "__debug__", "torch", "triton", "tl", "gl", "gluon", "hopper", "tma", "mbarrier", "new_names", "tma_load", "tma_store",
        "first_id", "round_id", "first_round", "last_round", "last_place", "place_of_program", "blocks_in_group", "blocks_left",
        "tma_add", "tma_add_of_builder", "_core", "async_copy", "copy_to_shared", "in_words",
        "range", "min", "max", "isinstance", "float", "int", "pid", "tile_id", "sizes", "dtype", "INDEX", "PRECISION", "EXACT", "ON_GPU", "EXP_DEGREE", "STAGES",
        "whole", "first_tile", "second_tile", "launch", "index_type", "whole_numbers", "integer_operands", "dot_precision", "exact_products",
        "programs", "whole_waves", "waves_before_parts", "tiles_before", "tail_block",
        "nvidia_only", "cluster", "unrolled", "tensor_map", "swizzled_map", "TensorDescriptor", "SwizzledDescriptor",
        "described", "operand_dtype", "piece", "language_type", "in_any_order", "has_float8", "float8_units", "float8_bits", "float8_pointer", "float8_type", "FLOAT8", "scalar_dtype",
        *(f"{word}_{name}" for name in FLOAT8 for word in ("from", "code_of", "round_to")),
        "DEPENDENT", "dependent", "overlapping", "warpgroups", "float8_warpgroups", "ring_stages", "joined_dimensions", "extents", "exp_degree", "linear_recurrence",
        *(f"exp2_{part}_of_{whole}{form}" for part, whole in SHARES for form in ("", "_if_wide")),
        *(name for fn in APPROXIMATIONS for name in (f"hardware_{fn}", f"{fn}_of_one")), "log2_instruction", "exp2_instruction", "reciprocal_instruction", "complementary_error",
        "floor_divide", "floor_modulo", "floor_to_int", "ceil_to_int", "nan_max", "nan_min",
        "float_power", "log_of_1_plus", "exp_minus_1", "arctangent", "arcsine", "arccosine", "arctangent_of", "round_half_even", "round_toward_zero", "sign_of", "is_nan", "is_infinite", "is_finite",
        "every_second", "bits_of", "number_of", "PAIRS", "converts_pairs",
        "product_of_two", "order_key", "place_of_key", "in_32_bits", "to_range", "to_int32", "to_int64", "random_words", "random_uniform", "random_normal",
    }
)  # fmt: skip
#: Python builtins that functions of the file call: no wrapper may have such a name
CALLED = frozenset({"any", "hasattr", "map", "str", "sum", "tuple", "zip", "ValueError", "TypeError", "RuntimeError"})

#: keyword arguments of Triton's launcher: no kernel parameter may have such a name, and scalars are kernel parameters
LAUNCHED = frozenset(
    {
        "num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "launch_cooperative_grid", "debug", "sanitize_overflow", "instrumentation_mode",
        "fpsan_homomorphic_casts", "grid", "warmup", "stream", "backend", "options", "params", "specialization", "specialize_impl", "JITCallable",
    }
)  # fmt: skip
_OF_TENSORS = ("ptr", "desc", "at")  #: suffixes of names for an input or a Func ``t``: ``t_ptr``
_OF_FUNCS = ("out", "kernel", "part_kernel", "descriptor_kernel", "tail_kernel", "tail_descriptor_kernel", "acc_part")


def clashes(name: str, taken: Collection[str]) -> bool:
    """Tell whether a derived Func of this name, or a name that the emitted file derives from it, would be taken."""
    own = {f"{name}_{word}" for word in (*_OF_TENSORS, *_OF_FUNCS)}
    return name in taken or any(t in own or t.startswith((f"{name}_stride_", f"{name}_size_")) for t in taken)


def check_names(algorithm: Algorithm, declared_at: dict[str, Position]) -> None:
    """Raise DTError for a declared name that conflicts with a name in the emitted file."""
    names = (*algorithm.funcs, *algorithm.inputs, *algorithm.scalars, *algorithm.labels, *(n for n, _ in algorithm.params))
    made = {name: of for of, derived in _emitted_names(algorithm) for name in derived}
    for name in names:
        beside = made.get(name) or _tensor_of_size_name(name, algorithm)
        taken = name in TAKEN or name in CALLED and name in algorithm.funcs or name in LAUNCHED and name in algorithm.scalars
        if taken or beside:
            found = repr(name) if taken else f"{name!r} beside {beside!r}"
            raise DTError("a name that the emitted file uses itself", found=found, allowed="another name", at=declared_at.get(name))


def _emitted_names(algorithm: Algorithm) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each declared name with the names that the emitted file derives from it."""
    for t in (*algorithm.inputs, *algorithm.funcs):
        yield t, tuple(f"{t}_{word}" for word in _OF_TENSORS)
    for f in algorithm.funcs:
        yield f, tuple(f"{f}_{word}" for word in _OF_FUNCS)
    for s in algorithm.scalars:
        yield s, (f"{s}_on_device", f"{s}_positive")
    for x in algorithm.labels:
        yield x, tuple(f"{word}_{x}" for word in ("size", "BLOCK", "TILE", "EVEN", "GROUP", "block", "blocks", "first", "in_group"))
        yield x, tuple(f"{x}_{word}" for word in ("ok", "start", "first", "tile", "part", "piece", "chunk", "from", "to", "in_row"))


def _tensor_of_size_name(name: str, algorithm: Algorithm) -> str:
    """Return the tensor that ``name`` would be a stride or a size of; "" if there is none."""
    return next((t for t in (*algorithm.inputs, *algorithm.funcs) if name.startswith((f"{t}_stride_", f"{t}_size_"))), "")
