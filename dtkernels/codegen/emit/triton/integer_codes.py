"""Convert quantized codes to floating-point operands by bit operations, since GPUs do few conversions at a time.

A number of 16 bits whose exponent makes its last bit 1 is the sum of a power of two and the integer in its last bits: 128 + n in bfloat16
for n below 128, 1024 + n in float16 for n below 1024. So the bits of two codes are moved into the place, and the power is subtracted from
both by one instruction. All steps are exact.
"""

from __future__ import annotations

#: helpers of kernels: name -> text. ``pairs``: whether the GPU computes with pairs of 16 bits; ``like``: the dtype of the product
HELPERS = {
    "bits_of": """
@triton.jit
def bits_of(codes, shift: tl.constexpr, mask: tl.constexpr, less: tl.constexpr, pairs: tl.constexpr, like: tl.constexpr):
    # ((codes >> shift) & mask) - less as float32, both 127 at most
    half: tl.constexpr = like == tl.float16
    lanes: tl.constexpr = mask * 65537
    power: tl.constexpr = 0x64006400 if half else 0x43004300
    minus: tl.constexpr = (0x6400 + less if half else 0x4300 + less) * 65537
    minus_one: tl.constexpr = 0xBC00BC00 if half else 0xBF80BF80
    kind: tl.constexpr = "f16x2" if half else "bf16x2"
    if pairs and (codes.dtype.primitive_bitwidth == 8 and mask << shift < 256):
        return tl.inline_asm_elementwise(
            f\"\"\"{{
            .reg .b32 a, b, one, less;
            mov.b32 one, {minus_one};
            mov.b32 less, {minus};
            prmt.b32 a, $2, 0, 0x4140;
            prmt.b32 b, $2, 0, 0x4342;
            shr.b32 a, a, {shift};
            shr.b32 b, b, {shift};
            lop3.b32 a, a, {lanes}, {power}, 0xEA;
            lop3.b32 b, b, {lanes}, {power}, 0xEA;
            fma.rn.{kind} $0, less, one, a;
            fma.rn.{kind} $1, less, one, b;
            }}\"\"\", "=r,=r,r", [codes], dtype=tl.float16 if half else tl.bfloat16, is_pure=True, pack=4,
        ).to(tl.float32)
    elif pairs and (codes.dtype.primitive_bitwidth == 32 and mask << shift < 4294967296):
        # of each of two elements the byte in which the code begins, and the next one
        first: tl.constexpr = shift // 8
        last: tl.constexpr = min(first + 1, 3)
        return tl.inline_asm_elementwise(
            f\"\"\"{{
            .reg .b32 a, one, less;
            mov.b32 one, {minus_one};
            mov.b32 less, {minus};
            prmt.b32 a, $1, $2, {first + 16 * last + 256 * (first + 4) + 4096 * (last + 4)};
            shr.b32 a, a, {shift % 8};
            lop3.b32 a, a, {lanes}, {power}, 0xEA;
            fma.rn.{kind} $0, less, one, a;
            }}\"\"\", "=r,r,r", [codes], dtype=tl.float16 if half else tl.bfloat16, is_pure=True, pack=2,
        ).to(tl.float32)
    else:
        bits = codes.to(tl.int32) if codes.dtype.primitive_bitwidth < 32 else codes
        return (((bits >> shift) & mask) - less).to(tl.float32)
""",
    "number_of": """
@triton.jit
def number_of(codes, dtype: tl.constexpr, pairs: tl.constexpr, like: tl.constexpr):
    # integers as numbers of a dtype
    if codes.dtype.primitive_bitwidth != 8:
        return codes.to(dtype)
    elif not pairs:
        return codes.to(tl.float32).to(dtype)
    elif like == tl.float16:
        sign: tl.constexpr = 0x80808080 if codes.dtype == tl.int8 else 0
        minus: tl.constexpr = 0xE480E480 if codes.dtype == tl.int8 else 0xE400E400
        return tl.inline_asm_elementwise(
            f\"\"\"{{
            .reg .b32 a, power, less;
            mov.b32 power, 0x64646464;
            mov.b32 less, {minus};
            xor.b32 a, $2, {sign};
            prmt.b32 $0, a, power, 0x4140;
            prmt.b32 $1, a, power, 0x4342;
            add.f16x2 $0, $0, less;
            add.f16x2 $1, $1, less;
            }}\"\"\", "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4,
        ).to(dtype)
    elif codes.dtype == tl.int8:
        # the last 7 bits beside 128, less 128, or 256 where the sign is set
        return tl.inline_asm_elementwise(
            \"\"\"{
            .reg .b32 a, b, c, d, one;
            mov.b32 one, 0x3F803F80;
            prmt.b32 a, $2, 0, 0x4140;
            prmt.b32 b, $2, 0, 0x4342;
            lop3.b32 c, a, 0x00800080, 0xC300C300, 0xEA;
            lop3.b32 d, b, 0x00800080, 0xC300C300, 0xEA;
            lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 b, b, 0x007F007F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, a, one, c;
            fma.rn.bf16x2 $1, b, one, d;
            }\"\"\", "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4,
        ).to(dtype)
    else:
        # the last 7 bits beside 128, less 256, and 128 or 256 by the first
        return tl.inline_asm_elementwise(
            \"\"\"{
            .reg .b32 a, b, c, d, one, less;
            mov.b32 one, 0x3F803F80;
            mov.b32 less, 0xC380C380;
            prmt.b32 a, $2, 0, 0x4140;
            prmt.b32 b, $2, 0, 0x4342;
            lop3.b32 c, a, 0x00800080, 0x43004300, 0xEA;
            lop3.b32 d, b, 0x00800080, 0x43004300, 0xEA;
            lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 b, b, 0x007F007F, 0x43004300, 0xEA;
            fma.rn.bf16x2 a, a, one, less;
            fma.rn.bf16x2 b, b, one, less;
            fma.rn.bf16x2 $0, a, one, c;
            fma.rn.bf16x2 $1, b, one, d;
            }\"\"\", "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4,
        ).to(dtype)
""",
}
