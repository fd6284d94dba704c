"""Define the Triton form of every function: an expression, and the text of helpers that Triton lacks.

What is called runs in the interpreter too, and on every target: no libdevice, no inline assembly but where ``on_gpu`` says so.
"""

from __future__ import annotations

import re

from ....lang.expr import FLOAT8
from . import approximations, exp2_emulation, integer_codes

#: function -> its Triton expression
CALLS = {
    "exp": "tl.exp({0})", "exp2": "tl.exp2({0})", "log": "tl.log({0})", "log2": "tl.log2({0})", "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})", "abs": "tl.abs({0})", "erf": "tl.erf({0})", "floor": "tl.floor({0})", "sigmoid": "tl.sigmoid({0})",
    "tanh": "tanh({0})", "where": "tl.where({0}, {1}, {2})", "//": "floor_divide({0}, {1})", "%": "floor_modulo({0}, {1})",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "largest": "tl.maximum({0}, {1})",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "min": "min({0}, {1})", "max": "max({0}, {1})", "cdiv": "tl.cdiv({0}, {1})",
    "floor_to_int": "floor_to_int({0})", "ceil_to_int": "ceil_to_int({0})",
    "random": "random_uniform({0}, {1}, {2}, {3}, {4}, {5})", "normal": "random_normal({0}, {1}, {2}, {3}, {4}, {5})",
    "key": "order_key({0}, {1})", "place": "place_of_key({0})", "largest_key": "tl.maximum({0}, {1})", "wide": "tl.cast({0}, tl.int64)",
    "bits": "bits_of({0}, {1}, {2}, {3}, PAIRS, {4})",
    "sin": "tl.sin({0})", "cos": "tl.cos({0})", "ceil": "tl.ceil({0})", "pow": "float_power({0}, {1})",
    "atan": "arctangent({0})", "asin": "arcsine({0})", "acos": "arccosine({0})", "atan2": "arctangent_of({0}, {1})",
    "log1p": "log_of_1_plus({0})", "expm1": "exp_minus_1({0})", "erfc": "complementary_error({0})", "round": "round_half_even({0})", "trunc": "round_toward_zero({0})",
    "sign": "sign_of({0})", "isnan": "is_nan({0})", "isinf": "is_infinite({0})", "isfinite": "is_finite({0})",
}  # fmt: skip

#: helpers a kernel may need: name -> text
HELPERS = {
    "tanh": """
@triton.jit
def tanh(x):
    # odd polynomial near 0, where 1 - 2 / (exp(2x) + 1) would lose all digits; coefficients: Cephes tanhf
    z = x * x
    near = x + x * z * (((((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z) - 3.33332819422e-1)
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    return tl.where(size < 0.625, near, tl.where(x < 0, -far, far))
""",  # noqa: E501 (emitted text is as wide as it is)
    "hardware_tanh": """
@triton.jit
def hardware_tanh(x, on_gpu: tl.constexpr):
    # relative error 2**-11
    if on_gpu:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tanh(x)
""",
    "every_second": """
@triton.jit
def every_second(tile, first: tl.constexpr):
    # the elements first, first + 2, ... along the last dimension
    if len(tile.shape) == 1:
        pairs = tl.reshape(tile, [tile.shape[0] // 2, 2])
    else:
        pairs = tl.reshape(tile, [tile.shape[0], tile.shape[1] // 2, 2])
    even, odd = tl.split(pairs)
    return odd if first else even
""",
    "floor_divide": """
@triton.jit
def floor_divide(a, b):
    # Triton's // rounds toward zero
    return (a - (a % b + b) % b) // b
""",
    "floor_modulo": """
@triton.jit
def floor_modulo(a, b):
    # Triton's % takes the sign of a
    return (a % b + b) % b
""",
    "floor_to_int": """
@triton.jit
def floor_to_int(x):
    return tl.floor(tl.minimum(tl.maximum(x, -1e9), 1e9)).to(tl.int32)
""",
    "ceil_to_int": """
@triton.jit
def ceil_to_int(x):
    return tl.ceil(tl.minimum(tl.maximum(x, -1e9), 1e9)).to(tl.int32)
""",
    "nan_max": """
@triton.jit
def nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
    "nan_min": """
@triton.jit
def nan_min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
    "product_of_two": """
@triton.jit
def product_of_two(a, b):
    return a * b
""",
    "random_words": """
@triton.jit
def random_words(seed, a, b, c, d, wide: tl.constexpr):
    # Philox 4x32-10 (Salmon et al., 2011). The counter is two integers of 64 bits, or four of 32
    a, b, c, d = tl.cast(a, tl.int64), tl.cast(b, tl.int64), tl.cast(c, tl.int64), tl.cast(d, tl.int64)
    none = (a - a) + (b - b) + (c - c) + (d - d)
    c0, c1 = a + none, ((a + none) >> 32 if wide else b + none)
    c2, c3 = (b + none if wide else c + none), ((b + none) >> 32 if wide else d + none)
    low = 4294967295
    return tl.philox(seed, (c0 & low).to(tl.uint32), (c1 & low).to(tl.uint32), (c2 & low).to(tl.uint32), (c3 & low).to(tl.uint32))
""",
    "random_uniform": """
@triton.jit
def random_uniform(seed, a, b, c, d, wide: tl.constexpr):
    w0, w1, w2, w3 = random_words(seed, a, b, c, d, wide)
    return (w0 >> 8).to(tl.float32) * 5.9604644775390625e-08
""",
    "random_normal": """
@triton.jit
def random_normal(seed, a, b, c, d, wide: tl.constexpr):
    # Box and Muller (1958)
    w0, w1, w2, w3 = random_words(seed, a, b, c, d, wide)
    u, v = ((w0 >> 8).to(tl.float32) + 1.0) * 5.9604644775390625e-08, (w1 >> 8).to(tl.float32) * 5.9604644775390625e-08
    return tl.sqrt(-2.0 * tl.log(u)) * tl.cos(6.283185307179586 * v)
""",
    "in_32_bits": """
@triton.jit
def in_32_bits(x):
    return x.to(tl.int32) if x.dtype.primitive_bitwidth < 32 else x
""",
    "to_range": """
@triton.jit
def to_range(x, least: tl.constexpr, most: tl.constexpr):
    return tl.minimum(tl.maximum(x, least), most)
""",
    "to_int32": """
@triton.jit
def to_int32(x, least: tl.constexpr, most: tl.constexpr):
    # toward zero, the nearest where there is none, 0 of a NaN; 2147483520 is the largest float32 below 2**31
    near = tl.minimum(tl.maximum(tl.where(x != x, 0.0, x), least * 1.0), min(most * 1.0, 2147483520.0)).to(tl.int32)
    return tl.where(x >= most, most, near)
""",
    "to_int64": """
@triton.jit
def to_int64(x):
    # 9223371487098961920 is the largest float32 below 2**63
    near = tl.minimum(tl.maximum(tl.where(x != x, 0.0, x), -9223372036854775808.0), 9223371487098961920.0).to(tl.int64)
    return tl.where(x >= 9223372036854775808.0, 9223372036854775807, near)
""",
    "order_key": """
@triton.jit
def order_key(x, place):
    # a NaN is largest; the bits of a negative float32 are in the other order
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    order = tl.where(x != x, 2147483647, bits ^ ((bits >> 31) & 2147483647))
    return order.to(tl.int64) * 4294967296 + (4294967295 - tl.cast(place, tl.int64))
""",
    "place_of_key": """
@triton.jit
def place_of_key(key):
    return 4294967295 - (key & 4294967295)
""",
    "float_power": """
@triton.jit
def float_power(a, b):
    # relative error: a few 2**-23 * (1 + abs(b * log2(a))); special cases as in C
    size = tl.where(tl.abs(a) == 1.0, 1.0, tl.exp2(b * tl.log2(tl.abs(a))))
    half = b * 0.5
    signed = tl.where(tl.floor(half) != half, -size, size)
    negative = tl.where(tl.floor(b) == b, signed, tl.where(a > float("-inf"), float("nan"), size))
    return tl.where(b == 0, 1.0, tl.where(a == 1, 1.0, tl.where(a < 0, negative, size)))
""",
    "log_of_1_plus": """
@triton.jit
def log_of_1_plus(x):
    # 1 + x = 2**k * (1 + m) with m in [-0.25, 0.5], without rounding 1 + x: bits of an exponent are taken from those of x
    bits = (1.0 + x).to(tl.int32, bitcast=True) - 1061158912
    power = bits & -8388608
    m = (x.to(tl.int32, bitcast=True) - power).to(tl.float32, bitcast=True) + (0.25 * (1082130432 - power).to(tl.float32, bitcast=True) - 1.0)
    q = (((-0.0449429319780696 * m + 0.10455564065597932) * m - 0.1316661191255416) * m + 0.14482447525731293) * m - 0.1664740860761099
    q = (((q * m + 0.19990540076003824) * m - 0.25000061841392923) * m + 0.3333345580381589) * m - 0.500000007905202
    near = (m + m * m * q) + power.to(tl.float32) * 8.262958294867817e-08
    near = tl.where(x > -1.0, near, tl.where(x == -1.0, float("-inf"), float("nan")))
    near = tl.where(x < float("inf"), near, x)
    # it has the sign of x, also of a zero
    return ((near.to(tl.int32, bitcast=True) & 2147483647) | (x.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)
""",
    "arctangent": """
@triton.jit
def arctangent(x):
    # one of three ranges, then an odd polynomial; coefficients: Cephes atanf
    size = tl.abs(x)
    far, middle = size > 2.414213562373095, size > 0.4142135623730950
    t = tl.where(far, -1.0 / tl.maximum(size, 1.0), tl.where(middle, 1.0 - 2.0 / (size + 1.0), size))
    z = t * t
    near = t + t * z * (((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z - 3.33329491539e-1)
    angle = near + tl.where(far, 1.5707963267948966, tl.where(middle, 0.7853981633974483, 0.0))
    return tl.where(x < 0, -angle, angle)
""",
    "arcsine": """
@triton.jit
def arcsine(x):
    return 2.0 * arctangent(x / (1.0 + tl.sqrt((1.0 - x) * (1.0 + x))))
""",
    "arccosine": """
@triton.jit
def arccosine(x):
    return tl.where(x == -1.0, 3.141592653589793, 2.0 * arctangent(tl.sqrt((1.0 - x) * (1.0 + x)) / (1.0 + x)))
""",
    "arctangent_of": """
@triton.jit
def arctangent_of(y, x):
    # special cases as in C, but that a zero has no sign
    top, low = tl.maximum(tl.abs(y), tl.abs(x)), tl.minimum(tl.abs(y), tl.abs(x))
    ratio = arctangent(tl.where(low == top, tl.where(top == 0, 0.0, 1.0), low / top))
    angle = tl.where(tl.abs(y) > tl.abs(x), 1.5707963267948966 - ratio, ratio)
    angle = tl.where(x < 0, 3.141592653589793 - angle, angle)
    angle = tl.where((x != x) | (y != y), x + y, angle)
    return tl.where(y < 0, -angle, angle)
""",
    "exp_minus_1": """
@triton.jit
def exp_minus_1(x):
    # x = n * log(2) + f: 2**n * expm1(f) + (2**n - 1), twice the half of it, which does not overflow
    held = tl.minimum(tl.maximum(x, -30.0, propagate_nan=tl.PropagateNan.ALL), 89.0, propagate_nan=tl.PropagateNan.ALL)
    moved = held * 1.4426950408889634 + 12582912.0
    n = moved - 12582912.0
    f = (held - n * 0.693145751953125) - n * 1.428606765330187e-06
    q = (((0.0013882489148292034 * f + 0.008366691711152863) * f + 0.041667205364802735) * f + 0.16666542350356056) * f + 0.49999998125382517
    near = f * (1.0 + f * q)
    half = ((moved.to(tl.int32, bitcast=True) + 126) << 23).to(tl.float32, bitcast=True)
    return tl.where(n == 0, near, 2.0 * (near * half + (half - 0.5)))
""",
    "complementary_error": """
@triton.jit
def complementary_error(x):
    # exp(-x * x) times a polynomial of 1 / (1 + 0.45 * abs(x)), as in Abramowitz and Stegun (1964), 7.1.26, with the coefficients of the least relative error
    t = 1.0 / (1.0 + 0.45 * tl.abs(x))
    p = (((-0.04139953344209227 * t + 0.19072453342637155) * t - 0.30064909761067027) * t + 0.14246665364343397) * t - 0.02239606982017073
    p = ((((p * t + 0.11996366656662084) * t + 0.17524946220126442) * t + 0.22827192858146228) * t + 0.2538831490220473) * t + 0.25388532094225863
    size = p * t * tl.exp(-x * x)
    return tl.where(x < 0, 2.0 - size, size)
""",
    "round_half_even": """
@triton.jit
def round_half_even(x):
    # float32 has no fraction from 2**23 on
    size = tl.abs(x)
    near = (size + 8388608.0) - 8388608.0
    return tl.where(size < 8388608.0, tl.where(x < 0, -near, near), x)
""",
    "round_toward_zero": """
@triton.jit
def round_toward_zero(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))
""",
    "sign_of": """
@triton.jit
def sign_of(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))
""",
    "is_nan": """
@triton.jit
def is_nan(x):
    return x != x
""",
    "is_infinite": """
@triton.jit
def is_infinite(x):
    return tl.abs(x) == float("inf")
""",
    "is_finite": """
@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")
""",
    "linear_recurrence": """
@triton.jit
def linear_recurrence(a, b, c, d):
    # two steps of h -> a * h + b as one
    return a * c, b * c + d
""",
    "from_e4m3": """
@triton.jit
def from_e4m3(x, dtype: tl.constexpr):
    # bits where the GPU has no such numbers: sign, 4 of the exponent, 3 of the fraction
    if x.dtype == tl.uint8:
        bits = x.to(tl.int32)
        size = bits & 127
        normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, tl.where(size == 127, float("nan"), normal))
        return tl.where(bits > 127, -value, value).to(dtype)
    # Triton 3.6 has no conversion to bfloat16 for compute capability 8.9
    return x.to(tl.float32).to(dtype) if dtype == tl.bfloat16 else x.to(dtype)
""",
    "from_e5m2": """
@triton.jit
def from_e5m2(x, dtype: tl.constexpr):
    # bits where the GPU has no such numbers: the upper half of a float16
    if x.dtype == tl.uint8:
        return (x.to(tl.int32) << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(dtype)
    # Triton 3.6 has no conversion to bfloat16 for compute capability 8.9
    return x.to(tl.float32).to(dtype) if dtype == tl.bfloat16 else x.to(dtype)
""",
    **{
        f"code_of_{name}": f"""
@triton.jit
def code_of_{name}(x, native: tl.constexpr):
    # ties to even; beyond the range the largest finite number; a NaN stays one
    near = tl.maximum(x, {-f.largest!r}, propagate_nan=tl.PropagateNan.ALL)
    near = tl.minimum(near, {f.largest!r}, propagate_nan=tl.PropagateNan.ALL)
    if native:
        return near.to(tl.{f.triton})
    else:
        bits = near.to(tl.int32, bitcast=True)
        size = bits & 2147483647
        even = (size + {2 ** (22 - f.fraction) - 1} + ((size >> {23 - f.fraction}) & 1)) >> {23 - f.fraction}
        # below the least normal number adding rounds to a multiple of the least number
        small = ((tl.abs(near) + {2.0 ** (24 - f.bias - f.fraction)!r}).to(tl.int32, bitcast=True)) & {2 ** (f.fraction + 1) - 1}
        code = tl.where(size < {(128 - f.bias) << 23}, small, even - {(127 - f.bias) << f.fraction})
        code = tl.where(near != near, 127, code)
        return (code | ((bits >> 24) & 128)).to(tl.uint8)
"""
        for name, f in FLOAT8.items()
    },
    **{
        f"round_to_{name}": f"""
@triton.jit
def round_to_{name}(x, native: tl.constexpr):
    return from_{name}(code_of_{name}(x, native), tl.float32)
"""
        for name in FLOAT8
    },
    **approximations.HELPERS,
    **exp2_emulation.HELPERS,
    **integer_codes.HELPERS,
}

#: function -> the helper that its expression calls
HELPER_OF = {fn: name for fn, text in CALLS.items() if (name := re.match(r"[\w.]+", text)[0]) in HELPERS}  # type: ignore[index]
#: helper -> itself and the helpers that it calls
WITH_CALLED = {name: {name, *(h for h in HELPERS if re.search(rf"(?<![\w.]){h}\(", text))} for name, text in HELPERS.items()}
#: functions whose arguments are tensors of float32: a number among them is written as one
ON_NUMBERS = frozenset({"erfc", "sin", "cos", "atan", "asin", "acos", "atan2", "ceil", "pow", "log1p", "expm1", "round", "trunc", "sign", "isnan", "isinf", "isfinite"})
