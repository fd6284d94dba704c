"""Kernels printed by the Gluon backend, on a GPU of compute capability 9.0, against float64: odd sizes, masks, shared heads."""

import pytest
import torch
from attention_sweep import apart, by_default, check_gradients, one_sweep
from gluon_programs import CAUSAL, PRODUCTS, SCORE, WINDOW, attention, product

from dtkernels.algebra.pipeline import prepare
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.runtime.build.source_cache import load_module

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="Gluon is printed for compute capability 9.0 alone"
)
MASKS = {
    "full": (SCORE, lambda row, key: key >= 0),
    "causal": (CAUSAL, lambda row, key: key <= row),
    "window": (WINDOW, lambda row, key: (key <= row) & (row - key < 300)),
}


class Never:
    """Stands for the kernel that goes by pointers."""

    def __getitem__(self, grid):
        raise AssertionError("the call went by pointers")


def compiled(text: str):
    """The wrapper, which must not fall back."""
    module = load_module(emit(prepare(parse(text)), "call", target("h200")), "gluon")
    for name in [n for n in vars(module) if n.endswith("_kernel") and "gluon" not in n]:
        setattr(module, name, Never())
    return module.call


def scaled(q, k, v, group, visible):
    """Attention written out, in the dtype of its inputs; rows that see nothing give 0."""
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    rows, columns = torch.arange(q.shape[2], device="cuda")[:, None], torch.arange(k.shape[2], device="cuda")[None, :]
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(~visible(rows, columns), -torch.inf), -1).nan_to_num(0.0) @ v


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rows, keys", [(1024, 1024), (1000, 1000), (4097, 4097), (97, 515), (1, 1)])
@pytest.mark.parametrize("wide, group", [(128, 1), (64, 4), (80, 2)])
def test_attention(mask, rows, keys, wide, group):
    if mask != "full":
        keys = rows
    generator = torch.Generator("cuda").manual_seed(rows + wide)
    q, k, v = (
        torch.randn(2, h, n, wide, device="cuda", generator=generator).bfloat16() for h, n in ((2 * group, rows), (2, keys), (2, keys))
    )
    score, visible = MASKS[mask]
    found = compiled(attention(score, group))(q, k, v, wide**-0.5)
    exact = scaled(q.double(), k.double(), v.double(), group, visible)
    own = (scaled(q, k, v, group, visible).double() - exact).abs().max()
    assert (found.double() - exact).abs().max() <= own + 2.0**-9 * exact.abs().max()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("stored", ["att.descriptor(Q, K, V, att);", "att.descriptor(Q, K, V);"])
@pytest.mark.parametrize("tiles", ["att.two_tiles(d, n);", "att.two_tiles(d);"])
@pytest.mark.parametrize("wide, rows", [(72, 1000), (96, 513), (160, 1000), (192, 130)])
def test_heads_that_two_tiles_hold(wide, rows, stored, tiles, mask):
    """Results go through descriptors or by pointers: each has its own way to say where the second tile begins."""
    score, visible = MASKS[mask]
    text = attention(score).replace("att.descriptor(Q, K, V, att);", stored).replace("l:128", "l:64") + tiles
    generator = torch.Generator("cuda").manual_seed(rows + wide)
    q, k, v = (torch.randn(2, 2, rows, wide, device="cuda", generator=generator).bfloat16() for _ in range(3))
    found = compiled(text)(q, k, v, wide**-0.5)
    exact = scaled(q.double(), k.double(), v.double(), 1, visible)
    own = (scaled(q, k, v, 1, visible).double() - exact).abs().max()
    assert (found.double() - exact).abs().max() <= own + 2.0**-9 * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("m, n, k", [(512, 512, 512), (1000, 1064, 520), (1, 8, 64), (4096, 4096, 72)])
def test_product(m, n, k, name, dtype):
    a, b = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(k, n, device="cuda", dtype=dtype)
    exact = torch.sigmoid(a.double() @ b.double())
    own = (torch.sigmoid(a @ b).double() - exact).abs().max()
    assert (compiled(product(name))(a, b).double() - exact).abs().max() <= own + 2.0**-9


@pytest.mark.parametrize("name", ["in turn", "parts of 160"])
def test_a_product_with_numbers_of_columns(name):
    """Each part has its own."""
    a, b, shift = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((1000, 520), (520, 1064), (1064,)))
    text = product(name, "tanh(0.05 * rdot(A[x, k], B[k, y], k) + b[y])").replace("A, B;", "A, B, b;")
    exact = torch.tanh(0.05 * (a.double() @ b.double()) + shift.double())
    assert (compiled(text)(a, b, shift).double() - exact).abs().max() <= 2.0**-7


def test_the_same_bits_every_time():
    q, k, v = (torch.randn(2, 4, 1000, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    call = compiled(attention(CAUSAL))
    first = call(q, k, v, 0.1)
    assert all(torch.equal(call(q, k, v, 0.1), first) for _ in range(20))


def test_a_negative_scale():
    q, k, v = (torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    found = compiled(attention())(q, k, v, -(64**-0.5))
    exact = scaled(-q.double(), k.double(), v.double(), 1, MASKS["full"][1])
    assert (found.double() - exact).abs().max() <= 2.0**-7 * exact.abs().max()


IN_BULK = "d_K.descriptor(Q, d_attention, K, V, d_Q); d_K.persistent(); d_K.stages(m:3); d_K.specialize_warps(m); d_K.num_warps(8);"
SWEEPS = {
    "full": ({}, (2, 3, 257, 515, 128), ""),
    "causal": ({"causal": True}, (1, 4, 1000, 1000, 128), ""),
    "narrow": ({"causal": True}, (2, 2, 300, 700, 64), ""),
    "of heads that share keys": ({"group": 4}, (2, 8, 321, 129, 112), ""),
    "split over heads": ({"causal": True, "group": 4}, (1, 8, 500, 500, 128), "d_K.split(h_in:2);"),
    "split over queries": ({"starts": True, "ends": True}, (1, 2, 1001, 999, 96), "d_K.split(m:3);"),
    "of one query": ({}, (3, 2, 1, 65, 128), ""),
    "in two tiles": ({}, (2, 3, 257, 515, 80), "d_K.two_tiles(d, n);"),
    "in two tiles, causal": ({"causal": True}, (1, 4, 1000, 1000, 96), "d_K.two_tiles(d, n);"),
    "in two tiles, of heads that share keys": ({"group": 4}, (2, 8, 321, 129, 72), "d_K.two_tiles(d, n);"),
    "in two tiles, narrow": ({"causal": True}, (2, 2, 300, 700, 40), "d_K.two_tiles(d, n);"),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_gradients_in_one_sweep(name):
    """Five products in each step; the gradient of queries is added up in memory."""
    params, sizes, more = SWEEPS[name]
    program = one_sweep(params, 128, 64, more=IN_BULK + more)
    module = load_module(emit(program, "call", target("h200"), True), "gluon")
    part = "_part" * ("split" in more)
    assert hasattr(module, f"d_K{part}_gluon_kernel")
    for form in ("", "_descriptor"):
        setattr(module, f"d_K{part}{form}_kernel", Never())
    check_gradients(module, program, params, sizes)


APART = {
    "wide, causal": ({"causal": True}, (1, 3, 700, 700, 256), ""),
    "wide, many heads share keys": ({"causal": True, "group": 9}, (2, 9, 425, 425, 224), "d_K.split(h_in:4); d_V.split(h_in:4);"),
    "rows sorted by length": ({"causal": True}, (2, 5, 1001, 1001, 128), "d_Q.map(m, b, h); d_K.map(l, b, h); d_V.map(b, l, h);"),
    "heads share keys": ({"group": 3}, (1, 6, 300, 515, 96), ""),
    "in two tiles": ({"group": 3}, (1, 6, 300, 515, 80), "d_Q.two_tiles(d, n); d_K.two_tiles(d, n); d_V.two_tiles(d, n);"),
    "in two tiles, causal": ({"causal": True}, (2, 5, 1001, 1001, 72), "d_Q.two_tiles(d, n); d_K.two_tiles(d, n); d_V.two_tiles(d, n);"),
}


@pytest.mark.parametrize("name", APART)
def test_gradients_by_kernels_of_their_own(name):
    params, sizes, more = APART[name]
    program = apart(params, sizes[-1], more)
    module = load_module(emit(program, "call", target("h200"), True), "gluon")
    names = ("d_Q", *(f"{f}{'_part' * ('split' in more)}" for f in ("d_K", "d_V")))
    for func in names:
        assert hasattr(module, f"{func}_gluon_kernel")
        setattr(module, f"{func}_kernel", Never())
    check_gradients(module, program, params, sizes)


DEFAULTS = {
    "causal": ({"causal": True}, (2, 9, 1001, 1001, 128)),
    "few queries": ({}, (2, 16, 64, 4096, 128)),
    "heads share keys": ({"group": 3}, (2, 21, 700, 700, 96)),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_gradients_by_the_default_schedule(name):
    """Gradients of keys and values, by one kernel of specialized warps, leave by the copy engine."""
    params, sizes = DEFAULTS[name]
    program = by_default(params, sizes, target("h200"))
    assert program.schedule.names("d_K", "specialize_warps")
    module = load_module(emit(program, "call", target("h200"), True), "gluon")
    setattr(module, f"d_K{'_part' * bool(program.schedule.sizes('d_K', 'split'))}_kernel", Never())
    check_gradients(module, program, params, sizes)
