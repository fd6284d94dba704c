"""Define the functions that an emitted wrapper may need, and their texts, which emitted files contain.

The functions run in the namespace of a wrapper, which has torch, triton and tl. In ``whole``, ``first_tile`` and ``second_tile`` the printer replaces ``{minimum}``.
"""
# Emitted text is as wide as it is, and its names are those of the wrapper.
# ruff: noqa: E501, F821
# mypy: ignore-errors


def whole(size):
    """The tile that holds a whole extent."""
    return max({minimum}, triton.next_power_of_2(size))


def first_tile(size):
    """The first of the two tiles that hold a whole extent."""
    return max({minimum}, triton.next_power_of_2(size) // 2)


def second_tile(size):
    """The second of the two tiles that hold a whole extent."""
    return max({minimum}, triton.next_power_of_2(max(1, size - first_tile(size))))


def launch(kernel, grid, stages, *args, **options):
    """With as many stages, ``stages`` at most, as shared memory holds; tiles of whole extents grow with the sizes."""
    while True:
        try:
            return kernel[grid](*args, num_stages=stages, **options)
        except triton.runtime.errors.OutOfResources:
            if stages == 1:
                raise
            stages -= 1


def index_type(*tensors):
    """64-bit indices where an offset can pass 2**31."""
    last = max(sum((n - 1) * s for n, s in zip(t.shape, t.stride())) for t in tensors)
    return tl.int64 if max(last, *(t.numel() for t in tensors)) >= 2**31 - 2**20 else tl.int32


def scalar_dtype(scalar):
    """The dtype of a scalar's gradient."""
    return scalar.dtype if isinstance(scalar, torch.Tensor) and scalar.dtype in (torch.float16, torch.bfloat16) else torch.float32


def whole_numbers(func, **tensors):
    """Refuse tensors that do not hold integers."""
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.uint8, torch.int8, torch.int32, torch.int64):
            raise TypeError(f"{func}: {name} is {tensor.dtype}; allowed: int32, int64, int8 or uint8, as it stands in an index")


def integer_operands(func, name, tensor, reason):
    """Refuse a tensor that arithmetic of integers is of and that holds none."""
    if tensor.dtype not in (torch.uint8, torch.int8, torch.int32, torch.int64):
        raise TypeError(f"{func}: {name} is {tensor.dtype}; allowed: int32, int64, int8 or uint8, {reason}")


def dot_precision():
    """float32 products follow torch's TF32 setting."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def exact_products(tensor):
    """How float32 products that may be approximated are made in float32: as three in TF32, where the GPU has that."""
    able = tensor.is_meta or tensor.is_cuda and not torch.version.hip and torch.cuda.get_device_capability(tensor.device) >= (8, 0)
    return "tf32x3" if able else "ieee"


def operand_dtype(*choices):
    """The dtype of a product's operands: promoted from the first choice that has a floating-point tensor or dtype; else float32."""
    for choice in choices:
        kinds = [c.dtype if isinstance(c, torch.Tensor) else c for c in choice]
        floats = [k for k in kinds if k.is_floating_point]
        for k in floats[1:]:
            floats[0] = torch.promote_types(floats[0], k)
        if floats:
            return floats[0]
    return torch.float32


def language_type(dtype):
    """Triton's name of a dtype."""
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


def converts_pairs(tensor):
    """Whether the GPU computes with pairs of bfloat16: compute capability 8.0 or higher."""
    return tensor.is_meta or tensor.is_cuda and not torch.version.hip and torch.cuda.get_device_capability(tensor.device) >= (8, 0)


def float8_units(tensor):
    """Whether the GPU converts and multiplies float8: compute capability 8.9 or higher."""
    return tensor.is_meta or tensor.is_cuda and not torch.version.hip and torch.cuda.get_device_capability(tensor.device) >= (8, 9)


def float8_bits(func, name, tensor, dtype):
    """The bits of a tensor that must be in this dtype."""
    if tensor.dtype != dtype:
        raise TypeError(f"{func}: {name} is {tensor.dtype}; this file was made for {dtype}")
    return tensor.view(torch.uint8)


def float8_pointer(tensor, native):
    """What a kernel is passed for a tensor in float8: its bits, where the GPU has no such numbers."""
    return tensor if native else tensor.view(torch.uint8)


def float8_type(dtype, native):
    """Triton's name of the dtype that products in float8 multiply in."""
    return {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}[dtype] if native else tl.float16


def programs(tensor, each):
    """How many programs the GPU runs at once, ``each`` a multiprocessor."""
    return each * torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 3


def exp_degree(tensor, dtype):
    """The degree of polynomials for exponentials, by what results of ``dtype`` hide; 0 for none, where the GPU lacks what they need."""
    able = tensor.is_meta or tensor.is_cuda and not torch.version.hip and torch.cuda.get_device_capability(tensor.device) >= (8, 0)
    return (5 if dtype == torch.float32 else 3) if able else 0


def whole_waves(blocks, programs, tensor):
    """How many of ``blocks`` are left to programs that take one after the other: whole waves of them, and a last one that is more than half full.

    For a tensor without storage one block less than there are: so is recorded what a launch may need.
    """
    if tensor.is_meta:
        return blocks - 1
    rest = blocks % programs
    return blocks - rest if blocks > programs and 2 * rest <= programs else blocks


def waves_before_parts(blocks, programs, tensor, parts):
    """The same where the last wave is computed in ``parts`` of each block, if these take fewer rounds than whole blocks."""
    if tensor.is_meta:
        return blocks - 1
    rest = blocks % programs
    return blocks - rest if blocks > programs and -(-rest * parts // programs) < parts else blocks


def nvidia_only(**options):
    """Launch options that only NVIDIA GPUs have."""
    return {} if torch.version.hip else options


def cluster(size):
    """The launch option for clusters of blocks."""
    version = tuple(int(n) for n in triton.__version__.split(".")[:2])
    if version < (3, 8):
        raise RuntimeError(f"cluster({size}) needs Triton 3.8 or newer; this is {triton.__version__}")
    if torch.version.hip or (torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0)):
        raise RuntimeError(f"cluster({size}) needs an NVIDIA GPU of compute capability 9.0 or higher")
    return {"num_ctas": size}


def unrolled(times):
    """Refuse what Triton before 3.9 does not compile for compute capability 10: a product's loop unrolled so often."""
    old = tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 9)
    if old and torch.cuda.is_available() and not torch.version.hip and torch.cuda.get_device_capability()[0] == 10:
        raise RuntimeError(f"unroll by {times} of a loop with a product needs Triton 3.9 or newer; this is {triton.__version__}")
    return {}


def described(*boxes):
    """Whether tensor descriptors reach these tensors: unit last stride, the start and other strides in multiples of 16 bytes."""
    for tensor, box in boxes:
        item, (*strides, last) = tensor.element_size(), tensor.stride()
        if tensor.dtype == torch.bool or last != 1 or tensor.data_ptr() % 16 or any(s <= 0 or s * item % 16 for s in strides):
            return False
        if max(box) > 256 or box[-1] * item < 16 or not 0 < tensor.numel() or max(tensor.shape) >= 2**31:
            return False
        if tensor.is_cuda and (torch.version.hip or torch.cuda.get_device_capability(tensor.device) < (9, 0)):
            return False
    return True


def joined_dimensions(tensor, first, last):
    """The tensor with dimensions ``first`` to ``last``, between whose elements there are no gaps, as one."""
    shape, strides = tensor.shape, tensor.stride()
    return tensor.as_strided((*shape[:first], shape[first : last + 1].numel(), *shape[last + 1 :]), (*strides[:first], *strides[last:]))


def overlapping(tensor, first):
    """The launch option for kernels that wait for the one before them, which writes ``first``, by themselves."""
    able = tensor.is_meta or tensor.is_cuda and not torch.version.hip and torch.cuda.get_device_capability(tensor.device) >= (9, 0)
    return {"launch_pdl": True} if able and first.numel() else {}


def warpgroups(*tensors):
    """Whether tensors are what warpgroups of compute capability 9.0 multiply: all bfloat16 or all float16."""
    kinds, (first, *_) = {t.dtype for t in tensors}, tensors
    fits = kinds in ({torch.bfloat16}, {torch.float16})
    return fits and (first.is_meta or first.is_cuda and torch.cuda.get_device_capability(first.device) == (9, 0))


def in_words(*tensors):
    """Whether the elements of tensors have 4 bytes, the least that a copy to shared memory brings."""
    return all(t.element_size() == 4 for t in tensors)


def float8_warpgroups(*tensors):
    """Whether tensors are float8 that warpgroups of compute capability 9.0 multiply: all of one dtype."""
    kinds, (first, *_) = {t.dtype for t in tensors}, tensors
    fits = kinds in ({torch.float8_e4m3fn}, {torch.float8_e5m2})
    return fits and (first.is_meta or first.is_cuda and torch.cuda.get_device_capability(first.device) == (9, 0))


def ring_stages(most, fixed, each):
    """How many times ``each`` bytes beside ``fixed`` ones shared memory holds, 2 to ``most``."""
    return max(2, min(most, (232448 - 1024 - fixed) // each))


def in_any_order(func, name):
    """Refuse sums that are added up in whatever order programs run, where torch is told to be reproducible."""
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(f"{func}: {name} is added up in no fixed order, which torch.use_deterministic_algorithms(True) forbids; allowed: accumulate_at(..., ordered)")


def piece(tensor, dims, first, size):
    """The view of ``size`` elements from ``first`` on, along each of ``dims``."""
    for dim in dims:
        tensor = tensor.narrow(dim, first, size)
    return tensor


def tensor_map(tensor, shape, strides, box):
    """The descriptor by which a kernel reads or writes boxes of a tensor. A kernel that made it would take a microsecond longer."""
    return TensorDescriptor(tensor, shape, strides, box)


def swizzled_map(tensor, shape, strides, box):
    """The same for a kernel in Gluon, whose boxes lie in shared memory as the matrix units read them."""
    kinds = {1: gl.int8, 2: gl.float16, 4: gl.float32}
    return SwizzledDescriptor(tensor, shape, strides, box, gl.NVMMASharedLayout.get_default_for(box, kinds[tensor.element_size()]))


def extents(func, tensors):
    """The extent of each label, after checking that the tensors agree on it."""
    sizes, device = {}, tensors[0][1].device
    for name, tensor, labels in tensors:
        if tensor.dim() != len(labels):
            raise ValueError(f"{func}: {name} has {len(labels)} dimensions ({', '.join(map(str, labels))}); got shape {tuple(tensor.shape)}")
        if tensor.device != device:
            raise ValueError(f"{func}: {name} is on {tensor.device}; {tensors[0][0]} is on {device}")
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64):
            raise TypeError(f"{func}: {name} is {tensor.dtype}; allowed: float32, float16, bfloat16, and bool or integers for masks")
        for label, size in zip(labels, tensor.shape):
            if label is not None and sizes.setdefault(label, size) != size:
                raise ValueError(f"{func}: {name} has {size} along {label}, another input has {sizes[label]}")
    return sizes


#: name -> text, as it stands here
SUPPORT = {text[4 : text.index("(")]: f"\n{text}\n" for text in __loader__.get_source(__name__).split("\n\n\n") if text.startswith("def ")}
#: those that take longest to compile: a wrapper takes them as Python compiled them at installation
READY = (index_type, described, extents)
