"""Suggest DT spellings for constructs of other languages, for error messages."""

from __future__ import annotations

POWER = "pow(a, b), or a product, a * a"
CHOOSE = "where(c, a, b)"
PRODUCT = "rdot(A[x, k], B[k, y], k)"
FLOOR = "a // b of whole numbers, floor(a / b) of others"

#: symbols that start no token
_SYMBOLS = {
    "@": PRODUCT, "!": "'not', or != between two values", "?": CHOOSE,
    "{": "( ) around a part of an expression", "}": "( ) around a part of an expression",
}  # fmt: skip
#: pairs of adjacent symbols
_PAIRS = {
    "**": POWER, "=<": "<=", "=>": ">=", "<>": "!=", "++": "one +", }  # fmt: skip
#: words in place of an operator, the end of a statement, or a statement
_WORDS = {
    "=": "== to compare", ".": "no methods or modules: exp(e) of a value, A[y, x] for a transpose, len(x) for a size",
    "if": CHOOSE, "else": CHOOSE, "elif": CHOOSE, "for": "labels: f[x] = ...; defines f at every x, rsum(e, k) runs over k", "in": "comparisons",
    "is": "==", "xor": "!= between two conditions", "mod": "%", "div": FLOOR, "pow": POWER,
    "return": "f.compile(); for each Func that is a result", "def": "Func f; ... f[x] = expression;", "let": "Func t; ... t[x] = expression;",
    "while": "a reduction: rsum(e, k)", "lambda": "Func f; ... f[x] = expression;",
}  # fmt: skip
#: functions of other languages -> their DT equivalent
_CALLS = f"""
power: {POWER}
square: a * a
clip: clamp(a, low, high)
max: maximum(a, b), or rmax(e, k) over a label
amax: rmax(e, k)
fmax: maximum(a, b)
min: minimum(a, b), or rmin(e, k) over a label
amin: rmin(e, k)
fmin: minimum(a, b)
sum: rsum(e, k)
mean avg average: rmean(e, k)
prod product: rprod(e, k)
any: rany(c, k)
all: rall(c, k)
argmax: rargmax(e, k)
topk top_k: rtopk(e, k, j) and rargtopk(e, k, j), Extent j = 8; for the eight largest
kthvalue: rtopk(e, k, 7) for the eighth largest
argmin: rargmin(e, k)
matmul mm bmm dot einsum: {PRODUCT}
softmax rsoftmax: e[x, y] = exp(A[x, y]); s[x] = rsum(e[x, y], y); and e[x, y] / s[x]
log_softmax: A[x, y] - log(s[x]) with s[x] = rsum(exp(A[x, y]), y)
logsumexp: log(rsum(exp(e), k))
var rvar: m[x] = rmean(A[x, y], y); and rmean((A[x, y] - m[x]) * (A[x, y] - m[x]), y)
std rstd: sqrt of rmean((A[x, y] - m[x]) * (A[x, y] - m[x]), y) with m[x] = rmean(A[x, y], y)
norm rnorm: sqrt(rsum(a * a, k))
median rmedian quantile: rtopk(e, k, j) of a fixed rank j
sort argsort rsort rargsort: rtopk(e, k, j) and rargtopk(e, k, j) for up to 32 ranks
cumsum: rscan(sum, e, t)
cumprod: rscan(prod, e, t)
cummax: rscan(max, e, t)
cummin: rscan(min, e, t)
scan: rscan(sum, e, t), rrecur(a, b, t) for a linear recurrence
cat concat concatenate hstack vstack: where(y < n, A[x, y + 0], B[x, y - n]) with n = len(k) of a Var k; Extent k = A[1]; Extent y = A[1] + B[1];
stack: where(p == 0, A[x], B[x]) with Extent p = 2;
pad: where(y >= 1 and y <= len(k), A[y - 1], 0) with a Var k; Extent k = A[0]; Extent y = A[0] + 2;
roll: A[(y - 1) % len(y)] with Extent y = A[0];
flip: A[len(y) - 1 - y] with Extent y = A[0];
tril: where(y <= x, A[x, y], 0)
triu: where(y >= x, A[x, y], 0)
one_hot onehot: where(t[x] == c, 1, 0) with Extent c = 8;
gather take embedding index_select: A[x, t[x]]
scatter scatter_add index_add: rsum(where(t[x] == i, A[x], 0), x) with an Extent of i
lerp: a + w * (b - a)
leaky_relu: where(a > 0, a, 0.01 * a)
elu: where(a > 0, a, expm1(minimum(a, 0)))
relu: maximum(a, 0)
silu swish: a * sigmoid(a)
gelu: 0.5 * a * (1 + erf(a * 0.7071067811865476))
softplus: log1p(exp(a))
tan: sin(a) / cos(a)
arctan: atan(a)
arcsin: asin(a)
arccos: acos(a)
arctan2: atan2(a, b)
stop_gradient: detach(a)
sinh: 0.5 * (exp(a) - exp(-a))
cosh: 0.5 * (exp(a) + exp(-a))
logistic: sigmoid(a)
ln: log(a)
log10: log(a) * 0.4342944819032518
fabs: abs(a)
rint: round(a)
fix: trunc(a)
sgn: sign(a)
reciprocal: 1 / a
mod: a % b of whole numbers
fmod: a - b * floor(a / b)
remainder: a % b of whole numbers, or a - b * floor(a / b)
select if ifelse iif sel: {CHOOSE}
float: cast(e, fp32)
half: cast(e, fp16)
bfloat16: cast(e, bf16)
float8 fp8 fp8e4 fp8e4nv float8e4nv float8_e4m3fn: cast(e, e4m3)
fp8e5 float8e5 float8_e5m2: cast(e, e5m2)
int: cast(a, int32)
size shape: len(k)
range arange: a label, which is its own index
transpose permute t: labels in the other order: A[y, x]
logical_and: a and b
logical_or: a or b
logical_not: not a
"""
#: bare names elsewhere -> their DT equivalent
_NAMES = {"True": "true", "False": "false", "None": "where(c, a, b) with a Param c for what may be absent", "Inf": "inf", "infinity": "inf", "pi": "3.141592653589793",
          "nan": "isnan(a) to compare with it, inf - inf for its value"}


def symbol_hint(text: str) -> str:
    """Suggest a replacement for a symbol that DT does not have; "" if there is none."""
    return {"&&": "'and'", "||": "'or'"}.get(text, "") or _SYMBOLS.get(text[:1], "")


def token_hint(before: str, found: str, after: str) -> str:
    """Suggest a replacement for the unexpected token ``found`` between two others; "" if there is none."""
    return _PAIRS.get(before + found, "") or _PAIRS.get(found + after, "") or _WORDS.get(found, "")


def call_hint(name: str) -> str:
    """Suggest a replacement for a function of another language; "" if there is none."""
    rows = (line.split(": ", 1) for line in _CALLS.strip().splitlines())
    return next((remedy for names, remedy in rows if name.lower() in names.split()), "")


def name_hint(name: str) -> str:
    """Suggest a replacement for a bare name of another language; "" if there is none."""
    return _NAMES.get(name, "")
