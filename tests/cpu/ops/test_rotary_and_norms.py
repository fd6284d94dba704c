"""Rotary embeddings and norms in the forms that models have, against float64 formulas written with torch: values and every gradient."""

import pytest
import torch
import torch.nn.functional as F
from against_torch import compare, normal

from dtkernels import ops

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def turned(x, cos, sin, pairs, heads=1):
    """Turn pairs of elements ("halves", "neighbours", or "unzipped": neighbours that end in halves); a table of each element, or of each pair."""
    cos, sin = cos.unsqueeze(heads), sin.unsqueeze(heads)
    size = cos.shape[-1] * (2 if pairs in ("unzipped", "paired") or pairs == "paired halves" else 1)
    x, rest = x[..., :size], x[..., size:]
    a, b = x.chunk(2, -1) if "halves" in pairs else (x[..., ::2], x[..., 1::2])
    if pairs == "halves":
        (c, d), (s, t) = cos.chunk(2, -1), sin.chunk(2, -1)
    elif pairs == "neighbours":
        (c, d), (s, t) = (cos[..., ::2], cos[..., 1::2]), (sin[..., ::2], sin[..., 1::2])
    else:
        c = d = cos
        s = t = sin
    both = a * c - b * s, b * d + a * t
    return torch.cat((torch.stack(both, -1).flatten(-2) if pairs in ("neighbours", "paired") else torch.cat(both, -1), rest), -1)


def laid(heads, dtype, table, width=10):
    shape = (2, 3, 5, width) if heads == 1 else (2, 5, 3, width)
    return [t.to(dtype) for t in (normal(*shape), normal(2, 5, table), normal(2, 5, table, seed=1))]


@DTYPES
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("pairs", "table", "options"), [
    ("halves", 10, {}), ("halves", 4, {}), ("neighbours", 4, {"interleaved": True}), ("paired", 5, {"interleaved": True, "paired": True}),
    ("paired", 2, {"interleaved": True, "paired": True}),
])  # fmt: skip
def test_rotary(pairs, table, options, heads, dtype):
    compare(lambda *t: ops.rotary(*t, heads=heads, **options), lambda *t: turned(*t, pairs, heads), laid(heads, dtype, table), 1e-5)


@DTYPES
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("pairs", "interleaved"), [("paired halves", False), ("unzipped", True)])
def test_rotary_pairs(pairs, interleaved, heads, dtype):
    compare(lambda *t: ops.rotary_pairs(*t, interleaved=interleaved, heads=heads), lambda *t: turned(*t, pairs, heads), laid(heads, dtype, 5), 1e-5)


@pytest.mark.parametrize("rotate", [
    lambda x, c, s: ops.rotary(x, torch.cat((c, c), -1), torch.cat((s, s), -1)), lambda x, c, s: ops.rotary(x, c, s, interleaved=True, paired=True), ops.rotary_pairs,
])  # fmt: skip
def test_float32_tables_are_not_rounded_to_the_dtype_of_x(rotate):
    x, cos, sin = laid(1, torch.float32, 5)
    found, exact = rotate(x.half(), cos, sin), rotate(x.half().float(), cos, sin)  # the interpreter does not round bfloat16 to the nearest
    assert found.dtype == torch.float16
    assert (found - exact).norm() <= 1.01 * (exact.half() - exact).norm()


def test_tables_of_one_batch_entry_and_rotations_that_are_refused():
    x, cos, sin = laid(1, torch.float64, 4)
    for one in (cos[:1], cos[0]):
        torch.testing.assert_close(ops.rotary(x, one, one), turned(x, cos[:1], cos[:1], "halves"))
    assert ops.rotary(x[:0], cos[:0], sin[:0]).shape == (0, 3, 5, 10) and ops.rotary_pairs(x[:, :0, :, :8], cos, sin).shape == (2, 0, 5, 8)
    for call, words in (
        (lambda: ops.rotary(x, cos[:, :3], sin[:, :3]), "x is (B, H, S, D)"),
        (lambda: ops.rotary(x, cos[..., :3], sin[..., :3]), "R is even"),
        (lambda: ops.rotary(x, cos, sin, paired=True), "rotary_pairs for halves"),
        (lambda: ops.rotary(x, cos, sin, heads=3), "heads is 3; allowed: 1 to 2"),
        (lambda: ops.rotary_pairs(x, cos, sin), "D / 2"),
    ):
        with pytest.raises(ValueError) as raised:
            call()
        assert words in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(TypeError, match="cos is a int"):
        ops.rotary(x, 3, sin)


def normed(x, w=None, z=None, gate=None, eps=1e-6, centered=False, offset=0, gate_first=False, logistic=False):
    x = x * F.silu(gate) if gate_first else x
    x = x - x.mean(-1, keepdim=True) if centered else x
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    x = x if w is None else x * (w + offset)
    x = x if z is None else x + z
    return x if gate is None or gate_first else x * (gate.sigmoid() if logistic else F.silu(gate))


@DTYPES
@pytest.mark.parametrize("shape", [(7,), (3, 7)], ids=str)
@pytest.mark.parametrize(("held", "options"), [
    ("", {}), ("w", {"offset": 1}), ("", {"centered": True}), ("wz", {"centered": True, "offset": 1}), ("wg", {}), ("wg", {"gate_first": True}), ("wzg", {"logistic": True}),
    ("g", {"gate_first": True, "centered": True}),
])  # fmt: skip
def test_normalize(held, options, shape, dtype):
    x, w, z, gate = (t.to(dtype) for t in (normal(2, 3, 7), normal(*shape), normal(*shape, seed=1), normal(2, 3, 7, seed=2)))
    tensors = [x, *([w] if "w" in held else []), *([z] if "z" in held else []), *([gate] if "g" in held else [])]

    def split(given):
        named = dict(zip(("weight", *(["bias"] if "z" in held else ()), *(["gate"] if "g" in held else ())) if "w" in held else ("gate",), given))
        return named.get("weight"), named.get("bias"), named.get("gate")

    def ours(x, *rest):
        weight, bias, gate = split(rest)
        return ops.normalize(x, weight, bias, 1e-6, gate=gate, **options)

    compare(ours, lambda x, *rest: normed(x, *split(rest), **options), tensors, 3e-5)


def test_normalize_of_nothing_and_what_it_refuses():
    x = normal(2, 3, 7)
    assert ops.normalize(x[:0]).shape == (0, 3, 7) and ops.normalize(x[..., :0]).shape == (2, 3, 0)
    for call, words in (
        (lambda: ops.normalize(x, x[0, 0, :3]), "weight and bias (C,) or (R, C)"),
        (lambda: ops.normalize(x, x[0, 0], x[0]), "weight and bias (C,) or (R, C)"),
        (lambda: ops.normalize(x, gate=x[0]), "gate has the shape of x"),
        (lambda: ops.normalize(x, gate_first=True), "with a gate"),
        (lambda: ops.normalize(x, gate=x, gate_first=True, logistic=True), "exclude each other"),
    ):
        with pytest.raises(ValueError) as raised:
            call()
        assert words in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(TypeError, match="weight is a float"):
        ops.normalize(x, 1.0)
