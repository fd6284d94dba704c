# ruff: noqa: E501 (programs and error texts read best on one line)
"""The texts of errors, whole: one line, `file:line:column: rule: found ...; allowed: ...`."""

import re

import pytest

from dtkernels.algebra.pipeline import prepare
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.pipeline import check_unused_statements
from dtkernels.lang import DTError, parse
from dtkernels.lang.checks import check_given
from dtkernels.lang.errors import DEPTH

ONE = "Func f; In A; Var x;\n"
TWO = "Func f; In A; Var x, y;\n"
ADD = TWO + "f[x, y] = A[x, y];\n"
SUM = "Func s, f; In A; Var x; RVar y;\ns[x] = rsum(A[x, y], y);\nf[x, y] = A[x, y] / s[x];\n"
INDEX = "an index is integer arithmetic on labels: found {}; allowed: labels, integers, SIn, parameters, len(), elements of an In or of a Func of integers (i[x] = cast(..., int32)), and + - * / % & | ^ ~ << >>"
TOKENS = "names, numbers and + - * / // % & | ^ ~ << >> < <= > >= == != = ( ) [ ] , ; : . #"
STATEMENTS = "a declaration (Func, In, SIn, Var, RVar, Param, Extent), a definition f[...] = ...; or a schedule statement f.block(...);"
POWER = "pow(a, b), or a product, a * a"
FUNCTIONS = "exp, exp2, log, log2, sqrt, rsqrt, abs, erf, floor, sigmoid, tanh, maximum, minimum, where, sin, cos, log1p, expm1, erfc, atan, asin, acos, atan2, detach, pow, clamp, round, ceil, trunc, sign, isnan, isinf, isfinite, random, normal, rsum, rmax, rmin, rmean, rprod, rany, rall, rargmax, rargmin, rtopk, rargtopk, rdot, rscan, rrecur, cast, reshape, write, len"
LATE = "a Func fused into the loop it reduces over is used there before it is finished, and the sum cannot be repaired: found s in f; allowed: s fused outside the loop over y"


def refusal(text: str) -> str:
    with pytest.raises(DTError) as error:
        program = parse(text, "t.dt")
        check_given(program)
        prepared = prepare(program)
        check_unused_statements(prepared)
        emit(prepared)
    return str(error.value)


NAMES = {
    TWO + "f[x, y] = A[x, y] + B[x, y];": "t.dt:2:21: undeclared tensor: found 'B'; allowed: A, f",
    TWO + "f[x, y] = A[x, y] * beta;": "t.dt:2:21: undeclared name: found 'beta'; allowed: labels x, y",
    TWO + "f[x, z] = A[x, y];": "t.dt:2:1: undeclared label: found 'z'; allowed: x, y",
    TWO + "f[x, y] = A[x, z];": "t.dt:2:16: undeclared name: found 'z'; allowed: labels x, y",
    TWO + "f[x, y] = A[x, y] + rsum(A[x, y], k);": "t.dt:2:21: undeclared label: found 'k'; allowed: x, y",
    TWO + "f[x, y] = A[x, y] / len(z);": "t.dt:2:21: undeclared label: found 'z'; allowed: x, y",
    TWO + "g[x, y] = A[x, y];": "t.dt:2:1: only a declared Func is defined: found 'g', which is not declared; allowed: f",
    ONE + "A[x] = 1;\nf[x] = A[x];": "t.dt:2:1: only a declared Func is defined: found 'A', which is an In; allowed: f",
    ONE + "f[x] = A[x];\nf[x] = 2 * A[x];": "t.dt:3:1: a Func is defined once: found 'f' again",
    ONE + "f[x, x] = A[x];": "t.dt:2:1: a Func is defined over distinct labels: found [x, x]",
    ONE + "f[x] = A[x] + f[x];": "t.dt:2:15: a Func is defined before it is used: found 'f'; allowed: no Func yet",
    "Func f, g; In A; Var x;\nf[x] = g[x];\ng[x] = A[x];": "t.dt:2:8: a Func is defined before it is used: found 'g'; allowed: no Func yet",
    "Func f; In A, f; Var x;\nf[x] = A[x];": "t.dt:1:15: a name is declared once: found 'f' again",
    "Func exp; In A; Var x;\nexp[x] = A[x];": "t.dt:1:6: a name of the language cannot be declared: found 'exp'",
    "Func lambda; In A; Var x;\nlambda[x] = A[x];": "t.dt:1:6: a name that the emitted file uses itself: found 'lambda'; allowed: another name",
    "Func f; In A, torch; Var x;\nf[x] = A[x] + torch[x];": "t.dt:1:15: a name that the emitted file uses itself: found 'torch'; allowed: another name",
    "Func sum; In A; Var x;\nsum[x] = A[x];": "t.dt:1:6: a name that the emitted file uses itself: found 'sum'; allowed: another name",
    "Func f; In A, A_ptr; Var x;\nf[x] = A[x] + A_ptr[x];": "t.dt:1:15: a name that the emitted file uses itself: found 'A_ptr' beside 'A'; allowed: another name",
    "Func f; In A, f_out; Var x;\nf[x] = A[x] + f_out[x];": "t.dt:1:15: a name that the emitted file uses itself: found 'f_out' beside 'f'; allowed: another name",
    "Func f; In A; SIn x_ok; Var x;\nf[x] = A[x] + x_ok;": "t.dt:1:19: a name that the emitted file uses itself: found 'x_ok' beside 'x'; allowed: another name",
    "Func f; In A, A_stride_x; Var x;\nf[x] = A[x] + A_stride_x[x];": "t.dt:1:15: a name that the emitted file uses itself: found 'A_stride_x' beside 'A'; allowed: another name",
    "Func f; In A, f_kernel; Var x;\nf[x] = A[x] + f_kernel[x];": "t.dt:1:15: a name that the emitted file uses itself: found 'f_kernel' beside 'f'; allowed: another name",
    "Func f; In A; SIn num_warps; Var x;\nf[x] = A[x] * num_warps;": "t.dt:1:19: a name that the emitted file uses itself: found 'num_warps'; allowed: another name",
    "Func f; In __debug__; Var x;\nf[x] = __debug__[x];": "t.dt:1:12: a name that the emitted file uses itself: found '__debug__'; allowed: another name",
    ONE + "f[x] = A;": "t.dt:2:8: a tensor is indexed: found 'A'; allowed: A[...]",
    ONE + "f[x] = concat(A[x], A[x]);": "t.dt:2:8: unknown function: found 'concat'; allowed: where(y < n, A[x, y + 0], B[x, y - n]) with n = len(k) of a Var k; Extent k = A[1]; Extent y = A[1] + B[1];",
    ONE + "f[x] = A[x] == nan;": "t.dt:2:16: undeclared name: found 'nan'; allowed: isnan(a) to compare with it, inf - inf for its value",
    ONE + "f[x] = cot(A[x]);": f"t.dt:2:8: unknown function: found 'cot'; allowed: {FUNCTIONS}",
    ONE + "f[x] = cast(A[x], int4);": "t.dt:2:19: unknown dtype: found 'int4'; allowed: fp32, fp16, bf16, e4m3, e5m2, int8, uint8, int16, int32, int64, bool",
}

NUMBERS = {
    ONE + "f[x] = A[x] + x % 0;": "t.dt:2:17: an integer is divided by 0: found x % 0; allowed: a divisor that is not 0",
    ONE + "f[x] = A[x] + A[x / 0];": "t.dt:2:19: an integer is divided by 0: found x / 0; allowed: a divisor that is not 0",
    ONE + "f[x] = A[x] * 12345678901234567890;": "t.dt:2:15: an integer has at most 18 digits: found 20 digits",
    ONE + "f[x] = A[x] * 1e400;": "t.dt:2:15: a number is finite: found 1e400; allowed: inf, where that is meant",
    ONE + "f[x] = A[x]; f.tensorize(x:2097152);": "t.dt:2:14: a size in tensorize: found x:2097152; allowed: at most 1048576",
    ONE + "f[x] = A[x]; f.block(x:4294967296);": "t.dt:2:14: a size in block: found x:4294967296; allowed: at most 2147483647",
    "Func f; Var x; Extent x = 5;\nf[x] = x;": "t.dt:2:1: what is compiled reads a tensor: found none in f; allowed: an In",
    ONE + "f[x] = " + "-(" * 2000 + "A[x]" + ")" * 2000 + ";": f"t.dt:1:1: an expression is nested too deeply: allowed: {DEPTH}",
}

SHAPES = {
    TWO + "f[x, y] = A[x, y] / A[1];": "t.dt:2:21: rank mismatch: found A with 1 indices; allowed: 2; len(k) of a label k for the size of a dimension, Extent k = A[1];",
    TWO + "f[x, y] = A[x, y] / len(A);": "t.dt:2:21: undeclared label: found 'A'; allowed: x, y; len(k) with Extent k = A[0]; for the size of a dimension",
    TWO + "f[x, y] = A[x, y] + A[x];": "t.dt:2:21: rank mismatch: found A with 1 indices; allowed: 2",
    "Func g, f; In A; Var x, y;\ng[x, y] = A[x, y];\nf[x, y] = g[x];": "t.dt:3:11: rank mismatch: found g with 1 indices; allowed: 2",
    "Func f; In A; Var x; RVar k;\nf[x] = rsum(rsum(A[x, k], k), k);": "t.dt:2:13: a label is reduced once: found k reduced twice",
    "Func f; In A; Var x; RVar k;\nf[x] = rsum(A[x, k], k, k);": "t.dt:2:8: a label is reduced once: found k, k reduced twice",
    TWO + "f[x] = A[x, y];": "t.dt:2:13: a label on the right is on the left or reduced: found 'y' in f; allowed: x",
    "Func f; In A; Var x; RVar k;\nf[x] = rsum(A[x, k], k) * A[x, k];": "t.dt:2:18: a label on the right is on the left or reduced: found 'k' in f; allowed: x",
    ONE + "f[x] = A[x] + A[1.5 * x];": "t.dt:2:17: " + INDEX.format("1.5"),
    "Func g, f; In A; Var x;\ng[x] = 2 * A[x];\nf[x] = A[x] + A[g[x]];": "t.dt:3:17: " + INDEX.format("g[x]"),
    ONE + "f[x] = A[x] + A[A[1.5]];": "t.dt:2:19: " + INDEX.format("1.5"),
    ONE + "f[x] = exp(A[x]) % 2;": "t.dt:2:18: % is of whole numbers: found exp(A[x]) % 2; allowed: labels, integers, SIn, parameters, len(), integer inputs and + - * // % of them; a - b * floor(a / b) of other numbers",
    ONE + "f[x] = A[x] + (x / 2) % 2;": "t.dt:2:23: % is of whole numbers: found x / 2 % 2; allowed: labels, integers, SIn, parameters, len(), integer inputs and + - * // % of them; a - b * floor(a / b) of other numbers",
    TWO + "f[x, y] = A[x, y] + reshape(A[x, 0], 1, y);": "t.dt:2:21: reshape names the labels of its value, and 1: found reshape(A[x, 0], 1, y); allowed: reshape(A[x, 0], x, 1)",
    ONE + "f[x] = reshape(A[x], x, 7);": "t.dt:2:8: reshape names the labels of its value, and 1: found reshape(A[x], x, 7); allowed: reshape(A[x], x, 1)",
    ONE + "f[x] = A[x] + A[floor(x)];": "t.dt:2:17: " + INDEX.format("floor(x)"),
}

SYNTAX = {
    ONE + "f[x] = where(0 < A[x] < 1, 1, 0);": "t.dt:2:23: comparisons do not chain: found '<'; allowed: 'and' between two comparisons",
    ONE + "f[x] = A[x] @ 2;": "t.dt:2:13: no DT token starts here: found '@'; allowed: rdot(A[x, k], B[k, y], k)",
    ONE + "  \t f[x] = A[x]; # note\n$": f"t.dt:3:1: no DT token starts here: found '$'; allowed: {TOKENS}",
    ONE + "f[x] = A[x]\nf.compile();": "t.dt:3:1: syntax: found 'f'; allowed: ';'",
    ONE + "f[x] = exp(A[x];": "t.dt:2:16: syntax: found ';'; allowed: ')'",
    ONE + "f[A[x]] = 1;": "t.dt:2:4: a definition has labels on its left: found A[...]; allowed: a sum of what belongs to each: f[i] = rsum(where(A[x] == i, ..., 0), x);",
    ONE + "f[x] = A[x]": "t.dt:2:12: syntax: found 'end of text'; allowed: ';'",
    ONE + "f[x] = A[x] + ;": "t.dt:2:15: syntax: found ';'; allowed: an expression",
    ONE + "f[x] = A[x];\nf + 1;": "t.dt:3:3: syntax: found '+'; allowed: '[' or '.' after 'f', or a declaration (Func, In, SIn, Var, RVar, Param, Extent)",
    ONE + "3 = A[x];": f"t.dt:2:1: syntax: found '3'; allowed: {STATEMENTS}",
    "Func f; In A; Var x; Param p = 1.5;\nf[x] = A[x] * p;": "t.dt:1:32: syntax: found '1.5'; allowed: an integer, true or false",
}

ARITY = {
    ONE + "f[x] = exp(A[x], 2);": "t.dt:2:8: exp takes 1 argument(s): found 2",
    ONE + "f[x] = A[x] + exp();": "t.dt:2:15: exp takes 1 argument(s): found 0",
    ONE + "f[x] = maximum(A[x]);": "t.dt:2:8: maximum takes 2 argument(s): found 1",
    ONE + "f[x] = where(A[x] > 0, A[x]);": "t.dt:2:8: where takes 3 argument(s): found 2",
    "Func f; In A; Var x; RVar k;\nf[x] = rsum(A[x, k]);": "t.dt:2:21: a reduction names the label it runs over: found none; allowed: rsum(e, k)",
}

KINDS = {
    ONE + "f[x] = (A[x] > 0) + 1;": "t.dt:2:14: a number is wanted here: found A[x] > 0, a boolean; allowed: where(c, 1, 0) of a condition c",
    ONE + "f[x] = where(x + 1, A[x], 0);": "t.dt:2:16: a boolean is wanted here: found x + 1, a number; allowed: a comparison: a != 0 of a number a",
    ONE + "f[x] = where(A[x] > 0, A[x] > 1, 2);": "t.dt:2:8: both values of where are of one kind: found where(A[x] > 0, A[x] > 1, 2)",
}

SCHEDULES = {
    ADD + "f.tile(x:4);": "t.dt:3:3: unknown schedule primitive: found 'tile'; allowed: block, tensorize, map, fuse_at, num_warps, num_stages, compile, compile_to_kernel, "
    "persistent, ping_pong, split, descriptor, stages, unroll, specialize_warps, cluster, evict, maxnreg, specialize, reorder, merge, store, approximate, stage, align, two_tiles, parts_at, tail, stream, chunk, accumulate_at",
    ADD + "g.block(x:4);": "t.dt:3:1: a schedule is on a Func of the program: found 'g'; allowed: f",
    ADD + "A.block(x:4);": "t.dt:3:1: a schedule is on a Func of the program: found 'A'; allowed: f",
    ADD + "g.compile();": "t.dt:3:1: a schedule is on a Func of the program: found 'g'; allowed: f",
    ADD + "f.block(z:4);": "t.dt:3:1: block names a label of f: found 'z'; allowed: x, y",
    SUM + "s.block(y:4);": "t.dt:4:1: block(y:4): found tensorize(y:1); allowed: tensorize(y:4), as large as the block",
    ADD + "f.tensorize(k:4);": "t.dt:3:1: tensorize names a label of f: found 'k'; allowed: x, y",
    ADD + "f.map(y, z);": "t.dt:3:1: map names a label of f: found 'z'; allowed: x, y",
    ADD + "f.map(y, y);": "t.dt:3:1: map names a label once: found 'y' twice",
    ADD + "f.block(x:4);\nf.map(x:x1/8, y);": "t.dt:4:1: map places the inside of each group: found 'x1' has no place; allowed: map(..., x1)",
    ADD + "f.tensorize(x:48);": "t.dt:3:1: a tile is a power of two: found x:48; allowed: x:32 or x:64",
    ADD + "f.tensorize(x:-4);": "t.dt:3:1: a size in tensorize: found x:-4; allowed: 1 or more, or 0 for the whole extent",
    ADD + "f.block(x:0);": "t.dt:3:1: a size in block: found x:0; allowed: 1 or more",
    ADD + "f.num_warps(3);": "t.dt:3:1: a number of warps: found 3; allowed: 1, 2, 4, 8, 16 or 32",
    ADD + "f.num_warps(64);": "t.dt:3:1: a number of warps: found 64; allowed: 1, 2, 4, 8, 16 or 32",
    ADD + "f.num_warps(x);": "t.dt:3:1: arguments of num_warps: found (x); allowed: (number)",
    ADD + "f.num_warps();": "t.dt:3:1: arguments of num_warps: found (); allowed: (number)",
    ADD + "f.block(x);": "t.dt:3:1: arguments of block: found (x); allowed: (label:size, ...)",
    ADD + "f.compile(x);": "t.dt:3:1: arguments of compile: found (x); allowed: ()",
    ADD + "f.fuse_at(f);": "t.dt:3:1: arguments of fuse_at: found (f); allowed: (func, label)",
    ADD + "f.evict(A:soon);": "t.dt:3:1: an eviction policy: found A:soon; allowed: first, last, reread",
    ONE + "f[x] = A[x, x];\nf.tensorize(x:32); f.descriptor(A);": "t.dt:3:20: descriptor(A): found x along two dimensions; allowed: a label along each",
    "Func f; In W, t; Var x, y;\nf[x, y] = W[t[x], y];\nf.tensorize(x:16, y:16); f.descriptor(t);": "t.dt:3:26: descriptor(t): found its elements stand in an index; allowed: tensors of numbers",
    ADD + "f.map(x:y/4, y);": "t.dt:3:1: map names the inside of each group anew: found 'y', a label; allowed: a name of its own",
    ADD + "f.map(x:i/4, y:i/2, i);": "t.dt:3:1: map names the inside of each group anew: found 'i', twice; allowed: a name of its own",
    ADD + "f.reorder(x, x);": "t.dt:3:1: reorder names a label once: found f.reorder(x, x)",
    ADD + "f.unroll(x:65);": "t.dt:3:1: a size in unroll: found x:65; allowed: at most 64",
    ADD + "f.block(x:4, x:8);": "t.dt:3:1: block says one thing of x: found x:4 and x:8; allowed: one of them",
    ADD + "f.evict(A:first, A:last);": "t.dt:3:1: evict says one thing of A: found A:first and A:last; allowed: one of them",
    ADD + "f.block(x:4);\nf.block(y:4, x:8);": "t.dt:4:1: a schedule says block of x once: found f.block(x:4), f.block(y:4, x:8); allowed: one of them",
    ADD + "f.num_warps(4);\nf.num_warps(8);": "t.dt:4:1: a schedule says num_warps of f once: found f.num_warps(4), f.num_warps(8); allowed: one of them",
    ADD + "f.map(y, x);\nf.map(x, y);": "t.dt:4:1: a schedule says map of f once: found f.map(y, x), f.map(x, y); allowed: one of them",
    SUM + "s.fuse_at(f, x);\ns.fuse_at(f, y);": "t.dt:5:1: a schedule says fuse_at of s once: found s.fuse_at(f, x), s.fuse_at(f, y); allowed: one of them",
    SUM + "s.fuse_at(f, x);\ns.block(x:4);": "t.dt:5:1: block is of a Func with a kernel of its own: found s, which is computed in that of f; allowed: f.block(...)",
    SUM + "s.num_warps(8);\ns.fuse_at(f, x);": "t.dt:4:1: num_warps is of a Func with a kernel of its own: found s, which is computed in that of f; allowed: f.num_warps(...)",
    ADD + "f.maxnreg(1);": "t.dt:3:1: a number of registers: found 1; allowed: 24 to 255, which a thread can have",
    ADD + "f.store();": "t.dt:3:1: store is of a Func that is fused into another kernel: found f, which has a kernel of its own; allowed: f.fuse_at(...), or no store: its own kernel writes it",
    ADD + "f.map(y, x);": "t.dt:3:1: map walks the blocks of labels: found y, which is not cut into blocks; allowed: f.block(y:...)",
    ADD + "f.block(x:4); f.map(y, x);": "t.dt:3:15: map walks the blocks of labels: found y, which is not cut into blocks; allowed: x",
    ADD + "f.tensorize(y:64); f.approximate(tanh);": "t.dt:3:20: approximate(tanh) is of what the kernel computes, after the algebra: found no tanh of a tile in the kernel of f; allowed: a kernel with one",
    ADD + "f.tensorize(y:64); f.approximate(exp:1/4);": "t.dt:3:20: approximate(exp:1/4) is of what the kernel computes, after the algebra: found no exp of a tile in the kernel of f; allowed: a kernel with one",
    ONE + "f[x] = tanh(A[x]);\nf.approximate(tanh);": "t.dt:3:1: approximate(tanh) is of what the kernel computes, after the algebra: found no tanh of a tile in the kernel of f; allowed: a kernel with one",
    "Func g, f; In A; Var x;\ng[x] = tanh(A[x]);\nf[x] = g[x] + 1;\ng.tensorize(x:64); f.tensorize(x:64); f.approximate(tanh);": "t.dt:4:39: approximate(tanh) is of what the kernel computes, after the algebra: found no tanh of a tile in the kernel of f; allowed: a kernel with one",
    SUM + "f.block(x:4); s.fuse_at(f, x); s.tensorize(x:16);": "t.dt:4:32: tensorize belongs to the Func whose loop it tiles: found x:16 of s, in the loop over x of f; allowed: f.tensorize(x:16)",
    ADD + "f.evict(f:first);": "t.dt:3:1: evict names a tensor that the kernel reads: found f; allowed: A",
    ADD + "f.descriptor(B);": "t.dt:3:1: descriptor names a tensor: found 'B'; allowed: A, f",
}

PAIR = "Func f, g, h; In A; Var x; RVar y;\nf[x] = rsum(A[x, y], y);\ng[x] = f[x] * 2;\nh[x] = f[x] + 1;\n"
FUSION = {
    PAIR + "g.fuse_at(f, x); f.fuse_at(h, x); g.compile(); h.compile();": "t.dt:5:1: a Func is fused into one that comes after it: found g in f, which it uses",
    "Func f, h, g; In A, B; Var x;\nf[x] = A[x];\nh[x] = f[x] * B[x];\ng[x] = h[x] + A[x];\ng.fuse_at(f, x); f.compile(); g.compile(); h.compile();": "t.dt:5:1: kernels run one after another: found f and h, each before the other by fuse_at",
    SUM + "s.fuse_at(g, x);": "t.dt:4:1: fuse_at names a Func: found 'g'; allowed: s, f",
    SUM + "s.fuse_at(f, k);": "t.dt:4:1: fuse_at names a loop of f: found 'k'; allowed: x, y",
    SUM + "s.fuse_at(f, x); f.fuse_at(s, x);": "t.dt:4:1: fuse_at does not go round in a circle: found s -> f -> s",
    SUM + "s.fuse_at(s, x);": "t.dt:4:1: fuse_at does not go round in a circle: found s -> s",
    "Func s, f; In A; Var x; RVar y;\ns[x] = rsum(A[x, y], y);\nf[x] = rsum(tanh(A[x, y] * s[x]), y);\ns.fuse_at(f, y);": f"t.dt:3:1: {LATE}",
    "Func s, f; In A; Var x; RVar y;\ns[x] = rmax(A[x, y], y);\nf[x] = rsum(A[x, y] - s[x], y);\ns.fuse_at(f, y);": f"t.dt:3:1: {LATE}",
    "Func s, f; In A; Var x; RVar y;\ns[x] = rsum(A[x, y], y);\nf[x] = rmax(A[x, y] / s[x], y);\ns.fuse_at(f, y);": f"t.dt:3:1: {LATE}",
    "Func t, f; In A; Var x; RVar y;\nt[x] = rsum(exp(A[x, y]), y);\nf[x] = rsum(exp(A[x, y]) / t[x] * tanh(A[x, y] - log(t[x])), y);\nt.fuse_at(f, y);": "t.dt:3:1: "
    + LATE.replace("found s", "found t").replace("allowed: s", "allowed: t"),
}

DECLARATIONS = {
    "Func f; In A, B; Var x;\nf[x] = A[x];": "t.dt:1:15: what is declared is used: found In 'B' is not",
    "Func f; In A; SIn a; Var x;\nf[x] = A[x];": "t.dt:1:19: what is declared is used: found SIn 'a' is not",
    "Func f; In A; Var x, y;\nf[x] = A[x];": "t.dt:1:22: what is declared is used: found label 'y' is not",
    "Func f; In A; Var x; Param p = 3;\nf[x] = A[x];": "t.dt:1:28: what is declared is used: found Param 'p' is not",
    "Func f, g; In A; Var x;\nf[x] = A[x];": "t.dt:1:9: a declared Func is defined: found no definition of 'g'",
    "Func f; In A; Var x; RVar k;\nf[x, k] = A[x, k];": "t.dt:1:27: an RVar is reduced somewhere: found 'k' is not; allowed: Var k",
    ONE + "Extent z = A[0];\nf[x] = A[x];": "t.dt:2:8: undeclared label: found 'z'; allowed: x",
    ONE + "Extent x = B[0];\nf[x] = A[x];": "t.dt:2:8: an extent is a number or that of an input: found B[0]; allowed: A",
    ONE + "Extent x = A[3];\nf[x] = A[x + 0];": "t.dt:2:8: a dimension of A: found A[3]; allowed: 0 to 0",
    ONE + "Extent x = A[-1];\nf[x] = A[x + 0];": "t.dt:2:8: a dimension of A: found A[-1]; allowed: 0 to 0",
    ONE + "Extent x = 3; Extent x = 4;\nf[x] = A[x + 0];": "t.dt:2:8: a label has one extent: found 3 and 4 of x; allowed: one of them",
    "Func g, f; In A; Var r, s; Extent r = 3; Extent s = 5;\ng[r] = A[r + 0];\nf[s] = g[s] + A[s + 0];": "t.dt:1:49: a label has one extent: found 3 and 5 of s; allowed: one of them",
    ONE + "f[x] = A[x + 1];": "t.dt:1:19: the extent of a label comes from an input it indexes by itself: found no input with 'x' as a plain index; allowed: Extent x = A[0]; for the size of that dimension, or a number, Extent x = 4;",
    "Func f; In W, t; Var x; RVar s;\nf[x] = rsum(W[t[x] + 1, s + 1], s);": "t.dt:1:30: the extent of a label comes from an input it indexes by itself: found no input with 's' as a plain index; allowed: Extent s = W[1]; for the size of that dimension, or a number, Extent s = 4;",
    "Func f, g; In A; Var x;\nf[x] = A[x];\ng[x] = A[x];": "t.dt:2:1: what is declared is used: found Func 'f' is not, by the result g; allowed: f.compile(); g.compile(); where it is a result too",
    "Func f, g; In A; Var x;\nf[x] = A[x];\ng[x] = f[x];\nf.compile();": "t.dt:3:1: what is declared is used: found Func 'g' is not, by the result f; allowed: g.compile(); where it is a result too",
    "Func a, f, g; In A; Var x;\na[x] = 2 * A[x];\nf[x] = A[x];\ng[x] = A[x];\na.block(x:4); f.compile(); g.compile();": "t.dt:2:1: what is declared is used: found Func 'a' is not, by the results f, g; allowed: a.compile(); where it is a result too",
}

#: what other languages write -> what the error says to write instead
HINTS = {
    "A[x] ** 2": POWER, "power(A[x], 2)": POWER, "clip(A[x], 0, 1)": "clamp(a, low, high)", "mean(A[x])": "rmean(e, k)",
    "softmax(A[x])": "e[x, y] = exp(A[x, y]); s[x] = rsum(e[x, y], y); and e[x, y] / s[x]", "sum(A[x])": "rsum(e, k)",
    "max(A[x], 0)": "maximum(a, b), or rmax(e, k) over a label", "min(A[x], 0)": "minimum(a, b), or rmin(e, k) over a label",
    "matmul(A, A)": "rdot(A[x, k], B[k, y], k)", "A[x] @ A[x]": "rdot(A[x, k], B[k, y], k)", "A[x] div 2": "a // b of whole numbers, floor(a / b) of others",
    "A[x] if x else 2": "where(c, a, b)", "if A[x] > 0 then 1 else 0": "where(c, a, b)", "A[x] > 0 ? 1 : 2": "where(c, a, b)",
    "where(x > 1 && x < 4, 1, 2)": "'and'", "where(x > 1 || x < 4, 1, 2)": "'or'", "where(x > 1 & x < 4, 1, 2)": "'and' between two comparisons",
    "where(!A[x], 1, 2)": "'not', or != between two values", "where(A[x] = 0, 1, 2)": "== to compare",
    "where(A[x] => 0, 1, 2)": ">=", "where(A[x] =< 0, 1, 2)": "<=", "where(A[x] <> 0, 1, 2)": "!=", "where(x is 0, 1, 2)": "==",
    "A(x)": "A[...]", "A[x][x]": "all indices in one pair of brackets: A[x, y]", "where(True, 1, A[x])": "true", "Relu(A[x])": "maximum(a, 0)",
    "torch.exp(A[x])": "no methods or modules: exp(e) of a value, A[y, x] for a transpose, len(x) for a size", "rsum(A[x], dim=1)": "labels by name: rsum(e, k)",
}  # fmt: skip
#: the same for statements
STATEMENT_HINTS = {
    "f[x] == A[x];": "'='", "f[x] += A[x];": "one definition f[...] = expression; with sums as rsum(e, k)", "f(x) = A[x];": "f[x, ...] = expression;", "f = A[x];": "f[x, ...] = expression;",
    "var y;": "Var", "if x > 0: f[x] = A[x];": "where(c, a, b)", "return f;": "f.compile(); for each Func that is a result", "input B;": "'[' or '.' after 'input', or a declaration (Func, In, SIn, Var, RVar, Param, Extent)",
    "f[x] = A[x]; f.block(x=4);": "x:size",
}  # fmt: skip


@pytest.mark.parametrize("text", {**{f"f[x] = {e};": hint for e, hint in HINTS.items()}, **STATEMENT_HINTS}.items(), ids=lambda pair: pair[0])
def test_the_error_names_what_to_write_instead(text):
    assert re.fullmatch(r"t\.dt:2:\d+: .*; allowed: " + re.escape(text[1]), refusal(ONE + text[0]))


def test_a_name_of_the_program_is_no_word_of_another_language():
    assert refusal("Func mod; In A; Var x;\nmod[x] = A[x]\nmod.compile();") == "t.dt:3:1: syntax: found 'mod'; allowed: ';'"
    assert refusal("Func f; In power; Var x;\nf[x] = power(x);").endswith("allowed: power[...]")
    assert refusal("Func f; In pow; Var x;\nf[x] = pow(x);").endswith("pow takes 2 argument(s): found 1; allowed: pow[...] for an element of pow")


GOLDEN = {**NAMES, **NUMBERS, **DECLARATIONS, **SHAPES, **SYNTAX, **ARITY, **KINDS, **SCHEDULES, **FUSION}


@pytest.mark.parametrize("text", GOLDEN)
def test_text_of_the_error(text):
    said = refusal(text)
    assert said == GOLDEN[text]
    assert re.fullmatch(r"t\.dt:\d+:\d+: [^\n]+", said)


#: errors found while lowering
PLACELESS = {
    ADD + "f.block(x:24); f.tensorize(x:16);": "a block is a whole number of tiles: found x: block 24, tile 16; allowed: all of it, a power of two that divides 24, or, padded, 32",
    ADD + "f.block(x:16); f.tensorize(x:32);": "a block is a whole number of tiles: found x: block 16, tile 32; allowed: all of it, a power of two that divides 16, or, padded, 16",
    "Func s, f; In A; Var x;\ns[x] = 2 * A[x];\nf[x] = s[x] + 1;\ns.fuse_at(f, x);\ns.compile();": "what is declared is used: found Func 'f' is not, by the result s; allowed: f.compile(); where it is a result too",

}


@pytest.mark.parametrize("text", PLACELESS)
def test_rule_of_the_error(text):
    assert refusal(text).endswith(PLACELESS[text])


@pytest.mark.parametrize("text", PLACELESS)
def test_place_of_the_error(text):
    assert re.match(r"t\.dt:\d+:\d+: ", refusal(text))


def test_program_of_nothing():
    assert refusal("").endswith("a program defines at least one Func: found no definition")
    assert refusal("Func f; In A; Var x;").endswith("a program defines at least one Func: found no definition")


def test_every_column_counts_from_one_and_every_line_too():
    assert refusal("@").startswith("t.dt:1:1: ")
    assert refusal("\n\n   @").startswith("t.dt:3:4: ")
    assert refusal("# a comment @\r\n@").startswith("t.dt:2:1: ")


def test_an_error_is_a_value_error_with_its_parts():
    with pytest.raises(ValueError) as error:
        parse(TWO + "f[x, y] = A[x, y] + B[x, y];", "t.dt")
    e = error.value
    assert (e.rule, e.found, e.allowed, e.at.line, e.at.column, e.at.source) == ("undeclared tensor", "'B'", "A, f", 2, 21, "t.dt")


def test_no_text_makes_the_parser_fail_otherwise():
    """Every prefix of a program, and the program with any one token missing, is refused properly or accepted."""
    text = "Func s, f; In A; SIn a; Var x; RVar y; Param p = -2; s[x] = rsum(exp(A[x, y] * a), y) + p; f[x, y] = where(not A[x, y + 1] < 0 and true, A[x, y] / s[x], -inf); " \
           "s.fuse_at(f, x); f.block(x:4); f.tensorize(x:4, y:0); f.map(x:x1/2, x1); f.evict(A:first); f.compile();"  # fmt: skip
    tokens = re.findall(r"\w+|[^\s\w]", text)
    for i in range(len(tokens)):
        for variant in (tokens[:i], tokens[:i] + tokens[i + 1 :], tokens[:i] + [tokens[i]] * 2 + tokens[i + 1 :]):
            try:
                parse(" ".join(variant))
            except DTError as refused:
                assert "\n" not in str(refused)


def test_names_of_the_emitted_file_are_those_that_are_refused():
    from dtkernels.codegen.emit.host_helpers import SUPPORT
    from dtkernels.codegen.emit.triton.functions import HELPERS
    from dtkernels.lang.reserved_names import TAKEN

    ours = {n for n in HELPERS if n not in ("tanh", "sigmoid")}  # words of the language, which are refused for that
    assert {*SUPPORT, *ours} <= TAKEN


AGAIN = """Func s, a, b; In A, B, C; Var x, y; RVar k, j;
s[x, j] = rdot(A[x, k], B[k, j], k); a[x, y] = rdot(s[x, j], C[j, y], j); b[x] = rsum(s[x, j], j);
s.fuse_at(a, j); a.block(x:16, y:16); a.tensorize(x:16, y:16, j:16, k:16);
b.block(x:16); b.tensorize(x:16, j:16, k:32); a.compile(); b.compile();"""


def test_a_kernel_may_tile_the_labels_of_what_it_computes_once_more():
    """s is fused into a, and b, which reads it too, computes it anew; where it is stored b loads it, and has no loop over k."""
    assert re.findall(r"TILE_k=(\d+)", emit(prepare(parse(AGAIN))))[-1] == "32"  # of b
    assert "tensorize names a label of b: found 'k'; allowed: x, j" in refusal(AGAIN.replace("s.fuse_at", "s.store(); s.fuse_at"))


def test_a_program_that_is_no_text_is_refused():
    compile_program = pytest.importorskip("dtkernels.runtime.bind.compiled_program").compile
    with pytest.raises(TypeError, match="a program is DT text; found int"):
        compile_program(3)


DERIVED = "Func s, f; In A, {0}; Var x; RVar y;\ns[x] = rsum(exp(A[x, y]), y); f[x, y] = exp(A[x, y]) / s[x] + {0}[x, y];"


@pytest.mark.parametrize("name", ["s_shift", "s_shift_kernel", "s_shift_out", "s_shift_ptr", "s_shift_stride_x"])
def test_what_the_algebra_makes_takes_no_name_of_the_program(name):
    """The kernel of the row maximum was named as the input, which the wrapper then called."""
    text = emit(prepare(parse(DERIVED.format(name))))
    made = re.findall(r"^def (\w+)\(", text, re.MULTILINE)
    assert "s_shift2_kernel" in made and name not in made


def test_a_copy_takes_no_name_of_the_program():
    program = "Func mm; In A, A_rows_kernel; Var x, y; RVar k; mm[x, y] = rdot(A[x, k], A_rows_kernel[k, y], k); mm.tensorize(x:16, y:16, k:16); mm.stage(A);"
    assert "def A_rows__kernel(" in emit(prepare(parse(program)))


def test_a_kernel_under_the_name_of_an_input_is_refused():
    program = (
        "Func s, f; In A, {0}; Var x; RVar k; s[x] = rsum(A[x, k], k); f[x] = rsum(A[x, k] * s[x] * tanh(s[x] * A[x, k]), k) + {0}[x];"
        "f.tensorize(x:16, k:16); f.split(k:2); s.fuse_at(f, x);"
    )
    assert "def f_part2_kernel(" in emit(prepare(parse(program.format("B"))))
    assert refusal(program.format("f_part2_kernel")) == "a name that the emitted file uses itself: found 'f_part2_kernel', a kernel; allowed: another name"
