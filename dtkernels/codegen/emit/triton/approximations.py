"""Define the forms of functions that ``f.approximate(...)`` asks for: a few instructions, exact enough for results of 16 bits.

Each is a short polynomial where the function is near 0, and elsewhere the special function unit's instruction, which loses digits there.
Relative errors are below 2**-15, those of tanh 2**-11; half a rounding to bfloat16 is 2**-9, to float16 2**-12. Where there is no GPU, Triton's
function stands for the instruction. Inline assembly is NVIDIA's.
"""

from __future__ import annotations

#: function -> the statements of its form. The instructions are exact to 2**-22 of 1 where the result is near 0
FORMS = {
    "log2": """
    near = (x - 1.0) * (1.4426950408889634 - (x - 1.0) * (0.7213475204444817 - (x - 1.0) * 0.4808983469629878))
    return tl.where(tl.abs(x - 1.0) < 0.03125, near, log2_instruction(x, on_gpu))
""",
    "log": """
    near = (x - 1.0) * (1.0 - (x - 1.0) * (0.5 - (x - 1.0) * 0.3333333333333333))
    return tl.where(tl.abs(x - 1.0) < 0.03125, near, log2_instruction(x, on_gpu) * 0.6931471805599453)
""",
    "log1p": """
    near = x * (1.0 - x * (0.5 - x * 0.3333333333333333))
    return tl.where(tl.abs(x) < 0.03125, near, log2_instruction(1.0 + x, on_gpu) * 0.6931471805599453)
""",
    "expm1": """
    near = x * (1.0 + x * (0.5 + x * 0.16666666666666666))
    return tl.where(tl.abs(x) < 0.03125, near, exp2_instruction(x * 1.4426950408889634, on_gpu) - 1.0)
""",
    "erfc": """
    # the form of Abramowitz and Stegun (1964), 7.1.26, with the coefficients of the least relative error
    t = reciprocal_instruction(1.0 + 0.45 * tl.abs(x), on_gpu)
    p = ((((-0.1263589280690158 * t + 0.26825865245959224) * t + 0.11132869969745882) * t + 0.23974844094296463) * t + 0.2531586581171095) * t + 0.2538924939134382
    size = p * t * exp2_instruction(x * x * -1.4426950408889634, on_gpu)
    return tl.where(x < 0, 2.0 - size, size)
""",  # noqa: E501 (emitted text is as wide as it is)
}


def _instruction_text(name: str, instruction: str, elsewhere: str, remark: str = "") -> str:
    """Return the function of one instruction of the special function unit. ``elsewhere``: what stands for it where there is no GPU."""
    return f"""
@triton.jit
def {name}(x, on_gpu: tl.constexpr):{remark}
    if on_gpu:
        return tl.inline_asm_elementwise("{instruction} $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return {elsewhere}
"""


_SMALL = "\n    # 0 for results below 2**-126"
INSTRUCTIONS = {
    name: _instruction_text(name, *how)
    for name, how in {
        "log2_instruction": ("lg2.approx.f32", "tl.log2(x)"),
        "exp2_instruction": ("ex2.approx.ftz.f32", "tl.exp2(x)", _SMALL),
        "reciprocal_instruction": ("rcp.approx.ftz.f32", "1.0 / x", _SMALL),
    }.items()
}


def _helper_text(fn: str) -> str:
    """Return the functions of a kernel's file. On a GPU one element follows the other: a compiler that takes step after step of a whole tile runs out of registers."""
    return f"""
@triton.jit
def {fn}_of_one(x, on_gpu: tl.constexpr = True):{FORMS[fn].rstrip()}


@triton.jit
def hardware_{fn}(x, on_gpu: tl.constexpr):
    if on_gpu:
        return tl.map_elementwise({fn}_of_one, x)
    else:
        return {fn}_of_one(x, False)
"""


#: helper -> text; ``hardware_tanh`` is among those of functions.py, whose text stored kernels have
HELPERS = {**{f"hardware_{fn}": _helper_text(fn) for fn in FORMS}, **INSTRUCTIONS}
