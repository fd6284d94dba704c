# ruff: noqa: E501 (programs read best on one line)
"""Exponentials by polynomials: what a schedule says, what is emitted, and what the emitted instructions give, worked out one by one."""

import re

import numpy as np
import pytest
from gluon_programs import attention

import dtkernels
from dtkernels.algebra.pipeline import prepare
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.emit.triton.exp2_emulation import HELPERS, POLYNOMIALS, name_of
from dtkernels.codegen.target import target
from dtkernels.lang import DTError, parse
from dtkernels.lang.parser import parse_schedule
from dtkernels.lang.schedule import SHARES, Share

ROWS = "Func total, f; In A; Var x; RVar y; total[x] = rsum(exp(A[x, y]), y); f[x, y] = exp(A[x, y]) / total[x]; total.fuse_at(f, x); f.block(x:1); f.tensorize(x:1, y:0); "
ERRORS = {3: 7.6e-5, 5: 1.65e-7}  #: relative, with the roundings of float32; ex2.approx has 2**-22.5 = 1.7e-7
LOWEST = 2.0**-126


# -- what a schedule says ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [f"exp:{part}/{whole}" for part, whole in SHARES])
def test_a_share_is_read_and_printed(text):
    schedule = parse_schedule(f"f.approximate(tanh, {text});")
    assert str(schedule) == f"f.approximate(tanh, {text});" and schedule.share("f") == tuple(map(int, text[4:].split("/")))
    assert schedule.names("f", "approximate") == ("tanh",) and isinstance(schedule.primitives[0].args[1], Share)


ALLOWED = "allowed: tanh, log, log2, log1p, expm1, erfc, rdot, exp:1/8, exp:1/4, exp:3/8, exp:1/2"


@pytest.mark.parametrize("said, message", [
    ("exp:1/3", f"a function to approximate: found exp:1/3; {ALLOWED}"),
    ("exp:4/4", f"a function to approximate: found exp:4/4; {ALLOWED}"),
    ("exp:0/4", f"a function to approximate: found exp:0/4; {ALLOWED}"),
    ("exp:-1/4", f"a function to approximate: found exp:-1/4; {ALLOWED}"),
    ("log:1/4", f"a function to approximate: found log:1/4; {ALLOWED}"),
    ("exp", f"a function to approximate: found exp; {ALLOWED}"),
    ("exp:4", "arguments of approximate: found (exp:4); allowed: (function or function:part/whole, ...)"),
    ("exp:1/x", "syntax: found 'x'; allowed: an integer"),
])  # fmt: skip
def test_a_wrong_share_is_one_line(said, message):
    with pytest.raises(DTError) as error:
        dtkernels.compile(ROWS + f"f.approximate({said});")
    assert message in str(error.value) and "\n" not in str(error.value)


# -- what is emitted ---------------------------------------------------------------------------------------------------


def test_nothing_changes_where_no_share_is_asked_for():
    text = dtkernels.compile(ROWS).source
    assert "tl.exp2(" in text and not any(name in text for name in (*HELPERS, "EXP_DEGREE", "inline_asm"))


@pytest.mark.parametrize("share", SHARES)
def test_the_exponentials_over_most_axes_are_shared(share):
    part, whole = share
    text = emit(prepare(parse(attention().replace("l:128", "l:64") + f"att.approximate(exp:{part}/{whole});")), "call", target("h200"))
    name = name_of(share)
    for lang, suffix in (("tl", ""), ("gl", "_gl")):  # by pointers, and by warpgroups
        assert f"def {name}{suffix}(x, degree: {lang}.constexpr):" in text and f"{lang}.inline_asm_elementwise(" in text
        assert re.search(rf"e = {name}{suffix}\(s \* .*1\.44\d+.*, EXP_DEGREE\)", text)
        assert re.search(rf"rescale = {lang}\.exp2\(", text), "what is one a row is few"
    assert "EXP_DEGREE=exp_degree(Q, dtype)" in text.replace("\n", " ") and text.count(f"pack={whole})") == 4
    assert text.count("ex2.approx.ftz.f32") == 4 * (whole - part)


def test_an_exponential_that_is_no_difference_from_a_shift():
    text = dtkernels.compile("Func f; In A; Var x; f[x] = exp(A[x] + 1); f.block(x:64); f.tensorize(x:64); f.approximate(exp:1/2);").source
    assert "exp2_1_of_2((A + 1) * 1.4426950408889634, EXP_DEGREE)" in text


def test_a_name_of_the_file_is_not_declared():
    with pytest.raises(DTError, match="a name that the emitted file uses itself: found 'exp2_1_of_4'"):
        dtkernels.compile("Func exp2_1_of_4; In A; Var x; exp2_1_of_4[x] = A[x];")


# -- the polynomials ---------------------------------------------------------------------------------------------------


def remez(degree: int) -> tuple[np.ndarray, float]:
    """(coefficients, error): the polynomial whose largest relative error to 2**f on [0, 1] is smallest, by exchange of its extrema."""
    f = np.linspace(0, 1, 20001)
    at = 0.5 - 0.5 * np.cos(np.pi * np.arange(degree + 2) / (degree + 1))
    for _ in range(30):
        powers = np.vander(at, degree + 1, increasing=True) / 2.0 ** at[:, None]
        *c, _level = np.linalg.solve(np.column_stack([powers, (-1.0) ** np.arange(degree + 2)]), np.ones(degree + 2))
        error = np.polynomial.polynomial.polyval(f, c) / 2.0**f - 1
        runs = np.split(np.arange(f.size), np.nonzero(np.diff(np.sign(error)))[0] + 1)
        at = np.array([f[run[np.argmax(abs(error[run]))]] for run in runs])
    return np.array(c), abs(error).max()


@pytest.mark.parametrize("degree", POLYNOMIALS)
def test_coefficients_are_those_of_the_smallest_largest_error(degree):
    c, error = remez(degree)
    ours = np.array(POLYNOMIALS[degree], np.uint32).view(np.float32)
    assert abs(ours / c - 1).max() < 2.0**-22 and 0.4 * ERRORS[degree] < error < ERRORS[degree]


# -- the instructions --------------------------------------------------------------------------------------------------

NAN = np.array(0x7FFFFFFF, np.uint32).view(np.float32)  #: the one that arithmetic gives


def flushed(x):
    """Without what lies below the smallest normal number; the one NaN."""
    x = np.where(abs(x) < np.float32(LOWEST), np.copysign(np.float32(0), x), x).astype(np.float32)
    return np.where(np.isnan(x), NAN, x)


def exact_sum(a, b):
    """(a + b, what that lost), in float64."""
    s = a + b
    back = s - a
    return s, np.where(np.isfinite(s), (a - (s - back)) + (b - back), 0.0)


def to_float32(s, lost, down=False):
    """The float32 next to ``s + lost``, or next below."""
    if not down:  # rounded to odd first, so that rounding twice is rounding once
        bits = s.view(np.int64).copy()
        inward = (lost != 0) & ((lost > 0) != (s > 0))
        bits[inward] -= 1
        bits[lost != 0] |= 1
        return bits.view(np.float64).astype(np.float32)
    near = s.astype(np.float32)
    above = (near.astype(np.float64) > s) | ((near.astype(np.float64) == s) & (lost < 0))
    return np.where(above & np.isfinite(s), np.nextafter(near, np.float32(-np.inf)), near)


def add(a, b, down=False):
    return to_float32(*exact_sum(a.astype(np.float64), b.astype(np.float64)), down)


OPERATIONS = {
    "max.NaN.ftz.f32": np.maximum, "min.NaN.ftz.f32": np.minimum,
    "add.rm.ftz.f32": lambda a, b: add(a, b, down=True), "sub.rn.ftz.f32": lambda a, b: add(a, -b),
    "mul.rn.ftz.f32": lambda a, b: (a.astype(np.float64) * b).astype(np.float32),
    "fma.rn.ftz.f32": lambda a, b, c: to_float32(*exact_sum(a.astype(np.float64) * b, np.broadcast_to(c, a.shape).astype(np.float64))),
    "ex2.approx.ftz.f32": lambda a: np.exp2(a.astype(np.float64)).astype(np.float32),
}  # fmt: skip


def run(text: str, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """What the assembly between braces makes of ``inputs``, bit by bit; ex2.approx is taken as exact."""
    registers = {f"${len(inputs) + i}": x for i, x in enumerate(inputs)}

    def value(name: str) -> np.ndarray:
        if name.startswith("0f"):
            return np.full(inputs[0].shape, np.array(int(name[2:], 16), np.uint32).view(np.float32))
        return registers[name]

    for line in re.findall(r"^\s+((?:\w+\.)+\w+ .*);$", text, re.M):
        word, *names = re.split(r",? ", line)
        if word in OPERATIONS:
            registers[names[0]] = flushed(OPERATIONS[word](*(flushed(value(n)) for n in names[1:])))
        elif word == "shl.b32":
            registers[names[0]] = (value(names[1]).view(np.uint32) << int(names[2])).view(np.float32)
        else:
            assert word in ("mov.b32", "mov.f32"), line
            registers[names[0]] = value(names[1])
    return [registers[f"${i}"] for i in range(len(inputs))]


def assembly(share: tuple[int, int], degree: int) -> str:
    three, five = re.findall(r'"""\n(\s+\{.*?\})\n', HELPERS[name_of(share)], re.S)
    text = {3: three, 5: five}[degree]
    return re.sub(r"^.*\.reg .*\n", "", text, flags=re.M)


def arguments() -> np.ndarray:
    every = np.arange(0, 2**32, 2**14 + 3, dtype=np.uint64).astype(np.uint32).view(np.float32)  # of all signs, sizes, NaNs and infinities
    close = np.linspace(-131, 131, 100_001).astype(np.float32)
    whole = np.arange(-150, 151, dtype=np.float32)
    edges = np.concatenate([np.nextafter(whole, np.float32(-np.inf)), whole, np.nextafter(whole, np.float32(np.inf))])
    return np.concatenate([every, close, edges, np.array([np.inf, -np.inf, np.nan, -0.0, 0.0, -1e-30, 1e-30, -3e38, 3e38], np.float32)])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("degree", POLYNOMIALS)
@pytest.mark.parametrize("share", SHARES)
def test_the_instructions_give_powers_of_two(share, degree):
    part, whole = share
    x = arguments()
    made = run(assembly(share, degree), [np.roll(x, i) for i in range(whole)])
    wanted = np.exp2(x.astype(np.float64))
    for i, got in enumerate(np.roll(y, -i) for i, y in enumerate(made)):
        assert (np.isnan(got) == np.isnan(x)).all()
        assert (got[x < -126] == 0).all() and not np.signbit(got[x < -126]).any(), "what is masked adds nothing"
        assert np.isposinf(got[x >= 128]).all()
        inside = (x > -125.99) & (x < 127.99)
        bound = ERRORS[degree] if i >= whole - part else 2.0**-23
        assert abs(got[inside] / wanted[inside] - 1).max() <= bound
        assert (got[(x >= -126) & (x <= -125.99)] <= 1.01 * 2.0**-125.99).all()
    worst = abs(made[-1] / np.exp2(np.roll(x, whole - 1).astype(np.float64)) - 1)[(np.roll(x, whole - 1) > -125) & (np.roll(x, whole - 1) < 127)].max()
    assert worst > ERRORS[degree] / 3, "the last of them is not the polynomial"


def test_a_third_of_half_a_rounding_to_float16():
    assert ERRORS[3] < 2.0**-12 / 3 and ERRORS[5] <= 2.0**-22.5
