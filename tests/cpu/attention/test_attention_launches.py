# ruff: noqa: E501 (arguments read best on one line)
"""A step of decoding with a cache launches attention alone, with new keys what writes them too: nothing prepares ranges of keys."""

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtkernels import ops


class Launches(TorchDispatchMode):
    """The operations of a call that are more than another view of a tensor: each is one launch on a GPU or several."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


B, GROUPS, ROOM, WIDTH, SLOTS = 2, 2, 32, 16, 8
TABLE = torch.arange(B * ROOM // SLOTS, dtype=torch.int32).view(B, -1)


def cache(pages=False, dtype=torch.float32):
    shape = (B * ROOM // SLOTS, SLOTS, GROUPS, WIDTH) if pages else (B, GROUPS, ROOM, WIDTH)
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


def new(tokens=1):
    return {"new_k": torch.randn(B, GROUPS, tokens, WIDTH), "new_v": torch.randn(B, GROUPS, tokens, WIDTH)}


def scales(*shape):
    return {"k_scale": torch.rand(*shape), "v_scale": torch.rand(*shape)}


STEP = ["dtkernels.attention_lengths_inference.default"]
PAGED = ["dtkernels.attention_paged_inference.default"]
#: queries, the cache, further arguments, what is launched
CALLS = {
    "a cache": (1, cache(), {}, STEP),
    "a cache, causal": (4, cache(), {"causal": True}, STEP),
    "a cache with a window": (4, cache(), {"causal": True, "window": (5, None), "return_lse": True}, ["dtkernels.attention_lengths_lse_inference.default"]),
    "pages": (1, cache(True), {"block_table": TABLE, "causal": True}, PAGED),
    "pages with a window": (3, cache(True), {"block_table": TABLE, "causal": True, "window": (9, None)}, PAGED),
    "new keys": (1, cache(), {"causal": True, **new()}, ["dtkernels.append_cache_inference.default", *STEP]),
    "new keys in pages": (2, cache(True), {"block_table": TABLE, "causal": True, **new(2)}, ["dtkernels.append_pages_inference.default", *PAGED]),
    "codes with a scale a head": (1, cache(dtype=torch.int8), scales(B, GROUPS), STEP),
    "codes with a scale a token": (1, cache(dtype=torch.int8), scales(B, GROUPS, ROOM), STEP),
    "codes with one scale": (1, cache(dtype=torch.int8), {"k_scale": 0.1, "v_scale": torch.tensor(0.2)}, STEP),
    "new codes in pages": (1, cache(True, torch.int8), {"block_table": TABLE, **scales(B * ROOM // SLOTS, SLOTS, GROUPS), **new()}, ["dtkernels.append_pages_scaled_inference.default", *PAGED]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_launched_beside_the_kernels(name):
    queries, (k, v), given, wanted = CALLS[name]
    q, lengths = torch.randn(B, 4, queries, WIDTH), torch.tensor([9, 21])
    with Launches() as made:
        ops.attention(q, k, v, lengths=lengths, **given)
    assert made.names == wanted


def test_a_scale_on_the_device_takes_one_more():
    q, (k, v) = torch.randn(B, 4, 1, WIDTH), cache(dtype=torch.int8)
    with Launches() as made:
        ops.attention(q, k, v, lengths=torch.tensor([9, 21]), k_scale=torch.tensor(0.1))
    assert made.names == ["aten.mul.Tensor", *STEP]
