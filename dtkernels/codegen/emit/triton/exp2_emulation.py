"""Print exponentials by polynomial, for ``transforms/arithmetic/exp2_emulation.py``.

``2**a = 2**n * 2**f`` with ``n = floor(a)`` and ``0 <= f <= 1``. Rounded down, ``a + 1.5 * 2**23 + 127`` has ``n + 127``
as its low bits, which are the exponent of ``2**n``; and ``2**f`` is the polynomial whose largest relative error is
smallest (Remez exchange on [0, 1]; tests/unit/codegen/test_exp2_emulation.py finds the coefficients anew). ``a`` is held to
[-127, 128]: 0 below -126, as ``ex2.approx.ftz`` has it, infinity from 128 on, NaN stays.
"""

from __future__ import annotations

from ....lang.schedule import SHARES

#: degree -> coefficients, of 1 first. Largest relative error with float32's roundings: 7.5e-5, a third of half a rounding
#: to float16; and 1.6e-7, as ``ex2.approx`` itself
POLYNOMIALS = {
    3: (0x3F7FFB19, 0x3F322226, 0x3E677E26, 0x3D9FCB52),
    5: (0x3F7FFFFF, 0x3F31727B, 0x3E75EAD4, 0x3D64AA23, 0x3C134806, 0x3AF61905),
}
_ROUNDED, _LEAST, _MOST = "0f4B40007F", "0fC2FE0000", "0f43000000"  # 1.5 * 2**23 + 127, -127, 128


def name_of(share: tuple[int, int]) -> str:
    """Return the helper for a share."""
    return f"exp2_{share[0]}_of_{share[1]}"


def helper_text(share: tuple[int, int]) -> str:
    """Return the function of a kernel's file."""
    part, whole = share
    constraints = ",".join(["=f"] * whole + ["f"] * whole)
    three, five = ("\n".join(_assembly(part, whole, degree)) for degree in (3, 5))
    return f'''
@triton.jit
def {name_of(share)}(x, degree: tl.constexpr):
    # {part} of {whole} by a polynomial for 2**(x - floor(x)): relative error 7.5e-5 for degree 3, 1.6e-7 for degree 5
    if degree == 0:
        return tl.exp2(x)
    elif degree == 3:
        return tl.inline_asm_elementwise("""
{three}
        """, "{constraints}", [x], dtype=tl.float32, is_pure=True, pack={whole})
    else:
        return tl.inline_asm_elementwise("""
{five}
        """, "{constraints}", [x], dtype=tl.float32, is_pure=True, pack={whole})
'''


def narrow_helper_text(share: tuple[int, int]) -> str:
    """Return the text of the function for tiles that may have fewer elements than share one polynomial's instructions."""
    return f"""
@triton.jit
def {name_of(share)}_if_wide(x, degree: tl.constexpr):
    if x.numel % {share[1]} == 0:
        return {name_of(share)}(x, degree)
    else:
        return tl.exp2(x)
"""


def _assembly(part: int, whole: int, degree: int) -> list[str]:
    lines = ["{", ".reg .f32 a, t, f, p;", ".reg .b32 s;"]
    lines += [f"ex2.approx.ftz.f32 ${i}, ${whole + i};" for i in range(whole - part)]
    for i in range(whole - part, whole):
        lines += polynomial(f"${i}", f"${whole + i}", degree)
    return [" " * 8 + line for line in [*lines, "}"]]


def polynomial(result: str, argument: str, degree: int) -> list[str]:
    """Return ``result = 2**argument`` in PTX."""
    first, *others = reversed(POLYNOMIALS[degree])
    return [
        f"max.NaN.ftz.f32 a, {argument}, {_LEAST};",
        f"min.NaN.ftz.f32 a, a, {_MOST};",
        f"add.rm.ftz.f32 t, a, {_ROUNDED};",
        f"sub.rn.ftz.f32 f, t, {_ROUNDED};",
        "sub.rn.ftz.f32 f, a, f;",
        "mov.b32 s, t;",
        "shl.b32 s, s, 23;",
        "mov.b32 t, s;",
        f"mov.f32 p, 0f{first:08X};",
        *(f"fma.rn.ftz.f32 p, p, f, 0f{c:08X};" for c in others),
        f"mul.rn.ftz.f32 {result}, p, t;",
    ]


HELPERS = {name_of(s): helper_text(s) for s in SHARES} | {f"{name_of(s)}_if_wide": narrow_helper_text(s) for s in SHARES}
