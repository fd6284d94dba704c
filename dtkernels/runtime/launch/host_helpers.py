"""Provide precompiled copies of the emitted host helpers that take longest to compile.

A host text that contains one of these texts takes the function from here, which Python compiled at installation. The texts must equal
those of ``codegen.emit.host_helpers`` except for docstrings; a test compares them. The functions run in the namespace of the host
text, which has torch and tl.
"""
# ruff: noqa: E501, F821
# mypy: ignore-errors


def index_type(*tensors):
    last = max(sum((n - 1) * s for n, s in zip(t.shape, t.stride())) for t in tensors)
    return tl.int64 if max(last, *(t.numel() for t in tensors)) >= 2**31 - 2**20 else tl.int32


def described(*boxes):
    for tensor, box in boxes:
        item, (*strides, last) = tensor.element_size(), tensor.stride()
        if tensor.dtype == torch.bool or last != 1 or tensor.data_ptr() % 16 or any(s <= 0 or s * item % 16 for s in strides):
            return False
        if max(box) > 256 or box[-1] * item < 16 or not 0 < tensor.numel() or max(tensor.shape) >= 2**31:
            return False
        if tensor.is_cuda and (torch.version.hip or torch.cuda.get_device_capability(tensor.device) < (9, 0)):
            return False
    return True


def extents(func, tensors):
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


READY = (index_type, described, extents)
